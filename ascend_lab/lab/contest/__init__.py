"""The scheduling problem of the MLSys 2026 contest: parse, price, bound and solve it.

Solve a contest problem: exact when small, else by merging and annealing.
"""

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# fmt: off
# isort: off
from ascend_lab.errors import CapacityError
from ascend_lab.lab.contest.cost import Step, schedule_latencies, step_latency, working_set
from ascend_lab.lab.contest.price import NOTHING, Kept, Prices, resident_tensors
from ascend_lab.lab.contest.problem import (
    Operation, Partition, Problem, bits, compute_time, lower_bound, read_problem, unfused_floor,
    union,
)
# fmt: on
# isort: on

__all__ = [
    "Operation",
    "Problem",
    "Solution",
    "Step",
    "lower_bound",
    "read_problem",
    "schedule_latencies",
    "solve",
    "step_latency",
    "unfused_floor",
    "working_set",
]
Path = tuple[tuple[int, Kept], ...]
"""Groups in the order they run, and what each retains."""
State = tuple[int, int, Kept]
"""The operations run, those whose results lie in slow memory, and the resident tensors."""
RESTARTS = 6
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
            "traversal_orders": [step.order and list(step.order) for step in self.steps],
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
    if len(singles) <= MAX_OPERATIONS:
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
    least = lower_bound(problem)
    found = (tuple(steps), tuple(latencies))
    proven = proven or sum(latencies) <= least * (1 + 1e-12)
    unfused = prices.total(singles), unfused_floor(problem)
    return Solution(*found, least, *unfused, proven, prices.asked)


def _search(prices: Prices, singles: Partition, seed: int) -> Partition:
    """Return the best partition of merging, and of annealing from there again and again."""
    goal = lower_bound(prices.problem)
    rng = random.Random(seed)
    best = singles
    if prices.legal(prices.relations.everything) and not prices.spent:
        best = min(best, (prices.relations.everything,), key=prices.total)
    merged = merge(prices, singles) if prices.total(best) > goal else best
    best = min(best, merged, key=prices.total)
    for turn in range(RESTARTS):
        if prices.spent or prices.total(best) <= goal:
            break
        start = merged if turn % 3 == 2 else best
        found = anneal(prices, start, rng, ROUNDS * len(singles), goal)
        best = min(best, found, key=prices.total)
    return best


def _with_residency(prices: Prices, groups: Iterable[int]) -> Path:
    order = prices.relations.order(groups) or []
    return tuple(zip(order, resident_tensors(prices, order), strict=True))


def _steps(prices: Prices, path: Path) -> list[Step]:
    steps = list[Step]()
    resident = NOTHING
    for group, retain in path:
        choice = prices.choice(group, resident, retain)
        assert choice is not None
        inside = tuple(sorted(bits(group), key=prices.problem.rank.__getitem__))
        steps.append(Step(inside, choice.granularity, tuple(sorted(retain)), choice.order))
        resident = retain
    return steps


# -- the exact search ------------------------------------------------------------------------------
MAX_OPERATIONS = 8
SHARE = 0.5
"""The part of the budget after which the exact search gives up."""


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

    best: dict[State, float] = {(0, 0, NOTHING): 0.0}
    heap: list[tuple[float, int, State, Path]] = [(0.0, 0, (0, 0, NOTHING), ())]
    limit = known * (1 - 1e-9)
    number = 0
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
    relations = prices.relations
    problem = prices.problem
    done, stored, resident = state
    needs, leaves = relations.ends(group)
    held = sum(1 << op for op in {problem.producer[tensor] for tensor in resident})
    if needs & ~(stored | held) or not leaves & ~stored:
        return
    able = list(bits(leaves & ~relations.results))
    for choice in range(1 << len(able)):
        keep = [op for place, op in enumerate(able) if choice >> place & 1]
        retain = frozenset(t for op in keep for t in problem.operations[op].outputs)
        if sum(map(problem.size, retain)) < problem.capacity:
            mask = sum(1 << op for op in keep)
            yield retain, (done | group, stored | (leaves & ~mask), retain)


# -- searches over partitions: merging, annealing --------------------------------------------------
HEAT = 0.004
"""The first temperature of annealing, as a part of the cost."""
LEAST = 1e-9
"""A smaller gain is rounding."""


def grown(prices: Prices, groups: Partition, seed: int) -> int:
    """Return the least legal union of groups that holds a set of operations, 0 without one."""
    while True:
        wide = prices.relations.hull(seed)
        for group in groups:
            if group & wide:
                wide |= group
        if wide == seed:
            return seed if prices.legal(seed) else 0
        seed = wide


