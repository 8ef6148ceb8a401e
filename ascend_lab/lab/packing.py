"""The exact search of chapter 15 for a memory plan: it finds a plan or proves that there is none.

In any plan, buffers can be moved to lower offsets until each starts at 0 or where another ends, and
they can be listed by rising offset. So it is enough to build plans bottom up: the next buffer
starts at its floor, the highest end among the buffers placed in its lifetime. That form, and the
first two of these ways to keep the search tree small, are MiniMalloc's (Moffitt 2023,
doi:10.1145/3623278.3624752):

- a buffer is not next when another would fit wholly below it (that one could come first);
- in each section of time, the lowest floor of the unplaced buffers plus their bytes must stay
  within the capacity;
- sets of buffers whose lifetimes do not overlap are solved one after the other;
- several orders of preference are tried, each for a number of steps that doubles by round;
- a state (unplaced buffers, and the floors below them) that failed is not searched again.

Buffers with an alignment, a given offset or gaps are not searched: `memory.plan` asks CP-SAT.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.compiler.buffers import Buffer, Offsets
from ascend_lab.compiler.memory import (
    Plan,
    best_heuristic,
    lowered_by_search,
    rounded,
)
from ascend_lab.errors import GraphError

Ints = NDArray[np.int64]
FIRST_STEPS = 500
"""Steps an order gets in the first round; every round doubles them."""
MAX_STATES = 1_000_000
"""Most failed states that are remembered, about 100 bytes each."""
MAX_BUFFERS = 2000
"""More buffers than this are not searched: one step would take too long to be of use."""
NO_FLOOR = 1 << 62
"""Stands for the floor of a buffer outside its lifetime: above all capacities."""


def exact_plan(buffers: Sequence[Buffer], time_limit_s: float = 10.0, seed: int = 0) -> Plan:
    """Return the lowest plan that the heuristics, and then the search, find in the time."""
    plain = rounded(buffers, 1)
    start = best_heuristic(plain)
    packer = partial(pack, seed=seed)
    return lowered_by_search(start, plain, start.lower_bound_bytes, packer, "exact", time_limit_s)


class _OutOfStepsError(Exception):
    """The steps of this round are used up."""


class _Search:
    """The problem as arrays over buffers and sections of time, and the partial plan.

    Sections are the spans between neighbouring births and deaths of buffers. `low` and `up` are the
    first section of each buffer and the one after its last. `floor` is the highest end of placed
    buffers in each section.
    """

    def __init__(self, order: Sequence[Buffer], capacity_bytes: int, deadline_s: float) -> None:
        times = np.unique([t for b in order for t in (b.lower, b.upper)])
        section = np.arange(len(times) - 1)
        self.low: Ints = np.searchsorted(times, [b.lower for b in order])
        self.up: Ints = np.searchsorted(times, [b.upper for b in order])
        self.size: Ints = np.array([b.size_bytes for b in order], np.int64)
        self.alive = (self.low[:, None] <= section) & (section < self.up[:, None])
        self.capacity = capacity_bytes
        self.deadline_s = deadline_s
        # per section, and a closing 0 that `reduceat` needs behind the last one
        self.floor: Ints = np.zeros(len(times), np.int64)
        self.unplaced_bytes: Ints = self.size @ self.alive
        self.rank: NDArray[Any] = np.arange(len(order))
        self.offset: Ints = np.zeros(len(order), np.int64)
        self.steps = 0
        self.failed = set[bytes]()

    def solve(self, ids: Ints, lowest: int) -> bool:
        """Place buffers `ids` (sorted by birth) at `lowest` or above, or change nothing."""
        low = self.low[ids]
        up = self.up[ids]
        # the highest floor of each lifetime: `reduceat` takes the maximum over [low, up), and over
        # [up, next low), which is not used
        bounds = np.stack((low, up), axis=1, dtype=np.intp).ravel()
        lowest_offsets = np.maximum(lowest, np.maximum.reduceat(self.floor, bounds)[::2])
        alive = self.alive[ids]
        section_floors = np.where(alive, lowest_offsets[:, None], NO_FLOOR).min(axis=0)
        # in some section the unplaced buffers do not fit above the lowest offset of any of them
        tops = section_floors + self.unplaced_bytes
        if np.any((section_floors < NO_FLOOR) & (tops > self.capacity)):
            return False
        state = blake2b(ids.tobytes() + section_floors.tobytes(), digest_size=16).digest()
        if state in self.failed:
            return False
        # a buffer born after all earlier ones have died begins a set of its own
        cuts = np.flatnonzero(low[1:] >= np.maximum.accumulate(up)[:-1]) + 1
        if len(cuts):
            solved = self._solve_sets(np.split(ids, cuts), lowest)
        else:
            solved = self._branch(ids, lowest_offsets)
        if not solved and len(self.failed) < MAX_STATES:
            self.failed.add(state)
        return solved

    def _solve_sets(self, sets: Sequence[Ints], lowest: int) -> bool:
        """Solve sets of buffers that never live together."""
        floor = self.floor.copy()
        unplaced_bytes = self.unplaced_bytes.copy()
        if all(self.solve(ids, lowest) for ids in sets):
            return True
        self.floor[:] = floor
        self.unplaced_bytes[:] = unplaced_bytes
        return False

    def _branch(self, ids: Ints, lowest_offsets: Ints) -> bool:
        """Try each buffer that can be next, the lowest first, then by preference."""
        self.steps -= 1
        if self.steps < 0 or time.perf_counter() > self.deadline_s:
            raise _OutOfStepsError
        lowest_end = int((lowest_offsets + self.size[ids]).min())
        for place in np.lexsort((self.rank[ids], lowest_offsets)):
            if lowest_offsets[place] >= lowest_end:
                # another fits wholly below this one and below all that follow: it could come first
                break
            buffer = ids[place]
            others = np.delete(ids, place)
            life = slice(self.low[buffer], self.up[buffer])
            floor = self.floor[life].copy()
            self.floor[life] = lowest_offsets[place] + self.size[buffer]
            self.unplaced_bytes[life] -= self.size[buffer]
            self.offset[buffer] = lowest_offsets[place]
            if not len(others) or self.solve(others, int(lowest_offsets[place])):
                return True
            self.floor[life] = floor
            self.unplaced_bytes[life] += self.size[buffer]
        return False


def pack(
    buffers: Sequence[Buffer], capacity_bytes: int, time_limit_s: float, seed: int = 0
) -> Offsets | None:
    """Return offsets within the capacity, or None when there are none.

    Raises TimeoutError when the time is over before either is known, and for more than
    MAX_BUFFERS buffers. The clock only ends the search: what is tried, and in which order,
    depends on the seed alone.
    """
    special = next((b.id for b in buffers if not b.is_plain), None)
    if special is not None:
        needed = "buffers without alignment, offset and gaps"
        raise GraphError(needed, f"{special}", "use memory.plan, which asks CP-SAT")
    if len(buffers) > MAX_BUFFERS:
        raise TimeoutError(f"{len(buffers)} buffers are more than the search takes")
    order = sorted((b for b in buffers if b.size_bytes), key=lambda b: b.lower)
    offsets: Offsets = {b.id: 0 for b in buffers}
    if not order:
        return offsets
    search = _Search(order, capacity_bytes, time.perf_counter() + time_limit_s)
    unplaced_bytes = search.unplaced_bytes.copy()
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 4 * len(order))  # up to two calls, each two deep, per buffer
    try:
        for rank, steps in _rounds(search, seed):
            search.rank = rank
            search.steps = steps
            search.floor[:] = 0
            search.unplaced_bytes[:] = unplaced_bytes
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
    fullness = -np.array([search.unplaced_bytes[a:b].max() for a, b in zip(low, up, strict=True)])
    area = -width * size
    keys = ((-width, area), (low, -up), (-width, fullness), (-up, -low), (area, -width, fullness))
    # the rank of buffer i is its place when all are sorted by a key (`lexsort`: last key first)
    orders: list[NDArray[Any]] = [np.argsort(np.lexsort(key)) for key in keys]
    rng = np.random.default_rng(seed)
    steps = FIRST_STEPS
    while True:
        for rank in orders:
            if time.perf_counter() > search.deadline_s:
                return
            yield rank, steps
        # noise of a tenth of the ranks: the next round prefers similar orders, not the same
        orders = [rank + rng.normal(0, len(low) / 10, len(low)) for rank in orders]
        steps *= 2
