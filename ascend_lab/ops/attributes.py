"""What an attribute of an operator may be: one check for all, by the kind of its default."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np

from ascend_lab.errors import InputError
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
