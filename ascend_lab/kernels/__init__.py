"""Kernels written by hand with the builder: vector examples, matrix product, convolution."""

from ascend_lab.kernels.conv import conv_launch
from ascend_lab.kernels.conv_schedules import conv_schedule, stacked_schedule
from ascend_lab.kernels.conv_shape import ConvShape, pack_conv, pack_gemm, unpack_conv, unpack_gemm
from ascend_lab.kernels.conv_windows import dense_placement
from ascend_lab.kernels.deconv import DeconvShape, deconv_kernel, pack_deconv, unpack_deconv
from ascend_lab.kernels.default_schedules import default_schedule
from ascend_lab.kernels.depthwise import depthwise_launch, pack_depthwise
from ascend_lab.kernels.flash import flash_launch
from ascend_lab.kernels.flash_shape import FlashShape, FlashTiling
from ascend_lab.kernels.flash_split import SplitTiling, flash_pipeline_launch
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_schedule import GemmSchedule, GemmShape, tile_bytes
from ascend_lab.kernels.rearrange import (
    check_indices,
    concat_launch,
    gather_launch,
    one_hot_launch,
    pad_launch,
    reshape_launch,
    scatter_launch,
    slice_launch,
    split_launch,
)
from ascend_lab.kernels.tandem import tandem_launch
from ascend_lab.kernels.tandem_schedules import tandem_launches
from ascend_lab.kernels.tandem_shape import Tandem, TandemSchedule
from ascend_lab.kernels.timed_schedules import best_grid, time_tilings
from ascend_lab.kernels.transpose import transpose_launch
from ascend_lab.kernels.vector import elementwise_launch, elementwise_program
from ascend_lab.layout import copy_launch

__all__ = [
    "ConvShape",
    "DeconvShape",
    "FlashShape",
    "FlashTiling",
    "GemmSchedule",
    "GemmShape",
    "SplitTiling",
    "Tandem",
    "TandemSchedule",
    "best_grid",
    "check_indices",
    "concat_launch",
    "conv_launch",
    "conv_schedule",
    "copy_launch",
    "deconv_kernel",
    "default_schedule",
    "dense_placement",
    "depthwise_launch",
    "elementwise_launch",
    "elementwise_program",
    "flash_launch",
    "flash_pipeline_launch",
    "gather_launch",
    "gemm_launch",
    "one_hot_launch",
    "pack_conv",
    "pack_deconv",
    "pack_depthwise",
    "pack_gemm",
    "pad_launch",
    "reshape_launch",
    "scatter_launch",
    "slice_launch",
    "split_launch",
    "stacked_schedule",
    "tandem_launch",
    "tandem_launches",
    "tile_bytes",
    "time_tilings",
    "transpose_launch",
    "unpack_conv",
    "unpack_deconv",
    "unpack_gemm",
]
