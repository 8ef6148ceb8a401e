"""Operators for training only: gradients of pooling, a loss, and the updates of optimisers.

`max_pool2d_grad(x, y, grad; kernel, stride, pad)`: x (n, c, h, w) and y (n, c, oh, ow) are input
and output of max_pool2d, and grad is d(loss)/dy. The gradient of a window goes to its first largest
element in reading order; gradients of overlapping windows add up. The result has x's shape.

`avg_pool2d_grad(grad; kernel, stride, pad, count_include_pad, size)`: the gradient of a window is
divided by its number of elements and goes to all of them. `size` is (h, w) of the image. A stride
of None stands for that of the kernel, as in pooling. global_avg_pool needs no operator of its own:
its gradient is muls(expand(grad, x's shape), 1 / (h w)).
"""

import math
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np

from ascend_lab.errors import CapacityError, InputError, ShapeError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import dsl as te
from ascend_lab.operators.kernels.pool_gradient import PoolGradient, pool_gradient_launch
from ascend_lab.operators.kernels.rows import LEAST
from ascend_lab.operators.ops import conv_gradient, expressions, formats as forms, gradients
from ascend_lab.operators.ops.expressions import (
    Pair,
    add_windows,
    cropped,
    in_fp32,
    narrow,
    padded,
    wide,
)
from ascend_lab.operators.ops.formats import EPSILON, Pairs, Shape, TypeRule, Values, rounded
from ascend_lab.operators.ops.operator import (
    REQUIRED,
    Call,
    Domain,
    Example,
    Grads,
    Template,
    define,
    get,
)
from ascend_lab.operators.ops.pooling import as_convolution, geometry, window_counts
from ascend_lab.operators.ops.slicing import SliceRules, axis_rules, every_input

# -- gradients of pooling --------------------------------------------------------------------------
LANES = 16
"""Channels of a block in fp16."""


def _pool_slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    """Return rules: images and channels are free; rows and columns share windows."""
    reason = "windows that reach across a cut add to both sides"
    count = len(shapes)
    return axis_rules(
        "SlidingWindowDeconv", [every_input(0, count), every_input(1, count), reason, reason]
    )


def _padded_size(size: Pair, pads: Pairs) -> Pair:
    """Return the size of a padded image."""
    return size[0] + sum(pads[0]), size[1] + sum(pads[1])


def _scattered_tap(values: te.Tensor, image_size: Pair, strides: Pair, tap: Pair) -> te.Tensor:
    """Return an image with `values` at the pixels tap + stride * index and zeros elsewhere."""
    dilated = conv_gradient.with_zeros_between(values, strides)
    # tap (1, 0) of a window at stride 2: values at rows 1, 3, 5, ... and columns 0, 2, 4, ...
    edges = [(tap[i], image_size[i] - tap[i] - dilated.shape[2 + i]) for i in range(2)]
    return te.pad(dilated, ((0, 0), (0, 0), *edges))


def _without_padding(image: te.Tensor, size: Pair, pads: Pairs) -> te.Tensor:
    n, c = image.shape[:2]
    first_row = pads[0][0]
    first_column = pads[1][0]
    if not np.any(pads):
        return image
    return te.slice(
        image, (0, 0, first_row, first_column), (n, c, first_row + size[0], first_column + size[1])
    )


# -- of max pooling ------------------------------------------------------------------------------
def _max_shape(x: Shape, y: Shape, grad: Shape, **attrs: Any) -> Shape:
    forms.check_rank("x (n, c, h, w)", x, 4)
    out_shape = (*x[:2], *expressions.out_size("pool", (x[2], x[3]), *geometry(**attrs)))
    for name, shape in (("y", y), ("grad", grad)):
        if shape != out_shape:
            raise ShapeError(
                f"{name} of shape {out_shape}: what max_pool2d makes of x {x}", str(shape)
            )
    return x


def _max_values(x: Values, y: Values, grad: Values, **attrs: Any) -> Values:
    """Return an image with each window's gradient at its first element that equals y."""
    size, strides, pads = geometry(**attrs)
    image = padded(x, pads, -np.inf)
    window_view = expressions.windows(image, size, strides)
    # A window 1, 3, 3: equal 0, 1, 1, and the first of these takes the gradient.
    equal = (window_view == y[..., None, None]).reshape((*window_view.shape[:4], -1))
    # argmax of booleans is the index of the first True; without any it is 0, where equal is False
    is_first_maximum = equal & (np.arange(equal.shape[-1]) == equal.argmax(axis=-1)[..., None])
    window_grads = (is_first_maximum * grad[..., None]).reshape(window_view.shape)
    return cropped(add_windows(window_grads, image.shape, strides), pads, (x.shape[2], x.shape[3]))


