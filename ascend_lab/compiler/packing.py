"""The search for a memory plan within a capacity; it is complete: it can prove there is none.

Any plan can be pushed down until each buffer rests on the ground or on another, and its buffers
can be listed by rising offset. So it is enough to build plans bottom up: the next buffer goes to
the floor below it, the highest end among the buffers placed in its lifetime. That form, and the
first two of these ways to keep the tree small, are MiniMalloc's (Moffitt 2023,
doi:10.1145/3623278.3624752):

- a buffer is not next when another would fit wholly below it (that one could come first);
- per time section, the lowest floor of what is left plus its bytes must stay within the capacity;
- sets of buffers that do not meet in time are solved one after the other, alone;
- several orders of preference are tried, each for a number of steps that doubles by round;
- a state (what is left, over which floors) that failed once is not searched again in any round.

Where OR-tools is installed, its CP-SAT is asked what this search does not find in time.
"""

import math
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Offsets = dict[Hashable, int]
"""The first byte of each buffer, by id."""


Block = Any
"""A `memory.Buffer`; `pack` asks for no more than id, lower, upper and size_bytes."""
FIRST_STEPS = 500
"""Steps an order gets in the first round; every round doubles them."""
MOST_STATES = 1_000_000
"""Failed states kept, about 100 bytes each."""
MOST_BUFFERS = 2000
"""More buffers than this are not searched: one step would take too long to be of use."""
FAR = 1 << 62


class _OutOfStepsError(Exception):
    """The steps of this round are used up."""


class _Search:
    """The problem as arrays over buffers and sections, and the partial plan."""

    def __init__(self, order: Sequence[Block], capacity_bytes: int, deadline_s: float) -> None:
        times = np.unique([t for b in order for t in (b.lower, b.upper)])
        section = np.arange(len(times) - 1)
        self.low: Ints = np.searchsorted(times, [b.lower for b in order])
        self.up: Ints = np.searchsorted(times, [b.upper for b in order])
        self.size: Ints = np.array([b.size_bytes for b in order], np.int64)
        self.alive = (self.low[:, None] <= section) & (section < self.up[:, None])
        self.capacity = capacity_bytes
        self.deadline_s = deadline_s
        # per section: where the next buffer would stand, and a closing 0; bytes still to place
        self.floor: Ints = np.zeros(len(times), np.int64)
        self.left: Ints = self.size @ self.alive
        self.rank: NDArray[Any] = np.arange(len(order))
        self.offset: Ints = np.zeros(len(order), np.int64)
        self.steps = 0
        self.failed = set[bytes]()

    def solve(self, ids: Ints, lowest: int) -> bool:
        """Place buffers `ids` (sorted by birth) at `lowest` or above, or leave no trace."""
        low = self.low[ids]
        up = self.up[ids]
        bounds = np.stack((low, up), axis=1, dtype=np.intp).ravel()
        at = np.maximum(lowest, np.maximum.reduceat(self.floor, bounds)[::2])
        alive = self.alive[ids]
        ground = np.where(alive, at[:, None], FAR).min(axis=0)
        if np.any((ground < FAR) & (ground + self.left > self.capacity)):
            return False
        state = blake2b(ids.tobytes() + ground.tobytes(), digest_size=16).digest()
        if state in self.failed:
            return False
        cuts = np.flatnonzero(low[1:] >= np.maximum.accumulate(up)[:-1]) + 1
        solved = self._apart(np.split(ids, cuts), lowest) if len(cuts) else self._branch(ids, at)
        if not solved and len(self.failed) < MOST_STATES:
            self.failed.add(state)
        return solved

    def _apart(self, parts: Sequence[Ints], lowest: int) -> bool:
        """Solve sets of buffers that never live together."""
        saved = self.floor.copy(), self.left.copy()
        if all(self.solve(part, lowest) for part in parts):
            return True
        self.floor[:], self.left[:] = saved
        return False

    def _branch(self, ids: Ints, at: Ints) -> bool:
        """Try each buffer that can be next, the lowest first, then by preference."""
        self.steps -= 1
        if self.steps < 0 or time.perf_counter() > self.deadline_s:
            raise _OutOfStepsError
        fits_below = int((at + self.size[ids]).min())
        for k in np.lexsort((self.rank[ids], at)):
            if at[k] >= fits_below:
                break
            i = ids[k]
            rest = np.delete(ids, k)
            section = slice(self.low[i], self.up[i])
            saved = self.floor[section].copy()
            self.floor[section] = at[k] + self.size[i]
            self.left[section] -= self.size[i]
            self.offset[i] = at[k]
            if not len(rest) or self.solve(rest, int(at[k])):
                return True
            self.floor[section] = saved
            self.left[section] += self.size[i]
        return False


