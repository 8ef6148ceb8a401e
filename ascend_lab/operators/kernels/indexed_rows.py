"""Programs that gather or scatter rows by indices that are read at run time.

Indices are loaded to UB in batches. The scalar unit S reads them, one per step, and then sets a
flag for the pipe that copies the rows. On chips whose copies need whole 32-byte blocks, the tail of
a row that is not a whole number of blocks is copied as one more, overlapping block; rows shorter
than a block are copied element by element.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def l2_trip_steps(chip: Chip) -> int:
    """Return the number of scalar steps that take as long as one access of S to L2."""
    return max(chip.l2.latency_cycles // max(chip.scalar_cycles, 1), 1)


@dataclass(slots=True)
class IndexFeed:
    """Indices of the int32 tensor `tensor`, used by loads (MTE2), stores (MTE3) or by S alone.

    `batch` is the queue of indices in UB; `read_signal` a queue of one element by which S signals
    MTE2 that it has read them. S needs `steps` steps per index.
    """

    k: KernelBuilder
    tensor: Buffer
    batch: Queue
    read_signal: Queue | None
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
    ) -> "IndexFeed":
        """Allocate batches of up to `most` indices for `pipes`, MTE2 and/or MTE3."""
        name = tensor.name
        size = min(most, -(-tensor.elements // 8) * 8)
        # A store that needs an index comes after S; if no store does, S is the last to use a batch.
        middle_pipe, last_pipe = ("S", "MTE3") if "MTE3" in pipes else ("", "S")
        batch = k.queue(
            f"{name}_batch",
            "UB",
            "int32",
            size,
            src="MTE2",
            dst=last_pipe,
            depth=1,
            via=middle_pipe,
        )
        read_signal = None
        if "MTE2" in pipes:
            read_signal = k.queue(f"{name}_look", "UB", "int32", 1, src="S", dst="MTE2", depth=1)
        return cls(k, tensor, batch, read_signal, steps_per_index)

    def open(self, start: Affine | int, count: int) -> None:
        """Load `count` indices from `start` on and let S read them.

        On chips whose copies cannot pad, a count that is not a multiple of 8 is copied index by
        index by S.
        """
        k = self.k
        chip = self.k.chip
        pad = count % 8 != 0
        # 7 indices are 28 bytes: copies of whole blocks of 32 bytes would read beyond the tensor.
        is_copied_singly = pad and chip.combined
        tile = self.batch.alloc()
        if not is_copied_singly:
            k.copy(tile.region(0, count), self.tensor.region(start, count), pad=pad)
        if self.batch.middle is not None:
            self.batch.hand()
        else:
            self.batch.enqueue()
            tile = self.batch.dequeue()
        if self.read_signal is not None:
            self.read_signal.alloc()
        if is_copied_singly:
            with k.loop("s", count) as s:
                source = self.tensor.region(start + s, 1)
                k.scalar(tile.region(s, 1), source, steps=l2_trip_steps(chip) + self.steps - 1)
        else:
            # S reads the indices, one per step; the copies use them later.
            k.scalar(steps=count * self.steps)
        if self.batch.middle is not None:
            self.batch.enqueue()
            tile = self.batch.dequeue()
        if self.read_signal is not None:
            self.read_signal.enqueue()
            self.read_signal.dequeue()
        self.open_batch = tile

    def index_region(self, i: Affine | int) -> Region:
        """Return the region of index i of the batch."""
        assert self.open_batch is not None
        return self.open_batch.region(i, 1)

    def close(self) -> None:
        """Free the slots of a batch that is used up."""
        self.batch.free()
        if self.read_signal is not None:
            self.read_signal.free()


def batches(
    k: KernelBuilder, name: str, count: int, batch_size: int
) -> Iterator[tuple[Affine | int, int]]:
    """Yield (first, length) of the batches of `count` indices: full ones, then the remainder.

    Full batches are a loop. The remainder is cut once more, so that at most 7 indices are not part
    of a whole block of 32 bytes.
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

    The index tensor picks `index_count` of its rows. With `from_end` indices below 0 count from the
    end.
    """

    rows: int
    columns: int
    index_count: int
    dtype: str
    from_end: bool = False

    @property
    def steps_per_index(self) -> int:
        """Scalar steps to turn an index into a row number."""
        return STEPS_FROM_END if self.from_end else 1

    @property
    def block(self) -> int:
        """Elements of one 32-byte block."""
        return BLOCK_BYTES // item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The indices and columns of a core.

    Each is a `Share`: elements, step from core to core, cores up to its last owner. The last two
    are 0 for an axis that is not divided.
    """

    indices: Share
    columns: Share

    def start(self, k: KernelBuilder) -> tuple[Affine, Affine]:
        """Declare the core's place and return its first index and its first column."""
        core = k.param("core", max(self.indices[2], self.columns[2]))
        return core * self.indices[1], core * self.columns[1]


