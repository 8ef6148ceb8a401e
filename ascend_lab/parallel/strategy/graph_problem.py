"""Costs of communication and work for strategy problems: from a topology, from a chip's peaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.cluster import Topology, collective_time
from ascend_lab.errors import ClusterError
from ascend_lab.graph import Graph
from ascend_lab.graph import Node as GraphNode
from ascend_lab.graph import counts as zoo_counts
from ascend_lab.graph.counts import node_macs
from ascend_lab.ops import OPERATORS
from ascend_lab.ops.slicing import Reduction, Source
from ascend_lab.parallel.redistribution import Cost, Layout, cheapest, price
from ascend_lab.parallel.strategy.problem import Edge, Node, Problem

TRAINING = 3
"""Forward and backward together, in units of forward: backward does about twice the work."""


def on_topology(topology: Topology) -> Cost:
    """Return the seconds of a collective of the first devices of a topology, quickest algorithm.

    Groups are charged as if alone: those that run at the same time do not share links.
    """

    @lru_cache(None)
    def cost(operation: str, devices: int, size_bytes: float) -> float:
        if devices > topology.size:
            raise ClusterError(f"at most {topology.size} devices", str(devices))
        placement = range(devices)
        return collective_time(operation, topology, size_bytes, placement=placement).time_s

    return cost


def roofline(chip: Chip) -> Callable[[Graph, GraphNode], float]:
    """Return the seconds of an operator in training: the larger of arithmetic and memory traffic.

    At the chip's peaks, so it is a bound from below.
    """
    peak = chip.peak_ops_per_s("fp16")
    memory_bytes_per_s = chip.device_memory.rate_bytes_per_s

    def work_s(graph: Graph, node: GraphNode) -> float:
        kinds = (*graph.in_types(node), *graph.out_types(node))
        moved = sum(kind.elements * DTYPE_BYTES[kind.dtype] for kind in kinds)
        return TRAINING * max(2 * node_macs(graph, node) / peak, moved / memory_bytes_per_s)

    return work_s


# Ways to cut an operator over 2^k devices, read off its slice rules.
#
# A way halves the work: along a free axis of the output, or along a reduction, which leaves
# partial
# sums. A sharding says how many times each way is used; what is left of the k halvings
# replicates.
# Device axes are given to the ways in order, the leftmost of the matrix (2, ..., 2) first.


Shape = tuple[int, ...]
WITHOUT_BIAS = {"gemm": "matmul", "conv2d": "conv2d"}
"""Operators that add a bias to a sum, and the operator that only sums."""
IMAGE_OPS = ("conv2d", "depthwise_conv2d")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut an operator: the axis of each output and input it divides (-1: none).

    `summed`: the outputs are partial sums. Pieces are multiples of `grain` along output 0's axis.
    """

    name: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    summed: bool = False
    grain: int = 1


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of a graph with the ways to cut it, and the shapes these ways divide."""

    node: GraphNode
    ways: tuple[Way, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def fits(self, counts: tuple[int, ...]) -> bool:
        """Tell whether every tensor divides evenly when each way is used so often."""
        for shapes, side in ((self.outputs, "outputs"), (self.inputs, "inputs")):
            for index, shape in enumerate(shapes):
                sizes = list(shape)
                for way, count in zip(self.ways, counts, strict=True):
                    axis = getattr(way, side)[index]
                    if axis < 0:
                        continue
                    unit = way.grain if side == "outputs" else 1
                    if sizes[axis] % (unit << count):
                        return False
        return True

    def shardings(self, halvings: int) -> Iterator[tuple[int, ...]]:
        """Yield how often each way is used, in all that fit with at most `halvings` in total."""
        for counts in product(range(halvings + 1), repeat=len(self.ways)):
            if sum(counts) <= halvings and self.fits(counts):
                yield counts

    def layout(self, counts: tuple[int, ...], halvings: int, side: str, index: int) -> Layout:
        """Return the layout of input or output `index` ("inputs", "outputs") of a sharding."""
        shape = getattr(self, side)[index]
        maps: list[list[int]] = [[] for _ in shape]
        axis = halvings - 1
        for way, count in zip(self.ways, counts, strict=True):
            dim = getattr(way, side)[index]
            if dim >= 0:
                maps[dim] += range(axis, axis - count, -1)
            axis -= count
        return Layout((2,) * halvings, tuple(map(tuple, maps)), shape)

    def undivided(self, counts: tuple[int, ...], side: str, index: int) -> tuple[int, int]:
        """Return (devices over which a tensor is the same or partial, parts it is cut into)."""
        same, parts = 1, 1
        for way, count in zip(self.ways, counts, strict=True):
            if getattr(way, side)[index] >= 0:
                parts <<= count
            else:
                same <<= count
        return same, parts


def operator(graph: Graph, node: GraphNode) -> Operator:
    """Return a node with its ways: free output axes in order, then reductions by a sum.

    In networks with convolutions the height and width of images are not cut: that would exchange
    borders, which redistribution does not know. MindSpore's search leaves them out as well.
    """
    inputs = tuple(kind.shape for kind in graph.in_types(node))
    outputs = tuple(kind.shape for kind in graph.out_types(node))
    rules = OPERATORS[node.op].slice_rules(inputs, dict(node.attrs))
    images = len(outputs[0]) == 4 and any(n.op in IMAGE_OPS for n in graph.nodes)
    ways = [
        Way(f"axis {rule.axis}", rule.joins, _axes(rule.sources, len(inputs)), grain=rule.grain)
        for rule in rules.axes
        if rule.kind == "free" and outputs[0][rule.axis] > 1 and not (images and rule.axis > 1)
    ]
    for reduction in _sums(node, inputs) if not rules.reductions else rules.reductions:
        if reduction.combine == "sum":
            pairs = dict(reduction.sources)
            own = tuple(pairs.get(i, -1) for i in range(len(inputs)))
            ways.append(Way("sum", (-1,) * len(outputs), own, summed=True))
    return Operator(node, tuple(ways), inputs, outputs)


def _axes(sources: tuple[Source, ...], count: int) -> tuple[int, ...]:
    found = [-1] * count
    for source in sources:
        found[source.input] = source.axis
    return tuple(found)


def _sums(node: GraphNode, inputs: tuple[Shape, ...]) -> tuple[Reduction, ...]:
    """Return the reductions of an operator that adds a bias: those of the sum before it."""
    plain = WITHOUT_BIAS.get(node.op)
    if plain is None or len(inputs) != 3:
        return ()
    known = OPERATORS[plain].attrs
    attrs = {key: value for key, value in node.attrs.items() if key in known}
    return OPERATORS[plain].slice_rules(inputs[:2], attrs).reductions


# A strategy problem from a graph to be trained: how to cut every operator over 2^k devices.
#
# The cost of a strategy, in nanoseconds of one training step, is the operator's own time divided
# by
# the parts it is cut into, plus what its devices must add up among themselves: forward the
# partial
# sums of a cut reduction, backward the gradient of every input that the cut does not divide (a
# weight
# under a cut batch, an activation under cut output channels). An edge costs the redistribution of
# the tensor, forward and backward. Nothing overlaps. Usage is bytes per device: weights with
# their
# gradients and Adam's moments, and the output, which is kept for the backward pass.


Counts = tuple[int, ...]
FLOATS = ("fp16", "bf16", "fp32")
STATE_BYTES = 16
"""Of a trained number: value and gradient, both in fp32 or in fp16 with an fp32 copy, two moments.

