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

PRICE_RISE = 1.1
PRICE_FALL = 0.97
"""Factors by which a limit's price rises after a sweep that exceeds it, and falls otherwise."""
ATTEMPTS = 3
"""Most orders of the nodes to try until one leads to an allowed choice, the problem's first."""
Positions = dict[int, int]
"""The chosen position (index of a remaining strategy) of each node."""


@dataclass(frozen=True)
class Landscape:
    """A reduced problem prepared for sweeps, with a large number in place of infinite costs.

    - rank: the position of each node in the order of the sweep
    - share: the part of a node's cost that each of its messages contains
    - costs, links, usages: those of `Reduced`, by node
    - rows_of: the memory limits in which a node occurs; `rooms`: what each limit allows
    - forbidden: the number in place of infinite costs
    """

    rank: dict[int, int]
    share: dict[int, float]
    costs: dict[int, Costs]
    links: dict[int, dict[int, Costs]]
    usages: dict[int, Costs]
    rows_of: dict[int, Whole]
    rooms: Costs
    forbidden: float

    def cost(self, positions: Positions) -> float:
        """Return the cost of a choice, without the constant cost of folded nodes."""
        total = sum(float(costs[positions[node]]) for node, costs in self.costs.items())
        for u, tables in self.links.items():
            # A table is stored at both of its nodes, and counted only at one of them.
            total += sum(
                float(table[positions[u], positions[v]]) for v, table in tables.items() if u < v
            )
        return total

    def used(self, positions: Positions) -> Costs:
        """Return the usage of a choice in each memory limit."""
        used = np.zeros(len(self.rooms))
        for node, usage in self.usages.items():
            used[self.rows_of[node]] += usage[positions[node]]
        return used


def search(
    reduced: Reduced, sweeps: int = 200, time_limit_s: float = 1e9, seed: int = 0
) -> Positions | None:
    """Return the best allowed positions found in `sweeps` sweeps, None if none is allowed.

    The same seed gives the same result unless the time runs out first.
    """
    end_s = time.monotonic() + time_limit_s
    rng = np.random.default_rng(seed)
    order = tuple(reduced.costs)
    for _ in range(ATTEMPTS):
        landscape = landscape_of(reduced, order)
        best = _sweeps(landscape, sweeps, end_s)
        if best is not None:
            return descend(landscape, best)
        if not order or time.monotonic() > end_s:
            break
        order = tuple(int(node) for node in rng.permutation(order))
    return None


def landscape_of(reduced: Reduced, order: tuple[int, ...]) -> Landscape:
    """Return a reduced problem as a `Landscape`, for sweeps in the given order."""
    tables_and_costs = (*reduced.costs.values(), *reduced.edges.values())
    finite_values = [values[np.isfinite(values)] for values in tables_and_costs]
    # More than any allowed choice can cost: 2 nodes of at most 5 and a table of at most 7 give 35.
    forbidden = 1.0 + 2 * sum(float(np.abs(values).max()) for values in finite_values)

    def filled(table: Costs) -> Costs:
        return np.where(np.isfinite(table), table, forbidden)

    rows: dict[int, list[int]] = {node: [] for node in reduced.costs}
    for index, (nodes, _) in enumerate(reduced.rows):
        for node in nodes:
            rows[node].append(index)
    rank = {node: index for index, node in enumerate(order)}
    share = {}
    for node, tables in reduced.links.items():
        later = sum(rank[n] > rank[node] for n in tables)
        # 3 neighbours later in the order and 1 earlier: each message carries a third of the node's
        # cost.
        share[node] = 1.0 / max(1, later, len(tables) - later)
    links = {}
    for node, tables in reduced.links.items():
        links[node] = {neighbour: filled(table) for neighbour, table in tables.items()}
    return Landscape(
        rank=rank,
        share=share,
        costs={node: filled(costs) for node, costs in reduced.costs.items()},
        links=links,
        usages={node: reduced.usages[node].astype(np.float64) for node in reduced.costs},
        rows_of={node: np.array(row, np.int64) for node, row in rows.items()},
        rooms=np.array([room for _, room in reduced.rows], np.float64),
        forbidden=forbidden,
    )


