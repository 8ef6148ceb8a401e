"""One stage of a convolution: im2col rows to L0A, weights to L0B, their products into L0C."""

from dataclasses import dataclass
from typing import Any

from ascend_lab.isa import Affine, KernelBuilder, Queue, Region, Tile, c0_of, load3d
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.conv_windows import Window
from ascend_lab.kernels.gemm_schedule import FRACTAL
from ascend_lab.kernels.tiles import segments


@dataclass(frozen=True, slots=True)
class Feeds:
    """The queues of both matrices in L0, and how many fractals deep their tiles are."""

    left: Queue
    right: Queue
    depth: int


def keep_near(
    k: KernelBuilder, right: Queue, weights: Tile, count: int, bias: Region | None
) -> None:
    """Bring `count` fractals of weights from L1 to a slot of L0B, a bias for the cube behind."""
    area = FRACTAL * c0_of(weights.buffer.dtype)
    slot, fractals = right.alloc(), (count, area)
    k.load2d(slot.region(0, fractals), weights.region(0, fractals))
    if bias is not None:
        k.load2d(slot.region(count * area, bias.sizes), bias)
    right.enqueue()


def add_stage(
    k: KernelBuilder,
    shape: ConvShape,
    feeds: Feeds,
    c: Tile,
    window: Window,
    sources: tuple[Tile, Tile, Tile | None],
    sizes: tuple[int, Affine, int],
    bias: Region | None,
) -> None:
    """Add the products of a stage, `sizes` (output blocks, first channel block, blocks).

    load3d forms tiles of the im2col rows of the window. `sources` are rows and weights in L1, and
    weights in L0B if they stay there.
    """
    (x, w, near), (n, c_at, c_size), left, right = sources, sizes, feeds.left, feeds.right
    c0 = c0_of(shape.dtype)
    m, rows, columns, area = window.fractals, window.rows, window.columns, FRACTAL * c0
    view = x.region(0, (c_size, rows.count, columns.count, shape.c0))
    windows: dict[str, Any] = {
        "kernel": (shape.r, shape.s),
        "stride": shape.strides,
        "pad": (rows.before, rows.after, columns.before, columns.after),
        "dilation": shape.dilations,
        "m_start": window.m_start,
        "pad_value": shape.pad_value,
    }
    for k_at, depth in segments(k, "k", c_size * shape.taps, feeds.depth):
        to = left.alloc().region(0, (m, depth, FRACTAL, c0))
        k.emit(load3d(k.chip, to, view, **windows, k_start=k_at * c0))
        left.enqueue()
        start, fractals = k_at * n * area, (depth * n, area)
        if near is None:
            k.load2d(right.alloc().region(0, fractals), w.region(start, fractals))
            right.enqueue()
        a = left.dequeue().region(0, (m, depth, FRACTAL, c0))
        tile, start = (near, start) if near else (right.dequeue(), Affine())
        sums, done = c.region(0, (n, m, FRACTAL, FRACTAL)), c_at * shape.taps + k_at
        b = tile.region(start, (depth, n, FRACTAL, c0))
        k.mmad(sums, a, b, accumulate=done, bias=bias)
        left.free()
        if near is None:
            right.free()
