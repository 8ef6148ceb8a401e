"""Example graphs, and what a compiler decides about a graph: order, launches, layouts.

- Order: `topological_order` puts the nodes in breadth-first or depth-first order, the first two
  modes of ATC's option `topo_sorting_mode`.
- Launches: `dispatch` compares three ways in which a host starts the kernels of a network.
- Layouts (chapter 14a): a choice gives every node one of its options, (layouts it reads, layout it
  writes). Conversions follow: an operand is converted when it is first read in another layout, and
  later readers of that layout share the result. `fewest_bytes` finds the best choice.
- `exported_block` is a block of a transformer in small operators, as exporters write it.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, GraphBuilder, Node, simulate_graph
from ascend_lab.compiler.compile import DEFAULT_ROAD, Road
from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.layout import Assigner
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.compiler.zoo import build
from ascend_lab.errors import InputError, LayoutError
from ascend_lab.machine.chip import load_chip


# -- the order of nodes ---------------------------------------------------------------------------
def topological_order(graph: Graph, mode: str) -> Graph:
    """Return the graph with its nodes in another order, each behind those whose outputs it reads.

    bfs: all nodes that can run, then those they make ready. dfs: the newest node made ready first.
    """
    producers = {
        node.name: {graph.producers[n].name for n in node.inputs if n in graph.producers}
        for node in graph.nodes
    }
    # how many producers of each node have not run yet
    missing_counts = {name: len(names) for name, names in producers.items()}
    ready = deque(node for node in graph.nodes if not missing_counts[node.name])
    ordered: list[Node] = []
    while ready:
        node = ready.popleft()
        ordered.append(node)
        readers = {r.name: r for name in node.outputs for r in graph.readers[name]}
        missing_counts |= {name: missing_counts[name] - 1 for name in readers}
        newly_ready = [reader for reader in readers.values() if not missing_counts[reader.name]]
        ready = deque([*newly_ready, *ready] if mode == "dfs" else [*ready, *newly_ready])
    return replace(graph, nodes=tuple(ordered))


def moved_bytes(graph: Graph) -> int:
    """Return the bytes that all nodes read and write, each as a kernel; reshapes move none."""
    return sum(
        graph.types[name].size_bytes
        for node in graph.nodes
        if node.op != "reshape"
        for name in (*dict.fromkeys(node.inputs), *node.outputs)
    )


# -- launches: who starts the next kernel ---------------------------------------------------------
WAYS = ("waits", "ahead", "sink")
"""Ways to launch the kernels of a network.

The launch overhead L of a chip has two parts: L - q of the host, and q of the device's own
scheduler, which starts every task. With t(i) the time of kernel i on the device:

    waits  the host sends a kernel, waits for its end, sends the next:  sum of L + t(i)
    ahead  the host sends without waiting:  end(i) = max(end(i - 1), (i + 1) (L - q)) + q + t(i)
    sink   the host sends the whole graph at once:  L - q + sum of q + t(i)
"""
Span = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """When the host is busy with launches and the device with kernels; `way` is one of `WAYS`."""

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
    host = list[Span]()
    device = list[Span]()
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
    """Return the bytes to be sent if the nodes from `position` on run on another device."""
    written = set(graph.inputs) | {n for node in graph.nodes[:position] for n in node.outputs}
    read = {name for node in graph.nodes[position:] for name in node.inputs}
    return sum(graph.types[name].size_bytes for name in written & read)


# -- layouts: graphs whose conversions depend on the choice ---------------------------------------
CHIP = "Ascend910A"
LAYOUTS = ("NC1HWC0", "FRACTAL_NZ", "ND")
Option = tuple[tuple[str, ...], str]
"""What a node may do: the layouts in which it reads its inputs, and the one it writes."""
Options = dict[str, list[Option]]
Forms = tuple[tuple[str, tuple[str, ...]], ...]
"""Tensors that are still to be read, each with the layouts in which it exists.

