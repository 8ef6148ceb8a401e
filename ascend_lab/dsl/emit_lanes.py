"""Folds along the lanes: the contiguous elements of each row become one element."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    if fold == "prod":
        _product_across(unit, dst, src, rows, lanes)
    elif _long_is_shorter(unit, COMBINE[fold], math.prod(rows), lanes, width):
        _long(unit, fold, dst, src, rows, lanes, width)
    elif lanes > width:
        narrow = _lines(unit, src.dtype, rows, width)
        _narrow(unit, Op(COMBINE[fold]), narrow, src, rows, lanes, width)
        _rows_across(unit, fold, dst, narrow, rows, width)
        unit.give(narrow.memory)
    else:
        _rows_across(unit, fold, dst, src, rows, lanes)


def _lines(unit: Unit, dtype: str, rows: Sequence[int], width: int) -> View:
    """Return scratch for rows of `width` lanes, one behind the other."""
    tile = unit.take(dtype, math.prod(rows) * width)
    return View(tile, dtype, 0, (*(s * width for s in row_major(rows)), 1))


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
    op, block = Op("vmul"), c0_of(src.dtype)
    lines, kept = _lines(unit, src.dtype, rows, block), min(lanes, block)
    if lanes > block:
        _narrow(unit, op, lines, src, rows, lanes, block)
    else:
        apply(unit, Op("vcopy"), lines, (src,), [*rows, lanes])
    spread = View(unit.take(src.dtype, block * block), src.dtype, 0, (block, 1))
    with unit.repeat(math.prod(rows)) as row:
        out = View(lines.memory, src.dtype, row * block, (1,))
        to = spread.memory.region(0, (kept, block))
        unit.builder.vector("vbrcb", to, lines.memory.region(out.offset, kept))
        if kept > 1:
            apply(unit, op, out, (spread.inner(), spread.moved(0, 1).inner()), [block])
        if kept > 2:
            with unit.repeat(kept - 2) as index:
                apply(unit, op, out, (out, spread.moved(0, index + 2).inner()), [block])
    _rows_across(unit, "max", dst, lines, rows, 1)
    unit.give(spread.memory)
    unit.give(lines.memory)


def _narrow(
    unit: Unit, op: Op, dst: View, src: View, rows: Sequence[int], lanes: int, width: int
) -> None:
    """dst[rows, width] = the chunks of `width` lanes of src combined."""
    last, whole = len(rows), lanes // width
    start = min(whole, 2)
    if whole > 1:
        apply(unit, op, dst, (src, src.moved(last, width)), [*rows, width])
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
    flat = View(unit.take(src.dtype, block), src.dtype, 0, (1,))
    for row, out in unit.over(rows, (src, dst)):
        _narrow(unit, op, flat, row, [], lanes, block)
        half = block
        while half > width:
            half //= 2
            apply(unit, op, flat, (flat, flat.moved(0, half)), [half])
        _rows_across(unit, fold, out, flat, [], width)
    unit.give(flat.memory)


def _rows_across(
    unit: Unit, fold: str, dst: View, src: View, rows: Sequence[int], lanes: int
) -> None:
    """One cross-lane instruction per up to 255 rows of at most one repeat."""
    dims = coalesce(rows, (dst, src.stepping(src.strides[:-1]))) or [(1, (1, 0))]
    *outer, count = (n for n, _ in dims)
    for out, row in unit.over(outer, with_dims((dst, src), dims)):
        step, pitch = out.strides[0], row.strides[0]
        for at, part in unit.parts(count, unit.builder.chip.max_repeat):
            to = out.memory.region(out.offset + at * step, part, (step,))
            what = row.memory.region(row.offset + at * pitch, (part, lanes), (pitch, 1))
            unit.builder.vector(ACROSS[fold], to, what)