def _max_expression(x: te.Tensor, y: te.Tensor, grad: te.Tensor, **attrs: Any) -> te.Tensor:
    """Return the gradient, computed for one position of the windows after another.

    `unassigned` is 1 for windows without a maximum so far.
    """
    size, strides, pads = geometry(**attrs)
    n, c, oh, ow = y.shape
    plane = (x.shape[2], x.shape[3])
    image_size = _padded_size(plane, pads)
    image = wide(te.pad(x, ((0, 0), (0, 0), *pads), LEAST))
    maxima = wide(y)
    slope = wide(grad)
    unassigned = None
    total = None
    for tap in product(range(size[0]), range(size[1])):
        # Tap (1, 0), 3 x 3 windows at stride 2: rows 1, 3, 5 and columns 0, 2, 4 of the image.
        end = (tap[0] + (oh - 1) * strides[0] + 1, tap[1] + (ow - 1) * strides[1] + 1)
        view = te.slice(image, (0, 0, *tap), (n, c, *end), (1, 1, *strides))
        is_maximum = te.vcmp(view, maxima, "eq")
        # a window that has its maximum is not unassigned any more: later equal elements get nothing
        if unassigned is None:
            unassigned = te.vadds(te.vmuls(is_maximum, -1.0), 1.0)
        else:
            is_maximum = te.vmul(is_maximum, unassigned)
            unassigned = te.vsub(unassigned, is_maximum)
        tap_grads = _scattered_tap(te.vmul(is_maximum, slope), image_size, strides, tap)
        total = tap_grads if total is None else te.vadd(total, tap_grads)
    assert total is not None
    return narrow(_without_padding(total, plane, pads), x.dtype)


def _max_launch(call: Call, chip: Chip) -> isa.Launch:
    return pool_gradient_launch(
        PoolGradient(as_convolution(call.attrs, call.shapes[0]), True), chip
    )


def _applies_in_fp16(launch: Callable[[Call, Chip], isa.Launch]) -> Callable[[Call, Chip], bool]:
    """Return the function that tests whether a kernel applies: fp16, and rows that fit into UB."""

    def applies(call: Call, chip: Chip) -> bool:
        if call.dtypes[0] != "fp16":
            return False
        try:
            launch(call, chip)
        except CapacityError:
            return False
        return True

    return applies


# -- of mean pooling -----------------------------------------------------------------------------
def _average_shape(grad: Shape, *, size: Any, **attrs: Any) -> Shape:
    forms.check_rank("grad (n, c, oh, ow)", grad, 4)
    plane = forms.pair("size", size)
    out_hw = expressions.out_size("pool", plane, *geometry(**attrs))
    if grad[2:] != out_hw:
        raise ShapeError(
            f"a gradient of {out_hw} pixels for images of {plane}", str(grad), "fix size"
        )
    return (*grad[:2], *plane)


def _pool_counts(*, size: Any, count_include_pad: bool, **attrs: Any) -> Values:
    """Return the number of elements of each window, (oh, ow)."""
    return window_counts(forms.pair("size", size), *geometry(**attrs), count_include_pad)


def _average_values(grad: Values, **attrs: Any) -> Values:
    window, strides, pads = geometry(**attrs)
    plane = forms.pair("size", attrs["size"])
    # A gradient of 1 on a full 3 x 3 window: 1/9 at each of its pixels.
    element_grad = grad / _pool_counts(**attrs)
    tap_grads = np.broadcast_to(element_grad[..., None, None], (*element_grad.shape, *window))
    image = add_windows(tap_grads, (*grad.shape[:2], *_padded_size(plane, pads)), strides)
    return cropped(image, pads, plane)


def _average_expression(grad: te.Tensor, **attrs: Any) -> te.Tensor:
    """Return the gradient, divided by the counts and added at all positions of the windows.

    The count of a window is the product of its counts along rows and columns, so the division is
    done for one axis after the other.
    """
    window, strides, pads = geometry(**attrs)
    plane = forms.pair("size", attrs["size"])
    image_size = _padded_size(plane, pads)
    element_grad = wide(grad)
    total = None
    counts = _pool_counts(**attrs)
    # Counts 4, 6, 4 / 6, 9, 6 / 4, 6, 4 are (1, 1.5, 1) by (1, 1.5, 1) times 4.
    for axis, column in ((2, counts[:, 0] / counts[0, 0]), (3, counts[0] / counts[0, 0])):
        element_grad = _divided_along(element_grad, axis, column)
    element_grad = te.vmuls(element_grad, 1.0 / float(counts[0, 0]))
    for tap in product(range(window[0]), range(window[1])):
        tap_grads = _scattered_tap(element_grad, image_size, strides, tap)
        total = tap_grads if total is None else te.vadd(total, tap_grads)
    assert total is not None
    return narrow(_without_padding(total, plane, pads), grad.dtype)


