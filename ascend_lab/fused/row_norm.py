"""Layer norm whose sums the cube computes, on cores that have both a cube and a vector unit.

    y = (x - m) / s * scale + bias       m, s: mean and deviation of each row of n columns

    otherwise      the vector unit alone: about 9 instructions for 64 numbers of a row
    here           the cube finds m, s and s y as products; the vector unit divides: 4 instructions
    saved          vector work, which the cube takes over: in a plain layer norm the cube is idle

The kernel is `row_norm_kernel`. It applies to matrices that lie in fractals (FRACTAL_NZ), as the
products before and behind a layer norm have them, and is timed against the vector unit's kernel.
"""

import math
from collections.abc import Iterator

from ascend_lab.compiler.lower.piece import Lowered, Piece
from ascend_lab.fused import row_norm_kernel
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Kernel, renamed


def norms_by_cube(piece: Piece, chip: Chip) -> Iterator[Lowered]:
    """Yield kernels with several tile sizes for a layer norm of one fp16 matrix in fractals."""
    node = piece.graph.nodes[0]
    if node.op != "layer_norm" or len(piece.graph.nodes) > 1 or not chip.combined:
        return
    kind = piece.type(node.inputs[0])
    if (kind.layout, kind.dtype) != ("FRACTAL_NZ", "fp16") or kind.shape[-1] % FRACTAL:
        return
    factors = node.inputs[1:]  # scale and bias, each with a number per column
    # FRACTAL_NZ stores (..., n / 16, m / 16, 16, 16): columns and rows are counted in fractals.
    *matrices, columns, rows, _, _ = kind.stored_shape
    # one matrix, and two different constants: a constant used twice has one packed form only
    if math.prod(matrices) != 1 or len({*factors} & piece.constants) != 2:
        return
    # The packed forms of both constants are made once, at compile time.
    tensors = (*node.inputs, *piece.graph.outputs)
    names = dict(zip(("x", "scale", "bias", "y"), tensors, strict=True))
    packings = (row_norm_kernel.packed_scale, row_norm_kernel.packed_bias)
    forms = dict(zip(factors, packings, strict=True))
    shape = row_norm_kernel.NormShape(rows, columns, node.attr("epsilon", 1e-5))
    # the caller times all of them, and the vector unit's kernel
    for launch in row_norm_kernel.norm_launches(shape, chip):
        kernel = Kernel("layer_norm", (renamed(launch, names),))
        yield Lowered(kernel, forms, {"ones": row_norm_kernel.fixed_operands()})


ROW_KERNELS = [norms_by_cube]
