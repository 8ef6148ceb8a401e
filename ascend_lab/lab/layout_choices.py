"""Chapter 14a: which layouts each operator of a graph may have, and what a choice moves.

A choice gives every node one of its options, (layouts it reads, layout it writes). Conversions
follow from it: an operand is converted when it is first read in another layout, once for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from ascend_lab.chip import load_chip
from ascend_lab.errors import LayoutError
from ascend_lab.graph import Graph, GraphBuilder, Node
from ascend_lab.graph.compile import DEFAULT_ROAD, Road
from ascend_lab.graph.layout import Assigner
from ascend_lab.graph.zoo import build
from ascend_lab.lab.graph_examples import kernel_times

CHIP = "Ascend910A"
LAYOUTS = ("NC1HWC0", "FRACTAL_NZ", "ND")
Option = tuple[tuple[str, ...], str]
Options = dict[str, list[Option]]
Forms = tuple[tuple[str, tuple[str, ...]], ...]
"""Every tensor alive, and the layouts it exists in: the one it was written in, then the others."""


# -- graphs ---------------------------------------------------------------------------------------
def block(channels: int = 64, size: int = 56) -> Graph:
    """Return a block of ResNet-18 without batch norms, its input and output as a user has them."""
    net = GraphBuilder("block")
    x = net.input("x", (1, channels, size, size))
    a = net.relu(net.conv2d(x, net.weight((channels, channels, 3, 3)), pad=1, name="a"), name="b")
    c = net.conv2d(a, net.weight((channels, channels, 3, 3)), pad=1, name="c")
    net.output(net.relu(net.add(c, x, name="d"), name="y"))
    return net.build()


def heads(channels: int = 64, size: int = 32, count: int = 3) -> Graph:
    """Return two convolutions, and up to four functions of their result that a user reads."""
    net = GraphBuilder("heads")
    x = net.input("x", (1, 3, size, size))
    h = net.relu(net.conv2d(x, net.weight((64, 3, 3, 3)), pad=1), name="h")
    c = net.conv2d(h, net.weight((channels, 64, 3, 3)), pad=1, name="c")
    for op in ("sigmoid", "tanh", "relu", "exp")[:count]:
        net.output(getattr(net, op)(c, name=op))
    return net.build()


def sampler(channels: int = 4, size: int = 64, width: int = 64) -> Graph:
    """Return a step of a diffusion sampler: what a network says, the image, and fresh noise."""
    net = GraphBuilder("sampler")
    x = net.input("x", (1, channels, size, size))
    noise = net.input("noise", (1, channels, size, size))
    h = net.relu(net.conv2d(x, net.weight((width, channels, 3, 3)), pad=1))
    h = net.relu(net.conv2d(h, net.weight((width, width, 3, 3)), pad=1))
    said = net.conv2d(h, net.weight((channels, width, 3, 3)), pad=1, name="said")
    step = net.add(net.muls(x, number=1.01), net.muls(said, number=-0.2), name="step")
    net.output(net.add(step, net.muls(noise, number=0.1), name="y"))
    return net.build()


OWN: Mapping[str, Callable[[], Graph]] = {"block": block, "heads": heads, "sampler": sampler}


@cache
def prepared(name: str) -> Graph:
    """Return a graph of this chapter or of the zoo in fp16, as layouts are assigned to it."""
    graph, _ = DEFAULT_ROAD.rewrite(OWN[name]() if name in OWN else build(name))
    return DEFAULT_ROAD.prepare(graph, load_chip(CHIP))


def random_graph(rng: np.random.Generator) -> Graph:
    """Return some convolutions, sums and functions of two images, with one to three results."""
    net = GraphBuilder("random")
    pool = [net.input(name, (1, 20, 6, 6)) for name in "xy"]
    for _ in range(rng.integers(4, 9)):
        one, two = (pool[int(k)] for k in rng.integers(0, len(pool), 2))
        op = rng.choice(["conv2d", "relu", "add", "exp"])
        if op == "conv2d":
            pool.append(net.conv2d(one, net.weight((20, 20, 3, 3)), pad=1))
        else:
            pool.append(getattr(net, str(op))(*((one, two) if op == "add" else (one,))))
    for k in rng.choice(np.arange(3, len(pool)), int(rng.integers(1, 4)), replace=False):
        net.output(pool[int(k)])
    graph, _ = DEFAULT_ROAD.rewrite(net.build())
    return DEFAULT_ROAD.prepare(graph, load_chip(CHIP))


# -- options and choices --------------------------------------------------------------------------
def options(graph: Graph) -> Options:
    """Return the options of every node: what the package's rule would say to each layout."""
    return {node.name: _options(graph, node) for node in graph.nodes}


