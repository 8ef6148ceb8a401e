"""The default convolution tiling: the rule of `gemm_default` with a convolution's own traffic.

What differs from a matrix product: pixel tiles do not span images, L1 holds image rows (not the
im2col matrix), one load3d fills a tile of A, a stage is a whole number of channel blocks, and
bundles of groups are products of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.conv_plan import side_of, window_sides
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.epilogue_plan import Demand, chip_left, demand_of, fitting
from ascend_lab.kernels.gemm_default import SIDES, drain_cycles, operand_cycles
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL, GemmSchedule, up
from ascend_lab.kernels.gemm_tilings import Array, Floats, Tilings, load_cycles_per_byte

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
