"""Imports ONNX operators that join, cut or rearrange tensors, or read and write at indices.

The module has three groups: joins, slices, pads; the largest elements and reads at known indices
(ArgMax, Compress); reads and writes at indices known at run time only (GatherND, TopK).
"""

import math
from collections.abc import Sequence

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import Fill
from ascend_lab.compiler.onnx import shapes, tensors as kinds
from ascend_lab.compiler.onnx.context import Context, Result, converter


@converter("Concat", since=4)
def _concat(ctx: Context) -> Result:
    """Join tensors along an axis; tensors without elements are left out."""
    nonempty = [i for i in range(len(ctx.inputs)) if ctx.tensor(i).elements] or [0]
    if len(nonempty) == 1:
        return ctx.tensor(nonempty[0])
    return ctx.emit("concat", *ctx.in_one_format(*nonempty), axis=ctx.attr("axis"))


@converter("Split", since=2)
def _split(ctx: Context) -> Sequence[Result]:
    """Cut into pieces of given sizes, or of equal size; the last of these may be smaller.

    Pieces without elements become constants; the graph gets nodes only for the others.
    """
    (axis,) = shapes.axes_of(ctx, (ctx.attr("axis"),), len(ctx.shape(0)))
    size = ctx.shape(0)[axis]
    count = ctx.attr("num_outputs") or ctx.out_count
    sizes: kinds.Shape = ctx.ints(1) if ctx.has(1) else ctx.attr("split")
    if not sizes:
        if count != ctx.out_count or (ctx.attr("num_outputs") is None and size % count):
            ctx.unsupported(f"{count} equal pieces of axis {axis}", f"size {size}")
        # 10 in 4 pieces: 3, 3, 3 and 1.
        part_size = -(-size // count)
        sizes = (*(part_size,) * (count - 1), size - part_size * (count - 1))
    if len(sizes) != ctx.out_count:
        ctx.unsupported(f"{len(sizes)} outputs", str(ctx.out_count))
    if len(sizes) == 1 and sizes[0] == size:
        return (ctx.tensor(0),)
    if min(sizes) < 0 or sum(sizes) != size:
        ctx.unsupported(f"sizes that add up to {size}", str(sizes))
    empty = np.zeros((*ctx.shape(0)[:axis], 0, *ctx.shape(0)[axis + 1 :]))
    nonempty_sizes = tuple(n for n in sizes if n)
    if len(nonempty_sizes) > 1:
        pieces: list[Result] = list(
            ctx.emit_all("split", ctx.input(0), sizes=nonempty_sizes, axis=axis)
        )
    else:
        pieces = [ctx.tensor(0)] * len(nonempty_sizes)
    return [pieces.pop(0) if n else ctx.known_tensor(empty, ctx.elem(0)) for n in sizes]


@converter("Slice")
def _slice(ctx: Context) -> Result:
    """Cut a slice; since opset 10 its bounds are inputs. A negative step reverses an axis."""
    x = ctx.tensor(0)
    operands: list[kinds.Shape] = [ctx.attr(key) for key in ("starts", "ends", "axes")]
    if ctx.opset >= 10:
        operands = [ctx.ints(i) if ctx.has(i) else () for i in range(1, 5)]
    starts, ends, axes, *steps_given = operands
    axes = shapes.axes_of(ctx, axes or tuple(range(len(starts))), len(x.shape))
    steps = (steps_given[0] if steps_given else ()) or (1,) * len(starts)
    if any(s < 0 and e >= 2**31 - 1 for e, s in zip(ends, steps, strict=False)):
        ctx.unsupported("an end before the start for steps below 0", str(ends))
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        ctx.unsupported("a start, end and step other than 0 for each axis", f"{starts} {ends}")
    parts = [slice(0, n, 1) for n in x.shape]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        parts[axis] = _clamped_slice(x.shape[axis], start, end, step)
    if all(p == slice(0, n, 1) for p, n in zip(parts, x.shape, strict=True)):
        return x
    shape = tuple(len(range(*p.indices(n))) for p, n in zip(parts, x.shape, strict=True))
    if x.known is not None:
        return x.mapped(shape, lambda array: array[tuple(parts)])
    if 0 in shape:
        return ctx.known_tensor(np.zeros(shape), x.elem)
    return _sliced(ctx, ctx.input(0), parts)


def _clamped_slice(size: int, start: int, end: int, step: int) -> slice:
    """Return the bounds clamped as Python does; a start before the first element becomes 0.

    With a negative step, an end before the first element becomes None.
    """
    # size 5: start -100 is 0, end 100 is 5; for a step of -1 from 4 to -6, all: 4, 3, 2, 1, 0.
    begin, stop, _ = slice(max(start, -size), end, step).indices(size)
    return slice(begin, None if stop < 0 else stop, step)


def _sliced(ctx: Context, value: Value, parts: Sequence[slice]) -> Value:
    """Return a slice; axes with a negative step are gathered in their order."""
    all_of_axes = [slice(0, n, 1) for n in value.shape]
    forward = [p if p.step > 0 else n for p, n in zip(parts, all_of_axes, strict=True)]
    sliced = value
    if forward != all_of_axes:
        begin, end, step = zip(*((p.start, p.stop, p.step) for p in forward), strict=True)
        steps = None if set(step) <= {1} else step
        sliced = ctx.emit("slice", value, begin=begin, end=end, step=steps)
    for axis, axis_slice in enumerate(parts):
        if axis_slice.step < 0:
            indices = np.arange(sliced.shape[axis])[axis_slice]
            sliced = _gathered(ctx, sliced, indices, axis)
    return sliced


def _gathered(ctx: Context, x: Value, indices: kinds.Values, axis: int) -> Value:
    """Return the slices of x at known places along an axis."""
    return ctx.emit("gather", x, ctx.value(ctx.known_tensor(indices, "int32")), axis=axis)


@converter("Gather", types=(kinds.GRAPH_TYPES, kinds.INTEGERS))
def _gather(ctx: Context) -> Value:
    """Pick slices; negative indices count from the end: known ones are replaced at once."""
    (axis,) = shapes.axes_of(ctx, (ctx.attr("axis"),), len(ctx.shape(0)))
    indices = ctx.tensor(1)
    if indices.known is not None:
        array = ctx.const(1)
        size = ctx.shape(0)[axis]
        if array.size and (array.min() < -size or array.max() >= size):
            ctx.unsupported(f"indices from {-size} to {size - 1}", str(array)[:40])
        # Index -1 of 10 is 9.
        indices = ctx.known_tensor(np.where(array < 0, array + size, array), "int32")
        return ctx.emit("gather", ctx.input(0), ctx.value(indices), axis=axis)
    return ctx.emit("gather", ctx.input(0), ctx.value(indices), axis=axis, from_end=True)


@converter("Expand", since=8)
def _expand(ctx: Context) -> Result:
    x = ctx.tensor(0)
    shape = np.broadcast_shapes(x.shape, ctx.ints(1))
    if shape == x.shape:
        return x
    if isinstance(x.known, Fill):
        return kinds.Tensor(x.elem, shape, known=x.known)
    return ctx.emit("expand", ctx.input(0), shape=shape)


@converter("Tile", since=6)
def _tile(ctx: Context) -> Result:
    """Repeat a tensor: put a new axis before each axis, expand it, and merge the two."""
    x = ctx.input(0)
    repeats = ctx.ints(1)
    if len(repeats) != len(x.shape) or min(repeats, default=1) < 1:
        ctx.unsupported(f"{len(x.shape)} repeats of at least 1", str(repeats))
    if set(repeats) <= {1}:
        return ctx.tensor(0)
    # (2, 3) repeated (2, 2): (1, 2, 1, 3) is expanded to (2, 2, 2, 3) and read as (4, 6).
    split = tuple(n for size in x.shape for n in (1, size))
    repeated = tuple(n for pair in zip(repeats, x.shape, strict=True) for n in pair)
    result = ctx.emit("expand", ctx.emit("reshape", x, shape=split), shape=repeated)
    shape = tuple(r * n for r, n in zip(repeats, x.shape, strict=True))
    return ctx.emit("reshape", result, shape=shape)


@converter("Pad", since=2)
def _pad(ctx: Context) -> Result:
    """Pad with one value or with the tensor's own elements; negative pads cut elements off."""
    x = ctx.input(0)
    rank = len(x.shape)
    pads = ctx.attr("pads")
    value = ctx.attr("value")
    if ctx.opset >= 11:
        pads = ctx.ints(1)
        value = ctx.scalar(2) if ctx.has(2) else 0
    axes = shapes.axes_of(ctx, ctx.ints(3), rank) if ctx.has(3) else tuple(range(rank))
    if len(pads) != 2 * len(axes):
        ctx.unsupported(f"{2 * len(axes)} pads", str(pads))
    # the file has the pads before each axis, then those after it: (top, left, bottom, right)
    sides = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        sides[axis] = (pads[i], pads[len(axes) + i])
    # negative pads cut; what is left is padded by the positive ones
    parts = [slice(max(0, -a), n - max(0, -b), 1) for n, (a, b) in zip(x.shape, sides, strict=True)]
    if any(p.start >= p.stop for p in parts):
        ctx.unsupported("pads that leave an element", str(pads))
    x = _sliced(ctx, x, parts)
    widths = tuple((max(0, a), max(0, b)) for a, b in sides)
    if ctx.attr("mode") != "constant":
        return _padded_by_elements(ctx, x, widths, ctx.attr("mode"))
    if not any(map(any, widths)):
        return x if x.name != ctx.input(0).name else ctx.tensor(0)
    kind = kinds.NUMPY[ctx.elem(0)]  # the value as the tensor's type holds it
    wide_type = np.float32 if kind.kind in "fV" else np.int64
    return ctx.emit("pad", x, pads=widths, value=np.array(value, kind).astype(wide_type).item())


def _padded_by_elements(
    ctx: Context, x: Value, widths: Sequence[tuple[int, int]], mode: object
) -> Result:
    """Return a tensor padded with its own elements, by a gather along each axis."""
    if mode not in ("reflect", "edge", "wrap"):
        ctx.unsupported("mode constant, reflect, edge or wrap", str(mode))
    result = x
    for axis, (pad_before, pad_after) in enumerate(widths):
        size = x.shape[axis]
        if pad_before + size + pad_after > kinds.MAX_FOLDED_ELEMENTS:
            ctx.unsupported(
                f"axes of at most {kinds.MAX_FOLDED_ELEMENTS} elements",
                str(pad_before + size + pad_after),
            )
        # `reflect` does not repeat the border element; `wrap` does, and can pad one element more
        max_pad = size if mode == "wrap" else size - 1
        if mode != "edge" and max(pad_before, pad_after) > max_pad:
            ctx.unsupported(
                f"pads that axis {axis} of size {size} can fill", f"{pad_before}, {pad_after}"
            )
        if pad_before or pad_after:
            result = _gathered(
                ctx, result, np.pad(np.arange(size), (pad_before, pad_after), mode=mode), axis
            )
    return ctx.tensor(0) if result.name == ctx.input(0).name else result


@converter("DepthToSpace", "SpaceToDepth")
def _depth_space(ctx: Context) -> Value:
    """Turn channels into the pixels of a block, or pixels into channels.

    The pixel's index comes before the channel's in mode DCR, and after it in mode CRD.
    """
    x = ctx.input(0)
    block = ctx.attr("blocksize")
    mode = ctx.attr("mode") or "DCR"
    to_space = ctx.op == "DepthToSpace"
    if mode not in ("DCR", "CRD"):
        ctx.unsupported("mode DCR or CRD", str(mode))
    divided_sizes = x.shape[1:2] if to_space else x.shape[2:]
    if (
        len(x.shape) != 4
        or block < 1
        or any(s % (block**2 if to_space else block) for s in divided_sizes)
    ):
        sides = "height and width multiples of blocksize"
        needed = "channels a multiple of blocksize squared" if to_space else sides
        ctx.unsupported(f"4 axes, {needed}", f"{x.shape}, {block}")
    n, c, h, w = x.shape
    # channel (i, j, k) of DCR and (k, i, j) of CRD become pixel (i, j) of a block, channel k
    if to_space:
        c //= block**2
        split = (n, block, block, c, h, w) if mode == "DCR" else (n, c, block, block, h, w)
        perm = (0, 3, 4, 1, 5, 2) if mode == "DCR" else (0, 1, 4, 2, 5, 3)
        shape = (n, c, h * block, w * block)
    else:
        split = (n, c, h // block, block, w // block, block)
        perm = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
        shape = (n, c * block**2, h // block, w // block)
    result = ctx.emit("transpose", ctx.emit("reshape", x, shape=split), perm=perm)
    return ctx.emit("reshape", result, shape=shape)


# -- indices of largest elements, known indices ----------------------------------------------------
def _index_of_extreme(
    ctx: Context, x: Value, axis: int, extreme: str, takes_last: bool = False
) -> Value:
    """Return the index of the largest or smallest element along an axis, which gets size 1."""
    size = x.shape[axis]
    # (3, 7, 7) has its maximum at indices 1 and 2; the smaller index, 1, is that of the first
    is_extreme = ctx.emit("equal", x, ctx.emit(extreme, x, axis=axis, keepdims=True))
    indices = ctx.arange_along(size, axis, len(x.shape))
    # if no element equals the extreme, as with NaN, the index must still lie on the axis
    not_extreme = ctx.constant_array(np.array(0 if takes_last else size - 1), "int32", "missed")
    candidates = ctx.choose(is_extreme, indices, not_extreme)
    return ctx.emit(
        "reduce_max" if takes_last else "reduce_min", candidates, axis=axis, keepdims=True
    )


@converter("ArgMax", "ArgMin", types=(kinds.COMPUTED_TYPES,), result="int64")
def _argmax(ctx: Context) -> Value:
    x = ctx.input(0)
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    if not x.shape[axis]:
        ctx.unsupported("an axis with elements", str(x.shape))
    extreme = "reduce_max" if ctx.op == "ArgMax" else "reduce_min"
    index = _index_of_extreme(ctx, x, axis, extreme, bool(ctx.attr("select_last_index")))
    if ctx.attr("keepdims"):
        return index
    return ctx.reshape(index, (*x.shape[:axis], *x.shape[axis + 1 :]))


@converter("Hardmax", types=(kinds.FLOATS,))
def _hardmax(ctx: Context) -> Value:
    """Return 1 at the first largest element along `axis`, else 0.

    Before opset 13 the largest element is taken over all axes from `axis` on.
    """
    x = ctx.input(0)
    shape = ctx.shape(0)
    axis = ctx.axis(ctx.attr("axis"), len(shape))
    # the older definition takes the tensor as a matrix
    if ctx.opset < 13:
        x = ctx.reshape(x, (math.prod(shape[:axis]), math.prod(shape[axis:])))
        axis = 1
    index = _index_of_extreme(ctx, x, axis, "reduce_max")
    indices = ctx.arange_along(x.shape[axis], axis, len(x.shape))
    # indices 0, 1, 2 and the largest element at 1: 0, 1, 0
    one_hot = ctx.cast(ctx.emit("equal", indices, index), x.type.dtype)
    return ctx.reshape(one_hot, shape)


@converter("Compress", types=(kinds.GRAPH_TYPES, ("bool",)))
def _compress(ctx: Context) -> Value:
    x = ctx.input(0)
    indices = np.flatnonzero(ctx.const(1))
    axis = ctx.attr("axis")
    if axis is None:
        x = ctx.reshape(x, (x.type.elements,))
        axis = 0
    return _gathered(ctx, x, indices, ctx.axis(axis, len(x.shape)))


@converter("ReverseSequence", types=(kinds.GRAPH_TYPES, ("int64",)))
def _reverse_sequence(ctx: Context) -> Value:
    """Reverse the first steps of each sequence, as many as its length, by gathering rows."""
    x = ctx.input(0)
    lengths = ctx.ints(1)
    rank = len(x.shape)
    time, batch = (ctx.axis(ctx.attr(f"{key}_axis"), rank) for key in ("time", "batch"))
    if {time, batch} != {0, 1} or len(lengths) != x.shape[batch]:
        ctx.unsupported("time and batch as the first two axes, one length each", f"{x.shape}")
    # 2 sequences of 4 steps, batch first: rows 0 .. 3 and 4 .. 7; lengths (3, 2) make 2 1 0 3 and 5
    # 4 6 7.
    row_numbers = np.arange(x.type.elements // int(np.prod(x.shape[2:]))).reshape(x.shape[:2])
    rows_of_batch = row_numbers if batch == 0 else row_numbers.T
    # `rows_of_batch` is a view: reversing parts of its rows changes `row_numbers`
    for row, length in zip(rows_of_batch, lengths, strict=True):
        row[:length] = row[:length][::-1].copy()
    flat = ctx.reshape(x, (row_numbers.size, *x.shape[2:]))
    return ctx.reshape(_gathered(ctx, flat, row_numbers.ravel(), 0), x.shape)


# -- reads and writes at computed indices ---------------------------------------------------------
# Indices become row numbers: the tensor is reshaped so that what an index names is one row.
# Negative indices count from the end.
_TYPES = (kinds.GRAPH_TYPES, kinds.INTEGERS, kinds.GRAPH_TYPES)
_MAX_COMPARISONS = 2**22


def _strides(shape: kinds.Shape) -> kinds.Values:
    """Return the elements between neighbours along each axis, row-major."""
    # (2, 3, 4): 12, 4 and 1.
    return np.array([math.prod(shape[i + 1 :]) for i in range(len(shape))], np.int64)


def _nonnegative_indices(ctx: Context, indices: Value, sizes: kinds.Values) -> Value:
    """Return indices counted from 0: the axis size is added to negative ones."""
    is_negative = ctx.emit("less", indices, ctx.constant_array(0, "int32", "zero"))
    shifted = ctx.emit("add", indices, ctx.constant_array(sizes, "int32", "sizes"))
    return ctx.choose(is_negative, shifted, indices)


def _element_numbers(ctx: Context, shape: kinds.Shape, axis: int) -> Value:
    """Return the row-major numbers of the elements that indices name along one axis."""
    indices = ctx.input(1, "int32")
    if len(indices.shape) != len(shape) or any(
        n > size for i, (n, size) in enumerate(zip(indices.shape, shape, strict=True)) if i != axis
    ):
        ctx.unsupported(f"indices no larger than {shape} but for axis {axis}", str(indices.shape))
    strides = _strides(shape)
    # in a tensor (3, 4), index 2 along axis 1 in row 1 is element 1 * 4 + 2 * 1 = 6
    grid = np.indices(indices.shape).reshape(len(shape), *indices.shape)
    other_offsets = sum(
        (grid[i] * strides[i] for i in range(len(shape)) if i != axis), np.zeros(1, np.int64)
    )
    scaled = _nonnegative_indices(ctx, indices, np.array(shape[axis]))
    if strides[axis] != 1:
        scaled = ctx.emit("mul", scaled, ctx.constant_array(strides[axis], "int32", "step"))
    base = np.broadcast_to(other_offsets, indices.shape)
    return (
        ctx.emit("add", scaled, ctx.constant_array(base, "int32", "base")) if base.any() else scaled
    )


@converter("GatherElements", types=_TYPES, since=11)
def _gather_elements(ctx: Context) -> Value:
    x = ctx.input(0)
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    flat = ctx.reshape(x, (x.type.elements,))
    return ctx.emit("gather", flat, _element_numbers(ctx, x.shape, axis), axis=0)


@converter("ScatterElements", "Scatter", types=_TYPES, since=9)
def _scatter_elements(ctx: Context) -> Value:
    x = ctx.input(0)
    updates = ctx.input(2)
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    element_numbers = _element_numbers(ctx, x.shape, axis)
    if updates.shape != element_numbers.shape:
        ctx.unsupported(f"updates {element_numbers.shape}", str(updates.shape))
    rows = [ctx.reshape(v, (v.type.elements,)) for v in (x, element_numbers, updates)]
    return ctx.reshape(ctx.emit(_scatter_operator(ctx), *rows), x.shape)


def _scatter_operator(ctx: Context) -> str:
    """Return the graph operator for a scatter's attribute `reduction`."""
    operators = {"none": "scatter_update", "add": "scatter_add"}
    operator = operators.get(ctx.attr("reduction") or "none")
    if operator is None or (operator == "scatter_add" and ctx.elem(0) not in kinds.NUMBERS):
        got = f"{ctx.attr('reduction')} of {ctx.elem(0)}"
        ctx.unsupported("reduction none, or add of floats, int32 or int64", got)
    return operator


def _row_numbers(ctx: Context, shape: kinds.Shape, batch: int = 0) -> tuple[Value, kinds.Shape]:
    """Return the numbers of the slices that index tuples name, and the shape of a slice."""
    indices = ctx.input(1, "int32")
    depth = indices.shape[-1] if indices.shape else 0
    if not depth or batch + depth > len(shape) or indices.shape[:batch] != shape[:batch]:
        ctx.unsupported(f"index tuples into {shape}", str(indices.shape))
    sizes = np.array(shape[batch : batch + depth])
    strides = _strides(shape[batch : batch + depth])
    nonnegative = _nonnegative_indices(ctx, indices, sizes)
    scaled = ctx.emit("mul", nonnegative, ctx.constant_array(strides, "int32", "steps"))
    # Tuple (1, 2) into axes of 3 and 4: 1 * 4 + 2 = row 6.
    rows = ctx.emit("reduce_sum", scaled, axis=-1)
    if batch:
        batch_starts = np.arange(math.prod(shape[:batch])) * int(np.prod(sizes))
        base = batch_starts.reshape(*shape[:batch], *(1,) * (len(rows.shape) - batch))
        rows = ctx.emit("add", rows, ctx.constant_array(base, "int32", "base"))
    return rows, shape[batch + depth :]


@converter("GatherND", "ScatterND", types=_TYPES, since=11)
def _gather_scatter_nd(ctx: Context) -> Value:
    x = ctx.input(0)
    rows, row_shape = _row_numbers(ctx, x.shape, ctx.attr("batch_dims") or 0)
    table = ctx.reshape(x, (x.type.elements // max(math.prod(row_shape), 1), *row_shape))
    if ctx.op == "GatherND":
        return ctx.emit("gather", table, rows, axis=0)
    updates = ctx.input(2)
    if updates.shape != (*rows.shape, *row_shape):
        ctx.unsupported(f"updates {(*rows.shape, *row_shape)}", str(updates.shape))
    return ctx.reshape(ctx.emit(_scatter_operator(ctx), table, rows, updates), x.shape)


@converter("TopK", types=(kinds.COMPUTED_TYPES, ("int64",)), since=10)
def _top_k(ctx: Context) -> tuple[Result, ...]:
    """Return the k largest (or smallest) elements and their indices, sorted.

    An element's rank is the number of larger elements and of equal ones with a lower index; the
    element of rank r is result r. NaN, which the standard does not mention, counts as infinity.
    """
    x = ctx.input(0)
    k = int(ctx.scalar(1))
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    n = x.shape[axis]
    if not 0 < k <= n or x.type.elements * n > _MAX_COMPARISONS:
        ctx.unsupported(
            f"k from 1 to {n}, at most {_MAX_COMPARISONS} comparisons", f"k {k} of {x.shape}"
        )
    order = (*(i for i in range(len(x.shape)) if i != axis), axis)
    axis_last = ctx.emit("transpose", x, perm=order)
    numbers = axis_last
    if ctx.elem(0) in kinds.FLOATS:
        is_number = ctx.emit("equal", axis_last, axis_last)
        numbers = ctx.choose(is_number, axis_last, ctx.constant_scalar(math.inf, x.type.dtype))
    # every element is compared with every other: (.., n, n) comparisons
    column, row = (ctx.reshape(numbers, (*numbers.shape[:-1], *s)) for s in ((n, 1), (1, n)))
    precedes = ctx.emit("less" if ctx.attr("largest") == 0 else "greater", row, column)
    earlier = ctx.constant_array(np.tril(np.ones((n, n)), -1), "int32", "lower")
    precedes_equal = ctx.emit("mul", ctx.cast(ctx.emit("equal", row, column), "int32"), earlier)
    precedes_either = ctx.emit("add", ctx.cast(precedes, "int32"), precedes_equal)
    # (3, 1, 3) has the ranks 0, 2, 1: of equal numbers the first comes first
    ranks = ctx.emit("reduce_sum", precedes_either, axis=-1, keepdims=True)
    hits = ctx.emit("equal", ranks, ctx.arange_along(k, 0, 1))
    elements = ctx.reshape(axis_last, column.shape)
    values = ctx.choose(hits, elements, ctx.constant_array(0, x.type.dtype, "none"))
    index_of_hit = ctx.emit("mul", hits, ctx.reshape(ctx.arange_along(n, 0, 1), (n, 1)))
    inverse_order = tuple(np.argsort(order))
    values, index_of_hit = (
        ctx.emit("transpose", ctx.emit("reduce_sum", v, axis=-2), perm=inverse_order)
        for v in (values, index_of_hit)
    )
    return values, ctx.with_elem(index_of_hit, "int64")
