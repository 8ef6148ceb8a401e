"""Reductions over axes, and normalisations built from them: softmax, layer norm, LRN.

For example, the sum of a tensor (5, 33) over axis 1 has the shape (5,), and the softmax of
(0, ln 3) is (1/4, 3/4).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ascend_lab import errors
from ascend_lab.operators import dsl as te
from ascend_lab.operators.ops import expressions, formats as forms, gradients, slicing
from ascend_lab.operators.ops.formats import (
    EPSILON,
    Shape,
    TypeRule,
    Values,
    axis_of,
    exact,
    rounded,
)
from ascend_lab.operators.ops.operator import REQUIRED, Domain, Example, Grads, define

Combine = Literal["sum", "max", "min", "prod"]
EXAMPLES = (
    Example(((1,),), {"axis": 0}),
    Example(((127,),), {"axis": -1}),
    Example(((5, 33),), {"axis": 1, "keepdims": True}),
    Example(((5, 33),), {"axis": 0}),
    Example(((3, 1, 17),), {"axis": (0, -1)}),
    Example(((2, 31, 16),), {"axis": 1}),
    Example(((4, 129),), {"axis": None}),
)
_EMPTY = Example(((3, 0),), {"axis": 1})


def reduced_shape(x: Shape, *, axis: Any, keepdims: bool) -> Shape:
    """Return the shape after the reduction; reduced axes are dropped, or have size 1."""
    axes = forms.axes_of("reduce", axis, x)
    # (2, 31, 16) over axis 1: (2, 16), with keepdims (2, 1, 16).
    return tuple(1 if i in axes else n for i, n in enumerate(x) if keepdims or i not in axes)


def _fold_slices(
    shapes: tuple[Shape, ...], *, axis: Any, keepdims: bool, combine: Any
) -> slicing.SliceRules:
    x = shapes[0]
    folded = forms.axes_of("reduce", axis, x)
    kept_axes = [dim for dim in range(len(x)) if keepdims or dim not in folded]
    rules = slicing.axis_rules(
        "Reduce", ["size 1" if a in folded else (slicing.Source(0, a),) for a in kept_axes]
    )
    reductions = tuple(slicing.Reduction(((0, a),), combine) for a in folded) if combine else ()
    return replace(rules, reductions=reductions)


def _nonempty_reduced_shape(x: Shape, *, axis: Any, keepdims: bool) -> Shape:
    """Return the reduced shape of a reduction without an identity, such as max.

    It needs at least one element: the maximum of nothing does not exist.
    """
    if 0 in (x[a] for a in forms.axes_of("reduce", axis, x)):
        raise errors.ShapeError("axes that are not empty", str(x), "there is no value to return")
    return reduced_shape(x, axis=axis, keepdims=keepdims)


def _reduction(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., te.Tensor],
    backward: Callable[[gradients.Site], Grads] | None,
    *,
    formats_in_fp32: tuple[str, ...] = expressions.NARROW,
    **more: Any,
) -> None:
    """Register a reduction; by default empty axes are allowed, as the sum over nothing is 0.

    Operands whose format is in `formats_in_fp32` are computed in fp32. `more` are other fields of
    the `Operator`.
    """

    def values(x: Values, *, axis: Any, keepdims: bool) -> Values:
        return np.asarray(
            formula(x, axis=forms.axes_of("reduce", axis, x.shape), keepdims=keepdims)
        )

    def expression(x: te.Tensor, *, axis: Any, keepdims: bool) -> te.Tensor:
        return compute(x, forms.axes_of("reduce", axis, x.shape), keepdims)

    defaults: dict[str, Any] = {
        "types": TypeRule(forms.NUMBERS),
        "tolerances": rounded(fp32_ulps=16, atol=2.0**-15),
        "shape_rule": reduced_shape,
        "examples": (*EXAMPLES, _EMPTY),
    }
    define(
        name,
        ("x",),
        values,
        expressions.in_fp32(expression, formats_in_fp32),
        summary,
        attrs={"axis": None, "keepdims": False},
        backward=backward,
        traits=("reduction",),
        allows_empty=True,
        **{**defaults, **more},
    )


def _with_kept_axes(s: gradients.Site, value: Any) -> tuple[Any, Shape]:
    """Return a reduced tensor in which reduced axes have size 1, and the input's shape."""
    kept_shape = reduced_shape(s.shape(), axis=s.attrs["axis"], keepdims=True)
    return s.net.shaped(value, kept_shape), s.shape()


