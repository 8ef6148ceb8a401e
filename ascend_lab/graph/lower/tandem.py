"""A pointwise and a depthwise convolution as one kernel: what lies between stays in L1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ascend_lab.chip import Chip
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import Node
from ascend_lab.graph.lower.conv import conv_job, near_cycles, packed_weights
from ascend_lab.graph.lower.piece import Form, Lowered, Piece
from ascend_lab.isa import Kernel
from ascend_lab.isa.launch import renamed
from ascend_lab.kernels.tandem_schedules import tandem_launches
from ascend_lab.kernels.tandem_shape import Tandem


def halves_of(nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Return a convolution with what follows it, and another one that reads this, if any."""
    for i, node in enumerate(nodes):
        if i and node.has("convolution") and node.inputs[0] == nodes[i - 1].output:
            return (nodes[:i], nodes[i:]) if nodes[0].has("convolution") else (nodes, ())
    return nodes, ()


def lower_tandem(piece: Piece, chip: Chip) -> Lowered:
    """Return two convolutions and what follows each, all in one kernel, the quickest of some."""
    parts = [_part(piece, nodes) for nodes in halves_of(piece.graph.nodes)]
    shared = parts[0].constants & parts[1].constants
    weights = [part.graph.nodes[0].inputs[1] for part in parts]
    if shared or not {*weights} <= piece.constants:
        raise UnsupportedError(
            "two convolutions in a row, constants of their own", "others", "cut here"
        )
    (point, one, forms), (depth, two, more) = (conv_job(part, chip) for part in parts)
    x, y = piece.graph.nodes[0].inputs[0], piece.graph.outputs[-1]
    names = {"x": x, "weight": weights[0], "depth_weight": weights[1], "y": y}
    launches = tandem_launches(Tandem(point, depth, one, two), chip)
    kernels = [Kernel("conv2d", (renamed(launch, names),)) for launch in launches]
    kernel = min(kernels, key=lambda kernel: near_cycles(kernel, piece, chip))
    own: dict[str, Form] = {weights[0]: partial(packed_weights, point)}
    return Lowered(kernel, forms | more | own | {weights[1]: partial(packed_weights, depth)})


def _part(piece: Piece, nodes: Sequence[Node]) -> Piece:
    """Return some nodes of a piece as a piece under the same names."""
    written = {name for node in nodes for name in node.outputs}
    reads = dict.fromkeys(n for node in nodes for n in node.inputs if n not in written)
    graph = replace(
        piece.graph, nodes=tuple(nodes), inputs=tuple(reads), outputs=(nodes[-1].output,)
    )
    return replace(piece, graph=graph, constants=piece.constants & reads.keys())
