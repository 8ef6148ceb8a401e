"""Kernels written by hand with the builder: vector examples, matrix product, convolution."""

from ascend_lab.kernels.conv import (
    ConvShape,
    conv_launch,
    conv_schedule,
    pack_conv,
    unpack_conv,
)
from ascend_lab.kernels.gemm import (
    GemmSchedule,
    GemmShape,
    default_schedule,
    gemm_launch,
    pack_gemm,
    tile_bytes,
    unpack_gemm,
)
from ascend_lab.kernels.vector import elementwise_launch, elementwise_program

__all__ = [
    "ConvShape",
    "GemmSchedule",
    "GemmShape",
    "conv_launch",
    "conv_schedule",
    "default_schedule",
    "elementwise_launch",
    "elementwise_program",
    "gemm_launch",
    "pack_conv",
    "pack_gemm",
    "tile_bytes",
    "unpack_conv",
    "unpack_gemm",
]
