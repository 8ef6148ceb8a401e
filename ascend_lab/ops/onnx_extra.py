"""Operators that ONNX models need beyond the library's own: the error function.

NumPy has none. The reference reads it from a table of exact values and expands it around the
nearest one; the expression is approximation 7.1.26 of Abramowitz and Stegun (1964), off by at most
1.5e-7.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.ops.elementwise import unary
from ascend_lab.ops.formats import rounded
from ascend_lab.ops.operator import Domain

Values = NDArray[Any]
SLOPE = 2.0 / math.sqrt(math.pi)
"""Derivative of erf at 0."""
_STEPS = 256
"""Table entries per unit: an argument is at most 1/512 away from one."""
_LAST = 6
"""erf(6) is 1 to 16 digits."""
_P = 0.3275911
_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


@cache
def _table() -> tuple[Values, Values, Values]:
    """Return the places x, erf(x) and its derivative 2 / sqrt(pi) e^(-x^2) there."""
    places = np.arange(_LAST * _STEPS + 1) / _STEPS
    return places, np.array([math.erf(x) for x in places]), SLOPE * np.exp(-(places**2))


def erf_values(x: Values) -> Values:
    """Return erf(x) = 2 / sqrt(pi) times the integral of e^(-t^2) from 0 to x, to 15 digits.

    Around a place a with h = |x| - a: erf(a) + s (h - a h^2 + (2 a^2 - 1) h^3 / 3 + ...), s the
    derivative; further coefficients follow from Hermite's polynomials.
    """
    places, known, slopes = _table()
    size = np.minimum(np.abs(np.asarray(x, np.float64)), _LAST)
    at = np.rint(np.nan_to_num(size) * _STEPS).astype(np.int64)
    a, h = places[at], size - places[at]
    square = a * a
    terms = (
        1.0,
        -a,
        (2 * square - 1) / 3,
        -a * (2 * square - 3) / 6,
        (4 * square * square - 12 * square + 3) / 30,
    )
    total = np.zeros_like(h)
    for term in reversed(terms):
        total = (total + term) * h
    result: Values = np.copysign(known[at] + slopes[at] * total, x)
    return result


def _erf(x: te.Tensor) -> te.Tensor:
    """Return sign(x) (1 - (a1 t + ... + a5 t^5) e^(-x^2)), t = 1 / (1 + p |x|)."""
    size = te.vmins(te.vabs(x), float(_LAST))
    t = te.vrec(te.vadds(te.vmuls(size, _P), 1.0))
    total = te.vmuls(t, _A[-1])
    for factor in reversed(_A[:-1]):
        total = te.vmul(te.vadds(total, factor), t)
    power = te.vexp(te.vmuls(te.vmul(size, size), -1.0))
    value = te.vadds(te.vmuls(te.vmul(total, power), -1.0), 1.0)
    zero = te.vmuls(size, 0.0)
    return te.vmul(value, te.vsub(te.vcmp(x, zero, "gt"), te.vcmp(x, zero, "lt")))


unary(
    "erf",
    "2 / sqrt(pi) times the integral of e^(-t^2) from 0 to x",
    erf_values,
    _erf,
    lambda x, y: SLOPE * np.exp(-x * x),
    domain=Domain(-4.0, 4.0),
    # the approximation is off by 1.5e-7, roundings in fp32 add as much
    tolerances=rounded(fp32_ulps=16, atol=2.0**-20),
    lift=("fp16", "bf16"),
)
