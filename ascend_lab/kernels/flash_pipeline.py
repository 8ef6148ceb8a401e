"""Two stages of one loop nest, the first of them some steps ahead of the second.

The nest goes over matrices, blocks of rows and tiles of keys. On the axis that runs ahead, the
first stage does `lead` pieces more, then both take turns, and the second stage ends alone:

    0 1 2 3 4  then 5, 0'; 6, 1'; ...  then the last five of the second stage
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ascend_lab.isa import Affine, KernelBuilder
from ascend_lab.kernels.tiles import repeat


class Piece(NamedTuple):
    """One step along an axis: its number, where it starts, its size, whether it is the rest."""

    number: Affine
    start: Affine
    size: int
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """From `first` on, `full` pieces of `each`, then a rest of its own (0: none)."""

    name: str
    full: int
    each: int
    rest: int
    first: Affine

    @property
    def count(self) -> int:
        """Pieces in all."""
        return self.full + (self.rest > 0)

    def piece(self, number: Affine) -> Piece:
        """Return one of the full pieces."""
        return Piece(number, self.first + number * self.each, self.each)

    def last(self) -> Iterator[Piece]:
        """Yield the rest, if there is one."""
        if self.rest:
            yield Piece(Affine(self.full), self.first + self.full * self.each, self.rest, True)

    def turns(self, k: KernelBuilder, count: int) -> Iterator[Affine]:
        """Yield the numbers of `count` pieces, in a loop."""
        if count:
            with repeat(k, self.name, count) as number:
                yield number

    def pieces(self, k: KernelBuilder) -> Iterator[Piece]:
        """Yield all pieces, the full ones in a loop."""
        for number in self.turns(k, self.full):
            yield self.piece(number)
        yield from self.last()

    def staggered(self, k: KernelBuilder, lead: int) -> Iterator[tuple[int, Piece]]:
        """Yield (stage, piece) with stage 0 ahead of stage 1 by `lead` pieces, if there are."""
        lead = min(lead, self.full)
        for number in self.turns(k, lead):
            yield 0, self.piece(number)
        for number in self.turns(k, self.full - lead):
            yield 0, self.piece(number + lead)
            yield 1, self.piece(number)
        for piece in self.last():
            yield 0, piece
        for number in self.turns(k, lead):
            yield 1, self.piece(number + (self.full - lead))
        for piece in self.last():
            yield 1, piece


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
    def of(cls, axes: tuple[Axis, Axis, Axis], tiles: int, most: int) -> "Nest":
        """Return the nest whose first stage is about `tiles` tiles ahead, of `most` in flight.

        Tiles run ahead where a block has enough of them, else matrices or blocks.
        """
        _, blocks, keys = (axis.count for axis in axes)
        if tiles < keys:
            return cls(axes, 2, tiles)
        if 2 * blocks * keys <= most:
            return cls(axes, 0, max(1, tiles // (blocks * keys)))
        if 2 * keys <= most:
            return cls(axes, 1, max(1, tiles // keys))
        return cls(axes, 2, tiles)

    @property
    def in_flight(self) -> int:
        """Tiles that the first stage has begun and the second not ended, at most."""
        inner = 1
        for axis in self.axes[self.ahead + 1 :]:
            inner *= axis.count
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
        opened = stages if len(at) == 2 else ()
        for stage in opened:
            stage.open(at)
        for which, piece in axis.staggered(k, self.lead):
            self._inner(k, stages[which], (*at, piece))
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
