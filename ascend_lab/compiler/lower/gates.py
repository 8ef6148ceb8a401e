"""Images that a number per image and channel scales, and where such gates come from.

A convolution and the scale of its images may be one kernel, and so may be the small network that
computes it: means of channels, two products, a function behind each (squeeze and excite).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab.compiler.ir import Node, Values
from ascend_lab.compiler.lower import conv
from ascend_lab.compiler.lower.piece import Form, Lowered, Piece
from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Kernel, Launch, renamed, up
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.kernels import conv_windows, excitation, squeeze
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue

Scaling = Callable[[int], tuple[Launch, ...]]
"""From rows of 16 weights of a channel block to the phases that scale weights."""


# -- a convolution of images that are scaled per image and channel ---------------------------------
def lower_scaled(piece: Piece, chip: Chip, scaling: Scaling | None = None) -> Lowered:
    """Return a convolution of scaled images, all at once or with weights scaled for each image.

    Of so many rows of weights `scaling` returns phases that do so, if there are such.
    """
    first, node, *rest = _scale_and_convolution(piece.graph.nodes)
    image, scale = sorted(first.inputs, key=lambda name: -piece.type(name).elements)
    weight, y = node.inputs[1], piece.graph.outputs[-1]
    conv.refuse_computed(piece, weight)
    plain = replace(node, inputs=(image, *node.inputs[1:]))
    graph = replace(piece.graph, nodes=(plain, *rest))
    shape, epilogue, forms = conv.conv_job(replace(piece, graph=graph), chip, cube_adds=False)
    if shape.groups > 1 or shape.dtype != "fp16":
        raise UnsupportedError("one group in fp16", str(shape), "cut here")
    apart = _weights_scaled((shape, epilogue), chip, (image, scale, weight, y), forms, scaling)
    if scaling:
        return apart
    try:
        launch = squeeze.scaled_launch(shape, chip, epilogue)
    except (CapacityError, UnsupportedError):
        return apart
    names = {"x": image, "scale": scale, "weight": weight, "y": y}
    whole = Kernel(node.op, (renamed(launch, names),))
    together = Lowered(whole, forms | {weight: partial(conv.packed_weights, shape)})
    return min((together, apart), key=lambda way: conv.near_cycles(way.kernel, piece, chip))


def _scale_and_convolution(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return nodes that begin with a scale of images and the convolution that reads these.

    Raises `UnsupportedError` for others: an activation or a sum may follow the scale instead.
    """
    if len(nodes) < 2 or nodes[1].op != "conv2d" or nodes[1].inputs[0] != nodes[0].output:
        got = " + ".join(node.op for node in nodes)
        raise UnsupportedError("images times a scale, then a convolution", got, "cut here")
    return nodes


def _weights_scaled(
    job: tuple[kernels.ConvShape, Epilogue | None],
    chip: Chip,
    names: tuple[str, str, str, str],
    forms: Mapping[str, Form],
    scaling: Scaling | None,
) -> Lowered:
    """Return the way that scales weights, which are fewer, in a phase of its own.

    It writes weights for each image. In memory n images of c1 blocks are one image of n c1 blocks:
    the second phase is a convolution in n groups.
    """
    (shape, epilogue), (image, scale, weight, y), forms = job, names, dict(forms)
    n, c, k = shape.n, up(shape.c, FRACTAL) * FRACTAL, up(shape.k, FRACTAL) * FRACTAL
    one, every = replace(shape, n=1, c=c, k=k), replace(shape, n=1, c=n * c, k=n * k, groups=n)
    sizes = (n, c // FRACTAL, shape.taps * k, FRACTAL)
    if scaling:
        phases = scaling(sizes[2])
    else:
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
    return conv.packed_weights(shape, np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))))


# -- gates of squeeze and excite, and the convolution of what they scale ---------------------------
def lower_gated(piece: Piece, chip: Chip, chains: Sequence[Sequence[Node]]) -> Lowered:
    """Return the kernel of `chains`, gates and what is behind them, or of scaled images alone."""
    reads = [n for node in piece.graph.nodes for n in node.inputs]
    if again := [piece.names[n] for n in sorted(piece.constants) if reads.count(n) > 1]:
        raise UnsupportedError("a constant packed in one way", again[0], "cut here")
    return _lower_gates(piece, chip, *chains[1:]) if chains else lower_scaled(piece, chip)


def _lower_gates(
    piece: Piece, chip: Chip, one: Sequence[Node], two: Sequence[Node], behind: Sequence[Node]
) -> Lowered:
    """Return the kernel of means, two products and what follows each, and of what they scale."""
    (shape, first), (_, last) = (_product(piece, some, chip) for some in (one, two))
    n, c, h, w = piece.type(x := piece.graph.nodes[0].inputs[0]).shape
    job = excitation.Excitation(n, c, h, w, shape.k, (first, last))
    sides, names, forms = (job.hidden, job.blocks * FRACTAL), {"x": x}, dict[str, Form]()
    for node, number, size in ((one[0], 1, sides), (two[0], 2, sides[::-1])):
        _, weight, bias = node.inputs
        names |= {("squeeze", "excite")[number - 1]: weight, f"bias{number}": bias}
        forms |= {weight: partial(_padded, size), bias: partial(_padded, size[:1])}

    def launches(rows: int = 0, **own: str) -> tuple[Launch, ...]:
        phases = excitation.excitation_launches(replace(job, rows=rows), chip)
        return tuple(renamed(launch, names | own) for launch in phases)

    if not behind:
        return Lowered(Kernel("gates", launches(y=two[-1].output)), forms)
    convolution = _scale_and_convolution(behind)[1]
    own = {"y": conv.PACKED, "weight": convolution.inputs[1]}
    found = lower_scaled(piece.part(behind), chip, lambda rows: launches(rows, **own))
    return replace(found, forms={**forms, **found.forms})


def _product(piece: Piece, nodes: Sequence[Node], chip: Chip) -> tuple[kernels.ConvShape, Epilogue]:
    """Return a product of means, and what follows it and its bias."""
    node, *rest = nodes
    if len(node.inputs) < 3:
        raise UnsupportedError("a bias", f"none of {piece.names[node.output]}", "cut here")
    for name in node.inputs[1:]:
        conv.refuse_computed(piece, name)
    part = piece.part([replace(node, inputs=node.inputs[:2]), *rest])
    shape, epilogue, _ = conv.conv_job(part, chip, vector=True)
    plain = (shape.r, shape.s, shape.stride, shape.pad, shape.groups, shape.dtype, shape.out_dtype)
    if plain != (1, 1, 1, 0, 1, "fp16", "fp16") or (epilogue and epilogue.operands):
        raise UnsupportedError("a plain product in fp16, no operand behind", str(shape), "cut here")
    return shape, epilogue or PLAIN


def _padded(sizes: tuple[int, ...], array: Values) -> Values:
    """Return weights (features, channels, 1, 1) or a bias, in fp32, with zeros added."""
    values = array.reshape(array.shape[: len(sizes)])
    whole = np.zeros(sizes, np.float16 if len(sizes) > 1 else np.float32)
    whole[tuple(map(slice, values.shape))] = values
    return whole.reshape(-1)
