"""Formulas on NumPy arrays in the hardware's formats, without instructions: fp32 inside, one cast.

Written apart from the simulator's vector unit on purpose: two implementations check each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.dsl.expr import Call, Expr, Read
from ascend_lab.sim.number_formats import numpy_type

Values = NDArray[Any]

FOLDS: Mapping[str, Any] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
"""What combines two partial results of a fold."""

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "vadd": np.add,
    "vadds": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vmuls": np.multiply,
    "mac": np.multiply,
    "vdiv": np.divide,
    "vmax": np.maximum,
    "vmaxs": np.maximum,
    "vmin": np.minimum,
    "vmins": np.minimum,
    "vabs": np.abs,
    "vrelu": lambda x: np.maximum(x, 0),
    "vexp": np.exp,
    "vln": np.log,
    "vsqrt": np.sqrt,
    "vrsqrt": lambda x: 1 / np.sqrt(x),
    "vrec": lambda x: 1 / x,
    "vand": np.bitwise_and,
    "vor": np.bitwise_or,
    "vnot": np.bitwise_not,
    "vsel": lambda condition, a, b: np.where(np.not_equal(condition, 0), a, b),
}
_COMPARE: Mapping[str, Callable[..., Values]] = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_ROUND: Mapping[str, Callable[..., Values]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "rint": np.rint,
}


def evaluated(expr: Expr, fetch: Callable[[Read], Values]) -> Values:
    """Return the value of a formula; `fetch` gives what each of its reads stands for."""
    if isinstance(expr, Read):
        return fetch(expr)
    assert isinstance(expr, Call)
    args = [evaluated(arg, fetch) for arg in expr.args]
    if expr.op == "vcopy":
        return args[0]
    if expr.op == "vconv":
        whole = numpy_type(expr.format)(0).dtype.kind in "iu"
        value = _ROUND[expr.mode or "rint"](widened(args[0])) if whole else args[0]
        return narrowed(value, expr.format)
    wide = [widened(arg) for arg in args]
    if expr.number is not None:
        wide.append(widened(numpy_type(expr.args[0].dtype)(expr.number)))
    function = _COMPARE[expr.mode] if expr.op == "vcmp" else _FUNCTIONS[expr.op]
    value = function(*wide)
    return value if expr.op == "mac" else narrowed(value, expr.format)


def widened(values: Any) -> Any:
    """Return values in the format arithmetic is done in: fp32, or 64-bit whole numbers."""
    array = np.asarray(values)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)


def narrowed(values: Values, dtype: str) -> Values:
    """Return values in a number format: rounded to nearest even, whole numbers saturate."""
    kind = numpy_type(dtype)
    if np.dtype(kind).kind in "iu":
        limits = np.iinfo(kind)
        values = np.clip(np.nan_to_num(np.rint(values)), limits.min, limits.max)
    result: Values = values.astype(kind)
    return result