The first of these is the layout in which it was written.
"""


def residual_block(channels: int = 64, size: int = 56) -> Graph:
    """Return a block of ResNet-18 without batch norms, with input and output in the layout ND."""
    net = GraphBuilder("block")
    x = net.input("x", (1, channels, size, size))
    a = net.relu(net.conv2d(x, net.weight((channels, channels, 3, 3)), pad=1, name="a"), name="b")
    c = net.conv2d(a, net.weight((channels, channels, 3, 3)), pad=1, name="c")
    net.output(net.relu(net.add(c, x, name="d"), name="y"))
    return net.build()


def heads_graph(channels: int = 64, size: int = 32, count: int = 3) -> Graph:
    """Return two convolutions, and up to four functions of their result that a user reads."""
    net = GraphBuilder("heads")
    x = net.input("x", (1, 3, size, size))
    h = net.relu(net.conv2d(x, net.weight((64, 3, 3, 3)), pad=1), name="h")
    c = net.conv2d(h, net.weight((channels, 64, 3, 3)), pad=1, name="c")
    for op in ("sigmoid", "tanh", "relu", "exp")[:count]:
        net.output(getattr(net, op)(c, name=op))
    return net.build()


def sampler_step() -> Graph:
    """Return a step of a diffusion sampler: a sum of the image, a network's output, and noise."""
    net = GraphBuilder("sampler")
    x, noise = (net.input(name, (1, 4, 64, 64)) for name in ("x", "noise"))
    h = net.relu(net.conv2d(x, net.weight((64, 4, 3, 3)), pad=1))
    h = net.relu(net.conv2d(h, net.weight((64, 64, 3, 3)), pad=1))
    network_output = net.conv2d(h, net.weight((4, 64, 3, 3)), pad=1, name="network")
    step = net.add(net.muls(x, number=1.01), net.muls(network_output, number=-0.2), name="step")
    net.output(net.add(step, net.muls(noise, number=0.1), name="y"))
    return net.build()


BUILDERS: Mapping[str, Callable[[], Graph]] = {
    "block": residual_block,
    "heads": heads_graph,
    "sampler": sampler_step,
}


@cache
def prepared(name: str) -> Graph:
    """Return a graph of `BUILDERS` or of the zoo in fp16, as layouts are assigned to it."""
    graph = BUILDERS[name]() if name in BUILDERS else build(name)
    rewritten, _ = DEFAULT_ROAD.rewrite(graph)
    return DEFAULT_ROAD.prepare(rewritten, load_chip(CHIP))


def random_graph(rng: np.random.Generator) -> Graph:
    """Return some convolutions, sums and functions of two images, with one to three results."""
    net = GraphBuilder("random")
    pool = [net.input(name, (1, 20, 6, 6)) for name in "xy"]
    for _ in range(rng.integers(4, 9)):
        x, y = (pool[int(place)] for place in rng.integers(0, len(pool), 2))
        op = str(rng.choice(["conv2d", "relu", "add", "exp"]))
        if op == "conv2d":
            pool.append(net.conv2d(x, net.weight((20, 20, 3, 3)), pad=1))
        elif op == "add":
            pool.append(net.add(x, y))
        else:
            pool.append(getattr(net, op)(x))
    output_count = int(rng.integers(1, 4))
    for place in rng.choice(np.arange(3, len(pool)), output_count, replace=False):
        net.output(pool[int(place)])
    graph, _ = DEFAULT_ROAD.rewrite(net.build())
    return DEFAULT_ROAD.prepare(graph, load_chip(CHIP))


# -- options and choices --------------------------------------------------------------------------
def options(graph: Graph) -> Options:
    """Return the options of every node: what the package's rule gives for inputs in each layout."""
    return {node.name: _options(graph, node) for node in graph.nodes}


def _options(graph: Graph, node: Node) -> list[Option]:
    """Return the options of a node, each once."""
    node_options: list[Option] = []
    for layout in LAYOUTS:
        rule = Assigner(graph)
        rule.names_by_layout |= {n: {layout: n} for n in graph.types if n not in graph.constants}
        reads, writes = rule.choose(node)
        pairs = [*zip(node.inputs, reads, strict=True), *((n, writes) for n in node.outputs)]
        option = tuple(reads), writes
        # an option counts if every tensor has a size in its layout: `size_bytes` raises otherwise
        with suppress(LayoutError):
            sizes = [size_bytes(graph, n, to) for n, to in pairs if n not in graph.constants]
            if option not in node_options and all(sizes):
                node_options.append(option)
    return node_options


