"""What only training needs: the gradients of pooling, losses, the optimisers' updates.

`max_pool2d_grad(x, y, grad; kernel, stride, pad)`: x (n, c, h, w) is what max_pool2d read, y and
grad (n, c, oh, ow) what it wrote and d(loss)/d(that). Each window's gradient goes to its first
largest element, in reading order; where windows overlap they add up. The result has x's shape.

`avg_pool2d_grad(grad; kernel, stride, pad, count_include_pad, size)`: every window's gradient,
divided by the number of elements it averaged, goes to all of them; `size` is (h, w) of the image.
A stride of None is the kernel, as in pooling. global_avg_pool needs no operator of its own: its
gradient is muls(expand(grad, x's shape), 1 / (h w)).
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
from ascend_lab.operators.kernels.pooling import PoolGradient, pool_gradient_launch
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
    """Images and channels are free; rows and columns share windows with their neighbours."""
    why = "windows that reach across a cut add to both sides"
    count = len(shapes)
    return axis_rules(
        "SlidingWindowDeconv", [every_input(0, count), every_input(1, count), why, why]
    )


def _room(size: Pair, pads: Pairs) -> Pair:
    """Return the size of a padded image."""
    return size[0] + sum(pads[0]), size[1] + sum(pads[1])


def _placed(part: te.Tensor, room: Pair, step: Pair, tap: Pair) -> te.Tensor:
    """Return an image of size `room`, zero but for `part` at the pixels tap + stride * index."""
    spread = conv_gradient.stretched(part, step)
    edges = [(tap[i], room[i] - tap[i] - spread.shape[2 + i]) for i in range(2)]
    return te.pad(spread, ((0, 0), (0, 0), *edges))


def _middle(image: te.Tensor, size: Pair, pads: Pairs) -> te.Tensor:
    (n, c) = image.shape[:2]
    (top, left) = (pads[0][0], pads[1][0])
    if not np.any(pads):
        return image
    return te.slice(image, (0, 0, top, left), (n, c, top + size[0], left + size[1]))


# -- of max pooling ------------------------------------------------------------------------------
def _max_shape(x: Shape, y: Shape, grad: Shape, **attrs: Any) -> Shape:
    forms.check_rank("x (n, c, h, w)", x, 4)
    out = (*x[:2], *expressions.out_size("pool", (x[2], x[3]), *geometry(**attrs)))
    for name, shape in (("y", y), ("grad", grad)):
        if shape != out:
            raise ShapeError(f"{name} of shape {out}: what max_pool2d makes of x {x}", str(shape))
    return x


def _max_values(x: Values, y: Values, grad: Values, **attrs: Any) -> Values:
    """Give each window's gradient to its first element equal to y; to none if there is none."""
    size, step, pads = geometry(**attrs)
    image = padded(x, pads, -np.inf)
    seen = expressions.windows(image, size, step)
    equal = (seen == y[..., None, None]).reshape((*seen.shape[:4], -1))
    first = equal & (np.arange(equal.shape[-1]) == equal.argmax(axis=-1)[..., None])
    parts = (first * grad[..., None]).reshape(seen.shape)
    return cropped(add_windows(parts, image.shape, step), pads, (x.shape[2], x.shape[3]))


def _max_expression(x: te.Tensor, y: te.Tensor, grad: te.Tensor, **attrs: Any) -> te.Tensor:
    """Walk the taps in order; a window that has found its element is not free any more."""
    (size, step, pads) = geometry(**attrs)
    (n, c, oh, ow) = y.shape
    plane = (x.shape[2], x.shape[3])
    room = _room(plane, pads)
    image = te.pad(x, ((0, 0), (0, 0), *pads), LEAST)
    image = wide(image)
    top = wide(y)
    slope = wide(grad)
    free = total = None
    for tap in product(range(size[0]), range(size[1])):
        end = (tap[0] + (oh - 1) * step[0] + 1, tap[1] + (ow - 1) * step[1] + 1)
        view = te.slice(image, (0, 0, *tap), (n, c, *end), (1, 1, *step))
        hit = te.vcmp(view, top, "eq")
        hit = hit if free is None else te.vmul(hit, free)
        free = te.vsub(free, hit) if free is not None else te.vadds(te.vmuls(hit, -1.0), 1.0)
        part = _placed(te.vmul(hit, slope), room, step, tap)
        total = part if total is None else te.vadd(total, part)
    assert total is not None
    return narrow(_middle(total, plane, pads), x.dtype)


