"""Computes the work of the busiest core under every tiling of a table, as arrays.

The arrays hold sizes, trip counts and costs of loads. Its tiles of pixels (or rows of A) are listed
one after another in a `TileList`; `first` is the index at which a tiling's list begins.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ascend_lab.aoe.cube.conv_space import shape_for_window, shares_of
from ascend_lab.aoe.cube.space import (
    Array,
    Columns,
    Floats,
    Mask,
    area_of,
    ceil_div_array,
    distinct_rows,
    uses,
)
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL
from ascend_lab.operators.kernels.conv_shape import Bundles, ConvShape, bundles_of
from ascend_lab.operators.kernels.conv_windows import tiles_per_image
from ascend_lab.operators.kernels.gemm_schedule import GemmShape
from ascend_lab.operators.kernels.tiles import chunks

_Record = TypeVar("_Record")


def rows_of(record: _Record, index: Array) -> _Record:
    """Return a record with the entries of some tilings: arrays are indexed, other fields kept."""
    assert is_dataclass(record) and not isinstance(record, type)
    sliced: dict[str, Any] = {}
    for column in fields(record):
        value = getattr(record, column.name)
        if isinstance(value, np.ndarray):
            sliced[column.name] = value[index]
        elif isinstance(value, CoreWork | Load):
            sliced[column.name] = rows_of(value, index)
    return replace(record, **sliced)


@dataclass(frozen=True, slots=True)
class TileList:
    """Tiles along m, the lists of many tilings end to end.

    A tile has `fractals`, `pixels`, and `unit_bytes` to load for each unit of depth. `runs` counts
    its stretches of contiguous pixels in memory, each of which needs a separate copy.
    """

    fractals: Array
    pixels: Array
    unit_bytes: Array
    runs: Array


@dataclass(frozen=True, slots=True)
class Load:
    """Loads of A or B from GM: cycles per byte, latency, and the bytes all cores fetch at least."""

    cycles_per_byte: Floats
    latency_cycles: Array
    fetched_bytes: Array


@dataclass(frozen=True, slots=True)
class CoreWork:
    """The work of one core, an array entry for each tiling.

    The core computes `m_tiles` x `n_tiles` tiles, `bundles` times (a bundle is a set of channel
    groups; products have one). Its `core_n` blocks of columns are in tiles of `n`, the last of
    `n_last`. The depth has `units` of `taps` fractals of K: a unit is a channel block with all taps
    of the kernel, or in a product one fractal. A stage, the part of the depth in an L1 slot, has
    `stage` units; a K tile has `k` fractals. `n_is_outer` means order nm. `keeps_a` and `keeps_b`
    tell which operand an outer loop keeps in L1, `keeps_b_throughout` that B stays for all m tiles
    in order mn; `bypass_a` and `bypass_b` tell which operand bypasses L1. `a_l1` .. `b_l0` are
    numbers of slots. `ragged` cores begin at various positions of several images.
    """

    rows: Array
    cores: Array
    bundles: Array
    first: Array
    m_tiles: Array
    m: Array
    m_sum: Array
    pixel_sum: Array
    unit_sum: Array
    n_tiles: Array
    n: Array
    n_last: Array
    core_n: Array
    units: Array
    stage: Array
    k: Array
    n_is_outer: Mask
    keeps_a: Mask
    keeps_b: Mask
    keeps_b_throughout: Mask
    bypass_a: Mask
    bypass_b: Mask
    a_l1: Array
    b_l1: Array
    a_l0: Array
    b_l0: Array
    ragged: Mask


@dataclass(frozen=True, slots=True)
class CubeWork:
    """The work of all tilings of a table, and what they share."""

    chip: Chip
    dtype: str
    taps: int
    is_conv: bool
    tile_list: TileList
    work: CoreWork
    a: Load
    b: Load
    out_pixels: int
    out_blocks: int

    @property
    def area_bytes(self) -> int:
        """Bytes of a fractal of A or B."""
        return area_of(self.dtype)


def load_of(chip: Chip, reads: Array, once: Array | int, cores: Array) -> Load:
    """Return the cost of loading `reads` bytes, `once` of them distinct, as in the simulator.

    The first read of a byte comes from device memory and all others from L2, so the mean cost of a
    byte is f * memory + (1 - f) * L2 with f = once / reads. All cores share both rates.
    """
    path = chip.path("GM", "L1")
    core_count = cores.astype(np.float64)
    # 1 MB that is read 4 times: a quarter of the reads goes to device memory
    first_read_share = np.minimum(1.0, once / np.maximum(reads, 1))
    path_cycles_per_byte = 1.0 / path.rate_bytes_per_cycle
    l2_cycles_per_byte = np.maximum(
        path_cycles_per_byte, core_count * chip.clock_hz / chip.l2.rate_bytes_per_s
    )
    memory_cycles_per_byte = np.maximum(
        path_cycles_per_byte, core_count * chip.clock_hz / chip.device_memory.rate_bytes_per_s
    )
    memory_latency = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    latency = path.latency_cycles + chip.l2.latency_cycles + first_read_share * memory_latency
    fetched_bytes = np.minimum(reads, once)
    cycles_per_byte = (
        first_read_share * memory_cycles_per_byte + (1.0 - first_read_share) * l2_cycles_per_byte
    )
    return Load(cycles_per_byte, np.rint(latency).astype(np.int64), fetched_bytes.astype(np.int64))


def gemm_work(shape: GemmShape, chip: Chip, t: Columns, warm: Collection[str] = ()) -> CubeWork:
    """Return the work of every tiling of a product's table; L2 holds the sides `warm`."""
    m1, k1, n1 = shape.fractals
    area = area_of(shape.dtype)
    cores = t["rows"] * t["cols"]
    m_all = ceil_div_array(m1, t["m"])
    n_all = ceil_div_array(n1, t["n"])
    # 10 fractals in tiles of 4 on 2 rows of cores: 3 tiles, of which the first row gets 2
    core_m = np.minimum(ceil_div_array(m_all, t["rows"]) * t["m"], m1)
    core_n = np.minimum(ceil_div_array(n_all, t["cols"]) * t["n"], n1)
    m_tiles = ceil_div_array(core_m, t["m"])
    n_tiles = ceil_div_array(core_n, t["n"])
    keep_a = uses(t, "keep", "a")
    keep_b = uses(t, "keep", "b")
    tile_list, first = _tile_list(core_m, t["m"], area)
    # A is read once for every tile of n; if it stays in L1, once for every column of cores
    reads_a = m1 * k1 * area * np.where(keep_a, t["cols"], n_all)
    reads_b = n1 * k1 * area * np.where(keep_b, t["rows"], m_all)
    nowhere = np.zeros(len(cores), bool)
    work = CoreWork(
        t["rows"],
        cores,
        np.ones_like(cores),
        first,
        m_tiles,
        t["m"],
        core_m,
        core_m * FRACTAL,
        core_m * area,
        n_tiles,
        t["n"],
        # the last tile: 10 blocks in tiles of 4 leave 2
        core_n - (n_tiles - 1) * t["n"],
        core_n,
        np.full_like(cores, k1),
        np.minimum(t["k"] * t["step"], k1),
        t["k"],
        t["order"] == 1,
        keep_a,
        keep_b,
        nowhere,
        uses(t, "bypass", "a"),
        uses(t, "bypass", "b"),
        t["a_l1"],
        t["b_l1"],
        t["a_l0"],
        t["b_l0"],
        nowhere,
    )
    # an operand in L2 has no first read from device memory: 0 distinct bytes
    a = load_of(chip, reads_a, 0 if "a" in warm else m1 * k1 * area, cores)
    b = load_of(chip, reads_b, 0 if "b" in warm else n1 * k1 * area, cores)
    return CubeWork(chip, shape.dtype, 1, False, tile_list, work, a, b, m1 * FRACTAL, n1)


