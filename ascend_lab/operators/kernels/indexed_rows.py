"""Programs that move rows picked by an index, and the indices that feed their copies.

A copy's pipe cannot use indices the moment they arrive: a batch comes to UB, S reads them, one a
step, and tells the pipe by a flag. On chips whose copies need whole 32-byte blocks a row that ends
raggedly gets a second, overlapping block; rows shorter than a block go element by element.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.machine.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Program,
    Queue,
    Region,
    Share,
    Tile,
)
from ascend_lab.machine.layout import item_bytes

BATCH = 256
"""Most indices of one batch: 1 KiB of UB."""
STEPS_FROM_END = 3
"""Scalar steps for an index that may count from the end: read it, compare it with 0, add to it."""


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
    steps: int
    open_batch: Tile | None = None

    @classmethod
    def make(
        cls,
        k: KernelBuilder,
        tensor: Buffer,
        *pipes: str,
        most: int = BATCH,
        steps_per_index: int = 1,
    ) -> "Feed":
        """Allocate batches of up to `most` indices for `pipes`, MTE2 and/or MTE3."""
        name = tensor.name
        size = min(most, -(-tensor.elements // 8) * 8)
        # A store that needs an index follows S; without one S is the last to use a batch.
        via, end = ("S", "MTE3") if "MTE3" in pipes else ("", "S")
        batch = k.queue(f"{name}_batch", "UB", "int32", size, src="MTE2", dst=end, depth=1, via=via)
        look = None
        if "MTE2" in pipes:
            look = k.queue(f"{name}_look", "UB", "int32", 1, src="S", dst="MTE2", depth=1)
        return cls(k, tensor, batch, look, steps_per_index)

    def open(self, start: Affine | int, count: int) -> None:
        """Bring `count` indices from `start` on and let S look at them.

        Counts that are no whole blocks go one by one through S on chips that cannot pad.
        """
        k = self.k
        chip = self.k.chip
        pad = count % 8 != 0
        # 7 indices are 28 bytes: copies of whole blocks of 32 bytes would read beyond the tensor.
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
                k.scalar(tile.region(s, 1), source, steps=l2_steps(chip) + self.steps - 1)
        else:
            # S reads the indices, one a step; the copies use them later.
            k.scalar(steps=count * self.steps)
        if self.batch.middle is not None:
            self.batch.enqueue()
            tile = self.batch.dequeue()
        if self.look is not None:
            self.look.enqueue()
            self.look.dequeue()
        self.open_batch = tile

    def take(self, i: Affine | int) -> Region:
        """Return the place of index i of the batch."""
        assert self.open_batch is not None
        return self.open_batch.region(i, 1)

    def close(self) -> None:
        """Free the slots of a batch that is used up."""
        self.batch.free()
        if self.look is not None:
            self.look.free()


def batches(
    k: KernelBuilder, name: str, count: int, batch_size: int
) -> Iterator[tuple[Affine | int, int]]:
    """Yield (first, length) of the batches of `count` indices: full ones, then the remainder.

    Full batches are a loop. The remainder is cut once more, so that at most 7 indices are no whole
    block of 32 bytes.
    """
    # 300 in batches of 256: one of 256, then 44 = 40 + 4.
    batch_count, remainder = divmod(count, batch_size)
    if batch_count:
        with k.loop(name, batch_count) as i:
            yield i * batch_size, batch_size
    in_blocks = remainder // 8 * 8
    if in_blocks:
        yield batch_count * batch_size, in_blocks
    if remainder - in_blocks:
        yield batch_count * batch_size + in_blocks, remainder - in_blocks


@dataclass(frozen=True, slots=True)
class Table:
    """A table of `rows` x `columns` elements of `dtype`.

    The index tensor picks `picks` of its rows. With `from_end` indices below 0 count from the end.
    """

    rows: int
    columns: int
    picks: int
    dtype: str
    from_end: bool = False

    @property
    def steps_per_index(self) -> int:
        """Scalar steps until an index is a row."""
        return STEPS_FROM_END if self.from_end else 1

    @property
    def block(self) -> int:
        """Elements of one 32-byte block."""
        return BLOCK_BYTES // item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The indices and columns of a core; (size, 0, 0) is an axis that is not cut."""

    picks: Share
    columns: Share

    def start(self, k: KernelBuilder) -> tuple[Affine, Affine]:
        """Declare the core's place and return its first index and its first column."""
        core = k.param("core", max(self.picks[2], self.columns[2]))
        return core * self.picks[1], core * self.columns[1]