def _max_launch(call: Call, chip: Chip) -> isa.Launch:
    return pool_gradient_launch(
        PoolGradient(as_convolution(call.attrs, call.shapes[0]), True), chip
    )


def _in_fp16(launch: Callable[[Call, Chip], isa.Launch]) -> Callable[[Call, Chip], bool]:
    """Return whether the hand-written kernel does it: fp16, and a block of rows fits UB."""

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
    out = expressions.out_size("pool", plane, *geometry(**attrs))
    if grad[2:] != out:
        raise ShapeError(f"a gradient of {out} pixels for images of {plane}", str(grad), "fix size")
    return (*grad[:2], *plane)


def _pool_counts(*, size: Any, count_include_pad: bool, **attrs: Any) -> Values:
    """Return how many elements each window averages, (oh, ow)."""
    return window_counts(forms.pair("size", size), *geometry(**attrs), count_include_pad)


def _average_values(grad: Values, **attrs: Any) -> Values:
    (window, step, pads) = geometry(**attrs)
    plane = forms.pair("size", attrs["size"])
    share = grad / _pool_counts(**attrs)
    parts = np.broadcast_to(share[..., None, None], (*share.shape, *window))
    image = add_windows(parts, (*grad.shape[:2], *_room(plane, pads)), step)
    return cropped(image, pads, plane)


def _average_expression(grad: te.Tensor, **attrs: Any) -> te.Tensor:
    """Add the gradient at every tap; the counts of an axis are a pooling of ones, as forward."""
    (window, step, pads) = geometry(**attrs)
    plane = forms.pair("size", attrs["size"])
    room = _room(plane, pads)
    share = wide(grad)
    total = None
    counts = _pool_counts(**attrs)
    for i, column in enumerate((counts[:, 0] / counts[0, 0], counts[0] / counts[0, 0])):
        share = _over_axis(share, 2 + i, column)
    share = te.vmuls(share, 1.0 / float(counts[0, 0]))
    for tap in product(range(window[0]), range(window[1])):
        part = _placed(share, room, step, tap)
        total = part if total is None else te.vadd(total, part)
    assert total is not None
    return narrow(_middle(total, plane, pads), grad.dtype)


def _over_axis(x: te.Tensor, axis: int, column: Values) -> te.Tensor:
    """Return x divided along an axis by one number per entry, equal ones at a time."""
    if np.ptp(column) == 0:
        return x
    ends = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(column)]
    pieces = []
    for low, high in pairwise(ends):
        part = te.slice(x, *forms.span(x.shape, axis, low, high))
        pieces.append(te.vmuls(part, 1.0 / float(column[low])))
    return te.concat(pieces, axis)


def _average_launch(call: Call, chip: Chip) -> isa.Launch:
    counts = _pool_counts(**call.attrs)
    share = 0.0 if np.ptp(counts) else 1.0 / float(counts.flat[0])
    shape = as_convolution(call.attrs, call.outputs[0])
    return pool_gradient_launch(PoolGradient(shape, False, share), chip)


def _pool_rates(call: Call) -> dict[str, Values]:
    """Return, where windows differ, the rate of each in all 16 lanes."""
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
_TIED = Domain(-1.0, 1.0, step=0.5)
"""Few values, so that many windows hold their y, and some hold it twice."""
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
        applies=_in_fp16(_max_launch),
    ),
    traits=("pool gradient",),
    domains={"x": _TIED, "y": _TIED},
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
        _in_fp16(_average_launch),
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
    result: Values = -(target * get("log_softmax").formula(logits, axis=1)).sum(axis=1)
    return result


def _loss(logits: te.Tensor, target: te.Tensor) -> te.Tensor:
    found = get("log_softmax").expression(logits, axis=1)
    return te.vmuls(te.reduce_sum(te.vmul(target, found), 1), -1.0)


