"""Activation functions built from several vector instructions; most compute in fp32.

Sigmoid and SiLU stay in fp16 where their operands are: fp32 halves the lanes and adds two casts, 22
cycles for 128 lanes instead of 7, and each of their four roundings is relative. SiLU of -x, turned
around, x / (1 + e^x), takes 6: `graph.canonical` asks for it where signs cost nothing.
GELU is lifted though fp16 would do (within 2 ulp, BERT in batches 2 to 9 % quicker): published
times of BERT on the 310P3 are longer than the model's already (validation page).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.ops.elementwise import LANES, inside, unary
from ascend_lab.ops.expressions import NARROW
from ascend_lab.ops.formats import Tolerance, Values, rounded
from ascend_lab.ops.gradients import Site
from ascend_lab.ops.operator import Domain

GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715


def _activation(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    slope: Callable[[Site], Any],
    *,
    reach: float = 6.0,
    short: float = 0.0,
    **more: Any,
) -> None:
    """Register y = formula(x); exp and divisions round, differences of near numbers lose digits.

    With `short` fp16 is not lifted: four roundings, and results up to `short` may be lost where
    e^-x overflows.
    """
    tolerances = dict(rounded(fp32_ulps=16, atol=2.0**-20))
    if short:
        tolerances["fp16"] = Tolerance(4.0, short, "four fp16 instructions round once each")
    usual = {"wide": True, "domains": {"x": Domain(-reach, reach)}, "tolerances": tolerances}
    lift = ("bf16",) if short else NARROW
    unary(name, summary, formula, compute, slope, lift=lift, **{**usual, **more})


def sigmoid_values(x: Values) -> Values:
    """Return 1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    result: Values = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return result


def sigmoid(x: te.Tensor) -> te.Tensor:
    """Return 1 / (1 + e^-x); e^-x may overflow to infinity, whose reciprocal is 0."""
    return _from_power(te.vexp(te.vmuls(x, -1.0)))


def _from_power(power: te.Tensor) -> te.Tensor:
    return te.vrec(te.vadds(power, 1.0))


def _tanh(x: te.Tensor) -> te.Tensor:
    """Return (e^2x - 1) / (e^2x + 1); beyond |x| = 10 the result is 1 in fp32, so x is limited."""
    power = te.vexp(te.vmuls(te.vmins(te.vmaxs(x, -10.0), 10.0), 2.0))
    return te.vdiv(te.vadds(power, -1.0), te.vadds(power, 1.0))


def _gelu(x: te.Tensor) -> te.Tensor:
    """Return x / (1 + e^(x (-a - a b x^2))): three passes fewer than a cube and a sigmoid."""
    slope = te.vadds(te.vmuls(te.vmul(x, x), -GELU_SCALE * GELU_CUBE), -GELU_SCALE)
    return te.vmul(x, te.vrec(te.vadds(te.vexp(te.vmul(slope, x)), 1.0)))


def _swish_slope(s: Site, x: Any, part: Any, slope: Any = None) -> Any:
    """Return p (1 + x (1 - p) u')."""
    rest = s.net.mul(x, s.net.one_minus(part))
    rest = rest if slope is None else s.net.mul(rest, slope)
    return s.net.mul(part, s.net.adds(rest, number=1.0))


def _silu(x: te.Tensor, *, turned: bool) -> te.Tensor:
    return te.vmul(x, _from_power(te.vexp(x)) if turned else sigmoid(x))


def _silu_slope(s: Site) -> Any:
    """Return g p (1 + x (1 - p)), p = sigmoid(x); x is minus the operand where it is turned."""
    x = s.net.neg(s.x()) if s.attrs["turned"] else s.x()
    return s.net.mul(s.g, _swish_slope(s, x, s.net.sigmoid(x)))


def _gelu_slope(s: Site) -> Any:
    """Return g (p + x p (1 - p) u'), p = sigmoid(u), u = a (x + b x^3)."""
    net, x = s.net, s.x()
    square = net.square(x)
    inner = net.mul(x, net.adds(net.muls(square, number=GELU_SCALE * GELU_CUBE), number=GELU_SCALE))
    slope = net.adds(net.muls(square, number=3 * GELU_SCALE * GELU_CUBE), number=GELU_SCALE)
    return net.mul(s.g, _swish_slope(s, x, net.sigmoid(inner), slope))


