"""The cube's part of FlashAttention: V turned on its way to L0B, products of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.isa import Affine, KernelBuilder, Queue, Region, Tile
from ascend_lab.kernels.flash_shape import AREA
from ascend_lab.kernels.gemm_schedule import FRACTAL
from ascend_lab.kernels.tiles import load_a, repeat

Sizes = tuple[int, int, int]
"""(m, k, n) of a product, in fractals."""


def load_turned(k: KernelBuilder, dst: Tile, src: Tile, width: int, keys: int) -> None:
    """Emit V (width, keys) fractals of L1 to (keys, width) of L0B, each fractal transposed."""
    sizes, strides = (width, FRACTAL, FRACTAL), (keys * AREA, 1, FRACTAL)
    with repeat(k, "fractal", keys) as i:
        k.load2d(dst.region(i * (width * AREA), sizes), src.region(i * AREA, sizes, strides))


def multiply(
    k: KernelBuilder, c: Tile, a: Tile, b: Tile, sizes: Sizes, accumulate: Affine | int = 0
) -> None:
    """Emit c = a b, or c += a b where `accumulate` is not 0."""
    m, depth, n = sizes
    k.mmad(
        c.region(0, (n, m, FRACTAL, FRACTAL)),
        a.region(0, (m, depth, FRACTAL, FRACTAL)),
        b.region(0, (depth, n, FRACTAL, FRACTAL)),
        accumulate=accumulate,
    )


@dataclass(frozen=True, slots=True)
class CubeQueues:
    """Two slots of everything a cube core needs: both operands in L1 and L0, sums in L0C."""

    left: Queue
    right: Queue
    a: Queue
    b: Queue
    c: Queue

    @classmethod
    def make(cls, k: KernelBuilder, left: int, right: int, sums: int) -> CubeQueues:
        """Allocate slots of these sizes in fractals."""
        return cls(
            k.queue("left_l1", "L1", "fp16", left * AREA, src="MTE2", dst="MTE1"),
            k.queue("right_l1", "L1", "fp16", right * AREA, src="MTE2", dst="MTE1"),
            k.queue("a_l0", "L0A", "fp16", left * AREA, src="MTE1", dst="M"),
            k.queue("b_l0", "L0B", "fp16", right * AREA, src="MTE1", dst="M"),
            k.queue("c_l0", "L0C", "fp32", sums * AREA, src="M", dst="FIX"),
        )

    def load_left(self, k: KernelBuilder, src: Region, m: int, depth: int) -> None:
        """Bring a left operand (depth, m) from GM through L1 to L0A."""
        k.copy(self.left.alloc().region(0, src.sizes), src)
        self.left.enqueue()
        load_a(k, self.a.alloc(), self.left.dequeue(), m, depth, Affine())
        self.left.free()
        self.a.enqueue()

    def load_right(self, k: KernelBuilder, src: Region, *, turned: int = 0) -> None:
        """Bring a right operand from GM through L1 to L0B, `turned` if it has that many keys."""
        k.copy(self.right.alloc().region(0, src.sizes), src)
        self.right.enqueue()
        tile, to = self.right.dequeue(), self.b.alloc()
        if turned:
            load_turned(k, to, tile, src.sizes[0], turned)
        else:
            fractals = (src.elements // AREA, AREA)
            k.load2d(to.region(0, fractals), tile.region(0, fractals))
        self.right.free()
        self.b.enqueue()

    def drain(self, k: KernelBuilder, to: Region, scale: float = 1.0) -> None:
        """Move the finished sums to GM through the fix pipe."""
        self.c.enqueue()
        k.fixpipe(to, self.c.dequeue().region(0, to.sizes), scale=scale)
        self.c.free()
