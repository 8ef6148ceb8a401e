"""Make a strategy problem smaller without losing its optimum.

Parallel edges are added up, usages lose their minimum, moments that can never exceed the limit are
dropped, strategies that no optimum needs are removed, and nodes with at most two neighbours whose
memory does not matter are folded into these. `restore` gives the folded nodes their best strategy.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.strategy.problem import FORBIDDEN, Problem

Costs = NDArray[np.float64]
Whole = NDArray[np.int64]
Folded = tuple[int, Costs, tuple[tuple[int, Costs], ...]]
"""A node that is gone: its costs, and its table against each neighbour it had then."""


@dataclass(slots=True)
class Reduced:
    """Costs (inf: forbidden) and usages by node, tables by pair of nodes, limits of memory.

    `choices` maps positions to strategies of the problem; `links[u][v]` is the table of u's
    positions (rows) by v's; each of `rows` is (nodes, room): their usages must not exceed it.
    """

    costs: dict[int, Costs]
    usages: dict[int, Whole]
    choices: dict[int, Whole]
    links: dict[int, dict[int, Costs]]
    rows: list[tuple[tuple[int, ...], int]]
    constant: float = 0.0
    folded: list[Folded] = field(default_factory=list)

    @property
    def edges(self) -> dict[tuple[int, int], Costs]:
        """Each table once, by (smaller node, larger node)."""
        return {(u, v): t for u, near in self.links.items() for v, t in near.items() if u < v}

    def restore(self, positions: dict[int, int]) -> tuple[int, ...]:
        """Return a strategy for every node of the problem, the folded ones chosen best."""
        full = dict(positions)
        for node, costs, tables in reversed(self.folded):
            total = costs + sum((table[:, full[near]] for near, table in tables), np.zeros(1))
            full[node] = int(np.argmin(total))
        return tuple(int(self.choices[node][full[node]]) for node in sorted(full))

    def forget(self, node: int) -> dict[int, Costs]:
        """Take a node out and return its tables, rows its own positions."""
        near = self.links.pop(node)
        for other in near:
            del self.links[other][node]
        self.folded.append((node, self.costs.pop(node), tuple(near.items())))
        return near

    def join(self, u: int, v: int, table: Costs) -> None:
        """Add a table between two nodes to what is there."""
        old = self.links[u].get(v)
        self.links[u][v] = table if old is None else old + table
        self.links[v][u] = self.links[u][v].T

    @property
    def lower_bound(self) -> float:
        """Sum of every node's and every table's least cost: nothing costs less."""
        parts = (*self.costs.values(), *self.edges.values())
        return self.constant + sum(float(part.min()) for part in parts)

    def below(self, cost: float) -> "Reduced":
        """Return the problem without what cannot be part of a choice of at most `cost`.

        That is every cost which alone lifts the lower bound above it; it becomes inf.
        """
        least = self.lower_bound
        slack = cost - least + 1.0 + 1e-9 * (abs(cost) + abs(least))

        def cheap(table: Costs) -> Costs:
            return np.where(table - table.min() <= slack, table, np.inf)

        costs = {node: cheap(own) for node, own in self.costs.items()}
        links = {u: {v: cheap(t) for v, t in near.items()} for u, near in self.links.items()}
        return replace(self, costs=costs, links=links)


def reduce_problem(problem: Problem) -> Reduced:
    """Return the smaller problem; ClusterError if it shows that no choice is allowed."""
    small = _tables(problem)
    while _without_partners(small) or _dominated(small):
        pass
    _fold(small)
    return small


def _tables(problem: Problem) -> Reduced:
    def floats(values: tuple[int, ...]) -> Costs:
        array = np.array(values, np.float64)
        return np.where(array >= FORBIDDEN, np.inf, array)

    nodes = range(len(problem.nodes))
    costs = {v: floats(problem.nodes[v].costs) for v in nodes}
    usages = {}
    for v in nodes:
        used = np.array(problem.nodes[v].usages, np.int64)
        usages[v] = used - used.min()
    choices = {v: np.arange(len(costs[v])) for v in nodes}
    small = Reduced(costs, usages, choices, {v: {} for v in nodes}, _rows(problem))
    for edge in problem.edges:
        u, v = edge.source, edge.target
        table = floats(edge.costs).reshape(len(costs[u]), len(costs[v]))
        if u == v:
            costs[u] += np.diag(table)
        else:
            small.join(u, v, table)
    return small


def _rows(problem: Problem) -> list[tuple[tuple[int, ...], int]]:
    """Return the largest sets of nodes live at once that can exceed the limit, and their room."""
    limit = problem.usage_limit
    if limit is None:
        return []
    starts, ends = defaultdict(list), defaultdict(list)
    for index, node in enumerate(problem.nodes):
        if node.lower < node.upper and max(node.usages) > 0:
            starts[node.lower].append(index)
            ends[node.upper].append(index)
    times = sorted({*starts, *ends})
    live: set[int] = set()
    found: dict[tuple[int, ...], int] = {}
    for time, after in zip_longest(times, times[1:]):
        live = (live - set(ends[time])) | set(starts[time])
        # A set is largest where some node has just begun and the next change ends one.
        if not starts[time] or (after is not None and not ends[after]):
            continue
        most = sum(max(problem.nodes[v].usages) for v in live)
        room = limit - sum(min(problem.nodes[v].usages) for v in live)
        if room < 0:
            needed = f"strategies within the usage limit of {limit} at time {time}"
            got = f"at least {limit - room}, whatever is chosen"
            raise ClusterError(needed, got, "raise the limit")
        if most > limit:
            varying = (v for v in live if len(set(problem.nodes[v].usages)) > 1)
            found[tuple(sorted(varying))] = room
    return list(found.items())


def _keep(small: Reduced, node: int, good: NDArray[np.bool_]) -> bool:
    """Keep some strategies of a node; tell whether that removed any."""
    if good.all():
        return False
    if not good.any():
        raise ClusterError(
            "a choice of strategies without a forbidden cost", f"node {node} has none left"
        )
    for kind in (small.costs, small.usages, small.choices):
        table: dict[int, Any] = kind
        table[node] = table[node][good]
    for near, costs in small.links[node].items():
        small.links[node][near] = costs[good]
        small.links[near][node] = small.links[node][near].T
    return True


def _without_partners(small: Reduced) -> bool:
    """Remove strategies that are forbidden, alone or with every strategy of a neighbour."""
    removed = False
    todo = set(small.costs)
    while todo:
        node = todo.pop()
        good = np.isfinite(small.costs[node])
        for table in small.links[node].values():
            good = good & np.isfinite(table).any(axis=1)
        if _keep(small, node, good):
            removed = True
            todo.update(small.links[node])
    return removed


def _dominated(small: Reduced) -> bool:
    """Remove strategies that another replaces at no cost and usage, whatever the rest does."""
    bound = {node for nodes, _ in small.rows for node in nodes}
    removed = False
    for node, costs in small.costs.items():
        worse = costs[None, :] - costs[:, None]
        for table in small.links[node].values():
            for index, line in enumerate(table):
                with np.errstate(invalid="ignore"):
                    extra = table - line
                worse[index] += np.where(np.isnan(extra), -np.inf, extra).max(axis=1)
        # worse[i, j]: what taking j instead of i can add at most
        dominates = worse <= 0
        if node in bound:
            used = small.usages[node]
            dominates &= used[None, :] <= used[:, None]
        mutual = dominates & dominates.T
        dominates &= ~mutual | (np.arange(len(costs))[None, :] < np.arange(len(costs))[:, None])
        removed |= _keep(small, node, np.logical_not(dominates.any(axis=1)))
    return removed


def _fold(small: Reduced) -> None:
    """Fold nodes of at most two neighbours whose usage bounds nothing, as long as there are any."""
    bound = {node for nodes, _ in small.rows for node in nodes}
    todo = [node for node in small.costs if node not in bound]
    while todo:
        node = todo.pop()
        if node not in small.costs or len(small.links[node]) > 2:
            continue
        costs, near = small.costs[node], list(small.links[node])
        if len(near) == 2 and _grows(small, node, near[0], near[1]):
            continue
        tables = small.forget(node)
        if not near:
            small.constant += float(costs.min())
        elif len(near) == 1:
            small.costs[near[0]] = small.costs[near[0]] + (tables[near[0]].T + costs).min(axis=1)
        else:
            left, right = (tables[n] for n in near)
            through = [(row[:, None] + costs[:, None] + right).min(axis=0) for row in left.T]
            small.join(near[0], near[1], np.array(through))
        todo += [n for n in near if n not in bound]


def _grows(small: Reduced, node: int, left: int, right: int) -> bool:
    """Tell whether folding makes a new table that is larger than the two it replaces."""
    own, a, b = (len(small.costs[n]) for n in (node, left, right))
    return right not in small.links[left] and a * b > own * (a + b)
