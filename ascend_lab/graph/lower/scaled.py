"""A convolution of images that are scaled per image and channel, and what follows it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab import dsl as te, isa
from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.graph.ir import Graph, Node, Values
from ascend_lab.graph.lower import conv
from ascend_lab.graph.lower.conv import PACKED, conv_job, near_cycles, packed_weights
from ascend_lab.graph.lower.piece import Form, Lowered, Piece
from ascend_lab.isa import FRACTAL, renamed, up
from ascend_lab.kernels import ConvShape, conv_launch, conv_windows, squeeze
from ascend_lab.kernels.epilogue import Epilogue


def scale_of(graph: Graph, node: Node) -> tuple[str, str] | None:
    """Return (image, scale) of a node that scales an image by a number per image and channel."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    one, two = sorted(node.inputs, key=lambda name: -graph.types[name].elements)
    image, scale = graph.types[one], graph.types[two]
    plain = all((t.dtype, t.layout) == ("fp16", "NC1HWC0") for t in (image, scale))
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
    whole = isa.Kernel(node.op, (renamed(launch, names),))
    together = Lowered(whole, forms | {weight: partial(packed_weights, shape)})
    return min((together, apart), key=lambda way: near_cycles(way.kernel, piece, chip))


def _weights_scaled(
    job: tuple[ConvShape, Epilogue | None],
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
    phases = te.lower(te.auto_schedule(te.renamed(scaled, PACKED), chip)).phases
    launch = conv_launch(every, chip, place=conv_windows.dense_placement(every), epilogue=epilogue)
    for operand in epilogue.of_kind("channel") if epilogue else ():
        forms[operand.name] = partial(_for_all, n, forms[operand.name])
    forms[weight] = partial(_padded_weights, one)
    own = {"x": image, "weight": PACKED, "y": y}
    return Lowered(isa.Kernel("conv2d", (*phases, renamed(launch, own))), forms)


def _for_all(images: int, form: Form, array: Values) -> Values:
    return np.tile(form(array), images)


def _padded_weights(shape: ConvShape, array: Values) -> Values:
    """Pack the weights; added ones are 0, on both sides."""
    missing = shape.c - array.shape[1]
    return packed_weights(shape, np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))))
