"""Imports ONNX operators with sliding windows: convolutions and pooling of rows and images.

The module covers pads, automatic pads, dilation, and the ceiling mode, in which the last window may
reach beyond the image.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import operator_of
from ascend_lab.compiler.onnx.context import Context, converter
from ascend_lab.compiler.onnx.tensors import FLOATS, MAX_FOLDED_ELEMENTS, Shape, Values, check_size
from ascend_lab.errors import GraphError

Pair = tuple[int, int]
_MAX_KERNEL_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Window:
    """A window over an image: its sizes along height and width; a row is an image of height 1."""

    kernel: Pair
    stride: Pair
    pads: tuple[Pair, Pair]
    dilation: Pair
    ceiling_pads: Pair = (0, 0)
    """Elements after the padded image that the last window of the ceiling mode covers."""

    @property
    def span(self) -> Pair:
        """Rows and columns a window spans: (k - 1) d + 1."""
        (h, w) = self.kernel
        (y, x) = self.dilation
        return (h - 1) * y + 1, (w - 1) * x + 1

    @property
    def pads_with_ceiling(self) -> tuple[Pair, Pair]:
        """The pads, with the elements that the ceiling mode adds at the end."""
        (top, bottom), (left, right) = self.pads
        return (top, bottom + self.ceiling_pads[0]), (left, right + self.ceiling_pads[1])

    def settings(self) -> dict[str, Any]:
        """Return the attributes of a convolution with this window."""
        attrs = {"stride": self.stride, "pad": self.pads, "dilation": self.dilation}
        return {key: collapsed(value) for key, value in attrs.items()}


def window_of(ctx: Context, kernel: Shape, size: Shape) -> Window:
    """Return the window over the last axes of an input of spatial `size`."""
    rank = len(size)
    kernel_shape = ctx.attr("kernel_shape")
    if rank not in (1, 2):
        ctx.unsupported("images of 1 or 2 dimensions", f"{rank} dimensions")
    if len(kernel) != rank or kernel_shape not in ((), kernel):
        needed = f"{ctx.where}: kernel_shape of {rank} sizes, as the weights"
        raise GraphError(needed, str(kernel_shape or kernel), "correct it")
    stride, dilation = (_sizes(ctx, key, rank) for key in ("strides", "dilations"))
    if min(*kernel, *stride, *dilation) < 1:
        needed = "kernel, strides, dilations of at least 1"
        got = f"{kernel}, {stride}, {dilation}"
        raise GraphError(f"{ctx.where}: {needed}", got, "correct it")
    if math.prod(kernel) > MAX_FOLDED_ELEMENTS:
        ctx.unsupported(f"windows of at most {MAX_FOLDED_ELEMENTS} elements", str(kernel))
    pads = _pads(ctx, kernel, stride, dilation, size)
    if any(n < 0 for side in pads for n in side):
        ctx.unsupported("pads of at least 0", str(pads))
    padded = tuple(n + sum(p) for n, p in zip(size, pads, strict=True))
    check_size(f"{ctx.where}: padded", (*ctx.shape(0)[:2], *padded))
    # a row (n, c, w) is an image of height 1
    leading_ones: Any = (1,) * (2 - rank)
    leading_pads: Any = ((0, 0),) * (2 - rank)
    return Window(
        leading_ones + kernel, leading_ones + stride, leading_pads + pads, leading_ones + dilation
    )


def _sizes(ctx: Context, key: str, rank: int) -> Shape:
    numbers: Shape = ctx.attr(key) or (1,) * rank
    if len(numbers) != rank:
        raise GraphError(f"{ctx.where}: {key} of {rank} sizes", str(numbers), "correct it")
    return numbers


def _pads(
    ctx: Context, kernel: Shape, stride: Shape, dilation: Shape, size: Shape
) -> tuple[Pair, ...]:
    """Return pads (before, after) per axis: given, or computed for ceil(size / stride) outputs."""
    rank = len(size)
    auto_pad = ctx.attr("auto_pad")
    pads = ctx.attr("pads")
    if auto_pad in ("NOTSET", ""):
        # the file has the pads before each axis, then those after it
        flat = pads or (0,) * (2 * rank)
        if len(flat) != 2 * rank:
            raise GraphError(f"{ctx.where}: {2 * rank} pads", str(flat), "correct it")
        return tuple((flat[i], flat[rank + i]) for i in range(rank))
    if any(pads):
        ctx.unsupported("pads or auto_pad", "both")
    if auto_pad == "VALID":
        return ((0, 0),) * rank
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        ctx.unsupported("auto_pad NOTSET, VALID, SAME_UPPER or SAME_LOWER", str(auto_pad))
    if any(d != 1 for d in dilation):
        ctx.unsupported("dilations of 1 with auto_pad SAME", str(dilation))
    pairs = []
    for k, s, d, n in zip(kernel, stride, dilation, size, strict=True):
        total = (-(-n // s) - 1) * s + (k - 1) * d + 1 - n
        # 5 pixels, kernel 3, stride 2: 3 windows cover 7 pixels, so that 2 are padded. If the
        # stride is above the kernel, the total may be negative; then there are no pads.
        pairs.append(_split_pads(max(total, 0), auto_pad))
    return tuple(pairs)


def _split_pads(total_pad: int, auto_pad: str) -> Pair:
    """Return pads before and after; SAME_UPPER puts the odd one after, SAME_LOWER before."""
    # 3 pads are (1, 2) for SAME_UPPER and (2, 1) for SAME_LOWER
    smaller_pad = total_pad // 2
    larger = total_pad - total_pad // 2
    return (smaller_pad, larger) if auto_pad == "SAME_UPPER" else (larger, smaller_pad)


def as_image(ctx: Context, value: Value) -> Value:
    """Return (n, c, w) as (n, c, 1, w); an image does not change."""
    if len(value.shape) not in (3, 4):
        ctx.unsupported("tensors of 3 or 4 axes", str(value.shape))
    return ctx.reshape(value, (*value.shape[:2], *(1,) * (4 - len(value.shape)), *value.shape[2:]))


def as_row(ctx: Context, value: Value, rank: int) -> Value:
    """Return an image of height 1 as (n, c, w) if the input had `rank` 3."""
    return value if rank == 4 else ctx.reshape(value, (*value.shape[:2], value.shape[3]))


def collapsed(value: Any) -> Any:
    """Return equal sizes, also nested ones, as one number: ((1, 1), (1, 1)) becomes 1."""
    if isinstance(value, int):
        return value
    sizes = [collapsed(v) for v in value]
    is_uniform = isinstance(sizes[0], int) and len(set(map(str, sizes))) == 1
    return sizes[0] if is_uniform else tuple(value)


# -- convolutions ---------------------------------------------------------------------------------
def convolved(
    ctx: Context, x: Value, weight: Value, *bias: Value, groups: int | None = None, border: int = 0
) -> Value:
    """Return the convolution of rows or images that the node's attributes describe.

    `border` is the number that pads the image: in int8, the zero point.
    """
    window = window_of(ctx, weight.shape[2:], x.shape[2:])
    settings = {"groups": ctx.attr("group") if groups is None else groups, **window.settings()}
    if border and any(map(any, window.pads)):
        settings["pad_value"] = border
    out = ctx.emit("conv2d", as_image(ctx, x), as_image(ctx, weight), *bias, **settings)
    return as_row(ctx, out, len(x.shape))


@converter("Conv", types=(FLOATS,))
def _conv(ctx: Context) -> Value:
    return convolved(ctx, *(ctx.input(i) for i in range(3) if ctx.has(i)))


@converter("ConvTranspose", types=(FLOATS,))
def _conv_transpose(ctx: Context) -> Value:
    """Return a transposed convolution whose pads are given, or follow from the output's size."""
    shape = ctx.shape(0)
    weight = ctx.shape(1)
    spatial = shape[2:]
    auto_pad = ctx.attr("auto_pad")
    output_shape = ctx.attr("output_shape")
    leading_ones = (1,) * (2 - len(spatial))
    output_padding: Shape = ctx.attr("output_padding") or (0,) * len(spatial)
    if len(output_padding) != len(spatial):
        ctx.unsupported(f"{len(spatial)} sizes of output_padding", str(output_padding))
    full_output_padding = (0,) * len(leading_ones) + output_padding
    if auto_pad.startswith("SAME"):
        ctx.attrs = {**ctx.attrs, "auto_pad": "NOTSET"}
    window = window_of(ctx, weight[2:], spatial)
    image_size = leading_ones + spatial
    # 5 pixels, stride 2, kernel 3: (5 - 1) 2 + 3 = 11; SAME means 5 * 2 = 10, so that one is cut
    # off, for SAME_UPPER at the end
    full_sizes = [
        (n - 1) * s + r for n, s, r in zip(image_size, window.stride, window.span, strict=True)
    ]
    # the output's size is given, and the pads follow from it: full size minus target
    if output_shape or auto_pad.startswith("SAME"):
        strides = window.stride[len(leading_ones) :]
        target = tuple(n * s for n, s in zip(spatial, strides, strict=True))
        if output_shape:
            target = tuple(output_shape[-len(spatial) :])
        padded = [n + e for n, e in zip(full_sizes, full_output_padding, strict=True)]
        window = replace(window, pads=_pads_to(ctx, auto_pad, padded, (*leading_ones, *target)))
    check_size(f"{ctx.where}: before its pads are cut", (*shape[:2], *full_sizes))
    values = [as_image(ctx, ctx.input(i)) for i in range(2)]
    values += [ctx.input(2)] if ctx.has(2) else []
    settings = {
        **window.settings(),
        "output_padding": collapsed(full_output_padding),
        "groups": ctx.attr("group"),
    }
    return as_row(ctx, ctx.emit("conv_transpose2d", *values, **settings), len(shape))


