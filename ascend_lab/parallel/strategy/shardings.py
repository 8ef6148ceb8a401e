"""Ways to cut an operator over 2^k devices, read off its slice rules.

A way halves the work: along a free axis of the output, or along a reduction, which leaves partial
sums. A sharding says how many times each way is used; what is left of the k halvings replicates.
Device axes are given to the ways in order, the leftmost of the matrix (2, ..., 2) first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ascend_lab.graph import Graph
from ascend_lab.graph import Node as GraphNode
from ascend_lab.ops import OPERATORS
from ascend_lab.ops.slicing import Reduction, Source
from ascend_lab.parallel.redistribution import Layout

Shape = tuple[int, ...]
WITHOUT_BIAS = {"gemm": "matmul", "conv2d": "conv2d"}
"""Operators that add a bias to a sum, and the operator that only sums."""
IMAGE_OPS = ("conv2d", "depthwise_conv2d")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut an operator: the axis of each output and input it divides (-1: none).

    `summed`: the outputs are partial sums. Pieces are multiples of `grain` along output 0's axis.
    """

    name: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    summed: bool = False
    grain: int = 1


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of a graph with the ways to cut it, and the shapes these ways divide."""

    node: GraphNode
    ways: tuple[Way, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def fits(self, counts: tuple[int, ...]) -> bool:
        """Tell whether every tensor divides evenly when each way is used so often."""
        for shapes, side in ((self.outputs, "outputs"), (self.inputs, "inputs")):
            for index, shape in enumerate(shapes):
                sizes = list(shape)
                for way, count in zip(self.ways, counts, strict=True):
                    axis = getattr(way, side)[index]
                    if axis < 0:
                        continue
                    unit = way.grain if side == "outputs" else 1
                    if sizes[axis] % (unit << count):
                        return False
        return True

    def shardings(self, halvings: int) -> Iterator[tuple[int, ...]]:
        """Yield how often each way is used, in all that fit with at most `halvings` in total."""
        for counts in product(range(halvings + 1), repeat=len(self.ways)):
            if sum(counts) <= halvings and self.fits(counts):
                yield counts

    def layout(self, counts: tuple[int, ...], halvings: int, side: str, index: int) -> Layout:
        """Return the layout of input or output `index` ("inputs", "outputs") of a sharding."""
        shape = getattr(self, side)[index]
        maps: list[list[int]] = [[] for _ in shape]
        axis = halvings - 1
        for way, count in zip(self.ways, counts, strict=True):
            dim = getattr(way, side)[index]
            if dim >= 0:
                maps[dim] += range(axis, axis - count, -1)
            axis -= count
        return Layout((2,) * halvings, tuple(map(tuple, maps)), shape)

    def undivided(self, counts: tuple[int, ...], side: str, index: int) -> tuple[int, int]:
        """Return (devices over which a tensor is the same or partial, parts it is cut into)."""
        same, parts = 1, 1
        for way, count in zip(self.ways, counts, strict=True):
            if getattr(way, side)[index] >= 0:
                parts <<= count
            else:
                same <<= count
        return same, parts


def operator(graph: Graph, node: GraphNode) -> Operator:
    """Return a node with its ways: free output axes in order, then reductions by a sum.

    In networks with convolutions the height and width of images are not cut: that would exchange
    borders, which redistribution does not know. MindSpore's search leaves them out as well.
    """
    inputs = tuple(kind.shape for kind in graph.in_types(node))
    outputs = tuple(kind.shape for kind in graph.out_types(node))
    rules = OPERATORS[node.op].slice_rules(inputs, dict(node.attrs))
    images = len(outputs[0]) == 4 and any(n.op in IMAGE_OPS for n in graph.nodes)
    ways = [
        Way(f"axis {rule.axis}", rule.joins, _axes(rule.sources, len(inputs)), grain=rule.grain)
        for rule in rules.axes
        if rule.kind == "free" and outputs[0][rule.axis] > 1 and not (images and rule.axis > 1)
    ]
    for reduction in _sums(node, inputs) if not rules.reductions else rules.reductions:
        if reduction.combine == "sum":
            pairs = dict(reduction.sources)
            own = tuple(pairs.get(i, -1) for i in range(len(inputs)))
            ways.append(Way("sum", (-1,) * len(outputs), own, summed=True))
    return Operator(node, tuple(ways), inputs, outputs)


def _axes(sources: tuple[Source, ...], count: int) -> tuple[int, ...]:
    found = [-1] * count
    for source in sources:
        found[source.input] = source.axis
    return tuple(found)


def _sums(node: GraphNode, inputs: tuple[Shape, ...]) -> tuple[Reduction, ...]:
    """Return the reductions of an operator that adds a bias: those of the sum before it."""
    plain = WITHOUT_BIAS.get(node.op)
    if plain is None or len(inputs) != 3:
        return ()
    known = OPERATORS[plain].attrs
    attrs = {key: value for key, value in node.attrs.items() if key in known}
    return OPERATORS[plain].slice_rules(inputs[:2], attrs).reductions
