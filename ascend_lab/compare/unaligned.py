"""Products whose operands lie in rows that are no whole 256 bytes.

On the second generation the cube's loads bring rows into blocks on their way, but for other rows
than those vector cores do it first, in the same kernel: then all cores wait for each other, and the
product reads blocks from L2. The kernel is started as one of both kinds of cores.

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

CHIPS = ("Ascend910B", "Ascend910C")
PRODUCTS = ("matmul", "batch_matmul")
ROW_BYTES = 256
ON_THE_WAY = (32, 64, 96, 128, 160, 192, 224, 384)
"""Bytes of short rows that the loads of the cube can bring into blocks, too."""
LONGEST = 65535
"""Numbers of a row that those loads can step over."""
FEW = 4
"""Rows of a matrix of a batch that are not worth a conversion."""


def is_unaligned(shape: Shape, dtype: str) -> bool:
    """Return whether vector cores bring an operand in halves into blocks first.

    Operands in fp32 are loaded as they are.
    """
    # fp32 is loaded as it lies; a single column is one run of memory in any case
    if DTYPE_BYTES[dtype] != 2 or shape[-1] == 1:
        return False
    if shape[-1] > LONGEST:
        return True
    if len(shape) > 2 and shape[-2] <= FEW:
        return False
    size_bytes = shape[-1] * DTYPE_BYTES[dtype]
    # 1000 halves are 2000 bytes, 7.8 times 256: unaligned; 1024 halves are aligned
    return size_bytes % ROW_BYTES != 0 and size_bytes not in ON_THE_WAY


def with_conversions(
    kernel: Kernel,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    attributes: Mapping[str, Any],
    chip: Chip,
) -> Kernel:
    """Return the kernel of a product a b with phases before it that bring unaligned operands.

    Their tensors are called `a_rows` and `b_rows`. Raises `AscendLabError` for what has no
    conversion.
    """
    if not chip.name.startswith(CHIPS):
        return kernel
    phases = kernel.phases
    # left operands lie as their rows do, right ones as their columns do
    turned = attributes.get("trans_a", False), not attributes.get("trans_b", False)
    for name, shape, dtype, turn in zip("ab", shapes[:2], dtypes[:2], turned, strict=True):
        if is_unaligned(shape, dtype):
            layout = "FRACTAL_ZN" if turn else "FRACTAL_NZ"
            # a phase of the same launch: all cores wait between it and the product
            phases = (*_conversion(name, shape, dtype, layout, chip).phases, *phases)
    return replace(kernel, phases=phases)


def _conversion(name: str, shape: Shape, dtype: str, layout: str, chip: Chip) -> Kernel:
    """Return the kernel that brings a tensor NAME_rows into blocks, a tensor NAME."""
    from ascend_lab.compiler import Graph, Node, Road, TensorType
    from ascend_lab.compiler.compile import Front, finish_stages
    from ascend_lab.machine.isa import renamed

    kind = TensorType(shape, dtype)
    rows = f"{name}_rows"
    types = {rows: kind, name: replace(kind, layout=layout)}
    node = Node(name, "trans_data", (rows,), (name,), {"layout": layout})
    graph = Graph("rows", (rows,), (name,), (node,), types)
    # a graph of one node compiles to one kernel
    (task,) = finish_stages(Front({}, graph, graph), chip, Road(dtype="")).compiled.tasks
    assert task.lowered is not None
    kernel = task.lowered.kernel
    names = {
        name_in_kernel: task.value(name_in_kernel)
        for name_in_kernel in (b.name for b in kernel.tensors)
    }
    return replace(kernel, phases=tuple(renamed(phase, names) for phase in kernel.phases))
