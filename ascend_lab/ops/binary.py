"""Operators of two or three operands with NumPy broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.ops.formats import FLOATS, NUMBERS, Tolerances, TypeRule, exact, rounded
from ascend_lab.ops.lifting import in_fp32, stretch
from ascend_lab.ops.operator import Domain, Example, Operator
from ascend_lab.ops.registry import register
from ascend_lab.ops.shapes import unbroadcast

Values = NDArray[Any]
PAIRS = tuple(
    Example(shapes)
    for shapes in (
        ((1,), (1,)),
        ((33,), (33,)),
        ((128,), (1,)),
        ((4, 1), (1, 5)),
        ((3, 1, 17), (2, 1)),
        ((2, 127), (127,)),
        ((31, 16), (31, 16)),
        ((0, 3), (1, 3)),
    )
)
DIVISORS = Domain(0.25, 3.0)
TIES = Domain(-2.0, 2.0, step=0.5)


def binary(
    name: str,
    summary: str,
    formula: Callable[..., Values],
    compute: Callable[..., Any],
    slopes: Callable[..., tuple[Values, Values]] | None,
    *,
    types: tuple[str, ...] = NUMBERS,
    domains: dict[str, Domain] | None = None,
    tolerances: Tolerances | None = None,
    lift: tuple[str, ...] = ("bf16",),
) -> Operator:
    """Register z = formula(x, y) with (dz/dx, dz/dy) = slopes(x, y, z), both operands broadcast."""

    def expression(x: te.Tensor, y: te.Tensor) -> Any:
        return compute(*stretch(x, y))

    def backward(grads: Any, inputs: Any, outputs: Any) -> tuple[Values, Values]:
        assert slopes is not None
        dx, dy = slopes(inputs[0], inputs[1], outputs[0])
        shapes = [v.shape for v in inputs]
        return unbroadcast(grads[0] * dx, shapes[0]), unbroadcast(grads[0] * dy, shapes[1])

    return register(
        Operator(
            name,
            ("x", "y"),
            formula,
            in_fp32(expression, lift),
            summary,
            outputs=("z",),
            types=TypeRule(types),
            backward=backward if slopes else None,
            domains=domains or {},
            examples=PAIRS,
            tolerances=tolerances or rounded(fp32_ulps=1),
            allows_empty=True,
        )
    )


def _like(z: Values, x: Values, y: Values) -> tuple[Values, Values]:
    """Return two slopes in the precision of the result."""
    return np.asarray(x, z.dtype), np.asarray(y, z.dtype)


_chosen = exact()
binary("add", "x + y", np.add, te.vadd, lambda x, y, z: _like(z, np.ones(1), np.ones(1)))
binary("sub", "x - y", np.subtract, te.vsub, lambda x, y, z: _like(z, np.ones(1), -np.ones(1)))
binary("mul", "x y", np.multiply, te.vmul, lambda x, y, z: (y, x))
binary(
    "div",
    "x / y",
    np.divide,
    te.vdiv,
    lambda x, y, z: (1 / y, -z / y),
    types=FLOATS,
    domains={"y": DIVISORS},
)
binary(
    "max",
    "the larger of x and y",
    np.maximum,
    te.vmax,
    lambda x, y, z: _like(z, x > y, x <= y),
    tolerances=_chosen,
)
binary(
    "min",
    "the smaller of x and y",
    np.minimum,
    te.vmin,
    lambda x, y, z: _like(z, x < y, x >= y),
    tolerances=_chosen,
)
binary(
    "pow",
    "x^y = e^(y ln x) for x > 0",
    np.power,
    lambda x, y: te.vexp(te.vmul(y, te.vlog(x))),
    lambda x, y, z: (y * z / x, z * np.log(x)),
    types=FLOATS,
    domains={"x": DIVISORS},
    # an error of one ulp in y ln x is |y ln x| ulps of the result
    tolerances=rounded(fp32_ulps=16),
    lift=("fp16", "bf16"),
)
binary(
    "and", "bits set in both", np.bitwise_and, te.vand, None, types=("int32",), tolerances=_chosen
)
binary(
    "or", "bits set in either", np.bitwise_or, te.vor, None, types=("int32",), tolerances=_chosen
)


def _comparison(name: str, sign: str, op: str, compare: Callable[..., Any]) -> None:
    def formula(x: Values, y: Values) -> Values:
        result: Values = compare(x, y).astype(x.dtype)
        return result

    binary(
        name,
        f"1 where x {sign} y, else 0, in the operands' format",
        formula,
        lambda x, y: te.vcmp(x, y, op),
        lambda x, y, z: (np.zeros_like(z), np.zeros_like(z)),
        types=FLOATS,
        domains={"x": TIES, "y": TIES},
        tolerances=_chosen,
    )


for _name, _symbol, _op, _compare in (
    ("equal", "=", "eq", np.equal),
    ("not_equal", "!=", "ne", np.not_equal),
    ("greater", ">", "gt", np.greater),
    ("greater_equal", ">=", "ge", np.greater_equal),
    ("less", "<", "lt", np.less),
    ("less_equal", "<=", "le", np.less_equal),
):
    _comparison(_name, _symbol, _op, _compare)


def _select_backward(grads: Any, inputs: Any, outputs: Any) -> tuple[None, Values, Values]:
    taken = inputs[0] != 0
    left, right = np.where(taken, grads[0], 0), np.where(taken, 0, grads[0])
    return None, unbroadcast(left, inputs[1].shape), unbroadcast(right, inputs[2].shape)


register(
    Operator(
        "select",
        ("condition", "x", "y"),
        lambda condition, x, y: np.where(condition != 0, x, y),
        in_fp32(lambda *given: te.select(*stretch(*given)), ("bf16",)),
        "x where the condition is not 0, else y (ONNX Where)",
        outputs=("z",),
        types=TypeRule(FLOATS),
        backward=_select_backward,
        examples=tuple(
            Example(shapes)
            for shapes in (
                ((1,), (1,), (1,)),
                ((129,), (129,), (129,)),
                ((3, 1), (1, 7), (3, 7)),
                ((31, 17), (31, 17), (1,)),
            )
        ),
        domains={"condition": TIES},
        tolerances=_chosen,
        allows_empty=True,
    )
)
