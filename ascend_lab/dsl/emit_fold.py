"""Folds of a box on the vector unit: sum, max, min, prod over some of its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.emit_lanes import COMBINE, WIDE, fold_lanes
from ascend_lab.dsl.emit_vector import apply, fill
from ascend_lab.dsl.unit import Op, Unit
from ascend_lab.dsl.views import View, block_steps, row_major
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import c0_of


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
    if lane is None:
        _outer(unit, fold, dst, src, sizes, kept, folded, add)
        return
    rest = [a for a in folded if a != lane]
    rows = [*rest, *kept]
    row_sizes = [sizes[a] for a in rows]
    source = src.take([*rows, lane])
    if not rest and not add:
        fold_lanes(unit, fold, dst, source, row_sizes, sizes[lane])
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
    fold_lanes(unit, fold, partial, source, row_sizes, sizes[lane])
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
    steps, elements = block_steps(box, block) if box else ((), 1)
    pitch = -(-elements // block) * block
    tile = unit.take(src.dtype, half * pitch)
    rows = View(tile, src.dtype, 0, (pitch, *steps))
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


def accumulator(unit: Unit, fold: str, dst: View, sizes: Sequence[int]) -> None:
    """Emit dst[box] = the number the fold starts from."""
    fill(unit, dst, sizes, start_of(fold, dst.dtype))
