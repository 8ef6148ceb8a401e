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
from ascend_lab.isa.program import renamed
from ascend_lab.kernels.chain import Chain
from ascend_lab.kernels.chain_schedules import chain_launches


def halves_of(nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Return the nodes before the second convolution, and the rest: none if there is one only."""
    places = [i for i, node in enumerate(nodes) if node.has("convolution")]
    alone = len(places) != 2 or any(node.op == "add" for node in nodes[: places[1]])
    cut = len(nodes) if alone else places[1]
    return nodes[:cut], nodes[cut:]


def lower_chain(piece: Piece, chip: Chip) -> Lowered:
    """Return two convolutions and what follows each, all in one kernel, the quickest of some."""
    parts = [_part(piece, nodes) for nodes in halves_of(piece.graph.nodes)]
    shared = parts[0].constants & parts[1].constants
    links = parts[1].graph.nodes[0].inputs[0] == parts[0].graph.outputs[0]
    weights = [part.graph.nodes[0].inputs[1] for part in parts]
    if shared or not links or not {*weights} <= piece.constants:
        raise UnsupportedError(
            "two convolutions in a row, constants of their own", "others", "cut here"
        )
    (point, one, forms), (depth, two, more) = (conv_job(part, chip) for part in parts)
    x, y = piece.graph.nodes[0].inputs[0], piece.graph.outputs[-1]
    names = {"x": x, "weight": weights[0], "depth_weight": weights[1], "y": y}
    launches = chain_launches(Chain(point, depth, one, two), chip)
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
