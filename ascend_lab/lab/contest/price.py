"""Finds the fastest tile of a group of operations, and the tensors to keep between two groups.

The cost of a group is its time. It is estimated for every candidate tile (width, height, depth of a
step), which the contest calls a granularity, and computed exactly for the best few. Where a sum is
deeper than the tile, a tile takes several steps along it. `Prices` remembers the results.
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
"""With more tiles, the order in which they run is not searched."""
MAX_DEPTHS = 14
"""With more depths of a step, only every n-th of them is a candidate."""
EXACT_CANDIDATES = 4
"""How many of the candidates are computed exactly."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest way found to run a group: its time, tile (w, h, k) and order of tiles."""

    cost: float
    granularity: tuple[int, int, int]
    order: tuple[int, ...] | None = None


def best_tile(group: Group, exact: int = EXACT_CANDIDATES) -> Choice | None:
    """Return the cheapest candidate that fits, or None when none fits.

    All candidates are estimated. The `exact` best of them are computed exactly; where the next tile
    can use a slice of an operand again, also in a zigzag order along rows or columns.
    """
    best: Choice | None = None
    for estimate, tile in _ranked_tiles(group, exact):
        if best is not None and estimate > best.cost:
            break
        for order in _orders(group, tile):
            cost = grid_latency(group, tile, order)
            if best is None or cost < best.cost * (1 - 1e-12):
                best = Choice(cost, tile, order)
    return best


def _ranked_tiles(group: Group, count: int) -> list[tuple[float, tuple[int, int, int]]]:
    """Return (estimate, tile) of the `count` candidates of least estimated time, the best first.

    Of equal estimates the tile with longer steps comes first, then the larger tile.
    """
    native_width, native_height = group.problem.native
    axes = (
        _sides(group.widths, native_width),
        _sides(group.heights, native_height),
        _depths([depth for depth in group.depths if depth > 1] or [1]),
    )
    # an array over all candidates (w, h, k)
    w, h, k = np.ix_(*(np.array(axis, dtype=np.float64) for axis in axes))
    fits = working_set(group, (w, h, k), np.minimum) <= group.problem.capacity
    estimates = np.where(fits, _estimate(group, w, h, k), np.inf)
    flat = estimates.ravel()
    # some more than needed, since equal ones are ranked by their sizes
    lowest = np.argpartition(flat, min(3 * count, flat.size - 1))[: 3 * count]
    lowest = lowest[np.isfinite(flat[lowest])]
    w_places, h_places, k_places = np.unravel_index(lowest, estimates.shape)
    widths = w.ravel()[w_places]
    heights = h.ravel()[h_places]
    depths = k.ravel()[k_places]
    # `lexsort` sorts by its last key first
    ranked = np.lexsort((-widths * heights, -depths, np.round(flat[lowest], 6)))[:count]
    return [
        (float(flat[lowest[i]]), (int(widths[i]), int(heights[i]), int(depths[i]))) for i in ranked
    ]


