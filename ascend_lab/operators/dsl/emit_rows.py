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
from typing import NamedTuple

from ascend_lab.machine.isa import c0_of
from ascend_lab.operators.dsl.emit_vector import Unit, View, coalesce, with_dims

BLOCKS_PER_REPEAT = 8
"""32-byte blocks of a vector repeat."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A copy of rows: (GM, UB) or (UB, GM) views, and the sizes of their merged axes.

    Every row is copied up to a multiple of `block` elements (0: rows are copied exactly); `tail` is
    the number of elements behind a row's last whole block. A row of 197 elements in blocks of 16
    has a tail of 5. The rows that one copy instruction moves are a piece; the axes outside of a
    piece are loops.
    """

    dst: View
    src: View
    counts: tuple[int, ...]
    block: int
    tail: int

    @property
    def is_load(self) -> bool:
        """True for a copy into UB."""
        return self.src.memory.region(0, 1).space == "GM"

    @property
    def by_blocks(self) -> bool:
        """True if ragged rows are moved by whole blocks."""
        return bool(self.tail and self.block)

    @property
    def has_leftover(self) -> bool:
        """True if some elements are not moved by any copy of whole blocks."""
        is_ragged = self.tail == self.counts[-1] or self.tail % c0_of(self.dst.dtype)
        return bool(is_ragged) and not self.by_blocks

    @property
    def padded_elements(self) -> int:
        """Elements of a row, filled up to whole blocks."""
        return -(-self.counts[-1] // self.block) * self.block

    @property
    def row_count(self) -> int:
        """Rows of a piece."""
        return self.counts[-2] if len(self.counts) > 1 else 1

    @property
    def gm_step(self) -> int:
        """Elements from row to row in GM."""
        if len(self.counts) == 1:
            return 0
        return (self.src if self.is_load else self.dst).strides[-2]

    @property
    def may_overrun(self) -> bool:
        """True if the copy of a row may reach into the next row: only the last rows are special."""
        is_dense = self.gm_step == self.counts[-1] == self.src.row
        return self.gm_step > 0 and (self.is_load or is_dense)

    @property
    def special_row_count(self) -> int:
        """How many rows at the end of a piece must be copied specially, so as not to leave it.

        They are those whose filled-up copies would end behind the last row.
        """
        if not self.may_overrun:
            return self.row_count
        overrun_rows = -(-(self.padded_elements - self.counts[-1]) // self.gm_step)
        return min(self.row_count, max(1, overrun_rows))

    def special_rows(self, unit: Unit) -> Iterator[list[tuple[int, View]]]:
        """Yield, for each piece, its rows with special ends, and how many rows are behind each.

        Last rows come first. All rows of a piece are written inside the same loops.
        """
        view = self.dst if self.is_load else self.src
        if not self.may_overrun:
            for (row,) in unit.over(self.counts[:-1], [view]):
                yield [(0, row)]
            return
        # Short stored rows: the last block of the piece holds several of them, all of them special.
        is_short_store = self.counts[-1] < self.block and not self.is_load
        count = -(-self.block // self.gm_step) if is_short_store else self.special_row_count
        for (piece,) in unit.over(self.counts[:-2], [view]):
            last = self.row_count - 1
            yield [(behind, piece.moved(0, last - behind).inner()) for behind in range(count)]


EmitCopy = Callable[[Unit, Rows], None]
"""A function that writes a part of a copy: `copy_main_part`, or one of those for ends of rows."""


def rows_of_box(dst: View, src: View, sizes: Sequence[int], block: int) -> Rows:
    """Return the copy of a box, whose rows may be rounded up to `block` elements (0: not)."""
    # Rows that lie behind each other on both sides are one long row: nothing is ragged inside it.
    dims = coalesce(sizes, (dst, src)) or [(1, (1, 1))]
    to_view, from_view = with_dims((dst, src), dims)
    counts = tuple(size for size, _ in dims)
    is_load = dst.memory.region(0, 1).space == "UB"
    on_chip, gm = (to_view, from_view) if is_load else (from_view, to_view)
    gm_step = gm.strides[-2] if len(counts) > 1 else 0
    may_overrun = is_load or gm_step == counts[-1] == on_chip.row
    # A block may only be copied where the tensor has as many elements as a block: 3 rows of 5 are
    # 15, too few for a block of 16.
    reach = counts[-1]
    if may_overrun and gm_step:
        reach += gm_step * (counts[-2] - 1)
    fits = to_view.strides[-1] == from_view.strides[-1] == 1 and reach >= block
    copied_block = block if fits else 0
    unit = max(copied_block, c0_of(dst.dtype))
    tail = counts[-1] % unit if on_chip.strides[-1] == 1 else counts[-1]
    return Rows(to_view, from_view, counts, copied_block, tail)


def copy_main_part(unit: Unit, rows: Rows) -> None:
    """Emit the copy of a box; without `block`, and without padding, only of its whole blocks."""
    can_pad = not unit.builder.chip.combined
    if rows.by_blocks and (rows.is_load or not can_pad):
        _copy_by_blocks(unit, rows)
        return
    counts = list(rows.counts)
    ragged_elements = rows.tail % c0_of(rows.dst.dtype)
    if ragged_elements and not can_pad:
        # Rows shorter than a block have no whole block: all their elements are left over.
        if rows.tail == counts[-1]:
            return
        counts[-1] -= ragged_elements
    for inner in unit.over(counts[:-2], (rows.dst, rows.src)):
        target, source = (v.memory.region(v.offset, counts[-2:], v.strides) for v in inner)
        unit.builder.copy(target, source, pad=bool(ragged_elements) and can_pad)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows that are copied inside the loops over outer axes, as views of GM and of UB."""

    unit: Unit
    gm: View
    on_chip: View
    is_load: bool

    def copy(
        self,
        rows: range,
        width: int,
        *,
        gm_start: int = 0,
        ub_start: int = 0,
        gm_step: int | None = None,
        pad: bool = False,
    ) -> None:
        """Emit the copy of `width` elements of some rows, from these places of each row on.

        With `gm_step` 0 the same elements of GM are copied for every row.
        """
        step = _row_step(self.gm)
        gm_begin = self.gm.offset + (rows.start * step + gm_start)
        gm_steps = (step if gm_step is None else gm_step, 1)
        gm_region = self.gm.memory.region(gm_begin, (len(rows), width), gm_steps)
        ub_step = _row_step(self.on_chip)
        ub_begin = self.on_chip.offset + (rows.start * ub_step + ub_start)
        ub_region = self.on_chip.memory.region(ub_begin, (len(rows), width), (ub_step, 1))
        if self.is_load:
            self.unit.builder.copy(ub_region, gm_region, pad=pad)
        else:
            self.unit.builder.copy(gm_region, ub_region, pad=pad)


def _row_step(view: View) -> int:
    """Return the elements from row to row; 0 for a view of one row."""
    return view.strides[-2] if len(view.strides) > 1 else 0


def _copy_by_blocks(unit: Unit, rows: Rows) -> None:
    """Emit the copy of ragged rows by whole blocks; see the top of the module."""
    row_elements = rows.counts[-1]
    block = rows.block
    block_elements = row_elements - rows.tail  # those in whole blocks
    plain_count = rows.row_count - rows.special_row_count if rows.may_overrun else 0
    special = range(plain_count, rows.row_count)
    can_pad = not unit.builder.chip.combined
    for dst, src in unit.over(rows.counts[:-2], (rows.dst, rows.src)):
        gm, on_chip = (src, dst) if rows.is_load else (dst, src)
        piece = _Piece(unit, gm, on_chip, rows.is_load)
        if plain_count:
            piece.copy(range(plain_count), rows.padded_elements)
        if block_elements and not can_pad:
            piece.copy(special, block_elements)
        if row_elements >= block:
            piece.copy(special, block, gm_start=row_elements - block, ub_start=block_elements)
        elif rows.is_load:
            # Rows shorter than a block: the last block of the piece, once for each of them.
            end = (len(special) - 1) * rows.gm_step + row_elements
            piece.copy(special, block, gm_start=end - block, gm_step=0)
        else:
            piece.copy(special[-1:], block, gm_start=row_elements - block)
        if can_pad:
            piece.copy(special, row_elements, pad=True)


def shift_loaded_ends(unit: Unit, rows: Rows) -> None:
    """Shift the last block of loaded rows from where it ends in GM to where it begins in UB."""
    if not rows.by_blocks:
        return
    size = rows.counts[-1]
    block = rows.block
    for piece in rows.special_rows(unit):
        for rows_behind, row in piece:
            block_elements = size - rows.tail
            skipped = block - rows.tail
            if size < block:
                skipped = block - rows_behind * rows.gm_step - size
            taken = _Taken(block_elements, block, skipped)
            _shift(unit, row, taken, row, range(block_elements, size))


def shift_stored_ends(unit: Unit, rows: Rows) -> None:
    """Write each row's last elements, aligned as in GM, over its last block and the padding.

    Nothing reads the tile but the store.
    """
    if not rows.by_blocks:
        return
    size = rows.counts[-1]
    block = rows.block
    c0 = c0_of(rows.src.dtype)
    # A row of 100: the last block in GM is 84..99, and begins at 80 in UB, at a whole block.
    start = max(size - block, 0) // c0 * c0
    for piece in rows.special_rows(unit):
        last_row = piece[0][1]
        for rows_behind, row in piece:
            if size >= block:
                last_block_start = size - rows.tail
                taken = _Taken(start, size - start, size - block - start)
                placed = range(last_block_start, last_block_start + block)
                _shift(unit, row, taken, row, placed)
                continue
            # The last block of all holds several short rows: where this one begins in it.
            first = block - (rows_behind + 1) * size
            visible = size + min(first, 0)
            placed = range(max(first, 0), max(first, 0) + visible)
            _shift(unit, row, _Taken(0, size, max(-first, 0)), last_row, placed)


class _Taken(NamedTuple):
    """Elements of a row that become blocks: the first, their number, how many are skipped."""

    start: int
    length: int
    skipped: int


def _shift(unit: Unit, row: View, taken: _Taken, out: View, placed: range) -> None:
    """Write elements of a row to the places `placed` of `out`, one by one by way of blocks."""
    c0 = c0_of(row.dtype)
    # `vbrcb` gives each element a block of its own, and `vcgmax` of a block of equal elements is
    # that element: together they move elements to any place, which no copy in UB can.
    tile = unit.take(row.dtype, taken.length * c0)
    source = row.memory.region(row.offset + taken.start, taken.length)
    unit.builder.vector("vbrcb", tile.region(0, (taken.length, c0)), source)
    in_full_repeats = len(placed) - len(placed) % BLOCKS_PER_REPEAT
    for first, count in ((0, in_full_repeats), (in_full_repeats, len(placed) - in_full_repeats)):
        if count:
            repeats = max(count // BLOCKS_PER_REPEAT, 1)
            shape = (repeats, min(count, BLOCKS_PER_REPEAT), c0)
            blocks = tile.region((taken.skipped + first) * c0, shape)
            target = out.memory.region(out.offset + (placed.start + first), count)
            unit.builder.vector("vcgmax", target, blocks)
    unit.give(tile)


def copy_leftover(unit: Unit, rows: Rows) -> None:
    """Emit copies, one by one on the scalar unit, of the elements that `copy_main_part` left out.

    Each element waits for the latency of L2 once, as in the copies of `layout` and `kernels`.
    """
    chip = unit.builder.chip
    counts = rows.counts
    if not rows.has_leftover:
        return
    count = rows.tail if rows.tail == counts[-1] else rows.tail % c0_of(rows.dst.dtype)
    # A scalar load from GM waits for L2: its latency is counted as scalar instructions.
    wait_steps = chip.l2.latency_cycles // max(chip.scalar_cycles, 1)
    ends = [v.moved(len(counts) - 1, counts[-1] - count) for v in (rows.dst, rows.src)]
    for inner in unit.over([*counts[:-1], count], ends):
        target, source = (v.memory.region(v.offset, 1) for v in inner)
        unit.builder.scalar(target, source, steps=max(wait_steps, 1))
