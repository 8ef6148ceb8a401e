"""Number formats, tolerances, and checks of shapes and attributes, shared by all operators.

For example, `broadcast_shape("x and y", (4, 1), (3, 5))` raises an error that shows both shapes,
and `spacing` gives the distance of neighbouring numbers of a format, in which tolerances count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np

from ascend_lab.errors import InputError, ShapeError, TypeMismatchError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa.memory import numpy_type as chip_type
from ascend_lab.machine.layout import AddressMap, address_map

Values = np.ndarray
Attrs = Mapping[str, Any]

FLOATS = ("fp16", "fp32", "bf16")
NUMBERS = (*FLOATS, "int32")
CUBE_INPUTS = ("fp16", "bf16", "int8", "fp32")
CUBE_LAYOUTS = ("NC1HWC0", "C1NHWC0", "FRACTAL_NZ")
"""Layouts of the cube's results: L0C holds fractals of 16 columns in any format."""
_NAMES = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
_MANTISSA_BITS = {"fp16": 10, "bf16": 7, "fp32": 23, "fp64": 52}
_SMALLEST_EXPONENT = {"fp16": -14, "bf16": -126, "fp32": -126, "fp64": -1022}


@lru_cache(4096)
def map_of(layout: str, shape: tuple[int, ...], dtype: str) -> AddressMap:
    """Return the address map of a layout; a suffix such as `:4` sets the channels of a block.

    The cube writes 4-byte results in blocks of 16, although 32 bytes hold only 8 of them.
    """
    # "NC1HWC0:16" is NC1HWC0 with blocks of 16 channels.
    name, _, lanes = layout.partition(":")
    block_lanes = "16" if DTYPE_BYTES[dtype] == 4 and name in CUBE_LAYOUTS else lanes
    return address_map(name, shape, dtype, c0=int(block_lanes) if block_lanes else None)


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return the NumPy type of a number format, or of "fp64", which only references use."""
    if dtype == "fp64":
        return np.dtype(np.float64)
    if dtype not in DTYPE_BYTES:
        format_names = ", ".join(DTYPE_BYTES)
        raise TypeMismatchError("a number format", repr(dtype), f"use one of {format_names}")
    numpy_format: np.dtype[Any] = np.dtype(chip_type(dtype))
    return numpy_format


def format_of(array: Values) -> str:
    """Return the number format of a NumPy array ("fp64" for double, which no chip has)."""
    return _format(array.dtype)


@lru_cache(maxsize=64)
def _format(kind: np.dtype[Any]) -> str:
    name = str(kind)
    dtype = _NAMES.get(name, name)
    if dtype not in DTYPE_BYTES and dtype not in _MANTISSA_BITS:
        raise TypeMismatchError("an array in a number format of the chips", name, "use astype")
    return dtype


def is_float(dtype: str) -> bool:
    """Return whether a format is a floating-point format."""
    return dtype in _MANTISSA_BITS


def widen(array: Values) -> Values:
    """Return an array in fp64, or int64 for whole numbers."""
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def round_to(values: Values, dtype: str) -> Values:
    """Cast fp64 or int64 values once, to the nearest number, with ties to even.

    A float that is cast to an integer format saturates, and NaN becomes 0. Integers that are cast
    to a narrower integer format wrap, like additions of the vector unit.
    """
    kind = numpy_type(dtype)
    if kind.kind in "iu" and values.dtype.kind == "f":
        info = np.iinfo(kind)
        # 2.5 rounds to 2 (halves to even), 300.0 to 127 in int8, NaN to 0.
        values = np.clip(np.nan_to_num(np.rint(values)), info.min, info.max)
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(kind)


def spacing(values: Values, dtype: str) -> Values:
    """Return the distance of neighbouring numbers at |values|: 2^(exponent - mantissa bits).

    For fp16, which has 10 mantissa bits, it is 2^-10 in [1, 2) and 2^-9 in [2, 4).
    """
    magnitudes = np.abs(np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0))
    # frexp returns a mantissa in [0.5, 1), the formats count from 1: hence the - 1
    exponent = np.frexp(np.maximum(magnitudes, 2.0 ** _SMALLEST_EXPONENT[dtype]))[1] - 1
    step: Values = np.ldexp(1.0, exponent - _MANTISSA_BITS[dtype])
    return step


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed error, ulps * spacing(reference) + atol, and the reason why it is not smaller."""

    ulps: float
    atol: float
    reason: str

    def bound(self, reference: Values, dtype: str) -> Values:
        """Return the largest error allowed at each element; 0 for whole numbers."""
        if not is_float(dtype):
            return np.full(reference.shape, self.atol)
        # 1 ulp in fp16 at 3.0 is 2^-9, at 1000 it is 0.5.
        return self.ulps * spacing(reference, dtype) + self.atol


