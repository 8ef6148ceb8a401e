"""Which part of every tensor each slice of a region computes: slice rules walked backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.subgraph.regions import Region, SlicePlan, axis_number
from ascend_lab.errors import InputError
from ascend_lab.graph import Constant, Fill, Graph, Node, TensorType, infer, pruned, verify
from ascend_lab.graph.draft import given_attrs
from ascend_lab.graph.slice import hull, part_of, rules_of
from ascend_lab.ops.slicing import AxisRule, Cut, Range, SliceRules, cut


@dataclass(frozen=True)
class Ranges:
    """How a part of a graph is sliced: the axis of every tensor cut, and ranges slice by slice.

    `wanted` are the ranges of the part's outputs, `spans` what each slice computes of each node's
    results, by (node name, slice); a node has none where a slice finds all it needs computed.
    """

    part: Graph
    axes: Mapping[str, int]
    wanted: list[dict[str, Range]]
    spans: Mapping[tuple[str, int], Range]
    rules: Mapping[str, SliceRules]

    def cut(self, node: Node, span: Range) -> Cut:
        """Return what a slice of a node's results needs."""
        return _cut(self.part, node, self.rules[node.name], self.axes, span)


def ranges_of(part: Graph, region: Region) -> Ranges:
    """Return the ranges of all slices.

    Raises `InputError` where a tensor is needed whole, or along two axes; `ShapeError` where a
    slice would read padding only, or part of what belongs together.
    """
    rules = {node.name: rules_of(part, node) for node in part.nodes}
    axes = _axes(part, region, rules)
    sizes = {n: region.spans(part.types[n].shape[axes[n]]) for n in part.outputs}
    wanted = [{n: sizes[n][i] for n in part.outputs} for i in range(len(region.parts))]
    needs = [_needs(part, rules, axes, one) for one in wanted]
    spans: dict[tuple[str, int], Range] = {}
    for node in part.nodes:
        done: int | None = None
        for i, need in enumerate(needs):
            low, high = need[node.output]
            if region.halo == "store" and done is not None:
                low = done
            if low < high:
                spans[node.name, i] = low, high
                done = high
    return Ranges(part, axes, wanted, spans, rules)


def _rule(node: Node, rules: SliceRules, axes: Mapping[str, int]) -> tuple[int, AxisRule]:
    """Return the axis of a node's first output that is cut, and its rule."""
    place, name = next((i, n) for i, n in enumerate(node.outputs) if n in axes)
    for axis, rule in enumerate(rules.axes):
        if rule.joins[place] == axes[name] and rule.splits:
            return axis, rule
    reasons = {r.reason for r in rules.axes if r.joins[place] == axes[name]}
    got = f"{node.name} ({node.op}): {' '.join(reasons) or 'no such axis'}"
    raise InputError(f"axis {axes[name]} of {name} in slices", got, "end the region before it")


def _axes(part: Graph, region: Region, rules: Mapping[str, SliceRules]) -> dict[str, int]:
    """Return the axis along which each tensor is cut, from the outputs backwards."""
    found = {n: axis_number(region.axis, part.types[n], n) for n in part.outputs}
    whole: dict[str, str] = {}
    for node in reversed(part.nodes):
        if not any(name in found for name in node.outputs):
            break
        _, rule = _rule(node, rules[node.name], found)
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
    return found


def _needs(
    part: Graph, rules: Mapping[str, SliceRules], axes: Mapping[str, int],
    wanted: Mapping[str, Range],
) -> dict[str, Range]:  # fmt: skip
    """Return what one slice needs of every tensor it cuts."""
    need = dict(wanted)
    for node in reversed(part.nodes):
        span = hull(need[name] for name in node.outputs if name in need)
        need.update(dict.fromkeys(node.outputs, span))
        piece = _cut(part, node, rules[node.name], axes, span)
        for name, taken in zip(node.inputs, piece.ranges, strict=True):
            if name in part.producers:
                need[name] = _joined((need.get(name), taken.get(axes[name])))
    return need


