"""Which part of the image a tile of output pixels needs, and which tiles are shifts of another.

Tiles are flat (16 * tile pixels in row-major order, whatever rows they cross) or strips (a piece
of one output row). A strip needs only some columns of the image: that is for wide rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import gcd

from ascend_lab.isa import Affine
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.tiles import Area, chunks


@dataclass(frozen=True, slots=True)
class Span:
    """Image rows (or columns) first .. first+count-1, with zeros before and after.

    `skipped` outputs are counted in front of the wanted ones, so that a span that lies beyond the
    image still holds one real row.
    """

    first: int
    count: int
    before: int
    after: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Window:
    """What a pixel tile reads: rows, columns, its place among their windows; and its pixels."""

    rows: Span
    columns: Span
    m_start: int
    fractals: int
    pixels: int

    def moved(self, by: int) -> Window:
        """Return the window `by` image rows further down."""
        return replace(self, rows=replace(self.rows, first=self.rows.first + by))


def span_of(size: int, stride: int, pad: int, reach: int, outputs: tuple[int, int]) -> Span:
    """Return what outputs first..last of an axis of `size` look at."""
    low = outputs[0] * stride - pad
    high = outputs[1] * stride - pad + reach - 1
    skipped = max(0, -(-(low - size + 1) // stride))
    start = low - skipped * stride
    first = max(start, 0)
    end = max(min(high, size - 1), first)
    return Span(first, end - first + 1, max(0, -start), max(0, high - end), skipped)


def window_of(shape: ConvShape, pixel: int, pixels: int, *, strip: bool = False) -> Window:
    """Return what `pixels` output pixels from `pixel` on look at; a strip stays in its row."""
    ow = shape.out_hw[1]
    top, _, left, _ = shape.pads
    first, last = pixel // ow, (pixel + pixels - 1) // ow
    rows = span_of(shape.h, shape.strides[0], top, shape.reach[0], (first, last))
    across = (pixel % ow, pixel % ow + pixels - 1) if strip else (0, ow - 1)
    columns = span_of(shape.w, shape.strides[1], left, shape.reach[1], across)
    wide = across[1] - across[0] + 1 + columns.skipped
    m_start = rows.skipped * wide + columns.skipped + (0 if strip else pixel % ow)
    return Window(rows, columns, m_start, up(pixels, FRACTAL), pixels)


def tiles_per_image(shape: ConvShape, tile: int, *, strip: bool = False) -> int:
    """Pixel tiles of `tile` fractals in one image, the last one (of each row) short."""
    oh, ow = shape.out_hw
    return oh * up(ow, tile * FRACTAL) if strip else up(up(oh * ow, FRACTAL), tile)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` repetitions of `tiles`, each `rows` image rows and `pixels` further down."""

    count: int
    tiles: tuple[tuple[int, Window], ...]
    rows: int
    pixels: int


def runs_of(
    shape: ConvShape, tile: int, first: int, last: int, *, strip: bool = False
) -> list[Run]:
    """Group pixel tiles first..last-1 of an image into runs that differ by a shift only.

    Only borders cut windows off, so blocks between two that differ by a shift do so as well.
    """
    return list(_runs(shape, tile, first, last, strip))


@lru_cache(maxsize=1024)
def _runs(shape: ConvShape, tile: int, first: int, last: int, strip: bool) -> tuple[Run, ...]:
    """Return `runs_of`: cores of a launch and schedules of one tile ask for the same ones."""
    ow, side = shape.out_hw[1], tile * FRACTAL
    period = up(ow, side) if strip else ow // gcd(side, ow)
    down = 1 if strip else period * side // ow
    shift = down * shape.strides[0]
    at = cache(partial(_tile, shape, tile, strip))

    def repeats(i: int, k: int) -> bool:
        """Tell whether the block of a period at tile i comes again k periods further."""
        block = range(i, i + period)
        return all(at(t + k * period)[1] == at(t)[1].moved(k * shift) for t in block)

    runs: list[Run] = []
    i = first
    while i < last:
        count, most = 1, (last - i) // period
        while count < most:
            middle = (count + most + 1) // 2
            count, most = (middle, most) if repeats(i, middle - 1) else (count, middle - 1)
        if count > 1:
            runs.append(Run(count, tuple(map(at, range(i, i + period))), shift, down * ow))
            i += count * period
        else:
            runs.append(Run(1, (at(i),), 0, 0))
            i += 1
    return tuple(runs)


def _tile(shape: ConvShape, tile: int, strip: bool, t: int) -> tuple[int, Window]:
    """Return (first pixel, window) of tile t of an image; a flat tile rounds its pixels up."""
    oh, ow = shape.out_hw
    side, each = tile * FRACTAL, up(ow, tile * FRACTAL)
    if strip:
        row, at = t // each, t % each * side
        pixel, pixels = row * ow + at, min(side, ow - at)
    else:
        pixel, pixels = t * side, min(side, oh * ow - t * side)
    return pixel, window_of(shape, pixel, pixels, strip=strip)


