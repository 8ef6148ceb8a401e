"""Kernels that one chapter needs: other ways to convolve, to scatter and to fuse."""

# fmt: off
# isort: off
from ascend_lab.lab.kernels.convolution_ways import (
    conv2d_reference, explicit_conv, im2col_launch, im2col_reference, is_plain_product,
    pack_explicit, pack_pointwise, pointwise_launch, unpack_explicit,
)
from ascend_lab.lab.kernels.grouped_scatter import group_indices, grouped_launch
from ascend_lab.lab.kernels.split_conflict import relu_transpose_kernel, turn_scatter_launch

__all__ = [
    "conv2d_reference", "explicit_conv", "group_indices", "grouped_launch", "im2col_launch",
    "im2col_reference", "is_plain_product", "pack_explicit", "pack_pointwise",
    "pointwise_launch", "relu_transpose_kernel", "turn_scatter_launch", "unpack_explicit",
]