def _options(graph: Graph, node: Node) -> list[Option]:
    found: list[Option] = []
    for layout in LAYOUTS:
        known = Assigner(graph)
        known.forms |= {n: {layout: n} for n in graph.types if n not in graph.constants}
        reads, writes = known.choose(node)
        option = tuple(reads), writes
        if option not in found and _exists(graph, node, option):
            found.append(option)
    return found


def _exists(graph: Graph, node: Node, option: Option) -> bool:
    pairs = [*zip(node.inputs, option[0], strict=True), *((n, option[1]) for n in node.outputs)]
    try:
        return all(size_bytes(graph, n, to) for n, to in pairs if n not in graph.constants)
    except LayoutError:
        return False


def size_bytes(graph: Graph, name: str, layout: str) -> int:
    """Return the bytes of a tensor in a layout, padding included."""
    return replace(graph.types[name], layout=layout).size_bytes


class _Chosen(Assigner):
    """The package's assigner with somebody else's choices."""

    def __init__(self, graph: Graph, choice: Mapping[str, Option]) -> None:
        super().__init__(graph)
        self.choice = choice

    def choose(self, node: Node) -> tuple[Sequence[str], str]:
        return self.choice[node.name]


def laid_out(graph: Graph, choice: Mapping[str, Option]) -> Graph:
    """Return the graph with the conversions that a choice needs."""
    return _Chosen(graph, choice).assigned()


def converted_bytes(graph: Graph) -> int:
    """Return what the conversions of a graph read and write."""
    return sum(
        graph.types[n].size_bytes
        for node in graph.nodes
        if node.op == "trans_data"
        for n in (*node.inputs, *node.outputs)
    )


def cheapest(graph: Graph) -> Graph:
    """Return a small graph with the fewest converted bytes, by trying all choices."""
    all_options = options(graph)
    choices = (dict(zip(all_options, each, strict=True)) for each in product(*all_options.values()))
    return min((laid_out(graph, choice) for choice in choices), key=converted_bytes)


def fewest_bytes(graph: Graph, allowed: Options) -> int:
    """Return the fewest converted bytes of any choice, over the forms of all tensors alive."""
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))

    def read(forms: dict[str, tuple[str, ...]], name: str, layout: str) -> int:
        if name in graph.constants or layout in forms[name]:
            return 0
        first, *others = forms[name]
        forms[name] = (first, *sorted((*others, layout)))
        return sum(size_bytes(graph, name, one) for one in (first, layout))

    states: dict[Forms, int] = {tuple((name, ("ND",)) for name in graph.inputs): 0}
    for i, node in enumerate(graph.nodes):
        found: dict[Forms, int] = {}
        for state, before in states.items():
            for reads, writes in allowed[node.name]:
                forms = dict(state)
                pairs = zip(node.inputs, reads, strict=True)
                cost = before + sum(read(forms, name, layout) for name, layout in pairs)
                forms |= dict.fromkeys(node.outputs, (writes,))
                key = tuple(sorted((n, form) for n, form in forms.items() if last.get(n, -1) > i))
                found[key] = min(cost, found.get(key, cost))
        states = found
    ends = ((dict(state), cost) for state, cost in states.items())
    outputs = [name for name in graph.outputs if name not in graph.constants]
    return min(cost + sum(read(forms, name, "ND") for name in outputs) for forms, cost in ends)


def unfused_us(graph: Graph) -> dict[str, float]:
    """Return the microseconds of every operator of a graph with layouts, each a kernel alone."""
    times = kernel_times(Road(fusion=False).kernels(graph, load_chip(CHIP)))
    return {node.name: 1e6 * times[node.output] for node in graph.nodes}
