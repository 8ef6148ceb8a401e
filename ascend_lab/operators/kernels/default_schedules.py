"""Choose the default tiling of a matrix product: estimate every plausible one, take the quickest.

No kernel is simulated. The estimate prefers tilings that balance the work over the cores, fill L0,
and shorten the slowest of three pipes on a tile: the cube, MTE1 (L1 to L0) or MTE2 (GM to L1).
"""

from collections.abc import Collection
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, c0_of
from ascend_lab.operators.kernels import gemm_schedule, vector_tail
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
"""Sides m and n of a candidate tile of L0, in fractals: 16 to 512 elements."""
STEPS = (1, 2, 3, 4, 6, 8)
"""L0 tiles of K in a candidate's stage of L1."""
SCHEDULES_PER_KIND = 2
"""Schedules of each kind (L1 keeps nothing, A or B) that are worth simulating."""
SHALLOW_DEPTH = 8
"""Most fractals of K in a tile of L0; where L0 has room, a tile twice as deep is tried too."""
HEAD_CYCLES = 12
"""Cycles from the start of a vector instruction to its first repeat, about."""


def default_schedule(
    shape: GemmShape, chip: Chip, epilogue: Epilogue | None = None
) -> GemmSchedule:
    """Return the candidate with the least estimated time; raise `CapacityError` if none fits."""
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    free_chip = chip_left(chip, demand)
    all_tilings = candidates(shape, free_chip)
    tilings = all_tilings.take(fitting(demand, free_chip, all_tilings))
    if not len(tilings.m):
        raise no_room(free_chip)
    cycles = estimate(shape, free_chip, tilings, demand)
    return tilings.schedule(int(np.argmin(cycles)), shape.dtype)


def no_room(chip: Chip) -> CapacityError:
    """Return the error for a chip on which not even the smallest tiling fits."""
    return CapacityError("a 16x16 tile in L0", str(dict(chip.buffers)), "enlarge the buffers")


def candidates(shape: GemmShape, chip: Chip) -> Tilings:
    """Return tilings: sides from SIDES, as deep as L0 allows, L1 stages from STEPS, full grids.

    A grid uses all cores, or in a small problem all cores that get a tile.
    """
    return counted_candidates(shape, chip)[0]


