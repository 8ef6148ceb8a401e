"""The default GEMM tiling: estimate every plausible tile in closed form, take the best.

This is the rule a good engineer writes down, not a search with the simulator: balance the work over
the cores, fill L0, and make the longest of three loads (cube, L1 to L0, GM to L1) short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import TypeVar

import numpy as np

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.kernels.epilogue import Demand, Epilogue, chip_left, demand_of, fitting
from ascend_lab.kernels.gemm_schedule import (
    ACCUMULATOR,
    FRACTAL,
    Array,
    Floats,
    GemmSchedule,
    GemmShape,
    Tilings,
    check_schedule,
    load_cycles_per_byte,
    memory_traffic,
    store_cycles_per_byte,
    up,
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


# Whether a tiled convolution fits the chip: what L1 must hold, and when rows are cut to strips.


Sizes = TypeVar("Sizes", int, Array)


def c1_stage(shape: ConvShape, schedule: GemmSchedule) -> int:
    """Channel blocks staged at once: step_k * base_k rounded to whole kernel windows."""
    depth = schedule.base_k // c0_of(shape.dtype) * schedule.step_k
    return min(max(1, depth // shape.taps), bundles_of(shape).c1)


def window_sides(shape: ConvShape, tile: int, *, strip: bool) -> tuple[int, int]:
    """Most image rows and columns a tile of `tile` fractals of pixels can need."""
    oh, ow = shape.out_hw
    if strip:
        spanned, across = 1, min(tile * FRACTAL, ow)
    else:
        latest = ow - gcd(tile * FRACTAL, ow)  # tiles start at multiples of their size
        spanned, across = min((latest + tile * FRACTAL - 1) // ow + 1, oh), ow
    return side_of(shape, 0, spanned), side_of(shape, 1, across)


def side_of(shape: ConvShape, axis: int, outputs: Sizes) -> Sizes:
    """Most image rows (axis 0) or columns that `outputs` neighbouring outputs can need."""
    size, step = (shape.h, shape.w)[axis], shape.strides[axis]
    beyond = (shape.out_hw[axis] - 1) * step - shape.pads[2 * axis] >= size
    least = max(shape.reach[axis], step if beyond else 1)
    needed: Sizes = np.minimum((outputs - 1) * step + least, size)
    return needed if isinstance(outputs, np.ndarray) else int(needed)


def stage_bytes(shape: ConvShape, schedule: GemmSchedule, *, strip: bool = False) -> int:
    """L1 bytes of the slots: windows of the image and weights."""
    c1, c0 = c1_stage(shape, schedule), c0_of(shape.dtype)
    rows, columns = window_sides(shape, schedule.base_m // FRACTAL, strip=strip)
    weights = c1 * shape.taps * up(schedule.base_n, FRACTAL) * FRACTAL * c0
    slots = schedule.a_l1_slots * c1 * rows * columns * c0 + schedule.b_l1_slots * weights
    return slots * DTYPE_BYTES[shape.dtype]


def takes_strips(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> bool:
    """Return whether pixel tiles are pieces of one row: rows three tiles long, or too long for L1.

    A flat tile loads whole rows; where it covers a small part of a row, most of that is not its.
    A schedule that names the window decides.
    """
    if schedule.window:
        return schedule.window == "strip"
    long_rows = shape.out_hw[1] >= 2 * schedule.base_m
    return long_rows or stage_bytes(shape, schedule) > chip.buffers["L1"]


def check_conv(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> None:
    """Raise `InputError` or `CapacityError` if the schedule does not fit the chip."""
    if schedule.keep or schedule.bypass:
        raise InputError(
            "keep and bypass of '' for a convolution",
            f"{schedule.keep!r} and {schedule.bypass!r}",
            "what fits one stage stays in L1 by itself: raise step_k",
        )
    check_schedule(shape.gemm, replace(schedule, step_k=min(schedule.step_k, 1)), chip)
    needed = stage_bytes(shape, schedule, strip=takes_strips(shape, schedule, chip))
    if needed > chip.buffers["L1"]:
        slots = (schedule.a_l1_slots, schedule.b_l1_slots)
        what = "two stages of rows and weights"
        if slots != (2, 2):
            what = "{} slots of rows and {} of weights".format(*slots)
        raise CapacityError(
            f"L1 for {what}: {needed} bytes",
            f"{chip.buffers['L1']} on {chip.name}",
            "use a smaller base_m, base_n or step_k",
        )


# The default convolution tiling: the rule of `gemm_default` with a convolution's own traffic.
#
# What differs from a matrix product: pixel tiles do not span images, L1 holds image rows (not the
# im2col matrix), one load3d fills a tile of A, a stage is a whole number of channel blocks, and
# bundles of groups are products of their own.


STAGES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Sizes of a convolution in fractals and bytes; channel blocks are those of one bundle."""

    pixels: int
    c1: int
    n1: int
    bundles: int
    taps: int
    area_bytes: int
    pixel_bytes: int

    @property
    def k1(self) -> int:
        return self.c1 * self.taps


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tilings, the channel blocks each stages in L1, and whether its tiles are strips of rows."""

    tilings: Tilings
    stages: Array
    strips: Array

    def take(self, index: Array) -> Candidates:
        """Return the candidates at `index`."""
        return Candidates(self.tilings.take(index), self.stages[index], self.strips[index])


def _problem(shape: ConvShape) -> _Problem:
    c0, size = c0_of(shape.dtype), DTYPE_BYTES[shape.dtype]
    oh, ow = shape.out_hw
    bundle, area = bundles_of(shape), FRACTAL * c0 * size
    return _Problem(
        up(oh * ow, FRACTAL), bundle.c1, bundle.n1, bundle.count, shape.taps, area, c0 * size
    )


def conv_schedule(shape: ConvShape, chip: Chip, epilogue: Epilogue | None = None) -> GemmSchedule:
    """Return the candidate with the least estimated time; raise `CapacityError` if none fits."""
    demand = demand_of(epilogue, chip, ACCUMULATOR[shape.dtype])
    chip = chip_left(chip, demand)
    found = conv_candidates(shape, chip)
    found = found.take(fitting(demand, chip, found.tilings))
    if not len(found.stages):
        rows, columns = window_sides(shape, 1, strip=True)
        p = _problem(shape)
        needed = 2 * (rows * columns * p.pixel_bytes + p.taps * p.area_bytes)
        raise CapacityError(
            f"image rows and weights of one channel block twice in L1: {needed} bytes",
            f"{chip.buffers['L1']} bytes on {chip.name}",
            "use a smaller kernel, dilation or stride",
        )
    best = int(np.argmin(conv_estimate(shape, chip, found, demand)))
    return found.tilings.schedule(best, shape.dtype)


def conv_candidates(shape: ConvShape, chip: Chip) -> Candidates:
    """Return the tilings that fit; the cores are split over bundles first, then inside each."""
    p, cores = _problem(shape), chip.core_count
    grids = [(r, cores // r) for r in range(1, cores + 1) if cores % r == 0]
    columns = np.array(list(product(SIDES, SIDES, STAGES, range(len(grids)))), np.int64).T
    m, n, stage, which = columns
    rows, cols = np.array(grids, np.int64).T[:, which]
    shares = np.minimum(cols, p.bundles)
    inside = cols // shares
    m, n = np.minimum(m, p.pixels), np.minimum(n, -(-p.n1 // inside))
    stage = np.minimum(stage, p.c1)
    room = np.minimum(chip.buffers["L0A"] // m, chip.buffers["L0B"] // n) // (2 * p.area_bytes)
    depths = np.array([d for d in range(1, 9) if p.taps % d == 0 or d % p.taps == 0])
    place = np.searchsorted(depths, np.minimum(room, stage * p.taps), side="right") - 1
    k = depths[np.maximum(place, 0)]
    step = -(-stage * p.taps // k)
    staged = np.minimum(np.maximum(k * step // p.taps, 1), p.c1)
    flat, strip = (_stage_bytes(shape, staged, m, n, strip=s) for s in (False, True))
    strips = (shape.out_hw[1] >= 2 * FRACTAL * m) | (flat > chip.buffers["L1"])
    rows = np.minimum(rows, shape.n * _tiles(shape, m, strips))
    cols = shares * np.minimum(inside, -(-p.n1 // n))
    fits = (room >= 1) & (m * n * 1024 <= chip.buffers["L0C"])
    fits &= np.where(strips, strip, flat) <= chip.buffers["L1"]
    every = Candidates(Tilings(m, k, n, step, rows, cols), staged, strips)
    return every.take(np.flatnonzero(fits))


def _tiles(shape: ConvShape, m: Array, strips: Array) -> Array:
    """Pixel tiles of m fractals in one image."""
    oh, ow = shape.out_hw
    flat = -(-up(oh * ow, FRACTAL) // m)
    tiles: Array = np.where(strips, oh * -(-ow // (m * FRACTAL)), flat)
    return tiles


def _window(shape: ConvShape, m: Array, *, strip: bool) -> Array:
    """Most image pixels a tile of m fractals can need: `conv_plan.window_sides` on arrays."""
    oh, ow = shape.out_hw
    if strip:
        return side_of(shape, 0, np.ones_like(m)) * side_of(shape, 1, np.minimum(m * FRACTAL, ow))
    latest = ow - np.gcd(m * FRACTAL, ow)
    spanned = np.minimum((latest + m * FRACTAL - 1) // ow + 1, oh)
    return side_of(shape, 0, spanned) * side_of(shape, 1, ow)


def _stage_bytes(shape: ConvShape, stage: Array, m: Array, n: Array, *, strip: bool) -> Array:
    p = _problem(shape)
    window = _window(shape, m, strip=strip) * p.pixel_bytes
    needed: Array = 2 * stage * (window + p.taps * n * p.area_bytes)
    return needed


def conv_estimate(
    shape: ConvShape, chip: Chip, found: Candidates, demand: Demand | None = None
) -> Floats:
    """Cycles of the busiest core: the longest load of its tiles, plus filling and draining once."""
    p, t = _problem(shape), found.tilings
    shares = np.minimum(t.cols, p.bundles)
    each = -(-p.n1 // t.n)
    across = -(-each // (t.cols // shares))
    down = -(-(shape.n * _tiles(shape, t.m, found.strips)) // t.rows)
    tiles = down * -(-p.bundles // shares) * across
    cube, mte1, mte2, rows, weights = _conv_loads(shape, chip, found, across, down)
    mte2 = mte2 + operand_cycles(chip, t, demand)
    drain = drain_cycles(shape.gemm, chip, t, demand)
    alone = t.m * t.n * 2048 > chip.buffers["L0C"]
    steady = np.maximum(np.maximum(np.where(alone, cube + drain, cube), mte1), mte2)
    steady = np.maximum(steady, drain)
    # Rows that stay for several tiles are asked for two tiles before the next ones need them.
    late = np.maximum(rows - 2 * steady, 0.0) / across
    steady = np.where((found.stages >= p.c1) & (across > 1), steady + late, steady)
    first = (rows + weights + mte1) * np.minimum(1.0, found.stages / p.c1)
    cycles: Floats = tiles * steady + first + drain
    return cycles


def _conv_loads(
    shape: ConvShape, chip: Chip, found: Candidates, across: Array, down: Array
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Cycles of one output tile on the cube, on MTE1, on MTE2; of loading its rows, its weights.

    `across` and `down` count a core's tiles along output channels and pixels: what stays in L1
    for some of them is shared by them.
    """
    p, t, stages = _problem(shape), found.tilings, found.stages
    turns = -(-p.k1 // t.k)
    fractal = FRACTAL * FRACTAL * c0_of(shape.dtype) / chip.macs_per_cycle(shape.dtype)
    cube = turns * chip.cube_head_cycles + t.m * p.k1 * t.n * fractal
    l0a, l0b = chip.path("L1", "L0A"), chip.path("L1", "L0B")
    loads = turns * (l0a.startup_cycles + t.k * l0b.startup_cycles)
    rates = t.m / l0a.rate_bytes_per_cycle + t.n / l0b.rate_bytes_per_cycle
    mte1 = loads + p.k1 * p.area_bytes * rates
    sides = [_window(shape, t.m, strip=strip) for strip in (True, False)]
    image = p.c1 * np.where(found.strips, *sides) * p.pixel_bytes
    once = stages >= p.c1
    tiles_x = np.where(once, across, 1)
    tiles_w = np.where(once & (across == 1), down, 1)
    turns_m = shape.n * _tiles(shape, t.m, found.strips)
    whole_image = shape.n * p.c1 * shape.h * shape.w * p.pixel_bytes
    cores = t.rows * t.cols
    fresh_x = np.minimum(1.0, whole_image * tiles_x / (turns_m * -(-p.n1 // t.n) * image))
    fresh_w = np.minimum(1.0, tiles_w / turns_m)
    startup, turns_k = chip.path("GM", "L1").startup_cycles, -(-p.c1 // stages)
    latency = _latency(chip, fresh_x)
    rows = turns_k * startup + image * load_cycles_per_byte(chip, fresh_x, cores)
    weights = p.k1 * t.n * p.area_bytes * load_cycles_per_byte(chip, fresh_w, cores)
    weights = weights + turns_k * startup
    mte2: Floats = rows / tiles_x + weights / tiles_w
    # Two L1 slots that wait for memory turn around in load + latency + use.
    slot = (turns_k / tiles_x * latency + mte1 + mte2) / 2
    return cube, mte1, np.maximum(mte2, slot), rows + latency, weights


def _latency(chip: Chip, fresh: Floats) -> Floats:
    """Cycles until loaded data are visible in L1, the mix of memory and L2."""
    extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    latency: Floats = chip.path("GM", "L1").latency_cycles + chip.l2.latency_cycles + fresh * extra
    return latency
