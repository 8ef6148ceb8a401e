"""NumPy's types for the hardware's number formats; bfloat16 comes from `ml_dtypes`, when needed."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import BLOCK_BYTES
from ascend_lab.errors import InputError
from ascend_lab.isa.program import REDUCING, WHOLE_BLOCKS, WITH_SCALAR, Instruction

_TYPES: Mapping[str, Any] = {
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
}


@cache
def numpy_type(dtype: str) -> Any:
    """Return the NumPy type of a number format such as "fp16"; raise `InputError` for others.

    "bf16" is `ml_dtypes.bfloat16`: fp32 with the lower 16 bits rounded away, to nearest even.
    """
    if dtype == "bf16":
        return import_module("ml_dtypes").bfloat16
    if dtype not in _TYPES:
        raise InputError("a number format", repr(dtype), f"use {', '.join((*_TYPES, 'bf16'))}")
    return _TYPES[dtype]


# -- what the vector unit computes -----------------------------------------------------------------
Values = NDArray[Any]

ELEMENTWISE: Mapping[str, Callable[..., Values]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vdiv": np.divide,
    "vmax": np.maximum,
    "vmin": np.minimum,
    "vabs": np.abs,
    "vrelu": lambda x: np.maximum(x, x.dtype.type(0)),
    "vexp": np.exp,
    "vln": np.log,
    "vsqrt": np.sqrt,
    "vrsqrt": lambda x: 1.0 / np.sqrt(x),
    "vrec": lambda x: 1.0 / x,
    "vconv": lambda x: x,
    "vcopy": lambda x: x,
    "vadds": np.add,
    "vmuls": np.multiply,
    "vmaxs": np.maximum,
    "vmins": np.minimum,
    "vand": np.bitwise_and,
    "vor": np.bitwise_or,
    "vnot": np.bitwise_not,
}
COMPARE: Mapping[str, Callable[..., Values]] = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
ROUND: Mapping[str, Callable[..., Values]] = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}
_REDUCE: Mapping[str, Any] = {
    "vcadd": np.add,
    "vcgadd": np.add,
    "vcmax": np.maximum,
    "vcgmax": np.maximum,
    "vcmin": np.minimum,
}


def store(dst: Values, values: Values, mask: Values | None = None) -> None:
    """Write with the hardware's cast: round to nearest even, saturate integers."""
    if dst.dtype.kind in "iu" and values.dtype != dst.dtype:
        info = np.iinfo(dst.dtype)
        rounded = np.nan_to_num(np.rint(values.astype(np.float64)))
        values = np.clip(rounded, info.min, info.max)
    np.copyto(dst, values.astype(dst.dtype, copy=False), where=True if mask is None else mask)


def run_vector(instruction: Instruction, dst: Values, srcs: Sequence[Values]) -> None:
    """Execute one vector instruction: read the views `srcs`, write the view `dst`.

    Sums and functions are taken in fp32 (integers: exactly) and cast once, at the end.
    """
    op = instruction.op
    if op in WHOLE_BLOCKS:
        turned = srcs[0].swapaxes(-1, -2) if op == "vtranspose" else srcs[0][:, None]
        store(dst, np.broadcast_to(turned, dst.shape))
        return
    if op in REDUCING:
        _reduce(op, dst, srcs[0], _mask(instruction, srcs[0]))
        return
    mask = _mask(instruction, dst).reshape((1, *dst.shape[1:]))
    shaped = [s.reshape(dst.shape) for s in srcs]
    if op == "vdup":
        store(dst, np.full(dst.shape, instruction.attr("scalar"), np.float64), mask)
    elif op == "vsel":
        chosen, (a, b) = (mask, shaped) if len(shaped) == 2 else (shaped[0] != 0, shaped[1:])
        store(dst, np.where(chosen, a, b))
    else:
        store(dst, _elementwise(instruction, shaped), mask)


def _mask(instruction: Instruction, main: Values) -> Values:
    """Return the lanes of one repeat that take part, all where no mask is given."""
    bits = instruction.attr("mask", -1)
    assert isinstance(bits, int)
    return np.array([bits >> i & 1 for i in range(main.size // main.shape[0])], bool)


def _elementwise(instruction: Instruction, srcs: list[Values]) -> Values:
    op = instruction.op
    kind = srcs[0].dtype
    if op in ("vand", "vor", "vnot"):
        bits = np.dtype(f"u{kind.itemsize}")
        return ELEMENTWISE[op](*(s.astype(kind).view(bits) for s in srcs)).view(kind)
    if op == "vcopy":
        return srcs[0]
    if op == "vconv":
        rounding = str(instruction.attr("round", "rint"))
        return ROUND[rounding](srcs[0].astype(np.float64)) if rounding in ROUND else srcs[0]
    if op == "vcmp":
        return COMPARE[str(instruction.attr("op"))](*srcs).astype(kind)
    wide: Any = kind if kind.kind in "iu" else np.float32
    values = [s.astype(wide) for s in srcs]
    if op == "vaxpy":
        scaled = values[1] * np.asarray(instruction.attr("scalar"), kind).astype(wide)
        total: NDArray[Any] = (values[0] + scaled).astype(kind)
        return total
    if op in WITH_SCALAR:
        values.append(np.asarray(instruction.attr("scalar"), kind).astype(wide))
    result: Values = ELEMENTWISE[op](*values).astype(kind)
    return result


def _reduce(op: str, dst: Values, src: Values, mask: Values) -> None:
    """Fold each repeat, or each 32-byte block of it: fp32 or whole-number sums, then one cast."""
    wide: Any = np.int64 if src.dtype.kind in "iu" else np.float32
    low, high = -np.inf, np.inf
    if wide is np.int64:
        low, high = np.iinfo(src.dtype).min, np.iinfo(src.dtype).max
    fill = {"vcadd": 0, "vcgadd": 0, "vcmin": high}.get(op, low)
    rows = np.where(mask, src.reshape(src.shape[0], -1).astype(wide), wide(fill))
    if op.startswith("vcg"):
        rows = rows.reshape(src.shape[0], -1, BLOCK_BYTES // src.dtype.itemsize)
    store(dst, _REDUCE[op].reduce(rows, axis=-1).reshape(dst.shape))
