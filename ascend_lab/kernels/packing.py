"""Row-major arrays to the layouts the kernels read, and back, through the maps of `layout`.

The cube's operands lie in GM as FRACTAL_NZ (A), FRACTAL_ZN (B) and, in 16 columns whatever the
accumulator, FRACTAL_NZ (C); images as NC1HWC0 and convolution weights as FRACTAL_Z.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmShape
from ascend_lab.layout import AddressMap, address_map, pack, unpack


def pack_gemm(shape: GemmShape, a: NDArray[Any], b: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Lay row-major A (m, k) and B (k, n) out as the kernel reads them, padded with zeros."""
    if a.shape != (shape.m, shape.k) or b.shape != (shape.k, shape.n):
        wanted, got = f"A {shape.m}x{shape.k} and B {shape.k}x{shape.n}", f"{a.shape} and {b.shape}"
        raise InputError(wanted, got, "pass row-major matrices of the problem's size")
    return {
        "a": pack(address_map("FRACTAL_NZ", a.shape, shape.dtype), a),
        "b": pack(address_map("FRACTAL_ZN", b.shape, shape.dtype), b),
    }


def unpack_gemm(shape: GemmShape, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return C (m, n) row-major from the kernel's output tensor."""
    stored = tensors["c"].reshape(-1)
    return unpack(_in_16("FRACTAL_NZ", (shape.m, shape.n), stored), stored)


def pack_conv(shape: ConvShape, x: NDArray[Any], weight: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Lay NCHW x and (K, C/groups, R, S) weights out as NC1HWC0 and FRACTAL_Z, zeros as padding.

    Grouped weights become one FRACTAL_Z a bundle of groups, block-diagonal, one after another.
    """
    if x.shape != (shape.n, shape.c, shape.h, shape.w):
        raise InputError("x as (n, c, h, w)", str(x.shape), "reshape it")
    if weight.shape != (shape.k, shape.c // shape.groups, shape.r, shape.s):
        raise InputError("weight as (k, c / groups, r, s)", str(weight.shape), "reshape it")
    image = pack(address_map("NC1HWC0", x.shape, shape.dtype, c0=shape.c0), x)
    return {"x": image, "weight": pack_weights(shape, weight)}


def pack_weights(shape: ConvShape, weight: NDArray[Any]) -> NDArray[Any]:
    """Return weights (k, c / groups, r, s) as FRACTAL_Z, a bundle of groups after the other."""
    parts = bundle_weights(shape, weight)
    return np.concatenate(
        [pack(address_map("FRACTAL_Z", p.shape, shape.dtype), p).reshape(-1) for p in parts]
    )


def bundle_weights(shape: ConvShape, weight: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the dense kernels (k_b, c_b, r, s) of each bundle from weights (k, c/groups, r, s).

    Off the diagonal blocks they are zero: the cube multiplies these zeros too. Where pixels have
    few lanes, taps and channels are one axis: (k, r s lanes, 1, 1), filled up to whole fractals.
    """
    if shape.lanes:
        wide = np.zeros((shape.k, shape.r * shape.s, shape.lanes), weight.dtype)
        wide[..., : shape.c] = weight.reshape(shape.k, shape.c, -1).transpose(0, 2, 1)
        flat = np.zeros((shape.k, shape.taps * c0_of(shape.dtype), 1, 1), weight.dtype)
        flat[:, : wide[0].size, 0, 0] = wide.reshape(shape.k, -1)
        return [flat]
    bundle = bundles_of(shape)
    c, k = shape.c // shape.groups, shape.k // shape.groups
    dense = []
    for index in range(bundle.count):
        groups = bundle.last_groups if index == bundle.count - 1 else bundle.groups
        kernel = np.zeros((groups * k, groups * c, shape.r, shape.s), weight.dtype)
        for g in range(groups):
            first = (index * bundle.groups + g) * k
            kernel[g * k : (g + 1) * k, g * c : (g + 1) * c] = weight[first : first + k]
        dense.append(kernel)
    return dense


def unpack_conv(
    shape: ConvShape, tensors: Mapping[str, NDArray[Any]], *, dense: bool = False
) -> NDArray[Any]:
    """Return the output as (n, k, oh, ow): per image a matrix, a row per pixel, in FRACTAL_NZ.

    `dense` reads what `dense_placement` left: NC1HWC0 in blocks of 16 channels.
    """
    (oh, ow), stored = shape.out_hw, tensors["y"].reshape(-1)
    if dense:
        return unpack(_in_16("NC1HWC0", (shape.n, shape.k, oh, ow), stored), stored)
    rows = unpack(_in_16("FRACTAL_NZ", (shape.n, oh * ow, shape.k), stored), stored)
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(shape.n, shape.k, oh, ow)


def _in_16(layout: str, shape: tuple[int, ...], values: NDArray[Any]) -> AddressMap:
    """Return a layout in blocks of 16 channels, in the number format of the values."""
    names = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}
    return address_map(layout, shape, names.get(values.dtype.name, values.dtype.name), c0=FRACTAL)