def _sweeps(landscape: Landscape, sweeps: int, end_s: float) -> Positions | None:
    """Return the best allowed choice that the sweeps find; None if they find none.

    The first choice takes the least usage of every node, so that an allowed one is found at once.
    """
    best: Positions | None = None
    best_cost = landscape.forbidden
    least_usage = {node: int(np.argmin(usage)) for node, usage in landscape.usages.items()}
    first = descend(landscape, least_usage)
    if landscape.cost(first) < best_cost:
        best = first
        best_cost = landscape.cost(first)
    # the first price of a limit: a thousandth of what all nodes can save, shared among the limits
    spread = sum(float(np.ptp(costs)) for costs in landscape.costs.values())
    first_price = 1e-3 * spread / max(len(landscape.rooms), 1) + 1.0
    prices = np.zeros(len(landscape.rooms))
    messages: dict[tuple[int, int], Costs] = {}
    for u, tables in landscape.links.items():
        messages |= {(u, v): np.zeros(len(landscape.costs[v])) for v in tables}
    for _ in range(sweeps):
        price_per_byte = prices / np.maximum(landscape.rooms, 1)
        priced = {}
        for node, costs in landscape.costs.items():
            node_price = price_per_byte[landscape.rows_of[node]].sum()
            priced[node] = costs + landscape.usages[node] * node_price
        over = np.zeros(len(landscape.rooms), bool)
        for forward in (True, False):
            positions = _sweep(landscape, priced, messages, forward)
            cost = landscape.cost(positions)
            over = landscape.used(positions) > landscape.rooms
            if cost < best_cost and not over.any():
                best = positions
                best_cost = cost
        if time.monotonic() > end_s:
            break
        prices = np.where(over, np.maximum(prices, first_price) * PRICE_RISE, prices * PRICE_FALL)
    return best


def _sweep(
    landscape: Landscape,
    priced: dict[int, Costs],
    messages: dict[tuple[int, int], Costs],
    forward: bool,
) -> Positions:
    """Update the messages in one direction, and return the choice made on the way."""
    positions: Positions = {}
    rank = landscape.rank
    for node in rank if forward else reversed(rank):
        total = priced[node]
        choice = priced[node]
        for neighbour, table in landscape.links[node].items():
            incoming = messages[neighbour, node]
            total = total + incoming
            # Neighbours that have chosen count with their choice, the others with their messages.
            if neighbour in positions:
                choice = choice + table[:, positions[neighbour]]
            else:
                choice = choice + incoming
        positions[node] = int(np.argmin(choice))
        node_share = landscape.share[node] * total
        for neighbour, table in landscape.links[node].items():
            if (rank[neighbour] > rank[node]) == forward:
                own_costs = node_share - messages[neighbour, node]
                outgoing = (own_costs[:, None] + table).min(axis=0)
                # Only differences between strategies matter; without this, messages would grow.
                messages[node, neighbour] = outgoing - outgoing.min()
    return positions


def descend(landscape: Landscape, start: Positions) -> Positions:
    """Change one node at a time while that lowers the cost within memory; return the result."""
    positions = dict(start)
    used = landscape.used(positions)
    pending = set(positions)
    while pending:
        node = pending.pop()
        rows = landscape.rows_of[node]
        usage = landscape.usages[node]
        total = landscape.costs[node]
        for neighbour, table in landscape.links[node].items():
            total = total + table[:, positions[neighbour]]
        room = (landscape.rooms[rows] - used[rows]).min(initial=np.inf)
        # A strategy fits if its extra usage is at most the free room of each limit.
        fits = usage - usage[positions[node]] <= max(room, 0.0)
        best = int(np.argmin(np.where(fits, total, np.inf)))
        if total[best] < total[positions[node]]:
            used[rows] += usage[best] - usage[positions[node]]
            positions[node] = best
            # After the change another strategy may be best for the neighbours.
            pending.update(landscape.links[node])
    return positions


# -- baselines -------------------------------------------------------------------------------------
REDISTRIBUTION_FACTOR = 16.0
"""MindSpore's cost of a tensor that its two operators cut differently, per element."""
ROW_CUT_FACTOR = 0.25
"""A cut of the rows of a product counts with this share of its cost."""
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
    """One round of halving.

    `before` are the counts before the round and `counts` those so far, by operator. `way_of` is the
    way that an operator has taken in this round (-1: none).
    """

    before: list[graph_problem.Counts]
    counts: list[graph_problem.Counts]
    way_of: dict[int, int] = field(default_factory=dict)


def halving(problem: graph_problem.GraphProblem, own_costs: bool = False) -> tuple[int, ...]:
    """Return the strategies of recursive halving on a problem made from a graph.

    With `own_costs` the rule uses the costs of the problem, not those of MindSpore. The remaining
    distance to the optimum is then due to cuts that are never revised.
    """
    operators = problem.operators
    strategy_of = [{c: i for i, c in enumerate(options)} for options in problem.shardings]
    weigh = _problem_costs(problem, strategy_of) if own_costs else _mindspore_costs(operators)
    order = sorted(range(len(operators)), key=lambda v: -_weight(operators[v]))
    counts: list[graph_problem.Counts] = [(0,) * len(op.ways) for op in operators]
    for _ in range(problem.halvings):
        this_round = _Round(list(counts), counts)
        for v in order:
            # A halving can fail: 6 rows cut in two leave 3, which cannot be cut in two again.
            ways = _open_ways(operators[v])
            possible = [way for way in ways if _with_one_more(counts[v], way) in strategy_of[v]]
            if not possible:
                this_round.way_of[v] = -1
                continue
            costs = [weigh(this_round, v, way) for way in possible]
            this_round.way_of[v] = possible[costs.index(min(costs))]
            counts[v] = _with_one_more(counts[v], this_round.way_of[v])
    return tuple(strategy_of[v][counts[v]] for v in range(len(operators)))