def _pads_to(
    ctx: Context, auto_pad: str, full_sizes: Sequence[int], target: Shape
) -> tuple[Pair, Pair]:
    """Return the pads that cut a transposed convolution's result to a size."""
    totals = [full_size - size for full_size, size in zip(full_sizes, target, strict=True)]
    if negative_pads := [-total for total in totals if total < 0]:
        ctx.unsupported(
            "an output_shape that needs no output_padding", f"{negative_pads[0]} missing"
        )
    return _split_pads(totals[0], auto_pad), _split_pads(totals[1], auto_pad)


# -- pooling --------------------------------------------------------------------------------------
@converter("MaxPool", types=((*FLOATS, "int8", "uint8"),))
def _max_pool(ctx: Context) -> Value:
    """Return the maximum of each window; int8 is computed in fp32, which holds it exactly."""
    is_integer = ctx.elem(0) not in FLOATS
    window = _pool_window(ctx)
    x = as_image(ctx, ctx.input(0, "fp32" if is_integer else ""))
    if window.dilation == (1, 1) and _pads_fit_kernel(window):
        result = ctx.emit("max_pool2d", x, **_pool_settings(window))
    else:
        result = _combined_slices(ctx, x, window, "max", -math.inf)
    return as_row(ctx, ctx.cast(result, ctx.elem(0)) if is_integer else result, len(ctx.shape(0)))


