"""Layer norm of rows in fractals: the cube adds rows up, the vector unit divides by the deviation.

For cores that are both. 16 rows of FRACTAL_NZ are 16 x 16 blocks, ready to be the left operand of a
product; sums are fp32 in L0C. Alone the vector unit takes 9 instructions for 64 numbers of a row,
here 2, a copy, and one in fp16:

    cube    sums = X 1                             m = mean of each row
    cube    C = (m 1' - X) / 2 in fp16             V copies it to UB, and from there to L1
    cube    G = C C' + X C', c = C 1               s^2 = 4 (m c - diagonal of G) / n + epsilon
    cube    D = X diag(scale) - m scale' + s bias'
    V       y = D / s, rounded once

X diag(scale) is one fractal times another for every 16 columns, and exact. A number of a row, m or
s, is two halves: the first is rounded, the second 2^11 times what that leaves; they stand in even
and odd columns of a fractal, against `scale` and 2^-11 of it. C is centred, so that a mean far off
0 does no harm, and halved, so that it stays finite. It is rounded, which its squares do not show:
if C = H + e, the sum of H^2 is that of 2 H C - C^2, but for e^2, and 2 H = m 1' - X. Tiles of rows
pass in a pipeline: while V divides one, the cube finds m and s of the next.

Source: CANN's layer_norm (impl/layer_norm.py, `_check_vector_to_cube`) leaves the sums of such rows
to the cube of Ascend910 and Ascend710, in fp16, for some lengths, 768 and 1024 among them.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import CapacityError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Queue, Region, Tile
from ascend_lab.operators.kernels.flash_shape import AREA
from ascend_lab.operators.kernels.flash_steps import LANES, NOTHING, Axis, Piece, Work, mixed
from ascend_lab.operators.kernels.tiles import Fractals, chunks, feed_a, repeat, segments

Values = np.ndarray
HALF = 2048.0
"""What the second half of a number is multiplied by: fp16 has 11 bits."""
GRAM = 24
"""Fractals of columns that meet at once where rows are squared."""
HEIGHTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
TIMED = 3
"""Fractals of rows a tile may have, and how many of these sizes are written, to be timed."""
ODD = sum(1 << lane for lane in range(1, 128, 2))


@dataclass(frozen=True, slots=True)
class NormShape:
    """Rows and columns in fractals, and what is added to the variance."""

    rows: int
    columns: int
    epsilon: float


def packed_scale(scale: Values) -> Values:
    """Return a fractal with the scale on its diagonal for 16 columns each, then its rows."""
    squares = scale.reshape(-1, 1, FRACTAL) * np.eye(FRACTAL, dtype=scale.dtype)
    return np.concatenate((squares.reshape(-1), packed_bias(scale)))


def packed_bias(bias: Values) -> Values:
    """Return fractals of L0B for 16 columns each: a number and 2^-11 of it, in rows 0 and 1."""
    fractals = np.zeros((bias.size // FRACTAL, FRACTAL, FRACTAL), bias.dtype)
    fractals[..., 0] = bias.reshape(-1, FRACTAL)
    fractals[..., 1] = fractals[..., 0] / HALF
    return fractals.reshape(-1)


def fixed_operands() -> Values:
    """Return three fractals: ones, minus half a unit matrix, minus halves as `packed_bias`."""
    ones = np.ones(AREA, np.float16)
    half = np.full(FRACTAL, -0.5, np.float16)
    return np.concatenate((ones, np.diag(half).reshape(-1), packed_bias(half)))


def norm_launch(shape: NormShape, chip: Chip, rows: int, part: int) -> isa.Launch:
    """Return the launch over tiles of `rows`, `part` columns at once: x, scale, bias, ones, y.

    Raises `PathError` on chips with separate vector cores, `CapacityError` where tiles do not fit.
    """
    axes = {"row": chunks(shape.rows, 1, chip.core_count)}
    return isa.spread("layer_norm", axes, lambda own: _Writer(shape, rows, part, chip).program(own))


def norm_launches(shape: NormShape, chip: Chip) -> Iterator[isa.Launch]:
    """Yield the launches of the three tiles, of those that fit, that seem to be quickest."""
    own = isa.up(shape.rows, chip.core_count)
    found = 0
    sizes = [(n, _part(shape, chip, n)) for n in HEIGHTS if n <= own]
    for rows, part in sorted(sizes, key=lambda size: _cycles(shape, own, *size)):
        with suppress(CapacityError):
            if found < TIMED:
                yield norm_launch(shape, chip, rows, part)
                found += 1


def _part(shape: NormShape, chip: Chip, rows: int) -> int:
    """Return columns that are worked on at once: equal parts, 4 or more, that fit L0A."""
    room = min(8, shape.columns // 4, chip.buffers["L0A"] // (4 * AREA * rows) - 2)
    return isa.up(shape.columns, isa.up(shape.columns, max(1, room)))


def _cycles(shape: NormShape, own: int, rows: int, part: int) -> int:
    """Estimate what tiles add for `own` rows: m and s, heads, the first with nothing to hide."""
    heads = isa.up(shape.columns, part) * (10 * min(part, 4 * rows) + 40)
    return isa.up(own, rows) * (700 + heads) + 32 * rows * shape.columns


def _blocks(memory: isa.Buffer | Tile, at: Affine | int, *counts: int) -> Region:
    """Return a matrix of fractals from the fractal `at` on."""
    return memory.region(at * AREA, (*counts, FRACTAL, FRACTAL))


class _Writer:
    """The program of cores with equal shares; sizes in fractals."""

    def __init__(self, shape: NormShape, rows: int, part: int, chip: Chip) -> None:
        """Declare tensors, allocate queues and buffers for tiles of `rows`, and parts of them."""
        self.shape = shape
        self.rows = rows
        self.part = part
        columns = shape.columns
        self.parts, self.rest = divmod(columns, part)
        k = self.k = KernelBuilder("layer_norm", chip)
        tile = rows * part * AREA
        whole = rows * columns * AREA
        side = rows * AREA
        sizes = {"x": shape.rows * columns, "scale": 2 * columns, "bias": columns, "ones": 3}
        self.gm = {n: k.tensor(n, "fp16", size * AREA) for n, size in sizes.items()}
        self.y = k.tensor("y", "fp16", self.gm["x"].elements)
        self.x = k.queue("x_l1", "L1", "fp16", whole, src="MTE2", dst="MTE1", depth=3)
        self.centred = k.queue("c_l1", "L1", "fp16", whole, src="MTE3", dst="MTE1", depth=1)
        self.mean = k.queue("mean_l1", "L1", "fp16", side, src="MTE3", dst="MTE1", depth=1)
        self.both = k.queue("both_l1", "L1", "fp16", 2 * side, src="MTE3", dst="MTE1")
        ones = k.queue("ones_l1", "L1", "fp16", 3 * AREA, src="MTE2", dst="MTE1", depth=1)
        self.ready = ones
        self.held = {"ones": ones.buffer}
        for name in ("scale", "bias"):
            self.held[name] = ones.join(f"{name}_l1", "fp16", sizes[name] * AREA)
        left = max(tile + 2 * side, 2 * GRAM * AREA)
        right = max(3 * part, GRAM) * AREA
        self.left = k.queue("a_l0", "L0A", "fp16", left, src="MTE1", dst="M")
        self.right = k.queue("b_l0", "L0B", "fp16", right, src="MTE1", dst="M")
        self.fixed = k.buffer("ones_l0", "L0B", "fp16", (GRAM + 1 + part) * AREA)
        self.sums = k.queue("sums_l0", "L0C", "fp32", 2 * side, src="M", dst="V", depth=1)
        self.product = k.queue("c_l0", "L0C", "fp32", tile, src="M", dst="V")
        self.narrow = k.view(self.product.buffer, "c_half", "fp16")
        self.out = k.queue("out", "UB", "fp16", tile, src="V", dst="MTE3", depth=4)
        self.wide = k.buffer("wide", "UB", "fp32", max(tile, 2 * side))
        self.slope = k.buffer("slope", "UB", "fp32", side, 2)
        self.diagonal = k.buffer("diagonal", "UB", "fp32", side)
        self.fold = k.buffer("fold", "UB", "fp32", side // 2)
        self.spare = k.buffer("spare", "UB", "fp16", side)
        self.minus, self.number, self.left_over = (
            k.buffer(n, "UB", "fp32", rows * FRACTAL) for n in ("minus_mean", "number", "left_over")
        )
        self.halves = [k.buffer(n, "UB", "fp16", rows * FRACTAL) for n in ("high", "low")]

    def program(self, own: isa.Share) -> isa.Program:
        """Write all tiles; what a body reads of two tiles ahead is loaded before it."""
        size, pitch, count = own
        k = self.k
        each = min(self.rows, size)
        first = k.param("row", count) * pitch
        rest = size % each
        axis = Axis("tile", size // each, each, 0, first + rest)
        k.each("vdup", each * AREA, (self.diagonal, 0), scalar=0.0)
        begin = [Piece(Affine(1), first, rest)] if rest else []
        begin += [next(axis.turns(k, 1, i))[0] for i in range(min(3, axis.full))]
        self._begin(*begin[:2])
        if rest:
            self._body(*begin[:3])
        for pieces in axis.turns(k, max(0, axis.full - 2), 0, 1, 2):
            self._body(*pieces)
        for i in range(max(0, axis.full - 2), axis.full):
            self._body(*(next(axis.turns(k, 1, n))[0] for n in range(i, axis.full)))
        self.ready.free()
        return k.finish()

    def _begin(self, tile: Piece, *after: Piece) -> None:
        """Load operands, and find mean and deviation of the first tile, with nothing to hide."""
        k = self.k
        ones = self.held["ones"]
        self.ready.alloc()
        k.copy(ones.region(), self.gm["ones"].region())
        self._load(tile)
        for name in ("scale", "bias"):
            k.copy(self.held[name].region(), self.gm[name].region())
        self.ready.enqueue()
        self.x.dequeue()
        self.left.alloc()  # tells the cube that `fixed` is there
        for i, (at, count) in enumerate(((0, GRAM), (GRAM, 1), (GRAM + 1, self.part))):
            to = self.fixed.region(at * AREA, (count, AREA))
            k.load2d(to, ones.region(i * AREA, (count, AREA), (0, 1)))
        self.left.enqueue()
        self.left.dequeue()
        self.left.free()
        self._sums(tile, 0)
        self._mean(tile)
        self._centre(tile, 0)
        self._squares(tile, 0)
        for other in after:
            self._load(other)
            self.x.dequeue()
            self._sums(other, 1)
        self._root(tile)
        self.ready.dequeue()

    def _body(self, tile: Piece, *others: Piece) -> None:
        """Divide a tile, find mean and deviation of the next, and the sums of the one behind.

        Eighths of the columns stand where V would wait: for the centred rows on their way to the
        cube, and for both numbers of the next tile.
        """
        both = self.both.dequeue()
        (after, later) = (*others, None, None)[:2]

        def share(first: int, last: int) -> Work:
            low, high = ((self.parts * eighth + 4) // 8 for eighth in (first, last))
            return high - low, lambda n: self._finish(tile, both, n + low)

        if later:
            self._load(later)
        if after:
            self._mean(after)
            self._centre(after, 1)
            mixed(self.k, share(0, 2))
            self._squares(after, 1, share(2, 7))
            self._root(after)
        end = share(7 if after else 0, 8)
        if later:
            self.x.dequeue()
            self._sums(later, 2, end)
        else:
            mixed(self.k, end)
        if self.rest:
            self._finish(tile, both, Affine(self.parts), self.rest)
        self.x.free()
        self.both.free()

    # -- steps ------------------------------------------------------------------------------------
    def _all(self, main: Work, write: Callable[[Affine, int], None]) -> None:
        """Emit a step for all parts of the columns, in turns with other work; then the rest."""
        mixed(self.k, main, (self.parts, lambda i: write(i * self.part, self.part)))
        if self.rest:
            write(Affine(self.parts * self.part), self.rest)

    def _load(self, tile: Piece) -> None:
        """Bring rows to L1."""
        sizes = (self.shape.columns, tile.size * AREA)
        strides = (self.shape.rows * AREA, 1)
        source = self.gm["x"].region(tile.start * AREA, sizes, strides)
        self.k.copy(self.x.alloc().region(0, sizes), source)
        self.x.enqueue()

    def _held(self, ahead: int) -> Tile:
        """Return the rows that come so many tiles later than those that go next."""
        return Tile(self.x.buffer, self.x.counts["free"] + ahead)

    def _take(self, queue: Queue, *sources: Region) -> Tile:
        """Bring fractals to L0, one behind the other."""
        to = queue.alloc()
        at = 0
        for source in sources:
            self.k.load2d(to.region(at, source.sizes), source)
            at += source.elements
        queue.enqueue()
        return queue.dequeue()

    def _send(self, *targets: Region) -> None:
        """Move what V has written elsewhere."""
        self.out.enqueue()
        tile = self.out.dequeue()
        for to in targets:
            self.k.copy(to, tile.region(0, to.sizes))
        self.out.free()

    def _sums(self, tile: Piece, ahead: int, main: Work = NOTHING) -> None:
        """Emit the sums of rows, in 16 equal columns."""
        k = self.k
        rows = tile.size
        x = self._held(ahead)
        area = tile.size * AREA
        sums = _blocks(self.sums.alloc(), 0, 1, rows)

        def part(at: Affine, size: int) -> None:
            feed_a(k, self.left.alloc(), Fractals(x, at * area, area), rows, size)
            self.left.enqueue()
            a = _blocks(self.left.dequeue(), 0, rows, size)
            ones = _blocks(self.fixed, 0, size, 1)
            k.mmad(sums, a, ones, accumulate=at)
            self.left.free()

        self._all(main, part)
        self.sums.enqueue()

    def _mean(self, tile: Piece) -> None:
        """Emit minus the mean of rows."""
        k = self.k
        count = tile.size * FRACTAL
        minus = (self.minus, 0)
        k.vector("vcgmax", self.minus.region(0, count), self._take_sums(tile.size))
        k.each("vmuls", count, minus, minus, scalar=-1.0 / (self.shape.columns * FRACTAL))
        self._spread(self.minus, count)
        self._send(*(queue.alloc().region(0, count * FRACTAL) for queue in (self.mean, self.both)))
        self.mean.enqueue()

    def _take_sums(self, fractals: int) -> Region:
        """Bring sums of the cube to UB; return 8 of the 16 lanes of their rows."""
        size = fractals * AREA
        self.k.copy(self.wide.region(0, size), self.sums.dequeue().region(0, size))
        self.sums.free()
        return self.wide.region(0, (2 * fractals, 8, 8), (8 * FRACTAL, FRACTAL, 1))

    def _spread(self, numbers: isa.Buffer, count: int) -> None:
        """Emit the halves of numbers in even and odd columns of fractals, ready to be sent."""
        k = self.k
        number = (numbers, 0)
        rest = (self.left_over, 0)
        (high, low) = self.halves
        k.each("vconv", count, (high, 0), number)
        k.each("vconv", count, rest, (high, 0))
        k.each("vsub", count, rest, number, rest)
        k.each("vmuls", count, rest, rest, scalar=HALF)
        k.each("vconv", count, (low, 0), rest)
        to = self.out.alloc()
        blocks = (count, FRACTAL)
        k.vector("vbrcb", to.region(0, blocks), high.region(0, count))
        k.vector("vbrcb", self.spare.region(0, blocks), low.region(0, count))
        k.each("vcopy", count * FRACTAL, (to, 0), (self.spare, 0), mask=ODD)

    def _centre(self, tile: Piece, ahead: int) -> None:
        """Emit halves of what rows are off their mean, back to L1."""
        k = self.k
        rows = tile.size
        area = tile.size * AREA
        x = self._held(ahead)
        mean = self.mean.dequeue()
        there = self.centred.alloc()
        unit = _blocks(self.fixed, GRAM, 1, 1)

        def part(at: Affine, size: int) -> None:
            some = x.region(at * area, (size * rows, AREA))
            a = self._take(self.left, some, mean.region(0, (rows, AREA)))
            c = Tile(self.narrow, self.product.alloc().slot)
            with repeat(k, "block", size) as i:
                k.mmad(_blocks(c, i * rows, 1, rows), _blocks(a, i * rows, rows, 1), unit)
            means = _blocks(a, size * rows, rows, 1)
            half = _blocks(self.fixed, GRAM + 1, 1, size)
            k.mmad(_blocks(c, 0, size, rows), means, half, accumulate=1)
            self.left.free()
            self.product.enqueue()
            c = Tile(self.narrow, self.product.dequeue().slot)
            k.copy(self.out.alloc().region(0, size * area), c.region(0, size * area))
            self.product.free()
            self._send(there.region(at * area, size * area))

        self._all(NOTHING, part)
        self.centred.enqueue()
        self.mean.free()

    def _squares(self, tile: Piece, ahead: int, main: Work = NOTHING) -> None:
        """Emit products of every 16 rows of C with themselves and X, and sums of C."""
        k = self.k
        rows = tile.size
        area = tile.size * AREA
        c = self.centred.dequeue()
        x = self._held(ahead)
        g = self.sums.alloc()

        def line(row: Affine) -> None:
            for at, size in segments(k, "part", self.shape.columns, GRAM):
                place = at * area + row * AREA, (size, AREA), (area, 1)
                a = self._take(self.left, c.region(*place), x.region(*place))
                b = _blocks(self._take(self.right, c.region(*place)), 0, size, 1)
                to, sums = (_blocks(g, row + i, 1, 1) for i in (0, rows))
                first, second = (_blocks(a, i * size, 1, size) for i in (0, 1))
                k.mmad(to, first, b, accumulate=at)
                k.mmad(to, second, b, accumulate=1)
                k.mmad(sums, first, _blocks(self.fixed, 0, size, 1), accumulate=at)
                self.left.free()
                self.right.free()

        mixed(k, main, (rows, line))
        self.centred.free()
        self.sums.enqueue()

    def _root(self, tile: Piece) -> None:
        """Emit 1 / s in every lane of rows, and mean and s on their way to the cube."""
        k = self.k
        rows = tile.size
        count = tile.size * FRACTAL
        number = (self.number, 0)
        g = self.wide
        rest = (self.left_over, 0)
        lanes = (2 * rows, 8, 8), (8 * FRACTAL, FRACTAL, 1)
        self._take_sums(2 * rows)
        k.vector("vcgmax", self.left_over.region(0, count), g.region(rows * AREA, *lanes))
        k.each("vmul", count, rest, rest, (self.minus, 0))
        for at in range(0, AREA, LANES):
            there = (rows, LANES), (AREA, 1)
            mask = sum(1 << i * FRACTAL + at // FRACTAL + i for i in range(LANES // FRACTAL))
            k.vector("vcopy", self.diagonal.region(at, *there), g.region(at, *there), mask=mask)
        sides = [self.diagonal.region(at, *lanes) for at in (0, 8)]
        k.vector("vadd", self.fold.region(0, (2 * rows, 8, 8)), *sides)
        k.vector("vcgadd", self.number.region(0, count), self.fold.region(0, (2 * rows, LANES)))
        k.each("vadd", count, number, number, rest)
        k.each("vmuls", count, number, number, scalar=-4.0 / (self.shape.columns * FRACTAL))
        k.each("vmaxs", count, number, number, scalar=0.0)
        k.each("vadds", count, number, number, scalar=self.shape.epsilon)
        k.each("vrsqrt", count, rest, number)
        for at in (0, 8):
            half = self.slope.region(at, (count, 8), (FRACTAL, 1), slot=tile.number)
            k.vector("vbrcb", half, self.left_over.region(0, count))
        k.each("vsqrt", count, number, number)
        self._spread(self.number, count)
        both = Tile(self.both.buffer, self.both.counts["alloc"] - 1)
        self._send(both.region(count * FRACTAL, count * FRACTAL))
        self.both.enqueue()

    def _finish(self, tile: Piece, both: Tile, number: Affine, size: int = 0) -> None:
        """Emit a part of the columns of y."""
        k = self.k
        rows = tile.size
        area = tile.size * AREA
        size = size or self.part
        at = number * self.part
        scale = self.held["scale"]
        some = (size, AREA)
        x = self._held(0).region(at * area, (size * rows, AREA))
        a = self._take(self.left, x, both.region(0, (2 * rows, AREA)))
        rights = scale.region(at * AREA, some), scale.region((at + self.shape.columns) * AREA, some)
        b = self._take(self.right, *rights, self.held["bias"].region(at * AREA, some))
        d = self.product.alloc()
        with repeat(k, "block", size) as i:
            to = _blocks(d, i * rows, 1, rows)
            left = _blocks(a, i * rows, rows, 1)
            k.mmad(to, left, _blocks(b, i, 1, 1))
        for n in (1, 2):
            left = _blocks(a, (size + n - 1) * rows, rows, 1)
            right = _blocks(b, n * size, 1, size)
            k.mmad(_blocks(d, 0, size, rows), left, right, accumulate=1)
        self.left.free()
        self.right.free()
        self.product.enqueue()
        k.copy(self.wide.region(0, size * area), self.product.dequeue().region(0, size * area))
        self.product.free()
        self._divide(tile, size)
        k.each("vconv", size * area, (self.out.alloc(), 0), (self.wide, 0))
        there = (at * self.shape.rows + tile.start) * AREA
        self._send(self.y.region(there, (size, area), (self.shape.rows * AREA, 1)))

    def _divide(self, tile: Piece, size: int) -> None:
        """Emit wide / s, a column of fractals or 4 rows of them at a time."""
        k = self.k
        groups = tile.size * AREA // LANES
        area = tile.size * AREA
        count = size
        step = area
        shape = (groups, LANES)
        strides = (LANES, 1)
        again = (LANES, 1)
        if groups < size:
            count = groups
            step = LANES
            shape = (size, LANES)
            strides = (area, 1)
            again = (0, 1)
        with repeat(k, "step", count) as i:
            first = Affine() if again[0] else i * LANES
            some = self.wide.region(i * step, shape, strides)
            k.vector("vmul", some, some, self.slope.region(first, shape, again, slot=tile.number))
