"""One of the two convolutions of a tandem on a core: its weights, its bias, products of a tile."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.isa import Affine, Buffer, KernelBuilder, Queue, Region, Tile
from ascend_lab.kernels.conv_stage import CubeBias, Feeds, add_products
from ascend_lab.kernels.conv_windows import BundleShare, Window
from ascend_lab.kernels.epilogue_emit import Sizes, new_finish
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.tandem_shape import PLAIN, SUMS, Job
from ascend_lab.kernels.tiles import repeat

AREA = FRACTAL * FRACTAL


class Half:
    """One of the two convolutions on a core: weights, bias, its way out of L0C."""

    def __init__(
        self,
        k: KernelBuilder,
        job: Job,
        own: tuple[int, int],
        tile: int,
        stored: int,
        shares: int,
    ) -> None:
        """Allocate; `own` are channel blocks of the core, and those of them that go together.

        The second half reads each block alone, and takes one of two `shares` of what is left of UB
        at most.
        """
        (shape, epilogue), (count, blocks) = job, own
        self.k, self.shape, self.count, self.blocks = k, shape, count, blocks
        self.near: Queue
        self.single = shares > 1
        self.prefix = "depth_" if self.single else ""
        self.deep = shape.taps * (1 if self.single else shape.blocks[0])
        self.weight = k.tensor(f"{self.prefix}weight", "fp16", self.deep * shape.blocks[1] * AREA)
        bias = epilogue.bias if epilogue else ""
        self.fractals = (self.deep + bool(bias)) * blocks
        self.bias = CubeBias.make(k, bias, shape, 1 if self.single else count) if bias else None
        whole, taken = (count, shape.blocks[1], stored), k.used_bytes("UB")
        sizes = Sizes(tile, blocks, *whole, self.prefix, shares, taken)
        finish = new_finish(k, epilogue or PLAIN, SUMS, sizes)
        assert finish is not None
        self.finish = finish

    def load_bias(self, col: Affine) -> None:
        """Bring the bias of the core's blocks, which begin at `col`, to L1."""
        if self.bias and self.single:
            self.bias.load(BundleShare(self.count, False, 1, 1, 0), col, Affine())
        elif self.bias:
            self.bias.load(BundleShare(1, False, self.count, 1, 0), Affine(), col)

    def weights(self, first: Affine) -> Region:
        """Return the weights of the blocks from `first` on."""
        start, size, n1 = first * AREA, self.blocks * AREA, self.shape.blocks[1]
        if self.single:
            return self.weight.region(start * self.deep, (1, self.deep * size))
        return self.weight.region(start, (self.deep, size), (n1 * AREA, 1))

    def add(
        self,
        acc: Queue,
        feed: tuple[Queue, Buffer | None],
        window: Window,
        view: Region,
        near: Tile,
    ) -> None:
        """Sum up a tile of all blocks of a unit; `feed`: what L0A takes, and ones for the bias."""
        (left, ones), k, m, count, c = feed, self.k, window.fractals, self.blocks, acc.alloc()
        loads = up(self.deep, left.buffer.elements // (m * AREA))
        feeds = Feeds(left, left, up(self.deep, loads))  # all as deep, about
        wide, units = (1, 1) if self.single else (count, self.shape.blocks[0])
        sizes = wide, Affine(), units
        with repeat(k, "block", count if self.single else 1) as j:
            one = replace(view, offset=view.offset + j * view.strides[0])
            starts = j * (self.deep * AREA), j * (m * AREA)
            add_products(k, self.shape, feeds, c, window, one, (None, near), sizes, None, starts)
        if self.bias and ones:
            a = ones.region(0, (m, 1, FRACTAL, FRACTAL))
            b = near.region(self.deep * count * AREA, (1, count, FRACTAL, FRACTAL))
            k.mmad(c.region(0, (count, m, FRACTAL, FRACTAL)), a, b, accumulate=1)
        acc.enqueue()
