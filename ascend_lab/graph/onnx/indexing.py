"""Places of largest elements, and reads and writes at places: known or computed."""

import math

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.converter import Result, converter
from ascend_lab.graph.onnx.tensors import ANY, FLOATS, INTEGERS, NUMBERS, Shape, Values

_COMPARED = (*NUMBERS, "int8", "uint8")


def _first(ctx: Context, x: Value, axis: int, extreme: str, last: bool = False) -> Value:
    """Return the place of the largest or smallest element along an axis, kept with size 1."""
    size = x.shape[axis]
    hit = ctx.emit("equal", x, ctx.emit(extreme, x, axis=axis, keepdims=True))
    places = ctx.counting(size, axis, len(x.shape))
    missed = ctx.table(np.array(-1 if last else size), "int32", "missed")
    marked = ctx.choose(hit, places, missed)
    return ctx.emit("reduce_max" if last else "reduce_min", marked, axis=axis, keepdims=True)


@converter("ArgMax", "ArgMin", types=(_COMPARED,), result="int64")
def _argmax(ctx: Context) -> Value:
    x = ctx.input(0)
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    if not x.shape[axis]:
        ctx.unsupported("an axis with elements", str(x.shape))
    extreme = "reduce_max" if ctx.op == "ArgMax" else "reduce_min"
    place = _first(ctx, x, axis, extreme, bool(ctx.attr("select_last_index")))
    if ctx.attr("keepdims"):
        return place
    return ctx.reshape(place, (*x.shape[:axis], *x.shape[axis + 1 :]))


@converter("Hardmax", types=(FLOATS,))
def _hardmax(ctx: Context) -> Value:
    """Mark the first largest element with 1; before opset 13 of all axes from `axis` on."""
    x, shape = ctx.input(0), ctx.shape(0)
    axis = ctx.axis(ctx.attr("axis"), len(shape))
    if ctx.opset < 13:
        x = ctx.reshape(x, (math.prod(shape[:axis]), math.prod(shape[axis:])))
        axis = 1
    place = _first(ctx, x, axis, "reduce_max")
    places = ctx.counting(x.shape[axis], axis, len(x.shape))
    hot = ctx.cast(ctx.emit("equal", places, place), x.type.dtype)
    return ctx.reshape(hot, shape)


@converter("Compress", types=(ANY, ("bool",)))
def _compress(ctx: Context) -> Value:
    x, kept = ctx.input(0), np.flatnonzero(ctx.const(1))
    axis = ctx.attr("axis")
    if axis is None:
        x, axis = ctx.reshape(x, (x.type.elements,)), 0
    return _picked(ctx, x, kept, ctx.axis(axis, len(x.shape)))


