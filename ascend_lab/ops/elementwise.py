"""Operators element by element: of one operand, of two or three that broadcast, and casts."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.errors import InputError, TypeMismatchError
from ascend_lab.kernels.rearrange import reshape_launch
from ascend_lab.ops import formats as forms
from ascend_lab.ops.expressions import NARROW, in_fp32, stretch
from ascend_lab.ops.formats import TypeRule, Values, exact, rounded
from ascend_lab.ops.gradients import Site
from ascend_lab.ops.operator import REQUIRED, Domain, Example, Grads, Template, define

EXAMPLES = tuple(
    Example((shape,))
    for shape in ((1,), (7,), (16,), (31,), (127,), (129,), (2, 3, 5), (33, 17), (4, 1000), (0,))
)
PAIRS = (
    Example(((1,), (1,))), Example(((33,), (33,))), Example(((128,), (1,))),
    Example(((4, 1), (1, 5))), Example(((3, 1, 17), (2, 1))), Example(((2, 127), (127,))),
    Example(((31, 16), (31, 16))), Example(((0, 3), (1, 3))),
)  # fmt: skip
POSITIVE = {"x": Domain(0.05, 4.0)}
DIVISORS = Domain(0.25, 3.0)
TIES = Domain(-2.0, 2.0, step=0.5)
LANES = ("lanes", "pointwise")
WHOLE = TypeRule(("int32",))
MOVED = exact("one selection or sign change, no rounding")


def unary(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    slope: Callable[[Site], Any] | None,
    *,
    lift: tuple[str, ...] = ("bf16",),
    **more: Any,
) -> None:
    """Register y = formula(x, **attrs); `slope(site)` is the gradient of x, `more` other fields.

    Formats in `lift` compute in fp32: bf16 always, fp16 where several roundings would add up.
    """
    backward = (lambda s: (slope(s),)) if slope else None
    usual = {"traits": LANES, "tolerances": rounded(), "examples": EXAMPLES, "allows_empty": True}
    define(name, ("x",), formula, in_fp32(compute, lift), summary,
           backward=backward, **{**usual, **more})  # fmt: skip


def flat(s: Site) -> None:
    """Return no gradient: the result stands still between its jumps."""


def inside(s: Site, x: Any, low: float, high: float) -> Any:
    """Return 1 where low < x < high, else 0."""
    net = s.net
    return net.mul(net.greater(x, net.like(low, x)), net.less(x, net.like(high, x)))


def _whole(rounding: Callable[[te.Tensor], te.Tensor]) -> Callable[[te.Tensor], te.Tensor]:
    """Return the rounding with its int32 result cast back to the operand's format."""
    return lambda x: te.cast_to(rounding(x), x.dtype)


def _signs(x: te.Tensor) -> te.Tensor:
    zero = te.vmuls(te.vmaxs(te.vmins(x, 0.0), 0.0), 0.0)
    return te.vsub(te.vcmp(x, zero, "gt"), te.vcmp(x, zero, "lt"))


# fmt: off
unary("abs", "|x|", np.abs, te.vabs, lambda s: s.net.mul(s.g, s.net.sign(s.x())), tolerances=MOVED,
      traits=(*LANES, "nonnegative", "even"))
unary("neg", "-x", np.negative, lambda x: te.vmuls(x, -1), lambda s: s.net.muls(s.g, number=-1.0),
      types=TypeRule(forms.NUMBERS), tolerances=MOVED)
unary("relu", "max(x, 0)", lambda x: np.maximum(x, 0), te.vrelu, lambda s: s.net.where(s.y(), s.g),
      types=TypeRule(forms.NUMBERS), tolerances=MOVED, traits=(*LANES, "nonnegative"))
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
unary("ceil", "smallest whole >= x", np.ceil, _whole(te.ceil), flat, tolerances=MOVED, traits=())
unary("floor", "largest whole <= x", np.floor, _whole(te.floor), flat, tolerances=MOVED, traits=())
unary("round", "nearest whole, halves to even", np.rint, _whole(te.round), flat, tolerances=MOVED,
      traits=())
