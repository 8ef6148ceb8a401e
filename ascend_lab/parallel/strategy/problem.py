"""A strategy problem: one strategy per node, node and edge costs, memory over time.

The form is that of the ASPLOS 2025 contest on intra-operator parallelism
(github.com/asplos-contest/2025, IOPDDL.md): choose s_v for every node v to minimise

    sum over v of cost_v[s_v] + sum over edges (u, v) of cost_uv[s_u, s_v]

such that at every time t the usages of the nodes with lower <= t < upper stay within the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ascend_lab.errors import InputError

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
