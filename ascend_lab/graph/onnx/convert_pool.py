"""Pooling: windows of any stride and padding, ceiling mode, dilation; and over the whole image."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import FLOATS, Shape, Values
from ascend_lab.graph.onnx.windows import WINDOW, Pair, Window, as_image, as_row, plain, window_of

_POOL = {**WINDOW, "ceil_mode": 0}
_MOST_TAPS = 64


@converter("MaxPool", types=((*FLOATS, "int8", "uint8"),))
def _max_pool(ctx: Context) -> Value:
    """Take the largest of each window; bytes pass through fp32, which holds them exactly."""
    whole = ctx.elem(0) not in FLOATS
    window, x = _window(ctx), as_image(ctx, ctx.input(0, "fp32" if whole else ""))
    if window.dilation == (1, 1) and _fits(window):
        out = ctx.emit("max_pool2d", x, **_settings(window))
    else:
        out = _by_taps(ctx, x, window, "max", -math.inf)
    return as_row(ctx, ctx.cast(out, ctx.elem(0)) if whole else out, len(ctx.shape(0)))


@converter("AveragePool", types=(FLOATS,))
def _average_pool(ctx: Context) -> Value:
    """Average real elements, with count_include_pad zeros of the padding too.

    Elements beyond the padding, which only the ceiling mode reaches, never count.
    """
    window, x = _window(ctx), as_image(ctx, ctx.input(0))
    include = bool(ctx.attr("count_include_pad"))
    if window.dilation != (1, 1):
        total = _by_taps(ctx, x, window, "add", 0.0)
        counts = ctx.known(_counts(x.shape[2:], window, include), "float32")
        shares = ctx.cast(ctx.value(counts), x.type.dtype)
        return as_row(ctx, ctx.emit("div", total, shares), len(ctx.shape(0)))
    if include and any(window.extra):
        x = ctx.emit("pad", x, pads=((0, 0), (0, 0), *window.pads))
        window, include = replace(window, pads=((0, 0), (0, 0))), False
    if not _fits(window):
        ctx.unsupported("pads smaller than the kernel", f"{window.pads} for {window.kernel}")
    out = ctx.emit("avg_pool2d", x, count_include_pad=include, **_settings(window))
    return as_row(ctx, out, len(ctx.shape(0)))


@converter("GlobalAveragePool", "GlobalMaxPool", types=(FLOATS,))
def _global_pool(ctx: Context) -> Value:
    op = "global_avg_pool" if ctx.op == "GlobalAveragePool" else "global_max_pool"
    x = ctx.input(0)
    if len(x.shape) < 3:
        ctx.unsupported("an image (n, c, ...)", str(x.shape))
    if len(x.shape) == 4:
        return ctx.emit(op, x)
    image = ctx.emit("reshape", x, shape=(*x.shape[:2], 1, math.prod(x.shape[2:])))
    out = ctx.emit(op, image)
    return ctx.emit("reshape", out, shape=(*x.shape[:2], *(1,) * (len(x.shape) - 2)))


def _window(ctx: Context) -> Window:
    """Return the window; the ceiling mode adds what its last window reaches beyond the padding.

    A last window that would start beyond the image and its padding before is dropped.
    """
    size = ctx.shape(0)[2:]
    if ctx.attr("ceil_mode") and ctx.attr("auto_pad") == "VALID":
        ctx.unsupported("ceil_mode without auto_pad VALID", "both")
    window = window_of(ctx, ctx.attr("kernel_shape"), size)
    if not ctx.attr("ceil_mode") or ctx.attr("auto_pad") not in ("NOTSET", ""):
        return window
    wide, extra = (1,) * (2 - len(size)) + size, []
    for n, pads, reach, step in zip(wide, window.pads, window.reach, window.stride, strict=True):
        count = -(-(n + sum(pads) - reach) // step) + 1
        if (count - 1) * step >= n + pads[0]:
            count -= 1
        extra.append(max(0, (count - 1) * step + reach - n - sum(pads)))
    return replace(window, extra=(extra[0], extra[1]))


def _reached(window: Window) -> tuple[Pair, Pair]:
    """Return the pads with what the ceiling mode adds behind."""
    (top, bottom), (left, right) = window.pads
    return (top, bottom + window.extra[0]), (left, right + window.extra[1])


def _fits(window: Window) -> bool:
    """Tell whether each pad is smaller than the kernel, as the pooling operators ask."""
    pads = _reached(window)
    return all(max(pads[i]) < window.kernel[i] for i in range(2))


def _settings(window: Window) -> dict[str, object]:
    pads = _reached(window)
    return {"kernel": plain(window.kernel), "stride": plain(window.stride), "pad": plain(pads)}


def _counts(size: Shape, window: Window, include: bool) -> Values:
    """Return how many elements each window of a dilated kernel averages."""
    rows = []
    for i, n in enumerate(size):
        (before, after), extra = window.pads[i], window.extra[i]
        real = np.zeros(before + n + after + extra)
        real[: before + n + after] = include
        real[before : before + n] = 1
        taps = np.arange(window.kernel[i]) * window.dilation[i]
        first = np.arange(0, len(real) - window.reach[i] + 1, window.stride[i])
        rows.append(real[first[:, None] + taps].sum(axis=1))
    return np.outer(*rows)


def _by_taps(ctx: Context, x: Value, window: Window, op: str, border: float) -> Value:
    """Combine one strided slice of the padded image for each element of the kernel."""
    if math.prod(window.kernel) > _MOST_TAPS:
        ctx.unsupported(f"dilated kernels of at most {_MOST_TAPS} elements", str(window.kernel))
    if ctx.attr("pads") or any(map(any, _reached(window))):
        x = ctx.emit("pad", x, pads=((0, 0), (0, 0), *_reached(window)), value=border)
    n, c, h, w = x.shape
    last = [s - r for s, r in zip((h, w), window.reach, strict=True)]
    if min(last) < 0:
        ctx.unsupported("a window no larger than the padded image", f"{window.reach}")
    out: Value | None = None
    for i, j in itertools.product(*map(range, window.kernel)):
        top, left = i * window.dilation[0], j * window.dilation[1]
        end = (n, c, top + last[0] + 1, left + last[1] + 1)
        tap = ctx.emit("slice", x, begin=(0, 0, top, left), end=end, step=(1, 1, *window.stride))
        out = tap if out is None else ctx.emit(op, out, tap)
    assert out is not None
    return out
