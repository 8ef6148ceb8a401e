"""Find the quickest grid of cores for a tile size that the user chose."""

from dataclasses import replace
from itertools import product

import numpy as np

from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels import conv, conv_schedules, conv_windows, gemm, gemm_schedule
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.operators.kernels.default_schedules import estimate
from ascend_lab.operators.kernels.gemm_schedule import Floats, GemmSchedule, GemmShape

SIMULATED_GRIDS = 8
"""Grids that `best_grid` simulates besides the schedule's own."""


def best_grid(shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule) -> GemmSchedule:
    """Return the schedule with the quickest grid, or its own grid if that is equally quick.

    The grids are ordered by estimated cycles; the schedule's own grid and the `SIMULATED_GRIDS`
    with the lowest estimates are simulated. Raises the errors of the kernel's launch.
    """
    if isinstance(shape, ConvShape):
        conv_schedules.check_conv(shape, schedule, chip)
    else:
        gemm_schedule.check_schedule(shape, schedule, chip)
    schedules = [schedule, *_grids(shape, chip, schedule)]
    # The schedule itself is number 0: it is simulated in any case.
    order = np.argsort(_estimate(shape, chip, schedules)[1:], kind="stable")[:SIMULATED_GRIDS] + 1
    candidates = [schedule, *(schedules[int(index)] for index in order)]
    launches = (
        conv.conv_launch(shape, chip, candidate)
        if isinstance(shape, ConvShape)
        else gemm.gemm_launch(shape, chip, candidate)
        for candidate in candidates
    )
    cycles = [sim.simulate(launch, chip).cycles for launch in launches]
    return candidates[int(np.argmin(cycles))]


def _grids(shape: GemmShape | ConvShape, chip: Chip, schedule: GemmSchedule) -> list[GemmSchedule]:
    """Return the schedule on every grid; of grids with the same work per core, on the smallest."""
    tile_m = schedule.base_m // isa.FRACTAL
    tile_n = schedule.base_n // isa.FRACTAL
    if isinstance(shape, GemmShape):
        m1, _, n1 = shape.fractals
        tile_rows = isa.ceil_div(m1, tile_m)
        bundles = 1
        tile_columns = isa.ceil_div(n1, tile_n)
    else:
        bundle = bundles_of(shape)
        strip = conv_schedules.takes_strips(shape, schedule, chip)
        tile_rows = shape.n * conv_windows.tiles_per_image(shape, tile_m, strip=strip)
        bundles = bundle.count
        tile_columns = isa.ceil_div(bundle.n1, tile_n)
    by_work: dict[tuple[int, ...], GemmSchedule] = {}
    for rows, cols in product(range(1, chip.core_count + 1), repeat=2):
        if rows * cols <= chip.core_count:
            # Grid columns first divide the bundles of groups; further columns divide each bundle:
            # 8 columns and 2 bundles are 2 shares of 4 columns.
            shares = min(cols, bundles)
            # (rows of tiles, bundles, columns of tiles) of the busiest core: 5 rows of cores give 8
            # rows of tiles no less work than 4 do.
            work = (
                isa.ceil_div(tile_rows, rows),
                isa.ceil_div(bundles, shares),
                isa.ceil_div(tile_columns, cols // shares),
            )
            by_work.setdefault(work, replace(schedule, grid_rows=rows, grid_cols=cols))
    return list(by_work.values())


def _estimate(shape: GemmShape | ConvShape, chip: Chip, schedules: list[GemmSchedule]) -> Floats:
    """Return the cycles that the default schedule's estimate gives, for one tile size."""
    tilings = gemm_schedule.tilings_of(schedules, shape.dtype)
    if isinstance(shape, GemmShape):
        return estimate(shape, chip, tilings)
    stages = np.full(len(schedules), conv_schedules.c1_stage(shape, schedules[0]))
    strips = np.full(len(schedules), conv_schedules.takes_strips(shape, schedules[0], chip))
    return conv_schedules.conv_estimate(
        shape, chip, conv_schedules.Candidates(tilings, stages, strips)
    )
