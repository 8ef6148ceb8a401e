"""Heuristics for strategy problems: message passing, and the rules of other systems.

Message passing: a sweep visits the nodes in order, then in reverse. Each node chooses its best
strategy, given the strategies of the neighbours that have already chosen and the messages of the
others. It then sends a message to the next nodes: for each of their strategies, the least cost on
its own side (tree-reweighted message passing: V. Kolmogorov, TPAMI 28(10), 2006). Each memory limit
has a price per byte, which rises while the limit is exceeded and falls while it is not. At the end
single nodes are changed as long as that lowers the cost within the limits.

Two rules serve as baselines. The greedy rule visits the nodes by descending weight; each takes the
strategy with the least cost, its own plus that of the edges to neighbours that have already chosen.

Recursive halving cuts every operator in two, log2(devices) times, and never revises a cut: the rule
of MindSpore's double-recursive search (mindspore, rec_core: rec_partition.cc and rec_cost.cc). In
each round the operators, heaviest first, take the cut with the least cost of their own plus
redistribution towards neighbours that this round has already cut. Costs are counted in elements:
half of the one tensor that is not divided by the cut of a product or convolution (for a cut of
rows, a quarter of that), 0 for other operators, and 16 times the size of a tensor that its two
operators cut differently. Memory is ignored.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.cluster.parallel.strategy import graph_problem
from ascend_lab.cluster.parallel.strategy.problem import Costs, Problem, Reduced, Whole

RAISE = 1.1
LOWER = 0.97
"""Factors by which a limit's price rises after a sweep that exceeds it, and falls otherwise."""
ATTEMPTS = 3
"""Most orders of the nodes to try until one leads to an allowed choice, the problem's first."""
Positions = dict[int, int]


@dataclass(frozen=True)
class Landscape:
    """A reduced problem prepared for sweeps, with a large number in place of infinite costs.

    `rank` is the position of each node in the order of the sweep, `share` the part of a node's cost
    that each of its messages contains.
    """

    rank: dict[int, int]
    share: dict[int, float]
    costs: dict[int, Costs]
    links: dict[int, dict[int, Costs]]
    usages: dict[int, Costs]
    rows_of: dict[int, Whole]
    rooms: Costs
    forbidden: float

    def cost(self, at: Positions) -> float:
        """Return the cost of a choice, without the constant cost of folded nodes."""
        total = sum(float(costs[at[node]]) for node, costs in self.costs.items())
        for u, tables in self.links.items():
            # A table is stored at both of its nodes, and counted only at one of them.
            total += sum(float(table[at[u], at[v]]) for v, table in tables.items() if u < v)
        return total

    def used(self, at: Positions) -> Costs:
        """Return the usage of a choice in each memory limit."""
        used = np.zeros(len(self.rooms))
        for node, usage in self.usages.items():
            used[self.rows_of[node]] += usage[at[node]]
        return used


def search(
    small: Reduced, sweeps: int = 200, time_limit_s: float = 1e9, seed: int = 0
) -> Positions | None:
    """Return the best allowed positions found in `sweeps` sweeps, None if none is allowed.

    The same seed gives the same result unless the time runs out first.
    """
    ends = time.monotonic() + time_limit_s
    rng = np.random.default_rng(seed)
    order = tuple(small.costs)
    for _ in range(ATTEMPTS):
        land = landscape(small, order)
        best = _sweeps(land, sweeps, ends)
        if best is not None:
            return descend(land, best)
        if not order or time.monotonic() > ends:
            break
        order = tuple(int(node) for node in rng.permutation(order))
    return None


