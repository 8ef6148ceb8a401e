"""Lowering: from a piece of a graph to its kernel, by default or as a tuner chose.

A pointwise and a depthwise convolution may be one kernel: what lies between stays in L1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ascend_lab.compiler.ir import Graph, Node, operator_of
from ascend_lab.compiler.lower import blocks, conv, matmul, vector
from ascend_lab.compiler.lower.conv import added_convolutions, conv_job, near_cycles, packed_weights
from ascend_lab.compiler.lower.gates import lower_gated
from ascend_lab.compiler.lower.matmul import around_attention, attention_in
from ascend_lab.compiler.lower.piece import (
    Choice,
    Form,
    Lowered,
    Piece,
    choice_of,
    packed,
    piece_of,
)
from ascend_lab.errors import TypeMismatchError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, Kernel, as_kernel, renamed
from ascend_lab.machine.sim.timeline import Start
from ascend_lab.operators.kernels import row_norm, squeeze, tandem_launches, tandem_shape
from ascend_lab.operators.kernels.epilogue import halves
from ascend_lab.operators.ops.formats import check_chip

__all__ = [
    "CONVOLUTIONS",
    "PRODUCTS",
    "Choice",
    "Lowered",
    "Piece",
    "added_convolutions",
    "around_attention",
    "attention_in",
    "by_template",
    "choice_of",
    "gates_of",
    "halves_of",
    "lower",
    "means_of",
    "mixes",
    "packed",
    "piece_of",
    "scale_of",
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
    """Return the kernel of a piece, by default or as a tuner chose, to be started so.

    `known` returns that of another piece, if kernels are remembered. Raises a typed error if it
    cannot be written for the chip.
    """
    if plain := blocks.plain_piece(piece):
        found = known(plain) if known else lower(plain, chip, choice, start)
        return blocks.among_blocks(piece, plain, found, chip)
    return _lowered(piece, chip, choice, start)


def _by_steps(piece: Piece, chip: Chip, choice: Choice) -> Lowered:
    """Return the kernel of a chosen schedule, which knows nothing of blocks of two sizes."""
    if whole := vector.mixed_blocks(piece):
        needed = "blocks of one size for the steps of a schedule"
        raise UnsupportedError(needed, f"bytes in {', '.join(whole)}", "leave it as it is")
    return vector.lower_vector(piece, chip, choice.steps)


def _lowered(piece: Piece, chip: Chip, choice: Choice | None, start: Start) -> Lowered:
    """Return the kernel of a piece whose images lie as kernels have them."""
    _check_formats(piece, chip)
    nodes = piece.graph.nodes
    op = piece.graph.nodes[0].op
    tiling = choice.tiling if choice else None
    if choice is not None and tiling is None:
        return _by_steps(piece, chip, choice)
    if chains := gates_of(piece.graph, nodes):
        return lower_gated(piece, chip, *chains[1:])
    if op in CONVOLUTIONS:
        _refuse_packed_twice(piece)
        two = bool(halves_of(nodes)[1])
        return lower_tandem(piece, chip) if two else conv.lower_conv(piece, chip, tiling, start)
    if op in PRODUCTS:
        _refuse_packed_twice(piece)
        return matmul.lower_product(piece, chip, tiling, start)
    if tiling is not None:
        raise UnsupportedError("a convolution or a product for a tiling", op, "give it steps")
    if len(nodes) > 1 and (moved := matmul.lower_moved(piece, chip)):
        return moved
    if op == "trans_data":
        return vector.lower_trans_data(piece, chip)
    if op == "conv_transpose2d":
        _refuse_packed_twice(piece)
        return conv.lower_deconv(piece, chip)
    if op == "conv2d_grad_weight" and piece.type(nodes[0].inputs[0]).layout != "ND":
        return vector.lower_weight_gradient(piece, chip)
    if [node.op for node in nodes] == ["quantise", "trans_data"]:
        return vector.lower_quantised_move(piece, chip)
    if vector.mixed_blocks(piece) and op != "cast":
        return vector.lower_mixed(piece, chip)
    return _from_template(piece, chip) or _lower_rows(piece, chip)


def mixes(piece: Piece, chip: Chip) -> bool:
    """Tell whether nothing but vector cores, behind the cube, can end a piece's convolution."""
    nodes = piece.graph.nodes
    if chip.combined or len(nodes) < 2 or nodes[0].op not in CONVOLUTIONS or halves_of(nodes)[1]:
        return False
    if piece.type(nodes[0].inputs[0]).dtype not in ACCUMULATOR:  # whole numbers, on the AI CPU
        return False
    shape, epilogue, _ = conv_job(piece, chip)
    return not conv.by_vector(shape) and bool(halves(epilogue, chip, ACCUMULATOR[shape.dtype])[1])


