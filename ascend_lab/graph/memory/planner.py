"""One front door to all the ways of planning memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ascend_lab.errors import GraphError
from ascend_lab.graph.memory.buffers import Buffer, Offsets, Plan, peak_live_bytes, rounded
from ascend_lab.graph.memory.cpsat import cpsat_available, pack_cpsat
from ascend_lab.graph.memory.heuristics import (
    best_fit,
    by_life,
    by_size,
    by_start,
    first_fit,
    height,
    place,
)
from ascend_lab.graph.memory.hot import hot_first
from ascend_lab.graph.memory.search import pack

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
