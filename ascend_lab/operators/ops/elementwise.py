"""Elementwise operators: with one operand, with two or three that broadcast, and activations.

Each operator has a NumPy formula, a tensor expression in vector instructions, and a gradient. For
example, relu is max(x, 0), the instruction vrelu, and a gradient that is g where y > 0.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ascend_lab.operators import dsl as te
from ascend_lab.operators.ops import formats as forms
from ascend_lab.operators.ops.expressions import NARROW, in_fp32, stretch
from ascend_lab.operators.ops.formats import Tolerance, TypeRule, Values, exact, rounded
from ascend_lab.operators.ops.gradients import Site
from ascend_lab.operators.ops.operator import Domain, Example, Grads, define

EXAMPLES = tuple(
    Example((shape,))
    for shape in ((1,), (7,), (16,), (31,), (127,), (129,), (2, 3, 5), (33, 17), (4, 1000), (0,))
)
PAIR_EXAMPLES = (
    Example(((1,), (1,))),
    Example(((33,), (33,))),
    Example(((128,), (1,))),
    Example(((4, 1), (1, 5))),
    Example(((3, 1, 17), (2, 1))),
    Example(((2, 127), (127,))),
    Example(((31, 16), (31, 16))),
    Example(((0, 3), (1, 3))),
)
POSITIVE = {"x": Domain(0.05, 4.0)}
DIVISORS = Domain(0.25, 3.0)
WITH_TIES = Domain(-2.0, 2.0, step=0.5)  # nine values only, so that comparisons meet equal operands
LANES = ("lanes", "pointwise")
INT32_ONLY = TypeRule(("int32",))
SELECTION_TOLERANCE = exact("one selection or sign change, no rounding")


def unary(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    slope: Callable[[Site], Any] | None,
    *,
    formats_in_fp32: tuple[str, ...] = ("bf16",),
    **more: Any,
) -> None:
    """Register y = formula(x, **attrs); `slope(site)` returns the gradient of x.

    Operands whose format is in `formats_in_fp32` are computed in fp32: always bf16, and fp16 if
    several roundings would add up. `more` are other fields of the `Operator`.
    """
    backward = (lambda s: (slope(s),)) if slope else None
    defaults = {
        "traits": LANES,
        "tolerances": rounded(),
        "examples": EXAMPLES,
        "allows_empty": True,
    }
    define(
        name,
        ("x",),
        formula,
        in_fp32(compute, formats_in_fp32),
        summary,
        backward=backward,
        **{**defaults, **more},
    )


def no_gradient(s: Site) -> None:
    """Return no gradient: a step function has slope 0 between its jumps."""


def is_inside(s: Site, x: Any, low: float, high: float) -> Any:
    """Return 1 where low < x < high, else 0."""
    net = s.net
    return net.mul(net.greater(x, net.like(low, x)), net.less(x, net.like(high, x)))


def _rounded_in_format(
    rounding: Callable[[te.Tensor], te.Tensor],
) -> Callable[[te.Tensor], te.Tensor]:
    """Return the rounding with its int32 result cast back to the operand's format."""
    return lambda x: te.cast_to(rounding(x), x.dtype)


def _signs(x: te.Tensor) -> te.Tensor:
    """Return (x > 0) - (x < 0)."""
    # an expression has no constant tensors: zeros of x's shape are x limited to [0, 0]
    zero = te.vmuls(te.vmaxs(te.vmins(x, 0.0), 0.0), 0.0)
    return te.vsub(te.vcmp(x, zero, "gt"), te.vcmp(x, zero, "lt"))


# fmt: off
unary("abs", "|x|", np.abs, te.vabs, lambda s: s.net.mul(s.g, s.net.sign(s.x())),
      tolerances=SELECTION_TOLERANCE,
      traits=(*LANES, "nonnegative", "even"))
unary("neg", "-x", np.negative, lambda x: te.vmuls(x, -1), lambda s: s.net.muls(s.g, number=-1.0),
      types=TypeRule(forms.NUMBERS), tolerances=SELECTION_TOLERANCE)
unary("relu", "max(x, 0)", lambda x: np.maximum(x, 0), te.vrelu, lambda s: s.net.where(s.y(), s.g),
      types=TypeRule(forms.NUMBERS), tolerances=SELECTION_TOLERANCE, traits=(*LANES, "nonnegative"))
unary("exp", "e^x", np.exp, te.vexp, lambda s: s.net.mul(s.g, s.y()), wide=True,
      traits=(*LANES, "nonnegative", "busy"))
