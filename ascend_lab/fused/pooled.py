"""A convolution, what follows it, and the largest of windows of that, in one kernel.

The sums are pooled on the core: the image between convolution and pooling never leaves it.
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
    """Propose a convolution, what follows it, and the largest of windows of that."""
    chain = [node, *elementwise_chain(graph, node)] if node.has("convolution") else []
    pool = only_reader(graph, chain[-1]) if chain else None
    return [*chain, pool] if pool is not None and pool.has("largest") else None


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return a convolution with what follows it, and the pooling; () for other groups."""
    fits = nodes[0].op in CONVOLUTIONS and nodes[-1].has("largest")
    return (nodes[:-1], nodes[-1:]) if fits else ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return the kernel; raise `UnsupportedError` where cube and vector unit share no core."""
    if not chip.combined:
        raise UnsupportedError("a core with cube and vector unit", chip.name, "cut here")
    refuse_packed_twice(piece)
    (pool,) = parts[1]
    refuse_computed(piece, piece.graph.nodes[0].inputs[1])
    graph = replace(piece.graph, nodes=tuple(parts[0]), outputs=pool.inputs)
    alone = replace(piece, graph=graph)
    settings = operator_of(pool.op).settings(pool.attrs)
    windows = pooling.as_convolution(settings, alone.output.shape)
    lowered = write_conv(alone, chip, vector=False, pool=windows)
    phases = (renamed(phase, {pool.inputs[0]: pool.output}) for phase in lowered.kernel.phases)
    return replace(lowered, kernel=Kernel(lowered.kernel.name, tuple(phases)))


def apart(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the convolution and the pooling as two kernels."""
    yield parts


FUSIONS = [
    Fusion(
        Rule("PooledConvolutionFusionPass", propose),
        parts_of,
        lower,
        apart,
        "what it makes is pooled on the core, in tiles of its windows",
    )
]
