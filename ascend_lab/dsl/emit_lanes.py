"""Folds along the lanes: the contiguous elements of each row become one element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.emit_vector import apply
from ascend_lab.dsl.unit import Op, Unit
from ascend_lab.dsl.views import View, coalesce, row_major, with_dims
from ascend_lab.isa import c0_of

COMBINE = {"sum": "vadd", "max": "vmax", "min": "vmin", "prod": "vmul"}
ACROSS = {"sum": "vcadd", "max": "vcmax", "min": "vcmin"}
WIDE = 32
"""Rows a long fold is spread over, so that one instruction has many repeats."""


def fold_lanes(
    unit: Unit, fold: str, dst: View, src: View, rows: Sequence[int], lanes: int
) -> None:
    """dst[rows] = fold of src[rows, lanes] along the contiguous lanes."""
    width = unit.builder.chip.vector_bytes_per_repeat // DTYPE_BYTES[src.dtype]
    count = math.prod(rows)
    if fold == "prod":
        _product_across(unit, dst, src, rows, lanes)
        return
    if _long_is_shorter(unit, COMBINE[fold], count, lanes, width):
        _long(unit, fold, dst, src, rows, lanes, width)
        return
    if lanes > width:
        tile = unit.take(src.dtype, count * width)
        strides = (*(s * width for s in row_major(rows)), 1)
        narrow = View(tile, src.dtype, 0, strides)
        _narrow(unit, Op(COMBINE[fold]), narrow, src, rows, lanes, width)
        _rows_across(unit, fold, dst, narrow, rows, width)
        unit.give(tile)
        return
    _rows_across(unit, fold, dst, src, rows, lanes)


def _long_is_shorter(unit: Unit, op: str, rows: int, lanes: int, width: int) -> bool:
    """True if folding row by row in deep blocks takes fewer cycles than all rows chunk by chunk."""
    deep = block_depth(lanes, width)
    if deep < 2:
        return False
    cost = unit.builder.chip.vector_costs[op]
    head, slope = cost.head_cycles, cost.slope_cycles
    by_chunks = lanes // width * (head + slope * rows)
    halvings = deep.bit_length() - 1
    one_row = lanes // (deep * width) * (head + slope * deep) + halvings * head + slope * deep
    return rows * (one_row + head) < by_chunks


def block_depth(lanes: int, width: int) -> int:
    """Return how many repeats deep a block is that fits at least twice into a row."""
    deep = WIDE
    while deep > 1 and deep * width * 2 > lanes:
        deep //= 2
    return deep


def _product_across(unit: Unit, dst: View, src: View, rows: Sequence[int], lanes: int) -> None:
    """dst[rows] = product along the lanes, for which there is no instruction.

    Chunks of a block are multiplied; then every lane of the block is spread over a block of its own
    and these blocks are multiplied; a one-lane maximum writes the results.
    """
    op, block, count = Op("vmul"), c0_of(src.dtype), math.prod(rows)
    lines = unit.take(src.dtype, count * block)
    steps = (*(s * block for s in row_major(rows)), 1)
    view = View(lines, src.dtype, 0, steps)
    if lanes > block:
        _narrow(unit, op, view, src, rows, lanes, block)
    else:
        apply(unit, Op("vcopy"), view, (src,), [*rows, lanes])
    spread = unit.take(src.dtype, block * block)
    with unit.repeat(count) as row:
        kept = min(lanes, block)
        unit.builder.vector(
            "vbrcb", spread.region(0, (kept, block)), lines.region(row * block, kept)
        )
        out = View(lines, src.dtype, row * block, (1,))
        blocks = View(spread, src.dtype, 0, (block, 1))
        if kept > 1:
            fold_rows(unit, op, out, blocks, kept)
    _rows_across(unit, "max", dst, view, rows, 1)
    unit.give(spread)
    unit.give(lines)


def _narrow(
    unit: Unit, op: Op, dst: View, src: View, rows: Sequence[int], lanes: int, width: int
) -> None:
    """dst[rows, width] = the chunks of `width` lanes of src combined."""
    last, whole = len(rows), lanes // width
    start = 1
    if whole > 1:
        apply(unit, op, dst, (src, src.moved(last, width)), [*rows, width])
        start = 2
    else:
        apply(unit, Op("vcopy"), dst, (src,), [*rows, width])
    if whole > start:
        with unit.repeat(whole - start) as index:
            chunk = src.moved(last, index * width + start * width)
            apply(unit, op, dst, (dst, chunk), [*rows, width])
    if lanes % width:
        chunk = src.moved(last, lanes - lanes % width)
        apply(unit, op, dst, (dst, chunk), [*rows, lanes % width])


def _long(
    unit: Unit, fold: str, dst: View, src: View, rows: Sequence[int], lanes: int, width: int
) -> None:
    """Few long rows: fold blocks of several repeats, then halve the block."""
    block, op = block_depth(lanes, width) * width, Op(COMBINE[fold])
    tile = unit.take(src.dtype, block)
    flat = View(tile, src.dtype, 0, (1,))
    last = len(rows)

    def one(row: View, out: View) -> None:
        _narrow(unit, op, flat, row, [], lanes, block)
        half = block
        while half > width:
            half //= 2
            apply(unit, op, flat, (flat, flat.moved(0, half)), [half])
        _rows_across(unit, fold, out, flat, [], width)

    _each(unit, rows, src, dst, one, last)
    unit.give(tile)


def _each(
    unit: Unit,
    rows: Sequence[int],
    src: View,
    dst: View,
    body: Callable[[View, View], None],
    last: int,
) -> None:
    """Call body(row of src, place in dst) for every row."""
    assert callable(body)
    if not rows:
        body(View(src.memory, src.dtype, src.offset, (src.strides[last],)), dst.take([]))
        return
    with unit.repeat(rows[0]) as index:
        below = src.moved(0, index)
        inner = View(below.memory, below.dtype, below.offset, below.strides[1:])
        out = dst.moved(0, index)
        _each(
            unit,
            rows[1:],
            inner,
            View(out.memory, out.dtype, out.offset, out.strides[1:]),
            body,
            last - 1,
        )


def _rows_across(
    unit: Unit, fold: str, dst: View, src: View, rows: Sequence[int], lanes: int
) -> None:
    """One cross-lane instruction per up to 255 rows of at most one repeat."""
    dims = coalesce(rows, (dst, View(src.memory, src.dtype, src.offset, src.strides[:-1])))
    out, row = with_dims((dst, src), dims)
    _rows_loop(unit, fold, out, row, [n for n, _ in dims], lanes)


def _rows_loop(unit: Unit, fold: str, dst: View, src: View, rows: list[int], lanes: int) -> None:
    if len(rows) > 1:
        with unit.repeat(rows[0]) as index:
            out, row = dst.moved(0, index), src.moved(0, index)
            _rows_loop(
                unit,
                fold,
                View(out.memory, out.dtype, out.offset, out.strides[1:]),
                View(row.memory, row.dtype, row.offset, row.strides[1:]),
                rows[1:],
                lanes,
            )
        return
    count = rows[0] if rows else 1
    step, pitch = (dst.strides[0], src.strides[0]) if rows else (1, 0)
    for at, part in unit.parts(count, unit.builder.chip.max_repeat):
        to = dst.memory.region(dst.offset + at * step, part, (step,))
        what = src.memory.region(src.offset + at * pitch, (part, lanes), (pitch, 1))
        unit.builder.vector(ACROSS[fold], to, what)


def fold_rows(unit: Unit, op: Op, out: View, rows: View, count: int) -> None:
    """Emit out[:] = the `count` rows combined; they are blocks of 32 bytes."""
    width = c0_of(rows.dtype)
    first, second = rows.take([1]), rows.moved(0, 1).take([1])
    apply(unit, op, out, (first, second), [width])
    if count > 2:
        with unit.repeat(count - 2) as index:
            apply(unit, op, out, (out, rows.moved(0, index + 2).take([1])), [width])
