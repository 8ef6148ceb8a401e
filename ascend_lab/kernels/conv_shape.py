"""What to convolve: sizes, window geometry, groups, and the matrix product it amounts to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.errors import InputError
from ascend_lab.isa import SMALL_C0, c0_of
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL, GemmShape, up

Pair = tuple[int, int]
Pads = tuple[int, int, int, int]
"""Rows above and below, columns left and right."""


@dataclass(frozen=True, slots=True)
class ConvShape:
    """An NCHW convolution: batch, channels, image, kernel count and size, and how windows lie.

    `stride` and `dilation` are one number or (vertical, horizontal); `pad` is one number,
    (rows, columns) on both sides, or (top, bottom, left, right). They are stored in the shortest
    form and read through `strides`, `dilations` and `pads`. With `groups` g, output channels
    i*k/g .. (i+1)*k/g - 1 see input channels i*c/g .. (i+1)*c/g - 1 only. With `crop`, a negative
    pad cuts rows or columns off; `pad_value` stands around the image. `lanes` are the channels of a
    pixel in memory where they are fewer than C0: 4, for a first layer of up to 4 channels. Raises
    `InputError` with the numbers for what is no convolution.
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
    crop: bool = False
    pad_value: int = 0
    lanes: int = 0

    def __post_init__(self) -> None:
        """Check sizes; the default output is what a next layer reads: fp16, or int32 sums."""
        for name, lengths in (("stride", (2,)), ("pad", (2, 4)), ("dilation", (2,))):
            object.__setattr__(self, name, _shortest(name, getattr(self, name), lengths))
        self._check_sizes()
        if self.dtype not in ACCUMULATOR:
            raise InputError(f"dtype {', '.join(ACCUMULATOR)}", self.dtype, "convert the operands")
        fits = self.c <= SMALL_C0 == self.lanes and self.groups == 1
        if self.lanes and not (fits and self.w * self.pixel_bytes % BLOCK_BYTES == 0):
            needed = f"up to {SMALL_C0} channels in as many lanes, rows of whole blocks of 32 bytes"
            got = f"{self.c} channels in {self.lanes}, {self.groups} groups, {self.w} columns"
            raise InputError(needed, got, "use blocks of C0")
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", "int32" if self.dtype == "int8" else self.dtype)
        if self.groups < 1 or self.c % self.groups or self.k % self.groups:
            wanted = f"groups that divide {self.c} input and {self.k} output channels"
            raise InputError(wanted, str(self.groups), "choose a common divisor")
        top, bottom, left, right = self.pads
        kept = (self.h + min(top, 0) + min(bottom, 0), self.w + min(left, 0) + min(right, 0))
        if min(kept) < 1:
            raise InputError("an image with a row and a column left", str(kept), "crop less")
        if min(self.out_hw) < 1:
            raise InputError(
                f"a kernel no larger than the padded image {self.h + top + bottom}x"
                f"{self.w + left + right}",
                "{}x{}".format(*self.reach),
                "add padding",
            )

    def _check_sizes(self) -> None:
        sizes = (self.n, self.c, self.h, self.w, self.k, self.r, self.s)
        steps = (*self.strides, *self.dilations)
        short = min(self.pads) < 0 and not self.crop
        if min(*sizes, *steps) < 1 or short or max(*sizes, *steps, *self.pads) > 1 << 20:
            needed = "sizes, stride and dilation from 1 to 1048576, padding of at least 0"
            got = f"{sizes}, stride {self.stride}, dilation {self.dilation}, padding {self.pad}"
            raise InputError(needed, got, "check the order N C H W K R S")

    @property
    def strides(self) -> Pair:
        """Rows and columns from one window to the next."""
        return pair(self.stride)

    @property
    def dilations(self) -> Pair:
        """Rows and columns from one tap of a window to the next."""
        return pair(self.dilation)

    @property
    def pads(self) -> Pads:
        """Zero rows and columns around the image: top, bottom, left, right."""
        if not isinstance(self.pad, tuple):
            return (self.pad,) * 4
        if len(self.pad) == 4:
            return self.pad
        rows, columns = self.pad
        return rows, rows, columns, columns

    @property
    def reach(self) -> Pair:
        """Rows and columns a window spans: dilation * (kernel - 1) + 1."""
        down, right = self.dilations
        return down * (self.r - 1) + 1, right * (self.s - 1) + 1

    @property
    def out_hw(self) -> Pair:
        """Output height and width: (size + pads - reach) // stride + 1."""
        top, bottom, left, right = self.pads
        rows = (self.h + top + bottom - self.reach[0]) // self.strides[0] + 1
        return rows, (self.w + left + right - self.reach[1]) // self.strides[1] + 1

    @property
    def c0(self) -> int:
        """Channels of a pixel of one channel block in memory."""
        return self.lanes or c0_of(self.dtype)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel of one channel block in memory."""
        return self.c0 * DTYPE_BYTES[self.dtype]

    @property
    def taps(self) -> int:
        """Fractals of depth in one channel block: r s taps, several to a fractal with few lanes."""
        return up(self.r * self.s * self.c0, c0_of(self.dtype))

    @property
    def ops(self) -> int:
        """Useful operations, 2 n oh ow k (c / groups) r s."""
        oh, ow = self.out_hw
        return 2 * self.n * oh * ow * self.k * (self.c // self.groups) * self.r * self.s

    @property
    def blocks(self) -> Pair:
        """Channel blocks of the tensors: (c / C0, k / 16), rounded up."""
        return up(self.c, self.c0), up(self.k, FRACTAL)

    @property
    def gemm(self) -> GemmShape:
        """The matrix product of one bundle of groups: m = pixels, k = taps * channels, n."""
        oh, ow = self.out_hw
        bundle = bundles_of(self)
        depth = bundle.c1 * c0_of(self.dtype) * self.taps
        wide = self.k if bundle.count == 1 else bundle.n1 * FRACTAL
        return GemmShape(self.n * oh * ow, depth, wide, self.dtype, self.out_dtype)


def pair(value: int | Pair) -> Pair:
    """Return (vertical, horizontal) of one number for both, or of two."""
    return value if isinstance(value, tuple) else (value, value)


def _shortest(name: str, value: object, lengths: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return one number where all sides agree, else the tuple; refuse other lengths and types."""
    values: Sequence[object] = tuple(value) if isinstance(value, tuple | list) else (value,)
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values) or len(values) not in (
        1,
        *lengths,
    ):
        words = " or ".join(map(str, lengths))
        raise InputError(f"{name}: a whole number, or {words} of them", repr(value), "mend it")
    if len(values) == 4 and values[0] == values[1] and values[2] == values[3]:
        values = (values[0], values[2])
    whole = tuple(int(v) for v in values)  # type: ignore[call-overload]
    return whole[0] if len(set(whole)) == 1 else whole


