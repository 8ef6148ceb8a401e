"""Memory planning: gives every buffer an offset, so that buffers alive at one time share no byte.

Heuristics place buffers one by one: fast and good, without a guarantee. If their best plan is above
the goal and OR-tools is installed, its solver CP-SAT looks for a lower plan (`packing`).
`hot_first` prefers addresses that were freed last: their lines are still in the cache, where the
next buffer overwrites them. An address that has not been used for long costs an eviction.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ascend_lab.compiler.buffers import Buffer, Offsets, Rectangle
from ascend_lab.compiler.packing import cpsat_available, pack_cpsat
from ascend_lab.errors import GraphError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Plan:
    """An offset in bytes for every buffer.

    `height_bytes` is the memory that the plan takes, `lower_bound_bytes` a bound for every plan,
    both with sizes rounded up to the alignment. `optimal` means that no plan has a smaller height.
    """

    offsets: Mapping[Hashable, int]
    height_bytes: int
    lower_bound_bytes: int
    method: str
    optimal: bool

    @property
    def gap(self) -> float:
        """Return height over lower bound, minus 1."""
        return self.height_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def aligned(size_bytes: int, alignment_bytes: int) -> int:
    """Return the size rounded up to a multiple of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def rounded(buffers: Iterable[Buffer], alignment_bytes: int) -> list[Buffer]:
    """Return the buffers with sizes rounded up to the alignment.

    Plain buffers are stacked on each other, so that rounded sizes keep all offsets aligned. If any
    buffer has a given offset, gaps or an alignment, that does not suffice: then each buffer gets
    the alignment as a condition.
    """
    if alignment_bytes < 1:
        raise GraphError("an alignment of at least 1 byte", str(alignment_bytes))
    sized = [replace(b, size_bytes=aligned(b.size_bytes, alignment_bytes)) for b in buffers]
    if len({b.id for b in sized}) < len(sized):
        raise GraphError("a different id for each buffer", "an id that stands twice")
    if all(b.is_plain for b in sized):
        return sized
    return [replace(b, alignment_bytes=math.lcm(b.alignment_bytes, alignment_bytes)) for b in sized]


def peak_live_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the largest number of bytes alive at one time: no plan is lower."""
    rectangles = [r for b in buffers for r in b.rectangles]
    live = peak = 0
    for is_birth, k in events_of(rectangles):
        live += rectangles[k].size_bytes if is_birth else -rectangles[k].size_bytes
        peak = max(peak, live)
    return peak


def least_height_bytes(buffers: Sequence[Buffer]) -> int:
    """Return a lower bound of the height: peak of live bytes or the largest end of one buffer.

    The whole buffer must lie in the memory, even if only parts of it are ever alive at one time.
    """
    ends = [(b.offset or 0) + b.size_bytes for b in buffers if b.size_bytes]
    return max(peak_live_bytes(buffers), *ends, 0)


def share(buffers: Sequence[Buffer], pairs: Iterable[tuple[Hashable, Hashable]]) -> list[Buffer]:
    """Merge buffers that may use the same bytes, such as the input and output of an operator.

    Each pair of ids becomes one buffer with the first id, alive from the earlier start to
    the later end and as large as the larger. Chains of pairs become one buffer. Raises GraphError
    for unknown ids.
    """
    buffers_by_id = {b.id: b for b in buffers}
    merged_into: dict[Hashable, Hashable] = {}

    def buffer_of(name: Hashable) -> Buffer:
        """Return the buffer into which this id has been merged so far."""
        # with pairs (a, b) and (b, c), the id b already stands for the buffer a
        kept = name
        while kept in merged_into:
            kept = merged_into[kept]
        if kept not in buffers_by_id:
            raise GraphError("ids of buffers to share", str(kept))
        return buffers_by_id[kept]

    for first_id, second_id in pairs:
        a = buffer_of(first_id)
        b = buffer_of(second_id)
        if a.id != b.id:
            merged_into[b.id] = a.id
            size = max(a.size_bytes, b.size_bytes)
            buffers_by_id[a.id] = Buffer(a.id, min(a.lower, b.lower), max(a.upper, b.upper), size)
            del buffers_by_id[b.id]
    return list(buffers_by_id.values())


# -- checks of a plan -----------------------------------------------------------------------------
def verify(plan: Plan, buffers: Sequence[Buffer], alignment_bytes: int = 1) -> None:
    """Raise GraphError unless every buffer has its own bytes below the plan's height."""
    if set(plan.offsets) != {b.id for b in buffers}:
        raise GraphError("an offset for each buffer and no other", f"{len(plan.offsets)} offsets")
    for b in buffers:
        begin = plan.offsets[b.id]
        unit = math.lcm(b.alignment_bytes, alignment_bytes)
        if b.size_bytes and (begin < 0 or begin % unit or begin + b.size_bytes > plan.height_bytes):
            needed = f"offsets from 0, multiples of {unit}, and ends up to {plan.height_bytes}"
            raise GraphError(needed, f"buffer {b.id} at {begin} .. {begin + b.size_bytes}")
        if b.offset is not None and begin != b.offset:
            raise GraphError(f"buffer {b.id} at {b.offset}, as given", str(begin))
    check_apart(buffers, plan.offsets)


