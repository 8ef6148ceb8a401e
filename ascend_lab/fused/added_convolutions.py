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
    if node.op != "add" or len(node.inputs) != 2:
        return []
    heads = [_head_of(graph, name) for name in node.inputs]
    same_shape = len({graph.types[name].shape for name in node.inputs}) == 1
    are_two = all(heads) and heads[0] != heads[1]
    return heads if are_two and same_shape else []


def _head_of(graph: Graph, name: str) -> tuple[Node, ...]:
    """Return the convolution that makes a summand, with the node that scales int32 sums, or ()."""
    maker = graph.producers.get(name)
    # a summand that another node reads, too, has to be stored: nothing is gained
    if maker is None or only_reader(graph, maker) is None:
        return ()
    if maker.op == "dequantise":
        convolution = graph.producers.get(maker.inputs[0])
        if convolution is None or convolution.op != "conv2d":
            return ()
        return (convolution, maker) if only_reader(graph, convolution) is not None else ()
    return (maker,) if maker.op == "conv2d" else ()


def beside_of(piece: Piece) -> tuple[Piece, tuple[Node, ...]]:
    """Split off a piece's second convolution; return the rest of the piece, and its nodes.

    The second convolution adds its sums to those of the first one. It has one tap; if both have
    one, it is the one without a bias, or with the larger stride. If it is in int8, the node that
    scales its int32 sums goes with it.
    """

    def order(head: tuple[Node, ...]) -> tuple[int, int, int]:
        # convolutions with a bias come first, then 3 x 3 before 1 x 1; the last one is split off
        convolution = head[0]
        has_bias = len(head[-1].inputs) > 2
        taps = piece.type(convolution.inputs[1]).shape[2:]
        stride = pair("stride", convolution.attr("stride", 1))[0]
        return not has_bias, -math.prod(taps), stride

    nodes = piece.graph.nodes
    for addition in nodes:
        heads = added_convolutions(piece.graph, addition)
        if not heads:
            continue
        main, second = sorted(heads, key=order)
        others = [node for node in nodes if node not in (*main, *second)]
        if len(main) == 1:
            # y = conv(a) + conv(b): what is left, conv(a), writes y, and the addition goes
            main_writes_sum = replace(main[0], outputs=addition.outputs)
            remaining = [main_writes_sum, *others[1:]]
        else:
            remaining = [*main, *others]
        return replace(piece, graph=replace(piece.graph, nodes=tuple(remaining))), second
    return piece, ()


def joint_job(piece: Piece, chip: Chip) -> tuple[ConvShape, Epilogue | None, Mapping[str, Form]]:
    """Return what `conv.conv_job` returns, for one convolution or for two that are added."""
    alone, second = beside_of(piece)
    return conv.conv_job(alone, chip, second_nodes=second)
