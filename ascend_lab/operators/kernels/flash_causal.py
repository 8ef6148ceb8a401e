"""Causal FlashAttention on chips with separate cube and vector cores: invisible tiles are skipped.

Rows are queries, or several heads of each query side by side. Query i of s sees the keys up to
number i + t - s: the last query sees all t keys. A tile is a range of keys. A block of rows takes
first the tiles that all of its rows see, then those on the diagonal, to whose scores a staircase of
minus infinities is added; later tiles are skipped.

So blocks differ in their numbers of tiles. A core takes the tiles of all its blocks as one
sequence, block by block and matrix by matrix, and the first stage is some tiles ahead in it:

    tiles   a0 | b0 b1 | c0 c1 c2 | a0 of the next matrix ...
    first         ^ four tiles ahead of the second

Where the rows of a matrix go to several cores, the longest blocks are given out first, so that
every core has long and short ones: of 4 blocks on 2 cores one has the first and the last.

Source: Dao 2023, "FlashAttention-2" (blocks above the diagonal are skipped, those on it masked).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Tile, ceil_div
from ascend_lab.operators.kernels.flash_nest import Axis, Piece, Place, Stage
from ascend_lab.operators.kernels.flash_shape import FlashShape
from ascend_lab.operators.kernels.flash_softmax import LANES, LEAST
from ascend_lab.operators.kernels.tiles import repeat


# -- which core does which blocks ------------------------------------------------------------------
def blocks_of_cores(shape: FlashShape, side: int, cores: int) -> list[tuple[Piece, ...]]:
    """Return the blocks of `side` fractals of rows for each of `cores` cores that share a matrix.

    Blocks are dealt from the longest on, each to the core that has the least work so far.
    """
    rows = shape.fractals[0]
    starts: list[list[int]] = [[] for _ in range(cores)]
    work = [0] * cores
    for start in reversed(range(0, rows, side)):
        # Of 4 blocks with 1, 2, 3, 4 tiles on 2 cores: 4 and 1 to the one, 3 and 2 to the other.
        core = work.index(min(work))
        starts[core].append(start)
        work[core] += _work(shape, start, side)

    def blocks(core_starts: list[int]) -> tuple[Piece, ...]:
        return tuple(
            Piece(Affine(number), Affine(start), min(side, rows - start))
            for number, start in enumerate(sorted(core_starts))
        )

    return [blocks(core_starts) for core_starts in starts]


def _work(shape: FlashShape, start: int, side: int) -> int:
    """Return the scores of a block of rows, in fractals."""
    # The last row of a block sees the most keys, which determine the tiles.
    size = min(side, shape.fractals[0] - start)
    return size * ceil_div(shape.seen((start + size) * FRACTAL - 1), FRACTAL)


def _work_of(shape: FlashShape, blocks: tuple[Piece, ...], side: int) -> int:
    """Return the scores of all blocks of a core, in fractals."""
    return sum(_work(shape, block.start.const, side) for block in blocks)


def causal_grid(shape: FlashShape, side: int, cores: int) -> tuple[int, int, int]:
    """Return cores over entries, row blocks and heads: the least work for the busiest core.

    Among equal ones it is the grid with the most cores over matrices, whose programs are alike.
    """
    entries = shape.batch // shape.heads
    blocks = ceil_div(shape.fractals[0], side)
    grids = list[tuple[int, int, tuple[int, int, int]]]()
    for places in range(1, min(blocks, cores) + 1):
        core_blocks = blocks_of_cores(shape, side, places)
        core_work = max(_work_of(shape, pieces, side) for pieces in core_blocks)
        for heads in range(1, min(shape.heads, cores // places) + 1):
            entry_cores = min(entries, cores // (places * heads))
            busiest = core_work * ceil_div(entries, entry_cores) * ceil_div(shape.heads, heads)
            grids.append((busiest, places, (entry_cores, places, heads)))
    return min(grids)[-1]


def visible_tiles(shape: FlashShape, block: Piece, side: int) -> tuple[int, int, int]:
    """Return three numbers for a block of rows and tiles of `side` fractals of keys.

    They are the tiles that all rows see in full, the tiles of which any row sees a key, and the
    fractals of the last of these.
    """
    first_row = block.start.const * FRACTAL
    full_tiles = shape.seen(first_row) // (side * FRACTAL)
    fractals = ceil_div(shape.seen(first_row + block.size * FRACTAL - 1), FRACTAL)
    count = ceil_div(fractals, side)
    return full_tiles, count, fractals - (count - 1) * side


# -- the sequence of tiles -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Step:
    """A tile in the sequence of one matrix: its block of rows, and its number in the block.

    `columns` are its fractals of keys; `is_first` and `is_last` say whether it is the first or last
    tile of its block, `is_masked` whether some rows do not see all of its keys. A loop writes
    neighbouring tiles that are alike: neither first nor last and, in the first stage, not masked.
    """

    block: Piece
    number: int
    columns: int
    is_first: bool
    is_last: bool
    is_masked: bool


@dataclass(frozen=True, slots=True)
class CausalTiles:
    """Tiles of all blocks, one after another; the first stage is `lead` tiles ahead.

    `steps` are the tiles of one matrix, which has `blocks` blocks of rows; a tile has `side`
    fractals of keys. At most `in_flight` tiles are begun by the first stage and not ended by the
    second. This number is the same on every core, because their rings are one tensor, even if a
    core has fewer tiles.
    """

    matrices: Axis
    steps: tuple[Step, ...]
    blocks: int
    side: int
    lead: int
    in_flight: int

    @classmethod
    def of(
        cls, shape: FlashShape, matrices: Axis, blocks: tuple[Piece, ...], side: int, lead: int
    ) -> "CausalTiles":
        """Return the sequence of some blocks, by tiles of `side` fractals of keys."""
        steps = list[Step]()
        for block in blocks:
            full_tiles, count, last_fractals = visible_tiles(shape, block, side)
            for n in range(count):
                size = last_fractals if n == count - 1 else side
                is_first = n == 0
                is_last = n == count - 1
                steps.append(Step(block, n, size, is_first, is_last, n >= full_tiles))
        ahead = min(lead, len(steps) * matrices.count)
        return cls(matrices, tuple(steps), len(blocks), side, ahead, lead + 1)

    def number(self, at: Place) -> Affine:
        """Return the number of a block, or of a tile in the sequence."""
        matrix, block, *tile = at
        if tile:
            return matrix.number * len(self.steps) + tile[0].number
        return matrix.number * self.blocks + block.number

    def run(self, k: KernelBuilder, first: Stage, second: Stage) -> None:
        """Write both stages."""
        count = len(self.steps)
        matrices = self.matrices.count
        # Matrices that the first stage may be ahead: 4 tiles in matrices of 3 tiles are 2.
        matrices_ahead = min((count - 1 + self.lead) // count, matrices)
        # The first stage runs alone at the beginning.
        for at in range(self.lead):
            matrix, tile_number = divmod(at, count)
            self._tile(first, self.matrices.piece(k, matrix), tile_number, Affine())
        for pieces in self.matrices.turns(k, matrices - matrices_ahead, *range(matrices_ahead + 1)):
            self._matrix_steps(k, first, second, pieces)
        for matrices_left in range(matrices_ahead, 0, -1):
            first_number = matrices - matrices_left
            last_pieces = [self.matrices.piece(k, first_number + n) for n in range(matrices_left)]
            self._matrix_steps(k, first, second, last_pieces)

    def _matrix_steps(
        self, k: KernelBuilder, first: Stage, second: Stage, pieces: list[Piece]
    ) -> None:
        """Write the second stage of the first piece; the first stage is ahead, among the pieces."""
        for start, length in self._runs():
            matrices_ahead, tile_number = divmod(start + self.lead, len(self.steps))
            with repeat(k, "tile", length) as n:
                if matrices_ahead < len(pieces):
                    self._tile(first, pieces[matrices_ahead], tile_number, n)
                self._tile(second, pieces[0], start, n)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of tiles that one loop writes, those of a block in both stages."""

        def loop_key(at: int) -> tuple[int, ...]:
            ahead = self.steps[(at + self.lead) % len(self.steps)]
            behind = self.steps[at]
            # Loops hold only tiles that begin, end and mask nothing, in either stage.
            ends = behind.is_first or behind.is_last or ahead.is_first or ahead.is_last
            if not ends and not ahead.is_masked:
                return behind.block.start.const, ahead.block.start.const
            return -1, at

        for _, group in groupby(range(len(self.steps)), loop_key):
            places = list(group)
            yield places[0], len(places)

    def _tile(self, stage: Stage, matrix: Piece, at: int, turn: Affine) -> None:
        """Write tile `at` + `turn` of a matrix, and the beginning and end of its block, if due."""
        step = self.steps[at]
        start = (turn + step.number) * self.side
        tile = Piece(turn + at, start, step.columns, step.is_masked)
        if step.is_first:
            stage.open((matrix, step.block))
        stage.tile((matrix, step.block, tile))
        if step.is_last:
            stage.close((matrix, step.block))