unary("sign", "1, 0 or -1", np.sign, _signs, flat, tolerances=MOVED, traits=())
unary("not", "every bit turned", np.invert, te.vnot, None, types=WHOLE, tolerances=MOVED,
      traits=())
# fmt: on


# -- one operand and a number ---------------------------------------------------------------------
def _leaky(x: te.Tensor, *, alpha: float) -> te.Tensor:
    scaled = te.vmuls(x, alpha)
    return te.vmax(x, scaled) if alpha <= 1 else te.vmin(x, scaled)


def _leaky_slope(s: Site) -> Any:
    above = s.net.greater(s.x(), s.net.like(0.0, s.g))
    return s.net.select(above, s.g, s.net.muls(s.g, number=s.attrs["alpha"]))


# fmt: off
unary("adds", "x + number", lambda x, *, number: x + number,
      lambda x, *, number: te.vadds(x, number), lambda s: s.g,
      lift=NARROW, attrs={"number": 1.0})  # in fp16 the number itself would be rounded first
unary("muls", "x * number", lambda x, *, number: x * number,
      lambda x, *, number: te.vmuls(x, number), lambda s: s.net.scaled(s.g, s.attrs["number"]),
      lift=NARROW, attrs={"number": 2.0})
unary("clip", "x limited to [low, high]", lambda x, *, low, high: np.clip(x, low, high),
      lambda x, *, low, high: te.vmins(te.vmaxs(x, low), high),
      lambda s: s.net.where(inside(s, s.x(), s.attrs["low"], s.attrs["high"]), s.g),
      tolerances=MOVED, ranges={"low": forms.NOT_NAN, "high": forms.NOT_NAN},
      attrs={"low": -1.0, "high": 1.0})
unary("relu6", "min(max(x, 0), 6)", lambda x: np.clip(x, 0, 6),
      lambda x: te.vmins(te.vrelu(x), 6.0),
      lambda s: s.net.where(inside(s, s.y(), 0.0, 6.0), s.g),
      domains={"x": Domain(-9.0, 9.0)}, tolerances=MOVED, traits=(*LANES, "nonnegative"))
unary("leaky_relu", "x where x > 0, else alpha * x",
      lambda x, *, alpha: np.where(x > 0, x, alpha * x), _leaky, _leaky_slope,
      lift=NARROW, attrs={"alpha": 0.01})
# fmt: on


# -- two operands ---------------------------------------------------------------------------------
def binary(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    backward: Callable[[Site], Grads] | None,
    *,
    lift: tuple[str, ...] = ("bf16",),
    **more: Any,
) -> None:
    """Register z = formula(x, y), both operands broadcast; `more` are other fields."""
    usual = {
        "types": TypeRule(forms.NUMBERS),
        "tolerances": rounded(fp32_ulps=1),
        "examples": PAIRS,
    }
    define(name, ("x", "y"), formula, in_fp32(lambda x, y: compute(*stretch(x, y)), lift), summary,
           outputs=("z",), backward=backward, allows_empty=True, **{**usual, **more})  # fmt: skip


def _back(s: Site, left: Any, right: Any) -> Grads:
    """Return the gradients of both operands in their shapes."""
    return s.net.summed_to(left, s.shape(0)), s.net.summed_to(right, s.shape(1))


def _sub(s: Site) -> Grads:
    right = s.net.summed_to(s.g, s.shape(1))
    return s.net.summed_to(s.g, s.shape(0)), s.net.muls(right, number=-1.0)


def _mul(s: Site) -> Grads:
    return (
        s.net.summed_to(s.net.mul(s.g, s.x(1)), s.shape(0)) if s.wanted[0] else None,
        s.net.summed_to(s.net.mul(s.g, s.x(0)), s.shape(1)) if s.wanted[1] else None,
    )


def _div(s: Site) -> Grads:
    share = s.net.div(s.g, s.x(1))
    return _back(s, share, s.net.muls(s.net.mul(share, s.y()), number=-1.0))


def _chosen(s: Site, left: Any) -> Grads:
    """Return the gradient where the mask is 1 for the left operand, else for the right."""
    return _back(s, s.net.mul(s.g, left), s.net.mul(s.g, s.net.one_minus(left)))


