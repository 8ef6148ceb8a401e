"""A convolution, its activation and the max pooling of the result in one kernel.

The first layers of ResNet: 7 x 7 convolution, relu, 3 x 3 max pooling with a stride of 2.

    unfused        conv, relu -> GM (64 x 112 x 112);  GM -> max pooling -> GM (64 x 56 x 56)
    fused          conv -> L0C -> relu and max in UB -> GM (64 x 56 x 56)
    saved          writing and reading 2 x 64 x 112 x 112 bytes = 1.6 MB each, one kernel start

The price: windows overlap, so that a row of the convolution at the border of two tiles is computed
for both. Only a core with both a cube and a vector unit can do this: the sums never leave the core.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node, only_reader, operator_of
from ascend_lab.compiler.lower import CONVOLUTIONS
from ascend_lab.compiler.lower.conv import refuse_computed, write_conv
from ascend_lab.compiler.lower.piece import Lowered, Piece, refuse_packed_twice
from ascend_lab.compiler.rules import Fusion, Group, Rule
from ascend_lab.errors import UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Kernel, renamed
from ascend_lab.operators.ops import pooling


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose a convolution, the elementwise nodes behind it, and the max pooling behind those."""
    # conv, relu: what the epilogue does before the maximum is taken
    chain = [node, *elementwise_chain(graph, node)] if node.has("convolution") else []
    pool = only_reader(graph, chain[-1]) if chain else None
    return [*chain, pool] if pool is not None and pool.has("largest") else None


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return (convolution, elementwise nodes) and (max pooling,); () if it is no such group."""
    # `parts` is asked about the groups of every rule, not of this one only
    fits = nodes[0].op in CONVOLUTIONS and nodes[-1].has("largest")
    return (nodes[:-1], nodes[-1:]) if fits else ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return the kernel; raise `UnsupportedError` where cube and vector unit share no core."""
    if not chip.combined:
        raise UnsupportedError("a core with cube and vector unit", chip.name, "cut here")
    refuse_packed_twice(piece)
    (pool,) = parts[1]
    refuse_computed(piece, piece.graph.nodes[0].inputs[1])
    # The convolution's kernel writes the pooled image: it is lowered as if the pooling were absent,
    # with the pooling windows as an argument, and its output is then renamed.
    graph = replace(piece.graph, nodes=tuple(parts[0]), outputs=pool.inputs)
    alone = replace(piece, graph=graph)
    settings = operator_of(pool.op).settings(pool.attrs)
    # Pooling has the geometry of a depthwise convolution: size, stride, padding per channel.
    windows = pooling.as_convolution(settings, alone.output.shape)
    lowered = write_conv(alone, chip, vector=False, pool=windows)
    phases = (renamed(phase, {pool.inputs[0]: pool.output}) for phase in lowered.kernel.phases)
    return replace(lowered, kernel=Kernel(lowered.kernel.name, tuple(phases)))


def unfused(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the two kernels against which the fused one is timed."""
    yield parts


FUSIONS = [
    Fusion(
        Rule("PooledConvolutionFusionPass", propose),
        parts_of,
        lower,
        unfused,
        "what it makes is pooled on the core, in tiles of its windows",
    )
]