def check_apart(buffers: Sequence[Buffer], offsets: Offsets | Mapping[Hashable, int]) -> None:
    """Raise GraphError if two buffers use the same byte at the same time."""
    placed = [(k, offsets[b.id], r) for k, b in enumerate(buffers) for r in b.rectangles]
    owner = np.array([k for k, _, _ in placed], np.int64)
    births = np.array([r.lower for _, _, r in placed], np.int64)
    deaths = np.array([r.upper for _, _, r in placed], np.int64)
    start = np.array([at + r.first for _, at, r in placed], np.int64)
    end = np.array([at + r.last for _, at, r in placed], np.int64)
    for i, (k, _, r) in enumerate(placed):
        in_time = (births < r.upper) & (deaths > r.lower)
        in_space = (start < end[i]) & (end > start[i])
        clash = in_time & in_space & (owner != k)
        if clash.any():
            clashing_id = buffers[owner[int(clash.argmax())]].id
            needed = "live buffers with bytes of their own"
            raise GraphError(needed, f"{buffers[k].id} and {clashing_id} overlap")


def events_of(buffers: Sequence[Buffer | Rectangle]) -> list[tuple[bool, int]]:
    """Return (is birth, index of the buffer) in order of time; at equal times, deaths first."""
    deaths = [(b.upper, False, k) for k, b in enumerate(buffers)]
    births = [(b.lower, True, k) for k, b in enumerate(buffers)]
    return [(is_birth, k) for _, is_birth, k in sorted(deaths + births)]


def simulate_writes(buffers: Sequence[Buffer], plan: Plan) -> None:
    """Check a plan in a real array: each buffer writes its number at birth and checks it at death.

    Bytes of no live buffer hold a special number.
    Raises GraphError when a number was overwritten or a buffer lies outside the memory.
    """
    poison = 0xFFFF
    placed = [(b, r) for b in buffers for r in b.rectangles]
    # for each byte the number of the rectangle that wrote it last, in two bytes: a plan of 1 GiB
    # takes 2 GiB here
    memory = np.full(plan.height_bytes, poison, np.uint16)
    for is_birth, k in events_of([r for _, r in placed]):
        b, r = placed[k]
        begin = plan.offsets[b.id] + r.first
        place = memory[begin : begin + r.size_bytes]
        if len(place) < r.size_bytes:
            raise GraphError("every byte inside the memory", f"{b.id} ends outside")
        if not is_birth and np.any(place != k % poison):
            raise GraphError("the bytes a buffer wrote until its death", f"{b.id} was overwritten")
        place[:] = k % poison if is_birth else poison