def _reduce_mean(s: gradients.Site) -> Grads:
    grad, shape = _with_kept_axes(s, s.g)
    # The mean over an axis of 4 hands a quarter of its gradient to each element.
    share = forms.elements(grad.shape) / forms.elements(shape)
    return (s.net.stretched(s.net.scaled(grad, share), shape),)


def extreme_gradient(s: gradients.Site, grad: Any, y: Any, axes: tuple[int, ...]) -> Any:
    """Return the gradient of a maximum or minimum, divided equally among the elements equal to it.

    For x = (1, 3, 3) and gradient 1 of the maximum, the result is (0, 1/2, 1/2).
    """
    net = s.net
    is_extreme = net.equal(s.x(), y)
    count = net.reduce_sum(is_extreme, axis=axes, keepdims=True)
    return net.mul(is_extreme, net.div(grad, count))


def _reduce_extreme(s: gradients.Site) -> Grads:
    axes = forms.axes_of("reduce", s.attrs["axis"], s.shape())
    return (extreme_gradient(s, _with_kept_axes(s, s.g)[0], _with_kept_axes(s, s.y())[0], axes),)


def _mean_over(x: te.Tensor, axes: tuple[int, ...], keepdims: bool) -> te.Tensor:
    # a factor 1 / n is part of the instruction; a division would need a tensor full of n
    count = math.prod(x.shape[a] for a in axes)
    return te.vmuls(te.reduce_sum(x, axes, keepdims), 1.0 / count)


_distinct = Domain(distinct=True)
_NO_EMPTY_AXES: dict[str, Any] = {"shape_rule": _nonempty_reduced_shape, "examples": EXAMPLES}
"""Fields of reductions without a value for empty axes: mean, maximum, minimum."""
_reduction(
    "reduce_sum",
    "sum over axes",
    np.sum,
    te.reduce_sum,
    lambda s: (s.net.stretched(*_with_kept_axes(s, s.g)),),
    slicing=partial(_fold_slices, combine="sum"),
)
_reduction(
    "reduce_mean",
    "mean over axes",
    np.mean,
    _mean_over,
    _reduce_mean,
    slicing=partial(_fold_slices, combine=None),
    types=TypeRule(),
    **_NO_EMPTY_AXES,
)
_extreme: dict[str, Any] = {
    "backward": _reduce_extreme,
    "formats_in_fp32": ("bf16",),
    **_NO_EMPTY_AXES,
    "domains": {"x": _distinct},
    "wide": True,
    "tolerances": exact(),
}
_max = "largest element over axes"
_min = "smallest element over axes"
_reduction(
    "reduce_max",
    _max,
    np.max,
    te.reduce_max,
    slicing=partial(_fold_slices, combine="max"),
    **_extreme,
)
_reduction(
    "reduce_min",
    _min,
    np.min,
    te.reduce_min,
    slicing=partial(_fold_slices, combine="min"),
    **_extreme,
)
_reduction(
    "reduce_prod",
    "product over axes",
    np.prod,
    te.reduce_prod,
    None,
    slicing=partial(_fold_slices, combine="prod"),
    types=TypeRule(),
    domains={"x": Domain(0.8, 1.2)},
    tolerances=rounded(fp32_ulps=600),  # n - 1 roundings of half an ulp each
)


_SOFTMAX_TOLERANCE = rounded(fp32_ulps=64, atol=2.0**-16)
"""An error of one ulp in x - max is |x - max| ulps of exp(x - max), and a sum of n terms adds up
to n/2 ulps. For results near 0 only `atol` is a useful bound."""


def _same_shape(x: Shape, *, axis: int) -> Shape:
    axis_of("axis", axis, x)
    return x


def _axis_slices(shapes: tuple[Shape, ...], *, axis: int) -> slicing.SliceRules:
    reduced_axis = axis_of("axis", axis, shapes[0])
    return slicing.elementwise_rules(
        shapes,
        shapes[0],
        reduced={reduced_axis: "each element needs the maximum and sum of the whole axis"},
    )


# -- softmax --------------------------------------------------------------------------------------
def _shifted(x: te.Tensor, axis: int) -> te.Tensor:
    """Return x - max(x) along an axis, which is at most 0: no exponential of it can overflow."""
    return te.vsub(x, te.broadcast(te.reduce_max(x, axis, keepdims=True), x.shape))


def softmax(x: te.Tensor, *, axis: int) -> te.Tensor:
    """Return e^(x - max) / sum along an axis, in x's format."""
    power = te.vexp(_shifted(x, axis))
    total = te.reduce_sum(power, axis, keepdims=True)
    return te.vdiv(power, te.broadcast(total, x.shape))