S. Rajbhandari et al., ZeRO, SC 2020, section 3.1.
"""
NS = 1e9
MOST_DEVICES = 32
"""The layouts to search grow faster than the factorial of the halvings."""


@dataclass(frozen=True, slots=True)
class GraphProblem:
    """A problem whose node v is operator v, strategy s its sharding s: a count for each way."""

    problem: Problem
    operators: tuple[Operator, ...]
    shardings: tuple[tuple[Counts, ...], ...]
    halvings: int

    def chosen(self, strategies: tuple[int, ...]) -> dict[str, dict[str, int]]:
        """Return the parts of each way that is used, by the operator's name."""
        found = {}
        for op, options, strategy in zip(self.operators, self.shardings, strategies, strict=True):
            pairs = zip(op.ways, options[strategy], strict=True)
            found[op.node.name] = {way.name: 1 << count for way, count in pairs if count}
        return found


def halvings_of(devices: int) -> int:
    """Return k for 2^k devices; ClusterError for another number, or one too large to search."""
    if not 1 <= devices <= MOST_DEVICES or devices & (devices - 1):
        needed = f"a power of two of at most {MOST_DEVICES} devices"
        raise ClusterError(needed, str(devices), "search one server, copy it to the others")
    return devices.bit_length() - 1


def problem_of(
    graph: Graph,
    devices: int,
    cost: Cost,
    work_s: Callable[[Graph, GraphNode], float],
    usage_limit_bytes: int | None = None,
) -> GraphProblem:
    """Return the strategy problem of training a graph on 2^k devices.

    `cost(operation, devices, bytes)` gives seconds of all_reduce, all_gather and all_to_all,
    `work_s(graph, node)` seconds of an operator, forward and backward, on one device.
    """
    halvings = halvings_of(devices)
    operators = tuple(operator(graph, node) for node in graph.nodes)
    shardings = tuple(tuple(op.shardings(halvings)) for op in operators)
    nodes = []
    for op, options in zip(operators, shardings, strict=True):
        own_s = work_s(graph, op.node)
        times = [own_s / (1 << sum(c)) + inner_s(graph, op, c, cost) for c in options]
        used = [usage_bytes(graph, op, c) for c in options]
        nodes.append(Node(0, 1, tuple(round(t * NS) for t in times), tuple(used)))
    edges = _edges(graph, operators, shardings, halvings, cost)
    problem = Problem(graph.name, tuple(nodes), edges, usage_limit_bytes)
    return GraphProblem(problem, operators, shardings, halvings)


