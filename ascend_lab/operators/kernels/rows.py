"""Rows of NC1HWC0 images in UB: their distances, vector instructions over them, and max pooling.

In NC1HWC0 a block of 32 bytes holds 16 channels of one pixel, so that a repeat takes 8 pixels that
lie equally far apart. A program loops over planes in blocks of rows. The border around the image
(zeros, or -inf for a maximum) is written to UB once, and loads do not overwrite it.

The result of a convolution may be pooled on the core before it is stored. The epilogue f comes
last, on fewer numbers. The result is the same if f is increasing: f(max(x, y)) = max(f(x), f(y)).

    L0C -> UB rows -> largest of each window -> epilogue -> GM
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter

from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.conv_windows import Window, divided, pooled_rows, rows_seen
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue
from ascend_lab.operators.kernels.epilogue_emit import (
    Channels,
    Piece,
    Sizes,
    copy_out,
    new_finish,
    write_steps,
)
from ascend_lab.operators.kernels.epilogue_plan import channel_blocks, demand_of, plan_of
from ascend_lab.operators.kernels.planes import (
    C0,
    PIXELS,
    Own,
    RowBlock,
    columns_seen,
    row_blocks,
    walk,
)
from ascend_lab.operators.kernels.tiles import Area, Span, repeat, segments

Place = isa.Tile | isa.Buffer
LEAST = -math.inf
"""What stands around an image whose largest numbers are sought: no number is smaller."""
ReadWritten = tuple[int, int]
"""Pixels of what is read, and of what is written."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """`turns` instructions, each of `repeats` x `pixels`, that begin at pixel 8 * `column`.

    Further fields are the distances from turn to turn and from repeat to repeat.
    """

    column: int
    turns: int
    moves: ReadWritten
    repeats: int
    pixels: int
    apart: ReadWritten

    def cycles(self, chip: Chip) -> int:
        """Return the cycles of instructions with two sources."""
        cost = chip.vector_costs["vmax"]
        # An instruction has at most 255 repeats; each further one has start-up cycles, too.
        heads = isa.ceil_div(self.repeats, chip.max_repeat) * cost.head_cycles
        return self.turns * (heads + self.repeats * cost.slope_cycles)


@dataclass(frozen=True, slots=True)
class Run:
    """The work of one instruction: its first pixels, and a part of a sweep."""

    first: tuple[isa.Affine, isa.Affine]
    repeats: int
    sweep: Sweep
    step: int

    def read(self, tile: isa.Buffer | isa.Tile, tap: int = 0) -> isa.Region:
        """Return the region of `tile` that is read, `tap` pixels further on."""
        sizes = (self.repeats, self.sweep.pixels, C0)
        strides = (self.sweep.apart[0] * C0, self.step * C0, 1)
        return tile.region((self.first[0] + tap) * C0, sizes, strides)

    def written(self, tile: isa.Buffer | isa.Tile) -> isa.Region:
        """Return the region of `tile` that is written."""
        sizes = (self.repeats, self.sweep.pixels, C0)
        return tile.region(self.first[1] * C0, sizes, (self.sweep.apart[1] * C0, C0, 1))


@dataclass(frozen=True, slots=True)
class Grid:
    """`rows` x `width` pixels to compute, with rows written `written` pixels apart.

    The pixels read lie `read` pixels apart from row to row, and `step` from column to column. An
    instruction takes one row, or 8 columns of all rows, or, if the distances of rows agree, all
    rows and the gaps between them. The last form comes first among equals: it leaves no gaps for
    later instructions on all pixels.
    """

    rows: int
    width: int
    read: int
    written: int
    step: int

    def _candidates(self) -> Iterator[list[Sweep]]:
        """Yield the sweeps of each way to cover all pixels."""
        full_repeats, last_pixels = divmod(self.width, PIXELS)
        row_moves = (self.read, self.written)
        column_moves = (PIXELS * self.step, PIXELS)
        # Rows lie equally far apart where they are read and written: include the gaps.
        if self.read == self.step * self.written:
            # 10 rows 24 pixels apart, of 20 pixels: 236 pixels are 30 repeats, gaps included.
            repeats = isa.ceil_div((self.rows - 1) * self.written + self.width, PIXELS)
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
        timed = (
            (sum(sweep.cycles(chip) for sweep in sweeps), sweeps) for sweeps in self._candidates()
        )
        return min(timed, key=itemgetter(0))

    def runs(self, k: isa.KernelBuilder) -> Iterator[Run]:
        """Yield the work of each instruction of the best sweeps, in loops."""
        for sweep in self.best_sweeps(k.chip)[1]:
            read = sweep.column * PIXELS * self.step
            written = sweep.column * PIXELS
            with repeat(k, "turn", sweep.turns) as turn:
                for done, (count, _) in k.runs(sweep.repeats, 1):
                    first_pixels = (
                        turn * sweep.moves[0] + (read + done * sweep.apart[0]),
                        turn * sweep.moves[1] + (written + done * sweep.apart[1]),
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

    def outputs(self, rows: int) -> int:
        """Return the pixels of `rows` rows of results, in whole repeats."""
        return _whole((rows - 1) * self.pitch + self.width)

    def beside(self, shape: ConvShape, rows: int) -> int:
        """Return the pixels of the scratch buffer: products, or folded rows."""
        output_pixels = self.outputs(rows)
        if not self.folded:
            return output_pixels
        return max(
            self.outputs(rows_seen(shape, rows)), (shape.reach[0] - 1) * self.pitch + output_pixels
        )

    def grid(self, shape: ConvShape, rows: int) -> Grid:
        """Return the grid that instructions compute: output rows, or all image rows if `folded`."""
        (sh, sw) = shape.strides
        line = self.line
        if self.folded:
            return Grid(rows_seen(shape, rows), self.width, line, self.pitch, sw)
        return Grid(rows, self.width, sh * line, self.pitch, sw)

    def seen(self, shape: ConvShape, rows: int) -> int:
        """Return the pixels of the image rows, including those that repeats read past the end."""
        grid = self.grid(shape, rows)
        (down, right) = shape.reach
        # Flat: one instruction runs over all rows and gaps, so it also reads past the last row.
        flat = grid.read == grid.step * grid.written
        last_pixel = (right - 1) + (0 if self.folded else (down - 1) * self.line)
        last_place = (grid.rows - 1) * grid.read + (grid.width - 1) * grid.step
        last_pixel += (self.outputs(grid.rows) - 1) * grid.step if flat else last_place
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
            2 * lines.seen(shape, rows)
            + (2 + blocks_per_result) * lines.outputs(rows)
            + lines.beside(shape, rows)
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

    `around` is the value of the border of the image, `plane` the number of pixels of a plane of y,
    `beside` a scratch buffer.
    """

    def __init__(
        self, name: str, shape: ConvShape, chip: Chip, lines: Lines, rows: int, around: float
    ) -> None:
        """Declare x, allocate queues for blocks of `rows` output rows."""
        self.shape = shape
        self.lines = lines
        self.around = around
        self.size = rows
        k = self.k = isa.KernelBuilder(name, chip)
        (oh, ow) = shape.out_hw
        c1 = shape.blocks[0]
        # Pixels of a plane of y; subclasses may pad it.
        self.plane = oh * ow
        self.x = k.tensor("x", "fp16", shape.n * c1 * shape.h * shape.w * C0)
        self.rows = k.queue("rows", "UB", "fp16", lines.seen(shape, rows) * C0, src="MTE2", dst="V")
        self.results = k.queue("sums", "UB", "fp16", lines.outputs(rows) * C0, src="V", dst="MTE3")
        self.beside = k.buffer("products", "UB", "fp16", lines.beside(shape, rows) * C0)

    @abstractmethod
    def compute(self, x: isa.Tile, results: isa.Tile, block: RowBlock) -> None:
        """Write the instructions of a block of rows."""

    def around_planes(self, channel: isa.Affine) -> AbstractContextManager[object]:
        """Hold the operands that all planes of a channel block need."""
        return nullcontext()

    def program(self, share: Own) -> isa.Program:
        """Return the program over planes in blocks of rows; borders are written at the start."""
        buffer = self.rows.buffer
        blocks = self.shape.blocks[0]
        self.y = self.k.tensor("y", "fp16", self.shape.n * blocks * self.plane * C0)
        tiles: list[isa.Tile | isa.Buffer] = [
            isa.Tile(buffer, slot) for slot in range(buffer.slots)
        ]
        if self.lines.folded and self.shape.strides[0] == 1:  # read with the gaps between rows
            tiles.append(self.beside)
        for tile in tiles:
            size = (tile.buffer if isinstance(tile, isa.Tile) else tile).elements
            self.k.each("vdup", size, (tile, 0), scalar=self.around)
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
            k.each("vdup", block.before * row, (x, 0), scalar=self.around)
        if block.after:
            first_element = (block.seen - block.after) * row
            k.each("vdup", block.after * row, (x, first_element), scalar=self.around)
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
    # A 3 x 3 window: largest of 3 in a row, then of 3 rows: 4 comparisons instead of 8.
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
    for unshifted in grid.runs(k):
        run = replace(
            unshifted, first=(unshifted.first[0] + start[0], unshifted.first[1] + start[1])
        )
        total = run.written(target)
        # The first comparison is of two sources, each later one of the result and one source.
        (first_region, *other_regions) = [run.read(source, tap) for tap in taps]
        for number, region in enumerate(other_regions or [first_region]):
            k.vector("vmax", total, total if number else first_region, region)


