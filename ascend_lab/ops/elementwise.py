"""Operators of one operand, element by element: y = f(x)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.ops.attributes import NOT_NAN, Range
from ascend_lab.ops.formats import FLOATS, NUMBERS, Tolerances, TypeRule, exact, rounded
from ascend_lab.ops.lifting import in_fp32
from ascend_lab.ops.operator import Domain, Example, Operator
from ascend_lab.ops.registry import register

Values = NDArray[Any]
EXAMPLES = tuple(
    Example((shape,))
    for shape in ((1,), (7,), (16,), (31,), (127,), (129,), (2, 3, 5), (33, 17), (4, 1000), (0,))
)
POSITIVE = Domain(0.05, 4.0)
ACTIVATION = Domain(-6.0, 6.0)


def unary(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    derivative: Callable[..., Values] | None,
    *,
    types: tuple[str, ...] = FLOATS,
    domain: Domain | None = None,
    tolerances: Tolerances | None = None,
    lift: tuple[str, ...] = ("bf16",),
    ranges: Mapping[str, Range] | None = None,
    **attrs: Any,
) -> Operator:
    """Register y = formula(x, **attrs) with dy/dx = derivative(x, y, **attrs).

    Formats in `lift` compute in fp32: bf16 always, fp16 where several roundings would add up.
    """

    def backward(grads: Any, inputs: Any, outputs: Any, **settings: Any) -> Values:
        assert derivative is not None
        result: Values = grads[0] * derivative(inputs[0], outputs[0], **settings)
        return result

    return register(
        Operator(
            name,
            ("x",),
            formula,
            in_fp32(compute, lift),
            summary,
            attrs=attrs,
            ranges=ranges or {},
            types=TypeRule(types),
            backward=backward if derivative else None,
            domains={"x": domain} if domain else {},
            examples=EXAMPLES,
            tolerances=tolerances or rounded(),
            allows_empty=True,
        )
    )


def _zero(x: Values, y: Values, **attrs: Any) -> Values:
    return np.zeros_like(x)


def _whole(rounding: Callable[[te.Tensor], te.Tensor]) -> Callable[[te.Tensor], te.Tensor]:
    """Return the rounding with its int32 result cast back to the operand's format."""
    return lambda x: te.cast_to(rounding(x), x.dtype)


def _sign(x: te.Tensor) -> te.Tensor:
    zero = te.vmuls(te.vmaxs(te.vmins(x, 0.0), 0.0), 0.0)
    return te.vsub(te.vcmp(x, zero, "gt"), te.vcmp(x, zero, "lt"))


_moved = exact("one selection or sign change, no rounding")
unary("abs", "|x|", np.abs, te.vabs, lambda x, y: np.sign(x), tolerances=_moved)
unary(
    "neg",
    "-x",
    np.negative,
    lambda x: te.vmuls(x, -1),
    lambda x, y: -np.ones_like(x),
    types=NUMBERS,
    tolerances=_moved,
)
unary(
    "relu",
    "max(x, 0)",
    lambda x: np.maximum(x, 0),
    te.vrelu,
    lambda x, y: (x > 0).astype(x.dtype),
    types=NUMBERS,
    tolerances=_moved,
)
unary("exp", "e^x", np.exp, te.vexp, lambda x, y: y)
unary("log", "ln x, x > 0", np.log, te.vlog, lambda x, y: 1 / x, domain=POSITIVE)
unary("sqrt", "x^(1/2)", np.sqrt, te.vsqrt, lambda x, y: 0.5 / y, domain=POSITIVE)
unary(
    "rsqrt",
    "x^(-1/2)",
    lambda x: 1 / np.sqrt(x),
    te.vrsqrt,
    lambda x, y: -0.5 * y / x,
    domain=POSITIVE,
)
unary("rec", "1 / x", lambda x: 1 / x, te.vrec, lambda x, y: -y * y, domain=POSITIVE)
unary("square", "x^2", np.square, lambda x: te.vmul(x, x), lambda x, y: 2 * x)
unary("ceil", "smallest whole >= x", np.ceil, _whole(te.ceil), _zero, tolerances=_moved)
unary("floor", "largest whole <= x", np.floor, _whole(te.floor), _zero, tolerances=_moved)
unary("round", "nearest whole, halves to even", np.rint, _whole(te.round), _zero, tolerances=_moved)
unary("sign", "1, 0 or -1", np.sign, _sign, _zero, tolerances=_moved)
unary(
    "not",
    "every bit turned",
    np.invert,
    te.vnot,
    None,
    types=("int32",),
    tolerances=_moved,
)


# -- one operand and a number ---------------------------------------------------------------------
unary(
    "adds",
    "x + number",
    lambda x, *, number: x + number,
    lambda x, *, number: te.vadds(x, number),
    lambda x, y, *, number: np.ones_like(x),
    lift=("fp16", "bf16"),  # in fp16 the number itself would be rounded first
    number=1.0,
)
unary(
    "muls",
    "x * number",
    lambda x, *, number: x * number,
    lambda x, *, number: te.vmuls(x, number),
    lambda x, y, *, number: np.full_like(x, number),
    lift=("fp16", "bf16"),
    number=2.0,
)
unary(
    "clip",
    "x limited to [low, high]",
    lambda x, *, low, high: np.clip(x, low, high),
    lambda x, *, low, high: te.vmins(te.vmaxs(x, low), high),
    lambda x, y, *, low, high: ((x > low) & (x < high)).astype(x.dtype),
    tolerances=_moved,
    ranges={"low": NOT_NAN, "high": NOT_NAN},
    low=-1.0,
    high=1.0,
)
unary(
    "relu6",
    "min(max(x, 0), 6)",
    lambda x: np.clip(x, 0, 6),
    lambda x: te.vmins(te.vrelu(x), 6.0),
    lambda x, y: ((x > 0) & (x < 6)).astype(x.dtype),
    domain=Domain(-9.0, 9.0),
    tolerances=_moved,
)


def _leaky(x: te.Tensor, *, alpha: float) -> te.Tensor:
    scaled = te.vmuls(x, alpha)
    return te.vmax(x, scaled) if alpha <= 1 else te.vmin(x, scaled)


unary(
    "leaky_relu",
    "x where x > 0, else alpha * x",
    lambda x, *, alpha: np.where(x > 0, x, alpha * x),
    _leaky,
    lambda x, y, *, alpha: np.where(x > 0, 1.0, alpha),
    lift=("fp16", "bf16"),
    alpha=0.01,
)