def _divided_along(x: te.Tensor, axis: int, column: Values) -> te.Tensor:
    """Return x divided along an axis by one number per entry, for runs of equal numbers at a time.

    Only windows at the border differ, so there are few runs: 2, 3, 3, .., 3, 2 has three.
    """
    if np.ptp(column) == 0:
        return x
    # 2, 3, 3, 3, 2: runs end at 1, 4 and 5.
    ends = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(column)]
    pieces = []
    for low, high in pairwise(ends):
        equal_entries = te.slice(x, *forms.span(x.shape, axis, low, high))
        pieces.append(te.vmuls(equal_entries, 1.0 / float(column[low])))
    return te.concat(pieces, axis)


def _average_launch(call: Call, chip: Chip) -> isa.Launch:
    counts = _pool_counts(**call.attrs)
    # Equal counts of 9: the number 1/9; unequal ones come as a tensor, `_pool_rates`.
    constant_share = 0.0 if np.ptp(counts) else 1.0 / float(counts.flat[0])
    shape = as_convolution(call.attrs, call.outputs[0])
    return pool_gradient_launch(PoolGradient(shape, False, constant_share), chip)


def _pool_rates(call: Call) -> dict[str, Values]:
    """Return 1 / count of each window, repeated in all 16 lanes, if the counts differ."""
    counts = _pool_counts(**call.attrs)
    return {"rate": np.repeat(1.0 / counts, LANES).astype(np.float16)} if np.ptp(counts) else {}


# -- both ----------------------------------------------------------------------------------------
_POOL_ATTRS = {"kernel": REQUIRED, "stride": None, "pad": 0}
_POOL_CASES: tuple[tuple[Shape, Pair, dict[str, Any]], ...] = (
    ((1, 1, 1, 1), (1, 1), {"kernel": 1}),
    ((2, 16, 6, 6), (3, 3), {"kernel": 2}),
    ((2, 3, 7, 5), (4, 3), {"kernel": 3, "stride": 2, "pad": 1}),
    ((1, 17, 8, 9), (7, 5), {"kernel": (3, 2), "stride": (1, 2), "pad": ((1, 0), (0, 1))}),
)
_DOMAIN_WITH_TIES = Domain(-1.0, 1.0, step=0.5)
"""Five values only, so that many windows contain their y, and some contain it twice."""
define(
    "max_pool2d_grad",
    ("x", "y", "grad"),
    _max_values,
    _max_expression,
    "each window's gradient at its first largest element",
    outputs=("dx",),
    attrs=_POOL_ATTRS,
    shape_rule=_max_shape,
    types=TypeRule(),
    slicing=_pool_slices,
    template=Template(
        _max_launch,
        ("x", "top", "grad"),
        "NC1HWC0",
        "NC1HWC0",
        applies=_applies_in_fp16(_max_launch),
    ),
    traits=("pool gradient",),
    domains={"x": _DOMAIN_WITH_TIES, "y": _DOMAIN_WITH_TIES},
    # up to four windows share an element; a kernel in fp16 rounds after each addition
    tolerances=rounded(ulps=2.0, atol=2.0**-9),
    examples=tuple(Example((x, (*x[:2], *o), (*x[:2], *o)), a) for x, o, a in _POOL_CASES),
)
define(
    "avg_pool2d_grad",
    ("grad",),
    _average_values,
    _average_expression,
    "each window's gradient, divided by what it averaged, at all its elements",
    outputs=("dx",),
    attrs={**_POOL_ATTRS, "count_include_pad": False, "size": REQUIRED},
    shape_rule=_average_shape,
    types=TypeRule(),
    slicing=_pool_slices,
    template=Template(
        _average_launch,
        ("grad",),
        "NC1HWC0",
        "NC1HWC0",
        _pool_rates,
        _applies_in_fp16(_average_launch),
    ),
    traits=("pool gradient",),
    # a kernel in fp16 rounds the rate, and after each of up to 9 additions
    tolerances=rounded(ulps=4.0, fp32_ulps=16, atol=2.0**-9),
    examples=tuple(
        Example(((*x[:2], *o),), {**a, "size": x[2:], "count_include_pad": include})
        for include in (False, True)
        for x, o, a in _POOL_CASES[2 * include :]
    ),
)


