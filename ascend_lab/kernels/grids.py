"""The grid of cores for a tile of one's own: an estimate orders them, the simulator chooses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from ascend_lab.chip import Chip
from ascend_lab.isa import Launch
from ascend_lab.kernels.conv import conv_launch
from ascend_lab.kernels.conv_default import Candidates, conv_estimate
from ascend_lab.kernels.conv_plan import c1_stage, check_conv, takes_strips
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_default import estimate
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, GemmShape, check_schedule, up
from ascend_lab.kernels.gemm_tilings import Floats, tilings_of
from ascend_lab.kernels.windows import tiles_per_image
from ascend_lab.sim import simulate

TRIED = 8


def best_grid(shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule) -> GemmSchedule:
    """Return the schedule with the quickest grid, its own among equals; raises as its launch.

    Simulated are its own and the TRIED grids with the least estimates.
    """
    if isinstance(shape, ConvShape):
        check_conv(shape, schedule, chip)
    else:
        check_schedule(shape, schedule, chip)
    every = [schedule, *_grids(shape, chip, schedule)]
    order = np.argsort(_estimate(shape, chip, every)[1:], kind="stable")[:TRIED] + 1
    tried = [schedule, *(every[int(index)] for index in order)]
    cycles = [simulate(_launch(shape, chip, one), chip).cycles for one in tried]
    return tried[int(np.argmin(cycles))]


def _grids(shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule) -> list[GemmSchedule]:
    """Return the schedule on every grid; of those that give a core the same work, the smallest."""
    down, bundles, across = _tiles(shape, chip, schedule)
    found: dict[tuple[int, ...], GemmSchedule] = {}
    for rows, cols in product(range(1, chip.core_count + 1), repeat=2):
        if rows * cols <= chip.core_count:
            shares = min(cols, bundles)
            work = up(down, rows), up(bundles, shares), up(across, cols // shares)
            found.setdefault(work, replace(schedule, grid_rows=rows, grid_cols=cols))
    return list(found.values())


def _tiles(
    shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule
) -> tuple[int, int, int]:
    """Return the tiles along m (or pixels), bundles of groups, and tiles along n of a bundle."""
    tile, blocks = schedule.base_m // FRACTAL, schedule.base_n // FRACTAL
    if isinstance(shape, GemmShape):
        m1, _, n1 = shape.fractals
        return up(m1, tile), 1, up(n1, blocks)
    strip, bundles = takes_strips(shape, schedule, chip), bundles_of(shape)
    pixels = shape.n * tiles_per_image(shape, tile, strip=strip)
    return pixels, bundles.count, up(bundles.n1, blocks)


def _estimate(shape: GemmShape | ConvShape, chip: Chip, every: list[GemmSchedule]) -> Floats:
    """Return the cycles that the default's rule gives schedules of one tile."""
    if isinstance(shape, GemmShape):
        return estimate(shape, chip, tilings_of(every, shape.dtype))
    stages = np.full(len(every), c1_stage(shape, every[0]))
    strips = np.full(len(every), takes_strips(shape, every[0], chip))
    found = Candidates(tilings_of(every, shape.dtype), stages, strips)
    return conv_estimate(shape, chip, found)


def _launch(shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule) -> Launch:
    if isinstance(shape, ConvShape):
        return conv_launch(shape, chip, schedule)
    return gemm_launch(shape, chip, schedule)
