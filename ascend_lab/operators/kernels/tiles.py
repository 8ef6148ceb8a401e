"""Steps the matrix product and the convolution share: tails, L0 loads, draining L0C."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
    up,
)

Span = tuple[Affine, int]
"""(start, size) of a stretch along one axis."""


def chunks(total: int, tile: int, cores: int) -> list[int]:
    """Sizes in fractals per core: whole tiles, equal except for the last core."""
    each = up(up(total, tile), cores) * tile
    return [min(each, total - i * each) for i in range(cores) if total > i * each]


def by_size(chunks: list[int]) -> dict[int, list[int]]:
    """Group the positions of equal chunks."""
    groups: dict[int, list[int]] = {}
    for index, size in enumerate(chunks):
        groups.setdefault(size, []).append(index)
    return groups


def segments(
    builder: KernelBuilder, name: str, total: int, tile: int
) -> Iterator[tuple[Affine, int]]:
    """Yield (start, size) for a loop over full tiles, then once for the tail."""
    full = total // tile
    if full:
        with builder.loop(name, full) as index:
            yield index * tile, tile
    if total % tile:
        yield Affine(full * tile), total % tile


def sum_queue(
    builder: KernelBuilder, name: str, dtype: str, tile_m: int, tile_n: int, slots: int = 0
) -> Queue:
    """Allocate L0C for tiles of sums, drained by V or by the fix pipe; 0 slots: two if they fit."""
    size = tile_m * tile_n * 256
    two = 2 * size * chip.DTYPE_BYTES[dtype] <= builder.chip.buffers["L0C"]
    drain = "V" if builder.chip.combined else "FIX"
    depth = slots or 1 + two
    return builder.queue(name, "L0C", dtype, size, src="M", dst=drain, depth=depth)


def out_queue(builder: KernelBuilder, dtype: str, tile_m: int, tile_n: int) -> Queue:
    """Allocate UB slots for draining C by as many 16-wide columns as fit twice."""
    column = tile_m * 256 * chip.DTYPE_BYTES[dtype]
    columns = max(1, min(tile_n, builder.chip.buffers["UB"] // (2 * column)))
    return builder.queue("c_ub", "UB", dtype, columns * tile_m * 256, src="V", dst="MTE3")


@dataclass(frozen=True, slots=True)
class Fractals:
    """Rows of fractals, one per C0 of k: from `start` on, `pitch` elements from row to row."""

    memory: Tile | Buffer
    start: Affine
    pitch: int

    def down(self, rows: Affine) -> "Fractals":
        """Return the fractals `rows` rows further."""
        return replace(self, start=self.start + rows * self.pitch)


def load_a(k: KernelBuilder, dst: Tile, src: Tile, m: int, depth: int) -> None:
    """(K1, M1) fractals of L1 to (M1, K1) of L0A."""
    feed_a(k, dst, Fractals(src, Affine(), m * FRACTAL * c0_of(src.buffer.dtype)), m, depth)


def feed_a(k: KernelBuilder, dst: Tile, src: Fractals, m: int, depth: int) -> None:
    """(K1, M1) fractals of L1 or GM to (M1, K1) of L0A: a load2d per row or column of fractals."""
    area = FRACTAL * c0_of(dst.buffer.dtype)
    memory = src.memory
    start = src.start
    if depth <= m:
        with repeat(k, "fractal", depth) as i:
            to = dst.region(i * area, (m, area), (depth * area, 1))
            k.load2d(to, memory.region(start + i * src.pitch, (m, area)))
        return
    with repeat(k, "fractal", m) as i:
        to = dst.region(i * (depth * area), (depth, area))
        k.load2d(to, memory.region(start + i * area, (depth, area), (src.pitch, 1)))


def feed_b(k: KernelBuilder, dst: Tile, src: Fractals, n: int, depth: int) -> None:
    """(K1, N1) fractals of L1 or GM to the same order in L0B: a load2d per row of fractals."""
    area = FRACTAL * c0_of(dst.buffer.dtype)
    with repeat(k, "fractal", depth) as i:
        to = dst.region(i * (n * area), (n, area))
        k.load2d(to, src.memory.region(src.start + i * src.pitch, (n, area)))


@contextmanager
def repeat(k: KernelBuilder, name: str, count: int) -> Iterator[Affine]:
    """A loop, or its body alone where it runs once."""
    if count == 1:
        yield Affine()
        return
    with k.loop(name, count) as index:
        yield index


def store_tile(
    k: KernelBuilder,
    acc: Queue,
    out: Queue | None,
    tensor: Buffer,
    sizes: tuple[int, int],
    start: Affine,
    pitch: int,
) -> None:
    """Move a finished (N1, M1) tile of L0C to GM at `start`; `pitch` fractals a column."""
    m, n = sizes
    c = acc.dequeue()
    if out is None:
        to = tensor.region(start, (n, m * 256), (pitch * 256, 1))
        k.fixpipe(to, c.region(0, to.sizes))
        acc.free()
        return
    columns = out.buffer.elements // (m * 256)
    for at, size in segments(k, "column", n, min(columns, n)):
        k.copy(out.alloc().region(0, size * m * 256), c.region(at * (m * 256), size * m * 256))
        out.enqueue()
        held = out.dequeue()
        to = tensor.region(start + at * (pitch * 256), (size, m * 256), (pitch * 256, 1))
        k.copy(to, held.region(0, to.sizes))
        out.free()
    acc.free()


@dataclass(frozen=True, slots=True)
class Area:
    """Where a tile of `blocks` output blocks lies in GM, in `pieces` of neighbouring pixels.

    A piece is (first pixel in the tile, its place in the plane, pixels); the first block begins at
    element `base`. `plane` pixels lie from block to block, `step` from one to the next. A block of
    the tile is `fractals` high in L0C, its first `pixels` rows are wanted. Blocks have `width`
    channels: 16, or 32 where bytes are among the tiles.
    """

    base: Affine
    pieces: tuple[tuple[int, Affine, int], ...]
    blocks: int
    plane: int
    step: int
    fractals: int
    pixels: int
    width: int = FRACTAL

    def lines(self, *, alone: bool) -> Iterator[tuple[int, Affine, int, int, tuple[int, int]]]:
        """Yield pieces, (pixel in the tile, place, pixels), and how many such follow, how far off.

        Pieces of one length that lie evenly are one copy, in place of blocks, unless `alone`.
        """
        at = 0
        while at < len(self.pieces):
            done, start, length = self.pieces[at]
            count = 1
            apart = (0, 0)
            while not alone and at + count < len(self.pieces):
                there, place, size = self.pieces[at + count]
                last = self.pieces[at + count - 1]
                step = there - last[0], place.const - last[1].const
                if size != length or place.terms != start.terms or (count > 1 and step != apart):
                    break
                count = count + 1
                apart = step
            yield done, start, length, count, apart
            at += count

    def pairs(
        self, tensor: Buffer | Tile | isa.RingTile, tile: Tile, run: int, at: Affine, count: int
    ) -> Iterator[tuple[Region, Region]]:
        """Yield (region of the tensor, of the tile) for blocks at .. at+count-1, `run` apart.

        A tile with 32 channels a block takes two blocks of a tensor that has 16, as floats do.
        """
        first = self.base + at * (self.plane * self.width)
        apart = self.plane * FRACTAL
        halves = isinstance(tensor, Buffer) and self.width > FRACTAL and tensor.itemsize > 1
        for done, start, length, rows, (here, far) in self.lines(alone=count > 1):
            sizes: tuple[int, ...] = (count, length, self.width)
            own: tuple[int, ...] = (run, self.width, 1)
            strides: tuple[int, ...] = (self.plane * self.width, self.step * self.width, 1)
            if rows > 1:
                sizes = (rows, *sizes[1:])
                own = (here * self.width, *own[1:])
                strides = (far * self.width, *strides[1:])
            if halves:
                sizes = (count, length, 2, FRACTAL)
                own = (run, self.width, FRACTAL, 1)
                strides = (2 * apart, self.step * FRACTAL, apart, 1)
            there = tensor.region(
                first + start * (FRACTAL if halves else self.width), sizes, strides
            )
            yield there, tile.region(done * self.width, sizes, own)


def store_area(
    k: KernelBuilder,
    acc: Queue,
    out: Queue | None,
    tensor: Tile | Buffer,
    area: Area,
    relu: bool = False,
    scale: float = 1.0,
) -> None:
    """Move a tile's pixels from L0C to GM; `relu`, `scale`: of the fix pipe."""
    c = acc.dequeue()
    n = area.blocks
    size = area.fractals * FRACTAL * FRACTAL
    if out is None:
        for to, source in area.pairs(tensor, c, size, Affine(), n):
            k.fixpipe(to, source, relu=relu, scale=scale)
        acc.free()
        return
    for first, columns in segments(k, "column", n, min(out.buffer.elements // size, n)):
        k.copy(out.alloc().region(0, columns * size), c.region(first * size, columns * size))
        out.enqueue()
        for to, source in area.pairs(tensor, out.dequeue(), size, first, columns):
            k.copy(to, source)
        out.free()
    acc.free()
