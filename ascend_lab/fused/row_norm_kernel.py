"""Layer norm of rows in fractals: the cube adds rows up, the vector unit divides by the deviation.

It is for cores that have both units. X is a tile of rows of n columns, 1 a column of ones, and '
means transposed; V is the vector unit:

    otherwise      V: sum of x, x - m, its square, their sum, / s, * scale, + bias: 9 instructions
                   for 64 numbers of a row
    here           cube    sums = X 1                            m = sums / n, the mean of each row
                   cube    C = (m 1' - X) / 2 in fp16            V copies it to UB, then to L1
                   cube    G = C C' + X C',  c = C 1            s^2 = 4 (m c - diag G) / n + eps
                   cube    D = X diag(scale) - m scale' + s bias'
                   V       y = D / s, rounded once
    saved          V keeps two instructions, a copy, and one instruction in fp16 per 64 numbers

Why this is exact enough with fp16 operands and fp32 sums:

- X diag(scale): a 16 x 16 fractal times a diagonal one for every 16 columns; sums have one term.
- m and s are fp32 numbers per row, and fp16 has 11 bits. Each becomes two fp16 numbers, high + low
  / 2^11: 1/3 = 0.33325195 + 0.1667 / 2048. They stand in even and odd columns of a fractal, against
  `scale` and `scale` / 2^11.
- C is centred, so that a mean far from 0 costs no bits, and halved, so that it stays finite.
- C = H + e is H = (m 1' - X) / 2 with a rounding error e. Since H^2 = 2 H C - C^2 + e^2 and
  2 H = m 1' - X, the sum of H^2 is that of m C - X C - C^2 plus that of e^2, which is negligible.

Tiles of rows form a pipeline: while V divides one tile, the cube computes m and s of the next.

Source: CANN's layer_norm (impl/layer_norm.py, `_check_vector_to_cube`) leaves the sums of such rows
to the cube of Ascend910 and Ascend710, in fp16, for some lengths, 768 and 1024 among them.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import CapacityError
from ascend_lab.fused.interleave import NOTHING, Work, interleave
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Queue, Region, Tile
from ascend_lab.operators.kernels.flash_nest import Axis, Piece
from ascend_lab.operators.kernels.flash_shape import AREA
from ascend_lab.operators.kernels.flash_softmax import LANES
from ascend_lab.operators.kernels.tiles import Fractals, chunks, feed_a, repeat, segments

Values = np.ndarray
LOW_FACTOR = 2048.0
"""The factor of the low fp16 number of an fp32 one: 2^11, as fp16 has 11 bits."""
GRAM_COLUMNS = 24
"""Fractals of columns that one product of G = C C' + X C' (a Gram matrix) sums over."""
TILE_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Fractals of rows that a tile may have."""
TIMED_SIZES = 3
"""Tile sizes whose kernels are written, to be timed: those that `_cycles` puts first."""
ODD_LANES = sum(1 << lane for lane in range(1, 128, 2))
"""The vector mask of the odd lanes."""


@dataclass(frozen=True, slots=True)
class NormShape:
    """Rows and columns, counted in fractals of 16, and the epsilon added to the variance."""

    rows: int
    columns: int
    epsilon: float


def packed_scale(scale: Values) -> Values:
    """Return the scale as L0B wants it: diagonal fractals for 16 columns each, then its rows.

    The first n / 16 fractals multiply X, the others (see `packed_bias`) multiply the mean.
    """
    # 16 columns times a diagonal fractal: each column by its own scale
    squares = scale.reshape(-1, 1, FRACTAL) * np.eye(FRACTAL, dtype=scale.dtype)
    return np.concatenate((squares.reshape(-1), packed_bias(scale)))


