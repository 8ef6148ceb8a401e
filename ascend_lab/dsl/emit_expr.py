"""Evaluate a formula on a tile: one vector instruction sequence per operation, scratch between."""

from __future__ import annotations

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
    axes = (*stage.axes, *stage.reduce)
    sizes = [box[a.name].count for a in axes]
    if not stage.fold:
        evaluate(unit, stage.expr, out, views, sizes)
        return
    kept = list(range(len(stage.axes)))
    folded = list(range(len(stage.axes), len(axes)))
    if isinstance(stage.expr, Read):
        source = views[stage.expr]
    else:
        source = _scratch(unit, stage.expr.dtype, sizes, views)
        evaluate(unit, stage.expr, source, views, sizes)
    fold_box(unit, stage.fold, out, source, sizes, kept, folded, add)
    unit.give(source.memory)


def _scratch(unit: Unit, dtype: str, sizes: Sequence[int], views: Mapping[Read, View]) -> View:
    """Return a scratch tile for a box; its contiguous axis is the one of the operands."""
    order = list(range(len(sizes)))
    lanes = [a for a in order if any(v.strides[a] == 1 for v in views.values())]
    last = max(lanes, key=lambda a: (sizes[a] > 1, a)) if lanes else order[-1]
    order = [*(a for a in order if a != last), last]
    rows = 1
    for axis in order[:-1]:
        rows *= sizes[axis]
    block = c0_of(dtype)
    pitch = sizes[last] if rows == 1 else -(-sizes[last] // block) * block
    strides, step = [0] * len(sizes), pitch
    strides[last] = 1
    for axis in reversed(order[:-1]):
        strides[axis] = step
        step *= sizes[axis]
    return View(unit.take(dtype, step), dtype, 0, tuple(strides))


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
        own = _own_sizes(arg, views, sizes)
        here = bool(spare) and arg.dtype == out.dtype and own == list(sizes)
        place = spare.pop() if here else _scratch(unit, arg.dtype, own, views)
        evaluate(unit, arg, place, views, own)
        operands.append(place if here else _repeated(place, own, sizes))
    apply(unit, Op(expr.op, expr.number, expr.mode), out, operands, sizes)
    for operand in operands:
        if operand is not out:
            unit.give(operand.memory)


def _own_sizes(expr: Expr, views: Mapping[Read, View], sizes: Sequence[int]) -> list[int]:
    """Return the box an expression really depends on: 1 along axes none of its reads uses."""
    used = [views[r].strides for r in leaves(expr) if isinstance(r, Read)]
    return [n if any(s[d] for s in used) else 1 for d, n in enumerate(sizes)]


def _repeated(view: View, own: Sequence[int], sizes: Sequence[int]) -> View:
    """Return a small tile as an operand of a larger box: steps of 0 where it repeats."""
    strides = tuple(
        0 if mine < whole else step
        for mine, whole, step in zip(own, sizes, view.strides, strict=True)
    )
    return View(view.memory, view.dtype, view.offset, strides)
