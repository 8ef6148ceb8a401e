"""Write copies of tiles between GM and UB, in which rows need not be whole 32-byte blocks.

On a chip whose copies move only whole 32-byte blocks, a row of 197 elements in fp16 cannot be
copied exactly. It is copied as 208 elements: a load reads into the next row; a store writes into
it, and the next row, stored later by the same pipe, corrects that. Only the last row of a tile must
not reach beyond its end. Its last block is the one that ends with the row in GM, elements
181 .. 196, and the vector unit shifts it in UB:

    UB row   ... 176 .. 191 | 181 ......... 196 |     in GM a block ends where the row ends
    UB row   ... 176 .. 191 | 192 .. 196 ...... |     what the operator computes with

by `vbrcb` (every element becomes a block) and `vcgmax` (every block becomes an element, anywhere).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ascend_lab.machine.isa import c0_of
from ascend_lab.operators.dsl.emit_vector import Unit, View, coalesce, with_dims

BLOCKS = 8
"""Blocks of a vector repeat."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A copy of rows: (GM, UB) or (UB, GM) views, and the sizes of their merged axes.

    Every row is copied up to a multiple of `block` elements (0: rows are copied exactly); `rest` is
    the number of elements behind a row's last whole block.
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
    def has_leftover(self) -> bool:
        """True if some elements are not moved by any copy of whole blocks."""
        ragged = self.rest == self.counts[-1] or self.rest % c0_of(self.dst.dtype)
        return bool(ragged) and not self.by_blocks

    @property
    def width(self) -> int:
        """Elements of a row, filled up to whole blocks."""
        return -(-self.counts[-1] // self.block) * self.block

    @property
    def many(self) -> int:
        """Rows that one copy moves; the axes outside of them are loops."""
        return self.counts[-2] if len(self.counts) > 1 else 1

    @property
    def step(self) -> int:
        """Elements from row to row in GM."""
        return (self.src if self.loads else self.dst).strides[-2] if len(self.counts) > 1 else 0

    @property
    def in_one(self) -> bool:
        """True if copies may run past a row into the next one: only the last rows are special."""
        return self.step > 0 and (self.loads or self.step == self.counts[-1] == self.src.row)

    @property
    def last(self) -> int:
        """How many rows at the end of a piece must be copied specially, so as not to leave it."""
        if not self.in_one:
            return self.many
        return min(self.many, max(1, -(-(self.width - self.counts[-1]) // self.step)))

    def apart(self, unit: Unit) -> Iterator[list[tuple[int, View]]]:
        """Yield the rows of a piece whose ends are special, each with the number of rows behind it.

        Last rows come first. All rows of a piece are written inside the same loops.
        """
        view = self.dst if self.loads else self.src
        if not self.in_one:
            for (row,) in unit.over(self.counts[:-1], [view]):
                yield [(0, row)]
            return
        short = self.counts[-1] < self.block and not self.loads  # the last block of all is theirs
        count = -(-self.block // self.step) if short else self.last
        for (piece,) in unit.over(self.counts[:-2], [view]):
            yield [(back, piece.moved(0, self.many - 1 - back).inner()) for back in range(count)]


Copy = Callable[[Unit, Rows], None]


def rows_of(dst: View, src: View, sizes: Sequence[int], block: int) -> Rows:
    """Return the copy of a box, whose rows may be rounded up to `block` elements (0: not)."""
    # Rows that lie behind each other on both sides are one long row: nothing is ragged inside it.
    dims = coalesce(sizes, (dst, src)) or [(1, (1, 1))]
    to_view, from_view = with_dims((dst, src), dims)
    counts = tuple(size for size, _ in dims)
    on_chip = to_view if dst.memory.region(0, 1).space == "UB" else from_view
    gm = from_view if on_chip is to_view else to_view
    step = gm.strides[-2] if len(counts) > 1 else 0
    in_one = on_chip is to_view or step == counts[-1] == on_chip.row
    # A block may only be copied where the tensor has as many elements as a block: 3 rows of 5 are
    # 15, too few for a block of 16.
    reach = counts[-1] + (step * (counts[-2] - 1) if in_one and step else 0)
    fits = to_view.strides[-1] == from_view.strides[-1] == 1 and reach >= block
    block = block if fits else 0
    unit = max(block, c0_of(dst.dtype))
    rest = counts[-1] % unit if on_chip.strides[-1] == 1 else counts[-1]
    return Rows(to_view, from_view, counts, block, rest)


def main_part(unit: Unit, rows: Rows) -> None:
    """Emit the copy of a box; without `block`, and without padding, only of its whole blocks."""
    padded = not unit.builder.chip.combined
    if rows.by_blocks and (rows.loads or not padded):
        _by_blocks(unit, rows)
        return
    counts = list(rows.counts)
    ragged = rows.rest % c0_of(rows.dst.dtype)
    if ragged and not padded:
        # Rows shorter than a block have no whole block: all their elements are left over.
        if rows.rest == counts[-1]:
            return
        counts[-1] -= ragged
    for inner in unit.over(counts[:-2], (rows.dst, rows.src)):
        target, source = (v.memory.region(v.offset, counts[-2:], v.strides) for v in inner)
        unit.builder.copy(target, source, pad=bool(ragged) and padded)


def _by_blocks(unit: Unit, rows: Rows) -> None:
    """Emit the copy of ragged rows by whole blocks; see the top of the module."""
    row = rows.counts[-1]
    block = rows.block
    many = rows.many
    whole_blocks = row - rows.rest
    plain_rows = many - rows.last if rows.in_one else 0
    padded = not unit.builder.chip.combined
    for views in unit.over(rows.counts[:-2], (rows.dst, rows.src)):
        gm, on_chip = views if not rows.loads else views[::-1]

        def copy(start: int, count: int, lane: int, at: int, width: int, **how: int) -> None:
            regions = []
            for v, place in ((gm, at), (on_chip, lane)):  # noqa: B023
                step = v.strides[-2] if len(v.strides) > 1 else 0
                begin = v.offset + (start * step + place)
                step = how.get("step", step) if v is gm else step  # noqa: B023
                regions.append(v.memory.region(begin, (count, width), (step, 1)))
            target, source = regions if not rows.loads else regions[::-1]
            unit.builder.copy(target, source, pad=bool(how.get("pad")))

        if plain_rows:
            copy(0, plain_rows, 0, 0, rows.width)
        if whole_blocks and not padded:
            copy(plain_rows, many - plain_rows, 0, 0, whole_blocks)
        if row >= block:
            copy(plain_rows, many - plain_rows, whole_blocks, row - block, block)
        elif rows.loads:  # rows shorter than a block: the last block of all, once for each
            end = (many - 1 - plain_rows) * rows.step + row
            copy(plain_rows, many - plain_rows, 0, end - block, block, step=0)
        else:
            copy(many - 1, 1, 0, row - block, block)
        if padded:
            copy(plain_rows, many - plain_rows, 0, 0, row, pad=1)


def ends_in_place(unit: Unit, rows: Rows) -> None:
    """Shift the last block of loaded rows from where it ends in GM to where it begins in UB."""
    size = rows.counts[-1]
    block = rows.block
    for piece in rows.apart(unit) if rows.by_blocks else ():
        for back, row in piece:
            whole_blocks = size - rows.rest
            skip = block - back * rows.step - size if size < block else block - rows.rest
            _shift(unit, row, (whole_blocks, block, skip), row, (whole_blocks, rows.rest))


def ends_apart(unit: Unit, rows: Rows) -> None:
    """Write each row's last elements, aligned as in GM, over its last block and the padding.

    Nothing reads the tile but the store.
    """
    size = rows.counts[-1]
    block = rows.block
    c0 = c0_of(rows.src.dtype)
    # A row of 100: the last block in GM is 84..99, and begins at 80 in UB, at a whole block.
    start = max(size - block, 0) // c0 * c0
    for piece in rows.apart(unit) if rows.by_blocks else ():
        last_row = piece[0][1]
        for back, row in piece:
            if size >= block:
                kept = (size - rows.rest, block)
                _shift(unit, row, (start, size - start, size - block - start), row, kept)
                continue
            # The last block of all holds several short rows: where this one begins in it.
            to = block - (back + 1) * size
            taken = (0, size, max(-to, 0))
            _shift(unit, row, taken, last_row, (max(to, 0), size + min(to, 0)))


def _shift(
    unit: Unit, row: View, taken: tuple[int, int, int], out: View, placed: tuple[int, int]
) -> None:
    """Write elements of a row elsewhere, one by one by way of blocks.

    `taken`: the first element and how many become blocks, and how many of these are skipped;
    `placed`: the first element written, and how many.
    """
    (start, count, skip) = taken
    (to, kept) = placed
    c0 = c0_of(row.dtype)
    # `vbrcb` gives each element a block of its own, and `vcgmax` of a block of equal elements is
    # that element: together they move elements to any place, which no copy in UB can.
    tile = unit.take(row.dtype, count * c0)
    source = row.memory.region(row.offset + start, count)
    unit.builder.vector("vbrcb", tile.region(0, (count, c0)), source)
    for at, n in ((0, kept - kept % BLOCKS), (kept - kept % BLOCKS, kept % BLOCKS)):
        if n:
            shape = (max(n // BLOCKS, 1), min(n, BLOCKS), c0)
            blocks = tile.region((skip + at) * c0, shape)
            unit.builder.vector("vcgmax", out.memory.region(out.offset + (to + at), n), blocks)
    unit.give(tile)


def leftover(unit: Unit, rows: Rows) -> None:
    """Emit copies, one by one on the scalar unit, of the elements that `main_part` left out.

    Each element waits for the latency of L2 once, as in the copies of `layout` and `kernels`.
    """
    chip = unit.builder.chip
    counts = rows.counts
    count = rows.rest if rows.rest == counts[-1] else rows.rest % c0_of(rows.dst.dtype)
    if not rows.has_leftover:
        return
    # A scalar load from GM waits for L2: its latency is counted as scalar instructions.
    wait = chip.l2.latency_cycles // max(chip.scalar_cycles, 1)
    moved = [v.moved(len(counts) - 1, counts[-1] - count) for v in (rows.dst, rows.src)]
    for inner in unit.over([*counts[:-1], count], moved):
        target, source = (v.memory.region(v.offset, 1) for v in inner)
        unit.builder.scalar(target, source, steps=max(wait, 1))
