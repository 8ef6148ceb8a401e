"""Orders in which a graph's nodes may run, and what they keep alive: `topo_sorting_mode`.

Modes as ATC numbers them: 0 breadth first, 1 depth first, 2 reverse depth first, 3 stable reverse
depth first. Source: the CLI options of the ATC guide.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from ascend_lab.errors import InputError
from ascend_lab.graph.ir import Graph, Node, Seeded
from ascend_lab.ops.slicing import Range

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
        found = []
        for reader in _after(graph, node):
            waits[reader.name] -= 1
            if not waits[reader.name]:
                found.append(reader)
        if depth_first:
            ready.extendleft(reversed(found))
        else:
            ready.extend(found)
    return tuple(done)


def _after(graph: Graph, node: Node) -> Iterable[Node]:
    readers = (reader for name in node.outputs for reader in graph.readers[name])
    return {reader.name: reader for reader in readers}.values()


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


def spans(graph: Graph) -> dict[str, Range]:
    """Return, for every activation, the first and the last node that needs it to be there."""
    found = dict.fromkeys(graph.inputs, (0, 0))
    for i, node in enumerate(graph.nodes):
        found.update((name, (i, i)) for name in node.outputs)
        for name in node.inputs:
            if name in found:
                found[name] = (found[name][0], i)
    end = max(len(graph.nodes) - 1, 0)
    found.update((n, (found[n][0], end)) for n in graph.outputs if n in found)
    return found


def live_bytes(graph: Graph) -> list[int]:
    """Return the bytes of the activations that exist while each node runs, its own included."""
    change = [0] * (max(len(graph.nodes), 1) + 1)
    for name, (first, last) in spans(graph).items():
        size = graph.types[name].size_bytes
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change))[:-1]


def peak_live_bytes(graph: Graph) -> int:
    """Return the most bytes of activations alive at once: no plan of the memory can need fewer."""
    return max(live_bytes(graph))


# Bytes that a network keeps in device memory along its nodes, and what a kernel can take on.


CONVOLVE = ("conv2d", "conv_transpose2d", "depthwise_conv2d")


def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all constants that nodes read."""
    read = {name for node in graph.nodes for name in node.inputs}
    return sum(c.type.size_bytes for name, c in graph.constants.items() if name in read)


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes alive along the nodes in order: activations, and all weights.

    Every node writes a tensor of its own: fusion, in-place results and views save some of it.
    """
    return weight_bytes(graph) + max(live_bytes(graph))


def pixels(graph: Graph, node: Node) -> int:
    """Return the pixels of all images that a convolution writes; 0 for other operators."""
    n, _, h, w = graph.types[node.output].shape if node.op in CONVOLVE else (0,) * 4
    return n * h * w


# Two numbers by which models are known: trainable parameters and multiply-accumulates.


STATISTICS = (3, 4)
"""Inputs of a batch norm that training averages but no gradient changes: mean and variance."""


def parameters(graph: Graph) -> int:
    """Return the trainable parameters of a model of the zoo, counted as published.

    Every `Seeded` constant that a node reads, once however often it is read; not the running
    statistics of batch norms, nor masks and other constants that are no weights.
    """
    read = {
        name
        for node in graph.nodes
        for place, name in enumerate(node.inputs)
        if not (node.op == "batch_norm" and place in STATISTICS)
    }
    found = ((name, c) for name, c in graph.constants.items() if isinstance(c.data, Seeded))
    return sum(c.type.elements for name, c in found if name in read)


def node_macs(graph: Graph, node: Node) -> int:
    """Return the multiply-accumulates of one node; 0 unless it multiplies matrices or convolves."""
    given = graph.in_types(node)
    out = graph.types[node.output].elements
    if node.op in ("conv2d", "depthwise_conv2d"):
        return out * math.prod(given[1].shape[1:])
    if node.op == "conv_transpose2d":
        return given[0].elements * math.prod(given[1].shape[1:])
    if node.op in ("matmul", "batch_matmul", "gemm"):
        return out * given[0].shape[-2 if node.attr("trans_a") else -1]
    if node.op == "attention":
        (*_, d), (*_, t, _), (*_, e) = (kind.shape for kind in given[:3])
        return out // e * t * (d + e)
    return 0


def macs(graph: Graph) -> int:
    """Return the multiply-accumulates of convolutions and matrix products of a graph."""
    return sum(node_macs(graph, node) for node in graph.nodes)


__all__ = ["live_bytes", "peak_bytes", "pixels", "spans", "weight_bytes"]
