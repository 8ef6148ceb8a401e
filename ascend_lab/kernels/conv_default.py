"""The default convolution tiling: the rule of `gemm_default` with a convolution's own traffic.

What differs from a matrix product: pixel tiles do not span images, L1 holds image rows (not the
im2col matrix), one load3d fills a tile of A, and a stage is a whole number of channel blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_default import SIDES, drain_cycles
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, up
from ascend_lab.kernels.gemm_tilings import Array, Floats, Tilings, load_cycles_per_byte

STAGES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Sizes of a convolution in fractals and bytes."""

    pixels: int
    c1: int
    n1: int
    taps: int
    area_bytes: int
    row_bytes: int

    @property
    def k1(self) -> int:
        return self.c1 * self.taps


def _problem(shape: ConvShape) -> _Problem:
    c0, size = c0_of(shape.dtype), DTYPE_BYTES[shape.dtype]
    oh, ow = shape.out_hw
    return _Problem(
        up(oh * ow, FRACTAL),
        up(shape.c, c0),
        up(shape.k, FRACTAL),
        shape.r * shape.s,
        FRACTAL * c0 * size,
        shape.w * c0 * size,
    )


def conv_schedule(shape: ConvShape, chip: Chip) -> GemmSchedule:
    """Return the candidate with the least estimated time; raise `CapacityError` if none fits."""
    tilings, stages = candidates(shape, chip)
    if not len(stages):
        raise CapacityError(
            "image rows and weights of one channel block twice in L1",
            f"{chip.buffers['L1']} bytes on {chip.name}",
            "use a smaller kernel or a narrower image",
        )
    best = int(np.argmin(estimate(shape, chip, tilings, stages)))
    return tilings.schedule(best, shape.dtype)


def candidates(shape: ConvShape, chip: Chip) -> tuple[Tilings, Array]:
    """Return tilings that fit, and how many channel blocks each stages in L1."""
    p, cores = _problem(shape), chip.core_count
    grids = [(r, cores // r) for r in range(1, cores + 1) if cores % r == 0]
    columns = np.array(list(product(SIDES, SIDES, STAGES, range(len(grids)))), np.int64).T
    m, n, stage, which = columns
    rows, cols = np.array(grids, np.int64).T[:, which]
    m, n = np.minimum(m, p.pixels), np.minimum(n, -(-p.n1 // cols))
    stage = np.minimum(stage, p.c1)
    rows = np.minimum(rows, shape.n * -(-p.pixels // m))
    cols = np.minimum(cols, -(-p.n1 // n))
    room = np.minimum(chip.buffers["L0A"] // m, chip.buffers["L0B"] // n) // (2 * p.area_bytes)
    depths = np.array([d for d in range(1, 9) if p.taps % d == 0 or d % p.taps == 0])
    place = np.searchsorted(depths, np.minimum(room, stage * p.taps), side="right") - 1
    k = depths[np.maximum(place, 0)]
    needed = 2 * stage * (_image_rows(shape, m) * p.row_bytes + p.taps * n * p.area_bytes)
    fits = (room >= 1) & (m * n * 1024 <= chip.buffers["L0C"]) & (needed <= chip.buffers["L1"])
    index = np.flatnonzero(fits)
    return Tilings(m, k, n, -(-stage * p.taps // k), rows, cols).take(index), stage[index]


def _image_rows(shape: ConvShape, m: Array) -> Array:
    """Most image rows a tile of m fractals of pixels can need."""
    ow = shape.out_hw[1]
    spanned = (m * FRACTAL + ow - 2) // ow + 1
    return np.minimum((spanned - 1) * shape.stride + shape.r, shape.h)


def estimate(shape: ConvShape, chip: Chip, t: Tilings, stages: Array) -> Floats:
    """Cycles of the busiest core: the longest load of its tiles, plus filling and draining once."""
    p = _problem(shape)
    per_image = -(-p.pixels // t.m)
    columns = -(-p.n1 // t.n)
    tiles = -(-(shape.n * per_image) // t.rows) * -(-columns // t.cols)
    cube, mte1, mte2 = _loads(shape, chip, t, stages)
    drain = drain_cycles(shape.gemm, chip, t)
    alone = t.m * t.n * 2048 > chip.buffers["L0C"]
    steady = np.maximum(np.maximum(np.where(alone, cube + drain, cube), mte1), mte2)
    first = (mte2 + mte1) * np.minimum(1.0, stages / p.c1)
    cycles: Floats = tiles * np.maximum(steady, drain) + first + drain
    return cycles


def _loads(
    shape: ConvShape, chip: Chip, t: Tilings, stages: Array
) -> tuple[Floats, Floats, Floats]:
    """Cycles of one output tile on the cube, on MTE1 and on MTE2."""
    p = _problem(shape)
    turns = -(-p.k1 // t.k)
    fractal = FRACTAL * FRACTAL * c0_of(shape.dtype) / chip.macs_per_cycle(shape.dtype)
    cube = turns * chip.cube_head_cycles + t.m * p.k1 * t.n * fractal
    l0a, l0b = chip.path("L1", "L0A"), chip.path("L1", "L0B")
    loads = turns * (l0a.startup_cycles + t.k * l0b.startup_cycles)
    rates = t.m / l0a.rate_bytes_per_cycle + t.n / l0b.rate_bytes_per_cycle
    mte1 = loads + p.k1 * p.area_bytes * rates
    image = p.c1 * _image_rows(shape, t.m) * p.row_bytes
    weights = p.k1 * t.n * p.area_bytes
    turns_m = shape.n * -(-p.pixels // t.m)
    whole_image = shape.n * p.c1 * shape.h * p.row_bytes
    cores = t.rows * t.cols
    fresh_x = np.minimum(1.0, whole_image / (turns_m * -(-p.n1 // t.n) * image))
    fresh_w = 1.0 / turns_m
    startups = -(-p.c1 // stages) * 2 * chip.path("GM", "L1").startup_cycles
    moved = image * load_cycles_per_byte(chip, fresh_x, cores)
    moved = moved + weights * load_cycles_per_byte(chip, fresh_w, cores)
    return cube, mte1, startups + moved
