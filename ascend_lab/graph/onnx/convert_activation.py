"""Activation functions and other operators of one operand, element by element."""

from __future__ import annotations

import math

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import Result, converter
from ascend_lab.graph.onnx.tensors import BITS, FLOATS, NUMBERS

_SAME_NAME = {
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Reciprocal": "rec",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Softplus": "softplus",
    "Erf": "erf",
    "HardSwish": "hard_swish",
}
"""Operators that the library has as they are."""
_BYTES = ("int8", "uint8")
LARGEST = float(np.finfo(np.float32).max)


@converter(*_SAME_NAME, types=(FLOATS,), since=6)
def _plain(ctx: Context) -> Value:
    return ctx.emit(_SAME_NAME[ctx.op], ctx.input(0))


@converter("Relu", "Abs", "Neg", types=(NUMBERS,), since=6)
def _plain_or_whole(ctx: Context) -> Value:
    return ctx.emit(ctx.op.lower(), ctx.input(0))


@converter("Sign", types=(NUMBERS,))
def _sign(ctx: Context) -> Value:
    return ctx.emit("sign", ctx.input(0))


@converter("LeakyRelu", types=(FLOATS,), since=6)
def _leaky_relu(ctx: Context) -> Value:
    return ctx.emit("leaky_relu", ctx.input(0), alpha=ctx.attr("alpha"))


@converter("PRelu", types=(FLOATS,), since=6)
def _prelu(ctx: Context) -> Value:
    """Return relu(x) + slope min(x, 0); in opset 6 slopes are one or one per channel."""
    x, slope = ctx.input(0), ctx.input(1)
    if ctx.opset < 7 and slope.type.elements > 1 and len(x.shape) > 2:
        slope = ctx.emit("reshape", slope, shape=(x.shape[1], *(1,) * (len(x.shape) - 2)))
    if np.broadcast_shapes(x.shape, slope.shape) != x.shape:
        ctx.unsupported(f"a slope that broadcasts to {x.shape}", str(slope.shape))
    below = ctx.emit("min", x, ctx.number(0, x.type.dtype))
    return ctx.emit("add", ctx.emit("relu", x), ctx.emit("mul", slope, below))


@converter("Elu", types=(FLOATS,), since=6)
def _elu(ctx: Context) -> Value:
    return ctx.emit("elu", ctx.input(0), alpha=ctx.attr("alpha"))


@converter("Selu", types=(FLOATS,), since=6)
def _selu(ctx: Context) -> Value:
    body = ctx.emit("elu", ctx.input(0), alpha=ctx.attr("alpha"))
    return ctx.emit("muls", body, number=ctx.attr("gamma"))


@converter("Celu", types=(FLOATS,))
def _celu(ctx: Context) -> Value:
    """Return alpha elu(x / alpha)."""
    alpha = ctx.attr("alpha")
    if not alpha > 0:
        ctx.unsupported("alpha above 0", str(alpha))
    if alpha == 1:
        return ctx.emit("elu", ctx.input(0))
    body = ctx.emit("elu", ctx.emit("muls", ctx.input(0), number=1 / alpha))
    return ctx.emit("muls", body, number=alpha)


@converter("ThresholdedRelu", types=(FLOATS,))
def _thresholded(ctx: Context) -> Value:
    x = ctx.input(0)
    above = ctx.emit("greater", x, ctx.number(ctx.attr("alpha"), x.type.dtype))
    return ctx.emit("select", above, x, ctx.number(0, x.type.dtype))


@converter("HardSigmoid", types=(FLOATS,), since=6)
def _hard_sigmoid(ctx: Context) -> Value:
    alpha, beta = ctx.attr("alpha"), ctx.attr("beta")
    if np.float32(alpha) == np.float32(1 / 6) and beta == 0.5:
        return ctx.emit("hard_sigmoid", ctx.input(0))
    line = ctx.emit("adds", ctx.emit("muls", ctx.input(0), number=alpha), number=beta)
    return ctx.emit("clip", line, low=0.0, high=1.0)


@converter("Softsign", types=(FLOATS,))
def _softsign(ctx: Context) -> Value:
    x = ctx.input(0)
    return ctx.emit("div", x, ctx.emit("adds", ctx.emit("abs", x), number=1.0))


@converter("Mish", types=(FLOATS,))
def _mish(ctx: Context) -> Value:
    x = ctx.input(0)
    return ctx.emit("mul", x, ctx.emit("tanh", ctx.emit("softplus", x)))


@converter("Swish", types=(FLOATS,))
def _swish(ctx: Context) -> Value:
    x, alpha = ctx.input(0), ctx.attr("alpha")
    if alpha == 1:
        return ctx.emit("silu", x)
    return ctx.emit("mul", x, ctx.emit("sigmoid", ctx.emit("muls", x, number=alpha)))


@converter("Gelu", types=(FLOATS,))
def _gelu(ctx: Context) -> Value:
    """Return the tanh form as it is; x (1 + erf(x / sqrt 2)) / 2 from its parts."""
    x, form = ctx.input(0), ctx.attr("approximate")
    if form == "tanh":
        return ctx.emit("gelu", x)
    if form != "none":
        ctx.unsupported("approximate none or tanh", form)
    inner = ctx.emit("erf", ctx.emit("muls", x, number=math.sqrt(0.5)))
    half = ctx.emit("muls", x, number=0.5)
    return ctx.emit("mul", half, ctx.emit("adds", inner, number=1.0))


@converter("Clip", types=((*NUMBERS, *_BYTES),), since=6)
def _clip(ctx: Context) -> Result:
    """Limit to bounds, attributes before opset 11, known or computed scalars since."""
    x, limits = ctx.tensor(0), {"low": _bound(ctx, "min"), "high": _bound(ctx, "max")}
    if ctx.opset >= 11:
        limits = {"low": -math.inf, "high": math.inf}
        value = ctx.input(0)
        for i, key, op in ((1, "low", "max"), (2, "high", "min")):
            if not ctx.has(i):
                continue
            if ctx.tensor(i).elements != 1:
                ctx.unsupported("bounds that are scalars", str(ctx.shape(i)))
            if ctx.tensor(i).known is None:
                bound = ctx.emit("reshape", ctx.input(i), shape=())
                if key == "high" and limits["low"] != -math.inf:
                    value = ctx.emit("clip", value, **limits)
                    limits = {"low": -math.inf, "high": math.inf}
                value = ctx.emit(op, value, bound)
            else:
                limits[key] = ctx.scalar(i)
        if limits == {"low": -math.inf, "high": math.inf}:
            return value if value.name != ctx.input(0).name else x
        return ctx.emit("clip", value, **limits)
    return ctx.emit("clip", ctx.input(0), **limits)


def _bound(ctx: Context, name: str) -> float:
    """Return a bound of opset 6; the default, the largest number of fp32, limits nothing."""
    number: float = ctx.attr(name) or 0.0
    return number if abs(number) < LARGEST else math.copysign(math.inf, number)


@converter("IsNaN", types=(FLOATS,), result="bool")
def _is_nan(ctx: Context) -> Value:
    x = ctx.input(0)
    return ctx.emit("not_equal", x, x)


@converter("BitwiseNot", types=(BITS,))
def _bitwise_not(ctx: Context) -> Value:
    return ctx.emit("not", ctx.input(0))


@converter("Sin", "Cos", types=(FLOATS,))
def _folded_only(ctx: Context) -> Value:
    ctx.unsupported("an operand known before the graph runs", "one computed from data")