# -- losses ---------------------------------------------------------------------------------------
def _loss_shape(logits: Shape, target: Shape) -> Shape:
    forms.check_rank("logits (n, classes)", logits, 2)
    if target != logits:
        needed = f"a target distribution of shape {logits}"
        raise ShapeError(needed, str(target), "one_hot makes it from labels")
    return (logits[0],)


def _loss_values(logits: Values, target: Values) -> Values:
    # Logits (0, 0), target (1, 0): -ln(1/2) = 0.693.
    result: Values = -(target * get("log_softmax").formula(logits, axis=1)).sum(axis=1)
    return result


def _loss(logits: te.Tensor, target: te.Tensor) -> te.Tensor:
    log_probabilities = get("log_softmax").expression(logits, axis=1)
    return te.vmuls(te.reduce_sum(te.vmul(target, log_probabilities), 1), -1.0)


def _loss_gradients(s: gradients.Site) -> Grads:
    """Return dlogits = g (softmax(logits) sum(target) - target), dtarget = -g log_softmax(logits).

    The sum of a target distribution is 1, but the rule holds for any target.
    """
    net = s.net
    rows = s.shape()[0]
    grad = net.shaped(s.g, (rows, 1))
    logits = s.x(0)
    target = s.x(1)
    # Logits (0, 0), target (1, 0): softmax (0.5, 0.5), so the gradient is (-0.5, 0.5).
    total = net.reduce_sum(target, axis=(1,), keepdims=True)
    logit_slope = net.sub(net.mul(net.softmax(logits, axis=1), total), target)
    target_grad = None
    if s.needs_gradient[1]:
        target_grad = net.muls(net.mul(net.log_softmax(logits, axis=1), grad), number=-1.0)
    return net.mul(logit_slope, grad), target_grad


define(
    "cross_entropy",
    ("logits", "target"),
    _loss_values,
    in_fp32(_loss),
    "-sum(target * log_softmax(logits)) per row",
    outputs=("loss",),
    shape_rule=_loss_shape,
    slicing=lambda shapes: axis_rules("Reduce", [every_input(0, 2)]),
    backward=_loss_gradients,
    wide=True,
    domains={"logits": Domain(-4.0, 4.0), "target": Domain(0.0, 0.25)},
    tolerances=rounded(fp32_ulps=64, atol=2.0**-14),
    examples=tuple(Example((s, s)) for s in ((1, 1), (3, 17), (5, 129), (31, 16))),
)


# -- optimisers -----------------------------------------------------------------------------------
def _all_equal(*shapes: Shape, **attrs: Any) -> tuple[Shape, ...]:
    for shape in shapes[1:]:
        if shape != shapes[0]:
            needed = f"every tensor of the parameter's shape {shapes[0]}"
            raise ShapeError(needed, str(shape), "reshape it")
    # Outputs are the parameter and its states: all inputs but the gradient, which is input 1.
    return tuple(shapes[i] for i in (0, *range(2, len(shapes))))


def _update_slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    sources = [every_input(i, len(shapes)) for i in range(len(shapes[0]))]
    return axis_rules("Elemwise", sources, outputs=len(shapes) - 1)


def _sgd(param: Values, grad: Values, velocity: Values, **attrs: Any) -> tuple[Values, Values]:
    """Return p' = p - lr v' and v' = momentum v + g; with nesterov p - lr (g + momentum v').

    Here g is the gradient plus weight_decay p.
    """
    slope = grad + attrs["weight_decay"] * param
    # p 1, g 0.5, v 1, momentum 0.9, lr 0.1: v' = 1.4 and p' = 1 - 0.14 = 0.86.
    new_velocity = attrs["momentum"] * velocity + slope
    step = slope + attrs["momentum"] * new_velocity if attrs["nesterov"] else new_velocity
    return param - attrs["lr"] * step, new_velocity


def _sgd_expression(
    param: te.Tensor, grad: te.Tensor, velocity: te.Tensor, **attrs: Any
) -> tuple[te.Tensor, te.Tensor]:
    decay = attrs["weight_decay"]
    slope = te.vadd(grad, te.vmuls(param, decay)) if decay else grad
    new_velocity = te.vadd(te.vmuls(velocity, attrs["momentum"]), slope)
    step = new_velocity
    if attrs["nesterov"]:
        step = te.vadd(slope, te.vmuls(new_velocity, attrs["momentum"]))
    return te.vsub(param, te.vmuls(step, attrs["lr"])), new_velocity


