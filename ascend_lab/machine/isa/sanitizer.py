"""Find what goes wrong between pipes: races, uninitialised reads, deadlocks, misused flags.

Happens-before is computed with one vector clock per pipe: a pipe's own order, plus set -> wait.
Two accesses to the same byte, one of them a write, that neither order covers are a race. Nothing
orders the cores of a launch, so whatever one of them writes no other may touch; in a mix launch
flags order those of an AI core. Atomic adds of several cores to one place are in order among
themselves, with nothing else. A copy that picks its row by an index is taken to touch every row it
may pick: a load needs all of them initialised, a store may have written any, and initialises none.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    SEVERAL,
    Access,
    Clock,
    CrossOrder,
    Space,
    Trouble,
    Write,
    join,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its kind, what happened, and the instruction that showed it.

    Kinds: out-of-bounds, illegal, overlap, uninitialised-read, race, deadlock, event-overflow,
    leak.
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
    """Run the program without values and return every fault found, each once.

    `filled` names the GM tensors that hold values before the launch; by default those that it
    never writes. A phase of a kernel finds what earlier phases wrote. Raises `SimulationError`
    when it has more than `limit_events` instructions: check a smaller shape, the code is the same.
    """
    kernel = as_kernel(program)
    if kernel.event_count > limit_events:
        needed = f"at most {limit_events} instructions to check"
        raise SimulationError(needed, str(kernel.event_count), "use smaller shapes")
    report = _Report()
    for phase in kernel.phases:
        for part in phase.parts:
            _check_static(part.program, chip, report)
        try:
            check_launch(chip, phase)
        except AscendLabError as error:
            report.add("illegal", str(error))
            return list(report.findings.values())
    written = [_written(phase) for phase in kernel.phases]
    names = {tensor.name for tensor in kernel.tensors}
    held = names.difference(*written) if filled is None else set(filled)
    if not report.has("out-of-bounds"):
        for phase, new in zip(kernel.phases, written, strict=True):
            checker = _Checker(phase, held, report)
            for crew in crews(phase):
                checker.run(crew, phase.mix or 1)
            held |= new
    return list(report.findings.values())


class _Report:
    """Findings by kind and instruction, so that a loop reports a fault once."""

    def __init__(self) -> None:
        self.findings: dict[tuple[str, str], Finding] = {}

    def add(self, kind: str, message: str, instruction: Instruction | str = "") -> None:
        text = str(instruction)
        self.findings.setdefault((kind, text or message), Finding(kind, message, text))

    def has(self, kind: str) -> bool:
        return any(found == kind for found, _ in self.findings)


def _check_static(program: Program, chip: Chip, report: _Report) -> None:
    """What needs no run: event ids, legality, bounds."""
    events: list[Event] = []
    for instruction, ranges in program.scoped():
        event = instruction.event
        if event is not None and event.id + event.count > chip.event_ids:
            message = f"{event}: ids go from 0 to {chip.event_ids - 1}"
            report.add("event-overflow", message, instruction)
            continue
        if event is not None and event not in events:
            for other in events:
                apart = other.id + other.count <= event.id or event.id + event.count <= other.id
                if (other.src, other.dst) == (event.src, event.dst) and not apart:
                    message = f"{event} and {other} share an id: a wait may take the other's flag"
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


def _written(launch: Launch) -> set[str]:
    """Names of the GM tensors a launch writes; adding alone needs a value there before."""
    return {
        i.dst.buffer.name
        for part in launch.parts
        for i, _ in part.program.instructions()
        if i.dst is not None and i.dst.space == "GM" and i.attr("atomic") != "add"
    }


def _buffers(launch: Launch) -> dict[str, list[Buffer]]:
    """Return the buffers of each on-chip memory ("UB") and each GM tensor ("GM x")."""
    groups: dict[str, list[Buffer]] = {}
    for part in launch.parts:
        for instruction, _ in part.program.instructions():
            for region in instruction.regions:
                groups.setdefault(_key(region), []).append(region.buffer)
    return groups


def _key(region: Region) -> str:
    return f"GM {region.buffer.name}" if region.space == "GM" else region.space


class _Checker:
    """Runs one crew after another over the same shadow memory; its cores take turns.

    What belongs to one core of several has its number in front: pipes, and spaces but the first's.
    """

    def __init__(self, launch: Launch, filled: Collection[str], report: _Report) -> None:
        self.buffers = _buffers(launch)
        self.filled = filled
        self.report = report
        self.spaces: dict[tuple[int, str], Space] = {}
        self.walks: dict[int, list[tuple[int, str, Instruction, dict[str, int]]]] = {}
        self.lanes: dict[int, list[tuple[Region, Lanes, Lanes]]] = {}
        self.ops = [""]
        self.starts: list[int] = []
        self.core, self.cross = 0, CrossOrder(1, 1)
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
                self._step(pipe, self.names[core][pipe], instruction, values)
        except SyncError as error:
            if "deadlock" in str(error) or not self.report.has("event-overflow"):
                self.report.add("deadlock", str(error))
            return
        for event, clocks in (item for raised in self.raised for item in raised.items()):
            if clocks:
                times = f"{len(clocks)} times more than it is waited for"
                self.report.add("leak", f"{event} is set {times}")
        for message in self.cross.left():
            self.report.add("leak", message)

    def _steps(
        self, crew: Sequence[walk.Core], team: int
    ) -> Iterator[tuple[int, str, Instruction, Mapping[str, int]]]:
        """Walk a crew; cores that wait for no other and run one program take the same steps."""
        program, binding = crew[0]
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
        """Return the shadow of the core's memory, or of a tensor."""
        group = _key(region)
        key = (-1 if region.space == "GM" else self.core), group
        space = self.spaces.get(key)
        if space is None:
            filled = region.space == "GM" and region.buffer.name in self.filled
            space = self.spaces[key] = Space(self.buffers[group], filled=filled)
        return space

    def _step(self, name: str, pipe: str, instruction: Instruction, env: Mapping[str, int]) -> None:
        clocks = self.clocks[self.core]
        step = len(self.ops)
        if name == "ALL":
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
            self._flag(instruction, instruction.event, clock)
            return
        if instruction.op in CROSS:
            self._cross(name, pipe, instruction, clock)
            return
        access = Access(step, pipe, clock, self.starts[-1], len(self.starts))
        for region in instruction.srcs:
            self._read(region, instruction, env, access)
        if id(instruction) not in self.lanes:
            self.lanes[id(instruction)] = sources_beside(instruction)
        for message in overlaps(instruction, self.lanes[id(instruction)], env):
            self.report.add("overlap", message, instruction)
        dst = instruction.dst
        if dst is not None:
            if instruction.at("accumulate", env):
                self._read(dst, instruction, env, access)
            space = self._space(dst)
            lanes = _written_lanes(instruction, dst)
            cut = space.cut(reach_of(instruction, dst), env)
            for trouble in space.write(cut, access, lanes, _write_kind(instruction)):
                self._trouble(trouble, "overwrites", space, instruction)

    def _read(
        self, region: Region, instruction: Instruction, env: Mapping[str, int], access: Access
    ) -> None:
        space = self._space(region)
        for trouble in space.read(space.cut(reach_of(instruction, region), env), access):
            self._trouble(trouble, "reads", space, instruction)

    def _flag(self, instruction: Instruction, event: Event, clock: Clock) -> None:
        raised = self.raised[self.core].setdefault(event, [])
        waited = self.waited[self.core].setdefault(event, [])
        if instruction.op == "wait_flag":
            join(clock, raised.pop(0))
            waited.append(dict(clock))
            return
        index = self.sets[self.core].get(event, 0)
        to = self.names[self.core][event.dst]
        self.sets[self.core][event] = index + 1
        needed = index - event.count
        if needed >= 0:
            seen = waited[needed] if needed < len(waited) else None
            if seen is None or seen[to] > clock.get(to, 0):
                message = f"{event} may be set again before it was waited for: the flag is lost"
                self.report.add("event-overflow", message, instruction)
        raised.append(dict(clock))

    def _cross(self, name: str, pipe: str, instruction: Instruction, clock: Clock) -> None:
        if instruction.op == "cross_set":
            for message in self.cross.set(self.core, instruction, clock):
                self.report.add("event-overflow", message, instruction)
        elif name == walk.ISSUE:
            self.cross.wait(self.core, instruction.number("id"), clock[pipe])
        else:
            self.cross.passing(self.core, pipe, clock)

    def _trouble(self, trouble: Trouble, verb: str, space: Space, instruction: Instruction) -> None:
        place = f"{space.name} byte {trouble.byte}"
        if trouble.kind == "uninitialised":
            message = f"{instruction.op} reads {place} that nothing has written"
            self.report.add("uninitialised-read", message, instruction)
        elif trouble.kind == "unordered":
            message = (
                f"{instruction.op} on {instruction.pipe} {verb} {place} "
                f"while nothing orders it after {self.ops[trouble.step]}; "
                "add a flag between them"
            )
            self.report.add("race", message, instruction)
        else:
            message = f"{self._cores(trouble, verb, space.name)}; no order between cores"
            key = ("race", space.name)
            self.report.findings.setdefault(key, Finding("race", message))

    def _cores(self, trouble: Trouble, verb: str, name: str) -> str:
        here = len(self.starts) - 1
        if trouble.kind == "core read":
            other = "other cores" if trouble.core == SEVERAL else f"core {trouble.core - 1}"
            return f"core {here} writes {name} byte {trouble.byte}, which {other} read"
        before = bisect_left(self.starts, trouble.step) - 1
        if verb == "overwrites":
            return f"cores {before} and {here} both write {name}"
        return f"core {here} reads {name} byte {trouble.byte}, which core {before} writes"


