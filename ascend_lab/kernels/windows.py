"""Which image rows a tile of output pixels needs, and which tiles are shifts of one another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import FRACTAL, up


@dataclass(frozen=True, slots=True)
class Window:
    """Image rows a pixel tile needs: first row, row count, padding above and below, m offset."""

    first: int
    rows: int
    top: int
    bottom: int
    m_start: int
    fractals: int

    def moved(self, by: int) -> Window:
        """Return the window `by` image rows further down."""
        return replace(self, first=self.first + by)


def window_of(shape: ConvShape, pixel: int, fractals: int) -> Window:
    """Return the rows that `fractals` * 16 output pixels from `pixel` on look at."""
    oh, ow = shape.out_hw
    last = min(pixel + fractals * FRACTAL, oh * ow) - 1
    low = pixel // ow * shape.stride - shape.pad
    high = last // ow * shape.stride - shape.pad + shape.r - 1
    below = max(0, -(-(low - shape.h + 1) // shape.stride))  # rows of pixels under the image
    start = low - below * shape.stride
    first = max(start, 0)
    end = max(min(high, shape.h - 1), first)
    top, bottom = max(0, -start), max(0, high - end)
    return Window(first, end - first + 1, top, bottom, below * ow + pixel % ow, fractals)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` repetitions of `tiles`, each `rows` image rows and `pixels` further down."""

    count: int
    tiles: tuple[tuple[int, Window], ...]
    rows: int
    pixels: int


def runs_of(shape: ConvShape, tile: int, first: int, last: int) -> list[Run]:
    """Group pixel tiles first..last-1 of an image into runs that differ by a shift only."""
    oh, ow = shape.out_hw
    pixels = tile * FRACTAL
    total = up(oh * ow, FRACTAL)
    tiles = [
        (t * pixels, window_of(shape, t * pixels, min(tile, total - t * tile)))
        for t in range(first, last)
    ]
    period = ow // gcd(pixels, ow)
    shift = period * pixels // ow * shape.stride
    runs: list[Run] = []
    i = 0
    while i < len(tiles):
        count = 1
        block = tiles[i : i + period]
        while True:
            after = tiles[i + count * period : i + (count + 1) * period]
            moved = [w.moved(count * shift) for _, w in block]
            if len(after) < period or [w for _, w in after] != moved:
                break
            count += 1
        if count > 1:
            runs.append(Run(count, tuple(block), shift, period * pixels))
            i += count * period
        else:
            runs.append(Run(1, (tiles[i],), 0, 0))
            i += 1
    return runs
