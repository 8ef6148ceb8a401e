"""What training adds: losses, and the optimisers' updates of parameters."""

import math
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.errors import InputError, ShapeError
from ascend_lab.ops.expressions import in_fp32
from ascend_lab.ops.formats import BELOW_ONE, EPSILON, Shape, TypeRule, Values, check_rank, rounded
from ascend_lab.ops.gradients import Site
from ascend_lab.ops.operator import Domain, Example, Grads, define, get
from ascend_lab.ops.slicing import SliceRules, axis_rules, every_input


# -- losses ---------------------------------------------------------------------------------------
def _loss_shape(logits: Shape, target: Shape) -> Shape:
    check_rank("logits (n, classes)", logits, 2)
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


def _loss_slopes(s: Site) -> Grads:
    """Return g (softmax sum(target) - target) and -g log_softmax."""
    net, rows = s.net, s.shape()[0]
    grad, logits, target = net.shaped(s.g, (rows, 1)), s.x(0), s.x(1)
    total = net.reduce_sum(target, axis=(1,), keepdims=True)
    slope = net.sub(net.mul(net.softmax(logits, axis=1), total), target)
    right = None
    if s.wanted[1]:
        right = net.muls(net.mul(net.log_softmax(logits, axis=1), grad), number=-1.0)
    return net.mul(slope, grad), right


define(
    "cross_entropy", ("logits", "target"), _loss_values, in_fp32(_loss),
    "-sum(target * log_softmax(logits)) per row", outputs=("loss",),
    shape_rule=_loss_shape, slicing=lambda shapes: axis_rules("Reduce", [every_input(0, 2)]),
    backward=_loss_slopes, wide=True,
    domains={"logits": Domain(-4.0, 4.0), "target": Domain(0.0, 0.25)},
    tolerances=rounded(fp32_ulps=64, atol=2.0**-14),
    examples=tuple(Example((s, s)) for s in ((1, 1), (3, 17), (5, 129), (31, 16))),
)  # fmt: skip


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
    (first, second), decay = _corrections(**a), a["weight_decay"]
    m = te.vadd(te.vmuls(mean, a["beta1"]), te.vmuls(grad, 1.0 - a["beta1"]))
    s = te.vadd(te.vmuls(square, a["beta2"]), te.vmuls(te.vmul(grad, grad), 1.0 - a["beta2"]))
    root = te.vadds(te.vmuls(te.vsqrt(s), 1.0 / math.sqrt(second)), a["epsilon"])
    moved = te.vdiv(te.vmuls(m, a["lr"] / first), root)
    kept = te.vmuls(param, 1.0 - a["lr"] * decay) if decay else param
    return te.vsub(kept, moved), m, s


_SHAPES: tuple[Shape, ...] = ((1,), (127,), (3, 33), (16, 129))
_UPDATE = rounded(fp32_ulps=16, atol=2.0**-20)
define(
    "sgd_momentum", ("param", "grad", "velocity"), _sgd, in_fp32(_sgd_expression),
    "v' = momentum v + g + weight_decay p; p' = p - lr v' (nesterov: - lr (g + momentum v'))",
    outputs=("param", "velocity"),
    attrs={"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False},
    shape_rule=_all_equal, types=TypeRule(("fp32", "fp16")), slicing=_update_slices,
    tolerances=_UPDATE,
    examples=(
        *(Example((s,) * 3) for s in _SHAPES),
        Example((_SHAPES[2],) * 3, {"nesterov": True, "weight_decay": 0.01}),
    ),
)  # fmt: skip
define(
    "adam", ("param", "grad", "mean", "square"), _adam, in_fp32(_adam_expression),
    "m' = b1 m + (1 - b1) g; s' = b2 s + (1 - b2) g^2; p' = p - lr (m^ / (sqrt(s^) + eps) "
    "+ weight_decay p), hats: divided by 1 - b^step",
    outputs=("param", "mean", "square"),
    attrs={
        "lr": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0, "step": 1,
    },
    ranges={**EPSILON, "beta1": BELOW_ONE, "beta2": BELOW_ONE, "step": (1, 2**31 - 1)},
    shape_rule=_all_equal, types=TypeRule(("fp32", "fp16")), slicing=_update_slices,
    domains={"square": Domain(0.0, 2.0), "param": Domain(-0.5, 0.5)}, tolerances=_UPDATE,
    examples=(
        *(Example((s,) * 4) for s in _SHAPES),
        Example((_SHAPES[2],) * 4, {"step": 10, "weight_decay": 0.1, "lr": 0.1}),
    ),
)  # fmt: skip