class RowTile(NamedTuple):
    """Some columns of the rows that some indices of a batch pick.

    The batch in UB begins at `first_index` of the index tensor; the tile begins at `batch_offset`
    in it and has `rows` rows. Its columns begin at `column` of the core's share.
    """

    column: int
    columns: int
    first_index: Affine
    batch_offset: Affine
    rows: int


class TableWriter:
    """Builder, tensors and sizes shared by the programs that move rows of a table.

    A tile in UB has `rows` rows of up to `max_columns` columns, `pitch` elements apart.
    """

    def __init__(self, name: str, chip: Chip, table: Table, share: CoreShare) -> None:
        """Declare the tensor `index`, and choose the widest tile of rows that fits UB."""
        self.k = KernelBuilder(name, chip)
        self.chip = chip
        self.table = table
        self.share = share
        self.first_index, self.column = share.start(self.k)
        self.index = self.k.tensor("index", "int32", table.index_count)
        size = item_bytes(table.dtype)
        block = table.block
        room = chip.buffers["UB"] // 2
        # Half of UB holds two slots of at least 8 rows, each one block longer than the piece.
        widest = room // (2 * 8 * size) // block * block - block
        self.max_columns = min(share.columns[0], widest)
        self.pitch = -(-self.max_columns // block) * block
        # Rows of a tile: as many as fit two slots, a multiple of 8.
        rows = min(room // (2 * self.pitch * size), BATCH, -(-share.indices[0] // 8) * 8)
        self.rows = rows // 8 * 8

    def tiles(self, feed: IndexFeed) -> Iterator[RowTile]:
        """Yield the tiles of the share, while the indices of their batch are in UB.

        Pieces of a row are as wide as a tile allows.
        """
        start = 0
        width = self.share.columns[0]
        block = self.table.block
        while start < width:
            columns = min(self.max_columns, width - start)
            # The last piece must be at least a block: the piece before it gives up a block.
            if 0 < width - start - columns < block:
                columns -= block
            batch_size = BATCH // self.rows * self.rows
            for batch_start, count in batches(self.k, "b", self.share.indices[0], batch_size):
                first_index = self.first_index + batch_start
                feed.open(first_index, count)
                for tile_start, rows in batches(self.k, "t", count, self.rows):
                    yield RowTile(start, columns, first_index, Affine() + tile_start, rows)
                feed.close()
            start += columns

    def pieces(self, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield (column, size, place in UB) of the copies of a row of `width`."""
        block = self.table.block
        tail = width % block
        if not tail or not self.chip.combined:
            yield 0, width, 0
        else:
            # A row of 40 in blocks of 16: 32 elements, then elements 24 .. 39, which stand from 32
            # on in UB.
            yield 0, width - tail, 0
            yield width - block, block, width - tail

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
    """Return the program of y[i] = x[index[i]] for the indices and columns of `share`."""
    writer = TableWriter("gather", chip, table, share)
    k = writer.k
    columns = table.columns
    x = k.tensor("x", table.dtype, table.rows * columns)
    y = k.tensor("y", table.dtype, table.index_count * columns)
    feed = IndexFeed.make(k, writer.index, "MTE2", steps_per_index=table.steps_per_index)
    size_in_ub = writer.rows * writer.pitch
    row_queue = k.queue("rows", "UB", table.dtype, size_in_ub, src="MTE2", dst="MTE3")
    for row_tile in writer.tiles(feed):
        tile = row_queue.alloc()
        with k.loop("r", row_tile.rows) as r:
            for piece, size, place in writer.pieces(row_tile.columns):
                target = tile.region(r * writer.pitch + place, size)
                source = x.region(writer.column + (row_tile.column + piece), size)
                writer.move_row(target, source, feed.index_region(row_tile.batch_offset + r))
        row_queue.enqueue()
        first_row = row_tile.first_index + row_tile.batch_offset
        origin = first_row * columns + writer.column + row_tile.column
        writer.move_tile(
            y, origin, row_queue.dequeue(), row_tile.columns, row_tile.rows, loads=False
        )
        row_queue.free()
    return k.finish()


def scatter_program(
    chip: Chip, table: Table, share: CoreShare, *, mode: str, atomic: bool = False
) -> Program:
    """Return the program of y[index[i]] = u[i] ("update") or += u[i] ("add"), in the order of i.

    It does the indices and columns of `share`. With `atomic` the memory adds. Otherwise "add" loads
    a row, adds and stores it, and the next load waits for the store, as it may be the same row.
    """
    writer = TableWriter(f"scatter_{mode}", chip, table, share)
    k = writer.k
    columns = table.columns
    # Load, add and store of one row must end before the next: its index may be the same.
    adds_in_ub = mode == "add" and not atomic
    u = k.tensor("u", table.dtype, table.index_count * columns)
    y = k.tensor("y", table.dtype, table.rows * columns)
    # An update needs indices for stores only, a sum for loads and stores.
    pipes = ("MTE3", "MTE2") if adds_in_ub else ("MTE3",)
    feed = IndexFeed.make(k, writer.index, *pipes)
    last_pipe = "V" if adds_in_ub else "MTE3"
    size_in_ub = writer.rows * writer.pitch
    row_queue = k.queue("rows", "UB", table.dtype, size_in_ub, src="MTE2", dst=last_pipe)
    adder = _Adder(writer) if adds_in_ub else None
    for row_tile in writer.tiles(feed):
        first_row = row_tile.first_index + row_tile.batch_offset
        origin = first_row * columns + writer.column + row_tile.column
        writer.move_tile(u, origin, row_queue.alloc(), row_tile.columns, row_tile.rows, loads=True)
        row_queue.enqueue()
        tile = row_queue.dequeue()
        with k.loop("r", row_tile.rows) as r:
            row = feed.index_region(row_tile.batch_offset + r)
            pieces = list(_pieces_of_row(writer, y, row_tile, r))
            if adder is not None:
                adder.add(row, pieces, tile)
            else:
                for piece in pieces:
                    source = tile.region(piece.place_in_tile, piece.in_table.elements)
                    writer.move_row(piece.in_table, source, row, "add" if atomic else None)
        row_queue.free()
    return k.finish()


class _RowPiece(NamedTuple):
    """A piece of a row: its region in the table, its place in a tile, its place in a single row."""

    in_table: Region
    place_in_tile: Affine
    place_in_row: int


def _pieces_of_row(
    writer: TableWriter, table_tensor: Buffer, row_tile: RowTile, row: Affine
) -> Iterator[_RowPiece]:
    """Yield the pieces in which row number `row` of a tile is copied."""
    for column, size, place in writer.pieces(row_tile.columns):
        in_table = table_tensor.region(writer.column + (row_tile.column + column), size)
        yield _RowPiece(in_table, row * writer.pitch + place, place)


class _Adder:
    """Loads a row of y, adds a row of the tile, stores it; the next row waits for the store."""

    def __init__(self, writer: TableWriter) -> None:
        self.writer = writer
        dtype = writer.table.dtype
        k = writer.k
        # A row that is not a whole number of blocks needs one more block, which overlaps.
        pitch = writer.pitch + writer.table.block
        self.old_row = k.queue("old", "UB", dtype, pitch, src="MTE2", dst="V", depth=1)
        self.sum = k.queue("sum", "UB", dtype, pitch, src="V", dst="MTE3", depth=1)
        self.turn = k.queue("turn", "UB", dtype, 1, src="MTE2", dst="MTE3", depth=1)

    def add(self, row: Region, pieces: list[_RowPiece], tile: Tile) -> None:
        """Emit y row += tile row, piece by piece; `row` is the region of the row's index."""
        # MTE2 may load the next row once MTE3 has freed this turn.
        self.turn.alloc()
        table_row = self.old_row.alloc()
        for piece in pieces:
            target = table_row.region(piece.place_in_row, piece.in_table.elements)
            self.writer.move_row(target, piece.in_table, row)
        self.old_row.enqueue()
        self.turn.enqueue()
        table_row = self.old_row.dequeue()
        new_row = self.sum.alloc()
        for piece in pieces:
            self.writer.k.each(
                "vadd",
                piece.in_table.elements,
                (new_row, piece.place_in_row),
                (table_row, piece.place_in_row),
                (tile, piece.place_in_tile),
            )
        self.old_row.free()
        self.sum.enqueue()
        new_row = self.sum.dequeue()
        self.turn.dequeue()
        for piece in pieces:
            source = new_row.region(piece.place_in_row, piece.in_table.elements)
            self.writer.move_row(piece.in_table, source, row)
        self.sum.free()
        self.turn.free()


# -- element by element ---------------------------------------------------------------------------
def single_program(chip: Chip, table: Table, share: CoreShare, *, mode: str) -> Program:
    """Return the program of `mode`, which moves single elements, for rows shorter than a block.

    "gather" is y[i] = x[index[i]], "update" y[index[i]] = u[i], "add" y[index[i]] += u[i].

    For every element, S waits for L2 once per load and once per store; V adds.
    """
    writer = _SingleWriter(chip, table, mode)
    k = writer.k
    first_index, column = share.start(k)
    with k.loop("p", share.indices[0]) as p:
        steps = writer.wait_steps + table.steps_per_index - 1
        k.scalar(writer.index_place, writer.index.region(first_index + p, 1), steps=steps)
        with k.loop("j", share.columns[0]) as j:
            writer.element((first_index + p) * table.columns + column + j, column + j)
    return k.finish()


class _SingleWriter:
    """Writes moves of single elements between `table_tensor` and `picked_rows`, row after row."""

    def __init__(self, chip: Chip, table: Table, mode: str) -> None:
        self.k = KernelBuilder(f"single_{mode}", chip)
        self.mode = mode
        self.wait_steps = l2_trip_steps(chip)
        k = self.k
        dtype = table.dtype
        self.index = k.tensor("index", "int32", table.index_count)
        names = ("x", "y") if mode == "gather" else ("y", "u")
        self.table_tensor = k.tensor(names[0], dtype, table.rows * table.columns)
        self.picked_rows = k.tensor(names[1], dtype, table.index_count * table.columns)
        self.index_place = k.buffer("place", "UB", "int32", 1).region()
        self.element_buffer = k.buffer("one", "UB", dtype, 1).region()
        self.block = table.block
        if mode == "add":
            self.pair = k.queue("pair", "UB", dtype, 2 * table.block, src="S", dst="V", depth=1)
            self.sum = k.queue("sum", "UB", dtype, 1, src="V", dst="S", depth=1)
        # What S needs to find the picked row: its index, the pitch of the table and its bound.
        self.pick: dict[str, Any] = {"index": self.index_place, "steps": self.wait_steps}
        self.pick |= {"pitch": table.columns, "bound": table.rows, "from_end": table.from_end}

    def element(self, place_in_rows: Affine, column: Affine) -> None:
        """Emit the work of one element: number `place_in_rows` of `picked_rows`.

        It is element `column` of the picked row of the table.
        """
        picked = self.picked_rows.region(place_in_rows, 1)
        in_table = self.table_tensor.region(column, 1)
        if self.mode == "gather":
            self.k.scalar(self.element_buffer, in_table, **self.pick)
            self.k.scalar(picked, self.element_buffer, steps=self.wait_steps)
            return
        if self.mode == "update":
            self.k.scalar(self.element_buffer, picked, steps=self.wait_steps)
            self.k.scalar(in_table, self.element_buffer, **self.pick)
            return
        tile = self.pair.alloc()
        self.k.scalar(tile.region(0, 1), picked, steps=self.wait_steps)
        self.k.scalar(tile.region(self.block, 1), in_table, **self.pick)
        self.pair.enqueue()
        tile = self.pair.dequeue()
        self.k.each("vadd", 1, (self.sum.alloc(), 0), (tile, 0), (tile, self.block))
        self.pair.free()
        self.sum.enqueue()
        self.k.scalar(in_table, self.sum.dequeue().region(), **self.pick)
        self.sum.free()
