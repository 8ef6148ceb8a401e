"""The arithmetic of quantisation, which represents real numbers v by whole numbers q of b bits.

    quantise      q = clip(round(v / scale) + offset, -2^(b-1), 2^(b-1) - 1)     halves to even
    dequantise    v is about (q - offset) scale
    symmetric     offset 0, scale = max|v| / (2^(b-1) - 1), or / 2^(b-1) if that v is negative
    asymmetric    scale = (high - low) / (2^b - 1), the range widened to hold 0;
                  offset = -2^(b-1) - round(low / scale), so that low becomes the least q

With 8 bits and numbers from -1 to 3: scale 4/255 = 0.0157, offset -128 + 64 = -64; then 0 is
exactly q = -64, and 1 is q = round(63.75) - 64 = 0. A scale that would be below FLT_EPSILON
(1.2e-7) is 1. Source: AMCT, github hicann/amct, custom_op/utils.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab.compiler.ir import Values
from ascend_lab.errors import InputError

EPSILON = float(np.finfo(np.float32).eps)
"""FLT_EPSILON, 1.2e-7: the smallest scale; smaller ones are replaced by 1."""
MAX_ABS = 1e18
"""Numbers below it have squares that fp32, which ends at 3.4e38, can hold."""
BIAS_STEPS = 2.0**30
"""Steps to which `quantise.fitting` limits a bias by a larger scale: half of int32, so that the
sums of products have the other half."""
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale and offset of a tensor, and the bits of its whole numbers."""

    scale: float
    offset: int = 0
    bits: int = 8

    def quantise(self, values: Values) -> Values:
        """Return the whole numbers q, in the float format of the values."""
        return quantise(values, self.scale, self.offset, self.bits)

    def fake_quantise(self, values: Values) -> Values:
        """Return (q - offset) scale, the values that the whole numbers stand for."""
        return fake_quantise(values, self.scale, self.offset, self.bits)


def integer_range(bits: int) -> tuple[int, int]:
    """Return the least and the largest signed number of `bits` bits: -128 and 127 for 8 bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def quantise(values: Values, scale: Any, offset: Any = 0, bits: int = 8) -> Values:
    """Return q, as floats of the values' format; scales may be arrays that broadcast."""
    # dividing in the values' format, as the hardware does: an fp64 quotient may round otherwise
    float_type = values.dtype.type
    steps: Values = np.clip(
        np.rint(values / np.asarray(scale, float_type)) + float_type(offset), *integer_range(bits)
    )
    return steps.astype(float_type, copy=False)


def fake_quantise(values: Values, scale: Any, offset: Any = 0, bits: int = 8) -> Values:
    """Return (q - offset) scale: real numbers, rounded and clipped as by quantisation.

    This is "fake quantisation": the network computes in floats with the errors of whole numbers.
    """
    float_type = values.dtype.type
    steps = quantise(values, scale, offset, bits) - float_type(offset)
    rounded: Values = steps * np.asarray(scale, float_type)
    return rounded


def scale_between(low: float, high: float, bits: int = 8, asymmetric: bool = False) -> Scale:
    """Return the scale and offset whose levels just cover the numbers from low to high."""
    half = 2 ** (bits - 1)  # 128 for 8 bits
    start = np.float32(low)
    end = np.float32(high)
    if asymmetric:
        # 0 has to be a level, since zero padding and ReLU write it exactly
        start = min(start, np.float32(0))
        end = max(end, np.float32(0))
        step = (end - start) / np.float32(2 * half - 1)
        # a range of almost nothing: all numbers count as 0, which is q = -128
        if not step >= EPSILON:
            return Scale(1.0, -half, bits)
        return Scale(float(step), -half - round(float(start / step)), bits)
    # 128 levels lie below 0 and 127 above: the step is 4/128 from -4 to 2, and 4/127 from -2 to 4
    step = max(abs(start), abs(end)) / np.float32(half if abs(start) > abs(end) else half - 1)
    return Scale(float(step) if step >= EPSILON else 1.0, 0, bits)


def channel_scales(weights: Values, axis: int | None, bits: int = 8) -> tuple[float, ...]:
    """Return the symmetric scale of each slice of weights along an axis, or one for None (ARQ)."""
    # weights (64, 32, 3, 3) along axis 0 are 64 rows of 288
    rows = weights.reshape(1, -1) if axis is None else np.moveaxis(weights, axis, 0)
    flat = rows.reshape(len(rows), -1)
    return tuple(scale_between(row.min(), row.max(), bits).scale for row in flat)


def broadcast_along(numbers: Any, axis: int | None, rank: int) -> Values:
    """Return numbers shaped to broadcast along an axis of a tensor with `rank` axes.

    Three numbers along axis 1 of 4 have the shape (1, 3, 1, 1); a single number has the shape ().
    """
    array = np.asarray(numbers)
    if axis is None or array.size == 1:
        return array.reshape(())
    return array.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def checked(values: Any, name: str = "values") -> Values:
    """Return numbers in fp32.

    Raises `InputError` for an empty array, for anything but real numbers, and for numbers that are
    not finite or have squares that fp32 cannot hold. `name` is the array's name in the message.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iuf" or not array.size:
        got = f"{array.dtype} {array.shape}"
        raise InputError(f"{name}: an array of numbers that is not empty", got, "give one")
    # a number beyond fp32 becomes infinite here, and is refused below with its place
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if not (fits := np.abs(narrow) < MAX_ABS).all():
        place = int(np.argmin(fits.ravel()))
        finite = np.isfinite(narrow.ravel()[place])
        needed = f"numbers below {MAX_ABS:g} in size" if finite else "finite numbers in fp32"
        got = f"{array.ravel()[place]} at place {place}"
        raise InputError(f"{name}: {needed}", got, "clean the data")
    return narrow


def signal_to_noise_db(values: Values, rounded: Values) -> float:
    """Return 10 log10(sum v^2 / sum (v - rounded)^2), in decibels; infinite for equal arrays."""
    wide = values.astype(np.float64)
    noise = float(np.sum((wide - rounded) ** 2))
    return 10 * math.log10(float(np.sum(wide**2)) / noise) if noise else math.inf


# -- the scales of a layer ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LayerScales:
    """How a layer is quantised: `name` is its node; one weight scale, or one per output channel.

    `scale` and `offset` are those of its input; weights are symmetric, with the offset 0. `balance`
    divides the input, channel by channel, and multiplies the weights, before both are quantised; ()
    if nothing is balanced. `shared` means that the layer's input is also a summand of an addition,
    which then reads the same whole numbers: a residual connection moves bytes instead of floats.
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
        # the offset is the whole number that represents 0, so it must be in the range of these
        if not -half <= self.offset < half:
            raise InputError(f"{self.name}: an offset in {self.bits} bits", str(self.offset))


def bias_scales(layer: LayerScales) -> Values:
    """Return the scales of a layer's sums: one, or one per output channel.

    A sum of products of whole numbers counts in steps of input scale x weight scale.
    """
    return np.float32(layer.scale) * np.asarray(layer.weight_scales, np.float32)


def bias_in_steps(bias: Values, layer: LayerScales) -> Values | None:
    """Return round(b / (scale x weight scale)) in int32; None for a bias that int32 cannot hold.

    Such a bias stays in floats.
    """
    # a bias of 0.5 with the scales 0.02 and 0.004 is 6250 steps of 0.00008
    steps = np.rint(bias.astype(np.float64) / bias_scales(layer))
    fits = np.abs(steps).max(initial=0.0) <= INT32_MAX
    return steps.astype(np.int32) if fits else None