# -- heuristics -----------------------------------------------------------------------------------
Order = Callable[[Buffer], tuple[int, ...]]
ENDLESS = 1 << 62
ORDERS: dict[str, Order] = {
    "size": lambda b: (-b.size_bytes, b.lower - b.upper, b.lower),
    "start": lambda b: (b.lower, -b.size_bytes),
    "life": lambda b: (b.lower - b.upper, -b.size_bytes),
}
"""Sort keys by name: the largest first, the earliest born (as at run time), the longest-lived."""


def place(buffers: Sequence[Buffer], order: Order, *, tightest: bool = False) -> Offsets:
    """Return an offset for each buffer, placed one after the other in the given order.

    A rectangle of bytes [first, last) must not overlap a placed one at addresses [start, end) that
    lives at the same time: offsets between start - last and end - first are forbidden. Of the gaps
    between forbidden intervals the buffer takes the lowest, or the tightest that fits. Buffers with
    a given offset come first.
    """
    offsets: Offsets = {}
    total = sum(len(b.rectangles) for b in buffers)
    placed = np.empty((4, total), np.int64)  # births, deaths, starts, ends; by start
    count = 0
    for b in sorted(buffers, key=lambda b: (b.offset is None, order(b))):
        rectangles = b.rectangles
        at = 0
        if b.offset is not None:
            at = b.offset
        elif rectangles:
            at = _free_offset(placed[:, :count], rectangles, b.alignment_bytes, tightest)
        for r in rectangles:
            # insert the rectangle so that columns stay sorted by start
            row = int(placed[2, :count].searchsorted(at + r.first))
            placed[:, row + 1 : count + 1] = placed[:, row:count]
            placed[:, row] = r.lower, r.upper, at + r.first, at + r.last
            count += 1
        offsets[b.id] = at
    return offsets


