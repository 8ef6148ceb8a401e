"""Gates of channels, a number per image and channel, and the convolution of what they scale.

The small network that computes gates may be one kernel (squeeze and excite): means of channels, two
products, a function behind each. A convolution may follow that reads nothing but what they scale.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node, Values, only_reader
from ascend_lab.compiler.layout import scale_of
from ascend_lab.compiler.lower import conv
from ascend_lab.compiler.lower.piece import Form, Lowered, Piece
from ascend_lab.compiler.rules import Fusion, Group, Rule
from ascend_lab.errors import UnsupportedError
from ascend_lab.fused import excitation
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Kernel, Launch, renamed, up
from ascend_lab.operators import kernels
from ascend_lab.operators.kernels import conv_windows
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue


# -- gates of squeeze and excite ------------------------------------------------------------------
def lower_gated(
    piece: Piece, chip: Chip, one: Sequence[Node], two: Sequence[Node], behind: Sequence[Node]
) -> Lowered:
    """Return the kernel of means, two products and what follows each, and of what they scale."""
    reads = [n for node in piece.graph.nodes for n in node.inputs]
    if again := [piece.names[n] for n in sorted(piece.constants) if reads.count(n) > 1]:
        raise UnsupportedError("a constant packed in one way", again[0], "cut here")
    (shape, first), (_, last) = (_product(piece, some, chip) for some in (one, two))
    n, c, h, w = piece.type(x := piece.graph.nodes[0].inputs[0]).shape
    job = excitation.Excitation(n, c, h, w, shape.k, (first, last))
    sides = (job.hidden, job.blocks * FRACTAL)
    names = {"x": x}
    forms = dict[str, Form]()
    for node, number, size in ((one[0], 1, sides), (two[0], 2, sides[::-1])):
        _, weight, bias = node.inputs
        names |= {("squeeze", "excite")[number - 1]: weight, f"bias{number}": bias}
        forms |= {weight: partial(_padded, size), bias: partial(_padded, size[:1])}

    def launches(rows: int = 0, **own: str) -> tuple[Launch, ...]:
        phases = excitation.excitation_launches(replace(job, rows=rows), chip)
        return tuple(renamed(launch, names | own) for launch in phases)

    if not behind:
        return Lowered(Kernel("gates", launches(y=two[-1].output)), forms)
    if len(behind) < 2 or behind[1].op != "conv2d" or behind[1].inputs[0] != behind[0].output:
        got = " + ".join(node.op for node in behind)  # an activation or a sum may follow instead
        raise UnsupportedError("a convolution of what gates scale", got, "cut here")
    own = {"y": conv.PACKED, "weight": behind[1].inputs[1]}
    found = _lower_behind(piece.part(behind), chip, lambda rows: launches(rows, **own))
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


# -- a convolution of what gates scale -------------------------------------------------------------
def _lower_behind(piece: Piece, chip: Chip, scaled: Callable[[int], tuple[Launch, ...]]) -> Lowered:
    """Return a convolution of images that gates scale: they scale its weights, which are fewer.

    Of so many rows of 16 weights of a channel block `scaled` returns the phases that scale them, a
    copy for each image. In memory n images of c1 blocks are one image of n c1 blocks: the last
    phase is a convolution in n groups.
    """
    first, node, *rest = piece.graph.nodes
    image = max(first.inputs, key=lambda name: piece.type(name).elements)
    weight = node.inputs[1]
    y = piece.graph.outputs[-1]
    conv.refuse_computed(piece, weight)
    plain = replace(node, inputs=(image, *node.inputs[1:]))
    graph = replace(piece.graph, nodes=(plain, *rest))
    shape, epilogue, found = conv.conv_job(replace(piece, graph=graph), chip, cube_adds=False)
    if shape.groups > 1 or shape.dtype != "fp16":
        raise UnsupportedError("one group in fp16", str(shape), "cut here")
    forms = dict(found)
    n = shape.n
    c = up(shape.c, FRACTAL) * FRACTAL
    k = up(shape.k, FRACTAL) * FRACTAL
    every = replace(shape, n=1, c=n * c, k=n * k, groups=n)
    launch = kernels.conv_launch(
        every, chip, place=conv_windows.dense_placement(every), epilogue=epilogue
    )
    for operand in epilogue.of_kind("channel") if epilogue else ():
        forms[operand.name] = partial(_for_all, n, forms[operand.name])
    forms[weight] = partial(_padded_weights, replace(shape, n=1, c=c, k=k))
    own = {"x": image, "weight": conv.PACKED, "y": y}
    return Lowered(Kernel("conv2d", (*scaled(shape.taps * k), renamed(launch, own))), forms)


def _for_all(images: int, form: Form, array: Values) -> Values:
    return np.tile(form(array), images)


def _padded_weights(shape: kernels.ConvShape, array: Values) -> Values:
    """Pack the weights; added ones are 0, on both sides."""
    missing = shape.c - array.shape[1]
    return conv.packed_weights(shape, np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))))


# -- which nodes, and what competes ----------------------------------------------------------------
def propose(graph: Graph, node: Node) -> Group | None:
    """Propose means of channels, two products of them, and the convolution of what these scale."""
    nodes = [node, *elementwise_chain(graph, node)]
    convolutions_ahead = 2 if node.op == "conv2d" else 3  # the means may be written already
    for _ in range(convolutions_ahead):
        reader = only_reader(graph, nodes[-1])
        if reader and reader.op == "conv2d":
            nodes += [reader, *elementwise_chain(graph, reader)]
    return nodes if parts_of(graph, nodes) else None


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return means, two products of them with what follows each, and what comes behind the gates.

    Means may be written already, and nothing behind; without products there is nothing.
    """
    start = int(nodes[0].op == "global_avg_pool")
    products = [i for i, node in enumerate(nodes) if node.op == "conv2d"]
    if len(products) < 2 or products[0] != start:
        return ()
    second = products[1]
    scales = (i for i in range(second, len(nodes)) if scale_of(graph, nodes[i]))
    end = next(scales, len(nodes))
    in_a_row = all(a.output == b.inputs[0] for a, b in pairwise(nodes[:end]))
    tensors = [nodes[start].inputs[0], *(node.output for node in nodes[start:end])]
    one_pixel = all(graph.types[name].shape[2:] == (1, 1) for name in tensors)
    behind = nodes[end:]
    gates_are_read = not behind or tensors[-1] in behind[0].inputs
    if in_a_row and one_pixel and gates_are_read:
        return nodes[:start], nodes[start:second], nodes[second:end], behind
    return ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return the kernel of gates, and of the convolution of what they scale."""
    _, first, second, behind = parts
    return lower_gated(piece, chip, first, second, behind)


def apart(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the gates as one kernel with their scale and its convolution apart; then all apart."""
    *gate_parts, behind = parts
    chains = [some for some in gate_parts if some]
    tail = [some for some in (behind[:1], behind[1:]) if some]
    if behind:
        yield [[node for some in chains for node in some], *tail]
    yield [*chains, *tail]


FUSIONS = [
    Fusion(
        Rule("ChannelGatesFusionPass", propose),
        parts_of,
        lower,
        apart,
        "gates of channels have a hand-written kernel without parameters",
        compares_all=True,
    )
]
