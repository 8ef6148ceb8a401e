"""The sanitizer finds races, uninitialised reads, deadlocks and misused flags in a program.

If the vector unit reads a tile that MTE2 loads, and no flag makes it wait for the load, that is a
race: on hardware the result may be right or wrong. Happens-before is computed with one vector clock
per pipe, from two rules: the instructions of a pipe run in order, and a wait comes after the set it
waits for. Two accesses to the same byte, one of them a write, are a race unless one of them happens
before the other.

Nothing orders the cores of a launch: no core may touch what another core writes. There are two
exceptions: in a mix launch flags order the cores of an AI core, and atomic adds of several cores to
the same bytes do not race with each other.

A copy that picks its row by an index counts as touching every row that it may pick. A load needs
all of these rows initialised. A store may have written any of them, so that none of them counts as
initialised afterwards.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import AscendLabError, SimulationError, SyncError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import instructions, operands, program as programs, walk
from ascend_lab.machine.isa.launch import Launch, Runnable, as_kernel, check_launch, crews
from ascend_lab.machine.isa.memory import Buffer, Region
from ascend_lab.machine.isa.program import (
    CROSS,
    PIPES,
    REDUCING,
    Event,
    Instruction,
    Program,
    reach_of,
)
from ascend_lab.machine.isa.shadow import (
    SEVERAL_CORES,
    Access,
    Clock,
    CrossOrder,
    Fault,
    Space,
    Write,
    join,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its type (`kind`), a message, and the text of the instruction that caused it.

    The types are out-of-bounds, illegal, overlap, uninitialised-read, race, deadlock,
    event-overflow and leak.
    """

    kind: str
    message: str
    instruction: str = ""

    def __str__(self) -> str:
        """Print as `kind: message`."""
        return f"{self.kind}: {self.message}"


def sanitize(
    program: Runnable,
    chip: Chip,
    *,
    filled: Collection[str] | None = None,
    limit_events: int = 200_000,
) -> list[Finding]:
    """Step through a program without computing values and return every fault, each once.

    `filled` names the GM tensors that hold values before the launch; by default these are the
    tensors that it never writes. Later phases of a kernel may read what earlier ones wrote. Raises
    `SimulationError` for a program that runs more than `limit_events` instructions: check a smaller
    shape, whose code is the same.
    """
    kernel = as_kernel(program)
    if kernel.executed_count > limit_events:
        needed = f"at most {limit_events} instructions to check"
        raise SimulationError(needed, str(kernel.executed_count), "use smaller shapes")
    report = _Report()
    for phase in kernel.phases:
        for part in phase.parts:
            _check_static(part.program, chip, report)
        try:
            check_launch(chip, phase)
        except AscendLabError as error:
            report.add("illegal", str(error))
            return list(report.findings.values())
    written = [_written_tensors(phase) for phase in kernel.phases]
    names = {tensor.name for tensor in kernel.tensors}
    filled_now = names.difference(*written) if filled is None else set(filled)
    if not report.has("out-of-bounds"):  # shadow memory is as large as the buffers, no larger
        for phase, written_in_phase in zip(kernel.phases, written, strict=True):
            checker = _Checker(phase, filled_now, report)
            for crew in crews(phase):
                checker.run(crew, phase.mix or 1)
            filled_now |= written_in_phase
    return list(report.findings.values())


class _Report:
    """Findings by type and instruction, so that a fault in a loop is reported once."""

    def __init__(self) -> None:
        self.findings: dict[tuple[str, str], Finding] = {}

    def add(self, kind: str, message: str, instruction: Instruction | str = "") -> None:
        text = str(instruction)
        self.findings.setdefault((kind, text or message), Finding(kind, message, text))

    def has(self, kind: str) -> bool:
        return any(reported == kind for reported, _ in self.findings)


