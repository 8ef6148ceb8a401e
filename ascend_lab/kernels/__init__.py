"""Kernels written by hand with the builder: vector examples, matrix product, convolution."""

from ascend_lab.kernels.chains import relu_transpose_kernel
from ascend_lab.kernels.conv import conv_launch
from ascend_lab.kernels.conv_default import conv_schedule
from ascend_lab.kernels.conv_reference import (
    conv2d_reference,
    conv_transpose2d_reference,
    im2col_reference,
    winograd_f2x2_3x3_reference,
)
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.deconv import DeconvShape, deconv_kernel, pack_deconv, unpack_deconv
from ascend_lab.kernels.depthwise import depthwise_launch, pack_depthwise
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_default import default_schedule
from ascend_lab.kernels.gemm_schedule import GemmSchedule, GemmShape, tile_bytes
from ascend_lab.kernels.grids import best_grid
from ascend_lab.kernels.grouped import group_indices, grouped_launch
from ascend_lab.kernels.im2col import (
    explicit_conv,
    im2col_launch,
    pack_explicit,
    unpack_explicit,
)
from ascend_lab.kernels.indexed import check_indices, gather_launch, scatter_launch
from ascend_lab.kernels.layouts import pack_conv, pack_gemm, unpack_conv, unpack_gemm
from ascend_lab.kernels.one_hot import one_hot_launch
from ascend_lab.kernels.pointwise import (
    is_plain_product,
    pack_pointwise,
    pointwise_launch,
    unpack_pointwise,
)
from ascend_lab.kernels.rearrange import (
    concat_launch,
    pad_launch,
    reshape_launch,
    slice_launch,
    split_launch,
)
from ascend_lab.kernels.strided import copy_launch
from ascend_lab.kernels.transpose import transpose_launch
from ascend_lab.kernels.vector import elementwise_launch, elementwise_program

__all__ = [
    "ConvShape",
    "DeconvShape",
    "GemmSchedule",
    "GemmShape",
    "best_grid",
    "check_indices",
    "concat_launch",
    "conv2d_reference",
    "conv_launch",
    "conv_schedule",
    "conv_transpose2d_reference",
    "copy_launch",
    "deconv_kernel",
    "default_schedule",
    "depthwise_launch",
    "elementwise_launch",
    "elementwise_program",
    "explicit_conv",
    "gather_launch",
    "gemm_launch",
    "group_indices",
    "grouped_launch",
    "im2col_launch",
    "im2col_reference",
    "is_plain_product",
    "one_hot_launch",
    "pack_conv",
    "pack_deconv",
    "pack_depthwise",
    "pack_explicit",
    "pack_gemm",
    "pack_pointwise",
    "pad_launch",
    "pointwise_launch",
    "relu_transpose_kernel",
    "reshape_launch",
    "scatter_launch",
    "slice_launch",
    "split_launch",
    "tile_bytes",
    "transpose_launch",
    "unpack_conv",
    "unpack_deconv",
    "unpack_explicit",
    "unpack_gemm",
    "unpack_pointwise",
    "winograd_f2x2_3x3_reference",
]
