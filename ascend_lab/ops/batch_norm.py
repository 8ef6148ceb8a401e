"""Batch normalisation over channels (axis 1): with given statistics, or with those of the batch.

The activations may be narrow; statistics, scale and bias are fp32, as the hardware's operators
keep them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.errors import ShapeError
from ascend_lab.ops.attributes import EPSILON
from ascend_lab.ops.formats import TypeRule, rounded
from ascend_lab.ops.lifting import along, narrow, wide
from ascend_lab.ops.operator import Domain, Example, Operator
from ascend_lab.ops.registry import register
from ascend_lab.ops.shapes import Shape
from ascend_lab.ops.slicing import AxisRule, SliceRules, Source

Values = NDArray[Any]
PARAMETERS = ("scale", "bias", "mean", "variance")
FIXED = tuple((name, "fp32") for name in PARAMETERS)
_LOOSE = rounded(fp32_ulps=64, atol=2.0**-16)
_SHAPES = ((1, 1), (2, 16, 3, 5), (3, 7, 1, 1), (5, 33), (2, 17, 4, 4))
EXAMPLES = tuple(Example((x, *((x[1],),) * 4)) for x in _SHAPES)


def _check(x: Shape, *parameters: Shape) -> None:
    if len(x) < 2:
        raise ShapeError("x with a channel axis 1", str(x), "add a batch axis")
    for name, shape in zip(PARAMETERS, parameters, strict=True):
        if shape != (x[1],):
            raise ShapeError(f"{name} of shape ({x[1]},) for x {x}", str(shape), "one per channel")


def _column(values: Values, rank: int) -> Values:
    """Return per-channel values shaped to broadcast over (n, c, ...)."""
    return values.reshape((1, -1, *(1,) * (rank - 2)))


def _others(x: Shape) -> tuple[int, ...]:
    """Return every axis but the channels."""
    return (0, *range(2, len(x)))


def _scaled(
    x: te.Tensor, scale: te.Tensor, bias: te.Tensor, mean: te.Tensor, rate: te.Tensor
) -> te.Tensor:
    """Return (x - mean) * rate * scale + bias as x * a + b with a, b per channel."""
    slope = te.vmul(scale, rate)
    offset = te.vsub(bias, te.vmul(mean, slope))
    return te.vadd(te.vmul(x, along(slope, 1, x.shape)), along(offset, 1, x.shape))


# -- inference ------------------------------------------------------------------------------------
def _inference_shape(*shapes: Shape, epsilon: float) -> Shape:
    _check(*shapes)
    return shapes[0]


def _inference(
    x: te.Tensor,
    scale: te.Tensor,
    bias: te.Tensor,
    mean: te.Tensor,
    variance: te.Tensor,
    *,
    epsilon: float,
) -> te.Tensor:
    rate = te.vrsqrt(te.vadds(variance, epsilon))
    return narrow(_scaled(wide(x), scale, bias, mean, rate), x.dtype)


def _inference_values(
    x: Values, scale: Values, bias: Values, mean: Values, variance: Values, *, epsilon: float
) -> Values:
    a, b, m, v = (_column(p, x.ndim) for p in (scale, bias, mean, variance))
    result: Values = (x - m) / np.sqrt(v + epsilon) * a + b
    return result


def _inference_backward(
    grads: Any, inputs: Any, outputs: Any, *, epsilon: float
) -> tuple[Values, ...]:
    x, scale, _, mean, variance = inputs
    rate = _column(1 / np.sqrt(variance + epsilon), x.ndim)
    normal, slope = (x - _column(mean, x.ndim)) * rate, _column(scale, x.ndim) * rate
    axes = _others(x.shape)
    dscale, dbias = (grads[0] * normal).sum(axis=axes), grads[0].sum(axis=axes)
    dmean = (-grads[0] * slope).sum(axis=axes)
    dvariance = (-0.5 * grads[0] * normal * slope * rate).sum(axis=axes)
    return grads[0] * slope, dscale, dbias, dmean, dvariance


def _channel_sources(rank: int) -> tuple[Source, ...]:
    return (Source(0, 1), *(Source(i, 0) for i in range(1, 5)))


def _inference_slices(shapes: tuple[Shape, ...], *, epsilon: float) -> SliceRules:
    axes = tuple(
        AxisRule(i, "free", _channel_sources(len(shapes[0])) if i == 1 else (Source(0, i),), (i,))
        for i in range(len(shapes[0]))
    )
    return SliceRules("ElemwiseBroadcast", axes)


# -- training -------------------------------------------------------------------------------------
def _training_shape(*shapes: Shape, epsilon: float, momentum: float) -> tuple[Shape, ...]:
    _check(*shapes)
    return shapes[0], shapes[3], shapes[4]


def _training(
    x: te.Tensor,
    scale: te.Tensor,
    bias: te.Tensor,
    mean: te.Tensor,
    variance: te.Tensor,
    *,
    epsilon: float,
    momentum: float,
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    values, axes = wide(x), _others(x.shape)
    count = math.prod(x.shape[a] for a in axes)
    now = te.vmuls(te.reduce_sum(values, axes), 1.0 / count)
    centred = te.vsub(values, along(now, 1, x.shape))
    spread = te.vmuls(te.reduce_sum(te.vmul(centred, centred), axes), 1.0 / count)
    slope = te.vmul(scale, te.vrsqrt(te.vadds(spread, epsilon)))
    y = te.vadd(te.vmul(centred, along(slope, 1, x.shape)), along(bias, 1, x.shape))

    def averaged(old: te.Tensor, new: te.Tensor) -> te.Tensor:
        return te.vadd(te.vmuls(old, momentum), te.vmuls(new, 1.0 - momentum))

    return narrow(y, x.dtype), averaged(mean, now), averaged(variance, spread)


def _training_values(
    x: Values,
    scale: Values,
    bias: Values,
    mean: Values,
    variance: Values,
    *,
    epsilon: float,
    momentum: float,
) -> tuple[Values, Values, Values]:
    axes = _others(x.shape)
    now, spread = x.mean(axis=axes), x.var(axis=axes)
    y = _inference_values(x, scale, bias, now, spread, epsilon=epsilon)
    return (
        y,
        momentum * mean + (1 - momentum) * now,
        momentum * variance + (1 - momentum) * spread,
    )


def _training_backward(
    grads: Any, inputs: Any, outputs: Any, *, epsilon: float, momentum: float
) -> tuple[Values | None, ...]:
    """Return gradients through y and through both running averages.

    dx = a r (g - mean(g) - n mean(g n)), n normalised, r = 1 / sqrt(var + epsilon), a = scale.
    """
    x, scale = inputs[:2]
    axes, rank = _others(x.shape), x.ndim
    count = x.size // x.shape[1]
    centred = x - x.mean(axis=axes, keepdims=True)
    rate = 1 / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + epsilon)
    normal = centred * rate
    dbias, dscale = grads[0].sum(axis=axes), (grads[0] * normal).sum(axis=axes)
    shared = (_column(dbias, rank) + normal * _column(dscale, rank)) / count
    dx = _column(scale, rank) * rate * (grads[0] - shared)
    share = (1 - momentum) / count
    dx = dx + share * (_column(grads[1], rank) + 2 * centred * _column(grads[2], rank))
    return dx, dscale, dbias, momentum * grads[1], momentum * grads[2]


def _training_slices(shapes: tuple[Shape, ...], *, epsilon: float, momentum: float) -> SliceRules:
    rules = []
    for axis in range(len(shapes[0])):
        if axis == 1:
            rules.append(AxisRule(1, "free", _channel_sources(len(shapes[0])), (1, 0, 0)))
        else:
            why = "batch statistics need every image and pixel"
            rules.append(AxisRule(axis, "reduce", reason=why, joins=(axis, 0, 0)))
    return SliceRules("Reduce", tuple(rules))


# -- registration ---------------------------------------------------------------------------------
_POSITIVE = {"variance": Domain(0.5, 2.0)}

register(
    Operator(
        "batch_norm",
        ("x", *PARAMETERS),
        _inference_values,
        _inference,
        "(x - mean) / sqrt(variance + epsilon) * scale + bias per channel, statistics given",
        attrs={"epsilon": 1e-5},
        ranges=EPSILON,
        shape_rule=_inference_shape,
        types=TypeRule(fixed=FIXED),
        slicing=_inference_slices,
        backward=_inference_backward,
        layouts={"x": "NC1HWC0", "y": "NC1HWC0"},
        domains=_POSITIVE,
        examples=EXAMPLES,
        tolerances=_LOOSE,
    )
)
register(
    Operator(
        "batch_norm_training",
        ("x", *PARAMETERS),
        _training_values,
        _training,
        "batch norm with the batch's own mean and (biased) variance; returns new running averages "
        "momentum * old + (1 - momentum) * batch",
        outputs=("y", "running_mean", "running_variance"),
        attrs={"epsilon": 1e-5, "momentum": 0.9},
        ranges=EPSILON,
        shape_rule=_training_shape,
        types=TypeRule(fixed=FIXED, result=lambda main, attrs: (main, "fp32", "fp32")),
        slicing=_training_slices,
        backward=_training_backward,
        layouts={"x": "NC1HWC0", "y": "NC1HWC0"},
        domains=_POSITIVE,
        # one value per channel has variance 0, and y hangs on rounding alone
        examples=EXAMPLES[1:],
        tolerances=_LOOSE,
    )
)
