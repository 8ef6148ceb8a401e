"""Arithmetic of whole numbers: quotients cut toward zero, remainders, bits.

A graph divides in fp64 and rounds to the nearest whole number; one step back makes it a cut.
Products and sums wrap at 32 bits, which leaves differences of near numbers exact.
"""

from __future__ import annotations

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import chosen, table
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import BITS


def _signs(ctx: Context, x: Value) -> Value:
    return ctx.emit("sign", x)


def divided(ctx: Context, x: Value, y: Value) -> tuple[Value, Value]:
    """Return x / y cut toward zero, and the remainder, which has the sign of x; in int32."""
    x, y = ctx.cast(x, "int32"), ctx.cast(y, "int32")
    nearest = ctx.emit("div", x, y)
    rest = ctx.emit("sub", x, ctx.emit("mul", nearest, y))
    # the nearest quotient is one too far from zero where the rest points the other way than x
    beyond = ctx.emit("less", ctx.emit("mul", _signs(ctx, rest), _signs(ctx, x)),
                      table(ctx, 0, "int32", "zero"))  # fmt: skip
    way = ctx.emit("mul", _signs(ctx, x), _signs(ctx, y))
    quotient = ctx.emit("sub", nearest, ctx.emit("mul", beyond, way))
    back = ctx.emit("mul", ctx.emit("mul", beyond, way), y)
    return quotient, ctx.emit("add", rest, back)


def modulo(ctx: Context, x: Value, y: Value) -> Value:
    """Return the remainder with the sign of y, in int32."""
    rest = divided(ctx, x, y)[1]
    y = ctx.cast(y, "int32")
    other = ctx.emit("less", ctx.emit("mul", _signs(ctx, rest), _signs(ctx, y)),
                     table(ctx, 0, "int32", "zero"))  # fmt: skip
    return chosen(ctx, other, ctx.emit("add", rest, y), rest)


def wrapped(ctx: Context, x: Value, dtype: str) -> Value:
    """Return the last eight bits of whole numbers as int8 or uint8, as the standard casts."""
    half = table(ctx, 128 if dtype == "int8" else 0, "int32", "half")
    raised = ctx.emit("add", ctx.cast(x, "int32"), half)
    low = ctx.emit("and", raised, table(ctx, 255, "int32", "byte"))
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
    power = ctx.emit("gather", table(ctx, powers, "int32", "powers"), places, axis=0)
    zero = table(ctx, 0, "int32", "zero")
    if left:
        moved, sign = ctx.emit("mul", x, power), zero
    else:
        moved = ctx.emit("div", ctx.emit("sub", x, modulo(ctx, x, power)), power)
        sign = ctx.emit("neg", ctx.emit("less", x, zero))
    inside = ctx.emit("equal", y, places)
    found = chosen(ctx, inside, moved, sign)
    return found if dtype == "int32" else wrapped(ctx, found, dtype)
