"""The default tiling of a product: every plausible one estimated, the best taken or worth timing.

This is the rule a good engineer writes down, not a search with the simulator: balance the work over
the cores, fill L0, and make the longest of three loads (cube, L1 to L0, GM to L1) short.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product

import numpy as np

from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, c0_of
from ascend_lab.operators.kernels import gemm_schedule, mix
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.kernels.epilogue_plan import Demand, chip_left, demand_of, fitting
from ascend_lab.operators.kernels.gemm_schedule import (
    Array,
    Floats,
    GemmSchedule,
    GemmShape,
    Tilings,
)

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
STEPS = (1, 2, 3, 4, 6, 8)
PROMISING = 2
"""Schedules of a kind that are worth timing."""
SHALLOW = 8
"""Fractals of K in a tile of L0 at most; small tiles may be twice as deep."""
HEAD_CYCLES = 12
"""Before the first repeat of a vector instruction, about."""


def default_schedule(
    shape: GemmShape, chip: Chip, epilogue: Epilogue | None = None
) -> GemmSchedule:
    """Return the candidate with the least estimated time; raise `CapacityError` if none fits."""
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    chip = chip_left(chip, demand)
    tilings = candidates(shape, chip)
    tilings = tilings.take(fitting(demand, chip, tilings))
    if not len(tilings.m):
        raise no_room(chip)
    return tilings.schedule(int(np.argmin(estimate(shape, chip, tilings, demand))), shape.dtype)


def no_room(chip: Chip) -> CapacityError:
    """Return the error where not even the least tiling fits."""
    return CapacityError("a 16x16 tile in L0", str(dict(chip.buffers)), "enlarge the buffers")


def candidates(shape: GemmShape, chip: Chip) -> Tilings:
    """Tiles with sides from SIDES, as deep as L0 allows, L1 stages from STEPS, full grids.

    A grid uses all cores, or all that get a tile where the problem is small.
    """
    return listed(shape, chip)[0]


def listed(shape: GemmShape, chip: Chip) -> tuple[Tilings, Array]:
    """Return `candidates`, and how many of `choices` come to each in a small problem."""
    m1, k1, n1 = shape.fractals
    m, n, step, rows, cols = choices(chip.core_count, STEPS)
    m = np.minimum(m, each_up(m1, rows))
    n = np.minimum(n, each_up(n1, cols))
    new, times = distinct(len(STEPS), m, n)
    m, n, step, rows, cols = (x[new] for x in (m, n, step, rows, cols))
    rows = np.minimum(rows, each_up(m1, m))
    cols = np.minimum(cols, each_up(n1, n))
    area = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    room = np.minimum(chip.buffers["L0A"] // m, chip.buffers["L0B"] // n) // (2 * area)
    deep = np.flatnonzero((room > SHALLOW) & (k1 > SHALLOW))  # twice: shallow tiles start sooner
    k = np.minimum(np.append(np.minimum(room, SHALLOW), np.minimum(room[deep], 2 * SHALLOW)), k1)
    columns = (m, n, step, rows, cols, times)
    m, n, step, rows, cols, times = (np.append(x, x[deep]) for x in columns)
    most = each_up(k1, np.maximum(k, 1))
    place = np.searchsorted(STEPS, step)
    fits = (k >= 1) & (m * n * 1024 <= chip.buffers["L0C"]) & (np.array((0, *STEPS))[place] < most)
    times = np.where(step < most, 1, len(STEPS) - place) * times
    step = np.minimum(step, most)
    fits &= 2 * (m + n) * k * step * area <= chip.buffers["L1"]
    return Tilings(m, k, n, step, rows, cols).take(np.flatnonzero(fits)), times[fits]


def each_up(value: Array | int, unit: Array) -> Array:
    """Return value / unit rounded up."""
    return -(-value // unit)


def distinct(stages: int, *columns: Array) -> tuple[Array, Array]:
    """Return where columns (m, n, stage) of `choices` are new, and for how many places each is.

    Small problems cap them: what is equal stands side by side along an axis.
    """
    shape = len(SIDES), len(SIDES), stages, columns[0].size // (len(SIDES) ** 2 * stages)
    new = np.ones(shape, bool)
    times = np.ones(shape, np.int64)
    for axis, column in enumerate(columns):
        values = np.moveaxis(column.reshape(shape), axis, 0)
        same = values[1:] == values[:-1]
        runs = np.ones(values.shape, np.int64)
        for place in reversed(range(len(same))):
            runs[place] += same[place] * runs[place + 1]
        np.moveaxis(new, axis, 0)[1:] &= ~same
        np.moveaxis(times, axis, 0)[:] *= runs
    return np.flatnonzero(new), times[new]


@cache
def choices(cores: int, stages: tuple[int, ...]) -> tuple[Array, ...]:
    """Return every tile side m and n with every stage and every full grid, as five columns."""
    grids = [(r, cores // r) for r in range(1, cores + 1) if cores // (r + 1) < cores // r]
    columns = np.array(list(product(SIDES, SIDES, stages, range(len(grids)))), np.int64).T
    return *columns[:3], *np.array(grids, np.int64).T[:, columns[3]]


def keeping(shape: GemmShape, chip: Chip, t: Tilings, keep: str) -> Array:
    """Return the places of tilings with room in L1 for all K of what `keep` names, twice.

    A core has several tiles of C that read it.
    """
    (m1, k1, n1) = shape.fractals
    area = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    depth_a, depth_b = (k1 if keep == name else t.k * t.step for name in "ab")
    turns = {"a": t.cols * t.n < n1, "b": t.rows * t.m < m1}
    fits = 2 * (t.m * depth_a + t.n * depth_b) * area <= chip.buffers["L1"]
    return np.flatnonzero(fits & turns.get(keep, True))


def estimate(
    shape: GemmShape,
    chip: Chip,
    t: Tilings,
    demand: Demand | None = None,
    keep: str = "",
    warm: Collection[str] = (),
) -> Floats:
    """Cycles of the busiest core: the longest load of its tiles, plus filling and draining once.

    What is kept is loaded once for all tiles of C along its side; L2 holds the sides `warm`.
    """
    m1, k1, n1 = shape.fractals
    down = each_up(each_up(m1, t.m), t.rows)
    across = each_up(each_up(n1, t.n), t.cols)
    tiles = down * across
    turns = {"a": across, "b": down}
    cube, mte1 = inner_cycles(shape.dtype, chip, t, k1, (np.minimum(t.k, t.m), t.k))
    fresh, memory_bytes = gemm_schedule.memory_traffic(shape, chip, t)
    area = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    cores = t.rows * t.cols
    starts = each_up(k1, t.k * t.step) * (1 if keep else 2) * chip.path("GM", "L1").startup_cycles
    mte2 = starts + operand_cycles(chip, t, demand)
    staged = np.minimum(1.0, t.k * t.step / k1)
    drain = drain_cycles(shape, chip, t, demand)
    first = mte1 * staged
    late = np.zeros(len(t.m))
    for name, side in (("a", t.m), ("b", t.n)):
        held = turns[name] if keep == name else np.ones_like(tiles)
        missed = np.minimum(1.0, fresh[name] * held) * (name not in warm)
        rate = gemm_schedule.load_cycles_per_byte(chip, missed, cores)
        load = k1 * area * side * rate
        if keep != name:
            extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
            late = np.maximum(late, missed * extra)
        mte2 = mte2 + load / held
        first = first + load * (1.0 if keep == name else staged)
    # two L1 slots that wait for memory turn around in load + latency + use
    latency = chip.path("GM", "L1").latency_cycles + chip.l2.latency_cycles + late
    mte2 = np.maximum(mte2, (each_up(k1, t.k * t.step) * latency + mte1 + mte2) / 2)
    first = first + starts * staged + latency
    core = tiles * steady(chip, t, cube, mte1, mte2, drain) + first + drain
    core = core + sum(after_cycles(chip, t, demand))
    memory = memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    longest: Floats = np.maximum(core, memory)
    return longest


def steady(
    chip: Chip, t: Tilings, cube: Floats, mte1: Floats, mte2: Floats, drain: Floats
) -> Floats:
    """Cycles from tile to tile: the longest of its loads and its way to GM.

    A C tile that fills L0C alone is drained while the cube waits; two of them overlap.
    """
    alone = t.m * t.n * 2048 > chip.buffers["L0C"]
    steady = np.maximum(np.maximum(np.where(alone, cube + drain, cube), mte1), mte2)
    longest: Floats = np.maximum(steady, drain)
    return longest


def inner_cycles(
    dtype: str, chip: Chip, t: Tilings, k1: int, loads: tuple[Array | int, Array | int]
) -> tuple[Floats, Floats]:
    """Cycles of one output tile on the cube and on MTE1; `loads` instructions fill one of A, B."""
    area = FRACTAL * c0_of(dtype) * DTYPE_BYTES[dtype]
    turns = each_up(k1, t.k)
    fractal = FRACTAL * FRACTAL * c0_of(dtype) / chip.macs_per_cycle(dtype)
    cube = turns * chip.cube_head_cycles + t.m * k1 * t.n * fractal
    l0a = chip.path("L1", "L0A")
    l0b = chip.path("L1", "L0B")
    starts = turns * (loads[0] * l0a.startup_cycles + loads[1] * l0b.startup_cycles)
    rates = t.m / l0a.rate_bytes_per_cycle + t.n / l0b.rate_bytes_per_cycle
    return cube, starts + k1 * area * rates


def drain_cycles(shape: GemmShape, chip: Chip, t: Tilings, demand: Demand | None = None) -> Floats:
    """Cycles from L0C to GM for one tile; two hops on chips without a fix pipe overlap.

    An epilogue makes the first hop longer.
    """
    stored = demand.stored_bytes if demand else DTYPE_BYTES[shape.out_dtype]
    size = t.m * t.n * np.float64(256 * stored)
    last: Floats = size * gemm_schedule.store_cycles_per_byte(chip, t.rows * t.cols)
    if not chip.combined:
        if demand is None or not demand.instructions:
            return last
        behind, told = after_cycles(chip, t, demand)
        return np.maximum(np.maximum(last, behind), (last + told) / mix.SLOTS)
    hop: Floats = size / chip.path("L0C", "UB").rate_bytes_per_cycle
    if demand is None:
        return np.maximum(hop, last)
    work: Floats = t.m * t.n * np.float64(256 * demand.cycles)
    return np.maximum(work + demand.instructions * HEAD_CYCLES, last)


def after_cycles(chip: Chip, t: Tilings, demand: Demand | None) -> tuple[Floats, Floats]:
    """Return cycles of vector cores on a tile of theirs, and until its slot is empty once stored.

    Both are 0 where none follow the cube.
    """
    sizes = t.m * t.n * np.float64(256)
    if demand is None or chip.combined or not demand.instructions:
        return 0.0 * sizes, 0.0 * sizes
    path = chip.path("GM", "UB")
    load = sizes * demand.stored_bytes / path.rate_bytes_per_cycle / chip.vector_cores_per_core
    latency = 2 * chip.cross_flag_cycles + path.latency_cycles + chip.l2.latency_cycles
    return sizes * demand.cycles + demand.instructions * HEAD_CYCLES, load + latency


def operand_cycles(chip: Chip, t: Tilings, demand: Demand | None) -> Floats:
    """Cycles of loading the tiles an epilogue adds to one output tile."""
    rate = gemm_schedule.load_cycles_per_byte(chip, np.ones(len(t.m)), t.rows * t.cols)
    cycles: Floats = t.m * t.n * (256 * demand.loaded_bytes if demand else 0) * rate
    return cycles


# -- what is worth timing --------------------------------------------------------------------------
@lru_cache(1024)
def promising(
    shape: GemmShape,
    chip: Chip,
    epilogue: Epilogue | None = None,
    warm: frozenset[str] = frozenset(),
    count: int = PROMISING,
) -> tuple[tuple[float, GemmSchedule], ...]:
    """Return the least estimates of tilings, and of those that keep A's rows or B's columns.

    `count` of each kind, with the schedules, if L2 holds the sides `warm`. Raises `CapacityError`
    if none fits.
    """
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    chip = chip_left(chip, demand)
    every, times = listed(shape, chip)
    every = every.take(fit := fitting(demand, chip, every))
    times = times[fit]
    found: dict[GemmSchedule, float] = {}
    for keep in ("", "a", "b"):
        some = every.take(place := keeping(shape, chip, every, keep))
        cycles = estimate(shape, chip, some, demand, keep, warm)
        order = np.argsort(cycles, kind="stable")[: 2 * count]
        sums = np.cumsum([0, *times[place[order]]])
        quicker = sums[np.searchsorted(cycles[order], cycles[order])]
        for index in order[quicker < 2 * count].tolist():
            one = some.schedule(index, shape.dtype)
            one = replace(one, order=gemm_schedule.KEEP_ORDER.get(keep, one.order), keep=keep)
            if sum(s.keep == keep for s in found) < count:
                found.setdefault(one, float(cycles[index]))
    if not found:
        raise no_room(chip)
    return tuple(sorted(((c, s) for s, c in found.items()), key=lambda pair: pair[0]))
