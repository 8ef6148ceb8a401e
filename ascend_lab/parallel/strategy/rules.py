"""The greedy rule in the spirit of recursive halving: heaviest node first, never back.

Nodes by weight descending; each takes the strategy with the least cost of its own and towards the
neighbours that have already chosen. MindSpore's double-recursive search chooses so in every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ascend_lab.parallel.strategy.graph_problem import IMAGE_OPS, GraphProblem, Operator
from ascend_lab.parallel.strategy.problem import Problem


def greedy(problem: Problem) -> tuple[int, ...]:
    """Return the greedy choice, heaviest by largest usage; memory is not looked at.

    Like the rule it imitates, it may exceed the limit: `evaluate` tells.
    """
    nodes = problem.nodes
    totals = [np.array(node.costs, np.float64) for node in nodes]
    near: list[list[tuple[int, np.ndarray]]] = [[] for _ in nodes]
    for edge in problem.edges:
        u, v = edge.source, edge.target
        table = np.array(edge.costs, np.float64).reshape(len(totals[u]), len(totals[v]))
        if u == v:
            totals[u] += np.diag(table)
        else:
            near[u].append((v, table))
            near[v].append((u, table.T))
    chosen: dict[int, int] = {}
    for node in sorted(range(len(nodes)), key=lambda v: -max(nodes[v].usages)):
        chosen[node] = int(np.argmin(totals[node]))
        for other, table in near[node]:
            totals[other] += table[chosen[node]]
    return tuple(chosen[node] for node in range(len(nodes)))


# Recursive halving: cut every operator in two, log2(devices) times, and never look back.
#
# The rule of MindSpore's double-recursive search (mindspore, rec_core: rec_partition.cc and
# rec_cost.cc): in each round the operators, heaviest first, take the cut with the least cost of
# their
# own plus redistribution towards neighbours that this round has already cut. Costs are elements:
# half of the one tensor that the cut of a product or convolution leaves whole (a quarter of that
# for
# rows), nothing for other operators, and 16 times a tensor whose cuts differ. Memory is ignored.


REDISTRIBUTION = 16.0
ROWS = 0.25
PRODUCTS = ("matmul", "batch_matmul", "gemm")
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """A tensor from output `port` of operator `source` to input `index` of operator `target`."""

    source: int
    target: int
    port: int
    index: int


def halving(given: GraphProblem, own_costs: bool = False) -> tuple[int, ...]:
    """Return the strategies of recursive halving on a problem made from a graph.

    With `own_costs` the rule is the same but weighs the problem's own costs, not MindSpore's: what
    then remains to the optimum comes from never looking back.
    """
    operators = given.operators
    joints = _joints(operators)
    near: list[list[Joint]] = [[] for _ in operators]
    for joint in joints:
        near[joint.source].append(joint)
        near[joint.target].append(joint)
    places = [{c: i for i, c in enumerate(options)} for options in given.shardings]
    counts: list[Counts] = [(0,) * len(op.ways) for op in operators]
    order = sorted(range(len(operators)), key=lambda v: -_weight(operators[v]))
    weigh = _own_costs(given, places) if own_costs else _published
    for _ in range(given.halvings):
        before = list(counts)
        cut: dict[int, int] = {}
        for v in order:
            ways = [w for w in _open_ways(operators[v]) if _more(before[v], w) in places[v]]
            if not ways:
                cut[v] = -1
                continue
            state = _State(operators, before, counts, cut, near)
            cut[v] = min(ways, key=lambda w: weigh(state, v, w))
            counts[v] = _more(before[v], cut[v])
    return tuple(places[v][counts[v]] for v in range(len(operators)))


@dataclass(frozen=True, slots=True)
class _State:
    """Where a round stands: cuts before it, cuts so far, the way each operator took in it."""

    operators: tuple[Operator, ...]
    before: list[Counts]
    counts: list[Counts]
    cut: dict[int, int]
    near: list[list[Joint]]


def _joints(operators: tuple[Operator, ...]) -> list[Joint]:
    place = {out: (v, i) for v, op in enumerate(operators) for i, out in enumerate(op.node.outputs)}
    return [
        Joint(*place[name][:1], v, place[name][1], index)
        for v, op in enumerate(operators)
        for index, name in enumerate(op.node.inputs)
        if name in place
    ]


def _more(counts: Counts, way: int) -> Counts:
    """Return counts with one more use of a way."""
    return tuple(c + (i == way) for i, c in enumerate(counts))


def _open_ways(op: Operator) -> Iterator[int]:
    """Yield the ways MindSpore considers: of a convolution only the batch, unless asked for."""
    for index, way in enumerate(op.ways):
        if op.node.op not in IMAGE_OPS or way.outputs[0] == 0:
            yield index


def _inner(op: Operator, counts: Counts, way: int) -> float:
    """Return the published cost of a cut: what it leaves whole, in elements of a device's part."""
    if op.node.op not in (*PRODUCTS, *IMAGE_OPS):
        return 0.0
    whole = 0.0
    sides = [("inputs", 0), ("inputs", 1), ("outputs", 0)]
    for side, index in sides:
        if getattr(op.ways[way], side)[index] < 0:
            _, parts = op.undivided(counts, side, index)
            whole += math.prod(getattr(op, side)[index]) / parts
    rows = op.node.op in PRODUCTS and op.ways[way].outputs[0] == len(op.outputs[0]) - 2
    return whole / 2 * (ROWS if rows else 1.0)


