"""Two convolutions whose results are added become one kernel that sums both in L0C.

A residual block with a projection computes y = relu(W1 x1 + W2 x2):

    unfused        conv W1 -> GM;  conv W2, add, relu -> GM            t = W1 x1 is stored and read
    fused          L0C = W1 x1;  L0C += W2 x2;  relu on the way out -> GM
    saved          writing and reading t once, and one kernel start

For 512 channels of 28 x 28 pixels in fp16 t is 2 x 512 x 784 bytes, about 0.8 MB, each way. The
sum stays in fp32, so that values differ only by one rounding less.

The convolution kernel itself can add a second convolution to the first (`conv.by_cube`); this file
proposes the nodes (found by `added_convolutions`) and says which of the two is the second.
"""

from collections.abc import Iterator, Sequence

from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node
from ascend_lab.compiler.lower import conv
from ascend_lab.compiler.lower.piece import Lowered, Piece, refuse_packed_twice
from ascend_lab.compiler.rules import JOINT, Fusion, Group, Rule
from ascend_lab.fused.added_convolutions import added_convolutions, beside_of
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels import GemmSchedule


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose two convolutions that are added, their sum, and elementwise nodes."""
    # Each head is a convolution, and in int8 also the node that scales its int32 sums.
    heads = added_convolutions(graph, node)
    return [*heads[0], *heads[1], node, *elementwise_chain(graph, node)] if heads else None


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return both convolutions, the first node's one in front, and the nodes behind; else ()."""
    for node in nodes:
        heads = added_convolutions(graph, node)
        if heads and all(head[0] in nodes for head in heads):
            first, second = heads if nodes[0] in heads[0] else heads[::-1]
            return first, second, [n for n in nodes if n not in (*first, *second)]
    return ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return the kernel with its default tiling, or with another one that is quicker."""
    return lower_tiled(piece, chip, parts)


def lower_tiled(
    piece: Piece, chip: Chip, parts: Sequence[Group], tiling: GemmSchedule | None = None
) -> Lowered:
    """Return the kernel with a tiling."""
    refuse_packed_twice(piece)
    alone, second = beside_of(piece)
    return conv.by_cube(alone, chip, tiling, second)


def unfused(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the kernels against which the fused one is timed.

    The variants: one convolution alone, and the other with the add and the nodes behind it; both
    convolutions alone; every node alone.
    """
    first, second, behind = parts
    yield [second, (*first, *behind)]
    yield [first, second, behind]
    yield [(node,) for node in (*first, *second, *behind)]


FUSIONS = [Fusion(Rule(JOINT, propose), parts_of, lower, unfused, lower_tiled=lower_tiled)]
