"""How long a program takes: `simulate(program, chip)` returns a `Timeline`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from ascend_lab.chip import Chip
from ascend_lab.errors import SimulationError
from ascend_lab.isa.instructions import mmad_shape
from ascend_lab.isa.legality import program_unit
from ascend_lab.isa.program import Launch, Program, as_launch
from ascend_lab.sim.compiled import WORK, Compiled, compile_program
from ascend_lab.sim.cost import Surroundings, instruction_cost
from ascend_lab.sim.fast import NotComposableError, run_fast
from ascend_lab.sim.reference import run_reference
from ascend_lab.sim.timeline import Timeline
from ascend_lab.sim.traffic import Traffic, analyse

Engine = Literal["fast", "reference"]
MAX_SLOWDOWN = 1024.0


def simulate(program: Program | Launch, chip: Chip, *, engine: Engine = "fast") -> Timeline:
    """Time a program or a launch on `chip`; both engines give the same cycles.

    All active cores share L2 and memory evenly. No launch ends before device memory has moved all
    its bytes; where that is the limit, the time is memory's, and the copies from memory are
    stretched (`memory_slowdown`) until the pipes fill it. Raises `SimulationError` (too many
    cores, unknown engine) and `SyncError` (deadlock).
    """
    if engine not in ("fast", "reference"):
        raise SimulationError("engine 'fast' or 'reference'", repr(engine), "choose one")
    launch = as_launch(program)
    unit = program_unit(chip, launch.parts[0].program) if launch.parts else "core"
    if launch.core_count > chip.cores_of(unit):
        raise SimulationError(
            f"at most {chip.cores_of(unit)} {unit} cores on {chip.name}",
            str(launch.core_count),
            "launch fewer blocks",
        )
    traffic = analyse(launch, chip)
    memory_cycles = math.ceil(
        traffic.memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz - 1e-9
    )
    around = Surroundings(launch.core_count, traffic.fresh)
    cycles, slowest = _time(launch, chip, around, engine)
    if 0 < cycles < memory_cycles:
        around = _stretched(launch, chip, around, memory_cycles)
        cycles, slowest = memory_cycles, _time(launch, chip, around, "fast")[1]
    return _timeline(launch, chip, traffic, around, cycles, slowest)


def _stretched(
    launch: Launch, chip: Chip, around: Surroundings, memory_cycles: int
) -> Surroundings:
    """Return the largest slowdown of memory that still ends within `memory_cycles`."""
    low, high = 1.0, 2.0
    while high < MAX_SLOWDOWN:
        if _time(launch, chip, replace(around, memory_slowdown=high), "fast")[0] > memory_cycles:
            break
        low, high = high, 2.0 * high
    for _ in range(12):
        middle = (low + high) / 2
        slower = replace(around, memory_slowdown=middle)
        if _time(launch, chip, slower, "fast")[0] > memory_cycles:
            high = middle
        else:
            low = middle
    return replace(around, memory_slowdown=low)


def run_cycles(compiled: Compiled, engine: Engine) -> int:
    """Return the cycles of one core's compiled program."""
    if engine == "reference":
        return run_reference(compiled)[0]
    try:
        return run_fast(compiled)
    except NotComposableError:
        return run_reference(compiled)[0]


def _time(launch: Launch, chip: Chip, around: Surroundings, engine: Engine) -> tuple[int, Compiled]:
    slowest: tuple[int, Compiled] | None = None
    for part in launch.parts:
        compiled = compile_program(part.program, chip, around)
        cycles = run_cycles(compiled, engine)
        if slowest is None or cycles > slowest[0]:
            slowest = (cycles, compiled)
    if slowest is None:
        raise SimulationError("a launch of at least one core", "none", "add a part")
    return slowest


def _timeline(
    launch: Launch,
    chip: Chip,
    traffic: Traffic,
    around: Surroundings,
    cycles: int,
    slowest: Compiled,
) -> Timeline:
    busy = dict.fromkeys(slowest.pipes, 0)
    for step, runs, each in zip(slowest.steps, slowest.runs(), slowest.cycles, strict=True):
        if step.kind == WORK and slowest.sources[step.source].op != "barrier":
            busy[slowest.pipes[step.pipe]] += runs * each
    macs, dtype, energy = 0, "fp16", 0.0
    for part in launch.parts:
        for instruction, times in part.program.instructions():
            runs = times * part.core_count
            if instruction.op == "mmad":
                macs += math.prod(mmad_shape(instruction)) * runs
                dtype = instruction.srcs[0].buffer.dtype
            energy += instruction_cost(chip, instruction, around).energy_pj * runs
    reads = sum(n for (src, _), n in traffic.path_bytes.items() if src == "GM")
    return Timeline(
        name=launch.name,
        chip=chip,
        cycles=cycles,
        core_count=launch.core_count,
        busy_cycles=busy,
        path_bytes=traffic.path_bytes,
        memory_bytes=traffic.memory_bytes,
        l2_bytes=max(reads - traffic.memory_read_bytes, 0),
        macs=macs,
        dtype=dtype,
        energy_pj=energy + traffic.memory_write_bytes * chip.device_memory.energy_pj_per_byte,
        memory_slowdown=around.memory_slowdown,
        compiled=slowest,
    )