@converter("ReverseSequence", types=(ANY, ("int64",)))
def _reverse_sequence(ctx: Context) -> Value:
    """Turn round the first `length` steps of each sequence: rows of a table picked anew."""
    x, lengths = ctx.input(0), ctx.ints(1)
    rank = len(x.shape)
    time, batch = (ctx.axis(ctx.attr(f"{key}_axis"), rank) for key in ("time", "batch"))
    if {time, batch} != {0, 1} or len(lengths) != x.shape[batch]:
        ctx.unsupported("time and batch as the first two axes, one length each", f"{x.shape}")
    places = np.arange(x.type.elements // int(np.prod(x.shape[2:]))).reshape(x.shape[:2])
    turned = places if batch == 0 else places.T
    for row, length in zip(turned, lengths, strict=True):
        row[:length] = row[:length][::-1].copy()
    flat = ctx.reshape(x, (places.size, *x.shape[2:]))
    return ctx.reshape(_picked(ctx, flat, places.ravel(), 0), x.shape)


def _picked(ctx: Context, x: Value, places: np.ndarray, axis: int) -> Value:
    """Return the slices of x at known places along an axis."""
    return ctx.emit("gather", x, ctx.table(places, "int32", "places"), axis=axis)


# -- reads and writes at computed places ----------------------------------------------------------
# Places become numbers of rows: the tensor is reshaped so that what an index names is one row.
# Negative indices count from the end.
_TYPES = (ANY, INTEGERS, ANY)
_MOST = 2**22


def _strides(shape: Shape) -> Values:
    """Return the elements between neighbours along each axis, row-major."""
    return np.array([math.prod(shape[i + 1 :]) for i in range(len(shape))], np.int64)


def _counted(ctx: Context, indices: Value, sizes: Values) -> Value:
    """Return indices counted from 0: those below 0 grow by the sizes."""
    below = ctx.emit("less", indices, ctx.table(0, "int32", "zero"))
    raised = ctx.emit("add", indices, ctx.table(sizes, "int32", "sizes"))
    return ctx.choose(below, raised, indices)


def _elements(ctx: Context, shape: Shape, axis: int) -> Value:
    """Return the row-major numbers of the elements that indices name along one axis."""
    indices = ctx.input(1, "int32")
    if len(indices.shape) != len(shape) or any(
        n > size for i, (n, size) in enumerate(zip(indices.shape, shape, strict=True)) if i != axis
    ):
        ctx.unsupported(f"indices no larger than {shape} but for axis {axis}", str(indices.shape))
    steps = _strides(shape)
    own = np.indices(indices.shape).reshape(len(shape), *indices.shape)
    rest = sum((own[i] * steps[i] for i in range(len(shape)) if i != axis), np.zeros(1, np.int64))
    scaled = _counted(ctx, indices, np.array(shape[axis]))
    if steps[axis] != 1:
        scaled = ctx.emit("mul", scaled, ctx.table(steps[axis], "int32", "step"))
    base = np.broadcast_to(rest, indices.shape)
    return ctx.emit("add", scaled, ctx.table(base, "int32", "base")) if base.any() else scaled


@converter("GatherElements", types=_TYPES, since=11)
def _gather_elements(ctx: Context) -> Value:
    x = ctx.input(0)
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    flat = ctx.reshape(x, (x.type.elements,))
    return ctx.emit("gather", flat, _elements(ctx, x.shape, axis), axis=0)


@converter("ScatterElements", "Scatter", types=_TYPES, since=9)
def _scatter_elements(ctx: Context) -> Value:
    x, updates = ctx.input(0), ctx.input(2)
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    places = _elements(ctx, x.shape, axis)
    if updates.shape != places.shape:
        ctx.unsupported(f"updates {places.shape}", str(updates.shape))
    rows = [ctx.reshape(v, (v.type.elements,)) for v in (x, places, updates)]
    return ctx.reshape(ctx.emit(_way(ctx), *rows), x.shape)


def _way(ctx: Context) -> str:
    """Return the operator of a reduction."""
    ways = {"none": "scatter_update", "add": "scatter_add"}
    way = ways.get(ctx.attr("reduction") or "none")
    if way is None or (way == "scatter_add" and ctx.elem(0) not in NUMBERS):
        got = f"{ctx.attr('reduction')} of {ctx.elem(0)}"
        ctx.unsupported("reduction none, or add of floats, int32 or int64", got)
    return way


def _rows(ctx: Context, shape: Shape, batch: int = 0) -> tuple[Value, Shape]:
    """Return the numbers of the slices that index tuples name, and the shape of a slice."""
    indices = ctx.input(1, "int32")
    depth = indices.shape[-1] if indices.shape else 0
    if not depth or batch + depth > len(shape) or indices.shape[:batch] != shape[:batch]:
        ctx.unsupported(f"index tuples into {shape}", str(indices.shape))
    sizes = np.array(shape[batch : batch + depth])
    steps = _strides(shape[batch : batch + depth])
    counted = _counted(ctx, indices, sizes)
    scaled = ctx.emit("mul", counted, ctx.table(steps, "int32", "steps"))
    rows = ctx.emit("reduce_sum", scaled, axis=-1)
    if batch:
        own = np.arange(math.prod(shape[:batch])) * int(np.prod(sizes))
        base = own.reshape(*shape[:batch], *(1,) * (len(rows.shape) - batch))
        rows = ctx.emit("add", rows, ctx.table(base, "int32", "base"))
    return rows, shape[batch + depth :]


@converter("GatherND", "ScatterND", types=_TYPES, since=11)
def _slices(ctx: Context) -> Value:
    x = ctx.input(0)
    rows, rest = _rows(ctx, x.shape, ctx.attr("batch_dims") or 0)
    table = ctx.reshape(x, (x.type.elements // max(math.prod(rest), 1), *rest))
    if ctx.op == "GatherND":
        return ctx.emit("gather", table, rows, axis=0)
    updates = ctx.input(2)
    if updates.shape != (*rows.shape, *rest):
        ctx.unsupported(f"updates {(*rows.shape, *rest)}", str(updates.shape))
    return ctx.reshape(ctx.emit(_way(ctx), table, rows, updates), x.shape)


@converter("TopK", types=((*NUMBERS, "int8", "uint8"), ("int64",)), since=10)
def _top_k(ctx: Context) -> tuple[Result, ...]:
    """Rank each element by those before it in order, then let rank r go to place r.

    Before an element stand all larger ones, and equal ones with a lower index.
    """
    x, k = ctx.input(0), int(ctx.scalar(1))
    rank = len(x.shape)
    axis = ctx.axis(ctx.attr("axis"), rank)
    n = x.shape[axis]
    if not 0 < k <= n or x.type.elements * n > _MOST:
        ctx.unsupported(f"k from 1 to {n}, at most {_MOST} comparisons", f"k {k} of {x.shape}")
    order = (*(i for i in range(rank) if i != axis), axis)
    turned = ctx.emit("transpose", x, perm=order)
    column, row = (ctx.reshape(turned, (*turned.shape[:-1], *s)) for s in ((n, 1), (1, n)))
    before = ctx.emit("less" if ctx.attr("largest") == 0 else "greater", row, column)
    lower = ctx.table(np.tril(np.ones((n, n)), -1), "int32", "lower")
    tied = ctx.emit("mul", ctx.cast(ctx.emit("equal", row, column), "int32"), lower)
    ahead = ctx.emit("add", ctx.cast(before, "int32"), tied)
    ranks = ctx.emit("reduce_sum", ahead, axis=-1, keepdims=True)
    hits = ctx.emit("equal", ranks, ctx.counting(k, 0, 1))
    values = ctx.choose(hits, column, ctx.table(0, x.type.dtype, "none"))
    places = ctx.emit("mul", hits, ctx.reshape(ctx.counting(n, 0, 1), (n, 1)))
    back = tuple(np.argsort(order))
    values, places = (
        ctx.emit("transpose", ctx.emit("reduce_sum", v, axis=-2), perm=back)
        for v in (values, places)
    )
    return values, ctx.typed(places, "int64")
