"""Blocks of rows of NC1HWC0 images in UB, and the vector instructions that run over them.

In NC1HWC0 a block of 32 bytes holds 16 channels of one pixel, so that a repeat takes 8 pixels that
lie equally far apart. A program loops over planes (a channel block of an image) in blocks of rows.
The border around the image (zeros, or -inf for a maximum) is written to UB once, and loads do not
overwrite it. Depthwise convolutions and max pooling are such programs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from ascend_lab.errors import CapacityError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.conv_windows import rows_seen
from ascend_lab.operators.kernels.planes import (
    C0,
    PIXELS,
    PlaneShare,
    RowBlock,
    columns_seen,
    row_blocks,
    walk,
)
from ascend_lab.operators.kernels.tiles import repeat

Place = isa.Tile | isa.Buffer
LEAST = -math.inf
"""Value of the border around an image whose largest numbers are sought: no number is smaller."""
ReadWritten = tuple[int, int]
"""A distance in pixels where an instruction reads, and the distance where it writes."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """`turns` instructions, each of `repeats` x `pixels`, that begin at pixel 8 * `column`.

    `turn_pitch` is the distance from instruction to instruction, `repeat_pitch` that from repeat to
    repeat. 10 rows of 20 columns, a row at a time: 10 turns of 2 repeats of 8 pixels, then 10 turns
    of 1 repeat of 4.
    """

    column: int
    turns: int
    turn_pitch: ReadWritten
    repeats: int
    pixels: int
    repeat_pitch: ReadWritten

    def cycles(self, chip: Chip) -> int:
        """Return the cycles of instructions with two sources."""
        cost = chip.vector_costs["vmax"]
        # An instruction has at most 255 repeats; each further one has start-up cycles, too.
        heads = isa.ceil_div(self.repeats, chip.max_repeat) * cost.head_cycles
        return self.turns * (heads + self.repeats * cost.slope_cycles)


@dataclass(frozen=True, slots=True)
class Run:
    """The work of one instruction: some repeats of a sweep.

    `first` are the first pixel that it reads and the first that it writes; pixels that are read lie
    `step` apart from column to column.
    """

    first: tuple[isa.Affine, isa.Affine]
    repeats: int
    sweep: Sweep
    step: int

    def read(self, tile: isa.Buffer | isa.Tile, tap: int = 0) -> isa.Region:
        """Return the region of `tile` that is read, `tap` pixels further on."""
        sizes = (self.repeats, self.sweep.pixels, C0)
        strides = (self.sweep.repeat_pitch[0] * C0, self.step * C0, 1)
        return tile.region((self.first[0] + tap) * C0, sizes, strides)

    def written(self, tile: isa.Buffer | isa.Tile) -> isa.Region:
        """Return the region of `tile` that is written."""
        sizes = (self.repeats, self.sweep.pixels, C0)
        return tile.region(self.first[1] * C0, sizes, (self.sweep.repeat_pitch[1] * C0, C0, 1))


@dataclass(frozen=True, slots=True)
class Grid:
    """`rows` x `width` pixels to compute, with rows written `written_pitch` pixels apart.

    The pixels read lie `read_pitch` apart from row to row, and `step` from column to column. An
    instruction takes one row, or 8 columns of all rows, or, if the distances of rows agree, all
    rows and the gaps between them. The last form comes first among equals: it leaves no gaps for
    later instructions on all pixels.
    """

    rows: int
    width: int
    read_pitch: int
    written_pitch: int
    step: int

    def _candidates(self) -> Iterator[list[Sweep]]:
        """Yield the sweeps of each way to cover all pixels."""
        full_repeats, last_pixels = divmod(self.width, PIXELS)
        row_moves = (self.read_pitch, self.written_pitch)
        column_moves = (PIXELS * self.step, PIXELS)
        # Rows lie equally far apart where they are read and written: include the gaps.
        if self.read_pitch == self.step * self.written_pitch:
            # 10 rows 24 pixels apart, of 20 pixels: 236 pixels are 30 repeats, gaps included.
            repeats = isa.ceil_div((self.rows - 1) * self.written_pitch + self.width, PIXELS)
            yield _not_empty((0, 1, column_moves, repeats, PIXELS, column_moves))
        # A row at a time: 20 columns are 2 repeats of 8 pixels, and 1 of 4.
        yield _not_empty(
            (0, self.rows, row_moves, full_repeats, PIXELS, column_moves),
            (full_repeats, self.rows, row_moves, 1, last_pixels, column_moves),
        )
        # 8 columns of all rows at a time: few instructions if there are many short rows.
        yield _not_empty(
            (0, full_repeats, column_moves, self.rows, PIXELS, row_moves),
            (full_repeats, 1, column_moves, self.rows, last_pixels, row_moves),
        )

    def best_sweeps(self, chip: Chip) -> tuple[int, list[Sweep]]:
        """Return the fewest cycles of an operation on all pixels, and the sweeps that do it."""

        def cycles(sweeps: list[Sweep]) -> int:
            return sum(sweep.cycles(chip) for sweep in sweeps)

        best = min(self._candidates(), key=cycles)
        return cycles(best), best

    def runs(self, k: isa.KernelBuilder) -> Iterator[Run]:
        """Yield the work of each instruction of the best sweeps, in loops."""
        for sweep in self.best_sweeps(k.chip)[1]:
            first_written = sweep.column * PIXELS
            first_read = first_written * self.step
            with repeat(k, "turn", sweep.turns) as turn:
                # An instruction has at most 255 repeats.
                for repeats_before, (count, _) in k.runs(sweep.repeats, 1):
                    read = first_read + repeats_before * sweep.repeat_pitch[0]
                    written = first_written + repeats_before * sweep.repeat_pitch[1]
                    first_pixels = (
                        turn * sweep.turn_pitch[0] + read,
                        turn * sweep.turn_pitch[1] + written,
                    )
                    yield Run(first_pixels, count, sweep, self.step)


def _not_empty(*sweeps: tuple[int, int, ReadWritten, int, int, ReadWritten]) -> list[Sweep]:
    """Return the sweeps that are not empty."""
    return [Sweep(*sizes) for sizes in sweeps if sizes[1] * sizes[3] * sizes[4]]


# -- blocks of rows --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Lines:
    """Distances in UB in pixels: `line` between image rows, `pitch` between output rows.

    `width` results are computed per row. With `folded`, a maximum is taken first along each image
    row, which leaves rows as short as output rows, then over such rows.
    """

    line: int
    pitch: int
    width: int
    folded: bool = False

    def output_pixels(self, rows: int) -> int:
        """Return the pixels of `rows` rows of results, in whole repeats."""
        return _whole((rows - 1) * self.pitch + self.width)

    def scratch_pixels(self, shape: ConvShape, rows: int) -> int:
        """Return the pixels of the scratch buffer: products, or folded rows."""
        if not self.folded:
            return self.output_pixels(rows)
        folded_rows = self.output_pixels(rows_seen(shape, rows))
        # The last row of windows reads `reach` folded rows, in whole repeats.
        read_by_windows = (shape.reach[0] - 1) * self.pitch + self.output_pixels(rows)
        return max(folded_rows, read_by_windows)

    def grid(self, shape: ConvShape, rows: int) -> Grid:
        """Return the grid that instructions compute: output rows, or all image rows if `folded`."""
        (sh, sw) = shape.strides
        line = self.line
        if self.folded:
            return Grid(rows_seen(shape, rows), self.width, line, self.pitch, sw)
        return Grid(rows, self.width, sh * line, self.pitch, sw)

    def image_pixels(self, shape: ConvShape, rows: int) -> int:
        """Return the pixels of the image rows, including those that repeats read past the end."""
        grid = self.grid(shape, rows)
        (down, right) = shape.reach
        # Flat: one instruction runs over all rows and gaps, so it also reads past the last row.
        flat = grid.read_pitch == grid.step * grid.written_pitch
        # Where the last window begins, and how far it reaches.
        if flat:
            last_window = (self.output_pixels(grid.rows) - 1) * grid.step
        else:
            last_window = (grid.rows - 1) * grid.read_pitch + (grid.width - 1) * grid.step
        rows_reached = 0 if self.folded else down - 1
        last_pixel = last_window + rows_reached * self.line + (right - 1)
        return max(last_pixel + 1, rows_seen(shape, rows) * self.line)


def _whole(pixels: int) -> int:
    """Return pixels rounded up to whole repeats of 8."""
    return isa.ceil_div(pixels, PIXELS) * PIXELS


def most_rows(
    shape: ConvShape, chip: Chip, lines: Lines, *, blocks_per_result: int = 0, fixed: int = 0
) -> int:
    """Return the most output rows of a block: UB holds image rows and results twice, and scratch.

    Further buffers take `blocks_per_result` blocks of 32 bytes per result, and `fixed` blocks in
    all. Raises `CapacityError` if one output row does not fit UB.
    """
    (oh, ow) = shape.out_hw
    room = chip.buffers["UB"] // BLOCK_BYTES - fixed

    def needed(rows: int) -> int:
        return (
            2 * lines.image_pixels(shape, rows)
            + (2 + blocks_per_result) * lines.output_pixels(rows)
            + lines.scratch_pixels(shape, rows)
        )

    rows = 0
    # The largest block that fits; a pixel of 16 fp16 channels is one block of 32 bytes.
    while rows < oh and needed(rows + 1) <= room:
        rows += 1
    if not rows:
        raise CapacityError(
            f"UB for one output row of {ow} pixels: {needed(1)} blocks of 32 bytes",
            f"{room} on {chip.name}",
            "cut the image into columns or use conv_launch",
        )
    return rows


class RowWriter(ABC):
    """Writes the program of a core, from x (N, C1, H, W, C0) to y, in blocks of rows of each plane.

    `border` is the value of the border of the image, `plane` the number of pixels of a plane of y,
    `scratch` a buffer for products or folded rows.
    """

    def __init__(
        self, name: str, shape: ConvShape, chip: Chip, lines: Lines, rows: int, border: float
    ) -> None:
        """Declare x, allocate queues for blocks of `rows` output rows."""
        self.shape = shape
        self.lines = lines
        self.border = border
        self.size = rows
        k = self.k = isa.KernelBuilder(name, chip)
        (oh, ow) = shape.out_hw
        c1 = shape.blocks[0]
        # Pixels of a plane of y; subclasses may pad it.
        self.plane = oh * ow
        self.x = k.tensor("x", "fp16", shape.n * c1 * shape.h * shape.w * C0)
        self.rows = k.queue(
            "rows", "UB", "fp16", lines.image_pixels(shape, rows) * C0, src="MTE2", dst="V"
        )
        self.results = k.queue(
            "sums", "UB", "fp16", lines.output_pixels(rows) * C0, src="V", dst="MTE3"
        )
        self.scratch = k.buffer("products", "UB", "fp16", lines.scratch_pixels(shape, rows) * C0)

    @abstractmethod
    def compute(self, x: isa.Tile, results: isa.Tile, block: RowBlock) -> None:
        """Write the instructions of a block of rows."""

    def around_planes(self, channel: isa.Affine) -> AbstractContextManager[object]:
        """Hold the operands that all planes of a channel block need."""
        return nullcontext()

    def program(self, share: PlaneShare) -> isa.Program:
        """Return the program over planes in blocks of rows; borders are written at the start."""
        buffer = self.rows.buffer
        blocks = self.shape.blocks[0]
        self.y = self.k.tensor("y", "fp16", self.shape.n * blocks * self.plane * C0)
        tiles: list[isa.Tile | isa.Buffer] = [
            isa.Tile(buffer, slot) for slot in range(buffer.slots)
        ]
        if self.lines.folded and self.shape.strides[0] == 1:  # read with the gaps between rows
            tiles.append(self.scratch)
        for tile in tiles:
            size = (tile.buffer if isinstance(tile, isa.Tile) else tile).elements
            self.k.each("vdup", size, (tile, 0), scalar=self.border)
        self.k.barrier()
        for channel, image in walk(self.k, share, self.around_planes):
            for block, turn in row_blocks(self.k, self.shape, share, self.size):
                self._block(image * blocks + channel, block, turn)
        return self.k.finish()

    def _block(self, plane: isa.Affine, block: RowBlock, turn: isa.Affine) -> None:
        """Load rows, compute, store the pixels of the block."""
        k = self.k
        lines = self.lines
        ow = self.shape.out_hw[1]
        self._load(plane, block, turn)
        x = self.rows.dequeue()
        results = self.results.alloc()
        row = lines.line * C0
        # Rows of zeros above and below the image, or of -inf for a maximum.
        if block.before:
            k.each("vdup", block.before * row, (x, 0), scalar=self.border)
        if block.after:
            first_element = (block.seen - block.after) * row
            k.each("vdup", block.after * row, (x, first_element), scalar=self.border)
        self.compute(x, results, block)
        self.rows.free()
        self.results.enqueue()
        pixel = plane * self.plane + turn * (block.rows * ow) + block.start * ow
        target = _rows(self.y, pixel * C0, block.rows, ow, ow)
        # In UB rows lie `pitch` pixels apart, in GM side by side: the copy leaves the gaps out.
        source = self.results.dequeue().region(0, target.sizes, (lines.pitch * C0, 1))
        k.copy(target, source)
        self.results.free()

    def _load(self, plane: isa.Affine, block: RowBlock, turn: isa.Affine) -> None:
        """Load the image rows of a block to their places inside the border."""
        shape = self.shape
        line = self.lines.line
        _, zeros_left, columns = columns_seen(shape)
        tile = self.rows.alloc()
        if block.count and columns:
            first_row = turn * (block.rows * shape.strides[0]) + block.first
            start = (plane * (shape.h * shape.w) + first_row * shape.w) * C0
            source = _rows(self.x, start, block.count, columns, shape.w)
            place = (block.before * line + zeros_left) * C0
            self.k.copy(tile.region(place, (block.count, columns * C0), (line * C0, 1)), source)
        self.rows.enqueue()


def _rows(tensor: isa.Buffer, start: isa.Affine, rows: int, pixels: int, pitch: int) -> isa.Region:
    return tensor.region(start, (rows, pixels * C0), (pitch * C0, 1))


# -- the largest of each window -------------------------------------------------------------------
def largest_lines(shape: ConvShape) -> Lines:
    """Return the distances of rows for max pooling: output rows as far apart as image rows."""
    pitch = isa.ceil_div(columns_seen(shape)[0], shape.strides[1])
    # A 3 x 3 window with a stride of 1: the largest of 3 in a row, then of 3 such rows, takes 4
    # comparisons instead of 8.
    folded = min(shape.r, shape.s) > 1
    return Lines(pitch * shape.strides[1], pitch, shape.out_hw[1], folded)


def fold_largest(
    k: isa.KernelBuilder,
    grid: Grid,
    taps: list[int],
    source: Place,
    target: Place,
    start: tuple[isa.Affine | int, isa.Affine | int] = (0, 0),
) -> None:
    """Write to each place of a grid the maximum of the pixels at distances `taps` behind it.

    `start` gives the first pixels in `source` and in `target`.
    """
    for run_at_zero in grid.runs(k):
        read, written = run_at_zero.first
        run = replace(run_at_zero, first=(read + start[0], written + start[1]))
        total = run.written(target)
        # The first comparison is of two sources, each later one of the result and one source.
        (first_region, *other_regions) = [run.read(source, tap) for tap in taps]
        for number, region in enumerate(other_regions or [first_region]):
            k.vector("vmax", total, total if number else first_region, region)
