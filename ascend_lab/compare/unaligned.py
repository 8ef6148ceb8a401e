"""Adds conversions to matrix products with operands whose rows are not a multiple of 256 bytes.

On the second generation (910B, 910C) the loads of the cube convert aligned rows to fractal blocks
on the fly. Unaligned rows are converted first by the vector cores, in the same kernel; after a
barrier of all cores the cube reads the blocks from L2. The launch therefore uses cube and vector
cores.

Source: hicann/ops-nn @e5c3fa932, matmul/mat_mul_v3/op_host/op_tiling/matmul_v3_base_tiling.cpp and
matmul/batch_mat_mul_v3/op_host/op_tiling/batch_mat_mul_v3_base_tiling.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ascend_lab.compare.rows import Shape
from ascend_lab.machine.chip import DTYPE_BYTES, Chip

if TYPE_CHECKING:
    from ascend_lab.machine.isa import Kernel

ARCH22_FAMILIES = ("Ascend910B", "Ascend910C")
"""Families of arch22, by how their names begin; for arch35 the library has other kernels."""
PRODUCTS = ("matmul", "batch_matmul")
ROW_BYTES = 256
CONVERTED_ROW_BYTES = (32, 64, 96, 128, 160, 192, 224, 384)
"""Other lengths of a row, in bytes, that the cube's loads convert."""
MAX_ROW_ELEMENTS = 65535
"""Most elements of a row that these loads can stride over."""
MAX_UNCONVERTED_ROWS = 4
"""Matrices of a batch with at most this many rows are not converted."""


def is_unaligned(shape: Shape, dtype: str) -> bool:
    """Tell whether vector cores convert a 16-bit operand to blocks first.

    Operands in fp32 are loaded as they are.
    """
    # a single column is contiguous in any case
    if DTYPE_BYTES[dtype] != 2 or shape[-1] == 1:
        return False
    if shape[-1] > MAX_ROW_ELEMENTS:
        return True
    if len(shape) > 2 and shape[-2] <= MAX_UNCONVERTED_ROWS:
        return False
    size_bytes = shape[-1] * DTYPE_BYTES[dtype]
    # 1000 elements of fp16 are 2000 bytes, 7.8 times 256: unaligned; 1024 elements are aligned
    return size_bytes % ROW_BYTES != 0 and size_bytes not in CONVERTED_ROW_BYTES


def with_conversions(
    kernel: Kernel,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    attributes: Mapping[str, Any],
    chip: Chip,
) -> Kernel:
    """Return the kernel of a product a b, preceded by phases that convert unaligned operands.

    The unaligned tensors are called `a_rows` and `b_rows`. Raises `AscendLabError` for an operand
    that cannot be converted.
    """
    if not chip.family.startswith(ARCH22_FAMILIES):
        return kernel
    phases = kernel.phases
    # a left operand goes to NZ, or to ZN if it is transposed; a right operand the other way round
    is_zn = attributes.get("trans_a", False), not attributes.get("trans_b", False)
    for name, shape, dtype, zn in zip("ab", shapes[:2], dtypes[:2], is_zn, strict=True):
        if is_unaligned(shape, dtype):
            layout = "FRACTAL_ZN" if zn else "FRACTAL_NZ"
            # a phase of the same launch: all cores wait between it and the product
            phases = (*_conversion(name, shape, dtype, layout, chip).phases, *phases)
    return replace(kernel, phases=phases)


def _conversion(name: str, shape: Shape, dtype: str, layout: str, chip: Chip) -> Kernel:
    """Return the kernel that converts the tensor `{name}_rows` to blocks, the tensor `name`."""
    from ascend_lab.compiler import Graph, Node, TensorType
    from ascend_lab.compiler.compile import Front, Road, finish_stages
    from ascend_lab.machine.isa import renamed

    row_type = TensorType(shape, dtype)
    rows_name = f"{name}_rows"
    types = {rows_name: row_type, name: replace(row_type, layout=layout)}
    node = Node(name, "trans_data", (rows_name,), (name,), {"layout": layout})
    graph = Graph("rows", (rows_name,), (name,), (node,), types)
    # a graph of one node compiles to one kernel
    (task,) = finish_stages(Front({}, graph, graph), chip, Road(dtype="")).compiled.tasks
    assert task.lowered is not None
    kernel = task.lowered.kernel
    names = {tensor.name: task.value(tensor.name) for tensor in kernel.tensors}
    return replace(kernel, phases=tuple(renamed(phase, names) for phase in kernel.phases))
