"""Defines strategy problems, reads them from files, and reduces them without losing the optimum.

The form is that of the ASPLOS 2025 contest on intra-operator parallelism
(github.com/asplos-contest/2025, IOPDDL.md): choose one strategy s_v for every node v to minimise

    sum over v of cost_v[s_v] + sum over edges (u, v) of cost_uv[s_u, s_v]

such that at every time t the usages of the nodes with lower <= t < upper stay within the limit.

`reduce_problem` makes it smaller: parallel edges are added up, the minimum is subtracted from each
node's usages and from the limit, times at which the limit cannot be exceeded are dropped, and
strategies that no optimum needs are removed. A node with at most two neighbours whose memory does
not matter is folded: it is removed, and its costs move to the edge between its neighbours.
`restore` gives the folded nodes their best strategy.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import ClusterError, InputError
from ascend_lab.limits import json_of, read_file, shown

FORBIDDEN = 10**17
"""A cost of at least this much means that the choice is forbidden."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operator: cost and usage of each of its strategies; live at times lower <= t < upper."""

    lower: int
    upper: int
    costs: tuple[int, ...]
    usages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """Cost of each pair of strategies of two nodes: `costs[s * width + t]`, `width` of target."""

    source: int
    target: int
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Nodes, edges and the limit of the usage at any time (None: no limit), all in integers."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    usage_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a choice of strategies: its cost, and its largest usage and when.

    `forbidden` counts the forbidden costs that it contains.
    """

    cost: int
    peak_usage: int
    peak_at: int
    forbidden: int
    feasible: bool


def evaluate(problem: Problem, strategies: Sequence[int]) -> Evaluation:
    """Evaluate one strategy per node in exact integers; raise InputError for a wrong choice."""
    nodes = problem.nodes
    if len(strategies) != len(nodes):
        raise InputError(f"{len(nodes)} strategies, one per node", str(len(strategies)))
    for index, (node, chosen) in enumerate(zip(nodes, strategies, strict=True)):
        if not 0 <= chosen < len(node.costs):
            raise InputError(f"a strategy below {len(node.costs)} for node {index}", str(chosen))
    paid = [node.costs[s] for node, s in zip(nodes, strategies, strict=True)]
    for edge in problem.edges:
        width = len(nodes[edge.target].costs)
        paid.append(edge.costs[strategies[edge.source] * width + strategies[edge.target]])
    used = [node.usages[s] for node, s in zip(nodes, strategies, strict=True)]
    at, peak = peak_usage(nodes, used)
    within = problem.usage_limit is None or peak <= problem.usage_limit
    forbidden = sum(cost >= FORBIDDEN for cost in paid)
    return Evaluation(sum(paid), peak, at, forbidden, within and not forbidden)


def peak_usage(nodes: Sequence[Node], used: Sequence[int]) -> tuple[int, int]:
    """Return (time, usage) of the first time with the largest usage; (0, 0) without nodes."""
    # A node of 5 bytes live at 0 <= t < 3 is +5 at time 0 and -5 at time 3; running sums are the
    # usage.
    changes: dict[int, int] = {}
    for node, amount in zip(nodes, used, strict=True):
        if node.lower < node.upper:
            changes[node.lower] = changes.get(node.lower, 0) + amount
            changes[node.upper] = changes.get(node.upper, 0) - amount
    times = sorted(changes)
    levels = list(accumulate(changes[time] for time in times))
    if not levels:
        return 0, 0
    best = max(range(len(times)), key=levels.__getitem__)
    return times[best], levels[best]


# -- from JSON, plain or compressed, every number checked ------------------------------------------
LARGEST = 2**63 - 1
"""Largest number in a problem: the contest promises integers of 64 bits."""


def read_problem(path: str | Path) -> Problem:
    """Read a problem from a .json or .json.gz file; raise InputError, which names the place."""
    data = json_of(read_file(path, "a readable problem file"), str(path))
    try:
        return parse_problem(data)
    except InputError as error:
        raise InputError(f"{path}: {error.needed}", error.got, error.remedy) from error


def parse_problem(data: Any) -> Problem:
    """Return the problem in decoded JSON; raise InputError, which names the wrong place."""
    problem = _object(data, "the whole file", ("problem",))["problem"]
    fields = _object(problem, "problem", ("nodes", "edges"))
    nodes = _nodes(_object(fields["nodes"], "nodes", ("intervals", "costs", "usages")))
    edges = _edges(_object(fields["edges"], "edges", ("nodes", "costs")), nodes)
    limit = fields.get("usage_limit")
    if limit is not None:
        limit = _whole(limit, "usage_limit", 0)
    return Problem(str(fields.get("name", "")), nodes, edges, limit)


def _nodes(data: dict[str, Any]) -> tuple[Node, ...]:
    """Return the nodes of a problem, every number checked."""
    intervals = _list(data["intervals"], "nodes.intervals")
    costs = _list(data["costs"], "nodes.costs", len(intervals))
    usages = _list(data["usages"], "nodes.usages", len(intervals))
    nodes = []
    for index, interval in enumerate(intervals):
        where = f"nodes.intervals[{index}]"
        lower, upper = _numbers(interval, where, 2)
        if lower > upper:
            raise InputError(f"{where} as [lower, upper] with lower <= upper", shown(interval))
        node_costs = _numbers(costs[index], f"nodes.costs[{index}]")
        if not node_costs:
            raise InputError(f"at least one strategy in nodes.costs[{index}]", "none")
        used = _numbers(usages[index], f"nodes.usages[{index}]", len(node_costs), 0)
        nodes.append(Node(lower, upper, node_costs, used))
    return tuple(nodes)


def _edges(data: dict[str, Any], nodes: tuple[Node, ...]) -> tuple[Edge, ...]:
    """Return the edges of a problem, every number checked."""
    ends = _list(data["nodes"], "edges.nodes")
    costs = _list(data["costs"], "edges.costs", len(ends))
    edges = []
    for index, pair in enumerate(ends):
        where = f"edges.nodes[{index}]"
        source, target = _numbers(pair, where, 2, 0)
        unknown = max(source, target)
        if unknown >= len(nodes):
            raise InputError(f"{where} among the {len(nodes)} nodes", f"node {unknown}")
        size = len(nodes[source].costs) * len(nodes[target].costs)
        table = _numbers(costs[index], f"edges.costs[{index}]", size)
        edges.append(Edge(source, target, table))
    return tuple(edges)


def _object(value: Any, name: str, needed: tuple[str, ...]) -> dict[str, Any]:
    """Return a JSON object; raise `InputError` unless it has all the `needed` keys."""
    if not isinstance(value, dict):
        raise InputError(f"{name} as a JSON object", type(value).__name__, "correct it")
    missing = [key for key in needed if key not in value]
    if missing:
        present = ", ".join(map(str, value))[:60] or "none"
        keys = "the key" if len(needed) == 1 else "the keys"
        what = f"{name} as a JSON object with {keys} {', '.join(needed)}"
        raise InputError(what, f"no {', '.join(missing)} among its keys ({present})", "add it")
    return value


def _list(value: Any, name: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{name} as a list", type(value).__name__)
    if length is not None and len(value) != length:
        raise InputError(f"{length} entries in {name}", str(len(value)))
    return value


def _numbers(
    value: Any, name: str, length: int | None = None, least: int = -LARGEST
) -> tuple[int, ...]:
    return tuple(_whole(number, name, least) for number in _list(value, name, length))


def _whole(value: Any, name: str, least: int) -> int:
    """Return a whole number of at least `least`; raise `InputError` for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as writers put large costs: 1e18
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} in whole numbers", shown(value))
    if not least <= value <= LARGEST:
        raise InputError(f"{name} from {least} to 2^63 - 1", shown(value))
    return value


