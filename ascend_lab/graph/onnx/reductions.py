"""Reductions; axes are an attribute in older opsets and an input in newer ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Fill, TensorType
from ascend_lab.graph.onnx.converter import Context, Convert, Result, converter
from ascend_lab.graph.onnx.shapes import axes_given, axes_of
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


# Normalisation over trailing axes, groups of channels or single images.


@converter("LayerNormalization", types=(FLOATS,))
def _layer_norm(ctx: Context) -> Sequence[Result]:
    """Normalise the axes from `axis` on; sums are in fp32 or wider."""
    x = ctx.input(0)
    tail = _tail(ctx)
    scale = _stretched(ctx, ctx.input(1), tail)
    bias = _stretched(ctx, ctx.input(2), tail) if ctx.has(2) else _fill(ctx, x, tail, 0.0)
    attrs = {"axis": -len(tail), "epsilon": ctx.attr("epsilon")}
    out = ctx.emit("layer_norm", x, scale, bias, **attrs)
    return (out,) if ctx.out_count == 1 else (out, *_statistics(ctx, len(tail)))


def _statistics(ctx: Context, count: int) -> tuple[Tensor, Tensor]:
    """Return the means and 1 / sqrt(variance + epsilon) over the last axes, in fp32."""
    axes = tuple(range(-count, 0))
    wide = ctx.input(0, "fp32")
    mean = ctx.emit("reduce_mean", wide, axis=axes, keepdims=True)
    squares = ctx.emit("square", ctx.emit("sub", wide, mean))
    variance = ctx.emit("reduce_mean", squares, axis=axes, keepdims=True)
    rate = ctx.emit("rsqrt", ctx.emit("adds", variance, number=ctx.attr("epsilon")))
    return ctx.typed(mean, "float32"), ctx.typed(rate, "float32")


@converter("RMSNormalization", types=(FLOATS,))
def _rms_norm(ctx: Context) -> Value:
    tail = _tail(ctx)
    scale = _stretched(ctx, ctx.input(1), tail)
    return ctx.emit("rms_norm", ctx.input(0), scale, axis=-len(tail), epsilon=ctx.attr("epsilon"))


def _tail(ctx: Context) -> Shape:
    shape, axis = ctx.shape(0), ctx.attr("axis")
    if not -len(shape) <= axis < len(shape) or ctx.attr("stash_type") != 1:
        ctx.unsupported(f"an axis of {shape}, stash_type 1", f"axis {axis}")
    return shape[axis % len(shape) :]


def _stretched(ctx: Context, value: Value, shape: Shape) -> Value:
    """Return a scale broadcast to the normalised axes."""
    if value.shape == shape:
        return value
    extra = value.shape[: max(0, len(value.shape) - len(shape))]
    if any(n != 1 for n in extra):
        ctx.unsupported(f"a scale that broadcasts to {shape}", str(value.shape))
    if extra:
        value = ctx.emit("reshape", value, shape=value.shape[len(extra) :])
    if np.broadcast_shapes(value.shape, shape) != shape:
        ctx.unsupported(f"a scale that broadcasts to {shape}", str(value.shape))
    return value if value.shape == shape else ctx.emit("expand", value, shape=shape)


def _fill(ctx: Context, like: Value, shape: Shape, number: float) -> Value:
    kind = TensorType(shape, like.type.dtype)
    return ctx.net.lasting(Fill(number), kind, f"{ctx.name}/fill")


def _normalised(ctx: Context, groups: int) -> Value:
    """Return (x - mean) / sqrt(variance + epsilon) over each of `groups` groups of channels."""
    x = ctx.input(0)
    n, c = x.shape[:2]
    if groups < 1 or c % groups:
        ctx.unsupported(f"groups that divide {c} channels", str(groups))
    rows = ctx.emit("reshape", x, shape=(n, groups, math.prod(x.shape[1:]) // groups))
    scale, bias = (_fill(ctx, x, rows.shape[-1:], number) for number in (1.0, 0.0))
    normal = ctx.emit("layer_norm", rows, scale, bias, epsilon=ctx.attr("epsilon"))
    return ctx.emit("reshape", normal, shape=x.shape)


def _scaled(ctx: Context, x: Value) -> Value:
    """Return x scale + bias, each one number per channel."""
    column = (x.shape[1], *(1,) * (len(x.shape) - 2))
    scale, bias = (ctx.emit("reshape", ctx.input(i), shape=column) for i in (1, 2))
    return ctx.emit("add", ctx.emit("mul", x, scale), bias)


def _image(ctx: Context) -> None:
    if len(ctx.shape(0)) < 3:
        ctx.unsupported("an image (n, c, ...)", str(ctx.shape(0)))


@converter("InstanceNormalization", types=(FLOATS,), since=6)
def _instance_norm(ctx: Context) -> Value:
    _image(ctx)
    return _scaled(ctx, _normalised(ctx, ctx.shape(0)[1]))


@converter("GroupNormalization", types=(FLOATS,))
def _group_norm(ctx: Context) -> Value:
    """Scale and bias are one per channel from opset 21 on, one per group before."""
    _image(ctx)
    shape, groups = ctx.shape(0), ctx.attr("num_groups")
    normal = _normalised(ctx, groups)
    if ctx.opset >= 21:
        return _scaled(ctx, normal)
    split = (shape[0], groups, shape[1] // groups, *shape[2:])
    wide = ctx.emit("reshape", normal, shape=split)
    return ctx.emit("reshape", _scaled(ctx, wide), shape=shape)


# Normalisation over any axes and by a norm; gated activations.


@converter("LpNormalization", types=(FLOATS,))
def _lp_norm(ctx: Context) -> Value:
    """Divide by the norm along an axis; zeros stay zeros."""
    x, p = ctx.input(0), ctx.attr("p")
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    if p not in (1, 2):
        ctx.unsupported("p of 1 or 2", str(p))
    powers = ctx.emit("abs" if p == 1 else "square", x)
    norm = ctx.emit("reduce_sum", powers, axis=axis, keepdims=True)
    norm = norm if p == 1 else ctx.emit("sqrt", norm)
    return ctx.choose(norm, ctx.emit("div", x, norm), ctx.table(0, x.type.dtype, "zero"))
