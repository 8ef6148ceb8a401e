"""The parts that all products on the cube share: loops, loads to L0, mmad, stores from L0C.

The innermost loop of a product is the same for all (`accumulate`):

    for each tile of k:
        L0A <- a tile of A
        L0B <- a tile of B
        L0C += L0A @ L0B                            (mmad)

Products differ in how a tile is loaded to L0. A `Feed` is an object that does this for one operand:
a matrix is loaded by load2d, the windows of an image by load3d; weights are loaded tile by tile, or
stay in L0B.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ascend_lab.machine import chip, isa
from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    Buffer,
    KernelBuilder,
    Queue,
    Region,
    Tile,
    c0_of,
    ceil_div,
)
from ascend_lab.operators.kernels.epilogue import UNCHANGED, Fix

Span = tuple[Affine, int]
"""(start, size) of an interval along one axis."""


def chunks(total: int, tile: int, cores: int) -> list[int]:
    """Return the fractals of each core: whole tiles, equally many except for the last core.

    10 fractals in tiles of 2 on 3 cores are 5 tiles, two a core: sizes 4, 4 and 2. Cores that
    would get nothing are left out.
    """
    # Whole tiles a core, rounded up: only the last core gets fewer.
    core_size = ceil_div(ceil_div(total, tile), cores) * tile
    return [min(core_size, total - i * core_size) for i in range(cores) if total > i * core_size]


def by_size(sizes: list[int]) -> dict[int, list[int]]:
    """Return the positions of each size: [4, 4, 2] gives {4: [0, 1], 2: [2]}."""
    groups: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        groups.setdefault(size, []).append(index)
    return groups


def segments(
    builder: KernelBuilder, name: str, total: int, tile: int
) -> Iterator[tuple[Affine, int]]:
    """Yield (start, size) for a loop over full tiles, then once for the tail."""
    # 10 in tiles of 4: a loop of 2 turns yields (4 i, 4), then the tail is (8, 2).
    tile_count = total // tile
    if tile_count:
        with builder.loop(name, tile_count) as index:
            yield index * tile, tile
    if total % tile:
        yield Affine(tile_count * tile), total % tile


def sum_queue(
    builder: KernelBuilder, name: str, dtype: str, tile_m: int, tile_n: int, slots: int = 0
) -> Queue:
    """Allocate slots of L0C for tiles of sums; with `slots` 0 there are two if two fit, else one.

    The vector unit drains them where the chip joins cube and vector unit in one core, else the
    fix pipe does.
    """
    # 256 = a fractal of 16 x 16 sums; two tiles let the cube begin one while the other is drained.
    size = tile_m * tile_n * 256
    two_fit = 2 * size * chip.DTYPE_BYTES[dtype] <= builder.chip.buffers["L0C"]
    drain_pipe = "V" if builder.chip.combined else "FIX"
    most_slots = 2 if two_fit else 1
    depth = slots or most_slots
    return builder.queue(name, "L0C", dtype, size, src="M", dst=drain_pipe, depth=depth)


def out_queue(builder: KernelBuilder, dtype: str, tile_m: int, tile_n: int) -> Queue:
    """Allocate two slots of UB through which C is stored: as many 16-wide columns as fit twice."""
    # A column of fp32 sums of 8 fractals is 8 * 1024 bytes.
    column_bytes = tile_m * 256 * chip.DTYPE_BYTES[dtype]
    columns = max(1, min(tile_n, builder.chip.buffers["UB"] // (2 * column_bytes)))
    return builder.queue("c_ub", "UB", dtype, columns * tile_m * 256, src="V", dst="MTE3")


@dataclass(frozen=True, slots=True)
class Fractals:
    """An operand as rows of fractals, one row for each C0 of k.

    The first row begins at element `start` of `memory`, the next one `pitch` elements further.
    """

    memory: Tile | Buffer
    start: Affine
    pitch: int

    def from_row(self, rows: Affine) -> "Fractals":
        """Return the fractals without the first `rows` rows."""
        return replace(self, start=self.start + rows * self.pitch)


def load_a(k: KernelBuilder, dst: Tile, src: Tile, m: int, depth: int) -> None:
    """Copy (K1, M1) fractals of L1 to L0A, where they lie as (M1, K1)."""
    feed_a(k, dst, Fractals(src, Affine(), m * FRACTAL * c0_of(src.buffer.dtype)), m, depth)


def feed_a(k: KernelBuilder, dst: Tile, src: Fractals, m: int, depth: int) -> None:
    """Copy (K1, M1) fractals of L1 or GM to L0A as (M1, K1).

    It takes one load2d per row or per column of fractals, whichever are fewer.
    """
    area = FRACTAL * c0_of(dst.buffer.dtype)
    memory = src.memory
    start = src.start
    # In L0A the fractals of one row of A are side by side, in L1 those of one C0 of k. A load2d
    # can read or write with a stride, so it transposes one row or column at a time.
    if depth <= m:
        with repeat(k, "fractal", depth) as i:
            to = dst.region(i * area, (m, area), (depth * area, 1))
            k.load2d(to, memory.region(start + i * src.pitch, (m, area)))
        return
    with repeat(k, "fractal", m) as i:
        to = dst.region(i * (depth * area), (depth, area))
        k.load2d(to, memory.region(start + i * area, (depth, area), (src.pitch, 1)))


def feed_b(k: KernelBuilder, dst: Tile, src: Fractals, n: int, depth: int) -> None:
    """Copy (K1, N1) fractals of L1 or GM to L0B in the same order: a load2d per row of fractals."""
    area = FRACTAL * c0_of(dst.buffer.dtype)
    with repeat(k, "fractal", depth) as i:
        to = dst.region(i * (n * area), (n, area))
        k.load2d(to, src.memory.region(src.start + i * src.pitch, (n, area)))


@contextmanager
def repeat(k: KernelBuilder, name: str, count: int) -> Iterator[Affine]:
    """Open a loop of `count` turns and yield its counter; write no loop for a single turn."""
    if count == 1:
        yield Affine()
        return
    with k.loop(name, count) as index:
        yield index


CopyAxes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Sizes of a copy's axes, and their strides in a tile and in a tensor."""