# -- the diagonal ----------------------------------------------------------------------------------
def staircase_rows(shape: FlashShape, rows: int) -> int:
    """Return the rows of the staircase for blocks of `rows` rows.

    It is 0 if no staircase is needed, because a block is part of the heads of one query.
    """
    if not shape.causal or shape.causal % rows == 0:
        return 0
    return 2 * rows + (FRACTAL - 1) * shape.causal


@dataclass(frozen=True, slots=True)
class Diagonal:
    """What is added to scores on the diagonal: rows of 16 keys, one key more every few rows.

    With h heads a query, row x of the staircase lets lanes up to floor(x / h) pass. Row r of the
    scores meets 16 keys from j on as x = r - h (j - (t - s)), which grows with r: one region of the
    staircase serves all rows of a slice. Buffer row 0 is x = -rows of a block.
    """

    k: KernelBuilder
    shape: FlashShape
    rows: int
    stairs: Buffer | None

    @classmethod
    def make(cls, k: KernelBuilder, shape: FlashShape, rows: int) -> "Diagonal":
        """Allocate for blocks of `rows` rows, and write the staircase."""
        # Rows of -inf above the stairs, h rows a step, rows of 0 below: any slice of it is one
        # region.
        height = staircase_rows(shape, rows)
        if not height:
            return cls(k, shape, rows, None)
        stairs = k.buffer("stairs", "UB", "fp32", height * FRACTAL)
        k.each("vdup", rows * FRACTAL, (stairs, 0), scalar=LEAST)
        k.each("vdup", (height - rows) * FRACTAL, (stairs, rows * FRACTAL), scalar=0.0)
        for lane in range(FRACTAL - 1):
            # Step `lane` of the stairs lets lanes 0 .. lane pass: bit mask 1111111111111110 for
            # lane 0.
            first_element = (rows + lane * shape.causal) * FRACTAL
            step = stairs.region(first_element, (shape.causal, FRACTAL))
            k.vector("vdup", step, scalar=LEAST, mask=(1 << FRACTAL) - (2 << lane))
        return cls(k, shape, rows, stairs)

    def drop(self, tile: Tile, at: Place, line: Affine, rows: int) -> None:
        """Emit s += LEAST where a row does not see a key, for rows from `line` of the block on."""
        _, block, keys = at
        first_row = block.start.const * FRACTAL
        # All rows see the keys that the first row sees.
        keys_of_first_row = self.shape.seen(first_row)
        if not keys.is_partial:  # all rows see all keys of the tile
            return
        for column in range(keys.size):
            key = (keys.start.const + column) * FRACTAL
            if key + FRACTAL <= keys_of_first_row:
                continue
            place = column * rows * FRACTAL
            size = rows * FRACTAL
            if self.stairs is None:
                bits = lanes_from(max(0, keys_of_first_row - key))
                self.k.each("vdup", size, (tile, place), scalar=LEAST, mask=bits)
                continue
            seen_by_first_query = self.shape.keys - self.shape.queries
            step = first_row - self.shape.causal * (key - seen_by_first_query) + self.rows
            scores = (tile, place)
            self.k.each("vadd", size, scores, scores, (self.stairs, (line + step) * FRACTAL))


def lanes_from(lane: int) -> int:
    """Return the bits of lanes `lane` .. 15 in each group of 16 lanes of a repeat."""
    fractal = ((1 << FRACTAL) - 1) >> lane << lane
    return sum(fractal << at for at in range(0, LANES, FRACTAL))
