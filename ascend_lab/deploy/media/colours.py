"""Colour conversion in whole numbers: matrices from the standards, a product, a shift by 8.

    YUV -> RGB   out_i = (sum_j m_ij (in_j - in_bias_j)) >> 8
    RGB -> YUV   out_i = ((sum_j m_ij in_j) >> 8) + out_bias_i

Every entry m is round(256 c) of the standard's real coefficient c, but for two that the vendor's
table raises by one. Source: CANN, AIPP, CSC_config. The shift is arithmetic (it rounds down) and
the result is limited to 0..255; the documents state neither, so both are our assumption.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError

Image = NDArray[Any]
Row = tuple[int, int, int]
WEIGHTS = {"601": (0.299, 0.114), "709": (0.2126, 0.0722)}
"""Shares of red and blue in luma (ITU-R BT.601, BT.709)."""
STANDARDS = tuple(f"{name} {reach}" for name in WEIGHTS for reach in ("narrow", "wide"))
"""Names of the conversions: a standard, and how far its numbers reach."""
RAISED = {"709 wide": (1, 0, 1)}
"""What the published luma row has more than the rounded coefficients: 55 and 19."""
NEUTRAL: Row = (0, 128, 128)
"""Black in YUV: no luma, and chroma in the middle of its range."""


@dataclass(frozen=True, slots=True)
class Csc:
    """A conversion: rows of the matrix in 1/256, `in_bias` taken away before, `out_bias` added."""

    matrix: tuple[Row, Row, Row]
    in_bias: Row = (0, 0, 0)
    out_bias: Row = (0, 0, 0)


def csc_of(standard: str, to: str) -> Csc:
    """Return the conversion of a standard to RGB or BGR (from YUV), or to YUV or YVU (from RGB).

    `standard` is one of `STANDARDS`; JPEG images are "601 wide". Raises `InputError` for others.
    """
    if standard not in STANDARDS or to not in ("RGB", "BGR", "YUV", "YVU"):
        needed = f"one of {', '.join(STANDARDS)} to RGB, BGR, YUV or YVU"
        raise InputError(needed, f"{standard} to {to}", "JPEG images are 601 wide")
    name, reach = standard.split()
    (red, blue) = WEIGHTS[name]
    narrow = reach == "narrow"
    # narrow luma takes 219 steps, from 16 to 235, and chroma 224, from 16 to 240
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
    # R = 298/256 (Y - 16) + 409/256 (V - 128) in 601 narrow: the inverse's first row, times 256
    coefficients = np.linalg.inv(to_yuv) if "R" in to else to_yuv
    entries = np.rint(256 * coefficients).astype(int)
    if "Y" in to:
        entries[0] += RAISED.get(standard, (0, 0, 0))
    order = {"RGB": [0, 1, 2], "BGR": [2, 1, 0], "YUV": [0, 1, 2], "YVU": [0, 2, 1]}[to]
    rows = tuple(tuple(int(v) for v in row) for row in entries[order])
    return Csc(rows, bias) if "R" in to else Csc(rows, out_bias=bias)  # type: ignore[arg-type]


def convert(image: Image, csc: Csc) -> Image:
    """Return an image (n, 3, h, w) of 0..255 in another colour space, as uint8."""
    shifted = image[:, :3].astype(np.int32) - _column(csc.in_bias)
    # m (3, 3) times the three channels of each pixel; >> 8 divides by the 256 in the matrix
    products = np.einsum("ij,njhw->nihw", np.array(csc.matrix, np.int32), shifted) >> 8
    converted: Image = np.clip(products + _column(csc.out_bias), 0, 255).astype(np.uint8)
    return converted


def _column(numbers: Row) -> Image:
    """Return three numbers shaped to broadcast over the pixels of three channels."""
    return np.array(numbers, np.int32).reshape(3, 1, 1)
