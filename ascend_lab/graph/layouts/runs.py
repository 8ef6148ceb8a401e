"""Parts of tensors that are one run of bytes: cut out, or joined, without moving anything."""

from __future__ import annotations

from itertools import accumulate, pairwise

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import Graph, Node, TensorType
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