def check_pool(shape: ConvShape, chip: Chip, epilogue: Epilogue | None) -> None:
    """Raise `UnsupportedError` if the core cannot pool the result of the convolution."""
    pool = shape.pool
    if pool is None:
        return
    plan = plan_of(epilogue or PLAIN, isa.ACCUMULATOR[shape.dtype])
    kinds = {shape.dtype, plan.tiles[plan.start], shape.out_dtype, (epilogue or PLAIN).out_dtype}
    needed = {
        f"cores that bring sums through UB, not {chip.name}": chip.combined,
        "steps that rise with the sums": epilogue and epilogue.is_increasing,
        "fp16 all the way": kinds == {"fp16"},
        "one convolution, image after image": not shape.beside and shape.mixed == 1,
        "images as it writes them": (pool.n, pool.c, pool.h, pool.w)
        == (shape.n, shape.k, *shape.out_hw),
    }
    for condition, fits in needed.items():
        if not fits:
            raise UnsupportedError(
                f"for pooling on the core {condition}", f"{shape}", "use two kernels"
            )


class Pooled:
    """Max pooling of tiles of sums before they are stored; a tile has some rows of windows."""

    def __init__(
        self,
        k: isa.KernelBuilder,
        conv: ConvShape,
        epilogue: Epilogue | None,
        sizes: Sizes,
        tile: int,
    ) -> None:
        """Allocate; raise `CapacityError` if not even one channel block fits UB."""
        shape = conv.pool
        rows = int(pooled_rows(conv, tile))
        assert shape and epilogue
        self.k = k
        self.shape = shape
        self.lines = largest_lines(shape)
        self.seen = rows_seen(shape, rows)
        pixels = rows * shape.out_hw[1]
        lines = self.lines
        demand = demand_of(epilogue, k.chip, "fp32")
        assert demand
        channel_bytes = (
            2 * channel_blocks(demand, k.chip, sizes.n_own, sizes.tile_n) * demand.block_bytes
        )
        # The last repeat of 8 pixels reads and writes beyond the last row.
        spare_pixels = (PIXELS * shape.strides[1] + shape.s, PIXELS)
        # The epilogue runs on pooled pixels only: its tile is as high as those.
        sizes = replace(sizes, tile_m=isa.ceil_div(pixels, isa.FRACTAL))
        # A channel block in UB: the rows of sums, the folded rows, and the epilogue on the results.
        column_bytes = self.seen * (lines.line + lines.folded * lines.pitch) * BLOCK_BYTES
        column_bytes += sizes.tile_m * isa.FRACTAL * isa.FRACTAL * demand.tile_bytes
        room = k.chip.buffers["UB"] - channel_bytes - sum(spare_pixels) * BLOCK_BYTES
        self.columns = min(sizes.tile_n, room // column_bytes)
        if not self.columns:
            needed = f"UB for {self.seen} rows of a block and their windows: {column_bytes} bytes"
            raise CapacityError(needed, f"{room} on {k.chip.name}", "use a smaller base_m")
        size = self.columns * self.seen
        self.x = k.buffer("rows", "UB", "fp16", (size * lines.line + spare_pixels[0]) * C0)
        size = size * lines.pitch * lines.folded + spare_pixels[1]
        self.beside = k.buffer("folded", "UB", "fp16", size * C0)
        finish = new_finish(k, epilogue, "fp32", replace(sizes, taken=k.used_bytes("UB")))
        assert finish and finish.out
        self.finish = finish
        self.out = finish.out

    def begin(self) -> None:
        """Write the border around the rows, which no tile overwrites."""
        for buffer in (self.x, *([self.beside] if self.shape.strides[0] == 1 else [])):
            self.k.each("vdup", buffer.elements, (buffer, 0), scalar=LEAST)

    def drain(
        self,
        acc: isa.Queue,
        y: isa.Buffer,
        place: tuple[isa.Affine, isa.Affine],
        tile: tuple[int, int, Window],
        first_block: isa.Affine,
        loaded: Channels | None,
    ) -> None:
        """Pool a tile (blocks, fractals of each in L0C, windows) and store it at `place` in y.

        `first_block` and the numbers per channel, `loaded`, are as in `epilogue_emit.drain`.
        """
        k = self.k
        (plane, down) = place
        (blocks, fractals, window) = tile
        c = acc.dequeue()
        (oh, pw) = self.shape.out_hw
        # The tile's first row of windows is its first image row, padding included, divided by the
        # stride.
        top_row = window.rows.first - window.rows.before + self.shape.pads[0]
        row = divided(down + top_row, self.shape.strides[0])
        area = Area(plane * C0, ((0, row * pw, window.pixels),), blocks, oh * pw, 1, 0, 0)
        piece_blocks = min(self.columns, blocks)
        pieces = (
            [(isa.Affine(), piece_blocks)]
            if piece_blocks == blocks
            else segments(k, "column", blocks, piece_blocks)
        )
        for at, count in pieces:
            self._copy_sums(c, fractals, window, (at, count))
            if piece_blocks == blocks:
                acc.free()
            memories: list[Place] = [self.out.alloc(), *self.finish.scratch]
            self._fold(memories[self.finish.plan.start], window, count)
            group = self.finish.channels
            rates = group.tiles_by_name(loaded.tile) if group and loaded else {}
            block = first_block + at - loaded.first_block if loaded else at
            run = window.pixels * C0
            write_steps(k, self.finish.plan, Piece(memories, {}, rates, block, count, run))
            copy_out(k, self.out, ((y, area),), run, (at, count))
        if piece_blocks < blocks:
            acc.free()

    def _copy_sums(self, c: isa.Tile, fractals: int, window: Window, blocks: Span) -> None:
        """Copy the rows of some channel blocks from L0C to their places inside the border.

        A block of 16 channels is `fractals` high in L0C.
        """
        seen = window.rows
        (at, count) = blocks
        (_, zeros_left, columns) = columns_seen(self.shape)
        line = self.lines.line * C0
        block_elements = fractals * isa.FRACTAL * isa.FRACTAL
        sizes = (count, seen.count, columns * C0)
        start = seen.before * line + zeros_left * C0
        target = self.x.region(start, sizes, (self.seen * line, line, 1))
        source = c.region(at * block_elements, sizes, (block_elements, self.shape.w * C0, 1))
        self.k.copy(target, source, relu=self.finish.plan.relu)

    def _fold(self, to: Place, window: Window, blocks: int) -> None:
        """Write the maximum of each window of some channel blocks, one plane after the other."""
        k = self.k
        shape = self.shape
        lines = self.lines
        seen = window.rows
        pw = self.lines.width
        line = lines.line
        (down, across) = shape.strides
        end = seen.before + seen.count
        for at, rows in ((0, seen.before), (end, seen.after)):
            if not rows:
                continue
            with repeat(k, "block", blocks) as block:
                start = (block * self.seen + at) * (line * C0)
                k.each("vdup", rows * line * C0, (self.x, start), scalar=LEAST)
        x = self.x
        taps = [i * line + j for i in range(shape.r) for j in range(shape.s)]
        if lines.folded:
            # Blocks lie one behind the other: fold the rows of all of them at once.
            all_rows = Grid(blocks * self.seen, pw, line, lines.pitch, across)
            fold_largest(k, all_rows, list(range(shape.s)), x, self.beside)
            x = self.beside
            line = lines.pitch
            across = 1
            taps = [i * line for i in range(shape.r)]
        grid = Grid(window.pixels // pw, pw, down * line, pw, across)
        with repeat(k, "block", blocks) as block:
            fold_largest(k, grid, taps, x, to, (block * (self.seen * line), block * window.pixels))
