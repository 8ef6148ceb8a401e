"""Solve a contest problem: exact when small, else dynamic programming, merging and annealing."""

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ascend_lab.errors import CapacityError
from ascend_lab.lab.contest.cost import Step, schedule_latencies
from ascend_lab.lab.contest.merge import anneal, intervals, merge, resident_tensors
from ascend_lab.lab.contest.price import NOTHING, Kept, Prices
from ascend_lab.lab.contest.problem import (
    Partition,
    Problem,
    bits,
    compute_time,
    lower_bound,
    unfused_floor,
)

MOST_OPERATIONS = 8
SHARE = 0.5
"""The part of the budget after which the exact search gives up."""
Path = tuple[tuple[int, Kept], ...]
State = tuple[int, int, Kept]


def best_sequence(prices: Prices, known: float = float("inf")) -> Path | None:
    """Return the cheapest sequence of (group, retained tensors) below a known cost.

    A* over states (operations run, results in slow memory, resident tensors) with the compute of
    what has not run as the bound: the first complete state taken from the heap is optimal for the
    candidate tiles. The path is empty when nothing beats `known`, None when the budget ran out.
    """
    relations = prices.relations
    groups = [group for group in range(1, relations.everything + 1) if prices.legal(group)]
    compute = [compute_time(prices.problem, op) for op in range(len(relations.makers))]

    def least(mask: int) -> float:
        return sum(compute[op] for op in bits(mask))

    start: State = (0, 0, NOTHING)
    best = {start: 0.0}
    heap: list[tuple[float, int, State, Path]] = [(least(relations.everything), 0, start, ())]
    limit, number = known * (1 - 1e-9), 0
    while heap:
        _, _, state, path = heapq.heappop(heap)
        cost = best[state]
        if state[0] == relations.everything and not relations.results & ~state[1]:
            return path
        for group in groups:
            if prices.spent or prices.progress > SHARE:
                return None
            rest = least(relations.everything & ~(state[0] | group))
            if cost + least(group) + rest >= limit:
                continue
            for retain, after in _next(prices, group, state):
                total = cost + prices.price(group, state[2], retain)
                if total < best.get(after, float("inf")) and total + rest < limit:
                    best[after] = total
                    number += 1
                    heapq.heappush(heap, (total + rest, number, after, (*path, (group, retain))))
    return ()


def _next(prices: Prices, group: int, state: State) -> Iterator[tuple[Kept, State]]:
    """Yield what a group may retain and the state it leads to."""
    relations, problem = prices.relations, prices.problem
    done, stored, resident = state
    needs, leaves = relations.ends(group)
    held = 0
    for tensor in resident:
        held |= 1 << problem.producer[tensor]
    if needs & ~(stored | held) or not leaves & ~stored:
        return
    able = list(bits(leaves & ~relations.results))
    for choice in range(1 << len(able)):
        keep = [op for place, op in enumerate(able) if choice >> place & 1]
        retain = frozenset(t for op in keep for t in problem.operations[op].outputs)
        if sum(map(problem.size, retain)) < problem.capacity:
            mask = sum(1 << op for op in keep)
            yield retain, (done | group, stored | (leaves & ~mask), retain)


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
    problem: Problem, seconds: float | None = 10.0, evaluations: int | None = None, seed: int = 0
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
    priced = [_steps(prices, path) for path in candidates]
    checked = [(schedule_latencies(problem, steps), steps) for steps in priced]
    latencies, steps = min(checked, key=lambda pair: sum(pair[0]))
    least, found = lower_bound(problem), (tuple(steps), tuple(latencies))
    proven = proven or sum(latencies) <= least * (1 + 1e-12)
    unfused = prices.total(singles), unfused_floor(problem)
    return Solution(*found, least, *unfused, proven, prices.asked)


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
