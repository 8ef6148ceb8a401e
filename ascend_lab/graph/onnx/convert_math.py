"""Arithmetic, comparisons and logic, element by element, with broadcasting."""

from __future__ import annotations

import math
from typing import Any

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.whole import divided, modulo
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import Result, converter
from ascend_lab.graph.onnx.tensors import ANY, BITS, FLOATS, INTEGERS, NUMBERS

_WHOLE = (*NUMBERS, "int8", "uint8")
"""Types of arithmetic and comparisons."""


_OLD: dict[str, Any] = {"axis": None, "broadcast": 0}
"""Attributes of opset 6, where an operand is stretched only if the node says so."""


@converter("Add", "Sub", "Mul", types=(_WHOLE,), since=6)
def _arithmetic(ctx: Context) -> Value:
    return ctx.emit(ctx.op.lower(), ctx.input(0), _second(ctx))


@converter("Div", types=(_WHOLE,), since=6)
def _div(ctx: Context) -> Value:
    x, y = ctx.input(0), _second(ctx)
    if ctx.elem(0) in FLOATS:
        return ctx.emit("div", x, y)
    return ctx.cast(divided(ctx, x, y)[0], x.type.dtype)


def _second(ctx: Context, dtype: str = "") -> Value:
    """Return the second operand; in opset 6 its axes may start at an axis of the first."""
    y, axis, shape = ctx.input(1, dtype), ctx.attr("axis"), ctx.shape(0)
    if ctx.opset >= 7 or not ctx.attr("broadcast"):
        if axis is not None or ctx.attr("broadcast"):
            ctx.unsupported("axis and broadcast in opset 6 only", f"opset {ctx.opset}")
        if ctx.opset < 7 and y.shape != shape:
            ctx.unsupported("operands of one shape, or broadcast = 1", f"{shape} and {y.shape}")
        return y
    if axis is None:
        return y
    at = axis + len(shape) if axis < 0 else axis
    behind = len(shape) - at - len(y.shape)
    if at < 0 or behind < 0:
        ctx.unsupported(f"an operand that fits {shape} at axis {axis}", str(y.shape))
    return ctx.emit("reshape", y, shape=(*y.shape, *(1,) * behind)) if behind else y


@converter("Mod", types=((*INTEGERS, "int8", "uint8"),))
def _mod(ctx: Context) -> Value:
    """Return the remainder, of y's sign or, with fmod, of x's."""
    x, y = ctx.input(0), ctx.input(1)
    rest = divided(ctx, x, y)[1] if ctx.attr("fmod") else modulo(ctx, x, y)
    return ctx.cast(rest, x.type.dtype)


@converter("Pow", types=(FLOATS, NUMBERS), since=6)
def _pow(ctx: Context) -> Result:
    """Return powers; small whole exponents by multiplication, which takes negative bases."""
    x, y = ctx.input(0), ctx.tensor(1)
    number = y.known is not None and y.elements == 1 and len(y.shape) <= len(x.shape)
    found = _power(ctx, x, float(ctx.scalar(1))) if number else None
    return ctx.emit("pow", x, _second(ctx, x.type.dtype)) if found is None else found


def _power(ctx: Context, x: Value, exponent: float) -> Result | None:
    """Return x to a power that a few instructions make, or None."""
    if exponent == 1:
        return ctx.tensor(0)
    named = {2.0: "square", 0.5: "sqrt", -1.0: "rec", -0.5: "rsqrt"}
    if exponent in named:
        return ctx.emit(named[exponent], x)
    if exponent in (3.0, 4.0):
        square = ctx.emit("square", x)
        return ctx.emit("mul", square, x if exponent == 3 else square)
    return None


@converter("Sum", types=(NUMBERS,), since=6)
def _sum(ctx: Context) -> Result:
    return _chain(ctx, "add")


@converter("Max", "Min", types=(_WHOLE,), since=6)
def _extreme(ctx: Context) -> Result:
    return _chain(ctx, ctx.op.lower())


@converter("Mean", types=(FLOATS,), since=6)
def _mean(ctx: Context) -> Result:
    total = _chain(ctx, "add")
    if not isinstance(total, Value):
        return total
    return ctx.emit("div", total, ctx.number(len(ctx.inputs), total.type.dtype))


def _chain(ctx: Context, op: str) -> Result:
    """Fold the inputs from the left with a binary operator; one input is the result itself."""
    if len(ctx.inputs) == 1:
        return ctx.tensor(0)
    total = ctx.input(0)
    for i in range(1, len(ctx.inputs)):
        total = ctx.emit(op, total, ctx.input(i))
    return total


# -- comparisons and logic ------------------------------------------------------------------------
_COMPARISONS = {
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
}


@converter(*_COMPARISONS, types=(_WHOLE,), result="bool", since=7)
def _compare(ctx: Context) -> Value:
    return ctx.emit(_COMPARISONS[ctx.op], ctx.input(0), ctx.input(1))


@converter("Equal", types=(ANY,), result="bool", since=7)
def _equal(ctx: Context) -> Value:
    return ctx.emit("equal", *ctx.alike())


@converter("And", "Or", "Xor", types=(("bool",),), result="bool", since=7)
def _logic(ctx: Context) -> Value:
    """Truth is 1 and falsehood 0 in any format: and is the minimum, or the maximum."""
    op = {"And": "min", "Or": "max", "Xor": "not_equal"}[ctx.op]
    return ctx.emit(op, *ctx.alike())


@converter("Not", types=(("bool",),), result="bool")
def _not(ctx: Context) -> Value:
    x = ctx.input(0)
    return ctx.emit("sub", ctx.number(1, x.type.dtype), x)


@converter("BitwiseAnd", "BitwiseOr", types=(BITS,))
def _bits(ctx: Context) -> Value:
    return ctx.emit(ctx.op.removeprefix("Bitwise").lower(), ctx.input(0), ctx.input(1))


@converter("Where", types=(("bool",), ANY))
def _where(ctx: Context) -> Value:
    x, y = ctx.alike(1, 2)
    ctx.result = ctx.elem(1)
    return ctx.emit("select", ctx.input(0, x.type.dtype), x, y)


@converter("IsInf", types=(FLOATS,), result="bool")
def _is_inf(ctx: Context) -> Value:
    x, (low, high) = ctx.input(0), (ctx.attr("detect_negative"), ctx.attr("detect_positive"))
    if not low and not high:
        ctx.unsupported("infinities of a sign to look for", "none")
    if low and high:
        x = ctx.emit("abs", x)
    infinity = ctx.number(math.inf if high else -math.inf, x.type.dtype)
    return ctx.emit("equal", x, infinity)