def _write_kind(instruction: Instruction) -> Write:
    if instruction.attr("atomic") == "add":
        return "added"
    stores = instruction.dst is not None and instruction.dst.space == "GM"
    return "maybe" if stores and programs.index_of(instruction) is not None else "sure"


def _written_lanes(instruction: Instruction, dst: Region) -> NDArray[np.bool_] | None:
    """Lanes a masked vector instruction writes, shaped to meet a cut; None means all."""
    bits = instruction.attr("mask", -1)
    reduces = instruction.op.startswith(("vcadd", "vcmax", "vcmin", "vcg"))
    if not isinstance(bits, int) or bits < 0 or reduces or instruction.op == "vsel":
        return None
    lanes = dst.elements // dst.sizes[0]
    return np.array([bits >> i & 1 for i in range(lanes)], bool).reshape((1, *dst.sizes[1:], 1))


# -- a destination over its source ----------------------------------------------------------------
# An instruction works repeat by repeat: a repeat reads its blocks, then writes its own, while the
# next one may be on its way. So a destination begins where the source does, which is in place, or
# shares no byte with it; in place no repeat reads what an earlier one has written, and where it
# works lane by lane no lane writes what another one reads in the same repeat.
Lanes = tuple[tuple[int, ...], tuple[int, ...], int, int, int, bool]
"""Sizes, strides in bytes, bytes of an element, elements a repeat, mask (-1: all lanes), and
whether a lane of the destination depends on its own lane of the source only."""


