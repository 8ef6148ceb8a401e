"""How a convolution is divided: windows of pixel tiles, shares of cores, places of the output.

Tiles are flat (16 * tile pixels in row-major order, whatever rows they cross) or strips (a piece
of one output row). A strip needs only some columns of the image: that is for wide rows. Where a
result is pooled on the core, a tile is the rows that some rows of windows see; rows that windows of
two tiles see are in both.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache, partial
from math import gcd, prod
from typing import TypeVar

import numpy as np

from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, Region, up
from ascend_lab.operators.kernels.conv_shape import ConvShape, Pair, units_of
from ascend_lab.operators.kernels.gemm_schedule import Array
from ascend_lab.operators.kernels.tiles import Area, Span, chunks

Sizes = TypeVar("Sizes", int, Array)


# -- windows --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Seen:
    """Image rows (or columns) first .. first+count-1, with zeros before and after.

    `skipped` outputs are counted in front of the wanted ones, so that a stretch that lies beyond
    the image still holds one real row.
    """

    first: int
    count: int
    before: int
    after: int
    skipped: int

    def times(self, mixed: int) -> Seen:
        """Return them where every row is one of each of `mixed` images."""
        return Seen(*(mixed * size for size in astuple(self))) if mixed > 1 else self


@dataclass(frozen=True, slots=True)
class Window:
    """What a pixel tile reads: rows, columns, its place among their windows; and its pixels."""

    rows: Seen
    columns: Seen
    m_start: int
    fractals: int
    pixels: int

    def moved(self, by: int) -> Window:
        """Return the window `by` image rows further down."""
        return replace(self, rows=replace(self.rows, first=self.rows.first + by))


def _seen(size: int, stride: int, pad: int, reach: int, outputs: tuple[int, int]) -> Seen:
    """Return what outputs first..last of an axis of `size` look at."""
    low = outputs[0] * stride - pad
    high = outputs[1] * stride - pad + reach - 1
    skipped = max(0, up(low - size + 1, stride))
    start = low - skipped * stride
    first = max(start, 0)
    end = max(min(high, size - 1), first)
    return Seen(first, end - first + 1, max(0, -start), max(0, high - end), skipped)


def window_of(shape: ConvShape, pixel: int, pixels: int, *, strip: bool = False) -> Window:
    """Return what `pixels` output pixels from `pixel` on look at; a strip stays in its row.

    Of mixed images it is as many rows of each.
    """
    ow = shape.out_hw[1]
    mixed = shape.mixed
    top, _, left, _ = shape.pads
    (first, skipped) = divmod(pixel // ow, mixed)
    last = (pixel + pixels - 1) // ow // mixed
    rows = _seen(shape.h, shape.strides[0], top, shape.reach[0], (first, last)).times(mixed)
    across = (pixel % ow, pixel % ow + pixels - 1) if strip else (0, ow - 1)
    columns = _seen(shape.w, shape.strides[1], left, shape.reach[1], across)
    if shape.lanes:  # whole rows, whole blocks of 32 bytes
        columns = replace(columns, count=shape.w)
    wide = across[1] - across[0] + 1 + columns.skipped
    m_start = (rows.skipped + skipped) * wide + columns.skipped + (0 if strip else pixel % ow)
    return Window(rows, columns, m_start, up(pixels, FRACTAL), pixels)


def tiles_per_image(shape: ConvShape, tile: int, *, strip: bool = False) -> int:
    """Pixel tiles of `tile` fractals in one image, the last one (of each row) short."""
    oh, ow = shape.out_hw
    if shape.pool:
        return up(shape.pool.out_hw[0], int(pooled_rows(shape, tile)))
    return oh * up(ow, tile * FRACTAL) if strip else up(up(oh * ow, FRACTAL), tile)


def pooled_rows(shape: ConvShape, tile: Array | int) -> Array:
    """Return the rows of pooled windows of a tile of `tile` fractals."""
    assert shape.pool
    rows = tile * FRACTAL // shape.out_hw[1] - shape.pool.r
    found: Array = np.clip(rows // shape.pool.strides[0] + 1, 1, shape.pool.out_hw[0])
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """`count` repetitions of `tiles`, each `rows` image rows and `pixels` further down.

    A tile is its first pixel and its windows: of its own image, and of that beside.
    """

    count: int
    tiles: tuple[tuple[int, tuple[Window, ...]], ...]
    rows: int
    pixels: int


@lru_cache(maxsize=1024)
def runs_of(
    shape: ConvShape, tile: int, first: int, last: int, *, strip: bool = False
) -> tuple[Run, ...]:
    """Group pixel tiles first..last-1 of an image into runs that differ by a shift only.

    Only borders cut windows off, so blocks between two that differ by a shift do so as well. Cores
    of a launch and schedules of one tile ask for the same runs.
    """
    ow = shape.out_hw[1]
    side = tile * FRACTAL
    row = ow * shape.mixed
    period = up(ow, side) if strip else row // gcd(side, row)
    down = 1 if strip else period * side // ow
    if shape.pool:
        period = 1
        down = int(pooled_rows(shape, tile)) * shape.pool.strides[0]
    at = cache(partial(_tile, shape, tile, strip))

    def repeats(i: int, k: int) -> bool:
        """Tell whether the block of a period at tile i comes again k periods further."""
        block = range(i, i + period)
        return all(at(t + k * period)[1] == _moved(shape, at(t)[1], k * down) for t in block)

    runs: list[Run] = []
    i = first
    while i < last:
        count = 1
        most = (last - i) // period
        while count < most:
            middle = (count + most + 1) // 2
            count, most = (middle, most) if repeats(i, middle - 1) else (count, middle - 1)
        if count > 1:
            tiles = tuple(map(at, range(i, i + period)))
            runs.append(Run(count, tiles, down * shape.strides[0], down * ow))
            i += count * period
        else:
            runs.append(Run(1, (at(i),), 0, 0))
            i += 1
    return tuple(runs)


def _moved(shape: ConvShape, windows: tuple[Window, ...], outputs: int) -> tuple[Window, ...]:
    """Return windows of a shape, and of what is beside it, so many output rows further down."""
    other = 1 if shape.pool else (shape.beside or shape).strides[0]
    steps = (step * outputs for step in (shape.strides[0], other))
    return tuple([window.moved(step) for window, step in zip(windows, steps, strict=False)])


def _tile(shape: ConvShape, tile: int, strip: bool, t: int) -> tuple[int, tuple[Window, ...]]:
    """Return (first pixel, windows) of tile t of an image; a flat tile rounds its pixels up."""
    oh, ow = shape.out_hw
    if shape.pool:
        (ph, pw) = shape.pool.out_hw
        rows = int(pooled_rows(shape, tile))
        pooled = window_of(shape.pool, t * rows * pw, min(rows, ph - t * rows) * pw)
        pixel = pooled.rows.first * ow
        pixels = pooled.rows.count * ow
        return pixel, (window_of(shape, pixel, pixels), pooled)
    side = tile * FRACTAL
    each = up(ow, tile * FRACTAL)
    if strip:
        row = t // each
        at = t % each * side
        pixel = row * ow + at
        pixels = min(side, ow - at)
    else:
        pixel = t * side
        pixels = min(side, oh * ow - t * side)
    every = (shape, shape.beside) if shape.beside else (shape,)
    return pixel, tuple([window_of(one, pixel, pixels, strip=strip) for one in every])


def rows_of(shape: ConvShape, x: Buffer, window: Window, blocks: Span, down: Affine) -> Region:
    """Return the rows of a window, `down` rows further, of channel blocks (first, count).

    Rows of mixed images are the first of each, then the second.
    """
    rows = window.rows
    columns = window.columns
    step = shape.stored[1]
    wide = shape.w * shape.c0
    row = divided(down + rows.first, shape.mixed) * (step * wide)
    start = blocks[0] * shape.plane + row + columns.first * shape.c0
    if shape.mixed > 1:
        turns = rows.count // shape.mixed
        pitch = shape.blocks[0] * shape.plane
        own = blocks[1], turns, shape.mixed, columns.count * shape.c0
        return x.region(start, own, (shape.plane, step * wide, pitch, 1))
    if columns.count == shape.w and step == 1:
        return x.region(start, (blocks[1], rows.count * wide), (shape.plane, 1))
    sizes = (blocks[1], rows.count, columns.count * shape.c0)
    return x.region(start, sizes, (shape.plane, step * wide, 1))


def divided(rows: Affine, by: int) -> Affine:
    """Return rows of mixed images, whole turns of `by`, as rows of each."""
    return Affine(rows.const // by, tuple((name, size // by) for name, size in rows.terms))


def window_sides(shape: ConvShape, tile: int, *, strip: bool) -> tuple[int, int]:
    """Most image rows and columns a tile of `tile` fractals of pixels can need."""
    ow = shape.out_hw[1]
    if strip:
        spanned = 1
        across = min(tile * FRACTAL, ow)
    else:
        spanned = int(rows_spanned(shape, np.array(tile)))
        across = ow
    return side_of(shape, 0, spanned) * shape.mixed, side_of(shape, 1, across)


def rows_spanned(shape: ConvShape, tile: Array) -> Array:
    """Most output rows that tiles of `tile` fractals touch; of mixed images, of each."""
    (oh, ow) = shape.out_hw
    mixed = shape.mixed
    side = tile * FRACTAL
    if shape.pool:
        return np.minimum(rows_seen(shape.pool, pooled_rows(shape, tile)), oh)
    latest = ow * mixed - np.gcd(side, ow * mixed)  # tiles start at multiples of their size
    most: Array = np.minimum((latest + side - 1) // (ow * mixed) + 1, oh // mixed)
    return most


def rows_seen(shape: ConvShape, rows: Sizes) -> Sizes:
    """Return the image rows that so many rows of windows span."""
    return (rows - 1) * shape.strides[0] + shape.reach[0]


def side_of(shape: ConvShape, axis: int, outputs: Sizes) -> Sizes:
    """Most image rows (axis 0) or columns that `outputs` neighbouring outputs can need."""
    size = (shape.h, shape.w)[axis]
    step = shape.strides[axis]
    if axis and shape.lanes:
        return outputs * 0 + size
    last = shape.out_hw[axis] // (1 if axis else shape.mixed) - 1
    beyond = last * step - shape.pads[2 * axis] >= size
    least = max(shape.reach[axis], step if beyond else 1)
    needed: Sizes = np.minimum((outputs - 1) * step + least, size)
    return needed if isinstance(outputs, np.ndarray) else int(needed)


def unit_elements(shape: ConvShape, tile: int, *, strip: bool) -> Pair:
    """Return the most elements of the images that a unit of a tile needs, and of those beside."""
    units = units_of(shape)
    other = shape.beside
    own = prod(window_sides(shape, tile, strip=strip)) * units.c1
    more = prod(window_sides(other, tile, strip=strip)) * units.beside if other else 0
    return own * shape.c0, more * shape.c0


# -- shares of cores ------------------------------------------------------------------------------
Tiles = tuple[int, int]
"""Pixel tiles first .. last-1, counted over all images."""


@dataclass(frozen=True, slots=True)
class RowShare:
    """Pixel tiles of one row of cores, and where other rows have the same, only moved.

    Core row i starts `images[i] * image_pitch` images and `downs[i] * step` output rows after
    `tiles`. A step of 0 means that none is moved down.
    """

    tiles: Tiles
    image_pitch: int
    images: tuple[int, ...]
    step: int
    downs: tuple[int, ...]


@lru_cache(maxsize=256)
def row_shares(shape: ConvShape, tile: int, grid_rows: int, *, strip: bool) -> tuple[RowShare, ...]:
    """Divide all pixel tiles evenly; rows of cores whose windows differ by a shift are one share.

    Rows that own whole images are alike, and so are those that own the same kind of piece of an
    image. A row whose tiles begin in one image and end in another is a share of its own.
    """
    per_image = tiles_per_image(shape, tile, strip=strip)
    ow = shape.out_hw[1]
    sizes = chunks(shape.n * per_image, 1, grid_rows)
    pitch = sizes[0] // per_image if sizes[0] % per_image == 0 else 0
    groups: dict[Hashable, list[tuple[int, int, Tiles]]] = {}
    for index, size in enumerate(sizes):
        start = index * sizes[0]
        image, first = divmod(start, per_image)
        if pitch:
            key: Hashable = size
            owner = index, 0, (0, size)
        elif first + size <= per_image:
            runs = runs_of(shape, tile, first, first + size, strip=strip)
            row = runs[0].tiles[0][0] // ow
            key = _unmoved(shape, runs, row)
            owner = (image, row, (first, first + size))
        else:
            key = ("across", start)
            owner = (0, 0, (start, start + size))
        groups.setdefault(key, []).append(owner)
    return tuple([_share(owners, pitch or 1) for owners in groups.values()])


def _unmoved(shape: ConvShape, runs: tuple[Run, ...], row: int) -> tuple[Run, ...]:
    """Return the runs as if they began in output row 0."""
    pixels = row * shape.out_hw[1]
    return tuple(
        replace(r, tiles=tuple((pixel - pixels, _moved(shape, w, -row)) for pixel, w in r.tiles))
        for r in runs
    )


def _share(owners: list[tuple[int, int, Tiles]], pitch: int) -> RowShare:
    """Return the share of rows of cores (image, first output row, tiles) with the same windows."""
    _, top, tiles = min(owners, key=lambda owner: owner[1])
    step = gcd(*(row - top for _, row, _ in owners))
    downs = tuple((row - top) // step if step else 0 for _, row, _ in owners)
    return RowShare(tiles, pitch, tuple(image for image, _, _ in owners), step, downs)


@dataclass(frozen=True, slots=True)
class Pixels:
    """A tile of pixels: its image, first pixel, window, its run, the turn of the run.

    `down` output rows are added to the window and the pixels. A second window is of the image
    beside.
    """

    image: Affine
    pixel: int
    windows: tuple[Window, ...]
    run: Run
    turn: Affine
    down: Affine

    @property
    def window(self) -> Window:
        """What it reads of its own image."""
        return self.windows[0]


# -- places of the output -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Placement:
    """Where output pixels go in a plane of `plane` pixels: start + row * row_pitch + column * step.

    A plain convolution fills its plane; one phase of a transposed convolution fills every step-th
    pixel of every other row. `weight` names the tensor of weights: several launches of one kernel
    need several. Rows of `mixed` images (count, pixels from one to the next) take turns.
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
    return Placement(0, ow, 1, up(oh * ow, FRACTAL) * FRACTAL)


