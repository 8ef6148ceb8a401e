"""Solve a strategy problem: exactly with SciPy, by the heuristics without it or out of time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.strategy.local import search
from ascend_lab.parallel.strategy.milp import ROUNDING, scipy_available, solve_milp
from ascend_lab.parallel.strategy.problem import Problem, evaluate
from ascend_lab.parallel.strategy.reduced import Reduced, reduce_problem

Method = Literal["auto", "exact", "heuristic"]
HEURISTIC_SHARE = 0.25
"""Part of a time limit spent on the heuristics before the solver starts."""
REPAIRS = 3
Found = tuple[int, tuple[int, ...], str, int]
"""Cost, strategies, what found them, peak usage."""


@dataclass(frozen=True, slots=True)
class Solution:
    """One strategy per node, what it costs and uses, and what is known about the optimum.

    `proven`: no choice costs less; `lower_bound`: none costs less than this (-inf: unknown);
    `method` is what found it: "milp" or "messages".
    """

    cost: int
    strategies: tuple[int, ...]
    lower_bound: float
    proven: bool
    peak_usage: int
    usage_limit: int | None
    method: str

    @property
    def gap(self) -> float:
        """Largest possible distance to the optimum, as a share of the bound."""
        if self.proven:
            return 0.0
        return (
            (self.cost - self.lower_bound) / self.lower_bound if self.lower_bound > 0 else math.inf
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "cost": self.cost,
            "strategies": list(self.strategies),
            "lower_bound": self.lower_bound,
            "proven": self.proven,
            "peak_usage": self.peak_usage,
            "usage_limit": self.usage_limit,
            "method": self.method,
        }


def solve(
    problem: Problem,
    time_limit_s: float | None = None,
    method: Method = "auto",
    seed: int = 0,
) -> Solution:
    """Return the best strategies found, proven optimal where the solver finishes in time.

    "auto" uses SciPy's solver if it is installed, "heuristic" never, "exact" raises
    UnsupportedError without it. ClusterError if no choice is allowed, or none was found.
    """
    ends = time.monotonic() + (math.inf if time_limit_s is None else time_limit_s)
    small = reduce_problem(problem)
    lower = simple_bound(small)
    found: list[Found] = []

    def offer(positions: dict[int, int] | None, how: str) -> None:
        if positions is not None:
            strategies = small.restore(positions)
            worth = evaluate(problem, strategies)
            if worth.feasible:
                found.append((worth.cost, strategies, how, worth.peak_usage))

    exact = method == "exact" or (method == "auto" and scipy_available())
    if not exact or time_limit_s is not None:
        share = HEURISTIC_SHARE if exact else 1.0
        limit_s = 1e9 if time_limit_s is None else share * (ends - time.monotonic())
        offer(search(small, time_limit_s=limit_s, seed=seed), "messages")
    if exact:
        lower = max(lower, _exact(small, ends, offer))
    if not found:
        raise ClusterError(
            f"an allowed choice of strategies for {problem.name or 'the problem'}",
            "none found, and no proof that there is none",
            "allow more time, or install ascend-lab[exact]" if not exact else "allow more time",
        )
    return _solution(problem, min(found), lower)


def _exact(small: Reduced, ends: float, offer: Any) -> float:
    """Offer what the solver finds and return its lower bound.

    Where the solver's tolerance lets a choice exceed a row by a little, the row is tightened.
    """
    answer = solve_milp(small, ends - time.monotonic())
    lower = answer.lower_bound
    for _ in range(REPAIRS):
        offer(answer.positions, "milp")
        if answer.positions is None or not (excess := _excess(small, answer.positions)):
            break
        tightened = [(nodes, room - excess) for nodes, room in small.rows]
        try:
            answer = solve_milp(replace(small, rows=tightened), ends - time.monotonic())
        except ClusterError:
            break
    return lower


def _excess(small: Reduced, positions: dict[int, int]) -> int:
    """Return by how much positions exceed the worst row, 0 if none."""
    used = (
        sum(int(small.usages[v][positions[v]]) for v in nodes) - room for nodes, room in small.rows
    )
    return max(0, max(used, default=0))


def simple_bound(small: Reduced) -> float:
    """Return the sum of every node's and every table's least cost."""
    parts: Sequence[Any] = (*small.costs.values(), *small.edges.values())
    return small.constant + sum(float(part.min()) for part in parts)


def _solution(problem: Problem, best: Found, lower: float) -> Solution:
    """Return the best choice beside the bound, which is whole because all costs are."""
    cost, strategies, how, peak = best
    if math.isfinite(lower):
        lower = math.ceil(lower - max(1e-6, ROUNDING * abs(lower)))
    proven = lower >= cost - ROUNDING * abs(cost)
    bound = cost if proven else lower
    return Solution(cost, strategies, bound, proven, peak, problem.usage_limit, how)