class PieceGroup(NamedTuple):
    """Pieces of equal length at equal distances, which one copy moves.

    The first one begins at pixel `tile_pixel` of the tile and goes to `place` of the plane. The
    next one begins `tile_step` pixels further in the tile and `plane_step` further in the plane.
    """

    tile_pixel: int
    place: Affine
    pixels: int
    piece_count: int
    tile_step: int
    plane_step: int


@dataclass(frozen=True, slots=True)
class Area:
    """Where a tile of `blocks` output blocks lies in GM, in `pieces` of neighbouring pixels.

    A block is a plane of pixels of 16 channels each (`width`: 32 where an operand or the result is
    int8). A piece is (first pixel in the tile, its place in the plane, pixels). The first block
    begins at element `base`; the next block begins `plane` pixels further, the next pixel `step`
    pixels. In L0C a block of the tile is `fractals` high; only its first `pixels` rows are stored.
    """

    base: Affine
    pieces: tuple[tuple[int, Affine, int], ...]
    blocks: int
    plane: int
    step: int
    fractals: int
    pixels: int
    width: int = FRACTAL

    def in_whole_fractals(self) -> "Area":
        """Return the area of a tile in one piece, with the rows that pad its last fractal."""
        ((pixel, place, _),) = self.pieces
        pixels = self.fractals * FRACTAL
        return replace(self, pieces=((pixel, place, pixels),), pixels=pixels)

    def piece_groups(self, *, separate: bool) -> Iterator[PieceGroup]:
        """Yield the pieces in groups that one copy can move; with `separate` one by one.

        Output rows of 14 pixels in a plane with rows of 30 are one group: `tile_step` 14,
        `plane_step` 30. A copy has a fixed number of axes: one over several blocks has none left
        for pieces, which are separate then.
        """
        first = 0
        while first < len(self.pieces):
            first_pixel, first_place, pixels = self.pieces[first]
            count = 1
            distance = (0, 0)
            while not separate and first + count < len(self.pieces):
                previous_pixel, previous_place, _ = self.pieces[first + count - 1]
                next_pixel, next_place, next_pixels = self.pieces[first + count]
                next_distance = (
                    next_pixel - previous_pixel,
                    next_place.const - previous_place.const,
                )
                # Two pieces define the distance; from the third on it must be the same. Places that
                # depend on different loop counters (`terms`) have no constant distance.
                if (
                    next_pixels != pixels
                    or next_place.terms != first_place.terms
                    or (count > 1 and next_distance != distance)
                ):
                    break
                count += 1
                distance = next_distance
            yield PieceGroup(first_pixel, first_place, pixels, count, *distance)
            first += count

    def pairs(
        self, tensor: Buffer | Tile | isa.RingTile, tile: Tile, run: int, at: Affine, count: int
    ) -> Iterator[tuple[Region, Region]]:
        """Yield (region of the tensor, region of the tile) for blocks at .. at+count-1.

        Blocks lie `run` elements apart in the tile. A block of 32 channels in the tile is two
        blocks of 16 in a float tensor.
        """
        two_halves = isinstance(tensor, Buffer) and self.width > FRACTAL and tensor.itemsize > 1
        pixel_elements = FRACTAL if two_halves else self.width
        first_element = self.base + at * (self.plane * self.width)
        for group in self.piece_groups(separate=count > 1):
            axes_of = self._two_halves if two_halves else self._axes
            sizes, tile_strides, tensor_strides = axes_of(group, run, count)
            tensor_start = first_element + group.place * pixel_elements
            tensor_region = tensor.region(tensor_start, sizes, tensor_strides)
            yield tensor_region, tile.region(group.tile_pixel * self.width, sizes, tile_strides)

    def _axes(self, group: PieceGroup, run: int, count: int) -> CopyAxes:
        """Return the axes of a copy of `count` blocks, or of several pieces of one block."""
        pixel_step = self.step * self.width
        if group.piece_count > 1:
            # There is only one block here: the axis of pieces takes the place of that of blocks.
            sizes = (group.piece_count, group.pixels, self.width)
            tile_strides = (group.tile_step * self.width, self.width, 1)
            return sizes, tile_strides, (group.plane_step * self.width, pixel_step, 1)
        sizes = (count, group.pixels, self.width)
        return sizes, (run, self.width, 1), (self.plane * self.width, pixel_step, 1)

    def _two_halves(self, group: PieceGroup, run: int, count: int) -> CopyAxes:
        """Return the axes of a copy of blocks of 32 channels to or from blocks of 16.

        16 of a pixel's channels lie in one block of the tensor, 16 in the next.
        """
        half_block = self.plane * FRACTAL
        sizes = (count, group.pixels, 2, FRACTAL)
        tile_strides = (run, self.width, FRACTAL, 1)
        return sizes, tile_strides, (2 * half_block, self.step * FRACTAL, half_block, 1)