def _tile_list(owned_fractals: Array, tile: Array, area: int) -> tuple[TileList, Array]:
    """List the tiles of every pair (fractals owned, tile height): full tiles, then the tail.

    10 fractals in tiles of 4 are listed as 4, 4, 2.
    """
    (owned, tiles), _, row = distinct_rows([owned_fractals, tile])
    counts = ceil_div_array(owned, tiles).astype(np.intp)
    # the lists lie end to end: counts (3, 2) start at 0 and 3
    starts = np.cumsum(counts) - counts
    sizes = np.repeat(tiles, counts)
    # the last tile of each list is replaced by what remains
    sizes[starts + counts - 1] = owned - (counts - 1) * tiles
    return TileList(sizes, sizes * FRACTAL, sizes * area, np.ones_like(sizes)), starts[row]


def conv_work(shape: ConvShape, chip: Chip, t: Columns, warm: Collection[str] = ()) -> CubeWork:
    """Return the work of every tiling of a convolution's table; L2 holds the sides `warm`."""
    bundle = bundles_of(shape)
    pixel = shape.pixel_bytes
    area = area_of(shape.dtype)
    shares, columns_per_share = shares_of(bundle, t["cols"])
    # the first share has no bundle of another size, unless it is the only one
    uneven = (bundle.c1, bundle.n1) != (bundle.last_c1, bundle.last_n1) and bundle.count > 1
    bundles_of_one_share = max(1, bundle.count - uneven)
    bundles = np.where(shares > 1, ceil_div_array(bundle.count, shares), bundles_of_one_share)
    n_all = ceil_div_array(bundle.n1, t["n"])
    core_n = np.minimum(ceil_div_array(n_all, columns_per_share) * t["n"], bundle.n1)
    n_tiles = ceil_div_array(core_n, t["n"])
    cores = t["rows"] * _columns_used(bundle, t["n"], shares, columns_per_share)
    # 8 tiles on 5 columns are 2 for each, so that 4 columns have work
    columns_per_share = ceil_div_array(n_all, ceil_div_array(n_all, columns_per_share))
    tile_list, m = _pixels(shape, t)
    # if one stage holds the whole depth, A stays while n goes round (order mn), or B while m does
    # (order nm); with a single tile of n, B stays for all tiles of m as well
    one_stage = t["stage"] >= bundle.c1
    nm = (t["order"] == 1) & (m["tiles"] > 1)
    keeps_a = one_stage & ~nm
    keeps_b_throughout = one_stage & ~nm & (n_tiles == 1)
    c1 = (bundle.count - 1) * bundle.c1 + bundle.last_c1
    reads_x = (
        m["read"] * c1 * pixel * np.where(one_stage & (t["order"] == 0), columns_per_share, n_all)
    )
    weights = ((bundle.count - 1) * bundle.c1 * bundle.n1 + bundle.last_c1 * bundle.last_n1) * (
        shape.taps * area
    )
    weights_held = keeps_b_throughout | (one_stage & nm)
    reads_w = weights * np.where(weights_held, t["rows"], m["all"])
    nowhere = np.zeros(len(cores), bool)
    work = CoreWork(
        t["rows"],
        cores,
        bundles,
        m["first"],
        m["tiles"],
        t["m"],
        m["fractals"],
        m["pixels"],
        m["windows"] * pixel,
        n_tiles,
        t["n"],
        core_n - (n_tiles - 1) * t["n"],
        core_n,
        np.full_like(cores, bundle.c1),
        np.minimum(t["stage"], bundle.c1),
        t["k"],
        nm,
        keeps_a,
        keeps_b_throughout | (one_stage & nm),
        keeps_b_throughout,
        nowhere,
        nowhere,
        t["a_l1"],
        t["b_l1"],
        t["a_l0"],
        t["b_l0"],
        m["ragged"] > 0,
    )
    x = load_of(chip, reads_x, 0 if "a" in warm else m["touched"] * c1 * pixel, cores)
    w = load_of(chip, reads_w, 0 if "b" in warm else weights, cores)
    oh, ow = shape.out_hw
    pixels = shape.n * oh * ow
    blocks = (bundle.count - 1) * bundle.n1 + bundle.last_n1
    return CubeWork(chip, shape.dtype, shape.taps, True, tile_list, work, x, w, pixels, blocks)


