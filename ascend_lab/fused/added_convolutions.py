"""Find two convolutions whose results are added, and describe them as one problem for a kernel.

    y = relu(conv(a) + conv(b))        a, b: images; both convolutions make images of one size

`joint` makes one kernel of them, the tuner searches its tiling, and `tandem` (a pointwise and a
depthwise convolution in one kernel) does not touch them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from ascend_lab.compiler.ir import Graph, Node, only_reader
from ascend_lab.compiler.lower import conv
from ascend_lab.compiler.lower.piece import Form, Piece
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels import ConvShape
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.ops.formats import pair


def added_convolutions(graph: Graph, node: Node) -> list[tuple[Node, ...]]:
    """Return the two convolutions that a node adds, if no other node reads them; else [].

    Their results have one shape. If a convolution is in int8, the node that scales its int32 sums
    is returned with it.
    """
    heads = [_head_of(graph, name) for name in node.inputs] if node.op == "add" else []
    alike = len({graph.types[name].shape for name in node.inputs}) == 1
    return heads if len(heads) == 2 and all(heads) and heads[0] != heads[1] and alike else []


def _head_of(graph: Graph, name: str) -> tuple[Node, ...]:
    """Return the convolution that makes a summand, with the node that scales int32 sums, or ()."""
    maker = graph.producers.get(name)
    # a summand that another node reads, too, has to be stored: nothing is gained
    if maker is None or only_reader(graph, maker) is None:
        return ()
    if maker.op == "dequantise":
        conv = graph.producers.get(maker.inputs[0])
        fits = conv is not None and conv.op == "conv2d" and only_reader(graph, conv) is not None
        return (conv, maker) if conv is not None and fits else ()
    return (maker,) if maker.op == "conv2d" else ()


def beside_of(piece: Piece) -> tuple[Piece, tuple[Node, ...]]:
    """Split off a piece's second convolution; return the rest of the piece, and its nodes.

    The second convolution adds its sums to those of the first one. It has one tap; if both have
    one, it is the one without a bias, or with the larger stride. If it is in int8, the node that
    scales its int32 sums goes with it.
    """
    nodes = piece.graph.nodes

    def order(nodes: tuple[Node, ...]) -> tuple[int, int, int]:
        # convolutions with a bias come first, then 3 x 3 before 1 x 1; the last one is split off
        conv = nodes[0]
        has_bias = len(nodes[-1].inputs) > 2
        taps = piece.type(conv.inputs[1]).shape[2:]
        step = conv.attr("stride", 1)
        return not has_bias, -math.prod(taps), pair("stride", step)[0]

    for sums in nodes:
        if heads := added_convolutions(piece.graph, sums):
            main, second = sorted(heads, key=order)
            remaining = [*main, *(n for n in nodes if n not in (*main, *second))]
            # y = conv(a) + conv(b): what is left, conv(a), writes y, and the add goes
            if len(main) == 1:
                remaining = [replace(main[0], outputs=sums.outputs), *remaining[2:]]
            return replace(piece, graph=replace(piece.graph, nodes=tuple(remaining))), second
    return piece, ()


def joint_job(piece: Piece, chip: Chip) -> tuple[ConvShape, Epilogue | None, Mapping[str, Form]]:
    """Return what `conv.conv_job` returns, for one convolution or for two that are added."""
    alone, second = beside_of(piece)
    return conv.conv_job(alone, chip, second_nodes=second)
