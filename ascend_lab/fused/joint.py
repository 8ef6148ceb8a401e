"""Two convolutions that are added, as one kernel: the cube adds up the sums of both in one place.

The kernel is that of the convolution (`lower.conv.beside_of`); here is which nodes it may take.
"""

from ascend_lab.compiler import lower
from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.compiler.rules import JOINT, Group, Rule


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose two convolutions that are added, their sum, and elementwise nodes."""
    heads = lower.added_convolutions(graph, node)
    return [*heads[0], *heads[1], node, *elementwise_chain(graph, node)] if heads else None


RULES = [Rule(JOINT, propose)]
