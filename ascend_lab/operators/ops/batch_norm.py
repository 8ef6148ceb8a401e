"""Batch normalisation over channels (axis 1), with given statistics or with those of the batch.

Activations may be in a narrow format. Statistics, scale and bias are fp32, as in the vendor's
operators.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.operators import dsl as te
from ascend_lab.operators.ops.expressions import along, narrow, wide
from ascend_lab.operators.ops.formats import (
    EPSILON,
    Shape,
    TypeRule,
    Values,
    check_rank,
    elements,
    rounded,
)
from ascend_lab.operators.ops.gradients import Site
from ascend_lab.operators.ops.operator import Domain, Example, Grads, define
from ascend_lab.operators.ops.slicing import AxisRule, SliceRules, Source, axis_rules, every_input

PARAMETERS = ("scale", "bias", "mean", "variance")
FIXED = tuple((name, "fp32") for name in PARAMETERS)
_NORM_TOLERANCE = rounded(fp32_ulps=64, atol=2.0**-16)
_SHAPES = ((1, 1), (2, 16, 3, 5), (3, 7, 1, 1), (5, 33), (2, 17, 4, 4))
EXAMPLES = tuple(Example((x, *((x[1],),) * 4)) for x in _SHAPES)


def _checked_shapes(x: Shape, *parameters: Shape) -> tuple[Shape, ...]:
    if len(x) < 2:
        raise errors.ShapeError("x with a channel axis 1", str(x), "add a batch axis")
    for name, shape in zip(PARAMETERS, parameters, strict=True):
        if shape != (x[1],):
            needed = f"{name} of shape ({x[1]},) for x {x}"
            raise errors.ShapeError(needed, str(shape), "one per channel")
    return x, *parameters


def _column(values: Values, rank: int) -> Values:
    """Return per-channel values shaped to broadcast over (n, c, ...)."""
    return values.reshape((1, -1, *(1,) * (rank - 2)))


def _all_but_channels(x: Shape) -> tuple[int, ...]:
    """Return all axes except the channels."""
    return (0, *range(2, len(x)))


def _scaled(
    x: te.Tensor, scale: te.Tensor, bias: te.Tensor, mean: te.Tensor, inverse_std: te.Tensor
) -> te.Tensor:
    """Return (x - mean) * inverse_std * scale + bias as x * a + b, with a and b per channel.

    a = scale * inverse_std and b = bias - mean * a are small tensors, so that only two instructions
    work on x.
    """
    slope = te.vmul(scale, inverse_std)
    offset = te.vsub(bias, te.vmul(mean, slope))
    return te.vadd(te.vmul(x, along(slope, 1, x.shape)), along(offset, 1, x.shape))


# -- inference ------------------------------------------------------------------------------------
def _inference(x: te.Tensor, *parameters: te.Tensor, epsilon: float) -> te.Tensor:
    scale, bias, mean, variance = parameters
    inverse_std = te.vrsqrt(te.vadds(variance, epsilon))
    return narrow(_scaled(wide(x), scale, bias, mean, inverse_std), x.dtype)


def _inference_values(x: Values, *parameters: Values, epsilon: float) -> Values:
    a, b, m, v = (_column(p, x.ndim) for p in parameters)
    result: Values = (x - m) / np.sqrt(v + epsilon) * a + b
    return result


_CHANNELS = (Source(0, 1), *(Source(i, 0) for i in range(1, 5)))


def _inference_slices(shapes: tuple[Shape, ...], *, epsilon: float) -> SliceRules:
    pixel_axes = map(every_input, range(2, len(shapes[0])))
    # Images: x only. Channels: axis 1 of x with axis 0 of the four parameters. Pixels: x only.
    return axis_rules("ElemwiseBroadcast", [every_input(0), _CHANNELS, *pixel_axes])


# -- training -------------------------------------------------------------------------------------
def _moments(x: te.Tensor) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Return the mean of each channel, x minus this mean, and the biased variance."""
    axes = _all_but_channels(x.shape)
    # 1 / (n h w): (2, 16, 3, 5) has 480 elements, so 16 / 480 = 1 / 30.
    inverse_count = x.shape[1] / elements(x.shape)
    mean = te.vmuls(te.reduce_sum(x, axes), inverse_count)
    centred = te.vsub(x, along(mean, 1, x.shape))
    return mean, centred, te.vmuls(te.reduce_sum(te.vmul(centred, centred), axes), inverse_count)


