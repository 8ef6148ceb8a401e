"""Imports ONNX operators that sum: matrix products, Einsum, reductions, softmax and norms.

The axes of a reduction are an attribute in older opsets and an input in newer ones.
"""

import math
from collections.abc import Sequence

import numpy as np

from ascend_lab.compiler import draft, ir
from ascend_lab.compiler.onnx import shapes, tensors as kinds
from ascend_lab.compiler.onnx.context import Context, Result, converter


@converter("Gemm", types=(kinds.FLOATS,), since=6)
def _gemm(ctx: Context) -> draft.Value:
    transposes = {"trans_a": bool(ctx.attr("transA")), "trans_b": bool(ctx.attr("transB"))}
    a = ctx.input(0)
    b = ctx.input(1)
    alpha = ctx.attr("alpha")
    if ctx.has(2):
        return ctx.emit(
            "gemm", a, b, ctx.input(2), **transposes, alpha=alpha, beta=ctx.attr("beta")
        )
    product = ctx.emit("matmul", a, b, **transposes)
    return product if alpha == 1 else ctx.emit("muls", product, number=alpha)


@converter("MatMul", types=((*kinds.FLOATS, "int32"),))
def _matmul(ctx: Context) -> draft.Value:
    """Multiply as NumPy does: a vector is a row on the left and a column on the right."""
    a = ctx.input(0)
    b = ctx.input(1)
    if not a.shape or not b.shape:
        ctx.unsupported("operands of at least 1 axis", f"{a.shape} and {b.shape}")
    # (5,) times (5, 7): (1, 5) (5, 7) = (1, 7), and (7,) in the end
    matrix_a = a if len(a.shape) > 1 else ctx.reshape(a, (1, *a.shape))
    matrix_b = b if len(b.shape) > 1 else ctx.reshape(b, (*b.shape, 1))
    is_matrix_product = len(matrix_a.shape) == len(matrix_b.shape) == 2
    product = ctx.emit("matmul" if is_matrix_product else "batch_matmul", matrix_a, matrix_b)
    # remove the axis that was added to a vector
    rows = product.shape[-2:-1] if len(a.shape) > 1 else ()
    columns = product.shape[-1:] if len(b.shape) > 1 else ()
    return ctx.reshape(product, (*product.shape[:-2], *rows, *columns))


# -- Einsum ---------------------------------------------------------------------------------------
# Operands are multiplied from the left, two at a time. A letter that both have is a batch axis if
# it is needed later, otherwise the product sums over it; letters of one are rows or columns.
LabelledTensor = tuple[draft.Value, str]
"""A tensor and a letter for each of its axes."""
_ELLIPSIS_LABELS = "0123456789"
"""Names of the axes that an ellipsis stands for, counted from the last."""


@converter("Einsum", types=(kinds.FLOATS,), since=12)
def _einsum(ctx: Context) -> draft.Value:
    terms, result = _parse_equation(ctx)
    x: LabelledTensor = (ctx.input(0), terms[0])
    # "ij,jk,kl->il": (ij, jk) first, which sums over j and keeps k, as kl needs it
    for i in range(1, len(terms)):
        x = _product_of(ctx, x, (ctx.input(i), terms[i]), set(result).union(*terms[i + 1 :]))
    value, names = _sum_unneeded(ctx, *x, set(result))
    return ctx.transpose(value, [names.index(name) for name in result])