def _check_static(program: Program, chip: Chip, report: _Report) -> None:
    """Check what does not depend on the order of steps: event ids, the chip's rules, bounds."""
    events: list[Event] = []
    for instruction, ranges in program.scoped():
        event = instruction.event
        if event is not None and event.id + event.count > chip.event_ids:
            message = f"{event}: ids go from 0 to {chip.event_ids - 1}"
            report.add("event-overflow", message, instruction)
            continue
        if event is not None and event not in events:
            for earlier in events:
                # ids 0..1 and 1..2 between the same two pipes overlap
                is_before = event.id + event.count <= earlier.id
                is_after = earlier.id + earlier.count <= event.id
                same_pipes = (earlier.src, earlier.dst) == (event.src, event.dst)
                if same_pipes and not is_before and not is_after:
                    message = f"{event} and {earlier} share an id: a wait may take the other's flag"
                    report.add("illegal", message, instruction)
            events.append(event)
        try:
            instructions.check_instruction(chip, instruction)
        except AscendLabError as error:
            report.add("illegal", str(error), instruction)
        for region in instruction.regions:
            try:
                instructions.check_bounds(reach_of(instruction, region), ranges, instruction.op)
            except AscendLabError as error:
                report.add("out-of-bounds", str(error), instruction)


def _written_tensors(launch: Launch) -> set[str]:
    """Return the GM tensors a launch writes; an atomic add reads as well, so it does not count."""
    return {
        i.dst.buffer.name
        for part in launch.parts
        for i, _ in part.program.instructions()
        if i.dst is not None and i.dst.space == "GM" and i.attr("atomic") != "add"
    }


def _buffers(launch: Launch) -> dict[str, list[Buffer]]:
    """Return the buffers of each on-chip memory ("UB") and each GM tensor ("GM x")."""
    by_space: dict[str, list[Buffer]] = {}
    for part in launch.parts:
        for instruction, _ in part.program.instructions():
            for region in instruction.regions:
                by_space.setdefault(_space_name(region), []).append(region.buffer)
    return by_space


def _space_name(region: Region) -> str:
    return f"GM {region.buffer.name}" if region.space == "GM" else region.space


