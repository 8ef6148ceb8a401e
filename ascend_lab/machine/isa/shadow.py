"""What the sanitizer remembers: which step last touched every piece of memory, what flags told.

One integer per piece and pipe, in NumPy arrays laid out like the memory itself, so that checking a
whole tile is a few array operations. Steps are numbered from 1 over all cores of a launch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ascend_lab.machine.isa import memory, program
from ascend_lab.machine.isa.launch import LIMIT, Counters, core_name

Stamps = NDArray[np.int32]
STAMP_BYTES = 4
Write = Literal["sure", "maybe", "added"]
"""A plain write, one to a row not known before the run, or an atomic add."""

SEVERAL = 2**31 - 1
"""Stands for 'more than one core' where a core's number is kept."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who touches memory: step number, pipe, what the pipe knows, and the core.

    `clock` gives per pipe the last step known to have finished; steps up to `base` belong to cores
    that ran before. `core` counts from 1.
    """

    step: int
    pipe: str
    clock: Mapping[str, int]
    base: int
    core: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault at `byte` of a space: the step or the core (0: unknown) on the other side."""

    kind: Literal["uninitialised", "unordered", "core wrote", "core read"]
    byte: int
    step: int = 0
    core: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The pieces of a space one access touches, as a view into any of the space's arrays."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, stamps: Stamps) -> Stamps:
        """Return the view; NumPy refuses one that leaves the array."""
        return np.ndarray(self.shape, np.int32, stamps, self.offset, self.strides)

    def first(self, bad: NDArray[np.bool_]) -> tuple[tuple[int, ...], int]:
        """Return (index, piece number) of the first True in a view-shaped array."""
        index = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), self.shape))
        place = self.offset + sum(i * s for i, s in zip(index, self.strides, strict=True))
        return index, place // STAMP_BYTES


@dataclass(slots=True)
class Trace:
    """The steps of a pipe that touched a space last, piece by piece, and the latest of them."""

    stamps: Stamps
    latest: int = 0


