"""Activation functions built from several vector instructions; all compute in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.ops.elementwise import ACTIVATION, unary
from ascend_lab.ops.formats import rounded
from ascend_lab.ops.operator import Domain

Values = NDArray[Any]
GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715
NARROW = ("fp16", "bf16")
# exp and the divisions round once each in fp32; differences of near numbers lose absolute digits
_LOOSE = rounded(fp32_ulps=16, atol=2.0**-20)


def _register(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    derivative: Callable[..., Values],
    domain: Domain = ACTIVATION,
    **attrs: Any,
) -> None:
    unary(
        name,
        summary,
        formula,
        compute,
        derivative,
        domain=domain,
        tolerances=_LOOSE,
        lift=NARROW,
        **attrs,
    )


def sigmoid_values(x: Values) -> Values:
    """Return 1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    result: Values = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return result


def sigmoid(x: te.Tensor) -> te.Tensor:
    """Return 1 / (1 + e^-x); e^-x may overflow to infinity, whose reciprocal is 0."""
    return te.vrec(te.vadds(te.vexp(te.vmuls(x, -1.0)), 1.0))


def _tanh(x: te.Tensor) -> te.Tensor:
    """Return (e^2x - 1) / (e^2x + 1); beyond |x| = 10 the result is 1 in fp32, so x is limited."""
    power = te.vexp(te.vmuls(te.vmins(te.vmaxs(x, -10.0), 10.0), 2.0))
    return te.vdiv(te.vadds(power, -1.0), te.vadds(power, 1.0))


def _gelu_inner(x: Any) -> Any:
    return GELU_SCALE * (x + GELU_CUBE * x * x * x)


def _gelu(x: te.Tensor) -> te.Tensor:
    cube = te.vmul(te.vmul(x, x), x)
    inner = te.vmuls(te.vadd(x, te.vmuls(cube, GELU_CUBE)), GELU_SCALE)
    return te.vmul(x, sigmoid(inner))


def _gelu_slope(x: Values, y: Values) -> Values:
    s = sigmoid_values(_gelu_inner(x))
    result: Values = s + x * s * (1 - s) * GELU_SCALE * (1 + 3 * GELU_CUBE * x * x)
    return result


def _silu_slope(x: Values, y: Values) -> Values:
    s = sigmoid_values(x)
    result: Values = s * (1 + x * (1 - s))
    return result


def _softplus(x: te.Tensor) -> te.Tensor:
    """Return max(x, 0) + ln(1 + e^-|x|): no overflow."""
    small = te.vexp(te.vmuls(te.vabs(x), -1.0))
    return te.vadd(te.vrelu(x), te.vlog(te.vadds(small, 1.0)))


def _elu(x: te.Tensor, *, alpha: float) -> te.Tensor:
    below = te.vmuls(te.vadds(te.vexp(te.vmins(x, 0.0)), -1.0), alpha)
    return te.vadd(te.vrelu(x), below)


def _hard_sigmoid(x: te.Tensor) -> te.Tensor:
    return te.vmins(te.vmaxs(te.vadds(te.vmuls(x, 1.0 / 6.0), 0.5), 0.0), 1.0)


_register("sigmoid", "1 / (1 + e^-x)", sigmoid_values, sigmoid, lambda x, y: y * (1 - y))
_register("tanh", "(e^x - e^-x) / (e^x + e^-x)", np.tanh, _tanh, lambda x, y: 1 - y * y)
_register(
    "gelu",
    "x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form",
    lambda x: x * sigmoid_values(_gelu_inner(x)),
    _gelu,
    _gelu_slope,
)
_register(
    "silu",
    "x sigmoid(x), also called swish",
    lambda x: x * sigmoid_values(x),
    lambda x: te.vmul(x, sigmoid(x)),
    _silu_slope,
)
_register(
    "softplus",
    "ln(1 + e^x)",
    lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    _softplus,
    lambda x, y: sigmoid_values(x),
)
_register(
    "elu",
    "x where x > 0, else alpha (e^x - 1)",
    lambda x, *, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    _elu,
    lambda x, y, *, alpha: np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0))),
    alpha=1.0,
)
_register(
    "hard_sigmoid",
    "x / 6 + 1/2 limited to [0, 1]",
    lambda x: np.clip(x / 6 + 0.5, 0, 1),
    _hard_sigmoid,
    lambda x, y: ((y > 0) & (y < 1)) / 6.0,
)
_register(
    "hard_swish",
    "x hard_sigmoid(x)",
    lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    lambda x: te.vmul(x, _hard_sigmoid(x)),
    lambda x, y: np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, x / 3 + 0.5)),
)
