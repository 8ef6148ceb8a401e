"""Many schedules: thousands of GEMM tilings timed at once, and the best grid for a tile.

All tilings that divide the problem evenly and keep the same number of L0C slots run the same loop
nest and differ in numbers only, so the (max, +) engine times them as one batch of arrays. The
result equals `simulate(gemm_launch(...))` of each to the cycle (a test holds them together).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ascend_lab import errors
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import DTYPE_BYTES, Chip, Path
from ascend_lab.operators.kernels import conv, conv_schedules, conv_windows, gemm, gemm_schedule
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.operators.kernels.default_schedules import estimate
from ascend_lab.operators.kernels.gemm_schedule import (
    Array,
    Floats,
    GemmSchedule,
    GemmShape,
    Tilings,
)

CHUNK = 128
"""Candidates timed together: their matrices stay in a core's cache."""
TRIED = 8
"""Grids that `best_grid` simulates besides the schedule's own."""


def time_tilings(
    shape: GemmShape, chip: Chip, schedules: Sequence[GemmSchedule]
) -> NDArray[np.int64]:
    """Return the kernel cycles of each schedule; all must divide the problem evenly.

    Raises `InputError` naming the first schedule that leaves a tail, `CapacityError` for one that
    does not fit.
    """
    tiles = gemm_schedule.tilings_of(schedules, shape.dtype)
    _check(shape, chip, schedules, tiles)
    out = np.zeros(len(schedules), np.int64)
    double = tiles.m * tiles.n * 2048 <= chip.buffers["L0C"]
    for slots in (False, True):
        index = np.flatnonzero(double == slots)
        for start in range(0, len(index), CHUNK):
            part = index[start : start + CHUNK]
            out[part] = _time_group(shape, chip, tiles.take(part), schedules[part[0]])
    return out


def _check(shape: GemmShape, chip: Chip, schedules: Sequence[GemmSchedule], t: Tilings) -> None:
    remedy = "time it with simulate(gemm_launch(...))"
    if widened := [s for s in schedules if s.extras]:
        wanted = "tilings in order mn with two slots, nothing kept"
        raise errors.InputError(wanted, str(widened[0].extras), remedy)
    m1, k1, n1 = shape.fractals
    even = (m1 % (t.rows * t.m) == 0) & (n1 % (t.cols * t.n) == 0) & (k1 % (t.k * t.step) == 0)
    if chip.combined:
        even &= t.n % _columns(shape, chip, t) == 0
    if not even.all():
        bad = schedules[int(np.flatnonzero(~even)[0])]
        wanted = f"tilings that divide {shape.m}x{shape.k}x{shape.n} evenly"
        raise errors.InputError(wanted, str(bad.as_dict()), remedy)
    for schedule in schedules:
        gemm_schedule.check_schedule(shape, schedule, chip)


