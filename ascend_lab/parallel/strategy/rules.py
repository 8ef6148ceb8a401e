"""Rules that others use, to compare with: greedy, and recursive halving.

Greedy takes nodes by weight descending; each takes the strategy with the least cost of its own and
towards the neighbours that have already chosen.

Recursive halving cuts every operator in two, log2(devices) times, and never looks back: the rule of
MindSpore's double-recursive search (mindspore, rec_core: rec_partition.cc and rec_cost.cc). In each
round the operators, heaviest first, take the cut with the least cost of their own plus
redistribution towards neighbours that this round has already cut. Costs are elements: half of the
one tensor that the cut of a product or convolution leaves whole (a quarter of that for rows),
nothing for other operators, and 16 times a tensor whose cuts differ. Memory is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ascend_lab.parallel.strategy.graph_problem import IMAGE_OPS, Counts, Cuttable, GraphProblem
from ascend_lab.parallel.strategy.problem import Problem

REDISTRIBUTION = 16.0
ROWS = 0.25
PRODUCTS = ("matmul", "batch_matmul", "gemm")


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


# -- recursive halving ----------------------------------------------------------------------------
class Joint(NamedTuple):
    """A tensor from output `port` of operator `source` to input `slot` of operator `target`."""

    source: int
    target: int
    port: int
    slot: int


@dataclass(slots=True)
class _Round:
    """Cuts before a round, cuts so far, and the way each operator took in it (-1: none)."""

    before: list[Counts]
    counts: list[Counts]
    taken: dict[int, int] = field(default_factory=dict)


def halving(given: GraphProblem, own_costs: bool = False) -> tuple[int, ...]:
    """Return the strategies of recursive halving on a problem made from a graph.

    With `own_costs` the rule is the same but weighs the problem's own costs, not MindSpore's: what
    then remains to the optimum comes from never looking back.
    """
    operators = given.operators
    places = [{c: i for i, c in enumerate(options)} for options in given.shardings]
    weigh = _own(given, places) if own_costs else _published(operators)
    order = sorted(range(len(operators)), key=lambda v: -_weight(operators[v]))
    counts: list[Counts] = [(0,) * len(op.ways) for op in operators]
    for _ in range(given.halvings):
        now = _Round(list(counts), counts)
        for v in order:
            open_ways = [w for w in _open(operators[v]) if _more(counts[v], w) in places[v]]
            now.taken[v] = min(open_ways, key=lambda w: weigh(now, v, w), default=-1)
            if open_ways:
                counts[v] = _more(counts[v], now.taken[v])
    return tuple(places[v][counts[v]] for v in range(len(operators)))


Weigh = Callable[[_Round, int, int], float]
"""The cost of cutting an operator a way in a round."""


def _more(counts: Counts, way: int) -> Counts:
    """Return counts with one more use of a way."""
    return tuple(c + (i == way) for i, c in enumerate(counts))


def _open(op: Cuttable) -> list[int]:
    """Return the ways MindSpore considers: of a convolution only the batch."""
    image = op.node.op in IMAGE_OPS
    return [i for i, way in enumerate(op.ways) if not image or way.outputs[0] == 0]


def _inner(op: Cuttable, counts: Counts, way: int) -> float:
    """Return the published cost of a cut: what it leaves whole, in elements of a device's part."""
    if op.node.op not in (*PRODUCTS, *IMAGE_OPS):
        return 0.0
    whole = 0.0
    for side, index in (("inputs", 0), ("inputs", 1), ("outputs", 0)):
        if getattr(op.ways[way], side)[index] < 0:
            whole += op.held_elements(counts, side, index)
    rows = op.node.op in PRODUCTS and op.ways[way].outputs[0] == len(op.outputs[0]) - 2
    return whole / 2 * (ROWS if rows else 1.0)


def _weight(op: Cuttable) -> float:
    """Return what operators are sorted by: a product's dearest cut, a convolution's cheapest."""
    costs = [_inner(op, (0,) * len(op.ways), way) for way in _open(op)]
    pick = max if op.node.op in PRODUCTS else min
    return pick(costs, default=0.0)


def _published(operators: tuple[Cuttable, ...]) -> Weigh:
    """Return MindSpore's cost of a cut, towards neighbours cut in the same round too."""
    place = {out: (v, i) for v, op in enumerate(operators) for i, out in enumerate(op.node.outputs)}
    near: list[list[Joint]] = [[] for _ in operators]
    for v, op in enumerate(operators):
        for slot, name in enumerate(op.node.inputs):
            if name in place:
                source, port = place[name]
                joint = Joint(source, v, port, slot)
                near[source].append(joint)
                near[v].append(joint)

    def weigh(now: _Round, v: int, way: int) -> float:
        total, ways = _inner(operators[v], now.before[v], way), {**now.taken, v: way}
        for joint in near[v]:
            if joint.source not in ways or joint.target not in ways:
                continue
            left = _axis(operators[joint.source], ways[joint.source], "outputs", joint.port)
            right = _axis(operators[joint.target], ways[joint.target], "inputs", joint.slot)
            if left != right:
                end = ("outputs", joint.port) if joint.source == v else ("inputs", joint.slot)
                total += REDISTRIBUTION * operators[v].held_elements(now.before[v], *end)
        return total

    return weigh


def _axis(op: Cuttable, way: int, side: str, index: int) -> int:
    """Return the axis of a tensor that a way cuts; -1: none."""
    return -1 if way < 0 else int(getattr(op.ways[way], side)[index])


def _own(given: GraphProblem, places: list[dict[Counts, int]]) -> Weigh:
    """Return the same weighing with the problem's own node and edge costs."""
    nodes, edges = given.problem.nodes, given.problem.edges
    near: list[list[int]] = [[] for _ in nodes]
    for index, edge in enumerate(edges):
        near[edge.source].append(index)
        near[edge.target].append(index)

    def weigh(now: _Round, v: int, way: int) -> float:
        own = places[v][_more(now.before[v], way)]
        total = nodes[v].costs[own]
        for edge in (edges[index] for index in near[v]):
            other = edge.target if edge.source == v else edge.source
            if other in now.taken:
                theirs = places[other][now.counts[other]]
                s, t = (own, theirs) if edge.source == v else (theirs, own)
                total += edge.costs[s * len(nodes[edge.target].costs) + t]
        return total

    return weigh
