"""Find what goes wrong between pipes: races, uninitialised reads, deadlocks, misused flags.

Happens-before is computed with one vector clock per pipe: a pipe's own order, plus set -> wait.
Two accesses to the same element, one of them a write, that neither order covers are a race.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ascend_lab.chip import Chip
from ascend_lab.errors import AscendLabError, SimulationError, SyncError
from ascend_lab.isa.legality import check_bounds, check_instruction
from ascend_lab.isa.memory import Buffer, Region
from ascend_lab.isa.program import Event, Instruction, Launch, Program, as_launch
from ascend_lab.isa.walk import interleave

Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its kind, what happened, and the instruction that showed it.

    Kinds: out-of-bounds, illegal, uninitialised-read, race, deadlock, event-overflow, leak.
    """

    kind: str
    message: str
    instruction: str = ""

    def __str__(self) -> str:
        """Print as `kind: message`."""
        return f"{self.kind}: {self.message}"


@dataclass(slots=True)
class _Cell:
    """What is known of one 32-byte block (GM: one element group): last write, later reads."""

    write: tuple[str, int, str] | None = None
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    clocks: dict[str, Clock] = field(default_factory=dict)
    cells: dict[tuple[str, int], _Cell] = field(default_factory=dict)
    flags: dict[Event, list[Clock]] = field(default_factory=dict)
    waited: dict[Event, list[Clock]] = field(default_factory=dict)
    sets: dict[Event, int] = field(default_factory=dict)

    def report(self, kind: str, message: str, instruction: Instruction | str = "") -> None:
        key = (kind, str(instruction) if instruction else message)
        self.findings.setdefault(key, Finding(kind, message, str(instruction)))


def sanitize(
    program: Program | Launch, chip: Chip, *, limit_events: int = 200_000
) -> list[Finding]:
    """Run the program without values and return every fault found, each once.

    Raises `SimulationError` when it has more than `limit_events` instructions: check a smaller
    shape, the code is the same.
    """
    launch = as_launch(program)
    total = sum(p.program.event_count * p.core_count for p in launch.parts)
    if total > limit_events:
        raise SimulationError(
            f"at most {limit_events} instructions to check", str(total), "use smaller shapes"
        )
    findings: dict[tuple[str, str], Finding] = {}
    written: dict[tuple[str, int], int] = {}
    core = 0
    for part in launch.parts:
        static = _static(part.program, chip)
        findings.update(static)
        for binding in part.bindings:
            if not any(kind == "out-of-bounds" for kind, _ in static):
                state = _run(part.program, dict(binding))
                findings.update(state.findings)
                _across_cores(state, written, core, findings)
            core += 1
    return list(findings.values())


def _static(program: Program, chip: Chip) -> dict[tuple[str, str], Finding]:
    state = _State()
    for instruction, ranges in program.scoped():
        try:
            check_instruction(chip, instruction)
        except AscendLabError as error:
            state.report("illegal", str(error), instruction)
        for region in instruction.regions:
            try:
                check_bounds(region, ranges, instruction.op)
            except AscendLabError as error:
                state.report("out-of-bounds", str(error), instruction)
        event = instruction.event
        if event is not None and event.id + event.count > chip.event_ids:
            state.report(
                "event-overflow", f"{event}: ids go from 0 to {chip.event_ids - 1}", instruction
            )
    return state.findings


def _run(program: Program, env: Mapping[str, int]) -> _State:
    state = _State(clocks={p: {} for p in program.pipes})
    written = _initialised(program)
    try:
        for instruction, values in interleave(program, env):
            _step(state, instruction, values, written)
    except SyncError as error:
        state.report("deadlock", str(error))
        return state
    for event, clocks in state.flags.items():
        if clocks:
            state.report("leak", f"{event} is set {len(clocks)} times more than it is waited for")
    return state


def _initialised(program: Program) -> set[str]:
    """GM tensors that the program reads but never writes come filled from outside."""
    outputs = {i.dst.buffer.name for i, _ in program.instructions() if i.dst is not None}
    return {b.name for b in program.tensors if b.name not in outputs}


def _step(
    state: _State, instruction: Instruction, env: Mapping[str, int], filled: set[str]
) -> None:
    if instruction.pipe == "ALL":
        merged: Clock = {}
        for clock in state.clocks.values():
            _join(merged, clock)
        for clock in state.clocks.values():
            clock.update(merged)
        return
    pipe = instruction.pipe
    clock = state.clocks[pipe]
    clock[pipe] = clock.get(pipe, 0) + 1
    event = instruction.event
    if event is not None:
        _flag(state, instruction, event, clock)
        return
    for region in instruction.srcs:
        for key in _blocks(region, env):
            _read(state, instruction, key, pipe, clock, region.buffer.name in filled)
    accumulates = instruction.op == "mmad" and _accumulates(instruction, env)
    if instruction.dst is not None:
        for key in _blocks(instruction.dst, env):
            if accumulates:
                _read(state, instruction, key, pipe, clock, False)
            _write(state, instruction, key, pipe, clock)