def _columns_used(bundle: Bundles, n: Array, shares: Array, columns_per_share: Array) -> Array:
    """Return how many columns of cores have work; the last bundle may be smaller and use fewer."""
    columns, last_columns = (
        ceil_div_array(
            ceil_div_array(b, n), ceil_div_array(ceil_div_array(b, n), columns_per_share)
        )
        for b in (bundle.n1, bundle.last_n1)
    )
    bundles_per_share = ceil_div_array(bundle.count, shares)
    last_is_small = (shares > 1) & (bundle.count - (shares - 1) * bundles_per_share == 1)
    return (shares - 1) * columns + np.where(last_is_small, last_columns, columns)


PIXEL_COLUMNS = (
    "first",
    "tiles",
    "all",
    "read",
    "touched",
    "ragged",
    "fractals",
    "pixels",
    "windows",
)
"""Columns about tiles: start and length of the list of one row of cores, its sums, and totals."""


def _pixels(shape: ConvShape, t: Columns) -> tuple[TileList, Columns]:
    """List the tiles of the row of cores with most to load, for each division of the pixels."""
    distinct, _, row = distinct_rows([t["window"], t["m"], t["rows"]])
    table: list[list[int]] = []
    lists: list[list[Array]] = []
    length = 0
    images: dict[tuple[int, int], tuple[Array, Array, Array, Array, int]] = {}
    for window, m, rows in np.stack(distinct, axis=1).tolist():
        seen, strip = shape_for_window(shape, window)
        if (window, m) not in images:
            images[window, m] = image_tiles(seen, m, strip=strip)
        *listed, touched = images[window, m]
        # the images of a batch have the same tiles: their lists are joined
        all_tiles = [np.tile(column, seen.n) for column in listed]
        tile_counts = np.array(chunks(len(all_tiles[0]), 1, rows), np.intp)
        # each row of cores takes a contiguous stretch of tiles; find the row with the most to load
        ends: Array = np.cumsum(tile_counts)
        # with tile counts (3, 2) the ends are 3 and 5, the sums begin at 0 and 3
        loads: Array = np.add.reduceat(all_tiles[2], ends - tile_counts)
        best = int(np.argmax(loads))
        busiest = slice(int(ends[best] - tile_counts[best]), int(ends[best]))
        lists.append([column[busiest] for column in all_tiles])
        # cores that begin at various places of various images: what all of them touch is counted
        # by the simulator as if their places were evenly spaced, which may be less
        image_tile_count = len(listed[0])
        ragged = (
            seen.n > 1
            and image_tile_count % tile_counts[0] > 0
            and tile_counts[0] % image_tile_count > 0
        )
        fetched_pixels = listed[2].max() if ragged else touched * seen.n
        values = [
            length,
            tile_counts[best],
            len(all_tiles[0]),
            all_tiles[2].sum(),
            fetched_pixels,
            ragged,
        ]
        table.append(
            [*values, all_tiles[0][busiest].sum(), all_tiles[1][busiest].sum(), loads[best]]
        )
        length += int(tile_counts[best])
    fractals, pixels, windows, runs = map(np.concatenate, zip(*lists, strict=True))
    columns = np.array(table, np.int64)[row].T
    by_name = dict(zip(PIXEL_COLUMNS, columns, strict=True))
    return TileList(fractals, pixels, windows * shape.pixel_bytes, runs), by_name


