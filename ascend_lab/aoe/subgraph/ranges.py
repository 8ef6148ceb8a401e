"""Which part of every tensor each slice of a region computes: slice rules walked backwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ascend_lab.aoe.subgraph.regions import Region, axis_number
from ascend_lab.errors import InputError
from ascend_lab.graph import Graph, Node
from ascend_lab.graph.tiling.cuts import hull, rules_of
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
