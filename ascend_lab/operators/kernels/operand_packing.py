"""Convert row-major arrays to and from the layouts of the product and convolution kernels.

The cube's operands lie in GM as FRACTAL_NZ (A), FRACTAL_ZN (B) and FRACTAL_NZ (C), the last in
blocks of 16 columns for every accumulator format. Images are NC1HWC0, convolution weights
FRACTAL_Z.
"""

from collections.abc import Mapping

import numpy as np

from ascend_lab.errors import InputError
from ascend_lab.machine.isa import FRACTAL, c0_of
from ascend_lab.machine.layout import AddressMap, address_map, pack, unpack
from ascend_lab.operators.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.operators.kernels.gemm_schedule import GemmShape


def pack_gemm(shape: GemmShape, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Lay row-major A (m, k) and B (k, n) out as the kernel reads them, padded with zeros."""
    if a.shape != (shape.m, shape.k) or b.shape != (shape.k, shape.n):
        needed = f"A {shape.m}x{shape.k} and B {shape.k}x{shape.n}"
        got = f"{a.shape} and {b.shape}"
        raise InputError(needed, got, "pass row-major matrices of the problem's size")
    return {
        "a": pack(address_map("FRACTAL_NZ", a.shape, shape.dtype), a),
        "b": pack(address_map("FRACTAL_ZN", b.shape, shape.dtype), b),
    }


def unpack_gemm(shape: GemmShape, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return C (m, n) row-major from the kernel's output tensor."""
    stored = tensors["c"].reshape(-1)
    return unpack(_in_16("FRACTAL_NZ", (shape.m, shape.n), stored), stored)


def pack_conv(shape: ConvShape, x: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Lay NCHW x and (K, C/groups, R, S) weights out as NC1HWC0 and FRACTAL_Z, zeros as padding.

    Grouped weights become one block-diagonal FRACTAL_Z per bundle of groups, one after another. A
    bundle is as many groups as fill whole channel blocks.
    """
    if x.shape != (shape.n, shape.c, shape.h, shape.w):
        raise InputError("x as (n, c, h, w)", str(x.shape), "reshape it")
    if weight.shape != (shape.k, shape.c // shape.groups, shape.r, shape.s):
        raise InputError("weight as (k, c / groups, r, s)", str(weight.shape), "reshape it")
    image = pack(address_map("NC1HWC0", x.shape, shape.dtype, c0=shape.c0), x)
    return {"x": image, "weight": pack_weights(shape, weight)}


def pack_weights(shape: ConvShape, weight: np.ndarray) -> np.ndarray:
    """Return weights (k, c / groups, r, s) as FRACTAL_Z, one bundle of groups after another."""
    kernels = bundle_weights(shape, weight)
    return np.concatenate(
        [
            pack(address_map("FRACTAL_Z", kernel.shape, shape.dtype), kernel).reshape(-1)
            for kernel in kernels
        ]
    )


def bundle_weights(shape: ConvShape, weight: np.ndarray) -> list[np.ndarray]:
    """Return the dense kernels (k_b, c_b, r, s) of each bundle from weights (k, c/groups, r, s).

    Outside the diagonal blocks they are zero, and the cube multiplies these zeros too. If pixels
    have fewer lanes than C0, taps and channels become one axis: (k, r s lanes, 1, 1), padded to
    whole fractals.
    """
    if shape.lanes:
        # Taps before lanes: 3 channels of a 7 x 7 kernel become (k, 49 taps, 4 lanes), 49 * 4 = 196
        # in a row, padded to 13 * 16 = 208 with zeros.
        by_tap = np.zeros((shape.k, shape.r * shape.s, shape.lanes), weight.dtype)
        by_tap[..., : shape.c] = weight.reshape(shape.k, shape.c, -1).transpose(0, 2, 1)
        flat = np.zeros((shape.k, shape.taps * c0_of(shape.dtype), 1, 1), weight.dtype)
        flat[:, : by_tap[0].size, 0, 0] = by_tap.reshape(shape.k, -1)
        return [flat]
    bundle = bundles_of(shape)
    c = shape.c // shape.groups
    k = shape.k // shape.groups
    dense = []
    for index in range(bundle.count):
        # Group g of a bundle fills rows g k .. and columns g c .. of its kernel: a block diagonal.
        groups = bundle.last_groups if index == bundle.count - 1 else bundle.groups
        kernel = np.zeros((groups * k, groups * c, shape.r, shape.s), weight.dtype)
        for g in range(groups):
            output_channel = (index * bundle.groups + g) * k
            group_weight = weight[output_channel : output_channel + k]
            kernel[g * k : (g + 1) * k, g * c : (g + 1) * c] = group_weight
        dense.append(kernel)
    return dense


def unpack_conv(
    shape: ConvShape, tensors: Mapping[str, np.ndarray], *, dense: bool = False
) -> np.ndarray:
    """Return the output as (n, k, oh, ow).

    In memory each image is a matrix with a row per pixel, in FRACTAL_NZ; with `dense` the kernel
    used `dense_placement`, so that images are in NC1HWC0 in blocks of 16 channels.
    """
    (oh, ow) = shape.out_hw
    stored = tensors["y"].reshape(-1)
    if dense:
        return unpack(_in_16("NC1HWC0", (shape.n, shape.k, oh, ow), stored), stored)
    # A matrix (pixels, channels) for each image; each plane is padded to whole fractals of 16
    # pixels.
    rows = unpack(_in_16("FRACTAL_NZ", (shape.n, oh * ow, shape.k), stored), stored)
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(shape.n, shape.k, oh, ow)


def _in_16(layout: str, shape: tuple[int, ...], values: np.ndarray) -> AddressMap:
    """Return the address map of a layout in blocks of 16 channels, in the values' format."""
    names = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}
    return address_map(layout, shape, names.get(values.dtype.name, values.dtype.name), c0=FRACTAL)