def size_bytes(graph: Graph, name: str, layout: str) -> int:
    """Return the bytes of a tensor in a layout, padding included."""
    return replace(graph.types[name], layout=layout).size_bytes


class _Chosen(Assigner):
    """The package's assigner of layouts, with given choices in place of its rule."""

    def __init__(self, graph: Graph, choice: Mapping[str, Option]) -> None:
        super().__init__(graph)
        self.choice = choice

    def choose(self, node: Node) -> tuple[Sequence[str], str]:
        return self.choice[node.name]


def laid_out(graph: Graph, choice: Mapping[str, Option]) -> Graph:
    """Return the graph with the conversions that a choice needs."""
    return _Chosen(graph, choice).assign()


def converted_bytes(graph: Graph) -> int:
    """Return the bytes that the conversions of a graph read and write."""
    return sum(
        graph.types[n].size_bytes
        for node in graph.nodes
        if node.op == "trans_data"
        for n in (*node.inputs, *node.outputs)
    )


def cheapest(graph: Graph) -> Graph:
    """Return a small graph with the fewest converted bytes, by trying all choices."""
    all_options = options(graph)
    names = list(all_options)
    graphs = (
        laid_out(graph, dict(zip(names, node_options, strict=True)))
        for node_options in product(*all_options.values())
    )
    return min(graphs, key=converted_bytes)


def fewest_bytes(graph: Graph, allowed: Options) -> int:
    """Return the fewest converted bytes of any choice, by dynamic programming.

    The nodes are taken in order. A state says which tensors that are still to be read exist in
    which layouts; for each state only the lowest cost so far is kept.
    """
    last_reader = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    last_reader |= dict.fromkeys(graph.outputs, len(graph.nodes))

    start = tuple((name, ("ND",)) for name in graph.inputs)
    states: dict[Forms, int] = {start: 0}
    for i, node in enumerate(graph.nodes):
        live_tensors = {name for name, last in last_reader.items() if last > i}
        states = _next_states(graph, node, allowed[node.name], states, live_tensors)
    outputs = [name for name in graph.outputs if name not in graph.constants]
    costs = []
    for state, cost_so_far in states.items():
        forms = dict(state)
        cost = cost_so_far
        for name in outputs:
            cost += _convert_for_read(graph, forms, name, "ND")
        costs.append(cost)
    return min(costs)


def _next_states(
    graph: Graph,
    node: Node,
    node_options: Sequence[Option],
    states: Mapping[Forms, int],
    live_tensors: Container[str],
) -> dict[Forms, int]:
    """Return the states after a node and their lowest costs; only live tensors are read later."""
    next_states: dict[Forms, int] = {}
    for state, cost_before in states.items():
        for reads, writes in node_options:
            forms = dict(state)
            cost = cost_before
            for name, layout in zip(node.inputs, reads, strict=True):
                cost += _convert_for_read(graph, forms, name, layout)
            forms |= dict.fromkeys(node.outputs, (writes,))
            live_forms = [(name, forms[name]) for name in sorted(forms) if name in live_tensors]
            key = tuple(live_forms)
            next_states[key] = min(cost, next_states.get(key, cost))
    return next_states


def _convert_for_read(
    graph: Graph, forms: dict[str, tuple[str, ...]], name: str, layout: str
) -> int:
    """Add the layout that a read needs to `forms`; return the bytes of the conversion to it."""
    if name in graph.constants or layout in forms[name]:
        return 0
    written_layout, *converted_layouts = forms[name]
    forms[name] = (written_layout, *sorted((*converted_layouts, layout)))
    return size_bytes(graph, name, written_layout) + size_bytes(graph, name, layout)


def unfused_us(graph: Graph) -> dict[str, float]:
    """Return the microseconds of every operator of a graph with layouts, each a kernel alone.

    A node that moves nothing is no kernel and takes none.
    """
    times = kernel_times(Road(fusion=False).kernels(graph, load_chip(CHIP)))
    return {node.name: 1e6 * times.get(node.name, 0.0) for node in graph.nodes}


