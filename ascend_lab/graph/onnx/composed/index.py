"""Places of largest elements, masks by place, and picks by values known before the graph runs."""

from __future__ import annotations

import math

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import axis_in, chosen, counting, reshaped_to, table
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import ANY, FLOATS, NUMBERS

_COMPARED = (*NUMBERS, "int8", "uint8")


def _first(ctx: Context, x: Value, axis: int, extreme: str, last: bool = False) -> Value:
    """Return the place of the largest or smallest element along an axis, kept with size 1."""
    size = x.shape[axis]
    hit = ctx.emit("equal", x, ctx.emit(extreme, x, axis=axis, keepdims=True))
    places = counting(ctx, size, axis, len(x.shape))
    missed = table(ctx, np.array(-1 if last else size), "int32", "missed")
    marked = chosen(ctx, hit, places, missed)
    return ctx.emit("reduce_max" if last else "reduce_min", marked, axis=axis, keepdims=True)


@converter("ArgMax", "ArgMin", types=(_COMPARED,), result="int64")
def _argmax(ctx: Context) -> Value:
    x = ctx.input(0)
    axis = axis_in(ctx, ctx.attr("axis"), len(x.shape))
    if not x.shape[axis]:
        ctx.unsupported("an axis with elements", str(x.shape))
    extreme = "reduce_max" if ctx.op == "ArgMax" else "reduce_min"
    place = _first(ctx, x, axis, extreme, bool(ctx.attr("select_last_index")))
    if ctx.attr("keepdims"):
        return place
    return reshaped_to(ctx, place, (*x.shape[:axis], *x.shape[axis + 1 :]))


@converter("Hardmax", types=(FLOATS,))
def _hardmax(ctx: Context) -> Value:
    """Mark the first largest element with 1; before opset 13 of all axes from `axis` on."""
    x, shape = ctx.input(0), ctx.shape(0)
    axis = axis_in(ctx, ctx.attr("axis"), len(shape))
    if ctx.opset < 13:
        x = reshaped_to(ctx, x, (math.prod(shape[:axis]), math.prod(shape[axis:])))
        axis = 1
    place = _first(ctx, x, axis, "reduce_max")
    places = counting(ctx, x.shape[axis], axis, len(x.shape))
    hot = ctx.cast(ctx.emit("equal", places, place), x.type.dtype)
    return reshaped_to(ctx, hot, shape)


@converter("Compress", types=(ANY, ("bool",)))
def _compress(ctx: Context) -> Value:
    x, kept = ctx.input(0), np.flatnonzero(ctx.const(1))
    axis = ctx.attr("axis")
    if axis is None:
        x, axis = reshaped_to(ctx, x, (x.type.elements,)), 0
    return _picked(ctx, x, kept, axis_in(ctx, axis, len(x.shape)))


@converter("ReverseSequence", types=(ANY, ("int64",)))
def _reverse_sequence(ctx: Context) -> Value:
    """Turn round the first `length` steps of each sequence: rows of a table picked anew."""
    x, lengths = ctx.input(0), ctx.ints(1)
    rank = len(x.shape)
    time, batch = (axis_in(ctx, ctx.attr(f"{key}_axis"), rank) for key in ("time", "batch"))
    if {time, batch} != {0, 1} or len(lengths) != x.shape[batch]:
        ctx.unsupported("time and batch as the first two axes, one length each", f"{x.shape}")
    places = np.arange(x.type.elements // int(np.prod(x.shape[2:]))).reshape(x.shape[:2])
    turned = places if batch == 0 else places.T
    for row, length in zip(turned, lengths, strict=True):
        row[:length] = row[:length][::-1].copy()
    flat = reshaped_to(ctx, x, (places.size, *x.shape[2:]))
    return reshaped_to(ctx, _picked(ctx, flat, places.ravel(), 0), x.shape)


@converter("CenterCropPad", types=(ANY, ("int32", "int64")))
def _center_crop_pad(ctx: Context) -> Value:
    """Cut or add zeros on both sides, half each; the odd one behind."""
    x, wanted = ctx.input(0), ctx.ints(1)
    axes = ctx.attr("axes") or tuple(range(len(x.shape)))
    if len(axes) != len(wanted) or min(wanted, default=1) < 1:
        ctx.unsupported("a size of at least 1 for each axis", str(wanted))
    begin, end = [0] * len(x.shape), list(x.shape)
    pads = [(0, 0)] * len(x.shape)
    for axis, size in zip(axes, wanted, strict=True):
        at = axis_in(ctx, axis, len(x.shape))
        more = size - x.shape[at]
        if more > 0:
            pads[at] = (more // 2, more - more // 2)
        else:
            begin[at] = -more // 2
            end[at] = begin[at] + size
    if list(x.shape) != [e - b for b, e in zip(begin, end, strict=True)]:
        x = ctx.emit("slice", x, begin=tuple(begin), end=tuple(end))
    return ctx.emit("pad", x, pads=tuple(pads)) if any(map(any, pads)) else x


def _picked(ctx: Context, x: Value, places: np.ndarray, axis: int) -> Value:
    """Return the slices of x at known places along an axis."""
    return ctx.emit("gather", x, table(ctx, places, "int32", "places"), axis=axis)
