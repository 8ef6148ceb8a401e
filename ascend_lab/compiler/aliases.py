"""Finds views: tensors that lie inside another tensor's memory, so that they need no kernel.

A reshape of row-major memory is a view: the source with another name. So are conversions,
transposes and chains of them that leave every element at its address, such as those that split a
matrix in fractals into the heads of an attention.

A slice or split is a part of its source if that part is one run of bytes. It has to be cut at whole
blocks along the outermost axis longer than 1: the images of a batch, or the blocks of 16 channels
of a single image; in C1NHWC0, the blocks of channels of all images.

A concat along such an axis is a view in the opposite direction: its operands are written directly
into their place in the result, provided that none of them is a view, an input or a constant.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from ascend_lab import errors
from ascend_lab.compiler.ir import MOVES, Graph, Node, TensorType, moves_after, operator_of
from ascend_lab.compiler.lower import piece, vector
from ascend_lab.machine import chip
from ascend_lab.machine.layout import AddressMap
from ascend_lab.operators.ops.slicing import Range

BLOCK_BYTES = 32
"""Kernels copy from and to addresses that are multiples of 32 bytes."""
CUTTING_OPS = ("slice", "split")


@dataclass(frozen=True, slots=True)
class Alias:
    """The place of a tensor: `offset_bytes` after the start of the tensor `owner`."""

    owner: str
    offset_bytes: int = 0


class _Aliases:
    """The aliases of the nodes read so far; each points at the next tensor that contains it.

    `chain_members` names nodes that are views only as part of a chain: a transpose and the
    transpose that undoes it, for example.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.alias_of: dict[str, Alias] = {}
        self.views: set[str] = set()
        self.chain_members: set[str] = set()

    def add(self, node: Node) -> None:
        """Store the aliases of a node if it is a view."""
        if node.name in self.chain_members:
            return
        if node.op == "concat" and self._join(node):
            self.views.add(node.name)
        elif (offsets := self._operand_offsets(node)) is not None:
            self.views.add(node.name)
            for name, offset in zip(node.outputs, offsets, strict=True):
                self.alias_of[name] = Alias(node.inputs[0], offset)
        # for example reshape, transpose, reshape, after which every element is at its old address
        elif chain := idle_moves(self.graph, node):
            self.chain_members.update(move.name for move in chain)
            self.alias_of.update((move.output, Alias(node.inputs[0])) for move in chain)

    def _operand_offsets(self, node: Node) -> list[int] | None:
        """Return the offset in its operand of each output of a node; None if it is not a view.

        A constant has no views, as it is packed for the kernels that read it.
        """
        if node.inputs[0] in self.graph.constants:
            return None
        kinds = (self.graph.types[node.inputs[0]], self.graph.types[node.output])
        if node.op == "trans_data":
            return [0] if keeps_addresses(*kinds) else None
        if node.op == "reshape":
            # row-major memory has the same order of elements in every shape
            return [0] if kinds[0].layout == kinds[1].layout == "ND" else None
        return cut_offsets(self.graph, node) if node.op in CUTTING_OPS else None

    def _join(self, node: Node) -> bool:
        """Place the operands of a concat inside its result; False if that is impossible.

        Two operands must not share memory, and inputs and constants cannot move.
        """
        result = self.graph.types[node.output]
        operands = self.graph.in_types(node)
        axis = int(node.attr("axis", 0)) % len(result.shape)
        ends = accumulate((kind.shape[axis] for kind in operands), initial=0)
        offsets = _offsets(result, operands, axis, list(pairwise(ends)))
        if offsets is None:
            return False
        bases = [self.base(name) for name in node.inputs]
        immovable = {*self.graph.inputs, *self.graph.constants}
        # concat(x, x) would need x at two places
        if None in bases or len(set(bases)) < len(bases) or immovable.intersection(map(str, bases)):
            return False
        for base, offset in zip(bases, offsets, strict=True):
            self.alias_of[str(base)] = Alias(node.output, offset)
        return True

    def base(self, name: str) -> str | None:
        """Return the tensor that owns the memory of `name`, if all of that memory can move.

        None if `name` is only a part of the owner.
        """
        # a view of equal size is all of its owner's memory
        size = self.graph.types[name].size_bytes
        while name in self.alias_of:
            name = self.alias_of[name].owner
        return name if self.graph.types[name].size_bytes == size else None


def aliases(graph: Graph, views: Collection[str]) -> Mapping[str, Alias]:
    """Return the place of every tensor that a view in `views`, names of nodes, puts in another."""
    collector = _Aliases(graph)
    for node in graph.nodes:
        if node.name in views:
            collector.add(node)
    resolved = {}
    for name in collector.alias_of:
        owner = name
        offset = 0
        # a slice 64 bytes into y, which lies 128 bytes into z: 192 bytes into z
        while owner in collector.alias_of:
            alias = collector.alias_of[owner]
            owner = alias.owner
            offset += alias.offset_bytes
        resolved[name] = Alias(owner, offset)
    return resolved


