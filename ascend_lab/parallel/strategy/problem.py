"""A strategy problem: one strategy per node, node and edge costs, memory over time.

The form is that of the ASPLOS 2025 contest on intra-operator parallelism
(github.com/asplos-contest/2025, IOPDDL.md): choose s_v for every node v to minimise

    sum over v of cost_v[s_v] + sum over edges (u, v) of cost_uv[s_u, s_v]

such that at every time t the usages of the nodes with lower <= t < upper stay within the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.limits import json_of, read_file, shown

FORBIDDEN = 10**17
"""A cost from here on means: this choice must not be made."""


@dataclass(frozen=True, slots=True)
class Node:
    """Strategies of one operator: cost and usage of each; live at times lower <= t < upper."""

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
    """Nodes, edges and the usage no moment may exceed (None: no limit); plain integers."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    usage_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a choice of strategies costs, its largest usage and when, and whether it is allowed.

    `forbidden` counts the costs in it that must not be chosen.
    """

    cost: int
    peak_usage: int
    peak_at: int
    forbidden: int
    feasible: bool


def evaluate(problem: Problem, strategies: Sequence[int]) -> Evaluation:
    """Price one strategy per node in exact integers; InputError for a choice that is none."""
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
    """Return (time, usage) of the first moment at which most is in use; (0, 0) without nodes."""
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
"""The contest promises numbers of 64 bits."""


def read_problem(path: str | Path) -> Problem:
    """Read a problem from a .json or .json.gz file; InputError names what is wrong and where."""
    data = json_of(read_file(path, "a readable problem file"), str(path))
    try:
        return parse_problem(data)
    except InputError as error:
        raise InputError(f"{path}: {error.needed}", error.got, error.remedy) from error


def parse_problem(data: Any) -> Problem:
    """Check the decoded JSON of a problem and return it; InputError names the wrong place."""
    problem = _object(data, "the whole file", ("problem",))["problem"]
    fields = _object(problem, "problem", ("nodes", "edges"))
    nodes = _nodes(_object(fields["nodes"], "nodes", ("intervals", "costs", "usages")))
    edges = _edges(_object(fields["edges"], "edges", ("nodes", "costs")), nodes)
    limit = fields.get("usage_limit")
    if limit is not None:
        limit = _whole(limit, "usage_limit", 0)
    return Problem(str(fields.get("name", "")), nodes, edges, limit)


def _nodes(data: dict[str, Any]) -> tuple[Node, ...]:
    intervals = _list(data["intervals"], "nodes.intervals")
    costs = _list(data["costs"], "nodes.costs", len(intervals))
    usages = _list(data["usages"], "nodes.usages", len(intervals))
    found = []
    for index, interval in enumerate(intervals):
        where = f"nodes.intervals[{index}]"
        lower, upper = _numbers(interval, where, 2)
        if lower > upper:
            raise InputError(f"{where} as [lower, upper] with lower <= upper", shown(interval))
        own = _numbers(costs[index], f"nodes.costs[{index}]")
        if not own:
            raise InputError(f"at least one strategy in nodes.costs[{index}]", "none")
        used = _numbers(usages[index], f"nodes.usages[{index}]", len(own), 0)
        found.append(Node(lower, upper, own, used))
    return tuple(found)


def _edges(data: dict[str, Any], nodes: tuple[Node, ...]) -> tuple[Edge, ...]:
    ends = _list(data["nodes"], "edges.nodes")
    costs = _list(data["costs"], "edges.costs", len(ends))
    found = []
    for index, pair in enumerate(ends):
        where = f"edges.nodes[{index}]"
        source, target = _numbers(pair, where, 2, 0)
        unknown = max(source, target)
        if unknown >= len(nodes):
            raise InputError(f"{where} among the {len(nodes)} nodes", f"node {unknown}")
        size = len(nodes[source].costs) * len(nodes[target].costs)
        table = _numbers(costs[index], f"edges.costs[{index}]", size)
        found.append(Edge(source, target, table))
    return tuple(found)


def _object(value: Any, name: str, needed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{name} as a JSON object", type(value).__name__)
    missing = [key for key in needed if key not in value]
    if missing:
        there = ", ".join(map(str, value))[:60] or "none"
        keys = "the key" if len(needed) == 1 else "the keys"
        what = f"{name} as a JSON object with {keys} {', '.join(needed)}"
        raise InputError(what, f"no {', '.join(missing)} among its keys ({there})")
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
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as writers put large costs: 1e18
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} in whole numbers", shown(value))
    if not least <= value <= LARGEST:
        raise InputError(f"{name} from {least} to 2^63 - 1", shown(value))
    return value