def _corrections(*, beta1: float, beta2: float, step: int, **others: Any) -> tuple[float, float]:
    """Return 1 - beta1^t and 1 - beta2^t, which correct the averages' start at zero.

    After the first step the mean is (1 - beta1) g; divided by 1 - beta1 it is g.
    """
    if step < 1:
        raise InputError("adam: step counted from 1", str(step), "the first update is step=1")
    return 1.0 - beta1**step, 1.0 - beta2**step


def _adam(
    param: Values, grad: Values, mean: Values, square: Values, **attrs: Any
) -> tuple[Values, ...]:
    mean_correction, square_correction = _corrections(**attrs)
    # First step from mean = square = 0 with g = 0.5: m / 0.1 = 0.5 and sqrt(s / 0.001) = 0.5, so p
    # moves by lr, whatever the size of g.
    m = attrs["beta1"] * mean + (1 - attrs["beta1"]) * grad
    s = attrs["beta2"] * square + (1 - attrs["beta2"]) * grad**2
    update = m / mean_correction / (np.sqrt(s / square_correction) + attrs["epsilon"])
    return param - attrs["lr"] * (update + attrs["weight_decay"] * param), m, s


def _adam_expression(
    param: te.Tensor, grad: te.Tensor, mean: te.Tensor, square: te.Tensor, **attrs: Any
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    mean_correction, square_correction = _corrections(**attrs)
    decay = attrs["weight_decay"]
    m = te.vadd(te.vmuls(mean, attrs["beta1"]), te.vmuls(grad, 1.0 - attrs["beta1"]))
    s = te.vadd(
        te.vmuls(square, attrs["beta2"]), te.vmuls(te.vmul(grad, grad), 1.0 - attrs["beta2"])
    )
    # sqrt(s / (1 - b2^t)) = sqrt(s) / sqrt(1 - b2^t): one factor, known before the launch
    root = te.vadds(te.vmuls(te.vsqrt(s), 1.0 / math.sqrt(square_correction)), attrs["epsilon"])
    update = te.vdiv(te.vmuls(m, attrs["lr"] / mean_correction), root)
    # p - lr (u + decay p) = (1 - lr decay) p - lr u
    decayed = te.vmuls(param, 1.0 - attrs["lr"] * decay) if decay else param
    return te.vsub(decayed, update), m, s


_SHAPES: tuple[Shape, ...] = ((1,), (127,), (3, 33), (16, 129))
_UPDATE_TOLERANCE = rounded(fp32_ulps=16, atol=2.0**-20)
define(
    "sgd_momentum",
    ("param", "grad", "velocity"),
    _sgd,
    in_fp32(_sgd_expression),
    "v' = momentum v + g + weight_decay p; p' = p - lr v' (nesterov: - lr (g + momentum v'))",
    outputs=("param", "velocity"),
    attrs={"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False},
    shape_rule=_all_equal,
    types=TypeRule(("fp32", "fp16", "bf16")),
    slicing=_update_slices,
    tolerances=_UPDATE_TOLERANCE,
    examples=(
        *(Example((s,) * 3) for s in _SHAPES),
        Example((_SHAPES[2],) * 3, {"nesterov": True, "weight_decay": 0.01}),
    ),
)
define(
    "adam",
    ("param", "grad", "mean", "square"),
    _adam,
    in_fp32(_adam_expression),
    "m' = b1 m + (1 - b1) g; s' = b2 s + (1 - b2) g^2; p' = p - lr (m^ / (sqrt(s^) + eps) "
    "+ weight_decay p), hats: divided by 1 - b^step",
    outputs=("param", "mean", "square"),
    attrs={
        "lr": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "weight_decay": 0.0,
        "step": 1,
    },
    ranges={**EPSILON, "beta1": forms.BELOW_ONE, "beta2": forms.BELOW_ONE, "step": (1, 2**31 - 1)},
    shape_rule=_all_equal,
    types=TypeRule(("fp32", "fp16", "bf16")),
    slicing=_update_slices,
    domains={"square": Domain(0.0, 2.0), "param": Domain(-0.5, 0.5)},
    tolerances=_UPDATE_TOLERANCE,
    examples=(
        *(Example((s,) * 4) for s in _SHAPES),
        Example((_SHAPES[2],) * 4, {"step": 10, "weight_decay": 0.1, "lr": 0.1}),
    ),
)
