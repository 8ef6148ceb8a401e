"""Parts of tensors that are one run of bytes: cut out, or joined, without moving anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.graph.ir import Graph, Node, TensorType, operator_of
from ascend_lab.graph.lower.piece import maps_between
from ascend_lab.layout import AddressMap
from ascend_lab.ops.slicing import Range

BLOCK_BYTES = 32
"""Kernels copy from and to addresses that are multiples of this."""


def run_offset(whole: TensorType, part: TensorType, axis: int, span: Range) -> int | None:
    """Return where entries span[0] .. span[1]-1 of an axis start, in bytes, if they are one run.

    `part` is the type of what is cut out; None if its bytes lie apart, or are ordered otherwise.
    """
    low, high = span
    if (part.layout, part.dtype) != (whole.layout, whole.dtype) or not whole.elements:
        return None
    pieces = whole.map.pieces
    top = next(p for p in pieces if p.axis == axis)
    ahead = pieces[: pieces.index(top)]
    if any(p.count > 1 for p in ahead):
        return None
    if low % top.step or (high % top.step and high != whole.shape[axis]):
        return None
    entries = -(-high // top.step) - low // top.step
    size = DTYPE_BYTES[whole.dtype]
    if entries * top.stride * size != part.size_bytes:
        return None
    offset = low // top.step * top.stride * size
    return None if offset % BLOCK_BYTES else offset


def cut_spans(graph: Graph, node: Node) -> tuple[int, list[Range]] | None:
    """Return the only axis a slice or split cuts, and what each output takes of it.

    None if a slice cuts several axes or skips entries.
    """
    shape = graph.types[node.inputs[0]].shape
    settings = operator_of(node.op).settings(node.attrs)
    if node.op == "split":
        axis = int(settings["axis"]) % len(shape)
        ends = accumulate((graph.types[n].shape[axis] for n in node.outputs), initial=0)
        return axis, list(pairwise(ends))
    steps = settings["step"] or (1,) * len(shape)
    found = [
        slice(begin, end).indices(size)[:2]
        for begin, end, size in zip(settings["begin"], settings["end"], shape, strict=True)
    ]
    axes = [i for i, (low, high) in enumerate(found) if high - low != shape[i]]
    if len(axes) > 1 or any(n != 1 for n in steps):
        return None
    axis = axes[0] if axes else 0
    return axis, [found[axis]]


def cut_offsets(graph: Graph, node: Node) -> list[int] | None:
    """Return where each output of a slice or split starts in its source; None if it must copy."""
    whole = graph.types[node.inputs[0]]
    cuts = cut_spans(graph, node) if whole.shape else None
    if cuts is None or node.inputs[0] in graph.constants:
        return None
    found = [
        run_offset(whole, part, cuts[0], span)
        for part, span in zip(graph.out_types(node), cuts[1], strict=True)
    ]
    return None if None in found else [n for n in found if n is not None]


def join_offsets(graph: Graph, node: Node) -> list[int] | None:
    """Return where each operand of a concat starts in the result; None if it must be copied."""
    whole, parts = graph.types[node.output], graph.in_types(node)
    axis = int(node.attr("axis", 0)) % len(whole.shape)
    ends = accumulate((t.shape[axis] for t in parts), initial=0)
    found = [run_offset(whole, t, axis, s) for t, s in zip(parts, pairwise(ends), strict=True)]
    return None if None in found else [n for n in found if n is not None]


def moves_nothing(one: TensorType, two: TensorType) -> bool:
    """Tell whether two layouts put every element of a shape at the same address, unpadded.

    NC1HWC0 of (n, 64, 1, 1) is row-major (n, 64): a conversion is only a new name.
    """
    first, second = maps_between(one, two)
    whole = not first.padding_bytes and not second.padding_bytes
    return whole and _runs(first) == _runs(second)


def _runs(layout: AddressMap) -> list[tuple[int, int, int, int]]:
    """Return the pieces, those of length 1 dropped and neighbours of one axis joined."""
    runs: list[tuple[int, int, int, int]] = []
    for p in layout.pieces:
        if p.count == 1:
            continue
        if runs and runs[-1][0] == p.axis and runs[-1][1] == p.step * p.count:
            axis, _, count, _ = runs.pop()
            runs.append((axis, p.step, count * p.count, p.stride))
        else:
            runs.append((p.axis, p.step, p.count, p.stride))
    return runs


# Tensors that are bytes of other tensors: views, which need no kernel and no memory.
#
# A reshape of row-major memory is its source under another name. A slice or split is a part of
# its
# source where that part is one run of bytes: cut at whole blocks along the outermost axis that
# has
# more than one, such as the images of a batch, or the blocks of channels of one image. A concat
# along
# such an axis is a view the other way round: its operands are written where they stand in the
# result, if each has memory of its own to give up.


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
