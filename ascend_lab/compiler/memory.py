"""Memory planning: buffers with lifetimes in, an offset for each out; rules first, then a search.

A buffer needs size_bytes during the half-open time [lower, upper). Two buffers whose times meet
must not share a byte; two that never live together may. Nothing here knows about graphs;
`memory_file` reads buffers from CSV.

A buffer may ask for more, as those of MiniMalloc do: an offset that is a multiple of its own
alignment, an offset that is given, and gaps, times inside its life when it needs no bytes or only a
window of them. A buffer with gaps is a row of rectangles, address by time, that share one offset.

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

import numpy as np

from ascend_lab.compiler.packing import Offsets, cpsat_available, pack, pack_cpsat
from ascend_lab.errors import GraphError


@dataclass(frozen=True, slots=True)
class Gap:
    """Times [lower, upper) when a buffer needs only its bytes [first, last), none by default."""

    lower: int
    upper: int
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Rectangle:
    """What a buffer takes in [lower, upper): its bytes [first, last), counted from its offset."""

    lower: int
    upper: int
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        """Return how many bytes that are."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Buffer:
    """A block of size_bytes, needed from time lower up to, not including, upper.

    Its offset is a multiple of alignment_bytes, and `offset` itself where that is given.
    """

    id: Hashable
    lower: int
    upper: int
    size_bytes: int
    alignment_bytes: int = 1
    gaps: tuple[Gap, ...] = ()
    offset: int | None = None

    def __post_init__(self) -> None:
        if self.upper <= self.lower:
            got = f"buffer {self.id} from {self.lower} to {self.upper}"
            raise GraphError("a lifetime that ends after it starts", got)
        if self.size_bytes < 0:
            got = f"buffer {self.id} of {self.size_bytes}"
            raise GraphError("a size of at least 0 bytes", got)
        if self.alignment_bytes < 1:
            got = f"buffer {self.id} with {self.alignment_bytes}"
            raise GraphError("an alignment of at least 1 byte", got)
        if self.offset is not None and (self.offset < 0 or self.offset % self.alignment_bytes):
            got = f"buffer {self.id} at {self.offset}"
            raise GraphError(f"an offset of a multiple of {self.alignment_bytes} from 0", got)
        self._check_gaps()

    def _check_gaps(self) -> None:
        """Raise GraphError unless gaps follow each other inside the life and the size."""
        free_from = self.lower
        for gap in self.gaps:
            where = f"buffer {self.id}: {gap.lower}-{gap.upper}@{gap.first}:{gap.last}"
            if not free_from <= gap.lower < gap.upper <= self.upper:
                needed = f"gaps one after the other from {self.lower} to {self.upper}"
                raise GraphError(needed, where)
            if not 0 <= gap.first <= gap.last <= self.size_bytes:
                raise GraphError(f"a window from 0 to {self.size_bytes}", where)
            free_from = gap.upper

    @property
    def is_plain(self) -> bool:
        """True for a buffer that may lie anywhere and needs all its bytes all the time."""
        return self.alignment_bytes == 1 and not self.gaps and self.offset is None

    @property
    def rectangles(self) -> list[Rectangle]:
        """Return the times and bytes that it takes, in order of time; none without bytes."""
        found = []
        begin = self.lower
        for gap in self.gaps:
            found.append(Rectangle(begin, gap.lower, 0, self.size_bytes))
            found.append(Rectangle(gap.lower, gap.upper, gap.first, gap.last))
            begin = gap.upper
        found.append(Rectangle(begin, self.upper, 0, self.size_bytes))
        return [r for r in found if r.lower < r.upper and r.first < r.last]


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
    """Return the buffers with sizes rounded up, so that stacking them keeps offsets aligned.

    Where a buffer asks for more than bytes and a life, stacking is no longer all there is: each
    then carries the alignment itself.
    """
    if alignment_bytes < 1:
        raise GraphError("an alignment of at least 1 byte", str(alignment_bytes))
    found = [replace(b, size_bytes=aligned(b.size_bytes, alignment_bytes)) for b in buffers]
    if len({b.id for b in found}) < len(found):
        raise GraphError("a different id for each buffer", "an id that stands twice")
    if all(b.is_plain for b in found):
        return found
    return [replace(b, alignment_bytes=math.lcm(b.alignment_bytes, alignment_bytes)) for b in found]


