"""Transposed convolution as one plain convolution per phase of the stride.

Output pixel oy receives x[iy] * w[i] where oy + top = iy * stride + i * dilation. Pixels with the
same remainder p = oy mod stride see the same taps i: each remainder (a phase, sh * sw in all) is a
stride-1 convolution of x with a part of the kernel, whose pixels lie `stride` apart in the output.
No zero is inserted into x, none is multiplied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Kernel, ceil_div
from ascend_lab.operators.kernels.conv import conv_launch
from ascend_lab.operators.kernels.conv_shape import LARGEST_SIZE, ConvShape, Pads, Pair, pair
from ascend_lab.operators.kernels.conv_windows import Placement
from ascend_lab.operators.kernels.operand_packing import pack_conv, unpack_conv


@dataclass(frozen=True, slots=True)
class DeconvShape:
    """A transposed convolution: x (n, c, h, w), weights (c, k/groups, r, s), y (n, k, oh, ow).

    `stride`, `pad`, `dilation` and `groups` are those of the convolution it transposes, in the
    forms of `ConvShape`; `output_pad` rows and columns are added below and on the right.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: int | Pair = 1
    pad: int | Pair | Pads = 0
    dtype: str = "fp16"
    out_dtype: str = ""
    dilation: int | Pair = 1
    groups: int = 1
    output_pad: int | Pair = 0

    def __post_init__(self) -> None:
        """Check what `ConvShape` checks, and that pads leave an output."""
        if min(self.h, self.w) < 1 or max(self.h, self.w) > LARGEST_SIZE:
            sizes = f"{self.h}x{self.w}"
            raise InputError("image sizes from 1 to 1048576", sizes, "check the order")
        windows = self.windows
        output_pads = pair(self.output_pad)
        # With stride 2 images of 7 and of 8 rows give the same 4 rows: output_pad says which.
        limits = map(max, windows.strides, windows.dilations)
        too_large = any(pad >= limit for pad, limit in zip(output_pads, limits, strict=True))
        if min(output_pads) < 0 or too_large:
            raise InputError(
                "an output_pad of at least 0 and below stride or dilation",
                str(self.output_pad),
                "it only chooses between sizes that one stride maps to the same image",
            )
        if min(self.out_hw) < 1:
            raise InputError("an output of at least 1x1", "{}x{}".format(*self.out_hw), "pad less")

    @property
    def windows(self) -> ConvShape:
        """A convolution of a large image with the same windows: strides, dilations and pads."""
        return ConvShape(
            n=self.n,
            c=self.c,
            h=LARGEST_SIZE,
            w=LARGEST_SIZE,
            k=self.k,
            r=self.r,
            s=self.s,
            stride=self.stride,
            pad=self.pad,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            dilation=self.dilation,
            groups=self.groups,
        )

    @property
    def out_hw(self) -> Pair:
        """Output height and width: (size - 1) * stride + reach - pads + output_pad."""
        windows = self.windows
        (sh, sw) = windows.strides
        (down, across) = windows.reach
        (rows_below, columns_right) = pair(self.output_pad)
        rows = (self.h - 1) * sh + down - sum(windows.pads[:2]) + rows_below
        return rows, (self.w - 1) * sw + across - sum(windows.pads[2:]) + columns_right

    @property
    def ops(self) -> int:
        """Useful operations, 2 n h w c (k / groups) r s (taps that fall outside counted)."""
        return 2 * self.n * self.h * self.w * self.c * (self.k // self.groups) * self.r * self.s


@dataclass(frozen=True, slots=True)
class _Axis:
    """One phase along one axis: its taps in the order of the image rows (or columns) they read.

    `dilation`, `pad_before` and `pad_after` are those of the phase's convolution.
    """

    taps: tuple[int, ...]
    dilation: int
    pad_before: int
    pad_after: int


def _axis(phase: int, size: int, out: int, windows: tuple[int, int, int, int]) -> _Axis:
    """Return a phase along an axis of `size` image rows and `out` output rows (or columns).

    `windows` is (kernel, stride, dilation, pad before). Tap i sees image row q + d(i) for output
    row q of the phase, d(i) = (phase + pad - i * dilation) / stride.
    """
    kernel, stride, dilation, pad = windows
    taps = [i for i in reversed(range(kernel)) if (phase + pad - i * dilation) % stride == 0]
    count = ceil_div(out - phase, stride)
    # Stride 2, kernel 3, pad 1: phase 0 has tap 1 at offset 0, phase 1 has taps 2 and 0 at 0 and 1.
    offsets = [(phase + pad - i * dilation) // stride for i in taps]
    # No tap, or all taps in the padding: a convolution with one tap of weight zero.
    if not taps or offsets[0] >= size or offsets[-1] + count <= 0:
        return _Axis((), 1, 0, count - size)
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 1
    # Negative padding crops rows that no output of the phase reads.
    return _Axis(tuple(taps), step, -offsets[0], count - 1 + offsets[-1] - (size - 1))


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: its convolution, its taps of the kernel, and where its pixels go in the output."""

    conv: ConvShape
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    place: Placement


def phases_of(shape: DeconvShape) -> list[Phase]:
    """Return the phases that have pixels: at most stride rows x stride columns of them."""
    windows = shape.windows
    (oh, ow) = shape.out_hw
    (sh, sw) = windows.strides
    (dh, dw) = windows.dilations
    (pad_top, _, pad_left, _) = windows.pads
    plane = ceil_div(oh * ow, FRACTAL) * FRACTAL
    phases: list[Phase] = []
    for row, column in product(range(min(sh, oh)), range(min(sw, ow))):
        down = _axis(row, shape.h, oh, (shape.r, sh, dh, pad_top))
        across = _axis(column, shape.w, ow, (shape.s, sw, dw, pad_left))
        conv = ConvShape(
            n=shape.n,
            c=shape.c,
            h=shape.h,
            w=shape.w,
            k=shape.k,
            r=max(len(down.taps), 1),
            s=max(len(across.taps), 1),
            stride=1,
            pad=(down.pad_before, down.pad_after, across.pad_before, across.pad_after),
            dtype=shape.dtype,
            out_dtype=shape.out_dtype,
            dilation=(down.dilation, across.dilation),
            groups=shape.groups,
            crop=True,
        )
        # Phase (0, 1) of stride 2 writes columns 1, 3, 5, ... of rows 0, 2, 4, ...
        place = Placement(row * ow + column, sh * ow, sw, plane, f"weight{len(phases)}")
        phases.append(Phase(conv, down.taps, across.taps, place))
    return phases


def deconv_kernel(shape: DeconvShape, chip: Chip) -> Kernel:
    """Return the phases as launches one after another: x and weight0, weight1, ... to y.

    y is laid out as a convolution's output, (N, K1, OH*OW rounded up to 16, 16).
    """
    launches = [conv_launch(p.conv, chip, place=p.place) for p in phases_of(shape)]
    return Kernel(f"deconv_{shape.n}x{shape.c}x{shape.h}x{shape.w}", tuple(launches))


def pack_deconv(shape: DeconvShape, x: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Lay x (n, c, h, w) out as NC1HWC0 and the taps (c, k/groups, r, s) of each phase."""
    c = shape.c // shape.groups
    k = shape.k // shape.groups
    if weight.shape != (shape.c, k, shape.r, shape.s):
        raise InputError("weight as (c, k / groups, r, s)", str(weight.shape), "reshape it")
    # (group, c, k) to (group, k, c): the convolution's weights have output channels first.
    by_group = weight.reshape(shape.groups, c, k, shape.r, shape.s).transpose(0, 2, 1, 3, 4)
    kernel = by_group.reshape(shape.k, c, shape.r, shape.s)
    tensors: dict[str, np.ndarray] = {}
    for phase in phases_of(shape):
        if phase.rows and phase.columns:
            phase_kernel = kernel[:, :, phase.rows][..., phase.columns]
        else:
            phase_kernel = np.zeros((shape.k, c, phase.conv.r, phase.conv.s), weight.dtype)
        packed = pack_conv(phase.conv, x, phase_kernel)
        tensors |= {"x": packed["x"], phase.place.weight: packed["weight"]}
    return tensors


def unpack_deconv(shape: DeconvShape, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the output as (n, k, oh, ow)."""
    oh, ow = shape.out_hw
    # The output of a 1 x 1 convolution of this size is laid out alike.
    one_tap = ConvShape(
        n=shape.n,
        c=shape.c,
        h=oh,
        w=ow,
        k=shape.k,
        r=1,
        s=1,
        dtype=shape.dtype,
        out_dtype=shape.out_dtype,
        groups=shape.groups,
    )
    return unpack_conv(one_tap, tensors)
