"""The default tiling of a convolution: every plausible one estimated, the best taken.

The rule is that of products (`default_schedules`). What differs: pixel tiles do not span images,
unless their rows take turns, L1 holds image rows (not the im2col matrix), one load3d fills a tile
of A, a stage is a whole number of channel blocks, and bundles of groups are products of their own.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, up
from ascend_lab.operators.kernels import conv_windows, default_schedules, gemm_schedule
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of, stacked, units_of
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


def c1_stage(shape: ConvShape, schedule: GemmSchedule) -> int:
    """Units, mostly channel blocks, staged at once: step_k * base_k rounded to whole ones."""
    depth = schedule.base_k // isa.c0_of(shape.dtype) * schedule.step_k
    units = units_of(shape)
    return min(max(1, depth // units.depth), units.count)


def stage_bytes(shape: ConvShape, schedule: GemmSchedule, *, strip: bool = False) -> int:
    """L1 bytes of the slots: windows of the image and weights."""
    stage = c1_stage(shape, schedule)
    c0 = isa.c0_of(shape.dtype)
    image = sum(conv_windows.unit_elements(shape, schedule.base_m // FRACTAL, strip=strip))
    weights = units_of(shape).depth * up(schedule.base_n, FRACTAL) * FRACTAL * c0
    slots = schedule.a_l1_slots * image + schedule.b_l1_slots * weights
    return stage * slots * DTYPE_BYTES[shape.dtype]


def stages_ahead(
    shape: ConvShape, schedule: GemmSchedule, chip: Chip, ids: int, *, strip: bool
) -> int:
    """Return the slots of L1 that rows and weights of a stage fill together, 0: each have theirs.

    That is where every tile loads both in several stages; `ids` are events left for it.
    """
    slots = schedule.a_l1_slots, schedule.b_l1_slots
    if slots != (2, 2) or c1_stage(shape, schedule) >= units_of(shape).count:
        return 0
    room = 2 * chip.buffers["L1"] // stage_bytes(shape, schedule, strip=strip)
    return min(gemm_schedule.AHEAD, ids, room)


def area_bytes(shape: ConvShape) -> int:
    """Return the bytes of a fractal of rows or weights."""
    return FRACTAL * isa.c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]


def takes_strips(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> bool:
    """Return whether pixel tiles are pieces of one row: rows three tiles long, or too long for L1.

    A flat tile loads whole rows; where it covers a small part of a row, most of that is not its.
    A schedule that names the window decides; pixels of few lanes stay whole rows.
    """
    if shape.lanes or shape.pool:
        return False
    if schedule.window:
        return schedule.window == "strip"
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
    sums = max(shape.sums, schedule.c_l0_slots)
    whole = replace(schedule, step_k=min(schedule.step_k, 1), c_l0_slots=sums)
    check_schedule(shape.gemm, whole, chip)
    if shape.pool and shape.pool.r * shape.out_hw[1] > schedule.base_m:
        wanted = f"base_m of a row of windows: {shape.pool.r} rows of {shape.out_hw[1]} pixels"
        raise errors.CapacityError(wanted, str(schedule.base_m), "use two kernels")
    needed = stage_bytes(shape, schedule, strip=takes_strips(shape, schedule, chip))
    if needed > chip.buffers["L1"]:
        slots = (schedule.a_l1_slots, schedule.b_l1_slots)
        what = "two stages of rows and weights"
        if slots != (2, 2):
            what = "{} slots of rows and {} of weights".format(*slots)
        wanted = f"L1 for {what}: {needed} bytes"
        got = f"{chip.buffers['L1']} on {chip.name}"
        other = "" if shape.mixed == 1 else "leave the window out (rows of all images), or "
        raise errors.CapacityError(wanted, got, f"{other}use a smaller base_m, base_n or step_k")


# -- the default of a convolution -----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Candidates:
    """Tilings, the units each stages in L1, and whether its tiles are strips of rows."""

    tilings: Tilings
    stages: Array
    strips: Array

    def take(self, index: Array) -> "Candidates":
        """Return the candidates at `index`."""
        return Candidates(self.tilings.take(index), self.stages[index], self.strips[index])


HEADS = 8
"""Instructions that fold the rows of a tile by one more, about."""
EQUAL = 1e-3
"""Share by which estimates may differ and still say the same."""
NEAR_GAIN = 0.08
"""Share of its cycles by which a schedule must look longer than one for images in L2 to time both.

