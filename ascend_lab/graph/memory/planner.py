"""Placement that prefers addresses freed last: they may still lie in the L2 cache.

A cache line just freed is overwritten in the cache; an address that nobody used for long must be
brought in, or another line evicted for it. Memory is looked at in units of a common divisor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import GraphError
from ascend_lab.graph.memory.buffers import Buffer, Offsets, Plan, aligned, peak_live_bytes, rounded
from ascend_lab.graph.memory.search import (
    best_fit,
    by_life,
    by_size,
    by_start,
    cpsat_available,
    first_fit,
    height,
    pack,
    pack_cpsat,
    place,
)

UNITS = 1 << 20
"""Most units memory is cut into; the unit grows before the number does."""
LOOKS = 1 << 28
"""Most units looked at for all buffers: each looks at all units."""


def hot_first(buffers: Sequence[Buffer], slack: float = 0.25) -> Offsets:
    """Place in order of birth, each buffer over the free bytes that were freed last on average.

    Heights up to (1 + slack) times the peak of live bytes are free to choose from; where no place
    is left below, memory grows by what is needed. The rule is greedy: it may cut memory into
    pieces too small for later buffers, so compare `reuse_distance_bytes` before trusting it.
    """
    unit = _unit_bytes(buffers)
    limit = int(peak_live_bytes(buffers) * (1 + slack)) // unit
    freed = np.zeros(limit, np.int64)  # bytes written by the time each unit was freed
    live = np.zeros(limit, np.int64)
    offsets: Offsets = {}
    written = 0
    for is_birth, b in _events(buffers):
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
    unit = _unit_bytes(buffers)
    units = max((offsets[b.id] + b.size_bytes for b in buffers), default=0) // unit + 1
    died_at = np.zeros(units, np.int64)  # bytes written by the time each unit was freed
    written = distance = 0
    for is_birth, b in _events(buffers):
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


def _events(buffers: Sequence[Buffer]) -> list[tuple[bool, Buffer]]:
    """Return deaths and births in order of time; at one time deaths come first."""
    order = by_start(buffers)
    events = [(b.upper, False, k) for k, b in enumerate(order)]
    events += [(b.lower, True, k) for k, b in enumerate(order)]
    return [(is_birth, order[k]) for _, is_birth, k in sorted(events)]


def _hottest(freed: NDArray[np.int64], live: NDArray[np.int64], count: int) -> int:
    """Return the start of the free window with the largest sum of freed, or -1 for none."""
    if count > len(freed):
        return -1
    heat, taken = (np.concatenate(([0], np.cumsum(a))) for a in (freed, live))
    heat, taken = (a[count:] - a[: len(a) - count] for a in (heat, taken))
    best = int(np.where(taken == 0, heat, np.iinfo(np.int64).min).argmax())
    return best if taken[best] == 0 else -1


# One front door to all the ways of planning memory.


HEURISTICS: dict[str, Callable[[Sequence[Buffer]], Offsets]] = {
    "greedy-by-size": lambda buffers: place(by_size(buffers), first_fit),
    "greedy-by-start": lambda buffers: place(by_start(buffers), first_fit),
    "greedy-by-life": lambda buffers: place(by_life(buffers), first_fit),
    "best-fit": lambda buffers: place(by_start(buffers), best_fit),
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