def _orders(group: Group, shape: tuple[int, int, int]) -> list[tuple[int, ...] | None]:
    """Return the orders of tiles to try; None stands for no order, in which no slice stays."""
    w, h, k = shape
    across = -(-max(group.widths) // w)
    down = -(-max(group.heights) // h)
    roles = {piece.role for piece, _ in group.bundles}
    factor_stays = group.steps(k) == 1 and not roles.isdisjoint({"left", "right"})
    slice_stays = "whole" in roles or factor_stays
    if not slice_stays or not 1 < across * down <= MAX_TILES:
        return [None]
    return [None, snake(across, down), snake(across, down, by_column=True)]


def snake(across: int, down: int, by_column: bool = False) -> tuple[int, ...]:
    """Return the tiles of a grid in zigzag order, along rows or along columns.

    3 across, 2 down: 0, 1, 2, 5, 4, 3.
    """
    grid = np.arange(across * down).reshape(down, across)
    lines = (grid.T if by_column else grid).copy()
    lines[1::2] = lines[1::2, ::-1]
    return tuple(lines.ravel().tolist())


def _sides(lengths: Sequence[int], native: int) -> list[int]:
    """Return tile sides to try: lengths, parts of the longest, multiples and halves of native."""
    longest = max(lengths)
    sides = set(lengths)
    for times in (1, 2, 3, 4, 6, 8):
        sides.add(min(native * times, longest))
    for parts in (1, 2, 3, 4, 5, 6, 7, 8, 10):
        sides.add(-(-longest // parts))
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
    if len(ranked) <= MAX_DEPTHS:
        return ranked
    # 30 depths: every third of them, and the last
    stride = -(-len(ranked) // MAX_DEPTHS)
    return [*ranked[::stride], ranked[-1]]


def _estimate(group: Group, w: Floats, h: Floats, k: Floats) -> Floats:
    """Return an estimate of the time of every candidate.

    A tile has a first step, middle ones and a last one, in which operands and results move. Each
    is taken over all tiles together: max(compute, moves / bandwidth).
    """
    steps = np.ceil(max(group.depths) / k)
    has_one_step = steps == 1
    native_width, native_height = group.problem.native
    compute = np.zeros((w.size, h.size, 1))
    for work in group.works:
        down = _native_tiles(work.height, h, native_height)
        across = _native_tiles(work.width, w, native_width)
        compute += work.base_cost * (down * across)
    compute = compute / steps
    lefts, wholes, rights, first_moves, last_moves = _traffic(group)
    # tiles run along rows if there are at least as many rows of tiles as columns: then a left
    # factor that takes one step stays for all tiles of its row
    by_row = np.ceil(max(group.heights) / h) >= np.ceil(max(group.widths) / w)
    left_moves = np.where(has_one_step & by_row, sum(lefts.values()), _repeated(lefts, w))
    right_moves = np.where(has_one_step & ~by_row, sum(rights.values()), _repeated(rights, h))
    step_moves = (left_moves + right_moves) / steps
    whole_moves = np.where(by_row, sum(wholes.values()), _repeated(wholes, w))
    start_moves = step_moves + (first_moves + whole_moves)
    bandwidth = group.problem.throughput
    # a single step is the first and the last
    only_moves = start_moves + np.where(has_one_step, last_moves, 0.0)
    first_time = np.maximum(compute, only_moves / bandwidth)
    last_time = np.where(
        has_one_step, 0.0, np.maximum(compute, (step_moves + last_moves) / bandwidth)
    )
    middle_time = np.maximum(compute, step_moves / bandwidth) * np.maximum(steps - 2, 0)
    return np.asarray(first_time + last_time + middle_time, dtype=np.float64)


def _native_tiles(length: int, side: Floats, native: int) -> Floats:
    """Return the native tiles along a length that is cut into sides; begun ones count as whole.

    A length of 100 in sides of 40, native 32: 2 + 2 + 1, the last for the remaining 20.
    """
    whole_sides = length // side
    tiles: Floats = whole_sides * np.ceil(side / native) + np.ceil(length % side / native)
    return tiles


Areas = Mapping[int, float]
"""Length -> elements that move again for every tile along that length."""


def _traffic(group: Group) -> tuple[Areas, Areas, Areas, float, float]:
    """Return the areas of left, whole and right factors, and the moves of first and last steps."""
    first_moves = 0.0
    last_moves = 0.0
    areas: dict[str, dict[int, float]] = {"left": {}, "whole": {}, "right": {}}
    for piece, count in group.bundles:
        area = float(count * piece.shape[0] * piece.shape[1])
        if piece.role in areas:
            areas_of_role = areas[piece.role]
            length = piece.height if piece.role == "right" else piece.width
            areas_of_role[length] = areas_of_role.get(length, 0.0) + area
        elif piece.ready == 1:  # an operand or result that waits for no sum
            first_moves += area
        else:
            last_moves += area
    return areas["left"], areas["whole"], areas["right"], first_moves, last_moves


def _repeated(areas: Areas, side: Floats) -> Floats:
    """Return the elements moved when each area moves once for every tile along a length."""
    return sum((np.ceil(length / side) * area for length, area in areas.items()), 0.0 * side)


TensorSet = frozenset[int]
"""Tensors that a group retains in fast memory for the next one."""
NOTHING: TensorSet = frozenset()


class Prices:
    """The cheapest way to run each group, searched once and remembered.

    `evaluations` limits `asked`, the number of different groups that were priced. Groups whose
    slices and operations are alike, as in repeated layers, share one search. Without `seconds` the
    clock plays no part and results repeat exactly.
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
        self._choice_by_key: dict[tuple[int, TensorSet, TensorSet], Choice | None] = {}
        self._choice_by_content: dict[Hashable, Choice | None] = {}
        self._connected_by_mask: dict[int, bool] = {}

    @property
    def progress(self) -> float:
        """Return the part of the budget that is used up, 0 without a budget."""
        counted = self.asked / self.evaluations if self.evaluations else 0.0
        timed = (time.monotonic() - self.start) / self.seconds if self.seconds else 0.0
        return max(counted, timed)

    @property
    def is_spent(self) -> bool:
        """Return whether the budget is used up."""
        return self.seconds == 0 or self.evaluations == 0 or self.progress >= 1

    def is_connected(self, mask: int) -> bool:
        """Return whether shared tensors join all operations of a group, given as a bit mask."""
        if mask not in self._connected_by_mask:
            self._connected_by_mask[mask] = len(self.relations.components(mask)) == 1
        return self._connected_by_mask[mask]

    def choice(
        self, mask: int, resident: TensorSet = NOTHING, retain: TensorSet = NOTHING
    ) -> Choice | None:
        """Return the cheapest way to run a group, or None when no candidate fits."""
        key = (mask, resident, retain)
        if key not in self._choice_by_key:
            self.asked += 1
            group = group_of(self.problem, bits(mask), resident, retain)
            kept_elements = sum(map(self.problem.size, group.kept))
            alike = (frozenset(group.bundles), frozenset(group.works), kept_elements)
            if alike not in self._choice_by_content:
                fits = working_set(group, (1, 1, 1)) <= self.problem.capacity
                self._choice_by_content[alike] = best_tile(group) if fits else None
            self._choice_by_key[key] = self._choice_by_content[alike]
        return self._choice_by_key[key]

    def price(self, mask: int, resident: TensorSet = NOTHING, retain: TensorSet = NOTHING) -> float:
        """Return the least cost of a group, infinite when it does not fit."""
        choice = self.choice(mask, resident, retain)
        return float("inf") if choice is None else choice.cost

    def total(self, groups: Iterable[int]) -> float:
        """Return the cost of groups that keep nothing resident."""
        return sum(self.price(group) for group in groups)

    def singles(self) -> Partition:
        """Return the schedule in which every operation is a subgraph of its own."""
        return tuple(1 << op for op in self.problem.order)


# -- what stays in fast memory from one group to the next ------------------------------------------
MAX_OPTIONS = 8
"""How many operations' results are tried alone; all of them together are always tried."""
Trail = tuple["Trail", TensorSet] | None
"""A linked list of what was retained so far: all earlier groups, then the latest one."""


def options(
    prices: Prices, groups: Sequence[int], place: int, last_reads: dict[int, int]
) -> list[TensorSet]:
    """Return what the group at a place may leave resident for the next: sets of whole tensors.

    `last_reads` has, for each operation, the place of the last group that reads its results from
    outside.
    """
    if place + 1 >= len(groups):
        return [NOTHING]
    problem = prices.problem
    relations = prices.relations
    next_group = groups[place + 1]
    choices = []
    for op in bits(relations.ends(groups[place])[1] & relations.ends(next_group)[0]):
        if last_reads[op] > place + 1:
            continue
        tensors = problem.operations[op].outputs
        is_read = all(tensor in problem.consumers for tensor in tensors)
        if is_read and sum(map(problem.size, tensors)) < problem.capacity:
            choices.append(frozenset(tensors))
    together = frozenset[int]().union(*choices)
    return list(dict.fromkeys([NOTHING, *choices[:MAX_OPTIONS], together]))


def resident_tensors(prices: Prices, groups: Sequence[int]) -> list[TensorSet]:
    """Return what each group retains so that the whole sequence is cheapest.

    Dynamic programming over the sequence; the state is what the group before left resident. When
    the budget runs out nothing more is retained.
    """
    states: dict[TensorSet, tuple[float, Trail]] = {NOTHING: (0.0, None)}
    last_reads = {
        op: place
        for place, group in enumerate(groups)
        for op in bits(prices.relations.ends(group)[0])
    }
    for place, group in enumerate(groups):
        next_states: dict[TensorSet, tuple[float, Trail]] = {}
        for retain in options(prices, groups, place, last_reads):
            for resident, (cost, trail) in states.items():
                if (retain or resident) and prices.is_spent:
                    continue
                total = cost + prices.price(group, resident, retain)
                if retain not in next_states or total < next_states[retain][0]:
                    next_states[retain] = (total, (trail, retain))
        states = next_states
    trail = states[NOTHING][1]
    retained = list[TensorSet]()
    while trail is not None:
        earlier_trail, tensors = trail
        retained.append(tensors)
        trail = earlier_trail
    return retained[::-1]
