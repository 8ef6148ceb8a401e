"""How a convolution is divided: the windows of pixel tiles, the cores' shares, the output's places.

Pixel tiles are flat or strips. A flat tile is 16 * tile pixels in row-major order, whatever rows it
crosses; it reads whole image rows. A strip is a piece of one output row; it reads only some columns
of the image, which suits wide rows. With 20 output columns a flat tile of 32 pixels is a row and
12 pixels of the next row; a strip of 32 pixels is one row.

If the core pools its result, a tile is the output rows that some rows of pooling windows read. Rows
that windows of two tiles read are computed in both.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache, partial
from math import gcd, prod
from typing import TypeVar

import numpy as np

from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, Region, ceil_div
from ascend_lab.operators.kernels.conv_shape import ConvShape, Pair, units_of
from ascend_lab.operators.kernels.gemm_schedule import Array
from ascend_lab.operators.kernels.tiles import Area, Span, chunks

Sizes = TypeVar("Sizes", int, Array)


# -- windows --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class InputRange:
    """The image rows (or columns) that outputs read: first .. first+count-1, and zeros around them.

    There are `before` rows of zeros in front and `after` behind. load3d needs at least one real
    row. Outputs that read only padding below the image therefore begin `skipped` outputs earlier,
    which reaches into the image; those are not computed.
    """

    first: int
    count: int
    before: int
    after: int
    skipped: int

    def of_interleaved(self, images: int) -> InputRange:
        """Return the same rows of several images with interleaved rows."""
        return InputRange(*(images * size for size in astuple(self)))


@dataclass(frozen=True, slots=True)
class Window:
    """What a pixel tile reads: rows and columns of the image.

    Its `pixels` fill `fractals` of 16; `m_start` is the first one's place, in row-major order,
    among all outputs of these rows and columns.
    """

    rows: InputRange
    columns: InputRange
    m_start: int
    fractals: int
    pixels: int

    def moved(self, by: int) -> Window:
        """Return the window `by` image rows further down."""
        return replace(self, rows=replace(self.rows, first=self.rows.first + by))


def _read_range(
    size: int, stride: int, pad: int, reach: int, outputs: tuple[int, int]
) -> InputRange:
    """Return the rows (or columns) of an axis of `size` that outputs first..last read.

    Stride 2, padding 1, reach 3, outputs 0..1: rows -1..3, that is 1 row of zeros and rows 0..3.
    """
    low = outputs[0] * stride - pad
    high = outputs[1] * stride - pad + reach - 1
    # If all rows lie below the image, start earlier, so that the last real row is included. With
    # 5 rows, a kernel of 1 and padding 3 output 8 reads row 5, which is padding: start at output 7.
    skipped = max(0, ceil_div(low - size + 1, stride))
    start = low - skipped * stride
    first_row = max(start, 0)
    end = max(min(high, size - 1), first_row)
    return InputRange(first_row, end - first_row + 1, max(0, -start), max(0, high - end), skipped)


def window_of(shape: ConvShape, pixel: int, pixels: int, *, strip: bool = False) -> Window:
    """Return what `pixels` output pixels from `pixel` on read; a strip stays in its row.

    Of mixed images the window has as many rows of each.
    """
    ow = shape.out_hw[1]
    mixed = shape.mixed
    top, _, left_pad, _ = shape.pads
    # An output row of mixed images is (row, image): the window begins with image 0 of its row.
    (first_output, rows_before) = divmod(pixel // ow, mixed)
    last_output = (pixel + pixels - 1) // ow // mixed
    rows_of_image = _read_range(
        shape.h, shape.strides[0], top, shape.reach[0], (first_output, last_output)
    )
    rows = rows_of_image.of_interleaved(mixed)
    column = pixel % ow
    outputs = (column, column + pixels - 1) if strip else (0, ow - 1)
    columns = _read_range(shape.w, shape.strides[1], left_pad, shape.reach[1], outputs)
    # Pixels of few lanes are smaller than a block of 32 bytes: only whole rows are whole blocks.
    if shape.lanes:
        columns = replace(columns, count=shape.w)
    # load3d counts outputs of the loaded rows and columns in row-major order: m_start is where this
    # tile begins among them.
    output_columns = outputs[1] - outputs[0] + 1 + columns.skipped
    columns_before = column - outputs[0]
    m_start = (rows.skipped + rows_before) * output_columns + columns.skipped + columns_before
    return Window(rows, columns, m_start, ceil_div(pixels, FRACTAL), pixels)


def tiles_per_image(shape: ConvShape, tile: int, *, strip: bool = False) -> int:
    """Return the pixel tiles of `tile` fractals in an image; the last (of a row) may be short."""
    oh, ow = shape.out_hw
    if shape.pool:
        return ceil_div(shape.pool.out_hw[0], int(pooled_rows(shape, tile)))
    if strip:
        return oh * ceil_div(ow, tile * FRACTAL)
    return ceil_div(ceil_div(oh * ow, FRACTAL), tile)


def pooled_rows(shape: ConvShape, tile: Array | int) -> Array:
    """Return the rows of pooling windows that a tile of `tile` fractals holds, at least 1.

    A tile of 8 output rows holds 3 rows of 3 x 3 windows with stride 2: they read 7 rows.
    """
    assert shape.pool
    # n rows of windows need (n - 1) stride + r output rows, so n = (output rows - r) / stride + 1.
    rows_to_spare = tile * FRACTAL // shape.out_hw[1] - shape.pool.r
    window_rows: Array = np.clip(
        rows_to_spare // shape.pool.strides[0] + 1, 1, shape.pool.out_hw[0]
    )
    return window_rows


PixelTile = tuple[int, tuple[Window, ...]]
"""A tile's first pixel, and its windows in the image and, if there is one, the second image."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` repetitions of `tiles`, each `rows` image rows and `pixels` output pixels further on.

    A tile is its first pixel and its windows: in its image and, if there is one, in the second
    image (`beside`).
    """

    count: int
    tiles: tuple[PixelTile, ...]
    rows: int
    pixels: int


@lru_cache(maxsize=1024)
def runs_of(
    shape: ConvShape, tile: int, first: int, last: int, *, strip: bool = False
) -> tuple[Run, ...]:
    """Group pixel tiles first..last-1 of an image into runs whose tiles differ by a shift only.

    Flat tiles of 16 pixels and rows of 24 output columns repeat every 3 tiles, 2 rows further down:
    a run consists of such periods. Cores of a launch and schedules with one tile size ask for the
    same runs, hence the cache.
    """
    periods = _Periods(shape, tile, strip)
    period = periods.tiles
    input_rows = periods.rows_down * shape.strides[0]
    runs: list[Run] = []
    tile_at = first
    while tile_at < last:
        count = periods.repetitions(tile_at, last)
        if count > 1:
            tiles = tuple(periods.tile(t) for t in range(tile_at, tile_at + period))
            runs.append(Run(count, tiles, input_rows, periods.rows_down * shape.out_hw[1]))
            tile_at += count * period
        else:
            runs.append(Run(1, (periods.tile(tile_at),), 0, 0))
            tile_at += 1
    return tuple(runs)


class _Periods:
    """After how many `tiles` windows repeat, `rows_down` output rows further down."""

    def __init__(self, shape: ConvShape, tile: int, strip: bool) -> None:
        self.shape = shape
        self.tiles, self.rows_down = _period_of(shape, tile, strip)
        # The same tiles are asked for again and again while periods are compared.
        self.tile = cache(partial(_tile, shape, tile, strip))

    def repetitions(self, first: int, last: int) -> int:
        """Return how many equal periods of tiles first .. last - 1 begin at tile `first`.

        Only borders cut windows off: if the last of some periods is the first one shifted, so are
        those between. So the number is found by bisection.
        """
        fewest = 1
        most = (last - first) // self.tiles
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if self._is_repeated(first, middle - 1):
                fewest = middle
            else:
                most = middle - 1
        return fewest

    def _is_repeated(self, first: int, periods: int) -> bool:
        """Tell whether the period at tile `first` is repeated `periods` periods later, shifted."""
        for t in range(first, first + self.tiles):
            shifted = _shifted(self.shape, self.tile(t)[1], periods * self.rows_down)
            if self.tile(t + periods * self.tiles)[1] != shifted:
                return False
        return True


def _period_of(shape: ConvShape, tile: int, strip: bool) -> tuple[int, int]:
    """Return after how many tiles windows repeat, and how many output rows further down."""
    ow = shape.out_hw[1]
    tile_pixels = tile * FRACTAL
    if shape.pool:
        return 1, int(pooled_rows(shape, tile)) * shape.pool.strides[0]
    if strip:
        return ceil_div(ow, tile_pixels), 1
    # 24 output columns and tiles of 16 pixels: 3 tiles are 48 pixels, 2 rows.
    row_pixels = ow * shape.mixed
    period = row_pixels // gcd(tile_pixels, row_pixels)
    return period, period * tile_pixels // ow


def _shifted(shape: ConvShape, windows: tuple[Window, ...], outputs: int) -> tuple[Window, ...]:
    """Return the windows of a tile `outputs` output rows further down.

    The second window, if any, is that of `beside` or of the pooling.
    """
    # A pooled tile's second window counts rows of the output itself: they move one by one.
    second_stride = 1 if shape.pool else (shape.beside or shape).strides[0]
    steps = (step * outputs for step in (shape.strides[0], second_stride))
    return tuple([window.moved(step) for window, step in zip(windows, steps, strict=False)])


def _tile(shape: ConvShape, tile: int, strip: bool, index: int) -> PixelTile:
    """Return (first pixel, windows) of tile `index` of an image."""
    oh, ow = shape.out_hw
    if shape.pool:
        (ph, pw) = shape.pool.out_hw
        rows = int(pooled_rows(shape, tile))
        # The pooling windows of the tile read some output rows: those are the tile's pixels.
        pooled = window_of(shape.pool, index * rows * pw, min(rows, ph - index * rows) * pw)
        first_read = pooled.rows.first * ow
        return first_read, (window_of(shape, first_read, pooled.rows.count * ow), pooled)
    tile_pixels = tile * FRACTAL
    if strip:
        # A row of 100 pixels in strips of 32: 4 strips, the last one with 4 pixels.
        row, strip_in_row = divmod(index, ceil_div(ow, tile_pixels))
        column = strip_in_row * tile_pixels
        pixel = row * ow + column
        pixels = min(tile_pixels, ow - column)
    else:
        pixel = index * tile_pixels
        pixels = min(tile_pixels, oh * ow - pixel)
    convolutions = (shape, shape.beside) if shape.beside else (shape,)
    return pixel, tuple([window_of(conv, pixel, pixels, strip=strip) for conv in convolutions])


def rows_of(shape: ConvShape, x: Buffer, window: Window, blocks: Span, down: Affine) -> Region:
    """Return the region of `x` with a window's rows, `down` rows further.

    `blocks` are channel blocks (first, count). Of mixed images it has the first row of each image,
    then the second of each.
    """
    rows = window.rows
    columns = window.columns
    step = shape.stored[1]
    row_elements = shape.w * shape.c0
    row = divided(down + rows.first, shape.mixed) * (step * row_elements)
    start = blocks[0] * shape.plane + row + columns.first * shape.c0
    if shape.mixed > 1:
        rows_of_each = rows.count // shape.mixed
        image_pitch = shape.blocks[0] * shape.plane
        mixed_sizes = blocks[1], rows_of_each, shape.mixed, columns.count * shape.c0
        return x.region(start, mixed_sizes, (shape.plane, step * row_elements, image_pitch, 1))
    # Whole rows, none left out: one stretch of memory for each channel block.
    if columns.count == shape.w and step == 1:
        return x.region(start, (blocks[1], rows.count * row_elements), (shape.plane, 1))
    sizes = (blocks[1], rows.count, columns.count * shape.c0)
    return x.region(start, sizes, (shape.plane, step * row_elements, 1))


def divided(rows: Affine, by: int) -> Affine:
    """Return rows of `by` mixed images, a multiple of `by`, as rows of each image."""
    return Affine(rows.const // by, tuple((name, size // by) for name, size in rows.terms))


def window_sides(shape: ConvShape, tile: int, *, strip: bool) -> tuple[int, int]:
    """Return the most image rows and columns that a tile of `tile` fractals of pixels can read."""
    ow = shape.out_hw[1]
    if strip:
        output_rows = 1
        output_columns = min(tile * FRACTAL, ow)
    else:
        output_rows = int(rows_spanned(shape, np.array(tile)))
        output_columns = ow
    return side_of(shape, 0, output_rows) * shape.mixed, side_of(shape, 1, output_columns)


def rows_spanned(shape: ConvShape, tile: Array) -> Array:
    """Return the most output rows that a flat tile of `tile` fractals crosses.

    Of mixed images it counts the rows of each. With rows of 24 and tiles of 16 pixels a tile starts
    in column 0, 8 or 16, and the one that starts in column 16 crosses 2 rows.
    """
    (oh, ow) = shape.out_hw
    mixed = shape.mixed
    tile_pixels = tile * FRACTAL
    if shape.pool:
        return np.minimum(rows_seen(shape.pool, pooled_rows(shape, tile)), oh)
    # Tiles start at multiples of their size, so at multiples of the gcd in a row.
    # Tiles of 16 pixels in rows of 24: starts 0, 16, 8, all multiples of gcd 8; the latest is 16,
    # and 16 + 16 - 1 = 31 lies in the second row.
    latest_start = ow * mixed - np.gcd(tile_pixels, ow * mixed)
    crossed: Array = np.minimum((latest_start + tile_pixels - 1) // (ow * mixed) + 1, oh // mixed)
    return crossed


def rows_seen(shape: ConvShape, rows: Sizes) -> Sizes:
    """Return the image rows that `rows` neighbouring rows of windows read."""
    return (rows - 1) * shape.strides[0] + shape.reach[0]


def side_of(shape: ConvShape, axis: int, outputs: Sizes) -> Sizes:
    """Return the most image rows (axis 0) or columns that `outputs` neighbours can read."""
    size = (shape.h, shape.w)[axis]
    stride = shape.strides[axis]
    if axis and shape.lanes:
        return outputs * 0 + size  # the whole row, whether `outputs` is a number or an array
    # A window at the end may lie wholly in the padding.
    last_output = shape.out_hw[axis] // (1 if axis else shape.mixed) - 1
    reads_only_padding = last_output * stride - shape.pads[2 * axis] >= size
    # An output that reads only padding starts at an earlier one (`InputRange.skipped`): up to a
    # stride more rows.
    one_output = max(shape.reach[axis], stride if reads_only_padding else 1)
    needed: Sizes = np.minimum((outputs - 1) * stride + one_output, size)
    return needed if isinstance(outputs, np.ndarray) else int(needed)


def unit_elements(shape: ConvShape, tile: int, *, strip: bool) -> Pair:
    """Return the most elements that a unit of a tile reads of its image and of the image beside."""
    units = units_of(shape)
    beside = shape.beside
    own_elements = prod(window_sides(shape, tile, strip=strip)) * units.c1
    beside_elements = prod(window_sides(beside, tile, strip=strip)) * units.beside if beside else 0
    return own_elements * shape.c0, beside_elements * shape.c0


# -- shares of cores ------------------------------------------------------------------------------
Tiles = tuple[int, int]
"""Pixel tiles first .. last-1, counted over all images."""


@dataclass(frozen=True, slots=True)
class RowShare:
    """Pixel tiles of a row of cores; other rows of cores have the same tiles, shifted.

    Core row i starts `images[i] * image_pitch` images and `downs[i] * step` output rows after
    `tiles`. With a step of 0 all core rows start in the same output row.
    """

    tiles: Tiles
    image_pitch: int
    images: tuple[int, ...]
    step: int
    downs: tuple[int, ...]


@lru_cache(maxsize=256)
def row_shares(shape: ConvShape, tile: int, grid_rows: int, *, strip: bool) -> tuple[RowShare, ...]:
    """Divide all pixel tiles evenly; rows of cores whose windows differ by a shift are one share.

    Rows of cores that own equally many whole images are one share, and so are rows that own parts
    of images with the same windows. A row whose tiles begin in one image and end in another is a
    separate share. With 8 tiles per image, 2 images and 4 rows of cores, rows 0 and 2 are one
    share: the upper halves of images.
    """
    per_image = tiles_per_image(shape, tile, strip=strip)
    ow = shape.out_hw[1]
    sizes = chunks(shape.n * per_image, 1, grid_rows)
    # Every row of cores has whole images: then all of them read the same windows.
    pitch = sizes[0] // per_image if sizes[0] % per_image == 0 else 0

    def owner_of(index: int, size: int) -> tuple[Hashable, tuple[int, int, Tiles]]:
        """Return what equal rows of cores have in common, and (image, output row, tiles) of one."""
        if pitch:
            return size, (index, 0, (0, size))
        start = index * sizes[0]
        # Tile 11 with 4 tiles an image is tile 3 of image 2.
        image, first_tile = divmod(start, per_image)
        end_tile = first_tile + size
        if end_tile > per_image:
            return ("across", start), (0, 0, (start, start + size))
        runs = runs_of(shape, tile, first_tile, end_tile, strip=strip)
        row = runs[0].tiles[0][0] // ow
        return _shifted_to_top(shape, runs, row), (image, row, (first_tile, end_tile))

    groups: dict[Hashable, list[tuple[int, int, Tiles]]] = {}
    for index, size in enumerate(sizes):
        key, owner = owner_of(index, size)
        groups.setdefault(key, []).append(owner)
    return tuple([_share(owners, pitch or 1) for owners in groups.values()])


def _shifted_to_top(shape: ConvShape, runs: tuple[Run, ...], row: int) -> tuple[Run, ...]:
    """Return runs that begin in output row `row`, shifted up to output row 0."""
    pixels_above = row * shape.out_hw[1]

    def at_top(tile: PixelTile) -> PixelTile:
        pixel, windows = tile
        return pixel - pixels_above, _shifted(shape, windows, -row)

    return tuple(replace(run, tiles=tuple(map(at_top, run.tiles))) for run in runs)


def _share(owners: list[tuple[int, int, Tiles]], pitch: int) -> RowShare:
    """Return one share for `owners` (image, first output row, tiles) with the same windows."""
    _, top, tiles = min(owners, key=lambda owner: owner[1])
    # Core rows that start in output rows 0, 8 and 24 do so 0, 1 and 3 steps of 8 further down.
    step = gcd(*(row - top for _, row, _ in owners))
    downs = tuple((row - top) // step if step else 0 for _, row, _ in owners)
    return RowShare(tiles, pitch, tuple(image for image, _, _ in owners), step, downs)


@dataclass(frozen=True, slots=True)
class Pixels:
    """A tile of pixels in a program: its image, first pixel and windows, and where loops move it.

    It is the `turn`-th repetition of its `run`, and lies `down` output rows below its windows, as
    the core's share does. A second window is that of the second image (`beside`).
    """

    image: Affine
    pixel: int
    windows: tuple[Window, ...]
    run: Run
    turn: Affine
    down: Affine

    @property
    def window(self) -> Window:
        """The window that the tile reads in the first image."""
        return self.windows[0]


# -- places of the output -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Placement:
    """Where output pixels go in a plane of `plane` pixels: start + row * row_pitch + column * step.

    A plain convolution fills its plane. A phase of a transposed convolution with stride 2 fills
    every second pixel of every second row. `weight` names the tensor of weights, because several
    launches of one kernel need several. `mixed` is the number of images with interleaved rows, and
    the pixels from one of them to the next.
    """

    start: int
    row_pitch: int
    step: int
    plane: int
    weight: str = "weight"
    mixed: Pair = (1, 0)


def plain_placement(shape: ConvShape) -> Placement:
    """Return the placement that writes rows one after another, padded to 16 pixels at the end."""
    oh, ow = shape.out_hw
    return Placement(0, ow, 1, ceil_div(oh * ow, FRACTAL) * FRACTAL)


def dense_placement(shape: ConvShape) -> Placement:
    """Return the placement that fills planes of OH * OW pixels: NC1HWC0, what a next layer reads.

    Blocks have 16 channels; those of an epilogue's int8 result have 32, what an int8 layer reads.
    """
    oh, ow = (shape.pool or shape).out_hw
    if shape.mixed == 1:
        return Placement(0, ow, 1, oh * ow)
    plane = oh // shape.mixed * ow
    return Placement(0, ow, 1, plane, mixed=(shape.mixed, shape.blocks[1] * plane))


def area_of(
    shape: ConvShape,
    place: Placement,
    plane: Affine,
    row: Affine,
    tile: tuple[int, int, Window],
    width: int = FRACTAL,
) -> Area:
    """Return where a tile of output pixels goes.

    It is one piece if the plane is filled in order, else a piece for every output row. `plane` is
    the first pixel of its first block's plane, `row` counts the output rows to add to the tile's;
    `tile` is (first pixel, output blocks, window). Stored blocks have `width` channels.
    """
    (pixel, blocks, window) = tile
    ow = shape.out_hw[1]
    images, image_pitch = place.mixed
    # A plain plane: pixel after pixel, row after row, one image.
    in_order = (place.row_pitch, place.step, images) == (ow, 1, 1)
    first_pixel = 0
    pieces = list[tuple[int, Affine, int]]()
    while first_pixel < window.pixels:
        output = pixel + first_pixel
        pixels_left = window.pixels - first_pixel
        size = pixels_left if in_order else min(ow - output % ow, pixels_left)
        image_row, image = divmod(output // ow, images)
        target = (divided(row, images) + image_row) * place.row_pitch + image * image_pitch
        target += output % ow * place.step + place.start
        pieces.append((first_pixel, target, size))
        first_pixel += size
    return Area(
        base=plane * FRACTAL,
        pieces=tuple(pieces),
        blocks=blocks * FRACTAL // width,  # of 16 sums; as int8 two of them are one block of 32
        plane=place.plane,
        step=place.step,
        fractals=window.fractals,
        pixels=window.pixels,
        width=width,
    )