def by_template(piece: Piece, chip: Chip) -> bool:
    """Tell whether a single operator has a kernel written by hand for its unit."""
    nodes = piece.graph.nodes
    own = nodes[0].op in ("trans_data", "conv_transpose2d") or attention_in(nodes) is not None
    return own or _from_template(piece, chip) is not None


def _from_template(piece: Piece, chip: Chip) -> Lowered | None:
    """Return the template's kernel, unless it changes an input: the expression copies first."""
    first, *rest = piece.graph.nodes
    return None if rest or first.has("in place") else vector.lower_template(piece, chip)


def _refuse_packed_twice(piece: Piece) -> None:
    """Raise `UnsupportedError` if a cube operator's constant is read by what follows, too."""
    nodes = piece.graph.nodes
    first = nodes[0]
    rest = nodes[1:]
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
            if operator.types.unit == "cube" and main == "fp32":
                # in a graph, blocks of fp32 are the 16 lanes that the cube writes: it reads 8
                needed = f"{where} in a graph: {' or '.join(d for d in chip.cube if d != main)}"
                raise TypeMismatchError(needed, main, "cast the inputs, or run it on its own")


# -- rows in fractals ------------------------------------------------------------------------------
def _lower_rows(piece: Piece, chip: Chip) -> Lowered:
    """Return a kernel of the vector unit, or a quicker one in which the cube adds up rows."""
    alone = vector.lower_vector(piece, chip)
    others = [*_norms(piece, chip)]
    if not others:
        return alone
    return min((alone, *others), key=lambda way: near_cycles(way.kernel, piece, chip))


def _norms(piece: Piece, chip: Chip) -> Iterator[Lowered]:
    """Yield the ways in which the cube adds up rows in fractals, if it can."""
    (first, *rest) = piece.graph.nodes
    graph = piece.graph
    if first.op != "layer_norm" or rest or not chip.combined:
        return
    kind = piece.type(first.inputs[0])
    factors = first.inputs[1:]
    if (kind.layout, kind.dtype) != ("FRACTAL_NZ", "fp16") or kind.shape[-1] % FRACTAL:
        return
    *matrices, columns, rows, _, _ = kind.stored_shape
    if math.prod(matrices) == 1 and len({*factors} & piece.constants) == 2:
        names = dict(zip(("x", "scale", "bias", "y"), (*first.inputs, *graph.outputs), strict=True))
        forms = dict(zip(factors, (row_norm.packed_scale, row_norm.packed_bias), strict=True))
        shape = row_norm.NormShape(rows, columns, first.attr("epsilon", 1e-5))
        for launch in row_norm.norm_launches(shape, chip):
            kernel = Kernel("layer_norm", (renamed(launch, names),))
            yield Lowered(kernel, forms, {"ones": row_norm.fixed_operands()})


