"""Lowering: writes the kernel of a piece of a graph, with default tiles or those a tuner chose.

A piece is the group of nodes that fusion made one kernel. Other packages add special kernels
(`compiler.rules`): each of these is tried first, and returns None for a piece it cannot compute.
"""

from collections.abc import Callable

from ascend_lab.compiler.ir import MOVES, operator_of
from ascend_lab.compiler.lower import conv, matmul, vector
from ascend_lab.compiler.lower.conv import near_cycles
from ascend_lab.compiler.lower.piece import (
    Choice,
    Lowered,
    Piece,
    choice_of,
    packed,
    piece_of,
    refuse_packed_twice,
)
from ascend_lab.compiler.rules import piece_kernels, row_kernels, special_form
from ascend_lab.errors import TypeMismatchError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start
from ascend_lab.operators.ops.formats import check_chip

__all__ = [
    "CONVOLUTIONS",
    "PRODUCTS",
    "Choice",
    "Lowered",
    "Piece",
    "by_template",
    "choice_of",
    "lower",
    "packed",
    "piece_of",
]
CONVOLUTIONS = ("conv2d", "depthwise_conv2d")
PRODUCTS = ("matmul", "batch_matmul")


def lower(
    piece: Piece,
    chip: Chip,
    choice: Choice | None = None,
    start: Start = "queued",
    known: Callable[[Piece], Lowered] | None = None,
) -> Lowered:
    """Return the kernel of a piece, with the default tiles or with the tuner's `choice`.

    `start` is how the kernel will be started. A special kernel may contain the kernels of other
    pieces: `known` returns those, e.g. from a cache; without it they are lowered here. Raises a
    typed error if the kernel cannot be written for the chip.
    """

    def lower_other(other: Piece) -> Lowered:
        return known(other) if known else lower(other, chip, choice, start)

    # the first special kernel that accepts the piece is taken, without comparing times
    for write in piece_kernels():
        special = write(piece, chip, lower_other)
        if special is not None:
            return special
    return _lowered(piece, chip, choice, start)


def _by_steps(piece: Piece, chip: Chip, choice: Choice) -> Lowered:
    """Return the kernel of a chosen schedule; its steps cannot mix blocks of 16 and 32 channels."""
    if byte_tensors := vector.mixed_blocks(piece):
        needed = "blocks of one size for the steps of a schedule"
        raise UnsupportedError(needed, f"bytes in {', '.join(byte_tensors)}", "leave it as it is")
    return vector.lower_vector(piece, chip, choice.steps)


def _lowered(piece: Piece, chip: Chip, choice: Choice | None, start: Start) -> Lowered:
    """Return the kernel of a piece, after all special kernels have declined it."""
    _check_formats(piece, chip)
    nodes = piece.graph.nodes
    op = nodes[0].op  # the head of a group decides which unit computes it
    tiling = choice.tiling if choice else None
    if choice is not None and tiling is None:
        return _by_steps(piece, chip, choice)
    if special := special_form(piece.graph, nodes):
        fusion, parts = special
        if tiling is not None and fusion.lower_tiled is not None:
            return fusion.lower_tiled(piece, chip, parts, tiling)
        return fusion.lower(piece, chip, parts)
    if op in CONVOLUTIONS:
        refuse_packed_twice(piece)
        return conv.lower_conv(piece, chip, tiling, start)
    if op in PRODUCTS:
        refuse_packed_twice(piece)
        return matmul.lower_product(piece, chip, tiling, start)
    if tiling is not None:
        raise UnsupportedError("a convolution or a product for a tiling", op, "give it steps")
    if len(nodes) > 1 and all(node.op in MOVES for node in nodes):
        return vector.lower_moves(piece, chip)
    if op == "trans_data":
        return vector.lower_trans_data(piece, chip)
    if op == "conv_transpose2d":
        refuse_packed_twice(piece)
        return conv.lower_deconv(piece, chip)
    if op == "conv2d_grad_weight" and piece.type(nodes[0].inputs[0]).layout != "ND":
        return vector.lower_weight_gradient(piece, chip)
    if vector.mixed_blocks(piece) and op != "cast":
        return vector.lower_mixed(piece, chip)
    return _from_template(piece, chip) or _lower_rows(piece, chip)


def by_template(piece: Piece, chip: Chip) -> bool:
    """Tell whether a single operator has a kernel written by hand for its unit."""
    nodes = piece.graph.nodes
    return (
        nodes[0].op in ("trans_data", "conv_transpose2d") or _from_template(piece, chip) is not None
    )


def _from_template(piece: Piece, chip: Chip) -> Lowered | None:
    """Return the kernel of an operator's template, None if there is no such kernel.

    An operator that changes its input in place gets none: the vector kernel copies the input first.
    """
    node, *followers = piece.graph.nodes
    return None if followers or node.has("in place") else vector.lower_template(piece, chip)


def _check_formats(piece: Piece, chip: Chip) -> None:
    """Raise `TypeMismatchError` for a format that the operator's unit does not compute."""
    for node in piece.graph.nodes:
        if node.op != "trans_data":
            operator = operator_of(node.op)
            dtypes = tuple(piece.type(n).dtype for n in node.inputs)
            main = operator.types.main(operator.names(len(dtypes)), dtypes)
            where = f"{piece.names.get(node.output, node.op)} ({node.op})"
            check_chip(where, operator.types, main, chip)
            if operator.types.unit == "cube" and main == "fp32":
                # a graph's blocks of fp32 have 16 lanes, as the cube writes them; it reads 8
                needed = f"{where} in a graph: {' or '.join(d for d in chip.cube if d != main)}"
                raise TypeMismatchError(needed, main, "cast the inputs, or run it on its own")


# -- rows in fractals ------------------------------------------------------------------------------
def _lower_rows(piece: Piece, chip: Chip) -> Lowered:
    """Return the plain kernel of the vector unit, or a special one that takes fewer cycles."""
    plain = vector.lower_vector(piece, chip)
    special = [kernel for write in row_kernels() for kernel in write(piece, chip)]
    if not special:
        return plain
    # `min` returns the first of equals: the plain kernel, unless a special one is faster
    return min((plain, *special), key=lambda lowered: near_cycles(lowered.kernel, piece, chip))
