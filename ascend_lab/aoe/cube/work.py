"""Computes the work of the busiest core under every tiling of a table, as arrays.

The arrays hold sizes, trip counts and costs of loads, with an entry for each tiling. A product of
10 x 4 x 8 fractals in tiles of 4 x 8 on 2 x 1 cores: the busiest core has 2 tiles of A and 1 of B.

Along m, tiles of rows of A (for a convolution, of pixels) may differ. So they are listed one by one
in a `TileList`, where the lists of all tilings lie end to end: 4, 4 for the tiling above.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ascend_lab.aoe.cube.conv_space import shape_for_window, shares_of
from ascend_lab.aoe.cube.space import (
    SLOT_GENES,
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
class ChannelLoad:
    """Loads of the epilogue's operands that have a number per channel, such as a bias.

    Of `resident_blocks` blocks of 16 channels the numbers stay on the core for all tiles. `copies`
    copies bring them, `block_bytes` in all for each block, and they arrive `latency_cycles` later.
    """

    copies: int
    block_bytes: int
    resident_blocks: Array
    cycles_per_byte: Floats
    latency_cycles: Array


@dataclass(frozen=True, slots=True)
class CoreWork:
    """The work of the busiest core, an array entry for each tiling.

    Sizes are in fractals along m and in blocks of 16 columns along n. The depth consists of units:
    a fractal of K in a product, a channel block with all taps of the kernel in a convolution. A
    stage is the part of the depth that one slot of L1 holds. A bundle is a set of channel groups
    that are computed as one product.
    """

    core_rows: Array  # rows of cores, over which m is divided
    cores: Array  # all cores that have work
    bundles: Array  # bundles of this core; 1 in a product
    # along m: the tiles at first_tile .. first_tile + m_tiles - 1 of the `TileList`
    first_tile: Array
    m_tiles: Array
    m: Array  # fractals of a full tile
    m_fractals: Array  # of all tiles together, as the next two
    m_pixels: Array
    m_unit_bytes: Array
    # along n: 10 blocks in tiles of 4 are n_tiles = 3 with n_last = 2
    n_tiles: Array
    n: Array  # blocks of a full tile
    n_last: Array
    core_n: Array  # blocks of all tiles together
    # along the depth: units of all of it, and of a stage
    units: Array
    stage_units: Array
    k: Array  # fractals of a K tile: what one slot of L0 holds
    # loops: in order "mn" the loop over tiles of m is outside, in order "nm" that over n
    n_is_outer: Mask
    keeps_a: Mask  # A stays in L1 while the inner loop runs
    keeps_b: Mask
    keeps_b_throughout: Mask  # B is loaded once for all tiles of m, though the order is "mn"
    bypass_a: Mask  # A goes from GM to L0 directly
    bypass_b: Mask
    # numbers of slots
    a_l1: Array
    b_l1: Array
    a_l0: Array
    b_l0: Array
    ragged: Mask  # the cores begin at different positions of several images


@dataclass(frozen=True, slots=True)
class CubeWork:
    """The work under all tilings of a table, and what they share.

    `a` and `b` are the loads of the operands. The result has `out_pixels` (or rows) by `out_blocks`
    blocks of 16 channels (or columns).
    """

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


def select_tilings(record: _Record, index: Array) -> _Record:
    """Return a record with the entries of some tilings.

    Arrays are indexed; fields that all tilings share (the chip, the list of tiles) stay as they
    are.
    """
    assert is_dataclass(record) and not isinstance(record, type)
    selected: dict[str, Any] = {}
    for column in fields(record):
        value = getattr(record, column.name)
        if isinstance(value, np.ndarray):
            selected[column.name] = value[index]
        elif isinstance(value, CoreWork | Load | ChannelLoad):
            selected[column.name] = select_tilings(value, index)
    return replace(record, **selected)


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


# -- products --------------------------------------------------------------------------------------
def gemm_work(shape: GemmShape, chip: Chip, table: Columns, warm: Collection[str] = ()) -> CubeWork:
    """Return the work of every tiling of a product's table; L2 holds the sides `warm`."""
    m1, k1, n1 = shape.fractals
    area = area_of(shape.dtype)
    tile_list, work = _gemm_core(shape, table)
    a_bytes = m1 * k1 * area
    b_bytes = n1 * k1 * area
    # A is read once for every tile of n; if it stays in L1, once for every column of cores
    m_tiles_of_all = ceil_div_array(m1, table["m"])
    n_tiles_of_all = ceil_div_array(n1, table["n"])
    reads_a = a_bytes * np.where(work.keeps_a, table["cols"], n_tiles_of_all)
    reads_b = b_bytes * np.where(work.keeps_b, table["rows"], m_tiles_of_all)
    # an operand in L2 has no first read from device memory: 0 distinct bytes
    return CubeWork(
        chip=chip,
        dtype=shape.dtype,
        taps=1,
        is_conv=False,
        tile_list=tile_list,
        work=work,
        a=load_of(chip, reads_a, 0 if "a" in warm else a_bytes, work.cores),
        b=load_of(chip, reads_b, 0 if "b" in warm else b_bytes, work.cores),
        out_pixels=m1 * FRACTAL,
        out_blocks=n1,
    )


