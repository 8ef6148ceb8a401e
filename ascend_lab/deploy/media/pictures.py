"""Pictures in device memory, as the JPEG decoder (JPEGD) writes them and VPC reads them.

The decoder writes rows of a padded width, and rows more than the picture has; what pads is junk.
Whoever reads the buffer has to be told the true size, or the junk is resized into the border.

    bytes = stride_w stride_h f     f = 1.5 (4:2:0), 2 (4:2:2, 4:4:0), 3 (4:4:4)

A JPEG of 500 x 333 pixels in 4:2:0 on Ascend310 lies in 512 x 336 x 1.5 = 258,048 bytes.

Source: CANN documentation, JPEGD and VPC functions and restrictions, acl.media.dvpp_*.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ascend_lab.compiler.memory import aligned
from ascend_lab.deploy.media.colours import Image
from ascend_lab.deploy.media.resizing import resize
from ascend_lab.errors import InputError

JPEGD_ALIGN: Mapping[str, tuple[int, int]] = {"Ascend310": (128, 16), "Ascend910A": (128, 16)}
"""What the decoder rounds width and height up to; other chips round widths to 64."""
LATER = (64, 16)
SAMPLINGS = {"4:2:0": 1.5, "4:2:2": 2.0, "4:4:0": 2.0, "4:4:4": 3.0}
"""Bytes of a pixel by how often chroma is sampled."""
LARGEST = {"Ascend310": 8192, "Ascend310DK": 8192, "Ascend310P3": 8192, "Ascend910A": 8192}
"""Most pixels along a side of a JPEG, and of what VPC reads; later chips decode twice as many."""
VPC_LEAST = (10, 6)
VPC_OUT = (4096, 4096)
"""Smallest and largest width and height that VPC writes."""
LEAST_STRIDE = 32


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
        """Bytes of the buffer."""
        return int(self.stride_w * self.stride_h * self.factor)


def jpegd_picture(width: int, height: int, chip: str, sampling: str = "4:2:0") -> Picture:
    """Return what the JPEG decoder of a chip writes; raises `InputError` for sizes it refuses."""
    if sampling not in SAMPLINGS:
        raise InputError(f"a sampling of {', '.join(SAMPLINGS)}", repr(sampling))
    largest = LARGEST.get(chip, 16384)
    if not (32 <= width <= largest and 32 <= height <= largest):
        needed = f"a JPEG from 32 x 32 to {largest} x {largest} on {chip}"
        raise InputError(needed, f"{width} x {height}", "decode it on the host")
    # 500 x 333 becomes 512 x 336 on Ascend310, on later chips the same: 512 is also 8 x 64
    align_w, align_h = JPEGD_ALIGN.get(chip, LATER)
    return Picture(
        width, height, aligned(width, align_w), aligned(height, align_h), SAMPLINGS[sampling]
    )


def vpc_picture(width: int, height: int) -> Picture:
    """Return a YUV420SP picture as VPC writes it: widths padded to 16, heights as they are."""
    # four pixels share one sample of chroma, so both sides must be even
    if width % 2 or height % 2:
        raise InputError("an even width and height for YUV420SP", f"{width} x {height}")
    if width < VPC_LEAST[0] or height < VPC_LEAST[1] or width > VPC_OUT[0] or height > VPC_OUT[1]:
        needed = "a size from {} x {} to {} x {}".format(*VPC_LEAST, *VPC_OUT)
        raise InputError(needed, f"{width} x {height}", "resize in steps")
    return Picture(width, height, max(LEAST_STRIDE, aligned(width, 16)), height)


def crop_box(x: int, y: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Return VPC's box (left, right, top, bottom) of a part that begins at (x, y).

    Both ends lie inside: 8 pixels from 2 on are the box from 2 to 9. The first is even, the last
    odd; raises `InputError` otherwise.
    """
    if min(x, y) < 0 or x % 2 or y % 2 or width % 2 or height % 2:
        needed = "an even place and an even size"
        raise InputError(needed, f"({x}, {y}), {width} x {height}", "round them down")
    return x, x + width - 1, y, y + height - 1


def vpc_crop_and_resize(
    raw: Image, picture: Picture, box: tuple[int, int, int, int], out: Picture
) -> Image:
    """Return the box of an NV12 picture in another size, as a flat buffer with the strides of out.

    Luma and chroma are resized apart, each as OpenCV would, and what pads is 0. Raises
    `InputError` for a buffer of another size or a box that leaves the picture.
    """
    x_first, x_last, y_first, y_last = box
    if raw.size != picture.size_bytes or picture.factor != 1.5 or out.factor != 1.5:
        raise InputError(f"an NV12 buffer of {picture.size_bytes:,} bytes", f"{raw.size:,}")
    inside = 0 <= x_first < x_last < picture.width and 0 <= y_first < y_last < picture.height
    if not inside or (x_first % 2, x_last % 2, y_first % 2, y_last % 2) != (0, 1, 0, 1):
        needed = f"an even box inside {picture.width} x {picture.height}"
        got = f"left {x_first}, right {x_last}, top {y_first}, bottom {y_last}"
        raise InputError(needed, got)
    # NV12: all rows of luma, then half as many rows of chroma, U and V in turns
    rows = raw.reshape(-1, picture.stride_w)
    luma = rows[y_first : y_last + 1, x_first : x_last + 1]
    chroma_top = picture.stride_h
    chroma = rows[chroma_top + y_first // 2 : chroma_top + (y_last + 1) // 2]
    # (rows, 2 columns) to the two planes (2, rows, columns), since U must not be mixed with V
    planes = chroma[:, x_first : x_last + 1].reshape(len(chroma), -1, 2).transpose(2, 0, 1)
    # rows of out: all of luma, padding included, then half as many of chroma
    buffer = np.zeros((out.size_bytes // out.stride_w, out.stride_w), np.uint8)
    buffer[: out.height, : out.width] = resize(luma, out.width, out.height)
    small = resize(planes, out.width // 2, out.height // 2).transpose(1, 2, 0)
    out_chroma = buffer[out.stride_h : out.stride_h + out.height // 2, : out.width]
    out_chroma[...] = small.reshape(out.height // 2, out.width)
    return buffer.reshape(-1)
