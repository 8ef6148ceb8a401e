"""Steps of FlashAttention: online softmax on one block of scores, and a loop nest of two stages.

Scores lie in L0C as (keys / 16, rows, 16). The vector unit copies them twice, first for their
maxima, then as fp16, and in between the cube subtracts the maxima: it adds 16 products with -128.
Maximum m and factor f are one number per row; m is stored as a sum of two fp16 numbers, high and
low. The last 16 columns of v are ones, so that those of o are l.

    m' = max(m, max(s)),  p = exp(c (s - m')),  f = exp(c (m - m')),  o' = f o + p v,  y = o / l

c scales products to scores. For the first block of keys m' = max(s), but finite, and o' = p v.
s - m' is rounded to fp16 before its exponential is taken. The error of e^-x is at most
x e^-x 2^-11, no more than 1.8e-4, while rounding p itself may cost 2.4e-4; it is three times as
large if c is not a power of two.

Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (FlashAttention).

Products are computed some steps before the vector unit uses them. The nest loops over matrices,
blocks of rows and tiles of keys. On one of these axes the first stage begins with `lead` pieces
alone, then both stages alternate, and the second stage ends alone:

    0 1 2 3 4  then 5, 0'; 6, 1'; ...  then the last five of the second stage
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Region, Tile, ceil_div
from ascend_lab.operators.kernels import flash_shape, tiles
from ascend_lab.operators.kernels.flash_shape import (
    AREA,
    GRID,
    FlashShape,
    FlashTiling,
    Matrix,
    Own,
)

Memory = Buffer | Tile
LANES = 64
"""fp32 lanes of a repeat: 4 rows of 16."""
LEAST = -1.0e30
"""Stands for minus infinity, but finite: the difference of two of them is 0, not NaN."""
STEP = 2048.0
"""Maxima are counted in these, so that their halves reach to 2^27."""
LOWEST = -65504.0
"""The least maximum of a row, in steps: finite in fp16."""


@dataclass(frozen=True, slots=True)
class State:
    """Buffers of UB that only the vector unit uses, in fp32 except for `halves`.

    `wide` has a tile of L0C, `work` 16 numbers per row, the others one number per row, and `best`
    one number per 8 keys.
    """

    builder: KernelBuilder
    wide: Buffer
    best: Buffer
    work: Buffer
    peak: Buffer
    factor: Buffer
    remainder: Buffer
    halves: Buffer
    mask: Buffer
    scale: float

    @classmethod
    def make(cls, k: KernelBuilder, shape: FlashShape, tiling: FlashTiling) -> "State":
        """Allocate the buffers for blocks of a tiling."""
        rows = tiling.rows
        row_elements = flash_shape.row_lanes(tiling.rows)
        # A tile of scores, or of the output with its column of ones.
        columns = max(tiling.keys, (shape.fractals[3] + 1) * FRACTAL)

        def buffer(name: str, elements: int, slots: int = 1, dtype: str = "fp32") -> Buffer:
            return k.buffer(name, "UB", dtype, elements, slots)

        work = buffer("work", rows * FRACTAL)
        return cls(
            k,
            buffer("wide", rows * columns),
            buffer("best", rows * tiling.keys // 8),
            work,
            buffer("peak", row_elements, 2),
            buffer("factor", row_elements, 2),
            buffer("left", row_elements),
            buffer("halves", row_elements, 2, "fp16"),
            buffer("mask_wide", rows * tiling.keys) if shape.mask == "full" else work,
            shape.scale,
        )


def lanes(buffer: Memory, rows: int, at: Affine | int = 0) -> Region:
    """Return `rows` fractals (rows x 256 elements) from fractal `at` on as vector repeats."""
    return buffer.region(at * AREA, (rows * AREA // LANES, LANES))


def add_mask(s: State, mask: Tile, fractals: int) -> None:
    """Emit scores in UB += mask / c in fp32, both (keys / 16, rows, 16)."""
    k = s.builder
    count = fractals * AREA
    wide = (s.mask, 0)
    scores = (s.wide, 0)
    k.each("vconv", count, wide, (mask, 0))
    # The scale is applied to all scores later: divide the mask by it.
    k.each("vaxpy", count, scores, scores, wide, scalar=1.0 / s.scale)


def drop_padding(s: State, rows: int, keys: int, ragged_keys: int) -> None:
    """Emit LEAST for the scores of padding: lanes from `ragged_keys` on of the last fractal."""
    # 4 keys in the last fractal: lanes 4 to 15 of every 16.
    fractal = ((1 << FRACTAL) - 1) >> ragged_keys << ragged_keys
    bits = sum(fractal << at for at in range(0, LANES, FRACTAL))
    last_column = lanes(s.wide, rows, (keys - 1) * rows)
    s.builder.vector("vdup", last_column, scalar=LEAST, mask=bits)


def take_peaks(s: State, out: Tile, rows: int, keys: int, block: Affine) -> None:
    """Emit m' of the scores in UB, divided by STEP, and to `out` its high and low parts."""
    k = s.builder
    lanes_of_rows = flash_shape.row_lanes(rows * FRACTAL)
    best = (s.best, 0)
    remainder = (s.remainder, 0)
    tallest(s, rows, keys)
    # Maxima in steps of 2048: the largest that fp16 holds is 65504 * 2048, about 2^27.
    k.each("vmuls", lanes_of_rows, best, best, scalar=1.0 / STEP)
    new_peak = (Tile(s.peak, block + 1), 0)
    if block == Affine():
        k.each("vmaxs", lanes_of_rows, new_peak, best, scalar=LOWEST)
    else:
        k.each("vmax", lanes_of_rows, new_peak, best, (Tile(s.peak, block), 0))
    high, low = (Tile(s.halves, Affine(half)) for half in (0, 1))
    k.each("vconv", lanes_of_rows, (high, 0), new_peak)
    k.each("vconv", lanes_of_rows, remainder, (high, 0))
    # m = high + low: high is m rounded to fp16, low what the rounding took away.
    k.each("vsub", lanes_of_rows, remainder, new_peak, remainder)
    k.each("vconv", lanes_of_rows, (low, 0), remainder)
    for half, number in enumerate((high, low)):
        to = out.region(half * rows * AREA, (rows * FRACTAL, FRACTAL))
        k.vector("vbrcb", to, number.region(0, rows * FRACTAL))


