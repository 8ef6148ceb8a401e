"""Builds the search space of a convolution's tilings, as a table of decisions (genes).

The genes in the order of decision: core grid, type of window, tile of pixels and of output
channels, loop order, channel blocks in a stage, K tile, slots of L1 and of L0. Sizes are in
fractals.

Pixel tiles divide the image as evenly as possible or hold whole rows of it. As in a product, the
smallest of the channel tiles that give every core the same number of tiles represents the others,
and if two slots fit, one slot is left out. Stages and K tiles divide the depth as evenly as
possible.
"""

from collections.abc import Callable
from dataclasses import replace
from math import gcd, prod

import numpy as np

from ascend_lab.aoe.cube import space
from ascend_lab.aoe.cube.space import (
    Array,
    Columns,
    CubeSpace,
    OperatorKind,
    area_of,
    ceil_div_array,
    cross_product,
    rows_at,
)
from ascend_lab.aoe.space import Point
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, c0_of
from ascend_lab.operators.kernels import conv_schedules, conv_windows, gemm_schedule
from ascend_lab.operators.kernels.conv_shape import Bundles, ConvShape, bundles_of, stacked
from ascend_lab.operators.kernels.epilogue_plan import Demand, chip_left, fitting
from ascend_lab.operators.kernels.tiles import chunks

CONV_NAMES = (
    *("rows", "cols", "window", "m", "n", "order"),
    *("stage", "k", "a_l1", "b_l1", "a_l0", "b_l0"),
)
"""The genes of a convolution, in the order of decision."""

STRIP, STACKED = map(space.TEXT_GENES["window"].index, ("strip", "stacked"))
"""Numbers of the window types "strip" and "stacked"; 0 is "flat"."""


def conv_space(
    shape: ConvShape,
    chip: Chip,
    demand: Demand | None = None,
    max_points: int = space.MAX_POINTS,
    *,
    default: bool | gemm_schedule.GemmSchedule = True,
) -> CubeSpace:
    """Return all tilings of a convolution; raises `InputError` if none fits.

    A space of more than `max_points` points is thinned out: sizes keep one of `SPACING_RATIOS`
    between them. `default` adds a schedule that thinning must not drop.
    """
    chip = chip_left(chip, demand)
    row = {}
    if isinstance(default, gemm_schedule.GemmSchedule):
        row = conv_row(shape, chip, default)
    elif default:
        row = _default_row(shape, chip, demand)
    for ratio in space.SPACING_RATIOS:
        table = _depths(shape, chip, _tiles(shape, chip, demand, ratio), ratio)
        pixels_bytes, weights_bytes = l1_bytes(shape, table)
        fits_l1 = pixels_bytes + weights_bytes <= chip.buffers["L1"]
        table = rows_at(table | {"a": pixels_bytes, "b": weights_bytes}, fits_l1)
        table = cross_product(table, {"order": np.arange(2)})
        table = rows_at(table, canonical_order(shape, table) == table["order"])
        table = space.with_l1_slots(table, chip, table["a"], table["b"])
        # `check_conv` also requires that the K tiles of all slots fit L1, as those of a product do
        tiles = (table["a_l1"] * table["m"] + table["b_l1"] * table["n"]) * table["k"]
        table = rows_at(table, tiles * area_of(shape.dtype) <= chip.buffers["L1"])
        if len(table["m"]) < max_points:
            break
    all_rows = {n: np.append(table[n], row.get(n, np.zeros(0, np.int64))) for n in CONV_NAMES}
    return CubeSpace(shape, chip, demand, CONV_NAMES, all_rows)


