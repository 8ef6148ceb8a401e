"""Tensors that are bytes of other tensors: views, which need no kernel and no memory.

A reshape of row-major memory is its source under another name, and so are conversions, transposes
and chains of them that leave every element where it is, as those that part a matrix in fractals
into the heads of an attention. A slice or split is a part of its source where that part is one run
of bytes: cut at whole blocks along the outermost axis that has more than one, such as the images of
a batch, or the blocks of channels of one image; in C1NHWC0, of all. A concat along such an axis is
a view the other way round: its operands are written where they stand in the result, if each has
memory of its own to give up.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from ascend_lab import errors
from ascend_lab.compiler.ir import MOVES, Graph, Node, TensorType, moves_behind, operator_of
from ascend_lab.compiler.lower import piece, vector
from ascend_lab.machine import chip
from ascend_lab.machine.layout import AddressMap
from ascend_lab.operators.ops.slicing import Range

BLOCK_BYTES = 32
"""Kernels copy from and to addresses that are multiples of this."""
CUTTING = ("slice", "split")


@dataclass(frozen=True, slots=True)
class Alias:
    """Where a tensor lies: this many bytes behind the start of `owner`."""

    owner: str
    offset_bytes: int = 0


class _Aliases:
    """Aliases as far as nodes are read: each points at the tensor it lies in, step by step.

    `between` names the moves of chains that are views only as a whole.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.into: dict[str, Alias] = {}
        self.views: set[str] = set()
        self.between: set[str] = set()

    def add(self, node: Node) -> None:
        """Note a node's aliases if it is a view."""
        if node.name in self.between:
            return
        if node.op == "concat" and self._join(node):
            self.views.add(node.name)
        elif (offsets := self._offsets(node)) is not None:
            self.views.add(node.name)
            for name, offset in zip(node.outputs, offsets, strict=True):
                self.into[name] = Alias(node.inputs[0], offset)
        elif chain := idle_moves(self.graph, node):
            self.between.update(move.name for move in chain)
            self.into.update((move.output, Alias(node.inputs[0])) for move in chain)

    def _offsets(self, node: Node) -> list[int] | None:
        """Return where in its operand each output of a node lies as it is.

        None for a constant: it lies with the weights, as the kernels that read it have packed it.
        """
        if node.inputs[0] in self.graph.constants:
            return None
        kinds = (self.graph.types[node.inputs[0]], self.graph.types[node.output])
        if node.op == "trans_data":
            return [0] if moves_nothing(*kinds) else None
        if node.op == "reshape":
            return [0] if kinds[0].layout == kinds[1].layout == "ND" else None
        return cut_offsets(self.graph, node) if node.op in CUTTING else None

    def _join(self, node: Node) -> bool:
        """Place the operands of a concat inside its result, if they can be."""
        whole = self.graph.types[node.output]
        parts = self.graph.in_types(node)
        axis = int(node.attr("axis", 0)) % len(whole.shape)
        ends = accumulate((kind.shape[axis] for kind in parts), initial=0)
        offsets = _offsets(whole, parts, axis, list(pairwise(ends)))
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


def aliases(graph: Graph, views: Collection[str]) -> Mapping[str, Alias]:
    """Return where every tensor lies that has no memory of its own; `views` name the nodes."""
    work = _Aliases(graph)
    for node in graph.nodes:
        if node.name in views:
            work.add(node)
    found = {}
    for name in work.into:
        owner = name
        offset = 0
        while owner in work.into:
            step = work.into[owner]
            owner = step.owner
            offset = offset + step.offset_bytes
        found[name] = Alias(owner, offset)
    return found


def view_nodes(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that are views."""
    return _views(graph)[0]


def moves_between(graph: Graph) -> frozenset[str]:
    """Return the names of the moves that are views only as a whole chain."""
    return _views(graph)[1]


@lru_cache(8)
def _views(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    work = _Aliases(graph)
    for node in graph.nodes:
        work.add(node)
    return frozenset(work.views | work.between), frozenset(work.between)


# -- bytes that stay where they are ---------------------------------------------------------------
def moves_nothing(one: TensorType, two: TensorType) -> bool:
    """Tell whether two layouts put every element of a shape at the same address, unpadded.

    NC1HWC0 of (n, 64, 1, 1) is row-major (n, 64): a conversion is only a new name.
    """
    first, second = piece.maps_between(one, two)
    return not first.padding_bytes | second.padding_bytes and _runs(first) == _runs(second)


def idle_moves(graph: Graph, node: Node) -> list[Node]:
    """Return the shortest chain of moves from a node on after which every element is in place.

    Nobody else reads what stands between, and there is no such tensor in memory.
    """
    chain = [node, *moves_behind(graph, node)]
    if node.op not in MOVES or node.inputs[0] in graph.constants:
        return []
    ends = (i for i in range(1, len(chain) + 1) if _in_place(graph, chain[:i]))
    return chain[: next(ends, 0)]


def _in_place(graph: Graph, chain: list[Node]) -> bool:
    ends = chain[0].inputs[0], chain[-1].output
    if any(graph.types[name].map.padding_bytes for name in ends):
        return False
    try:
        reads, writes = vector.digits_moved(graph, chain)
    except errors.UnsupportedError:
        return False
    return reads == writes


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


def run_offset(whole: TensorType, part: TensorType, axis: int, span: Range) -> int | None:
    """Return where entries span[0] .. span[1]-1 of an axis start, in bytes, if they are one run.

    `part` is the type of what is cut out; None if its bytes lie apart, or are ordered otherwise.
    """
    low, high = span
    if (part.layout, part.dtype) != (whole.layout, whole.dtype) or not whole.elements:
        return None
    pieces = whole.map.pieces
    size = chip.DTYPE_BYTES[whole.dtype]
    top = next(p for p in pieces if p.axis == axis)
    if any(p.count > 1 for p in pieces[: pieces.index(top)]):
        return None
    if low % top.step or (high % top.step and high != whole.shape[axis]):
        return None
    entries = -(-high // top.step) - low // top.step
    offset = low // top.step * top.stride * size
    apart = entries * top.stride * size != part.size_bytes or offset % BLOCK_BYTES
    return None if apart else offset


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
    found = [
        slice(begin, end).indices(size)[:2]
        for begin, end, size in zip(settings["begin"], settings["end"], shape, strict=True)
    ]
    axes = [i for i, (low, high) in enumerate(found) if high - low != shape[i]]
    if len(axes) > 1 or any(n != 1 for n in settings["step"] or ()):
        return None
    axis = axes[0] if axes else 0
    return axis, [found[axis]]


def cut_offsets(graph: Graph, node: Node) -> list[int] | None:
    """Return where each output of a slice or split starts in its source; None if it must copy."""
    whole = graph.types[node.inputs[0]]
    cuts = cut_spans(graph, node) if whole.shape else None
    if cuts is None:
        return None
    return _offsets(whole, graph.out_types(node), cuts[0], cuts[1])


def _offsets(
    whole: TensorType, parts: Collection[TensorType], axis: int, spans: Collection[Range]
) -> list[int] | None:
    pairs = zip(parts, spans, strict=True)
    found = [
        offset
        for part, span in pairs
        if (offset := run_offset(whole, part, axis, span)) is not None
    ]
    return found if len(found) == len(parts) else None