def overlaps(
    instruction: Instruction, beside: Sequence[tuple[Region, Lanes, Lanes]], env: Mapping[str, int]
) -> Iterator[str]:
    """Yield what is wrong with each source that the destination partly overlaps."""
    for src, written, read in beside:
        dst = instruction.out
        start = dst.byte_at(env)
        shared = _shared(written, read, src.byte_at(env) - start)
        if shared is not None:
            yield (
                f"{instruction.op}: a destination that begins where its source does, or "
                f"shares no byte with it; got {dst.space} byte {start + shared} of both; "
                "write to another buffer"
            )


def sources_beside(instruction: Instruction) -> list[tuple[Region, Lanes, Lanes]]:
    """Return the sources in the memory of the destination, with the lanes of both."""
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
    each = max(region.elements // main.sizes[0], 1)
    if op == "vbrcb":
        each *= operands.BLOCKS_PER_REPEAT
    elif op == "vtranspose":
        each = region.sizes[-1] * region.sizes[-2]
    mask = instruction.number("mask", -1)
    if op == "vsel" or (op in REDUCING and region is instruction.dst):
        mask = -1
    lane_by_lane = op not in (*REDUCING, *programs.WHOLE_BLOCKS, "vconv")
    return region.sizes, tuple(s * item for s in region.strides), item, each, mask, lane_by_lane


@lru_cache(4096)
def _shared(written: Lanes, read: Lanes, gap: int) -> int | None:
    """Return the first byte, from the destination's start on, at fault; the source is `gap` on."""
    (start, end) = _reach(written)
    (begin, stop) = _reach(read)
    if gap + begin >= end or start >= gap + stop:
        return None
    (stored, first) = _touched(written)
    (loaded, last) = _touched(read)
    loaded = loaded + gap
    low = min(stored.min(), loaded.min())
    span = int(max(stored.max(), loaded.max()) - low + 1)
    writes = np.full(span, -1)
    writes[(stored - low)[::-1]] = first[::-1]
    before = writes[loaded - low]
    bad = before >= 0
    if gap == 0:
        each = written[3] if written[5] else 1
        bad &= (last > before) | ((last < before) & (last // each == before // each))
    return int(loaded[bad].min()) if bad.any() else None


def _reach(lanes: Lanes) -> tuple[int, int]:
    """Return the bytes from the first to behind the last, counted from where lane 0 begins."""
    ends = [(size - 1) * stride for size, stride in zip(*lanes[:2], strict=True)]
    return sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends) + lanes[2]


def _touched(lanes: Lanes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes of all active lanes, and which lane, or only which repeat, each is of."""
    sizes, strides, item, each, mask, lane_by_lane = lanes
    starts = np.zeros(1, np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        starts = np.add.outer(starts, np.arange(size) * stride).ravel()
    index = np.arange(len(starts))
    if mask >= 0:
        active = np.array([mask >> i & 1 for i in range(each)], bool)[index % each]
        starts = starts[active]
        index = index[active]
    index = index if lane_by_lane else index // each
    return np.add.outer(starts, np.arange(item)).ravel(), np.repeat(index, item)
