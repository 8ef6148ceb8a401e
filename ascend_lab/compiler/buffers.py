"""Defines buffers with lifetimes, for which a memory plan finds offsets.

A buffer needs size_bytes during the half-open time [lower, upper): 8 bytes in [0, 3) are needed at
the times 0, 1 and 2. Nothing here depends on graphs.

A buffer may have further conditions, as in MiniMalloc (Moffitt 2023, doi:10.1145/3623278.3624752):
its own alignment, a given offset, and gaps: times within its life when it needs no bytes or only a
range of them. In the plane of time and address, a buffer with gaps consists of several rectangles
that share one offset.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from ascend_lab.errors import GraphError

Offsets = dict[Hashable, int]
"""The first byte of each buffer, by id."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Times [lower, upper) in which a buffer needs only its bytes [first, last), or none."""

    lower: int
    upper: int
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Bytes [first, last), counted from the offset, that a buffer needs in [lower, upper)."""

    lower: int
    upper: int
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Buffer:
    """A block of size_bytes, needed in the time [lower, upper).

    Its offset has to be a multiple of alignment_bytes, and equal to `offset` if that is given.
    """

    id: Hashable
    lower: int
    upper: int
    size_bytes: int
    alignment_bytes: int = 1
    gaps: tuple[Gap, ...] = ()
    offset: int | None = None

    def __post_init__(self) -> None:
        # half-open: [3, 3) would be empty
        if self.upper <= self.lower:
            got = f"buffer {self.id} from {self.lower} to {self.upper}"
            raise GraphError("a lifetime that ends after it starts", got)
        if self.size_bytes < 0:
            got = f"buffer {self.id} of {self.size_bytes}"
            raise GraphError("a size of at least 0 bytes", got)
        if self.alignment_bytes < 1:
            got = f"buffer {self.id} with {self.alignment_bytes}"
            raise GraphError("an alignment of at least 1 byte", got)
        if self.offset is not None and (self.offset < 0 or self.offset % self.alignment_bytes):
            got = f"buffer {self.id} at {self.offset}"
            raise GraphError(f"an offset of a multiple of {self.alignment_bytes} from 0", got)
        self._check_gaps()

    def _check_gaps(self) -> None:
        """Raise GraphError unless the gaps are in order, inside the lifetime and the size."""
        # gaps may touch: each begins where the one before ended, or later
        free_from = self.lower
        for gap in self.gaps:
            where = f"buffer {self.id}: {gap.lower}-{gap.upper}@{gap.first}:{gap.last}"
            if not free_from <= gap.lower < gap.upper <= self.upper:
                needed = f"gaps one after the other from {self.lower} to {self.upper}"
                raise GraphError(needed, where)
            if not 0 <= gap.first <= gap.last <= self.size_bytes:
                raise GraphError(f"a window from 0 to {self.size_bytes}", where)
            free_from = gap.upper

    @property
    def is_plain(self) -> bool:
        """True for a buffer that may be anywhere and needs all its bytes all the time."""
        return self.alignment_bytes == 1 and not self.gaps and self.offset is None

    @property
    def rectangles(self) -> list[Rectangle]:
        """Return the rectangles of time and bytes, in order of time, without empty ones."""
        rectangles = []
        # 8 bytes in 0 .. 10 with the gap 3-6@2:5 are three rectangles: all bytes in 0 .. 3, bytes 2
        # to 5 in 3 .. 6, all bytes in 6 .. 10
        begin = self.lower
        for gap in self.gaps:
            rectangles.append(Rectangle(begin, gap.lower, 0, self.size_bytes))
            rectangles.append(Rectangle(gap.lower, gap.upper, gap.first, gap.last))
            begin = gap.upper
        rectangles.append(Rectangle(begin, self.upper, 0, self.size_bytes))
        # a gap at the start of the life, or one that needs no bytes, leaves an empty rectangle
        return [r for r in rectangles if r.lower < r.upper and r.first < r.last]
