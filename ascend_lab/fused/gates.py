"""Fuse squeeze and excite: the channel gates, and the convolution of the image that they scale.

A gate is one factor per image and channel, computed from the means of all channels:

    g = f2(W2 f1(W1 mean(x) + b1) + b2)       y = W (g * x)

    unfused        mean -> GM; product, f1 -> GM; product, f2 -> GM; g * x -> GM; convolution -> GM
    fused          one kernel of three phases: partial W1 means; gates, and g * W; (g * W) x
    saved          three or four kernel starts, and one pass over the image: as y = (W diag(g)) x,
                   the gates scale the columns of W instead of the image

In EfficientNet-B0 an image of 96 x 56 x 56 = 301,056 numbers meets 24 x 96 = 2,304 weights; a later
one of 1152 x 7 x 7 = 56,448 numbers meets 192 x 1152 = 221,184 weights, where scaling the image is
less work. So both forms are timed. `excitation` is the kernel of the gates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node, Values, only_reader
from ascend_lab.compiler.layout import image_and_scale
from ascend_lab.compiler.lower import conv
from ascend_lab.compiler.lower.piece import Form, Lowered, Piece
from ascend_lab.compiler.rules import Fusion, Group, Rule
from ascend_lab.errors import UnsupportedError
from ascend_lab.fused import excitation
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Kernel, Launch, ceil_div, renamed
from ascend_lab.operators import kernels
from ascend_lab.operators.kernels import conv_windows
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue


# -- gates of squeeze and excite ------------------------------------------------------------------
def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return the kernel of the gates and, if a scale follows them, of the scaled convolution."""
    _, squeeze, excite, scaled_nodes = parts
    reads = [n for node in piece.graph.nodes for n in node.inputs]
    # A constant is stored in one packed form, so that two operators cannot share it.
    read_twice = [piece.names[n] for n in sorted(piece.constants) if reads.count(n) > 1]
    if read_twice:
        raise UnsupportedError("a constant packed in one way", read_twice[0], "cut here")
    shape, hidden_epilogue = _product(piece, squeeze, chip)
    _, gate_epilogue = _product(piece, excite, chip)
    x = piece.graph.nodes[0].inputs[0]
    n, c, h, w = piece.type(x).shape
    job = excitation.Excitation(n, c, h, w, shape.k, (hidden_epilogue, gate_epilogue))
    channels = job.blocks * FRACTAL
    _, squeeze_weight, squeeze_bias = squeeze[0].inputs
    _, excite_weight, excite_bias = excite[0].inputs
    names = {
        "x": x,
        "squeeze": squeeze_weight,
        "bias1": squeeze_bias,
        "excite": excite_weight,
        "bias2": excite_bias,
    }
    forms: dict[str, Form] = {
        squeeze_weight: partial(_padded, (job.hidden, channels)),
        squeeze_bias: partial(_padded, (job.hidden,)),
        excite_weight: partial(_padded, (channels, job.hidden)),
        excite_bias: partial(_padded, (channels,)),
    }

    def launches(rows: int = 0, **other_names: str) -> tuple[Launch, ...]:
        phases = excitation.excitation_launches(replace(job, rows=rows), chip)
        return tuple(renamed(launch, names | other_names) for launch in phases)

    if not scaled_nodes:
        return Lowered(Kernel("gates", launches(y=excite[-1].output)), forms)
    if not _is_scaled_convolution(scaled_nodes):
        got = " + ".join(node.op for node in scaled_nodes)
        raise UnsupportedError("a convolution of what gates scale", got, "cut here")
    # The second phase writes scaled weights where the convolution expects packed ones.
    weight_names = {"y": conv.PACKED, "weight": scaled_nodes[1].inputs[1]}
    scaled_piece = piece.part(scaled_nodes)
    scaled = _lower_scaled(scaled_piece, chip, lambda rows: launches(rows, **weight_names))
    return replace(scaled, forms={**forms, **scaled.forms})


def _is_scaled_convolution(nodes: Sequence[Node]) -> bool:
    """Tell whether nodes begin with a scale and a convolution of its result."""
    # an activation or a sum may follow the scale instead
    if len(nodes) < 2 or nodes[1].op != "conv2d":
        return False
    return nodes[1].inputs[0] == nodes[0].output


def _product(piece: Piece, nodes: Sequence[Node], chip: Chip) -> tuple[kernels.ConvShape, Epilogue]:
    """Return a product as a 1 x 1 convolution, and the epilogue of the nodes behind its bias."""
    node, *followers = nodes
    if len(node.inputs) < 3:
        raise UnsupportedError("a bias", f"none of {piece.names[node.output]}", "cut here")
    for name in node.inputs[1:]:
        conv.refuse_computed(piece, name)
    # The excitation kernel adds the bias itself, in fp32: the epilogue is that of the activation.
    product = piece.part([replace(node, inputs=node.inputs[:2]), *followers])
    shape, epilogue, _ = conv.conv_job(product, chip, vector=True)
    plain = (shape.r, shape.s, shape.stride, shape.pad, shape.groups, shape.dtype, shape.out_dtype)
    # 1 x 1 taps, stride 1, no padding and one group make a fully connected layer
    if plain != (1, 1, 1, 0, 1, "fp16", "fp16") or (epilogue and epilogue.operands):
        raise UnsupportedError("a plain product in fp16, no operand behind", str(shape), "cut here")
    return shape, epilogue or PLAIN


def _padded(sizes: tuple[int, ...], array: Values) -> Values:
    """Return weights (features, channels, 1, 1) in fp16, or a bias in fp32, padded with zeros.

    10 hidden numbers of 24 channels: a matrix of 16 x 32, as the vector unit reads whole blocks.
    """
    values = array.reshape(array.shape[: len(sizes)])
    padded = np.zeros(sizes, np.float16 if len(sizes) > 1 else np.float32)
    padded[tuple(map(slice, values.shape))] = values
    return padded.reshape(-1)