# -- a smaller problem -----------------------------------------------------------------------------
Costs = NDArray[np.float64]
Whole = NDArray[np.int64]
Folded = tuple[int, Costs, tuple[tuple[int, Costs], ...]]
"""A folded node: its number, its costs, and its table with each neighbour at that time."""


@dataclass(slots=True)
class Reduced:
    """A reduced problem: costs (inf: forbidden), usages, cost tables of edges, memory limits.

    A position is the index of a strategy that remains. `choices` maps positions to strategies of
    the problem. `links[u][v]` is the cost table of u's positions (rows) by v's. Each of `rows` is a
    memory limit (nodes, room): the usages of these nodes must not exceed `room` in total.
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
        """The tables, each once, by (smaller node, larger node)."""
        return {(u, v): t for u, tables in self.links.items() for v, t in tables.items() if u < v}

    def restore(self, positions: dict[int, int]) -> tuple[int, ...]:
        """Return a strategy for every node of the problem, the best one for each folded node."""
        restored = dict(positions)
        # The node that was folded last comes first: all its neighbours are decided by now.
        for node, costs, tables in reversed(self.folded):
            total = costs + sum(
                (table[:, restored[neighbour]] for neighbour, table in tables), np.zeros(1)
            )
            restored[node] = int(np.argmin(total))
        return tuple(int(self.choices[node][restored[node]]) for node in sorted(restored))

    def forget(self, node: int) -> dict[int, Costs]:
        """Remove a node and return its tables, whose rows are the node's positions."""
        neighbours = self.links.pop(node)
        for neighbour in neighbours:
            del self.links[neighbour][node]
        self.folded.append((node, self.costs.pop(node), tuple(neighbours.items())))
        return neighbours

    def join(self, u: int, v: int, table: Costs) -> None:
        """Add a table to the table between two nodes, if one exists; else store it."""
        previous = self.links[u].get(v)
        self.links[u][v] = table if previous is None else previous + table
        self.links[v][u] = self.links[u][v].T

    @property
    def lower_bound(self) -> float:
        """The sum of the least costs of all nodes and tables: a lower bound on every choice."""
        parts = (*self.costs.values(), *self.edges.values())
        return self.constant + sum(float(table.min()) for table in parts)

    def below(self, cost: float) -> "Reduced":
        """Return the problem without entries that no choice of at most `cost` can contain.

        These are the costs that alone raise the lower bound above `cost`; they become inf.
        """
        bound = self.lower_bound
        slack = cost - bound + 1.0 + 1e-9 * (abs(cost) + abs(bound))

        def cheap(table: Costs) -> Costs:
            # Lower bound 90 and a choice of cost 100: an entry more than 11 (1 for rounding) above
            # its table's least can be in no better choice.
            return np.where(table - table.min() <= slack, table, np.inf)

        costs = {node: cheap(node_costs) for node, node_costs in self.costs.items()}
        links = {
            u: {v: cheap(t) for v, t in tables_of.items()} for u, tables_of in self.links.items()
        }
        return replace(self, costs=costs, links=links)


