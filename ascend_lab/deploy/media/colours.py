"""Colour conversion with integers, as the chip's pre-processing unit AIPP computes it.

The matrices come from the video standards, in units of 1/256:

    YUV -> RGB   out_i = (sum_j m_ij (in_j - in_bias_j)) >> 8
    RGB -> YUV   out_i = ((sum_j m_ij in_j) >> 8) + out_bias_i

Every entry m is round(256 c) of the standard's real coefficient c, except for two that are larger
by one in the vendor's table (`LUMA_CORRECTIONS`). Source: CANN, AIPP, CSC_config. Assumed, as the
documents do not state it: the shift rounds down, and results are limited to 0..255.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError

Image = NDArray[Any]
Row = tuple[int, int, int]
LUMA_SHARES = {"601": (0.299, 0.114), "709": (0.2126, 0.0722)}
"""Standard -> the coefficients of red and blue in luma (ITU-R BT.601, BT.709)."""
STANDARDS = tuple(f"{name} {reach}" for name in LUMA_SHARES for reach in ("narrow", "wide"))
"""Names of the conversions: a standard and its range of values (narrow luma is 16 to 235)."""
LUMA_CORRECTIONS = {"709 wide": (1, 0, 1)}
"""The published luma row minus the rounded coefficients: it has 55 and 19 for 54 and 18."""
NEUTRAL: Row = (0, 128, 128)
"""Black in YUV: no luma, and chroma in the middle of its range."""


@dataclass(frozen=True, slots=True)
class Csc:
    """A colour conversion: a matrix in units of 1/256, an input bias and an output bias.

    `in_bias` is subtracted before the product, `out_bias` is added after it.
    """

    matrix: tuple[Row, Row, Row]
    in_bias: Row = (0, 0, 0)
    out_bias: Row = (0, 0, 0)


def csc_of(standard: str, target: str) -> Csc:
    """Return the conversion of a standard to RGB or BGR (from YUV), or to YUV or YVU (from RGB).

    `standard` is one of `STANDARDS`; JPEG images are "601 wide". Raises `InputError` for others.
    """
    if standard not in STANDARDS or target not in ("RGB", "BGR", "YUV", "YVU"):
        needed = f"one of {', '.join(STANDARDS)} to RGB, BGR, YUV or YVU"
        raise InputError(needed, f"{standard} to {target}", "JPEG images are 601 wide")
    name, value_range = standard.split()
    (red, blue) = LUMA_SHARES[name]
    narrow = value_range == "narrow"
    # Narrow luma has 219 steps, from 16 to 235, and chroma 224 steps, from 16 to 240.
    luma_scale, chroma_scale = (219 / 255, 224 / 255) if narrow else (1.0, 1.0)
    bias: Row = (16, 128, 128) if narrow else NEUTRAL
    # Y = r R + g G + b B with r + g + b = 1; U = (B - Y) / (2 (1 - b)); V = (R - Y) / (2 (1 - r))
    shares = np.array([red, 1 - red - blue, blue])
    to_yuv = np.vstack(
        [
            shares * luma_scale,
            (np.array([0, 0, 1]) - shares) / (2 * (1 - blue)) * chroma_scale,
            (np.array([1, 0, 0]) - shares) / (2 * (1 - red)) * chroma_scale,
        ]
    )
    # 601 narrow: R = 298/256 (Y - 16) + 409/256 (V - 128), so the inverse's first row is (298, 0,
    # 409) / 256.
    coefficients = np.linalg.inv(to_yuv) if "R" in target else to_yuv
    entries = np.rint(256 * coefficients).astype(int)
    if "Y" in target:
        entries[0] += LUMA_CORRECTIONS.get(standard, (0, 0, 0))
    order = {"RGB": [0, 1, 2], "BGR": [2, 1, 0], "YUV": [0, 1, 2], "YVU": [0, 2, 1]}[target]
    rows = tuple(tuple(int(v) for v in row) for row in entries[order])
    return Csc(rows, bias) if "R" in target else Csc(rows, out_bias=bias)  # type: ignore[arg-type]


def convert(image: Image, csc: Csc) -> Image:
    """Return an image (n, 3, h, w) of 0..255 in another colour space, as uint8."""
    shifted = image[:, :3].astype(np.int32) - _per_channel(csc.in_bias)
    # The matrix times the three channels of each pixel; >> 8 divides by 256.
    products = np.einsum("ij,njhw->nihw", np.array(csc.matrix, np.int32), shifted) >> 8
    converted: Image = np.clip(products + _per_channel(csc.out_bias), 0, 255).astype(np.uint8)
    return converted


def _per_channel(numbers: Row) -> Image:
    """Return three numbers as (3, 1, 1), to broadcast over the pixels of three channels."""
    return np.array(numbers, np.int32).reshape(3, 1, 1)
