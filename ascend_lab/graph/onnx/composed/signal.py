"""Signals: Fourier transforms as products with a fixed matrix, windows, norms of pieces."""

from __future__ import annotations

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import axis_in, axis_mixed, reshaped_to, table
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import ELEMENTS, FLOATS, INTEGERS, Tensor, Values
from ascend_lab.graph.onnx.windows import as_image, as_row, plain, window_of

_MOST = 2048
_COSINES = {"HannWindow": (0.5, 0.5), "HammingWindow": (25 / 46, 21 / 46),
            "BlackmanWindow": (0.42, 0.5, 0.08)}  # fmt: skip


@converter("DFT", types=(FLOATS, INTEGERS, ("int64",)), since=17)
def _dft(ctx: Context) -> Value:
    """Multiply (real, imaginary) pairs along an axis by e^(-2 pi i k n / N), or its inverse."""
    x, rank = ctx.input(0), len(ctx.shape(0))
    asked = int(ctx.scalar(2)) if ctx.has(2) else -2
    axis = axis_in(ctx, asked if ctx.opset >= 20 else ctx.attr("axis"), rank)
    parts, n = x.shape[-1], x.shape[axis]
    half = bool(ctx.attr("onesided") and ctx.attr("inverse"))
    length = int(ctx.scalar(1)) if ctx.has(1) else (2 * (n - 1) if half else n)
    if axis == rank - 1 or parts not in (1, 2) or not 0 < length <= _MOST or (half and parts == 1):
        ctx.unsupported(f"a signal axis of up to {_MOST} numbers or pairs", f"{x.shape}")
    if ctx.attr("onesided") and not ctx.attr("inverse") and parts == 2:
        ctx.unsupported("a real signal, of which one side is enough", "a complex one")
    matrix = _fourier(ctx, n, length, parts)
    order = (*(i for i in range(rank) if i not in (axis, rank - 1)), axis, rank - 1)
    turned = x if order == tuple(range(rank)) else ctx.emit("transpose", x, perm=order)
    lead = turned.shape[:-2]
    mixed = axis_mixed(ctx, reshaped_to(ctx, turned, (*lead, n * parts)), len(lead), matrix)
    wide = 1 if half else 2
    out = reshaped_to(ctx, mixed, (*lead, len(matrix) // wide, wide))
    if order == tuple(range(rank)):
        return out
    return ctx.emit("transpose", out, perm=tuple(int(i) for i in np.argsort(order)))


def _fourier(ctx: Context, n: int, length: int, parts: int) -> Values:
    """Return the matrix from n pairs (or real numbers) to the transform's pairs."""
    inverse, onesided = bool(ctx.attr("inverse")), bool(ctx.attr("onesided"))
    outs = length // 2 + 1 if onesided and not inverse else length
    k, at = np.ogrid[:outs, : min(n, length)]
    turn = np.exp((2j if inverse else -2j) * np.pi * k * at / length)
    turn = turn / length if inverse else turn
    if inverse and onesided:  # the other side is the mirror image: its conjugates
        mirrored = (at > 0) & (2 * at < length)
        real, imaginary = turn * np.where(mirrored, 2, 1), turn * np.where(mirrored, 2, 1)
        pairs = np.stack([real.real, -imaginary.imag], axis=-1)[:, None]
    else:
        pairs = np.stack(
            [np.stack([turn.real, -turn.imag], -1), np.stack([turn.imag, turn.real], -1)], 1
        )
    full = np.zeros((outs, pairs.shape[1], n, parts))
    full[:, :, : at.shape[1]] = pairs[..., :parts]
    return full.reshape(outs * pairs.shape[1], n * parts)


@converter(*_COSINES, types=(INTEGERS,), since=17)
def _cosine_window(ctx: Context) -> Tensor:
    """Return a0 - a1 cos(x) + a2 cos(2 x) over one period."""
    size, number = int(ctx.scalar(0)), ctx.attr("output_datatype")
    if not 1 < size <= 2**20 or number not in ELEMENTS:
        ctx.unsupported("a window of 2 to 2^20 numbers", f"{size} of type {number}")
    angle = 2 * np.pi * np.arange(size) / (size if ctx.attr("periodic") else size - 1)
    terms = (a * (-1) ** i * np.cos(i * angle) for i, a in enumerate(_COSINES[ctx.op]))
    return ctx.known(sum(terms, np.zeros(size)), ELEMENTS[number][0])


@converter("LpPool", types=(FLOATS,), since=2)
def _lp_pool(ctx: Context) -> Value:
    """Take the p-th root of the sum of |x|^p over each window: a convolution with ones."""
    x, size = ctx.input(0), ctx.shape(0)[2:]
    if ctx.attr("ceil_mode"):
        ctx.unsupported("ceil_mode = 0", "1")
    window = window_of(ctx, ctx.attr("kernel_shape"), size)
    powers = as_image(ctx, _powered(ctx, x))
    channels = powers.shape[1]
    ones = table(ctx, np.ones((channels, 1, *window.kernel)), x.type.dtype, "ones")
    how = {"stride": window.stride, "pad": window.pads, "dilation": window.dilation}
    settings = {key: plain(value) for key, value in how.items()}
    total = ctx.emit("conv2d", powers, ones, groups=channels, **settings)
    return as_row(ctx, _root(ctx, total), len(x.shape))


@converter("GlobalLpPool", types=(FLOATS,), since=2)
def _global_lp_pool(ctx: Context) -> Value:
    x = ctx.input(0)
    if len(x.shape) < 3:
        ctx.unsupported("an image (n, c, ...)", str(x.shape))
    axes = tuple(range(2, len(x.shape)))
    return _root(ctx, ctx.emit("reduce_sum", _powered(ctx, x), axis=axes, keepdims=True))


def _powered(ctx: Context, x: Value) -> Value:
    p = ctx.attr("p")
    if p < 1:
        ctx.unsupported("p of at least 1", str(p))
    size = ctx.emit("abs", x)
    return size if p == 1 else ctx.emit("pow", size, ctx.number(p, x.type.dtype))


def _root(ctx: Context, x: Value) -> Value:
    p = ctx.attr("p")
    return x if p == 1 else ctx.emit("pow", x, ctx.number(1 / p, x.type.dtype))