def _pow(s: Site) -> Grads:
    """Return g y z / x and g z ln x."""
    net, z = s.net, s.net.mul(s.g, s.y())
    left = net.div(net.mul(z, s.x(1)), s.x(0)) if s.wanted[0] else s.g
    return _back(s, left, net.mul(z, net.log(s.x(0))) if s.wanted[1] else s.g)


# fmt: off
binary("add", "x + y", np.add, te.vadd, lambda s: _back(s, s.g, s.g),
      traits=("lanes", "commutes", "broadcasts"))
binary("sub", "x - y", np.subtract, te.vsub, _sub, traits=("lanes", "broadcasts"))
binary("mul", "x y", np.multiply, te.vmul, _mul, traits=("lanes", "commutes", "broadcasts"))
binary("div", "x / y", np.divide, te.vdiv, _div, wide=True, types=TypeRule(),
      domains={"y": DIVISORS}, traits=("broadcasts",))
binary("max", "the larger of x and y", np.maximum, te.vmax,
       lambda s: _chosen(s, s.net.greater(s.x(0), s.x(1))), tolerances=MOVED,
      traits=("lanes", "commutes", "broadcasts"))
binary("min", "the smaller of x and y", np.minimum, te.vmin,
       lambda s: _chosen(s, s.net.less(s.x(0), s.x(1))), tolerances=MOVED,
      traits=("lanes", "commutes", "broadcasts"))
binary("pow", "x^y = e^(y ln x) for x > 0", np.power,
       lambda x, y: te.vexp(te.vmul(y, te.vlog(x))), _pow, wide=True,
       types=TypeRule(), domains={"x": DIVISORS}, lift=NARROW,
       # an error of one ulp in y ln x is |y ln x| ulps of the result
       tolerances=rounded(fp32_ulps=16), traits=("broadcasts",))
binary("and", "bits set in both", np.bitwise_and, te.vand, None,
       types=WHOLE, tolerances=MOVED)
binary("or", "bits set in either", np.bitwise_or, te.vor, None, types=WHOLE, tolerances=MOVED)
# fmt: on


for _name, _sign, _op, _compare in (
    ("equal", "=", "eq", np.equal),
    ("not_equal", "!=", "ne", np.not_equal),
    ("greater", ">", "gt", np.greater),
    ("greater_equal", ">=", "ge", np.greater_equal),
    ("less", "<", "lt", np.less),
    ("less_equal", "<=", "le", np.less_equal),
):
    binary(_name, f"1 where x {_sign} y, else 0, in the operands' format",
           lambda x, y, compare=_compare: compare(x, y).astype(x.dtype),
           lambda x, y, op=_op: te.vcmp(x, y, op), lambda s: (None, None),
           types=TypeRule(), domains={"x": TIES, "y": TIES}, tolerances=MOVED)  # fmt: skip


def _select_slopes(s: Site) -> Grads:
    net, mask, zero = s.net, s.x(0), s.net.like(0.0, s.g)
    left, right = net.select(mask, s.g, zero), net.select(mask, zero, s.g)
    return None, net.summed_to(left, s.shape(1)), net.summed_to(right, s.shape(2))


define(
    "select", ("condition", "x", "y"), lambda condition, x, y: np.where(condition != 0, x, y),
    in_fp32(lambda *given: te.select(*stretch(*given)), ("bf16",)),
    "x where the condition is not 0, else y (ONNX Where)", outputs=("z",),
    types=TypeRule(), backward=_select_slopes,
    domains={"condition": TIES}, tolerances=MOVED, allows_empty=True,
    examples=(
        Example(((1,), (1,), (1,))), Example(((129,), (129,), (129,))),
        Example(((3, 1), (1, 7), (3, 7))), Example(((31, 17), (31, 17), (1,))),
    ),
)  # fmt: skip