@converter("AveragePool", types=(FLOATS,))
def _average_pool(ctx: Context) -> Value:
    """Return the average of each window's elements; with count_include_pad the padding counts.

    Elements after the padding, which only the ceiling mode covers, never count.
    """
    window = _pool_window(ctx)
    x = as_image(ctx, ctx.input(0))
    counts_padding = bool(ctx.attr("count_include_pad"))
    if window.dilation != (1, 1):
        sums = _combined_slices(ctx, x, window, "add", 0.0)
        counts = ctx.known_tensor(_element_counts(x.shape[2:], window, counts_padding), "float32")
        element_counts = ctx.cast(ctx.value(counts), x.type.dtype)
        return as_row(ctx, ctx.emit("div", sums, element_counts), len(ctx.shape(0)))
    if counts_padding and any(window.ceiling_pads):
        x = ctx.emit("pad", x, pads=((0, 0), (0, 0), *window.pads))
        window = replace(window, pads=((0, 0), (0, 0)))
        counts_padding = False
    if not _pads_fit_kernel(window):
        ctx.unsupported("pads smaller than the kernel", f"{window.pads} for {window.kernel}")
    result = ctx.emit("avg_pool2d", x, count_include_pad=counts_padding, **_pool_settings(window))
    return as_row(ctx, result, len(ctx.shape(0)))


@converter("GlobalAveragePool", "GlobalMaxPool", types=(FLOATS,))
def _global_pool(ctx: Context) -> Value:
    op = "global_avg_pool" if ctx.op == "GlobalAveragePool" else "global_max_pool"
    x = ctx.input(0)
    if len(x.shape) < 3:
        ctx.unsupported("an image (n, c, ...)", str(x.shape))
    flat_shape = (*x.shape[:2], 1, math.prod(x.shape[2:]))
    result = ctx.emit(op, x if len(x.shape) == 4 else ctx.reshape(x, flat_shape))
    return ctx.reshape(result, (*x.shape[:2], *(1,) * (len(x.shape) - 2)))


@converter("LpPool", types=(FLOATS,), since=2)
def _lp_pool(ctx: Context) -> Value:
    """Return the p-th root of the sum of |x|^p over each window, by a convolution with ones."""
    x = ctx.input(0)
    if ctx.attr("ceil_mode"):
        ctx.unsupported("ceil_mode = 0", "1")
    powers = _powered(ctx, x)
    kernel = ctx.attr("kernel_shape")
    window_of(ctx, kernel, x.shape[2:])  # raises an error for a kernel that is too large
    # a group for each channel and weights of 1: each window is summed channel by channel
    ones = ctx.constant_array(np.ones((x.shape[1], 1, *kernel)), x.type.dtype, "ones")
    return _root(ctx, convolved(ctx, powers, ones, groups=x.shape[1]))


