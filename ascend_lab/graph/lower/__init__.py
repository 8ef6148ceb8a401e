"""Lowering: from a piece of a graph to its kernel, by default or as a tuner chose.

A pointwise and a depthwise convolution may be one kernel: what lies between stays in L1.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ascend_lab.chip import Chip
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import Node, operator_of
from ascend_lab.graph.lower import conv, matmul, vector
from ascend_lab.graph.lower.conv import added_convolutions, conv_job, near_cycles, packed_weights
from ascend_lab.graph.lower.piece import Choice, Form, Lowered, Piece, choice_of, packed, piece_of
from ascend_lab.graph.lower.scaled import lower_scaled, scale_of
from ascend_lab.isa import ACCUMULATOR, Kernel, renamed
from ascend_lab.kernels import squeeze, tandem_launches, tandem_shape
from ascend_lab.kernels.epilogue import halves
from ascend_lab.ops.formats import check_chip
from ascend_lab.sim.timeline import Start

__all__ = [
    "CONVOLUTIONS", "PRODUCTS", "Choice", "Lowered", "Piece", "added_convolutions",
    "by_template", "choice_of", "halves_of", "lower", "means_of", "mixes", "packed", "piece_of",
    "scale_of",
]  # fmt: skip
CONVOLUTIONS = ("conv2d", "depthwise_conv2d")
PRODUCTS = ("matmul", "batch_matmul")


def lower(
    piece: Piece, chip: Chip, choice: Choice | None = None, start: Start = "queued"
) -> Lowered:
    """Return the kernel of a piece, by default or as a tuner chose, to be started so.

    Raises a typed error if it cannot be written for the chip.
    """
    _check_formats(piece, chip)
    nodes, op = piece.graph.nodes, piece.graph.nodes[0].op
    tiling = choice.tiling if choice else None
    if choice is not None and tiling is None:
        return vector.lower_vector(piece, chip, choice.steps)
    if op in CONVOLUTIONS:
        _refuse_packed_twice(piece)
        two = bool(halves_of(nodes)[1])
        return lower_tandem(piece, chip) if two else conv.lower_conv(piece, chip, tiling, start)
    if op in PRODUCTS:
        _refuse_packed_twice(piece)
        return matmul.lower_product(piece, chip, tiling)
    if op == "mul" and len(nodes) > 1 and nodes[1].op == "conv2d":
        _refuse_packed_twice(piece)
        return lower_scaled(piece, chip)
    if tiling is not None:
        raise UnsupportedError("a convolution or a product for a tiling", op, "give it steps")
    if len(nodes) > 1 and all(node.op in vector.MOVES for node in nodes):
        return vector.lower_moves(piece, chip)
    if op == "trans_data":
        return vector.lower_trans_data(piece, chip)
    if op == "conv_transpose2d":
        return conv.lower_deconv(piece, chip)
    if op == "conv2d_grad_weight" and piece.type(nodes[0].inputs[0]).layout != "ND":
        return vector.lower_weight_gradient(piece, chip)
    if [node.op for node in nodes] == ["quantise", "trans_data"]:
        return vector.lower_quantised_move(piece, chip)
    if vector.mixed_blocks(piece) and op != "cast":
        return vector.lower_mixed(piece, chip)
    return _from_template(piece, chip) or vector.lower_vector(piece, chip)


def mixes(piece: Piece, chip: Chip) -> bool:
    """Tell whether nothing but vector cores, behind the cube, can end a piece's convolution."""
    nodes = piece.graph.nodes
    if chip.combined or len(nodes) < 2 or nodes[0].op not in CONVOLUTIONS or halves_of(nodes)[1]:
        return False
    shape, epilogue, _ = conv_job(piece, chip)
    return not conv.by_vector(shape) and bool(halves(epilogue, chip, ACCUMULATOR[shape.dtype])[1])


def by_template(piece: Piece, chip: Chip) -> bool:
    """Tell whether a single operator has a kernel written by hand for its unit."""
    own = piece.graph.nodes[0].op in ("trans_data", "conv_transpose2d")
    return own or _from_template(piece, chip) is not None


