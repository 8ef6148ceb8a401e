"""The loops of FlashAttention: over matrices, blocks of rows and tiles of keys, in two stages.

The first stage computes scores, the second one uses them; the first stage is some tiles ahead, so
that no unit waits for the other. On one of the three axes it begins with `lead` pieces alone, then
both stages alternate, and the second stage ends alone. With a lead of 5 (' is the second stage):

    0 1 2 3 4  then 5, 0'; 6, 1'; ...  then the last five of the second stage

If a block of rows has few tiles, whole blocks or whole matrices are ahead instead of single tiles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from ascend_lab.machine.isa import Affine, KernelBuilder
from ascend_lab.operators.kernels.flash_shape import GRID, CoreShares, Matrix
from ascend_lab.operators.kernels.tiles import repeat


class Piece(NamedTuple):
    """A piece of an axis: a matrix, a block of rows or a tile of keys.

    `start` is the first fractal of a block or tile, or the batch entry of a matrix, whose `head` is
    a separate field. `is_partial` marks tiles of keys of which some rows see only a part: the
    remainder, which may end in padding, and tiles on the diagonal of causal attention.
    """

    number: Affine
    start: Affine
    size: int
    is_partial: bool = False
    head: Affine = Affine()

    @property
    def matrix(self) -> Matrix:
        """Entry and head of a matrix."""
        return self.start, self.head


@dataclass(frozen=True, slots=True)
class Axis:
    """`full_count` pieces of `piece_length` from `start` on, then a remainder (of size 0: none).

    Pieces are numbered head by head, from `head` on, with equally many per head: 3 heads of 4
    matrices are pieces 0 .. 11.
    """

    name: str
    full_count: int
    piece_length: int
    remainder: int
    start: Affine
    heads: int = 1
    head: Affine = field(default_factory=Affine)

    @property
    def count(self) -> int:
        """Number of all pieces."""
        return self.full_count + 1 if self.remainder else self.full_count

    def last(self) -> Iterator[Piece]:
        """Yield the remainder, if there is one."""
        if self.remainder:
            start = self.start + self.full_count * self.piece_length
            yield Piece(Affine(self.full_count), start, self.remainder, is_partial=True)

    def piece(self, k: KernelBuilder, number: int) -> Piece:
        """Return full piece `number`."""
        ((piece,),) = self.turns(k, 1, number)
        return piece

    def turns(self, k: KernelBuilder, count: int, *shifts: int) -> Iterator[list[Piece]]:
        """Yield full pieces n + shift, one per shift, for all n < `count`, in loops if possible."""
        head_pieces = self.full_count // self.heads or 1
        whole_heads, pieces_of_last_head = divmod(count, head_pieces)
        # 25 pieces in heads of 10: a loop over heads 0 and 1, then 5 pieces of head 2.
        if whole_heads:
            with repeat(k, "head", whole_heads) as head:
                yield from self._turns_of_head(k, head, head_pieces, shifts)
        if pieces_of_last_head:
            yield from self._turns_of_head(k, Affine(whole_heads), pieces_of_last_head, shifts)

    def _turns_of_head(
        self, k: KernelBuilder, head: Affine, count: int, shifts: tuple[int, ...]
    ) -> Iterator[list[Piece]]:
        """Yield `turns` for the first `count` pieces of a head.

        A loop must end where a shifted piece passes into the next head: a shift of 4 in heads of 10
        pieces does so from piece 6 on, which gives loops over 0 .. 5 and 6 .. 9.
        """
        head_pieces = self.full_count // self.heads or 1
        cuts = {0, count}
        for shift in shifts:
            first_in_next_head = -shift % head_pieces
            if first_in_next_head < count:
                cuts.add(first_in_next_head)
        for first_piece, end_piece in pairwise(sorted(cuts)):
            with repeat(k, self.name, end_piece - first_piece) as counter:
                pieces = []
                for shift in shifts:
                    heads_further, piece_in_head = divmod(first_piece + shift, head_pieces)
                    pieces.append(self._piece(head + heads_further, counter + piece_in_head))
                yield pieces

    def _piece(self, head: Affine, piece_in_head: Affine) -> Piece:
        """Return a piece by its head and its number in the head."""
        number = head * (self.full_count // self.heads) + piece_in_head
        start = self.start + piece_in_head * self.piece_length
        return Piece(number, start, self.piece_length, head=self.head + head)

    def pieces(self, k: KernelBuilder) -> Iterator[Piece]:
        """Yield all pieces, the full ones in a loop."""
        for (piece,) in self.turns(k, self.full_count, 0):
            yield piece
        yield from self.last()

    def threes(self, k: KernelBuilder) -> Iterator[tuple[Piece | None, ...]]:
        """Yield all runs of three neighbours (previous, current, following).

        None stands for pieces beyond the ends: pieces 0, 1 give (None, None, 0), (None, 0, 1),
        (0, 1, None) and (1, None, None).
        """
        ends_of_loop: list[Piece | None]
        if self.full_count > 1:
            start_of_loop = [None, None, self.piece(k, 0), self.piece(k, 1)]
            yield from _triples(start_of_loop)
            for pieces in self.turns(k, self.full_count - 2, 0, 1, 2):
                yield tuple(pieces)
            ends_of_loop = [self.piece(k, self.full_count - n) for n in (2, 1)]
        else:
            ends_of_loop = [None, None, *(self.piece(k, n) for n in range(self.full_count))]
        yield from _triples([*ends_of_loop, *self.last(), None, None])

    def staggered(self, k: KernelBuilder, lead: int) -> Iterator[tuple[int, Piece]]:
        """Yield (stage, piece) with stage 0 ahead of stage 1 by `lead` pieces, or by all pieces."""
        # A lead of 2 and 5 pieces: 0 1, then 2 0', 3 1', 4 2', then 3' 4'.
        full_lead = min(lead, self.full_count)
        for (piece,) in self.turns(k, full_lead, 0):
            yield 0, piece
        for piece_ahead, piece in self.turns(k, self.full_count - full_lead, full_lead, 0):
            yield 0, piece_ahead
            yield 1, piece
        for piece in self.last():
            yield 0, piece
        for (piece,) in self.turns(k, full_lead, self.full_count - full_lead):
            yield 1, piece
        for piece in self.last():
            yield 1, piece


def _triples(pieces: Sequence[Piece | None]) -> Iterator[tuple[Piece | None, ...]]:
    """Yield all runs of three neighbours in a list."""
    yield from zip(pieces, pieces[1:], pieces[2:], strict=False)


def places(k: KernelBuilder, shares: CoreShares) -> tuple[Affine, ...]:
    """Return the coordinates of a core in the grid, one per axis."""
    return tuple(k.param(name, share[2]) for name, share in zip(GRID, shares, strict=True))


def axes(core_shares: CoreShares, core: Sequence[Affine], side: int) -> tuple[Axis, Axis]:
    """Return the matrices a core of the grid owns, and its blocks of `side` rows, in fractals."""
    entry, row, head = (place * share[1] for place, share in zip(core, core_shares, strict=True))
    entries, rows, heads = (share[0] for share in core_shares)
    matrices = Axis(
        "matrix",
        full_count=entries * heads,
        piece_length=1,
        remainder=0,
        start=entry,
        heads=heads,
        head=head,
    )
    return matrices, Axis("block", rows // side, side, rows % side, row)


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
    """Loops over matrices, blocks and tiles, which are axes 0, 1 and 2.

    The first stage runs `lead` pieces ahead on axis number `axis_ahead`.
    """

    axes: tuple[Axis, Axis, Axis]
    axis_ahead: int
    lead: int

    @classmethod
    def of(
        cls, three_axes: tuple[Axis, Axis, Axis], tiles_ahead: int, max_in_flight: int
    ) -> "Nest":
        """Return the nest whose first stage is about `tiles_ahead` tiles ahead of the second.

        At most `max_in_flight` tiles may be in flight. Single tiles run ahead if a block has enough
        of them, else whole blocks or matrices.
        """
        _, blocks, keys = (axis.count for axis in three_axes)
        if tiles_ahead < keys:
            return cls(three_axes, 2, tiles_ahead)
        if 2 * blocks * keys <= max_in_flight:
            # A matrix has few tiles: whole matrices run ahead.
            return cls(three_axes, 0, max(1, tiles_ahead // (blocks * keys)))
        if 2 * keys <= max_in_flight:
            # A block of rows has few tiles: whole blocks run ahead.
            return cls(three_axes, 1, max(1, tiles_ahead // keys))
        return cls(three_axes, 2, tiles_ahead)

    @property
    def in_flight(self) -> int:
        """Most tiles that the first stage has begun and the second has not ended."""
        tiles_per_piece = 1
        for axis in self.axes[self.axis_ahead + 1 :]:
            tiles_per_piece *= axis.count
        # 5 pieces begun of 2 blocks with 3 tiles each: 30 tiles.
        return (self.lead + 1) * tiles_per_piece

    def number(self, at: Place) -> Affine:
        """Number a block or tile among those that may be in flight."""
        number = Affine()
        for axis, piece in list(zip(self.axes, at, strict=False))[self.axis_ahead :]:
            number = number * axis.count + piece.number
        return number

    def run(self, k: KernelBuilder, first: Stage, second: Stage) -> None:
        """Write both stages."""
        self._both_stages(k, (first, second), ())

    def _both_stages(self, k: KernelBuilder, stages: tuple[Stage, Stage], at: Place) -> None:
        """Write the loops down to the axis on which the first stage is ahead, and both inside."""
        axis = self.axes[len(at)]
        if len(at) < self.axis_ahead:
            for piece in axis.pieces(k):
                self._both_stages(k, stages, (*at, piece))
            return
        # If tiles run ahead, both stages begin and end the block together.
        opened = stages if len(at) == 2 else ()
        for stage in opened:
            stage.open(at)
        for stage_index, piece in axis.staggered(k, self.lead):
            self._one_stage(k, stages[stage_index], (*at, piece))
        for stage in opened:
            stage.close(at)

    def _one_stage(self, k: KernelBuilder, stage: Stage, at: Place) -> None:
        """Write the loops of one stage inside the piece at `at`."""
        if len(at) == 3:
            stage.tile(at)
            return
        if len(at) == 2:
            stage.open(at)
        for piece in self.axes[len(at)].pieces(k):
            self._one_stage(k, stage, (*at, piece))
        if len(at) == 2:
            stage.close(at)
