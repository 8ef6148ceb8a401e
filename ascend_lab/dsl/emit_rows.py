"""Copies of tiles between GM and UB: at most two axes an instruction, ragged rows by whole blocks.

A chip whose copies move whole 32-byte blocks only cannot move a row of 197 elements. It can move
208: a load reads into the next row, a store writes into it, and the next row, stored later by the
same pipe, puts that right. Only the last row of a tile may reach no further than its end. Its last
block is moved as it ends in GM, at elements 181 .. 196, and the vector unit shifts it:

    UB row   ... 176 .. 191 | 181 ......... 196 |     in GM a block ends where the row ends
    UB row   ... 176 .. 191 | 192 .. 196 ...... |     what the operator computes with

by `vbrcb` (every element becomes a block) and `vcgmax` (every block becomes an element, anywhere).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ascend_lab.dsl.emit_vector import Unit, View, coalesce, with_dims
from ascend_lab.isa import c0_of

BLOCKS = 8
"""Blocks of a vector repeat."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A copy of rows: (GM, UB) or (UB, GM) views, the sizes of their merged axes, and how.

    Copies of whole blocks fill every row up to a multiple of `block` elements (0: they do not);
    `rest` elements stand behind the last whole block.
    """

    dst: View
    src: View
    counts: tuple[int, ...]
    block: int
    rest: int

    @property
    def loads(self) -> bool:
        """True for a copy into UB."""
        return self.src.memory.region(0, 1).space == "GM"

    @property
    def by_blocks(self) -> bool:
        """True if ragged rows are moved by whole blocks."""
        return bool(self.rest and self.block)

    @property
    def width(self) -> int:
        """Elements of a row, filled up to whole blocks."""
        return -(-self.counts[-1] // self.block) * self.block

    @property
    def in_one(self) -> bool:
        """True if each row may reach into the next: only the last of them needs care."""
        if len(self.counts) < 2:
            return False
        step = (self.src if self.loads else self.dst).strides[-2]
        if self.loads:
            return self.width - self.counts[-1] <= step
        return step == self.counts[-1] == self.src.row

    def apart(self, unit: Unit) -> Iterator[Sequence[View]]:
        """Return (dst, src) of every row whose end needs care."""
        outer, views = self.counts[:-1], [self.dst, self.src]
        if self.in_one:
            axes = [*range(len(outer) - 1), len(outer)]
            views = [v.moved(len(outer) - 1, outer[-1] - 1).take(axes) for v in views]
            outer = outer[:-1]
        return unit.over(outer, views)


Copy = Callable[[Unit, Rows], None]


def rows_of(dst: View, src: View, sizes: Sequence[int], block: int) -> Rows:
    """Return the copy of a box; `block`: what ragged rows may be filled up to (0: they may not)."""
    dims = coalesce(sizes, (dst, src)) or [(1, (1, 1))]
    to, what = with_dims((dst, src), dims)
    counts = tuple(size for size, _ in dims)
    on_chip = to if dst.memory.region(0, 1).space == "UB" else what
    fits = to.strides[-1] == what.strides[-1] == 1 and counts[-1] >= block
    block = block if fits else 0
    unit = max(block, c0_of(dst.dtype))
    rest = counts[-1] % unit if on_chip.strides[-1] == 1 else counts[-1]
    return Rows(to, what, counts, block, rest)


def main_part(unit: Unit, rows: Rows) -> None:
    """Emit the copy of a box; without `block`, and without padding, only of its whole blocks."""
    padded = not unit.builder.chip.combined
    if rows.by_blocks and (rows.loads or not padded):
        _by_blocks(unit, rows)
        return
    counts, rest = list(rows.counts), rows.rest % c0_of(rows.dst.dtype)
    if rest and not padded:
        if rows.rest == counts[-1]:
            return
        counts[-1] -= rest
    for inner in unit.over(counts[:-2], (rows.dst, rows.src)):
        to, what = (v.memory.region(v.offset, counts[-2:], v.strides) for v in inner)
        unit.builder.copy(to, what, pad=bool(rest) and padded)


def _by_blocks(unit: Unit, rows: Rows) -> None:
    """Emit the copy of ragged rows by whole blocks; see the top of the module."""
    row, whole = rows.counts[-1], rows.counts[-1] - rows.rest
    many = rows.counts[-2] if len(rows.counts) > 1 else 1
    first = many - 1 if rows.in_one else 0

    for views in unit.over(rows.counts[:-2], (rows.dst, rows.src)):

        def copy(start: int, count: int, lane: int, gm: int, width: int, pad: bool = False) -> None:
            regions = []
            for v, on_chip in zip(views, (rows.loads, not rows.loads), strict=True):  # noqa: B023
                step = v.strides[-2] if len(v.strides) > 1 else 0
                at = v.offset + (start * step + (lane if on_chip else gm))
                regions.append(v.memory.region(at, (count, width), (step, 1)))
            unit.builder.copy(*regions, pad=pad)

        if first:
            copy(0, first, 0, 0, rows.width)
        padded = not unit.builder.chip.combined
        if whole and not padded:
            copy(first, many - first, 0, 0, whole)
        copy(first, many - first, whole, row - rows.block, rows.block)
        if padded:
            copy(first, many - first, 0, 0, row, pad=True)


def ends_in_place(unit: Unit, rows: Rows) -> None:
    """Shift the last block of loaded rows from where it ends in GM to where it begins in UB."""
    if not rows.by_blocks:
        return
    whole = rows.counts[-1] - rows.rest
    for row, _ in rows.apart(unit):
        _shift(unit, row, whole, rows.block, rows.block - rows.rest, rows.rest, whole)


def ends_apart(unit: Unit, rows: Rows) -> None:
    """Write the last elements of rows, as they end in GM, over their last block and what follows.

    Nothing reads the tile but the store.
    """
    if not rows.by_blocks:
        return
    size, block, c0 = rows.counts[-1], rows.block, c0_of(rows.src.dtype)
    start = (size - block) // c0 * c0
    for _, row in rows.apart(unit):
        _shift(unit, row, start, size - start, size - block - start, block, size - rows.rest)


def _shift(unit: Unit, row: View, start: int, count: int, skip: int, kept: int, to: int) -> None:
    """Write elements start + skip ... of a row to `to` ..., by way of blocks of `count` of them."""
    c0 = c0_of(row.dtype)
    tile = unit.take(row.dtype, count * c0)
    what = row.memory.region(row.offset + start, count)
    unit.builder.vector("vbrcb", tile.region(0, (count, c0)), what)
    for at, n in ((0, kept - kept % BLOCKS), (kept - kept % BLOCKS, kept % BLOCKS)):
        if n:
            shape = (max(n // BLOCKS, 1), min(n, BLOCKS), c0)
            blocks = tile.region((skip + at) * c0, shape)
            unit.builder.vector("vcgmax", row.memory.region(row.offset + (to + at), n), blocks)
    unit.give(tile)


def leftover(unit: Unit, rows: Rows) -> None:
    """Emit, one by one on the scalar unit, the elements `main_part` left out.

    Each waits for L2 once (its latency), as in the copies of `layout` and `kernels`.
    """
    chip, counts = unit.builder.chip, rows.counts
    rest = rows.rest if rows.rest == counts[-1] else rows.rest % c0_of(rows.dst.dtype)
    if not rest or rows.by_blocks:
        return
    wait = chip.l2.latency_cycles // max(chip.scalar_cycles, 1)
    moved = [v.moved(len(counts) - 1, counts[-1] - rest) for v in (rows.dst, rows.src)]
    for inner in unit.over([*counts[:-1], rest], moved):
        to, what = (v.memory.region(v.offset, 1) for v in inner)
        unit.builder.scalar(to, what, steps=max(wait, 1))