def landscape(small: Reduced, order: tuple[int, ...]) -> Landscape:
    """Return a reduced problem as a `Landscape`, for sweeps in the given order."""
    finite = [t[np.isfinite(t)] for t in (*small.costs.values(), *small.edges.values())]
    # More than any allowed choice can cost: 2 nodes of at most 5 and a table of at most 7 give 35.
    forbidden = 1.0 + 2 * sum(float(np.abs(costs_or_table).max()) for costs_or_table in finite)

    def filled(table: Costs) -> Costs:
        return np.where(np.isfinite(table), table, forbidden)

    rows: dict[int, list[int]] = {node: [] for node in small.costs}
    for index, (nodes, _) in enumerate(small.rows):
        for node in nodes:
            rows[node].append(index)
    rank = {node: place for place, node in enumerate(order)}
    share = {}
    for node, tables in small.links.items():
        later = sum(rank[n] > rank[node] for n in tables)
        # 3 neighbours later in the order and 1 earlier: each message carries a third of the node's
        # cost.
        share[node] = 1.0 / max(1, later, len(tables) - later)
    return Landscape(
        rank,
        share,
        {node: filled(costs) for node, costs in small.costs.items()},
        {u: {v: filled(t) for v, t in tables.items()} for u, tables in small.links.items()},
        {node: small.usages[node].astype(np.float64) for node in small.costs},
        {node: np.array(row, np.int64) for node, row in rows.items()},
        np.array([room for _, room in small.rows], np.float64),
        forbidden,
    )


def _sweeps(land: Landscape, sweeps: int, ends: float) -> Positions | None:
    """Return the best allowed choice that the sweeps find; None if they find none.

    The first choice takes the least usage of every node, so that an allowed one is found at once.
    """
    best: Positions | None = None
    best_cost = land.forbidden
    frugal = descend(land, {node: int(np.argmin(usage)) for node, usage in land.usages.items()})
    if land.cost(frugal) < best_cost:
        best = frugal
        best_cost = land.cost(frugal)
    spread = sum(float(np.ptp(costs)) for costs in land.costs.values())
    unit = 1e-3 * spread / max(len(land.rooms), 1) + 1.0
    prices = np.zeros(len(land.rooms))
    messages = {
        (u, v): np.zeros(len(land.costs[v])) for u, tables in land.links.items() for v in tables
    }
    for _ in range(sweeps):
        per_use = prices / np.maximum(land.rooms, 1)
        priced = {
            node: costs + land.usages[node] * per_use[land.rows_of[node]].sum()
            for node, costs in land.costs.items()
        }
        over = np.zeros(len(land.rooms), bool)
        for forward in (True, False):
            at = _sweep(land, priced, messages, forward)
            cost = land.cost(at)
            over = land.used(at) > land.rooms
            if cost < best_cost and not over.any():
                best = at
                best_cost = cost
        if time.monotonic() > ends:
            break
        prices = np.where(over, np.maximum(prices, unit) * RAISE, prices * LOWER)
    return best


def _sweep(
    land: Landscape, priced: dict[int, Costs], messages: dict[tuple[int, int], Costs], forward: bool
) -> Positions:
    """Update the messages in one direction, and return the choice made on the way."""
    at: Positions = {}
    rank = land.rank
    for node in rank if forward else reversed(rank):
        total = choice = priced[node]
        for neighbour, table in land.links[node].items():
            incoming = messages[neighbour, node]
            total = total + incoming
            # Neighbours that have chosen count with their choice, the others with their messages.
            choice = choice + (table[:, at[neighbour]] if neighbour in at else incoming)
        at[node] = int(np.argmin(choice))
        node_share = land.share[node] * total
        for neighbour, table in land.links[node].items():
            if (rank[neighbour] > rank[node]) == forward:
                incoming = ((node_share - messages[neighbour, node])[:, None] + table).min(axis=0)
                # Only differences between strategies matter; without this, messages would grow.
                messages[node, neighbour] = incoming - incoming.min()
    return at