def data_parallel(given: GraphProblem) -> tuple[int, ...]:
    """Return the strategies that cut the first axis of every output, as far as it goes."""
    found = []
    for op, options in zip(given.operators, given.shardings, strict=True):
        cuts = [
            -1 if any(n and way.outputs[0] for way, n in zip(op.ways, c, strict=True)) else sum(c)
            for c in options
        ]
        found.append(cuts.index(max(cuts)))
    return tuple(found)


def inner_s(graph: Graph, op: Operator, counts: Counts, cost: Cost) -> float:
    """Return the seconds of communication inside an operator, forward and backward."""
    total = 0.0
    if any(way.summed and count for way, count in zip(op.ways, counts, strict=True)):
        kind = graph.out_types(op.node)[0]
        group = 1 << sum(c for way, c in zip(op.ways, counts, strict=True) if way.summed)
        _, parts = op.undivided(counts, "outputs", 0)
        total += cost("all_reduce", group, kind.elements * DTYPE_BYTES[kind.dtype] / parts)
    weights: dict[int, float] = {}
    for index, name in enumerate(op.node.inputs):
        group, parts = op.undivided(counts, "inputs", index)
        if group == 1 or not has_gradient(graph, op.node, index):
            continue
        kind = graph.types[name]
        held = kind.elements * DTYPE_BYTES[kind.dtype] / parts
        if name in graph.constants:  # an operator's weights travel together
            weights[group] = weights.get(group, 0.0) + held
        else:
            total += cost("all_reduce", group, held)
    return total + sum(cost("all_reduce", group, held) for group, held in weights.items())


def has_gradient(graph: Graph, node: GraphNode, index: int) -> bool:
    """Tell whether training needs the gradient of an input: weights and activations, not data."""
    name = node.inputs[index]
    averaged = node.op == "batch_norm" and index in zoo_counts.STATISTICS
    return graph.types[name].dtype in FLOATS and name not in graph.inputs and not averaged


def usage_bytes(graph: Graph, op: Operator, counts: Counts) -> int:
    """Return the bytes a device holds for an operator: its weights' copies and its output."""
    total = 0
    for index, name in enumerate(op.node.inputs):
        if name in graph.constants:
            kind = graph.types[name]
            trained = has_gradient(graph, op.node, index)
            each = STATE_BYTES if trained else DTYPE_BYTES[kind.dtype]
            _, parts = op.undivided(counts, "inputs", index)
            total += kind.elements * each // parts
    for index, kind in enumerate(graph.out_types(op.node)):
        _, parts = op.undivided(counts, "outputs", index)
        total += kind.elements * DTYPE_BYTES[kind.dtype] // parts
    return total


def _edges(
    graph: Graph,
    operators: tuple[Operator, ...],
    shardings: tuple[tuple[Counts, ...], ...],
    halvings: int,
    cost: Cost,
) -> tuple[Edge, ...]:
    """Return an edge per tensor and operator that reads it, of two or more strategies each."""
    place = {out: (v, i) for v, op in enumerate(operators) for i, out in enumerate(op.node.outputs)}
    moves = _Moves(cost)
    found = []
    for v, op in enumerate(operators):
        for index, name in enumerate(op.node.inputs):
            if name not in place:
                continue
            u, port = place[name]
            back = has_gradient(graph, op.node, index)
            left = [operators[u].layout(c, halvings, "outputs", port) for c in shardings[u]]
            right = [op.layout(c, halvings, "inputs", index) for c in shardings[v]]
            table = moves.table(left, right, DTYPE_BYTES[graph.types[name].dtype], back)
            if any(table):
                found.append(Edge(u, v, table))
    return tuple(found)


class _Moves:
    """Times of redistributions, each searched once."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.known: dict[tuple[Layout, int], dict[object, float]] = {}
        self.tables: dict[object, tuple[int, ...]] = {}

    def table(
        self, left: list[Layout], right: list[Layout], item_bytes: int, back: bool
    ) -> tuple[int, ...]:
        """Return nanoseconds from every left layout to every right one, and back if asked."""
        kept = [
            dim
            for dim in range(len(left[0].shape))
            if any(own.tensor_map[dim] for own in (*left, *right))
        ]
        item_bytes *= math.prod(n for dim, n in enumerate(left[0].shape) if dim not in kept)
        left, right = ([_only(own, kept) for own in side] for side in (left, right))
        key = (tuple(left), tuple(right), item_bytes, back)
        if key not in self.tables:
            self.tables[key] = tuple(
                round(NS * (self.time_s(a, b, item_bytes) + back * self.time_s(b, a, item_bytes)))
                for a in left
                for b in right
            )
        return self.tables[key]

    def time_s(self, source: Layout, target: Layout, item_bytes: int) -> float:
        """Return the seconds of the cheapest steps between two layouts."""
        key = (source, item_bytes)
        if key not in self.known:
            paths = cheapest(source, price(item_bytes, self.cost))
            self.known[key] = {map_: path.total for map_, path in paths.items()}
        return self.known[key][target.tensor_map]


def _only(own: Layout, kept: list[int]) -> Layout:
    """Return a layout without the dimensions that no candidate cuts; they count as one item."""
    maps = tuple(own.tensor_map[dim] for dim in kept)
    return Layout(own.device_matrix, maps, tuple(own.shape[dim] for dim in kept))