def _free_offset(
    placed: np.ndarray, rectangles: Sequence[Rectangle], alignment_bytes: int, tightest: bool
) -> int:
    """Return an offset for a buffer's rectangles among placed ones, sorted by their start."""
    lower, upper, starts, ends = placed
    # an offset may be at most `below`, or at least `above`
    upper_parts = []
    lower_parts = []
    for r in rectangles:
        same_time = (lower < r.upper) & (upper > r.lower)
        upper_parts.append(starts[same_time] - r.last)
        lower_parts.append(ends[same_time] - r.first)
    upper_limits = np.concatenate(upper_parts)
    lower_limits = np.concatenate(lower_parts)
    # intervals of one rectangle are sorted by start already; those of several are merged
    if len(rectangles) > 1:
        by_start = np.argsort(upper_limits, kind="stable")
        upper_limits = upper_limits[by_start]
        lower_limits = lower_limits[by_start]
    # candidate i lies above all intervals that start before interval i
    candidates = np.maximum.accumulate(np.append(0, lower_limits))
    candidates = -(-candidates // alignment_bytes) * alignment_bytes
    free_bytes = np.append(upper_limits, ENDLESS) - candidates
    fits = np.flatnonzero(free_bytes >= 0)
    chosen = free_bytes[fits].argmin() if tightest else 0
    return int(candidates[fits[chosen]])


def height(buffers: Iterable[Buffer], offsets: Offsets) -> int:
    """Return the end of the buffer with the largest address."""
    return max((offsets[b.id] + b.size_bytes for b in buffers if b.size_bytes), default=0)


# -- a warm cache ---------------------------------------------------------------------------------
MAX_UNITS = 1 << 20
"""Largest number of units into which memory is divided; the unit grows with the memory."""
MAX_UNIT_VISITS = 1 << 28
"""Most looks at a unit by all buffers together, as each buffer looks at all units."""


def hot_first(buffers: Sequence[Buffer], slack: float = 0.25) -> Offsets:
    """Place buffers in order of birth, each in the free window that was freed last on average.

    The memory to choose from is (1 + slack) times the peak of live bytes; if no window in it is
    large enough, it grows as needed. The rule is greedy and may leave pieces too small for later
    buffers: compare its `reuse_distance_bytes` with that of other plans. Raises GraphError for
    buffers with an alignment, an offset or gaps.
    """
    special = [b.id for b in buffers if not b.is_plain]
    if special:
        needed = "buffers that ask for bytes and a life only"
        raise GraphError(needed, f"{special[0]} asks for more", "choose another rule than l2")
    unit = _unit_bytes(buffers)
    order = sorted(buffers, key=ORDERS["start"])
    limit = int(peak_live_bytes(buffers) * (1 + slack)) // unit
    freed = np.zeros(limit, np.int64)  # bytes written by the time each unit was freed
    live = np.zeros(limit, np.int64)
    offsets: Offsets = {}
    # the clock is the number of bytes written: what was freed at 900 is warmer than at 100
    written = 0
    for is_birth, k in events_of(order):
        b = order[k]
        count = aligned(b.size_bytes, unit) // unit
        if not is_birth:
            start = offsets[b.id] // unit
            live[start : start + count] = 0
            freed[start : start + count] = written
            continue
        start = _hottest_window(freed, live, count)
        if start < 0:
            # no free window is large enough: grow from the highest unit in use
            start = int(live.nonzero()[0].max(initial=-1)) + 1
            new_units = np.zeros(start + count - len(live), np.int64)
            freed = np.append(freed, new_units)
            live = np.append(live, new_units)
        live[start : start + count] = 1
        offsets[b.id] = start * unit
        written += b.size_bytes
    return offsets


def reuse_distance_bytes(buffers: Sequence[Buffer], offsets: Offsets) -> float:
    """Return how many bytes are written, on average, between a byte's death and its next write.

    For the first write of a byte, all bytes written before count. A cache larger than this distance
    tends to hold the line still when it is written again.
    """
    unit = _unit_bytes(buffers)
    order = sorted(buffers, key=ORDERS["start"])
    units = max((offsets[b.id] + b.size_bytes for b in buffers), default=0) // unit + 1
    died_at = np.zeros(units, np.int64)  # bytes written by the time each unit was freed
    written = distance = 0
    for is_birth, k in events_of(order):
        b = order[k]
        place = died_at[offsets[b.id] // unit : -(-(offsets[b.id] + b.size_bytes) // unit)]
        if is_birth and place.size:
            distance += int((written - place).mean() * b.size_bytes)
            written += b.size_bytes
        else:
            place[:] = written
    return distance / written if written else 0.0


def _unit_bytes(buffers: Sequence[Buffer]) -> int:
    total = sum(b.size_bytes for b in buffers)
    common = math.gcd(*(b.size_bytes for b in buffers)) or 1
    units = max(1, min(MAX_UNITS, MAX_UNIT_VISITS // max(1, len(buffers))))
    return aligned(-(-total // units), common) or 1


def _hottest_window(freed: np.ndarray, live: np.ndarray, count: int) -> int:
    """Return the start of the free window with the largest sum of `freed`, -1 if none is free."""
    if count > len(freed):
        return -1
    freed_in_window = _window_sums(freed, count)
    is_free = _window_sums(live, count) == 0
    start = int(np.where(is_free, freed_in_window, np.iinfo(np.int64).min).argmax())
    return start if is_free[start] else -1


def _window_sums(units: np.ndarray, count: int) -> np.ndarray:
    """Return the sums over every window of `count` neighbouring units."""
    # a window's sum is the difference of two prefix sums
    prefix_sums = np.concatenate(([0], np.cumsum(units)))
    sums: np.ndarray = prefix_sums[count:] - prefix_sums[: len(prefix_sums) - count]
    return sums


# -- planning -------------------------------------------------------------------------------------
HEURISTICS: dict[str, Callable[[Sequence[Buffer]], Offsets]] = {
    **{f"greedy-by-{name}": partial(place, order=order) for name, order in ORDERS.items()},
    "best-fit": partial(place, order=ORDERS["start"], tightest=True),
}
"""Heuristics that only look for a small height."""
METHODS = ("best of", *HEURISTICS, "l2", "exact")
ANSWER_SHARE = 0.85
"""Share of the remaining time that one question to a packer may take."""


def plan(
    buffers: Sequence[Buffer],
    capacity_bytes: int | None = None,
    method: str = "best of",
    time_limit_s: float = 10.0,
    alignment_bytes: int = 1,
    seed: int = 0,
) -> Plan:
    """Give every buffer an offset.

    "best of" and "exact" take the lowest heuristic plan; if that is above the goal, they ask CP-SAT
    for a lower one until time_limit_s is over. Without OR-tools, "best of" ends with the
    heuristics, and "exact" raises UnsupportedError. The goal is the capacity, or without one the
    lower bound of the height. The plan returned may exceed the capacity: compare its height_bytes.
    Raises GraphError for bad buffers, unknown methods, and given offsets that make buffers overlap.
    """
    if method not in METHODS:
        raise GraphError(f"one of {', '.join(METHODS)}", repr(method))
    if method == "exact" and not cpsat_available():
        raise UnsupportedError(
            "OR-tools for an exact plan", "none", "pip install 'ascend-lab[exact]'"
        )
    start_s = time.perf_counter()
    sized = rounded(buffers, alignment_bytes)
    fixed = [b for b in sized if b.offset is not None]
    check_apart(fixed, {b.id: b.offset or 0 for b in fixed})
    if method in ("best of", "exact"):
        best = best_heuristic(sized)
        if not cpsat_available():
            return best
        goal_bytes = max(best.lower_bound_bytes, capacity_bytes or 0)
        packer = partial(pack_cpsat, seed=seed)
        # the heuristics count towards the time limit, too
        remaining_s = time_limit_s - (time.perf_counter() - start_s)
        return lowered_by_search(best, sized, goal_bytes, packer, "exact (CP-SAT)", remaining_s)
    offsets = hot_first(sized) if method == "l2" else HEURISTICS[method](sized)
    bound = least_height_bytes(sized)
    plan_height = height(sized, offsets)
    return Plan(offsets, plan_height, bound, method, plan_height == bound)


def best_heuristic(buffers: Sequence[Buffer]) -> Plan:
    """Return the lowest of the heuristics' plans."""
    bound = least_height_bytes(buffers)
    offsets = {name: heuristic(buffers) for name, heuristic in HEURISTICS.items()}
    heights = {name: height(buffers, offsets[name]) for name in offsets}
    lowest = min(heights, key=heights.__getitem__)
    return Plan(offsets[lowest], heights[lowest], bound, lowest, heights[lowest] == bound)


Packer = Callable[[Sequence[Buffer], int, float], Offsets | None]
"""(buffers, capacity in bytes, seconds) -> offsets within the capacity, None if there are none.

Raises TimeoutError without an answer.
"""


def lowered_by_search(
    start: Plan,
    buffers: Sequence[Buffer],
    goal_bytes: int,
    packer: Packer,
    method: str,
    time_limit_s: float,
) -> Plan:
    """Return the lowest plan that a packer finds between the lower bound and the plan `start`.

    The packer is asked for a plan of `goal_bytes` first, then the range is bisected: with a bound
    and a goal of 8 and a plan of 16, no plan for 8 leads to the question for 12.
    """
    end_s = time.perf_counter() + time_limit_s
    best = start
    # no plan is lower than this: the bound, or one byte above the last capacity without a plan
    proven_bytes = start.lower_bound_bytes
    target_bytes = goal_bytes
    while best.height_bytes > max(goal_bytes, proven_bytes):
        remaining_s = end_s - time.perf_counter()
        if remaining_s <= 0:
            break
        try:
            # keep some time for a larger capacity, which is easier
            offsets = packer(buffers, target_bytes, ANSWER_SHARE * remaining_s)
        except TimeoutError:
            target_bytes = (target_bytes + best.height_bytes) // 2
            continue
        if offsets is None:
            proven_bytes = target_bytes + 1
        elif (height_bytes := height(buffers, offsets)) < best.height_bytes:
            best = replace(best, offsets=offsets, height_bytes=height_bytes, method=method)
        target_bytes = max(goal_bytes, (proven_bytes + best.height_bytes) // 2)
    return replace(best, optimal=best.height_bytes <= proven_bytes)
