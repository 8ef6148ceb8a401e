"""A stage of a convolution on a core: rows of the image to sums in L0C.

A bias is one more step of depth: the cube adds it where the vector unit has more to do.

    sums (pixels, channels) += ones (pixels, 1) @ bias (1, channels)

Ones fill the first column of the left matrix, numbers the first row of the right one; the rest of
both fractals is 0. Bytes hold small numbers only, so 127 fills the other 31 columns, and a whole
bias is b = l + 127 (h1 + ... + h31). They come to L1 before all else, so that whoever waits for
rows or weights has waited for them: no flag of their own, of which some chips have few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab import isa
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of, units_of
from ascend_lab.kernels.conv_tiles import BundleShare
from ascend_lab.kernels.conv_windows import Window
from ascend_lab.kernels.tiles import Span, segments

LARGEST = 127
MOST_WHOLE = LARGEST * LARGEST * (2 * isa.FRACTAL - 1) + LARGEST // 2
"""The largest whole bias that one fractal of bytes adds."""


# -- a stage --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Feeds:
    """The queues of both matrices in L0, and how many fractals deep their tiles are."""

    left: isa.Queue
    right: isa.Queue
    depth: int


def keep_near(
    k: isa.KernelBuilder, right: isa.Queue, weights: isa.Tile, count: int, bias: isa.Region | None
) -> None:
    """Bring `count` fractals of weights from L1 to a slot of L0B, a bias for the cube behind."""
    area = isa.FRACTAL * isa.c0_of(weights.buffer.dtype)
    slot, fractals = right.alloc(), (count, area)
    k.load2d(slot.region(0, fractals), weights.region(0, fractals))
    if bias is not None:
        k.load2d(slot.region(count * area, bias.sizes), bias)
    right.enqueue()


def add_stage(
    k: isa.KernelBuilder,
    shape: ConvShape,
    feeds: Feeds,
    c: isa.Tile,
    windows: tuple[Window, ...],
    sources: tuple[isa.Tile, isa.Tile, isa.Tile | None],
    sizes: tuple[int, isa.Affine, int],
    bias: isa.Region | None,
    starts: tuple[int, int],
) -> None:
    """Add the products of a stage, `sizes` (output blocks, first unit, units), and those beside.

    `sources` are rows and weights in L1, and weights in L0B if they stay there. What is beside has
    its rows, and its sums (0: the same ones) at `starts`.
    """
    (n, at, count), units, other = sizes, units_of(shape), shape.beside
    own = n, at * units.c1, count * units.c1
    x, *weights = sources
    view = _view(shape, x, windows[0], 0, own[2])
    add_products(k, shape, feeds, c, windows[0], view, (*weights,), own, bias, (0, 0))
    if other:
        start = own[2] * shape.taps * n * isa.FRACTAL * isa.c0_of(shape.dtype)
        own = n, at * units.beside if starts[1] else isa.Affine(1), count * units.beside
        view = _view(other, x, windows[1], starts[0], own[2])
        places = start, starts[1]
        add_products(k, other, feeds, c, windows[1], view, (*weights,), own, None, places)


def _view(shape: ConvShape, x: isa.Tile, window: Window, start: int, blocks: int) -> isa.Region:
    """Return the rows of a window in L1, those of channel blocks one behind the other."""
    return x.region(start, (blocks, window.rows.count, window.columns.count, shape.c0))


def add_products(
    k: isa.KernelBuilder,
    shape: ConvShape,
    feeds: Feeds,
    c: isa.Tile,
    window: Window,
    view: isa.Region,
    weights: Sequence[isa.Tile | None],
    sizes: tuple[int, isa.Affine, int],
    bias: isa.Region | None,
    starts: tuple[isa.Affine | int, isa.Affine | int],
) -> None:
    """Add the products of channel blocks, `sizes` (output blocks, first channel block, blocks).

    load3d forms tiles of the im2col rows of `view`. `weights` are those in L1, and in L0B if they
    stay there; they and the sums begin at `starts`.
    """
    (w, near), (n, c_at, c_size), left, right = weights, sizes, feeds.left, feeds.right
    c0 = isa.c0_of(shape.dtype)
    m, rows, columns, area = window.fractals, window.rows, window.columns, isa.FRACTAL * c0
    dilation = shape.dilations[0] * shape.mixed, shape.dilations[1]
    pads = rows.before, rows.after, columns.before, columns.after
    windows: dict[str, Any] = {"kernel": (shape.r, shape.s), "stride": shape.strides, "pad": pads}
    windows |= {"dilation": dilation, "m_start": window.m_start}
    windows["pad_value"] = shape.pad_value
    for k_at, depth in segments(k, "k", c_size * shape.taps, feeds.depth):
        to = left.alloc().region(0, (m, depth, isa.FRACTAL, c0))
        k.emit(isa.load3d(k.chip, to, view, **windows, k_start=k_at * c0))
        left.enqueue()
        start, fractals = k_at * (n * area) + starts[0], (depth * n, area)
        if near is None:
            assert w is not None
            k.load2d(right.alloc().region(0, fractals), w.region(start, fractals))
            right.enqueue()
        a = left.dequeue().region(0, (m, depth, isa.FRACTAL, c0))
        tile, start = (near, start) if near else (right.dequeue(), isa.Affine())
        sums, done = c.region(starts[1], (n, m, isa.FRACTAL, isa.FRACTAL)), c_at * shape.taps + k_at
        b = tile.region(start, (depth, n, isa.FRACTAL, c0))
        k.mmad(sums, a, b, accumulate=done, bias=bias)
        left.free()
        if near is None:
            right.free()


# -- a bias ---------------------------------------------------------------------------------------
def bias_bytes(shape: ConvShape) -> int:
    """Return the bytes of L1 that the bias of all output blocks takes."""
    return isa.FRACTAL * 2 * isa.FRACTAL * (1 + shape.blocks[1])


def pack_bias(shape: ConvShape, bias: np.ndarray) -> np.ndarray:
    """Return a bias (k,) as fractals: one of ones, then one a block of output channels."""
    blocks, c0 = shape.blocks[1], isa.c0_of(shape.dtype)
    dtype = np.dtype(np.int8) if shape.dtype == "int8" else bias.dtype
    wide = np.zeros(blocks * isa.FRACTAL, bias.dtype)
    wide[: bias.size] = bias.reshape(-1)
    packed = np.zeros((1 + blocks, isa.FRACTAL, c0), dtype)
    packed[0, :, 0] = 1
    if shape.dtype != "int8":
        packed[1:, :, 0] = wide.reshape(blocks, isa.FRACTAL)
        return packed.reshape(-1)
    packed[0, :, 1:] = LARGEST
    high = np.rint(wide / LARGEST).astype(np.int64)
    each, rest = np.divmod(np.abs(high)[:, None], c0 - 1)
    digits = np.sign(high)[:, None] * (each + (np.arange(c0 - 1) < rest))
    packed[1:, :, 0] = (wide - LARGEST * high).reshape(blocks, isa.FRACTAL)
    packed[1:, :, 1:] = digits.reshape(blocks, isa.FRACTAL, c0 - 1)
    return packed.reshape(-1)


@dataclass(frozen=True, slots=True)
class CubeBias:
    """The bias of a core's blocks in L1, `own` of each of its bundles of groups."""

    k: isa.KernelBuilder
    numbers: isa.Buffer
    held: isa.Buffer
    shape: ConvShape
    own: int

    @classmethod
    def make(cls, k: isa.KernelBuilder, name: str, shape: ConvShape, own: int) -> "CubeBias":
        """Declare the tensor `name` and allocate its place in L1."""
        area, most = isa.FRACTAL * isa.c0_of(shape.dtype), bundles_of(shape).count * own
        numbers = k.tensor(name, shape.dtype, (1 + shape.blocks[1]) * area)
        held = k.buffer(f"{name}_l1", "L1", shape.dtype, (1 + most) * area)
        return cls(k, numbers, held, shape, own)

    def load(self, share: BundleShare, first: isa.Affine, col: isa.Affine) -> None:
        """Bring the ones, and the bias of blocks from `col` on of bundles from `first` on."""
        bundle, area, own = (
            bundles_of(self.shape),
            isa.FRACTAL * isa.c0_of(self.shape.dtype),
            self.own,
        )
        self.k.copy(self.held.region(0, area), self.numbers.region(0, area))
        short = bundle.last_n1 if share.full else own
        last = (isa.Affine(bundle.count - 1), int(share.tail), short, own * share.full)
        for index, count, blocks, place in ((first, share.full, own, 0), last):
            if count:
                sizes, start = (count, blocks * area), (1 + index * bundle.n1 + col) * area
                source = self.numbers.region(start, sizes, (bundle.n1 * area, 1))
                to = self.held.region((1 + place) * area, sizes, (own * area, 1))
                self.k.copy(to, source)

    def blocks(self, n: Span) -> isa.Region:
        """Return the fractals of blocks `n` (place, count) in L1."""
        area = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        return self.held.region((n[0] + 1) * area, (n[1], area))

    def add(
        self,
        c: isa.Tile,
        feeds: tuple[isa.Queue, isa.Queue],
        m: int,
        n: Span,
        near: isa.Region | None = None,
    ) -> None:
        """Add the bias of blocks `n` (place in L1, count) to sums of `m` fractals of pixels.

        `near`: its fractals in L0B, if they are there.
        """
        k, (left, right), c0 = self.k, feeds, isa.c0_of(self.shape.dtype)
        area = isa.FRACTAL * c0
        sizes = (m, area)
        k.load2d(left.alloc().region(0, sizes), self.held.region(0, sizes, (0, 1)))
        left.enqueue()
        if near is None:
            k.load2d(right.alloc().region(0, (n[1], area)), self.blocks(n))
            right.enqueue()
        a = left.dequeue().region(0, (m, 1, isa.FRACTAL, c0))
        b = near or right.dequeue().region(0, (1, n[1], isa.FRACTAL, c0))
        k.mmad(c.region(0, (n[1], m, isa.FRACTAL, isa.FRACTAL)), a, b, accumulate=1)
        left.free()
        if near is None:
            right.free()
