"""Solves the scheduling problem of the MLSys 2026 contest.

Operations on matrices are to be divided into groups that run one after the other; what stays inside
a group need not move between slow and fast memory. A set of operations is a bit mask: 0b101 is the
group of operations 0 and 2. Problems of up to 8 operations are solved exactly; in larger ones
groups are merged, and then changed at random (simulated annealing). `problem` reads a problem,
`cost` computes what a group costs, and `price` finds the best tile of a group.
"""

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Some names are imported only to be offered here, which `ruff` would otherwise put one a line.
# fmt: off
# isort: off
from ascend_lab.errors import CapacityError
from ascend_lab.lab.contest.cost import Step, schedule_latencies, step_latency, working_set
from ascend_lab.lab.contest.price import NOTHING, TensorSet, Prices, resident_tensors
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
Sequenced = tuple[tuple[int, TensorSet], ...]
"""Groups in the order in which they run, each with the tensors that it retains."""
State = tuple[int, int, TensorSet]
"""The operations that ran, those whose results lie in slow memory, and the resident tensors."""
RESTARTS = 6
"""How often annealing starts."""
ROUNDS = 40
"""Changes that annealing tries in each start, for each operation of the problem."""
RESERVE = 0.9
"""The part of the seconds that the searches may use; the last part is for the final checks."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A checked schedule, the time of each subgraph, and what to compare the sum with.

    `unfused` is the cost of the best schedule found of single operations, `floor` what an ideal one
    would take. `proven` means that no schedule is cheaper, either because every sequence of
    subgraphs was ruled out or because the cost equals the lower bound.
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
    candidates: list[Sequenced] = [_with_residency(prices, singles)]
    proven = False
    if len(singles) <= MAX_OPERATIONS:
        candidates.append(_with_residency(prices, merge(prices, singles)))
        known_cost = min(sum(schedule_latencies(problem, _steps(prices, p))) for p in candidates)
        exact = best_sequence(prices, known_cost)
        proven = exact is not None
        if exact:
            candidates.append(exact)
    if not proven:
        candidates.append(_with_residency(prices, _search(prices, singles, seed)))
    schedules = [_steps(prices, path) for path in candidates]
    checked = [(schedule_latencies(problem, steps), steps) for steps in schedules]
    latencies, steps = min(checked, key=lambda pair: sum(pair[0]))
    bound = lower_bound(problem)
    return Solution(
        steps=tuple(steps),
        latencies=tuple(latencies),
        lower_bound=bound,
        unfused=prices.total(singles),
        floor=unfused_floor(problem),
        proven=proven or sum(latencies) <= bound * (1 + 1e-12),
        evaluations=prices.asked,
    )


def _search(prices: Prices, singles: Partition, seed: int) -> Partition:
    """Return the best partition of merging, and of annealing that starts `RESTARTS` times."""
    goal = lower_bound(prices.problem)
    rng = random.Random(seed)
    best = singles
    if prices.is_connected(prices.relations.everything) and not prices.is_spent:
        best = min(best, (prices.relations.everything,), key=prices.total)
    merged = merge(prices, singles) if prices.total(best) > goal else best
    best = min(best, merged, key=prices.total)
    for turn in range(RESTARTS):
        if prices.is_spent or prices.total(best) <= goal:
            break
        start = merged if turn % 3 == 2 else best
        annealed = anneal(prices, start, rng, ROUNDS * len(singles), goal)
        best = min(best, annealed, key=prices.total)
    return best


def _with_residency(prices: Prices, groups: Iterable[int]) -> Sequenced:
    """Return groups in an order that can run, each with the tensors to retain for the next."""
    order = prices.relations.order(groups) or []
    return tuple(zip(order, resident_tensors(prices, order), strict=True))


def _steps(prices: Prices, path: Sequenced) -> list[Step]:
    """Return the steps of a schedule: for each group its cheapest tile and order of tiles."""
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
EXACT_BUDGET = 0.5
"""The part of the budget after which the exact search stops without a result."""


def best_sequence(prices: Prices, known_cost: float = float("inf")) -> Sequenced | None:
    """Return the cheapest sequence of (group, retained tensors) below a known cost.

    A* over states (operations run, results in slow memory, resident tensors) with the compute of
    what has not run as the bound: the first complete state taken from the heap is optimal for the
    candidate tiles. The path is empty when none is below `known_cost`, None when the budget ran
    out.
    """
    relations = prices.relations
    groups = [group for group in range(1, relations.everything + 1) if prices.is_connected(group)]
    compute_times = [compute_time(prices.problem, op) for op in range(len(relations.makers))]

    def compute_of(operations: int) -> float:
        """Return the compute of a set of operations."""
        return sum(compute_times[op] for op in bits(operations))

    best: dict[State, float] = {(0, 0, NOTHING): 0.0}
    heap: list[tuple[float, int, State, Sequenced]] = [(0.0, 0, (0, 0, NOTHING), ())]
    limit = known_cost * (1 - 1e-9)
    push_number = 0
    while heap:
        _, _, state, path = heapq.heappop(heap)
        cost = best[state]
        done, stored, resident = state
        if done == relations.everything and not relations.results & ~stored:
            return path
        for group in groups:
            if prices.is_spent or prices.progress > EXACT_BUDGET:
                return None
            rest_compute = compute_of(relations.everything & ~(done | group))
            if cost + compute_of(group) + rest_compute >= limit:
                continue
            for retain, next_state in _successors(prices, group, state):
                total = cost + prices.price(group, resident, retain)
                if total < best.get(next_state, float("inf")) and total + rest_compute < limit:
                    best[next_state] = total
                    push_number += 1  # decides between equal costs: states have no order
                    next_path = (*path, (group, retain))
                    entry = (total + rest_compute, push_number, next_state, next_path)
                    heapq.heappush(heap, entry)
    return ()


def _successors(prices: Prices, group: int, state: State) -> Iterator[tuple[TensorSet, State]]:
    """Yield each set of tensors that a group may retain after a state, and the next state."""
    relations = prices.relations
    problem = prices.problem
    done, stored, resident = state
    needs, leaves = relations.ends(group)
    resident_makers = sum(1 << op for op in {problem.producer[tensor] for tensor in resident})
    if needs & ~(stored | resident_makers) or not leaves & ~stored:
        return
    retainable = list(bits(leaves & ~relations.results))
    for choice in range(1 << len(retainable)):  # bit i of a choice retains the i-th of them
        kept_operations = [op for place, op in enumerate(retainable) if choice >> place & 1]
        retain = frozenset(t for op in kept_operations for t in problem.operations[op].outputs)
        if sum(map(problem.size, retain)) < problem.capacity:
            kept_mask = sum(1 << op for op in kept_operations)
            yield retain, (done | group, stored | (leaves & ~kept_mask), retain)


# -- searches over partitions: merging, annealing --------------------------------------------------
START_TEMPERATURE = 0.004
"""The first temperature of annealing, as a part of the lowest cost so far."""
ROUNDING = 1e-9
"""A smaller gain counts as a rounding error."""


def grown(prices: Prices, groups: Partition, seed: int) -> int:
    """Return the least legal union of groups that holds a set of operations, 0 without one.

    It is closed (`Relations.hull`), and its operations are connected by shared tensors.
    """
    while True:
        wider = prices.relations.hull(seed)
        for group in groups:
            if group & wider:
                wider |= group
        if wider == seed:
            return seed if prices.is_connected(seed) else 0
        seed = wider


def joined(prices: Prices, groups: Partition, seed: int) -> Partition | None:
    """Return the groups with those that contain operations of `seed` joined to one, if legal."""
    new_group = grown(prices, groups, seed)
    if not new_group:
        return None
    partition = (*(group for group in groups if not group & new_group), new_group)
    return partition if prices.relations.order(partition) is not None else None


def neighbours(prices: Prices, groups: Partition) -> list[int]:
    """Return the unions of two groups with an edge between them or that read the same input."""
    relations = prices.relations
    group_of_operation = {op: group for group in groups for op in bits(group)}
    neighbours_of = {group: union(relations.beside, group) & ~group for group in groups}
    return sorted(
        {group | group_of_operation[op] for group in groups for op in bits(neighbours_of[group])}
    )


def merge(prices: Prices, groups: Partition) -> Partition:
    """Join neighbouring groups until no pair gains time.

    Each round joins, the best first, the pairs that gain at least half as much as the best.
    """
    gains: dict[int, float] = {}

    def gain(seed: int) -> float:
        """Return the time that is gained by joining the groups of a set."""
        if not seed:
            return 0.0
        inside = [group for group in groups if group & seed]
        return prices.total(inside) - prices.price(seed) if len(inside) > 1 else 0.0

    while True:
        pairs = neighbours(prices, groups)
        for pair in pairs:
            if pair not in gains and not prices.is_spent:
                gains[pair] = gain(grown(prices, groups, pair))
        ranked = sorted(pairs, key=lambda pair: -gains.get(pair, 0.0))
        best = max(gains.get(ranked[0], 0.0) if ranked else 0.0, 2 * ROUNDING)
        touched = 0
        for pair in ranked:
            if gains.get(pair, 0.0) < best / 2:
                break
            # groups that this round has joined already are left for the next round
            candidate = None if pair & touched else joined(prices, groups, pair)
            if candidate is None:
                continue
            new_group = candidate[-1]
            if not new_group & touched and gain(new_group) > ROUNDING:
                groups = candidate
                touched |= new_group
        if not touched or prices.is_spent:
            return groups


def anneal(
    prices: Prices, groups: Partition, rng: random.Random, rounds: int, goal: float = 0.0
) -> Partition:
    """Return the best partition seen by random joins, splits, moves and copies.

    A worse one is accepted with probability exp(-increase / T), where the temperature T falls from
    `START_TEMPERATURE` times the lowest cost to 0. The search ends with the rounds, with the budget
    or at the goal.
    """
    current = groups
    cost = prices.total(groups)
    best = current
    best_cost = cost
    for step in range(rounds):
        if prices.is_spent or best_cost <= goal * (1 + 1e-12):
            break
        candidate = _changed(prices, current, rng)
        if candidate is None:
            continue
        total = prices.total(candidate)
        temperature = START_TEMPERATURE * best_cost * (1 - step / rounds) ** 2 + 1e-12
        if total <= cost or rng.random() < math.exp(max((cost - total) / temperature, -700.0)):
            current = candidate
            cost = total
            if cost < best_cost * (1 - 1e-12):
                best = current
                best_cost = cost
    return best


def _changed(prices: Prices, groups: Partition, rng: random.Random) -> Partition | None:
    """Return a legal neighbour of a partition, or None when the move tried gives none.

    A group and an operation of it are drawn, then one of five moves.
    """
    relations = prices.relations
    group = rng.choice(groups)
    op = rng.choice(list(bits(group)))
    move = rng.random()
    if move < 0.35:
        return _joined_at(prices, groups, group, op, rng)
    other_groups = [candidate for candidate in groups if candidate != group]
    if move < 0.55:  # split the group into what the operation needs, and the rest
        needed = group & (relations.before[op] | 1 << op)
        changed = [needed, group & ~needed]
    elif move < 0.75:  # split off the operation, with one of its neighbours
        seed = 1 << op
        neighbours_inside = list(bits(relations.beside[op] & group))
        if neighbours_inside:
            seed |= 1 << rng.choice(neighbours_inside)
        split_off = relations.hull(seed) & group
        changed = [split_off, group & ~split_off]
    elif move < 0.9:  # move the operation to a group with which it shares a tensor
        targets = [candidate for candidate in other_groups if relations.touching[op] & candidate]
        if not targets:
            return None
        target = rng.choice(targets)
        other_groups.remove(target)
        changed = [group & ~(1 << op), target | 1 << op]
    else:
        changed = _copied(prices, other_groups, group, op)
    pieces = [piece for mask in changed for piece in relations.components(mask)]
    partition = tuple(dict.fromkeys([*other_groups, *pieces]))
    ordered = relations.order(partition)
    return partition if ordered is not None and relations.covers(ordered) else None


def _joined_at(
    prices: Prices, groups: Partition, group: int, op: int, rng: random.Random
) -> Partition | None:
    """Return the groups with one joined to a group that shares a tensor with its operation."""
    touching = prices.relations.touching[op]
    outside = [candidate for candidate in bits(touching) if not group >> candidate & 1]
    if not outside:
        return None
    # for each group another operation is drawn, which the group has or has not
    hits = [candidate for candidate in groups if candidate >> rng.choice(outside) & 1]
    return joined(prices, groups, group | rng.choice(hits)) if hits else None


def _copied(prices: Prices, other_groups: list[int], group: int, op: int) -> list[int]:
    """Compute an operation again in every group that reads it; return the changed groups.

    These, and a group of that operation alone, are removed from `other_groups`.
    """
    readers = prices.relations.readers[op]
    if not readers & ~group and group.bit_count() == 1:
        return [group]
    changed = [group & ~(1 << op)] if readers & ~group else [group]
    for candidate in list(other_groups):
        if candidate & readers and not candidate >> op & 1:
            other_groups.remove(candidate)
            changed.append(candidate | 1 << op)
        elif candidate == 1 << op:
            other_groups.remove(candidate)
    return changed