def descend(land: Landscape, start: Positions) -> Positions:
    """Change one node at a time while that lowers the cost within memory; return the result."""
    at = dict(start)
    used = land.used(at)
    todo = set(at)
    while todo:
        node = todo.pop()
        rows = land.rows_of[node]
        usage = land.usages[node]
        total = land.costs[node]
        for neighbour, table in land.links[node].items():
            total = total + table[:, at[neighbour]]
        room = (land.rooms[rows] - used[rows]).min(initial=np.inf)
        # A strategy fits if its extra usage is at most the free room of each limit.
        fits = usage - usage[at[node]] <= max(room, 0.0)
        best = int(np.argmin(np.where(fits, total, np.inf)))
        if total[best] < total[at[node]]:
            used[rows] += usage[best] - usage[at[node]]
            at[node] = best
            # After the change another strategy may be best for the neighbours.
            todo.update(land.links[node])
    return at


# -- baselines -------------------------------------------------------------------------------------
REDISTRIBUTION = 16.0
ROWS = 0.25
PRODUCTS = ("matmul", "batch_matmul", "gemm")


def greedy(problem: Problem) -> tuple[int, ...]:
    """Return the greedy choice, in which nodes with the largest usage choose first.

    Memory is ignored, as in the original rule, so that the choice may exceed the limit.
    """
    nodes = problem.nodes
    totals = [np.array(node.costs, np.float64) for node in nodes]
    adjacent: list[list[tuple[int, np.ndarray]]] = [[] for _ in nodes]
    for edge in problem.edges:
        u = edge.source
        v = edge.target
        table = np.array(edge.costs, np.float64).reshape(len(totals[u]), len(totals[v]))
        if u == v:
            totals[u] += np.diag(table)
        else:
            adjacent[u].append((v, table))
            adjacent[v].append((u, table.T))
    chosen: dict[int, int] = {}
    # The largest usage of any of its strategies is a node's weight: large tensors choose first.
    for node in sorted(range(len(nodes)), key=lambda v: -max(nodes[v].usages)):
        chosen[node] = int(np.argmin(totals[node]))
        for neighbour, table in adjacent[node]:
            totals[neighbour] += table[chosen[node]]
    return tuple(chosen[node] for node in range(len(nodes)))


# -- recursive halving ----------------------------------------------------------------------------
@dataclass(slots=True)
class _Round:
    """One round of halving: counts before it, counts so far, and each operator's way (-1: none)."""

    before: list[graph_problem.Counts]
    counts: list[graph_problem.Counts]
    taken: dict[int, int] = field(default_factory=dict)


def halving(given: graph_problem.GraphProblem, own_costs: bool = False) -> tuple[int, ...]:
    """Return the strategies of recursive halving on a problem made from a graph.

    With `own_costs` the rule uses the costs of the problem, not those of MindSpore. The remaining
    distance to the optimum is then due to cuts that are never revised.
    """
    operators = given.operators
    places = [{c: i for i, c in enumerate(options)} for options in given.shardings]
    weigh = _own(given, places) if own_costs else _published(operators)
    order = sorted(range(len(operators)), key=lambda v: -_weight(operators[v]))
    counts: list[graph_problem.Counts] = [(0,) * len(op.ways) for op in operators]
    for _ in range(given.halvings):
        now = _Round(list(counts), counts)
        for v in order:
            # A halving can fail: 6 rows cut in two leave 3, which cannot be cut in two again.
            open_ways = [w for w in _open(operators[v]) if _more(counts[v], w) in places[v]]
            now.taken[v] = min(open_ways, key=lambda w: weigh(now, v, w), default=-1)
            if open_ways:
                counts[v] = _more(counts[v], now.taken[v])
    return tuple(places[v][counts[v]] for v in range(len(operators)))


Weigh = Callable[[_Round, int, int], float]
"""Returns the cost of cutting an operator along a way in a round."""


def _more(counts: graph_problem.Counts, way: int) -> graph_problem.Counts:
    """Return counts with one more use of a way."""
    # (0, 1, 0) with one more use of way 2 is (0, 1, 1).
    return tuple(c + (i == way) for i, c in enumerate(counts))


