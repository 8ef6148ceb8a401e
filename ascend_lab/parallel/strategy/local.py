"""Heuristics for strategies without a solver: messages between nodes, prices of memory, descent.

A sweep visits the nodes in order, then in reverse. Each node tells the next ones, for every one of
their strategies, what it would cost at best on its side; then it takes the strategy that is best
for what its chosen neighbours took and the others told (tree-reweighted message passing: V.
Kolmogorov, TPAMI 28(10), 2006). Memory enters as a price per row: raised while the row is exceeded,
lowered while it is not. In the end single nodes change as long as that helps and memory allows.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_lab.parallel.strategy.reduced import Costs, Reduced

RAISE, LOWER = 1.1, 0.97
"""Factors of a row's price after a sweep that exceeds it, or does not."""
ATTEMPTS = 3
"""Orders of the nodes tried until one leads to an allowed choice; the first is the problem's."""
Positions = dict[int, int]


@dataclass(frozen=True)
class Landscape:
    """Nodes in order of the sweep, their costs and tables with a large number for inf, memory.

    `rank`: the place of each node in the order. `share`: the part of a node's cost that each of its
    messages carries.
    """

    rank: dict[int, int]
    share: dict[int, float]
    costs: dict[int, Costs]
    links: dict[int, dict[int, Costs]]
    usages: dict[int, Costs]
    rows_of: dict[int, NDArray[np.int64]]
    rooms: Costs
    forbidden: float

    def cost(self, at: Positions) -> float:
        """Return the cost of a choice, without what was folded."""
        total = sum(float(costs[at[node]]) for node, costs in self.costs.items())
        for u, near in self.links.items():
            total += sum(float(table[at[u], at[v]]) for v, table in near.items() if u < v)
        return total

    def used(self, at: Positions) -> Costs:
        """Return what a choice uses of every row of memory."""
        used = np.zeros(len(self.rooms))
        for node, own in self.usages.items():
            used[self.rows_of[node]] += own[at[node]]
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
    """Return a reduced problem as the heuristics need it."""
    finite = [t[np.isfinite(t)] for t in (*small.costs.values(), *small.edges.values())]
    forbidden = 1.0 + 2 * sum(float(np.abs(part).max()) for part in finite)

    def filled(table: Costs) -> Costs:
        return np.where(np.isfinite(table), table, forbidden)

    rows: dict[int, list[int]] = {node: [] for node in small.costs}
    for index, (nodes, _) in enumerate(small.rows):
        for node in nodes:
            rows[node].append(index)
    rank, share = {node: place for place, node in enumerate(order)}, {}
    for node, near in small.links.items():
        later = sum(rank[n] > rank[node] for n in near)
        share[node] = 1.0 / max(1, later, len(near) - later)
    return Landscape(
        rank,
        share,
        {node: filled(costs) for node, costs in small.costs.items()},
        {u: {v: filled(t) for v, t in near.items()} for u, near in small.links.items()},
        {node: small.usages[node].astype(np.float64) for node in small.costs},
        {node: np.array(own, np.int64) for node, own in rows.items()},
        np.array([room for _, room in small.rows], np.float64),
        forbidden,
    )


def _sweeps(land: Landscape, sweeps: int, ends: float) -> Positions | None:
    """Return the best allowed choice met while messages and prices settle.

    The first one comes from the least usage of every node, so that there is one in no time.
    """
    best: Positions | None = None
    best_cost = land.forbidden
    frugal = descend(land, {node: int(np.argmin(own)) for node, own in land.usages.items()})
    if land.cost(frugal) < best_cost:
        best, best_cost = frugal, land.cost(frugal)
    spread = sum(float(np.ptp(costs)) for costs in land.costs.values())
    unit = 1e-3 * spread / max(len(land.rooms), 1) + 1.0
    prices = np.zeros(len(land.rooms))
    messages = {
        (u, v): np.zeros(len(land.costs[v])) for u, near in land.links.items() for v in near
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
                best, best_cost = at, cost
        if time.monotonic() > ends:
            break
        prices = np.where(over, np.maximum(prices, unit) * RAISE, prices * LOWER)
    return best


def _sweep(
    land: Landscape,
    priced: dict[int, Costs],
    messages: dict[tuple[int, int], Costs],
    forward: bool,
) -> Positions:
    """Renew the messages in one direction and return the choice made on the way."""
    at: Positions = {}
    rank = land.rank
    for node in rank if forward else reversed(rank):
        total = choice = priced[node]
        for near, table in land.links[node].items():
            told = messages[near, node]
            total = total + told
            choice = choice + (table[:, at[near]] if near in at else told)
        at[node] = int(np.argmin(choice))
        part = land.share[node] * total
        for near, table in land.links[node].items():
            if (rank[near] > rank[node]) == forward:
                told = ((part - messages[near, node])[:, None] + table).min(axis=0)
                messages[node, near] = told - told.min()
    return at


def descend(land: Landscape, start: Positions) -> Positions:
    """Change one node at a time while that lowers the cost within memory; return the result."""
    at = dict(start)
    used = land.used(at)
    todo = set(at)
    while todo:
        node = todo.pop()
        rows, own = land.rows_of[node], land.usages[node]
        total = land.costs[node]
        for near, table in land.links[node].items():
            total = total + table[:, at[near]]
        room = (land.rooms[rows] - used[rows]).min(initial=np.inf)
        fits = own - own[at[node]] <= max(room, 0.0)
        best = int(np.argmin(np.where(fits, total, np.inf)))
        if total[best] < total[at[node]]:
            used[rows] += own[best] - own[at[node]]
            at[node] = best
            todo.update(land.links[node])
    return at