unary("log", "ln x, x > 0", np.log, te.vlog, lambda s: s.net.div(s.g, s.x()),
      wide=True, domains=POSITIVE, traits=())
unary("sqrt", "x^(1/2)", np.sqrt, te.vsqrt,
      lambda s: s.net.div(s.net.muls(s.g, number=0.5), s.y()), wide=True, domains=POSITIVE,
      traits=("pointwise", "nonnegative"))
unary("rsqrt", "x^(-1/2)", lambda x: 1 / np.sqrt(x), te.vrsqrt,
      lambda s: s.net.muls(s.net.mul(s.g, s.net.div(s.y(), s.x())), number=-0.5),
      wide=True, domains=POSITIVE, traits=())
unary("rec", "1 / x", lambda x: 1 / x, te.vrec,
      lambda s: s.net.muls(s.net.mul(s.g, s.net.square(s.y())), number=-1.0),
      wide=True, domains=POSITIVE, traits=())
unary("square", "x^2", np.square, lambda x: te.vmul(x, x),
      lambda s: s.net.mul(s.net.muls(s.g, number=2.0), s.x()), wide=True, traits=(*LANES, "even"))
unary("ceil", "smallest whole >= x", np.ceil, _rounded_in_format(te.ceil), no_gradient,
      tolerances=SELECTION_TOLERANCE, traits=())
unary("floor", "largest whole <= x", np.floor, _rounded_in_format(te.floor), no_gradient,
      tolerances=SELECTION_TOLERANCE, traits=())
unary("round", "nearest whole, halves to even", np.rint, _rounded_in_format(te.round), no_gradient,
      tolerances=SELECTION_TOLERANCE,
      traits=())
unary("sign", "1, 0 or -1", np.sign, _signs, no_gradient, tolerances=SELECTION_TOLERANCE, traits=())
unary("not", "every bit turned", np.invert, te.vnot, None, types=INT32_ONLY,
      tolerances=SELECTION_TOLERANCE,
      traits=())
# fmt: on


# -- one operand and a number ---------------------------------------------------------------------
def _leaky(x: te.Tensor, *, alpha: float) -> te.Tensor:
    # for alpha <= 1 the larger of x and alpha x is x above 0 and alpha x below: no comparison
    scaled = te.vmuls(x, alpha)
    return te.vmax(x, scaled) if alpha <= 1 else te.vmin(x, scaled)


def _leaky_slope(s: Site) -> Any:
    above = s.net.greater(s.x(), s.net.like(0.0, s.g))
    return s.net.select(above, s.g, s.net.muls(s.g, number=s.attrs["alpha"]))


# fmt: off
unary("adds", "x + number", lambda x, *, number: x + number,
      lambda x, *, number: te.vadds(x, number), lambda s: s.g,
      # in fp16 the number itself would be rounded first
      formats_in_fp32=NARROW, attrs={"number": 1.0})
unary("muls", "x * number", lambda x, *, number: x * number,
      lambda x, *, number: te.vmuls(x, number), lambda s: s.net.scaled(s.g, s.attrs["number"]),
      formats_in_fp32=NARROW, attrs={"number": 2.0})
unary("clip", "x limited to [low, high]", lambda x, *, low, high: np.clip(x, low, high),
      lambda x, *, low, high: te.vmins(te.vmaxs(x, low), high),
      lambda s: s.net.where(is_inside(s, s.x(), s.attrs["low"], s.attrs["high"]), s.g),
      tolerances=SELECTION_TOLERANCE, ranges={"low": forms.NOT_NAN, "high": forms.NOT_NAN},
      attrs={"low": -1.0, "high": 1.0})
unary("relu6", "min(max(x, 0), 6)", lambda x: np.clip(x, 0, 6),
      lambda x: te.vmins(te.vrelu(x), 6.0),
      lambda s: s.net.where(is_inside(s, s.y(), 0.0, 6.0), s.g),
      domains={"x": Domain(-9.0, 9.0)},
      tolerances=SELECTION_TOLERANCE, traits=(*LANES, "nonnegative"))
unary("leaky_relu", "x where x > 0, else alpha * x",
      lambda x, *, alpha: np.where(x > 0, x, alpha * x), _leaky, _leaky_slope,
      formats_in_fp32=NARROW, attrs={"alpha": 0.01})
# fmt: on


