"""Operators whose result is known while importing: constants, shapes, ranges."""

from __future__ import annotations

from typing import Any

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.ir import Fill, TensorType
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import (
    ANY,
    ELEMENTS,
    EVERY,
    FLOATS,
    FORMATS,
    INTEGERS,
    NUMPY,
    Shape,
    Tensor,
    Values,
)
from ascend_lab.graph.onnx.weights import check_size, tensor_of


@converter("Constant")
def _constant(ctx: Context) -> Tensor:
    given = {key: value for key, value in ctx.attrs.items() if value is not None}
    if len(given) != 1:
        ctx.unsupported("one value", ", ".join(given) or "none")
    ((key, value),) = given.items()
    if key == "value":
        return _stored(ctx)
    return ctx.known(value, "int64" if key.startswith("value_int") else "float32")


def _stored(ctx: Context) -> Tensor:
    """Return the tensor in attribute `value`."""
    proto = ctx.attr("value")
    if not hasattr(proto, "dims"):
        ctx.unsupported("a tensor as value", repr(proto)[:40])
    return tensor_of(proto, ctx.folder, ctx.limits)


@converter("ConstantOfShape")
def _constant_of_shape(ctx: Context) -> Tensor:
    shape: Shape = ctx.ints(0)
    check_size(f"{ctx.where}: shape", shape, ctx.limits)
    if ctx.attr("value") is None:
        return Tensor("float32", shape, known=Fill(0.0))
    one = _stored(ctx)
    if one.elements != 1:
        ctx.unsupported("a value of one element", str(one.shape))
    number: Any = one.array().reshape(()).item()
    return Tensor(one.elem, shape, known=Fill(number))


@converter("Shape")
def _shape(ctx: Context) -> Tensor:
    return ctx.known(ctx.shape(0)[ctx.attr("start") : ctx.attr("end")], "int64")


@converter("Size")
def _size(ctx: Context) -> Tensor:
    return ctx.known(np.array(ctx.tensor(0).elements), "int64")


@converter("Range")
def _range(ctx: Context) -> Tensor:
    """Refuse: a range of known bounds is folded, so one of these is computed."""
    for i in range(3):
        if ctx.tensor(i).known is None:
            ctx.needs(i)
    ctx.unsupported("bounds that are scalars", "more")


@converter("NonZero", result="int64")
def _non_zero(ctx: Context) -> Tensor:
    """Refuse: the size of the result depends on computed values."""
    if ctx.tensor(0).known is None:
        ctx.needs(0)
    ctx.unsupported("an operand of fewer elements", str(ctx.shape(0)))


@converter("EyeLike")
def _eye_like(ctx: Context) -> Tensor:
    shape, number = ctx.shape(0), ctx.attr("dtype")
    elem = ELEMENTS[number][0] if number in ELEMENTS else ctx.elem(0)
    if len(shape) != 2 or (number and number not in ELEMENTS):
        ctx.unsupported("a matrix of numbers", f"{shape}, type {number}")
    kind, k = NUMPY[elem], ctx.attr("k")
    return Tensor(elem, shape, known=lambda: np.eye(*shape, k=k).astype(kind))


@converter("Trilu", types=(ANY, EVERY))
def _trilu(ctx: Context) -> Value | Tensor:
    """Keep one triangle: elsewhere 0 is selected."""
    x, k = ctx.tensor(0), int(ctx.scalar(1)) if ctx.has(1) else 0
    if len(x.shape) < 2:
        ctx.unsupported("matrices", str(x.shape))
    rows, columns = x.shape[-2:]
    k = min(max(k, -rows), columns)
    half = np.triu if ctx.attr("upper") else np.tril
    if x.known is not None:
        return Tensor(x.elem, x.shape, known=lambda: half(x.array(), k))
    value = ctx.value(x)
    kind = TensorType((rows, columns), value.type.dtype)

    def mask() -> Values:
        return half(np.ones((rows, columns), np.float32), k)

    kept = ctx.net.lasting(mask, kind, f"{ctx.name}/mask")
    return ctx.emit("select", kept, value, ctx.number(0, value.type.dtype))


@converter("OneHot", types=((*INTEGERS, *FLOATS), EVERY, ANY))
def _one_hot(ctx: Context) -> Value:
    """Mark classes counted from 0, or back from the last; an index outside marks none.

    Indices are compared in fp32: numbers it rounds are larger than any depth accepted.
    """
    depth, values, shape = int(ctx.scalar(1)), ctx.const(2).ravel(), ctx.shape(0)
    rank, axis = len(shape) + 1, ctx.attr("axis")
    if len(values) != 2 or not 1 <= depth < 2**24 or not -rank <= axis < rank:
        ctx.unsupported("a depth from 1 to 2^24 and two values", f"{depth}, {values}")
    ctx.result, at = ctx.elem(2), axis % rank
    off, on = (ctx.number(v.item(), FORMATS[ctx.elem(2)]) for v in values)
    index = ctx.input(0)
    if ctx.elem(0) in FLOATS:
        index = ctx.emit("cast", index, dtype="int32", round="trunc")
    places = ctx.emit("reshape", ctx.cast(index, "fp32"), shape=(*shape[:at], 1, *shape[at:]))
    classes = np.arange(depth).reshape((-1, *(1,) * (rank - 1 - at)))
    hits = [
        ctx.emit("equal", places, ctx.value(ctx.known(numbers, "float32")))
        for numbers in (classes, classes - depth)
    ]
    return ctx.emit("select", ctx.cast(ctx.emit("max", *hits), on.type.dtype), on, off)
