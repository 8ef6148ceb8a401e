"""Choose the default tiling of a convolution: estimate every plausible one, take the quickest.

The estimate is that of products (`default_schedules`), with five differences:

- A tile of output pixels ends with its image, unless images are stacked (`conv_shape.stacked`).
- L1 holds image rows, not the im2col matrix.
- One load3d fills a tile of A in L0.
- A stage (what one slot of L1 holds) is a whole number of units of depth, mostly channel blocks.
- Groups are bundled until they fill channel blocks; each bundle is a separate matrix product.

`strip` or `strips` below says whether pixel tiles are strips: pieces of one output row.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, ceil_div
from ascend_lab.operators.kernels import conv_windows, default_schedules, gemm_schedule
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of, stacked, units_of
from ascend_lab.operators.kernels.default_schedules import ceil_div_array
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.kernels.epilogue_plan import Demand, chip_left, demand_of, fitting
from ascend_lab.operators.kernels.gemm_schedule import (
    Array,
    Floats,
    GemmSchedule,
    Tilings,
    check_schedule,
)

STAGES = (1, 2, 4, 8, 16, 32)
"""Units (mostly channel blocks) in a candidate's stage of L1."""


def c1_stage(shape: ConvShape, schedule: GemmSchedule) -> int:
    """Return the units (mostly channel blocks) of a stage: step_k * base_k in whole units."""
    depth = schedule.base_k // isa.c0_of(shape.dtype) * schedule.step_k
    units = units_of(shape)
    return min(max(1, depth // units.depth), units.count)


def stage_bytes(shape: ConvShape, schedule: GemmSchedule, *, strip: bool = False) -> int:
    """Return the bytes of L1 that all slots of image rows and of weights take."""
    stage = c1_stage(shape, schedule)
    c0 = isa.c0_of(shape.dtype)
    image = sum(conv_windows.unit_elements(shape, schedule.base_m // FRACTAL, strip=strip))
    weights = units_of(shape).depth * ceil_div(schedule.base_n, FRACTAL) * FRACTAL * c0
    slots = schedule.a_l1_slots * image + schedule.b_l1_slots * weights
    return stage * slots * DTYPE_BYTES[shape.dtype]


def stages_ahead(
    shape: ConvShape, schedule: GemmSchedule, chip: Chip, ids: int, *, strip: bool
) -> int:
    """Return how many slots of L1 hold the rows and the weights of a stage together.

    It is 0 if rows and weights have separate slots. They share a slot if every tile loads both in
    several stages. A slot takes one of `ids` event ids.
    """
    slots = schedule.a_l1_slots, schedule.b_l1_slots
    if slots != (2, 2) or c1_stage(shape, schedule) >= units_of(shape).count:
        return 0
    # `stage_bytes` is for two slots of each: half of it is one stage.
    room = 2 * chip.buffers["L1"] // stage_bytes(shape, schedule, strip=strip)
    return min(gemm_schedule.MAX_STAGES_IN_L1, ids, room)


def area_bytes(shape: ConvShape) -> int:
    """Return the bytes of a fractal of A or B: 512 in every format."""
    return FRACTAL * isa.c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]


def takes_strips(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> bool:
    """Return whether pixel tiles are strips, each inside one output row.

    They are strips if rows are at least two tiles long: a flat tile (16 * tile consecutive pixels)
    would load whole rows, most of whose pixels other tiles compute. They also are strips if the
    output is one row, if whole rows do not fit in L1, or if the schedule's window says so. Images
    with fewer lanes than C0 are always read by whole rows.
    """
    if shape.lanes or shape.pool:
        return False
    if schedule.window:
        return schedule.window == "strip"
    # 112 output columns and tiles of 48 pixels are strips, as 2 * 48 <= 112; tiles of 64 are flat.
    long_rows = shape.out_hw[1] >= 2 * schedule.base_m or shape.out_hw[0] == 1
    return long_rows or stage_bytes(shape, schedule) > chip.buffers["L1"]


def check_conv(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> None:
    """Raise `InputError` or `CapacityError` if the schedule does not fit the chip."""
    if schedule.keep or schedule.bypass:
        raise errors.InputError(
            "keep and bypass of '' for a convolution",
            f"{schedule.keep!r} and {schedule.bypass!r}",
            "what fits one stage stays in L1 by itself: raise step_k",
        )
    c_l0_slots = max(shape.sums, schedule.c_l0_slots)
    # `check_schedule` would count a stage of the im2col matrix, which L1 never holds: so it gets
    # the smallest step; the bytes of image rows are checked below.
    one_step = replace(schedule, step_k=min(schedule.step_k, 1), c_l0_slots=c_l0_slots)
    check_schedule(shape.gemm, one_step, chip)
    if shape.pool and shape.pool.r * shape.out_hw[1] > schedule.base_m:
        needed_rows = f"base_m of a row of windows: {shape.pool.r} rows of {shape.out_hw[1]} pixels"
        raise errors.CapacityError(needed_rows, str(schedule.base_m), "use two kernels")
    needed_bytes = stage_bytes(shape, schedule, strip=takes_strips(shape, schedule, chip))
    if needed_bytes > chip.buffers["L1"]:
        slots = (schedule.a_l1_slots, schedule.b_l1_slots)
        if slots == (2, 2):
            contents = "two stages of rows and weights"
        else:
            contents = "{} slots of rows and {} of weights".format(*slots)
        needed = f"L1 for {contents}: {needed_bytes} bytes"
        got = f"{chip.buffers['L1']} on {chip.name}"
        unstacked = "" if shape.mixed == 1 else "leave the window out (rows of all images), or "
        raise errors.CapacityError(
            needed, got, f"{unstacked}use a smaller base_m, base_n or step_k"
        )


# -- the default of a convolution -----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Candidates:
    """Tilings, the units in a stage of each, and whether its pixel tiles are strips."""

    tilings: Tilings
    stages: Array
    strips: Array

    def take(self, index: Array) -> "Candidates":
        """Return the candidates at `index`."""
        return Candidates(self.tilings.take(index), self.stages[index], self.strips[index])


VMAX_PER_WINDOW_ROW = 8
"""About how many vmax instructions take one more row of all pooling windows of a tile."""
TIE_TOLERANCE = 1e-3
"""Relative difference up to which two estimates count as equal."""
L2_GAIN = 0.08
"""Least estimated gain for which the schedule for images in L2 is timed beside the default.

Of 292 random convolutions on four chips 10 % are then timed twice, and all take 1.4 % less time on
average, up to 45 %. Timing every one whose schedules differ (31 %) would save 2.0 %.
"""


def conv_schedule(shape: ConvShape, chip: Chip, epilogue: Epilogue | None = None) -> GemmSchedule:
    """Return the candidate with the least estimated time; raise `CapacityError` if none fits."""
    demand = _demand(shape, chip, epilogue)
    free_chip = chip_left(chip, demand)
    _, index = _best_candidate(shape, free_chip, demand)
    return _candidates_with_room(shape, free_chip, demand).tilings.schedule(index, shape.dtype)


def schedule_for_l2(
    shape: ConvShape, chip: Chip, epilogue: Epilogue | None = None
) -> GemmSchedule | None:
    """Return the candidate that is quickest for an image in L2, if it is quicker by `L2_GAIN`.

    The default assumes that images are read from memory, as for a kernel run alone. In a network
    the kernel before has just written them to L2. Returns None if the default is about as good
    even then. Raises `CapacityError` if nothing fits.
    """
    demand = _demand(shape, chip, epilogue)
    free_chip = chip_left(chip, demand)
    _, default = _best_candidate(shape, free_chip, demand)
    candidates = _candidates_with_room(shape, free_chip, demand)
    cycles = conv_estimate(shape, free_chip, candidates, demand, image_in_l2=True)
    best = _index_of_least(shape, candidates, cycles)
    if cycles[default] <= cycles[best] * (1 + L2_GAIN):
        return None
    return candidates.tilings.schedule(best, shape.dtype)


def _demand(shape: ConvShape, chip: Chip, epilogue: Epilogue | None) -> Demand | None:
    """Return the epilogue's demand per element of a tile, counted before pooling.

    Pooling takes the maximum along columns, then along rows; the epilogue's steps run on the
    results. 2 x 2 windows with stride 2 leave 1/2 of the elements, then 1/4.
    """
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    pool = shape.pool
    if demand is None or pool is None:
        return demand
    element_bytes = DTYPE_BYTES["fp16"]
    vmax = chip.vector_costs["vmax"]
    arrival_cycles = element_bytes / chip.path("L0C", "UB").rate_bytes_per_cycle
    # 112 columns in windows of stride 2 leave 56, one half; with the rows it is one quarter.
    pooled_rows, pooled_columns = pool.out_hw
    column_share = pooled_columns / pool.w
    element_share = pooled_rows / pool.h * column_share
    vmax_cycles = vmax.slope_cycles * element_bytes / chip.vector_bytes_per_repeat
    # Pooling by r x s takes s - 1 maxima along columns, then r - 1 along rows, on what is left.
    maxima = (pool.s - 1) * column_share + (pool.r - 1) * element_share
    cycles = arrival_cycles + maxima * vmax_cycles
    cycles += (demand.cycles - arrival_cycles) * element_share
    return replace(
        demand,
        cycles=cycles,
        stored_bytes=demand.stored_bytes * element_share,
        tile_bytes=demand.tile_bytes + 2 * element_bytes,
        instructions=demand.instructions + VMAX_PER_WINDOW_ROW * (pool.r - 1),
    )


def stacked_schedule(
    shape: ConvShape, chip: Chip, epilogue: Epilogue | None = None
) -> GemmSchedule | None:
    """Return the best candidate that interleaves rows of several images, or None.

    None means that no images can be stacked so, or that the estimate is no better than with tiles
    that end with their image.
    """
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    stacked_shape = stacked(shape)
    if stacked_shape == shape:
        return None
    # L1 must hold rows of all images of a stack at once: those of large images may not fit.
    with suppress(errors.CapacityError):
        free_chip = chip_left(chip, demand)
        # 7 x 7 pixels of 16 images: 49 fractals stacked, 64 one by one.
        stacked_cycles, index = _best_candidate(stacked_shape, free_chip, demand)
        schedule = _candidates_with_room(stacked_shape, free_chip, demand).tilings.schedule(
            index, stacked_shape.dtype
        )
        check_conv(stacked_shape, schedule, free_chip)
        if stacked_cycles < _best_candidate(shape, free_chip, demand)[0]:
            return replace(schedule, window="stacked")
    return None


def as_stacked(
    shape: ConvShape, place: conv_windows.Placement | None
) -> tuple[ConvShape, conv_windows.Placement]:
    """Return the convolution with several images stacked to one, and where its pixels go.

    Raises `InputError` if that fills tiles no better, or if planes of the result have gaps.
    """
    stacked_shape = stacked(shape)
    if stacked_shape == shape:
        needed = "images that fill tiles better together, one group, no bytes, for stacked tiles"
        got = f"{shape.n} images, {shape.r}x{shape.s}, stride {shape.stride}, padding {shape.pad}"
        got += f", {shape.groups} groups, {shape.dtype}"
        raise errors.InputError(needed, got, "leave the window out")
    if place != conv_windows.dense_placement(shape):
        remedy = "pass place=dense_placement(shape)"
        raise errors.InputError("planes without gaps for stacked tiles", str(place), remedy)
    return stacked_shape, conv_windows.dense_placement(stacked_shape)


@lru_cache(256)
def _best_candidate(shape: ConvShape, chip: Chip, demand: Demand | None) -> tuple[float, int]:
    """Return the least estimated cycles and that candidate's index.

    Raises `CapacityError` if no candidate leaves room for the epilogue.
    """
    candidates = _candidates_with_room(shape, chip, demand)
    cycles = conv_estimate(shape, chip, candidates, demand)
    best = _index_of_least(shape, candidates, cycles)
    return float(cycles[best]), best


@lru_cache(64)
def _candidates_with_room(shape: ConvShape, chip: Chip, demand: Demand | None) -> Candidates:
    """Return the candidates that leave room for the epilogue; raise `CapacityError` if none."""
    all_candidates = conv_candidates(shape, chip)
    candidates = all_candidates.take(fitting(demand, chip, all_candidates.tilings))
    if not len(candidates.stages):
        rows, columns = conv_windows.window_sides(shape, 1, strip=True)
        needed_bytes = 2 * (rows * columns + shape.taps * FRACTAL) * shape.pixel_bytes
        if needed_bytes <= chip.buffers["L1"]:
            raise default_schedules.no_room(chip)
        raise errors.CapacityError(
            f"image rows and weights of one channel block twice in L1: {needed_bytes} bytes",
            f"{chip.buffers['L1']} bytes on {chip.name}",
            "use a smaller kernel, dilation or stride",
        )
    return candidates


def _index_of_least(shape: ConvShape, candidates: Candidates, cycles: Floats) -> int:
    """Return the index of the least cycles.

    Among equals it prefers cores that share bundles of groups, not pixels: each core then reads
    neighbouring rows of its own channels, which it finds in L2.
    """
    equal = np.flatnonzero(cycles <= cycles.min() * (1 + TIE_TOLERANCE))
    bundle_shares = np.minimum(candidates.tilings.cols[equal], bundles_of(shape).count)
    return int(equal[np.lexsort((cycles[equal], -bundle_shares))[0]])


def conv_candidates(shape: ConvShape, chip: Chip) -> Candidates:
    """Return the tilings that fit; grid columns divide the bundles first, then each bundle."""
    bundle = bundles_of(shape)
    units = units_of(shape)
    tiles = _distinct_tiles(shape, chip.core_count)
    depth_room = _l0_depth_room(shape, chip, tiles)
    stage_depth = tiles.stage_units * units.depth
    k = _equal_depths(shape, np.minimum(depth_room, stage_depth))
    step = ceil_div_array(stage_depth, k)
    # k * step is the depth that a stage really has: whole tiles of L0.
    stage_units = np.minimum(np.maximum(k * step // units.depth, 1), units.count)
    flat_bytes = _l1_bytes(shape, tiles, stage_units, strip=False)
    strip_bytes = _l1_bytes(shape, tiles, stage_units, strip=True)
    strips = _takes_strips(shape, chip, tiles.m, flat_bytes)
    fits_l0c = tiles.m * tiles.n * 1024 * shape.sums <= chip.buffers["L0C"]
    fits_l1 = np.where(strips, strip_bytes, flat_bytes) <= chip.buffers["L1"]
    # No more rows of cores than pixel tiles, no more columns than tiles of output channels.
    grid_rows = np.minimum(tiles.grid_rows, shape.n * _tiles(shape, tiles.m, strips))
    bundle_shares = np.minimum(tiles.grid_cols, bundle.count)
    columns_per_bundle = np.minimum(
        tiles.grid_cols // bundle_shares, ceil_div_array(bundle.n1, tiles.n)
    )
    grid_cols = bundle_shares * columns_per_bundle
    tilings = Tilings(tiles.m, k, tiles.n, step, grid_rows, grid_cols)
    fits = np.flatnonzero((depth_room >= 1) & fits_l0c & fits_l1)
    return Candidates(tilings, stage_units, strips).take(fits)


class _Tiles(NamedTuple):
    """Sides of output tiles in fractals, units in a stage of L1, and grids of cores, as arrays."""

    m: Array
    n: Array
    stage_units: Array
    grid_rows: Array
    grid_cols: Array


def _distinct_tiles(shape: ConvShape, cores: int) -> _Tiles:
    """Return all choices of tile, stage and grid, cut to the problem, equal ones only once."""
    oh, ow = shape.out_hw
    bundle = bundles_of(shape)
    sides_m, sides_n, stages, grid_rows, grid_cols = default_schedules.all_choices(cores, STAGES)
    image_fractals = ceil_div(oh * ow, FRACTAL)
    if shape.pool:
        # A choice of m stands for m rows of pooling windows: the tile is the output rows they read.
        output_rows = np.minimum(conv_windows.rows_seen(shape.pool, sides_m), oh)
        heights = (output_rows * ow - 1) // FRACTAL + 1
    else:
        heights = sides_m
    cut_m = np.minimum(heights, image_fractals)
    # 49 fractals in tiles of 32 are 2 tiles: make them 25 and 24 rather than 32 and 17.
    tile_count = ceil_div_array(image_fractals, cut_m)
    m = ceil_div_array(image_fractals, tile_count) if shape.mixed > 1 else cut_m
    columns_per_bundle = grid_cols // np.minimum(grid_cols, bundle.count)
    n = np.minimum(sides_n, ceil_div_array(bundle.n1, columns_per_bundle))
    stage_units = np.minimum(stages, units_of(shape).count)
    first, _ = default_schedules.first_of_equal_choices(len(STAGES), m, n, stage_units)
    return _Tiles(m[first], n[first], stage_units[first], grid_rows[first], grid_cols[first])


def _l0_depth_room(shape: ConvShape, chip: Chip, tiles: _Tiles) -> Array:
    """Return how many fractals of depth two slots of L0A and two of L0B have room for."""
    side_bytes = np.minimum(chip.buffers["L0A"] // tiles.m, chip.buffers["L0B"] // tiles.n)
    room: Array = side_bytes // (2 * area_bytes(shape))
    return room


def _l1_bytes(shape: ConvShape, tiles: _Tiles, stage_units: Array, *, strip: bool) -> Array:
    """Return the bytes of two stages of image rows and of weights in L1."""
    weight_bytes = units_of(shape).depth * tiles.n * area_bytes(shape)
    return 2 * stage_units * (_unit_bytes(shape, tiles.m, strip=strip) + weight_bytes)


def _takes_strips(shape: ConvShape, chip: Chip, m: Array, flat_bytes: Array) -> Array:
    """Return whether pixel tiles of m fractals are strips: `takes_strips` on arrays."""
    oh, ow = shape.out_hw
    reads_whole_rows = bool(shape.lanes or shape.mixed > 1 or shape.pool)
    strips: Array = np.where(
        reads_whole_rows,
        False,
        (ow >= 2 * FRACTAL * m) | (flat_bytes > chip.buffers["L1"]) | (oh == 1),
    )
    return strips


def _equal_depths(shape: ConvShape, depths: Array) -> Array:
    """Return depths of a tile of L0, no larger than `depths` and at most 8 fractals.

    They divide a unit or are whole units, so that no step is shorter than the others. A channel
    block of a 3 x 3 kernel is a unit of 9 fractals: depths 1 and 3. Where a fractal holds several
    taps, or another convolution is added (`beside`), the last step may be short anyway.
    """
    unit_depth = units_of(shape).depth
    any_depth = bool(shape.lanes or shape.beside)
    allowed_depths = np.array(
        [d for d in range(1, 9) if any_depth or unit_depth % d == 0 or d % unit_depth == 0]
    )
    index = np.searchsorted(allowed_depths, depths, side="right") - 1
    equal_depths: Array = allowed_depths[np.maximum(index, 0)]
    return equal_depths


def _tiles(shape: ConvShape, m: Array, strips: Array) -> Array:
    """Return the pixel tiles of m fractals in one image: `tiles_per_image` on arrays."""
    oh, ow = shape.out_hw
    if shape.pool:
        rows = conv_windows.pooled_rows(shape, m)
        return ceil_div_array(shape.pool.out_hw[0], rows)
    flat = ceil_div_array(ceil_div(oh * ow, FRACTAL), m)
    tiles: Array = np.where(strips, oh * ceil_div_array(ow, m * FRACTAL), flat)
    return tiles


def _window(shape: ConvShape, m: Array, *, strip: bool) -> Array:
    """Return the most image pixels that a tile of m fractals reads: `window_sides` on arrays."""
    ow = shape.out_hw[1]
    if strip:
        rows = conv_windows.side_of(shape, 0, np.ones_like(m))
        return rows * conv_windows.side_of(shape, 1, np.minimum(m * FRACTAL, ow))
    rows = conv_windows.side_of(shape, 0, conv_windows.rows_spanned(shape, m))
    return rows * shape.mixed * conv_windows.side_of(shape, 1, ow)


def _unit_bytes(shape: ConvShape, m: Array, *, strip: bool) -> Array:
    """Return the most image bytes in a unit of depth of a tile of m fractals of pixels.

    It is `conv_windows.unit_elements` on arrays.
    """
    units = units_of(shape)
    pixel_bytes = shape.pixel_bytes
    image_bytes = units.c1 * pixel_bytes * _window(shape, m, strip=strip)
    if shape.beside:
        image_bytes += units.beside * pixel_bytes * _window(shape.beside, m, strip=strip)
    return image_bytes


def conv_estimate(
    shape: ConvShape,
    chip: Chip,
    candidates: Candidates,
    demand: Demand | None = None,
    *,
    image_in_l2: bool = False,
) -> Floats:
    """Return the estimated cycles of the busiest core for each candidate.

    They are its number of tiles times the longest of cube, MTE1, MTE2 and drain of one tile, plus
    one fill and one drain of the pipeline. With `image_in_l2` the image is read from L2 only.
    """
    bundle = bundles_of(shape)
    units = units_of(shape)
    t = candidates.tilings
    bundle_shares = np.minimum(t.cols, bundle.count)
    tiles_across = ceil_div_array(ceil_div_array(bundle.n1, t.n), t.cols // bundle_shares)
    tiles_down = ceil_div_array(shape.n * _tiles(shape, t.m, candidates.strips), t.rows)
    all_tiles = tiles_down * ceil_div_array(bundle.count, bundle_shares) * tiles_across
    cube, mte1 = default_schedules.inner_cycles(shape.dtype, chip, t, units.total_depth, (1, 1))
    loads = _conv_loads(shape, chip, candidates, (tiles_across, tiles_down), mte1, image_in_l2)
    mte2 = loads.mte2 + default_schedules.operand_cycles(chip, t, demand)
    drain = default_schedules.drain_cycles(shape.gemm, chip, t, demand)
    c_tilings = replace(t, n=t.n * shape.sums)
    busiest_pipe = default_schedules.cycles_per_tile(chip, c_tilings, cube, mte1, mte2, drain)
    # Rows that stay for several tiles have two slots: MTE2 asks for the next ones two tiles before
    # the cube needs them. The cube waits for the cycles beyond that, once per pixel tile.
    wait = np.maximum(loads.rows - 2 * busiest_pipe, 0.0) / tiles_across
    rows_stay = (candidates.stages >= units.count) & (tiles_across > 1)
    tile_cycles = np.where(rows_stay, busiest_pipe + wait, busiest_pipe)
    exposed_share = np.minimum(1.0, candidates.stages / units.count)
    fill_cycles = (loads.rows + loads.weights + mte1) * exposed_share
    tiles: Array | Floats = all_tiles
    if shape.mixed > 1:  # the last tile of a stack of images is smaller
        oh, ow = shape.out_hw
        stacked_fractals = _tiles(shape, t.m, candidates.strips) * t.m
        tiles = all_tiles * ceil_div(oh * ow, FRACTAL) / stacked_fractals
    cycles: Floats = (
        tiles * tile_cycles
        + fill_cycles
        + drain
        + sum(default_schedules.vector_core_cycles(chip, t, demand))
    )
    return cycles


class _Loads(NamedTuple):
    """Cycles of loads for an output tile.

    mte2        all loads of the tile, if rows and weights that stay are shared by several tiles
    rows        its image rows, until the last one has arrived
    weights     its weights
    """

    mte2: Floats
    rows: Floats
    weights: Floats


def _conv_loads(
    shape: ConvShape,
    chip: Chip,
    candidates: Candidates,
    turns: tuple[Array, Array],
    mte1: Floats,
    image_in_l2: bool,
) -> _Loads:
    """Return an output tile's cycles on MTE2, and those of loading its rows and its weights.

    `turns` count a core's tiles along output channels and along pixels: tiles share one load of
    what stays in L1 for them.
    """
    units = units_of(shape)
    t = candidates.tilings
    tile_image_bytes = _tile_image_bytes(shape, candidates)
    tiles_per_load = _tiles_per_load(candidates.stages >= units.count, turns)
    miss_shares = _miss_shares(shape, candidates, tile_image_bytes, *tiles_per_load)
    image_miss_share = np.zeros_like(miss_shares[0]) if image_in_l2 else miss_shares[0]
    # Every stage starts a copy of rows and one of weights, whatever their sizes.
    startup = chip.path("GM", "L1").startup_cycles
    stages_per_tile = ceil_div_array(units.count, candidates.stages)
    # Bytes that miss L2 arrive later than those that hit it.
    memory_extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    latency = (
        chip.path("GM", "L1").latency_cycles
        + chip.l2.latency_cycles
        + image_miss_share * memory_extra
    )
    cores = t.rows * t.cols
    image_rate = gemm_schedule.load_cycles_per_byte(chip, image_miss_share, cores)
    weight_rate = gemm_schedule.load_cycles_per_byte(chip, miss_shares[1], cores)
    weight_bytes = units.total_depth * t.n * area_bytes(shape)
    rows = stages_per_tile * startup + tile_image_bytes * image_rate
    weights = weight_bytes * weight_rate + stages_per_tile * startup
    tiles_per_rows, tiles_per_weights = tiles_per_load
    mte2: Floats = rows / tiles_per_rows + weights / tiles_per_weights
    # A slot of L1 is busy for load + latency + use; with two slots MTE2 sustains two in that time.
    slot_cycles = (stages_per_tile / tiles_per_rows * latency + mte1 + mte2) / 2
    return _Loads(np.maximum(mte2, slot_cycles), rows + latency, weights)


def _tile_image_bytes(shape: ConvShape, candidates: Candidates) -> Array:
    """Return the most image bytes that a tile reads, in all channel blocks of a bundle."""
    m = candidates.tilings.m
    strip_bytes = _unit_bytes(shape, m, strip=True)
    flat_bytes = _unit_bytes(shape, m, strip=False)
    image_bytes: Array = units_of(shape).count * np.where(
        candidates.strips, strip_bytes, flat_bytes
    )
    return image_bytes


def _tiles_per_load(
    one_stage: NDArray[np.bool_], turns: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return how many tiles share one load of rows, and one load of weights.

    With one stage, rows serve all output channels of their pixels; weights serve all pixels if the
    core has one tile of output channels.
    """
    (tiles_across, tiles_down) = turns
    tiles_per_rows = np.where(one_stage, tiles_across, 1)
    return tiles_per_rows, np.where(one_stage & (tiles_across == 1), tiles_down, 1)


def _miss_shares(
    shape: ConvShape,
    candidates: Candidates,
    tile_image_bytes: Array,
    tiles_per_rows: Array,
    tiles_per_weights: Array,
) -> tuple[Floats, Floats]:
    """Return the share of image reads that miss L2, and that of weight reads.

    The image comes from memory once; the other loads of its rows, by neighbouring tiles and for
    other output channels, hit L2. Weights come from memory once for all pixel tiles.
    """
    t = candidates.tilings
    pixel_tiles = shape.n * _tiles(shape, t.m, candidates.strips)
    row_loads = pixel_tiles * ceil_div_array(bundles_of(shape).n1, t.n)
    read_once = _image_bytes(shape) * tiles_per_rows
    image_miss_share = np.minimum(1.0, read_once / (row_loads * tile_image_bytes))
    return image_miss_share, np.minimum(1.0, tiles_per_weights / pixel_tiles)


def _image_bytes(shape: ConvShape) -> int:
    """Return the image bytes that one bundle of groups reads, those of `beside` included."""
    pixels = bundles_of(shape).c1 * shape.h * shape.w
    beside = shape.beside
    pixels += beside.blocks[0] * beside.h * beside.w if beside else 0
    return shape.n * shape.mixed * pixels * shape.pixel_bytes
