"""A graph in slices: equal in value, other in the order of work and the size of each piece.

Slice rules walked backwards say which part of every tensor each slice computes. Every slice of a
node is a node of its own on part of the operands, with the attributes its rule gives it. Weights
that are not cut stay shared, so that they are found in L2 again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.subgraph.regions import Region, SlicePlan, axis_number
from ascend_lab.errors import InputError
from ascend_lab.graph import Constant, Fill, Graph, Node, TensorType, infer, pruned, verify
from ascend_lab.graph.draft import given_attrs
from ascend_lab.graph.layout import ELEMENTWISE
from ascend_lab.graph.slice import hull, part_of, rules_of
from ascend_lab.ops.slicing import Cut, Range, SliceRules, cut


@dataclass(frozen=True)
class Ranges:
    """How a part of a graph is sliced: the axis of every tensor cut, and ranges slice by slice.

    `along` is the axis of each node's first output that is cut. `wanted` are the ranges of the
    part's outputs, `spans` what each slice computes of each node's results, by (node name, slice);
    a node has none where a slice finds all it needs computed.
    """

    part: Graph
    rules: Mapping[str, SliceRules]
    axes: Mapping[str, int]
    along: Mapping[str, int]
    wanted: list[dict[str, Range]]
    spans: dict[tuple[str, int], Range]

    def cut(self, node: Node, span: Range) -> Cut:
        """Return what a slice of a node's results needs."""
        shapes = [t.shape for t in self.part.in_types(node)]
        return cut(self.rules[node.name], shapes, node.attrs, self.along[node.name], span)

    def needs(self, wanted: Mapping[str, Range]) -> dict[str, Range]:
        """Return what one slice needs of every tensor it cuts."""
        need = dict(wanted)
        for node in reversed(self.part.nodes):
            span = hull(need[name] for name in node.outputs if name in need)
            need.update(dict.fromkeys(node.outputs, span))
            for name, taken in zip(node.inputs, self.cut(node, span).ranges, strict=True):
                if name in self.part.producers:
                    known = need.get(name), taken.get(self.axes[name])
                    need[name] = hull(r for r in known if r)
        return need


def ranges_of(part: Graph, region: Region) -> Ranges:
    """Return the ranges of all slices.

    Raises `InputError` where a tensor is needed whole, or along two axes; `ShapeError` where a
    slice would read padding only, or part of what belongs together.
    """
    rules = {node.name: rules_of(part, node) for node in part.nodes}
    axes, along = _axes(part, region, rules)
    sizes = {n: region.spans(part.types[n].shape[axes[n]]) for n in part.outputs}
    wanted = [{n: sizes[n][i] for n in part.outputs} for i in range(len(region.parts))]
    found = Ranges(part, rules, axes, along, wanted, {})
    needs = [found.needs(one) for one in wanted]
    for node in part.nodes:
        done: int | None = None
        for i, need in enumerate(needs):
            low, high = need[node.output]
            if region.halo == "store" and done is not None:
                low = done
            if low < high:
                found.spans[node.name, i] = low, high
                done = high
    return found


