"""Writes kernels that work through rows as the vendor's library does, to be timed and never run.

Everything that takes time is written: which rows a core owns, how many it holds at once, its
copies, every vector instruction with its repeats, every wait. The computed values are not right:
all vector instructions work on the same scratch memory.

Three habits of the library cost time that our kernels do not spend:

    one buffer        the next rows are loaded only when the vector unit has released the buffer
    a barrier         after nearly every vector instruction: its head and its tail are paid in full
    a scalar between  a reduced number is read, worked on and handed back while all pipes wait
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Launch,
    Program,
    Queue,
    Region,
    Share,
    Tile,
    ceil_div,
    spread,
)

SCALAR_FLAG = 7
"""Id of the flags to and from the scalar unit: queues take theirs from 0 upward."""
BLOCKS = 8
"""Blocks that one repeat of a vector instruction works on."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `columns` numbers in one number format."""

    count: int
    columns: int
    dtype: str


def aligned(columns: int, dtype: str) -> int:
    """Return the elements that a row takes on chip, rounded up to blocks of 32 bytes."""
    # 1000 numbers of fp16: 63 blocks of 16, so 1008 elements
    unit = BLOCK_BYTES // DTYPE_BYTES[dtype]
    return ceil_div(columns, unit) * unit


# -- rows that come and go -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Stream:
    """Copies of `columns` numbers of each row of a tensor into UB or out of it.

    In memory a row has `step` numbers, and those copied begin at `start`; in UB rows begin `pitch`
    elements apart.
    """

    k: KernelBuilder
    queue: Queue
    tensor: Buffer
    columns: int
    pitch: int
    step: int
    start: int = 0

    def load(self, row: Affine | int, count: int) -> None:
        """Copy rows into an empty slot; the vector unit waits for them."""
        # with one slot this waits until the vector unit has released the previous rows
        slot = self.queue.alloc()
        self.k.copy(self._on_chip(slot, count), self._in_memory(row, count), pad=True)
        self.queue.enqueue()
        self.queue.dequeue()

    def free(self) -> None:
        """Free the slot, so that the next rows can be loaded."""
        self.queue.free()

    def alloc(self) -> None:
        """Let the vector unit wait for an empty slot."""
        self.queue.alloc()

    def store(self, row: Affine | int, count: int) -> None:
        """Copy rows out once the vector unit has written them, and free the slot."""
        self.queue.enqueue()
        slot = self.queue.dequeue()
        self.k.copy(self._in_memory(row, count), self._on_chip(slot, count), pad=True)
        self.queue.free()

    def _on_chip(self, slot: Tile, count: int) -> Region:
        return slot.region(0, (count, self.columns), (self.pitch, 1))

    def _in_memory(self, row: Affine | int, count: int) -> Region:
        return self.tensor.region(
            row * self.step + self.start, (count, self.columns), (self.step, 1)
        )


