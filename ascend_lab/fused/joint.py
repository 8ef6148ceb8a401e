"""Two convolutions whose results are added become one kernel that sums both in L0C.

A residual block with a projection computes y = relu(W1 x1 + W2 x2):

    plain floor    conv W1 -> GM;  conv W2, add, relu -> GM            t = W1 x1 goes out and back
    fused          L0C = W1 x1;  L0C += W2 x2;  relu on the way out -> GM
    saved          writing and reading t once, and one kernel start

For 512 channels of 28 x 28 pixels in fp16 t is 2 x 512 x 784 bytes, about 0.8 MB, each way. The
sum stays in fp32, so that one rounding less is the only difference of the values.

The convolution's own kernel can do this (`lower.conv.beside_of`); this file finds the nodes.
"""

from ascend_lab.compiler import lower
from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.compiler.rules import JOINT, Group, Rule


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose two convolutions that are added, their sum, and elementwise nodes."""
    # Each head is a convolution with the nodes that may follow it, a batch norm folded in, say.
    heads = lower.added_convolutions(graph, node)
    return [*heads[0], *heads[1], node, *elementwise_chain(graph, node)] if heads else None


RULES = [Rule(JOINT, propose)]
