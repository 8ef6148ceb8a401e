"""The arithmetic of whole numbers that stand for others: v is about (q - offset) scale.

q = clip(round(v / scale) + offset, -2^(b-1), 2^(b-1) - 1), halves to even. Symmetric: offset 0, the
scale is max|v| / (2^(b-1) - 1), or / 2^(b-1) where the largest number is negative. Asymmetric: the
range, 0 taken in, / (2^b - 1). A scale that would be below FLT_EPSILON is 1. (AMCT, github
hicann/amct, custom_op/utils.py.)
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab.compiler.ir import Values
from ascend_lab.errors import InputError

EPSILON = float(np.finfo(np.float32).eps)
LARGEST = 1e18
"""Errors of numbers below it have squares that fp32 holds."""


@dataclass(frozen=True, slots=True)
class Scale:
    """One scale and offset of a whole tensor, in so many bits."""

    scale: float
    offset: int = 0
    bits: int = 8

    def quantise(self, values: Values) -> Values:
        """Return the whole numbers, in the float format of the values."""
        return quantise(values, self.scale, self.offset, self.bits)

    def fake(self, values: Values) -> Values:
        """Return the values that the whole numbers stand for."""
        return fake(values, self.scale, self.offset, self.bits)


def limits(bits: int) -> tuple[int, int]:
    """Return the least and the largest signed number of so many bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def quantise(values: Values, scale: Any, offset: Any = 0, bits: int = 8) -> Values:
    """Return q of the rule above, as floats of the values' format; scales may be arrays."""
    kind = values.dtype.type
    found: Values = np.clip(np.rint(values / np.asarray(scale, kind)) + kind(offset), *limits(bits))
    return found.astype(kind, copy=False)


def fake(values: Values, scale: Any, offset: Any = 0, bits: int = 8) -> Values:
    """Return (q - offset) scale: the values rounded and limited as the whole numbers are."""
    kind = values.dtype.type
    whole = quantise(values, scale, offset, bits) - kind(offset)
    found: Values = whole * np.asarray(scale, kind)
    return found


def scale_between(low: float, high: float, bits: int = 8, asymmetric: bool = False) -> Scale:
    """Return the scale and offset that just hold the numbers from low to high."""
    half = 2 ** (bits - 1)
    one = np.float32(low)
    two = np.float32(high)
    if asymmetric:
        one = min(one, np.float32(0))
        two = max(two, np.float32(0))
        step = (two - one) / np.float32(2 * half - 1)
        if not step >= EPSILON:
            return Scale(1.0, -half, bits)
        return Scale(float(step), -half - round(float(one / step)), bits)
    step = max(abs(one), abs(two)) / np.float32(half if abs(one) > abs(two) else half - 1)
    return Scale(float(step) if step >= EPSILON else 1.0, 0, bits)


def channel_scales(weights: Values, axis: int | None, bits: int = 8) -> tuple[float, ...]:
    """Return the symmetric scale of each slice along an axis, or of all weights for None (ARQ)."""
    rows = weights.reshape(1, -1) if axis is None else np.moveaxis(weights, axis, 0)
    flat = rows.reshape(len(rows), -1)
    return tuple(scale_between(row.min(), row.max(), bits).scale for row in flat)


def along(numbers: Any, axis: int | None, rank: int) -> Values:
    """Return numbers shaped to broadcast along an axis of a tensor; one, or no axis: a scalar."""
    found = np.asarray(numbers)
    if axis is None or found.size == 1:
        return found.reshape(())
    return found.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def checked(values: Any, what: str = "values") -> Values:
    """Return numbers in fp32; raise `InputError` for none, others, and squares fp32 cannot hold."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf" or not array.size:
        got = f"{array.dtype} {array.shape}"
        raise InputError(f"{what}: an array of numbers that is not empty", got, "give one")
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if not (fits := np.abs(narrow) < LARGEST).all():
        place = int(np.argmin(fits.ravel()))
        finite = np.isfinite(narrow.ravel()[place])
        needed = f"numbers below {LARGEST:g} in size" if finite else "finite numbers in fp32"
        got = f"{array.ravel()[place]} at place {place}"
        raise InputError(f"{what}: {needed}", got, "clean the data")
    return narrow


def signal_to_noise_db(values: Values, found: Values) -> float:
    """Return 10 log10(sum v^2 / sum (v - found)^2), in decibel; infinite for equal arrays."""
    wide = values.astype(np.float64)
    noise = float(np.sum((wide - found) ** 2))
    return 10 * math.log10(float(np.sum(wide**2)) / noise) if noise else math.inf


# -- what is known of a layer ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LayerScales:
    """How a layer is quantised: `name` is its node; one weight scale, or one per output channel.

    Weights are symmetric (offset 0). `balance` divides what the layer reads, per input channel, and
    multiplies its weights, before both are quantised; () where nothing is balanced. `shared`: an
    addition beside the layer reads what it reads in whole numbers too, so that a residual is bytes.
    """

    name: str
    scale: float
    offset: int
    weight_scales: tuple[float, ...]
    bits: int = 8
    weight_bits: int = 8
    balance: tuple[float, ...] = ()
    shared: bool = False

    def __post_init__(self) -> None:
        numbers = (self.scale, *self.weight_scales, *self.balance)
        if not self.weight_scales or not all(0 < n < float("inf") for n in numbers):
            raise InputError(f"{self.name}: finite scales above 0", str(min(numbers, default=0)))
        for key, bits in (("bits", self.bits), ("weight_bits", self.weight_bits)):
            if not 2 <= bits <= 16:
                raise InputError(f"{self.name}: {key} from 2 to 16", str(bits))
        half = 2 ** (self.bits - 1)
        if not -half <= self.offset < half:
            raise InputError(f"{self.name}: an offset in {self.bits} bits", str(self.offset))
