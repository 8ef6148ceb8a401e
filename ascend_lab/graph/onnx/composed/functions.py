"""Functions of one operand that the library lacks, and running sums and products."""

from __future__ import annotations

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import axis_in, chosen, table
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import FLOATS, INTEGERS, NUMBERS


@converter("Sinh", "Cosh", types=(FLOATS,), since=9)
def _hyperbolic(ctx: Context) -> Value:
    """Half the difference, or sum, of e^x and e^-x."""
    x = ctx.input(0, "fp32")
    up, down = ctx.emit("exp", x), ctx.emit("exp", ctx.emit("neg", x))
    both = ctx.emit("sub" if ctx.op == "Sinh" else "add", up, down)
    return ctx.cast(ctx.emit("muls", both, number=0.5), ctx.input(0).type.dtype)


@converter("Shrink", types=(FLOATS,), since=9)
def _shrink(ctx: Context) -> Value:
    """x + bias below -lambd, x - bias above lambd, 0 between."""
    x, bias = ctx.input(0), ctx.attr("bias")
    dtype = x.type.dtype
    low, high = (table(ctx, n * ctx.attr("lambd"), dtype, "bound") for n in (-1, 1))
    above = chosen(
        ctx,
        ctx.emit("greater", x, high),
        ctx.emit("adds", x, number=-bias),
        table(ctx, 0, dtype, "zero"),
    )
    return chosen(ctx, ctx.emit("less", x, low), ctx.emit("adds", x, number=bias), above)


@converter("CumSum", "CumProd", types=(NUMBERS, INTEGERS), since=11)
def _running(ctx: Context) -> Value:
    """Combine each element with the one 1, then 2, 4, ... places before it (Hillis and Steele)."""
    x, first = ctx.input(0), ctx.op == "CumSum"
    axis = axis_in(ctx, int(ctx.scalar(1)), len(x.shape))
    if not x.type.elements:
        ctx.unsupported("elements", str(x.shape))
    if ctx.attr("exclusive"):
        x = _moved(ctx, x, axis, 1, 0 if first else 1)
    step = 1
    while step < x.shape[axis]:
        x = ctx.emit("add" if first else "mul", x, _moved(ctx, x, axis, step, 0 if first else 1))
        step *= 2
    return x


def _moved(ctx: Context, x: Value, axis: int, step: int, fill: float) -> Value:
    """Return x moved along an axis, back with `reverse`, a number filling its place."""
    back, size = bool(ctx.attr("reverse")), x.shape[axis]
    low = [step if back and i == axis else 0 for i in range(len(x.shape))]
    high = [n if back or i != axis else n - step for i, n in enumerate(x.shape)]
    sides = [(0, 0)] * len(x.shape)
    sides[axis] = (0, step) if back else (step, 0)
    if step >= size:
        return ctx.emit("expand", table(ctx, fill, x.type.dtype, "fill"), shape=x.shape)
    kept = ctx.emit("slice", x, begin=tuple(low), end=tuple(high))
    return ctx.emit("pad", kept, pads=tuple(sides), value=fill)
