"""Attention that reads and writes transposed tensors in place, without transpose kernels.

A projection yields (batch, tokens, heads x width); attention wants (batch, heads, tokens, width):

    plain floor    transpose q, k, v -> GM; attention -> GM; transpose y -> GM
    fused          attention steps over GM with the strides of the tensors as they lie
    saved          four kernels, each of which reads and writes a whole tensor

12 heads of width 64: one head's tokens are 64 elements after the transpose and 768 elements before
it. A copy from GM with that stride costs the same number of bytes.

The attention kernel can do this (`lower.matmul.lower_moved`); this file finds the moves.
"""

from ascend_lab.compiler import aliases, lower
from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.compiler.rules import Group, Rule


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose attention with those moves around it that its kernel can replace by strides."""
    # this rule starts at the attention; `lower.around_attention` looks in both directions
    if not lower.attention_in([node]):
        return None
    moves_inside_views = aliases.moves_inside_chains(graph)
    views = aliases.view_nodes(graph)
    group = [node]
    for _, chain, _ in lower.around_attention(graph, node):
        names = {move.name for move in chain}
        # A chain of views costs nothing as it is: only a chain with a copy in it is worth taking.
        group += chain if moves_inside_views.isdisjoint(names) and names - views else ()
    return group


RULES = [Rule("FlashAttentionTransposeFusionPass", propose)]
