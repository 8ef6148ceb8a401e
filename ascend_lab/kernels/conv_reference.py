"""What convolutions mean: NumPy references, in the precision of their operands (fp64 included).

Direct sums over kernel taps, each a vectorised product over channels. Whole-number operands are
summed exactly, in int64. These functions share no code with the kernels they judge.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.kernels.conv_shape import ConvShape, Pads, Pair

Values = NDArray[Any]


def conv2d_reference(
    x: Values,
    weight: Values,
    stride: int | Pair = 1,
    pad: int | Pair | Pads = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Values:
    """y[n,k,i,j] = sum over c,r,s of x[n,c,i*sh+r*dh-top,j*sw+s*dw-left] * weight[k,c,r,s].

    x is (n, c, h, w), weight (k, c/groups, r, s), the result (n, k, oh, ow) in float64 for floats
    (float32 stays), int64 for whole numbers. Raises `InputError` for shapes that do not fit.
    """
    x, weight = _wide(x, 4), _wide(weight, 4)
    shape = _shape_of(x, weight, stride, pad, dilation, groups)
    (oh, ow), (down, right), (sh, sw) = shape.out_hw, shape.dilations, shape.strides
    top, bottom, left, last = shape.pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, last)))
    x = x.reshape(shape.n, groups, shape.c // groups, *x.shape[2:])
    split = weight.reshape(groups, shape.k // groups, *weight.shape[1:])
    y = np.zeros((shape.n, groups, shape.k // groups, oh, ow), np.result_type(x, weight))
    for i in range(shape.r):
        for j in range(shape.s):
            rows = slice(i * down, i * down + (oh - 1) * sh + 1, sh)
            columns = slice(j * right, j * right + (ow - 1) * sw + 1, sw)
            y += np.einsum("ngchw,gkc->ngkhw", x[:, :, :, rows, columns], split[..., i, j])
    return y.reshape(shape.n, shape.k, oh, ow)


def conv_transpose2d_reference(
    x: Values,
    weight: Values,
    stride: int | Pair = 1,
    pad: int | Pair | Pads = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    output_pad: int | Pair = 0,
) -> Values:
    """Each input pixel adds its kernel to the output: y[i*sh+r*dh-top] += x[i] * weight[r].

    x is (n, c, h, w), weight (c, k/groups, r, s); the result has (h-1)*sh - top - bottom + reach +
    output_pad rows. This is the gradient of a convolution with respect to its input.
    """
    x, weight = _wide(x, 4), _wide(weight, 4)
    c, kg, r, s = weight.shape
    if x.shape[1] != c or groups < 1 or c % groups:
        raise InputError(
            f"weight (c, k/groups, r, s) with c = {x.shape[1]}, a multiple of {groups} groups",
            str(weight.shape),
            "swap its first two axes",
        )
    probe = ConvShape(1, 1, 1 << 20, 1 << 20, 1, r, s, stride, pad, dilation=dilation)
    (sh, sw), (dh, dw), (top, bottom, left, right) = probe.strides, probe.dilations, probe.pads
    more = output_pad if isinstance(output_pad, tuple) else (output_pad, output_pad)
    n, _, h, w = x.shape
    tall = (h - 1) * sh + probe.reach[0] + more[0]
    wide = (w - 1) * sw + probe.reach[1] + more[1]
    if tall - top - bottom < 1 or wide - left - right < 1:
        raise InputError("an output of at least 1x1", f"{tall}x{wide} before the pads", "pad less")
    full = np.zeros((n, groups, kg, tall, wide), np.result_type(x, weight))
    split = x.reshape(n, groups, c // groups, h, w)
    taps = weight.reshape(groups, c // groups, kg, r, s)
    for i in range(r):
        for j in range(s):
            rows = slice(i * dh, i * dh + (h - 1) * sh + 1, sh)
            columns = slice(j * dw, j * dw + (w - 1) * sw + 1, sw)
            part = np.einsum("ngchw,gck->ngkhw", split, taps[..., i, j])
            full[:, :, :, rows, columns] += part
    y: Values = full[:, :, :, top : tall - bottom, left : wide - right]
    return y.reshape(n, groups * kg, *y.shape[3:])


def im2col_reference(
    x: Values,
    kernel: Pair,
    stride: int | Pair = 1,
    pad: int | Pair | Pads = 0,
    dilation: int | Pair = 1,
) -> Values:
    """Return the im2col matrix (n*oh*ow, c*r*s) of x (n, c, h, w): a row holds a window.

    Its columns are ordered (c, r, s), so `weight.reshape(k, -1).T` is the other factor.
    """
    x = np.asarray(x)
    probe = np.zeros((1, x.shape[1], *kernel))
    shape = _shape_of(x, probe, stride, pad, dilation, 1)
    (oh, ow), (down, right), (sh, sw) = shape.out_hw, shape.dilations, shape.strides
    top, bottom, left, last = shape.pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, last)))
    rows = np.arange(oh)[:, None] * sh + np.arange(shape.r)[None, :] * down
    columns = np.arange(ow)[:, None] * sw + np.arange(shape.s)[None, :] * right
    windows = x[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    matrix: Values = windows.transpose(0, 2, 3, 1, 4, 5).reshape(shape.n * oh * ow, -1)
    return matrix


WINOGRAD_B = np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]], np.float64)
WINOGRAD_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float64)
WINOGRAD_A = np.array([[1, 0], [1, 1], [1, -1], [0, -1]], np.float64)
"""Matrices of F(2x2, 3x3) after Lavin and Gray (2016): y = A^T [(G g G^T) * (B^T d B)] A."""


def winograd_f2x2_3x3_reference(x: Values, weight: Values, pad: int | Pair | Pads = 0) -> Values:
    """Convolve with 3x3 kernels, stride 1, by Winograd's F(2x2, 3x3): 16 products for 4 outputs.

    x (n, c, h, w) and weight (k, c, 3, 3) give what `conv2d_reference` gives, up to rounding:
    36 products become 16. Odd output sides are computed one larger and cut.
    """
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    shape = _shape_of(x, weight, 1, pad, 1, 1)
    if (shape.r, shape.s) != (3, 3):
        raise InputError("a 3x3 kernel", f"{shape.r}x{shape.s}", "F(2x2, 3x3) has no other")
    oh, ow = shape.out_hw
    top, bottom, left, right = shape.pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom + oh % 2), (left, right + ow % 2)))
    view = np.lib.stride_tricks.sliding_window_view(x, (4, 4), (2, 3))[:, :, ::2, ::2]
    data = np.einsum("ia,ncpqij,jb->ncpqab", WINOGRAD_B, view, WINOGRAD_B)
    kernel = np.einsum("ai,kcij,bj->kcab", WINOGRAD_G, weight, WINOGRAD_G)
    product = np.einsum("ncpqab,kcab->nkpqab", data, kernel)
    y = np.einsum("ai,nkpqab,bj->nkpiqj", WINOGRAD_A, product, WINOGRAD_A)
    n, k, p, _, q, _ = y.shape
    cut: Values = y.reshape(n, k, 2 * p, 2 * q)[:, :, :oh, :ow]
    return cut


def _wide(values: Values, rank: int) -> Values:
    """Return the values in the format they are summed in."""
    values = np.asarray(values)
    if values.ndim != rank:
        raise InputError(f"an array of rank {rank}", str(values.shape), "reshape it")
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    return values if values.dtype == np.float32 else values.astype(np.float64)


def _shape_of(
    x: Values,
    weight: Values,
    stride: int | Pair,
    pad: int | Pair | Pads,
    dilation: int | Pair,
    groups: int,
) -> ConvShape:
    """Check the operands against one another and return them as a problem."""
    if x.ndim != 4 or weight.ndim != 4 or weight.shape[1] * groups != x.shape[1]:
        raise InputError(
            f"x (n, c, h, w) and weight (k, c/{groups}, r, s)",
            f"{x.shape} and {weight.shape}",
            "check the channels and the groups",
        )
    n, c, h, w = x.shape
    k, _, r, s = weight.shape
    return ConvShape(n, c, h, w, k, r, s, stride, pad, dilation=dilation, groups=groups)
