"""Evaluate a formula on a tile: one vector instruction sequence per operation, scratch between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ascend_lab.dsl.boxes import Box
from ascend_lab.dsl.emit_fold import fold_box
from ascend_lab.dsl.emit_vector import apply
from ascend_lab.dsl.expr import Call, Expr, Read, leaves
from ascend_lab.dsl.stages import Stage
from ascend_lab.dsl.unit import Op, Unit
from ascend_lab.dsl.views import View
from ascend_lab.isa import c0_of


def compute_tile(
    unit: Unit, stage: Stage, box: Box, out: View, views: Mapping[Read, View], add: bool
) -> None:
    """Emit out[data axes] = formula, or its fold; `add`: fold into what out holds."""
    kept, folds = ([box[a.name].count for a in axes] for axes in (stage.axes, stage.reduce))
    sizes = [*kept, *folds]
    if not stage.fold:
        evaluate(unit, stage.expr, out, views, sizes)
        return
    if isinstance(stage.expr, Read):
        source = views[stage.expr]
    else:
        source = _scratch(unit, stage.expr.dtype, sizes, views)
        evaluate(unit, stage.expr, source, views, sizes)
    folds_first = source.take([*range(len(kept), len(sizes)), *range(len(kept))])
    fold_box(unit, stage.fold, out, folds_first, folds, kept, add)
    unit.give(source.memory)


def evaluate(
    unit: Unit, expr: Expr, out: View, views: Mapping[Read, View], sizes: Sequence[int]
) -> None:
    """Emit out[box] = expr; inner operations go to scratch tiles, reused as soon as possible."""
    if isinstance(expr, Read):
        apply(unit, Op("vcopy"), out, (views[expr],), sizes)
        return
    assert isinstance(expr, Call)
    operands, spare = [], [out]
    for arg in expr.args:
        if isinstance(arg, Read):
            operands.append(views[arg])
            continue
        used = [views[r].strides for r in leaves(arg) if isinstance(r, Read)]
        own = [n if any(s[d] for s in used) else 1 for d, n in enumerate(sizes)]
        here = bool(spare) and arg.dtype == out.dtype and own == list(sizes)
        place = spare.pop() if here else _scratch(unit, arg.dtype, own, views)
        evaluate(unit, arg, place, views, own)
        repeats = zip(own, sizes, place.strides, strict=True)
        steps = tuple(0 if mine < whole else step for mine, whole, step in repeats)
        operands.append(place if here else place.stepping(steps))
    apply(unit, Op(expr.op, expr.number, expr.mode), out, operands, sizes)
    for operand in operands:
        if operand is not out:
            unit.give(operand.memory)


def _scratch(unit: Unit, dtype: str, sizes: Sequence[int], views: Mapping[Read, View]) -> View:
    """Return a scratch tile for a box; its contiguous axis is the one of the operands."""
    lanes = [a for a in range(len(sizes)) if any(v.strides[a] == 1 for v in views.values())]
    last = max(lanes, key=lambda a: (sizes[a] > 1, a)) if lanes else len(sizes) - 1
    outer = [a for a in range(len(sizes)) if a != last]
    block = c0_of(dtype)
    single = math.prod(sizes[a] for a in outer) == 1
    step = sizes[last] if single else -(-sizes[last] // block) * block
    strides = [1] * len(sizes)
    for axis in reversed(outer):
        strides[axis] = step
        step *= sizes[axis]
    return View(unit.take(dtype, step), dtype, 0, tuple(strides))