def store_area(
    k: KernelBuilder,
    acc: Queue,
    out: Queue | None,
    tensor: Tile | Buffer,
    area: Area,
    fix: Fix = UNCHANGED,
) -> None:
    """Move a tile's pixels from L0C to GM; the fix pipe, if any, applies `fix`."""
    c = acc.dequeue()
    # Sums of a block of 16 channels: 16 x 16 per fractal of pixels.
    block_elements = area.fractals * FRACTAL * FRACTAL
    if out is None:
        for target, source in area.pairs(tensor, c, block_elements, Affine(), area.blocks):
            k.fixpipe(target, source, relu=fix.relu, scale=fix.scale)
        acc.free()
        return
    # Sums cross UB some columns of fractals at a time, as many as a slot of `out` holds.
    slot_columns = min(out.buffer.elements // block_elements, area.blocks)
    for at, columns in segments(k, "column", area.blocks, slot_columns):
        elements = columns * block_elements
        k.copy(out.alloc().region(0, elements), c.region(at * block_elements, elements))
        out.enqueue()
        for target, source in area.pairs(tensor, out.dequeue(), block_elements, at, columns):
            k.copy(target, source)
        out.free()
    acc.free()


# -- the innermost loop of a product -------------------------------------------------------------
class Feed(Protocol):
    """The interface for loading tiles of one operand of a product to L0."""

    def load(self, k_at: Affine, depth: int) -> None:
        """Load `depth` fractals of k, from `k_at` on, to L0."""

    def take(self, k_at: Affine, depth: int) -> Region:
        """Return the loaded region as mmad reads it: (M1, K1, 16, C0) or (K1, N1, 16, C0)."""
        raise NotImplementedError

    def free(self) -> None:
        """Free the slot, since the cube has read it."""


@dataclass(frozen=True, slots=True)
class SlotFeed(ABC):
    """A feed that fills the slots of a queue in L0, one after another.

    `side` is the size of a tile in fractals along m (operand A) or n (operand B).
    """

    k: KernelBuilder
    queue: Queue
    side: int

    def load(self, k_at: Affine, depth: int) -> None:
        """Fill the next slot."""
        self.fill(self.queue.alloc(), k_at, depth)
        self.queue.enqueue()

    def take(self, k_at: Affine, depth: int) -> Region:
        """Wait for the slot and return its region."""
        c0 = c0_of(self.queue.buffer.dtype)
        is_left = self.queue.buffer.space == "L0A"
        sides = (self.side, depth) if is_left else (depth, self.side)
        return self.queue.dequeue().region(0, (*sides, FRACTAL, c0))

    def free(self) -> None:
        """Free the slot."""
        self.queue.free()

    @abstractmethod
    def fill(self, slot: Tile, k_at: Affine, depth: int) -> None:
        """Write the instructions that fill a slot."""


@dataclass(frozen=True, slots=True)
class MatrixFeed(SlotFeed):
    """A feed of A or B that lie as rows of fractals in L1 or in GM."""

    source: Fractals

    def fill(self, slot: Tile, k_at: Affine, depth: int) -> None:
        """Load one row or one column of fractals per instruction."""
        load_fractals = feed_a if self.queue.buffer.space == "L0A" else feed_b
        load_fractals(self.k, slot, self.source.from_row(k_at), self.side, depth)


@dataclass(frozen=True, slots=True)
class OrderedFeed(SlotFeed):
    """A feed of B from L1, where it already lies in the order of L0B, (depth, N1).

    It begins at element `start` of `memory`.
    """

    memory: Tile | Buffer
    start: Affine | int = 0

    def fill(self, slot: Tile, k_at: Affine, depth: int) -> None:
        """Copy neighbouring fractals by one load2d."""
        fractal = FRACTAL * c0_of(slot.buffer.dtype)
        # Fractals in the right order are one run of memory: 8 of depth x 4 of n are one
        # instruction.
        sizes = (depth * self.side, fractal)
        source = self.memory.region(k_at * (self.side * fractal) + self.start, sizes)
        self.k.load2d(slot.region(0, sizes), source)


@dataclass(frozen=True, slots=True)
class ResidentFeed:
    """A feed of an operand that stays in L0B: (depth, N1) fractals from element `start` on."""

    tile: Tile
    n: int
    start: Affine | int = 0

    def load(self, k_at: Affine, depth: int) -> None:
        """Load nothing."""

    def take(self, k_at: Affine, depth: int) -> Region:
        """Return the region of the fractals."""
        c0 = c0_of(self.tile.buffer.dtype)
        start = k_at * (self.n * FRACTAL * c0) + self.start
        return self.tile.region(start, (depth, self.n, FRACTAL, c0))

    def free(self) -> None:
        """Keep the slot for the next tile of A."""


@dataclass(frozen=True, slots=True)
class Sums:
    """A tile of L0C, (N1, M1, 16, 16), and how much of k is already summed in it.

    With `depth_before` 0 the first product overwrites the tile (plus `bias`, if there is one);
    otherwise it is added to what is in the tile, as later products are.
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
    """Add the product over `depth` fractals of k, in tiles of L0 with `tile_depth` of them."""
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
