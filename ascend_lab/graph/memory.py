"""Memory planning: buffers with lifetimes in, an offset for each out; rules first, then a search.

A buffer needs size_bytes during the half-open time [lower, upper). Two buffers whose times meet
must not share a byte; two that never live together may. Nothing here knows about graphs. Files are
CSV in the MiniMalloc form: a header id,lower,upper,size, then a row per buffer.

Short rules place buffers one by one: fast, good, without a promise; `packing` searches, and where
OR-tools is installed, its CP-SAT is asked what the search does not find in time. `hot_first`
prefers addresses freed last: a cache line just freed is overwritten in the cache; an address that
nobody used for long must be brought in, or another line evicted for it.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ascend_lab.errors import GraphError, InputError
from ascend_lab.graph.packing import Offsets, cpsat_available, pack, pack_cpsat
from ascend_lab.limits import csv_of, read_file, whole_of

HEADER = ("id", "lower", "upper", "size")
MOST_FILE_BYTES = 2**20
MOST_ROWS = 10_000
MOST = 2**40
"""Times and sizes beyond this are refused in files, so that no sum leaves 64 bits."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A block of size_bytes, needed from time lower up to, not including, upper."""

    id: Hashable
    lower: int
    upper: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.upper <= self.lower:
            got = f"buffer {self.id} from {self.lower} to {self.upper}"
            raise GraphError("a lifetime that ends after it starts", got)
        if self.size_bytes < 0:
            got = f"buffer {self.id} of {self.size_bytes}"
            raise GraphError("a size of at least 0 bytes", got)


@dataclass(frozen=True, slots=True)
class Plan:
    """An offset in bytes for every buffer.

    height_bytes is the memory the plan takes, lower_bound_bytes what no plan can go below,
    both with sizes rounded up to the alignment. `optimal` tells that no lower height exists.
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
    """Return the buffers with sizes rounded up, so that stacking them keeps offsets aligned."""
    if alignment_bytes < 1:
        raise GraphError("an alignment of at least 1 byte", str(alignment_bytes))
    found = [replace(b, size_bytes=aligned(b.size_bytes, alignment_bytes)) for b in buffers]
    if len({b.id for b in found}) < len(found):
        raise GraphError("a different id for each buffer", "an id that stands twice")
    return found


def peak_live_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the most bytes that live at one time: no plan is lower than this."""
    live = peak = 0
    for is_birth, k in events_of(buffers):
        live += buffers[k].size_bytes if is_birth else -buffers[k].size_bytes
        peak = max(peak, live)
    return peak


def share(buffers: Sequence[Buffer], pairs: Iterable[tuple[Hashable, Hashable]]) -> list[Buffer]:
    """Merge buffers that may use the same bytes, such as an operator's input and in-place output.

    Each pair (kept, merged) becomes one buffer under the kept id, alive from the first birth to
    the last death and as large as the larger; pairs may chain. Raises GraphError for unknown ids.
    """
    found = {b.id: b for b in buffers}
    into: dict[Hashable, Hashable] = {}

    def left(name: Hashable) -> Buffer:
        """Return the buffer that a name was merged into."""
        while name in into:
            name = into[name]
        if name not in found:
            raise GraphError("ids of buffers to share", str(name))
        return found[name]

    for kept, merged in pairs:
        a, b = left(kept), left(merged)
        if a.id != b.id:
            into[b.id] = a.id
            size = max(a.size_bytes, b.size_bytes)
            found[a.id] = Buffer(a.id, min(a.lower, b.lower), max(a.upper, b.upper), size)
            del found[b.id]
    return list(found.values())


# -- checks of a plan -----------------------------------------------------------------------------
def verify(plan: Plan, buffers: Sequence[Buffer], alignment_bytes: int = 1) -> None:
    """Raise GraphError unless every buffer has a place of its own below the plan's height."""
    if set(plan.offsets) != {b.id for b in buffers}:
        raise GraphError("an offset for each buffer and no other", f"{len(plan.offsets)} offsets")
    filled = [b for b in buffers if b.size_bytes]
    low, up = np.array([(b.lower, b.upper) for b in filled], np.int64).reshape(-1, 2).T
    start = np.array([plan.offsets[b.id] for b in filled], np.int64)
    end = start + np.array([b.size_bytes for b in filled], np.int64)
    for i, b in enumerate(filled):
        if start[i] < 0 or start[i] % alignment_bytes or end[i] > plan.height_bytes:
            needed = f"aligned offsets from 0 and ends up to {plan.height_bytes}"
            raise GraphError(needed, f"buffer {b.id} at {start[i]} .. {end[i]}")
        clash = (low < b.upper) & (up > b.lower) & (start < end[i]) & (end > start[i])
        clash[i] = False
        if clash.any():
            other = filled[int(clash.argmax())].id
            raise GraphError("live buffers with bytes of their own", f"{b.id} and {other} overlap")


