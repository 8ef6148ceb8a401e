"""What several converters compose: constants, picks by a mask, running numbers along an axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import TensorType
from ascend_lab.graph.onnx.converter import Context
from ascend_lab.graph.onnx.tensors import Shape, Tensor, Values
from ascend_lab.ops.formats import numpy_type


def table(ctx: Context, array: Any, dtype: str, name: str = "table") -> Value:
    """Return a constant of the graph with these numbers."""
    values = np.asarray(array).astype(numpy_type(dtype))
    return ctx.net.lasting(values, TensorType(values.shape, dtype), f"{ctx.name}/{name}")


def axis_in(ctx: Context, axis: int, rank: int) -> int:
    """Return an axis counted from 0; refuse one the tensor does not have."""
    if not -rank <= axis < rank:
        ctx.unsupported(f"an axis of a tensor of {rank} axes", str(axis))
    return axis % rank


def counting(ctx: Context, size: int, axis: int, rank: int, dtype: str = "int32") -> Value:
    """Return 0, 1, ... size - 1 along one axis of a tensor of `rank` axes, size 1 elsewhere."""
    shape = tuple(size if i == axis else 1 for i in range(rank))
    return table(ctx, np.arange(size).reshape(shape), dtype, "counting")


def chosen(ctx: Context, condition: Value, x: Value, y: Value) -> Value:
    """Return x where the condition (0 or 1, any format) holds, else y of x's format."""
    return ctx.emit("select", ctx.cast(condition, x.type.dtype), x, y)


def reshaped_to(ctx: Context, x: Value, shape: Shape) -> Value:
    """Return x in another shape; itself if it has it."""
    return x if x.shape == shape else ctx.emit("reshape", x, shape=shape)


def typed(ctx: Context, value: Value, elem: str) -> Tensor:
    """Return an output of an element type of its own."""
    roots = frozenset().union(*(t.roots for t in ctx.inputs if t))
    return Tensor(elem, value.shape, value, roots=roots)


def axis_mixed(ctx: Context, x: Value, axis: int, weights: Values) -> Value:
    """Return x with one axis multiplied by a matrix (out, size)."""
    order = [i for i in range(len(x.shape)) if i != axis]
    last = axis == len(x.shape) - 1
    turned = x if last else ctx.emit("transpose", x, perm=(*order, axis))
    lead = turned.shape[:-1]
    flat = reshaped_to(ctx, turned, (math.prod(lead), turned.shape[-1]))
    mixed = ctx.emit("matmul", flat, table(ctx, weights.T, x.type.dtype, "weights"))
    back = reshaped_to(ctx, mixed, (*lead, len(weights)))
    if last:
        return back
    return ctx.emit("transpose", back, perm=tuple(int(i) for i in np.argsort((*order, axis))))


def part(ctx: Context, x: Value, axis: int, begin: int, end: int) -> Value:
    """Return a range of one axis."""
    axis %= len(x.shape)
    if (begin, end) == (0, x.shape[axis]):
        return x
    low = tuple(begin if i == axis else 0 for i in range(len(x.shape)))
    high = tuple(end if i == axis else n for i, n in enumerate(x.shape))
    return ctx.emit("slice", x, begin=low, end=high)
