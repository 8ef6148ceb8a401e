"""Kernels written by hand with the builder: vector examples, matrix product, convolution."""

from ascend_lab.kernels.conv import conv_launch
from ascend_lab.kernels.conv_default import conv_schedule
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_default import default_schedule
from ascend_lab.kernels.gemm_schedule import GemmSchedule, GemmShape, tile_bytes
from ascend_lab.kernels.layouts import pack_conv, pack_gemm, unpack_conv, unpack_gemm
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
