"""Blocks of rows of the gradient of pooling: which windows see them, how many fit UB."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import CapacityError
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import up


@dataclass(frozen=True, slots=True)
class PoolGradient:
    """What to do: the pooling as a convolution with a group per channel, and its kind.

    `share` is what the gradient of an average is multiplied by, 0 where that differs from window
    to window: then `rate` holds it for each, (OH, OW, 16). `weighted` is the gradient of a
    depthwise convolution's image: each tap has a weight per channel, (C1, r, s, 16).
    """

    shape: ConvShape
    maximum: bool
    share: float = 1.0
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class RowBlock:
    """`rows` rows of dx and the `windows` that see them; all row numbers count from `base`.

    Relative to the block's first row of dx: `base` is the first row in UB, `window` the first
    window's first row; `first` .. `end`-1 of `span` rows in UB are in the image.
    """

    rows: int
    windows: int
    base: int
    window: int
    span: int
    first: int
    end: int


def block_of(shape: ConvShape, rows: int, index: int) -> RowBlock:
    """Return what block `index` of `rows` rows of dx needs."""
    stride, top, oh = shape.strides[0], shape.pads[0], shape.out_hw[0]
    start = index * rows
    end = min(start + rows, shape.h)
    low = max(0, up(start + top - shape.r + 1, stride))
    windows = max(0, min(oh - 1, (end - 1 + top) // stride) - low + 1)
    window = low * stride - top if windows else start
    base = min(start, window)
    span = max(end, window + (windows - 1) * stride + shape.r if windows else end) - base
    first, last = max(-base, 0), min(span, shape.h - base)
    return RowBlock(end - start, windows, base - start, window - start, span, first, last)


def blocks_of(shape: ConvShape, rows: int) -> list[RowBlock]:
    """Return all blocks of an image."""
    return [block_of(shape, rows, i) for i in range(up(shape.h, rows))]


def line_of(shape: ConvShape) -> int:
    """Pixels of a row in UB: what windows see, and all of the image."""
    seen = (shape.out_hw[1] - 1) * shape.strides[1] + shape.s
    return max(seen, shape.pads[2] + shape.w)


def _needed(job: PoolGradient, rows: int) -> int:
    """32-byte blocks of UB: dx and the gradient twice; of maximum also x and y, and the hits."""
    shape = job.shape
    blocks, ow = blocks_of(shape, rows), shape.out_hw[1]
    span, windows = max(b.span for b in blocks), max(b.windows for b in blocks)
    planes, runs = (4, 5) if job.maximum else (2, 2 if job.share else 4)
    weights = 2 * shape.taps if job.weighted else 0
    return planes * span * line_of(shape) + (runs + job.weighted) * max(windows, 1) * ow + weights


def rows_of_block(job: PoolGradient, chip: Chip) -> int:
    """Most rows of dx that fit UB, whole strides where there are several."""
    shape, room = job.shape, chip.buffers["UB"] // BLOCK_BYTES
    stride = shape.strides[0]
    fitting = [
        r
        for r in range(1, shape.h + 1)
        if (r % stride == 0 or r == shape.h) and _needed(job, r) <= room
    ]
    if not fitting:
        raise CapacityError(
            f"UB for {stride} rows of {shape.w} pixels: {_needed(job, min(stride, shape.h))}"
            " blocks of 32 bytes",
            f"{room} on {chip.name}",
            "cut the image into columns",
        )
    return fitting[-1]