# -- the convolution of the scaled image -----------------------------------------------------------
def _lower_scaled(
    piece: Piece, chip: Chip, scaled_launches: Callable[[int], tuple[Launch, ...]]
) -> Lowered:
    """Return a convolution of scaled images as one of plain images with scaled weights.

    Each image has its own gates, so `scaled_launches` writes a copy of the weights for each; its
    argument is how many rows of 16 weights a channel block has. In memory n images of c1 channel
    blocks look like one image of n c1 blocks: the last phase is one convolution in n groups.
    """
    scale_node, node, *followers = piece.graph.nodes
    # The scale reads the image and the gates, in either order; the image is the larger one.
    image = max(scale_node.inputs, key=lambda name: piece.type(name).elements)
    weight = node.inputs[1]
    y = piece.graph.outputs[-1]
    conv.refuse_computed(piece, weight)
    plain = replace(node, inputs=(image, *node.inputs[1:]))
    graph = replace(piece.graph, nodes=(plain, *followers))
    shape, epilogue, packed_forms = conv.conv_job(
        replace(piece, graph=graph), chip, cube_adds=False
    )
    # groups stand for images here, so the convolution itself must have one group
    if shape.groups > 1 or shape.dtype != "fp16":
        raise UnsupportedError("one group in fp16", str(shape), "cut here")
    forms = dict(packed_forms)
    n = shape.n
    c = ceil_div(shape.c, FRACTAL) * FRACTAL
    k = ceil_div(shape.k, FRACTAL) * FRACTAL
    all_images = replace(shape, n=1, c=n * c, k=n * k, groups=n)
    launch = kernels.conv_launch(
        all_images, chip, place=conv_windows.dense_placement(all_images), epilogue=epilogue
    )
    for operand in epilogue.of_kind("channel") if epilogue else ():
        forms[operand.name] = partial(_for_all, n, forms[operand.name])
    forms[weight] = partial(_padded_weights, replace(shape, n=1, c=c, k=k))
    names = {"x": image, "weight": conv.PACKED, "y": y}
    # 3 x 3 weights for 32 output channels: 9 x 32 rows of 16 input channels per channel block
    phases = (*scaled_launches(shape.taps * k), renamed(launch, names))
    return Lowered(Kernel("conv2d", phases), forms)


def _for_all(images: int, form: Form, array: Values) -> Values:
    """Repeat numbers per channel for each image, because each image is its own group."""
    return np.tile(form(array), images)


def _padded_weights(shape: kernels.ConvShape, array: Values) -> Values:
    """Pack weights, with input and output channels padded by zeros to whole blocks of 16."""
    missing = shape.c - array.shape[1]
    return conv.packed_weights(shape, np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))))


# -- which nodes, and what competes ----------------------------------------------------------------
def propose(graph: Graph, node: Node) -> Group | None:
    """Propose channel means, two products, and the convolution of the image that they scale."""
    nodes = [node, *elementwise_chain(graph, node)]
    # squeeze, excite, and the convolution of the scaled image, of which the node may be the first
    convolutions_ahead = 2 if node.op == "conv2d" else 3  # the means may be written already
    for _ in range(convolutions_ahead):
        reader = only_reader(graph, nodes[-1])
        if reader and reader.op == "conv2d":
            nodes += [reader, *elementwise_chain(graph, reader)]
    return nodes if parts_of(graph, nodes) else None


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return (means), (product, activation), (product, activation), (scale, convolution, ...).

    The first part is () if the kernel before has already written the means (`tandem` does), the
    last part is () if nothing follows the gates. The result is () for a group of another form.
    """
    # 1 if the group begins with the means, 0 if the kernel before has written them
    start = int(nodes[0].op == "global_avg_pool")
    products = [i for i, node in enumerate(nodes) if node.op == "conv2d"]
    if len(products) < 2 or products[0] != start:
        return ()
    second = products[1]
    # the node that multiplies the image by the gates ends them
    scales = (i for i in range(second, len(nodes)) if image_and_scale(graph, nodes[i]))
    gates_end = next(scales, len(nodes))
    in_a_row = all(node.output == reader.inputs[0] for node, reader in pairwise(nodes[:gates_end]))
    tensors = [nodes[start].inputs[0], *(node.output for node in nodes[start:gates_end])]
    # means and gates are images of 1 x 1 pixels
    one_pixel = all(graph.types[name].shape[2:] == (1, 1) for name in tensors)
    scaled_nodes = nodes[gates_end:]
    gates_are_read = not scaled_nodes or tensors[-1] in scaled_nodes[0].inputs
    if in_a_row and one_pixel and gates_are_read:
        return nodes[:start], nodes[start:second], nodes[second:gates_end], scaled_nodes
    return ()


def unfused(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the kernels against which the fused one is timed.

    The first variant has one kernel for the gates, and two for the scale and the convolution; in
    the second every product and its activation is a separate kernel.
    """
    *gate_parts, scaled_nodes = parts
    chains = [chain for chain in gate_parts if chain]
    scale_and_convolution = [chain for chain in (scaled_nodes[:1], scaled_nodes[1:]) if chain]
    if scaled_nodes:
        yield [[node for chain in chains for node in chain], *scale_and_convolution]
    yield [*chains, *scale_and_convolution]


FUSIONS = [
    Fusion(
        Rule("ChannelGatesFusionPass", propose),
        parts_of,
        lower,
        unfused,
        "gates of channels have a hand-written kernel without parameters",
        times_all_unfused=True,
    )
]