Tolerances = Mapping[str, Tolerance]


def exact(reason: str = "values are moved or compared, not rounded") -> Tolerances:
    """Return the tolerance 0 of operators that only move or select values."""
    return dict.fromkeys(DTYPE_BYTES, Tolerance(0.0, 0.0, reason))


def rounded(*, ulps: float = 1.0, fp32_ulps: float = 4.0, atol: float = 0.0) -> Tolerances:
    """Return tolerances of arithmetic: `ulps` in narrow formats, `fp32_ulps` in fp32, plus `atol`.

    Narrow formats compute in fp32 and round once more at the end. Rounding twice may give the
    neighbour of the correctly rounded number, so one unit in the last place is allowed.
    """
    narrow = Tolerance(ulps, atol, "computed in fp32, then rounded once")
    wide = Tolerance(fp32_ulps, atol, "each fp32 instruction rounds once")
    integers = Tolerance(0.0, 0.0, "whole numbers are exact")
    return {"fp16": narrow, "bf16": narrow, "fp32": wide, "int32": integers, "int8": integers}


@dataclass(frozen=True, slots=True)
class TypeRule:
    """The number formats of an operator's inputs and outputs.

    All inputs share one format out of `allowed`, the main format. Inputs named in `fixed` have a
    format of their own, where "result" stands for that of the first output. `result` maps the main
    format and the attributes to the output formats; if it is None, all outputs have the main one.
    `unit` is the unit that computes: "vector" or "cube".
    """

    allowed: tuple[str, ...] = FLOATS
    fixed: tuple[tuple[str, str], ...] = ()
    result: Callable[[str, Attrs], str | tuple[str, ...]] | None = None
    unit: str = "vector"

    def outputs(self, main: str, attrs: Attrs, count: int) -> tuple[str, ...]:
        """Return the formats of `count` outputs for the main input format."""
        formats = main if self.result is None else self.result(main, attrs)
        return (formats,) * count if isinstance(formats, str) else formats

    def inputs(self, names: tuple[str, ...], main: str, attrs: Attrs) -> tuple[str, ...]:
        """Return the format each named input must have when the main one is `main`."""
        fixed_formats = dict(self.fixed)
        # matmul in int8 with a bias "result": (int8, int8, int32).
        declared = (fixed_formats.get(name, main) for name in names)
        return tuple(self.outputs(main, attrs, 1)[0] if k == "result" else k for k in declared)

    def main(self, names: tuple[str, ...], dtypes: tuple[str, ...]) -> str:
        """Return the main format among the inputs' formats."""
        fixed_formats = dict(self.fixed)
        # batch_norm (x fp16, scale .. variance fp32): the fixed ones do not count, the main format
        # is fp16.
        shared = [d for name, d in zip(names, dtypes, strict=True) if name not in fixed_formats]
        return shared[0] if shared else self.allowed[0]

    def on_chip(self, chip: Chip) -> tuple[str, ...]:
        """Return the main formats a chip can compute: its cube's, or its vector unit's."""
        if self.unit == "cube":
            return tuple(d for d in self.allowed if d in chip.cube)
        return tuple(d for d in self.allowed if d != "bf16" or "bf16" in chip.cube)


def check_types(
    where: str, rule: TypeRule, names: tuple[str, ...], dtypes: tuple[str, ...], attrs: Attrs
) -> str:
    """Return the main format; raise `TypeMismatchError` naming the first input that differs."""
    main = rule.main(names, dtypes)
    if main not in rule.allowed:
        raise TypeMismatchError(f"{where}: {' or '.join(rule.allowed)}", main, "cast the inputs")
    for name, needed_dtype, got_dtype in zip(
        names, rule.inputs(names, main, attrs), dtypes, strict=True
    ):
        if needed_dtype != got_dtype:
            because = f", because the operator's format is {main}" if needed_dtype == main else ""
            needed = f"{where}: input {name} in {needed_dtype}{because}"
            raise TypeMismatchError(needed, got_dtype, f"cast {name} to {needed_dtype}")
    return main


