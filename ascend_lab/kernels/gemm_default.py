"""The default GEMM tiling: estimate every plausible tile in closed form, take the best.

This is the rule a good engineer writes down, not a search with the simulator: balance the work over
the cores, fill L0, and make the longest of three loads (cube, L1 to L0, GM to L1) short.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.epilogue_plan import Demand, chip_left, demand_of, fitting
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL, GemmSchedule, GemmShape
from ascend_lab.kernels.gemm_tilings import (
    Array,
    Floats,
    Tilings,
    load_cycles_per_byte,
    memory_traffic,
    store_cycles_per_byte,
)

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
HEAD_CYCLES = 12
"""Before the first repeat of a vector instruction, about."""
STEPS = (1, 2, 3, 4, 6, 8)


def default_schedule(
    shape: GemmShape, chip: Chip, epilogue: Epilogue | None = None
) -> GemmSchedule:
    """Return the candidate with the least estimated time; raise `CapacityError` if none fits."""
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    chip = chip_left(chip, demand)
    tilings = candidates(shape, chip)
    tilings = tilings.take(fitting(demand, chip, tilings))
    if not len(tilings.m):
        raise CapacityError("a 16x16 tile in L0", str(dict(chip.buffers)), "enlarge the buffers")
    return tilings.schedule(int(np.argmin(estimate(shape, chip, tilings, demand))), shape.dtype)


def candidates(shape: GemmShape, chip: Chip) -> Tilings:
    """Tiles with sides from SIDES, k as deep as L0 allows, L1 stages from STEPS, full grids.

    A grid uses all cores, or all that get a tile where the problem is small.
    """
    m1, k1, n1 = shape.fractals
    cores = chip.core_count
    grids = [(r, cores // r) for r in range(1, cores + 1) if cores % r == 0]
    columns = np.array(list(product(SIDES, SIDES, STEPS, range(len(grids)))), np.int64).T
    m, n, step, which = columns
    rows, cols = np.array(grids, np.int64).T[:, which]
    m, n = np.minimum(m, _up(m1, rows)), np.minimum(n, _up(n1, cols))
    rows, cols = np.minimum(rows, _up(m1, m)), np.minimum(cols, _up(n1, n))
    area = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    room = np.minimum(chip.buffers["L0A"] // m, chip.buffers["L0B"] // n) // (2 * area)
    k = np.minimum(np.minimum(room, 8), k1)
    step = np.minimum(step, _up(k1, np.maximum(k, 1)))
    fits = (k >= 1) & (m * n * 1024 <= chip.buffers["L0C"])
    fits &= 2 * (m + n) * k * step * area <= chip.buffers["L1"]
    return Tilings(m, k, n, step, rows, cols).take(np.flatnonzero(fits))


def _up(value: Array | int, unit: Array) -> Array:
    return -(-value // unit)


def estimate(shape: GemmShape, chip: Chip, t: Tilings, demand: Demand | None = None) -> Floats:
    """Cycles of the busiest core: the longest load of its tiles, plus filling and draining once.

    A C tile that fills L0C alone is drained while the cube waits; two of them overlap.
    """
    m1, _, n1 = shape.fractals
    tiles = _up(_up(m1, t.m), t.rows) * _up(_up(n1, t.n), t.cols)
    cube, mte1, mte2 = _loads(shape, chip, t)
    mte2 = mte2 + operand_cycles(chip, t, demand)
    drain = drain_cycles(shape, chip, t, demand)
    alone = t.m * t.n * 2048 > chip.buffers["L0C"]
    steady = np.maximum(np.maximum(np.where(alone, cube + drain, cube), mte1), mte2)
    first = (mte2 + mte1) * np.minimum(1.0, t.k * t.step / shape.fractals[1])
    core = tiles * np.maximum(steady, drain) + first + drain
    _, memory_bytes = memory_traffic(shape, chip, t)
    memory = memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    longest: Floats = np.maximum(core, memory)
    return longest


def _loads(shape: GemmShape, chip: Chip, t: Tilings) -> tuple[Floats, Floats, Floats]:
    """Cycles of one output tile on the cube, on MTE1 and on MTE2."""
    k1 = shape.fractals[1]
    area = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    turns, stages = _up(k1, t.k), _up(k1, t.k * t.step)
    fractal = FRACTAL * FRACTAL * c0_of(shape.dtype) / chip.macs_per_cycle(shape.dtype)
    cube = turns * chip.cube_head_cycles + t.m * k1 * t.n * fractal
    l0a, l0b = chip.path("L1", "L0A"), chip.path("L1", "L0B")
    mte1 = turns * (np.minimum(t.k, t.m) * l0a.startup_cycles + t.k * l0b.startup_cycles)
    mte1 = mte1 + k1 * area * (t.m / l0a.rate_bytes_per_cycle + t.n / l0b.rate_bytes_per_cycle)
    fresh, _ = memory_traffic(shape, chip, t)
    cores: Array = t.rows * t.cols
    mte2 = stages * 2 * chip.path("GM", "L1").startup_cycles + k1 * area * (
        t.m * load_cycles_per_byte(chip, fresh["a"], cores)
        + t.n * load_cycles_per_byte(chip, fresh["b"], cores)
    )
    return cube, mte1, mte2


def drain_cycles(shape: GemmShape, chip: Chip, t: Tilings, demand: Demand | None = None) -> Floats:
    """Cycles from L0C to GM for one tile; two hops on chips without a fix pipe overlap.

    An epilogue makes the first hop longer.
    """
    stored = demand.stored_bytes if demand else DTYPE_BYTES[shape.out_dtype]
    size = t.m * t.n * 256 * stored
    last: Floats = size * store_cycles_per_byte(chip, t.rows * t.cols)
    if not chip.combined:
        return last
    hop: Floats = size / chip.path("L0C", "UB").rate_bytes_per_cycle
    if demand is None:
        return np.maximum(hop, last)
    work: Floats = t.m * t.n * np.float64(256 * demand.cycles)
    return np.maximum(work + demand.instructions * HEAD_CYCLES, last)


def operand_cycles(chip: Chip, t: Tilings, demand: Demand | None) -> Floats:
    """Cycles of loading the tiles an epilogue adds to one output tile."""
    rate = load_cycles_per_byte(chip, np.ones(len(t.m)), t.rows * t.cols)
    cycles: Floats = t.m * t.n * (256 * demand.loaded_bytes if demand else 0) * rate
    return cycles
