"""Reductions over any axes: sum, mean, max, min, prod."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.errors import ShapeError
from ascend_lab.ops import formats as forms
from ascend_lab.ops.expressions import NARROW, in_fp32
from ascend_lab.ops.formats import Shape, TypeRule, Values, exact, rounded
from ascend_lab.ops.gradients import Site
from ascend_lab.ops.operator import Domain, Example, Grads, define
from ascend_lab.ops.slicing import Reduction, SliceRules, Source, axis_rules

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
EMPTY = Example(((3, 0),), {"axis": 1})


def reduced_shape(x: Shape, *, axis: Any, keepdims: bool) -> Shape:
    """Return the shape left after folding the axes; folded ones have size 1 with `keepdims`."""
    axes = forms.axes_of("reduce", axis, x)
    return tuple(1 if i in axes else n for i, n in enumerate(x) if keepdims or i not in axes)


def _slices(shapes: tuple[Shape, ...], *, axis: Any, keepdims: bool, combine: Any) -> SliceRules:
    x = shapes[0]
    folded = forms.axes_of("reduce", axis, x)
    kept = [own for own in range(len(x)) if keepdims or own not in folded]
    rules = axis_rules("Reduce", ["size 1" if a in folded else (Source(0, a),) for a in kept])
    ways = tuple(Reduction(((0, a),), combine) for a in folded) if combine else ()
    return replace(rules, reductions=ways)


def _not_empty(x: Shape, *, axis: Any, keepdims: bool) -> Shape:
    """Return the reduced shape of a fold without an identity: it needs an element."""
    if 0 in (x[a] for a in forms.axes_of("reduce", axis, x)):
        raise ShapeError("axes that are not empty", str(x), "there is no value to return")
    return reduced_shape(x, axis=axis, keepdims=keepdims)


def _reduction(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., te.Tensor],
    backward: Callable[[Site], Grads] | None,
    combine: Combine | None,
    *,
    identity: bool = True,
    lift: tuple[str, ...] = NARROW,
    **more: Any,
) -> None:
    """Register a reduction; `combine` joins partial results, `identity` allows empty axes."""

    def values(x: Values, *, axis: Any, keepdims: bool) -> Values:
        return np.asarray(
            formula(x, axis=forms.axes_of("reduce", axis, x.shape), keepdims=keepdims)
        )

    def expression(x: te.Tensor, *, axis: Any, keepdims: bool) -> te.Tensor:
        return compute(x, forms.axes_of("reduce", axis, x.shape), keepdims)

    base: dict[str, Any] = {
        "types": TypeRule(forms.NUMBERS),
        "tolerances": rounded(fp32_ulps=16, atol=2.0**-15),
    }
    define(
        name, ("x",), values, in_fp32(expression, lift),
        summary,
        attrs={"axis": None, "keepdims": False},
        shape_rule=reduced_shape if identity else _not_empty,
        slicing=partial(_slices, combine=combine), backward=backward, traits=("reduction",),
        allows_empty=True,
        examples=(*EXAMPLES, EMPTY) if identity else EXAMPLES,
        **{**base, **more},
    )  # fmt: skip


def _restored(s: Site, value: Any) -> tuple[Any, Shape]:
    """Return a reduced tensor with its folded axes back as size 1, and the input's shape."""
    kept = reduced_shape(s.shape(), axis=s.attrs["axis"], keepdims=True)
    return s.net.shaped(value, kept), s.shape()


def _reduce_mean(s: Site) -> Grads:
    grad, shape = _restored(s, s.g)
    share = forms.elements(grad.shape) / forms.elements(shape)
    return (s.net.stretched(s.net.scaled(grad, share), shape),)


def shared(s: Site, grad: Any, y: Any, axes: tuple[int, ...]) -> Any:
    """Return the gradient shared equally by the elements that are the extreme one."""
    net = s.net
    hits = net.equal(s.x(), y)
    count = net.reduce_sum(hits, axis=axes, keepdims=True)
    return net.mul(hits, net.div(grad, count))


def _reduce_extreme(s: Site) -> Grads:
    axes = forms.axes_of("reduce", s.attrs["axis"], s.shape())
    return (shared(s, _restored(s, s.g)[0], _restored(s, s.y())[0], axes),)


def _mean(x: te.Tensor, axes: tuple[int, ...], keepdims: bool) -> te.Tensor:
    count = math.prod(x.shape[a] for a in axes)
    return te.vmuls(te.reduce_sum(x, axes, keepdims), 1.0 / count)


_distinct = Domain(distinct=True)
_reduction(
    "reduce_sum", "sum over axes", np.sum, te.reduce_sum,
    lambda s: (s.net.stretched(*_restored(s, s.g)),), "sum",
)  # fmt: skip
_reduction(
    "reduce_mean", "mean over axes", np.mean, _mean, _reduce_mean, None,
    types=TypeRule(), identity=False,
)  # fmt: skip
_extreme: dict[str, Any] = {
    "backward": _reduce_extreme, "lift": ("bf16",), "identity": False, "domains": {"x": _distinct},
    "wide": True, "tolerances": exact(),
}  # fmt: skip
_max, _min = "largest element over axes", "smallest element over axes"
_reduction("reduce_max", _max, np.max, te.reduce_max, combine="max", **_extreme)
_reduction("reduce_min", _min, np.min, te.reduce_min, combine="min", **_extreme)
_reduction(
    "reduce_prod", "product over axes", np.prod, te.reduce_prod, None, "prod",
    types=TypeRule(), domains={"x": Domain(0.8, 1.2)},
    tolerances=rounded(fp32_ulps=600),  # n - 1 roundings of half an ulp each
)  # fmt: skip