def _joined(ranges: Iterable[Range | None]) -> Range:
    return hull(r for r in ranges if r)


def _cut(part: Graph, node: Node, rules: SliceRules, axes: Mapping[str, int], span: Range) -> Cut:
    axis, _ = _rule(node, rules, axes)
    shapes = [t.shape for t in part.in_types(node)]
    return cut(rules, shapes, node.attrs, axis, span)


# A graph in slices: equal in value, other in the order of work and the size of each piece.
#
# Every slice of a node is a node of its own on part of the operands, with the attributes its
# slice
# rule gives it. Weights that are not cut stay shared, so that they are found in L2 again.


Taken = Mapping[int, Range]


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
    """The new graph as far as it is built; `pieces` are slices of tensors by name."""

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
            axis = ranges.axes[name]
            parts = [
                self.piece(name, axis, one[name], i, shared) for i, one in enumerate(ranges.wanted)
            ]
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
        size = self.types[name].shape[axis]
        whole = [(i, (0, size), name)]
        known = [p for p in self.pieces.get(name, whole) if shared or p[0] == i]
        low, high = span
        for _, (start, end), new in known:
            if start <= low and high <= end:
                return self.cut(new, axis, (low - start, high - start))
        parts = []
        for _, (start, end), new in sorted(known, key=lambda p: p[1]):
            if start < high and low < end:
                inner = max(low, start) - start, min(high, end) - start
                parts.append(self.cut(new, axis, inner))
        key = (name, axis, span)
        if key not in self.cuts:
            new = self.new_name(f"{name}.{low}_{high}")
            self.cuts[key] = self.append("concat", parts, {"axis": axis}, new)
        return self.cuts[key]

    def cut(self, name: str, axis: int, span: Range) -> str:
        """Return entries of an axis of a tensor, cut out once for all readers."""
        shape = self.types[name].shape
        if span == (0, shape[axis]):
            return name
        key = (name, axis, span)
        if key not in self.cuts:
            begin = tuple(span[0] if a == axis else 0 for a in range(len(shape)))
            end = tuple(span[1] if a == axis else n for a, n in enumerate(shape))
            new = self.new_name(f"{name}.{span[0]}_{span[1]}")
            self.cuts[key] = self.append("slice", [name], {"begin": begin, "end": end}, new)
        return self.cuts[key]

    def constant(self, name: str, taken: Taken) -> str:
        """Return a part of a constant; the constant itself if all of it is taken."""
        old = self.constants[name]
        shape = old.type.shape
        cuts = {a: span for a, span in taken.items() if span != (0, shape[a])}
        if not cuts:
            return name
        key = (name, *sorted(cuts.items()))
        if key not in self.cuts:
            index = tuple(slice(*cuts[a]) if a in cuts else slice(None) for a in range(len(shape)))
            sizes = tuple(cuts[a][1] - cuts[a][0] if a in cuts else n for a, n in enumerate(shape))
            kind = TensorType(sizes, old.type.dtype)
            data = old.data if isinstance(old.data, Fill) else partial(_part, old, index)
            ends = "_".join(f"{low}_{high}" for low, high in cuts.values())
            new = self.new_name(f"{name}.{ends}")
            self.types[new], self.constants[new] = kind, Constant(kind, data)
            self.cuts[key] = new
        return self.cuts[key]

    def append(
        self, op: str, reads: list[str], attrs: Mapping[str, Any], name: str,
        kinds: tuple[TensorType, ...] = (),
    ) -> str:  # fmt: skip
        """Append a node that writes one tensor of its name; return it."""
        found = kinds or infer(op, [self.types[n] for n in reads], attrs)
        self.types[name] = found[0]
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
    count = len(region.parts)
    if region.order == "depth":
        yield from ((node, i) for i in range(count) for node in part.nodes)
        return
    order = range(count)
    for place, node in enumerate(part.nodes):
        if place and not node.has("lanes"):
            order = order[::-1]
        yield from ((node, i) for i in order)