def pixel_tiles(shape: ConvShape, max_tile: int, ratio: float, *, strip: bool) -> Array:
    """Return the heights of pixel tiles to try, in fractals (blocks of 16 pixels)."""
    oh, ow = shape.out_hw
    if strip:
        # a strip lies in one row: 56 columns are 4 fractals, in tiles of 4, 2 or 1
        heights = space.even_sizes(-(-ow // FRACTAL))
        return space.thinned(heights[heights <= max_tile], ratio)
    # tiles of whole rows: a multiple of `period` fractals ends at the end of a row. With 24 columns
    # that is 3 fractals, 48 pixels, 2 rows.
    pixels = -(-oh * ow // FRACTAL)
    period = ow * shape.mixed // gcd(ow * shape.mixed, FRACTAL)
    heights = np.union1d(space.even_sizes(pixels), np.arange(period, pixels + 1, period))
    return space.thinned(heights[heights <= max_tile], ratio)


def _pixel_options(shape: ConvShape, chip: Chip, max_tile: int, ratio: float) -> Columns:
    """Return a table (window, m, rows) of all ways to divide the pixels over rows of cores."""
    options = set()
    is_possible = {0: True, STRIP: not shape.lanes, STACKED: stacked(shape) != shape}
    for window in (0, STRIP, STACKED):
        if not is_possible[window]:
            continue
        windowed, strip = shape_for_window(shape, window)
        for m in pixel_tiles(windowed, max_tile, ratio, strip=strip):
            tiles = windowed.n * conv_windows.tiles_per_image(windowed, int(m), strip=strip)
            counts = space.core_counts(chip.core_count, ratio)
            # 10 tiles on 4 cores give 3 to a core, as 4 rows do: ceil(10 / ceil(10 / 4)) = 4; 6
            # cores get 2 each, for which 5 rows are enough
            rows = {-(-tiles // -(-tiles // c)) for c in counts}
            options |= {(window, int(m), r) for r in rows}
    columns = np.array(sorted(options), np.int64).T
    return dict(zip(("window", "m", "rows"), columns, strict=True))


def _channel_options(shape: ConvShape, chip: Chip, max_tile: int, ratio: float) -> Columns:
    """Return a table (cols, n) of all ways to divide channels over columns of cores."""
    bundle = bundles_of(shape)
    options = set()
    for cols in space.core_counts(chip.core_count, ratio):
        _, columns_per_share = column_shares(bundle, cols)
        # 10 blocks on 2 columns: tiles of 5, 3, 2 and 1 give a core 1, 2, 3 and 5 of them
        tiles_per_column = np.arange(1, -(-bundle.n1 // columns_per_share) + 1)
        tiles = np.unique(ceil_div_array(bundle.n1, columns_per_share * tiles_per_column))
        for tile in space.thinned(tiles[tiles <= max_tile], ratio):
            options.add((used_columns(bundle, cols, int(tile)), int(tile)))
    columns = np.array(sorted(options), np.int64).T
    return dict(zip(("cols", "n"), columns, strict=True))


def column_shares(bundle: Bundles, cols: int) -> tuple[int, int]:
    """Return (shares of the bundles, columns of cores that divide the channels of each bundle).

    A bundle is a set of channel groups that are computed together. 8 columns for 2 bundles: 2
    shares, and 4 columns divide the channels of a bundle.
    """
    shares = len(chunks(bundle.count, 1, min(cols, bundle.count)))
    return shares, max(1, cols // shares)


def shares_of(bundle: Bundles, cols: Array) -> tuple[Array, Array]:
    """Return `column_shares` of many numbers of columns."""
    by_columns = [column_shares(bundle, c) for c in range(1, int(cols.max(initial=0)) + 1)]
    # entry 0 is never read: every tiling has at least one column
    table = np.array([(0, 0), *by_columns], np.int64)[cols]
    return table[:, 0], table[:, 1]


def used_columns(bundle: Bundles, cols: int, tile: int) -> int:
    """Return the smallest number of columns that gives the same kernel as `cols`."""

    def kernel(count: int) -> tuple[int, int]:
        shares, columns_per_share = column_shares(bundle, count)
        return shares, len(chunks(bundle.n1, tile, columns_per_share))

    # 5 columns for 8 tiles of one bundle have 2 each, as 4 columns do: 4 is returned
    same_kernel = kernel(cols)
    return next(c for c in range(1, cols + 1) if kernel(c) == same_kernel)


def _tiles(shape: ConvShape, chip: Chip, demand: Demand | None, ratio: float) -> Columns:
    """Return core grids, windows and tiles of the output."""
    area = area_of(shape.dtype)
    table = cross_product(
        _pixel_options(shape, chip, chip.buffers["L0A"] // area, ratio),
        _channel_options(shape, chip, chip.buffers["L0B"] // area, ratio),
    )
    table = rows_at(table, table["rows"] * table["cols"] <= chip.core_count)
    return rows_at(table, space.tile_fits(shape.gemm, chip, demand, table))


def _depths(shape: ConvShape, chip: Chip, table: Columns, ratio: float) -> Columns:
    """Add stages in channel blocks, K tiles and the slots of L0."""
    c1 = bundles_of(shape).c1
    taps = shape.taps
    # the stage of the whole depth must not be thinned out: with it an operand can stay in L1
    stages = np.union1d(space.thinned(space.even_sizes(c1), ratio), [c1])
    lists = []
    # K tiles of a stage; if whole K tiles also cover a longer stage, only the longer one is in the
    # table: with one tap, K tiles of 2 cover 4 channel blocks, so that 3 is left out
    for stage in stages:
        k_tiles = space.thinned(space.even_sizes(int(stage) * taps), ratio)
        covered_blocks = ceil_div_array(stage * taps, k_tiles) * k_tiles // taps
        is_longest = stage == stages[-1]
        lists.append(k_tiles if is_longest else k_tiles[covered_blocks == stage])
    # `cross_product` lists all stages for every row: the lists are numbers 0, 1, ..., 0, 1, ...
    list_of_row = np.tile(np.arange(len(stages)), len(table["m"]))
    table = cross_product(table, {"stage": stages})
    table = space.with_column(table, "k", lists, list_of_row)
    return space.with_l0_slots(table, chip, area_of(shape.dtype))


def shape_for_window(shape: ConvShape, window: int) -> tuple[ConvShape, bool]:
    """Return the convolution for a type of window, and whether its tiles are strips of a row."""
    return stacked(shape) if window == STACKED else shape, window == STRIP


def _by_window(
    shape: ConvShape, table: Columns, value: Callable[[ConvShape, bool, int], int]
) -> Array:
    """Return a value for each row of the table, from its pixel tile's height and window type."""
    distinct, _, row = space.distinct_rows([table["window"], table["m"]])
    values = [
        value(*shape_for_window(shape, window), m)
        for window, m in np.stack(distinct, axis=1).tolist()
    ]
    return np.array(values, np.int64)[row]


def l1_bytes(shape: ConvShape, table: Columns) -> tuple[Array, Array]:
    """Return the bytes of a slot of pixels and of a slot of weights in L1."""

    def window_pixels(windowed: ConvShape, strip: bool, m: int) -> int:
        return prod(conv_windows.window_sides(windowed, m, strip=strip))

    # a stage of 2 has the window's pixels of 2 channel blocks, and the weights of both for each tap
    pixels = table["stage"] * _by_window(shape, table, window_pixels)
    weight_fractals = table["stage"] * shape.taps * table["n"]
    return pixels * shape.pixel_bytes, weight_fractals * area_of(shape.dtype)


def canonical_order(shape: ConvShape, table: Columns) -> Array:
    """Return the canonical loop order: 0 where both orders give the same kernel."""
    bundle = bundles_of(shape)

    def pixel_tile_count(windowed: ConvShape, strip: bool, m: int) -> int:
        return windowed.n * conv_windows.tiles_per_image(windowed, m, strip=strip)

    _, columns_per_share = shares_of(bundle, table["cols"])
    m_tiles = ceil_div_array(_by_window(shape, table, pixel_tile_count), table["rows"])
    n_tiles = ceil_div_array(ceil_div_array(bundle.n1, table["n"]), columns_per_share)
    # with a single tile along one side there is only one loop
    return np.where((m_tiles == 1) | (n_tiles == 1), 0, table["order"])


def _default_row(shape: ConvShape, chip: Chip, demand: Demand | None) -> Columns:
    """Return the genes of the best schedule by the closed form; empty if none fits."""
    tilings = conv_schedules.conv_candidates(shape, chip)
    if not len(tilings.stages):
        return {}
    tilings = tilings.take(fitting(demand, chip, tilings.tilings))
    best = int(np.argmin(conv_schedules.conv_estimate(shape, chip, tilings, demand)))
    return conv_row(shape, chip, tilings.tilings.schedule(best, shape.dtype))


def conv_row(shape: ConvShape, chip: Chip, schedule: gemm_schedule.GemmSchedule) -> Columns:
    """Return the genes of a convolution's schedule as a table of one row."""
    bundle = bundles_of(shape)
    strip = conv_schedules.takes_strips(shape, schedule, chip)
    window = schedule.window or ("strip" if strip else "flat")
    windowed, _ = shape_for_window(shape, space.number_of("window", window))
    oh, ow = windowed.out_hw
    # a strip lies in one row of the image, any other tile in the whole image
    pixels = ow if strip else oh * ow
    m = min(schedule.base_m // FRACTAL, -(-pixels // FRACTAL))
    tiles = windowed.n * conv_windows.tiles_per_image(windowed, m, strip=strip)
    _, columns_per_share = column_shares(bundle, schedule.grid_cols)
    n = min(
        schedule.base_n // FRACTAL,
        chunks(bundle.n1, schedule.base_n // FRACTAL, columns_per_share)[0],
    )
    stage = conv_schedules.c1_stage(shape, schedule)
    genes: dict[str, int | str] = {
        "rows": len(chunks(tiles, 1, schedule.grid_rows)),
        "cols": used_columns(bundle, schedule.grid_cols, n),
        "window": window,
        "m": m,
        "n": n,
        "order": schedule.order,
        "stage": stage,
        "k": min(schedule.base_k // c0_of(shape.dtype), stage * shape.taps),
        **{name: getattr(schedule, f"{name}_slots") for name in space.SLOT_GENES},
    }
    row = {name: np.array([space.number_of(name, genes[name])], np.int64) for name in CONV_NAMES}
    return row | {"order": canonical_order(shape, row)}


def conv_schedule_of(shape: ConvShape, point: Point) -> gemm_schedule.GemmSchedule:
    """Return the schedule of a point of a convolution's space."""
    g = dict(zip(CONV_NAMES, point, strict=True))
    c0 = c0_of(shape.dtype)
    # a stage of 2 blocks with 9 taps in K tiles of 4 fractals has 5 of them, 18 / 4 rounded up
    step = -(-g["stage"] * shape.taps // g["k"])
    schedule = gemm_schedule.GemmSchedule(
        g["m"] * FRACTAL, g["k"] * c0, g["n"] * FRACTAL, step, g["rows"], g["cols"]
    )
    slots = {f"{name}_slots": g[name] for name in space.SLOT_GENES}
    return replace(schedule, order=g["order"], window=g["window"], **slots)


ROLES = {"x": "a", "weight": "b"}
"""The operands of the underlying product: pixels are A, weights are B."""
CONV = OperatorKind(
    CONV_NAMES,
    conv_space,
    conv_row,
    conv_schedule_of,
    conv_schedules.conv_schedule,
    ROLES,
)