class _Checker:
    """Steps through the crews of a launch, one after another, over the same shadow memory.

    A crew is a group of cores that may wait for each other; their steps are interleaved. State that
    belongs to a core is a list with one entry per core of the crew; the name of a pipe begins with
    the number of its core ("0.MTE2"). Steps are numbered over all crews.

    - spaces: the shadow of each memory, by core (-1 for GM) and name
    - walks: the steps of a crew, by the identity of its first program
    - lanes: the sources that a destination may overlap, by the instruction's identity
    - ops: the instruction of each step; `starts[i]` is the last step before crew i
    - core: the number in its crew of the core whose step is checked now
    - cross: the flags between the cores of the crew
    - clocks: by pipe, its vector clock
    - names: by pipe, its name with the number of the core
    - raised: by event, the clocks of the flags that are set and not yet waited for
    - waited: by event, the clocks after each of its waits
    - sets: by event, how often it was set
    """

    def __init__(self, launch: Launch, filled: Collection[str], report: _Report) -> None:
        self.buffers = _buffers(launch)
        self.filled = filled
        self.report = report
        self.spaces: dict[tuple[int, str], Space] = {}
        self.walks: dict[int, list[tuple[int, str, Instruction, dict[str, int]]]] = {}
        self.lanes: dict[int, list[tuple[Region, Lanes, Lanes]]] = {}
        self.ops = [""]  # steps count from 1; in shadow memory 0 means that no step was there
        self.starts: list[int] = []
        self.core = 0
        self.cross = CrossOrder(1, 1)
        self.clocks: list[dict[str, Clock]] = []
        self.names: list[dict[str, str]] = []
        self.raised: list[dict[Event, list[Clock]]] = []
        self.waited: list[dict[Event, list[Clock]]] = []
        self.sets: list[dict[Event, int]] = []

    def run(self, crew: Sequence[walk.Core], team: int) -> None:
        self.starts.append(len(self.ops) - 1)
        self.cross = CrossOrder(len(crew), team)
        self.clocks = [{pipe: {} for pipe in (*p.pipes, walk.ISSUE)} for p, _ in crew]
        pipes = (*PIPES, walk.ISSUE, "ALL")
        self.names = [{pipe: f"{core}.{pipe}" for pipe in pipes} for core in range(len(crew))]
        self.raised = [{} for _ in crew]
        self.waited = [{} for _ in crew]
        self.sets = [{} for _ in crew]
        try:
            for core, pipe, instruction, values in self._steps(crew, team):
                self.core = core
                self._check_step(pipe, self.names[core][pipe], instruction, values)
        except SyncError as error:
            # counters that overflow in the walk add nothing to an event-overflow found before
            if "deadlock" in str(error) or not self.report.has("event-overflow"):
                self.report.add("deadlock", str(error).removeprefix("deadlock: "))
            return
        for event, clocks in (item for raised in self.raised for item in raised.items()):
            if clocks:
                times = f"{len(clocks)} times more than it is waited for"
                self.report.add("leak", f"{event} is set {times}")
        for message in self.cross.unconsumed_sets():
            self.report.add("leak", message)

    def _steps(
        self, crew: Sequence[walk.Core], team: int
    ) -> Iterator[tuple[int, str, Instruction, Mapping[str, int]]]:
        """Yield the steps of a crew in an order that the flags allow.

        The steps of a crew of one core are remembered for other cores that run the same program.
        """
        program, binding = crew[0]
        # these cores take the same steps; only the values of their params, and so their addresses,
        # differ
        if len(crew) == 1 and id(program) in self.walks:
            for core, pipe, instruction, values in self.walks[id(program)]:
                yield core, pipe, instruction, {**values, **binding}
            return
        steps = []
        for step in walk.interleave_cores(crew, team=team):
            steps.append(step)
            yield step
        self.walks[id(program)] = steps

    def _space(self, region: Region) -> Space:
        """Return the shadow of a GM tensor, which all cores share, or of an on-chip memory."""
        name = _space_name(region)
        key = (-1 if region.space == "GM" else self.core), name
        space = self.spaces.get(key)
        if space is None:
            filled = region.space == "GM" and region.buffer.name in self.filled
            space = Space(self.buffers[name], filled=filled)
            self.spaces[key] = space
        return space

    def _check_step(
        self, name: str, pipe: str, instruction: Instruction, env: Mapping[str, int]
    ) -> None:
        """Check one step of a core's pipe `name`, which is called `pipe` within the crew."""
        clocks = self.clocks[self.core]
        step = len(self.ops)
        if name == "ALL":  # after a barrier the steps of all pipes before it are known to be over
            merged: Clock = {}
            for clock in clocks.values():
                join(merged, clock)
            for clock in clocks.values():
                clock.update(merged)
            return
        clock = clocks[name]
        clock[pipe] = step
        self.ops.append(instruction.op)
        if instruction.event is not None:
            self._check_flag(instruction, instruction.event, clock)
            return
        if instruction.op in CROSS:
            self._check_cross_flag(name, pipe, instruction, clock)
            return
        access = Access(step, pipe, clock, self.starts[-1], len(self.starts))
        for region in instruction.srcs:
            self._check_read(region, instruction, env, access)
        if id(instruction) not in self.lanes:
            self.lanes[id(instruction)] = sources_in_same_memory(instruction)
        for message in overlaps(instruction, self.lanes[id(instruction)], env):
            self.report.add("overlap", message, instruction)
        dst = instruction.dst
        if dst is not None:
            if instruction.attr_at("accumulate", env):  # C += A @ B reads C
                self._check_read(dst, instruction, env, access)
            space = self._space(dst)
            lanes = _written_lanes(instruction, dst)
            cut = space.cut(reach_of(instruction, dst), env)
            kind = _write_kind(instruction)
            for fault in space.write(cut, access, lanes, kind):
                self._report_fault(fault, "overwrites", space, instruction)

    def _check_read(
        self, region: Region, instruction: Instruction, env: Mapping[str, int], access: Access
    ) -> None:
        space = self._space(region)
        for fault in space.read(space.cut(reach_of(instruction, region), env), access):
            self._report_fault(fault, "reads", space, instruction)

    def _check_flag(self, instruction: Instruction, event: Event, clock: Clock) -> None:
        """Pass a pipe's clock from a set to its wait, and check that no flag is set twice.

        The sets of an event use its `count` ids in turn: set number k (from 0) has the same id as
        set k - count, so that wait number k - count must happen before it.
        """
        raised = self.raised[self.core].setdefault(event, [])
        waited = self.waited[self.core].setdefault(event, [])
        if instruction.op == "wait_flag":
            join(clock, raised.pop(0))
            waited.append(dict(clock))
            return
        set_number = self.sets[self.core].get(event, 0)
        waiting_pipe = self.names[self.core][event.dst]
        self.sets[self.core][event] = set_number + 1
        wait_number = set_number - event.count
        if wait_number >= 0:
            wait = waited[wait_number] if wait_number < len(waited) else None
            if wait is None or wait[waiting_pipe] > clock.get(waiting_pipe, 0):
                message = f"{event} may be set again before it was waited for: the flag is lost"
                self.report.add("event-overflow", message, instruction)
        raised.append(dict(clock))

    def _check_cross_flag(
        self, name: str, pipe: str, instruction: Instruction, clock: Clock
    ) -> None:
        if instruction.op == "cross_set":
            for message in self.cross.set(self.core, instruction, clock):
                self.report.add("event-overflow", message, instruction)
        elif name == walk.ISSUE:
            self.cross.wait(self.core, instruction.int_attr("id"), clock[pipe])
        else:
            self.cross.passing(self.core, pipe, clock)

    def _report_fault(
        self, fault: Fault, verb: str, space: Space, instruction: Instruction
    ) -> None:
        location = f"{space.name} byte {fault.byte}"
        if fault.kind == "uninitialised":
            message = f"{instruction.op} reads {location} that nothing has written"
            self.report.add("uninitialised-read", message, instruction)
        elif fault.kind == "unordered":
            message = (
                f"{instruction.op} on {instruction.pipe} {verb} {location} "
                f"while nothing orders it after {self.ops[fault.step]}; "
                "add a flag between them"
            )
            self.report.add("race", message, instruction)
        else:
            conflict = self._conflict_of_cores(fault, verb, space.name)
            message = f"{conflict}; no order between cores"
            key = ("race", space.name)
            self.report.findings.setdefault(key, Finding("race", message))

    def _conflict_of_cores(self, fault: Fault, verb: str, name: str) -> str:
        current = len(self.starts) - 1
        if fault.kind == "core read":
            readers = "other cores" if fault.core == SEVERAL_CORES else f"core {fault.core - 1}"
            return f"core {current} writes {name} byte {fault.byte}, which {readers} read"
        writer = bisect_left(self.starts, fault.step) - 1
        if verb == "overwrites":
            return f"cores {writer} and {current} both write {name}"
        return f"core {current} reads {name} byte {fault.byte}, which core {writer} writes"