def _gemm_core(shape: GemmShape, table: Columns) -> tuple[TileList, CoreWork]:
    """Return the tiles along m and the work of a product's busiest core, the first."""
    m1, k1, n1 = shape.fractals
    area = area_of(shape.dtype)
    m_tiles_of_all = ceil_div_array(m1, table["m"])
    n_tiles_of_all = ceil_div_array(n1, table["n"])
    # 10 fractals in tiles of 4 on 2 rows of cores: 3 tiles, of which the first row of cores has 2
    core_m = np.minimum(ceil_div_array(m_tiles_of_all, table["rows"]) * table["m"], m1)
    core_n = np.minimum(ceil_div_array(n_tiles_of_all, table["cols"]) * table["n"], n1)
    n_tiles = ceil_div_array(core_n, table["n"])
    tile_list, first_tile = _tile_list(core_m, table["m"], area)
    cores = table["rows"] * table["cols"]
    never = np.zeros(len(cores), bool)
    work = CoreWork(
        core_rows=table["rows"],
        cores=cores,
        bundles=np.ones_like(cores),
        first_tile=first_tile,
        m_tiles=ceil_div_array(core_m, table["m"]),
        m=table["m"],
        m_fractals=core_m,
        m_pixels=core_m * FRACTAL,
        m_unit_bytes=core_m * area,
        n_tiles=n_tiles,
        n=table["n"],
        n_last=core_n - (n_tiles - 1) * table["n"],
        core_n=core_n,
        units=np.full_like(cores, k1),
        stage_units=np.minimum(table["k"] * table["step"], k1),
        k=table["k"],
        n_is_outer=table["order"] == 1,
        keeps_a=uses(table, "keep", "a"),
        keeps_b=uses(table, "keep", "b"),
        keeps_b_throughout=never,
        bypass_a=uses(table, "bypass", "a"),
        bypass_b=uses(table, "bypass", "b"),
        **{name: table[name] for name in SLOT_GENES},
        ragged=never,
    )
    return tile_list, work


def _tile_list(core_fractals: Array, tile: Array, area: int) -> tuple[TileList, Array]:
    """List the tiles of every pair (fractals of the core, tile height); return where lists begin.

    10 fractals in tiles of 4 are listed as 4, 4, 2: full tiles, then the tail.
    """
    (totals, heights), _, row_number = distinct_rows([core_fractals, tile])
    counts = ceil_div_array(totals, heights).astype(np.intp)
    # the lists lie end to end: counts (3, 2) start at 0 and 3
    starts = np.cumsum(counts) - counts
    sizes = np.repeat(heights, counts)
    # the last tile of each list is replaced by what remains
    sizes[starts + counts - 1] = totals - (counts - 1) * heights
    tiles = TileList(sizes, sizes * FRACTAL, sizes * area, np.ones_like(sizes))
    return tiles, starts[row_number]


# -- convolutions ----------------------------------------------------------------------------------
class ChannelShares(NamedTuple):
    """How output channels are divided over columns of cores, an array entry for each tiling.

    A share is a group of columns of cores that computes the same bundles.
    """

    columns: Array  # columns of cores with work, of all shares
    columns_per_share: Array  # of these, the columns of a share
    bundles: Array  # bundles of the busiest core
    tiles_per_bundle: Array  # tiles of n
    core_n: Array  # blocks and tiles of n of the busiest core
    n_tiles: Array


