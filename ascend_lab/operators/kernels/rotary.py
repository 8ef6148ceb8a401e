"""Rotary embedding on the vector unit: rotate pairs (a, b) of q and k by the angles of their row.

    a, b  ->  a cos - b sin,  b cos + a sin

A core has rows of q and k with their cosines and sines, which are read once for all heads. A pair
is element i and i + d / 2 of a head, or the neighbours 2 i and 2 i + 1. Neighbours lie in two lanes
of one repeat and must be exchanged, in three steps, 16 blocks of 32 bytes at a time: a transpose
turns lanes into rows, rows are copied crosswise, and a transpose turns rows into lanes again.

fp16 is computed in fp16, bf16 in fp32. Source: CANN toolkit 8.1, Ascend C operator
ApplyRotaryPosEmb (apply_rotary_pos_emb.cpp, apply_rotary_pos_emb_compute_ab.h). That operator
changes q and k in place (aclnn_apply_rotary_pos_emb.h), and so does this one: L2 then needs room
for one tensor less of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Affine, Buffer, KernelBuilder, Region, Tile
from ascend_lab.operators.kernels.tiles import chunks, repeat, segments

SQUARE = 16
"""Side of the square of 2-byte numbers that `vtranspose` turns: 16 blocks of 32 bytes."""
BLOCKS = 8
"""Blocks that a repeat takes."""
MAX_ROWS = 64
"""Rows of a tile: more hide no more of an instruction's first cycles."""
Memory = Buffer | Tile
Place = tuple[Memory, Affine | int]
"""Where in a tile of heads, or of tables, the first run begins."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Number of rows, heads of q and of k per row, and size of a head; which elements are pairs."""

    rows: int
    heads: tuple[int, int]
    head_columns: int
    dtype: str
    neighbours: bool = False

    @property
    def halves(self) -> tuple[int, int]:
        """How many runs a head has, and their length: two halves, or one whole if `neighbours`."""
        return (1, self.head_columns) if self.neighbours else (2, self.head_columns // 2)


def rotary_launch(shape: Rotary, chip: Chip) -> isa.Launch:
    """Return the launch, which changes q and k in place; cos and sin are (rows, head_columns).

    Raises `UnsupportedError` for pairs of neighbours in heads that end within a block of 32 bytes,
    `PathError` for chips whose cores have both units, `CapacityError` if not one head fits UB.
    """
    if shape.neighbours and shape.head_columns * DTYPE_BYTES[shape.dtype] % BLOCK_BYTES:
        needed = f"rotary: heads of whole blocks of {BLOCK_BYTES} bytes for neighbours"
        raise UnsupportedError(needed, f"{shape.head_columns} {shape.dtype}", "turn halves instead")
    axes = {"row": chunks(shape.rows, 1, chip.cores_of("vector"))}
    return isa.spread("rotary", axes, lambda share: _Writer(shape, chip, share).program())


class _Writer:
    """Writes the program of cores with equal shares."""

    def __init__(self, shape: Rotary, chip: Chip, share: isa.Share) -> None:
        """Declare tensors, choose rows and heads of a tile, allocate queues and tiles."""
        self.shape = shape
        self.share = share
        k = self.k = KernelBuilder("rotary", chip)
        self.compute = "fp32" if shape.dtype == "bf16" else shape.dtype
        runs, length = shape.halves
        block = BLOCK_BYTES // min(DTYPE_BYTES[shape.dtype], DTYPE_BYTES[self.compute])
        self.pitch = isa.ceil_div(length, block) * block
        self.head = runs * self.pitch
        self.lanes = chip.vector_bytes_per_repeat // DTYPE_BYTES[self.compute]
        self.rows, self.heads = self._tile(chip)
        sizes = [shape.rows * n * shape.head_columns for n in shape.heads]
        self.operands = [
            k.tensor(n, shape.dtype, size) for n, size in zip("qk", sizes, strict=True)
        ]
        table = shape.rows * shape.head_columns
        self.tables = [k.tensor(name, shape.dtype, table) for name in ("cos", "sin")]
        self._allocate()

    def _tile(self, chip: Chip) -> tuple[int, int]:
        """Return the rows and heads of a tile: all heads of many rows, or some of one."""
        stored_bytes = DTYPE_BYTES[self.shape.dtype]
        computed_bytes = DTYPE_BYTES[self.compute]
        cast_bytes = computed_bytes if self.compute != self.shape.dtype else 0
        # Two slots of cos and sin; the same in fp32 where they are cast.
        table_bytes = 2 * self.head * (2 * stored_bytes + cast_bytes)
        # Two slots in and two out; two scratch tiles; x in fp32 where it is cast.
        head_bytes = self.head * (4 * stored_bytes + 2 * computed_bytes + cast_bytes)
        # Behind a tile there is room for whole 16 x 16 squares; its slots begin with blocks.
        room = chip.buffers["UB"] - 8 * SQUARE * BLOCK_BYTES
        heads = min(max(self.shape.heads), chip.max_repeat)
        while heads > 1 and table_bytes + heads * head_bytes > room:
            heads = isa.ceil_div(heads, 2)
        rows = min(room // (table_bytes + heads * head_bytes), MAX_ROWS, self.share[0])
        if not rows:
            needed_bytes = table_bytes + head_bytes
            needed = f"rotary: {needed_bytes} bytes of UB for a head of {self.shape.head_columns}"
            raise CapacityError(needed, f"{room} bytes", "use smaller heads")
        return rows, heads

    def _allocate(self) -> None:
        """Allocate queues and tiles in UB."""
        k = self.k
        dtype = self.shape.dtype
        table = self.rows * self.head
        square = SQUARE * BLOCK_BYTES // DTYPE_BYTES[dtype]
        tile = isa.ceil_div(table * self.heads, square) * square
        self.angles = k.queue("cos_ub", "UB", dtype, table, src="MTE2", dst="V")
        self.angles.join("sin_ub", dtype, table)
        self.loaded = k.queue("x_ub", "UB", dtype, tile, src="MTE2", dst="V")
        self.out = k.queue("y_ub", "UB", dtype, tile, src="V", dst="MTE3")
        self.scratch = k.buffer("other", "UB", self.compute, tile)
        self.crossed = k.buffer("crossed", "UB", self.compute, tile)
        # Exchanged numbers end in one of the two buffers; the other one is free for casts.
        self.result = self.scratch if self.shape.neighbours else self.crossed
        sources = [self.loaded.buffer, self.scratch, self.crossed]
        if self.compute != dtype:
            self.wide_x = k.buffer("x_wide", "UB", self.compute, tile)
            sources[0] = self.wide_x
            self.wide_tables = [
                k.buffer(name, "UB", self.compute, table) for name in ("cos_wide", "sin_wide")
            ]
        if self.shape.neighbours and self.compute == "fp32":
            self.halves = {
                buffer.name: k.view(buffer, f"{buffer.name}_halves", "fp16") for buffer in sources
            }

    def program(self) -> isa.Program:
        """Return the program: tiles of rows; in each tile q, then k, by tiles of heads."""
        k = self.k
        first_row = k.param("row", self.share[2]) * self.share[1]
        for at, rows in segments(k, "tile", self.share[0], self.rows):
            row = first_row + at
            slot = self.angles.alloc().slot
            buffers = (self.angles.buffer, *self.angles.members)
            for tensor, buffer in zip(self.tables, buffers, strict=True):
                self._move(Tile(buffer, slot), tensor, row * self.shape.head_columns, (rows, 1, 1))
            self.angles.enqueue()
            slot = self.angles.dequeue().slot
            tables = self._tables([Tile(buffer, slot) for buffer in buffers], rows)
            for place, heads in enumerate(self.shape.heads):
                for head, tile_heads in segments(k, f"head{place}", heads, self.heads):
                    start = (row * heads + head) * self.shape.head_columns
                    self._rotate(place, start, (rows, tile_heads, heads), tables)
            self.angles.free()
        return k.finish()

    def _move(self, tile: Tile, tensor: Buffer, start: Affine, sizes: tuple[int, int, int]) -> None:
        """Load (rows, heads of the tile, heads of a row) to UB, with halves at whole blocks."""
        in_tile, in_memory = self._regions(tile, tensor, start, sizes)
        self.k.copy(in_tile, in_memory, pad=self._is_ragged)

    @property
    def _is_ragged(self) -> bool:
        """Whether runs end within a block of 32 bytes."""
        return self.shape.halves[1] * DTYPE_BYTES[self.shape.dtype] % BLOCK_BYTES != 0

    def _regions(
        self, tile: Tile, tensor: Buffer, start: Affine, sizes: tuple[int, int, int]
    ) -> tuple[Region, Region]:
        """Return the regions of some heads in a tile, and in GM."""
        rows, tile_heads, heads = sizes
        runs, length = self.shape.halves
        size = self.shape.head_columns
        shape = (rows, tile_heads, runs, length)
        in_tile = tile.region(0, shape, (tile_heads * self.head, self.head, self.pitch, 1))
        in_memory = tensor.region(start, shape, (heads * size, size, length, 1))
        return in_tile, in_memory

    def _tables(self, tiles: list[Tile], rows: int) -> list[Memory]:
        """Return cosines and sines as factors; for pairs of neighbours even sines are negated."""
        if self.compute == self.shape.dtype:
            factors: list[Memory] = [*tiles]
        else:
            for wide, tile in zip(self.wide_tables, tiles, strict=True):
                self._cast((rows, 1, 1), wide, tile)
            factors = [*self.wide_tables]
        if self.shape.neighbours:
            for at, (repeats, lanes) in self.k.runs(rows * self.head, self.lanes):
                # a cos - b sin in even lanes, b cos + a sin in odd ones: the sines of even lanes
                # change sign.
                even = sum(1 << lane for lane in range(0, lanes, 2))
                sines = factors[1].region(at, (repeats, lanes))
                self.k.vector("vmuls", sines, sines, scalar=-1.0, mask=even)
        return factors

    def _rotate(
        self, place: int, start: Affine, sizes: tuple[int, int, int], tables: list[Memory]
    ) -> None:
        """Load, rotate and store (rows, heads of the tile, heads of a row) of q or k."""
        k = self.k
        self._move(self.loaded.alloc(), self.operands[place], start, sizes)
        self.loaded.enqueue()
        x: Memory = self.loaded.dequeue()
        out: Memory = self.out.alloc()
        rotate = self._rotate_neighbours if self.shape.neighbours else self._rotate_halves
        if self.compute == self.shape.dtype:
            rotate(sizes, x, out, tables)
        else:
            self._cast(sizes, self.wide_x, x)
            rotate(sizes, self.wide_x, self.result, tables)
            self._cast(sizes, out, self.result)
        self.loaded.free()
        self.out.enqueue()
        in_tile, in_memory = self._regions(self.out.dequeue(), self.operands[place], start, sizes)
        k.copy(in_memory, in_tile, pad=self._is_ragged)
        self.out.free()

    # -- arithmetic -------------------------------------------------------------------------------
    def _rotate_halves(
        self, sizes: tuple[int, int, int], x: Memory, y: Memory, tables: list[Memory]
    ) -> None:
        """Rotate the pairs of elements i and i + d / 2 of each head."""
        cos, sin = tables
        product = self.scratch
        for at, lanes in self._runs(self.shape.head_columns // 2):
            # y = (x_a cos - x_b sin, x_b cos + x_a sin): the same three instructions for either
            # half.
            for position, pair, op in (
                (at, at + self.pitch, "vsub"),
                (at + self.pitch, at, "vadd"),
            ):
                self._emit(
                    "vmul", sizes, lanes, (y, position), (x, position), table=(cos, position)
                )
                self._emit(
                    "vmul", sizes, lanes, (product, position), (x, pair), table=(sin, position)
                )
                self._emit(op, sizes, lanes, (y, position), (y, position), (product, position))

    def _rotate_neighbours(
        self, sizes: tuple[int, int, int], x: Memory, y: Memory, tables: list[Memory]
    ) -> None:
        """Rotate the pairs 2 i and 2 i + 1 of each head; the sines of even lanes are negated."""
        cos, sin = tables
        count = sizes[0] * sizes[1] * self.head
        self._cross(x, count)
        crossed = self.crossed
        for at, lanes in self._runs(self.head):
            self._emit("vmul", sizes, lanes, (y, at), (x, at), table=(cos, at))
            self._emit("vmul", sizes, lanes, (crossed, at), (crossed, at), table=(sin, at))
        self.k.each("vadd", count, (y, 0), (y, 0), (crossed, 0))

    def _cross(self, x: Memory, count: int) -> None:
        """Write x to `crossed` with each two neighbouring numbers exchanged.

        A number of 4 bytes is two rows of a transposed square, one of 2 bytes is one.
        """
        k = self.k
        # A number of 4 bytes is two 2-byte rows: exchange rows 0, 1 with rows 2, 3.
        step = DTYPE_BYTES[self.compute] // 2
        area = SQUARE * SQUARE
        squares = isa.ceil_div(count * step, area)
        numbers_missing = squares * area // step - count
        if numbers_missing:
            k.each("vdup", numbers_missing, (x, count), scalar=0.0)
        blocks = (squares, SQUARE, SQUARE)
        lanes = self._in_halves(x).region(0, blocks)
        rows, exchanged = (self._in_halves(memory) for memory in (self.crossed, self.scratch))
        k.vector("vtranspose", rows.region(0, blocks), lanes)
        row_pitch = 2 * step * SQUARE
        for row in range(2 * step):
            full_repeats, remaining = divmod(squares * SQUARE // (2 * step), BLOCKS)
            # Rows of lanes change places in pairs: 0 with 1 for 2-byte numbers.
            target = (row + step) % (2 * step)
            for first_block, shape in (
                (0, (full_repeats, BLOCKS, SQUARE)),
                (full_repeats * BLOCKS, (1, remaining, SQUARE)),
            ):
                if shape[0] * shape[1]:
                    strides = (BLOCKS * row_pitch, row_pitch, 1)
                    source = rows.region(first_block * row_pitch + row * SQUARE, shape, strides)
                    place = exchanged.region(
                        first_block * row_pitch + target * SQUARE, shape, strides
                    )
                    k.vector("vcopy", place, source)
        k.vector("vtranspose", rows.region(0, blocks), exchanged.region(0, blocks))

    def _in_halves(self, memory: Memory) -> Memory:
        """Return the same bytes as numbers of 2 bytes."""
        if self.compute == "fp16":
            return memory
        if isinstance(memory, Tile):
            return Tile(self.halves[memory.buffer.name], memory.slot)
        return self.halves[memory.name]

    def _cast(self, sizes: tuple[int, int, int], target: Memory, source: Memory) -> None:
        """Emit the cast of heads, without the padding of their halves."""
        if not self._is_ragged:
            count = sizes[0] * sizes[1] * self.head
            self.k.each("vconv", count, (target, 0), (source, 0))
            return
        runs, length = self.shape.halves
        for run in range(runs):
            for first_element, lanes in self._runs(length):
                at = run * self.pitch + first_element
                self._emit("vconv", sizes, lanes, (target, at), (source, at))

    def _runs(self, length: int) -> Iterator[tuple[int, int]]:
        """Yield (first, lanes) for each piece of a run that one instruction takes."""
        for at in range(0, length, self.lanes):
            yield at, min(self.lanes, length - at)

    def _emit(
        self,
        op: str,
        sizes: tuple[int, int, int],
        lanes: int,
        *places: Place,
        table: Place | None = None,
    ) -> None:
        """Emit an operation on the same lanes of all heads; with a table, on its lanes of that row.

        An instruction takes all rows of a head or all heads of a row, whichever is more.
        """
        rows, heads, _ = sizes
        by_head = heads <= rows
        turns, repeats = (heads, rows) if by_head else (rows, heads)
        # Heads of a row are neighbours; the same head of the next row lies `heads` heads further.
        turn_step, repeat_step = (1, heads) if by_head else (heads, 1)
        with repeat(self.k, "turn", turns) as turn:
            shape = (repeats, lanes)
            turn_start = turn * (turn_step * self.head)
            strides = (repeat_step * self.head, 1)
            regions = [memory.region(turn_start + at, shape, strides) for memory, at in places]
            if table is not None:
                angles, first_angle = table
                # One row of a table for all heads of a row: a stride of 0.
                table_row, table_pitch = (Affine(), self.head) if by_head else (turn * self.head, 0)
                regions.append(angles.region(table_row + first_angle, shape, (table_pitch, 1)))
            self.k.vector(op, *regions)
