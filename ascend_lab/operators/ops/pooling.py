"""Pooling of (n, c, h, w) images: maximum and average of windows, and of the whole image.

For example, the maxima of the 2 x 2 windows of a 6 x 6 image, which do not overlap, are 3 x 3
numbers.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import layout
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Kernel, as_kernel, ceil_div, renamed
from ascend_lab.operators import dsl as te
from ascend_lab.operators.kernels import conv, conv_windows, epilogue
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.operand_packing import pack_weights
from ascend_lab.operators.ops import expressions, formats as forms, reduction
from ascend_lab.operators.ops.expressions import (
    NARROW,
    Pair,
    in_fp32,
    narrow,
    out_size,
    padded,
    wide,
)
from ascend_lab.operators.ops.formats import Pairs, Shape, TypeRule, Values, exact, rounded
from ascend_lab.operators.ops.operator import REQUIRED, Call, Domain, Example, Template, define
from ascend_lab.operators.ops.slicing import AxisRule, Reduction, SliceRules, Source

C0 = 16
"""Channels of a block of the layout NC1HWC0 in 2-byte formats."""
MAX_CUBE_TAPS = 25
"""Largest window that the cube adds up, 5 x 5: each element takes a 16 x 16 fractal of weights."""


def geometry(kernel: Any, stride: Any, pad: Any, **others: Any) -> tuple[Pair, Pair, Pairs]:
    """Return kernel, stride (by default the kernel) and padding as pairs.

    Raises `ShapeError` if the padding is not smaller than the kernel.
    """
    size = forms.pair("kernel", kernel)
    strides = size if stride is None else forms.pair("stride", stride)
    pads = forms.pad_pairs("pool", pad)
    if any(max(pads[i]) >= size[i] for i in range(2)):
        needed = f"padding smaller than the kernel {size}"
        raise errors.ShapeError(needed, str(pads), "a window needs a real element")
    return size, strides, pads


def _shape(x: Shape, **attrs: Any) -> Shape:
    forms.check_rank("x (n, c, h, w)", x, 4)
    return (*x[:2], *out_size("pool", (x[2], x[3]), *geometry(**attrs)))


def _slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    size, strides, pads = geometry(**attrs)
    rules = (
        *(AxisRule(i, "free", (Source(0, i),), (i,)) for i in range(2)),
        *expressions.window_rules(size, strides, pads),
    )

    return SliceRules("SlidingWindow", rules, adjust=partial(expressions.piece_pads, rules, pads))


def window_counts(size: Shape, kernel: Pair, strides: Pair, pads: Pairs, include: bool) -> Values:
    """Return the number of elements of each window, (oh, ow); padding counts if `include`.

    It is the product of the numbers along rows and along columns.
    """
    axes = []
    for n, width, stride, (pad_before, pad_after) in zip(size, kernel, strides, pads, strict=True):
        counted = np.pad(np.ones(n), (pad_before, pad_after), constant_values=float(include))
        # a difference of prefix sums is the sum of a window
        sums = np.append(0, np.cumsum(counted))
        axes.append((sums[width:] - sums[:-width])[::stride])
    # 3 x 3 pixels, 3 x 3 windows, pad 1: (2, 3, 2) along each axis, so 4 in a corner, 6 at an edge,
    # 9 in the middle.
    counts: Values = np.multiply.outer(*axes)
    return counts


# -- values and expressions -----------------------------------------------------------------------
def _max_values(x: Values, **attrs: Any) -> Values:
    size, strides, pads = geometry(**attrs)
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    return expressions.fold_windows(padded(x, pads, lowest), size, strides, np.maximum)


def _average_values(x: Values, *, count_include_pad: bool, **attrs: Any) -> Values:
    size, strides, pads = geometry(**attrs)
    counts = window_counts(x.shape[2:], size, strides, pads, count_include_pad)
    result: Values = expressions.fold_windows(padded(x, pads), size, strides, np.add) / counts
    return result


def _pooled(x: te.Tensor, size: Pair, strides: Pair, pads: Pairs, mode: str) -> te.Tensor:
    """Return the pooling of an image in NC1HWC0, with channels padded to blocks of 16."""
    n, c, h, w = x.shape
    # 17 channels are 2 blocks: 15 lanes are padding, cut off again at the end.
    c1 = -(-c // C0)
    blocks = te.reshape(te.pad(x, ((0, 0), (0, c1 * C0 - c), (0, 0), (0, 0))), (n, c1, C0, h, w))
    image = te.transpose(blocks, (0, 1, 3, 4, 2))
    pooled = te.pooling2d(image, size, strides, (*pads[0], *pads[1]), mode)
    oh, ow = pooled.shape[2:4]
    image_nchw = te.reshape(te.transpose(pooled, (0, 1, 4, 2, 3)), (n, c1 * C0, oh, ow))
    return image_nchw if c == c1 * C0 else te.slice(image_nchw, (0, 0, 0, 0), (n, c, oh, ow))


def _max_expression(x: te.Tensor, size: Pair, strides: Pair, pads: Pairs) -> te.Tensor:
    """Return the maximum of each window; int8 is compared in fp16, which represents it exactly."""
    if x.dtype != "int8":
        return _pooled(x, size, strides, pads, "max")
    return te.cast_to(_pooled(te.cast_to(x, "fp16"), size, strides, pads, "max"), "int8")


def _average_expression(x: te.Tensor, *, count_include_pad: bool, **attrs: Any) -> te.Tensor:
    """Return the mean of each window.

    The pooling instruction counts padding. To exclude it, the result is divided by the mean of an
    image of ones, which is the share of real elements: 4/9 in the corner of a 3 x 3 window with
    pad 1.
    """
    size, strides, pads = geometry(**attrs)
    mean = _pooled(x, size, strides, pads, "avg")
    if count_include_pad or not any(map(any, pads)):
        return mean
    one_channel = te.slice(x, (0, 0, 0, 0), (1, 1, *x.shape[2:]))
    # An expression has no constants: max(min(x, 0), 0) = 0 for any number x, and 0 + 1 is one.
    ones = te.vadds(te.vmuls(te.vmaxs(te.vmins(one_channel, 0.0), 0.0), 0.0), 1.0)
    real_share = _pooled(ones, size, strides, pads, "avg")
    return te.vdiv(mean, te.broadcast(real_share, mean.shape))


# -- kernels: images lie as NC1HWC0, so that every window element is one contiguous block ---------
def _windows(x: te.Tensor, size: Pair, strides: Pair, fold: Any) -> te.Tensor:
    """Return the fold (maximum or sum) of every window of a padded image (n, c1, h, w, c0)."""
    n, c1, h, w, c0 = x.shape
    out_shape = (n, c1, (h - size[0]) // strides[0] + 1, (w - size[1]) // strides[1] + 1, c0)
    r = te.reduce_axis(size[0], "r")
    s = te.reduce_axis(size[1], "s")

    def formula(b: Any, c: Any, i: Any, j: Any, lane: Any) -> Any:
        return fold(x[b, c, r + i * strides[0], s + j * strides[1], lane], (r, s))

    return te.compute(out_shape, formula)


def as_convolution(attrs: Mapping[str, Any], image: Shape, **formats: Any) -> ConvShape:
    """Return the pooling of an image as a convolution with a group per channel."""
    size, strides, pads = geometry(**attrs)
    n, c, h, w = image
    return ConvShape(
        n=n,
        c=c,
        h=h,
        w=w,
        k=c,
        r=size[0],
        s=size[1],
        stride=strides,
        pad=(*pads[0], *pads[1]),
        groups=c,
        **formats,
    )


def _image_tensor(call: Call) -> te.Tensor:
    shape = call.shapes[0]
    dtype = call.dtypes[0]
    lanes = None if dtype == "int8" else C0
    return te.placeholder(
        layout.address_map("NC1HWC0", shape, dtype, c0=lanes).storage_shape, dtype, "x"
    )


def _max_kernel(call: Call, chip: Chip) -> Kernel:
    size, strides, pads = geometry(**call.attrs)
    x = _image_tensor(call)
    numbers = te.cast_to(x, "fp16") if x.dtype == "int8" else x  # the vector unit compares floats
    # Around the image stands the least number, so that padding never is the largest.
    image = te.pad(numbers, ((0, 0), (0, 0), *pads, (0, 0)), -np.inf)
    numbers = wide(image) if x.dtype == "bf16" else image
    y = te.cast_to(_windows(numbers, size, strides, te.max), x.dtype)
    return te.lower(te.auto_schedule(te.renamed(y, "y"), chip))


def _counts(call: Call) -> Values:
    size = call.shapes[0][2:]
    include = call.attrs["count_include_pad"]
    return window_counts(size, *geometry(**call.attrs), include)


def _average_kernel(call: Call, chip: Chip) -> Kernel:
    """Return the kernel of the mean of windows.

    If all windows have the same count, sums are multiplied by the number 1 / count, otherwise by a
    tensor `rate`. The cube adds up small windows, as a depthwise convolution with weights of 1.
    """
    size, strides, pads = geometry(**call.attrs)
    x = _image_tensor(call)
    counts = _counts(call)
    # Images in fp32 and windows of more than 25 elements are summed by the vector unit, below.
    shape = _sum_convolution(call)
    if shape is not None:
        return _cube_kernel(call, shape, chip)
    total = _windows(wide(te.pad(x, ((0, 0), (0, 0), *pads, (0, 0)))), size, strides, te.sum)
    if np.ptp(counts) == 0:
        mean = te.vmuls(total, 1.0 / float(counts.flat[0]))
    else:
        rate = te.placeholder((*counts.shape, 1), "fp32", "rate")
        mean = te.vmul(total, te.broadcast(rate, total.shape))
    return te.lower(te.auto_schedule(te.renamed(narrow(mean, x.dtype), "y"), chip))


def _extra_tensors(call: Call) -> dict[str, Values]:
    """Return the tensors that the kernel reads besides the image: `rate`, 1 / count; and weights.

    All lanes of the last channel block have weights of 1, including those that are padding: in the
    layout C1NHWC0 the kernel may meet a full block where it expects the padded one.
    """
    counts = _counts(call)
    shape = _sum_convolution(call)
    tensors = {"rate": (1.0 / counts).astype(np.float32)} if np.ptp(counts) else {}
    if shape is not None:
        lanes = ceil_div(shape.c, C0) * C0
        every_lane = replace(shape, c=lanes, k=lanes, groups=lanes)
        ones = np.ones((lanes, 1, shape.r, shape.s), forms.numpy_type(shape.dtype))
        tensors["weight"] = pack_weights(every_lane, ones)
    return tensors


def _sum_convolution(call: Call) -> ConvShape | None:
    """Return the depthwise convolution that adds windows, or None in fp32 and for large windows."""
    size = geometry(**call.attrs)[0]
    dtype = call.dtypes[0]
    if dtype not in NARROW or prod(size) > MAX_CUBE_TAPS:
        return None
    # Windows at the border average fewer elements: their sums stay wide until they are scaled.
    out_dtype = "fp32" if np.ptp(_counts(call)) else dtype
    return as_convolution(call.attrs, call.shapes[0], dtype=dtype, out_dtype=out_dtype)


def _cube_kernel(call: Call, shape: ConvShape, chip: Chip) -> Kernel:
    """Return the kernel on the cube: sums times 1 / count, or times `rate` in a second phase."""
    counts = _counts(call)
    placement = conv_windows.dense_placement(shape)
    # equal counts: the epilogue of the convolution scales the sums and casts them in one phase
    if shape.out_dtype != "fp32":
        # 2 x 2 windows: sums times 0.25.
        scale = epilogue.Step("vmuls", ("sums",), 1.0 / float(counts.flat[0]))
        steps = (scale, epilogue.Step("vconv", (0,), None, shape.dtype))
        return as_kernel(
            conv.conv_launch(
                shape, chip, None, placement, epilogue.Epilogue((), steps, shape.dtype)
            )
        )
    sums_phase = renamed(conv.conv_launch(shape, chip, None, placement), {"y": "sums"})
    total = te.placeholder((shape.n, shape.blocks[1], *shape.out_hw, C0), "fp32", "sums")
    rate = te.placeholder((*counts.shape, 1), "fp32", "rate")
    mean = narrow(te.vmul(total, te.broadcast(rate, total.shape)), shape.dtype)
    mean_kernel = as_kernel(te.lower(te.auto_schedule(te.renamed(mean, "y"), chip)))
    return Kernel("avg_pool2d", (sums_phase, *mean_kernel.phases))


# -- registration ---------------------------------------------------------------------------------
_ATTRS = {"kernel": REQUIRED, "stride": None, "pad": 0}
_EXAMPLES = (
    Example(((1, 1, 1, 1),), {"kernel": 1}),
    Example(((1, 16, 6, 6),), {"kernel": 2}),
    Example(((2, 3, 7, 5),), {"kernel": 3, "stride": 2, "pad": 1}),
    Example(((1, 17, 8, 9),), {"kernel": (3, 2), "stride": (1, 2), "pad": ((1, 0), (0, 1))}),
)
_SUMS = rounded(fp32_ulps=16, atol=2.0**-18)
_DISTINCT = {"x": Domain(distinct=True)}
define(
    "max_pool2d",
    ("x",),
    _max_values,
    in_fp32(lambda x, **attrs: _max_expression(x, *geometry(**attrs)), ("bf16",)),
    "largest element of each window; padding never wins",
    attrs=_ATTRS,
    shape_rule=_shape,
    types=TypeRule((*forms.FLOATS, "int8")),
    slicing=_slices,
    backward=lambda s: (s.net.max_pool2d_grad(s.x(), s.y(), s.g, **s.attrs),),
    template=Template(_max_kernel, ("x",), "NC1HWC0", "NC1HWC0"),
    traits=("pooling", "largest", "busy"),
    domains=_DISTINCT,
    tolerances=exact(),
    examples=_EXAMPLES,
)
define(
    "avg_pool2d",
    ("x",),
    _average_values,
    in_fp32(_average_expression),
    "mean of each window, over real elements only or, with count_include_pad, over padding too",
    attrs={**_ATTRS, "count_include_pad": False},
    shape_rule=_shape,
    types=TypeRule(),
    slicing=_slices,
    backward=lambda s: (s.net.avg_pool2d_grad(s.g, size=s.shape()[2:], **s.attrs),),
    template=Template(_average_kernel, ("x",), "NC1HWC0", "NC1HWC0", extra=_extra_tensors),
    traits=("pooling", "busy"),
    tolerances=_SUMS,
    examples=(
        *_EXAMPLES,
        Example(_EXAMPLES[2].shapes, {**_EXAMPLES[2].attrs, "count_include_pad": True}),
    ),
)


# -- the whole image ------------------------------------------------------------------------------
def _global_shape(x: Shape) -> Shape:
    forms.check_rank("x (n, c, h, w)", x, 4)
    return (*x[:2], 1, 1)


def _global_slices(*reductions: Reduction) -> Any:
    free = tuple(AxisRule(i, "free", (Source(0, i),), (i,)) for i in range(2))
    # Images and channels may be cut; of the result's rows and columns there is one each.
    single = tuple(AxisRule(i, "whole", reason="size 1", joins=(i,)) for i in (2, 3))
    return lambda shapes: SliceRules("Reduce", (*free, *single), reductions)


_GLOBAL = tuple(Example((s,)) for s in ((1, 1, 1, 1), (2, 3, 5, 7), (1, 16, 4, 4), (2, 17, 7, 1)))
define(
    "global_max_pool",
    ("x",),
    lambda x: x.max(axis=(2, 3), keepdims=True),
    in_fp32(lambda x: te.reduce_max(x, (2, 3), keepdims=True), ("bf16",)),
    "largest element of each channel",
    shape_rule=_global_shape,
    types=TypeRule(),
    slicing=_global_slices(*(Reduction(((0, i),), "max") for i in (2, 3))),
    backward=lambda s: (reduction.extreme_gradient(s, s.g, s.y(), (2, 3)),),
    wide=True,
    traits=("reduction", "image fold"),
    domains=_DISTINCT,
    tolerances=exact(),
    examples=_GLOBAL,
)
define(
    "global_avg_pool",
    ("x",),
    lambda x: x.mean(axis=(2, 3), keepdims=True),
    in_fp32(lambda x: te.vmuls(te.reduce_sum(x, (2, 3), True), 1.0 / prod(x.shape[2:]))),
    "mean of each channel",
    shape_rule=_global_shape,
    types=TypeRule(),
    slicing=_global_slices(),
    backward=lambda s: (s.net.stretched(s.net.scaled(s.g, 1.0 / prod(s.shape()[2:])), s.shape()),),
    traits=("reduction", "image fold"),
    tolerances=_SUMS,
    examples=_GLOBAL,
)