# -- two convolutions in one kernel ----------------------------------------------------------------
def halves_of(nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Return a convolution with what follows it, and another one that reads this, if any."""
    for i, node in enumerate(nodes):
        if i and node.has("convolution") and node.inputs[0] == nodes[i - 1].output:
            return (nodes[:i], nodes[i:]) if nodes[0].has("convolution") else (nodes, ())
    return nodes, ()


def means_of(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return the means of channels behind two convolutions, if any."""
    means = nodes[-1].op == "global_avg_pool" and halves_of(nodes)[1]
    return nodes[-1:] if means else ()


def lower_tandem(piece: Piece, chip: Chip) -> Lowered:
    """Return two convolutions and what follows each, all in one kernel, the quickest of some."""
    nodes = piece.graph.nodes
    means = means_of(piece.graph.nodes)
    parts = [piece.part(some) for some in halves_of(nodes[: len(nodes) - len(means)])]
    shared = parts[0].constants & parts[1].constants
    weights = [part.graph.nodes[0].inputs[1] for part in parts]
    if shared or not {*weights} <= piece.constants:
        raise UnsupportedError(
            "two convolutions in a row, constants of their own", "others", "cut here"
        )
    (point, one, forms), (depth, two, more) = (conv_job(part, chip) for part in parts)
    ways = [(two, more)]
    if depth.mixed == 1 and two and not two.bias:  # of both, one may have less to do
        ways.append(conv_job(parts[1], chip, cube_adds=True)[1:])
    names = {"x": nodes[0].inputs[0], "weight": weights[0], "depth_weight": weights[1]}
    names |= {"y": parts[1].graph.outputs[-1]}
    if means:
        names["means"] = means[0].output
    made = [
        (launch, forms_of)
        for after, forms_of in ways
        for launch in tandem_launches(
            tandem_shape.Tandem(point, depth, one, after, bool(means)), chip
        )
    ]
    near = replace(piece, graph=replace(piece.graph, inputs=(*piece.graph.inputs, "x")))
    launch, more = min(made, key=lambda way: near_cycles(as_kernel(way[0]), near, chip))
    kernel = Kernel("conv2d", (renamed(launch, names),))
    own: dict[str, Form] = {weights[0]: partial(packed_weights, point)}
    forms = forms | more | own | {weights[1]: partial(packed_weights, depth)}
    return Lowered(kernel, forms, {"ones": squeeze.diagonal()} if means else {})


# -- images that a number per image and channel scales --------------------------------------------
def scale_of(graph: Graph, node: Node) -> tuple[str, str] | None:
    """Return (image, scale) of a node that scales an image by a number per image and channel."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    one, two = sorted(node.inputs, key=lambda name: -graph.types[name].elements)
    image = graph.types[one]
    scale = graph.types[two]
    layouts = blocks.IMAGES, blocks.BLOCKS
    plain = all(t.dtype == "fp16" and t.layout in layouts for t in (image, scale))
    fits = plain and scale.shape == (*image.shape[:2], 1, 1) and scale.shape != image.shape
    return (one, two) if fits else None


def gates_of(graph: Graph, nodes: Sequence[Node]) -> list[Sequence[Node]]:
    """Return means, two products of them with what follows each, and what comes behind the gates.

    Means may be written already, and nothing behind; without products there is nothing.
    """
    start = int(nodes[0].op == "global_avg_pool")
    products = [i for i, node in enumerate(nodes) if node.op == "conv2d"]
    if len(products) < 2 or products[0] != start:
        return []
    two = products[1]
    end = next((i for i in range(two, len(nodes)) if scale_of(graph, nodes[i])), len(nodes))
    names = [nodes[start].inputs[0], *(node.output for node in nodes[start:end])]
    row = all(a.output == b.inputs[0] for a, b in pairwise(nodes[:end]))
    pixel = all(graph.types[name].shape[2:] == (1, 1) for name in names)
    behind = nodes[end:]
    read = not behind or names[-1] in behind[0].inputs
    found = [nodes[:start], nodes[start:two], nodes[two:end], behind]
    return found if row and pixel and read else []