class RowWriter:
    """Builder, tensors and shapes shared by the programs that move rows."""

    def __init__(self, name: str, chip: Chip, table: Table, share: CoreShare) -> None:
        """Declare the tensor `index`, and choose the widest tile of rows that fits UB."""
        self.k = KernelBuilder(name, chip)
        self.chip = chip
        self.table = table
        self.share = share
        self.first_pick, self.column = share.start(self.k)
        self.index = self.k.tensor("index", "int32", table.picks)
        size = item_bytes(table.dtype)
        block = table.block
        room = chip.buffers["UB"] // 2
        # Half of UB holds two slots of 8 rows at least, each one block longer than the piece.
        widest = room // (2 * 8 * size) // block * block - block
        self.chunk = min(share.columns[0], widest)
        self.pitch = -(-self.chunk // block) * block
        # Rows of a tile: as fit twice, in whole blocks of 8 indices.
        rows = min(room // (2 * self.pitch * size), BATCH, -(-share.picks[0] // 8) * 8)
        self.rows = rows // 8 * 8

    def tiles(self, feed: Feed) -> Iterator[tuple[int, int, Affine, Affine, int]]:
        """Yield (column, columns, first pick of a batch, first of a tile in it, picks).

        The indices of the batch are in UB; pieces of a row are as wide as fits a tile.
        """
        start = 0
        width = self.share.columns[0]
        block = self.table.block
        while start < width:
            columns = min(self.chunk, width - start)
            # A last piece of less than a block could not be copied alone: leave it a block.
            if 0 < width - start - columns < block:
                columns -= block
            for at, count in batches(
                self.k, "b", self.share.picks[0], BATCH // self.rows * self.rows
            ):
                first_pick = self.first_pick + at
                feed.open(first_pick, count)
                for place_in_batch, tile_picks in batches(self.k, "t", count, self.rows):
                    yield start, columns, first_pick, Affine() + place_in_batch, tile_picks
                feed.close()
            start += columns

    def pieces(self, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield (column, size, place in UB) of the copies of a row of `width`."""
        block = self.table.block
        ragged = width % block
        if not ragged or not self.chip.combined:
            yield 0, width, 0
        else:
            # A row of 40 in blocks of 16: 32 elements, then elements 24 .. 39, which stand from 32
            # on in UB.
            yield 0, width - ragged, 0
            yield width - block, block, width - ragged

    def move_tile(
        self, tensor: Buffer, origin: Affine, tile: Tile, width: int, count: int, *, loads: bool
    ) -> None:
        """Emit the copies of `count` whole rows between GM, where they are neighbours, and UB."""
        for piece, size, place in self.pieces(width):
            in_memory = tensor.region(origin + piece, (count, size), (self.table.columns, 1))
            in_tile = tile.region(place, (count, size), (self.pitch, 1))
            target, source = (in_tile, in_memory) if loads else (in_memory, in_tile)
            self.k.copy(target, source, pad=size % self.table.block != 0)

    def move_row(
        self, target: Region, source: Region, row: Region, atomic: str | None = None
    ) -> None:
        """Emit the copy of a piece of the row of the table that the index in `row` names."""
        pad = target.elements % self.table.block != 0
        table = self.table
        self.k.copy_row(
            target,
            source,
            row,
            table.columns,
            table.rows,
            from_end=table.from_end,
            pad=pad,
            atomic=atomic,
        )


def gather_program(chip: Chip, table: Table, share: CoreShare) -> Program:
    """y[i] = x[index[i]] for the picks and columns of `share`."""
    w = RowWriter("gather", chip, table, share)
    k = w.k
    columns = table.columns
    x = k.tensor("x", table.dtype, table.rows * columns)
    y = k.tensor("y", table.dtype, table.picks * columns)
    feed = Feed.make(k, w.index, "MTE2", steps_per_index=table.steps_per_index)
    q = k.queue("rows", "UB", table.dtype, w.rows * w.pitch, src="MTE2", dst="MTE3")
    for start, width, first_pick, at, count in w.tiles(feed):
        tile = q.alloc()
        with k.loop("r", count) as r:
            for piece, size, place in w.pieces(width):
                target = tile.region(r * w.pitch + place, size)
                w.move_row(target, x.region(w.column + (start + piece), size), feed.take(at + r))
        q.enqueue()
        place_in_y = (first_pick + at) * columns + w.column + start
        w.move_tile(y, place_in_y, q.dequeue(), width, count, loads=False)
        q.free()
    return k.finish()


def scatter_program(
    chip: Chip, table: Table, share: CoreShare, *, mode: str, atomic: bool = False
) -> Program:
    """y[index[i]] = u[i] or += u[i], in the order of i, for the picks and columns of `share`.

    With `atomic` the memory adds. Otherwise "add" loads the row, adds, stores, and the next load
    waits for that: it may be the same row.
    """
    w = RowWriter(f"scatter_{mode}", chip, table, share)
    k = w.k
    columns = table.columns
    # Load, add and store of one row must end before the next: its index may be the same.
    chain = mode == "add" and not atomic
    u = k.tensor("u", table.dtype, table.picks * columns)
    y = k.tensor("y", table.dtype, table.rows * columns)
    # An update needs indices for stores only, a sum for loads and stores.
    feed = Feed.make(k, w.index, *(("MTE3", "MTE2") if chain else ("MTE3",)))
    drain = "V" if chain else "MTE3"
    q = k.queue("rows", "UB", table.dtype, w.rows * w.pitch, src="MTE2", dst=drain)
    adder = _Adder(w) if chain else None
    for start, width, first_pick, at, count in w.tiles(feed):
        origin = (first_pick + at) * columns + w.column + start
        w.move_tile(u, origin, q.alloc(), width, count, loads=True)
        q.enqueue()
        tile = q.dequeue()
        with k.loop("r", count) as r:
            row = feed.take(at + r)
            parts = [
                (y.region(w.column + (start + piece), size), r * w.pitch + place, place)
                for piece, size, place in w.pieces(width)
            ]
            if adder is not None:
                adder.add(row, parts, tile)
            else:
                for target, place_in_tile, _ in parts:
                    source = tile.region(place_in_tile, target.elements)
                    w.move_row(target, source, row, "add" if atomic else None)
        q.free()
    return k.finish()


class _Adder:
    """Load a row of y, add a row of the tile, store it; the next row waits for the store."""

    def __init__(self, w: RowWriter) -> None:
        self.w = w
        dtype = w.table.dtype
        k = w.k
        # A ragged row needs one more block, which overlaps.
        pitch = w.pitch + w.table.block
        self.old_row = k.queue("old", "UB", dtype, pitch, src="MTE2", dst="V", depth=1)
        self.sum = k.queue("sum", "UB", dtype, pitch, src="V", dst="MTE3", depth=1)
        self.turn = k.queue("turn", "UB", dtype, 1, src="MTE2", dst="MTE3", depth=1)

    def add(self, row: Region, parts: list[tuple[Region, Affine, int]], tile: Tile) -> None:
        """Emit y row += tile row; parts are (place in y, place in the tile, place in a row)."""
        # MTE2 may load the next row once MTE3 has freed this turn.
        self.turn.alloc()
        table_row = self.old_row.alloc()
        for place_in_y, _, place in parts:
            self.w.move_row(table_row.region(place, place_in_y.elements), place_in_y, row)
        self.old_row.enqueue()
        self.turn.enqueue()
        table_row = self.old_row.dequeue()
        new_row = self.sum.alloc()
        for place_in_y, at, place in parts:
            self.w.k.each(
                "vadd", place_in_y.elements, (new_row, place), (table_row, place), (tile, at)
            )
        self.old_row.free()
        self.sum.enqueue()
        new_row = self.sum.dequeue()
        self.turn.dequeue()
        for place_in_y, _, place in parts:
            self.w.move_row(place_in_y, new_row.region(place, place_in_y.elements), row)
        self.sum.free()
        self.turn.free()


# -- element by element ---------------------------------------------------------------------------
def single_program(chip: Chip, table: Table, share: CoreShare, *, mode: str) -> Program:
    """y[i] = x[index[i]] ("gather"), y[index[i]] = u[i] ("update") or += u[i] ("add").

    Every element costs S a trip to L2 per load and per store; V makes the sums.
    """
    w = _SingleWriter(chip, table, mode)
    first_pick, column = share.start(w.k)
    with w.k.loop("p", share.picks[0]) as p:
        steps = w.wait + table.steps_per_index - 1
        w.k.scalar(w.place, w.index.region(first_pick + p, 1), steps=steps)
        with w.k.loop("j", share.columns[0]) as j:
            w.element((first_pick + p) * table.columns + column + j, column + j)
    return w.k.finish()


class _SingleWriter:
    """Moves single elements between `table_tensor` and `picked_rows`, one row after another."""

    def __init__(self, chip: Chip, table: Table, mode: str) -> None:
        self.k = KernelBuilder(f"single_{mode}", chip)
        self.mode = mode
        self.wait = l2_steps(chip)
        k = self.k
        dtype = table.dtype
        self.index = k.tensor("index", "int32", table.picks)
        names = ("x", "y") if mode == "gather" else ("y", "u")
        self.table_tensor = k.tensor(names[0], dtype, table.rows * table.columns)
        self.picked_rows = k.tensor(names[1], dtype, table.picks * table.columns)
        self.place = k.buffer("place", "UB", "int32", 1).region()
        self.one = k.buffer("one", "UB", dtype, 1).region()
        self.block = table.block
        if mode == "add":
            self.pair = k.queue("pair", "UB", dtype, 2 * table.block, src="S", dst="V", depth=1)
            self.sum = k.queue("sum", "UB", dtype, 1, src="V", dst="S", depth=1)
        # What S needs to find the picked row: its index, the pitch of the table and its bound.
        self.pick: dict[str, Any] = {"index": self.place, "steps": self.wait}
        self.pick |= {"pitch": table.columns, "bound": table.rows, "from_end": table.from_end}

    def element(self, at: Affine, column: Affine) -> None:
        """Emit the work of one element: `at` in `picked_rows`, `column` of the picked row."""
        picked = self.picked_rows.region(at, 1)
        in_table = self.table_tensor.region(column, 1)
        if self.mode == "gather":
            self.k.scalar(self.one, in_table, **self.pick)
            self.k.scalar(picked, self.one, steps=self.wait)
            return
        if self.mode == "update":
            self.k.scalar(self.one, picked, steps=self.wait)
            self.k.scalar(in_table, self.one, **self.pick)
            return
        tile = self.pair.alloc()
        self.k.scalar(tile.region(0, 1), picked, steps=self.wait)
        self.k.scalar(tile.region(self.block, 1), in_table, **self.pick)
        self.pair.enqueue()
        tile = self.pair.dequeue()
        self.k.each("vadd", 1, (self.sum.alloc(), 0), (tile, 0), (tile, self.block))
        self.pair.free()
        self.sum.enqueue()
        self.k.scalar(in_table, self.sum.dequeue().region(), **self.pick)
        self.sum.free()