# -- two operands ---------------------------------------------------------------------------------
def binary(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    backward: Callable[[Site], Grads] | None,
    *,
    formats_in_fp32: tuple[str, ...] = ("bf16",),
    **more: Any,
) -> None:
    """Register z = formula(x, y), both operands broadcast; `more` are other fields."""
    defaults = {
        "types": TypeRule(forms.NUMBERS),
        "tolerances": rounded(fp32_ulps=1),
        "examples": PAIR_EXAMPLES,
    }
    define(
        name,
        ("x", "y"),
        formula,
        in_fp32(lambda x, y: compute(*stretch(x, y)), formats_in_fp32),
        summary,
        outputs=("z",),
        backward=backward,
        allows_empty=True,
        **{**defaults, **more},
    )


def _summed_to_operands(s: Site, x_gradient: Any, y_gradient: Any) -> Grads:
    """Return the gradients of both operands in their shapes."""
    return s.net.summed_to(x_gradient, s.shape(0)), s.net.summed_to(y_gradient, s.shape(1))


def _sub_gradients(s: Site) -> Grads:
    y_gradient = s.net.summed_to(s.g, s.shape(1))
    return s.net.summed_to(s.g, s.shape(0)), s.net.muls(y_gradient, number=-1.0)


def _mul_gradients(s: Site) -> Grads:
    return (
        s.net.summed_to(s.net.mul(s.g, s.x(1)), s.shape(0)) if s.needs_gradient[0] else None,
        s.net.summed_to(s.net.mul(s.g, s.x(0)), s.shape(1)) if s.needs_gradient[1] else None,
    )


def _div_gradients(s: Site) -> Grads:
    # d(x / y)/dx = 1 / y and d(x / y)/dy = -(x / y) / y.
    x_gradient = s.net.div(s.g, s.x(1))
    return _summed_to_operands(s, x_gradient, s.net.muls(s.net.mul(x_gradient, s.y()), number=-1.0))


def _extreme_gradients(s: Site, is_left: Any) -> Grads:
    """Return the gradients of max or min; `is_left` is 1 where the left operand is the result.

    If both operands are equal, the right one receives the gradient.
    """
    return _summed_to_operands(s, s.net.mul(s.g, is_left), s.net.mul(s.g, s.net.one_minus(is_left)))


def _pow_gradients(s: Site) -> Grads:
    """Return g y z / x and g z ln x."""
    net = s.net
    g_z = s.net.mul(s.g, s.y())
    x_gradient = net.div(net.mul(g_z, s.x(1)), s.x(0)) if s.needs_gradient[0] else s.g
    return _summed_to_operands(
        s, x_gradient, net.mul(g_z, net.log(s.x(0))) if s.needs_gradient[1] else s.g
    )


LARGEST_EXPONENT = 2.0**31 - 128
"""A large fp32 number that int32 can hold; x^y is 0, 1 or infinite for larger exponents y.

It is 2^31 - 128, and even.
"""


def _power(x: te.Tensor, y: te.Tensor) -> te.Tensor:
    """Return x^y = s e^(y ln |x|) in fp32, where s is the sign; NaN for fractional y below x = 0.

    A zero counts as positive, whatever its sign.
    """
    # x == x is 1, or 0 for NaN; the maximum with 1 makes a tensor of ones in every case
    ones = te.vmaxs(te.vcmp(x, x, "eq"), 1.0)
    zeros = te.vmuls(ones, 0.0)
    exponent = te.vmaxs(te.vmins(y, LARGEST_EXPONENT), -LARGEST_EXPONENT)
    magnitude = te.vabs(x)
    power = te.vexp(te.vmul(exponent, te.vlog(magnitude)))
    # For x < 0 the sign s is 1 for even exponents and -1 for odd ones. For fractional exponents
    # ln x provides the NaN. Minus infinity is the exception: (-inf)^0.5 is infinity, not NaN.
    half_exponent = te.vmuls(exponent, 0.5)
    is_whole = te.vcmp(te.cast_to(te.floor(exponent), x.dtype), exponent, "eq")
    # Exponent 4: half of it, 2, is whole; exponent 3: 1.5 is not, so the sign is -1.
    is_even = te.vcmp(te.cast_to(te.floor(half_exponent), x.dtype), half_exponent, "eq")
    even_or_odd = te.vadds(te.vmuls(is_even, 2.0), -1.0)
    is_finite = te.vcmp(te.vmuls(magnitude, 0.0), zeros, "eq")
    sign = te.select(is_whole, even_or_odd, te.select(is_finite, te.vlog(x), ones))
    signed = te.select(te.vcmp(x, zeros, "lt"), te.vmul(power, sign), power)
    # x^0 = 1 and 1^y = 1, even where the other operand is NaN.
    is_one = te.vmax(te.vcmp(y, zeros, "eq"), te.vcmp(x, ones, "eq"))
    return te.select(is_one, ones, signed)