def check_chip(where: str, rule: TypeRule, main: str, chip: Chip) -> None:
    """Raise `TypeMismatchError` unless the chip's unit computes the main format."""
    supported = rule.on_chip(chip)
    if main not in supported:
        supported_names = " or ".join(supported) or "no format"
        needed = f"{where} on the {rule.unit} unit of {chip.name}: {supported_names}"
        raise TypeMismatchError(needed, main, "cast the inputs or choose another chip")


# -- shapes and attributes -------------------------------------------------------------------------
Range = tuple[float, float]
LARGEST = float(np.finfo(np.float32).max)
FINITE: Range = (-LARGEST, LARGEST)
"""The range of attributes whose default is a fractional number."""
NOT_NAN: Range = (-math.inf, math.inf)
"""The range of attributes that become output values, which may be infinite."""
BELOW_ONE: Range = (0.0, math.nextafter(1.0, 0.0))
EPSILON = {"epsilon": (0.0, LARGEST)}


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; True and False do not count as integers."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_attribute(where: str, value: Any, default: Any, limits: Range | None = None) -> None:
    """Raise `InputError` unless a value is of the same type as the default: flag, text or number.

    A number must lie in `limits`, by default in the finite range of fp32; integer limits ask for
    an integer. An attribute whose default is None may be None. Shape rules check sizes and axes.
    """
    if isinstance(default, bool):
        needed = "" if isinstance(value, bool | np.bool_) or is_flag(value) else "True or False"
    elif isinstance(default, str):
        needed = "" if isinstance(value, str) else f"a word such as {default}"
    elif limits is not None or isinstance(default, float):
        low, high = limits or FINITE
        needed = "" if value is None is default else _wrong_number(value, low, high)
    else:
        is_flag_for_number = isinstance(value, bool) and isinstance(default, int)
        needed = f"a number such as {default}" if is_flag_for_number else ""
    if needed:
        raise InputError(f"{where}: {needed}", shown(value), "correct it")


def is_flag(value: object) -> bool:
    """Return whether a value is the 0 or 1 that model files write for a flag."""
    return is_whole(value) and value in (0, 1)


def _wrong_number(value: Any, low: float, high: float) -> str:
    """Return a description of the number that is needed, or "" if the value is such a number."""
    # Limits (-128, 255) ask for whole numbers, (0.0, 1.0) for any.
    needs_integer = isinstance(low, int)
    is_right_kind = is_whole(value) or (
        isinstance(value, float | np.floating) and not needs_integer
    )
    if (
        is_right_kind
        and low <= value <= high
        and (needs_integer or abs(value) <= LARGEST or abs(value) == math.inf)
    ):
        return ""
    kind_name = "a whole number" if needs_integer else "a number"
    return kind_name if math.isinf(high) else f"{kind_name} from {low:g} to {high:g}"


# -- shapes: broadcasting, axes, windows; errors show the shapes -----------------------------------
Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Pairs = tuple[tuple[int, int], ...]
MAX_ELEMENTS = 2**31 - 1
"""Largest tensor: sizes are 32-bit signed numbers."""


def elements(shape: Shape) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


def check_shape(where: str, shape: Any) -> Shape:
    """Return a shape as a tuple of ints; raise `ShapeError` if it is not valid or too large."""
    try:
        dims = tuple(int(n) for n in shape)
        all_integers = all(int(n) == n for n in shape)
    except (TypeError, ValueError):
        raise ShapeError(f"{where}: a shape", repr(shape), "pass a tuple of ints") from None
    if not all_integers or any(n < 0 for n in dims):
        raise ShapeError(f"{where}: whole sizes of at least 0", str(shape), "check the shape")
    if elements(dims) > MAX_ELEMENTS:
        got = f"{elements(dims)} in {dims}"
        raise ShapeError(f"{where}: at most {MAX_ELEMENTS} elements", got, "split the tensor")
    return dims