class Space:
    """One GM tensor, or one on-chip memory; a piece is the largest part all its buffers share."""

    def __init__(self, buffers: Iterable[memory.Buffer], *, filled: bool = False) -> None:
        """Cover `buffers`; a `filled` tensor holds values before the first step."""
        self.name = ""
        self.filled = filled
        self.on_chip = False
        self.piece_bytes = 0
        size_bytes = 0
        for buffer in buffers:
            self.on_chip = buffer.space != "GM"
            self.name = buffer.space if self.on_chip else buffer.name
            start, pitch = (buffer.address, buffer.slot_bytes) if self.on_chip else (0, 0)
            self.piece_bytes = math.gcd(self.piece_bytes, buffer.itemsize, start, pitch)
            size_bytes = max(size_bytes, start + buffer.size_bytes)
        self._pieces = size_bytes // self.piece_bytes
        self._last = self._blank()
        self._reader = self._blank() if not self.on_chip else None
        self._others: dict[Write, Stamps] = {}
        self._writes: dict[str, Trace] = {}
        self._reads: dict[str, Trace] = {}
        self._first_write = 0

    def _blank(self) -> Stamps:
        return np.zeros(self._pieces, np.int32)

    def cut(self, region: memory.Region, env: Mapping[str, int]) -> Cut:
        """Place a region for loop variables `env`; the last axis is the pieces of an element."""
        buffer = region.buffer
        start = region.byte_at(env) - (0 if self.on_chip else buffer.address)
        pieces = buffer.itemsize // self.piece_bytes
        width = pieces * STAMP_BYTES
        strides = (*(s * width for s in region.strides), STAMP_BYTES)
        return Cut(start // self.piece_bytes * STAMP_BYTES, (*region.sizes, pieces), strides)

    def read(self, cut: Cut, access: Access) -> Iterator[Trouble]:
        """Note a read; yield what is wrong with it."""
        last = cut.of(self._last)
        floor = access.base if self.on_chip else 0
        if not self.filled and last.min() <= floor:
            yield self._trouble("uninitialised", cut, last <= floor)
        yield from self._unordered(self._writes, cut, access)
        if self._reader is not None:
            yield from self._foreign_writes(cut, access)
            reader = cut.of(self._reader)
            mine = (reader == 0) | (reader == access.core)
            reader[...] = np.where(mine, access.core, SEVERAL)
        self._stamp(self._reads, cut, access)

    def write(
        self, cut: Cut, access: Access, lanes: NDArray[np.bool_] | None = None, kind: Write = "sure"
    ) -> Iterator[Trouble]:
        """Note a write, of the masked `lanes` only; yield what is wrong with it.

        A "maybe" write hits some of the cut's rows, so it makes none of them initialised. An
        "added" write needs a value to add to, and may meet "added" writes of other cores.
        """
        last = cut.of(self._last)
        if kind == "added" and not self.filled and last.min() <= 0:
            yield self._trouble("uninitialised", cut, last <= 0)
        yield from self._unordered(self._writes, cut, access)
        yield from self._unordered(self._reads, cut, access)
        if self._reader is not None:
            yield from self._foreign_writes(cut, access, adds=kind != "added")
            reader = cut.of(self._reader)
            bad = (reader != 0) & (reader != access.core)
            if bad.any():
                index, _ = cut.first(bad)
                yield self._trouble("core read", cut, bad, core=int(reader[index]))
        if kind != "sure":
            last = cut.of(self._others.setdefault(kind, self._blank()))
        np.copyto(last, access.step, where=True if lanes is None else lanes)
        self._first_write = self._first_write or access.step
        self._stamp(self._writes, cut, access)

    def _stamp(self, traces: dict[str, Trace], cut: Cut, access: Access) -> None:
        if access.pipe not in traces:
            traces[access.pipe] = Trace(self._blank())
        trace = traces[access.pipe]
        cut.of(trace.stamps)[...] = trace.latest = access.step

    def _unordered(
        self, traces: Mapping[str, Trace], cut: Cut, access: Access
    ) -> Iterator[Trouble]:
        """Yield steps of other pipes that may still be running: newer than what is known."""
        for pipe, trace in traces.items():
            known = access.clock.get(pipe, access.base)
            if pipe == access.pipe or trace.latest <= known:
                continue
            view = cut.of(trace.stamps)
            if view.max() > known:
                yield self._trouble("unordered", cut, view > known, view)

    def _foreign_writes(self, cut: Cut, access: Access, *, adds: bool = True) -> Iterator[Trouble]:
        """Yield writes of other cores: sure ones, possible ones and, if asked, added ones."""
        kinds = [self._last, *(a for k, a in self._others.items() if adds or k != "added")]
        for array in kinds if 0 < self._first_write <= access.base else ():
            last = cut.of(array)
            bad = (last > 0) & (last <= access.base)
            if bad.any():
                yield self._trouble("core wrote", cut, bad, last)
                return

    def _trouble(
        self,
        kind: Literal["uninitialised", "unordered", "core wrote", "core read"],
        cut: Cut,
        bad: NDArray[np.bool_],
        stamps: Stamps | None = None,
        core: int = 0,
    ) -> Trouble:
        index, piece = cut.first(bad)
        step = 0 if stamps is None else int(stamps[index])
        return Trouble(kind, piece * self.piece_bytes, step, core)


# -- flags between cores: clocks travel with sets and end at waits --------------------------------
Clock = dict[str, int]
"""Per pipe, the number of its last step that is known to have finished."""
Place = tuple[int, int]
"""A core and one of its flags."""


def join(clock: Clock, other: Mapping[str, int]) -> None:
    """Let a clock know what another one knows."""
    for pipe, step in other.items():
        if step > clock.get(pipe, 0):
            clock[pipe] = step


class CrossOrder:
    """The cross-core flags of one crew: what each wait learns, and what may go wrong with a set."""

    def __init__(self, cores: int, team: int) -> None:
        """Start with all counters at 0."""
        self.counters = Counters(cores, team)
        self.team = team
        self.pending: dict[tuple[int, int, int, int], list[Clock]] = {}
        self.arrived: dict[Place, list[tuple[int, Clock]]] = {}
        self.waits: dict[Place, list[int]] = {}
        self.issued: list[list[Clock]] = [[{}] for _ in range(cores)]
        self.passed: dict[str, int] = {}
        self.last: dict[Place, dict[tuple[int, int], int]] = {}

    def set(self, core: int, instruction: program.Instruction, clock: Clock) -> Iterator[str]:
        """Take a set along with what its pipe knows; yield what may go wrong."""
        mode = instruction.number("mode")
        flag = instruction.number("id")
        mine = self.last.setdefault((core, flag), {})
        for r in self.counters.tells[core, mode]:
            arrived = self.arrived.setdefault((r, flag), [])
            mine[mode, r] = number = mine.get((mode, r), -1) + 1
            if number >= LIMIT and not self._over(r, flag, number - LIMIT, clock):
                yield f"cross-core flag {flag} of {core_name(r, self.team)} may exceed {LIMIT}"
            self.pending.setdefault((r, mode, flag, core), []).append(dict(clock))
            heard = [self.pending.get((r, mode, flag, s), []) for s in self.counters.hears[r, mode]]
            if all(heard):
                known: Clock = {}
                for clocks in heard:
                    join(known, clocks.pop(0))
                others = [(r, i) for i, (m, _) in enumerate(arrived) if m != mode][-1:]
                others += [(who, last) for (m, who), last in mine.items() if m != mode]
                if any(not self._over(who, flag, last, known) for who, last in others):
                    yield f"cross-core flag {flag} is set in mode {mode} before it was drained"
                arrived.append((mode, known))

    def _over(self, core: int, flag: int, number: int, clock: Clock) -> bool:
        """Tell whether a clock knows that wait `number` for a flag is over."""
        waits = self.waits.get((core, flag), [])
        return number < len(waits) and waits[number] <= clock.get(f"{core}.ISSUE", 0)

    def wait(self, core: int, flag: int, step: int) -> None:
        """Let the issue of a core learn what the next arrival for its flag knows."""
        waits = self.waits.setdefault((core, flag), [])
        known = dict(self.issued[core][-1])
        join(known, self.arrived[core, flag][len(waits)][1])
        known[f"{core}.ISSUE"] = step
        waits.append(step)
        self.issued[core].append(known)

    def passing(self, core: int, pipe: str, clock: Clock) -> None:
        """Let a pipe learn what its core knew when it issued the wait that the pipe passes."""
        self.passed[pipe] = self.passed.get(pipe, 0) + 1
        join(clock, self.issued[core][self.passed[pipe]])

    def left(self) -> Iterator[str]:
        """Yield the flags that are set more often than waited for."""
        for (core, flag), arrived in self.arrived.items():
            sets = [
                len(self.pending.get((core, m, flag, s), []))
                for (r, m), who in self.counters.hears.items()
                if r == core
                for s in who
            ]
            more = len(arrived) - len(self.waits.get((core, flag), [])) + max(sets, default=0)
            if more:
                name = core_name(core, self.team)
                yield f"cross-core flag {flag} of {name} is set {more} times more than waited for"
