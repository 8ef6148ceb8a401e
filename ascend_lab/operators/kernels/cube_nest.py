"""The innermost loop of a product on the cube: tiles of A and of B meet in L0.

    for each tile of k:
        L0A <- a tile of A, by its feed
        L0B <- a tile of B, by its feed
        L0C += L0A @ L0B                            (mmad)

A product and a convolution differ in their feeds only. The rows of a matrix come to L0A by load2d,
the windows of an image by load3d; weights come to L0B tile by tile, or stay there.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    Buffer,
    KernelBuilder,
    Queue,
    Region,
    Tile,
    c0_of,
)
from ascend_lab.operators.kernels.tiles import Fractals, feed_a, feed_b, segments


class Feed(Protocol):
    """Where tiles of an operand of a product come from."""

    def load(self, k_at: Affine, depth: int) -> None:
        """Bring `depth` fractals of k, from `k_at` on, to L0."""

    def take(self, k_at: Affine, depth: int) -> Region:
        """Return them as mmad reads them: (M1, K1, 16, C0) of A, (K1, N1, 16, C0) of B."""
        raise NotImplementedError

    def free(self) -> None:
        """Give their slot back, since the cube has read it."""


@dataclass(frozen=True, slots=True)
class SlotFeed(ABC):
    """A feed whose tiles take turns in the slots of a queue; `side` is m or n in fractals."""

    k: KernelBuilder
    queue: Queue
    side: int

    def load(self, k_at: Affine, depth: int) -> None:
        """Fill the next slot."""
        self.fill(self.queue.alloc(), k_at, depth)
        self.queue.enqueue()

    def take(self, k_at: Affine, depth: int) -> Region:
        """Wait for the slot."""
        c0 = c0_of(self.queue.buffer.dtype)
        is_left = self.queue.buffer.space == "L0A"
        sides = (self.side, depth) if is_left else (depth, self.side)
        return self.queue.dequeue().region(0, (*sides, FRACTAL, c0))

    def free(self) -> None:
        """Give the slot back."""
        self.queue.free()

    @abstractmethod
    def fill(self, slot: Tile, k_at: Affine, depth: int) -> None:
        """Write the instructions that fill a slot."""


@dataclass(frozen=True, slots=True)
class MatrixFeed(SlotFeed):
    """A or B of a product, as rows of fractals in L1 or in GM."""

    source: Fractals

    def fill(self, slot: Tile, k_at: Affine, depth: int) -> None:
        """Load a row or a column of fractals an instruction."""
        feed = feed_a if self.queue.buffer.space == "L0A" else feed_b
        feed(self.k, slot, self.source.down(k_at), self.side, depth)


@dataclass(frozen=True, slots=True)
class OrderedFeed(SlotFeed):
    """B as fractals of L1 that already lie in the order of L0B, (depth, N1), from `start` on."""

    memory: Tile | Buffer
    start: Affine | int = 0

    def fill(self, slot: Tile, k_at: Affine, depth: int) -> None:
        """Copy neighbouring fractals by one load2d."""
        fractal = FRACTAL * c0_of(slot.buffer.dtype)
        sizes = (depth * self.side, fractal)
        source = self.memory.region(k_at * (self.side * fractal) + self.start, sizes)
        self.k.load2d(slot.region(0, sizes), source)


@dataclass(frozen=True, slots=True)
class ResidentFeed:
    """An operand that stays in L0B, (depth, N1) fractals from element `start` on."""

    tile: Tile
    n: int
    start: Affine | int = 0

    def load(self, k_at: Affine, depth: int) -> None:
        """Load nothing."""

    def take(self, k_at: Affine, depth: int) -> Region:
        """Return the fractals where they lie."""
        c0 = c0_of(self.tile.buffer.dtype)
        start = k_at * (self.n * FRACTAL * c0) + self.start
        return self.tile.region(start, (depth, self.n, FRACTAL, c0))

    def free(self) -> None:
        """Keep the slot for the next tile of A."""


@dataclass(frozen=True, slots=True)
class Sums:
    """A tile of L0C, (N1, M1, 16, 16), and how its first product is added.

    Where `depth_before` is 0 the first product overwrites the tile, with `bias` if there is one;
    later products, and the first one elsewhere, are added to what is in the tile.
    """

    region: Region
    depth_before: Affine | int = 0
    bias: Region | None = None


def sums_region(c: Tile, m: int, n: int, start: Affine | int = 0) -> Region:
    """Return the region of a tile of L0C with the sums of m x n fractals."""
    return c.region(start, (n, m, FRACTAL, FRACTAL))


def accumulate(
    k: KernelBuilder, sums: Sums, left: Feed, right: Feed, depth: int, tile_depth: int
) -> None:
    """Add the product of `depth` fractals of k, of which a tile of L0 holds `tile_depth`."""
    for k_at, size in segments(k, "k", depth, tile_depth):
        multiply(k, sums, left, right, (k_at, size))


def multiply(
    k: KernelBuilder, sums: Sums, left: Feed, right: Feed, k_tile: tuple[Affine, int]
) -> None:
    """Load one tile of A and of B to L0 and add their product."""
    left.load(*k_tile)
    right.load(*k_tile)
    a = left.take(*k_tile)
    b = right.take(*k_tile)
    # mmad overwrites the sums where the depth before this tile is 0, in the first turn of a loop.
    k.mmad(sums.region, a, b, accumulate=k_tile[0] + sums.depth_before, bias=sums.bias)
    left.free()
    right.free()