class PixelShares(NamedTuple):
    """How the pixels are divided over rows of cores, an array entry for each tiling.

    The busiest row of cores is the one that loads most pixels. Tiles load overlapping pixels; what
    is loaded counts them for each tile, what is touched counts them once.
    """

    first_tile: Array  # where the tiles of the busiest row begin in the `TileList`
    m_tiles: Array  # the number of these tiles, and their sums
    fractals: Array
    pixels: Array
    loaded: Array
    tiles_of_all: Array  # of all rows of cores, as the next two
    loaded_by_all: Array
    touched: Array
    ragged: Array  # 1 if cores begin at different positions of several images, else 0


class ImageTiles(NamedTuple):
    """The tiles of one image: fractals, output pixels, loaded pixels, and runs of each tile.

    Neighbouring tiles load overlapping pixels, of which `touched` counts each once.
    """

    fractals: Array
    pixels: Array
    loaded: Array
    runs: Array
    touched: int


def conv_work(shape: ConvShape, chip: Chip, table: Columns, warm: Collection[str] = ()) -> CubeWork:
    """Return the work of every tiling of a convolution's table; L2 holds the sides `warm`."""
    bundle = bundles_of(shape)
    channels = _channel_shares(bundle, table)
    tile_list, pixels = _pixel_shares(shape, table)
    work = _conv_core(shape, table, channels, pixels)
    c1 = (bundle.count - 1) * bundle.c1 + bundle.last_c1
    one_stage = table["stage"] >= bundle.c1
    # pixels are read once for every tile of n; if they stay in L1, once for every column of cores
    stay_in_mn = one_stage & (table["order"] == 0)
    pixel_reads = np.where(stay_in_mn, channels.columns_per_share, channels.tiles_per_bundle)
    reads_x = pixels.loaded_by_all * c1 * shape.pixel_bytes * pixel_reads
    distinct_x = pixels.touched * c1 * shape.pixel_bytes
    weight_fractals = (bundle.count - 1) * bundle.c1 * bundle.n1 + bundle.last_c1 * bundle.last_n1
    weight_bytes = weight_fractals * shape.taps * area_of(shape.dtype)
    reads_w = weight_bytes * np.where(work.keeps_b, table["rows"], pixels.tiles_of_all)
    oh, ow = shape.out_hw
    return CubeWork(
        chip=chip,
        dtype=shape.dtype,
        taps=shape.taps,
        is_conv=True,
        tile_list=tile_list,
        work=work,
        a=load_of(chip, reads_x, 0 if "a" in warm else distinct_x, work.cores),
        b=load_of(chip, reads_w, 0 if "b" in warm else weight_bytes, work.cores),
        out_pixels=shape.n * oh * ow,
        out_blocks=(bundle.count - 1) * bundle.n1 + bundle.last_n1,
    )


def _conv_core(
    shape: ConvShape, table: Columns, channels: ChannelShares, pixels: PixelShares
) -> CoreWork:
    """Return the work of a convolution's busiest core."""
    bundle = bundles_of(shape)
    cores = table["rows"] * channels.columns
    # if one stage holds the whole depth, A stays while n goes round (order mn), or B while m does
    # (order nm); with a single tile of n, B stays for all tiles of m in order mn as well
    one_stage = table["stage"] >= bundle.c1
    n_is_outer = (table["order"] == 1) & (pixels.m_tiles > 1)
    keeps_b_throughout = one_stage & ~n_is_outer & (channels.n_tiles == 1)
    never = np.zeros(len(cores), bool)
    return CoreWork(
        core_rows=table["rows"],
        cores=cores,
        bundles=channels.bundles,
        first_tile=pixels.first_tile,
        m_tiles=pixels.m_tiles,
        m=table["m"],
        m_fractals=pixels.fractals,
        m_pixels=pixels.pixels,
        m_unit_bytes=pixels.loaded * shape.pixel_bytes,
        n_tiles=channels.n_tiles,
        n=table["n"],
        n_last=channels.core_n - (channels.n_tiles - 1) * table["n"],
        core_n=channels.core_n,
        units=np.full_like(cores, bundle.c1),
        stage_units=np.minimum(table["stage"], bundle.c1),
        k=table["k"],
        n_is_outer=n_is_outer,
        keeps_a=one_stage & ~n_is_outer,
        keeps_b=keeps_b_throughout | (one_stage & n_is_outer),
        keeps_b_throughout=keeps_b_throughout,
        bypass_a=never,
        bypass_b=never,
        **{name: table[name] for name in SLOT_GENES},
        ragged=pixels.ragged > 0,
    )


