"""DVPP's pictures: strides, sizes and the box to crop, and what its VPC does with them.

The decoder writes rows of a padded width, and rows more than the picture has; what pads is junk.
Whoever reads the buffer has to be told the true size, or the junk is resized into the border.

    bytes = stride_w stride_h f     f = 1.5 (4:2:0), 2 (4:2:2, 4:4:0), 3 (4:4:4)

Sources: CANN documentation, JPEGD and VPC functions and restrictions, acl.media.dvpp_*.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import InputError
from ascend_lab.media.colour import Image
from ascend_lab.media.resize import resize

JPEGD_ALIGN: Mapping[str, tuple[int, int]] = {"Ascend310": (128, 16), "Ascend910A": (128, 16)}
"""What the decoder rounds width and height up to; other chips round widths to 64."""
LATER = (64, 16)
SAMPLINGS = {"4:2:0": 1.5, "4:2:2": 2.0, "4:4:0": 2.0, "4:4:4": 3.0}
LARGEST = {"Ascend310": 8192, "Ascend310DK": 8192, "Ascend310P3": 8192, "Ascend910A": 8192}
"""Most pixels along a side of a JPEG, and of what VPC reads; later chips decode twice as many."""
VPC_LEAST, VPC_OUT = (10, 6), (4096, 4096)
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


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def jpegd_picture(width: int, height: int, chip: str, sampling: str = "4:2:0") -> Picture:
    """Return what the JPEG decoder of a chip writes; raises `InputError` for sizes it refuses."""
    if sampling not in SAMPLINGS:
        raise InputError(f"a sampling of {', '.join(SAMPLINGS)}", repr(sampling))
    most = LARGEST.get(chip, 16384)
    if not (32 <= width <= most and 32 <= height <= most):
        needed = f"a JPEG from 32 x 32 to {most} x {most} on {chip}"
        raise InputError(needed, f"{width} x {height}", "decode it on the host")
    wide, high = JPEGD_ALIGN.get(chip, LATER)
    return Picture(width, height, _up(width, wide), _up(height, high), SAMPLINGS[sampling])


def vpc_picture(width: int, height: int) -> Picture:
    """Return a YUV420SP picture as VPC writes it: widths to 16, heights to 2."""
    if width % 2 or height % 2:
        raise InputError("an even width and height for YUV420SP", f"{width} x {height}")
    if width < VPC_LEAST[0] or height < VPC_LEAST[1] or width > VPC_OUT[0] or height > VPC_OUT[1]:
        needed = "a size from {} x {} to {} x {}".format(*VPC_LEAST, *VPC_OUT)
        raise InputError(needed, f"{width} x {height}", "resize in steps")
    return Picture(width, height, max(LEAST_STRIDE, _up(width, 16)), height)


def crop_box(left: int, top: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Return VPC's box (left, right, top, bottom), both ends inside: even ones first, odd last."""
    if min(left, top) < 0 or left % 2 or top % 2 or width % 2 or height % 2:
        needed = "an even place and an even size"
        raise InputError(needed, f"({left}, {top}), {width} x {height}", "round them down")
    return left, left + width - 1, top, top + height - 1


def vpc_crop_and_resize(
    raw: Image, picture: Picture, box: tuple[int, int, int, int], out: Picture
) -> Image:
    """Return the box of an NV12 picture in another size, as a flat buffer with the strides of out.

    Luma and chroma are resized apart, each as OpenCV would, and what pads is 0. Raises
    `InputError` for a buffer of another size or a box that leaves the picture.
    """
    left, right, top, bottom = box
    if raw.size != picture.size_bytes or picture.factor != 1.5 or out.factor != 1.5:
        raise InputError(f"an NV12 buffer of {picture.size_bytes:,} bytes", f"{raw.size:,}")
    inside = 0 <= left < right < picture.width and 0 <= top < bottom < picture.height
    if not inside or (left % 2, right % 2, top % 2, bottom % 2) != (0, 1, 0, 1):
        needed = f"an even box inside {picture.width} x {picture.height}"
        raise InputError(needed, f"left {left}, right {right}, top {top}, bottom {bottom}")
    rows = raw.reshape(-1, picture.stride_w)
    luma = rows[top : bottom + 1, left : right + 1]
    chroma = rows[picture.stride_h + top // 2 : picture.stride_h + (bottom + 1) // 2]
    pairs = chroma[:, left : right + 1].reshape(len(chroma), -1, 2).transpose(2, 0, 1)
    found = np.zeros((out.size_bytes // out.stride_w, out.stride_w), np.uint8)
    found[: out.height, : out.width] = resize(luma, out.width, out.height)
    small = resize(pairs, out.width // 2, out.height // 2).transpose(1, 2, 0)
    found[out.stride_h : out.stride_h + out.height // 2, : out.width] = small.reshape(
        out.height // 2, out.width
    )
    return found.reshape(-1)