def _training(
    x: te.Tensor, *parameters: te.Tensor, epsilon: float, momentum: float
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    scale, bias, mean, variance = parameters
    batch_mean, centred, batch_variance = _moments(wide(x))
    slope = te.vmul(scale, te.vrsqrt(te.vadds(batch_variance, epsilon)))
    y = te.vadd(te.vmul(centred, along(slope, 1, x.shape)), along(bias, 1, x.shape))

    def averaged(running: te.Tensor, batch: te.Tensor) -> te.Tensor:
        return te.vadd(te.vmuls(running, momentum), te.vmuls(batch, 1.0 - momentum))

    return narrow(y, x.dtype), averaged(mean, batch_mean), averaged(variance, batch_variance)


def _training_values(
    x: Values, *parameters: Values, epsilon: float, momentum: float
) -> tuple[Values, ...]:
    axes = _all_but_channels(x.shape)
    statistics = x.mean(axis=axes), x.var(axis=axes)
    y = _inference_values(x, *parameters[:2], *statistics, epsilon=epsilon)
    pairs = zip(parameters[2:], statistics, strict=True)
    return (y, *(momentum * running + (1 - momentum) * batch for running, batch in pairs))


def _training_slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    rank = len(shapes[0])
    reason = "batch statistics need every image and pixel"
    rules = [AxisRule(axis, "reduce", reason=reason, joins=(axis, 0, 0)) for axis in range(rank)]
    rules[1] = AxisRule(1, "free", _CHANNELS, (1, 0, 0))
    return SliceRules("Reduce", tuple(rules))


# -- gradients ------------------------------------------------------------------------------------
def _as_column(s: Site, channels: Any) -> Any:
    """Return one number per channel, shaped to broadcast over (n, c, ...)."""
    return s.net.shaped(channels, (1, s.shape()[1], *(1,) * (len(s.shape()) - 2)))


def _norm_gradients(s: Site, mean: Any, variance: Any) -> tuple[Any, Any, Any]:
    """Return dscale, dbias and r = 1 / sqrt(variance + epsilon), each shaped (1, c, 1, 1).

    dscale = sum(g (x - mean)) r and dbias = sum(g).
    """
    net = s.net
    unwidened = replace(s, wide=False)
    epsilon = s.attrs["epsilon"]
    # for images one kernel computes both sums; it comes first, because it also converts mean and
    # variance to the layout in which the rest reads them
    if len(s.shape()) == 4:
        operands = unwidened.g, unwidened.x(), mean, variance
        dscale, dbias = net.bn_training_update_grad(*operands, epsilon=epsilon)
        return dscale, dbias, net.rsqrt(net.adds(variance, number=epsilon))
    inverse_std = net.rsqrt(net.adds(variance, number=epsilon))
    moment = net.channel_sums(net.mul(s.g, net.sub(s.x(), mean)))
    return net.mul(moment, inverse_std), net.channel_sums(s.g), inverse_std


def _batch_statistic(s: Site, place: int) -> Any:
    """Return a statistic of the batch, recovered from the running average that the operator wrote.

    average = momentum * old + (1 - momentum) * batch, so batch = (average - momentum * old) /
    (1 - momentum). With momentum 0 the average is the batch's statistic.
    """
    net = s.net
    average = s.y(place)
    momentum = s.attrs["momentum"]
    if momentum:
        average = net.sub(average, net.scaled(s.x(place + 2), momentum))
        # Momentum 0.9, old 2, average 2.1: (2.1 - 1.8) / 0.1 = 3, the batch's own.
        average = net.scaled(average, 1.0 / (1.0 - momentum))
    return _as_column(s, average)


def _training_gradients(s: Site) -> Grads:
    """Return dx = a r (g - mean(g) - n mean(g n)), dscale = sum(g n) and dbias = sum(g).

    Here a = scale, r = 1 / sqrt(variance + epsilon), and n is the normalised x. Numbers per channel
    keep the shape (1, c, 1, 1), so that they have the same layout as the image.
    """
    net = s.net
    shape = s.shape()
    inverse_count = shape[1] / elements(shape)
    grad = s.g
    mean = _batch_statistic(s, 1)
    dscale, dbias, inverse_std = _norm_gradients(s, mean, _batch_statistic(s, 2))
    # dx = (g - x b - c) a, one number per channel each: no other tensor of the image's size
    b = net.mul(net.muls(dscale, number=inverse_count), inverse_std)
    c = net.sub(net.muls(dbias, number=inverse_count), net.mul(mean, b))
    centred = net.sub(net.sub(grad, net.mul(s.x(), b)), c)
    dx = net.mul(centred, net.mul(_as_column(s, s.x(1)), inverse_std))
    return dx, net.shaped(dscale, (shape[1],)), net.shaped(dbias, (shape[1],)), None, None


def _inference_gradients(s: Site) -> Grads:
    """Return the gradients with given statistics: dx, dscale, dbias, dmean, dvariance.

    dx = g a r, dmean = -dbias a r, and dvariance = -dscale a r^2 / 2, with a = scale and
    r = 1 / sqrt(variance + epsilon). dmean and dvariance are None if nobody uses them.
    """
    net = s.net
    channels = (s.shape()[1],)
    dscale, dbias, inverse_std = _norm_gradients(s, _as_column(s, s.x(3)), _as_column(s, s.x(4)))
    slope = net.mul(_as_column(s, s.x(1)), inverse_std)
    dx = net.mul(s.g, slope)
    dmean = None
    dvariance = None
    if s.needs_gradient[3]:
        dmean = net.shaped(net.muls(net.mul(dbias, slope), number=-1.0), channels)
    if s.needs_gradient[4]:
        moment = net.mul(net.mul(dscale, slope), inverse_std)
        dvariance = net.shaped(net.muls(moment, number=-0.5), channels)
    return dx, net.shaped(dscale, channels), net.shaped(dbias, channels), dmean, dvariance


# -- registration ---------------------------------------------------------------------------------
_POSITIVE = {"variance": Domain(0.5, 2.0)}

define(
    "batch_norm",
    ("x", *PARAMETERS),
    _inference_values,
    _inference,
    "(x - mean) / sqrt(variance + epsilon) * scale + bias per channel, statistics given",
    attrs={"epsilon": 1e-5},
    ranges=EPSILON,
    shape_rule=lambda *shapes, epsilon: _checked_shapes(*shapes)[0],
    types=TypeRule(fixed=FIXED),
    slicing=_inference_slices,
    backward=_inference_gradients,
    wide=True,
    weights=(1, 2),
    domains=_POSITIVE,
    tolerances=_NORM_TOLERANCE,
    examples=EXAMPLES,
)
define(
    "batch_norm_training",
    ("x", *PARAMETERS),
    _training_values,
    _training,
    "batch norm with the batch's own mean and (biased) variance; returns new running averages "
    "momentum * old + (1 - momentum) * batch",
    outputs=("y", "running_mean", "running_variance"),
    attrs={"epsilon": 1e-5, "momentum": 0.9},
    ranges=EPSILON,
    shape_rule=lambda *shapes, **attrs: tuple(_checked_shapes(*shapes)[i] for i in (0, 3, 4)),
    types=TypeRule(fixed=FIXED, result=lambda main, attrs: (main, "fp32", "fp32")),
    slicing=_training_slices,
    backward=_training_gradients,
    wide=True,
    weights=(1, 2),
    domains=_POSITIVE,
    tolerances=_NORM_TOLERANCE,
    # one value per channel has variance 0, and y depends on rounding alone
    examples=EXAMPLES[1:],
)


# -- the sums that batch norm needs in training ----------------------------------------------------
# With m = n h w elements in a channel, r = 1 / sqrt(variance + epsilon), sums over n, h and w:
#     bn_training_reduce(x):                              mean = sum(x) / m, variance (biased)
#     bn_training_update_grad(grad, x, mean, variance):   dscale = sum(grad (x - mean)) r,
#                                                         dbias = sum(grad)
# Images are (n, c, h, w). Numbers per channel are fp32 tensors of shape (1, c, 1, 1), so that they
# can have the layout of the image. Source: CANN operator list, BNTrainingReduce and
# BNTrainingUpdateGrad.
SUMMED_AXES = (0, 2, 3)


def _channels(x: Shape) -> Shape:
    return (1, x[1], 1, 1)


def _reduce_shape(x: Shape) -> tuple[Shape, ...]:
    check_rank("x (n, c, h, w)", x, 4)
    return (_channels(x),) * 2


def _reduce(x: te.Tensor) -> tuple[te.Tensor, te.Tensor]:
    mean, _, variance = _moments(wide(x))
    return te.reshape(mean, _channels(x.shape)), te.reshape(variance, _channels(x.shape))


def _grad_shape(
    grad: Shape, x: Shape, mean: Shape, variance: Shape, *, epsilon: float
) -> tuple[Shape, ...]:
    check_rank("x (n, c, h, w)", x, 4)
    needed_shapes = (x, _channels(x), _channels(x))
    if (grad, mean, variance) != needed_shapes:
        got = f"grad {grad}, mean {mean}, variance {variance}"
        raise errors.ShapeError(f"grad {x}, mean and variance {_channels(x)}", got, "reshape them")
    return (_channels(x),) * 2


def _update_grad(
    grad: te.Tensor, x: te.Tensor, mean: te.Tensor, variance: te.Tensor, *, epsilon: float
) -> tuple[te.Tensor, te.Tensor]:
    wide_grad = wide(grad)
    column_shape = _channels(x.shape)
    centred = te.vsub(wide(x), te.broadcast(mean, x.shape))
    moment = te.reshape(te.reduce_sum(te.vmul(wide_grad, centred), SUMMED_AXES), column_shape)
    inverse_std = te.vrsqrt(te.vadds(variance, epsilon))
    dbias = te.reshape(te.reduce_sum(wide_grad, SUMMED_AXES), column_shape)
    return te.vmul(moment, inverse_std), dbias


def _grad_values(
    grad: Values, x: Values, mean: Values, variance: Values, *, epsilon: float
) -> tuple[Values, Values]:
    moment = (grad * (x - mean)).sum(axis=SUMMED_AXES, keepdims=True)
    return moment / np.sqrt(variance + epsilon), grad.sum(axis=SUMMED_AXES, keepdims=True)


def _slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    reason = "sums over every image and pixel"
    sources: list[Any] = [reason, every_input(1, len(shapes)), reason, reason]
    return axis_rules("Reduce", sources, kind="reduce", outputs=2)


_IMAGES = ((1, 1, 1, 2), (2, 16, 3, 5), (2, 17, 4, 4), (3, 40, 7, 7))
_STATISTICS = (("mean", "fp32"), ("variance", "fp32"))
define(
    "bn_training_reduce",
    ("x",),
    lambda x: (x.mean(axis=SUMMED_AXES, keepdims=True), x.var(axis=SUMMED_AXES, keepdims=True)),
    _reduce,
    "mean and biased variance of each channel over images and pixels",
    outputs=("mean", "variance"),
    shape_rule=_reduce_shape,
    types=TypeRule(result=lambda main, attrs: ("fp32", "fp32")),
    slicing=_slices,
    traits=("channel sums",),
    tolerances=rounded(fp32_ulps=64, atol=2.0**-16),
    examples=tuple(Example((x,)) for x in _IMAGES),
)
define(
    "bn_training_update_grad",
    ("grad", "x", "mean", "variance"),
    _grad_values,
    _update_grad,
    "gradients of a batch norm's scale and bias: sum(grad normalised x), sum(grad)",
    outputs=("dscale", "dbias"),
    attrs={"epsilon": 1e-5},
    ranges=EPSILON,
    shape_rule=_grad_shape,
    types=TypeRule(fixed=_STATISTICS, result=lambda main, attrs: ("fp32", "fp32")),
    slicing=_slices,
    traits=("channel sums",),
    domains={"variance": Domain(0.5, 2.0)},
    tolerances=rounded(fp32_ulps=64, atol=2.0**-12),
    examples=tuple(Example((x, x, *((1, x[1], 1, 1),) * 2)) for x in _IMAGES),
)
