"""Solve a strategy problem: exactly with SciPy, by the heuristics without it or out of time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.strategy.local import search
from ascend_lab.parallel.strategy.milp import scipy_available, solve_milp
from ascend_lab.parallel.strategy.problem import Problem, evaluate
from ascend_lab.parallel.strategy.reduced import Reduced, reduce_problem

Method = Literal["auto", "exact", "heuristic"]
HEURISTIC_SHARE = 0.25
"""Part of a time limit spent on the heuristics before the solver starts."""
FEW_SWEEPS, SWEEPS = 20, 200
"""Sweeps of the heuristics when the solver follows without a time limit, and otherwise."""
REPAIRS = 3
ROUNDING = 1e-9
"""Relative trust in the solver's bound, which is a floating-point number."""
Found = tuple[int, tuple[int, ...], str, int]
"""Cost, strategies, what found them, peak usage."""


@dataclass(frozen=True, slots=True)
class Solution:
    """One strategy per node, what it costs and uses, and what is known about the optimum.

    `proven`: no choice costs less, up to the billionth part that floating point allows;
    `lower_bound`: none costs less than this; `method` is what found it: "milp" or "messages".
    """

    cost: int
    strategies: tuple[int, ...]
    lower_bound: int
    proven: bool
    peak_usage: int
    usage_limit: int | None
    method: str

    @property
    def gap(self) -> float:
        """Largest possible distance to the optimum, as a share of the bound."""
        if self.proven:
            return 0.0
        above = self.cost - self.lower_bound
        return above / self.lower_bound if self.lower_bound > 0 else math.inf

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
    limit_s = math.inf if time_limit_s is None else time_limit_s
    ends = time.monotonic() + limit_s
    small = reduce_problem(problem)
    found: list[Found] = []

    def offer(positions: dict[int, int] | None, how: str) -> None:
        if positions is not None:
            strategies = small.restore(positions)
            worth = evaluate(problem, strategies)
            if worth.feasible:
                found.append((worth.cost, strategies, how, worth.peak_usage))

    exact = method == "exact" or (method == "auto" and scipy_available())
    sweeps = FEW_SWEEPS if exact and time_limit_s is None else SWEEPS
    share = HEURISTIC_SHARE if exact else 1.0
    offer(search(small, sweeps, share * (ends - time.monotonic()), seed), "messages")
    lower = small.lower_bound
    if exact:
        lower = max(lower, _exact(small, found, ends, offer))
    if not found:
        raise ClusterError(
            f"an allowed choice of strategies for {problem.name or 'the problem'}",
            "none found, and no proof that there is none",
            "allow more time, or install ascend-lab[exact]" if not exact else "allow more time",
        )
    return _solution(problem, min(found), lower)


def _exact(small: Reduced, found: list[Found], ends: float, offer: Any) -> float:
    """Offer what the solver finds and return its lower bound.

    What a choice already found makes too dear is left out. Where the solver's tolerance lets a
    choice exceed a row by a little, the row is tightened.
    """
    if found:
        small = small.below(found[0][0])
    try:
        answer = solve_milp(small, ends - time.monotonic())
    except ClusterError:
        if found:  # there is one: the solver's arithmetic failed on huge costs
            return -math.inf
        raise
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


def _solution(problem: Problem, best: Found, lower: float) -> Solution:
    """Return the best choice beside the bound, rounded up to whole because all costs are."""
    cost, strategies, how, peak = best
    trust = 1e-6 + ROUNDING * abs(cost)
    # All costs are whole, so a bound a fraction below is as good.
    proven = math.ceil(lower - trust) >= cost or lower >= cost - trust
    bound = cost if proven else math.ceil(lower - trust)
    return Solution(cost, strategies, bound, proven, peak, problem.usage_limit, how)