def pack(
    buffers: Sequence[Block], capacity_bytes: int, time_limit_s: float, seed: int = 0
) -> Offsets | None:
    """Return offsets within the capacity, or None when there are none.

    Raises TimeoutError when the time is over before either is known, and for more than
    MOST_BUFFERS buffers. The clock only ends the search: what is tried, and in which order,
    depends on the seed alone.
    """
    if len(buffers) > MOST_BUFFERS:
        raise TimeoutError(f"{len(buffers)} buffers are more than the search takes")
    order = sorted((b for b in buffers if b.size_bytes), key=lambda b: b.lower)
    offsets: Offsets = {b.id: 0 for b in buffers}
    if not order:
        return offsets
    search = _Search(order, capacity_bytes, time.perf_counter() + time_limit_s)
    left = search.left.copy()
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 4 * len(order))  # up to two calls, each two deep, per buffer
    try:
        for rank, steps in _rounds(search, seed):
            search.rank = rank
            search.steps = steps
            search.floor[:] = 0
            search.left[:] = left
            try:
                if not search.solve(np.arange(len(order)), 0):
                    return None
            except _OutOfStepsError:
                continue
            return offsets | {b.id: int(at) for b, at in zip(order, search.offset, strict=True)}
    finally:
        sys.setrecursionlimit(depth)
    raise TimeoutError(f"no answer within {time_limit_s} s")


def _rounds(search: _Search, seed: int) -> Iterator[tuple[NDArray[Any], int]]:
    """Yield ranks (low is preferred) with the steps they get, until the time is over."""
    low = search.low
    up = search.up
    size = search.size
    width = up - low
    tight = -np.array([search.left[a:b].max() for a, b in zip(low, up, strict=True)])
    area = -width * size
    keys = ((-width, area), (low, -up), (-width, tight), (-up, -low), (area, -width, tight))
    orders: list[NDArray[Any]] = [np.argsort(np.lexsort(key)) for key in keys]
    rng = np.random.default_rng(seed)
    steps = FIRST_STEPS
    while True:
        for rank in orders:
            if time.perf_counter() > search.deadline_s:
                return
            yield rank, steps
        orders = [rank + rng.normal(0, len(low) / 10, len(low)) for rank in orders]
        steps *= 2


def cpsat_available() -> bool:
    """Return whether OR-tools is installed (`pip install ascend-lab[exact]`)."""
    return find_spec("ortools") is not None


def pack_cpsat(
    buffers: Sequence[Block], capacity_bytes: int, time_limit_s: float, seed: int = 0
) -> Offsets | None:
    """Return offsets within the capacity, or None when there are none, with one thread.

    Buffers are rectangles, address by time, that must not overlap; one with gaps is several. A
    redundant constraint says that at no address they need more time than there is: without it the
    solver is far slower.
    Raises TimeoutError without an answer.
    """
    from ortools.sat.python import cp_model

    filled = [b for b in buffers if b.size_bytes]
    offsets: Offsets = {b.id: b.offset or 0 for b in buffers}
    if not filled:
        return offsets
    rectangles = [(b, r) for b in filled for r in b.rectangles]
    unit = _common_unit_bytes(filled)
    rows = capacity_bytes // unit
    times = sorted({t for _, r in rectangles for t in (r.lower, r.upper)})
    section = {t: k for k, t in enumerate(times)}
    model = cp_model.CpModel()
    starts = _start_variables(model, filled, rows, unit)
    if starts is None:
        return None
    spans = []
    lives = []
    widths = []
    for number, (b, r) in enumerate(rectangles):
        name = f"{b.id} {number}"
        size = r.size_bytes // unit
        width = section[r.upper] - section[r.lower]
        begin = starts[b.id] + r.first // unit
        spans.append(model.new_fixed_size_interval_var(begin, size, f"{name} space"))
        lives.append(model.new_fixed_size_interval_var(section[r.lower], width, f"{name} time"))
        widths.append(width)
    model.add_no_overlap_2d(spans, lives)
    model.add_cumulative(spans, widths, len(section) - 1)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise TimeoutError(f"no answer within {time_limit_s} s")
    return offsets | {name: solver.value(at) * unit for name, at in starts.items()}


def _start_variables(
    model: Any, buffers: Sequence[Block], rows: int, unit: int
) -> dict[Hashable, Any] | None:
    """Return where each buffer may start, in units; None for one that has no place in the rows.

    An aligned offset is so many steps; one that is given is the only one of its domain.
    """
    starts: dict[Hashable, Any] = {}
    for b in buffers:
        size = b.size_bytes // unit
        step = max(b.alignment_bytes // unit, 1)
        most = (rows - size) // step
        fixed = None if b.offset is None else b.offset // unit // step
        if size > rows or (fixed is not None and fixed > most):
            return None
        steps = model.new_int_var(fixed or 0, most if fixed is None else fixed, f"{b.id}")
        starts[b.id] = steps * step
    return starts


def _common_unit_bytes(buffers: Sequence[Block]) -> int:
    """Return the largest unit in which sizes, windows, offsets and alignments are whole numbers.

    A plan pushed down as far as it goes has all offsets in it, so nothing is lost.
    """
    unit = 0
    for b in buffers:
        windows = [bound for r in b.rectangles for bound in (r.first, r.last)]
        unit = math.gcd(unit, b.size_bytes, b.offset or 0, *windows)
    asked = [b.alignment_bytes for b in buffers if b.alignment_bytes > 1]
    return math.gcd(unit, *asked)
