"""One of the two convolutions of a tandem on a core: its weights, bias, sums and epilogue.

A tandem is a pointwise convolution and the depthwise one that reads it, in one kernel. Each of the
two is called a half. On a core they differ only in how weights lie and which channels a sum reads:

    pointwise    a sum over all input blocks: weights (input blocks, output blocks, 16, 16)
    depthwise    a sum over the taps of one block: weights (blocks, taps, 16, 16), diagonal fractals
"""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.fused.tandem_shape import AREA, SUMS, Job
from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    Buffer,
    KernelBuilder,
    Queue,
    Region,
    Tile,
    ceil_div,
)
from ascend_lab.operators.kernels import epilogue_emit, tiles
from ascend_lab.operators.kernels.conv_tiles import WindowFeed
from ascend_lab.operators.kernels.conv_windows import Window
from ascend_lab.operators.kernels.epilogue import PLAIN
from ascend_lab.operators.kernels.epilogue_plan import CubeBias
from ascend_lab.operators.kernels.tiles import ResidentFeed, Sums, accumulate, sums_region


class Half:
    """One of the two convolutions on a core: weights, bias, epilogue.

    is_depthwise       each channel block is read alone; a block has one diagonal fractal a tap
    sum_depth          depth of a sum in fractals: taps, times input blocks if pointwise
    weight_fractals    fractals of the weights of a unit, and of its bias behind them
    weights_l0b        the queue of these weights in L0B, which the program allocates
    """

    def __init__(
        self,
        k: KernelBuilder,
        job: Job,
        channels: tuple[int, int],
        tile: int,
        stored: int,
        shares: int,
    ) -> None:
        """Allocate weights, bias and the buffers of the epilogue.

        `channels` are the channel blocks of the core and of a unit, `tile` fractals of pixels,
        `stored` the elements of the result. The half may take 1 / `shares` of what is free in UB.
        """
        (shape, epilogue) = job
        (count, blocks) = channels
        self.k = k
        self.shape = shape
        self.count = count
        self.blocks = blocks
        self.weights_l0b: Queue
        self.is_depthwise = shares > 1
        self.prefix = "depth_" if self.is_depthwise else ""
        self.sum_depth = shape.taps * (1 if self.is_depthwise else shape.blocks[0])
        self.weight = k.tensor(
            f"{self.prefix}weight", "fp16", self.sum_depth * shape.blocks[1] * AREA
        )
        bias = epilogue.bias if epilogue else ""
        self.bias: CubeBias | None = None
        self.weight_fractals = self.sum_depth * blocks
        if bias:
            # the bias is one more fractal of depth
            self.weight_fractals += blocks
            self.bias = CubeBias.make(k, bias, shape, 1 if self.is_depthwise else count)
        sizes = epilogue_emit.Sizes(tile, blocks, count, shape.blocks[1], stored)
        share_of_ub = replace(sizes, prefix=self.prefix, shares=shares, taken=k.used_bytes("UB"))
        finish = epilogue_emit.new_finish(k, epilogue or PLAIN, SUMS, share_of_ub)
        assert finish is not None
        self.finish = finish

    def load_bias(self, col: Affine) -> None:
        """Load the bias of the core's blocks, which begin at `col`, to L1."""
        if self.bias and self.is_depthwise:
            self.bias.load(self.count, False, col, Affine())
        elif self.bias:
            self.bias.load(1, False, Affine(), col)

    def weights(self, first_block: Affine) -> Region:
        """Return the weights in GM of a unit's blocks from `first_block` on."""
        # block 3 begins behind 3 fractals of 256 numbers: at 768, times the taps if depthwise
        start = first_block * AREA
        size = self.blocks * AREA
        n1 = self.shape.blocks[1]
        # depthwise: the taps of a block are one run; pointwise: a run in each row of fractals
        if self.is_depthwise:
            return self.weight.region(start * self.sum_depth, (1, self.sum_depth * size))
        return self.weight.region(start, (self.sum_depth, size), (n1 * AREA, 1))

    def add(
        self,
        acc: Queue,
        feed: tuple[Queue, Buffer | None],
        window: Window,
        view: Region,
        weights_l0b: Tile,
    ) -> None:
        """Emit the sums of a tile for all blocks of a unit, into a slot of `acc`.

        `feed` is the queue of L0A, and the ones there that a bias is multiplied by; `view` are the
        pixels in L1 that the window sees.
        """
        (left_queue, ones) = feed
        k = self.k
        m = window.fractals
        count = self.blocks
        sums_tile = acc.alloc()
        # how often L0A is filled for one tile
        load_count = ceil_div(self.sum_depth, left_queue.buffer.elements // (m * AREA))
        # 10 fractals deep where 8 fit L0A: two loads of 5, not of 8 and 2
        tile_depth = ceil_div(self.sum_depth, load_count)
        blocks_at_once = 1 if self.is_depthwise else count
        depth_blocks = 1 if self.is_depthwise else self.shape.blocks[0]
        with tiles.repeat(k, "block", count if self.is_depthwise else 1) as j:
            block_view = replace(view, offset=view.offset + j * view.strides[0])
            x = WindowFeed(k, left_queue, m, self.shape, window, block_view)
            weights = ResidentFeed(weights_l0b, blocks_at_once, j * (self.sum_depth * AREA))
            sums = Sums(sums_region(sums_tile, m, blocks_at_once, j * (m * AREA)))
            accumulate(k, sums, x, weights, depth_blocks * self.shape.taps, tile_depth)
        # bias: a product one fractal deep, ones (pixels, 16) @ (16, channels), the bias in a row
        if self.bias and ones:
            a = ones.region(0, (m, 1, FRACTAL, FRACTAL))
            b = weights_l0b.region(self.sum_depth * count * AREA, (1, count, FRACTAL, FRACTAL))
            k.mmad(sums_tile.region(0, (count, m, FRACTAL, FRACTAL)), a, b, accumulate=1)
        acc.enqueue()
