"""Describe a convolution: sizes, window geometry, groups, and the matrix product it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, lcm

from ascend_lab.errors import InputError
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, SMALL_C0, c0_of, ceil_div
from ascend_lab.operators.kernels.gemm_schedule import GemmShape

Pair = tuple[int, int]
LARGEST_SIZE = 1 << 20
"""Limit of every size: images, channels, sides of an image or kernel, stride, dilation, padding."""
LARGEST_TILE = 512
"""Pixels of the tallest tile that a default schedule has: 32 fractals."""
MAX_SPREAD = 255
"""Most rows of dilation or padding that load3d takes.

If the rows of m images are interleaved (`stacked`), a window needs m times its own dilation and
padding.
"""
Pads = tuple[int, int, int, int]
"""Rows above and below, columns left and right."""


@dataclass(frozen=True, slots=True)
class ConvShape:
    """An NCHW convolution of n images: c input and k output channels, images h x w, kernels r x s.

    What it computes:

    - `stride`, `dilation` are one number or (vertical, horizontal); `pad` is one number, (rows,
      columns) on both sides, or (top, bottom, left, right). They are stored in the shortest form
      and read through `strides`, `dilations` and `pads`.
    - `groups` g: output channels i*k/g .. (i+1)*k/g - 1 read input channels i*c/g .. (i+1)*c/g - 1.
    - `crop` allows a negative pad, which cuts rows or columns off; padding has value `pad_value`.
    - `beside` is a convolution of another image, with one tap and no padding, whose result is added
      to the sums.
    - `pool` gives the windows of a max pooling that the core applies to the result: the kernel,
      stride and padding of a depthwise convolution.

    How the image lies in memory:

    - `lanes` are the stored channels of a pixel if fewer than C0: 4, for images of few channels.
    - `stored` is (rows, step): a channel block has `rows` rows in memory, of which every `step`-th
      is read (see `thinned`); 0 rows stand for h.
    - `mixed` m: every image consists of m images with interleaved rows (see `stacked`).

    The result has `out_hw` rows (of all interleaved images) and columns, each
    (size + pads - reach) // stride + 1. Raises `InputError` for sizes that do not fit together.
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
    stored: Pair = (0, 1)
    mixed: int = 1
    beside: "ConvShape | None" = None
    pool: "ConvShape | None" = None
    strides: Pair = field(init=False, repr=False, compare=False)
    dilations: Pair = field(init=False, repr=False, compare=False)
    pads: Pads = field(init=False, repr=False, compare=False)
    out_hw: Pair = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check sizes; the default output format is the input's, or int32 for int8."""
        # The class is frozen: derived fields are set once, here.
        set_field = object.__setattr__
        for name, lengths in (("stride", (2,)), ("pad", (2, 4)), ("dilation", (2,))):
            set_field(self, name, _shortest_form(name, getattr(self, name), lengths))
        set_field(self, "strides", pair(self.stride))
        set_field(self, "dilations", pair(self.dilation))
        set_field(self, "pads", _sides(self.pad))
        self._check_sizes()
        set_field(self, "out_hw", self._out_hw())
        if self.dtype not in ACCUMULATOR:
            raise InputError(f"dtype {', '.join(ACCUMULATOR)}", self.dtype, "convert the operands")
        self._check_lanes()
        if not self.out_dtype:
            set_field(self, "out_dtype", "int32" if self.dtype == "int8" else self.dtype)
        self._check_groups()
        self._check_crop()
        self._check_beside()
        self._check_kernel()

    def _check_lanes(self) -> None:
        """Raise `InputError` for more channels than lanes, or rows that end inside a block."""
        # 3 channels of a first layer in 4 lanes: 8 bytes a pixel in fp16 instead of 32.
        lanes_fit = self.c <= SMALL_C0 == self.lanes and self.groups == 1
        if self.lanes and not (lanes_fit and self.w * self.pixel_bytes % BLOCK_BYTES == 0):
            needed_lanes = (
                f"up to {SMALL_C0} channels in as many lanes, rows of whole blocks of 32 bytes"
            )
            got = f"{self.c} channels in {self.lanes}, {self.groups} groups, {self.w} columns"
            raise InputError(needed_lanes, got, "use blocks of C0")

    def _check_groups(self) -> None:
        """Raise `InputError` for a number of groups that does not divide both channels."""
        if self.groups < 1 or self.c % self.groups or self.k % self.groups:
            needed_groups = f"groups that divide {self.c} input and {self.k} output channels"
            raise InputError(needed_groups, str(self.groups), "choose a common divisor")

    def _check_crop(self) -> None:
        """Raise `InputError` if negative padding cuts off the whole image."""
        top, bottom, left_pad, right_pad = self.pads
        cropped_hw = (
            self.h + min(top, 0) + min(bottom, 0),
            self.w + min(left_pad, 0) + min(right_pad, 0),
        )
        if min(cropped_hw) < 1:
            raise InputError("an image with a row and a column left", str(cropped_hw), "crop less")

    def _check_kernel(self) -> None:
        """Raise `InputError` for a kernel that is larger than the padded image."""
        if min(self.out_hw) < 1:
            top, bottom, left_pad, right_pad = self.pads
            padded = f"{self.h + top + bottom}x{self.w + left_pad + right_pad}"
            needed_kernel = f"a kernel no larger than the padded image {padded}"
            raise InputError(needed_kernel, "{}x{}".format(*self.reach), "add padding")

    def _check_sizes(self) -> None:
        """Raise `InputError` for sizes outside their limits, and for negative padding."""
        sizes = (self.n, self.c, self.h, self.w, self.k, self.r, self.s)
        steps = (*self.strides, *self.dilations)
        crops_unasked = min(self.pads) < 0 and not self.crop
        if (
            min(*sizes, *steps) < 1
            or crops_unasked
            or max(*sizes, *steps, *self.pads) > LARGEST_SIZE
        ):
            needed = f"sizes, stride and dilation from 1 to {LARGEST_SIZE}, padding of at least 0"
            got = f"{sizes}, stride {self.stride}, dilation {self.dilation}, padding {self.pad}"
            raise InputError(needed, got, "check the order N C H W K R S")

    def _check_beside(self) -> None:
        """Raise `InputError` if a second convolution's result cannot be added to this one's."""
        beside = self.beside
        if beside is None:
            return
        # Both results are added element by element, so they must agree in everything.
        results = [
            (conv.n, conv.k, *conv.out_hw, conv.dtype, conv.groups, conv.lanes)
            for conv in (self, beside)
        ]
        # The projection of a residual block: 1 x 1, no padding.
        geometry = (beside.r, beside.s, beside.strides[0], beside.pad)
        one_tap = geometry == (1, 1, 1, 0) and beside.beside is None
        if results[0] != results[1] or self.groups > 1 or self.lanes or not one_tap:
            needed = f"{self.n} images {self.out_hw} of {self.k} channels, of one tap each"
            raise InputError(needed, str(beside), "add them by a kernel of their own")

    @property
    def sums(self) -> int:
        """Tiles of sums per output tile: 2 for int8 with `beside`, as the scales differ, else 1."""
        return 2 if self.beside is not None and self.dtype == "int8" else 1

    @property
    def reach(self) -> Pair:
        """Rows and columns a window spans: dilation * (kernel - 1) + 1."""
        down, across = self.dilations
        # 3 x 3 with a dilation of 2 reaches over 5 rows and 5 columns
        return down * (self.r - 1) + 1, across * (self.s - 1) + 1

    def _out_hw(self) -> Pair:
        """Return the rows and columns of the result."""
        top, bottom, left_pad, right_pad = self.pads
        # 7 rows, padding 1 and 1, a reach of 3, a stride of 2: (9 - 3) // 2 + 1 = 4
        rows = (self.h + top + bottom - self.reach[0]) // self.strides[0] + 1
        columns = (self.w + left_pad + right_pad - self.reach[1]) // self.strides[1] + 1
        return rows * self.mixed, columns

    @property
    def c0(self) -> int:
        """Channels of a pixel of one channel block in memory."""
        return self.lanes or c0_of(self.dtype)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel of one channel block in memory."""
        return self.c0 * DTYPE_BYTES[self.dtype]

    @property
    def plane(self) -> int:
        """Elements of a channel block of an image in memory."""
        # 14 of 28 stored rows are read: the next channel block still begins 28 rows further on
        stored_rows = self.stored[0] or self.h
        return stored_rows * self.w * self.c0

    @property
    def images(self) -> int:
        """Images in memory."""
        return self.n * self.mixed

    @property
    def taps(self) -> int:
        """Fractals of depth in one channel block: r s, or fewer if a fractal holds several taps.

        A 7 x 7 kernel in fp16 has 49; with 4 lanes of 16 a fractal holds 4 taps, so 13.
        """
        return ceil_div(self.r * self.s * self.c0, c0_of(self.dtype))

    @property
    def ops(self) -> int:
        """Useful operations, 2 n oh ow k (c / groups) r s."""
        oh, ow = self.out_hw
        own_ops = 2 * self.n * oh * ow * self.k * (self.c // self.groups) * self.r * self.s
        return own_ops + (self.beside.ops if self.beside else 0)

    @property
    def blocks(self) -> Pair:
        """Channel blocks of the tensors: (c / C0, k / 16), rounded up."""
        # 100 input and 24 output channels in fp16: (7, 2)
        return ceil_div(self.c, self.c0), ceil_div(self.k, FRACTAL)

    @property
    def gemm(self) -> GemmShape:
        """The matrix product of one bundle of groups: pixels x depth x output channels."""
        oh, ow = self.out_hw
        bundle = bundles_of(self)
        # Elements of depth: r s c in whole fractals, those of a convolution beside included.
        depth = units_of(self).total_depth * c0_of(self.dtype)
        columns = self.k if bundle.count == 1 else bundle.n1 * FRACTAL
        return GemmShape(self.n * oh * ow, depth, columns, self.dtype, self.out_dtype)


def thinned(shape: ConvShape) -> ConvShape:
    """Return a convolution of only those image rows that are read, if its stride skips some.

    A 1 x 1 kernel with stride 2 reads every second row: the result has half the rows and a vertical
    stride of 1. Grouped convolutions stay as they are, and so does one with one channel in and out:
    the vector unit may do those, and it strides over rows itself.
    """
    step = shape.strides[0]
    (rows, _) = shape.out_hw
    for_vector_unit = shape.groups > 1 or shape.c == shape.k == 1
    if step == 1 or shape.r > 1 or any(shape.pads[:2]) or for_vector_unit or shape.lanes:
        return shape
    return replace(shape, h=rows, stride=(1, shape.strides[1]), stored=(shape.h, step))


def stacked(shape: ConvShape) -> ConvShape:
    """Return a convolution that treats several images as one, or `shape` if that is impossible.

    Fractals of 16 pixels then go on in the next image: 16 images of 7 x 7 pixels fill 49 fractals
    instead of 64. Rows are interleaved: row 0 of every image, then row 1, and so on. For load3d the
    windows of m images have m times the dilation, and m times the rows of zeros above and below.

    m is the smallest number of images that leads to the fewest fractals and fills a large tile; if
    no such number fills one, it is the largest. With a vertical stride this is impossible: windows
    would have to move by one row from image to image, but by more from the last image to the next
    row of the first.
    """
    has_int8 = "int8" in (shape.dtype, shape.out_dtype)
    if shape.n == 1 or shape.groups > 1 or shape.lanes or has_int8 or shape.pool:
        return shape
    (oh, ow) = shape.out_hw
    if shape.strides[0] > 1 or min(shape.pads) < 0:
        return shape
    # load3d dilates by 255 at most: 85 images of a kernel with dilation 3.
    most_images = MAX_SPREAD // max(shape.dilations[0], *shape.pads[:2])
    # Divisors of the batch, so that all stacks are equally high.
    divisors = [m for m in range(1, min(shape.n, most_images) + 1) if shape.n % m == 0]
    if not divisors:  # a dilation or padding beyond 255: not even one image goes through load3d
        return shape

    def fractals(m: int) -> int:
        # 49 pixels: 1 image takes 4 fractals each, 16 images 49 together, 3.06 each.
        return shape.n // m * ceil_div(m * oh * ow, FRACTAL)

    fewest_fractals = min(map(fractals, divisors))
    candidates = [m for m in divisors if fractals(m) == fewest_fractals]
    mixed = next((m for m in candidates if m * oh * ow >= LARGEST_TILE), candidates[-1])
    beside = shape.beside and replace(shape.beside, n=shape.n // mixed, mixed=mixed)
    return replace(shape, n=shape.n // mixed, mixed=mixed, beside=beside)


def pair(value: int | Pair) -> Pair:
    """Return (vertical, horizontal): a pair as it is, one number twice."""
    return value if isinstance(value, tuple) else (value, value)


def _sides(pad: int | Pair | Pads) -> Pads:
    """Return rows above and below, columns left and right."""
    if isinstance(pad, tuple) and len(pad) == 4:
        return pad
    # (1, 2): one row above and one below, two columns on each side.
    rows, columns = pair(pad)
    return rows, rows, columns, columns


def _shortest_form(name: str, value: object, lengths: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return one number if all sides agree, else the tuple; raise for other lengths and types."""
    sides: Sequence[object] = tuple(value) if isinstance(value, tuple | list) else (value,)
    all_integers = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    if not all_integers or len(sides) not in (1, *lengths):
        allowed_lengths = " or ".join(map(str, lengths))
        raise InputError(
            f"{name}: a whole number, or {allowed_lengths} of them", repr(value), "correct it"
        )
    # (1, 1, 2, 2) becomes (1, 2), and (3, 3) becomes 3: equal shapes have one form.
    integers: tuple[int, ...] = tuple(int(side) for side in sides)  # type: ignore[call-overload]
    if len(set(integers)) == 1:
        return integers[0]
    if len(integers) == 4 and integers[0] == integers[1] and integers[2] == integers[3]:
        return integers[0], integers[2]
    return integers


