"""Folds of a box on the vector unit: sum, max, min, prod over some of its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.emit_lanes import COMBINE, WIDE, fold_lanes
from ascend_lab.dsl.emit_vector import apply
from ascend_lab.dsl.unit import Op, Unit
from ascend_lab.dsl.views import View, block_steps, row_major
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import c0_of

Sizes = Sequence[int]


def start_of(fold: str, dtype: str) -> float:
    """Return the number a fold starts from: 0, 1, or the format's least or largest."""
    whole = {"int32": 2147483647.0, "int8": 127.0, "uint8": 255.0}
    top = whole.get(dtype, math.inf)
    return {"sum": 0.0, "prod": 1.0, "max": -top, "min": top}[fold]


def fold_box(
    unit: Unit, fold: str, dst: View, src: View, folds: Sizes, kept: Sizes, add: bool
) -> None:
    """Emit dst[kept] = fold of src[folds, kept] over its first axes; `add`: folded into dst.

    The axis along which src is contiguous is folded across lanes, the others row by row.
    """
    live = [d for d, n in enumerate(folds) if n > 1]
    own = range(len(folds), len(folds) + len(kept))
    lane = next((d for d in live if src.strides[d] == 1), None)
    rest = [d for d in live if d != lane]
    outer = [folds[d] for d in rest]
    if lane is None:
        _fold_rows(unit, fold, dst, src.take([*rest, *own]), outer, kept, add)
        return
    source = src.take([*rest, *own, lane])
    if not rest and not add:
        fold_lanes(unit, fold, dst, source, kept, folds[lane])
        return
    inner, block = math.prod(kept), c0_of(src.dtype)
    pitch = inner if inner == 1 else -(-inner // block) * block
    steps = (*(s * pitch for s in row_major(outer)), *row_major(kept))
    partial = View(unit.take(src.dtype, pitch * math.prod(outer)), src.dtype, 0, steps)
    fold_lanes(unit, fold, partial, source, [*outer, *kept], folds[lane])
    fold_box(unit, fold, dst, partial, outer, kept, add)
    unit.give(partial.memory)


def _fold_rows(
    unit: Unit, fold: str, dst: View, src: View, folds: Sizes, kept: Sizes, add: bool
) -> None:
    """Combine the slices of src one after another into dst."""
    if folds and 1 not in src.strides[len(folds) :] and max(kept, default=1) > 1:
        raise ScheduleError(
            "a fold with contiguous elements along a kept axis, or along the folded one",
            f"steps {src.strides}",
            "transpose the tensor first",
        )
    op = Op(COMBINE[fold])
    if not folds and not add:
        apply(unit, Op("vcopy"), dst, (src,), kept)
        return
    size_bytes = math.prod(kept) * DTYPE_BYTES[src.dtype]
    short = size_bytes < WIDE // 4 * unit.builder.chip.vector_bytes_per_repeat
    if len(folds) == 1 and short and folds[0] >= 4:  # a slice an instruction would mostly start up
        _halving(unit, op, dst, src, folds[0], kept, add)
        return
    order = sorted(range(len(folds)), key=lambda d: folds[d])
    slices = src.take([*order, *range(len(folds), len(src.strides))])
    _slices(unit, op, dst, slices, [folds[d] for d in order], kept, fresh=not add)


def _halving(unit: Unit, op: Op, dst: View, src: View, count: int, kept: Sizes, add: bool) -> None:
    """Combine the second half of the slices with the first, again and again, in scratch."""
    half, block = count // 2, c0_of(src.dtype)
    steps, elements = block_steps(kept, block) if kept else ((), 1)
    pitch = -(-elements // block) * block
    rows = View(unit.take(src.dtype, half * pitch), src.dtype, 0, (pitch, *steps))
    first = rows.inner()
    apply(unit, op, rows, (src, src.moved(0, half)), [half, *kept])
    if count % 2:
        apply(unit, op, first, (first, src.moved(0, count - 1).inner()), kept)
    while half > 1:
        count, half = half, half // 2
        apply(unit, op, rows, (rows, rows.moved(0, half)), [half, *kept])
        if count % 2:
            apply(unit, op, first, (first, rows.moved(0, count - 1).inner()), kept)
    if add:
        apply(unit, op, dst, (dst, first), kept)
    else:
        apply(unit, Op("vcopy"), dst, (first,), kept)
    unit.give(rows.memory)


def _slices(
    unit: Unit, op: Op, dst: View, src: View, folds: Sizes, kept: Sizes, fresh: bool
) -> None:
    """Combine all slices into dst; `fresh`: dst holds nothing yet, two begin it."""
    if not folds:
        apply(unit, op, dst, (dst, src), kept)
        return
    start = 0
    if fresh and len(folds) > 1:
        _slices(unit, op, dst, src.inner(), folds[1:], kept, fresh=True)
        start = 1
    elif fresh:
        apply(unit, op, dst, (src.inner(), src.moved(0, 1).inner()), kept)
        start = 2
    if folds[0] > start:
        with unit.repeat(folds[0] - start) as index:
            inner = src.moved(0, index + start).inner()
            _slices(unit, op, dst, inner, folds[1:], kept, fresh=False)