# -- casts, with the rounding the vector unit's vconv offers --------------------------------------
DIRECT: Mapping[str, tuple[str, ...]] = {
    "fp16": ("fp32", "int32", "int8", "uint8"),
    "fp32": ("fp16", "bf16", "int32"),
    "bf16": ("fp32",),
    "int32": ("fp32", "fp16"),
    "int8": ("fp16",),
    "uint8": ("fp16",),
}
"""Casts of one vconv; others go through fp32 or fp16."""
ROUNDINGS = {"rint": np.rint, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}


def _path(source: str, target: str) -> tuple[str, ...]:
    """Return the formats to pass through from source to target, both left out.

    Chosen so that only one step rounds; int32 -> bf16 rounds twice beyond 2^24.
    """
    if target == source or target in DIRECT[source]:
        return ()
    if source == "bf16":
        return ("fp32", *_path("fp32", target))
    if source == "fp32":  # to int8: round to a whole number first, fp16 would round before that
        return ("int32", "fp16")
    if target == "bf16":
        return (*_path(source, "fp32"), "fp32")
    return ("fp16",)


def _cast_result(main: str, attrs: Mapping[str, Any]) -> str:
    dtype, mode = attrs["dtype"], attrs["round"]
    forms.numpy_type(dtype)
    if dtype == "fp64":
        raise TypeMismatchError("cast: a format of the chips", dtype, "use fp32")
    if mode not in ROUNDINGS:
        raise InputError(f"cast: round in {', '.join(ROUNDINGS)}", repr(mode), "choose one")
    if mode != "rint" and forms.is_float(dtype):
        what = f"cast: round={mode} only to a whole format"
        raise TypeMismatchError(what, f"{main} -> {dtype}", "leave round out")
    return str(dtype)


def _cast_values(x: Values, *, dtype: str, round: str) -> Values:  # noqa: A002 - the attribute's name
    """Round and saturate in a whole format; the caller's final cast rounds floats."""
    if forms.is_float(dtype):
        return x.astype(np.float64)
    info = np.iinfo(forms.numpy_type(dtype))
    whole = np.nan_to_num(ROUNDINGS[round](x.astype(np.float64)))
    result: Values = np.clip(whole, info.min, info.max).astype(np.int64)
    return result


def _cast(x: te.Tensor, *, dtype: str, round: str) -> te.Tensor:  # noqa: A002
    if round == "rint" or not forms.is_float(x.dtype):
        for step in (*_path(x.dtype, dtype), dtype):
            x = te.cast_to(x, step)
        return x
    wide = te.cast_to(x, "fp32")
    if round == "trunc":  # toward zero: floor above, ceil below
        above = te.cast_to(te.floor(te.vrelu(wide)), "fp32")
        whole = te.vadd(above, te.cast_to(te.ceil(te.vmins(wide, 0.0)), "fp32"))
    else:
        whole = te.floor(wide) if round == "floor" else te.ceil(wide)
    return _cast(whole, dtype=dtype, round="rint")


_CASTS = (
    ("fp32", ""), ("fp16", ""), ("int32", ""), ("int32", "floor"), ("int8", ""),
    ("int32", "ceil"), ("int32", "trunc"), ("fp32", ""), ("fp16", ""), ("fp16", ""),
)  # fmt: skip
define(
    "cast", ("x",), _cast_values, _cast,
    "x in another number format; whole formats round (rint, floor, ceil, trunc) and saturate",
    attrs={"dtype": REQUIRED, "round": "rint"}, types=TypeRule(tuple(DIRECT), result=_cast_result),
    backward=lambda s: (s.g if forms.is_float(s.attrs["dtype"]) else None,),
    template=Template(
        lambda call, chip: reshape_launch(chip, call.shapes[0], call.outputs[0], call.dtypes[0]),
        applies=lambda call, chip: bool(call.attrs["dtype"] == call.dtypes[0]),
    ),
    traits=LANES, domains={"x": Domain(-300.0, 300.0)},
    tolerances=exact("a cast rounds once, as the reference does"), allows_empty=True,
    examples=tuple(
        Example(example.shapes, {"dtype": dtype, **({"round": how} if how else {})})
        for example, (dtype, how) in zip(EXAMPLES, _CASTS, strict=True)
    ),
)  # fmt: skip
