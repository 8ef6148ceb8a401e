"""Planning memory: short rules, rules for a warm cache, and the search behind one front door.

Short rules place buffers one by one: fast, good, without a promise. "l2" prefers addresses freed
last: a cache line just freed is overwritten in the cache; an address that nobody used for long must
be brought in, or another line evicted for it. It looks at memory in units of a common divisor.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import GraphError
from ascend_lab.graph.memory.buffers import (
    Buffer,
    Offsets,
    Plan,
    aligned,
    events_of,
    peak_live_bytes,
    rounded,
)
from ascend_lab.graph.memory.search import cpsat_available, pack, pack_cpsat

Ints = NDArray[np.int64]
Order = Callable[[Buffer], tuple[int, ...]]
ENDLESS = 1 << 62
UNITS = 1 << 20
"""Most units memory is cut into; the unit grows before the number does."""
LOOKS = 1 << 28
"""Most units looked at for all buffers: each looks at all units."""


# -- short rules ----------------------------------------------------------------------------------
def by_size(b: Buffer) -> tuple[int, ...]:
    """Order the largest buffers first, of equal ones the longest-lived."""
    return -b.size_bytes, b.lower - b.upper, b.lower


def by_start(b: Buffer) -> tuple[int, ...]:
    """Order the earliest born first, as a run-time allocator meets them."""
    return b.lower, -b.size_bytes


def by_life(b: Buffer) -> tuple[int, ...]:
    """Order the longest-lived first."""
    return b.lower - b.upper, -b.size_bytes


def place(buffers: Sequence[Buffer], order: Order, *, tightest: bool = False) -> Offsets:
    """Give each buffer, in order, a gap among those placed that live at the same time.

    Of gaps with room the lowest, or the tightest.
    """
    offsets: Offsets = {}
    placed = np.empty(
        (4, len(buffers)), np.int64
    )  # births, deaths, first bytes, ends; by first byte
    for b in sorted(buffers, key=order):
        lower, upper, starts, ends = placed[:, : (count := len(offsets))]
        meets = (lower < b.upper) & (upper > b.lower)
        tops = np.maximum.accumulate(np.append(0, ends[meets]))
        lengths = np.append(starts[meets], ENDLESS) - tops
        fits = np.flatnonzero(lengths >= b.size_bytes)
        best = lengths[fits].argmin() if tightest else 0
        at = int(tops[fits[best]]) if b.size_bytes else 0
        row = int(starts.searchsorted(at))
        placed[:, row + 1 : count + 1] = placed[:, row:count]
        placed[:, row] = b.lower, b.upper, at, at + b.size_bytes
        offsets[b.id] = at
    return offsets


def height(buffers: Iterable[Buffer], offsets: Offsets) -> int:
    """Return the end of the highest buffer."""
    return max((offsets[b.id] + b.size_bytes for b in buffers if b.size_bytes), default=0)


# -- a warm cache ---------------------------------------------------------------------------------
def hot_first(buffers: Sequence[Buffer], slack: float = 0.25) -> Offsets:
    """Place in order of birth, each buffer over the free bytes that were freed last on average.

    Heights up to (1 + slack) times the peak of live bytes are free to choose from; where no place
    is left below, memory grows by what is needed. The rule is greedy: it may cut memory into
    pieces too small for later buffers, so compare `reuse_distance_bytes` before trusting it.
    """
    unit, order = _unit_bytes(buffers), sorted(buffers, key=by_start)
    limit = int(peak_live_bytes(buffers) * (1 + slack)) // unit
    freed = np.zeros(limit, np.int64)  # bytes written by the time each unit was freed
    live = np.zeros(limit, np.int64)
    offsets: Offsets = {}
    written = 0
    for is_birth, k in events_of(order):
        b = order[k]
        count = aligned(b.size_bytes, unit) // unit
        if not is_birth:
            start = offsets[b.id] // unit
            live[start : start + count], freed[start : start + count] = 0, written
            continue
        start = _hottest(freed, live, count)
        if start < 0:
            start = int(live.nonzero()[0].max(initial=-1)) + 1  # grow from the highest in use
            more = np.zeros(start + count - len(live), np.int64)
            freed, live = np.append(freed, more), np.append(live, more)
        live[start : start + count] = 1
        offsets[b.id] = start * unit
        written += b.size_bytes
    return offsets


def reuse_distance_bytes(buffers: Sequence[Buffer], offsets: Offsets) -> float:
    """Return how many bytes are written, on average, between a byte's death and its next write.

    The first write of a byte counts everything written before it. A cache larger than the result
    tends to still hold what is written next.
    """
    unit, order = _unit_bytes(buffers), sorted(buffers, key=by_start)
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
    units = max(1, min(UNITS, LOOKS // max(1, len(buffers))))
    return aligned(-(-total // units), common) or 1


def _hottest(freed: NDArray[np.int64], live: NDArray[np.int64], count: int) -> int:
    """Return the start of the free window with the largest sum of freed, or -1 for none."""
    if count > len(freed):
        return -1
    heat, taken = (np.concatenate(([0], np.cumsum(a))) for a in (freed, live))
    heat, taken = (a[count:] - a[: len(a) - count] for a in (heat, taken))
    best = int(np.where(taken == 0, heat, np.iinfo(np.int64).min).argmax())
    return best if taken[best] == 0 else -1


# -- the front door -------------------------------------------------------------------------------
HEURISTICS: dict[str, Callable[[Sequence[Buffer]], Offsets]] = {
    "greedy-by-size": partial(place, order=by_size),
    "greedy-by-start": partial(place, order=by_start),
    "greedy-by-life": partial(place, order=by_life),
    "best-fit": partial(place, order=by_start, tightest=True),
}
"""Rules that only look for a low height."""
METHODS = ("best of", *HEURISTICS, "l2", "exact")


def plan(
    buffers: Sequence[Buffer],
    capacity_bytes: int | None = None,
    method: str = "best of",
    time_limit_s: float = 10.0,
    alignment_bytes: int = 1,
    seed: int = 0,
) -> Plan:
    """Give every buffer an offset.

    "best of" takes the lowest heuristic plan and, where that is above the goal, searches for one
    that reaches it until time_limit_s is over; "exact" goes to the search at once. The goal is the
    capacity, or without one the peak of live bytes. The plan returned may exceed the capacity:
    compare its height_bytes. Raises GraphError for bad buffers and unknown methods.
    """
    if method not in METHODS:
        raise GraphError(f"one of {', '.join(METHODS)}", repr(method))
    sized = rounded(buffers, alignment_bytes)
    bound = peak_live_bytes(sized)
    if method == "l2":
        found, used = hot_first(sized), method
    elif method in HEURISTICS:
        found, used = HEURISTICS[method](sized), method
    else:
        goal = bound if capacity_bytes is None else max(bound, capacity_bytes)
        return _search(sized, bound, goal, method, time_limit_s, seed)
    high = height(sized, found)
    return Plan(found, high, bound, used, high == bound)


def _search(
    buffers: Sequence[Buffer], bound: int, goal: int, method: str, time_limit_s: float, seed: int
) -> Plan:
    """Take the best heuristic plan; search between the bound and its height."""
    end_s = time.perf_counter() + time_limit_s
    tried = {name: rule(buffers) for name, rule in HEURISTICS.items()}
    used = min(tried, key=lambda name: height(buffers, tried[name]))
    found, high, proven = tried[used], height(buffers, tried[used]), bound
    # First the goal itself; whatever is left of the time halves what lies between.
    target = goal
    while high > max(goal, proven) and (left_s := end_s - time.perf_counter()) > 0:
        try:
            packed, name = _pack(buffers, target, left_s, seed)
        except TimeoutError:
            target = (target + high) // 2
            continue
        if packed is None:
            proven = target + 1
        elif height(buffers, packed) < high:
            found, high, used = packed, height(buffers, packed), name
        target = max(goal, (proven + high) // 2)
    return Plan(found, high, bound, used, high <= proven)


def _pack(
    buffers: Sequence[Buffer], target: int, time_limit_s: float, seed: int
) -> tuple[Offsets | None, str]:
    """Ask our search, then CP-SAT where it is installed; return the answer and whose it is."""
    if not cpsat_available():
        return pack(buffers, target, time_limit_s / 2, seed), "exact"
    try:
        return pack(buffers, target, time_limit_s / 8, seed), "exact"
    except TimeoutError:
        return pack_cpsat(buffers, target, time_limit_s * 0.85, seed), "exact (CP-SAT)"