def view_nodes(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that are views."""
    return _views(graph)[0]


def moves_inside_chains(graph: Graph) -> frozenset[str]:
    """Return the names of the moves that are views only as part of a whole chain."""
    return _views(graph)[1]


@lru_cache(8)
def _views(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    collector = _Aliases(graph)
    for node in graph.nodes:
        collector.add(node)
    return frozenset(collector.views | collector.chain_members), frozenset(collector.chain_members)


# -- moves that keep addresses --------------------------------------------------------------------
def keeps_addresses(source: TensorType, target: TensorType) -> bool:
    """Tell whether two types put every element at the same address, without padding.

    NC1HWC0 of (n, 64, 1, 1) is row-major (n, 64): a conversion only gives a new name.
    """
    first_map, second_map = piece.maps_between(source, target)
    return not first_map.padding_bytes | second_map.padding_bytes and _runs(first_map) == _runs(
        second_map
    )


def idle_moves(graph: Graph, node: Node) -> list[Node]:
    """Return the shortest chain of moves from this node that returns every element to its place.

    Only the chain itself reads the tensors in it, so that none of them has to exist in memory.
    """
    chain = [node, *moves_after(graph, node)]
    if node.op not in MOVES or node.inputs[0] in graph.constants:
        return []
    ends = (i for i in range(1, len(chain) + 1) if _ends_in_place(graph, chain[:i]))
    return chain[: next(ends, 0)]


def _ends_in_place(graph: Graph, chain: list[Node]) -> bool:
    ends = chain[0].inputs[0], chain[-1].output
    if any(graph.types[name].map.padding_bytes for name in ends):
        return False
    try:
        reads, writes = vector.digits_moved(graph, chain)
    except errors.UnsupportedError:
        return False
    return reads == writes


def _runs(layout: AddressMap) -> list[tuple[int, int, int, int]]:
    """Return a layout's pieces without those of length 1; adjacent pieces of an axis are merged.

    Blocks of 4 x 16 channels that follow each other without a gap are one piece of 64 channels.
    """
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


def run_offset(uncut: TensorType, cut: TensorType, axis: int, span: Range) -> int | None:
    """Return the offset in bytes of a cut: entries span[0] .. span[1] - 1 of an axis of `uncut`.

    `cut` is the type of the cut. None if its bytes are in several runs or in another order.
    """
    low, high = span
    if (cut.layout, cut.dtype) != (uncut.layout, uncut.dtype) or not uncut.elements:
        return None
    pieces = uncut.map.pieces
    size = chip.DTYPE_BYTES[uncut.dtype]
    # pieces are sorted from the outermost to the innermost
    outermost = next(p for p in pieces if p.axis == axis)
    # an axis further out has several entries: each holds its own part of the cut
    if any(p.count > 1 for p in pieces[: pieces.index(outermost)]):
        return None
    # a cut inside a block of channels; the last block may be incomplete
    if low % outermost.step or (high % outermost.step and high != uncut.shape[axis]):
        return None
    # blocks of the axis, the last one perhaps incomplete
    block_count = -(-high // outermost.step) - low // outermost.step
    offset = low // outermost.step * outermost.stride * size
    is_split = block_count * outermost.stride * size != cut.size_bytes or offset % BLOCK_BYTES
    return None if is_split else offset


def cut_spans(graph: Graph, node: Node) -> tuple[int, list[Range]] | None:
    """Return the only axis that a slice or split cuts, and the range of each output.

    None if a slice cuts several axes or skips entries.
    """
    shape = graph.types[node.inputs[0]].shape
    settings = operator_of(node.op).settings(node.attrs)
    if node.op == "split":
        axis = int(settings["axis"]) % len(shape)
        ends = accumulate((graph.types[n].shape[axis] for n in node.outputs), initial=0)
        return axis, list(pairwise(ends))
    ranges = [
        slice(begin, end).indices(size)[:2]
        for begin, end, size in zip(settings["begin"], settings["end"], shape, strict=True)
    ]
    # [:, 2:4] of shape (3, 8) cuts axis 1 only
    axes = [i for i, (low, high) in enumerate(ranges) if high - low != shape[i]]
    if len(axes) > 1 or any(n != 1 for n in settings["step"] or ()):
        return None
    axis = axes[0] if axes else 0
    return axis, [ranges[axis]]


def cut_offsets(graph: Graph, node: Node) -> list[int] | None:
    """Return the offset of each output of a slice or split, None if it has to copy."""
    source = graph.types[node.inputs[0]]
    cuts = cut_spans(graph, node) if source.shape else None
    if cuts is None:
        return None
    return _offsets(source, graph.out_types(node), cuts[0], cuts[1])


def _offsets(
    joined: TensorType, pieces: Collection[TensorType], axis: int, spans: Collection[Range]
) -> list[int] | None:
    """Return the offset of each piece of a tensor cut along an axis; None if one is no run."""
    offsets: list[int] = []
    for piece_type, span in zip(pieces, spans, strict=True):
        offset = run_offset(joined, piece_type, axis, span)
        if offset is None:
            return None
        offsets.append(offset)
    return offsets