def _accumulates(instruction: Instruction, env: Mapping[str, int]) -> bool:
    value = instruction.attr("accumulate")
    return bool(value if isinstance(value, int) else value.at(env))  # type: ignore[union-attr]


def _flag(state: _State, instruction: Instruction, event: Event, clock: Clock) -> None:
    queue = state.flags.setdefault(event, [])
    waited = state.waited.setdefault(event, [])
    if instruction.op == "wait_flag":
        _join(clock, queue.pop(0))
        waited.append(dict(clock))
        return
    index = state.sets.get(event, 0)
    state.sets[event] = index + 1
    needed = index - event.count
    if needed >= 0:
        seen = waited[needed] if needed < len(waited) else None
        if seen is None or seen[event.dst] > clock.get(event.dst, 0):
            state.report(
                "event-overflow",
                f"{event} may be set again before it was waited for: the flag is lost",
                instruction,
            )
    queue.append(dict(clock))


def _join(clock: Clock, other: Clock) -> None:
    for pipe, value in other.items():
        if value > clock.get(pipe, 0):
            clock[pipe] = value


def _blocks(region: Region, env: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield (space, element address in bytes) keys of what a region touches."""
    buffer: Buffer = region.buffer
    base = region.offset.at(env)
    space, start = buffer.name, 0
    if buffer.space != "GM":
        space = buffer.space
        start = buffer.address + (region.slot.at(env) % buffer.slots) * buffer.slot_bytes
    offsets = [base]
    for size, stride in zip(region.sizes, region.strides, strict=True):
        offsets = [o + i * stride for o in offsets for i in range(size)]
    grain = min(buffer.itemsize, 2)
    seen = set()
    for offset in offsets:
        for byte in range(0, buffer.itemsize, grain):
            seen.add(start + offset * buffer.itemsize + byte)
    return ((space, key) for key in seen)


def _ordered(clock: Clock, pipe: str, stamp: int, own: str) -> bool:
    return pipe == own or clock.get(pipe, 0) >= stamp


def _read(
    state: _State,
    instruction: Instruction,
    key: tuple[str, int],
    pipe: str,
    clock: Clock,
    filled: bool,
) -> None:
    cell = state.cells.setdefault(key, _Cell())
    if cell.write is None:
        if not filled:
            state.report(
                "uninitialised-read",
                f"{instruction.op} reads {key[0]} byte {key[1]} that nothing has written",
                instruction,
            )
    elif not _ordered(clock, cell.write[0], cell.write[1], pipe):
        state.report("race", _race("reads", instruction, key, cell.write[2]), instruction)
    cell.reads[pipe] = (clock[pipe], instruction.op)


def _write(
    state: _State, instruction: Instruction, key: tuple[str, int], pipe: str, clock: Clock
) -> None:
    cell = state.cells.setdefault(key, _Cell())
    if cell.write is not None and not _ordered(clock, cell.write[0], cell.write[1], pipe):
        state.report("race", _race("overwrites", instruction, key, cell.write[2]), instruction)
    for other, (stamp, op) in cell.reads.items():
        if not _ordered(clock, other, stamp, pipe):
            state.report("race", _race("overwrites", instruction, key, op), instruction)
    cell.write, cell.reads = (pipe, clock[pipe], instruction.op), {}


def _race(verb: str, instruction: Instruction, key: tuple[str, int], other: str) -> str:
    return (
        f"{instruction.op} on {instruction.pipe} {verb} {key[0]} byte {key[1]} "
        f"while nothing orders it after {other}; add a flag between them"
    )


def _across_cores(
    state: _State,
    written: dict[tuple[str, int], int],
    core: int,
    findings: dict[tuple[str, str], Finding],
) -> None:
    on_chip = {"L1", "L0A", "L0B", "L0C", "UB", "BT"}
    for key, cell in state.cells.items():
        if key[0] in on_chip or cell.write is None:
            continue
        other = written.setdefault(key, core)
        if other != core:
            message = f"cores {other} and {core} both write {key[0]}; no order between cores"
            findings.setdefault(("race", key[0]), Finding("race", message))
