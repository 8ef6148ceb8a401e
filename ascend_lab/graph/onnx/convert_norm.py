"""Normalisation over trailing axes, groups of channels or single images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.ir import Fill, TensorType
from ascend_lab.graph.onnx.composed.parts import typed
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import Result, converter
from ascend_lab.graph.onnx.tensors import FLOATS, Shape, Tensor


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
    return typed(ctx, mean, "float32"), typed(ctx, rate, "float32")


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
