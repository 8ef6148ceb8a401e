"""One split for several operators in a row: the axis along which each may be shared out over cores.

Every core is to keep its pieces from the first operator to the last. So the walk starts at an axis
of the last result and goes backwards: the operator's slice rule says which axis of each operand
follows, that axis is the one its producer must be cut along, and so on. It fails where an operator
does not split along the axis, or where a piece would need all of a tensor made on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ascend_lab.errors import AscendLabError, GraphError
from ascend_lab.graph.draft import given_attrs
from ascend_lab.graph.ir import Graph, Node, TensorType, operator_of
from ascend_lab.ops.slicing import AxisRule, Cut, Range, SliceRules, Window, cut


@dataclass(frozen=True, slots=True)
class Split:
    """A split all operators agree on: the cut axis of every tensor; others are read whole."""

    axes: Mapping[str, int]

    def __str__(self) -> str:
        """Return it on one line."""
        return ", ".join(f"{name} along axis {axis}" for name, axis in self.axes.items())


@dataclass(frozen=True, slots=True)
class Agreement:
    """What comes of every axis of the last output: a split, or the reason why there is none."""

    splits: Mapping[int, Split]
    refusals: Mapping[int, str]

    def __str__(self) -> str:
        """Return a line per axis."""
        lines = {a: f"cut {s}" for a, s in self.splits.items()}
        lines |= {a: f"no: {why}" for a, why in self.refusals.items()}
        return "\n".join(f"axis {a}: {lines[a]}" for a in sorted(lines))


def common_split(graph: Graph, nodes: Sequence[Node]) -> Agreement:
    """Return along which axes of the last node's output all `nodes`, in order, may be cut.

    Pieces that overlap (halos) or come in grains are refused: a core would compute some of its
    neighbour's. Raises `GraphError` for no nodes.
    """
    if not nodes:
        raise GraphError("one node or more", "none", "pass the nodes in order")
    splits, refusals = {}, {}
    for axis in range(len(graph.types[nodes[-1].output].shape)):
        found = _walk(graph, nodes, axis)
        if isinstance(found, str):
            refusals[axis] = found
        else:
            splits[axis] = Split(found)
    return Agreement(splits, refusals)


def _walk(graph: Graph, nodes: Sequence[Node], axis: int) -> dict[str, int] | str:
    """Return the cut axis of every tensor, or why `axis` of the last output cannot be cut."""
    made = {name for node in nodes for name in node.outputs}
    wanted = {nodes[-1].output: axis}
    for node in reversed(nodes):
        if not any(name in wanted for name in node.outputs):
            continue
        rule = _rule(graph, node, wanted)
        if isinstance(rule, str):
            return rule
        for index, name in enumerate(node.inputs):
            axes = {s.axis for s in rule.sources if s.input == index}
            if not axes and name in made:
                return f"{node.name} ({node.op}): every piece needs all of {name}"
            for own in axes:
                if wanted.setdefault(name, own) != own:
                    return f"{name} is wanted along axis {wanted[name]} and along axis {own}"
    return wanted


def _rule(graph: Graph, node: Node, wanted: Mapping[str, int]) -> AxisRule | str:
    """Return the rule of the axis that readers want a node cut along, or why it cannot be."""
    known = operator_of(node.op)
    rules = known.slice_rules([t.shape for t in graph.in_types(node)], node.attrs)
    found = []
    for number, name in enumerate(node.outputs):
        if name in wanted:
            found += [r for r in rules.axes if r.joins[number] == wanted[name]]
    rule = found[0]
    place = f"{node.name} ({node.op}): axis {rule.axis}"
    if any(r is not rule for r in found):
        return f"{place} for one reader, axis {found[-1].axis} for another"
    if graph.types[node.output].shape[rule.axis] == 1:
        return f"{place} has one element"
    if not rule.splits:
        return f"{place} does not split: {rule.reason or rule.kind}"
    plain = all(s.window == Window() and s.grain == 1 for s in rule.sources)
    if rule.kind != "free" or rule.grain != 1 or not plain:
        return f"{place} splits, but pieces overlap or come in grains"
    return rule


# Which rows and columns of every tensor a tile of the outputs needs: slice rules walked
# backwards.
#
# Rows and columns are independent, so each axis is walked on its own and a tile is a pair of
# walks.
# Ranges are cut off at the borders of the image, and only what reaches beyond a border keeps
# padding.


AXES = (2, 3)
"""Rows and columns of (n, c, h, w)."""


@dataclass(frozen=True)
class Region:
    """A part of a network that is computed tile by tile: local nodes as a graph."""

    graph: Graph

    @cached_property
    def rules(self) -> Mapping[str, SliceRules]:
        """Slice rules of every node at its whole shapes."""
        return {node.name: rules_of(self.graph, node) for node in self.graph.nodes}

    def bounds(self, axis: int, count: int) -> list[dict[str, Range]]:
        """Return what each of about `count` tiles along an axis writes of every output.

        A unit is one entry of the coarsest tensor, so that strides rarely tell tiles apart; the
        last tile takes what is left.
        """
        types, names = self.graph.types, self.graph.outputs
        coarse = min(types[n].shape[axis] for node in self.graph.nodes for n in node.outputs)
        size = {n: types[n].shape[axis] for n in names}
        grain = {n: -(-size[n] // coarse) for n in names}
        units = max(-(-size[n] // grain[n]) for n in names)
        step = -(-units // count)
        inner = [u for u in range(step, units, step) if all(u * grain[n] < size[n] for n in names)]
        return [
            {n: (low * grain[n], size[n] if high is None else high * grain[n]) for n in names}
            for low, high in zip([0, *inner], [*inner, None], strict=True)
        ]


def rules_of(graph: Graph, node: Node) -> SliceRules:
    """Return the slice rules of a node at its shapes."""
    return operator_of(node.op).slice_rules([t.shape for t in graph.in_types(node)], node.attrs)


def obstacle(graph: Graph, node: Node) -> str:
    """Return why a node cannot be computed tile by tile, or "" if it can."""
    if any(len(t.shape) != 4 or t.shape[2] * t.shape[3] == 1 for t in graph.out_types(node)):
        return "its result is no image (n, c, h, w)"
    try:
        rules = rules_of(graph, node)
    except AscendLabError as error:
        return str(error)
    ways = []
    for axis in AXES:
        rule = rules.axes[axis]
        if not rule.splits or set(rule.joins) != {axis}:
            return f"axis {axis}: {rule.reason or 'pieces cannot be joined'}"
        if rule.grain != 1 or any(s.axis != axis or s.grain != 1 for s in rule.sources):
            return f"axis {axis} comes from another axis"
        ways.append({node.inputs[s.input] for s in rule.sources})
    if ways[0] != ways[1] or any(name in graph.constants for name in ways[0]):
        return "an operand is repeated along one axis only, or a constant image"
    return ""


def whole_inputs(graph: Graph, node: Node) -> set[str]:
    """Return the activations that every tile of a local node reads whole."""
    cut_up = {node.inputs[s.input] for s in rules_of(graph, node).axes[2].sources}
    return {n for n in node.inputs if n not in cut_up and n not in graph.constants}


@dataclass(frozen=True, slots=True)
class Walk:
    """One axis of a tile: the range of every tensor it computes, and how every node is cut."""

    axis: int
    wanted: Mapping[str, Range]
    need: Mapping[str, Range]
    parts: Mapping[str, Cut]

    def own(self, name: str, span: Range) -> Range:
        """Return a range of a tensor counted from the first entry the tile has."""
        return span[0] - self.need[name][0], span[1] - self.need[name][0]

    def key(self, graph: Graph) -> Any:
        """Return what tiles that can share a graph have in common."""
        nodes = []
        for node in graph.nodes:
            part = self.parts[node.name]
            reads = zip(node.inputs, part.ranges, strict=True)
            inner = tuple(self.own(n, r[self.axis]) for n, r in reads if self.axis in r)
            nodes.append((repr(sorted(part.attrs.items())), inner))
        widths = tuple(high - low for low, high in self.need.values())
        return tuple(nodes), widths, tuple(self.own(n, r) for n, r in self.wanted.items())


def walk(region: Region, axis: int, wanted: Mapping[str, Range]) -> Walk:
    """Return what a tile needs along an axis; raise `ShapeError` if it would read padding only."""
    graph, need, parts = region.graph, dict(wanted), {}
    for node in reversed(graph.nodes):
        span = hull(need[name] for name in node.outputs if name in need)
        need.update(dict.fromkeys(node.outputs, span))
        shapes = [t.shape for t in graph.in_types(node)]
        part = cut(region.rules[node.name], shapes, node.attrs, axis, span)
        parts[node.name] = part
        for name, ranges in zip(node.inputs, part.ranges, strict=True):
            if axis in ranges:
                need[name] = hull(r for r in (need.get(name), ranges[axis]) if r)
    return Walk(axis, wanted, need, parts)


def hull(ranges: Iterable[Range]) -> Range:
    """Return the smallest range that holds all."""
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def tile_graph_of(region: Region, rows: Walk, cols: Walk, name: str) -> Graph:
    """Return the graph of one kind of tile; its outputs are in the order of the region's.

    Where one reader needs less of a tensor than another, a `slice` cuts its part out.
    """
    work = _TileBuilder(region, rows, cols)
    for node in region.graph.nodes:
        work.add(node)
    outs = tuple(work.part(n, rows.wanted[n], cols.wanted[n]) for n in region.graph.outputs)
    used = {n for node in work.nodes for n in node.inputs} | set(outs)
    constants = {n: c for n, c in region.graph.constants.items() if n in used}
    inputs = region.graph.inputs
    return Graph(name, inputs, outs, tuple(work.nodes), work.types, constants)


class _TileBuilder:
    """The nodes of a tile so far; tensors keep the names they have in the region."""

    def __init__(self, region: Region, rows: Walk, cols: Walk) -> None:
        self.region, self.rows, self.cols = region, rows, cols
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = dict(region.graph.types)
        for name in rows.need:
            kind, sizes = self.types[name], (_width(rows, name), _width(cols, name))
            self.types[name] = replace(kind, shape=(*kind.shape[:2], *sizes))

    def add(self, node: Node) -> None:
        """Append a node with the operands and attributes of this tile."""
        first = self.rows.parts[node.name]
        shapes = [
            (*t.shape[:2], r[2][1] - r[2][0], *t.shape[3:]) if 2 in r else t.shape
            for t, r in zip(self.region.graph.in_types(node), first.ranges, strict=True)
        ]
        rules = operator_of(node.op).slice_rules(shapes, first.attrs)
        second = cut(rules, shapes, first.attrs, 3, self.cols.need[node.output])
        reads = [
            self.part(name, r[2], c[3]) if 2 in r else name
            for name, r, c in zip(node.inputs, first.ranges, second.ranges, strict=True)
        ]
        attrs = given_attrs(node.op, dict(second.attrs))
        self.nodes.append(replace(node, inputs=tuple(reads), attrs=attrs))

    def part(self, name: str, rows: Range, cols: Range) -> str:
        """Return the name of a part of a tensor of the tile, cut out once for all readers."""
        (top, bottom), (left, right) = self.rows.own(name, rows), self.cols.own(name, cols)
        whole = self.types[name].shape
        if (0, 0, top, left, *whole[:2], bottom, right) == (0, 0, 0, 0, *whole):
            return name
        begin, end = (0, 0, top, left), (*whole[:2], bottom, right)
        new = f"{name}.{top}_{bottom}_{left}_{right}"
        if new not in self.types:
            shape = tuple(b - a for a, b in zip(begin, end, strict=True))
            self.types[new] = replace(self.types[name], shape=shape)
            self.nodes.append(Node(new, "slice", (name,), (new,), {"begin": begin, "end": end}))
        return new


def _width(walked: Walk, name: str) -> int:
    low, high = walked.need[name]
    return high - low


def part_of(graph: Graph, nodes: Sequence[Node], name: str) -> Graph:
    """Return consecutive nodes as a graph that writes what is read outside them."""
    inside = {node.name for node in nodes}
    written = {n: None for node in nodes for n in node.outputs}
    read = {n: None for node in nodes for n in node.inputs if n not in written}
    outs = tuple(
        n for n in written
        if n in graph.outputs or any(r.name not in inside for r in graph.readers[n])
    )  # fmt: skip
    constants = {n: graph.constants[n] for n in read if n in graph.constants}
    inputs = tuple(n for n in read if n not in constants)
    types = {n: graph.types[n] for n in (*read, *written)}
    return Graph(name, inputs, outs, tuple(nodes), types, constants)