def _axes(
    part: Graph, region: Region, rules: Mapping[str, SliceRules]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the axis along which each tensor is cut, and each node, from the outputs backwards."""
    found = {n: axis_number(region.axis, part.types[n], n) for n in part.outputs}
    along: dict[str, int] = {}
    whole: dict[str, str] = {}
    for node in reversed(part.nodes):
        cut_up = [(i, n) for i, n in enumerate(node.outputs) if n in found]
        if not cut_up:  # somebody needs it whole
            break
        place, name = cut_up[0]
        axes = [(axis, rule) for axis, rule in enumerate(rules[node.name].axes)
                if rule.joins[place] == found[name]]  # fmt: skip
        splits = [(axis, rule) for axis, rule in axes if rule.splits]
        if not splits:
            reasons = " ".join({rule.reason for _, rule in axes}) or "no such axis"
            needed, got = f"axis {found[name]} of {name} in slices", f"{node.name} ({node.op}): "
            raise InputError(needed, got + reasons, "end the region before it")
        along[node.name], rule = splits[0]
        pairs = list(zip(node.outputs, rule.joins, strict=True))
        reads = {s.input: s.axis for s in rule.sources}
        pairs += [(node.inputs[i], axis) for i, axis in reads.items()]
        for name, axis in pairs:
            if found.setdefault(name, axis) != axis and name not in part.constants:
                got = f"axes {found[name]} and {axis}, {node.name}"
                raise InputError(f"{name} cut along one axis", got, "end the region before it")
        for i, name in enumerate(node.inputs):
            if i not in reads:
                whole.setdefault(name, node.name)
    for name in part.producers:
        if name in whole:
            got = f"{whole[name]}, which needs it whole"
            raise InputError(f"{name} in slices", got, "end the region before it")
    return found, along


def sliced(graph: Graph, plan: SlicePlan) -> Graph:
    """Return the graph with each region of the plan in slices; raises as `ranges_of`."""
    work = _Sliced(graph)
    done = 0
    for low, high, region in plan.ranges(graph):
        work.nodes += graph.nodes[done:low]
        part = part_of(graph, graph.nodes[low : high + 1], region.first)
        if len(region.parts) > 1:
            work.add(region, ranges_of(part, region))
        else:
            work.nodes += part.nodes
        done = high + 1
    work.nodes += graph.nodes[done:]
    found = replace(graph, nodes=tuple(work.nodes), types=work.types, constants=work.constants)
    return verify(pruned(found))


class _Sliced:
    """The new graph as far as it is built.

    `pieces` are slices of tensors by name, `cuts` what is cut out of tensors, once for all readers.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.types = dict(graph.types)
        self.constants = dict(graph.constants)
        self.pieces: dict[str, list[tuple[int, Range, str]]] = {}
        self.cuts: dict[Any, str] = {}

    def add(self, region: Region, ranges: Ranges) -> None:
        """Append the nodes of a region, slice by slice, and the joins of its outputs."""
        part, shared = ranges.part, region.halo == "store"
        self.pieces.clear()
        for node, i in _steps(part, region):
            if (node.name, i) in ranges.spans:
                self.slice_of(node, i, ranges, shared)
        for name in part.outputs:
            axis, spans = ranges.axes[name], [one[name] for one in ranges.wanted]
            parts = [self.piece(name, axis, span, i, shared) for i, span in enumerate(spans)]
            self.append("concat", parts, {"axis": axis}, name, (self.types[name],))

    def slice_of(self, node: Node, i: int, ranges: Ranges, shared: bool) -> None:
        """Append slice i of a node."""
        span = ranges.spans[node.name, i]
        found = ranges.cut(node, span)
        reads = []
        for name, taken in zip(node.inputs, found.ranges, strict=True):
            if name in self.constants:
                reads.append(self.constant(name, taken))
            elif ranges.axes.get(name) in taken:
                axis = ranges.axes[name]
                reads.append(self.piece(name, axis, taken[axis], i, shared))
            else:
                reads.append(name)
        kinds = infer(node.op, [self.types[n] for n in reads], found.attrs)
        names = [self.new_name(f"{name}.{i}") for name in node.outputs]
        self.types.update(zip(names, kinds, strict=True))
        title = names[0] if node.name == node.output else f"{node.name}.{i}"
        attrs = given_attrs(node.op, dict(found.attrs))
        self.nodes.append(Node(title, node.op, tuple(reads), tuple(names), attrs))
        for name, new in zip(node.outputs, names, strict=True):
            self.pieces.setdefault(name, []).append((i, span, new))

    def piece(self, name: str, axis: int, span: Range, i: int, shared: bool) -> str:
        """Return a part of a tensor, from the slices there are or from the whole tensor."""
        whole = [(i, (0, self.types[name].shape[axis]), name)]
        known = [(r, new) for at, r, new in self.pieces.get(name, whole) if shared or at == i]
        low, high = span
        for (start, end), new in known:
            if start <= low and high <= end:
                return self.cut(new, axis, (low - start, high - start))
        parts = [
            self.cut(new, axis, (max(low, start) - start, min(high, end) - start))
            for (start, end), new in sorted(known, key=lambda pair: pair[0])
            if start < high and low < end
        ]
        key = (name, axis, span)
        if key not in self.cuts:
            new = self.new_name(f"{name}.{low}_{high}")
            self.cuts[key] = self.append("concat", parts, {"axis": axis}, new)
        return self.cuts[key]

    def cut(self, name: str, axis: int, span: Range) -> str:
        """Return entries of an axis of a tensor."""
        shape = self.types[name].shape
        if span == (0, shape[axis]):
            return name
        key = (name, axis, span)
        if key not in self.cuts:
            begin, end = [0] * len(shape), list(shape)
            begin[axis], end[axis] = span
            new = self.new_name(f"{name}.{span[0]}_{span[1]}")
            attrs = {"begin": tuple(begin), "end": tuple(end)}
            self.cuts[key] = self.append("slice", [name], attrs, new)
        return self.cuts[key]

    def constant(self, name: str, taken: Mapping[int, Range]) -> str:
        """Return a part of a constant; the constant itself if all of it is taken."""
        old = self.constants[name]
        cuts = {a: span for a, span in taken.items() if span != (0, old.type.shape[a])}
        if not cuts:
            return name
        key = (name, *sorted(cuts.items()))
        if key not in self.cuts:
            spans = [cuts.get(a, (0, size)) for a, size in enumerate(old.type.shape)]
            kind = TensorType(tuple(high - low for low, high in spans), old.type.dtype)
            index = tuple(slice(low, high) for low, high in spans)
            data = old.data if isinstance(old.data, Fill) else partial(_part, old, index)
            ends = "_".join(f"{low}_{high}" for low, high in cuts.values())
            new = self.cuts[key] = self.new_name(f"{name}.{ends}")
            self.types[new], self.constants[new] = kind, Constant(kind, data)
        return self.cuts[key]

    def append(
        self, op: str, reads: list[str], attrs: Mapping[str, Any], name: str,
        kinds: tuple[TensorType, ...] = (),
    ) -> str:  # fmt: skip
        """Append a node that writes one tensor of its name; return it."""
        self.types[name] = (kinds or infer(op, [self.types[n] for n in reads], attrs))[0]
        self.nodes.append(Node(name, op, tuple(reads), (name,), given_attrs(op, dict(attrs))))
        return name

    def new_name(self, wanted: str) -> str:
        """Return a tensor name that is free."""
        while wanted in self.types:
            wanted += "_"
        return wanted


def _part(constant: Constant, index: tuple[slice, ...]) -> NDArray[Any]:
    return np.ascontiguousarray(constant.array()[index])


def _steps(part: Graph, region: Region) -> Iterator[tuple[Node, int]]:
    """Yield nodes and slices in the order in which they run."""
    order = range(len(region.parts))
    if region.order == "depth":
        yield from ((node, i) for i in order for node in part.nodes)
        return
    for place, node in enumerate(part.nodes):
        if place and node.op not in ELEMENTWISE:
            order = order[::-1]
        yield from ((node, i) for i in order)
