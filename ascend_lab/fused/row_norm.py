"""Layer norm of rows in fractals, whose sums the cube adds up where a core has both units.

The kernel is `row_norm_kernel`; it competes with that of the vector unit alone.
"""

import math
from collections.abc import Iterator

from ascend_lab.compiler.lower.piece import Lowered, Piece
from ascend_lab.fused import row_norm_kernel
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Kernel, renamed


def norms_by_cube(piece: Piece, chip: Chip) -> Iterator[Lowered]:
    """Yield the kernels of a layer norm alone whose matrix lies in fractals of fp16."""
    node = piece.graph.nodes[0]
    if node.op != "layer_norm" or len(piece.graph.nodes) > 1 or not chip.combined:
        return
    kind = piece.type(node.inputs[0])
    if (kind.layout, kind.dtype) != ("FRACTAL_NZ", "fp16") or kind.shape[-1] % FRACTAL:
        return
    factors = node.inputs[1:]  # scale and bias, a number a column each
    *matrices, columns, rows, _, _ = kind.stored_shape
    if math.prod(matrices) != 1 or len({*factors} & piece.constants) != 2:
        return
    tensors = (*node.inputs, *piece.graph.outputs)
    names = dict(zip(("x", "scale", "bias", "y"), tensors, strict=True))
    packings = (row_norm_kernel.packed_scale, row_norm_kernel.packed_bias)
    forms = dict(zip(factors, packings, strict=True))
    shape = row_norm_kernel.NormShape(rows, columns, node.attr("epsilon", 1e-5))
    for launch in row_norm_kernel.norm_launches(shape, chip):
        kernel = Kernel("layer_norm", (renamed(launch, names),))
        yield Lowered(kernel, forms, {"ones": row_norm_kernel.fixed_operands()})


ROW_KERNELS = [norms_by_cube]