def _write_kind(instruction: Instruction) -> Write:
    if instruction.attr("atomic") == "add":
        return "added"
    stores = instruction.dst is not None and instruction.dst.space == "GM"
    return "maybe" if stores and programs.index_of(instruction) is not None else "sure"


def _written_lanes(instruction: Instruction, dst: Region) -> NDArray[np.bool_] | None:
    """Return which lanes a vector instruction writes, in a shape that broadcasts to its cut.

    None means all lanes. The mask of a reduction chooses the lanes read, that of vsel the source.
    """
    bits = instruction.attr("mask", -1)
    reduces = instruction.op.startswith(("vcadd", "vcmax", "vcmin", "vcg"))
    if not isinstance(bits, int) or bits < 0 or reduces or instruction.op == "vsel":
        return None
    lanes = dst.elements // dst.sizes[0]
    return np.array([bits >> i & 1 for i in range(lanes)], bool).reshape((1, *dst.sizes[1:], 1))


# -- a destination over its source ----------------------------------------------------------------
# A vector instruction works repeat by repeat: each repeat reads its source blocks, then writes its
# destination blocks, while the next repeat may have begun to read. Two layouts are safe:
#   apart: destination and source share no byte;
#   in place: both begin at the same byte, no repeat reads what an earlier repeat has written, and
#     in an instruction that works lane by lane no lane writes what another lane of the same repeat
#     reads.
# Example: vadds with 128 fp16 lanes per repeat, whose dst begins 64 elements after src, is unsafe:
# repeat 0 writes elements 64..191 of the source, of which repeat 1 reads those from 128 on.
class Lanes(NamedTuple):
    """The lanes of one operand of a vector instruction, in the order in which it works on them.

    `mask` is -1 for all lanes. `lane_by_lane` says that a lane of the destination depends on the
    same lane of the source only.
    """

    sizes: tuple[int, ...]
    byte_strides: tuple[int, ...]
    item_bytes: int
    lanes_per_repeat: int
    mask: int
    lane_by_lane: bool


def overlaps(
    instruction: Instruction, sources: Sequence[tuple[Region, Lanes, Lanes]], env: Mapping[str, int]
) -> Iterator[str]:
    """Yield a message for each source that the destination overlaps in an unsafe way.

    `sources` comes from `sources_in_same_memory`, which depends on the instruction only; `env`
    gives the loop variables, on which the distance between the regions depends.
    """
    for src, written, read in sources:
        dst = instruction.out
        start = dst.byte_at(env)
        clash = _first_clash(written, read, src.byte_at(env) - start)
        if clash is not None:
            yield (
                f"{instruction.op}: a destination that begins where its source does, or "
                f"shares no byte with it; got {dst.space} byte {start + clash} of both; "
                "write to another buffer"
            )


