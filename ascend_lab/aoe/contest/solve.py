"""Solve a contest problem: exact when small, else dynamic programming, merging and annealing."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from ascend_lab.aoe.contest.bound import lower_bound, unfused_floor
from ascend_lab.aoe.contest.cost import Step, schedule_latencies
from ascend_lab.aoe.contest.exact import MOST_OPERATIONS, Path, best_sequence
from ascend_lab.aoe.contest.keep import resident_tensors
from ascend_lab.aoe.contest.merge import anneal, intervals, merge
from ascend_lab.aoe.contest.partition import Partition, bits
from ascend_lab.aoe.contest.price import Prices
from ascend_lab.aoe.contest.problem import Problem
from ascend_lab.errors import CapacityError

RESTARTS = 20
SHORT = 40
"""The operations up to which one order is cut exactly at once, not only as a restart."""
ROUNDS = 40
RESERVE = 0.9
"""The part of the seconds the searches may use; the rest is for residency and the last check."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A checked schedule, the time of each subgraph, and what to compare the sum with.

    `unfused` is the cost of the best schedule found of single operations, `floor` what an ideal one
    would take, `proven` whether every sequence of subgraphs was weighed.
    """

    steps: tuple[Step, ...]
    latencies: tuple[float, ...]
    lower_bound: float
    unfused: float
    floor: float
    proven: bool
    evaluations: int

    @property
    def cost(self) -> float:
        """Return the time of the whole schedule."""
        return sum(self.latencies)

    @property
    def ratio(self) -> float:
        """Return cost / lower bound, 1 when both are 0."""
        return self.cost / self.lower_bound if self.lower_bound else 1.0

    def as_dict(self) -> dict[str, object]:
        """Return the solution with the keys of the contest, its cost and its bound."""
        return {
            "subgraphs": [list(step.operations) for step in self.steps],
            "granularities": [list(step.granularity) for step in self.steps],
            "tensors_to_retain": [list(step.retain) for step in self.steps],
            "traversal_orders": [
                None if step.order is None else list(step.order) for step in self.steps
            ],
            "subgraph_latencies": list(self.latencies),
            "cost": self.cost,
            "lower_bound": self.lower_bound,
        }


def solve(
    problem: Problem,
    seconds: float | None = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
) -> Solution:
    """Return the best schedule found within the seconds or the group evaluations.

    With `seconds=None` the result depends on `evaluations` and `seed` alone. CapacityError when
    some operation fits with no tile.
    """
    prices = Prices(problem, seconds and RESERVE * seconds, evaluations)
    singles = prices.singles()
    for group in singles:
        if prices.choice(group) is None:
            op = next(bits(group))
            needed = f"a fast memory that holds one element of every tensor of operation {op}"
            raise CapacityError(needed, f"{problem.capacity:.0f} elements")
    candidates: list[Path] = [_with_residency(prices, singles)]
    proven = False
    if len(singles) <= MOST_OPERATIONS:
        candidates.append(_with_residency(prices, merge(prices, singles)))
        known = min(sum(schedule_latencies(problem, _steps(prices, p))) for p in candidates)
        exact = best_sequence(prices, known)
        proven = exact is not None
        if exact:
            candidates.append(exact)
    if not proven:
        candidates.append(_with_residency(prices, _search(prices, singles, seed)))
    priced = [(_steps(prices, path), path) for path in candidates]
    checked = [(schedule_latencies(problem, steps), steps) for steps, _ in priced]
    latencies, steps = min(checked, key=lambda pair: sum(pair[0]))
    return Solution(
        tuple(steps),
        tuple(latencies),
        lower_bound(problem),
        prices.total(singles),
        unfused_floor(problem),
        proven or sum(latencies) <= lower_bound(problem) * (1 + 1e-12),
        prices.asked,
    )


def _search(prices: Prices, singles: Partition, seed: int) -> Partition:
    """Return the best partition of merging, of cutting orders, and of annealing from those."""
    whole = prices.relations.everything
    goal, rng = lower_bound(prices.problem), random.Random(seed)
    best = singles
    if prices.legal(whole) and not prices.spent:
        best = min(best, (whole,), key=prices.total)
    if prices.total(best) > goal:
        best = min(best, merge(prices, singles), key=prices.total)
    if prices.total(best) > goal and len(singles) <= SHORT:
        best = min(best, intervals(prices, prices.problem.order), key=prices.total)
    for turn in range(RESTARTS):
        if prices.spent or prices.total(best) <= goal:
            break
        start = best
        if turn % 3 == 2:
            start = merge(prices, intervals(prices, prices.relations.random_order(rng)))
        found = anneal(prices, start, rng, ROUNDS * len(singles), goal)
        best = min(best, found, key=prices.total)
    return best


def _with_residency(prices: Prices, groups: Iterable[int]) -> Path:
    order = prices.relations.order(groups) or []
    return tuple(zip(order, resident_tensors(prices, order), strict=True))


def _steps(prices: Prices, path: Path) -> list[Step]:
    steps = []
    resident: frozenset[int] = frozenset()
    for group, retain in path:
        choice = prices.choice(group, resident, retain)
        assert choice is not None
        inside = sorted(bits(group), key=prices.problem.rank.__getitem__)
        kept = tuple(sorted(retain))
        steps.append(Step(tuple(inside), choice.granularity, kept, choice.order))
        resident = retain
    return steps
