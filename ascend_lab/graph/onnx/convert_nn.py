"""Convolutions, matrix products and normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import typed
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import Result, converter
from ascend_lab.graph.onnx.tensors import FLOATS, FORMATS
from ascend_lab.graph.onnx.windows import as_image, as_row, plain, window_of


@converter("Conv", types=(FLOATS,))
def _conv(ctx: Context) -> Value:
    shape, weight = ctx.shape(0), ctx.shape(1)
    window = window_of(ctx, weight[2:], shape[2:])
    given = [as_image(ctx, ctx.input(i)) for i in range(2)]
    if ctx.has(2):
        given.append(ctx.input(2))
    how = {"stride": window.stride, "pad": window.pads, "dilation": window.dilation}
    settings = {key: plain(value) for key, value in how.items()}
    out = ctx.emit("conv2d", *given, groups=ctx.attr("group"), **settings)
    return as_row(ctx, out, len(shape))


@converter("Gemm", types=(FLOATS,), since=6)
def _gemm(ctx: Context) -> Value:
    trans = {"trans_a": bool(ctx.attr("transA")), "trans_b": bool(ctx.attr("transB"))}
    a, b, alpha = ctx.input(0), ctx.input(1), ctx.attr("alpha")
    if ctx.has(2):
        scale = {"alpha": alpha, "beta": ctx.attr("beta")}
        return ctx.emit("gemm", a, b, ctx.input(2), **trans, **scale)
    out = ctx.emit("matmul", a, b, **trans)
    return out if alpha == 1 else ctx.emit("muls", out, number=alpha)


@converter("MatMul", types=((*FLOATS, "int32"),))
def _matmul(ctx: Context) -> Value:
    """Multiply as NumPy does: a vector is a row on the left and a column on the right."""
    a, b = ctx.input(0), ctx.input(1)
    if not a.shape or not b.shape:
        ctx.unsupported("operands of at least 1 axis", f"{a.shape} and {b.shape}")
    left = a if len(a.shape) > 1 else ctx.emit("reshape", a, shape=(1, *a.shape))
    right = b if len(b.shape) > 1 else ctx.emit("reshape", b, shape=(*b.shape, 1))
    ranks = (len(left.shape), len(right.shape))
    out = ctx.emit("matmul" if ranks == (2, 2) else "batch_matmul", left, right)
    shape = list(out.shape)
    if len(b.shape) == 1:
        del shape[-1]
    if len(a.shape) == 1:
        del shape[-1 if len(b.shape) == 1 else -2]
    return out if len(shape) == len(out.shape) else ctx.emit("reshape", out, shape=tuple(shape))


@converter("BatchNormalization", types=(FLOATS,), since=6)
def _batch_norm(ctx: Context) -> Sequence[Result]:
    """Normalise by the statistics given or, in training, by the batch's, averaged with them."""
    if ctx.attr("spatial") == 0:
        ctx.unsupported("one number per channel", "spatial = 0")
    if ctx.opset < 7 and not ctx.attr("is_test"):
        ctx.unsupported("inference in opset 6", "is_test = 0")
    given = (ctx.input(0), *(ctx.input(i, "fp32") for i in range(1, 5)))
    epsilon = ctx.attr("epsilon")
    if not ctx.attr("training_mode"):
        return (ctx.emit("batch_norm", *given, epsilon=epsilon),)
    momentum = ctx.attr("momentum")
    out, *averages = ctx.emit_all("batch_norm_training", *given, epsilon=epsilon, momentum=momentum)
    elem = ctx.elem(3)
    return out, *(typed(ctx, ctx.cast(value, FORMATS[elem]), elem) for value in averages)


@converter("LRN", types=(FLOATS,))
def _lrn(ctx: Context) -> Value:
    """Divide by (bias + alpha mean of x^2 over `size` channels)^beta, zeros beyond the last."""
    x, size = ctx.input(0), ctx.attr("size")
    if len(x.shape) < 2 or not 1 <= size <= 2 * x.shape[1] + 1:
        ctx.unsupported("a size from 1 to about twice the channels", f"{size} on {x.shape}")
    names = ("alpha", "beta", "bias")
    return ctx.emit("lrn", x, size=size, **{name: ctx.attr(name) for name in names})


@converter("Softmax", "LogSoftmax", types=(FLOATS,))
def _softmax(ctx: Context) -> Value:
    """From opset 13 along one axis; before, over all axes from `axis` on as one."""
    op = "softmax" if ctx.op == "Softmax" else "log_softmax"
    x, at = ctx.input(0), ctx.attr("axis")
    if ctx.opset >= 13:
        return ctx.emit(op, x, axis=at)
    if not -len(x.shape) <= at <= len(x.shape):
        ctx.unsupported(f"an axis of {x.shape}", str(at))
    at += len(x.shape) if at < 0 else 0
    if at == len(x.shape) - 1:
        return ctx.emit(op, x, axis=-1)
    flat = ctx.emit("reshape", x, shape=(math.prod(x.shape[:at]), math.prod(x.shape[at:])))
    return ctx.emit("reshape", ctx.emit(op, flat, axis=-1), shape=x.shape)
