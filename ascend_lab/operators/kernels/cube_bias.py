"""A bias that the cube adds, as one more step of depth, where the vector unit has more to do.

    sums (pixels, channels) += ones (pixels, 1) @ bias (1, channels)

In fp16 the first column of the left fractal is 1, the first row of the right fractal is the bias,
and the rest of both is 0. An int8 fractal is 32 deep and holds numbers up to 127 only: there the
other 31 columns of the left fractal are 127, and an integer bias is b = l + 127 (h1 + ... + h31).
The bias comes to L1 before all else, so that whoever waits for rows or weights has waited for it:
it needs no flag of its own, of which some chips have few.
"""

from dataclasses import dataclass

import numpy as np

from ascend_lab.machine import isa
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.operators.kernels.cube_nest import (
    Feed,
    OrderedFeed,
    SlotFeed,
    Sums,
    multiply,
    sums_region,
)
from ascend_lab.operators.kernels.tiles import Span

LARGEST = 127
"""The largest int8."""
MOST_WHOLE = LARGEST * LARGEST * (2 * isa.FRACTAL - 1) + LARGEST // 2
"""The largest integer bias that one int8 fractal adds: 127 * 127 * 31 + 63 = 500,062."""


def bias_bytes(shape: ConvShape) -> int:
    """Return the bytes of L1 that the bias of all output blocks takes."""
    return isa.FRACTAL * 2 * isa.FRACTAL * (1 + shape.blocks[1])


def pack_bias(shape: ConvShape, bias: np.ndarray) -> np.ndarray:
    """Return a bias (k,) as fractals: one of ones, then one for each block of output channels."""
    blocks = shape.blocks[1]
    c0 = isa.c0_of(shape.dtype)
    dtype = np.dtype(np.int8) if shape.dtype == "int8" else bias.dtype
    padded = np.zeros(blocks * isa.FRACTAL, bias.dtype)
    padded[: bias.size] = bias.reshape(-1)
    packed = np.zeros((1 + blocks, isa.FRACTAL, c0), dtype)
    packed[0, :, 0] = 1
    if shape.dtype != "int8":
        packed[1:, :, 0] = padded.reshape(blocks, isa.FRACTAL)
        return packed.reshape(-1)
    packed[0, :, 1:] = LARGEST
    # b = low + 127 * high with |low| <= 63; high is the sum of 31 digits, as equal as can be.
    high = np.rint(padded / LARGEST).astype(np.int64)
    quotient, remainder = np.divmod(np.abs(high)[:, None], c0 - 1)
    digits = np.sign(high)[:, None] * (quotient + (np.arange(c0 - 1) < remainder))
    packed[1:, :, 0] = (padded - LARGEST * high).reshape(blocks, isa.FRACTAL)
    packed[1:, :, 1:] = digits.reshape(blocks, isa.FRACTAL, c0 - 1)
    return packed.reshape(-1)


@dataclass(frozen=True, slots=True)
class OnesFeed(SlotFeed):
    """The left operand: the first fractal of `l1`, the same for all fractals of pixels."""

    l1: isa.Buffer

    def fill(self, slot: isa.Tile, k_at: isa.Affine, depth: int) -> None:
        """Load one fractal `side` times."""
        sizes = (self.side, isa.FRACTAL * isa.c0_of(self.l1.dtype))
        # A stride of 0 repeats the fractal.
        self.k.load2d(slot.region(0, sizes), self.l1.region(0, sizes, (0, 1)))


@dataclass(frozen=True, slots=True)
class CubeBias:
    """The bias of a core's output blocks in L1, `n_own` of each of its bundles of groups.

    MTE1 learns from `queue` that it has arrived, or else from what MTE2 copies after it.
    """

    k: isa.KernelBuilder
    numbers: isa.Buffer
    l1: isa.Buffer
    shape: ConvShape
    n_own: int
    queue: isa.Queue | None = None

    @classmethod
    def make(
        cls,
        k: isa.KernelBuilder,
        name: str,
        shape: ConvShape,
        n_own: int,
        *,
        has_queue: bool = False,
    ) -> "CubeBias":
        """Declare the tensor `name` and allocate L1, as a queue or as a plain buffer."""
        fractal = isa.FRACTAL * isa.c0_of(shape.dtype)
        most_blocks = bundles_of(shape).count * n_own
        numbers = k.tensor(name, shape.dtype, (1 + shape.blocks[1]) * fractal)
        buffer_args = f"{name}_l1", "L1", shape.dtype, (1 + most_blocks) * fractal
        if not has_queue:
            return cls(k, numbers, k.buffer(*buffer_args), shape, n_own)
        queue = k.queue(*buffer_args, src="MTE2", dst="MTE1", depth=1)
        return cls(k, numbers, queue.buffer, shape, n_own, queue)

    def load(self, full: int, tail: bool, first: isa.Affine, col: isa.Affine) -> None:
        """Copy the ones and the bias to L1: of `full` bundles, and of the short last one if `tail`.

        `first` is the core's first bundle, `col` its first output block in each.
        """
        bundle = bundles_of(self.shape)
        n_own = self.n_own
        fractal = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        if self.queue:
            self.queue.alloc()
        self.k.copy(self.l1.region(0, fractal), self.numbers.region(0, fractal))
        tail_blocks = bundle.last_n1 if full else n_own
        tail_part = (isa.Affine(bundle.count - 1), int(tail), tail_blocks, n_own * full)
        for index, count, blocks, l1_block in ((first, full, n_own, 0), tail_part):
            if count:
                sizes = (count, blocks * fractal)
                start = (1 + index * bundle.n1 + col) * fractal
                source = self.numbers.region(start, sizes, (bundle.n1 * fractal, 1))
                target = self.l1.region((1 + l1_block) * fractal, sizes, (n_own * fractal, 1))
                self.k.copy(target, source)
        if self.queue:  # the bias never moves: the queue only signals that it has arrived
            self.queue.enqueue()
            self.queue.dequeue()
            self.queue.free()

    def blocks(self, n: Span) -> isa.Region:
        """Return the region of L1 with blocks `n` (index, count); the ones come before block 0."""
        fractal = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        return self.l1.region((n[0] + 1) * fractal, (n[1], fractal))

    def add(
        self,
        c: isa.Tile,
        feeds: tuple[isa.Queue, isa.Queue],
        m: int,
        n: Span,
        l0b_bias: Feed | None = None,
    ) -> None:
        """Begin sums of `m` fractals of pixels with the bias of blocks `n` (index in L1, count).

        `l0b_bias` is the bias in L0B, if it stays there.
        """
        fractal = isa.FRACTAL * isa.c0_of(self.shape.dtype)
        ones = OnesFeed(self.k, feeds[0], m, self.l1)
        # The ones are the first fractal, so block 0 is the second.
        bias = l0b_bias or OrderedFeed(self.k, feeds[1], n[1], self.l1, (n[0] + 1) * fractal)
        multiply(self.k, Sums(sums_region(c, m, n[1])), ones, bias, (isa.Affine(), 1))
