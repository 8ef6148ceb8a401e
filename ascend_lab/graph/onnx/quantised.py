"""Arithmetic of whole numbers: quotients cut toward zero, remainders, bits.

A graph divides in fp64 and rounds to the nearest whole number; one step back makes it a cut.
Products and sums wrap at 32 bits, which leaves differences of near numbers exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.onnx.converter import Context, converter
from ascend_lab.graph.onnx.tensors import BITS, ELEMENTS, FLOATS, Shape
from ascend_lab.graph.onnx.windows import as_image, as_row, plain, window_of


def _signs(ctx: Context, x: Value) -> Value:
    return ctx.emit("sign", x)


def divided(ctx: Context, x: Value, y: Value) -> tuple[Value, Value]:
    """Return x / y cut toward zero, and the remainder, which has the sign of x; in int32."""
    x, y = ctx.cast(x, "int32"), ctx.cast(y, "int32")
    nearest = ctx.emit("div", x, y)
    rest = ctx.emit("sub", x, ctx.emit("mul", nearest, y))
    # the nearest quotient is one too far from zero where the rest points the other way than x
    beyond = ctx.emit("less", ctx.emit("mul", _signs(ctx, rest), _signs(ctx, x)),
                      ctx.table(0, "int32", "zero"))  # fmt: skip
    way = ctx.emit("mul", _signs(ctx, x), _signs(ctx, y))
    quotient = ctx.emit("sub", nearest, ctx.emit("mul", beyond, way))
    back = ctx.emit("mul", ctx.emit("mul", beyond, way), y)
    return quotient, ctx.emit("add", rest, back)


def modulo(ctx: Context, x: Value, y: Value) -> Value:
    """Return the remainder with the sign of y, in int32."""
    rest = divided(ctx, x, y)[1]
    y = ctx.cast(y, "int32")
    other = ctx.emit("less", ctx.emit("mul", _signs(ctx, rest), _signs(ctx, y)),
                     ctx.table(0, "int32", "zero"))  # fmt: skip
    return ctx.choose(other, ctx.emit("add", rest, y), rest)


def wrapped(ctx: Context, x: Value, dtype: str) -> Value:
    """Return the last eight bits of whole numbers as int8 or uint8, as the standard casts."""
    half = ctx.table(128 if dtype == "int8" else 0, "int32", "half")
    raised = ctx.emit("add", ctx.cast(x, "int32"), half)
    low = ctx.emit("and", raised, ctx.table(255, "int32", "byte"))
    return ctx.cast(ctx.emit("sub", low, half), dtype)


@converter("BitwiseXor", types=(BITS,), since=18)
def _xor(ctx: Context) -> Value:
    """Bits in either but not in both: x or y, less x and y."""
    x, y = ctx.input(0), ctx.input(1)
    return ctx.emit("sub", ctx.emit("or", x, y), ctx.emit("and", x, y))


@converter("BitShift", types=(BITS,), since=11)
def _shift(ctx: Context) -> Value:
    """Multiply by a power of two, or divide and round down; too far shifts leave the sign only."""
    x, y = ctx.input(0, "int32"), ctx.input(1, "int32")
    left, dtype = ctx.attr("direction") == "LEFT", ctx.input(0).type.dtype
    if not left and ctx.attr("direction") != "RIGHT":
        ctx.unsupported("direction LEFT or RIGHT", str(ctx.attr("direction")))
    most = (32 if dtype == "int32" else 8) - (1 if left or dtype != "int32" else 2)
    powers = (2 ** np.arange(most + 1, dtype=np.int64)).astype(np.int32)
    places = ctx.emit("clip", y, low=0, high=most)
    power = ctx.emit("gather", ctx.table(powers, "int32", "powers"), places, axis=0)
    zero = ctx.table(0, "int32", "zero")
    if left:
        moved, sign = ctx.emit("mul", x, power), zero
    else:
        moved = ctx.emit("div", ctx.emit("sub", x, modulo(ctx, x, power)), power)
        sign = ctx.emit("neg", ctx.emit("less", x, zero))
    inside = ctx.emit("equal", y, places)
    found = ctx.choose(inside, moved, sign)
    return found if dtype == "int32" else wrapped(ctx, found, dtype)


# Quantised tensors: whole numbers that stand for (number - zero point) * scale.


_NARROW = ("int8", "uint8")
_GRAIN = {"axis": 1, "block_size": 0, "output_dtype": 0}


def _spread(ctx: Context, i: int, shape: Shape) -> Value:
    """Return a scale or zero point shaped to broadcast: for all, for each row, or for blocks."""
    given = ctx.input(i)
    if given.type.elements == 1 and not ctx.attr("block_size"):
        return ctx.reshape(given, ())
    axis = ctx.axis(ctx.attr("axis"), len(shape))
    block = ctx.attr("block_size")
    if not block:
        if given.shape != (shape[axis],):
            ctx.unsupported(f"{shape[axis]} scales along axis {axis}", str(given.shape))
        return ctx.reshape(given, (shape[axis], *(1,) * (len(shape) - axis - 1)))
    wanted = tuple(-(-n // block) if d == axis else n for d, n in enumerate(shape))
    if given.shape != wanted:
        ctx.unsupported(f"scales {wanted} for blocks of {block}", str(given.shape))
    rows = ctx.table(np.arange(shape[axis]) // block, "int32", "blocks")
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
        point = ctx.reshape(point, ())
    elif column and len(point.shape) == 1:
        point = ctx.reshape(point, (*point.shape, *(1,) * (len(x.shape) - 1 if i else 1)))
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
    point = ctx.reshape(ctx.input(zero, "fp32"), ())
    ctx.result = ctx.elem(zero)
    return ctx.cast(ctx.emit("add", whole, point), ctx.result)


def _scale(ctx: Context, i: int, axes_behind: int = 0) -> Value:
    """Return a scale in fp32: a scalar, or one a row or channel with axes behind it."""
    given = ctx.input(i, "fp32")
    if given.type.elements == 1:
        return ctx.reshape(given, ())
    return ctx.reshape(given, (*given.shape, *(1,) * axes_behind))


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
