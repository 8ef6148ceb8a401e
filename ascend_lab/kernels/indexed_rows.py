"""Feed copies with indices: a batch to UB, the scalar unit looks at it, then the pipes may use it.

A copy's pipe cannot use indices the moment they arrive: S reads them first, one a step, and tells
the pipe by a flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Program, Queue, Region, Tile
from ascend_lab.layout.moves import item_bytes

BATCH = 256
"""Most indices of one batch: 1 KiB of UB."""


def l2_steps(chip: Chip) -> int:
    """Return scalar steps as long as one trip of S to L2."""
    return max(chip.l2.latency_cycles // max(chip.scalar_cycles, 1), 1)


@dataclass(slots=True)
class Feed:
    """Indices of the int32 tensor `tensor`, for loads (MTE2), stores (MTE3) or S alone.

    `batch` holds the indices; `look` tells MTE2 that S has looked at them.
    """

    k: KernelBuilder
    tensor: Buffer
    batch: Queue
    look: Queue | None
    held: Tile | None = None

    @classmethod
    def make(cls, k: KernelBuilder, tensor: Buffer, *pipes: str, most: int = BATCH) -> Feed:
        """Allocate a feed of batches of up to `most` indices for `pipes`, MTE2 and/or MTE3."""
        name, size = tensor.name, min(most, -(-tensor.elements // 8) * 8)
        via, end = ("S", "MTE3") if "MTE3" in pipes else ("", "S")
        batch = k.queue(f"{name}_batch", "UB", "int32", size, src="MTE2", dst=end, depth=1, via=via)
        look = None
        if "MTE2" in pipes:
            look = k.queue(f"{name}_look", "UB", "int32", 1, src="S", dst="MTE2", depth=1)
        return cls(k, tensor, batch, look)

    def open(self, start: Affine | int, count: int) -> None:
        """Bring `count` indices from `start` on and let S look at them.

        Counts that are no whole blocks go one by one through S on chips that cannot pad.
        """
        k, chip = self.k, self.k.chip
        pad = count % 8 != 0
        single = pad and chip.combined
        tile = self.batch.alloc()
        if not single:
            k.copy(tile.region(0, count), self.tensor.region(start, count), pad=pad)
        if self.batch.middle is not None:
            self.batch.hand()
        else:
            self.batch.enqueue()
            tile = self.batch.dequeue()
        if self.look is not None:
            self.look.alloc()
        if single:
            with k.loop("s", count) as s:
                source = self.tensor.region(start + s, 1)
                k.scalar(tile.region(s, 1), source, steps=l2_steps(chip))
        else:
            k.scalar(steps=count)
        if self.batch.middle is not None:
            self.batch.enqueue()
            tile = self.batch.dequeue()
        if self.look is not None:
            self.look.enqueue()
            self.look.dequeue()
        self.held = tile

    def take(self, i: Affine | int) -> Region:
        """Return the place of index i of the batch."""
        assert self.held is not None
        return self.held.region(i, 1)

    def close(self) -> None:
        """The batch is used up."""
        self.batch.free()
        if self.look is not None:
            self.look.free()


def batches(
    k: KernelBuilder, name: str, count: int, most: int
) -> Iterator[tuple[Affine | int, int]]:
    """Yield (first, length) of the batches of `count` things: a loop of full ones, then the rest.

    The rest is cut once more, so that at most 7 things are no whole block of indices.
    """
    full, rest = divmod(count, most)
    if full:
        with k.loop(name, full) as i:
            yield i * most, most
    whole = rest // 8 * 8
    if whole:
        yield full * most, whole
    if rest - whole:
        yield full * most + whole, rest - whole


# Programs that move rows picked by an index: gather, and scatter that knows nothing of them.
#
# On chips whose copies need whole 32-byte blocks a row that ends raggedly gets a second,
# overlapping
# block; rows shorter than a block go element by element (`kernels.single_elements`).


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


# Rows picked by an index, element by element through the scalar unit: right for any width.


def single_program(chip: Chip, table: Table, work: Work, cores: int, *, mode: str) -> Program:
    """y[i] = x[index[i]] ("gather"), y[index[i]] = u[i] ("update") or += u[i] ("add").

    Every element costs S a trip to L2 per load and per store; V makes the sums.
    """
    writer = _Writer(chip, table, mode)
    k, columns = writer.k, table.columns
    core = k.param("core", cores)
    first, column = core * work.first_step + work.first, core * work.column_step + work.column
    with k.loop("p", work.picks) as p:
        k.scalar(writer.place, writer.index.region(first + p, 1), steps=writer.wait)
        with k.loop("j", work.width) as j:
            writer.element((first + p) * columns + column + j, column + j)
    return k.finish()


class _Writer:
    """`big` is the table rows are picked from, `small` holds the picked rows one after another."""

    def __init__(self, chip: Chip, table: Table, mode: str) -> None:
        self.k, self.mode, self.wait = KernelBuilder(f"single_{mode}", chip), mode, l2_steps(chip)
        k, dtype = self.k, table.dtype
        self.index = k.tensor("index", "int32", table.picks)
        names = ("x", "y") if mode == "gather" else ("y", "u")
        self.big = k.tensor(names[0], dtype, table.rows * table.columns)
        self.small = k.tensor(names[1], dtype, table.picks * table.columns)
        self.place = k.buffer("place", "UB", "int32", 1).region()
        self.one = k.buffer("one", "UB", dtype, 1).region()
        self.block = table.block
        if mode == "add":
            self.pair = k.queue("pair", "UB", dtype, 2 * table.block, src="S", dst="V", depth=1)
            self.sum = k.queue("sum", "UB", dtype, 1, src="V", dst="S", depth=1)
        self.pick: dict[str, Any] = {
            "index": self.place,
            "pitch": table.columns,
            "bound": table.rows,
            "steps": self.wait,
        }

    def element(self, at: Affine, column: Affine) -> None:
        """Emit the work of one element: `at` in `small`, `column` of the picked row."""
        near, far = self.small.region(at, 1), self.big.region(column, 1)
        if self.mode == "gather":
            self.k.scalar(self.one, far, **self.pick)
            self.k.scalar(near, self.one, steps=self.wait)
        elif self.mode == "update":
            self.k.scalar(self.one, near, steps=self.wait)
            self.k.scalar(far, self.one, **self.pick)
        else:
            self._add(near, far)

    def _add(self, near: Region, far: Region) -> None:
        tile, cell = self.pair.alloc(), (1, 1)
        self.k.scalar(tile.region(0, 1), near, steps=self.wait)
        self.k.scalar(tile.region(self.block, 1), far, **self.pick)
        self.pair.enqueue()
        tile = self.pair.dequeue()
        operands = tile.region(0, cell), tile.region(self.block, cell)
        self.k.vector("vadd", self.sum.alloc().region(0, cell), *operands)
        self.pair.free()
        self.sum.enqueue()
        self.k.scalar(far, self.sum.dequeue().region(), **self.pick)
        self.sum.free()