def _channel_shares(bundle: Bundles, table: Columns) -> ChannelShares:
    """Divide the bundles and their output channels over the columns of cores."""
    shares, columns_per_share = shares_of(bundle, table["cols"])
    last_is_smaller = (bundle.c1, bundle.n1) != (bundle.last_c1, bundle.last_n1)
    # a single share counts its full bundles only; the bound leaves a smaller last one out
    full_bundles = bundle.count - 1 if last_is_smaller and bundle.count > 1 else bundle.count
    bundles = np.where(shares > 1, ceil_div_array(bundle.count, shares), full_bundles)
    tiles_per_bundle = ceil_div_array(bundle.n1, table["n"])
    tiles_per_column = ceil_div_array(tiles_per_bundle, columns_per_share)
    core_n = np.minimum(tiles_per_column * table["n"], bundle.n1)
    return ChannelShares(
        columns=_columns_with_work(bundle, table["n"], shares, columns_per_share),
        # 8 tiles on 5 columns are 2 for each, so that 4 columns have work
        columns_per_share=ceil_div_array(tiles_per_bundle, tiles_per_column),
        bundles=bundles,
        tiles_per_bundle=tiles_per_bundle,
        core_n=core_n,
        n_tiles=ceil_div_array(core_n, table["n"]),
    )


def _columns_with_work(bundle: Bundles, n: Array, shares: Array, columns_per_share: Array) -> Array:
    """Return how many columns of cores have work; the last bundle may be smaller and use fewer."""

    def columns_for(blocks: int) -> Array:
        tiles = ceil_div_array(blocks, n)
        return ceil_div_array(tiles, ceil_div_array(tiles, columns_per_share))

    columns = columns_for(bundle.n1)
    bundles_per_share = ceil_div_array(bundle.count, shares)
    # 5 bundles in shares of 2, 2 and 1: the last share has the smaller bundle only
    last_is_small = (shares > 1) & (bundle.count - (shares - 1) * bundles_per_share == 1)
    last_columns = np.where(last_is_small, columns_for(bundle.last_n1), columns)
    return (shares - 1) * columns + last_columns


def _pixel_shares(shape: ConvShape, table: Columns) -> tuple[TileList, PixelShares]:
    """List the tiles of the busiest row of cores, for each division of the pixels."""
    divisions, _, row_number = distinct_rows([table["window"], table["m"], table["rows"]])
    images: dict[tuple[int, int], ImageTiles] = {}
    listed_tiles: list[ImageTiles] = []
    shares: list[dict[str, int]] = []
    first_tile = 0
    for window, m, rows in np.stack(divisions, axis=1).tolist():
        windowed, strip = shape_for_window(shape, window)
        if (window, m) not in images:
            images[window, m] = image_tiles(windowed, m, strip=strip)
        tiles, share = _busiest_row(images[window, m], windowed.n, rows)
        listed_tiles.append(tiles)
        shares.append({**share, "first_tile": first_tile})
        first_tile += share["m_tiles"]
    tile_list = TileList(
        fractals=np.concatenate([tiles.fractals for tiles in listed_tiles]),
        pixels=np.concatenate([tiles.pixels for tiles in listed_tiles]),
        unit_bytes=np.concatenate([tiles.loaded for tiles in listed_tiles]) * shape.pixel_bytes,
        runs=np.concatenate([tiles.runs for tiles in listed_tiles]),
    )
    columns = {
        name: np.array([share[name] for share in shares], np.int64)[row_number]
        for name in PixelShares._fields
    }
    return tile_list, PixelShares(**columns)


