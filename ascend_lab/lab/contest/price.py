"""The price of a group, and of what stays in fast memory between two.

Granularities are estimated, the best few of them priced, prices remembered.
"""

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ascend_lab.lab.contest.cost import Floats, Group, grid_latency, group_of, working_set
from ascend_lab.lab.contest.problem import Partition, Problem, Relations, bits

MAX_TILES = 20_000
EXACT = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest way found to run a group."""

    cost: float
    granularity: tuple[int, int, int]
    order: tuple[int, ...] | None = None


def best_tile(group: Group, exact: int = EXACT) -> Choice | None:
    """Return the cheapest candidate that fits, or None when none fits.

    All candidates are estimated at once; the `exact` best are priced, where a slice can stay for
    the next tile also along rows and along columns, to and fro.
    """
    wide, high = group.problem.native
    steps = _depths([depth for depth in group.depths if depth > 1] or [1])
    axes = _sides(group.widths, wide), _sides(group.heights, high), steps
    w, h, k = np.ix_(*(np.array(axis, dtype=np.float64) for axis in axes))
    fits = working_set(group, (w, h, k), np.minimum) <= group.problem.capacity
    every = np.where(fits, _estimate(group, w, h, k), np.inf)
    estimate = every.ravel()
    first = np.argpartition(estimate, min(3 * exact, estimate.size - 1))[: 3 * exact]
    first = first[np.isfinite(estimate[first])]
    across, down, deep = np.unravel_index(first, every.shape)
    width = w.ravel()[across]
    height = h.ravel()[down]
    depth = k.ravel()[deep]
    ranked = np.lexsort((-width * height, -depth, np.round(estimate[first], 6)))[:exact]
    best: Choice | None = None
    for index in ranked:
        if best is not None and estimate[first[index]] > best.cost:
            break
        shape = (int(width[index]), int(height[index]), int(depth[index]))
        for order in _orders(group, shape):
            latency = grid_latency(group, shape, order)
            if best is None or latency < best.cost * (1 - 1e-12):
                best = Choice(latency, shape, order)
    return best


def _orders(group: Group, shape: tuple[int, int, int]) -> list[tuple[int, ...] | None]:
    w, h, k = shape
    across = -(-max(group.widths) // w)
    down = -(-max(group.heights) // h)
    roles = {piece.role for piece, _ in group.bundles}
    stays = "whole" in roles or (group.steps(k) == 1 and roles & {"left", "right"})
    if not stays or not 1 < across * down <= MAX_TILES:
        return [None]
    return [None, snake(across, down), snake(across, down, by_column=True)]


def snake(across: int, down: int, by_column: bool = False) -> tuple[int, ...]:
    """Return the tiles of a grid to and fro, along rows or along columns."""
    grid = np.arange(across * down).reshape(down, across)
    grid = (grid.T if by_column else grid).copy()
    grid[1::2] = grid[1::2, ::-1]
    return tuple(grid.ravel().tolist())


def _sides(lengths: Sequence[int], native: int) -> list[int]:
    """Return tile sides: the lengths, equal parts of the longest, native times or halves."""
    longest = max(lengths)
    sides = {*lengths, *(min(native * times, longest) for times in (1, 2, 3, 4, 6, 8))}
    sides |= {-(-longest // parts) for parts in (1, 2, 3, 4, 5, 6, 7, 8, 10)}
    side = min(native, longest)
    while side > 1:
        side = -(-side // 2)
        sides.add(side)
    return sorted(sides)


def _depths(depths: Sequence[int]) -> list[int]:
    """Return steps along the sums: divisors of all of them, or powers of two when those are few."""
    common = reduce(math.gcd, depths)
    shortest = min(depths)
    small = {d for d in range(1, math.isqrt(common) + 1) if common % d == 0}
    steps = small | {common // d for d in small}
    if len(steps) < 6:
        steps |= {2**n for n in range(shortest.bit_length())} | {shortest}
    ranked = sorted(steps | {max(depths)})
    return ranked if len(ranked) <= 14 else [*ranked[:: -(-len(ranked) // 14)], ranked[-1]]


def _estimate(group: Group, w: Floats, h: Floats, k: Floats) -> Floats:
    """Return about the time of every candidate: first, middle and last steps added over tiles."""
    steps = np.ceil(max(group.depths) / k)
    one = steps == 1
    wide, high = group.problem.native
    compute = np.zeros((w.size, h.size, 1))  # native tiles begun, all tiles together
    for work in group.works:
        down = work.height // h * np.ceil(h / high) + np.ceil(work.height % h / high)
        across = work.width // w * np.ceil(w / wide) + np.ceil(work.width % w / wide)
        compute += work.base_cost * (down * across)
    compute = compute / steps
    lefts, wholes, rights, first, last = _traffic(group)
    by_row = np.ceil(max(group.heights) / h) >= np.ceil(max(group.widths) / w)
    once, whole_once, right_once = (sum(areas.values()) for areas in (lefts, wholes, rights))
    middle = np.where(one & by_row, once, _again(lefts, w))
    middle = (middle + np.where(one & ~by_row, right_once, _again(rights, h))) / steps
    begun = first + np.where(by_row, whole_once, _again(wholes, w))
    speed = group.problem.throughput
    begin = np.maximum(compute, (middle + begun + np.where(one, last, 0.0)) / speed)
    end = np.where(one, 0.0, np.maximum(compute, (middle + last) / speed))
    rest = np.maximum(compute, middle / speed) * np.maximum(steps - 2, 0)
    return np.asarray(begin + end + rest, dtype=np.float64)


Areas = Mapping[int, float]


def _traffic(group: Group) -> tuple[Areas, Areas, Areas, float, float]:
    """Add up areas: of factors by the length that repeats them, of the first and the last step."""
    roles = ("left", "whole", "right")
    ends = [0.0, 0.0]
    areas: dict[str, dict[int, float]] = {role: {} for role in roles}
    for piece, count in group.bundles:
        area = float(count * piece.shape[0] * piece.shape[1])
        if piece.role in areas:
            own = areas[piece.role]
            length = piece.height if piece.role == "right" else piece.width
            own[length] = own.get(length, 0.0) + area
        else:
            ends[piece.ready != 1] += area
    return areas["left"], areas["whole"], areas["right"], ends[0], ends[1]


def _again(areas: Areas, side: Floats) -> Floats:
    """Return the elements moved when each area moves once for every tile along a length."""
    return sum((np.ceil(length / side) * area for length, area in areas.items()), 0.0 * side)


Kept = frozenset[int]
NOTHING: Kept = frozenset()


class Prices:
    """The cheapest way to run each group asked for, found once; counts the groups.

    Groups whose slices and operations are alike, as in repeated layers, share one search.

    A search looks at `spent` between its steps: true when the seconds or the evaluations are used
    up. Without `seconds` the clock plays no part and results repeat exactly.
    """

    def __init__(
        self, problem: Problem, seconds: float | None = None, evaluations: int | None = None
    ) -> None:
        """Start the clock."""
        self.problem = problem
        self.relations = Relations(problem)
        self.evaluations = evaluations
        self.start = time.monotonic()
        self.seconds = seconds
        self.asked = 0
        self._known: dict[tuple[int, Kept, Kept], Choice | None] = {}
        self._alike: dict[Hashable, Choice | None] = {}
        self._legal: dict[int, bool] = {}

    @property
    def progress(self) -> float:
        """Return the part of the budget that is used up, 0 without a budget."""
        counted = self.asked / self.evaluations if self.evaluations else 0.0
        timed = (time.monotonic() - self.start) / self.seconds if self.seconds else 0.0
        return max(counted, timed)

    @property
    def spent(self) -> bool:
        """Return whether the budget is used up."""
        return self.seconds == 0 or self.evaluations == 0 or self.progress >= 1

    def legal(self, group: int) -> bool:
        """Return whether shared tensors join all operations of a group."""
        if group not in self._legal:
            self._legal[group] = len(self.relations.components(group)) == 1
        return self._legal[group]

    def choice(self, group: int, resident: Kept = NOTHING, retain: Kept = NOTHING) -> Choice | None:
        """Return the cheapest way to run a group, or None when no candidate fits."""
        key = (group, resident, retain)
        if key not in self._known:
            self.asked += 1
            found = group_of(self.problem, bits(group), resident, retain)
            room = sum(map(self.problem.size, found.kept))
            alike = (frozenset(found.bundles), frozenset(found.works), room)
            if alike not in self._alike:
                fits = working_set(found, (1, 1, 1)) <= self.problem.capacity
                self._alike[alike] = best_tile(found) if fits else None
            self._known[key] = self._alike[alike]
        return self._known[key]

    def price(self, group: int, resident: Kept = NOTHING, retain: Kept = NOTHING) -> float:
        """Return the least time of a group, infinite when it does not fit."""
        choice = self.choice(group, resident, retain)
        return float("inf") if choice is None else choice.cost

    def total(self, groups: Iterable[int]) -> float:
        """Return the time of groups that keep nothing resident."""
        return sum(self.price(group) for group in groups)

    def singles(self) -> Partition:
        """Return the schedule in which every operation is a subgraph of its own."""
        return tuple(1 << op for op in self.problem.order)


# -- what stays in fast memory from one group to the next ------------------------------------------
MAX_OPTIONS = 8
Trail = tuple["Trail", Kept] | None
"""What was retained so far, the latest last."""


def options(prices: Prices, groups: Sequence[int], place: int, last: dict[int, int]) -> list[Kept]:
    """Return what the group at a place may leave resident for the next: sets of whole tensors.

    `last` is, for each operation, the place of the last group that reads its results from outside.
    """
    if place + 1 >= len(groups):
        return [NOTHING]
    problem = prices.problem
    relations = prices.relations
    following = groups[place + 1]
    found = []
    for op in bits(relations.ends(groups[place])[1] & relations.ends(following)[0]):
        if last[op] > place + 1:
            continue
        tensors = problem.operations[op].outputs
        wanted = all(tensor in problem.consumers for tensor in tensors)
        if wanted and sum(map(problem.size, tensors)) < problem.capacity:
            found.append(frozenset(tensors))
    together = frozenset[int]().union(*found)
    return list(dict.fromkeys([NOTHING, *found[:MAX_OPTIONS], together]))


def resident_tensors(prices: Prices, groups: Sequence[int]) -> list[Kept]:
    """Return what each group retains so that the whole sequence is cheapest.

    Dynamic programming over the sequence; the state is what the group before left resident. When
    the budget runs out nothing more is retained.
    """
    states: dict[Kept, tuple[float, Trail]] = {NOTHING: (0.0, None)}
    last = {
        op: place
        for place, group in enumerate(groups)
        for op in bits(prices.relations.ends(group)[0])
    }
    for place, group in enumerate(groups):
        following: dict[Kept, tuple[float, Trail]] = {}
        for retain in options(prices, groups, place, last):
            for resident, (cost, trail) in states.items():
                if (retain or resident) and prices.spent:
                    continue
                total = cost + prices.price(group, resident, retain)
                if retain not in following or total < following[retain][0]:
                    following[retain] = (total, (trail, retain))
        states = following
    trail = states[NOTHING][1]
    found = list[Kept]()
    while trail is not None:
        trail, kept = trail
        found.append(kept)
    return found[::-1]