def events_of(buffers: Sequence[Buffer]) -> list[tuple[bool, int]]:
    """Return (is birth, place in `buffers`) in order of time; at one time deaths come first."""
    deaths = [(b.upper, False, k) for k, b in enumerate(buffers)]
    births = [(b.lower, True, k) for k, b in enumerate(buffers)]
    return [(is_birth, k) for _, is_birth, k in sorted(deaths + births)]


def simulate_writes(buffers: Sequence[Buffer], plan: Plan) -> None:
    """Play the lifetimes over real bytes: each buffer writes its pattern and checks it at death.

    The memory starts poisoned, and a dead buffer's bytes are poisoned again.
    Raises GraphError when a pattern was overwritten or lies outside the memory.
    """
    poison = 0xFFFF
    memory = np.full(plan.height_bytes, poison, np.uint16)  # the number of a byte's last writer
    for is_birth, k in events_of(buffers):
        b = buffers[k]
        place = memory[plan.offsets[b.id] : plan.offsets[b.id] + b.size_bytes]
        if len(place) < b.size_bytes:
            raise GraphError("every byte inside the memory", f"{b.id} ends outside")
        if not is_birth and np.any(place != k % poison):
            raise GraphError("the bytes a buffer wrote until its death", f"{b.id} was overwritten")
        place[:] = k % poison if is_birth else poison


# -- short rules ----------------------------------------------------------------------------------
Order = Callable[[Buffer], tuple[int, ...]]
ENDLESS = 1 << 62
ORDERS: dict[str, Order] = {
    "size": lambda b: (-b.size_bytes, b.lower - b.upper, b.lower),
    "start": lambda b: (b.lower, -b.size_bytes),
    "life": lambda b: (b.lower - b.upper, -b.size_bytes),
}
"""Who comes first: the largest, the earliest born (as at run time), the longest-lived."""


def place(buffers: Sequence[Buffer], order: Order, *, tightest: bool = False) -> Offsets:
    """Give each buffer, in order, a gap among those placed that live at the same time.

    Of gaps with room the lowest, or the tightest.
    """
    offsets: Offsets = {}
    placed = np.empty((4, len(buffers)), np.int64)  # births, deaths, starts, ends; by start
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
    unit, order = _unit_bytes(buffers), sorted(buffers, key=ORDERS["start"])
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
    unit, order = _unit_bytes(buffers), sorted(buffers, key=ORDERS["start"])
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


def _hottest(freed: np.ndarray, live: np.ndarray, count: int) -> int:
    """Return the start of the free window with the largest sum of freed, or -1 for none."""
    if count > len(freed):
        return -1
    heat, taken = (np.concatenate(([0], np.cumsum(a))) for a in (freed, live))
    heat, taken = (a[count:] - a[: len(a) - count] for a in (heat, taken))
    best = int(np.where(taken == 0, heat, np.iinfo(np.int64).min).argmax())
    return best if taken[best] == 0 else -1


# -- the front door -------------------------------------------------------------------------------
HEURISTICS: dict[str, Callable[[Sequence[Buffer]], Offsets]] = {
    **{f"greedy-by-{name}": partial(place, order=order) for name, order in ORDERS.items()},
    "best-fit": partial(place, order=ORDERS["start"], tightest=True),
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


# -- files ----------------------------------------------------------------------------------------
def read_csv(path: str | Path) -> list[Buffer]:
    """Return the buffers of a file; lifetimes are half-open, columns may stand in any order.

    Raises InputError, with the line, for a file that cannot be read or is too large, a missing
    column, a number that is none, a lifetime that is empty, and an id that stands twice.
    """
    numbered = csv_of(read_file(path, "a CSV file", MOST_FILE_BYTES), path)
    if not numbered or not set(HEADER) <= set(numbered[0][1]):
        needed = f"a header with {','.join(HEADER)}"
        raise InputError(needed, f"none in {path}", "name them in the first line")
    if len(numbered) > MOST_ROWS + 1:
        raise InputError(f"at most {MOST_ROWS} buffers", f"{len(numbered) - 1} in {path}")
    names, found = numbered[0][1], dict[str, Buffer]()
    for line, row in numbered[1:]:
        where = f"{path} line {line}"
        if len(row) != len(names):
            raise InputError(f"{len(names)} columns", f"{len(row)} in {where}", "mend the row")
        cells = dict(zip(names, row, strict=True))
        name, *numbers = (cells[key] for key in HEADER)
        lower, upper, size = map(_number, numbers, HEADER[1:], (where,) * 3)
        try:
            buffer = Buffer(name, lower, upper, size)
        except GraphError as error:
            raise InputError(error.needed, f"{error.got} in {where}", "mend it") from error
        if name in found:
            raise InputError("a different id for each buffer", f"{name[:30]!r} again in {where}")
        found[name] = buffer
    return list(found.values())


def _number(text: str, name: str, where: str) -> int:
    value = whole_of(text)
    if value is None:
        raise InputError(f"{name} as a whole number", f"{text[:30]!r} in {where}", "mend it")
    if abs(value) > MOST:
        raise InputError(f"{name} of at most {MOST}", f"{text[:30]} in {where}", "mend it")
    return value