def _busiest_row(
    image: ImageTiles, image_count: int, rows: int
) -> tuple[ImageTiles, dict[str, int]]:
    """Return the tiles of the busiest of `rows` rows of cores, and its fields of `PixelShares`."""
    tiles_per_image = len(image.pixels)
    # the images of a batch have the same tiles: their lists are joined
    fractals, pixels, loaded, runs = (np.tile(column, image_count) for column in image[:4])
    # each row of cores takes a contiguous stretch of tiles
    tile_counts = np.array(chunks(len(pixels), 1, rows), np.intp)
    ends: Array = np.cumsum(tile_counts)
    # with tile counts (3, 2) the ends are 3 and 5, the sums begin at 0 and 3
    loaded_by_row: Array = np.add.reduceat(loaded, ends - tile_counts)
    busiest = int(np.argmax(loaded_by_row))
    stretch = slice(int(ends[busiest] - tile_counts[busiest]), int(ends[busiest]))
    # 6 tiles an image: 4 tiles a row of cores are ragged, but 3 (half an image) or 12 (two) are not
    ragged = (
        image_count > 1
        and tiles_per_image % tile_counts[0] > 0
        and tile_counts[0] % tiles_per_image > 0
    )
    # for ragged cores the simulator estimates the distinct pixels, perhaps as fewer than there are:
    # the pixels of one tile are a lower bound
    touched = image.loaded.max() if ragged else image.touched * image_count
    tiles = ImageTiles(fractals[stretch], pixels[stretch], loaded[stretch], runs[stretch], 0)
    share = {
        "m_tiles": int(tile_counts[busiest]),
        "fractals": int(tiles.fractals.sum()),
        "pixels": int(tiles.pixels.sum()),
        "loaded": int(loaded_by_row[busiest]),
        "tiles_of_all": len(pixels),
        "loaded_by_all": int(loaded.sum()),
        "touched": int(touched),
        "ragged": int(ragged),
    }
    return tiles, share


def image_tiles(shape: ConvShape, m: int, *, strip: bool) -> ImageTiles:
    """Return the tiles of `m` fractals of an image; `strip`: each lies within one image row."""
    (oh, ow) = shape.out_hw
    tile_pixels = m * FRACTAL
    tile = np.arange(tiles_per_image(shape, m, strip=strip))
    if strip:
        # 100 columns in strips of 48 pixels are 3 a row: strip 4 is in row 1, from column 48 on
        strips_per_row = -(-ow // tile_pixels)
        row = tile // strips_per_row
        first_column = tile % strips_per_row * tile_pixels
        pixels = np.minimum(tile_pixels, ow - first_column)
        rows = (row, row)
        columns = (first_column, first_column + pixels - 1)
    else:
        # rows of 20 pixels: tile 1 of 48 pixels has pixels 48 .. 95, which are in rows 2 .. 4
        first_pixel = tile * tile_pixels
        pixels = np.minimum(tile_pixels, oh * ow - first_pixel)
        rows = (first_pixel // ow, (first_pixel + pixels - 1) // ow)
        columns = (np.zeros_like(tile), np.full_like(tile, ow - 1))
    mixed = shape.mixed
    row_spans = input_spans(shape, 0, rows[0] // mixed, rows[1] // mixed)
    column_spans = input_spans(shape, 1, *columns)
    return ImageTiles(
        fractals=ceil_div_array(pixels, FRACTAL),
        pixels=pixels,
        loaded=row_spans[1] * column_spans[1] * mixed,
        runs=rows[1] - rows[0] + 1 if mixed > 1 else np.ones_like(tile),
        touched=_covered(*row_spans) * _covered(*column_spans) * mixed,
    )


def input_spans(shape: ConvShape, axis: int, first: Array, last: Array) -> tuple[Array, Array]:
    """Return (first, count) of the inputs that outputs first..last read, within the image."""
    size = (shape.h, shape.w)[axis]
    stride = shape.strides[axis]
    # stride 2, padding 1, kernel 3: outputs 0 .. 3 read inputs -1 .. 7, before clipping
    low = first * stride - shape.pads[2 * axis]
    high = last * stride - shape.pads[2 * axis] + shape.reach[axis] - 1
    # a window that lies in the padding behind the image starts whole strides earlier, inside it
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
