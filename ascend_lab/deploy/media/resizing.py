"""Resizing of images, bit for bit as OpenCV does it.

The vendor compares its hardware resizer (VPC) with OpenCV. Output pixel i is taken from position

    bilinear   x = (i + 1/2) in / out - 1/2      between pixels floor(x) and floor(x) + 1
    nearest    floor(i in / out)

Bilinear weights have 11 bits and are applied along rows, then along columns. When 8 pixels become
4, output pixel 1 is at x = 1.5 * 2 - 0.5 = 2.5: half of pixel 2 and half of pixel 3. There is no
low-pass filter: shrinking to a tenth uses one pair of pixels in ten.
"""

import numpy as np
from numpy.typing import NDArray

from ascend_lab.deploy.media.colours import Image
from ascend_lab.errors import InputError

WEIGHT_BITS = 11
"""Bits of a bilinear weight, as in OpenCV for 8-bit images."""
METHODS = ("bilinear", "nearest")


def resize(image: Image, width: int, height: int, method: str = "bilinear") -> Image:
    """Return a uint8 image (..., h, w) in another size; raises `InputError` for sizes below 1."""
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
    """Return the image of the nearest pixels floor(i in / out)."""
    rows, columns = (
        np.minimum(np.floor(np.arange(out) * _pixel_distance(size, out)).astype(np.intp), size - 1)
        for size, out in zip(image.shape[-2:], (height, width), strict=True)
    )
    return image[..., rows[:, None], columns]


def _bilinear(image: Image, width: int, height: int) -> Image:
    """Return the image of weighted means of two pixels of a row, and of two such rows."""
    (h, w) = image.shape[-2:]
    left_column, right_column, weights = _source_pixels(w, width, clamps_edges=True)
    pixels = image.astype(np.int32)
    # OpenCV's vector code multiplies 16-bit numbers. Both weights together have 22 bits: 4 are
    # dropped here, 16 after the second product, and 2 at the end.
    row_sums = (pixels[..., left_column] * weights[0] + pixels[..., right_column] * weights[1]) >> 4
    upper_row, lower_row, weights = _source_pixels(h, height, clamps_edges=False)
    upper, lower = (
        row_sums[..., rows, :] * row_weights[:, None] >> 16
        for rows, row_weights in ((upper_row, weights[0]), (lower_row, weights[1]))
    )
    # Adding 2, half of 4, before the last shift rounds to the nearest integer.
    rounded: Image = np.clip((upper + lower + 2) >> 2, 0, 255).astype(np.uint8)
    return rounded


def _pixel_distance(size: int, out: int) -> float:
    """Return the distance of output pixels in input pixels, rounded as in OpenCV.

    1 / (out / size) differs from size / out in the last bit, and this decides ties.
    """
    return 1.0 / (out / size)


def _source_pixels(
    size: int, out: int, *, clamps_edges: bool
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int32]]:
    """Return the two input pixels of each output pixel along an axis, and their weights (2, out).

    If `clamps_edges`, an output pixel beyond the border takes the border pixel with the full
    weight. If not, it takes the border pixel twice, and each of the two terms is rounded.
    """
    x = ((np.arange(out) + 0.5) * _pixel_distance(size, out) - 0.5).astype(np.float32)
    low = np.floor(x)
    fraction = x - low
    if clamps_edges:
        over_edge = (low < 0) | (low >= size - 1)
        fraction = np.where(over_edge, np.float32(0), fraction)
    weights = np.rint(np.stack([1 - fraction, fraction]) * np.float32(2**WEIGHT_BITS)).astype(
        np.int32
    )
    low_pixel, high_pixel = (np.clip(low + i, 0, size - 1).astype(np.intp) for i in (0, 1))
    return low_pixel, high_pixel, weights