def _parse_equation(ctx: Context) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with ellipses expanded."""
    equation = str(ctx.attr("equation")).replace(" ", "")
    left_side, arrow, result = equation.partition("->")
    terms = left_side.split(",")
    if len(terms) != len(ctx.inputs):
        ctx.unsupported(f"a term for each of {len(ctx.inputs)} inputs", equation)
    full_terms = [_expand_ellipsis(ctx, term, len(ctx.shape(i))) for i, term in enumerate(terms)]
    # Axes of an ellipsis are aligned at the right, as in broadcasting: "...ij" of a tensor with 4
    # axes is "10ij", with digits that count from the right, so that "...j" of a tensor with 2 axes,
    # "0j", shares the axis 0.
    longest = max(sum(c in _ELLIPSIS_LABELS for c in term) for term in full_terms)
    ellipsis_labels = _ELLIPSIS_LABELS[:longest][::-1]
    if arrow:
        result = result.replace("...", ellipsis_labels)
    else:
        # without an arrow the result has the letters that occur once, in alphabetical order:
        # in "ij,jk" j occurs twice, so the result is "ik"
        letters = sorted("".join(full_terms))
        result = ellipsis_labels + "".join(
            c for c in letters if letters.count(c) == 1 and c not in _ELLIPSIS_LABELS
        )
    if any(len(set(term)) < len(term) for term in (*full_terms, result)):
        ctx.unsupported("each letter once in a term", equation)
    if set(result) - set("".join(full_terms)):
        ctx.unsupported("letters of the operands in the result", equation)
    return full_terms, result


def _expand_ellipsis(ctx: Context, term: str, rank: int) -> str:
    # "...ij" of 4 axes: the ellipsis stands for 2
    ellipsis_rank = rank - len(term.replace("...", ""))
    if (ellipsis_rank and "..." not in term) or not 0 <= ellipsis_rank <= len(_ELLIPSIS_LABELS):
        ctx.unsupported(f"a letter for each of {rank} axes", term)
    return term.replace("...", _ELLIPSIS_LABELS[:ellipsis_rank][::-1])


def _sum_unneeded(ctx: Context, x: draft.Value, names: str, needed: set[str]) -> LabelledTensor:
    """Return a tensor summed over the axes that are not in `needed`, and the remaining letters."""
    axes = tuple(i for i, name in enumerate(names) if name not in needed)
    kept_labels = "".join(name for name in names if name in needed)
    return (ctx.emit("reduce_sum", x, axis=axes), kept_labels) if axes else (x, names)


def _product_of(
    ctx: Context, left: LabelledTensor, right: LabelledTensor, needed: set[str]
) -> LabelledTensor:
    """Return the product of two operands, summed over the letters that are not in `needed`."""
    x, left_labels = _sum_unneeded(ctx, *left, needed | set(right[1]))
    y, right_labels = _sum_unneeded(ctx, *right, needed | set(left_labels))
    sizes: dict[str, int] = {}
    for name, size in (
        *zip(left_labels, x.shape, strict=True),
        *zip(right_labels, y.shape, strict=True),
    ):
        if size != 1 and sizes.get(name, 1) not in (1, size):
            ctx.unsupported(f"one size for {name}", f"{sizes[name]} and {size}")
        sizes[name] = max(size, sizes.get(name, 1))
    # "bij,bjk->bik": batch b, inner j, rows i, columns k
    batch = "".join(name for name in left_labels if name in right_labels and name in needed)
    inner = "".join(name for name in left_labels if name in right_labels and name not in needed)
    rows = "".join(name for name in left_labels if name not in right_labels)
    columns = "".join(name for name in right_labels if name not in left_labels)

    def matrices(operand: draft.Value, names: str, *groups: str) -> draft.Value:
        """Return an operand as a batch of matrices, its axes grouped; sizes of 1 broadcast."""
        shape = tuple(sizes[name] for name in names)
        full_operand = operand
        if shape != operand.shape:
            full_operand = ctx.emit("expand", operand, shape=shape)
        ordered = ctx.transpose(full_operand, [names.index(name) for name in "".join(groups)])
        return ctx.reshape(ordered, tuple(math.prod(sizes[n] for n in group) for group in groups))

    sides = (
        matrices(x, left_labels, batch, rows, inner),
        matrices(y, right_labels, batch, inner, columns),
    )
    names = batch + rows + columns
    return ctx.reshape(ctx.emit("batch_matmul", *sides), tuple(sizes[n] for n in names)), names


# -- reductions -----------------------------------------------------------------------------------
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
"""Roughly the largest number of each type, to which an infinite maximum is clipped."""


def _axes(ctx: Context) -> kinds.Shape:
    """Return the axes to reduce: all if none are named, but () with noop_with_empty_axes."""
    rank = len(ctx.shape(0))
    axes = shapes.axes_given(ctx)
    if not axes:
        return () if ctx.attr("noop_with_empty_axes") else tuple(range(rank))
    return shapes.axes_of(ctx, axes, rank)


def _reduce(ctx: Context, op: str, value: draft.Value, *, keep: bool | None = None) -> draft.Value:
    keepdims = bool(ctx.attr("keepdims")) if keep is None else keep
    return ctx.emit(op, value, axis=_axes(ctx), keepdims=keepdims)


@converter("ReduceSum", "ReduceProd", types=(kinds.NUMBERS, kinds.INTEGERS))
@converter("ReduceMean", types=(kinds.FLOATS, kinds.INTEGERS))
@converter("ReduceMax", "ReduceMin", types=(kinds.GRAPH_TYPES, kinds.INTEGERS))
def _reduction(ctx: Context) -> Result:
    """Return a reduction: the input itself without axes, a neutral value without elements."""
    if _reduces_nothing(ctx) and ctx.op in ("ReduceMax", "ReduceMin"):
        return _empty_extreme(ctx, 1 if ctx.op == "ReduceMax" else -1)
    op = f"reduce_{ctx.op.removeprefix('Reduce').lower()}"
    return _reduce(ctx, op, ctx.input(0)) if _axes(ctx) else ctx.tensor(0)


def _reduces_nothing(ctx: Context) -> bool:
    """Tell whether the axes to reduce have no elements."""
    return any(ctx.shape(0)[a] == 0 for a in _axes(ctx))


def _empty_extreme(ctx: Context, sign: int) -> kinds.Tensor:
    """Return the maximum (sign 1) or minimum (-1) of no numbers: the least or largest number."""
    kind = kinds.NUMPY[ctx.elem(0)]
    axes = _axes(ctx)
    keepdims = ctx.attr("keepdims")
    shape = [1 if i in axes else n for i, n in enumerate(ctx.shape(0)) if keepdims or i not in axes]
    if ctx.elem(0) in kinds.FLOATS:
        return ctx.known_tensor(np.full(shape, -sign * np.inf), ctx.elem(0))
    # the maximum of no int8 is -128, the minimum 127: so empty parts do not change that of a whole
    low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return ctx.known_tensor(np.full(shape, low if sign > 0 else high, kind), ctx.elem(0))


@converter(
    "ReduceSumSquare",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    types=(kinds.FLOATS, kinds.INTEGERS),
)
def _composed_reduction(ctx: Context) -> Result:
    """Return a reduction with functions before and after it, such as ReduceLogSumExp."""
    x = ctx.input(0)
    op = ctx.op.removeprefix("Reduce")
    if not _axes(ctx):
        ctx.unsupported("axes to fold", "none")
    if op == "LogSumExp" and _reduces_nothing(ctx):
        return _empty_extreme(ctx, 1)
    if op == "LogSumExp":
        # max + log sum exp(x - max): no exponential overflows; the maximum is clipped, as
        # infinity - infinity would be NaN
        largest: float = _LARGEST[ctx.elem(0)]
        maximum = ctx.emit(
            "clip", _reduce(ctx, "reduce_max", x, keep=True), low=-largest, high=largest
        )
        powers = ctx.emit("exp", ctx.emit("sub", x, maximum))
        log_sum = ctx.emit("log", _reduce(ctx, "reduce_sum", powers))
        return ctx.emit("add", ctx.emit("reshape", maximum, shape=log_sum.shape), log_sum)
    first_op = {"L1": "abs", "SumSquare": "square", "L2": "square"}.get(op)
    total = _reduce(ctx, "reduce_sum", ctx.emit(first_op, x) if first_op else x)
    last_op = {"L2": "sqrt", "LogSum": "log"}.get(op)
    return ctx.emit(last_op, total) if last_op else total


@converter("Softmax", "LogSoftmax", types=(kinds.FLOATS,))
def _softmax(ctx: Context) -> draft.Value:
    """Return a softmax: since opset 13 along one axis, before over all axes from `axis` on."""
    op = "softmax" if ctx.op == "Softmax" else "log_softmax"
    x = ctx.input(0)
    axis = ctx.attr("axis")
    if ctx.opset >= 13:
        return ctx.emit(op, x, axis=axis)
    if not -len(x.shape) <= axis <= len(x.shape):
        ctx.unsupported(f"an axis of {x.shape}", str(axis))
    axis += len(x.shape) if axis < 0 else 0
    if axis == len(x.shape) - 1:
        return ctx.emit(op, x, axis=-1)
    matrix = ctx.emit("reshape", x, shape=(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return ctx.emit("reshape", ctx.emit(op, matrix, axis=-1), shape=x.shape)


@converter("LpNormalization", types=(kinds.FLOATS,))
def _lp_norm(ctx: Context) -> draft.Value:
    """Divide by the norm along an axis; zeros stay zeros."""
    x = ctx.input(0)
    p = ctx.attr("p")
    axis = ctx.axis(ctx.attr("axis"), len(x.shape))
    if p not in (1, 2):
        ctx.unsupported("p of 1 or 2", str(p))
    powers = ctx.emit("abs" if p == 1 else "square", x)
    norm = ctx.emit("reduce_sum", powers, axis=axis, keepdims=True)
    norm = norm if p == 1 else ctx.emit("sqrt", norm)
    return ctx.choose(norm, ctx.emit("div", x, norm), ctx.constant_array(0, x.type.dtype, "zero"))


# -- normalisation --------------------------------------------------------------------------------
@converter("BatchNormalization", types=(kinds.FLOATS,), since=6)
def _batch_norm(ctx: Context) -> Sequence[Result]:
    """Normalise by the given statistics or, in training, by those of the batch.

    In training the running statistics, also results, are averages of both.
    """
    if ctx.attr("spatial") == 0:
        ctx.unsupported("one number per channel", "spatial = 0")
    if ctx.opset < 7 and not ctx.attr("is_test"):
        ctx.unsupported("inference in opset 6", "is_test = 0")
    operands = (ctx.input(0), *(ctx.input(i, "fp32") for i in range(1, 5)))
    settings = {"epsilon": ctx.attr("epsilon")}
    if not ctx.attr("training_mode"):
        return (ctx.emit("batch_norm", *operands, **settings),)
    settings["momentum"] = ctx.attr("momentum")
    elem = ctx.elem(3)
    out, *averages = ctx.emit_all("batch_norm_training", *operands, **settings)
    return out, *(ctx.with_elem(ctx.cast(value, kinds.FORMATS[elem]), elem) for value in averages)


@converter("LRN", types=(kinds.FLOATS,))
def _lrn(ctx: Context) -> draft.Value:
    """Divide by (bias + alpha mean of x^2 over `size` channels)^beta, padded with zeros."""
    x = ctx.input(0)
    size = ctx.attr("size")
    if len(x.shape) < 2 or not 1 <= size <= 2 * x.shape[1] + 1:
        ctx.unsupported("a size from 1 to about twice the channels", f"{size} on {x.shape}")
    return ctx.emit("lrn", x, **ctx.attrs)


@converter("LayerNormalization", types=(kinds.FLOATS,))
def _layer_norm(ctx: Context) -> Sequence[Result]:
    """Normalise the axes from `axis` on; sums are in fp32 or wider."""
    x = ctx.input(0)
    shape = _normalised_shape(ctx)
    epsilon = ctx.attr("epsilon")
    scale = _expanded_parameter(ctx, ctx.input(1), shape)
    bias = (
        _expanded_parameter(ctx, ctx.input(2), shape) if ctx.has(2) else _fill(ctx, x, shape, 0.0)
    )
    out = ctx.emit("layer_norm", x, scale, bias, axis=-len(shape), epsilon=epsilon)
    if ctx.out_count == 1:
        return (out,)
    axes = tuple(range(-len(shape), 0))
    x_fp32 = ctx.input(0, "fp32")
    mean = ctx.emit("reduce_mean", x_fp32, axis=axes, keepdims=True)
    squares = ctx.emit("square", ctx.emit("sub", x_fp32, mean))
    variance = ctx.emit("reduce_mean", squares, axis=axes, keepdims=True)
    inverse_deviation = ctx.emit("rsqrt", ctx.emit("adds", variance, number=epsilon))
    return out, ctx.with_elem(mean, "float32"), ctx.with_elem(inverse_deviation, "float32")


@converter("RMSNormalization", types=(kinds.FLOATS,))
def _rms_norm(ctx: Context) -> draft.Value:
    shape = _normalised_shape(ctx)
    scale = _expanded_parameter(ctx, ctx.input(1), shape)
    return ctx.emit("rms_norm", ctx.input(0), scale, axis=-len(shape), epsilon=ctx.attr("epsilon"))


def _normalised_shape(ctx: Context) -> kinds.Shape:
    shape = ctx.shape(0)
    axis = ctx.attr("axis")
    if not -len(shape) <= axis < len(shape) or ctx.attr("stash_type") != 1:
        ctx.unsupported(f"an axis of {shape}, stash_type 1", f"axis {axis}")
    # (2, 128, 768) from axis -1 on: (768,)
    return shape[axis % len(shape) :]


def _expanded_parameter(ctx: Context, value: draft.Value, shape: kinds.Shape) -> draft.Value:
    """Return a scale broadcast to the normalised axes."""
    # a scale (1, 1, 768) for an axis of 768: its leading axes of 1 are removed
    leading_sizes = value.shape[: max(0, len(value.shape) - len(shape))]
    trailing_shape = value.shape[len(leading_sizes) :]
    if any(n != 1 for n in leading_sizes) or np.broadcast_shapes(trailing_shape, shape) != shape:
        ctx.unsupported(f"a scale that broadcasts to {shape}", str(value.shape))
    trailing = ctx.reshape(value, trailing_shape)
    return trailing if trailing_shape == shape else ctx.emit("expand", trailing, shape=shape)


def _fill(ctx: Context, like: draft.Value, shape: kinds.Shape, number: float) -> draft.Value:
    kind = ir.TensorType(shape, like.type.dtype)
    return ctx.net.add_constant(ir.Fill(number), kind, f"{ctx.name}/fill")


@converter("InstanceNormalization", types=(kinds.FLOATS,), since=6)
@converter("GroupNormalization", types=(kinds.FLOATS,))
def _group_norm(ctx: Context) -> draft.Value:
    """Return a group norm; scale and bias are one number per channel, before opset 21 per group."""
    x = ctx.input(0)
    shape = ctx.shape(0)
    is_instance_norm = ctx.op == "InstanceNormalization"
    if len(shape) < 3:
        ctx.unsupported("an image (n, c, ...)", str(shape))
    n, c, *spatial = shape
    groups = c if is_instance_norm else ctx.attr("num_groups")
    if groups < 1 or c % groups:
        ctx.unsupported(f"groups that divide {c} channels", str(groups))
    # (2, 32, 14, 14) in 8 groups: rows (2, 8, 784) of 4 channels, each normalised alone
    rows = ctx.emit("reshape", x, shape=(n, groups, math.prod(shape[1:]) // groups))
    ones, zeros = (_fill(ctx, x, rows.shape[-1:], number) for number in (1.0, 0.0))
    normalised = ctx.emit("layer_norm", rows, ones, zeros, epsilon=ctx.attr("epsilon"))
    has_group_parameters = not is_instance_norm and ctx.opset < 21
    group_shape = (n, groups, c // groups, *spatial) if has_group_parameters else shape
    grouped = ctx.reshape(ctx.emit("reshape", normalised, shape=shape), group_shape)
    column = (group_shape[1], *(1,) * (len(group_shape) - 2))
    scale, bias = (ctx.emit("reshape", ctx.input(i), shape=column) for i in (1, 2))
    return ctx.reshape(ctx.emit("add", ctx.emit("mul", grouped, scale), bias), shape)


@converter("MeanVarianceNormalization", types=(kinds.FLOATS,))
def _mean_variance_norm(ctx: Context) -> draft.Value:
    """Return (x - m) / (s + 1e-9), m the mean over `axes` and s the standard deviation.

    The standard writes s^2 = E[x^2] - m^2, which loses digits if m is much larger than s, in fp16
    all of them; the mean of (x - m)^2 equals it and does not.
    """
    x = ctx.input(0)
    rank = len(ctx.shape(0))
    axes = tuple(ctx.axis(axis, rank) for axis in ctx.attr("axes"))
    mean = ctx.emit("reduce_mean", x, axis=axes, keepdims=True)
    centred = ctx.emit("sub", x, mean)
    variance = ctx.emit("reduce_mean", ctx.emit("square", centred), axis=axes, keepdims=True)
    deviation = ctx.emit("adds", ctx.emit("sqrt", variance), number=1e-9)
    return ctx.emit("div", centred, deviation)