def _loss_slopes(s: gradients.Site) -> Grads:
    """Return g (softmax sum(target) - target) and -g log_softmax."""
    net = s.net
    rows = s.shape()[0]
    grad = net.shaped(s.g, (rows, 1))
    logits = s.x(0)
    target = s.x(1)
    total = net.reduce_sum(target, axis=(1,), keepdims=True)
    slope = net.sub(net.mul(net.softmax(logits, axis=1), total), target)
    right = None
    if s.wanted[1]:
        right = net.muls(net.mul(net.log_softmax(logits, axis=1), grad), number=-1.0)
    return net.mul(slope, grad), right


define(
    "cross_entropy",
    ("logits", "target"),
    _loss_values,
    in_fp32(_loss),
    "-sum(target * log_softmax(logits)) per row",
    outputs=("loss",),
    shape_rule=_loss_shape,
    slicing=lambda shapes: axis_rules("Reduce", [every_input(0, 2)]),
    backward=_loss_slopes,
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
    return tuple(shapes[i] for i in (0, *range(2, len(shapes))))


def _update_slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    sources = [every_input(i, len(shapes)) for i in range(len(shapes[0]))]
    return axis_rules("Elemwise", sources, outputs=len(shapes) - 1)


def _sgd(param: Values, grad: Values, velocity: Values, **a: Any) -> tuple[Values, Values]:
    """v' = momentum v + g; p' = p - lr v', or p - lr (g + momentum v') with nesterov."""
    slope = grad + a["weight_decay"] * param
    moved = a["momentum"] * velocity + slope
    step = slope + a["momentum"] * moved if a["nesterov"] else moved
    return param - a["lr"] * step, moved


def _sgd_expression(
    param: te.Tensor, grad: te.Tensor, velocity: te.Tensor, **a: Any
) -> tuple[te.Tensor, te.Tensor]:
    decay = a["weight_decay"]
    slope = te.vadd(grad, te.vmuls(param, decay)) if decay else grad
    moved = te.vadd(te.vmuls(velocity, a["momentum"]), slope)
    step = te.vadd(slope, te.vmuls(moved, a["momentum"])) if a["nesterov"] else moved
    return te.vsub(param, te.vmuls(step, a["lr"])), moved


def _corrections(*, beta1: float, beta2: float, step: int, **others: Any) -> tuple[float, float]:
    """Return 1 - beta1^t and 1 - beta2^t, which undo the averages' start at zero."""
    if step < 1:
        raise InputError("adam: step counted from 1", str(step), "the first update is step=1")
    return 1.0 - beta1**step, 1.0 - beta2**step


def _adam(
    param: Values, grad: Values, mean: Values, square: Values, **a: Any
) -> tuple[Values, ...]:
    first, second = _corrections(**a)
    m = a["beta1"] * mean + (1 - a["beta1"]) * grad
    s = a["beta2"] * square + (1 - a["beta2"]) * grad**2
    moved = m / first / (np.sqrt(s / second) + a["epsilon"])
    return param - a["lr"] * (moved + a["weight_decay"] * param), m, s


def _adam_expression(
    param: te.Tensor, grad: te.Tensor, mean: te.Tensor, square: te.Tensor, **a: Any
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    (first, second) = _corrections(**a)
    decay = a["weight_decay"]
    m = te.vadd(te.vmuls(mean, a["beta1"]), te.vmuls(grad, 1.0 - a["beta1"]))
    s = te.vadd(te.vmuls(square, a["beta2"]), te.vmuls(te.vmul(grad, grad), 1.0 - a["beta2"]))
    root = te.vadds(te.vmuls(te.vsqrt(s), 1.0 / math.sqrt(second)), a["epsilon"])
    moved = te.vdiv(te.vmuls(m, a["lr"] / first), root)
    kept = te.vmuls(param, 1.0 - a["lr"] * decay) if decay else param
    return te.vsub(kept, moved), m, s


_SHAPES: tuple[Shape, ...] = ((1,), (127,), (3, 33), (16, 129))
_UPDATE = rounded(fp32_ulps=16, atol=2.0**-20)
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
    tolerances=_UPDATE,
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
    tolerances=_UPDATE,
    examples=(
        *(Example((s,) * 4) for s in _SHAPES),
        Example((_SHAPES[2],) * 4, {"step": 10, "weight_decay": 0.1, "lr": 0.1}),
    ),
)