def rows_of(pixel: int, pixels: int, ow: int) -> list[tuple[int, int, int]]:
    """Cut a tile into pieces of one output row: (position in the tile, first pixel, length)."""
    pieces, done = [], 0
    while done < pixels:
        at = pixel + done
        size = min(ow - at % ow, pixels - done)
        pieces.append((done, at, size))
        done += size
    return pieces


# How the pixels of a convolution are divided over rows of cores, and which may share a program.


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


@dataclass(frozen=True, slots=True)
class _Owner:
    """One row of cores: its image, its first output row there, its tiles."""

    image: int
    row: int
    tiles: Tiles


@lru_cache(maxsize=256)
def row_shares(shape: ConvShape, tile: int, grid_rows: int, *, strip: bool) -> tuple[RowShare, ...]:
    """Divide all pixel tiles evenly; rows of cores whose windows differ by a shift are one share.

    Rows that own whole images are alike, and so are those that own the same kind of piece of an
    image. A row whose tiles begin in one image and end in another is a share of its own.
    """
    per_image = tiles_per_image(shape, tile, strip=strip)
    sizes = chunks(shape.n * per_image, 1, grid_rows)
    pitch = sizes[0] // per_image if sizes[0] % per_image == 0 else 0
    groups: dict[Hashable, list[_Owner]] = {}
    for index, size in enumerate(sizes):
        image, first = divmod(index * sizes[0], per_image)
        key: Hashable
        if pitch:
            key, owner = size, _Owner(index, 0, (0, size))
        elif first + size <= per_image:
            runs = runs_of(shape, tile, first, first + size, strip=strip)
            row = runs[0].tiles[0][0] // shape.out_hw[1]
            key, owner = _unmoved(shape, runs, row), _Owner(image, row, (first, first + size))
        else:
            start = index * sizes[0]
            key, owner = ("across", start), _Owner(0, 0, (start, start + size))
        groups.setdefault(key, []).append(owner)
    return tuple([_share(owners, pitch or 1) for owners in groups.values()])


def _unmoved(shape: ConvShape, runs: list[Run], row: int) -> tuple[Run, ...]:
    """Return the runs as if they began in output row 0."""
    pixels, rows = row * shape.out_hw[1], row * shape.strides[0]
    return tuple(
        replace(r, tiles=tuple((pixel - pixels, w.moved(-rows)) for pixel, w in r.tiles))
        for r in runs
    )


def _share(owners: list[_Owner], pitch: int) -> RowShare:
    top = min(owners, key=lambda owner: owner.row)
    step = gcd(*(owner.row - top.row for owner in owners))
    downs = tuple((owner.row - top.row) // step if step else 0 for owner in owners)
    return RowShare(top.tiles, pitch, tuple(o.image for o in owners), step, downs)


# Where the pixels of a convolution go in GM.


@dataclass(frozen=True, slots=True)
class Placement:
    """Where output pixels go in a plane of `plane` pixels: start + row * row_pitch + column * step.

    A plain convolution fills its plane; one phase of a transposed convolution fills every step-th
    pixel of every other row.
    """

    start: int
    row_pitch: int
    step: int
    plane: int
    weight: str = "weight"
    """Name of the tensor of weights: several launches of one kernel need several."""


def plain_placement(shape: ConvShape) -> Placement:
    """Return the placement that writes rows one after another, padded to 16 pixels at the end."""
    oh, ow = shape.out_hw
    return Placement(0, ow, 1, up(oh * ow, FRACTAL) * FRACTAL)


def dense_placement(shape: ConvShape) -> Placement:
    """Return the placement that fills planes of OH * OW pixels: NC1HWC0, what a next layer reads.

    Blocks are of 16 channels whatever the format: int8 layers, which read blocks of 32, cannot
    follow each other this way.
    """
    oh, ow = shape.out_hw
    return Placement(0, ow, 1, oh * ow)


def area_of(
    shape: ConvShape, place: Placement, plane: Affine, row: Affine, tile: tuple[int, int, Window]
) -> Area:
    """Return where a tile of output pixels goes.

    `plane` is the first pixel of its first block's plane, `row` counts output rows in front;
    `tile` is (first pixel, output blocks, window).
    """
    (pixel, blocks, window), ow = tile, shape.out_hw[1]
    rows = rows_of(pixel, window.pixels, ow)
    if (place.row_pitch, place.step) == (ow, 1):
        rows = [(0, pixel, window.pixels)]
    pieces = []
    for done, first, length in rows:
        to = plane + place.start + (row + first // ow) * place.row_pitch + first % ow * place.step
        pieces.append((done, to * FRACTAL, length))
    step, size = place.step * FRACTAL, place.plane * FRACTAL
    return Area(tuple(pieces), blocks, size, step, window.fractals, window.pixels)