def _open(op: graph_problem.Cuttable) -> list[int]:
    """Return the ways that MindSpore considers: for a convolution only the batch."""
    image = op.node.op in graph_problem.IMAGE_OPS
    return [i for i, loop_axis in enumerate(op.ways) if not image or loop_axis.outputs[0] == 0]


def _inner(op: graph_problem.Cuttable, counts: graph_problem.Counts, way: int) -> float:
    """Return MindSpore's cost of a cut inside an operator, in elements of a device's part."""
    if op.node.op not in (*PRODUCTS, *graph_problem.IMAGE_OPS):
        return 0.0
    total_s = 0.0
    for side, index in (("inputs", 0), ("inputs", 1), ("outputs", 0)):
        if getattr(op.ways[way], side)[index] < 0:
            total_s += op.held_elements(counts, side, index)
    rows = op.node.op in PRODUCTS and op.ways[way].outputs[0] == len(op.outputs[0]) - 2
    return total_s / 2 * (ROWS if rows else 1.0)


def _weight(op: graph_problem.Cuttable) -> float:
    """Return an operator's weight: cost of a product's dearest cut, a convolution's cheapest."""
    costs = [_inner(op, (0,) * len(op.ways), loop_axis) for loop_axis in _open(op)]
    # only the order in which operators choose depends on it
    pick = max if op.node.op in PRODUCTS else min
    return pick(costs, default=0.0)


def _published(operators: tuple[graph_problem.Cuttable, ...]) -> Weigh:
    """Return a function that gives MindSpore's cost of a cut, with edges to cut neighbours."""
    edges_of: list[list[graph_problem.Joint]] = [[] for _ in operators]
    for joint in graph_problem.joints(operators):
        edges_of[joint.source].append(joint)
        edges_of[joint.target].append(joint)

    def weigh(now: _Round, v: int, way: int) -> float:
        total = _inner(operators[v], now.before[v], way)
        assigned = {**now.taken, v: way}
        for joint in edges_of[v]:
            if joint.source not in assigned or joint.target not in assigned:
                continue
            source_axis = _axis(
                operators[joint.source], assigned[joint.source], "outputs", joint.port
            )
            target_axis = _axis(
                operators[joint.target], assigned[joint.target], "inputs", joint.slot
            )
            if source_axis != target_axis:
                end = ("outputs", joint.port) if joint.source == v else ("inputs", joint.slot)
                total += REDISTRIBUTION * operators[v].held_elements(now.before[v], *end)
        return total

    return weigh


def _axis(op: graph_problem.Cuttable, way: int, side: str, index: int) -> int:
    """Return the axis of a tensor that a way cuts, or -1 if it cuts none."""
    # if neither operator cuts the tensor they agree: -1 equals -1
    return -1 if way < 0 else int(getattr(op.ways[way], side)[index])


def _own(given: graph_problem.GraphProblem, places: list[dict[graph_problem.Counts, int]]) -> Weigh:
    """Return a function as in `_published`, but with the costs of the problem."""
    nodes = given.problem.nodes
    edges = given.problem.edges
    edges_of: list[list[int]] = [[] for _ in nodes]
    for index, edge in enumerate(edges):
        edges_of[edge.source].append(index)
        edges_of[edge.target].append(index)

    def weigh(now: _Round, v: int, way: int) -> float:
        position = places[v][_more(now.before[v], way)]
        total = nodes[v].costs[position]
        for edge in (edges[index] for index in edges_of[v]):
            neighbour = edge.target if edge.source == v else edge.source
            if neighbour in now.taken:
                theirs = places[neighbour][now.counts[neighbour]]
                # Tables are row-major, source by target: with 3 strategies of the target, (2, 1) is
                # entry 7.
                s, t = (position, theirs) if edge.source == v else (theirs, position)
                total += edge.costs[s * len(nodes[edge.target].costs) + t]
        return total

    return weigh