def _weight(op: Operator) -> float:
    """Return what operators are sorted by: a product's dearest cut, a convolution's cheapest."""
    start = (0,) * len(op.ways)
    costs = [_inner(op, start, way) for way in _open_ways(op)]
    if not costs:
        return 0.0
    return max(costs) if op.node.op in PRODUCTS else min(costs)


def _published(state: _State, v: int, way: int) -> float:
    """Return MindSpore's cost of a cut, towards neighbours cut in this round too."""
    op = state.operators[v]
    total = _inner(op, state.before[v], way)
    for joint in state.near[v]:
        other = joint.target if joint.source == v else joint.source
        if other not in state.cut:
            continue
        ways = {v: way, other: state.cut[other]}
        ends = (
            _axis(state.operators[joint.source], ways[joint.source], "outputs", joint.port),
            _axis(state.operators[joint.target], ways[joint.target], "inputs", joint.index),
        )
        if ends[0] != ends[1]:
            side, index = ("outputs", joint.port) if joint.source == v else ("inputs", joint.index)
            _, parts = op.undivided(state.before[v], side, index)
            total += REDISTRIBUTION * math.prod(getattr(op, side)[index]) / parts
    return total


def _axis(op: Operator, way: int, side: str, index: int) -> int:
    """Return the axis of a tensor that a way cuts; -1: none."""
    return -1 if way < 0 else int(getattr(op.ways[way], side)[index])


def _own_costs(
    given: GraphProblem, places: list[dict[Counts, int]]
) -> Callable[[_State, int, int], float]:
    """Return the same weighing with the problem's own node and edge costs."""
    nodes = given.problem.nodes
    near: list[list[int]] = [[] for _ in nodes]
    for index, edge in enumerate(given.problem.edges):
        near[edge.source].append(index)
        near[edge.target].append(index)

    def weigh(state: _State, v: int, way: int) -> float:
        taken = places[v][_more(state.before[v], way)]
        total = nodes[v].costs[taken]
        for index in near[v]:
            edge = given.problem.edges[index]
            other = edge.target if edge.source == v else edge.source
            if other in state.cut:
                theirs = places[other][state.counts[other]]
                s, t = (taken, theirs) if edge.source == v else (theirs, taken)
                total += edge.costs[s * len(nodes[edge.target].costs) + t]
        return total

    return weigh