# fmt: off
binary("add", "x + y", np.add, te.vadd, lambda s: _summed_to_operands(s, s.g, s.g),
      traits=("lanes", "commutes", "broadcasts"))
binary("sub", "x - y", np.subtract, te.vsub, _sub_gradients, traits=("lanes", "broadcasts"))
binary("mul", "x y", np.multiply, te.vmul, _mul_gradients,
      traits=("lanes", "commutes", "broadcasts"))
binary("div", "x / y", np.divide, te.vdiv, _div_gradients, wide=True, types=TypeRule(),
      domains={"y": DIVISORS}, traits=("broadcasts",))
binary("max", "the larger of x and y", np.maximum, te.vmax,
       lambda s: _extreme_gradients(s, s.net.greater(s.x(0), s.x(1))),
      tolerances=SELECTION_TOLERANCE,
      traits=("lanes", "commutes", "broadcasts"))
binary("min", "the smaller of x and y", np.minimum, te.vmin,
       lambda s: _extreme_gradients(s, s.net.less(s.x(0), s.x(1))), tolerances=SELECTION_TOLERANCE,
      traits=("lanes", "commutes", "broadcasts"))
binary("pow", "x^y; NaN for fractional y below x = 0", np.power, _power, _pow_gradients, wide=True,
       types=TypeRule(), domains={"x": DIVISORS}, formats_in_fp32=NARROW,
       # an error of one ulp in y ln x is |y ln x| ulps of the result
       tolerances=rounded(fp32_ulps=16), traits=("broadcasts",))
binary("and", "bits set in both", np.bitwise_and, te.vand, None,
       types=INT32_ONLY, tolerances=SELECTION_TOLERANCE)
binary("or", "bits set in either", np.bitwise_or, te.vor, None, types=INT32_ONLY,
      tolerances=SELECTION_TOLERANCE)
# fmt: on


_COMPARISONS = (
    ("equal", "=", "eq", np.equal),
    ("not_equal", "!=", "ne", np.not_equal),
    ("greater", ">", "gt", np.greater),
    ("greater_equal", ">=", "ge", np.greater_equal),
    ("less", "<", "lt", np.less),
    ("less_equal", "<=", "le", np.less_equal),
)
for _name, _sign, _op, _compare in _COMPARISONS:
    binary(
        _name,
        f"1 where x {_sign} y, else 0, in the operands' format",
        lambda x, y, compare=_compare: compare(x, y).astype(x.dtype),
        lambda x, y, op=_op: te.vcmp(x, y, op),
        lambda s: (None, None),
        types=TypeRule(),
        domains={"x": WITH_TIES, "y": WITH_TIES},
        tolerances=SELECTION_TOLERANCE,
    )


def _select_gradients(s: Site) -> Grads:
    net = s.net
    mask = s.x(0)
    zero = s.net.like(0.0, s.g)
    x_gradient = net.select(mask, s.g, zero)
    y_gradient = net.select(mask, zero, s.g)
    return None, net.summed_to(x_gradient, s.shape(1)), net.summed_to(y_gradient, s.shape(2))


define(
    "select",
    ("condition", "x", "y"),
    lambda condition, x, y: np.where(condition != 0, x, y),
    in_fp32(lambda *given: te.select(*stretch(*given)), ("bf16",)),
    "x where the condition is not 0, else y (ONNX Where)",
    outputs=("z",),
    types=TypeRule(),
    backward=_select_gradients,
    domains={"condition": WITH_TIES},
    tolerances=SELECTION_TOLERANCE,
    allows_empty=True,
    examples=(
        Example(((1,), (1,), (1,))),
        Example(((129,), (129,), (129,))),
        Example(((3, 1), (1, 7), (3, 7))),
        Example(((31, 17), (31, 17), (1,))),
    ),
)


# -- activation functions: several vector instructions, most in fp32 -------------------------------
# Sigmoid, SiLU and GELU of fp16 operands are computed in fp16, as in Ascend C unless the caller
# asks for high precision. fp32 would halve the lanes and add two casts: SiLU of 128 lanes would
# take 22 cycles instead of 7. Their few roundings are relative, so little is lost.
# Source: Ascend C API, Gelu: `highPrecision` exists for half only and is false by default.
GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715