def reduce_problem(problem: Problem) -> Reduced:
    """Return the reduced problem; raise ClusterError if it shows that no choice is allowed."""
    reduced = _tables(problem)
    while _remove_forbidden(reduced) or _remove_dominated(reduced):
        pass
    _fold(reduced)
    return reduced


def _tables(problem: Problem) -> Reduced:
    """Return a problem as arrays, parallel edges added up, before anything is removed."""

    def floats(values: tuple[int, ...]) -> Costs:
        array = np.array(values, np.float64)
        return np.where(array >= FORBIDDEN, np.inf, array)

    nodes = range(len(problem.nodes))
    costs = {v: floats(problem.nodes[v].costs) for v in nodes}
    usages = {}
    for v in nodes:
        used = np.array(problem.nodes[v].usages, np.int64)
        # Usages 3 and 5 become 0 and 2; the 3 that is used in any case is subtracted from the limit
        # in `_rows`.
        usages[v] = used - used.min()
    choices = {v: np.arange(len(costs[v])) for v in nodes}
    reduced = Reduced(costs, usages, choices, {v: {} for v in nodes}, _rows(problem))
    for edge in problem.edges:
        u = edge.source
        v = edge.target
        table = floats(edge.costs).reshape(len(costs[u]), len(costs[v]))
        if u == v:
            costs[u] += np.diag(table)
        else:
            reduced.join(u, v, table)
    return reduced


def _rows(problem: Problem) -> list[tuple[tuple[int, ...], int]]:
    """Return the largest sets of nodes live at once that can exceed the limit, with their room.

    The room is what the limit leaves after the least usage of every live node.
    """
    limit = problem.usage_limit
    if limit is None:
        return []
    starts = defaultdict(list)
    ends = defaultdict(list)
    for index, node in enumerate(problem.nodes):
        if node.lower < node.upper and max(node.usages) > 0:
            starts[node.lower].append(index)
            ends[node.upper].append(index)
    times = sorted({*starts, *ends})
    live: set[int] = set()
    row_by_live: dict[tuple[int, ...], int] = {}
    for time, next_time in zip_longest(times, times[1:]):
        live = (live - set(ends[time])) | set(starts[time])
        # A set is largest if a node has just become live and the next event is the end of a node.
        if not starts[time] or (next_time is not None and not ends[next_time]):
            continue
        peak = sum(max(problem.nodes[v].usages) for v in live)
        room = limit - sum(min(problem.nodes[v].usages) for v in live)
        if room < 0:
            needed = f"strategies within the usage limit of {limit} at time {time}"
            got = f"at least {limit - room}, whatever is chosen"
            raise ClusterError(needed, got, "raise the limit")
        if peak > limit:
            varying = (v for v in live if len(set(problem.nodes[v].usages)) > 1)
            row_by_live[tuple(sorted(varying))] = room
    return list(row_by_live.items())


