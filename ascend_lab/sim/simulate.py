"""How long a program takes: `simulate(program, chip)` returns a `Timeline`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ascend_lab.chip import Chip
from ascend_lab.errors import SimulationError
from ascend_lab.isa.instructions import mmad_shape
from ascend_lab.isa.legality import program_unit
from ascend_lab.isa.program import Launch, Program, as_launch
from ascend_lab.sim.compiled import Compiled, compile_program
from ascend_lab.sim.cost import Surroundings
from ascend_lab.sim.fast import NotComposableError, run_fast
from ascend_lab.sim.reference import run_reference
from ascend_lab.sim.timeline import Timeline
from ascend_lab.sim.traffic import Traffic, analyse
from ascend_lab.sim.walked import is_short, run_walked

Engine = Literal["fast", "reference"]


def simulate(
    program: Program | Launch,
    chip: Chip,
    *,
    engine: Engine = "fast",
    warm: Mapping[str, float] | None = None,
    write_back_bytes: int | None = None,
) -> Timeline:
    """Time a program or a launch on `chip`; both engines give the same cycles.

    All active cores share L2 and memory evenly. No launch ends before device memory has moved all
    its bytes; where that is the limit, the time is memory's, and the copies from memory are
    stretched (`memory_slowdown`) until the pipes fill it. L2 is empty at the start, or holds the
    share `warm[name]` of a GM tensor; `write_back_bytes` go to memory meanwhile, by default all
    written bytes if what is touched exceeds L2, else none. Raises `SimulationError` (too many
    cores, unknown engine, bad shares) and `SyncError` (deadlock).
    """
    launch = as_launch(program)
    traffic = analyse(launch, chip)
    if warm or write_back_bytes is not None:
        traffic = traffic.warmed(warm or {}, write_back_bytes)
    return time_launch(launch, chip, traffic, engine)


def _check(launch: Launch, chip: Chip, engine: str) -> None:
    if engine not in ("fast", "reference"):
        raise SimulationError("engine 'fast' or 'reference'", repr(engine), "choose one")
    if not launch.parts:
        raise SimulationError("a launch of at least one core", "none", "add a part")
    unit = program_unit(chip, launch.parts[0].program)
    if launch.core_count > chip.cores_of(unit):
        raise SimulationError(
            f"at most {chip.cores_of(unit)} {unit} cores on {chip.name}",
            str(launch.core_count),
            "launch fewer blocks",
        )


def time_launch(launch: Launch, chip: Chip, traffic: Traffic, engine: Engine = "fast") -> Timeline:
    """Time a launch whose traffic is known; raises as `simulate`."""
    _check(launch, chip, engine)
    memory_cycles = math.ceil(
        traffic.memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz - 1e-9
    )
    around = Surroundings(launch.core_count, traffic.fresh)
    parts = tuple(compile_program(part.program, chip, around) for part in launch.parts)
    times = tuple(run_cycles(part, engine) for part in parts)
    macs, dtype, energy_pj = _work(launch, parts)
    reads = sum(n for (src, _), n in traffic.path_bytes.items() if src == "GM")
    return Timeline(
        name=launch.name,
        chip=chip,
        cycles=max(*times, memory_cycles) if max(times) else 0,
        core_count=launch.core_count,
        path_bytes=traffic.path_bytes,
        memory_bytes=traffic.memory_bytes,
        l2_bytes=max(reads - traffic.memory_read_bytes, 0),
        macs=macs,
        dtype=dtype,
        energy_pj=energy_pj + traffic.memory_write_bytes * chip.device_memory.energy_pj_per_byte,
        around=around,
        parts=parts,
        pipe_cycles=times,
    )


def run_cycles(compiled: Compiled, engine: Engine) -> int:
    """Return the cycles of one core's compiled program."""
    if engine == "reference":
        return run_reference(compiled)[0]
    try:
        return run_walked(compiled) if is_short(compiled) else run_fast(compiled)
    except NotComposableError:
        return run_reference(compiled)[0]


def _work(launch: Launch, parts: tuple[Compiled, ...]) -> tuple[int, str, float]:
    """Multiply-accumulates of all cores, their number format, and the energy in pJ."""
    macs, dtype, energy_pj = 0, "fp16", 0.0
    for part, compiled in zip(launch.parts, parts, strict=True):
        rows = zip(compiled.steps, compiled.runs(), compiled.energy_pj, strict=True)
        for step, times, each_pj in rows:
            runs, source = times * part.core_count, compiled.sources[step.source]
            energy_pj += each_pj * runs
            if source.op == "mmad":
                macs += math.prod(mmad_shape(source)) * runs
                dtype = source.srcs[0].buffer.dtype
    return macs, dtype, energy_pj