@dataclass(frozen=True, slots=True)
class Bundles:
    """Groups put together until their channels fill whole blocks, each bundle one product.

    `count` bundles in all; each has `groups` groups, `c1` input and `n1` output channel blocks,
    the last one maybe fewer: `last_groups`, `last_c1`, `last_n1`.
    """

    count: int
    groups: int
    c1: int
    n1: int
    last_groups: int
    last_c1: int
    last_n1: int


@lru_cache(maxsize=256)
def bundles_of(shape: ConvShape) -> Bundles:
    """Return the smallest bundles whose channels start on block borders.

    With c/g and k/g channels a group, e = lcm(lcm(c/g, C0) / (c/g), lcm(k/g, 16) / (k/g)) groups
    do (32 for 16 where bytes are stored), or all of them where there are fewer. Inside a bundle the
    weights are block-diagonal: the share 1 - 1/e of the products is with zeros.
    """
    c0, g = c0_of(shape.dtype), shape.groups
    c, k = shape.c // g, shape.k // g
    block = 2 * FRACTAL if shape.out_dtype == "int8" else FRACTAL
    each = min(lcm(lcm(c, c0) // c, lcm(k, block) // k), g)
    count = up(g, each)
    last = g - (count - 1) * each
    sizes = [(groups, up(groups * c, c0), up(groups * k, FRACTAL)) for groups in (each, last)]
    return Bundles(count, *sizes[0], *sizes[1])
