"""Attention that does the moves around it: its kernel strides over transposed queries and keys.

The kernel is that of attention (`lower.matmul.lower_moved`); here is which moves it may take.
"""

from ascend_lab.compiler import aliases, lower
from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.compiler.rules import Group, Rule


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose attention and the moves around it that its kernel can do: it strides over them."""
    if not lower.attention_in([node]):
        return None
    idle = aliases.moves_between(graph)
    views = aliases.view_nodes(graph)
    found = [node]
    for _, chain, _ in lower.around_attention(graph, node):
        names = {move.name for move in chain}
        found += chain if idle.isdisjoint(names) and names - views else ()
    return found


RULES = [Rule("FlashAttentionTransposeFusionPass", propose)]