def _remove_others(reduced: Reduced, node: int, kept: NDArray[np.bool_]) -> bool:
    """Keep only the strategies `kept` of a node; tell whether that removed any."""
    if kept.all():
        return False
    if not kept.any():
        raise ClusterError(
            "a choice of strategies without a forbidden cost", f"node {node} has none left"
        )
    for kind in (reduced.costs, reduced.usages, reduced.choices):
        table: dict[int, Any] = kind
        table[node] = table[node][kept]
    for neighbour, costs in reduced.links[node].items():
        reduced.links[node][neighbour] = costs[kept]
        reduced.links[neighbour][node] = reduced.links[node][neighbour].T
    return True


def _remove_forbidden(reduced: Reduced) -> bool:
    """Remove strategies that are forbidden, alone or with every strategy of a neighbour."""
    removed = False
    pending = set(reduced.costs)
    while pending:
        node = pending.pop()
        kept = np.isfinite(reduced.costs[node])
        for table in reduced.links[node].values():
            kept = kept & np.isfinite(table).any(axis=1)
        if _remove_others(reduced, node, kept):
            removed = True
            pending.update(reduced.links[node])
    return removed


def _remove_dominated(reduced: Reduced) -> bool:
    """Remove strategies that can always be replaced by another one without more cost or usage."""
    limited = {node for nodes, _ in reduced.rows for node in nodes}
    removed = False
    for node, costs in reduced.costs.items():
        # Costs (3, 5): worse is [[0, 2], [-2, 0]]; taking strategy 0 instead of 1 adds at most -2.
        worse = costs[None, :] - costs[:, None]
        for table in reduced.links[node].values():
            for index, line in enumerate(table):
                with np.errstate(invalid="ignore"):
                    # inf - inf is NaN: both choices are forbidden with that neighbour's strategy,
                    # so neither is worse.
                    extra = table - line
                worse[index] += np.where(np.isnan(extra), -np.inf, extra).max(axis=1)
        # worse[i, j]: the largest cost that taking j instead of i can add
        dominates = worse <= 0
        if node in limited:
            used = reduced.usages[node]
            dominates &= used[None, :] <= used[:, None]
        mutual = dominates & dominates.T
        dominates &= ~mutual | (np.arange(len(costs))[None, :] < np.arange(len(costs))[:, None])
        removed |= _remove_others(reduced, node, np.logical_not(dominates.any(axis=1)))
    return removed


def _fold(reduced: Reduced) -> None:
    """Fold nodes with at most two neighbours that are in no memory limit, until none is left."""
    limited = {node for nodes, _ in reduced.rows for node in nodes}
    pending = [node for node in reduced.costs if node not in limited]
    while pending:
        node = pending.pop()
        if node not in reduced.costs or len(reduced.links[node]) > 2:
            continue
        costs = reduced.costs[node]
        neighbours = list(reduced.links[node])
        if len(neighbours) == 2 and _grows(reduced, node, neighbours[0], neighbours[1]):
            continue
        tables = reduced.forget(node)
        if not neighbours:
            reduced.constant += float(costs.min())
        elif len(neighbours) == 1:
            reduced.costs[neighbours[0]] = reduced.costs[neighbours[0]] + (
                tables[neighbours[0]].T + costs
            ).min(axis=1)
        else:
            first_table, second_table = (tables[n] for n in neighbours)
            # The cost of the cheapest strategy of the folded node, for each pair of its neighbours'
            # strategies.
            through = [
                (row[:, None] + costs[:, None] + second_table).min(axis=0) for row in first_table.T
            ]
            reduced.join(neighbours[0], neighbours[1], np.array(through))
        pending += [n for n in neighbours if n not in limited]


def _grows(reduced: Reduced, node: int, left: int, right: int) -> bool:
    """Tell whether folding makes a new table that is larger than the two it replaces."""
    # 4 strategies between neighbours of 10 and 10: a table of 100 in place of 40 + 40 grows;
    # between 5 and 5, 25 in place of 20 + 20 does not.
    choices, a, b = (len(reduced.costs[n]) for n in (node, left, right))
    return right not in reduced.links[left] and a * b > choices * (a + b)