def peak_live_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the most bytes that live at one time: no plan is lower than this."""
    rectangles = [r for b in buffers for r in b.rectangles]
    live = peak = 0
    for is_birth, k in events_of(rectangles):
        live += rectangles[k].size_bytes if is_birth else -rectangles[k].size_bytes
        peak = max(peak, live)
    return peak


def least_height_bytes(buffers: Sequence[Buffer]) -> int:
    """Return a height that no plan goes below: live bytes, and the ends of the largest and fixed.

    A buffer of which gaps never leave more than a part alive still lies wholly in the memory.
    """
    ends = [(b.offset or 0) + b.size_bytes for b in buffers if b.size_bytes]
    return max(peak_live_bytes(buffers), *ends, 0)


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
        a = left(kept)
        b = left(merged)
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
    """Raise GraphError if two buffers use a byte at one time."""
    placed = [(k, offsets[b.id], r) for k, b in enumerate(buffers) for r in b.rectangles]
    owner = np.array([k for k, _, _ in placed], np.int64)
    low = np.array([r.lower for _, _, r in placed], np.int64)
    up = np.array([r.upper for _, _, r in placed], np.int64)
    start = np.array([at + r.first for _, at, r in placed], np.int64)
    end = np.array([at + r.last for _, at, r in placed], np.int64)
    for i, (k, _, r) in enumerate(placed):
        in_time = (low < r.upper) & (up > r.lower)
        in_space = (start < end[i]) & (end > start[i])
        clash = in_time & in_space & (owner != k)
        if clash.any():
            other = buffers[owner[int(clash.argmax())]].id
            wanted = "live buffers with bytes of their own"
            raise GraphError(wanted, f"{buffers[k].id} and {other} overlap")


def events_of(buffers: Sequence[Buffer | Rectangle]) -> list[tuple[bool, int]]:
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
    placed = [(b, r) for b in buffers for r in b.rectangles]
    memory = np.full(plan.height_bytes, poison, np.uint16)  # the number of a byte's last writer
    for is_birth, k in events_of([r for _, r in placed]):
        b, r = placed[k]
        begin = plan.offsets[b.id] + r.first
        place = memory[begin : begin + r.size_bytes]
        if len(place) < r.size_bytes:
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
    """Give each buffer, in order, a place among those placed that live at the same time.

    A rectangle of bytes [first, last) and a placed one at [start, end) that meet in time forbid the
    offsets between start - last and end - first. Of the places left between such intervals it takes
    the lowest, or the tightest. Buffers whose offset is given come first.
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
            row = int(placed[2, :count].searchsorted(at + r.first))
            placed[:, row + 1 : count + 1] = placed[:, row:count]
            placed[:, row] = r.lower, r.upper, at + r.first, at + r.last
            count += 1
        offsets[b.id] = at
    return offsets


def _free_offset(
    placed: np.ndarray, rectangles: Sequence[Rectangle], alignment_bytes: int, tightest: bool
) -> int:
    """Return an offset for rectangles of one buffer among placed ones, sorted by their start."""
    lower, upper, starts, ends = placed
    # an offset may be at most `below`, or at least `above`
    below = []
    above = []
    for r in rectangles:
        meets = (lower < r.upper) & (upper > r.lower)
        below.append(starts[meets] - r.last)
        above.append(ends[meets] - r.first)
    most = np.concatenate(below)
    least = np.concatenate(above)
    if len(rectangles) > 1:
        by_start = np.argsort(most, kind="stable")
        most = most[by_start]
        least = least[by_start]
    candidates = np.maximum.accumulate(np.append(0, least))
    candidates = -(-candidates // alignment_bytes) * alignment_bytes
    room = np.append(most, ENDLESS) - candidates
    fits = np.flatnonzero(room >= 0)
    chosen = room[fits].argmin() if tightest else 0
    return int(candidates[fits[chosen]])


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
    Raises GraphError for buffers with an alignment, an offset or gaps.
    """
    asking = [b.id for b in buffers if not b.is_plain]
    if asking:
        needed = "buffers that ask for bytes and a life only"
        raise GraphError(needed, f"{asking[0]} asks for more", "choose another rule than l2")
    unit = _unit_bytes(buffers)
    order = sorted(buffers, key=ORDERS["start"])
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
            live[start : start + count] = 0
            freed[start : start + count] = written
            continue
        start = _hottest(freed, live, count)
        if start < 0:
            start = int(live.nonzero()[0].max(initial=-1)) + 1  # grow from the highest in use
            more = np.zeros(start + count - len(live), np.int64)
            freed = np.append(freed, more)
            live = np.append(live, more)
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
    compare its height_bytes. Raises GraphError for bad buffers and unknown methods, and where
    buffers whose offsets are given overlap.
    """
    if method not in METHODS:
        raise GraphError(f"one of {', '.join(METHODS)}", repr(method))
    sized = rounded(buffers, alignment_bytes)
    bound = least_height_bytes(sized)
    fixed = [b for b in sized if b.offset is not None]
    check_apart(fixed, {b.id: b.offset or 0 for b in fixed})
    if method == "l2":
        found = hot_first(sized)
        used = method
    elif method in HEURISTICS:
        found = HEURISTICS[method](sized)
        used = method
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
    found = tried[used]
    high = height(buffers, tried[used])
    proven = bound
    if not (cpsat_available() or all(b.is_plain for b in buffers)):
        return Plan(found, high, bound, used, high == bound)  # our own search knows plain ones only
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
            found = packed
            high = height(buffers, packed)
            used = name
        target = max(goal, (proven + high) // 2)
    return Plan(found, high, bound, used, high <= proven)


def _pack(
    buffers: Sequence[Buffer], target: int, time_limit_s: float, seed: int
) -> tuple[Offsets | None, str]:
    """Ask our search, then CP-SAT where it is installed; return the answer and whose it is."""
    if not all(b.is_plain for b in buffers):
        return pack_cpsat(buffers, target, time_limit_s, seed), "exact (CP-SAT)"
    if not cpsat_available():
        return pack(buffers, target, time_limit_s / 2, seed), "exact"
    try:
        return pack(buffers, target, time_limit_s / 8, seed), "exact"
    except TimeoutError:
        return pack_cpsat(buffers, target, time_limit_s * 0.85, seed), "exact (CP-SAT)"
