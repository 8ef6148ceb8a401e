"""Operators that put tensors together, take them apart and pick from them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Fill
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.converter import Result, converter
from ascend_lab.graph.onnx.shapes import axes_of
from ascend_lab.graph.onnx.tensors import ANY, INTEGERS, NUMPY, SMALL, Shape, Tensor


@converter("Concat", since=4)
def _concat(ctx: Context) -> Result:
    """Put tensors one behind the other; those without elements add none."""
    full = [i for i in range(len(ctx.inputs)) if ctx.tensor(i).elements] or [0]
    if len(full) == 1:
        return ctx.tensor(full[0])
    return ctx.emit("concat", *ctx.alike(*full), axis=ctx.attr("axis"))


@converter("Split", since=2)
def _split(ctx: Context) -> Sequence[Result]:
    """Cut into the sizes given, or into equal pieces of which the last may be smaller.

    Pieces without elements are known; only the others are nodes.
    """
    (at,) = axes_of(ctx, (ctx.attr("axis"),), len(ctx.shape(0)))
    size, count = ctx.shape(0)[at], ctx.attr("num_outputs") or ctx.out_count
    sizes: Shape = ctx.ints(1) if ctx.has(1) else ctx.attr("split")
    if not sizes:
        if count != ctx.out_count or (ctx.attr("num_outputs") is None and size % count):
            ctx.unsupported(f"{count} equal pieces of axis {at}", f"size {size}")
        each = -(-size // count)
        sizes = (*(each,) * (count - 1), size - each * (count - 1))
    if len(sizes) != ctx.out_count:
        ctx.unsupported(f"{len(sizes)} outputs", str(ctx.out_count))
    if len(sizes) == 1 and sizes[0] == size:
        return (ctx.tensor(0),)
    if min(sizes) < 0 or sum(sizes) != size:
        ctx.unsupported(f"sizes that add up to {size}", str(sizes))
    empty = np.zeros((*ctx.shape(0)[:at], 0, *ctx.shape(0)[at + 1 :]))
    full = tuple(n for n in sizes if n)
    if len(full) > 1:
        pieces: list[Result] = list(ctx.emit_all("split", ctx.input(0), sizes=full, axis=at))
    else:
        pieces = [ctx.tensor(0)] * len(full)
    return [pieces.pop(0) if n else ctx.known(empty, ctx.elem(0)) for n in sizes]


@converter("Slice")
def _slice(ctx: Context) -> Result:
    """Cut; from opset 10 on the bounds are inputs. A negative step turns an axis round."""
    x = ctx.tensor(0)
    given: list[Shape] = [ctx.attr(key) for key in ("starts", "ends", "axes")]
    if ctx.opset >= 10:
        given = [ctx.ints(i) if ctx.has(i) else () for i in range(1, 5)]
    starts, ends, axes, *more = given
    axes = axes_of(ctx, axes or tuple(range(len(starts))), len(x.shape))
    steps = (more[0] if more else ()) or (1,) * len(starts)
    if any(s < 0 and e >= 2**31 - 1 for e, s in zip(ends, steps, strict=False)):
        ctx.unsupported("an end before the start for steps below 0", str(ends))
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        ctx.unsupported("a start, end and step other than 0 for each axis", f"{starts} {ends}")
    parts = [slice(0, n, 1) for n in x.shape]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        parts[axis] = _bounds(x.shape[axis], start, end, step)
    if all(p == slice(0, n, 1) for p, n in zip(parts, x.shape, strict=True)):
        return x
    shape = tuple(len(range(*p.indices(n))) for p, n in zip(parts, x.shape, strict=True))
    if x.known is not None:
        return x.mapped(shape, lambda array: array[tuple(parts)])
    if 0 in shape:
        return ctx.known(np.zeros(shape), x.elem)
    return _cut(ctx, ctx.input(0), parts)


def _bounds(size: int, start: int, end: int, step: int) -> slice:
    """Return the bounds clamped as the standard says; an end of -1 below a step < 0 is None."""
    start += size if start < 0 else 0
    end += size if end < 0 else 0
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    last = min(max(end, -1), size - 1)
    return slice(min(max(start, 0), size - 1), None if last < 0 else last, step)


def _cut(ctx: Context, value: Value, parts: Sequence[slice]) -> Value:
    """Return a slice; axes with a negative step are gathered in their order."""
    forward = [p if p.step > 0 else slice(0, n, 1) for p, n in zip(parts, value.shape, strict=True)]
    if forward != [slice(0, n, 1) for n in value.shape]:
        begin, end, step = (
            tuple(getattr(p, k) for p in forward) for k in ("start", "stop", "step")
        )
        steps = None if set(step) <= {1} else step
        value = ctx.emit("slice", value, begin=begin, end=end, step=steps)
    for axis, part in enumerate(parts):
        if part.step < 0:
            order = ctx.known(np.arange(value.shape[axis])[part], "int32")
            value = ctx.emit("gather", value, ctx.value(order), axis=axis)
    return value


@converter("Gather", types=(ANY, INTEGERS))
def _gather(ctx: Context) -> Value:
    """Pick slices; known indices may be negative, computed ones are refused if they are."""
    (axis,) = axes_of(ctx, (ctx.attr("axis"),), len(ctx.shape(0)))
    indices = ctx.tensor(1)
    if indices.known is not None:
        array, size = ctx.const(1), ctx.shape(0)[axis]
        if array.size and (array.min() < -size or array.max() >= size):
            ctx.unsupported(f"indices from {-size} to {size - 1}", str(array)[:40])
        indices = ctx.known(np.where(array < 0, array + size, array), "int32")
    return ctx.emit("gather", ctx.input(0), ctx.value(indices), axis=axis)


@converter("Expand", since=8)
def _expand(ctx: Context) -> Result:
    x = ctx.tensor(0)
    shape = np.broadcast_shapes(x.shape, ctx.ints(1))
    if shape == x.shape:
        return x
    if isinstance(x.known, Fill):
        return Tensor(x.elem, shape, known=x.known)
    return ctx.emit("expand", ctx.input(0), shape=shape)


@converter("Tile", since=6)
def _tile(ctx: Context) -> Result:
    """Repeat: a new axis before each one, expanded, then joined with it."""
    x, repeats = ctx.input(0), ctx.ints(1)
    if len(repeats) != len(x.shape) or min(repeats, default=1) < 1:
        ctx.unsupported(f"{len(x.shape)} repeats of at least 1", str(repeats))
    if set(repeats) <= {1}:
        return ctx.tensor(0)
    split = tuple(n for size in x.shape for n in (1, size))
    wide = tuple(n for pair in zip(repeats, x.shape, strict=True) for n in pair)
    out = ctx.emit("expand", ctx.emit("reshape", x, shape=split), shape=wide)
    shape = tuple(r * n for r, n in zip(repeats, x.shape, strict=True))
    return ctx.emit("reshape", out, shape=shape)


@converter("Pad", since=2)
def _pad(ctx: Context) -> Result:
    """Add elements of one value, or of the tensor's own; negative pads cut."""
    x = ctx.input(0)
    rank = len(x.shape)
    pads, value = ctx.attr("pads"), ctx.attr("value")
    if ctx.opset >= 11:
        pads, value = ctx.ints(1), ctx.scalar(2) if ctx.has(2) else 0
    axes = axes_of(ctx, ctx.ints(3), rank) if ctx.has(3) else tuple(range(rank))
    if len(pads) != 2 * len(axes):
        ctx.unsupported(f"{2 * len(axes)} pads", str(pads))
    sides = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        sides[axis] = (pads[i], pads[len(axes) + i])
    parts = [slice(max(0, -a), n - max(0, -b), 1) for n, (a, b) in zip(x.shape, sides, strict=True)]
    if any(p.start >= p.stop for p in parts):
        ctx.unsupported("pads that leave an element", str(pads))
    x = _cut(ctx, x, parts)
    widths = tuple((max(0, a), max(0, b)) for a, b in sides)
    if ctx.attr("mode") != "constant":
        return _extended(ctx, x, widths, ctx.attr("mode"))
    if not any(map(any, widths)):
        return x if x.name != ctx.input(0).name else ctx.tensor(0)
    kind = NUMPY[ctx.elem(0)]  # the value as the tensor's type holds it
    wide = np.float32 if kind.kind in "fV" else np.int64
    return ctx.emit("pad", x, pads=widths, value=np.array(value, kind).astype(wide).item())