def _from_template(piece: Piece, chip: Chip) -> Lowered | None:
    """Return the template's kernel, unless it changes an input: the expression copies first."""
    first, *rest = piece.graph.nodes
    return None if rest or first.has("in place") else vector.lower_template(piece, chip)


def _refuse_packed_twice(piece: Piece) -> None:
    """Raise `UnsupportedError` if a cube operator's constant is read by what follows, too."""
    nodes = piece.graph.nodes
    first, rest = nodes[0], nodes[1:]
    if first.op == "mul":
        first, rest = nodes[1], nodes[2:]
    later = {name for node in rest for name in node.inputs}
    again = sorted(piece.constants.intersection(first.inputs) & later)
    if again:
        raise UnsupportedError("a constant packed in one way", piece.names[again[0]], "cut here")


def _check_formats(piece: Piece, chip: Chip) -> None:
    """Raise `TypeMismatchError` for a format that the operator's unit does not compute."""
    for node in piece.graph.nodes:
        if node.op != "trans_data":
            operator = operator_of(node.op)
            dtypes = tuple(piece.type(n).dtype for n in node.inputs)
            main = operator.types.main(operator.names(len(dtypes)), dtypes)
            where = f"{piece.names.get(node.output, node.op)} ({node.op})"
            check_chip(where, operator.types, main, chip)


# -- two convolutions in one kernel ----------------------------------------------------------------
def halves_of(nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Return a convolution with what follows it, and another one that reads this, if any."""
    for i, node in enumerate(nodes):
        if i and node.has("convolution") and node.inputs[0] == nodes[i - 1].output:
            return (nodes[:i], nodes[i:]) if nodes[0].has("convolution") else (nodes, ())
    return nodes, ()


def means_of(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return the means of channels behind two convolutions, if there are any."""
    return nodes[-1:] if nodes[-1].op == "global_avg_pool" and halves_of(nodes)[1] else ()


def lower_tandem(piece: Piece, chip: Chip) -> Lowered:
    """Return two convolutions and what follows each, all in one kernel, the quickest of some."""
    nodes, means = piece.graph.nodes, means_of(piece.graph.nodes)
    parts = [_part(piece, some) for some in halves_of(nodes[: len(nodes) - len(means)])]
    shared = parts[0].constants & parts[1].constants
    weights = [part.graph.nodes[0].inputs[1] for part in parts]
    if shared or not {*weights} <= piece.constants:
        raise UnsupportedError(
            "two convolutions in a row, constants of their own", "others", "cut here"
        )
    (point, one, forms), (depth, two, more) = (conv_job(part, chip) for part in parts)
    names = {"x": nodes[0].inputs[0], "weight": weights[0], "depth_weight": weights[1]}
    names |= {"y": parts[1].graph.outputs[-1]}
    if means:
        names["means"] = means[0].output
    launches = tandem_launches(tandem_shape.Tandem(point, depth, one, two, bool(means)), chip)
    kernels = [Kernel("conv2d", (renamed(launch, names),)) for launch in launches]
    kernel = min(kernels, key=lambda kernel: near_cycles(kernel, piece, chip))
    own: dict[str, Form] = {weights[0]: partial(packed_weights, point)}
    forms = forms | more | own | {weights[1]: partial(packed_weights, depth)}
    return Lowered(kernel, forms, {"ones": squeeze.diagonal()} if means else {})


def _part(piece: Piece, nodes: Sequence[Node]) -> Piece:
    """Return some nodes of a piece as a piece under the same names."""
    written = {name for node in nodes for name in node.outputs}
    reads = dict.fromkeys(n for node in nodes for n in node.inputs if n not in written)
    graph = replace(
        piece.graph, nodes=tuple(nodes), inputs=tuple(reads), outputs=(nodes[-1].output,)
    )
    return replace(piece, graph=graph, constants=piece.constants & reads.keys())