# -- one core --------------------------------------------------------------------------------------
class RowWriter:
    """Writes the program of one vector core."""

    def __init__(self, name: str, chip: Chip, rows: Rows, cores: int, per_core: int) -> None:
        """Allocate scratch memory for the numbers, in two formats, and for reduced results."""
        self.k = KernelBuilder(name, chip)
        self.rows = rows
        self.padded_rows = cores * per_core  # the last core may own fewer: tensors are padded
        self.first = self.k.param("core", cores) * per_core
        self.lanes = chip.vector_bytes_per_repeat // DTYPE_BYTES["fp32"]
        # one repeat count of numbers, the most that an instruction touches
        self.fp32_scratch = self.k.buffer("numbers", "UB", "fp32", chip.max_repeat * self.lanes)
        # the same bytes as fp16, for instructions on halves
        self.fp16_scratch = self.k.view(self.fp32_scratch, "halves", "fp16")
        self.reduced = self.k.buffer("reduced", "UB", "fp32", chip.max_repeat + 1)

    # -- tensors ----------------------------------------------------------------------------------
    def source(
        self, name: str, rows_at_once: int, *, packed: bool = False, depth: int = 1
    ) -> Stream:
        """Return a tensor like x with slots of `rows_at_once` rows, packed side by side or not."""
        columns = self.rows.columns
        # packed rows serve instructions that run over several rows at once
        pitch = columns if packed else aligned(columns, self.rows.dtype)
        tensor = self._tensor(name, columns, self.rows.dtype)
        queue = self._queue(name, self.rows.dtype, rows_at_once * pitch, depth)
        return Stream(self.k, queue, tensor, columns, pitch, columns)

    def halves(
        self, name: str, rows_at_once: int, pitch: int, depth: int = 1
    ) -> tuple[Stream, Stream]:
        """Return the right and the left half of the rows of x, each with slots of its own."""
        columns = self.rows.columns
        half = columns // 2
        tensor = self._tensor(name, columns, self.rows.dtype)
        streams = []
        for side, start in (("right", half), ("left", 0)):
            queue = self._queue(f"{name}_{side}", self.rows.dtype, rows_at_once * pitch, depth)
            streams.append(
                Stream(
                    k=self.k,
                    queue=queue,
                    tensor=tensor,
                    columns=half,
                    pitch=pitch,
                    step=columns,
                    start=start,
                )
            )
        return streams[0], streams[1]

    def result(
        self, name: str, columns: int, dtype: str, rows_at_once: int, pitch: int = 0
    ) -> Stream:
        """Return a tensor for results, with room for `rows_at_once` rows in its slot."""
        row_pitch = pitch or aligned(columns, dtype)
        elements = max(rows_at_once * row_pitch, aligned(rows_at_once, dtype))
        queue = self._queue(name, dtype, elements, 1, out=True)
        tensor = self._tensor(name, columns, dtype)
        return Stream(self.k, queue, tensor, columns, row_pitch, columns)

    def numbers(self, name: str, rows_at_once: int) -> Stream:
        """Return a result of one fp32 number a row, such as a scale; they are one run in UB."""
        return self.result(name, 1, "fp32", rows_at_once, pitch=1)

    def constants(self, name: str, columns: int, dtype: str) -> None:
        """Load a row that all cores read before they start, such as gamma."""
        tensor = self.k.tensor(name, dtype, columns)
        queue = self._queue(name, dtype, aligned(columns, dtype), 1)
        stream = Stream(self.k, queue, tensor, columns, aligned(columns, dtype), columns)
        stream.load(0, 1)
        stream.free()

    def _tensor(self, name: str, columns: int, dtype: str) -> Buffer:
        return self.k.tensor(name, dtype, self.padded_rows * columns)

    def _queue(
        self, name: str, dtype: str, elements: int, depth: int, *, out: bool = False
    ) -> Queue:
        src, dst = ("V", "MTE3") if out else ("MTE2", "V")
        return self.k.queue(f"{name}_ub", "UB", dtype, elements, src=src, dst=dst, depth=depth)

    # -- vector instructions -----------------------------------------------------------------------
    def wait(self) -> None:
        """Write a barrier of the vector unit: later instructions wait for all earlier results."""
        self.k.barrier("V")

    def vector(
        self, op: str, elements: int, *, reads: int = 1, halves: bool = False, wait: bool = True
    ) -> None:
        """Write an instruction on numbers of 4 bytes (2 with `halves`), and a barrier if `wait`."""
        memory = self.fp16_scratch if halves else self.fp32_scratch
        lanes = 2 * self.lanes if halves else self.lanes
        # the value does not matter, as nothing is computed; the form of the instruction does
        scalar = 1.0 if op in ("vmuls", "vadds", "vdup") else None
        repeats = ceil_div(elements, lanes)
        while repeats:
            count = min(repeats, self.k.chip.max_repeat)
            region = memory.region(0, (count, lanes))
            self.k.vector(op, region, *[region] * reads, scalar=scalar)
            repeats -= count
        if wait:
            self.wait()

    def vectors(self, ops: str, elements: int, *, halves: bool = False) -> None:
        """Write the instructions that `ops` names, one after another."""
        for op in ops.split():
            reads = 2 if op in ("vadd", "vmul", "vdiv", "vmax") else 1
            self.vector(op, elements, reads=0 if op == "vdup" else reads, halves=halves)

    def reduce(self, op: str, repeats: int, *, wait: bool = True) -> None:
        """Reduce each of `repeats` repeats to one number."""
        while repeats:
            count = min(repeats, self.k.chip.max_repeat)
            self.k.vector(
                op, self.reduced.region(0, count), self.fp32_scratch.region(0, (count, self.lanes))
            )
            repeats -= count
        if wait:
            self.wait()

    def to_blocks(self, numbers: int) -> None:
        """Spread each number over a block (Brcb): 8 numbers are one of its repeats."""
        # 3 numbers: a repeat of 8 blocks all the same
        blocks = ceil_div(numbers, BLOCKS) * BLOCKS
        while blocks:
            count = min(blocks, self.k.chip.max_repeat // BLOCKS * BLOCKS)
            into = self.fp32_scratch.region(0, (count, BLOCKS))
            self.k.vector("vbrcb", into, self.reduced.region(0, count))
            blocks -= count
        self.wait()

    def halving_sum(self, columns: int) -> None:
        """Sum a row: halves are added until one repeat is left, which is reduced.

        1000 columns: the 488 after the 512th are added to the first ones, then 256, 128 and 64.
        """
        # the largest power of two that the row holds
        power_of_two = 1 << (columns.bit_length() - 1)
        if columns > self.lanes:
            if columns > power_of_two:
                self.vectors("vadd", columns - power_of_two)
            while power_of_two > self.lanes:
                power_of_two //= 2
                self.vectors("vadd", power_of_two)
        self.reduce("vcadd", 1, wait=False)

    def folding_max(self, columns: int, *, halves: bool = False) -> None:
        """Find the largest of a row: all repeats are folded onto the first, which is reduced."""
        self.fold(columns, halves=halves)
        self.reduce("vcmax", 1, wait=False)

    def fold(self, columns: int, *, halves: bool = False) -> None:
        """Fold all repeats of a row onto its first."""
        lanes = 2 * self.lanes if halves else self.lanes
        # 1000 columns in repeats of 64: 15 whole ones, 40 columns
        repeats, remaining_columns = divmod(columns, lanes)
        if repeats > 1:
            self.vectors("vmax", (repeats - 1) * lanes, halves=halves)
        if repeats and remaining_columns:
            self.vectors("vmax", remaining_columns, halves=halves)

    def staged_max(self, columns: int) -> None:
        """Find the largest of a row by ReduceMax: reduce each repeat, then the results, and so on.

        A reduced repeat leaves its largest number and that number's index: 32 pairs fill a repeat.
        """
        repeats = ceil_div(columns, self.lanes)
        self.reduce("vcmax", repeats)
        while repeats > 1:
            repeats = ceil_div(repeats, self.lanes // 2)
            self.reduce("vcmax", repeats)

    def by_scalar(self, steps: int, after: str = "V", *, loads_wait: bool = True) -> None:
        """Let the scalar unit work on a number that pipe `after` has written, while others wait.

        The scalar unit hands every instruction to its pipe, in order: instructions after its own
        work begin later, in all pipes. Loads do not wait in a kernel that issues the next load
        before that work.
        Source: Ascend C developer documentation, basic architecture.
        """
        # the pipe that has reduced the row tells the scalar unit ...
        self.k.set_flag(after, "S", SCALAR_FLAG)
        self.k.wait_flag(after, "S", SCALAR_FLAG)
        self.k.scalar(steps=steps)
        # ... and the scalar unit lets the others go on
        for pipe in ("V", "MTE2", "MTE3") if loads_wait else ("V", "MTE3"):
            self.k.set_flag("S", pipe, SCALAR_FLAG)
            self.k.wait_flag("S", pipe, SCALAR_FLAG)


# -- all cores -------------------------------------------------------------------------------------
TileWriter = Callable[[Affine, int], None]
"""Writes the work on `count` rows from a first one on."""
Start = Callable[[RowWriter, int], TileWriter]
"""Declares the tensors, with room for a number of rows, and writes what precedes the first tile."""


def row_launch(
    name: str, chip: Chip, rows: Rows, rows_at_once: int, start: Start, cores: int
) -> Launch:
    """Return a launch that deals rows to at most `cores` cores, in tiles of `rows_at_once`."""
    # 1000 rows on 48 cores: 21 each for 47 cores, 13 for the last one
    per_core = ceil_div(rows.count, min(cores, chip.cores_of("vector")))
    # 50 rows on 48 cores: 2 each, so that 25 cores work
    used = ceil_div(rows.count, per_core)
    shares = [per_core] * (used - 1) + [rows.count - per_core * (used - 1)]
    tile_rows = min(rows_at_once, per_core)

    def program(share: Share) -> Program:
        writer = RowWriter(name, chip, rows, used, per_core)
        tile = start(writer, tile_rows)
        # a core's last tile may hold fewer rows
        tiles, last_rows = divmod(share[0], tile_rows)
        with writer.k.loop("tile", tiles) as i:
            tile(writer.first + i * tile_rows, tile_rows)
        if last_rows:
            tile(writer.first + tiles * tile_rows, last_rows)
        return writer.k.finish()

    return spread(name, {"core": shares}, program)