def _activation(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    slope: Callable[[Site], Any],
    *,
    fp16_atol: float = 0.0,
    **more: Any,
) -> None:
    """Register an activation y = formula(x), computed in fp32 unless `fp16_atol` is given.

    With `fp16_atol`, fp16 operands stay in fp16. Each of the few instructions rounds once, and
    where e^-x overflows (x < -11) results up to `fp16_atol` become 0.
    """
    # exp and division round, and a difference of nearby numbers loses digits: hence the atol
    tolerances = dict(rounded(fp32_ulps=16, atol=2.0**-20))
    if fp16_atol:
        tolerances["fp16"] = Tolerance(4.0, fp16_atol, "four fp16 instructions round once each")
    defaults = {"wide": True, "domains": {"x": Domain(-6.0, 6.0)}, "tolerances": tolerances}
    formats_in_fp32 = ("bf16",) if fp16_atol else NARROW
    unary(
        name,
        summary,
        formula,
        compute,
        slope,
        formats_in_fp32=formats_in_fp32,
        **{**defaults, **more},
    )


def sigmoid_values(x: Values) -> Values:
    """Return 1 / (1 + e^-x) without overflow."""
    # x = -1000: e^-1000 / (1 + e^-1000) = 0, where 1 / (1 + e^1000) would overflow on the way.
    decay = np.exp(-np.abs(x))
    result: Values = np.where(x >= 0, 1.0, decay) / (1.0 + decay)
    return result


def sigmoid(x: te.Tensor) -> te.Tensor:
    """Return 1 / (1 + e^-x); e^-x may overflow to infinity, whose reciprocal is 0."""
    return te.vrec(te.vadds(te.vexp(te.vmuls(x, -1.0)), 1.0))


def _tanh(x: te.Tensor) -> te.Tensor:
    """Return (e^2x - 1) / (e^2x + 1); beyond |x| = 10 the result is 1 in fp32, so x is limited."""
    e_to_2x = te.vexp(te.vmuls(te.vmins(te.vmaxs(x, -10.0), 10.0), 2.0))
    return te.vdiv(te.vadds(e_to_2x, -1.0), te.vadds(e_to_2x, 1.0))


def _gelu(x: te.Tensor) -> te.Tensor:
    """Return x / (1 + e^(x (-a - a b x^2))), a = GELU_SCALE, b = GELU_CUBE.

    Factored like this it takes three instructions fewer than a cube x^3 and a sigmoid.
    """
    slope = te.vadds(te.vmuls(te.vmul(x, x), -GELU_SCALE * GELU_CUBE), -GELU_SCALE)
    return te.vmul(x, te.vrec(te.vadds(te.vexp(te.vmul(slope, x)), 1.0)))


def _swish_slope(s: Site, x: Any, p: Any, u_slope: Any = None) -> Any:
    """Return d(x p)/dx = p (1 + x (1 - p) u') for p = sigmoid(u(x)); `u_slope` is u', None for 1.

    It follows from dp/dx = p (1 - p) u'.
    """
    second_term = s.net.mul(x, s.net.one_minus(p))
    second_term = second_term if u_slope is None else s.net.mul(second_term, u_slope)
    return s.net.mul(p, s.net.adds(second_term, number=1.0))


def _silu_slope(s: Site) -> Any:
    """Return g p (1 + x (1 - p)), p = sigmoid(x)."""
    return s.net.mul(s.g, _swish_slope(s, s.x(), s.net.sigmoid(s.x())))


def _gelu_slope(s: Site) -> Any:
    """Return g (p + x p (1 - p) u'), p = sigmoid(u), u = a (x + b x^3)."""
    net = s.net
    x = s.x()
    square = net.square(x)
    inner = net.mul(x, net.adds(net.muls(square, number=GELU_SCALE * GELU_CUBE), number=GELU_SCALE))
    slope = net.adds(net.muls(square, number=3 * GELU_SCALE * GELU_CUBE), number=GELU_SCALE)
    return net.mul(s.g, _swish_slope(s, x, net.sigmoid(inner), slope))


def _softplus(x: te.Tensor) -> te.Tensor:
    """Return max(x, 0) + ln(1 + e^-|x|): no overflow."""
    decay = te.vexp(te.vmuls(te.vabs(x), -1.0))
    return te.vadd(te.vrelu(x), te.vlog(te.vadds(decay, 1.0)))