def _extended(ctx: Context, x: Value, widths: Sequence[tuple[int, int]], mode: Any) -> Result:
    """Return a tensor padded with elements of its own, each axis gathered in the order needed."""
    if mode not in ("reflect", "edge", "wrap"):
        ctx.unsupported("mode constant, reflect, edge or wrap", str(mode))
    out = x
    for axis, (before, after) in enumerate(widths):
        size = x.shape[axis]
        if before + size + after > SMALL:
            ctx.unsupported(f"axes of at most {SMALL} elements", str(before + size + after))
        if mode != "edge" and max(before, after) >= size + (mode == "wrap"):
            ctx.unsupported(f"pads that axis {axis} of size {size} can fill", f"{before}, {after}")
        if before or after:
            order = ctx.known(np.pad(np.arange(size), (before, after), mode=mode), "int32")
            out = ctx.emit("gather", out, ctx.value(order), axis=axis)
    return ctx.tensor(0) if out.name == ctx.input(0).name else out


@converter("DepthToSpace", "SpaceToDepth")
def _blocks(ctx: Context) -> Value:
    """Let channels become pixels of a block, or these channels: before the old (DCR) or behind."""
    x, block, mode = ctx.input(0), ctx.attr("blocksize"), ctx.attr("mode") or "DCR"
    deep = ctx.op == "DepthToSpace"
    if mode not in ("DCR", "CRD"):
        ctx.unsupported("mode DCR or CRD", str(mode))
    cut = x.shape[1:2] if deep else x.shape[2:]
    if len(x.shape) != 4 or block < 1 or any(s % (block**2 if deep else block) for s in cut):
        what = "channels a multiple of blocksize squared" if deep else (
            "height and width multiples of blocksize")  # fmt: skip
        ctx.unsupported(f"4 axes, {what}", f"{x.shape}, {block}")
    n, c, h, w = x.shape
    if deep:
        c //= block**2
        split = (n, block, block, c, h, w) if mode == "DCR" else (n, c, block, block, h, w)
        perm = (0, 3, 4, 1, 5, 2) if mode == "DCR" else (0, 1, 4, 2, 5, 3)
        shape = (n, c, h * block, w * block)
    else:
        split = (n, c, h // block, block, w // block, block)
        perm = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
        shape = (n, c * block**2, h // block, w // block)
    out = ctx.emit("transpose", ctx.emit("reshape", x, shape=split), perm=perm)
    return ctx.emit("reshape", out, shape=shape)
