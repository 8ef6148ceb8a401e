"""What shapes and attributes of operators may be: one check for all, with numbers in the error."""

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from ascend_lab.errors import InputError, ShapeError
from ascend_lab.limits import shown

Range = tuple[float, float]
LARGEST = float(np.finfo(np.float32).max)
FINITE: Range = (-LARGEST, LARGEST)
"""What every attribute with a fractional default must lie in."""
NOT_NAN: Range = (-math.inf, math.inf)
"""Of an attribute that becomes a value of the output: infinities are values, too."""
BELOW_ONE: Range = (0.0, math.nextafter(1.0, 0.0))
EPSILON = {"epsilon": (0.0, LARGEST)}


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_attribute(where: str, value: Any, default: Any, limits: Range | None = None) -> None:
    """Raise `InputError` unless a value is of the default's kind: flag, text or number.

    Numbers lie in `limits` (whole ones if those are), by default they are finite in fp32; an
    attribute whose default is None may be None. Sizes, axes and the like are the rules' affair.
    """
    if isinstance(default, bool):
        needed = "" if isinstance(value, bool | np.bool_) or is_flag(value) else "True or False"
    elif isinstance(default, str):
        needed = "" if isinstance(value, str) else f"a word such as {default}"
    elif limits is not None or isinstance(default, float):
        low, high = limits or FINITE
        needed = "" if value is None is default else _wrong_number(value, low, high)
    else:
        flag = isinstance(value, bool) and isinstance(default, int)
        needed = f"a number such as {default}" if flag else ""
    if needed:
        raise InputError(f"{where}: {needed}", shown(value), "mend it")


def is_flag(value: object) -> bool:
    """Return whether a value is the 0 or 1 that model files write for a flag."""
    return is_whole(value) and value in (0, 1)


def _wrong_number(value: Any, low: float, high: float) -> str:
    """Return what was needed, or "" if the value is a number in the range."""
    whole = isinstance(low, int)
    fine = is_whole(value) or (isinstance(value, float | np.floating) and not whole)
    if fine and low <= value <= high and (whole or abs(value) <= LARGEST or abs(value) == math.inf):
        return ""
    word = "a whole number" if whole else "a number"
    return word if math.isinf(high) else f"{word} from {low:g} to {high:g}"


# -- shapes: broadcasting, axes, windows; errors show the shapes -----------------------------------
Shape = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
MAX_ELEMENTS = 2**31 - 1
"""Largest tensor: sizes are 32-bit signed numbers."""


def elements(shape: Shape) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


def check_shape(where: str, shape: Any) -> Shape:
    """Return a shape as a tuple of ints; raise `ShapeError` if it is none or too large."""
    try:
        dims = tuple(int(n) for n in shape)
        whole = all(int(n) == n for n in shape)
    except (TypeError, ValueError):
        raise ShapeError(f"{where}: a shape", repr(shape), "pass a tuple of ints") from None
    if not whole or any(n < 0 for n in dims):
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
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    out = []
    for axis, sizes in enumerate(zip(*padded, strict=True)):
        wanted = {n for n in sizes if n != 1}
        if len(wanted) > 1:
            raise ShapeError(
                f"{where}: shapes that broadcast (equal sizes or 1, aligned right)",
                f"{' and '.join(map(str, shapes))}: {' against '.join(map(str, sizes))} at axis "
                f"{axis - rank}",
                "reshape one of them",
            )
        out.append(wanted.pop() if wanted else 1)
    return tuple(out)


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
    given = axis if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(sorted(axis_of(where, a, shape) for a in given))
    if len(set(axes)) < len(axes):
        raise ShapeError(f"{where}: each axis once", str(axis), f"shape {shape}: drop the repeat")
    return axes


def pair(where: str, value: Any, *, least: int = 1) -> tuple[int, int]:
    """Return (vertical, horizontal) of a number or a pair; raise `ShapeError` below `least`."""
    both = (value, value) if is_whole(value) else tuple(value)
    if len(both) != 2 or any(not is_whole(n) or n < least for n in both):
        raise ShapeError(
            f"{where}: one or two whole numbers >= {least}", repr(value), "vertical, horizontal"
        )
    return int(both[0]), int(both[1])


def pad_pairs(where: str, value: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return ((top, bottom), (left, right)) of a number, two, or two pairs."""
    if is_whole(value):
        value = (value, value)
    if len(value) != 2:
        raise ShapeError(f"{where}: pad, (pad, pad) or two pairs", repr(value), "check the pad")
    sides = tuple(pair(f"{where}: padding", side, least=0) for side in value)
    return sides[0], sides[1]


def window_count(where: str, size: int, kernel: int, stride: int, pads: Sequence[int]) -> int:
    """Return (size + pads - kernel) // stride + 1; raise `ShapeError` if no window fits."""
    room = size + sum(pads)
    if kernel > room:
        needed = f"{where}: a window no larger than the padded input ({size} + {sum(pads)})"
        got = f"{kernel} (dilation included)"
        raise ShapeError(needed, got, "add padding or use a smaller kernel")
    return (room - kernel) // stride + 1


def check_rank(where: str, shape: Shape, *ranks: int) -> None:
    """Raise `ShapeError` unless the shape has one of the given ranks."""
    if len(shape) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ShapeError(f"{where}: {wanted} axes", f"{len(shape)} in {shape}", "reshape it")
