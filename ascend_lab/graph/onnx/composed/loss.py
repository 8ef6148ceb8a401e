"""Losses over classes: negative log likelihood and softmax cross entropy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import chosen, reshaped_to, table
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import FLOATS, INTEGERS, Shape

_ATTRS = {"ignore_index": None, "reduction": "mean"}
_TYPES = (FLOATS, INTEGERS, FLOATS)


@converter("NegativeLogLikelihoodLoss", types=_TYPES)
def _nll(ctx: Context) -> Value:
    return _loss(ctx, ctx.input(0))


@converter("SoftmaxCrossEntropyLoss", types=_TYPES)
def _cross_entropy(ctx: Context) -> Sequence[Value]:
    logs = ctx.emit("log_softmax", ctx.input(0), axis=1)
    return _loss(ctx, logs), logs


def _hits(ctx: Context, shape: Shape) -> Value:
    """Return 1 where the class on axis 1 is the target, else 0; ignored targets hit none."""
    n, classes, *rest = shape
    if ctx.shape(1) != (n, *rest):
        ctx.unsupported(f"targets {(n, *rest)}", str(ctx.shape(1)))
    names = np.arange(classes)
    ignored = ctx.attr("ignore_index")
    if ignored is not None and 0 <= ignored < classes:
        names[ignored] = np.iinfo(np.int32).min
    column = table(ctx, names.reshape(1, classes, *(1 for _ in rest)), "int32", "classes")
    target = reshaped_to(ctx, ctx.input(1, "int32"), (n, 1, *rest))
    return ctx.emit("equal", column, target)


def _loss(ctx: Context, logs: Value) -> Value:
    """Return -log p of each target, weighted by its class, and the mean or sum of them."""
    dtype, reduction = logs.type.dtype, ctx.attr("reduction")
    if reduction not in ("none", "sum", "mean"):
        ctx.unsupported("reduction none, sum or mean", str(reduction))
    hits, zero = _hits(ctx, logs.shape), table(ctx, 0, dtype, "zero")
    picked = chosen(ctx, hits, ctx.emit("neg", logs), zero)
    weighted = ctx.has(2)
    if weighted:
        classes = logs.shape[1]
        weight = reshaped_to(ctx, ctx.input(2), (1, classes, *(1,) * (len(logs.shape) - 2)))
        picked = ctx.emit("mul", picked, weight)
    losses = ctx.emit("reduce_sum", picked, axis=1)
    if reduction == "none":
        return losses
    total = ctx.emit("reduce_sum", losses)
    if reduction == "sum":
        return total
    shares = chosen(ctx, hits, weight, zero) if weighted else ctx.cast(hits, dtype)
    return ctx.emit("div", total, ctx.emit("reduce_sum", shares))