Of 292 random convolutions on four chips 10 % are timed twice then, and all take 1.4 % less on
average, up to 45 %; timing every one whose schedules differ, 31 %, would save 2.0 %.
"""


def conv_schedule(shape: ConvShape, chip: Chip, epilogue: Epilogue | None = None) -> GemmSchedule:
    """Return the candidate with the least estimated time; raise `CapacityError` if none fits."""
    demand = _demand(shape, chip, epilogue)
    left = chip_left(chip, demand)
    _, place = _least(shape, left, demand)
    return _fitting(shape, left, demand).tilings.schedule(place, shape.dtype)


def near_schedule(
    shape: ConvShape, chip: Chip, epilogue: Epilogue | None = None
) -> GemmSchedule | None:
    """Return the candidate that looks best where L2 holds the image, if it gains `NEAR_GAIN`.

    The default takes images to come from memory, as those of a kernel alone do. In a network the
    kernel before has just written them. None where the default looks about as good then. Raises
    `CapacityError` if nothing fits.
    """
    demand = _demand(shape, chip, epilogue)
    left = chip_left(chip, demand)
    _, default = _least(shape, left, demand)
    found = _fitting(shape, left, demand)
    cycles = conv_estimate(shape, left, found, demand, near=True)
    best = _place_of_least(shape, found, cycles)
    if cycles[default] <= cycles[best] * (1 + NEAR_GAIN):
        return None
    return found.tilings.schedule(best, shape.dtype)


def _demand(shape: ConvShape, chip: Chip, epilogue: Epilogue | None) -> Demand | None:
    """Return what is done to a number of the tile, whether or not only the largest of some leave.

    Columns are folded, then rows; the steps are for what is left.
    """
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    pool = shape.pool
    if demand is None or pool is None:
        return demand
    size = DTYPE_BYTES["fp16"]
    cost = chip.vector_costs["vmax"]
    arrival = size / chip.path("L0C", "UB").rate_bytes_per_cycle
    across, left = (a / b for a, b in zip(pool.out_hw[::-1], (pool.w, pool.h), strict=True))
    left *= across
    one = cost.slope_cycles * size / chip.vector_bytes_per_repeat
    cycles = arrival + ((pool.s - 1) * across + (pool.r - 1) * left) * one
    cycles += (demand.cycles - arrival) * left
    return replace(
        demand,
        cycles=cycles,
        stored_bytes=demand.stored_bytes * left,
        tile_bytes=demand.tile_bytes + 2 * size,
        instructions=demand.instructions + HEADS * (pool.r - 1),
    )


def stacked_schedule(
    shape: ConvShape, chip: Chip, epilogue: Epilogue | None = None
) -> GemmSchedule | None:
    """Return the best candidate with images together, None where they stay apart.

    So they do where even the estimate is no better than that of tiles that end with their image.
    """
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    together = stacked(shape)
    if together == shape:
        return None
    with suppress(errors.CapacityError):  # of large images, each a row then
        left = chip_left(chip, demand)
        least, place = _least(together, left, demand)
        found = _fitting(together, left, demand).tilings.schedule(place, together.dtype)
        check_conv(together, found, left)
        if least < _least(shape, left, demand)[0]:
            return replace(found, window="stacked")
    return None


def as_stacked(
    shape: ConvShape, place: conv_windows.Placement | None
) -> tuple[ConvShape, conv_windows.Placement]:
    """Return a convolution of all images together, and where its pixels go.

    Raises `InputError` where they do not fill tiles better so, or planes have gaps.
    """
    together = stacked(shape)
    if together == shape:
        wanted = "images that fill tiles better together, one group, no bytes, for stacked tiles"
        got = f"{shape.n} images, {shape.r}x{shape.s}, stride {shape.stride}, padding {shape.pad}"
        got += f", {shape.groups} groups, {shape.dtype}"
        raise errors.InputError(wanted, got, "leave the window out")
    if place != conv_windows.dense_placement(shape):
        remedy = "pass place=dense_placement(shape)"
        raise errors.InputError("planes without gaps for stacked tiles", str(place), remedy)
    return together, conv_windows.dense_placement(together)


@lru_cache(256)
def _least(shape: ConvShape, chip: Chip, demand: Demand | None) -> tuple[float, int]:
    """Return the least estimated cycles, and the place of the candidate; raises as `_fitting`."""
    found = _fitting(shape, chip, demand)
    cycles = conv_estimate(shape, chip, found, demand)
    best = _place_of_least(shape, found, cycles)
    return float(cycles[best]), best


@lru_cache(64)
def _fitting(shape: ConvShape, chip: Chip, demand: Demand | None) -> Candidates:
    """Return the candidates with room for what follows; raise `CapacityError` if none fits."""
    found = conv_candidates(shape, chip)
    found = found.take(fitting(demand, chip, found.tilings))
    if not len(found.stages):
        rows, columns = conv_windows.window_sides(shape, 1, strip=True)
        pixel = shape.pixel_bytes
        needed = 2 * (rows * columns + shape.taps * FRACTAL) * pixel
        if needed <= chip.buffers["L1"]:
            raise default_schedules.no_room(chip)
        raise errors.CapacityError(
            f"image rows and weights of one channel block twice in L1: {needed} bytes",
            f"{chip.buffers['L1']} bytes on {chip.name}",
            "use a smaller kernel, dilation or stride",
        )
    return found


def _place_of_least(shape: ConvShape, found: Candidates, cycles: Floats) -> int:
    """Return the place of the least cycles.

    Of equal ones cores share bundles of groups rather than pixels: each reads neighbouring rows of
    its own channels, which it finds in L2.
    """
    equal = np.flatnonzero(cycles <= cycles.min() * (1 + EQUAL))
    shares = np.minimum(found.tilings.cols[equal], bundles_of(shape).count)
    return int(equal[np.lexsort((cycles[equal], -shares))[0]])


def conv_candidates(shape: ConvShape, chip: Chip) -> Candidates:
    """Return the tilings that fit; the cores are split over bundles first, then inside each."""
    (oh, ow) = shape.out_hw
    bundle = bundles_of(shape)
    units = units_of(shape)
    area = area_bytes(shape)
    taps = units.depth
    m, n, stage, rows, cols = default_schedules.choices(chip.core_count, STAGES)
    inside = cols // np.minimum(cols, bundle.count)
    pixels = up(oh * ow, FRACTAL)
    if shape.pool:  # what so many rows of windows see
        m = (np.minimum(conv_windows.rows_seen(shape.pool, m), oh) * ow - 1) // FRACTAL + 1
    m = np.minimum(m, pixels)
    n = np.minimum(n, default_schedules.each_up(bundle.n1, inside))
    if shape.mixed > 1:  # as even heights as can be
        m = default_schedules.each_up(pixels, default_schedules.each_up(pixels, m))
    stage = np.minimum(stage, units.count)
    new, _ = default_schedules.distinct(len(STAGES), m, n, stage)
    m, n, stage, rows, cols = (x[new] for x in (m, n, stage, rows, cols))
    shares = np.minimum(cols, bundle.count)
    inside = cols // shares
    room = np.minimum(chip.buffers["L0A"] // m, chip.buffers["L0B"] // n) // (2 * area)
    # with taps several to a fractal, or something beside, the last step may be short
    uneven = bool(shape.lanes or shape.beside)
    depths = np.array([d for d in range(1, 9) if uneven or taps % d == 0 or d % taps == 0])
    place = np.searchsorted(depths, np.minimum(room, stage * taps), side="right") - 1
    k = depths[np.maximum(place, 0)]
    step = default_schedules.each_up(stage * taps, k)
    staged = np.minimum(np.maximum(k * step // taps, 1), units.count)
    flat, strip = (
        2 * staged * (_unit_bytes(shape, m, strip=s) + taps * n * area) for s in (False, True)
    )
    strips = (ow >= 2 * FRACTAL * m) | (flat > chip.buffers["L1"]) | (oh == 1)
    strips &= not (shape.lanes or shape.mixed > 1 or shape.pool)
    rows = np.minimum(rows, shape.n * _tiles(shape, m, strips))
    cols = shares * np.minimum(inside, default_schedules.each_up(bundle.n1, n))
    fits = (room >= 1) & (m * n * 1024 * shape.sums <= chip.buffers["L0C"])
    fits &= np.where(strips, strip, flat) <= chip.buffers["L1"]
    every = Candidates(Tilings(m, k, n, step, rows, cols), staged, strips)
    return every.take(np.flatnonzero(fits))


def _tiles(shape: ConvShape, m: Array, strips: Array) -> Array:
    """Pixel tiles of m fractals in one image."""
    oh, ow = shape.out_hw
    if shape.pool:
        rows = conv_windows.pooled_rows(shape, m)
        return default_schedules.each_up(shape.pool.out_hw[0], rows)
    flat = default_schedules.each_up(up(oh * ow, FRACTAL), m)
    tiles: Array = np.where(strips, oh * default_schedules.each_up(ow, m * FRACTAL), flat)
    return tiles


def _window(shape: ConvShape, m: Array, *, strip: bool) -> Array:
    """Most image pixels a tile of m fractals can need: `window_sides` on arrays."""
    ow = shape.out_hw[1]
    if strip:
        return conv_windows.side_of(shape, 0, np.ones_like(m)) * conv_windows.side_of(
            shape, 1, np.minimum(m * FRACTAL, ow)
        )
    return (
        conv_windows.side_of(shape, 0, conv_windows.rows_spanned(shape, m))
        * shape.mixed
        * conv_windows.side_of(shape, 1, ow)
    )


def _unit_bytes(shape: ConvShape, m: Array, *, strip: bool) -> Array:
    """Bytes of image of a unit of a tile of m fractals: `unit_elements` on arrays."""
    units = units_of(shape)
    pixel = shape.pixel_bytes
    own = units.c1 * pixel * _window(shape, m, strip=strip)
    other = shape.beside
    return own + units.beside * pixel * _window(other, m, strip=strip) if other else own


def conv_estimate(
    shape: ConvShape,
    chip: Chip,
    found: Candidates,
    demand: Demand | None = None,
    *,
    near: bool = False,
) -> Floats:
    """Cycles of the busiest core: the longest load of its tiles, plus filling and draining once.

    With `near` L2 holds the image.
    """
    bundle = bundles_of(shape)
    units = units_of(shape)
    t = found.tilings
    shares = np.minimum(t.cols, bundle.count)
    across = default_schedules.each_up(default_schedules.each_up(bundle.n1, t.n), t.cols // shares)
    down = default_schedules.each_up(shape.n * _tiles(shape, t.m, found.strips), t.rows)
    tiles = down * default_schedules.each_up(bundle.count, shares) * across
    cube, mte1 = default_schedules.inner_cycles(shape.dtype, chip, t, units.every, (1, 1))
    mte2, rows, weights = _conv_loads(shape, chip, found, (across, down), mte1, near)
    mte2 = mte2 + default_schedules.operand_cycles(chip, t, demand)
    drain = default_schedules.drain_cycles(shape.gemm, chip, t, demand)
    sums = replace(t, n=t.n * shape.sums)
    pace = default_schedules.steady(chip, sums, cube, mte1, mte2, drain)
    # Rows that stay for several tiles are asked for two tiles before the next ones need them.
    late = np.maximum(rows - 2 * pace, 0.0) / across
    pace = np.where((found.stages >= units.count) & (across > 1), pace + late, pace)
    first = (rows + weights + mte1) * np.minimum(1.0, found.stages / units.count)
    if shape.mixed > 1:  # the last tile of some images is a little smaller
        oh, ow = shape.out_hw
        tiles = tiles * up(oh * ow, FRACTAL) / (_tiles(shape, t.m, found.strips) * t.m)
    cycles: Floats = (
        tiles * pace + first + drain + sum(default_schedules.after_cycles(chip, t, demand))
    )
    return cycles


def _conv_loads(
    shape: ConvShape,
    chip: Chip,
    found: Candidates,
    turns: tuple[Array, Array],
    mte1: Floats,
    near: bool,
) -> tuple[Floats, Floats, Floats]:
    """Cycles of one output tile on MTE2, of loading its rows, of loading its weights.

    L2 holds the image if it is `near`. `turns` count a core's tiles along output channels and
    pixels: what stays in L1 for some of them is shared by them.
    """
    bundle = bundles_of(shape)
    units = units_of(shape)
    t = found.tilings
    stages = found.stages
    (across, down) = turns
    sides = [_unit_bytes(shape, t.m, strip=strip) for strip in (True, False)]
    image = units.count * np.where(found.strips, *sides)
    once = stages >= units.count
    tiles_x = np.where(once, across, 1)
    tiles_w = np.where(once & (across == 1), down, 1)
    turns_m = shape.n * _tiles(shape, t.m, found.strips)
    other = shape.beside
    pixels = bundle.c1 * shape.h * shape.w
    pixels += other.blocks[0] * other.h * other.w if other else 0
    whole_image = shape.n * shape.mixed * pixels * shape.pixel_bytes
    cores = t.rows * t.cols
    fresh_x = np.minimum(
        1.0, whole_image * tiles_x / (turns_m * default_schedules.each_up(bundle.n1, t.n) * image)
    )
    if near:
        fresh_x = np.zeros_like(fresh_x)
    fresh_w = np.minimum(1.0, tiles_w / turns_m)
    startup = chip.path("GM", "L1").startup_cycles
    turns_k = default_schedules.each_up(units.count, stages)
    extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    latency = chip.path("GM", "L1").latency_cycles + chip.l2.latency_cycles + fresh_x * extra
    rows = turns_k * startup + image * gemm_schedule.load_cycles_per_byte(chip, fresh_x, cores)
    size = units.every * t.n * area_bytes(shape)
    weights = size * gemm_schedule.load_cycles_per_byte(chip, fresh_w, cores) + turns_k * startup
    mte2: Floats = rows / tiles_x + weights / tiles_w
    # Two L1 slots that wait for memory turn around in load + latency + use.
    slot = (turns_k / tiles_x * latency + mte1 + mte2) / 2
    return np.maximum(mte2, slot), rows + latency, weights
