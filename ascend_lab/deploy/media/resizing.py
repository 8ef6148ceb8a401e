"""Resizing as OpenCV does it, which is what the vendor measures its VPC against.

    x = (i + 1/2) in / out - 1/2          where result i looks, between floor(x) and the next
    bilinear: 11-bit weights across, then down, the sum rounded once; nearest: floor(i in / out)

Halving 8 pixels to 4, result 1 looks at x = 1.5 x 2 - 0.5 = 2.5: half of pixel 2, half of pixel 3.
There is no low-pass filter: shrinking to a tenth looks at one pixel pair in ten.
"""

import numpy as np
from numpy.typing import NDArray

from ascend_lab.deploy.media.colours import Image
from ascend_lab.errors import InputError

BITS = 11
"""Of a weight, as OpenCV has them for 8-bit images."""
METHODS = ("bilinear", "nearest")


def resize(image: Image, width: int, height: int, method: str = "bilinear") -> Image:
    """Return a uint8 image (..., h, w) in another size; raises `InputError` for bad sizes."""
    if method not in METHODS:
        raise InputError(f"a method of {', '.join(METHODS)}", repr(method))
    if image.dtype != np.uint8 or image.ndim < 2 or 0 in image.shape[-2:]:
        raise InputError("a uint8 image (..., h, w)", f"{image.dtype}{image.shape}", "convert it")
    if min(width, height) < 1:
        raise InputError("a width and a height of at least 1", f"{width} x {height}")
    return (
        _nearest(image, width, height) if method == "nearest" else _bilinear(image, width, height)
    )


def _nearest(image: Image, width: int, height: int) -> Image:
    """Return the image of the pixels floor(i in / out)."""
    rows, columns = (
        np.minimum(np.floor(np.arange(out) * _step(size, out)).astype(np.intp), size - 1)
        for size, out in zip(image.shape[-2:], (height, width), strict=True)
    )
    return image[..., rows[:, None], columns]


def _bilinear(image: Image, width: int, height: int) -> Image:
    """Return the image of weighted means of two pixels across, and of two such rows."""
    (h, w) = image.shape[-2:]
    left_column, right_column, weights = _looks(w, width, inside=True)
    pixels = image.astype(np.int32)
    # As OpenCV's vector code, which multiplies numbers of 16 bits: both weights together have 22
    # bits, of which 4 are dropped here, 16 behind the second product, and 2 at the end.
    across = (pixels[..., left_column] * weights[0] + pixels[..., right_column] * weights[1]) >> 4
    upper_row, lower_row, weights = _looks(h, height, inside=False)
    upper, lower = (
        across[..., rows, :] * row_weights[:, None] >> 16
        for rows, row_weights in ((upper_row, weights[0]), (lower_row, weights[1]))
    )
    # adding 2, half of 4, before the last shift rounds to the nearest
    rounded: Image = np.clip((upper + lower + 2) >> 2, 0, 255).astype(np.uint8)
    return rounded


def _step(size: int, out: int) -> float:
    """Return how far apart results look; rounded as OpenCV does, which decides ties."""
    return 1.0 / (out / size)


def _looks(
    size: int, out: int, *, inside: bool
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int32]]:
    """Return the two pixels each result mixes along one axis, and their weights (2, out).

    `inside`: what looks over an edge takes the edge's pixel alone, not twice (each part rounds).
    """
    x = ((np.arange(out) + 0.5) * _step(size, out) - 0.5).astype(np.float32)
    low = np.floor(x)
    fraction = x - low
    if inside:
        over_edge = (low < 0) | (low >= size - 1)
        fraction = np.where(over_edge, np.float32(0), fraction)
    weights = np.rint(np.stack([1 - fraction, fraction]) * np.float32(2**BITS)).astype(np.int32)
    low_pixel, high_pixel = (np.clip(low + i, 0, size - 1).astype(np.intp) for i in (0, 1))
    return low_pixel, high_pixel, weights
