"""Programs that move rows picked by an index: gather, and scatter that knows nothing of them.

On chips whose copies need whole 32-byte blocks a row that ends raggedly gets a second, overlapping
block; rows shorter than a block go element by element (`kernels.single_elements`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Program, Region, Tile
from ascend_lab.kernels.index_feed import BATCH, Feed, batches
from ascend_lab.kernels.move_writer import item_bytes


@dataclass(frozen=True, slots=True)
class Table:
    """A table of `rows` x `columns` elements of `dtype`, and how many rows an index picks."""

    rows: int
    columns: int
    picks: int
    dtype: str

    @property
    def block(self) -> int:
        """Elements of one 32-byte block."""
        return BLOCK_BYTES // item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Work:
    """One core's part: `picks` indices from `first` on, `width` columns from `column` on.

    `first_step` and `column_step` lead to the next core's part.
    """

    picks: int
    width: int
    first: int = 0
    column: int = 0
    first_step: int = 0
    column_step: int = 0


class RowWriter:
    """Builder, tensors and shapes shared by the programs that move rows."""

    def __init__(self, name: str, chip: Chip, table: Table, work: Work, cores: int) -> None:
        """Declare `index`, `x` or `u`, and `y`; take the widest tile of rows that fits UB."""
        self.k, self.chip, self.table, self.work = KernelBuilder(name, chip), chip, table, work
        core = self.k.param("core", cores)
        self.first = core * work.first_step + work.first
        self.column = core * work.column_step + work.column
        self.index = self.k.tensor("index", "int32", table.picks)
        size, block = item_bytes(table.dtype), table.block
        room = chip.buffers["UB"] // 2
        widest = room // (2 * 8 * size) // block * block - block
        self.chunk = min(work.width, widest)
        self.pitch = -(-self.chunk // block) * block
        rows = min(room // (2 * self.pitch * size), BATCH, -(-work.picks // 8) * 8)
        self.rows = rows // 8 * 8

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (first column, columns) of the pieces of a row that fit a tile."""
        start, width = 0, self.work.width
        while start < width:
            size = min(self.chunk, width - start)
            if 0 < width - start - size < self.table.block:
                size -= self.table.block
            yield start, size
            start += size

    def tiles(self, feed: Feed) -> Iterator[tuple[Affine, Affine, int]]:
        """Yield (first pick of a batch, first of a tile in it, picks) with the batch in UB."""
        for at, count in batches(self.k, "b", self.work.picks, BATCH // self.rows * self.rows):
            first = self.first + at
            feed.open(first, count)
            for inside, some in batches(self.k, "t", count, self.rows):
                yield first, Affine() + inside, some
            feed.close()

    def pieces(self, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield (column, size, place in UB) of the copies of a row of `width`."""
        block = self.table.block
        ragged = width % block
        if not ragged or not self.chip.combined:
            yield 0, width, 0
        else:
            yield 0, width - ragged, 0
            yield width - block, block, width - ragged

    def move_tile(
        self,
        tensor: Buffer,
        origin: Affine,
        tile: Tile,
        width: int,
        count: int,
        *,
        loads: bool,
    ) -> None:
        """Emit the copies of `count` whole rows between GM, where they are neighbours, and UB."""
        for piece, size, place in self.pieces(width):
            far = tensor.region(origin + piece, (count, size), (self.table.columns, 1))
            near = tile.region(place, (count, size), (self.pitch, 1))
            target, source = (near, far) if loads else (far, near)
            self.k.copy(target, source, pad=self.pads(size))

    def pads(self, size: int) -> bool:
        """Tell whether a copy of `size` columns ends inside a block."""
        return size % self.table.block != 0


def gather_program(chip: Chip, table: Table, work: Work, cores: int) -> Program:
    """y[i] = x[index[i]] for the picks and columns of `work`."""
    w = RowWriter("gather", chip, table, work, cores)
    k, columns = w.k, table.columns
    x = k.tensor("x", table.dtype, table.rows * columns)
    y = k.tensor("y", table.dtype, table.picks * columns)
    feed = Feed.make(k, w.index, "MTE2")
    q = k.queue("rows", "UB", table.dtype, w.rows * w.pitch, src="MTE2", dst="MTE3")
    for start, width in w.chunks():
        for first, at, count in w.tiles(feed):
            tile = q.alloc()
            with k.loop("r", count) as r:
                for piece, size, place in w.pieces(width):
                    source = x.region(w.column + (start + piece), size)
                    target, row = tile.region(r * w.pitch + place, size), feed.take(at + r)
                    k.copy_row(target, source, row, columns, table.rows, pad=w.pads(size))
            q.enqueue()
            goal = (first + at) * columns + w.column + start
            w.move_tile(y, goal, q.dequeue(), width, count, loads=False)
            q.free()
    return k.finish()


def scatter_program(
    chip: Chip, table: Table, work: Work, cores: int, *, mode: str, atomic: bool = False
) -> Program:
    """y[index[i]] = u[i] or += u[i], in the order of i, for the picks and columns of `work`.

    With `atomic` the memory adds. Otherwise "add" loads the row, adds, stores, and the next load
    waits for that: it may be the same row.
    """
    w = RowWriter(f"scatter_{mode}", chip, table, work, cores)
    k, columns, chain = w.k, table.columns, mode == "add" and not atomic
    u = k.tensor("u", table.dtype, table.picks * columns)
    y = k.tensor("y", table.dtype, table.rows * columns)
    feed = Feed.make(k, w.index, *(("MTE3", "MTE2") if chain else ("MTE3",)))
    drain = "V" if chain else "MTE3"
    q = k.queue("rows", "UB", table.dtype, w.rows * w.pitch, src="MTE2", dst=drain)
    adder = _Adder(w) if chain else None
    for start, width in w.chunks():
        for first, at, count in w.tiles(feed):
            origin = (first + at) * columns + w.column + start
            w.move_tile(u, origin, q.alloc(), width, count, loads=True)
            q.enqueue()
            tile = q.dequeue()
            with k.loop("r", count) as r:
                parts = [
                    (y.region(w.column + (start + piece), size), r * w.pitch + place, place)
                    for piece, size, place in w.pieces(width)
                ]
                if adder is not None:
                    adder.add(feed.take(at + r), parts, tile)
                else:
                    _store_row(w, feed.take(at + r), parts, tile, "add" if atomic else None)
            q.free()
    return k.finish()


Parts = list[tuple[Region, Affine, int]]
"""Pieces of one row: the place in y, in the tile of updates, and in a row of UB."""


def _store_row(w: RowWriter, row: Region, parts: Parts, tile: Tile, atomic: str | None) -> None:
    """Emit y[row] = (or +=, by the memory) a row of the tile."""
    table = w.table
    for target, at, _ in parts:
        size = target.elements
        source, pad = tile.region(at, size), w.pads(size)
        w.k.copy_row(target, source, row, table.columns, table.rows, pad=pad, atomic=atomic)


class _Adder:
    """Load a row of y, add a row of the tile, store it; the next row waits for the store."""

    def __init__(self, w: RowWriter) -> None:
        self.w, dtype, k = w, w.table.dtype, w.k
        pitch = w.pitch + w.table.block
        self.old = k.queue("old", "UB", dtype, pitch, src="MTE2", dst="V", depth=1)
        self.sum = k.queue("sum", "UB", dtype, pitch, src="V", dst="MTE3", depth=1)
        self.turn = k.queue("turn", "UB", dtype, 1, src="MTE2", dst="MTE3", depth=1)

    def add(self, row: Region, parts: Parts, tile: Tile) -> None:
        """Emit y row += tile row; parts are (place in y, place in the tile, place in a row)."""
        w, k, table = self.w, self.w.k, self.w.table
        self.turn.alloc()
        old = self.old.alloc()
        for source, _, place in parts:
            size = source.elements
            target = old.region(place, size)
            k.copy_row(target, source, row, table.columns, table.rows, pad=w.pads(size))
        self.old.enqueue()
        self.turn.enqueue()
        old, new = self.old.dequeue(), self.sum.alloc()
        for source, at, place in parts:
            add_row(k, new, place, old, tile, at, source.elements)
        self.old.free()
        self.sum.enqueue()
        new = self.sum.dequeue()
        self.turn.dequeue()
        for target, _, place in parts:
            size = target.elements
            source = new.region(place, size)
            k.copy_row(target, source, row, table.columns, table.rows, pad=w.pads(size))
        self.sum.free()
        self.turn.free()


def add_row(
    k: KernelBuilder, out: Tile, place: int, one: Tile, two: Tile, at: Affine | int, size: int
) -> None:
    """Emit out[place:] = one[place:] + two[at:], `size` elements, as repeats and a rest."""
    lanes = k.chip.vector_bytes_per_repeat // out.buffer.itemsize
    repeats, rest = divmod(size, lanes)
    done = 0
    for count, width in ((repeats, lanes), (1, rest)):
        if not count or not width:
            continue
        for first in range(0, count, k.chip.max_repeat):
            shape = (min(count - first, k.chip.max_repeat), width)
            step = done + first * width
            sources = one.region(place + step, shape), two.region(at + step, shape)
            k.vector("vadd", out.region(place + step, shape), *sources)
        done += count * width