def _log_softmax(x: te.Tensor, *, axis: int) -> te.Tensor:
    shifted = _shifted(x, axis)
    # Of (1000, 1001): shifted (-1, 0), ln(e^-1 + 1) = 0.313, so (-1.313, -0.313).
    total = te.vlog(te.reduce_sum(te.vexp(shifted), axis, keepdims=True))
    return te.vsub(shifted, te.broadcast(total, x.shape))


def softmax_values(x: Values, *, axis: int) -> Values:
    """Return softmax along an axis in NumPy."""
    # (1000, 1001) gives (0.269, 0.731); without the maximum e^1000 would be infinite in fp64.
    power = np.exp(x - x.max(axis=axis, keepdims=True))
    result: Values = power / power.sum(axis=axis, keepdims=True)
    return result


def _log_softmax_values(x: Values, *, axis: int) -> Values:
    shifted = x - x.max(axis=axis, keepdims=True)
    result: Values = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
    return result


def softmax_grad(s: gradients.Site, grad: Any, y: Any, axis: int) -> Any:
    """Return y (g - sum(g y)) along an axis."""
    net = s.net
    # y = (0.27, 0.73), g = (1, 0): sum(g y) = 0.27, so (0.27 * 0.73, -0.73 * 0.27) = (0.20, -0.20).
    total = net.reduce_sum(net.mul(grad, y), axis=(axis,), keepdims=True)
    return net.mul(y, net.sub(grad, total))


def _log_softmax_slope(s: gradients.Site) -> Grads:
    """Return g - e^y sum(g)."""
    net = s.net
    axis = axis_of("axis", s.attrs["axis"], s.shape())
    total = net.reduce_sum(s.g, axis=(axis,), keepdims=True)
    return (net.sub(s.g, net.mul(net.exp(s.y()), total)),)


_AXIS_EXAMPLES = (
    Example(((1,),)),
    Example(((127,),)),
    Example(((3, 16),)),
    Example(((5, 33),), {"axis": 0}),
    Example(((2, 3, 17),), {"axis": 1}),
    Example(((31, 129),)),
)
define(
    "softmax",
    ("x",),
    softmax_values,
    expressions.in_fp32(softmax),
    "e^x / sum(e^x) along an axis",
    attrs={"axis": -1},
    shape_rule=_same_shape,
    slicing=_axis_slices,
    backward=lambda s: (softmax_grad(s, s.g, s.y(), axis_of("axis", s.attrs["axis"], s.shape())),),
    wide=True,
    traits=("reduction", "nonnegative", "busy"),
    domains={"x": Domain(-6.0, 6.0)},
    tolerances=_SOFTMAX_TOLERANCE,
    examples=_AXIS_EXAMPLES,
)
define(
    "log_softmax",
    ("x",),
    _log_softmax_values,
    expressions.in_fp32(_log_softmax),
    "x - ln(sum(e^x)) along an axis",
    attrs={"axis": -1},
    shape_rule=_same_shape,
    slicing=_axis_slices,
    backward=_log_softmax_slope,
    wide=True,
    traits=("reduction",),
    domains={"x": Domain(-6.0, 6.0)},
    tolerances=_SOFTMAX_TOLERANCE,
    examples=_AXIS_EXAMPLES,
)


# -- layer norm -----------------------------------------------------------------------------------
def _tail_axes(x: Shape, axis: int) -> tuple[int, ...]:
    return tuple(range(axis_of("axis", axis, x), len(x)))


def _norm_shape(x: Shape, *scales: Shape, axis: int, epsilon: float) -> Shape:
    # x (2, 5, 8) from axis 1 on: scale and bias (5, 8).
    scale_shape = tuple(x[a] for a in _tail_axes(x, axis))
    for scale in scales:
        if scale != scale_shape:
            needed = f"scale and bias of shape {scale_shape}, the axes of x {x} from {axis} on"
            raise errors.ShapeError(needed, str(scale), "reshape them or change axis")
    return x


def _norm_slices(shapes: tuple[Shape, ...], *, axis: int, epsilon: float) -> slicing.SliceRules:
    why = "mean and variance need the whole axis"
    return slicing.elementwise_rules(
        shapes, shapes[0], reduced=dict.fromkeys(_tail_axes(shapes[0], axis), why)
    )