def counted_candidates(shape: GemmShape, chip: Chip) -> tuple[Tilings, Array]:
    """Return `candidates`, and how many of `all_choices` each of them stands for.

    A problem of 2 x 2 fractals cuts every larger tile to 2 x 2: one candidate for many choices.
    """
    _, k1, _ = shape.fractals
    distinct = _distinct_tiles(shape, chip.core_count)
    fractal_bytes = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    side_bytes = np.minimum(chip.buffers["L0A"] // distinct.m, chip.buffers["L0B"] // distinct.n)
    # Fractals of K that fit twice, as L0A and L0B have two slots each.
    depth_room = side_bytes // (2 * fractal_bytes)
    # Tiles that may be deep appear twice: a shallow one lets the cube start sooner, a deep one
    # starts fewer instructions.
    deep = np.flatnonzero((depth_room > SHALLOW_DEPTH) & (k1 > SHALLOW_DEPTH))
    shallow_k = np.minimum(depth_room, SHALLOW_DEPTH)
    deep_k = np.minimum(depth_room[deep], 2 * SHALLOW_DEPTH)
    k = np.minimum(np.append(shallow_k, deep_k), k1)
    tiles = distinct.with_copies(deep)
    k_tiles = ceil_div_array(k1, np.maximum(k, 1))
    # Stages of all K are one candidate: a step is dropped where the next smaller one already holds
    # all K, and the smallest that holds all K stands for the larger steps.
    step_index = np.searchsorted(STEPS, tiles.step)
    next_smaller_step = np.array((0, *STEPS))[step_index]
    choices_of_step = np.where(tiles.step < k_tiles, 1, len(STEPS) - step_index)
    step = np.minimum(tiles.step, k_tiles)
    # A fractal of sums has 1024 bytes.
    fits_l0 = (k >= 1) & (tiles.m * tiles.n * 1024 <= chip.buffers["L0C"])
    fits_l1 = 2 * (tiles.m + tiles.n) * k * step * fractal_bytes <= chip.buffers["L1"]
    fits = fits_l0 & fits_l1 & (next_smaller_step < k_tiles)
    tilings = Tilings(tiles.m, k, tiles.n, step, tiles.grid_rows, tiles.grid_cols)
    choice_counts = choices_of_step * tiles.choice_counts
    return tilings.take(np.flatnonzero(fits)), choice_counts[fits]


class _Tiles(NamedTuple):
    """Arrays: sides of tiles in fractals, L0 tiles of K in a stage of L1, grids of cores.

    `choice_counts` says how many of `all_choices` become this one when they are cut to the problem.
    """

    m: Array
    n: Array
    step: Array
    grid_rows: Array
    grid_cols: Array
    choice_counts: Array

    def with_copies(self, index: Array) -> "_Tiles":
        """Return these tiles, followed by another copy of those at `index`."""
        return _Tiles(*(np.append(column, column[index]) for column in self))


def _distinct_tiles(shape: GemmShape, cores: int) -> _Tiles:
    """Return all choices of tile, step and grid, cut to the problem, equal ones only once."""
    m1, _, n1 = shape.fractals
    sides_m, sides_n, steps, rows, cols = all_choices(cores, STEPS)
    # No tile is larger than a core's share of the problem.
    cut_m = np.minimum(sides_m, ceil_div_array(m1, rows))
    cut_n = np.minimum(sides_n, ceil_div_array(n1, cols))
    first, choice_counts = first_of_equal_choices(len(STEPS), cut_m, cut_n)
    m = cut_m[first]
    n = cut_n[first]
    # No more rows of cores than rows of tiles.
    grid_rows = np.minimum(rows[first], ceil_div_array(m1, m))
    grid_cols = np.minimum(cols[first], ceil_div_array(n1, n))
    return _Tiles(m, n, steps[first], grid_rows, grid_cols, choice_counts)


def ceil_div_array(value: Array | int, unit: Array) -> Array:
    """Return value / unit rounded up, element by element."""
    return -(-value // unit)


def first_of_equal_choices(stages: int, *columns: Array) -> tuple[Array, Array]:
    """Return the indices at which (m, n, stage) of `all_choices` differ from their predecessors.

    The second array counts the equal choices that each one stands for. A small problem caps the
    columns, and a cap makes neighbours along an axis equal: (1, 2, 3, 4) becomes (1, 2, 2, 2),
    of which the first two stay, for 1 and 3 choices.
    """
    # The axes of `all_choices`: sides m, sides n, stages, grids.
    grid_count = columns[0].size // (len(SIDES) ** 2 * stages)
    shape = len(SIDES), len(SIDES), stages, grid_count
    is_first = np.ones(shape, bool)
    choice_counts = np.ones(shape, np.int64)
    for axis, column in enumerate(columns):
        values = np.moveaxis(column.reshape(shape), axis, 0)
        equals_previous = values[1:] == values[:-1]
        # 1, 2, 2, 2 has runs of 1, 3, 2, 1 equal values from each place on.
        run_length = np.ones(values.shape, np.int64)
        for index in reversed(range(len(equals_previous))):
            run_length[index] += equals_previous[index] * run_length[index + 1]
        np.moveaxis(is_first, axis, 0)[1:] &= ~equals_previous
        np.moveaxis(choice_counts, axis, 0)[:] *= run_length
    return np.flatnonzero(is_first), choice_counts[is_first]


@cache
def all_choices(cores: int, stages: tuple[int, ...]) -> tuple[Array, ...]:
    """Return every (m, n, stage, grid rows, grid columns), as five columns.

    Grids are full: with 8 cores 1 x 8, 2 x 4, 4 x 2 and 8 x 1, with r rows as many columns as fit.
    A grid with fewer rows and equally many columns is left out.
    """
    grids = [(r, cores // r) for r in range(1, cores + 1) if cores // (r + 1) < cores // r]
    choices = product(SIDES, SIDES, stages, range(len(grids)))
    m, n, stage, grid_index = np.array(list(choices), np.int64).T
    grid_rows, grid_cols = np.array(grids, np.int64).T
    return m, n, stage, grid_rows[grid_index], grid_cols[grid_index]


def tilings_that_keep(shape: GemmShape, chip: Chip, t: Tilings, keep: str) -> Array:
    """Return the indices of tilings that can keep the operand `keep` ("a" or "b") in L1.

    L1 must have room for two slots with all K of it, and a core several tiles of C that read it.
    """
    (m1, k1, n1) = shape.fractals
    fractal_bytes = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    stage_depth = t.k * t.step
    depth_a = k1 if keep == "a" else stage_depth
    depth_b = k1 if keep == "b" else stage_depth
    reused = {"a": t.cols * t.n < n1, "b": t.rows * t.m < m1}
    fits = 2 * (t.m * depth_a + t.n * depth_b) * fractal_bytes <= chip.buffers["L1"]
    return np.flatnonzero(fits & reused.get(keep, True))


def estimate(
    shape: GemmShape,
    chip: Chip,
    t: Tilings,
    demand: Demand | None = None,
    keep: str = "",
    operands_in_l2: Collection[str] = (),
) -> Floats:
    """Return the cycles of the busiest core, or of memory if that takes longer.

    A core's cycles are its number of tiles times the longest of cube, MTE1, MTE2 and drain of one
    tile, plus one fill and one drain of the pipeline. A core loads the operand `keep` once for all
    tiles of C along its side. `operands_in_l2` lie in L2 from the beginning.
    """
    k1 = shape.fractals[1]
    tiles_down, tiles_across = _tiles_of_core(shape, t)
    cube, mte1 = inner_cycles(shape.dtype, chip, t, k1, (np.minimum(t.k, t.m), t.k))
    miss_shares, memory_bytes = gemm_schedule.memory_traffic(shape, chip, t)
    for name in operands_in_l2:
        miss_shares[name] = np.zeros(len(t.m))
    a = _operand_load(shape, chip, t, "a", keep, miss_shares["a"])
    b = _operand_load(shape, chip, t, "b", keep, miss_shares["b"])
    # A stage starts a copy of A and one of B, but none of what is kept.
    stages = ceil_div_array(k1, t.k * t.step)
    startup_cycles = stages * (1 if keep else 2) * chip.path("GM", "L1").startup_cycles
    mte2_copies = startup_cycles + operand_cycles(chip, t, demand)
    mte2_copies = mte2_copies + a.cycles_per_tile + b.cycles_per_tile
    # A slot of L1 is busy for load + latency + use; with two slots MTE2 sustains two in that time.
    memory_delay = np.maximum(a.memory_delay, b.memory_delay)
    latency = chip.path("GM", "L1").latency_cycles + chip.l2.latency_cycles + memory_delay
    mte2 = np.maximum(mte2_copies, (stages * latency + mte1 + mte2_copies) / 2)
    # The first stage must arrive before the cube starts: its share of K is exposed.
    staged = np.minimum(1.0, t.k * t.step / k1)
    fill_cycles = mte1 * staged + a.exposed_cycles + b.exposed_cycles
    fill_cycles = fill_cycles + startup_cycles * staged + latency
    drain = drain_cycles(shape, chip, t, demand)
    tile_cycles = cycles_per_tile(chip, t, cube, mte1, mte2, drain)
    core_cycles = tiles_down * tiles_across * tile_cycles + fill_cycles + drain
    core_cycles = core_cycles + sum(vector_core_cycles(chip, t, demand))
    # All cores together: no estimate is below the time that memory needs for all bytes.
    memory = memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    longest: Floats = np.maximum(core_cycles, memory)
    return longest


def _tiles_of_core(shape: GemmShape, t: Tilings) -> tuple[Array, Array]:
    """Return the tiles of C along m and along n of the busiest core."""
    m1, _, n1 = shape.fractals
    tiles_down = ceil_div_array(ceil_div_array(m1, t.m), t.rows)
    return tiles_down, ceil_div_array(ceil_div_array(n1, t.n), t.cols)


class _OperandLoad(NamedTuple):
    """What loading A or B costs.

    cycles_per_tile     on MTE2, for each tile of C
    exposed_cycles      before the cube can start with the first tile
    memory_delay        how much longer than from L2 the bytes take to arrive, on average
    """

    cycles_per_tile: Floats
    exposed_cycles: Floats
    memory_delay: Floats


def _operand_load(
    shape: GemmShape, chip: Chip, t: Tilings, name: str, keep: str, miss_share: Floats
) -> _OperandLoad:
    """Return the cycles of loading operand `name` ("a" or "b").

    `miss_share` is the share of its reads that miss L2 if every tile of C loads its own; a core
    loads the operand `keep` once for all tiles of C along its side.
    """
    k1 = shape.fractals[1]
    fractal_bytes = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    tiles_down, tiles_across = _tiles_of_core(shape, t)
    side, tiles_along = (t.m, tiles_across) if name == "a" else (t.n, tiles_down)
    cores = t.rows * t.cols
    if keep == name:
        # Tiles that share one load: all bytes from memory then fall on fewer loads.
        kept_miss_share = np.minimum(1.0, miss_share * tiles_along)
        rate = gemm_schedule.load_cycles_per_byte(chip, kept_miss_share, cores)
        load = k1 * fractal_bytes * side * rate
        return _OperandLoad(load / tiles_along, load, np.zeros(len(t.m)))
    missed = np.minimum(1.0, miss_share)
    rate = gemm_schedule.load_cycles_per_byte(chip, missed, cores)
    load = k1 * fractal_bytes * side * rate
    staged = np.minimum(1.0, t.k * t.step / k1)
    memory_extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    return _OperandLoad(load, load * staged, missed * memory_extra)


def cycles_per_tile(
    chip: Chip, t: Tilings, cube: Floats, mte1: Floats, mte2: Floats, drain: Floats
) -> Floats:
    """Return the cycles from one tile to the next: the longest of cube, MTE1, MTE2 and drain.

    Where only one tile of C fits in L0C the cube waits while it is drained; two of them overlap.
    """
    # Two tiles of C need 2 * 1024 bytes for each fractal.
    one_slot = t.m * t.n * 2048 > chip.buffers["L0C"]
    slowest_feed = np.maximum(np.maximum(np.where(one_slot, cube + drain, cube), mte1), mte2)
    longest: Floats = np.maximum(slowest_feed, drain)
    return longest


def inner_cycles(
    dtype: str, chip: Chip, t: Tilings, k1: int, loads: tuple[Array | int, Array | int]
) -> tuple[Floats, Floats]:
    """Return the cycles of an output tile on the cube and on MTE1.

    A tile of A and one of B in L0 take `loads` instructions each.
    """
    fractal_bytes = FRACTAL * c0_of(dtype) * DTYPE_BYTES[dtype]
    k_tiles = ceil_div_array(k1, t.k)
    # Multiplying two fractals takes 16 x 16 x C0 products: one cycle in fp16 on a 16^3 cube.
    fractal_cycles = FRACTAL * FRACTAL * c0_of(dtype) / chip.macs_per_cycle(dtype)
    cube = k_tiles * chip.cube_head_cycles + t.m * k1 * t.n * fractal_cycles
    l0a = chip.path("L1", "L0A")
    l0b = chip.path("L1", "L0B")
    startup_cycles = k_tiles * (loads[0] * l0a.startup_cycles + loads[1] * l0b.startup_cycles)
    cycles_per_depth_byte = t.m / l0a.rate_bytes_per_cycle + t.n / l0b.rate_bytes_per_cycle
    return cube, startup_cycles + k1 * fractal_bytes * cycles_per_depth_byte


def drain_cycles(shape: GemmShape, chip: Chip, t: Tilings, demand: Demand | None = None) -> Floats:
    """Return the cycles in which one tile of C leaves L0C for GM.

    A chip without a fix pipe has two hops, L0C to UB and UB to GM, which overlap: the longer one
    counts. The steps of an epilogue belong to the first hop.
    """
    stored = demand.stored_bytes if demand else DTYPE_BYTES[shape.out_dtype]
    tile_bytes = t.m * t.n * np.float64(256 * stored)
    store: Floats = tile_bytes * gemm_schedule.store_cycles_per_byte(chip, t.rows * t.cols)
    if not chip.combined:
        if demand is None or not demand.instructions:
            return store
        # Vector cores follow the cube through a ring of SLOTS tiles: each may take the time of
        # SLOTS tiles.
        vector, ring_delay = vector_core_cycles(chip, t, demand)
        return np.maximum(np.maximum(store, vector), (store + ring_delay) / vector_tail.SLOTS)
    to_ub: Floats = tile_bytes / chip.path("L0C", "UB").rate_bytes_per_cycle
    if demand is None:
        return np.maximum(to_ub, store)
    epilogue: Floats = t.m * t.n * np.float64(256 * demand.cycles)
    return np.maximum(epilogue + demand.instructions * HEAD_CYCLES, store)


def vector_core_cycles(chip: Chip, t: Tilings, demand: Demand | None) -> tuple[Floats, Floats]:
    """Return a tile's cycles on the vector cores, and the delay before its ring slot is free.

    The delay begins with the cube core's store: a flag to the vector cores, their load into UB, a
    flag back. Both are 0 where no vector cores follow the cube.
    """
    elements = t.m * t.n * np.float64(256)
    if demand is None or chip.combined or not demand.instructions:
        return 0.0 * elements, 0.0 * elements
    to_ub = chip.path("GM", "UB")
    load = elements * demand.stored_bytes / to_ub.rate_bytes_per_cycle / chip.vector_cores_per_core
    round_trip = 2 * chip.cross_flag_cycles + to_ub.latency_cycles + chip.l2.latency_cycles
    return elements * demand.cycles + demand.instructions * HEAD_CYCLES, load + round_trip


def operand_cycles(chip: Chip, t: Tilings, demand: Demand | None) -> Floats:
    """Return the cycles of loading, for one output tile, the tiles that its epilogue reads."""
    rate = gemm_schedule.load_cycles_per_byte(chip, np.ones(len(t.m)), t.rows * t.cols)
    cycles: Floats = t.m * t.n * (256 * demand.loaded_bytes if demand else 0) * rate
    return cycles


# -- what is worth timing --------------------------------------------------------------------------
@lru_cache(1024)
def promising(
    shape: GemmShape,
    chip: Chip,
    epilogue: Epilogue | None = None,
    operands_in_l2: frozenset[str] = frozenset(),
    count: int = SCHEDULES_PER_KIND,
) -> tuple[tuple[float, GemmSchedule], ...]:
    """Return (estimated cycles, schedule) of the tilings worth timing, the quickest first.

    There are up to `count` each of the tilings that keep nothing, A's rows, or B's columns in L1.
    `operands_in_l2` lie in L2 from the beginning. Raises `CapacityError` if none fits.
    """
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    free_chip = chip_left(chip, demand)
    candidate_tilings, candidate_counts = counted_candidates(shape, free_chip)
    fits = fitting(demand, free_chip, candidate_tilings)
    fitting_tilings = candidate_tilings.take(fits)
    choice_counts = candidate_counts[fits]
    estimates: dict[GemmSchedule, float] = {}
    for keep in ("", "a", "b"):
        keep_index = tilings_that_keep(shape, free_chip, fitting_tilings, keep)
        tilings = fitting_tilings.take(keep_index)
        cycles = estimate(shape, free_chip, tilings, demand, keep, operands_in_l2)
        quickest = np.argsort(cycles, kind="stable")[: 2 * count]
        # Take a schedule if fewer than 2 * count choices are quicker. A candidate counts as all the
        # choices it stands for: a small problem is not searched further than a large one.
        choices_before = np.cumsum([0, *choice_counts[keep_index[quickest]]])
        quicker_choices = choices_before[np.searchsorted(cycles[quickest], cycles[quickest])]
        for index in quickest[quicker_choices < 2 * count].tolist():
            tiling = tilings.schedule(index, shape.dtype)
            order = gemm_schedule.KEEP_ORDER.get(keep, tiling.order)
            schedule = replace(tiling, order=order, keep=keep)
            if sum(s.keep == keep for s in estimates) < count:
                estimates.setdefault(schedule, float(cycles[index]))
    if not estimates:
        raise no_room(free_chip)
    pairs = [(cycles, schedule) for schedule, cycles in estimates.items()]
    return tuple(sorted(pairs, key=lambda pair: pair[0]))
