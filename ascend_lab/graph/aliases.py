"""Tensors that are bytes of other tensors: views, which need no kernel and no memory.

A reshape of row-major memory is its source under another name. A slice or split is a part of its
source where that part is one run of bytes: cut at whole blocks along the outermost axis that has
more than one, such as the images of a batch, or the blocks of channels of one image. A concat along
such an axis is a view the other way round: its operands are written where they stand in the
result, if each has memory of its own to give up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.layouts.cancel import moves_nothing
from ascend_lab.graph.layouts.runs import cut_offsets, join_offsets

RENAMING = ("reshape",)
"""Operators that move nothing: row-major memory knows no shape."""
CUTTING = ("slice", "split")


@dataclass(frozen=True, slots=True)
class Alias:
    """Where a tensor lies: this many bytes behind the start of `owner`."""

    owner: str
    offset_bytes: int = 0


class _Aliases:
    """Aliases as far as nodes are read: each points at the tensor it lies in, step by step."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.into: dict[str, Alias] = {}
        self.views: set[str] = set()

    def add(self, node: Node) -> None:
        """Note a node's aliases if it is a view."""
        offsets: list[int] | None = None
        if node.op == "trans_data":
            moves = moves_nothing(self.graph.types[node.inputs[0]], self.graph.types[node.output])
            offsets = [0] if moves else None
        elif node.op in RENAMING:
            types = (*self.graph.in_types(node)[:1], *self.graph.out_types(node))
            offsets = [0] if all(t.layout == "ND" for t in types) else None
        elif node.op in CUTTING:
            offsets = cut_offsets(self.graph, node)
        elif node.op == "concat":
            if not self._join(node):
                return
            offsets = []
        if offsets is not None:
            self.views.add(node.name)
            for name, offset in zip(node.outputs, offsets, strict=False):
                self.into[name] = Alias(node.inputs[0], offset)

    def _join(self, node: Node) -> bool:
        """Place the operands of a concat inside its result, if they can be."""
        offsets = join_offsets(self.graph, node)
        if offsets is None:
            return False
        bases = [self.base(name) for name in node.inputs]
        fixed = {*self.graph.inputs, *self.graph.constants}
        if None in bases or len(set(bases)) < len(bases) or fixed.intersection(map(str, bases)):
            return False
        for base, offset in zip(bases, offsets, strict=True):
            self.into[str(base)] = Alias(node.output, offset)
        return True

    def base(self, name: str) -> str | None:
        """Return the tensor whose memory `name` is, if that is free to lie elsewhere.

        None if `name` is only a part of it, or already lies inside another tensor.
        """
        size = self.graph.types[name].size_bytes
        while name in self.into:
            name = self.into[name].owner
        return name if self.graph.types[name].size_bytes == size else None

    def resolved(self) -> dict[str, Alias]:
        """Return every alias as a place in the tensor at the end of its chain."""
        found = {}
        for name in self.into:
            owner, offset = name, 0
            while owner in self.into:
                step = self.into[owner]
                owner, offset = step.owner, offset + step.offset_bytes
            found[name] = Alias(owner, offset)
        return found


def aliases(graph: Graph, views: Collection[str]) -> Mapping[str, Alias]:
    """Return where every tensor lies that has no memory of its own; `views` name the nodes."""
    work = _Aliases(graph)
    for node in graph.nodes:
        if node.name in views:
            work.add(node)
    return work.resolved()


def view_nodes(graph: Graph) -> Collection[str]:
    """Return the names of the nodes that are views; remembered with the graph."""
    memory = vars(graph)
    if "_view_nodes" not in memory:
        work = _Aliases(graph)
        for node in graph.nodes:
            work.add(node)
        memory["_view_nodes"] = frozenset(work.views)
    found: frozenset[str] = memory["_view_nodes"]
    return found