def _columns(shape: GemmShape, chip: Chip, t: Tilings) -> Array:
    """Columns of fractals that pass UB at a time, as `tiles.out_queue` allocates them."""
    column = t.m * 256 * DTYPE_BYTES[shape.out_dtype]
    return np.maximum(1, np.minimum(t.n, chip.buffers["UB"] // (2 * column)))


def _time_group(shape: GemmShape, chip: Chip, t: Tilings, first: GemmSchedule) -> Array:
    """Time candidates that share a structure; none ends before memory has moved its bytes."""
    template = _template(shape, chip, first)
    fresh, memory_bytes = gemm_schedule.memory_traffic(shape, chip, t)
    m1, k1, n1 = shape.fractals
    counts = [m1 // (t.rows * t.m), n1 // (t.cols * t.n), k1 // (t.k * t.step), t.step]
    counts += [np.minimum(t.k, t.m), t.k]
    if chip.combined:
        counts.append(t.n // _columns(shape, chip, t))
    assert len(counts) == len(template.counts)  # in the order the kernel opens its loops
    cycles, latency = _fill(template, _durations(shape, chip, t, fresh), len(t.m))
    tail = np.repeat(np.array(template.tail_latency)[:, None], len(t.m), axis=1)
    needed = np.ceil(memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz - 1e-9)
    run = sim.run_batch(template, cycles, latency, tail, np.stack(counts))
    return np.maximum(run, needed.astype(np.int64))


def _template(shape: GemmShape, chip: Chip, first: GemmSchedule) -> sim.Compiled:
    """Compile a problem whose loops all run at least twice, with the group's L0C slots."""
    c0 = isa.c0_of(shape.dtype)
    base = replace(first, base_k=2 * c0, step_k=2, grid_rows=1, grid_cols=1)
    if base.base_m == isa.FRACTAL or base.base_n == isa.FRACTAL:
        base = replace(base, base_m=2 * isa.FRACTAL, base_n=2 * isa.FRACTAL)
    probe = GemmShape(2 * base.base_m, 8 * c0, 2 * base.base_n, shape.dtype, shape.out_dtype)
    return sim.compile_program(
        gemm.gemm_launch(probe, chip, base).parts[0].program, chip, sim.Surroundings()
    )


def _durations(
    shape: GemmShape, chip: Chip, t: Tilings, fresh: dict[str, Floats]
) -> dict[str, tuple[Array, Array]]:
    """Cycles and flag latency by destination buffer: `sim.cost` on arrays."""
    cores, none = t.rows * t.cols, 0 * t.m
    area = isa.FRACTAL * isa.c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    columns = _columns(shape, chip, t) if chip.combined else t.n
    out = t.m * columns * 256 * DTYPE_BYTES[shape.out_dtype]
    l0a, l0b = chip.path("L1", "L0A"), chip.path("L1", "L0B")
    drain = chip.path("L0C", "UB" if chip.combined else "GM")
    store, load = chip.path("UB" if chip.combined else "L0C", "GM"), chip.path("GM", "L1")
    m0, k0, n0 = chip.cube_shape(shape.dtype)
    steps = isa.up(isa.FRACTAL, m0) * isa.up(isa.c0_of(shape.dtype), k0) * isa.up(isa.FRACTAL, n0)
    work = {
        "a_l0": (_occupancy(l0a, np.maximum(t.k, t.m) * area), none + l0a.latency_cycles),
        "b_l0": (_occupancy(l0b, t.n * area), none + l0b.latency_cycles),
        "c_l0": (chip.cube_head_cycles + t.m * t.k * t.n * steps, none),
        "c_ub": (_occupancy(drain, out), none + drain.latency_cycles),
        "c": (
            _occupancy(store, out, gemm_schedule.store_cycles_per_byte(chip, cores)),
            none + store.latency_cycles + chip.l2.latency_cycles,
        ),
    }
    extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    for name, side in (("a", t.m), ("b", t.n)):
        rate = gemm_schedule.load_cycles_per_byte(chip, fresh[name], cores)
        latency = load.latency_cycles + chip.l2.latency_cycles + fresh[name] * extra
        cycles = _occupancy(load, side * t.k * t.step * area, rate)
        work[f"{name}_l1"] = cycles, np.rint(latency).astype(np.int64)
    return work


def _occupancy(path: Path, size_bytes: Array, cycles_per_byte: Floats | None = None) -> Array:
    rate = cycles_per_byte
    if rate is None:
        rate = np.full(len(size_bytes), 1.0 / path.rate_bytes_per_cycle)
    return path.startup_cycles + np.ceil(size_bytes * rate - 1e-9).astype(np.int64)


def _fill(
    template: sim.Compiled, work: dict[str, tuple[Array, Array]], count: int
) -> tuple[Array, Array]:
    """Spread the costs over the steps: by destination buffer; flags inherit their latency."""
    cycles = np.repeat(np.array(template.cycles, np.int64)[:, None], count, axis=1)
    latency = np.zeros_like(cycles)
    last: dict[int, Array] = {}
    for number, step in enumerate(template.steps):
        source = template.sources[step.source]
        if source.event is None and source.dst is not None:
            cycles[number], seen = work[source.dst.buffer.name]
            before = last.get(step.pipe, np.zeros_like(seen)) - cycles[number]
            last[step.pipe] = np.maximum(seen, before)
        elif source.op == "set_flag" and step.pipe in last:
            latency[number] = last[step.pipe]
    return cycles, latency


# -- the grid of cores for a tile of one's own ----------------------------------------------------
def best_grid(shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule) -> GemmSchedule:
    """Return the schedule with the quickest grid, its own among equals; raises as its launch.

    Estimates order the grids; simulated are its own and the TRIED ones with the least.
    """
    if isinstance(shape, ConvShape):
        conv_schedules.check_conv(shape, schedule, chip)
    else:
        gemm_schedule.check_schedule(shape, schedule, chip)
    every = [schedule, *_grids(shape, chip, schedule)]
    order = np.argsort(_estimate(shape, chip, every)[1:], kind="stable")[:TRIED] + 1
    tried = [schedule, *(every[int(index)] for index in order)]
    launches = (
        conv.conv_launch(shape, chip, one)
        if isinstance(shape, ConvShape)
        else gemm.gemm_launch(shape, chip, one)
        for one in tried
    )
    cycles = [sim.simulate(launch, chip).cycles for launch in launches]
    return tried[int(np.argmin(cycles))]


def _grids(shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule) -> list[GemmSchedule]:
    """Return the schedule on every grid; of those that give a core the same work, the smallest."""
    tile, blocks = schedule.base_m // isa.FRACTAL, schedule.base_n // isa.FRACTAL
    if isinstance(shape, GemmShape):
        m1, _, n1 = shape.fractals
        down, bundles, across = isa.up(m1, tile), 1, isa.up(n1, blocks)
    else:
        bundle, strip = bundles_of(shape), conv_schedules.takes_strips(shape, schedule, chip)
        down = shape.n * conv_windows.tiles_per_image(shape, tile, strip=strip)
        bundles, across = bundle.count, isa.up(bundle.n1, blocks)
    found: dict[tuple[int, ...], GemmSchedule] = {}
    for rows, cols in product(range(1, chip.core_count + 1), repeat=2):
        if rows * cols <= chip.core_count:
            shares = min(cols, bundles)
            work = isa.up(down, rows), isa.up(bundles, shares), isa.up(across, cols // shares)
            found.setdefault(work, replace(schedule, grid_rows=rows, grid_cols=cols))
    return list(found.values())


def _estimate(shape: GemmShape | ConvShape, chip: Chip, every: list[GemmSchedule]) -> Floats:
    """Return the cycles that the default's rule gives schedules of one tile."""
    tilings = gemm_schedule.tilings_of(every, shape.dtype)
    if isinstance(shape, GemmShape):
        return estimate(shape, chip, tilings)
    stages = np.full(len(every), conv_schedules.c1_stage(shape, every[0]))
    strips = np.full(len(every), conv_schedules.takes_strips(shape, every[0], chip))
    return conv_schedules.conv_estimate(
        shape, chip, conv_schedules.Candidates(tilings, stages, strips)
    )
