"""The sanitizer's shadow memory: it stores the last step of each pipe on each piece of memory.

The numbers of steps (stamps) are stored in NumPy arrays laid out like the memory itself, so that
checking a tile takes a few array operations. Steps are numbered from 1 over all cores of a launch;
a stamp of 0 means that no step has touched the piece. `CrossOrder` at the end follows the flags
between cores.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ascend_lab.machine.isa import memory, program
from ascend_lab.machine.isa.launch import MAX_COUNTER, Counters, core_name

Stamps = NDArray[np.int32]
STAMP_BYTES = 4
Write = Literal["sure", "maybe", "added"]
"""A plain write, a write to a row that is picked at run time, or an atomic add."""

# the largest number in an array of int32; no launch has so many crews
SEVERAL_CORES = 2**31 - 1
"""Stored instead of a core's number if more than one core has read a piece."""


@dataclass(frozen=True, slots=True)
class Access:
    """One access to memory: its step, its pipe, the pipe's vector clock, and its core.

    `clock` gives, per pipe, the last step that is known to have finished. Steps up to `base` belong
    to crews (groups of cores) that were checked before. `core` is the number of the crew, from 1.
    """

    step: int
    pipe: str
    clock: Mapping[str, int]
    base: int
    core: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at `byte` of a space, with the step or core (0: unknown) that it conflicts with."""

    kind: Literal["uninitialised", "unordered", "core wrote", "core read"]
    byte: int
    step: int = 0
    core: int = 0


@dataclass(frozen=True, slots=True)
class ShadowView:
    """The pieces of a space that one access touches, as a view into any of the space's arrays."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, stamps: Stamps) -> Stamps:
        """Return the view of an array of stamps; NumPy raises if it leaves the array."""
        # NumPy takes offset and strides in bytes, here bytes of stamps
        return np.ndarray(self.shape, np.int32, stamps, self.offset, self.strides)

    def first_fault(self, bad: NDArray[np.bool_]) -> tuple[tuple[int, ...], int]:
        """Return (index, piece number) of the first True in an array of the view's shape."""
        # argmax of booleans is the position of the first True
        index = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), self.shape))
        stamp_byte = self.offset + sum(i * s for i, s in zip(index, self.strides, strict=True))
        return index, stamp_byte // STAMP_BYTES


@dataclass(slots=True)
class Trace:
    """The last step of one pipe on each piece of a space, and the latest of these steps."""

    stamps: Stamps
    latest: int = 0


