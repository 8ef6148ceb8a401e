"""How the operands of a convolution come to L0.

Its A matrix, im2col, is never stored: load3d forms a tile of it from rows of the image in L1.
"""

from dataclasses import dataclass

from ascend_lab.machine import isa
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.conv_windows import Window
from ascend_lab.operators.kernels.cube_nest import Feed, OrderedFeed, ResidentFeed, SlotFeed


def rows_view(shape: ConvShape, x: isa.Tile, window: Window, blocks: int, start: int) -> isa.Region:
    """Return the region of L1 with the rows of a window, one channel block after another."""
    return x.region(start, (blocks, window.rows.count, window.columns.count, shape.c0))


@dataclass(frozen=True, slots=True)
class Addend:
    """One of the convolutions whose results are added: its tensors, its places in L1 and L0C.

    A unit of depth has `unit_blocks` channel blocks of it. Its rows begin at element `rows_start`
    of a slot of L1, its sums at `sums_start` of a tile of L0C. `sums_begun`: something is in these
    sums before its first product.
    """

    shape: ConvShape
    x: isa.Buffer
    weight: isa.Buffer
    unit_blocks: int
    rows_start: int
    sums_start: int
    sums_begun: bool


@dataclass(frozen=True, slots=True)
class WindowFeed(SlotFeed):
    """Tiles of the im2col matrix, formed from the image rows `view` of a pixel tile's window."""

    shape: ConvShape
    window: Window
    view: isa.Region

    def fill(self, slot: isa.Tile, k_at: isa.Affine, depth: int) -> None:
        """Let load3d find the taps of the window in its rows."""
        shape = self.shape
        rows = self.window.rows
        columns = self.window.columns
        c0 = isa.c0_of(shape.dtype)
        self.k.load3d(
            slot.region(0, (self.side, depth, isa.FRACTAL, c0)),
            self.view,
            kernel=(shape.r, shape.s),
            stride=shape.strides,
            pad=(rows.before, rows.after, columns.before, columns.after),
            # Rows of m images take turns, so rows of one image are m apart: a dilation to load3d.
            dilation=(shape.dilations[0] * shape.mixed, shape.dilations[1]),
            m_start=self.window.m_start,
            pad_value=shape.pad_value,
            k_start=k_at * c0,
        )


@dataclass(frozen=True, slots=True)
class Operands:
    """Image rows and weights of a stage in L1, and the weights in L0B if they stay there."""

    rows: isa.Tile
    weights: isa.Tile
    l0b_weights: isa.Tile | None

    def weights_from(self, k: isa.KernelBuilder, queue: isa.Queue, n: int, start: int) -> Feed:
        """Return the feed of weights of `n` output blocks from element `start` on."""
        if self.l0b_weights:
            return ResidentFeed(self.l0b_weights, n, start)
        return OrderedFeed(k, queue, n, self.weights, start)


def load_l0b_weights(
    k: isa.KernelBuilder, queue: isa.Queue, weights: isa.Tile, count: int, bias: isa.Region | None
) -> None:
    """Copy `count` fractals of weights from L1 to a slot of L0B, and the bias behind them."""
    fractal = isa.FRACTAL * isa.c0_of(weights.buffer.dtype)
    slot = queue.alloc()
    sizes = (count, fractal)
    k.load2d(slot.region(0, sizes), weights.region(0, sizes))
    if bias is not None:
        k.load2d(slot.region(count * fractal, bias.sizes), bias)
    queue.enqueue()