@converter("GlobalLpPool", types=(FLOATS,), since=2)
def _global_lp_pool(ctx: Context) -> Value:
    x = ctx.input(0)
    if len(x.shape) < 3:
        ctx.unsupported("an image (n, c, ...)", str(x.shape))
    axes = tuple(range(2, len(x.shape)))
    return _root(ctx, ctx.emit("reduce_sum", _powered(ctx, x), axis=axes, keepdims=True))


def _powered(ctx: Context, x: Value) -> Value:
    p = ctx.attr("p")
    magnitude = ctx.emit("abs", x)
    if p < 1:
        ctx.unsupported("p of at least 1", str(p))
    return magnitude if p == 1 else ctx.emit("pow", magnitude, ctx.constant_scalar(p, x.type.dtype))


def _root(ctx: Context, x: Value) -> Value:
    p = ctx.attr("p")
    return x if p == 1 else ctx.emit("pow", x, ctx.constant_scalar(1 / p, x.type.dtype))


def _pool_window(ctx: Context) -> Window:
    """Return the window; in ceiling mode, with what the last window covers after the pads.

    A last window that would start after the image's last pixel is dropped.
    """
    size = ctx.shape(0)[2:]
    if ctx.attr("ceil_mode") and ctx.attr("auto_pad") == "VALID":
        ctx.unsupported("ceil_mode without auto_pad VALID", "both")
    window = window_of(ctx, ctx.attr("kernel_shape"), size)
    if not ctx.attr("ceil_mode") or ctx.attr("auto_pad") not in ("NOTSET", ""):
        return window
    image_size = (1,) * (2 - len(size)) + size
    ceiling_pads = []
    for n, pads, span, stride in zip(
        image_size, window.pads, window.span, window.stride, strict=True
    ):
        # 6 pixels, kernel 3, stride 2, no pads: ceil(3 / 2) + 1 = 3 windows, and the last one, at
        # 4, ends 1 pixel after the image
        count = -(-(n + sum(pads) - span) // stride) + 1
        if (count - 1) * stride >= n + pads[0]:
            count -= 1
        ceiling_pads.append(max(0, (count - 1) * stride + span - n - sum(pads)))
    return replace(window, ceiling_pads=(ceiling_pads[0], ceiling_pads[1]))


def _pads_fit_kernel(window: Window) -> bool:
    """Tell whether each pad is smaller than the kernel, as the pooling operators require."""
    return all(max(p) < k for p, k in zip(window.pads_with_ceiling, window.kernel, strict=True))


def _pool_settings(window: Window) -> dict[str, Any]:
    attrs = {"kernel": window.kernel, "stride": window.stride, "pad": window.pads_with_ceiling}
    return {key: collapsed(value) for key, value in attrs.items()}


def _element_counts(size: Shape, window: Window, counts_padding: bool) -> Values:
    """Return the number of elements in each window of a dilated kernel, to divide sums by."""
    mask = np.pad(np.ones(size), window.pads, constant_values=counts_padding)
    mask = np.pad(mask, tuple((0, n) for n in window.ceiling_pads))
    ones = np.ones((1, 1, *window.kernel))
    conv = operator_of("conv2d")
    attrs = conv.settings({"stride": window.stride, "dilation": window.dilation})
    counts: Values = np.asarray(conv.formula(mask[None, None], ones, **attrs))[0, 0]
    return counts


def _combined_slices(ctx: Context, x: Value, window: Window, op: str, border: float) -> Value:
    """Combine one strided slice of the padded image for each element of the kernel."""
    if math.prod(window.kernel) > _MAX_KERNEL_ELEMENTS:
        ctx.unsupported(
            f"dilated kernels of at most {_MAX_KERNEL_ELEMENTS} elements", str(window.kernel)
        )
    if ctx.attr("pads") or any(map(any, window.pads_with_ceiling)):
        x = ctx.emit("pad", x, pads=((0, 0), (0, 0), *window.pads_with_ceiling), value=border)
    n, c, h, w = x.shape
    # 7 rows and windows that span 5: they start at rows 0, 1 and 2
    last_starts = [s - r for s, r in zip((h, w), window.span, strict=True)]
    if min(last_starts) < 0:
        ctx.unsupported("a window no larger than the padded image", f"{window.span}")
    slices = []
    for i, j in itertools.product(*map(range, window.kernel)):
        top = i * window.dilation[0]
        first_column = j * window.dilation[1]
        end = (n, c, top + last_starts[0] + 1, first_column + last_starts[1] + 1)
        step = (1, 1, *window.stride)
        slices.append(ctx.emit("slice", x, begin=(0, 0, top, first_column), end=end, step=step))
    return functools.reduce(lambda one, other: ctx.emit(op, one, other), slices)