def _softplus(x: te.Tensor) -> te.Tensor:
    """Return max(x, 0) + ln(1 + e^-|x|): no overflow."""
    small = te.vexp(te.vmuls(te.vabs(x), -1.0))
    return te.vadd(te.vrelu(x), te.vlog(te.vadds(small, 1.0)))


def _elu(x: te.Tensor, *, alpha: float) -> te.Tensor:
    below = te.vmuls(te.vadds(te.vexp(te.vmins(x, 0.0)), -1.0), alpha)
    return te.vadd(te.vrelu(x), below)


def _hard_sigmoid(x: te.Tensor) -> te.Tensor:
    return te.vmins(te.vmaxs(te.vadds(te.vmuls(x, 1.0 / 6.0), 0.5), 0.0), 1.0)


def _elu_slope(s: Site) -> Any:
    """Return g where x > 0, else g alpha e^x = g (y + alpha)."""
    above = s.net.greater(s.x(), s.net.like(0.0, s.g))
    below = s.net.mul(s.g, s.net.adds(s.y(), number=s.attrs["alpha"]))
    return s.net.select(above, s.g, below)


def _hard_swish_slope(s: Site) -> Any:
    """Return g times 0 below -3, 1 above 3, x / 3 + 1/2 between."""
    net, x = s.net, s.x()
    between = net.adds(net.muls(x, number=1.0 / 3.0), number=0.5)
    slope = net.select(net.less(x, net.like(3.0, x)), between, net.like(1.0, x))
    return net.mul(s.g, net.where(net.greater(x, net.like(-3.0, x)), slope))


# fmt: off
_activation("sigmoid", "1 / (1 + e^-x)", sigmoid_values, sigmoid,
            lambda s: s.net.mul(s.g, s.net.mul(s.y(), s.net.one_minus(s.y()))),
            traits=(*LANES, "nonnegative", "busy"), short=2.0**-15)
_activation("tanh", "(e^x - e^-x) / (e^x + e^-x)", np.tanh, _tanh,
            lambda s: s.net.mul(s.g, s.net.one_minus(s.net.square(s.y()))),
            traits=(*LANES, "busy"))
_activation("gelu", "x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form",
            lambda x: x * sigmoid_values(GELU_SCALE * (x + GELU_CUBE * x * x * x)),
            _gelu, _gelu_slope, traits=(*LANES, "busy"))
_activation("silu", "x sigmoid(x), also called swish; turned: x sigmoid(-x)",
            lambda x, *, turned: x * sigmoid_values(-x if turned else x), _silu, _silu_slope,
            traits=(*LANES, "busy"), short=2.0**-12, attrs={"turned": False})
_activation("softplus", "ln(1 + e^x)",
            lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), _softplus,
            lambda s: s.net.mul(s.g, s.net.sigmoid(s.x())))
_activation("elu", "x where x > 0, else alpha (e^x - 1)",
            lambda x, *, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
            _elu, _elu_slope, attrs={"alpha": 1.0})
_activation("hard_sigmoid", "x / 6 + 1/2 limited to [0, 1]",
            lambda x: np.clip(x / 6 + 0.5, 0, 1), _hard_sigmoid,
            lambda s: s.net.where(inside(s, s.y(), 0.0, 1.0), s.net.muls(s.g, number=1.0 / 6.0)),
            wide=False, traits=(*LANES, "nonnegative"))
_activation("hard_swish", "x hard_sigmoid(x)", lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
            lambda x: te.vmul(x, _hard_sigmoid(x)), _hard_swish_slope, traits=(*LANES, "busy"))
# fmt: on


# -- the error function ---------------------------------------------------------------------------
# NumPy has none. The reference expands it around the nearest of a table of exact values; the
# expression is approximation 7.1.26 of Abramowitz and Stegun (1964), off by at most 1.5e-7.
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


def _erf_slope(s: Site) -> Any:
    bell = s.net.exp(s.net.muls(s.net.square(s.x()), number=-1.0))
    return s.net.mul(s.net.muls(s.g, number=SLOPE), bell)


_activation("erf", "2 / sqrt(pi) times the integral of e^(-t^2) from 0 to x", erf_values, _erf,
            _erf_slope, reach=4.0, traits=())  # fmt: skip
