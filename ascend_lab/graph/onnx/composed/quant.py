"""Quantised tensors: whole numbers that stand for (number - zero point) * scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import axis_in, reshaped_to, table, typed
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import Result, converter
from ascend_lab.graph.onnx.tensors import ELEMENTS, FLOATS, Shape
from ascend_lab.graph.onnx.windows import as_image, as_row, plain, window_of

_NARROW = ("int8", "uint8")
_GRAIN = {"axis": 1, "block_size": 0, "output_dtype": 0}


def _spread(ctx: Context, i: int, shape: Shape) -> Value:
    """Return a scale or zero point shaped to broadcast: for all, for each row, or for blocks."""
    given = ctx.input(i)
    if given.type.elements == 1 and not ctx.attr("block_size"):
        return reshaped_to(ctx, given, ())
    axis = axis_in(ctx, ctx.attr("axis"), len(shape))
    block = ctx.attr("block_size")
    if not block:
        if given.shape != (shape[axis],):
            ctx.unsupported(f"{shape[axis]} scales along axis {axis}", str(given.shape))
        return reshaped_to(ctx, given, (shape[axis], *(1,) * (len(shape) - axis - 1)))
    wanted = tuple(-(-n // block) if d == axis else n for d, n in enumerate(shape))
    if given.shape != wanted:
        ctx.unsupported(f"scales {wanted} for blocks of {block}", str(given.shape))
    rows = table(ctx, np.arange(shape[axis]) // block, "int32", "blocks")
    return ctx.emit("gather", given, rows, axis=axis)


@converter("QuantizeLinear", types=((*FLOATS, "int32"), FLOATS, _NARROW), since=10)
def _quantize(ctx: Context) -> Value:
    if ctx.attr("precision"):
        ctx.unsupported("the scale's precision", f"precision {ctx.attr('precision')}")
    given = ctx.attr("output_dtype")
    elem = ctx.elem(2) if ctx.has(2) else "uint8"
    ctx.result = ELEMENTS[given][0] if given in ELEMENTS else elem
    if ctx.result not in _NARROW or (given and given not in ELEMENTS):
        ctx.unsupported("output in int8 or uint8", ctx.result if not given else str(given))
    x = ctx.input(0)
    scale = _spread(ctx, 1, x.shape)
    ratio = ctx.emit("div", ctx.cast(x, scale.type.dtype), scale)
    whole = ctx.cast(ctx.emit("round", ratio), "fp32")
    if ctx.has(2):
        whole = ctx.emit("add", whole, ctx.cast(_spread(ctx, 2, x.shape), "fp32"))
    return ctx.cast(whole, ctx.result)


@converter("DequantizeLinear", types=((*_NARROW, "int32"), FLOATS, (*_NARROW, "int32")), since=10)
def _dequantize(ctx: Context) -> Value:
    x = ctx.input(0, "int32")
    scale = _spread(ctx, 1, x.shape)
    ctx.result = ctx.elem(1)
    given = ctx.attr("output_dtype")
    if given and ELEMENTS.get(given, ("",))[0] != ctx.result:
        ctx.unsupported("output in the scale's type", f"output_dtype {given}")
    if ctx.has(2):
        x = ctx.emit("sub", x, ctx.cast(_spread(ctx, 2, x.shape), "int32"))
    return ctx.emit("mul", ctx.cast(x, scale.type.dtype), scale)


@converter("DynamicQuantizeLinear", types=(("float32",),), result="uint8", since=11)
def _dynamic(ctx: Context) -> Sequence[Result]:
    """Choose scale and zero point so that the extremes and 0 fit in 0 ... 255."""
    x = ctx.input(0)
    zero = table(ctx, 0, "fp32", "zero")
    high = ctx.emit("max", ctx.emit("reduce_max", x), zero)
    low = ctx.emit("min", ctx.emit("reduce_min", x), zero)
    steps = table(ctx, 255, "fp32", "steps")
    scale = ctx.emit("div", ctx.emit("sub", high, low), steps)
    point = ctx.emit("neg", ctx.emit("div", low, scale))
    point = ctx.emit("round", ctx.emit("clip", point, low=0.0, high=255.0))
    whole = ctx.emit("add", ctx.emit("round", ctx.emit("div", x, scale)), point)
    return ctx.cast(whole, "uint8"), typed(ctx, scale, "float32"), ctx.cast(point, "uint8")


def _shifted(ctx: Context, i: int, zero: int, column: bool = False) -> Value:
    """Return whole numbers less their zero point in int32; int8 as they are where it is 0."""
    x = ctx.input(i)
    if not ctx.has(zero):
        return x
    known = ctx.tensor(zero).known is not None
    if known and not ctx.const(zero).any() and ctx.elem(i) == "int8":
        return x
    point = ctx.input(zero, "int32")
    if point.type.elements == 1:
        point = reshaped_to(ctx, point, ())
    elif column and len(point.shape) == 1:
        point = reshaped_to(ctx, point, (*point.shape, *(1,) * (len(x.shape) - 1 if i else 1)))
    return ctx.emit("sub", ctx.cast(x, "int32"), point)


def _product(ctx: Context, a: Value, b: Value) -> Value:
    if min(len(a.shape), len(b.shape)) < 2:
        ctx.unsupported("matrices", f"{a.shape} and {b.shape}")
    if (a.type.dtype, b.type.dtype) != ("int8", "int8"):
        a, b = ctx.cast(a, "int32"), ctx.cast(b, "int32")
    flat = len(a.shape) == len(b.shape) == 2
    return ctx.emit("matmul" if flat else "batch_matmul", a, b)


@converter("MatMulInteger", types=(_NARROW,), result="int32", since=10)
def _matmul_integer(ctx: Context) -> Value:
    return _product(ctx, _shifted(ctx, 0, 2, column=True), _shifted(ctx, 1, 3))


def _convolved(ctx: Context, x: Value, weight: Value, *bias: Value) -> Value:
    shape = x.shape
    window = window_of(ctx, weight.shape[2:], shape[2:])
    if (x.type.dtype, weight.type.dtype) != ("int8", "int8"):
        x, weight = ctx.cast(x, "int32"), ctx.cast(weight, "int32")
    how = {"stride": window.stride, "pad": window.pads, "dilation": window.dilation}
    settings = {key: plain(value) for key, value in how.items()}
    images = as_image(ctx, x), as_image(ctx, weight)
    out = ctx.emit("conv2d", *images, *bias, groups=ctx.attr("group"), **settings)
    return as_row(ctx, out, len(shape))


@converter("ConvInteger", types=(_NARROW,), result="int32", since=10)
def _conv_integer(ctx: Context) -> Value:
    return _convolved(ctx, _shifted(ctx, 0, 2), _shifted(ctx, 1, 3, column=True))


def _rescaled(ctx: Context, total: Value, scales: Sequence[Value], zero: int) -> Value:
    """Return sums in the output's scale: times a b / y, rounded, plus the zero point, limited."""
    a, b, y = scales
    ratio = ctx.emit("div", ctx.emit("mul", a, b), y)
    whole = ctx.emit("round", ctx.emit("mul", ctx.cast(total, "fp32"), ratio))
    point = reshaped_to(ctx, ctx.input(zero, "fp32"), ())
    ctx.result = ctx.elem(zero)
    return ctx.cast(ctx.emit("add", whole, point), ctx.result)