def sources_in_same_memory(instruction: Instruction) -> list[tuple[Region, Lanes, Lanes]]:
    """Return the sources in the destination's memory, each with the lanes written and read."""
    dst = instruction.dst
    if dst is None or instruction.op not in programs.VECTOR_OPS:
        return []
    written = _lanes(instruction, dst)
    sources = (src for src in instruction.srcs if src.space == dst.space)
    return [(src, written, _lanes(instruction, src)) for src in sources]


def _lanes(instruction: Instruction, region: Region) -> Lanes:
    op = instruction.op
    item = region.buffer.itemsize
    main = instruction.srcs[0] if op in REDUCING else instruction.dst
    assert main is not None
    per_repeat = max(region.elements // main.sizes[0], 1)
    if op == "vbrcb":  # its first axis counts blocks, of which a repeat makes 8
        per_repeat *= operands.BLOCKS_PER_REPEAT
    elif op == "vtranspose":
        per_repeat = region.sizes[-1] * region.sizes[-2]
    mask = instruction.int_attr("mask", -1)
    if op == "vsel" or (op in REDUCING and region is instruction.dst):
        mask = -1
    lane_by_lane = op not in (*REDUCING, *programs.WHOLE_BLOCKS, "vconv")
    byte_strides = tuple(s * item for s in region.strides)
    return Lanes(region.sizes, byte_strides, item, per_repeat, mask, lane_by_lane)


@lru_cache(4096)
def _first_clash(written: Lanes, read: Lanes, gap: int) -> int | None:
    """Return the first byte that is overwritten while it is needed, or None if all is safe.

    Bytes count from the start of the destination; the source begins `gap` bytes further on.
    """
    write_start, write_end = _byte_range(written)
    read_start, read_end = _byte_range(read)
    if gap + read_start >= write_end or write_start >= gap + read_end:
        return None
    written_bytes, writers = _touched(written)
    read_bytes, readers = _touched(read)
    read_bytes = read_bytes + gap
    low = min(written_bytes.min(), read_bytes.min())
    span = int(max(written_bytes.max(), read_bytes.max()) - low + 1)
    # The first lane that writes each byte, -1 for none: assigned backwards, the first one stays.
    first_writer = np.full(span, -1)
    first_writer[(written_bytes - low)[::-1]] = writers[::-1]
    writer = first_writer[read_bytes - low]
    bad = writer >= 0
    if gap == 0:
        # In place a byte may be written by its own lane or in a later repeat. Reads by a later lane
        # are faults, and so are reads by an earlier lane of the same repeat.
        per_repeat = written.lanes_per_repeat if written.lane_by_lane else 1
        same_repeat = readers // per_repeat == writer // per_repeat
        bad &= (readers > writer) | ((readers < writer) & same_repeat)
    return int(read_bytes[bad].min()) if bad.any() else None


def _byte_range(lanes: Lanes) -> tuple[int, int]:
    """Return the first byte and the byte behind the last, counted from the start of lane 0."""
    pairs = zip(lanes.sizes, lanes.byte_strides, strict=True)
    ends = [(size - 1) * stride for size, stride in pairs]
    return sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends) + lanes.item_bytes


def _touched(lanes: Lanes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes of all active lanes, and for each byte its lane.

    Where lanes depend on each other (reductions, transposes) the number of the repeat stands for
    the lane.
    """
    starts = np.zeros(1, np.int64)
    for size, stride in zip(lanes.sizes, lanes.byte_strides, strict=True):
        starts = np.add.outer(starts, np.arange(size) * stride).ravel()
    index = np.arange(len(starts))
    per_repeat = lanes.lanes_per_repeat
    if lanes.mask >= 0:
        active = np.array([lanes.mask >> i & 1 for i in range(per_repeat)], bool)
        is_active = active[index % per_repeat]
        starts = starts[is_active]
        index = index[is_active]
    numbers = index if lanes.lane_by_lane else index // per_repeat
    item = lanes.item_bytes
    return np.add.outer(starts, np.arange(item)).ravel(), np.repeat(numbers, item)
