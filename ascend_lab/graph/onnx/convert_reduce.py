"""Reductions; axes are an attribute in older opsets and an input in newer ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.convert_shape import axes_given, axes_of
from ascend_lab.graph.onnx.registry import Convert, Result, converter
from ascend_lab.graph.onnx.tensors import ANY, FLOATS, INTEGERS, NUMBERS, NUMPY, Shape, Tensor

_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
"""About the largest number of each type, which an infinite maximum is limited to."""
_ATTRS = {"axes": (), "keepdims": 1, "noop_with_empty_axes": 0}


def _axes(ctx: Context) -> Shape:
    """Return the axes to fold, all if none are named; () for noop_with_empty_axes."""
    rank = len(ctx.shape(0))
    given = axes_given(ctx)
    if not given:
        return () if ctx.attr("noop_with_empty_axes") else tuple(range(rank))
    return axes_of(ctx, given, rank)


def _fold(ctx: Context, op: str, value: Value, *, keep: bool | None = None) -> Value:
    kept = bool(ctx.attr("keepdims")) if keep is None else keep
    return ctx.emit(op, value, axis=_axes(ctx), keepdims=kept)


_PLAIN = {
    "ReduceSum": "reduce_sum",
    "ReduceProd": "reduce_prod",
    "ReduceMean": "reduce_mean",
    "ReduceMax": "reduce_max",
    "ReduceMin": "reduce_min",
}


def _reduced(ctx: Context) -> Result:
    """Fold; without an axis to fold the input is the result, without elements the least value."""
    if _empty(ctx) and ctx.op in ("ReduceMax", "ReduceMin"):
        return _least(ctx, 1 if ctx.op == "ReduceMax" else -1)
    return _fold(ctx, _PLAIN[ctx.op], ctx.input(0)) if _axes(ctx) else ctx.tensor(0)


def _empty(ctx: Context) -> bool:
    """Tell whether the axes to fold have no elements."""
    return any(ctx.shape(0)[a] == 0 for a in _axes(ctx))


def _least(ctx: Context, sign: int) -> Tensor:
    """Return the result of a fold over nothing: -infinity, or the format's end, times a sign."""
    kind, axes, kept = NUMPY[ctx.elem(0)], _axes(ctx), ctx.attr("keepdims")
    shape = [1 if i in axes else n for i, n in enumerate(ctx.shape(0)) if kept or i not in axes]
    if ctx.elem(0) in FLOATS:
        return ctx.known(np.full(shape, -sign * np.inf), ctx.elem(0))
    low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return ctx.known(np.full(shape, low if sign > 0 else high, kind), ctx.elem(0))


for _names, _types in (
    (("ReduceSum", "ReduceProd"), NUMBERS),
    (("ReduceMean",), FLOATS),
    (("ReduceMax", "ReduceMin"), ANY),
):
    converter(*_names, types=(_types, INTEGERS))(_reduced)


def _composed(*names: str) -> Callable[[Convert], Convert]:
    return converter(*names, types=(FLOATS, INTEGERS))


@_composed("ReduceSumSquare", "ReduceL1", "ReduceL2")
def _of_sizes(ctx: Context) -> Value:
    _some(ctx)
    inner = ctx.emit("abs" if ctx.op == "ReduceL1" else "square", ctx.input(0))
    total = _fold(ctx, "reduce_sum", inner)
    return ctx.emit("sqrt", total) if ctx.op == "ReduceL2" else total


@_composed("ReduceLogSum")
def _log_sum(ctx: Context) -> Value:
    _some(ctx)
    return ctx.emit("log", _fold(ctx, "reduce_sum", ctx.input(0)))


@_composed("ReduceLogSumExp")
def _log_sum_exp(ctx: Context) -> Result:
    """Return max + log sum exp(x - max): no exponential can overflow, nor infinity less itself."""
    _some(ctx)
    if _empty(ctx):
        return _least(ctx, 1)
    x = ctx.input(0)
    top = _fold(ctx, "reduce_max", x, keep=True)
    largest: float = _LARGEST[ctx.elem(0)]
    top = ctx.emit("clip", top, low=-largest, high=largest)
    power = ctx.emit("exp", ctx.emit("sub", x, top))
    total = ctx.emit("log", _fold(ctx, "reduce_sum", power))
    return ctx.emit("add", ctx.emit("reshape", top, shape=total.shape), total)


def _some(ctx: Context) -> None:
    if not _axes(ctx):
        ctx.unsupported("axes to fold", "none")