class Space:
    """The shadow of one GM tensor or one on-chip memory, in pieces of `piece_bytes`.

    The size of a piece is the greatest common divisor of all element sizes, buffer addresses and
    slot distances: with fp16 and fp32 buffers in UB it is 2 bytes.
    """

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
            # GM tensors begin at 0 of their own space; gcd with 0 leaves the other number
            start, pitch = (buffer.address, buffer.slot_bytes) if self.on_chip else (0, 0)
            self.piece_bytes = math.gcd(self.piece_bytes, buffer.itemsize, start, pitch)
            size_bytes = max(size_bytes, start + buffer.size_bytes)
        self._pieces = size_bytes // self.piece_bytes
        self._last_write = self._blank()
        # Only GM is shared: the core (from 1) that has read a piece, or SEVERAL_CORES.
        self._reader = self._blank() if not self.on_chip else None
        self._uncertain_writes: dict[Write, Stamps] = {}
        self._writes: dict[str, Trace] = {}
        self._reads: dict[str, Trace] = {}
        # lets `_foreign_writes` skip a space that no earlier core has written
        self._first_write = 0

    def _blank(self) -> Stamps:
        return np.zeros(self._pieces, np.int32)

    def cut(self, region: memory.Region, env: Mapping[str, int]) -> ShadowView:
        """Return the pieces of a region for loop variables `env`.

        The cut has one axis more than the region: the pieces of an element.
        """
        buffer = region.buffer
        start = region.byte_at(env) - (0 if self.on_chip else buffer.address)
        pieces = buffer.itemsize // self.piece_bytes
        # fp32 in pieces of 2 bytes: an element is 2 pieces, whose stamps take 2 x 4 bytes
        element_stamp_bytes = pieces * STAMP_BYTES
        strides = (*(s * element_stamp_bytes for s in region.strides), STAMP_BYTES)
        # byte 64 of a memory in pieces of 2 bytes is piece 32, whose stamp begins at byte 128
        return ShadowView(start // self.piece_bytes * STAMP_BYTES, (*region.sizes, pieces), strides)

    def read(self, cut: ShadowView, access: Access) -> Iterator[Fault]:
        """Record a read; yield the faults that it reveals."""
        last_write = cut.of(self._last_write)
        # A core finds its on-chip memory uninitialised, whatever earlier crews have written.
        before_first = access.base if self.on_chip else 0
        if not self.filled and last_write.min() <= before_first:
            yield self._fault("uninitialised", cut, last_write <= before_first)
        yield from self._unordered(self._writes, cut, access)
        if self._reader is not None:
            yield from self._foreign_writes(cut, access)
            reader = cut.of(self._reader)
            only_this_core = (reader == 0) | (reader == access.core)
            reader[...] = np.where(only_this_core, access.core, SEVERAL_CORES)
        self._stamp(self._reads, cut, access)

    def write(
        self,
        cut: ShadowView,
        access: Access,
        lanes: NDArray[np.bool_] | None = None,
        kind: Write = "sure",
    ) -> Iterator[Fault]:
        """Record a write, of the masked `lanes` only; yield the faults that it reveals.

        A "maybe" write changes some of the rows, so that none of them counts as initialised. An
        "added" write needs an initialised value to add to, and other cores may add to it as well.
        """
        stamps = cut.of(self._last_write)
        if kind == "added" and not self.filled and stamps.min() <= 0:
            yield self._fault("uninitialised", cut, stamps <= 0)
        yield from self._unordered(self._writes, cut, access)
        yield from self._unordered(self._reads, cut, access)
        if self._reader is not None:
            # two atomic adds give the same sum in either order: those of other cores are no fault
            yield from self._foreign_writes(cut, access, adds=kind != "added")
            reader = cut.of(self._reader)
            bad = (reader != 0) & (reader != access.core)
            if bad.any():
                index, _ = cut.first_fault(bad)
                yield self._fault("core read", cut, bad, core=int(reader[index]))
        if kind != "sure":
            stamps = cut.of(self._uncertain_writes.setdefault(kind, self._blank()))
        np.copyto(stamps, access.step, where=True if lanes is None else lanes)
        self._first_write = self._first_write or access.step
        self._stamp(self._writes, cut, access)

    def _stamp(self, traces: dict[str, Trace], cut: ShadowView, access: Access) -> None:
        if access.pipe not in traces:
            traces[access.pipe] = Trace(self._blank())
        trace = traces[access.pipe]
        cut.of(trace.stamps)[...] = access.step
        trace.latest = access.step

    def _unordered(
        self, traces: Mapping[str, Trace], cut: ShadowView, access: Access
    ) -> Iterator[Fault]:
        """Yield a fault for each other pipe whose step on these pieces may still be running."""
        for pipe, trace in traces.items():
            # comparing `latest` is cheap and spares the arrays of pipes that have finished
            finished = access.clock.get(pipe, access.base)
            if pipe == access.pipe or trace.latest <= finished:
                continue
            stamps = cut.of(trace.stamps)
            if stamps.max() > finished:
                yield self._fault("unordered", cut, stamps > finished, stamps)

    def _foreign_writes(
        self, cut: ShadowView, access: Access, *, adds: bool = True
    ) -> Iterator[Fault]:
        """Yield a fault if another core has written, or may have written, to these pieces.

        With `adds` an atomic add by another core counts as well. All steps up to `access.base` are
        those of other cores.
        """
        if not 0 < self._first_write <= access.base:
            return
        uncertain = (a for k, a in self._uncertain_writes.items() if adds or k != "added")
        for array in (self._last_write, *uncertain):
            stamps = cut.of(array)
            bad = (stamps > 0) & (stamps <= access.base)
            if bad.any():
                yield self._fault("core wrote", cut, bad, stamps)
                return

    def _fault(
        self,
        kind: Literal["uninitialised", "unordered", "core wrote", "core read"],
        cut: ShadowView,
        bad: NDArray[np.bool_],
        stamps: Stamps | None = None,
        core: int = 0,
    ) -> Fault:
        index, piece = cut.first_fault(bad)
        step = 0 if stamps is None else int(stamps[index])
        return Fault(kind, piece * self.piece_bytes, step, core)


# -- flags between cores ---------------------------------------------------------------------------
Clock = dict[str, int]
"""Per pipe, the number of its last step that is known to have finished."""
FlagOfCore = tuple[int, int]
"""The number of a core and of one of its flags."""


def join(clock: Clock, other: Mapping[str, int]) -> None:
    """Raise every entry of a clock to that of another clock if it is later there."""
    for pipe, step in other.items():
        if step > clock.get(pipe, 0):
            clock[pipe] = step


class CrossOrder:
    """The cross-core flags of one crew: a set passes the clock of its pipe to the wait.

    - pending: clocks of sets that not all senders of a mode have made yet, by (receiver, mode,
      flag, sender)
    - arrived: (mode, joined clock) of the sets that all senders have made, by flag of the receiver;
      the next wait consumes the first
    - waits: the steps of the finished waits, by flag
    - issued: a core's clock after each of its waits
    - passed: how many of these waits a pipe has passed
    - last_set: the number of the last set, by (mode, receiver)
    """

    def __init__(self, cores: int, team: int) -> None:
        """Start with all counters at 0."""
        self.counters = Counters(cores, team)
        self.team = team
        self.pending: dict[tuple[int, int, int, int], list[Clock]] = {}
        self.arrived: dict[FlagOfCore, list[tuple[int, Clock]]] = {}
        self.waits: dict[FlagOfCore, list[int]] = {}
        self.issued: list[list[Clock]] = [[{}] for _ in range(cores)]
        self.passed: dict[str, int] = {}
        self.last_set: dict[FlagOfCore, dict[tuple[int, int], int]] = {}

    def set(self, core: int, instruction: program.Instruction, clock: Clock) -> Iterator[str]:
        """Record a set with the clock of its pipe; yield a message for each fault."""
        mode = instruction.int_attr("mode")
        flag = instruction.int_attr("id")
        last_set = self.last_set.setdefault((core, flag), {})
        for receiver in self.counters.receivers_of[core, mode]:
            arrived = self.arrived.setdefault((receiver, flag), [])
            # sets count from 0: the 16th has number 15, for which wait 0 must be over
            number = last_set.get((mode, receiver), -1) + 1
            last_set[mode, receiver] = number
            # a counter has 4 bits: before set number k, wait number k - 15 must be over
            if number >= MAX_COUNTER and not self._is_over(
                receiver, flag, number - MAX_COUNTER, clock
            ):
                name = core_name(receiver, self.team)
                yield f"cross-core flag {flag} of {name} may exceed {MAX_COUNTER}"
            self.pending.setdefault((receiver, mode, flag, core), []).append(dict(clock))
            senders = self.counters.senders_to[receiver, mode]
            pending = [self.pending.get((receiver, mode, flag, s), []) for s in senders]
            # two vector cores set a flag of their cube core: it arrives with the second set
            if all(pending):
                joined: Clock = {}
                for clocks in pending:
                    join(joined, clocks.pop(0))
                # One counter serves all modes. A flag may change its mode only when the waits for
                # its sets in the other mode are over: at the receiver, and at all cores that this
                # core has set it for.
                # only the last set in another mode matters: waits consume sets in order
                other_mode = [(receiver, i) for i, (m, _) in enumerate(arrived) if m != mode][-1:]
                other_mode += [(to, last) for (m, to), last in last_set.items() if m != mode]
                if any(not self._is_over(to, flag, last, joined) for to, last in other_mode):
                    yield f"cross-core flag {flag} is set in mode {mode} before it was drained"
                arrived.append((mode, joined))

    def _is_over(self, core: int, flag: int, number: int, clock: Clock) -> bool:
        """Tell whether wait `number` (from 0) for a flag is over, as far as a clock knows."""
        waits = self.waits.get((core, flag), [])
        return number < len(waits) and waits[number] <= clock.get(f"{core}.ISSUE", 0)

    def wait(self, core: int, flag: int, step: int) -> None:
        """End a wait: the core's issuing unit receives the clock of the next arrived set."""
        waits = self.waits.setdefault((core, flag), [])
        clock = dict(self.issued[core][-1])
        # wait k consumes the set that arrived as number k
        join(clock, self.arrived[core, flag][len(waits)][1])
        clock[f"{core}.ISSUE"] = step
        waits.append(step)
        self.issued[core].append(clock)

    def passing(self, core: int, pipe: str, clock: Clock) -> None:
        """Join to a pipe's clock what its core knew after the wait that the pipe now passes."""
        self.passed[pipe] = self.passed.get(pipe, 0) + 1
        # entry 0 is the empty clock from before the first wait: after k waits entry k is the latest
        join(clock, self.issued[core][self.passed[pipe]])

    def unconsumed_sets(self) -> Iterator[str]:
        """Yield a message for each flag that is set more often than it is waited for."""
        for (core, flag), arrived in self.arrived.items():
            pending_sets = [
                len(self.pending.get((core, mode, flag, s), []))
                for (receiver, mode), senders in self.counters.senders_to.items()
                if receiver == core
                for s in senders
            ]
            unused = len(arrived) - len(self.waits.get((core, flag), []))
            # vector core 0 set a flag twice, vector core 1 once: one set is never consumed
            unused += max(pending_sets, default=0)
            if unused:
                name = core_name(core, self.team)
                yield f"cross-core flag {flag} of {name} is set {unused} times more than waited for"