# -- a transformer as an exporter writes it -------------------------------------------------------
class _Exported(GraphBuilder):
    """Layers spelled out in small operators, constants as tensors, as exporters write them."""

    def scalar(self, number: float) -> Any:
        return self.constant(np.array([number], np.float32), name="number")

    def spelled_norm(self, x: Value, name: str) -> Any:
        """Append a layer norm in nine nodes."""
        mean = self.reduce_mean(x, axis=-1, keepdims=True, name=f"{name}.mean")
        centred = self.sub(x, mean, name=f"{name}.centred")
        squares = self.pow(centred, self.scalar(2.0), name=f"{name}.squares")
        variance = self.reduce_mean(squares, axis=-1, keepdims=True, name=f"{name}.variance")
        stabilised = self.add(variance, self.scalar(1e-5), name=f"{name}.eps")
        root = self.sqrt(stabilised, name=f"{name}.root")
        normal = self.div(centred, root, name=f"{name}.normal")
        scaled = self.mul(normal, self.weight(x.shape[-1:], f"{name}.scale"), name=f"{name}.scaled")
        return self.add(scaled, self.weight(x.shape[-1:], f"{name}.bias"), name=name)

    def spelled_gelu(self, x: Value, name: str) -> Any:
        """Append the tanh form of GELU in eight nodes."""
        cube = self.mul(self.pow(x, self.scalar(3.0), name=f"{name}.cube"), self.scalar(0.044715))
        inner = self.mul(self.add(x, cube, name=f"{name}.sum"), self.scalar(math.sqrt(2 / math.pi)))
        one = self.add(self.tanh(inner, name=f"{name}.tanh"), self.scalar(1.0), name=f"{name}.one")
        half = self.mul(x, self.scalar(0.5), name=f"{name}.half")
        return self.mul(half, one, name=name)

    def spelled_linear(self, x: Value, features: int, name: str) -> Any:
        """Append a product by weights stored transposed, and a bias."""
        stored = self.weight((features, x.shape[-1]), f"{name}.weight")
        weight = self.transpose(stored, perm=(1, 0), name=f"{name}.transposed")
        projected = self.batch_matmul(x, weight, name=f"{name}.product")
        return self.add(self.weight((features,), f"{name}.bias"), projected, name=name)

    def split_heads(self, x: Value, head_count: int, name: str) -> Any:
        """Append (batch, rows, width) -> (batch, heads, rows, depth)."""
        batch, rows, width = x.shape
        parts = self.reshape(
            x, shape=(batch, rows, head_count, width // head_count), name=f"{name}.heads"
        )
        return self.transpose(parts, perm=(0, 2, 1, 3), name=f"{name}.first")


def exported_block(length: int = 128, width: int = 256, heads: int = 4) -> Graph:
    """Return one block of a transformer in 61 nodes, as an exporter of models writes it."""
    net = _Exported("exported block")
    x = net.input("x", (1, length, width))
    mask = net.input("mask", (length, length))
    normed = net.spelled_norm(x, "norm1")
    q, k, v = (
        net.split_heads(net.spelled_linear(normed, width, part), heads, part) for part in "qkv"
    )
    scores = net.batch_matmul(q, net.transpose(k, perm=(0, 1, 3, 2), name="keys"), name="scores")
    scaled = net.div(scores, net.scalar(math.sqrt(width // heads)), name="scaled")
    shares = net.softmax(net.add(scaled, mask, name="masked"), name="shares")
    dropped_out = net.mul(shares, net.scalar(1.0), name="dropout")
    context = net.batch_matmul(dropped_out, v, name="context")
    rows = net.transpose(context, perm=(0, 2, 1, 3), name="back")
    joined = net.reshape(rows, shape=(1, length, width), name="joined")
    x = net.add(x, net.spelled_linear(joined, width, "out"), name="add1")
    inner = net.spelled_linear(net.spelled_norm(x, "norm2"), 4 * width, "up")
    down = net.spelled_linear(net.spelled_gelu(inner, "gelu"), width, "down")
    net.output(net.add(x, down, name="y"))
    return net.build()
