"""The slicer: which part of every tensor a piece of the outputs needs, by slice rules backwards.

An operator's slice rule says which axis of each operand follows an axis of its result, and which
entries a range of it needs. So a walk starts at the results and goes backwards, for tiles that fit
memory as for slices that fit L2.

Ranges are cut off at the borders of a tensor, and only what reaches beyond a border keeps padding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Draft, given_attrs
from ascend_lab.graph.ir import Graph, Node, operator_of
from ascend_lab.graph.lower.piece import read_outside
from ascend_lab.ops.slicing import AxisRule, Cut, Range, SliceRules, cut

Rules = Mapping[str, SliceRules]
"""Slice rules of every node of a graph at its whole shapes."""


def rules_of(graph: Graph, node: Node) -> SliceRules:
    """Return the slice rules of a node at its shapes."""
    return operator_of(node.op).slice_rules([t.shape for t in graph.in_types(node)], node.attrs)


def all_rules(graph: Graph) -> Rules:
    """Return the slice rules of every node."""
    return {node.name: rules_of(graph, node) for node in graph.nodes}


def part_of(graph: Graph, nodes: Sequence[Node], name: str) -> Graph:
    """Return consecutive nodes as a graph that writes what is read outside them."""
    written = {n: None for node in nodes for n in node.outputs}
    read = {n: None for node in nodes for n in node.inputs if n not in written}
    constants = {n: graph.constants[n] for n in read if n in graph.constants}
    inputs = tuple(n for n in read if n not in constants)
    types = {n: graph.types[n] for n in (*read, *written)}
    outs = tuple(read_outside(graph, nodes))
    return Graph(name, inputs, outs, tuple(nodes), types, constants)


def hull(ranges: Iterable[Range]) -> Range:
    """Return the smallest range that holds all."""
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


# -- ranges ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Walk:
    """One piece of the outputs: the range of every tensor it needs, and how every node is cut.

    `axes` is the axis along which each tensor is cut; others are read whole.
    """

    axes: Mapping[str, int]
    wanted: Mapping[str, Range]
    need: Mapping[str, Range]
    parts: Mapping[str, Cut]

    def own(self, name: str, span: Range) -> Range:
        """Return a range of a tensor counted from the first entry the piece has."""
        return span[0] - self.need[name][0], span[1] - self.need[name][0]

    def width(self, name: str) -> int:
        """Return how many entries of a tensor the piece has."""
        return self.need[name][1] - self.need[name][0]


def walk(graph: Graph, rules: Rules, axes: Mapping[str, int], wanted: Mapping[str, Range]) -> Walk:
    """Return what ranges of the outputs need; raise `ShapeError` if that is padding only."""
    need, parts = dict(wanted), {}
    for node in reversed(graph.nodes):
        span = hull(need[name] for name in node.outputs if name in need)
        need.update(dict.fromkeys(node.outputs, span))
        parts[node.name] = cut_node(graph, node, rules[node.name], axes, span)
        for name, ranges in zip(node.inputs, parts[node.name].ranges, strict=True):
            if axes.get(name) in ranges:
                need[name] = hull(r for r in (need.get(name), ranges[axes[name]]) if r)
    return Walk(axes, wanted, need, parts)


def cut_node(
    graph: Graph, node: Node, rules: SliceRules, axes: Mapping[str, int], span: Range
) -> Cut:
    """Return what a range of a node's results needs."""
    axis, _ = split_rule(node, rules, axes)
    return cut(rules, [t.shape for t in graph.in_types(node)], node.attrs, axis, span)


def split_rule(node: Node, rules: SliceRules, axes: Mapping[str, int]) -> tuple[int, AxisRule]:
    """Return the axis of a node's first output that is cut, and its rule.

    Raises `InputError` where the operator does not split along it.
    """
    place, name = next((i, n) for i, n in enumerate(node.outputs) if n in axes)
    for axis, rule in enumerate(rules.axes):
        if rule.joins[place] == axes[name] and rule.splits:
            return axis, rule
    reasons = {r.reason for r in rules.axes if r.joins[place] == axes[name]}
    got = f"{node.name} ({node.op}): {' '.join(reasons) or 'no such axis'}"
    raise InputError(f"axis {axes[name]} of {name} in slices", got, "end the region before it")


# -- tiles: one walk for rows, one for columns ----------------------------------------------------
ROWS, COLUMNS = 2, 3
"""Axes of (n, c, h, w)."""


def tile_key(graph: Graph, walked: Walk, axis: int) -> Any:
    """Return what tiles that can share a graph have in common along one axis."""
    nodes = []
    for node in graph.nodes:
        part = walked.parts[node.name]
        reads = zip(node.inputs, part.ranges, strict=True)
        inner = tuple(walked.own(n, r[axis]) for n, r in reads if axis in r)
        nodes.append((repr(sorted(part.attrs.items())), inner))
    widths = tuple(map(walked.width, walked.need))
    return tuple(nodes), widths, tuple(walked.own(n, r) for n, r in walked.wanted.items())


def tile_graph_of(graph: Graph, rows: Walk, cols: Walk, name: str) -> Graph:
    """Return the graph of one kind of tile; its outputs are in the order of the graph's.

    Rows and columns are independent, so that a tile is a pair of walks. Where one reader needs less
    of a tensor than another, a `slice` cuts its part out.
    """
    draft = Draft(graph, nodes=())
    for tensor in rows.need:
        kind = graph.types[tensor]
        sizes = (*kind.shape[:2], rows.width(tensor), cols.width(tensor))
        draft.types[tensor] = replace(kind, shape=sizes)
    for node in graph.nodes:
        first = rows.parts[node.name]
        shapes = [
            (*t.shape[:2], r[ROWS][1] - r[ROWS][0], *t.shape[3:]) if ROWS in r else t.shape
            for t, r in zip(graph.in_types(node), first.ranges, strict=True)
        ]
        rules = operator_of(node.op).slice_rules(shapes, first.attrs)
        second = cut(rules, shapes, first.attrs, COLUMNS, cols.need[node.output])
        reads = tuple(
            _part(draft, tensor, rows.own(tensor, r[ROWS]), cols.own(tensor, c[COLUMNS]))
            if ROWS in r
            else tensor
            for tensor, r, c in zip(node.inputs, first.ranges, second.ranges, strict=True)
        )
        new = replace(node, inputs=reads, attrs=given_attrs(node.op, dict(second.attrs)))
        draft.put(new, *(draft.types[n] for n in node.outputs))
    outs = tuple(
        _part(draft, n, rows.own(n, rows.wanted[n]), cols.own(n, cols.wanted[n]))
        for n in graph.outputs
    )
    used = {n for node in draft.nodes.values() for n in node.inputs} | set(outs)
    constants = {n: c for n, c in graph.constants.items() if n in used}
    nodes = tuple(draft.nodes.values())
    return Graph(name, graph.inputs, outs, nodes, draft.types, constants)


def _part(draft: Draft, tensor: str, high: Range, wide: Range) -> str:
    """Return the name of rows and columns of an image, cut out once for all readers."""
    (top, bottom), (left, right), whole = high, wide, draft.types[tensor]
    begin, end = (0, 0, top, left), (*whole.shape[:2], bottom, right)
    if (begin, end) == ((0, 0, 0, 0), whole.shape):
        return tensor
    new = f"{tensor}.{top}_{bottom}_{left}_{right}"
    if new not in draft.types:
        shape = (*whole.shape[:2], bottom - top, right - left)
        node = Node(new, "slice", (tensor,), (new,), {"begin": begin, "end": end})
        draft.put(node, replace(whole, shape=shape))
    return new
