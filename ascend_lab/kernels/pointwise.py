"""A 1x1 convolution as a plain matrix product: the image already is the im2col matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError
from ascend_lab.isa import Launch, c0_of
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, GemmShape
from ascend_lab.kernels.layouts import pack_conv, unpack_conv


def is_plain_product(shape: ConvShape) -> bool:
    """Return whether x (N, C1, H, W, C0) is, byte by byte, a left operand of the cube.

    It is for 1x1 kernels with stride 1, no pads and no groups, one image, and H * W a multiple of
    16: then (C1, H W, C0) = (K1, M1, 16, C0).
    """
    one = (shape.r, shape.s, *shape.strides) == (1, 1, 1, 1) and not any(shape.pads)
    return one and shape.n == shape.groups == 1 and shape.h * shape.w % FRACTAL == 0


def pointwise_launch(
    shape: ConvShape,
    chip: Chip,
    schedule: GemmSchedule | None = None,
    epilogue: Epilogue | None = None,
) -> Launch:
    """Return the product a (pixels x channels) @ b; raise `InputError` if im2col is not free.

    Its output c is dense, (Cout1, H, W, 16); so are the tiles an `epilogue` reads.
    """
    if not is_plain_product(shape):
        raise InputError(
            "one image, a 1x1 kernel, stride 1, no pads, no groups and H*W a multiple of 16",
            f"{shape.n} images, kernel {shape.r}x{shape.s}, stride {shape.stride}, "
            f"pad {shape.pad}, {shape.groups} groups, H*W = {shape.h * shape.w}",
            "use conv_launch",
        )
    return gemm_launch(pointwise_gemm(shape), chip, schedule, epilogue)


def pointwise_gemm(shape: ConvShape) -> GemmShape:
    """Return the product: pixels x (whole blocks of) input channels x output channels."""
    depth = shape.blocks[0] * c0_of(shape.dtype)
    return GemmShape(shape.h * shape.w, depth, shape.k, shape.dtype, shape.out_dtype)


def pack_pointwise(
    shape: ConvShape, x: NDArray[Any], weight: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Return the tensors of a convolution under the names of a product: nothing is moved."""
    packed = pack_conv(shape, x, weight)
    return {"a": packed["x"], "b": packed["weight"]}


def unpack_pointwise(shape: ConvShape, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the output as (n, k, oh, ow)."""
    return unpack_conv(shape, {"y": tensors["c"]})