def _rows(x: te.Tensor, axis: int) -> te.Tensor:
    """Return x as (rows, elements of the normalised axes)."""
    # (2, 5, 8) from axis 1 on: 2 rows of 40.
    tail = forms.elements(x.shape[axis_of("axis", axis, x.shape) :])
    return te.reshape(x, (x.elements // tail, tail))


def _row_mean(x: te.Tensor) -> te.Tensor:
    """Return the mean of every row, broadcast back over it."""
    total = te.reduce_sum(x, 1, keepdims=True)
    return te.broadcast(te.vmuls(total, 1.0 / x.shape[1]), x.shape)


def _for_every_row(x: te.Tensor, factor: te.Tensor) -> te.Tensor:
    """Return `factor`, a vector as long as a row of x, repeated for every row."""
    return te.broadcast(te.reshape(factor, (1, x.shape[1])), x.shape)


def _norm(x: te.Tensor, scale: te.Tensor, *bias: te.Tensor, axis: int, epsilon: float) -> te.Tensor:
    """Return the layer norm or, without a bias, the root-mean-square norm, which is not centred.

    All computation, including casts, is done on x reshaped to rows, so that x (16, 256, n) is
    scheduled as the same loop nest as x (4096, n).
    """
    # in_fp32 is applied here and not in `define`, so that the casts see rows as well
    rows = expressions.in_fp32(_norm_of_rows)
    return te.reshape(rows(_rows(x, axis), scale, *bias, epsilon=epsilon), x.shape)


def _norm_of_rows(rows: te.Tensor, scale: te.Tensor, *bias: te.Tensor, epsilon: float) -> te.Tensor:
    # Layer norm of (1, 3): (-1, 1). Root mean square of (3, 4): divided by sqrt(12.5), (0.85,
    # 1.13).
    centred = te.vsub(rows, _row_mean(rows)) if bias else rows
    variance = _row_mean(te.vmul(centred, centred))
    normal = te.vmul(centred, te.vrsqrt(te.vadds(variance, epsilon)))
    y = te.vmul(normal, _for_every_row(rows, scale))
    return te.vadd(y, _for_every_row(rows, bias[0])) if bias else y


def _norm_values(x: Values, scale: Values, *bias: Values, axis: int, epsilon: float) -> Values:
    axes = _tail_axes(x.shape, axis)
    centred = x - x.mean(axis=axes, keepdims=True) if bias else x
    variance = (centred**2).mean(axis=axes, keepdims=True)
    result: Values = centred / np.sqrt(variance + epsilon) * scale
    return result + bias[0] if bias else result


def _norm_slopes(s: gradients.Site) -> Grads:
    """Return dx = r (h - mean(h) - n mean(h n)), dscale = sum(g n) and dbias = sum(g).

    Here r = 1 / sqrt(var + epsilon), h = g scale, and n is the normalised x. Without a bias x was
    not centred: dx has no mean(h), and there is no dbias.
    """
    net = s.net
    is_centred = len(s.inputs) > 2
    axes = _tail_axes(s.shape(), s.attrs["axis"])

    def mean(x: Any) -> Any:
        return net.reduce_mean(x, axis=axes, keepdims=True)

    def sum_over_rows(x: Any) -> Any:
        return net.reduce_sum(x, axis=tuple(range(axes[0])), keepdims=False) if axes[0] else x

    centred = net.sub(s.x(), mean(s.x())) if is_centred else s.x()
    inverse_std = net.rsqrt(net.adds(mean(net.square(centred)), number=s.attrs["epsilon"]))
    grad = s.g
    normal = net.mul(centred, inverse_std)
    dscale = sum_over_rows(net.mul(grad, normal))
    dbias = (sum_over_rows(grad),) if is_centred else ()
    scaled = net.mul(grad, s.x(1))
    projection = mean(net.mul(scaled, normal))
    centred_grad = net.sub(scaled, mean(scaled)) if is_centred else scaled
    return net.mul(inverse_std, net.sub(centred_grad, net.mul(normal, projection))), dscale, *dbias


_SHAPES = (((1, 16), -1), ((3, 31), -1), ((5, 129), 1), ((2, 3, 17), -1), ((2, 5, 8), 1))
define(
    "layer_norm",
    ("x", "scale", "bias"),
    _norm_values,
    _norm,
    "(x - mean) / sqrt(var + epsilon) * scale + bias over the axes from `axis` on",
    attrs={"axis": -1, "epsilon": 1e-5},
    ranges=EPSILON,
    shape_rule=_norm_shape,
    slicing=_norm_slices,
    backward=_norm_slopes,
    wide=True,
    traits=("reduction", "busy"),
    weights=(1, 2),
    tolerances=_SOFTMAX_TOLERANCE,
    examples=tuple(Example((x, x[a:], x[a:]), {"axis": a}) for x, a in _SHAPES),
)
define(
    "rms_norm",
    ("x", "scale"),
    _norm_values,
    _norm,
    "x / sqrt(mean(x^2) + epsilon) * scale over the axes from `axis` on",
    attrs={"axis": -1, "epsilon": 1e-5},
    ranges=EPSILON,
    shape_rule=_norm_shape,
    slicing=_norm_slices,
    backward=_norm_slopes,
    wide=True,
    traits=("reduction",),
    weights=(1,),
    tolerances=_SOFTMAX_TOLERANCE,
    examples=tuple(Example((x, x[a:]), {"axis": a}) for x, a in _SHAPES),
)


# -- local response normalisation ------------------------------------------------------------------
# y = x / (bias + alpha / size * sum of x^2 over `size` neighbouring channels)^beta
# Source: Krizhevsky et al. 2012, ImageNet Classification with Deep Convolutional Neural Networks.
def _neighbours(size: int) -> tuple[int, int]:
    """Return the numbers of neighbouring channels before and after: (2, 2) for size 5."""
    return (size - 1) // 2, size // 2


def _lrn_shape(x: Shape, *, size: Any, **attrs: Any) -> Shape:
    if len(x) < 2 or not forms.is_whole(size) or not 1 <= size <= 2 * x[1] + 1:
        needed = "x (n, c, ...) and a size from 1 to about 2 c"
        raise errors.ShapeError(needed, f"{x}, {size}", "check it")
    return x


def _lrn_base(x: Values, size: int, alpha: float, bias: float) -> Values:
    """Return bias + alpha / size times the sum of x^2 over the neighbour channels."""
    padding = [(0, 0), _neighbours(size), *((0, 0) for _ in x.shape[2:])]
    square = np.pad(x * x, padding)
    # Size 3: channels k - 1, k and k + 1, where those beyond the ends are 0.
    window_sums = np.sum([square[:, i : i + x.shape[1]] for i in range(size)], axis=0)
    base: Values = window_sums * (alpha / size) + bias
    return base


def _lrn_values(x: Values, *, size: int, alpha: float, beta: float, bias: float) -> Values:
    result: Values = x / _lrn_base(x, size, alpha, bias) ** beta
    return result


def _lrn(x: te.Tensor, *, size: int, alpha: float, beta: float, bias: float) -> te.Tensor:
    """Return x e^(-beta ln(total)); a reduction axis r runs over the window of channels."""
    n, c = x.shape[:2]
    inner = int(np.prod(x.shape[2:], dtype=np.int64))
    flat_x = te.reshape(x, (n, c, inner))
    square = te.pad(te.vmul(flat_x, flat_x), ((0, 0), _neighbours(size), (0, 0)))
    r = te.reduce_axis(size, "r")
    window_sums = te.compute((n, c, inner), lambda b, k, i: te.sum(square[b, k + r, i], r))
    total = te.vadds(te.vmuls(window_sums, alpha / size), bias)
    # total^-beta as e^(-beta ln(total)).
    slope = te.vexp(te.vmuls(te.vlog(total), -beta))
    return te.reshape(te.vmul(flat_x, slope), x.shape)


def _lrn_slices(shapes: tuple[Shape, ...], *, size: int, **attrs: Any) -> slicing.SliceRules:
    """Return rules in which all axes are free except the channels, which need neighbours."""
    channels_before, channels_after = _neighbours(size)
    sources: list[Any] = [slicing.every_input(i) for i in range(len(shapes[0]))]
    if size > 1:
        sources[1] = f"{channels_before} channels before and {channels_after} after count"
    return slicing.axis_rules("SlidingWindow", sources)


define(
    "lrn",
    ("x",),
    _lrn_values,
    expressions.in_fp32(_lrn),
    "x / (bias + alpha mean of x^2 over `size` neighbour channels)^beta",
    attrs={"size": REQUIRED, "alpha": 1e-4, "beta": 0.75, "bias": 1.0},
    shape_rule=_lrn_shape,
    slicing=_lrn_slices,
    # exp(-beta ln(total)): the errors of both functions add up
    tolerances=rounded(fp32_ulps=24, atol=2.0**-20),
    examples=(
        Example(((1, 1, 1, 1),), {"size": 1}),
        Example(((1, 16, 4, 4),), {"size": 5}),
        Example(((2, 7, 5, 3),), {"size": 3, "alpha": 0.5, "bias": 2.0}),
        Example(((1, 17, 33, 1),), {"size": 7, "alpha": 1.0, "beta": 0.5}),
    ),
)
