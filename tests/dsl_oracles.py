"""Tensor expressions next to their values: every operation is done twice, in the DSL and in NumPy.

A `Known` is a tensor, the values it must have, and how far a right kernel may be off (`slack`).
Elementwise operations round once, in the format of their operands, so their slack is 0 as long as
nothing before them was a sum (any order is right) or a function (a few units in the last place).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.operators import dsl as te

Values = NDArray[Any]
INTS = ("int8", "uint8", "int32")
ULP = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-23}
FUNCTION_ULPS = 4
"""Units in the last place of fp32 that exp and log may differ by (NumPy: 1, by alignment)."""


@dataclass(frozen=True)
class Known:
    """A tensor, its right values in its own format, and the largest right deviation from them."""

    tensor: te.Tensor
    value: Values
    slack: Values

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def named(self, name: str) -> Known:
        return Known(te.renamed(self.tensor, name), self.value, self.slack)


def known(array: Values, dtype: str, name: str) -> Known:
    """An input: exactly this array."""
    return Known(te.placeholder(array.shape, dtype, name), array, np.zeros(array.shape))


def wide(dtype: str) -> Any:
    """The format the vector unit computes in."""
    return numpy_type(dtype) if dtype in INTS else np.float32


def made(tensor: te.Tensor, exact: Values, slack: Values) -> Known:
    """Round values computed in the wide format; a deviation may round to the other side."""
    with np.errstate(all="ignore"):
        value = exact.astype(numpy_type(tensor.dtype))
        size = np.abs(value.astype(np.float64)) + slack
    unit = 0.0 if tensor.dtype in INTS else ULP[tensor.dtype]
    slack = np.where(slack > 0, slack + unit * size + 1e-7 * (unit > 0), 0.0)
    assert tensor.shape == value.shape, f"{tensor.label}: {tensor.shape}, NumPy {value.shape}"
    return Known(tensor, value, slack)


def up(x: Known) -> Values:
    return x.value.astype(wide(x.dtype))


# -- element by element ----------------------------------------------------------------------------

BINARY: dict[str, Callable[..., Values]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vdiv": np.divide,
    "vmax": np.maximum,
    "vmin": np.minimum,
    "vand": np.bitwise_and,
    "vor": np.bitwise_or,
}
SCALAR: dict[str, Callable[..., Values]] = {
    "vadds": np.add,
    "vmuls": np.multiply,
    "vmaxs": np.maximum,
    "vmins": np.minimum,
}
UNARY: dict[str, Callable[..., Values]] = {
    "vabs": np.abs,
    "vrelu": lambda x: np.maximum(x, 0),
    "vexp": np.exp,
    "vlog": np.log,
    "vsqrt": np.sqrt,
    "vrsqrt": lambda x: 1 / np.sqrt(x),
    "vrec": lambda x: 1 / x,
    "vnot": np.bitwise_not,
}
FLOAT_ONLY = ("vdiv", "vexp", "vlog", "vsqrt", "vrsqrt", "vrec")
INT_ONLY = ("vand", "vor", "vnot")
POSITIVE = ("vlog", "vsqrt", "vrsqrt", "vrec")
FUNCTIONS = ("vexp", "vlog", "vrsqrt", "vrec")
COMPARE: dict[str, Callable[..., Values]] = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def binary(op: str, a: Known, b: Known) -> Known:
    with np.errstate(all="ignore"):
        exact = BINARY[op](up(a), up(b))
        x, y = (np.abs(k.value.astype(np.float64)) for k in (a, b))
        if op == "vmul":
            slack = x * b.slack + y * a.slack + a.slack * b.slack
        elif op == "vdiv":
            slack = (a.slack + b.slack * x / y) / np.maximum(y - b.slack, 1e-3)
        elif op in ("vmax", "vmin"):
            slack = np.maximum(a.slack, b.slack)
        else:
            slack = a.slack + b.slack
    return made(getattr(te, op)(a.tensor, b.tensor), exact, slack)


def scalar(op: str, a: Known, number: float) -> Known:
    with np.errstate(all="ignore"):
        constant = np.asarray(number, numpy_type(a.dtype)).astype(wide(a.dtype))
        exact = SCALAR[op](up(a), constant)
    slack = a.slack * abs(number) if op == "vmuls" else a.slack
    return made(getattr(te, op)(a.tensor, number), exact, slack)


def unary(op: str, a: Known) -> Known:
    with np.errstate(all="ignore"):
        exact = UNARY[op](up(a))
        slack = a.slack
        if op in (*FUNCTIONS, "vsqrt"):
            x = a.value.astype(np.float64)
            formula = UNARY[op]
            low = np.maximum(x - a.slack, 1e-6) if op != "vexp" else x - a.slack
            high = x + a.slack
            moved = np.maximum(abs(formula(low) - formula(x)), abs(formula(high) - formula(x)))
            slack = np.where(a.slack > 0, moved, 0.0)
        if op in FUNCTIONS:
            slack = slack + FUNCTION_ULPS * ULP["fp32"] * np.maximum(np.abs(exact), 2.0**-14)
    return made(getattr(te, op)(a.tensor), exact, slack)


def cast(a: Known, dtype: str) -> Known:
    """cast_to: nearest even, whole numbers saturate."""
    return _cast(te.cast_to(a.tensor, dtype), a, np.rint)


def rounding(op: str, a: Known) -> Known:
    mode = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}[op]
    return _cast(getattr(te, op)(a.tensor), a, mode)


def _cast(tensor: te.Tensor, a: Known, mode: Callable[..., Values]) -> Known:
    if tensor.dtype not in INTS:
        return made(tensor, a.value.astype(np.float64).astype(numpy_type(tensor.dtype)), a.slack)
    info = np.iinfo(numpy_type(tensor.dtype))
    exact = np.clip(mode(a.value.astype(np.float64)), info.min, info.max)
    return made(tensor, exact, np.where(a.slack > 0, a.slack + 1.0, 0.0))


def compare(a: Known, b: Known, op: str) -> Known:
    exact = COMPARE[op](up(a), up(b)).astype(wide(a.dtype))
    both = a.slack + b.slack
    apart = np.abs(a.value.astype(np.float64) - b.value.astype(np.float64))
    return made(te.vcmp(a.tensor, b.tensor, op), exact, 1.0 * ((both > 0) & (apart <= both)))


def select(condition: Known, a: Known, b: Known) -> Known:
    takes = condition.value != 0
    exact = np.where(takes, a.value, b.value)
    slack = np.where(takes, a.slack, b.slack)
    apart = np.abs(a.value.astype(np.float64) - b.value.astype(np.float64)) + a.slack + b.slack
    slack = np.where(condition.slack > 0, apart, slack)
    return made(te.select(condition.tensor, a.tensor, b.tensor), exact, slack)


# -- folds -----------------------------------------------------------------------------------------
def fold(kind: str, a: Known, axes: int | tuple[int, ...], *, keepdims: bool = False) -> Known:
    """Sums and products in fp32 (whole numbers: exactly), in any order, rounded once at the end."""
    tensor = getattr(te, f"reduce_{kind}")(a.tensor, axes, keepdims)
    x = a.value.astype(np.float64) if a.dtype not in INTS else a.value.astype(np.int64)
    size = np.abs(x.astype(np.float64))
    if kind in ("max", "min"):
        exact = getattr(np, kind)(x, axis=axes, keepdims=keepdims)
        slack = np.max(a.slack, axis=axes, keepdims=keepdims)
    elif kind == "sum":
        exact = np.sum(x, axis=axes, keepdims=keepdims)
        order = _count(a, axes) * 2.0**-24 * np.sum(size, axis=axes, keepdims=keepdims)
        slack = np.sum(a.slack, axis=axes, keepdims=keepdims) + order * (a.dtype not in INTS)
    else:
        exact = np.prod(x, axis=axes, keepdims=keepdims)
        larger = np.prod(size + a.slack, axis=axes, keepdims=keepdims)
        order = _count(a, axes) * 2.0**-23 * larger
        slack = larger - np.prod(size, axis=axes, keepdims=keepdims)
        slack = np.maximum(slack, 0) + order * (a.dtype not in INTS)
    if a.dtype in INTS:
        exact = np.clip(exact, np.iinfo(a.value.dtype).min, np.iinfo(a.value.dtype).max)
    shape = tensor.shape
    return made(tensor, np.reshape(exact, shape), np.reshape(slack, shape))


def _count(a: Known, axes: int | tuple[int, ...]) -> int:
    chosen = (axes,) if isinstance(axes, int) else axes
    return int(np.prod([a.shape[d] for d in chosen])) + 2


# -- elements that only move -----------------------------------------------------------------------
def moved(tensor: te.Tensor, change: Callable[[Values], Values], *sources: Known) -> Known:
    """The same change of place for values and slack."""
    value = change(*(s.value for s in sources))
    return made(tensor, np.atleast_1d(value), np.atleast_1d(change(*(s.slack for s in sources))))


def broadcast(a: Known, shape: Sequence[int]) -> Known:
    return moved(te.broadcast(a.tensor, shape), lambda x: np.broadcast_to(x, tuple(shape)), a)


def reshape(a: Known, shape: Sequence[int]) -> Known:
    return moved(te.reshape(a.tensor, shape), lambda x: x.reshape(tuple(shape)), a)


def transpose(a: Known, perm: Sequence[int] | None) -> Known:
    return moved(te.transpose(a.tensor, perm), lambda x: x.transpose(perm), a)


def cut(a: Known, begin: Sequence[int], end: Sequence[int], step: Sequence[int]) -> Known:
    index = tuple(slice(b, e, s) for b, e, s in zip(begin, end, step, strict=True))
    return moved(te.slice(a.tensor, begin, end, step), lambda x: x[index], a)


def concat(parts: Sequence[Known], axis: int) -> Known:
    tensor = te.concat([p.tensor for p in parts], axis)
    return moved(tensor, lambda *xs: np.concatenate(xs, axis), *parts)


def pad(a: Known, widths: Sequence[tuple[int, int]], value: float) -> Known:
    tensor = te.pad(a.tensor, widths, value)
    exact = np.pad(a.value, widths, constant_values=numpy_type(a.dtype)(value))
    return made(tensor, exact, np.pad(a.slack, widths))


def softmax(a: Known, axis: int) -> Known:
    """exp(x - max x) / sum of it, along one axis."""
    top = broadcast(fold("max", a, axis, keepdims=True), a.shape)
    power = unary("vexp", binary("vsub", a, top))
    total = broadcast(fold("sum", power, axis, keepdims=True), a.shape)
    return binary("vdiv", power, total)


def layer_norm(a: Known, axes: tuple[int, ...], scale: Known, bias: Known) -> Known:
    """(x - mean) / sqrt(var + 0.001) * scale + bias over some axes."""
    share = 1.0 / np.prod([a.shape[d] for d in axes])
    mean = scalar("vmuls", fold("sum", a, axes, keepdims=True), share)
    centred = binary("vsub", a, broadcast(mean, a.shape))
    squares = fold("sum", binary("vmul", centred, centred), axes, keepdims=True)
    spread = unary("vrsqrt", scalar("vadds", scalar("vmuls", squares, share), 1e-3))
    scaled = binary("vmul", centred, broadcast(spread, a.shape))
    scaled = binary("vmul", scaled, broadcast(scale, a.shape))
    return binary("vadd", scaled, broadcast(bias, a.shape))
