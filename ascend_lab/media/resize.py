"""Resizing as OpenCV does it, which is what the vendor measures its VPC against.

    x = (i + 1/2) in / out - 1/2          where result i looks, between floor(x) and the next
    bilinear: 11-bit weights across, then down, the sum rounded once; nearest: floor(i in / out)

There is no low-pass filter: shrinking to a tenth looks at one pixel pair in ten.
"""

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.media.colour import Image

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
    (h, w), sizes = image.shape[-2:], (height, width)
    if method == "nearest":
        rows, columns = (
            np.minimum(np.floor(np.arange(out) * _step(size, out)).astype(np.intp), size - 1)
            for size, out in zip((h, w), sizes, strict=True)
        )
        return image[..., rows[:, None], columns]
    left, right, weights = _looks(w, width, inside=True)
    wide = image.astype(np.int32)
    across = (wide[..., left] * weights[0] + wide[..., right] * weights[1]) >> 4
    upper, lower, weights = _looks(h, height, inside=False)
    first, second = (
        across[..., rows, :] * part[:, None] >> 16
        for rows, part in ((upper, weights[0]), (lower, weights[1]))
    )
    found: Image = np.clip((first + second + 2) >> 2, 0, 255).astype(np.uint8)
    return found


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
    part = x - low
    if inside:
        part = np.where((low < 0) | (low >= size - 1), np.float32(0), part)
    weights = np.rint(np.stack([1 - part, part]) * np.float32(2**BITS)).astype(np.int32)
    first, second = (np.clip(low + i, 0, size - 1).astype(np.intp) for i in (0, 1))
    return first, second, weights
