"""Lowering: from a piece of a graph to its kernel, by default or as a tuner chose.

A pointwise and a depthwise convolution may be one kernel: what lies between stays in L1; so may a
convolution and the scale of its images.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab import dsl as te, kernels
from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.graph.ir import Graph, Node, Values, operator_of
from ascend_lab.graph.lower import blocks, conv, matmul, vector
from ascend_lab.graph.lower.conv import added_convolutions, conv_job, near_cycles, packed_weights
from ascend_lab.graph.lower.matmul import around_attention, attention_in
from ascend_lab.graph.lower.piece import Choice, Form, Lowered, Piece, choice_of, packed, piece_of
from ascend_lab.isa import ACCUMULATOR, FRACTAL, Kernel, as_kernel, renamed, up
from ascend_lab.kernels import conv_windows, row_norm, squeeze, tandem_launches, tandem_shape
from ascend_lab.kernels.epilogue import Epilogue, halves
from ascend_lab.ops.formats import check_chip
from ascend_lab.sim.timeline import Start

__all__ = [
    "CONVOLUTIONS", "PRODUCTS", "Choice", "Lowered", "Piece", "added_convolutions",
    "around_attention", "attention_in", "by_template", "choice_of", "halves_of", "lower",
    "means_of", "mixes", "packed", "piece_of", "scale_of",
]  # fmt: skip
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


def _lowered(piece: Piece, chip: Chip, choice: Choice | None, start: Start) -> Lowered:
    """Return the kernel of a piece whose images lie as kernels have them."""
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
        return matmul.lower_product(piece, chip, tiling, start)
    if op == "mul" and len(nodes) > 1 and nodes[1].op == "conv2d":
        _refuse_packed_twice(piece)
        return lower_scaled(piece, chip)
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


# -- rows in fractals ------------------------------------------------------------------------------
def _lower_rows(piece: Piece, chip: Chip) -> Lowered:
    """Return a kernel of the vector unit, or a quicker one in which the cube adds up rows."""
    alone, others = vector.lower_vector(piece, chip), [*_norms(piece, chip)]
    if not others:
        return alone
    return min((alone, *others), key=lambda way: near_cycles(way.kernel, piece, chip))


def _norms(piece: Piece, chip: Chip) -> Iterator[Lowered]:
    """Yield the ways in which the cube adds up rows in fractals, if it can."""
    (first, *rest), graph = piece.graph.nodes, piece.graph
    if first.op != "layer_norm" or rest or not chip.combined:
        return
    kind, factors = piece.type(first.inputs[0]), first.inputs[1:]
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


def _part(piece: Piece, nodes: Sequence[Node]) -> Piece:
    """Return some nodes of a piece as a piece under the same names."""
    written = {name for node in nodes for name in node.outputs}
    reads = dict.fromkeys(n for node in nodes for n in node.inputs if n not in written)
    graph = replace(
        piece.graph, nodes=tuple(nodes), inputs=tuple(reads), outputs=(nodes[-1].output,)
    )
    return replace(piece, graph=graph, constants=piece.constants & reads.keys())


# -- a convolution of images that are scaled per image and channel ---------------------------------
def scale_of(graph: Graph, node: Node) -> tuple[str, str] | None:
    """Return (image, scale) of a node that scales an image by a number per image and channel."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    one, two = sorted(node.inputs, key=lambda name: -graph.types[name].elements)
    image, scale = graph.types[one], graph.types[two]
    layouts = blocks.IMAGES, blocks.BLOCKS
    plain = all(t.dtype == "fp16" and t.layout in layouts for t in (image, scale))
    fits = plain and scale.shape == (*image.shape[:2], 1, 1) and scale.shape != image.shape
    return (one, two) if fits else None


def lower_scaled(piece: Piece, chip: Chip) -> Lowered:
    """Return a convolution of scaled images, all at once or with weights scaled for each image."""
    first, node, *rest = piece.graph.nodes
    found = scale_of(piece.graph, first)
    if found is None or node.op != "conv2d" or node.inputs[0] != first.output:
        raise UnsupportedError("images times a scale, then a convolution", str(first), "cut here")
    image, scale = found
    weight, y = node.inputs[1], piece.graph.outputs[-1]
    conv.refuse_computed(piece, weight)
    plain = replace(node, inputs=(image, *node.inputs[1:]))
    graph = replace(piece.graph, nodes=(plain, *rest))
    shape, epilogue, forms = conv_job(replace(piece, graph=graph), chip, cube_adds=False)
    if shape.groups > 1 or shape.dtype != "fp16":
        raise UnsupportedError("one group in fp16", str(shape), "cut here")
    apart = _weights_scaled((shape, epilogue), chip, (image, scale, weight, y), forms)
    try:
        launch = squeeze.scaled_launch(shape, chip, epilogue)
    except (CapacityError, UnsupportedError):
        return apart
    names = {"x": image, "scale": scale, "weight": weight, "y": y}
    whole = Kernel(node.op, (renamed(launch, names),))
    together = Lowered(whole, forms | {weight: partial(packed_weights, shape)})
    return min((together, apart), key=lambda way: near_cycles(way.kernel, piece, chip))


def _weights_scaled(
    job: tuple[kernels.ConvShape, Epilogue | None],
    chip: Chip,
    names: tuple[str, str, str, str],
    forms: Mapping[str, Form],
) -> Lowered:
    """Return the way that scales weights, which are fewer, in a phase of its own.

    It writes weights for each image. In memory n images of c1 blocks are one image of n c1 blocks:
    the second phase is a convolution in n groups.
    """
    (shape, epilogue), (image, scale, weight, y), forms = job, names, dict(forms)
    n, c, k = shape.n, up(shape.c, FRACTAL) * FRACTAL, up(shape.k, FRACTAL) * FRACTAL
    one, every = replace(shape, n=1, c=c, k=k), replace(shape, n=1, c=n * c, k=n * k, groups=n)
    sizes = (n, c // FRACTAL, shape.taps * k, FRACTAL)
    weights = te.placeholder((1, *sizes[1:]), "fp16", weight)
    scales = te.placeholder((*sizes[:2], 1, FRACTAL), "fp16", scale)
    scaled = te.vmul(te.broadcast(weights, sizes), te.broadcast(scales, sizes))
    phases = te.lower(te.auto_schedule(te.renamed(scaled, conv.PACKED), chip)).phases
    launch = kernels.conv_launch(
        every, chip, place=conv_windows.dense_placement(every), epilogue=epilogue
    )
    for operand in epilogue.of_kind("channel") if epilogue else ():
        forms[operand.name] = partial(_for_all, n, forms[operand.name])
    forms[weight] = partial(_padded_weights, one)
    own = {"x": image, "weight": conv.PACKED, "y": y}
    return Lowered(Kernel("conv2d", (*phases, renamed(launch, own))), forms)


def _for_all(images: int, form: Form, array: Values) -> Values:
    return np.tile(form(array), images)


def _padded_weights(shape: kernels.ConvShape, array: Values) -> Values:
    """Pack the weights; added ones are 0, on both sides."""
    missing = shape.c - array.shape[1]
    return packed_weights(shape, np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))))
