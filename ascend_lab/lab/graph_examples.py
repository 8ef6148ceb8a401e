"""Graphs in time: orders of their nodes, and who tells the device what to run next.

Orders in which a graph's nodes may run, and the bytes they move and keep: `topo_sorting_mode`.

Modes as ATC numbers them: 0 breadth first, 1 depth first, 2 reverse depth first, 3 stable reverse
depth first. Source: the CLI options of the ATC guide.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ascend_lab.errors import InputError
from ascend_lab.graph import Compiled, Graph, Node, simulate_graph
from ascend_lab.graph.evaluate import live_bytes

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


# Who tells the device what to run next: the host, operator by operator, or the device itself.
#
# A chip's launch overhead L is paid by two: L - d by the host, d by the device's own scheduler,
# which starts each task whoever sent it; d is what a task costs that waits in its queue. With t(i)
# the time of kernel i on the device,
#
#     waits  the host sends a kernel, waits for its end, sends the next:  sum of L + t(i)
#     ahead  the host sends without waiting:  end(i) = max(end(i - 1), (i + 1) (L - d)) + d + t(i)
#     sink   the host sends the whole graph at once:  L - d + sum of d + t(i)
WAYS = ("waits", "ahead", "sink")
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """When the host is busy with launches and the device with kernels; (start, end) in seconds."""

    way: str
    host: tuple[Span, ...]
    device: tuple[Span, ...]

    @property
    def time_s(self) -> float:
        """End of the last kernel."""
        return self.device[-1][1]

    @property
    def busy_share(self) -> float:
        """Share of the time in which a kernel runs."""
        return sum(end - start for start, end in self.device) / self.time_s


def dispatch(times_s: Sequence[float], way: str, launch_s: float, task_s: float) -> Dispatch:
    """Return when each of the kernels runs.

    Raises `InputError` for an unknown way, no kernels, or a task that takes longer than a launch.
    """
    if way not in WAYS or not times_s:
        got = f"{len(times_s)} kernels, {way!r}"
        raise InputError(f"kernels and a way: {', '.join(WAYS)}", got, "choose one")
    if not 0 <= task_s <= launch_s:
        raise InputError(f"a task from 0 to {launch_s} s", f"{task_s} s", "it is part of a launch")
    send_s = launch_s - task_s
    host: list[Span] = []
    device: list[Span] = []
    end = 0.0
    for i, time_s in enumerate(times_s):
        if way != "sink" or i == 0:
            begin = end if way == "waits" else i * send_s
            host.append((begin, begin + send_s))
        start = max(end, host[-1][1]) + task_s
        end = start + time_s
        device.append((start, end))
    return Dispatch(way, tuple(host), tuple(device))


def kernel_times(compiled: Compiled) -> dict[str, float]:
    """Return the seconds of each kernel of a network on the device, in order, launches left out."""
    clock_hz = compiled.chip.clock_hz
    return {op.name: op.timeline.cycles / clock_hz for op in simulate_graph(compiled).operators}


def crossing_bytes(graph: Graph, position: int) -> int:
    """Return the bytes that go over if the nodes from `position` on run on another device.

    Inputs of the graph that the second part reads count, and outputs that the first part writes
    do not; constants lie where they are needed.
    """
    before = set(graph.inputs) | {n for node in graph.nodes[:position] for n in node.outputs}
    after = {name for node in graph.nodes[position:] for name in node.inputs}
    return sum(graph.types[name].size_bytes for name in before & after)
