"""Orders in which a graph's nodes may run, and the bytes they move and keep: `topo_sorting_mode`.

Modes as ATC numbers them: 0 breadth first, 1 depth first, 2 reverse depth first, 3 stable reverse
depth first. Source: the CLI options of the ATC guide.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ascend_lab.errors import InputError
from ascend_lab.graph import Graph, Node
from ascend_lab.graph.counts import live_bytes

MODES = {"bfs": 0, "dfs": 1, "rdfs": 2, "stable_rdfs": 3}


def topological_order(graph: Graph, mode: str | int = "dfs") -> Graph:
    """Return the graph with its nodes in another order in which each reads what is there.

    bfs: all nodes that can run, then those they make ready. dfs: the newest node made ready
    first. rdfs: from each output back, what it needs, last input first. stable_rdfs: the same,
    but of several inputs the one first that stands first in the graph given.
    Raises `InputError` for other modes.
    """
    names = {number: name for name, number in MODES.items()}
    kind = mode if isinstance(mode, str) else names.get(mode, "")
    if kind not in MODES:
        known = ", ".join(f"{name} ({number})" for name, number in MODES.items())
        raise InputError(f"a sorting mode: {known}", repr(mode), "choose one")
    if kind in ("bfs", "dfs"):
        nodes = _forwards(graph, depth_first=kind == "dfs")
    else:
        nodes = _backwards(graph, stable=kind == "stable_rdfs")
    return graph if nodes == graph.nodes else replace(graph, nodes=nodes)


def _before(graph: Graph, node: Node) -> list[Node]:
    """Return the nodes a node reads from, each once, in the order of its inputs."""
    makers = (graph.producers[name] for name in node.inputs if name in graph.producers)
    return list({maker.name: maker for maker in makers}.values())


def _forwards(graph: Graph, *, depth_first: bool) -> tuple[Node, ...]:
    waits = {node.name: len(_before(graph, node)) for node in graph.nodes}
    ready = deque(node for node in graph.nodes if not waits[node.name])
    done: list[Node] = []
    while ready:
        node = ready.popleft()
        done.append(node)
        readers = {r.name: r for name in node.outputs for r in graph.readers[name]}
        found = []
        for reader in readers.values():
            waits[reader.name] -= 1
            if not waits[reader.name]:
                found.append(reader)
        if depth_first:
            ready.extendleft(reversed(found))
        else:
            ready.extend(found)
    return tuple(done)


def _backwards(graph: Graph, *, stable: bool) -> tuple[Node, ...]:
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    ends = [node for node in graph.nodes if not any(graph.readers[n] for n in node.outputs)]
    done: dict[str, Node] = {}
    for end in ends if stable else reversed(ends):
        stack = [end]
        while stack:
            node = stack[-1]
            missing = [maker for maker in _before(graph, node) if maker.name not in done]
            if not missing:
                done.setdefault(stack.pop().name, node)
            elif stable:
                stack.append(min(missing, key=lambda maker: place[maker.name]))
            else:
                stack.append(missing[-1])
    return tuple(done.values())


def moved_bytes(graph: Graph) -> int:
    """Return the bytes all nodes read and write, each a kernel of its own; reshapes move nothing.

    Constants count once for each node that reads them.
    """
    return sum(
        graph.types[name].size_bytes
        for node in graph.nodes
        if node.op != "reshape"
        for name in (*dict.fromkeys(node.inputs), *node.outputs)
    )


def peak_live_bytes(graph: Graph) -> int:
    """Return the most bytes of activations alive at once: no plan of the memory can need fewer."""
    return max(live_bytes(graph))