def _elu(x: te.Tensor, *, alpha: float) -> te.Tensor:
    # x > 0: e^min(x, 0) - 1 = 0, so that only relu(x) counts.
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
    net = s.net
    x = s.x()
    between = net.adds(net.muls(x, number=1.0 / 3.0), number=0.5)
    slope = net.select(net.less(x, net.like(3.0, x)), between, net.like(1.0, x))
    return net.mul(s.g, net.where(net.greater(x, net.like(-3.0, x)), slope))


# fmt: off
_activation("sigmoid", "1 / (1 + e^-x)", sigmoid_values, sigmoid,
            lambda s: s.net.mul(s.g, s.net.mul(s.y(), s.net.one_minus(s.y()))),
            traits=(*LANES, "nonnegative", "busy"), fp16_atol=2.0**-15)
_activation("tanh", "(e^x - e^-x) / (e^x + e^-x)", np.tanh, _tanh,
            lambda s: s.net.mul(s.g, s.net.one_minus(s.net.square(s.y()))),
            traits=(*LANES, "busy"))
_activation("gelu", "x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form",
            lambda x: x * sigmoid_values(GELU_SCALE * (x + GELU_CUBE * x * x * x)),
            _gelu, _gelu_slope, traits=(*LANES, "busy"), fp16_atol=2.0**-12)
_activation("silu", "x sigmoid(x), also called swish",
            lambda x: x * sigmoid_values(x), lambda x: te.vmul(x, sigmoid(x)),
            _silu_slope, traits=(*LANES, "busy"), fp16_atol=2.0**-12)
_activation("softplus", "ln(1 + e^x)",
            lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), _softplus,
            lambda s: s.net.mul(s.g, s.net.sigmoid(s.x())))
_activation("elu", "x where x > 0, else alpha (e^x - 1)",
            lambda x, *, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
            _elu, _elu_slope, attrs={"alpha": 1.0})
_activation("hard_sigmoid", "x / 6 + 1/2 limited to [0, 1]",
            lambda x: np.clip(x / 6 + 0.5, 0, 1), _hard_sigmoid,
            lambda s: s.net.where(is_inside(s, s.y(), 0.0, 1.0), s.net.muls(s.g, number=1.0 / 6.0)),
            wide=False, traits=(*LANES, "nonnegative"))
_activation("hard_swish", "x hard_sigmoid(x)", lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
            lambda x: te.vmul(x, _hard_sigmoid(x)), _hard_swish_slope, traits=(*LANES, "busy"))
# fmt: on


# -- the error function ---------------------------------------------------------------------------
# NumPy has no erf: the reference calls Python's, element by element. The expression is
# approximation 7.1.26 of Abramowitz and Stegun (1964), with an error of at most 1.5e-7.
_P = 0.3275911
_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _erf(x: te.Tensor) -> te.Tensor:
    """Return sign(x) (1 - (a1 t + ... + a5 t^5) e^(-x^2)), t = 1 / (1 + p |x|)."""
    magnitude = te.vmins(te.vabs(x), 6.0)  # erf(6) is 1 to 16 digits
    t = te.vrec(te.vadds(te.vmuls(magnitude, _P), 1.0))
    # Horner's scheme: ((((a5 t + a4) t + a3) t + a2) t + a1) t
    total = te.vmuls(t, _A[-1])
    for factor in reversed(_A[:-1]):
        total = te.vmul(te.vadds(total, factor), t)
    power = te.vexp(te.vmuls(te.vmul(magnitude, magnitude), -1.0))
    erf_of_magnitude = te.vadds(te.vmuls(te.vmul(total, power), -1.0), 1.0)
    zero = te.vmuls(magnitude, 0.0)
    return te.vmul(erf_of_magnitude, te.vsub(te.vcmp(x, zero, "gt"), te.vcmp(x, zero, "lt")))


def _erf_slope(s: Site) -> Any:
    """Return g times 2 / sqrt(pi) e^(-x^2)."""
    bell = s.net.exp(s.net.muls(s.net.square(s.x()), number=-1.0))
    return s.net.mul(s.net.muls(s.g, number=2.0 / math.sqrt(math.pi)), bell)


_activation(
    "erf",
    "2 / sqrt(pi) times the integral of e^(-t^2) from 0 to x",
    np.vectorize(math.erf, otypes=[np.float64]),
    _erf,
    _erf_slope,
    domains={"x": Domain(-4.0, 4.0)},
    traits=(),
)
