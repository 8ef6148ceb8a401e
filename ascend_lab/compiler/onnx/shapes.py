"""Imports ONNX operators on shapes and types: reshapes, transposes, casts, constants.

Results that are computed from known tensors are known, too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ascend_lab.compiler import draft, ir
from ascend_lab.compiler.onnx import model_file, quantised, tensors as kinds
from ascend_lab.compiler.onnx.context import Context, Result, converter
from ascend_lab.compiler.onnx.tensors import Shape, Tensor, Values, check_size
from ascend_lab.errors import GraphError


def reshaped(ctx: Context, tensor: Tensor, shape: Shape) -> Result:
    """Return a tensor in another shape with equally many elements."""
    if math.prod(shape) != tensor.elements:
        raise GraphError(f"{ctx.where}: {tensor.elements} elements", str(shape), "keep the number")
    if shape == tensor.shape:
        return tensor
    if tensor.known is not None:
        return tensor.mapped(shape, lambda array: array.reshape(shape))
    if not tensor.elements:
        return ctx.known_tensor(np.zeros(shape), tensor.elem)
    return ctx.emit("reshape", ctx.value(tensor), shape=shape)


@converter("Identity")
def _identity(ctx: Context) -> Tensor:
    return ctx.tensor(0)


@converter("Dropout", since=6)
def _dropout(ctx: Context) -> Sequence[Result]:
    """Return the input, and a mask of ones: inference drops nothing."""
    # an attribute (before opset 7) or the third input (since opset 12) turns training on
    if ctx.opset < 7 and not ctx.attr("is_test"):
        ctx.unsupported("inference", "is_test = 0")
    if ctx.has(2) and ctx.scalar(2) and not (ctx.has(1) and ctx.scalar(1) == 0):
        ctx.unsupported("inference", "training_mode = true")
    mask = Tensor("bool", ctx.shape(0), known=ir.Fill(1))
    return (ctx.tensor(0), mask) if ctx.opset >= 10 else (ctx.tensor(0),)


@converter("Reshape", since=5)
def _reshape(ctx: Context) -> Result:
    """Return a reshape; size 0 keeps the input's size (unless allowzero), -1 is computed."""
    x = ctx.tensor(0)
    target = ctx.ints(1)
    zero_keeps_size = not ctx.attr("allowzero")
    if any(n == 0 and i >= len(x.shape) for i, n in enumerate(target)) and zero_keeps_size:
        ctx.unsupported(f"0 only for the {len(x.shape)} axes of the input", str(target))
    # (2, 3, 4) to (0, -1): 0 keeps the 2, -1 is 24 / 2 = 12
    sizes = [x.shape[i] if n == 0 and zero_keeps_size else n for i, n in enumerate(target)]
    # exported with a batch of 1, imported with 4: x begins with 4, so (1, 10) becomes (4, 10)
    if ctx.rebatch and sizes and sizes[0] == ctx.rebatch[0] and x.shape[:1] == ctx.rebatch[1:]:
        sizes[0] = ctx.rebatch[1]
    if sizes.count(-1) > 1 or any(n < -1 for n in sizes):
        ctx.unsupported("sizes of at least 0 and one -1", str(target))
    if -1 in sizes:
        known_elements = math.prod(n for n in sizes if n != -1)
        if known_elements == 0 or x.elements % known_elements:
            ctx.unsupported(f"sizes that divide {x.elements} elements", str(target))
        sizes[sizes.index(-1)] = x.elements // known_elements
    return reshaped(ctx, x, tuple(sizes))