def dense_placement(shape: ConvShape) -> Placement:
    """Return the placement that fills planes of OH * OW pixels: NC1HWC0, what a next layer reads.

    Blocks are of 16 channels, those of an epilogue's int8 result of 32: what an int8 layer reads.
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
    """Return where a tile of output pixels goes, cut into pieces of one output row where it must.

    `plane` is the first pixel of its first block's plane, `row` counts output rows in front;
    `tile` is (first pixel, output blocks, window). Stored blocks have `width` channels.
    """
    (pixel, blocks, window) = tile
    ow = shape.out_hw[1]
    images, pitch = place.mixed
    whole = (place.row_pitch, place.step, images) == (ow, 1, 1)
    done = 0
    pieces = list[tuple[int, Affine, int]]()
    while done < window.pixels:
        at = pixel + done
        left = window.pixels - done
        size = left if whole else min(ow - at % ow, left)
        turn, image = divmod(at // ow, images)
        to = (divided(row, images) + turn) * place.row_pitch + image * pitch
        to += at % ow * place.step + place.start
        pieces.append((done, to, size))
        done += size
    blocks = blocks * FRACTAL // width
    sizes = (place.plane, place.step, window.fractals, window.pixels, width)
    return Area(plane * FRACTAL, tuple(pieces), blocks, *sizes)