def packed_bias(bias: Values) -> Values:
    """Return fractals for 16 columns each: the bias in row 0, and 2^-11 times the bias in row 1.

    They are multiplied by fractals whose even columns hold the high parts of m or s, and whose odd
    columns hold the low parts.
    """
    fractals = np.zeros((bias.size // FRACTAL, FRACTAL, FRACTAL), bias.dtype)
    fractals[..., 0] = bias.reshape(-1, FRACTAL)
    # low parts are stored 2^11 times too large, which this factor undoes
    fractals[..., 1] = fractals[..., 0] / LOW_FACTOR
    return fractals.reshape(-1)


def fixed_operands() -> Values:
    """Return three fractals: ones, -1/2 on the diagonal, -1/2 as `packed_bias` of it.

    They are the right operands of X 1, of -X / 2 and of m 1' / 2, whose left operand holds -m.
    """
    ones = np.ones(AREA, np.float16)
    half = np.full(FRACTAL, -0.5, np.float16)
    return np.concatenate((ones, np.diag(half).reshape(-1), packed_bias(half)))


def norm_launch(shape: NormShape, chip: Chip, rows: int, block_columns: int) -> isa.Launch:
    """Return the launch over tiles of `rows` rows, `block_columns` columns at once, in fractals.

    Tensors: x, scale, bias, ones, y.

    Raises `PathError` on chips with separate vector cores, `CapacityError` where tiles do not fit.
    """
    axes = {"row": chunks(shape.rows, 1, chip.core_count)}
    return isa.spread(
        "layer_norm",
        axes,
        lambda share: _NormWriter(shape, rows, block_columns, chip).program(share),
    )


def norm_launches(shape: NormShape, chip: Chip) -> Iterator[isa.Launch]:
    """Yield launches of the `TIMED_SIZES` tile sizes that the estimate puts first and that fit."""
    core_rows = isa.ceil_div(shape.rows, chip.core_count)
    launch_count = 0
    sizes = [(n, _block_columns(shape, chip, n)) for n in TILE_ROWS if n <= core_rows]
    for rows, block_columns in sorted(sizes, key=lambda size: _cycles(shape, core_rows, *size)):
        with suppress(CapacityError):
            if launch_count < TIMED_SIZES:
                yield norm_launch(shape, chip, rows, block_columns)
                launch_count += 1


def _block_columns(shape: NormShape, chip: Chip, rows: int) -> int:
    """Return the columns of a block, so that there are at least four blocks and L0A holds two."""
    # two slots in L0A, each with a block of x and the fractals of m and s (2 x rows)
    columns_that_fit = min(8, shape.columns // 4, chip.buffers["L0A"] // (4 * AREA * rows) - 2)
    return isa.ceil_div(shape.columns, isa.ceil_div(shape.columns, max(1, columns_that_fit)))


def _cycles(shape: NormShape, core_rows: int, rows: int, block_columns: int) -> int:
    """Estimate the cycles of a core beyond the work that is the same for every tile size.

    Each tile costs about 700 cycles for m and s, and start-up cycles for its blocks of columns; the
    loads and sums of the first tile overlap with no other work.
    """
    # start-up cycles of the instructions and copies of each block of columns
    heads = isa.ceil_div(shape.columns, block_columns) * (10 * min(block_columns, 4 * rows) + 40)
    return isa.ceil_div(core_rows, rows) * (700 + heads) + 32 * rows * shape.columns


def _blocks(memory: isa.Buffer | Tile, first_fractal: Affine | int, *counts: int) -> Region:
    """Return a matrix of `counts` fractals that begins at a fractal of a buffer."""
    return memory.region(first_fractal * AREA, (*counts, FRACTAL, FRACTAL))


class _NormWriter:
    """Writes the program of cores with equal shares; sizes are in fractals."""

    def __init__(self, shape: NormShape, rows: int, block_columns: int, chip: Chip) -> None:
        """Declare tensors; allocate queues and buffers for tiles of `rows` and their blocks."""
        self.shape = shape
        self.rows = rows
        self.block_columns = block_columns
        columns = shape.columns
        self.full_blocks, self.odd_columns = divmod(columns, block_columns)
        k = self.k = KernelBuilder("layer_norm", chip)
        block_size = rows * block_columns * AREA
        row_tile_size = rows * columns * AREA
        numbers_size = rows * AREA
        sizes = {"x": shape.rows * columns, "scale": 2 * columns, "bias": columns, "ones": 3}
        self.gm = {n: k.tensor(n, "fp16", size * AREA) for n, size in sizes.items()}
        self.y = k.tensor("y", "fp16", self.gm["x"].elements)
        # three tiles of x: one is divided, the next one squared, the one after that loaded
        self.x = k.queue("x_l1", "L1", "fp16", row_tile_size, src="MTE2", dst="MTE1", depth=3)
        self.centred = k.queue("c_l1", "L1", "fp16", row_tile_size, src="MTE3", dst="MTE1", depth=1)
        self.mean = k.queue("mean_l1", "L1", "fp16", numbers_size, src="MTE3", dst="MTE1", depth=1)
        self.mean_and_deviation = k.queue(
            "both_l1", "L1", "fp16", 2 * numbers_size, src="MTE3", dst="MTE1"
        )
        ones = k.queue("ones_l1", "L1", "fp16", 3 * AREA, src="MTE2", dst="MTE1", depth=1)
        self.ready = ones
        self.constants = {"ones": ones.buffer}
        for name in ("scale", "bias"):
            self.constants[name] = ones.join(f"{name}_l1", "fp16", sizes[name] * AREA)
        self._allocate_l0(block_size, numbers_size)
        self._allocate_ub(block_size, numbers_size)

    def _allocate_l0(self, block_size: int, numbers_size: int) -> None:
        """Allocate operands and sums of the cube.

        `block_size` are the elements of a block of columns, `numbers_size` those of a fractal
        column of numbers per row.
        """
        k = self.k
        # D needs a block of x and the numbers m and s; G needs GRAM_COLUMNS fractals of C and of X
        left_size = max(block_size + 2 * numbers_size, 2 * GRAM_COLUMNS * AREA)
        right_size = max(3 * self.block_columns, GRAM_COLUMNS) * AREA
        self.left_l0 = k.queue("a_l0", "L0A", "fp16", left_size, src="MTE1", dst="M")
        self.right_l0 = k.queue("b_l0", "L0B", "fp16", right_size, src="MTE1", dst="M")
        # right operands that stay: ones, one fractal of -1/2 on its diagonal, -1/2 for each block
        fixed_size = (GRAM_COLUMNS + 1 + self.block_columns) * AREA
        self.fixed = k.buffer("ones_l0", "L0B", "fp16", fixed_size)
        self.sums = k.queue("sums_l0", "L0C", "fp32", 2 * numbers_size, src="M", dst="V", depth=1)
        self.product = k.queue("c_l0", "L0C", "fp32", block_size, src="M", dst="V")
        # C is rounded to fp16 in L0C: the same memory with another format
        self.narrow = k.view(self.product.buffer, "c_half", "fp16")

    def _allocate_ub(self, block_size: int, numbers_size: int) -> None:
        """Allocate what the vector unit works on."""
        k = self.k
        number_count = self.rows * FRACTAL
        self.out = k.queue("out", "UB", "fp16", block_size, src="V", dst="MTE3", depth=4)
        self.wide = k.buffer("wide", "UB", "fp32", max(block_size, 2 * numbers_size))
        self.inverse_deviation = k.buffer("slope", "UB", "fp32", numbers_size, 2)
        self.diagonal = k.buffer("diagonal", "UB", "fp32", numbers_size)
        self.fold = k.buffer("fold", "UB", "fp32", numbers_size // 2)
        self.spare = k.buffer("spare", "UB", "fp16", numbers_size)
        self.minus_mean = k.buffer("minus_mean", "UB", "fp32", number_count)
        self.deviation = k.buffer("number", "UB", "fp32", number_count)
        self.remainder = k.buffer("left_over", "UB", "fp32", number_count)
        self.halves = [k.buffer(n, "UB", "fp16", number_count) for n in ("high", "low")]

    def program(self, share: isa.Share) -> isa.Program:
        """Return the program of all tiles.

        If the share is not a multiple of a tile, the first tile has the remaining rows. The loop
        body divides tile t, computes m and s of tile t + 1 and loads tile t + 2; the last two
        passes have fewer tiles ahead and are written after the loop.
        """
        size, pitch, count = share
        k = self.k
        tile_rows = min(self.rows, size)
        first_row = k.param("row", count) * pitch
        odd_rows = size % tile_rows
        # the loop has full tiles only: the remaining rows come before it, in a smaller tile
        axis = Axis("tile", size // tile_rows, tile_rows, 0, first_row + odd_rows)
        k.each("vdup", tile_rows * AREA, (self.diagonal, 0), scalar=0.0)
        first_tiles = [Piece(Affine(1), first_row, odd_rows)] if odd_rows else []
        first_tiles += [axis.piece(k, i) for i in range(min(3, axis.full_count))]
        self._begin(*first_tiles[:2])
        if odd_rows:
            self._body(*first_tiles[:3])
        looped = max(0, axis.full_count - 2)
        for pieces in axis.turns(k, looped, 0, 1, 2):
            self._body(*pieces)
        for first in range(looped, axis.full_count):
            self._body(*(axis.piece(k, n) for n in range(first, axis.full_count)))
        self.ready.free()
        return k.finish()

    def _begin(self, tile: Piece, *later_tiles: Piece) -> None:
        """Load constants, and compute mean and deviation of the first tile."""
        k = self.k
        ones = self.constants["ones"]
        self.ready.alloc()
        k.copy(ones.region(), self.gm["ones"].region())
        self._load(tile)
        for name in ("scale", "bias"):
            k.copy(self.constants[name].region(), self.gm[name].region())
        self.ready.enqueue()
        self.x.dequeue()
        self.left_l0.alloc()  # tells the cube that `fixed` is there
        for i, (first_fractal, count) in enumerate(
            ((0, GRAM_COLUMNS), (GRAM_COLUMNS, 1), (GRAM_COLUMNS + 1, self.block_columns))
        ):
            to = self.fixed.region(first_fractal * AREA, (count, AREA))
            k.load2d(to, ones.region(i * AREA, (count, AREA), (0, 1)))
        self.left_l0.enqueue()
        self.left_l0.dequeue()
        self.left_l0.free()
        self._sums(tile, 0)
        self._mean(tile)
        self._centre(tile, 0)
        self._squares(tile, 0)
        for later_tile in later_tiles:
            self._load(later_tile)
            self.x.dequeue()
            self._sums(later_tile, 1)
        self._root(tile)
        self.ready.dequeue()

    def _body(self, tile: Piece, *later_tiles: Piece) -> None:
        """Divide a tile, compute mean and deviation of the next, and the sums of the one after it.

        The division is cut into eighths of the columns, which V does where it would wait: two while
        centred rows are copied to the cube, five while the cube squares them, one at the end.
        """
        mean_and_deviation = self.mean_and_deviation.dequeue()
        # later tiles are None at the end of the share
        (next_tile, tile_behind) = (*later_tiles, None, None)[:2]

        def eighths(first_eighth: int, last_eighth: int) -> Work:
            first_block, end_block = (
                (self.full_blocks * eighth + 4) // 8 for eighth in (first_eighth, last_eighth)
            )

            def finish(n: Affine) -> None:
                self._finish(tile, mean_and_deviation, n + first_block, self.block_columns)

            return end_block - first_block, finish

        if tile_behind:
            self._load(tile_behind)
        if next_tile:
            self._mean(next_tile)
            self._centre(next_tile, 1)
            interleave(self.k, eighths(0, 2))
            self._squares(next_tile, 1, eighths(2, 7))
            self._root(next_tile)
        last_eighths = eighths(7 if next_tile else 0, 8)
        if tile_behind:
            self.x.dequeue()
            self._sums(tile_behind, 2, last_eighths)
        else:
            interleave(self.k, last_eighths)
        if self.odd_columns:
            self._finish(tile, mean_and_deviation, Affine(self.full_blocks), self.odd_columns)
        self.x.free()
        self.mean_and_deviation.free()

    # -- steps ------------------------------------------------------------------------------------
    def _all(self, main: Work, write: Callable[[Affine, int], None]) -> None:
        """Emit a step for all blocks of columns, interleaved with `main`; last, the odd columns."""
        interleave(
            self.k,
            main,
            (self.full_blocks, lambda i: write(i * self.block_columns, self.block_columns)),
        )
        if self.odd_columns:
            # the remaining columns, fewer than a block
            write(Affine(self.full_blocks * self.block_columns), self.odd_columns)

    def _load(self, tile: Piece) -> None:
        """Load the rows of a tile to L1."""
        sizes = (self.shape.columns, tile.size * AREA)
        strides = (self.shape.rows * AREA, 1)
        source = self.gm["x"].region(tile.start * AREA, sizes, strides)
        self.k.copy(self.x.alloc().region(0, sizes), source)
        self.x.enqueue()

    def _held(self, ahead: int) -> Tile:
        """Return the rows of the tile `ahead` tiles after the one that is freed next."""
        return Tile(self.x.buffer, self.x.counts["free"] + ahead)

    def _take(self, queue: Queue, *sources: Region) -> Tile:
        """Load regions of L1 to a slot in L0, one behind the other; return the slot."""
        to = queue.alloc()
        element = 0
        for source in sources:
            self.k.load2d(to.region(element, source.sizes), source)
            element += source.elements
        queue.enqueue()
        return queue.dequeue()

    def _send(self, *targets: Region) -> None:
        """Copy the tile that V has written from UB to each target."""
        self.out.enqueue()
        tile = self.out.dequeue()
        for to in targets:
            self.k.copy(to, tile.region(0, to.sizes))
        self.out.free()

    def _sums(self, tile: Piece, ahead: int, main: Work = NOTHING) -> None:
        """Emit X 1, the sum of each row, in 16 equal columns."""
        k = self.k
        rows = tile.size
        x = self._held(ahead)
        area = tile.size * AREA
        sums = _blocks(self.sums.alloc(), 0, 1, rows)

        def write_sums(column: Affine, size: int) -> None:
            # 16 equal columns cost the cube no more than one: it multiplies whole fractals
            feed_a(k, self.left_l0.alloc(), Fractals(x, column * area, area), rows, size)
            self.left_l0.enqueue()
            a = _blocks(self.left_l0.dequeue(), 0, rows, size)
            ones = _blocks(self.fixed, 0, size, 1)
            k.mmad(sums, a, ones, accumulate=column)
            self.left_l0.free()

        self._all(main, write_sums)
        self.sums.enqueue()

    def _mean(self, tile: Piece) -> None:
        """Emit -m and send it to the cube, for C and for D."""
        k = self.k
        count = tile.size * FRACTAL
        minus = (self.minus_mean, 0)
        k.vector("vcgmax", self.minus_mean.region(0, count), self._take_sums(tile.size))
        k.each("vmuls", count, minus, minus, scalar=-1.0 / (self.shape.columns * FRACTAL))
        self._spread(self.minus_mean, count)
        self._send(
            *(
                queue.alloc().region(0, count * FRACTAL)
                for queue in (self.mean, self.mean_and_deviation)
            )
        )
        self.mean.enqueue()

    def _take_sums(self, fractals: int) -> Region:
        """Copy sums of the cube to UB; return 8 of the 16 equal lanes of their rows.

        `vcgmax` reduces 8 lanes to one: of 8 equal numbers it keeps that number.
        """
        size = fractals * AREA
        self.k.copy(self.wide.region(0, size), self.sums.dequeue().region(0, size))
        self.sums.free()
        return self.wide.region(0, (2 * fractals, 8, 8), (8 * FRACTAL, FRACTAL, 1))

    def _spread(self, numbers: isa.Buffer, count: int) -> None:
        """Emit fp32 numbers as high and low fp16 numbers in even and odd columns of fractals."""
        k = self.k
        # remainder = number - high; low = 2^11 remainder
        number = (numbers, 0)
        remainder = (self.remainder, 0)
        (high, low) = self.halves
        k.each("vconv", count, (high, 0), number)
        k.each("vconv", count, remainder, (high, 0))
        k.each("vsub", count, remainder, number, remainder)
        k.each("vmuls", count, remainder, remainder, scalar=LOW_FACTOR)
        k.each("vconv", count, (low, 0), remainder)
        to = self.out.alloc()
        blocks = (count, FRACTAL)
        # high numbers to all 16 columns, then low ones over the odd columns
        k.vector("vbrcb", to.region(0, blocks), high.region(0, count))
        k.vector("vbrcb", self.spare.region(0, blocks), low.region(0, count))
        k.each("vcopy", count * FRACTAL, (to, 0), (self.spare, 0), mask=ODD_LANES)

    def _centre(self, tile: Piece, ahead: int) -> None:
        """Emit C = (m 1' - X) / 2, which goes through UB back to L1."""
        k = self.k
        rows = tile.size
        area = tile.size * AREA
        x = self._held(ahead)
        mean = self.mean.dequeue()
        centred = self.centred.alloc()
        unit = _blocks(self.fixed, GRAM_COLUMNS, 1, 1)

        def write_centred(column: Affine, size: int) -> None:
            x_block = x.region(column * area, (size * rows, AREA))
            a = self._take(self.left_l0, x_block, mean.region(0, (rows, AREA)))
            product = Tile(self.narrow, self.product.alloc().slot)
            # X (-1/2 unit matrix), a fractal at a time, then + (-m) (-1/2)
            with repeat(k, "block", size) as i:
                k.mmad(_blocks(product, i * rows, 1, rows), _blocks(a, i * rows, rows, 1), unit)
            means = _blocks(a, size * rows, rows, 1)
            minus_half = _blocks(self.fixed, GRAM_COLUMNS + 1, 1, size)
            k.mmad(_blocks(product, 0, size, rows), means, minus_half, accumulate=1)
            self.left_l0.free()
            self.product.enqueue()
            c = Tile(self.narrow, self.product.dequeue().slot)
            k.copy(self.out.alloc().region(0, size * area), c.region(0, size * area))
            self.product.free()
            self._send(centred.region(column * area, size * area))

        self._all(NOTHING, write_centred)
        self.centred.enqueue()
        self.mean.free()

    def _squares(self, tile: Piece, ahead: int, main: Work = NOTHING) -> None:
        """Emit G = C C' + X C' for every 16 rows, and c = C 1."""
        k = self.k
        rows = tile.size
        area = tile.size * AREA
        c = self.centred.dequeue()
        x = self._held(ahead)
        g = self.sums.alloc()

        def write_row(row: Affine) -> None:
            for column, size in segments(k, "part", self.shape.columns, GRAM_COLUMNS):
                fractals_of_row = column * area + row * AREA, (size, AREA), (area, 1)
                a = self._take(self.left_l0, c.region(*fractals_of_row), x.region(*fractals_of_row))
                b = _blocks(self._take(self.right_l0, c.region(*fractals_of_row)), 0, size, 1)
                gram, sums = (_blocks(g, row + i, 1, 1) for i in (0, rows))
                centred_rows, x_rows = (_blocks(a, i * size, 1, size) for i in (0, 1))
                k.mmad(gram, centred_rows, b, accumulate=column)
                k.mmad(gram, x_rows, b, accumulate=1)
                k.mmad(sums, centred_rows, _blocks(self.fixed, 0, size, 1), accumulate=column)
                self.left_l0.free()
                self.right_l0.free()

        interleave(k, main, (rows, write_row))
        self.centred.free()
        self.sums.enqueue()

    def _root(self, tile: Piece) -> None:
        """Emit 1 / s in every lane of the rows, and send s to the cube.

        s^2 = 4 (m c - diagonal of G) / n + epsilon
        """
        k = self.k
        rows = tile.size
        count = tile.size * FRACTAL
        number = (self.deviation, 0)
        g = self.wide
        sum_term = (self.remainder, 0)
        lanes = (2 * rows, 8, 8), (8 * FRACTAL, FRACTAL, 1)
        self._take_sums(2 * rows)
        k.vector("vcgmax", self.remainder.region(0, count), g.region(rows * AREA, *lanes))
        k.each("vmul", count, sum_term, sum_term, (self.minus_mean, 0))
        for lane in range(0, AREA, LANES):
            lanes_shape = (rows, LANES), (AREA, 1)
            # 64 lanes are 4 rows of a fractal; row r has its diagonal number in lane r
            mask = sum(1 << i * FRACTAL + lane // FRACTAL + i for i in range(LANES // FRACTAL))
            diagonal = self.diagonal.region(lane, *lanes_shape)
            k.vector("vcopy", diagonal, g.region(lane, *lanes_shape), mask=mask)
        # a row of 16 with one number that is not 0: its sum is that number
        sides = [self.diagonal.region(lane, *lanes) for lane in (0, 8)]
        k.vector("vadd", self.fold.region(0, (2 * rows, 8, 8)), *sides)
        k.vector("vcgadd", self.deviation.region(0, count), self.fold.region(0, (2 * rows, LANES)))
        # number = diagonal of G - m c, so that the factor is -4 / n
        k.each("vadd", count, number, number, sum_term)
        k.each("vmuls", count, number, number, scalar=-4.0 / (self.shape.columns * FRACTAL))
        # rounding may leave a variance of 0 slightly negative
        k.each("vmaxs", count, number, number, scalar=0.0)
        k.each("vadds", count, number, number, scalar=self.shape.epsilon)
        k.each("vrsqrt", count, sum_term, number)
        for lane in (0, 8):
            half = self.inverse_deviation.region(lane, (count, 8), (FRACTAL, 1), slot=tile.number)
            k.vector("vbrcb", half, self.remainder.region(0, count))
        k.each("vsqrt", count, number, number)
        self._spread(self.deviation, count)
        # `_mean` has filled the first half of this slot
        queue = self.mean_and_deviation
        mean_and_deviation = Tile(queue.buffer, queue.counts["alloc"] - 1)
        self._send(mean_and_deviation.region(count * FRACTAL, count * FRACTAL))
        self.mean_and_deviation.enqueue()

    def _finish(self, tile: Piece, mean_and_deviation: Tile, number: Affine, size: int) -> None:
        """Emit y = D / s for block `number` of `size` columns.

        D = X diag(scale) - m scale' + s bias'
        """
        k = self.k
        rows = tile.size
        area = tile.size * AREA
        column = number * self.block_columns
        scale = self.constants["scale"]
        shape = (size, AREA)
        x = self._held(0).region(column * area, (size * rows, AREA))
        a = self._take(self.left_l0, x, mean_and_deviation.region(0, (2 * rows, AREA)))
        rights = (
            scale.region(column * AREA, shape),
            scale.region((column + self.shape.columns) * AREA, shape),
        )
        b = self._take(self.right_l0, *rights, self.constants["bias"].region(column * AREA, shape))
        d = self.product.alloc()
        with repeat(k, "block", size) as i:
            to = _blocks(d, i * rows, 1, rows)
            k.mmad(to, _blocks(a, i * rows, rows, 1), _blocks(b, i, 1, 1))
        # pass n = 1 adds -m scale', pass n = 2 adds s bias'
        for n in (1, 2):
            left_operand = _blocks(a, (size + n - 1) * rows, rows, 1)
            right_operand = _blocks(b, n * size, 1, size)
            k.mmad(_blocks(d, 0, size, rows), left_operand, right_operand, accumulate=1)
        self.left_l0.free()
        self.right_l0.free()
        self.product.enqueue()
        k.copy(self.wide.region(0, size * area), self.product.dequeue().region(0, size * area))
        self.product.free()
        self._divide(tile, size)
        k.each("vconv", size * area, (self.out.alloc(), 0), (self.wide, 0))
        first_fractal = (column * self.shape.rows + tile.start) * AREA
        self._send(self.y.region(first_fractal, (size, area), (self.shape.rows * AREA, 1)))

    def _divide(self, tile: Piece, size: int) -> None:
        """Emit D / s in place.

        An instruction divides a column of fractals, or 4 rows of all columns; the form that takes
        fewer instructions is used. A tile of 2 x 6 fractals takes 6 by columns, 8 by 4 rows each.
        """
        k = self.k
        groups = tile.size * AREA // LANES
        area = tile.size * AREA
        factors = self.inverse_deviation
        slot = tile.number
        if groups >= size:
            with repeat(k, "step", size) as column:
                block = self.wide.region(column * area, (groups, LANES), (LANES, 1))
                factor = factors.region(Affine(), (groups, LANES), (LANES, 1), slot=slot)
                k.vector("vmul", block, block, factor)
            return
        with repeat(k, "step", groups) as group:
            block = self.wide.region(group * LANES, (size, LANES), (area, 1))
            # A stride of 0: the same 4 rows of factors for all columns.
            factor = factors.region(group * LANES, (size, LANES), (0, 1), slot=slot)
            k.vector("vmul", block, block, factor)
