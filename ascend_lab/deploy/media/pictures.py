"""Describes decoded pictures in memory, from the JPEG decoder (JPEGD) to the resizer (VPC).

The decoder pads the width and the height of a picture, and the padding has undefined values. A
program that reads the buffer must know the true size, or else a resize mixes padding into the
border.

    bytes = stride_w stride_h f     f = 1.5 (4:2:0), 2 (4:2:2, 4:4:0), 3 (4:4:4)

A JPEG of 500 x 333 pixels in 4:2:0 takes 512 x 336 x 1.5 = 258,048 bytes on Ascend310.

Source: CANN documentation, JPEGD and VPC functions and restrictions, acl.media.dvpp_*.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ascend_lab.compiler.memory import aligned
from ascend_lab.deploy.media.colours import Image
from ascend_lab.deploy.media.resizing import resize
from ascend_lab.errors import InputError

JPEGD_ALIGN: Mapping[str, tuple[int, int]] = {
    "Ascend310": (128, 16),
    "Ascend310DK": (128, 16),
    "Ascend910A": (128, 16),
}
"""Chip -> the multiples to which the decoder rounds width and height up."""
JPEGD_DEFAULT_ALIGN = (64, 16)
"""The same for all other chips: Ascend310P, 310B and 910B.

Source: CANN 8.0.RC1, aclpythondevg_01_0321, table 2.
"""
BYTES_PER_PIXEL = {"4:2:0": 1.5, "4:2:2": 2.0, "4:4:0": 2.0, "4:4:4": 3.0}
"""Chroma sampling -> bytes of a pixel."""
MAX_JPEG_SIDE = {"Ascend310": 8192, "Ascend310DK": 8192, "Ascend310P3": 8192, "Ascend910A": 8192}
"""Largest width and height of a JPEG; chips that are not listed decode up to 16384."""
VPC_MIN_SIZE = (10, 6)
VPC_MAX_SIZE = (4096, 4096)
"""Smallest and largest width and height that VPC writes."""
MIN_STRIDE = 32
"""Smallest row stride that VPC writes, in pixels."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in device memory: its true size in pixels, its strides, its bytes per pixel."""

    width: int
    height: int
    stride_w: int
    stride_h: int
    factor: float = 1.5

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the buffer."""
        return int(self.stride_w * self.stride_h * self.factor)


def jpegd_picture(width: int, height: int, chip: str, sampling: str = "4:2:0") -> Picture:
    """Return the picture that a chip's JPEG decoder writes; raises `InputError` for wrong sizes."""
    if sampling not in BYTES_PER_PIXEL:
        raise InputError(f"a sampling of {', '.join(BYTES_PER_PIXEL)}", repr(sampling))
    max_side = MAX_JPEG_SIDE.get(chip, 16384)
    if not (32 <= width <= max_side and 32 <= height <= max_side):
        needed = f"a JPEG from 32 x 32 to {max_side} x {max_side} on {chip}"
        raise InputError(needed, f"{width} x {height}", "decode it on the host")
    # 700 x 333 becomes 768 x 336 on Ascend310 (6 x 128) and 704 x 336 on Ascend910B2 (11 x 64).
    align_w, align_h = JPEGD_ALIGN.get(chip, JPEGD_DEFAULT_ALIGN)
    return Picture(
        width, height, aligned(width, align_w), aligned(height, align_h), BYTES_PER_PIXEL[sampling]
    )


def vpc_picture(width: int, height: int) -> Picture:
    """Return a YUV420SP picture as VPC writes it, with the width padded to a multiple of 16."""
    # Four pixels share one sample of chroma, so both sides must be even.
    if width % 2 or height % 2:
        raise InputError("an even width and height for YUV420SP", f"{width} x {height}")
    if (
        width < VPC_MIN_SIZE[0]
        or height < VPC_MIN_SIZE[1]
        or width > VPC_MAX_SIZE[0]
        or height > VPC_MAX_SIZE[1]
    ):
        needed = "a size from {} x {} to {} x {}".format(*VPC_MIN_SIZE, *VPC_MAX_SIZE)
        raise InputError(needed, f"{width} x {height}", "resize in steps")
    return Picture(width, height, max(MIN_STRIDE, aligned(width, 16)), height)


def crop_box(x: int, y: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Return VPC's crop box (left, right, top, bottom) for a rectangle that begins at (x, y).

    The box includes both ends: 8 pixels from pixel 2 on are the box from 2 to 9. Raises
    `InputError` unless begins are even and ends are odd.
    """
    if min(x, y) < 0 or x % 2 or y % 2 or width % 2 or height % 2:
        needed = "an even place and an even size"
        raise InputError(needed, f"({x}, {y}), {width} x {height}", "round them down")
    return x, x + width - 1, y, y + height - 1


def vpc_crop_and_resize(
    raw: Image, picture: Picture, box: tuple[int, int, int, int], out: Picture
) -> Image:
    """Return a box of an NV12 picture, resized, as a flat buffer with the strides of `out`.

    Luma and chroma are resized separately, each as OpenCV does it, and padding is 0. Raises
    `InputError` for a buffer of another size or a box outside the picture.
    """
    x_first, x_last, y_first, y_last = box
    if raw.size != picture.size_bytes or picture.factor != 1.5 or out.factor != 1.5:
        raise InputError(f"an NV12 buffer of {picture.size_bytes:,} bytes", f"{raw.size:,}")
    is_inside = 0 <= x_first < x_last < picture.width and 0 <= y_first < y_last < picture.height
    if not is_inside or (x_first % 2, x_last % 2, y_first % 2, y_last % 2) != (0, 1, 0, 1):
        needed = f"an even box inside {picture.width} x {picture.height}"
        got = f"left {x_first}, right {x_last}, top {y_first}, bottom {y_last}"
        raise InputError(needed, got)
    # NV12: all rows of luma, then half as many rows of chroma, with U and V alternating.
    source_rows = raw.reshape(-1, picture.stride_w)
    luma = source_rows[y_first : y_last + 1, x_first : x_last + 1]
    chroma_top = picture.stride_h
    chroma = source_rows[chroma_top + y_first // 2 : chroma_top + (y_last + 1) // 2]
    # (rows, 2 columns) becomes two planes (2, rows, columns), as U must not be mixed with V.
    planes = chroma[:, x_first : x_last + 1].reshape(len(chroma), -1, 2).transpose(2, 0, 1)
    # The rows of `out`: all rows of luma with padding, then half as many of chroma.
    buffer = np.zeros((out.size_bytes // out.stride_w, out.stride_w), np.uint8)
    buffer[: out.height, : out.width] = resize(luma, out.width, out.height)
    out_planes = resize(planes, out.width // 2, out.height // 2).transpose(1, 2, 0)
    out_chroma = buffer[out.stride_h : out.stride_h + out.height // 2, : out.width]
    out_chroma[...] = out_planes.reshape(out.height // 2, out.width)
    return buffer.reshape(-1)
