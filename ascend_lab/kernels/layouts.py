"""Row-major arrays to the layouts the kernels read, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmShape, up


def pack_gemm(shape: GemmShape, a: NDArray[Any], b: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Lay row-major A (m, k) and B (k, n) out as the kernel reads them, padded with zeros."""
    m1, k1, n1 = shape.fractals
    c0 = c0_of(shape.dtype)
    if a.shape != (shape.m, shape.k) or b.shape != (shape.k, shape.n):
        raise InputError(
            f"A {shape.m}x{shape.k} and B {shape.k}x{shape.n}",
            f"{a.shape} and {b.shape}",
            "pass row-major matrices of the problem's size",
        )
    left = np.zeros((m1 * FRACTAL, k1 * c0), a.dtype)
    left[: shape.m, : shape.k] = a
    right = np.zeros((k1 * c0, n1 * FRACTAL), b.dtype)
    right[: shape.k, : shape.n] = b
    return {
        "a": left.reshape(m1, FRACTAL, k1, c0).transpose(2, 0, 1, 3).copy(),
        "b": right.reshape(k1, c0, n1, FRACTAL).transpose(0, 2, 3, 1).copy(),
    }


def unpack_gemm(shape: GemmShape, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return C (m, n) row-major from the kernel's output tensor."""
    m1, _, n1 = shape.fractals
    tile = tensors["c"].reshape(n1, m1, FRACTAL, FRACTAL).transpose(1, 2, 0, 3)
    return tile.reshape(m1 * FRACTAL, n1 * FRACTAL)[: shape.m, : shape.n]


def pack_conv(shape: ConvShape, x: NDArray[Any], weight: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Lay NCHW x and (K, C, R, S) weights out as NC1HWC0 and FRACTAL_Z, padded with zeros."""
    c0 = c0_of(shape.dtype)
    c1, n1 = up(shape.c, c0), up(shape.k, FRACTAL)
    if x.shape != (shape.n, shape.c, shape.h, shape.w):
        raise InputError("x as (n, c, h, w)", str(x.shape), "reshape it")
    if weight.shape != (shape.k, shape.c, shape.r, shape.s):
        raise InputError("weight as (k, c, r, s)", str(weight.shape), "reshape it")
    wide = np.zeros((shape.n, c1 * c0, shape.h, shape.w), x.dtype)
    wide[:, : shape.c] = x
    kernel = np.zeros((n1 * FRACTAL, c1 * c0, shape.r, shape.s), weight.dtype)
    kernel[: shape.k, : shape.c] = weight
    return {
        "x": wide.reshape(shape.n, c1, c0, shape.h, shape.w).transpose(0, 1, 3, 4, 2).copy(),
        "weight": kernel.reshape(n1, FRACTAL, c1, c0, shape.r, shape.s)
        .transpose(2, 4, 5, 0, 1, 3)
        .copy(),
    }


def unpack_conv(shape: ConvShape, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the output as (n, k, oh, ow)."""
    oh, ow = shape.out_hw
    n1, pixels = up(shape.k, FRACTAL), up(oh * ow, FRACTAL) * FRACTAL
    y = tensors["y"].reshape(shape.n, n1, pixels, FRACTAL)[:, :, : oh * ow]
    y = y.transpose(0, 1, 3, 2).reshape(shape.n, n1 * FRACTAL, oh, ow)
    return y[:, : shape.k]