@dataclass(frozen=True, slots=True)
class Bundles:
    """Groups put together until their channels fill whole blocks; each bundle is one product.

    There are `count` bundles of `groups` groups, `c1` input and `n1` output channel blocks each;
    the last one may have fewer: `last_groups`, `last_c1`, `last_n1`.
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
    suffice (32 for 16 if the result is int8), or all of them if there are fewer. Groups of 4 input
    and 8 output channels in fp16: e = lcm(16/4, 16/8) = 4. Inside a bundle the weights are
    block-diagonal: the share 1 - 1/e of the products is with zeros.
    """
    c0 = c0_of(shape.dtype)
    g = shape.groups
    group_c = shape.c // g
    group_k = shape.k // g
    out_block = 2 * FRACTAL if shape.out_dtype == "int8" else FRACTAL
    # Input and output channels of a bundle must both fill whole blocks.
    bundle_groups = min(lcm(lcm(group_c, c0) // group_c, lcm(group_k, out_block) // group_k), g)
    count = ceil_div(g, bundle_groups)
    # 10 groups in bundles of 4: three bundles, the last of 10 - 2 * 4 = 2 groups.
    last_groups = g - (count - 1) * bundle_groups
    return Bundles(
        count=count,
        groups=bundle_groups,
        c1=ceil_div(bundle_groups * group_c, c0),
        n1=ceil_div(bundle_groups * group_k, FRACTAL),
        last_groups=last_groups,
        last_c1=ceil_div(last_groups * group_c, c0),
        last_n1=ceil_div(last_groups * group_k, FRACTAL),
    )


@dataclass(frozen=True, slots=True)
class Units:
    """The smallest part of a bundle's depth that a stage of L1 can hold.

    A unit has `c1` channel blocks of the image and `beside` ones of the second image; it is `depth`
    fractals deep, and a bundle has `count` units.
    """

    count: int
    c1: int
    beside: int
    depth: int

    @property
    def total_depth(self) -> int:
        """Depth of a bundle in fractals."""
        return self.count * self.depth


@lru_cache(maxsize=256)
def units_of(shape: ConvShape) -> Units:
    """Return the units of a convolution: single channel blocks, unless it has a second image.

    With 4 channel blocks, and 6 in `beside`, there are gcd(4, 6) = 2 units of 2 and 3 blocks.
    """
    c1 = bundles_of(shape).c1
    beside = shape.beside
    beside_c1, beside_taps = (beside.blocks[0], beside.taps) if beside else (0, 0)
    # A unit holds whole channel blocks of both, so that both end with the last unit.
    count = gcd(c1, beside_c1)
    total_depth = c1 * shape.taps + beside_c1 * beside_taps
    return Units(count, c1 // count, beside_c1 // count, total_depth // count)
