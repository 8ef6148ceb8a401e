"""Kernels that one chapter needs: other ways to convolve, to scatter and to fuse."""

# fmt: off
# isort: off
from ascend_lab.lab.kernels.convolution_ways import (
    conv2d_reference, explicit_conv, im2col_launch, im2col_reference, is_plain_product,
    pack_explicit, pack_pointwise, pointwise_launch, unpack_explicit,
)
from ascend_lab.lab.kernels.grouped_scatter import group_indices, grouped_launch
from ascend_lab.lab.kernels.product_floors import product_floors
from ascend_lab.lab.kernels.product_nests import in_tiles, nest_bytes, product_nest
from ascend_lab.lab.kernels.split_conflict import relu_transpose_kernel, turn_scatter_launch

__all__ = [
    "conv2d_reference", "explicit_conv", "group_indices", "grouped_launch", "im2col_launch",
    "im2col_reference", "in_tiles", "is_plain_product", "nest_bytes", "pack_explicit",
    "pack_pointwise", "pointwise_launch", "product_floors", "product_nest",
    "relu_transpose_kernel", "turn_scatter_launch", "unpack_explicit",
]