@converter("Flatten")
def _flatten(ctx: Context) -> Result:
    x = ctx.tensor(0)
    axis = ctx.attr("axis")
    if not -len(x.shape) <= axis <= len(x.shape):
        ctx.unsupported(f"an axis of {x.shape}", str(axis))
    # (2, 3, 4) at axis 2: (6, 4); at axis 0: (1, 24)
    axis += len(x.shape) if axis < 0 else 0
    return reshaped(ctx, x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@converter("Squeeze")
def _squeeze(ctx: Context) -> Result:
    x = ctx.tensor(0)
    stated_axes = axes_given(ctx)
    # (1, 3, 1) without axes becomes (3,)
    axes = {i for i, n in enumerate(x.shape) if n == 1}
    if stated_axes is not None:
        axes = set(axes_of(ctx, stated_axes, len(x.shape)))
        if any(x.shape[a] != 1 for a in axes):
            ctx.unsupported("axes of size 1", f"{stated_axes} of {x.shape}")
    return reshaped(ctx, x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


@converter("Unsqueeze")
def _unsqueeze(ctx: Context) -> Result:
    x = ctx.tensor(0)
    stated_axes = axes_given(ctx)
    if stated_axes is None:
        ctx.unsupported("axes", "none")
    # the axes are those of the result: (3, 4) with axes 0 and -1 becomes (1, 3, 4, 1)
    rank = len(x.shape) + len(stated_axes)
    axes = set(axes_of(ctx, stated_axes, rank))
    sizes = iter(x.shape)
    return reshaped(ctx, x, tuple(1 if i in axes else next(sizes) for i in range(rank)))


def axes_given(ctx: Context) -> Shape | None:
    """Return the axes, or None: an input since opset 13 (18 for some), an attribute before."""
    return ctx.ints(1) if ctx.has(1) else ctx.attr("axes") or None


def axes_of(ctx: Context, axes_stated: Shape, rank: int) -> Shape:
    """Return axes counted from 0, each once."""
    if any(not -rank <= a < rank for a in axes_stated):
        ctx.unsupported(f"axes from {-rank} to {rank - 1}", str(axes_stated))
    # with 4 axes, -1 is axis 3
    nonnegative_axes = tuple(a % rank for a in axes_stated)
    if len(set(nonnegative_axes)) < len(nonnegative_axes):
        ctx.unsupported("each axis once", str(axes_stated))
    return nonnegative_axes


@converter("Transpose")
def _transpose(ctx: Context) -> Result:
    x = ctx.tensor(0)
    rank = len(ctx.shape(0))
    # without perm the axes are reversed: (2, 3, 4) becomes (4, 3, 2)
    perm = ctx.attr("perm") or tuple(range(rank))[::-1]
    if sorted(perm) != list(range(rank)):
        ctx.unsupported(f"perm: each of {rank} axes once", str(perm))
    if perm == tuple(range(rank)):
        return x
    if x.known is None:
        return ctx.emit("transpose", ctx.value(x), perm=perm)
    return x.mapped(tuple(x.shape[p] for p in perm), lambda array: array.transpose(perm))


@converter("Cast", "CastLike")
def _cast(ctx: Context) -> Result:
    """Cast as the standard says: floats truncate, integers wrap, all numbers but 0 are true."""
    result = ctx.attr("to")
    if ctx.op == "Cast" and result not in kinds.ELEMENT_TYPES:
        ctx.unsupported("a numeric type", f"type {result}")
    x = ctx.tensor(0)
    elem = kinds.ELEMENT_TYPES[result][0] if ctx.op == "Cast" else ctx.elem(1)
    ctx.result = elem
    if elem == x.elem:
        return x
    if x.known is not None:
        return _recast(x, elem)
    if elem not in kinds.FORMATS:
        ctx.unsupported(f"a cast to {', '.join(kinds.FORMATS)}", elem)
    value = ctx.value(x)
    dtype = kinds.FORMATS[elem]
    if x.elem == "bool" or value.name in ctx.net.boolean_names:
        if elem == "bool":
            return value
        result = ctx.cast(value, dtype)
        ctx.net.boolean_names.add(result.name)
        return result
    if elem == "bool":
        return ctx.emit("not_equal", value, ctx.constant_scalar(0, value.type.dtype))
    if x.elem in kinds.FLOATS and elem not in kinds.FLOATS:
        return ctx.emit("cast", value, dtype=dtype, round="trunc")
    if elem in ("int8", "uint8") and x.elem not in (*kinds.FLOATS, "bool"):
        return quantised.wrapped(ctx, value, dtype)
    if x.elem == "int64" and dtype == "int32":  # append a node, so that evaluation checks numbers
        return ctx.emit("cast", value, dtype=dtype)
    return ctx.cast(value, dtype)


def _recast(tensor: Tensor, elem: str) -> Tensor:
    """Return a known tensor in another element type, as C and NumPy cast."""

    def cast_values(source: Tensor = tensor) -> Values:
        array = source.array()
        if elem == "int64" and array.dtype.kind == "f":
            fp64_values = array.astype(np.float64)
            if not np.all(
                (fp64_values >= -(2.0**63)) & (fp64_values < 2.0**63)
            ):  # False for NaN, too
                where = f"{tensor.name or 'a constant'}: numbers that int64 holds"
                raise GraphError(
                    where,
                    "NaN" if np.isnan(fp64_values).any() else f"{fp64_values.max():g}",
                    "rewrite it",
                )
        with np.errstate(all="ignore"):
            return array.astype(kinds.NUMPY[elem])

    if isinstance(tensor.known, ir.Fill):
        value = cast_values(Tensor(tensor.elem, (), known=tensor.known)).item()
        return Tensor(elem, tensor.shape, known=ir.Fill(value))
    return Tensor(elem, tensor.shape, known=cast_values)


# -- known during import: constants, shapes, ranges -----------------------------------------------
@converter("Constant")
def _constant(ctx: Context) -> Tensor:
    attrs = {key: value for key, value in ctx.attrs.items() if value is not None}
    if len(attrs) != 1 or "string" in next(iter(attrs)):
        ctx.unsupported("one value", ", ".join(attrs) or "none")
    ((key, value),) = attrs.items()
    if key == "value":
        return _value_attribute(ctx)
    return ctx.known_tensor(value, "int64" if key.startswith("value_int") else "float32")


def _value_attribute(ctx: Context) -> Tensor:
    """Return the tensor in attribute `value`."""
    proto = ctx.attr("value")
    if not hasattr(proto, "dims"):
        ctx.unsupported("a tensor as value", repr(proto)[:40])
    return model_file.tensor_of(proto, ctx.folder)


@converter("ConstantOfShape")
def _constant_of_shape(ctx: Context) -> Tensor:
    shape: Shape = ctx.ints(0)
    check_size(f"{ctx.where}: shape", shape)
    if ctx.attr("value") is None:
        return Tensor("float32", shape, known=ir.Fill(0.0))
    element = _value_attribute(ctx)
    if element.elements != 1:
        ctx.unsupported("a value of one element", str(element.shape))
    number: Any = element.array().reshape(()).item()
    return Tensor(element.elem, shape, known=ir.Fill(number))


@converter("Shape", "Size")
def _shape(ctx: Context) -> Tensor:
    if ctx.op == "Size":
        return ctx.known_tensor(ctx.tensor(0).elements, "int64")
    return ctx.known_tensor(ctx.shape(0)[ctx.attr("start") : ctx.attr("end")], "int64")


@converter("Range", "NonZero", result="int64")
def _refuse_unknown_size(ctx: Context) -> Tensor:
    """Raise an error: if the operands are not known, the size of the result is not either."""
    for i, tensor in enumerate(ctx.inputs):
        if tensor and tensor.known is None:
            ctx.needs(i)
    if ctx.op == "Range":
        ctx.unsupported("bounds that are scalars", "more")
    ctx.unsupported("an operand of fewer elements", str(ctx.shape(0)))


@converter("EyeLike")
def _eye_like(ctx: Context) -> Tensor:
    shape = ctx.shape(0)
    element_number = ctx.attr("dtype")
    k = ctx.attr("k")
    elem = (
        kinds.ELEMENT_TYPES[element_number][0]
        if element_number in kinds.ELEMENT_TYPES
        else ctx.elem(0)
    )
    if len(shape) != 2 or (element_number and element_number not in kinds.ELEMENT_TYPES):
        ctx.unsupported("a matrix of numbers", f"{shape}, type {element_number}")
    return Tensor(elem, shape, known=lambda: np.eye(*shape, k=k).astype(kinds.NUMPY[elem]))


@converter("Trilu", types=(kinds.GRAPH_TYPES, kinds.ALL_TYPES))
def _trilu(ctx: Context) -> draft.Value | Tensor:
    """Return a matrix with one triangle kept and 0 elsewhere."""
    x = ctx.tensor(0)
    k = int(ctx.scalar(1)) if ctx.has(1) else 0
    if len(x.shape) < 2:
        ctx.unsupported("matrices", str(x.shape))
    rows, columns = x.shape[-2:]
    # the upper triangle of 2 x 3 numbers is empty for k = 3 and for every larger k
    k = min(max(k, -rows), columns)
    triangle = np.triu if ctx.attr("upper") else np.tril
    if x.known is not None:
        return Tensor(x.elem, x.shape, known=lambda: triangle(x.array(), k))
    value = ctx.value(x)
    kind = ir.TensorType((rows, columns), value.type.dtype)
    mask: Callable[[], Values] = lambda: triangle(np.ones(kind.shape, np.float32), k)  # noqa: E731
    mask_value = ctx.net.add_constant(mask, kind, f"{ctx.name}/mask")
    return ctx.emit("select", mask_value, value, ctx.constant_scalar(0, value.type.dtype))


@converter("OneHot", types=((*kinds.INTEGERS, *kinds.FLOATS), kinds.ALL_TYPES, kinds.GRAPH_TYPES))
def _one_hot(ctx: Context) -> draft.Value:
    """Return a one-hot encoding; negative indices count from the end, others outside give zeros.

    Indices are compared in fp32: integers that fp32 rounds are larger than any depth accepted.
    """
    depth = int(ctx.scalar(1))
    values = ctx.const(2).ravel()
    shape = ctx.shape(0)
    rank = len(shape) + 1
    axis = ctx.attr("axis")
    if len(values) != 2 or not 1 <= depth < 2**24 or not -rank <= axis < rank:
        ctx.unsupported("a depth from 1 to 2^24 and two values", f"{depth}, {values}")
    ctx.result = ctx.elem(2)
    position = axis % rank
    off, on = (ctx.constant_scalar(v.item(), kinds.FORMATS[ctx.elem(2)]) for v in values)
    index = ctx.input(0)
    if ctx.elem(0) in kinds.FLOATS:
        index = ctx.emit("cast", index, dtype="int32", round="trunc")
    # indices (2, 3), axis -1, depth 5: (2, 3, 1) is compared with (5,), which gives (2, 3, 5)
    index_column = ctx.emit(
        "reshape", ctx.cast(index, "fp32"), shape=(*shape[:position], 1, *shape[position:])
    )
    classes = np.arange(depth).reshape((-1, *(1,) * (rank - 1 - position)))
    matches = [
        ctx.emit("equal", index_column, ctx.value(ctx.known_tensor(numbers, "float32")))
        # depth 5: index 4 equals one of 0 .. 4, index -1 the same class in -5 .. -1
        for numbers in (classes, classes - depth)
    ]
    return ctx.emit("select", ctx.cast(ctx.emit("max", *matches), on.type.dtype), on, off)
