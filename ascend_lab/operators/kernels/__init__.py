"""Kernels written by hand, for example `gemm_launch` (a product) and `conv_launch` (a convolution).

The simplest one is in this file: y = op(x1, x2) element by element, as in the first chapters. A
core loads tiles of 2048 elements to UB, computes, and stores them, three steps that overlap.
"""

from dataclasses import dataclass
from typing import Any

# fmt: off
# isort: off
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import InputError
from ascend_lab.facade import names_of
from ascend_lab.machine.isa import KernelBuilder, Launch, Program, spread
from ascend_lab.operators.kernels.conv import conv_launch
from ascend_lab.operators.kernels.conv_schedules import conv_schedule, stacked_schedule
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.conv_windows import dense_placement
from ascend_lab.operators.kernels.deconv import (
    DeconvShape, deconv_kernel, pack_deconv, unpack_deconv,
)
from ascend_lab.operators.kernels.default_schedules import default_schedule
from ascend_lab.operators.kernels.depthwise import depthwise_launch, pack_depthwise
from ascend_lab.operators.kernels.gemm import gemm_launch
from ascend_lab.operators.kernels.gemm_schedule import (
    GemmSchedule, GemmShape, check_schedule, tile_bytes,
)
from ascend_lab.operators.kernels.grids import best_grid
from ascend_lab.operators.kernels.operand_packing import (
    pack_conv, pack_gemm, unpack_conv, unpack_gemm,
)
from ascend_lab.operators.kernels.rearrange import (
    check_indices, concat_launch, gather_launch, one_hot_launch, pad_launch, reshape_launch,
    scatter_launch, slice_launch, split_launch,
)
from ascend_lab.operators.kernels.transpose import transpose_launch
from ascend_lab.machine.layout import copy_launch
# fmt: on
# isort: on

__getattr__ = names_of(
    __name__,
    {
        "flash": "flash_launch",
        "flash_shape": "FlashShape FlashTiling FlashView",
        "flash_split": "SplitTiling flash_pipeline_launch",
    },
)
__all__ = [
    "ConvShape",
    "DeconvShape",
    "FlashShape",
    "FlashTiling",
    "FlashView",
    "GemmSchedule",
    "GemmShape",
    "SplitTiling",
    "best_grid",
    "check_indices",
    "check_schedule",
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
    "tile_bytes",
    "transpose_launch",
    "unpack_conv",
    "unpack_deconv",
    "unpack_gemm",
]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """What an elementwise kernel computes: y = op(x1, x2), or op(x1) for unary operations.

    `tile` is in elements, a multiple of 256 bytes; each queue has `depth` slots of UB.
    """

    op: str = "vadd"
    tile: int = 2048
    depth: int = 2
    dtype: str = "fp16"


def elementwise_program(chip: Chip, elements: int, **options: Any) -> Program:
    """Return one core's program for `elements` elements; `options` are fields of `Elementwise`."""
    return _elementwise(chip, elements, 1, Elementwise(**options))


def _elementwise(chip: Chip, elements: int, cores: int, work: Elementwise) -> Program:
    """Return the program that each of `cores` cores runs on `elements` elements of its own."""
    dtype = work.dtype
    tile = work.tile
    lanes = chip.vector_bytes_per_repeat // DTYPE_BYTES[dtype]
    if tile % lanes or elements % tile or tile < lanes:
        needed = f"tiles of a multiple of {lanes} elements that divide {elements}"
        raise InputError(needed, str(tile), "round it")
    two_operands = work.op in ("vadd", "vsub", "vmul", "vdiv", "vmax", "vmin")
    names = ("x1", "x2") if two_operands else ("x1",)
    k = KernelBuilder(work.op, chip)
    total = elements * cores
    sources = [k.tensor(name, dtype, total) for name in names]
    y = k.tensor("y", dtype, total)
    # With two slots MTE2 loads the next tile while V computes this one and MTE3 stores the last.
    loads = [
        k.queue(f"{name}_ub", "UB", dtype, tile, src="MTE2", dst="V", depth=work.depth)
        for name in names
    ]
    store = k.queue("y_ub", "UB", dtype, tile, src="V", dst="MTE3", depth=work.depth)
    # All cores run one program: its parameter says which share of the tensors a core computes.
    base = k.param("core", cores) * elements
    with k.loop("i", elements // tile) as i:
        for load, tensor in zip(loads, sources, strict=True):
            k.copy(load.alloc().region(), tensor.region(base + i * tile, tile))
            load.enqueue()
        tiles = [load.dequeue() for load in loads]
        out = store.alloc()
        # One instruction for the tile: 2048 elements in fp16 are 16 repeats of 128 lanes.
        regions = (t.region(0, (tile // lanes, lanes)) for t in (out, *tiles))
        k.vector(work.op, *regions)
        for load in loads:
            load.free()
        store.enqueue()
        k.copy(y.region(base + i * tile, tile), store.dequeue().region())
        store.free()
    return k.finish()


def elementwise_launch(chip: Chip, elements: int, **options: Any) -> Launch:
    """Return a launch that divides `elements` evenly over all vector cores; see `Elementwise`."""
    cores = chip.cores_of("vector")
    if elements % cores:
        raise InputError(f"a multiple of {cores} elements", str(elements), "pad the tensor")
    work = Elementwise(**options)
    program = _elementwise(chip, elements // cores, cores, work)
    return spread(work.op, {"core": [1] * cores}, lambda _: program)
