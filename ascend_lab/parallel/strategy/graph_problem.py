"""A strategy problem from a graph to be trained: how to cut every operator over 2^k devices.

The cost of a strategy, in nanoseconds of one training step, is the operator's own time divided by
the parts it is cut into, plus what its devices must add up among themselves: forward the partial
sums of a cut reduction, backward the gradient of every input that the cut does not divide (a weight
under a cut batch, an activation under cut output channels). An edge costs the redistribution of
the tensor, forward and backward. Nothing overlaps. Usage is bytes per device: weights with their
gradients and Adam's moments, and the output, which is kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.errors import ClusterError
from ascend_lab.graph import Graph
from ascend_lab.graph import Node as GraphNode
from ascend_lab.graph.zoo import counts as zoo_counts
from ascend_lab.parallel.redistribution import Cost, Layout, cheapest, price
from ascend_lab.parallel.strategy.problem import Edge, Node, Problem
from ascend_lab.parallel.strategy.shardings import Operator, operator

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
