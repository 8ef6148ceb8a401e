"""Normalisation over any axes and by a norm; gated activations."""

from __future__ import annotations

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import axis_in, chosen, table
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import FLOATS


@converter("MeanVarianceNormalization", types=(FLOATS,), since=9)
def _mean_variance(ctx: Context) -> Value:
    """Subtract the mean, divide by the standard deviation + 1e-9, as the standard's function."""
    x = ctx.input(0)
    axes = tuple(axis_in(ctx, a, len(x.shape)) for a in ctx.attr("axes"))
    centred = ctx.emit("sub", x, ctx.emit("reduce_mean", x, axis=axes, keepdims=True))
    variance = ctx.emit("reduce_mean", ctx.emit("square", centred), axis=axes, keepdims=True)
    spread = ctx.emit("adds", ctx.emit("sqrt", variance), number=1e-9)
    return ctx.emit("div", centred, spread)


@converter("LpNormalization", types=(FLOATS,))
def _lp_norm(ctx: Context) -> Value:
    """Divide by the norm along an axis; zeros stay zeros."""
    x, p = ctx.input(0), ctx.attr("p")
    axis = axis_in(ctx, ctx.attr("axis"), len(x.shape))
    if p not in (1, 2):
        ctx.unsupported("p of 1 or 2", str(p))
    powers = ctx.emit("abs" if p == 1 else "square", x)
    norm = ctx.emit("reduce_sum", powers, axis=axis, keepdims=True)
    norm = norm if p == 1 else ctx.emit("sqrt", norm)
    return chosen(ctx, norm, ctx.emit("div", x, norm), table(ctx, 0, x.type.dtype, "zero"))


@converter("SwiGLU", types=(FLOATS,), since=28)
def _swiglu(ctx: Context) -> Value:
    gate, value = ctx.input(0), ctx.input(1)
    if gate.shape != value.shape:
        ctx.unsupported("two inputs of one shape", f"{gate.shape} and {value.shape}")
    alpha = ctx.attr("alpha")
    open_ = ctx.emit("sigmoid", gate if alpha == 1 else ctx.emit("muls", gate, number=alpha))
    return ctx.emit("mul", ctx.emit("mul", gate, open_), value)