Weigh = Callable[[_Round, int, int], float]
"""Returns the cost of cutting an operator along a way in a round."""


def _with_one_more(counts: graph_problem.Counts, way: int) -> graph_problem.Counts:
    """Return counts with one more use of a way."""
    # (0, 1, 0) with one more use of way 2 is (0, 1, 1).
    return tuple(c + (i == way) for i, c in enumerate(counts))


def _open_ways(op: graph_problem.Cuttable) -> list[int]:
    """Return the ways that MindSpore considers: for a convolution only the batch."""
    image = op.node.op in graph_problem.IMAGE_OPS
    return [i for i, way in enumerate(op.ways) if not image or way.outputs[0] == 0]


def _inner_cost(op: graph_problem.Cuttable, counts: graph_problem.Counts, way: int) -> float:
    """Return MindSpore's cost of a cut inside an operator, in elements of a device's part."""
    if op.node.op not in (*PRODUCTS, *graph_problem.IMAGE_OPS):
        return 0.0
    elements = 0.0
    for side, index in (("inputs", 0), ("inputs", 1), ("outputs", 0)):
        if getattr(op.ways[way], side)[index] < 0:
            elements += op.held_elements(counts, side, index)
    cuts_rows = op.node.op in PRODUCTS and op.ways[way].outputs[0] == len(op.outputs[0]) - 2
    return elements / 2 * (ROW_CUT_FACTOR if cuts_rows else 1.0)


def _weight(op: graph_problem.Cuttable) -> float:
    """Return an operator's weight: cost of a product's dearest cut, a convolution's cheapest."""
    costs = [_inner_cost(op, (0,) * len(op.ways), way) for way in _open_ways(op)]
    # only the order in which operators choose depends on it
    pick = max if op.node.op in PRODUCTS else min
    return pick(costs, default=0.0)


def _mindspore_costs(operators: tuple[graph_problem.Cuttable, ...]) -> Weigh:
    """Return a function that gives MindSpore's cost of a cut, with edges to cut neighbours."""
    edges_of: list[list[graph_problem.Joint]] = [[] for _ in operators]
    for joint in graph_problem.joints(operators):
        edges_of[joint.source].append(joint)
        edges_of[joint.target].append(joint)

    def weigh(this_round: _Round, v: int, way: int) -> float:
        total = _inner_cost(operators[v], this_round.before[v], way)
        assigned = {**this_round.way_of, v: way}
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
                total += REDISTRIBUTION_FACTOR * operators[v].held_elements(
                    this_round.before[v], *end
                )
        return total

    return weigh


def _axis(op: graph_problem.Cuttable, way: int, side: str, index: int) -> int:
    """Return the axis of a tensor that a way cuts, or -1 if it cuts none."""
    # if neither operator cuts the tensor they agree: -1 equals -1
    return -1 if way < 0 else int(getattr(op.ways[way], side)[index])


def _problem_costs(
    problem: graph_problem.GraphProblem, strategy_of: list[dict[graph_problem.Counts, int]]
) -> Weigh:
    """Return a function as in `_mindspore_costs`, but with the costs of the problem."""
    nodes = problem.problem.nodes
    edges = problem.problem.edges
    edges_of: list[list[int]] = [[] for _ in nodes]
    for index, edge in enumerate(edges):
        edges_of[edge.source].append(index)
        edges_of[edge.target].append(index)

    def weigh(this_round: _Round, v: int, way: int) -> float:
        strategy = strategy_of[v][_with_one_more(this_round.before[v], way)]
        total = nodes[v].costs[strategy]
        for edge in (edges[index] for index in edges_of[v]):
            neighbour = edge.target if edge.source == v else edge.source
            if neighbour in this_round.way_of:
                neighbour_strategy = strategy_of[neighbour][this_round.counts[neighbour]]
                # Tables are row-major, source by target: with 3 strategies of the target, (2, 1) is
                # entry 7.
                s, t = (
                    (strategy, neighbour_strategy)
                    if edge.source == v
                    else (neighbour_strategy, strategy)
                )
                total += edge.costs[s * len(nodes[edge.target].costs) + t]
        return total

    return weigh