def broadcast_shape(where: str, *shapes: Shape) -> Shape:
    """Return the common shape by NumPy's rule: align right, sizes equal or 1.

    Raises `ShapeError` with all shapes and the axis that clashes.
    """
    rank = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]  # (5,) against (3, 5) becomes (1, 5)
    out = []
    for axis, sizes in enumerate(zip(*padded, strict=True)):
        # Sizes 1, 4 and 4 give {4}; 3 against 4 gives {3, 4}, a clash; 1 and 1 give {}, and 1.
        stretched_sizes = {n for n in sizes if n != 1}
        if len(stretched_sizes) > 1:
            needed = f"{where}: shapes that broadcast (equal sizes or 1, aligned right)"
            clash = f"{' against '.join(map(str, sizes))} at axis {axis - rank}"
            got = f"{' and '.join(map(str, shapes))}: {clash}"
            raise ShapeError(needed, got, "reshape one of them")
        out.append(stretched_sizes.pop() if stretched_sizes else 1)
    return tuple(out)


def span(shape: Shape, axis: int, low: int, high: int) -> tuple[Shape, Shape]:
    """Return the begin and end corners of the slice low .. high - 1 of one axis.

    For shape (4, 6) and columns 2 .. 4 the corners are (0, 2) and (4, 5).
    """
    begin = tuple(low if i == axis else 0 for i in range(len(shape)))
    return begin, tuple(high if i == axis else n for i, n in enumerate(shape))


def axis_of(where: str, axis: Any, shape: Shape) -> int:
    """Return an axis counted from 0; raise `ShapeError` if the shape has no such axis."""
    rank = len(shape)
    if not is_whole(axis) or not -rank <= axis < rank:
        needed = f"{where}: an axis from {-rank} to {rank - 1} of shape {shape}"
        raise ShapeError(needed, repr(axis), "count from 0, or back from -1")
    return int(axis) % rank


def axes_of(where: str, axis: Any, shape: Shape) -> tuple[int, ...]:
    """Return sorted axes counted from 0; None means all; raise `ShapeError` on repeats."""
    if axis is None:
        return tuple(range(len(shape)))
    axis_list = axis if isinstance(axis, tuple | list) else (axis,)
    # (-1, 0) of 3 axes is (0, 2); (0, -3) names axis 0 twice.
    axes = tuple(sorted(axis_of(where, a, shape) for a in axis_list))
    if len(set(axes)) < len(axes):
        raise ShapeError(f"{where}: each axis once", str(axis), f"shape {shape}: drop the repeat")
    return axes


def pair(where: str, value: Any, *, least: int = 1) -> tuple[int, int]:
    """Return (vertical, horizontal) of a number or a pair; raise `ShapeError` below `least`."""
    # 2 is (2, 2): rows and columns alike.
    values = tuple(value) if isinstance(value, Sequence | np.ndarray) else (value, value)
    if len(values) != 2 or any(not is_whole(n) or n < least for n in values):
        needed = f"{where}: one or two whole numbers >= {least}"
        raise ShapeError(needed, shown(value), f"e.g. {least + 1}, or (vertical, horizontal)")
    return int(values[0]), int(values[1])


def pad_pairs(where: str, value: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return ((top, bottom), (left, right)) of a number, two, or two pairs."""
    if is_whole(value):
        value = (value, value)
    if not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
        raise ShapeError(f"{where}: pad, (pad, pad) or two pairs", shown(value), "e.g. 1")
    sides = tuple(pair(f"{where}: padding", side, least=0) for side in value)
    return sides[0], sides[1]


def window_count(where: str, size: int, kernel: int, stride: int, pads: Sequence[int]) -> int:
    """Return (size + pads - kernel) // stride + 1; raise `ShapeError` if no window fits."""
    # 7 rows, pads (1, 1), reach 3, stride 2: (9 - 3) // 2 + 1 = 4 windows.
    room = size + sum(pads)
    if kernel > room:
        needed = f"{where}: a window no larger than the padded input ({size} + {sum(pads)})"
        remedy = "add padding or use a smaller kernel"
        raise ShapeError(needed, f"{kernel} (dilation included)", remedy)
    return (room - kernel) // stride + 1


def check_rank(where: str, shape: Shape, *ranks: int) -> None:
    """Raise `ShapeError` unless the shape has one of the given ranks."""
    if len(shape) not in ranks:
        allowed = " or ".join(map(str, ranks))
        raise ShapeError(f"{where}: {allowed} axes", f"{len(shape)} in {shape}", "reshape it")
