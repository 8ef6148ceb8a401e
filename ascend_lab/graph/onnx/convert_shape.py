"""Operators that move no element: reshape and its kin, identity, dropout in inference; casts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ascend_lab.graph.builder import Value
from ascend_lab.graph.ir import Fill
from ascend_lab.graph.onnx.composed.whole import wrapped
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.known import recast, reshaped, transposed
from ascend_lab.graph.onnx.registry import Result, converter
from ascend_lab.graph.onnx.tensors import ELEMENTS, FLOATS, FORMATS, Shape, Tensor


@converter("Identity")
def _identity(ctx: Context) -> Tensor:
    return ctx.tensor(0)


@converter("Dropout", since=6)
def _dropout(ctx: Context) -> Sequence[Result]:
    """Return the input: inference drops nothing; the mask says so."""
    if ctx.opset < 7 and not ctx.attr("is_test"):
        ctx.unsupported("inference", "is_test = 0")
    if ctx.has(2) and ctx.scalar(2) and not (ctx.has(1) and ctx.scalar(1) == 0):
        ctx.unsupported("inference", "training_mode = true")
    mask = Tensor("bool", ctx.shape(0), known=Fill(1))
    return (ctx.tensor(0), mask) if ctx.opset >= 10 else (ctx.tensor(0),)


@converter("Reshape", since=5)
def _reshape(ctx: Context) -> Result:
    """Take sizes as they are; 0 keeps one (unless allowzero), -1 is what is left."""
    x, wanted = ctx.tensor(0), ctx.ints(1)
    keep = not ctx.attr("allowzero")
    if any(n == 0 and i >= len(x.shape) for i, n in enumerate(wanted)) and keep:
        ctx.unsupported(f"0 only for the {len(x.shape)} axes of the input", str(wanted))
    sizes = [x.shape[i] if n == 0 and keep else n for i, n in enumerate(wanted)]
    if ctx.rebatch and sizes and sizes[0] == ctx.rebatch[0] and x.shape[:1] == ctx.rebatch[1:]:
        sizes[0] = ctx.rebatch[1]
    if sizes.count(-1) > 1 or any(n < -1 for n in sizes):
        ctx.unsupported("sizes of at least 0 and one -1", str(wanted))
    if -1 in sizes:
        others = math.prod(n for n in sizes if n != -1)
        if others == 0 or x.elements % others:
            ctx.unsupported(f"sizes that divide {x.elements} elements", str(wanted))
        sizes[sizes.index(-1)] = x.elements // others
    return reshaped(ctx, x, tuple(sizes))


@converter("Flatten")
def _flatten(ctx: Context) -> Result:
    x, at = ctx.tensor(0), ctx.attr("axis")
    if not -len(x.shape) <= at <= len(x.shape):
        ctx.unsupported(f"an axis of {x.shape}", str(at))
    at += len(x.shape) if at < 0 else 0
    return reshaped(ctx, x, (math.prod(x.shape[:at]), math.prod(x.shape[at:])))


@converter("Squeeze")
def _squeeze(ctx: Context) -> Result:
    x = ctx.tensor(0)
    given = axes_given(ctx)
    axes = {i for i, n in enumerate(x.shape) if n == 1}
    if given is not None:
        axes = set(axes_of(ctx, given, len(x.shape)))
        if any(x.shape[a] != 1 for a in axes):
            ctx.unsupported("axes of size 1", f"{given} of {x.shape}")
    return reshaped(ctx, x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


@converter("Unsqueeze")
def _unsqueeze(ctx: Context) -> Result:
    x, given = ctx.tensor(0), axes_given(ctx)
    if given is None:
        ctx.unsupported("axes", "none")
    rank = len(x.shape) + len(given)
    axes, sizes = set(axes_of(ctx, given, rank)), iter(x.shape)
    return reshaped(ctx, x, tuple(1 if i in axes else next(sizes) for i in range(rank)))


def axes_given(ctx: Context) -> Shape | None:
    """Return the axes: an input from opset 13 on (18 for some), an attribute before; or None."""
    if ctx.has(1):
        return ctx.ints(1)
    given: Shape = ctx.attr("axes")
    return given or None


def axes_of(ctx: Context, given: Shape, rank: int) -> Shape:
    """Return axes counted from 0, each once."""
    if any(not -rank <= a < rank for a in given):
        ctx.unsupported(f"axes from {-rank} to {rank - 1}", str(given))
    axes = tuple(a % rank for a in given)
    if len(set(axes)) < len(axes):
        ctx.unsupported("each axis once", str(given))
    return axes


@converter("Transpose")
def _transpose(ctx: Context) -> Result:
    x, given = ctx.tensor(0), ctx.attr("perm")
    rank = len(x.shape)
    perm = given or tuple(range(rank))[::-1]
    if sorted(perm) != list(range(rank)):
        ctx.unsupported(f"perm: each of {rank} axes once", str(perm))
    return x if perm == tuple(range(rank)) else transposed(ctx, x, perm)


_CAST = {"to": 0, "saturate": 1, "round_mode": "up"}


@converter("Cast")
def _cast(ctx: Context) -> Result:
    number = ctx.attr("to")
    if number not in ELEMENTS:
        ctx.unsupported("a numeric type", f"type {number}")
    return cast_to(ctx, ELEMENTS[number][0])


@converter("CastLike")
def _cast_like(ctx: Context) -> Result:
    return cast_to(ctx, ctx.elem(1))


def cast_to(ctx: Context, elem: str) -> Result:
    """Return input 0 in another element type, as the standard casts."""
    x, ctx.result = ctx.tensor(0), elem
    if elem == x.elem:
        return x
    if x.known is not None:
        return recast(x, elem)
    if elem not in FORMATS:
        ctx.unsupported(f"a cast to {', '.join(FORMATS)}", elem)
    value, dtype = ctx.value(x), FORMATS[elem]
    if elem == "bool":
        return ctx.emit("not_equal", value, ctx.number(0, value.type.dtype))
    if elem in FLOATS or x.elem == "bool":
        return renamed(ctx, ctx.cast(value, dtype))
    if x.elem in FLOATS:
        return ctx.emit("cast", value, dtype=dtype, round="trunc")
    if elem in ("int8", "uint8"):
        return wrapped(ctx, value, dtype)
    return renamed(ctx, ctx.cast(value, dtype))


def renamed(ctx: Context, value: Value) -> Value:
    """Return a value; that of the input itself if its format did not change."""
    return value