def _scale(ctx: Context, i: int, axes_behind: int = 0) -> Value:
    """Return a scale in fp32: a scalar, or one a row or channel with axes behind it."""
    given = ctx.input(i, "fp32")
    if given.type.elements == 1:
        return reshaped_to(ctx, given, ())
    return reshaped_to(ctx, given, (*given.shape, *(1,) * axes_behind))


@converter(
    "QLinearMatMul",
    types=(_NARROW, FLOATS, _NARROW, _NARROW, FLOATS, _NARROW, FLOATS, _NARROW),
    since=10,
)
def _qlinear_matmul(ctx: Context) -> Value:
    total = _product(ctx, _shifted(ctx, 0, 2, column=True), _shifted(ctx, 3, 5))
    rows = 1 if len(ctx.shape(1)) == 1 else 0
    return _rescaled(ctx, total, (_scale(ctx, 1, rows), _scale(ctx, 4), _scale(ctx, 6)), 7)


@converter(
    "QLinearConv",
    types=(_NARROW, FLOATS, _NARROW, _NARROW, FLOATS, _NARROW, FLOATS, _NARROW, ("int32",)),
    since=10,
)
def _qlinear_conv(ctx: Context) -> Value:
    behind = len(ctx.shape(0)) - 2
    bias = (ctx.input(8),) if ctx.has(8) else ()
    total = _convolved(ctx, _shifted(ctx, 0, 2), _shifted(ctx, 3, 5, column=True), *bias)
    return _rescaled(ctx, total, (_scale(ctx, 1), _scale(ctx, 4, behind), _scale(ctx, 6)), 7)