def image_tiles(shape: ConvShape, m: int, *, strip: bool) -> tuple[Array, Array, Array, Array, int]:
    """Return each tile's fractals, pixels, loaded pixels and runs; and the distinct pixels of all.

    Neighbouring tiles load overlapping pixels, of which `touched` counts each once.
    """
    (oh, ow) = shape.out_hw
    tile_pixels = m * FRACTAL
    t = np.arange(tiles_per_image(shape, m, strip=strip))
    if strip:
        # 100 columns in strips of 48 pixels are 3 a row: strip 4 is in row 1, from column 48 on
        strips_per_row = -(-ow // tile_pixels)
        row = t // strips_per_row
        first_column = t % strips_per_row * tile_pixels
        pixels = np.minimum(tile_pixels, ow - first_column)
        rows = (row, row)
        columns = (first_column, first_column + pixels - 1)
    else:
        pixels = np.minimum(tile_pixels, oh * ow - t * tile_pixels)
        # rows of 20 pixels: tile 1 of 48 pixels has pixels 48 .. 95, which are in rows 2 .. 4
        rows = (t * tile_pixels // ow, (t * tile_pixels + pixels - 1) // ow)
        columns = (np.zeros_like(t), np.full_like(t, ow - 1))
    mixed = shape.mixed
    down = spans(shape, 0, *(row // mixed for row in rows))
    across = spans(shape, 1, *columns)
    touched = _covered(*down) * _covered(*across) * mixed
    runs = rows[1] - rows[0] + 1 if mixed > 1 else np.ones_like(t)
    return ceil_div_array(pixels, FRACTAL), pixels, down[1] * across[1] * mixed, runs, touched


def spans(shape: ConvShape, axis: int, first: Array, last: Array) -> tuple[Array, Array]:
    """Return (first, count) of the inputs that outputs first..last read: `window_of` on arrays."""
    size = (shape.h, shape.w)[axis]
    stride = shape.strides[axis]
    # stride 2, padding 1, kernel 3: outputs 0 .. 3 read inputs -1 .. 7, before clipping
    low = first * stride - shape.pads[2 * axis]
    high = last * stride - shape.pads[2 * axis] + shape.reach[axis] - 1
    start = low - np.maximum(0, ceil_div_array(low - size + 1, stride)) * stride
    begin = np.maximum(start, 0)
    end = np.maximum(np.minimum(high, size - 1), begin)
    return begin, end - begin + 1


def _covered(first: Array, count: Array) -> int:
    """Return how many positions at least one span covers."""
    # +1 where a span begins, -1 behind its end: the running sum counts the spans that cover a place
    change = np.zeros(int((first + count).max()) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, first + count, -1)
    return int((np.cumsum(change) > 0).sum())
