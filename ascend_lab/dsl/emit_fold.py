"""Folds of a box on the vector unit: sum, max, min, prod over some of its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.emit_vector import Op, Unit, apply, fill
from ascend_lab.dsl.footprint import row_major
from ascend_lab.dsl.views import View, coalesce, with_dims
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import c0_of

COMBINE = {"sum": "vadd", "max": "vmax", "min": "vmin", "prod": "vmul"}
ACROSS = {"sum": "vcadd", "max": "vcmax", "min": "vcmin"}
WIDE = 32
"""Rows a long fold is spread over, so that one instruction has many repeats."""


def start_of(fold: str, dtype: str) -> float:
    """Return the number a fold starts from: 0, 1, or or the format's least or largest."""
    whole = {"int32": 2147483647.0, "int8": 127.0, "uint8": 255.0}
    top = whole.get(dtype, math.inf)
    return {"sum": 0.0, "prod": 1.0, "max": -top, "min": top}[fold]


def fold_box(
    unit: Unit,
    fold: str,
    dst: View,
    src: View,
    sizes: Sequence[int],
    kept: Sequence[int],
    folded: Sequence[int],
    add: bool,
) -> None:
    """Emit dst[kept axes] = fold of src[box] over the `folded` axes; `add`: folded into dst.

    The axis along which src is contiguous is folded across lanes, the others row by row.
    """
    folded = [a for a in folded if sizes[a] > 1]
    lane = next((a for a in folded if src.strides[a] == 1), None)
    if lane is None or fold == "prod":
        _outer(unit, fold, dst, src, sizes, kept, folded, add)
        return
    rest = [a for a in folded if a != lane]
    rows = [*rest, *kept]
    row_sizes = [sizes[a] for a in rows]
    source = src.take([*rows, lane])
    if not rest and not add:
        _across(unit, fold, dst, source, row_sizes, sizes[lane])
        return
    inner = math.prod(sizes[a] for a in kept)
    block = c0_of(src.dtype)
    pitch = inner if inner == 1 else -(-inner // block) * block
    steps = (
        *(s * pitch for s in row_major(row_sizes[: len(rest)])),
        *row_major([sizes[a] for a in kept]),
    )
    tile = unit.take(src.dtype, pitch * math.prod(row_sizes[: len(rest)]))
    partial = View(tile, src.dtype, 0, steps)
    _across(unit, fold, partial, source, row_sizes, sizes[lane])
    own = list(range(len(rest), len(rows)))
    fold_box(unit, fold, dst, partial, row_sizes, own, list(range(len(rest))), add)
    unit.give(tile)


def _outer(
    unit: Unit,
    fold: str,
    dst: View,
    src: View,
    sizes: Sequence[int],
    kept: Sequence[int],
    folded: Sequence[int],
    add: bool,
) -> None:
    """Combine the slices of src one after another into dst."""
    op = Op(COMBINE[fold])
    box = [sizes[a] for a in kept]
    if folded and not any(src.strides[a] == 1 for a in kept) and box and max(box) > 1:
        raise ScheduleError(
            "a fold with contiguous elements along a kept axis, or along the folded one",
            f"steps {src.strides}",
            "transpose the tensor first",
        )
    if not folded and not add:
        apply(unit, Op("vcopy"), dst, (src.take(kept),), box)
        return
    order = sorted(folded, key=lambda a: sizes[a])
    if len(order) == 1 and _narrow_rows(unit, src, box) and sizes[order[0]] >= 4:
        _halving(unit, op, dst, src, (sizes[order[0]], order[0]), kept, box, add)
        return
    _slices(unit, op, dst, src, sizes, kept, order, fresh=not add)


def _narrow_rows(unit: Unit, src: View, box: Sequence[int]) -> bool:
    """True if one slice is so short that an instruction per slice would mostly start up."""
    size_bytes = math.prod(box) * DTYPE_BYTES[src.dtype]
    return size_bytes < WIDE // 4 * unit.builder.chip.vector_bytes_per_repeat


def _halving(
    unit: Unit,
    op: Op,
    dst: View,
    src: View,
    fold: tuple[int, int],
    kept: Sequence[int],
    box: Sequence[int],
    add: bool,
) -> None:
    """Combine the second half of the slices with the first, again and again, in scratch."""
    count, axis = fold
    half = count // 2
    block = c0_of(src.dtype)
    pitch = -(-math.prod(box) // block) * block
    tile = unit.take(src.dtype, half * pitch)
    rows = View(tile, src.dtype, 0, (pitch, *row_major(box)))
    order = [axis, *kept]
    apply(unit, op, rows, (src.take(order), src.moved(axis, half).take(order)), [half, *box])
    first = rows.take(range(1, len(order)))
    if count % 2:
        apply(unit, op, first, (first, src.moved(axis, count - 1).take(kept)), box)
    while half > 1:
        count, half = half, half // 2
        apply(unit, op, rows, (rows, rows.moved(0, half)), [half, *box])
        if count % 2:
            last = rows.moved(0, count - 1).take(range(1, len(order)))
            apply(unit, op, first, (first, last), box)
    if add:
        apply(unit, op, dst, (dst, first), box)
    else:
        apply(unit, Op("vcopy"), dst, (first,), box)
    unit.give(tile)


def _slices(
    unit: Unit,
    op: Op,
    dst: View,
    src: View,
    sizes: Sequence[int],
    kept: Sequence[int],
    folded: Sequence[int],
    fresh: bool,
) -> None:
    """Combine all slices into dst; `fresh`: dst holds nothing yet, two begin it."""
    box = [sizes[a] for a in kept]
    if not folded:
        apply(unit, op, dst, (dst, src.take(kept)), box)
        return
    axis, rest = folded[0], folded[1:]
    start = 0
    if fresh and rest:
        _slices(unit, op, dst, src, sizes, kept, rest, fresh=True)
        start = 1
    elif fresh:
        apply(unit, op, dst, (src.take(kept), src.moved(axis, 1).take(kept)), box)
        start = 2
    if sizes[axis] > start:
        with unit.repeat(sizes[axis] - start) as index:
            inner = src.moved(axis, index + start)
            _slices(unit, op, dst, inner, sizes, kept, rest, fresh=False)


def _across(unit: Unit, fold: str, dst: View, src: View, rows: Sequence[int], lanes: int) -> None:
    """dst[rows] = fold of src[rows, lanes] along the contiguous lanes."""
    width = unit.builder.chip.vector_bytes_per_repeat // DTYPE_BYTES[src.dtype]
    count = 1
    for size in rows:
        count *= size
    if count * 4 <= WIDE and lanes >= 4 * width:
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
    deep = WIDE
    while deep * width * 2 > lanes:
        deep //= 2
    block, op = deep * width, Op(COMBINE[fold])
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


def _each(unit: Unit, rows: Sequence[int], src: View, dst: View, body: object, last: int) -> None:
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


def accumulator(unit: Unit, fold: str, dst: View, sizes: Sequence[int]) -> None:
    """Emit dst[box] = the number the fold starts from."""
    fill(unit, dst, sizes, start_of(fold, dst.dtype))
