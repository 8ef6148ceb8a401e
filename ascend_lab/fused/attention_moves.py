"""Attention that reads and writes transposed tensors in place, without transpose kernels.

A projection yields (batch, tokens, heads x width); attention wants (batch, heads, tokens, width):

    unfused        transpose q, k, v -> GM; attention -> GM; transpose y -> GM
    fused          attention steps over GM with the strides of the tensors as they lie
    saved          four transpose kernels, each of which reads and writes a whole tensor

12 heads of width 64: one head's tokens are 64 elements after the transpose and 768 elements before
it. A copy from GM with either stride moves the same number of bytes.

This file finds the transposes and reshapes (moves) around attention and passes their strides to the
attention kernel (`flash_attention`) as views.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ascend_lab.compiler import aliases
from ascend_lab.compiler.ir import Graph, Node, moves_after, moves_before
from ascend_lab.compiler.lower import vector
from ascend_lab.compiler.lower.piece import Lowered, Piece
from ascend_lab.compiler.rules import Fusion, Group, Rule
from ascend_lab.errors import UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels.flash_shape import FlashView

ATTENTION = "flash_attention"


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose attention with the moves before and after it that its kernel can do by strides."""
    # this rule starts at the attention; `around` looks in both directions
    if node.op != ATTENTION:
        return None
    moves_inside_views = aliases.moves_inside_chains(graph)
    views = aliases.view_nodes(graph)
    group = [node]
    for _, chain, _ in around(graph, node):
        names = {move.name for move in chain}
        # A chain of views costs nothing as it is: only a chain with a copy in it is worth taking.
        group += chain if moves_inside_views.isdisjoint(names) and names - views else ()
    return group


def around(graph: Graph, node: Node) -> Iterator[tuple[str, list[Node], FlashView]]:
    """Yield each operand (q, k, v or y) whose moves attention can do: name, moves, view."""
    for name, tensor in zip("qkvy", (*node.inputs[:3], node.output), strict=True):
        is_result = name == "y"
        chain = moves_after(graph, node) if is_result else moves_before(graph, tensor)
        if not chain:
            continue
        try:
            ends = vector.digits_moved(graph, chain)
        except UnsupportedError:
            continue
        # strides at the attention's end of the chain, and at the end that lies in memory
        at_attention, in_memory = ends if is_result else ends[::-1]
        strides = [(a[1], b[1]) for a, b in zip(at_attention, in_memory, strict=True)]
        if view := FlashView.of(graph.types[tensor].shape, strides):
            yield name, chain, view


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return (attention,) and the chains of moves around it; () if it is no such group."""
    node = next((node for node in nodes if node.op == ATTENTION), None)
    if node is None or len(nodes) == 1:
        return ()
    chains = [chain for _, chain, _ in around(graph, node)]
    return (node,), *(chain for chain in chains if chain[0] in nodes)


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return the kernel of attention that strides over the moves around it."""
    (node,) = parts[0]
    graph = piece.graph
    types = dict(graph.types)
    ends = dict[str, str]()
    views = []
    for name, chain, view in around(graph, node):
        chain_in = chain[0].inputs[0]
        chain_out = chain[-1].output
        inner, outer = (chain_in, chain_out) if name == "y" else (chain_out, chain_in)
        # the attention reads the tensor in memory, with the shape that the moves would give it
        ends[inner] = outer
        types[outer] = types[inner]
        views.append((name, view))
    reads = tuple(ends.get(name, name) for name in node.inputs)
    writes = tuple(ends.get(name, name) for name in node.outputs)
    moves_all_operands = {*graph.inputs, *graph.outputs} == {*reads, *writes}
    alone = replace(graph, nodes=(replace(node, inputs=reads, outputs=writes),), types=types)
    if moves_all_operands:
        lowered = vector.lower_template(replace(piece, graph=alone), chip, views=tuple(views))
        if lowered is not None:
            return lowered
    raise UnsupportedError("attention, and moves that it can do", str(graph), "cut here")


def unfused(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the groups of the unfused variant: attention, and one copy for each chain of moves.

    The compiler times them against the fused kernel.
    """
    yield parts


FUSIONS = [
    Fusion(
        Rule("FlashAttentionTransposeFusionPass", propose),
        parts_of,
        lower,
        unfused,
        "it has a hand-written kernel without parameters",
    )
]