def tallest(s: State, rows: int, keys: int) -> None:
    """Emit best (rows) = the maxima over keys: of 8 lanes at once, then by repeated halving."""
    k = s.builder
    # vcgmax leaves a maximum of 8 lanes: two for each fractal of 16 keys.
    count = 2 * keys
    repeats = 2 * rows * keys
    for half in (0, 1):
        for at, size in tiles.segments(
            k, "part", repeats, ceil_div(repeats, ceil_div(repeats, k.chip.max_repeat))
        ):
            source = s.wide.region(at * 128 + half * 8, (size, 8, 8), (128, FRACTAL, 1))
            k.vector("vcgmax", s.best.region((at + half * repeats) * 8, size * 8), source)
    while count > 1:
        folded_lanes = count // 2 * rows * FRACTAL
        second_half = (count - count // 2) * rows * FRACTAL
        k.each("vmax", folded_lanes, (s.best, 0), (s.best, 0), (s.best, second_half))
        count -= count // 2


def take_factor(s: State, rows: int, block: Affine) -> None:
    """Emit f of block `block`, one number per row; two blocks are in progress at a time."""
    k = s.builder
    count = flash_shape.row_lanes(rows * FRACTAL)
    factor = (Tile(s.factor, block), 0)
    old_peak, new_peak = ((Tile(s.peak, at), 0) for at in (block, block + 1))
    k.each("vsub", count, factor, old_peak, new_peak)
    k.each("vmuls", count, factor, factor, scalar=STEP * s.scale)
    k.each("vexp", count, factor, factor)


def weigh(s: State, out: Tile, fractals: int) -> None:
    """Emit p = exp(c x) of the fp16 numbers in `out`, in place."""
    k = s.builder
    count = fractals * AREA
    place = (out, 0)
    if s.scale != 1.0:
        k.each("vmuls", count, place, place, scalar=s.scale)
    k.each("vexp", count, place, place)


def rescale(s: State, out: Tile, rows: int, width: int, block: Affine) -> None:
    """Emit o = f o, from L0C to UB and back, with the factor of block `block`."""
    k = s.builder
    count = rows * FRACTAL
    all_sums = (0, width * rows * AREA)
    k.copy(s.wide.region(*all_sums), out.region(*all_sums))
    for at in (0, 8):
        # vbrcb writes 8 equal lanes: twice, for the 16 of a row.
        spread = s.work.region(at, (count, 8), (FRACTAL, 1))
        k.vector("vbrcb", spread, Tile(s.factor, block).region(0, count))
    columns(s, rows, width)
    k.copy(out.region(*all_sums), s.wide.region(*all_sums))


def columns(s: State, rows: int, width: int) -> None:
    """Emit wide *= the 16 lanes of each row in `work`, for `width` columns of fractals."""
    k = s.builder
    with tiles.repeat(k, "column", width) as e:
        column = lanes(s.wide, rows, e * rows)
        k.vector("vmul", column, column, lanes(s.work, rows))


def finish(s: State, sums: Tile, out: Tile, rows: int, width: int) -> None:
    """Emit out = o / l as fp16; `sums` are o, and l in the last of `width` columns of 16."""
    k = s.builder
    size = (width - 1) * rows * AREA
    all_sums = (0, width * rows * AREA)
    k.copy(s.wide.region(*all_sums), sums.region(*all_sums))
    # l stands in the last column of 16: multiply by 1 / l instead of dividing.
    k.vector("vrec", lanes(s.work, rows), lanes(s.wide, rows, (width - 1) * rows))
    columns(s, rows, width - 1)
    k.each("vconv", size, (out, 0), (s.wide, 0))


# -- two stages of one nest ------------------------------------------------------------------------
class Piece(NamedTuple):
    """One step along an axis: its number, where it starts, its size, whether it is the remainder.

    For matrices `start` is the entry of the batch.
    """

    number: Affine
    start: Affine
    size: int
    is_rest: bool = False
    head: Affine = Affine()

    @property
    def matrix(self) -> Matrix:
        """Entry and head of a matrix."""
        return self.start, self.head


class Block(NamedTuple):
    """A block of rows and of keys: where they are, its number among those of its rows.

    `ragged` keys are in its last fractal, where that is not full.
    """

    matrix: Matrix
    rows: tiles.Span
    keys: tiles.Span
    number: Affine
    ragged: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """From `first` on, `full` pieces of size `each`, then a remainder of another size (0: none).

    Pieces are numbered head by head, from `head` on, with equally many per head.
    """

    name: str
    full: int
    each: int
    rest: int
    first: Affine
    heads: int = 1
    head: Affine = field(default_factory=Affine)

    @property
    def count(self) -> int:
        """Pieces in all."""
        return self.full + (self.rest > 0)

    def last(self) -> Iterator[Piece]:
        """Yield the rest, if there is one."""
        if self.rest:
            yield Piece(Affine(self.full), self.first + self.full * self.each, self.rest, True)

    def turns(self, k: KernelBuilder, count: int, *shifts: int) -> Iterator[list[Piece]]:
        """Yield full pieces n + shift, one per shift, for all n < `count`, in loops if possible."""
        # Loops run inside a head, and must be cut where a shifted piece would carry into the next
        # head.
        head_pieces = self.full // self.heads or 1
        # A shift of 4 in heads of 10 pieces carries from piece 6 on: loops over 0 .. 5 and 6 .. 9.
        cuts = {0, *(-shift % head_pieces for shift in shifts)}
        for first_head, head_count, size in (
            (0, count // head_pieces, head_pieces),
            (count // head_pieces, 1, count % head_pieces),
        ):
            ends = sorted({*(n for n in cuts if n < size), size}) if head_count else []
            with tiles.repeat(k, "head", head_count or 1) as head:
                for start_piece, end_piece in pairwise(ends):
                    with tiles.repeat(k, self.name, end_piece - start_piece) as at:
                        places = (divmod(start_piece + shift, head_pieces) for shift in shifts)
                        yield [
                            self._piece(head + first_head + heads_further, at + piece_in_head)
                            for heads_further, piece_in_head in places
                        ]

    def _piece(self, head: Affine, at: Affine) -> Piece:
        """Return piece `at` of a head."""
        number = head * (self.full // self.heads) + at
        start = self.first + at * self.each
        return Piece(number, start, self.each, head=self.head + head)

    def pieces(self, k: KernelBuilder) -> Iterator[Piece]:
        """Yield all pieces, the full ones in a loop."""
        for (piece,) in self.turns(k, self.full, 0):
            yield piece
        yield from self.last()

    def threes(self, k: KernelBuilder) -> Iterator[tuple[Piece | None, ...]]:
        """Yield (previous, piece, next) for each piece; None stands for pieces beyond the ends."""
        first_numbers = range(self.full) if self.full < 2 else (0, 1)
        first_pieces = [None, None, *(next(self.turns(k, 1, n))[0] for n in first_numbers)]
        if self.full > 1:
            yield from zip(first_pieces, first_pieces[1:], first_pieces[2:], strict=False)
            for pieces in self.turns(k, self.full - 2, 0, 1, 2):
                yield tuple(pieces)
            first_pieces = [next(self.turns(k, 1, self.full - n))[0] for n in (2, 1)]
        last_pieces = [*first_pieces, *self.last(), None, None]
        yield from zip(last_pieces, last_pieces[1:], last_pieces[2:], strict=False)

    def staggered(self, k: KernelBuilder, lead: int) -> Iterator[tuple[int, Piece]]:
        """Yield (stage, piece) with stage 0 ahead of stage 1 by `lead` pieces, or by all pieces."""
        # With lead 2 and 5 pieces: 0 1, then 2 0', 3 1', 4 2', then 3' 4'.
        lead = min(lead, self.full)
        for (piece,) in self.turns(k, lead, 0):
            yield 0, piece
        for ahead, piece in self.turns(k, self.full - lead, lead, 0):
            yield 0, ahead
            yield 1, piece
        for piece in self.last():
            yield 0, piece
        for (piece,) in self.turns(k, lead, self.full - lead):
            yield 1, piece
        for piece in self.last():
            yield 1, piece


def places(k: KernelBuilder, shares: Own) -> tuple[Affine, ...]:
    """Return the coordinates of a core in the grid, one per axis."""
    return tuple(k.param(name, share[2]) for name, share in zip(GRID, shares, strict=True))


def axes(core_shares: Own, core: Sequence[Affine], side: int) -> tuple[Axis, Axis]:
    """Return the matrices a core of the grid owns, and its blocks of `side` rows, in fractals."""
    entry, row, head = (place * share[1] for place, share in zip(core, core_shares, strict=True))
    entries, rows, heads = (share[0] for share in core_shares)
    return (
        Axis("matrix", entries * heads, 1, 0, entry, heads, head),
        Axis("block", rows // side, side, rows % side, row),
    )


Place = tuple[Piece, ...]
"""Where a stage is: matrix, block of rows and, for a tile, keys."""


class Stage(Protocol):
    """What a core does at the beginning of a block of rows, for each tile of keys, at its end."""

    def open(self, at: Place) -> None:
        """Begin a block."""

    def tile(self, at: Place) -> None:
        """Do one tile of keys."""

    def close(self, at: Place) -> None:
        """End a block."""


@dataclass(frozen=True, slots=True)
class Nest:
    """Matrices, blocks and tiles; the first stage runs `lead` pieces ahead on one axis."""

    axes: tuple[Axis, Axis, Axis]
    ahead: int
    lead: int

    @classmethod
    def of(cls, axes: tuple[Axis, Axis, Axis], tiles: int, max_in_flight: int) -> "Nest":
        """Return the nest whose first stage is about `tiles` tiles ahead of the second.

        At most `max_in_flight` tiles may be in flight. Single tiles run ahead if a block has enough
        of them, else whole blocks or matrices.
        """
        _, blocks, keys = (axis.count for axis in axes)
        if tiles < keys:
            return cls(axes, 2, tiles)
        if 2 * blocks * keys <= max_in_flight:
            # A matrix has few tiles: whole matrices run ahead.
            return cls(axes, 0, max(1, tiles // (blocks * keys)))
        if 2 * keys <= max_in_flight:
            # A block of rows has few tiles: whole blocks run ahead.
            return cls(axes, 1, max(1, tiles // keys))
        return cls(axes, 2, tiles)

    @property
    def in_flight(self) -> int:
        """Most tiles that the first stage has begun and the second has not ended."""
        inner = 1
        for axis in self.axes[self.ahead + 1 :]:
            inner *= axis.count
        # 5 pieces begun of 2 blocks with 3 tiles each: 30 tiles.
        return (self.lead + 1) * inner

    def number(self, at: Place) -> Affine:
        """Number a block or tile among those that may be in flight."""
        total = Affine()
        for axis, piece in list(zip(self.axes, at, strict=False))[self.ahead :]:
            total = total * axis.count + piece.number
        return total

    def run(self, k: KernelBuilder, first: Stage, second: Stage) -> None:
        """Write both stages."""
        self._outer(k, (first, second), ())

    def _outer(self, k: KernelBuilder, stages: tuple[Stage, Stage], at: Place) -> None:
        axis = self.axes[len(at)]
        if len(at) < self.ahead:
            for piece in axis.pieces(k):
                self._outer(k, stages, (*at, piece))
            return
        # If tiles run ahead, both stages begin and end the block together.
        opened = stages if len(at) == 2 else ()
        for stage in opened:
            stage.open(at)
        for stage_index, piece in axis.staggered(k, self.lead):
            self._inner(k, stages[stage_index], (*at, piece))
        for stage in opened:
            stage.close(at)

    def _inner(self, k: KernelBuilder, stage: Stage, at: Place) -> None:
        if len(at) == 3:
            stage.tile(at)
            return
        if len(at) == 2:
            stage.open(at)
        for piece in self.axes[len(at)].pieces(k):
            self._inner(k, stage, (*at, piece))
        if len(at) == 2:
            stage.close(at)


# -- two pieces of work, interleaved --------------------------------------------------------------
Work = tuple[int, Callable[[Affine], None]]
"""How many pieces there are, and what writes one of them."""
NOTHING: Work = 0, lambda _: None


def mixed(k: KernelBuilder, main: Work, beside: Work = NOTHING) -> None:
    """Emit the pieces of `main` and of `beside` interleaved, so that both end together."""
    # 12 pieces and 4 others: 4 turns, each with 3 pieces of the one and 1 of the other.
    turns = min(main[0], beside[0]) or max(main[0], beside[0], 1)
    with tiles.repeat(k, "turn", turns) as i:
        for count, write in (main, beside):
            for position in range(count // turns):
                write(i * (count // turns) + position)
    for count, write in (main, beside):
        if remaining := count % turns:
            with tiles.repeat(k, "rest", remaining) as i:
                write(i + (count - remaining))