def joined(prices: Prices, groups: Partition, seed: int) -> Partition | None:
    """Return the groups with those that a set of operations touches made one, if that is legal."""
    union = grown(prices, groups, seed)
    if not union:
        return None
    found = (*(group for group in groups if not group & union), union)
    return found if prices.relations.order(found) is not None else None


def neighbours(prices: Prices, groups: Partition) -> list[int]:
    """Return the unions of two groups with an edge between them or that read the same input."""
    relations = prices.relations
    home = {op: group for group in groups for op in bits(group)}
    near = {group: union(relations.beside, group) & ~group for group in groups}
    return sorted({group | home[op] for group in groups for op in bits(near[group])})


def merge(prices: Prices, groups: Partition) -> Partition:
    """Join neighbours until no pair gains: in each round those that gain most or half of that."""
    gains: dict[int, float] = {}

    def gain(seed: int) -> float:
        if not seed:
            return 0.0
        inside = [group for group in groups if group & seed]
        return prices.total(inside) - prices.price(seed) if len(inside) > 1 else 0.0

    while True:
        pairs = neighbours(prices, groups)
        for pair in pairs:
            if pair not in gains and not prices.spent:
                gains[pair] = gain(grown(prices, groups, pair))
        ranked = sorted(pairs, key=lambda pair: -gains.get(pair, 0.0))
        best = max(gains.get(ranked[0], 0.0) if ranked else 0.0, 2 * LEAST)
        touched = 0
        for pair in ranked:
            if gains.get(pair, 0.0) < best / 2:
                break
            found = None if pair & touched else joined(prices, groups, pair)
            if found and not found[-1] & touched and gain(found[-1]) > LEAST:
                groups = found
                touched = touched | found[-1]
        if not touched or prices.spent:
            return groups


def anneal(
    prices: Prices, groups: Partition, rng: random.Random, rounds: int, goal: float = 0.0
) -> Partition:
    """Return the best partition seen by random joins, splits, moves and copies.

    A worse one is accepted with probability exp(-increase / T), T falling from HEAT of the best.
    Ends with the rounds, with the budget or at the goal.
    """
    now = groups
    cost = prices.total(groups)
    best = now
    least = cost
    for step in range(rounds):
        if prices.spent or least <= goal * (1 + 1e-12):
            break
        found = _changed(prices, now, rng)
        if found is None:
            continue
        total = prices.total(found)
        heat = HEAT * least * (1 - step / rounds) ** 2 + 1e-12
        if total <= cost or rng.random() < math.exp(max((cost - total) / heat, -700.0)):
            now = found
            cost = total
            if cost < least * (1 - 1e-12):
                best = now
                least = cost
    return best


def _changed(prices: Prices, groups: Partition, rng: random.Random) -> Partition | None:
    """Return a legal neighbour of a partition, or None when the move tried gives none."""
    relations = prices.relations
    group = rng.choice(groups)
    op = rng.choice(list(bits(group)))
    kind = rng.random()
    if kind < 0.35:
        near = [other for other in bits(relations.touching[op]) if not group >> other & 1]
        if not near:
            return None
        home = [other for other in groups if other >> rng.choice(near) & 1]
        return joined(prices, groups, group | rng.choice(home)) if home else None
    rest = [other for other in groups if other != group]
    if kind < 0.55:
        ahead = group & (relations.before[op] | 1 << op)
        parts = [ahead, group & ~ahead]
    elif kind < 0.75:
        near = list(bits(relations.beside[op] & group))
        part = relations.hull(1 << op | (1 << rng.choice(near) if near else 0)) & group
        parts = [part, group & ~part]
    elif kind < 0.9:
        near = [other for other in rest if relations.touching[op] & other]
        if not near:
            return None
        other = rng.choice(near)
        rest.remove(other)
        parts = [group & ~(1 << op), other | 1 << op]
    else:
        parts = _copied(prices, rest, group, op)
    pieces = [piece for part in parts for piece in relations.components(part)]
    found = tuple(dict.fromkeys([*rest, *pieces]))
    ordered = relations.order(found)
    return found if ordered is not None and relations.covers(ordered) else None


def _copied(prices: Prices, rest: list[int], group: int, op: int) -> list[int]:
    """Compute an operation again in every group that reads it, or only once if it is copied."""
    readers = prices.relations.readers[op]
    if not readers & ~group and group.bit_count() == 1:
        return [group]
    parts = [group & ~(1 << op)] if readers & ~group else [group]
    for other in list(rest):
        if other & readers and not other >> op & 1:
            rest.remove(other)
            parts.append(other | 1 << op)
        elif other == 1 << op:
            rest.remove(other)
    return parts
