"""A graph in slices: equal in value, other in the order of work and the size of each piece.

A plan is data: regions of a graph, the axis each is cut along, sizes and order. Slice rules walked
backwards say which part of every tensor each slice computes. Every slice of a node is a node of its
own on part of the operands, with the attributes its rule gives it. Weights that are not cut stay
shared, so that they are found in L2 again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ascend_lab.compiler import (
    Compiled,
    Constant,
    Fill,
    Graph,
    Node,
    Road,
    TensorType,
    infer,
    pruned,
)
from ascend_lab.compiler.compile import DEFAULT_ROAD
from ascend_lab.compiler.draft import Draft, given_attrs
from ascend_lab.compiler.slice import Rules, all_rules, cut_node, part_of, split_rule, walk
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start
from ascend_lab.operators.ops.slicing import Cut, Range

AXES = ("batch", "channel", "height", "width", "sequence")
ORDERS = ("depth", "zigzag")
HALOS = ("recompute", "store")
HOW = {"one_launch": "one launch", "inside": "kernels chosen for it", "prefetch": "weights ahead"}
"""What a plan says of the whole network, in words."""


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive nodes `first` .. `last` of a graph, computed in slices along an axis.

    `parts` are the slices' sizes in entries of the smallest result: 7 images as (4, 3). `order`:
    "depth" takes each slice through the whole region, "zigzag" each layer through all slices, every
    other layer backwards. `halo`: rows that two slices need are computed twice ("recompute") or
    kept ("store").
    """

    first: str
    last: str
    axis: str
    parts: tuple[int, ...]
    order: str = "depth"
    halo: str = "recompute"

    def __post_init__(self) -> None:
        """Raise `InputError` for an unknown axis, order or halo, or sizes below 1."""
        given = ((self.axis, AXES), (self.order, ORDERS), (self.halo, HALOS))
        for word, known in given:
            if word not in known:
                raise InputError(f"one of {', '.join(known)}", repr(word), "choose one")
        if not self.parts or min(self.parts) < 1:
            raise InputError("sizes of at least 1", str(self.parts), "state each slice's size")

    def spans(self, size: int) -> list[Range]:
        """Return the ranges of an axis, cut in proportion; `InputError` for an empty slice."""
        scale = -(-size // sum(self.parts))
        ends = [min(end * scale, size) for end in accumulate(self.parts)]
        found = list(pairwise([0, *ends[:-1], size]))
        if any(low >= high for low, high in found):
            raise InputError(f"slices of {size} entries", str(self.parts), "use fewer or smaller")
        return found

    def __str__(self) -> str:
        """Return one line."""
        sizes = "+".join(map(str, self.parts))
        halo = "" if self.axis == "batch" else f", halo {self.halo}"
        return f"{self.first} .. {self.last}: {self.axis} {sizes}, {self.order}{halo}"


def even(size: int, count: int) -> tuple[int, ...]:
    """Return a size in `count` parts that differ by at most 1, the larger ones first."""
    return tuple(size // count + (i < size % count) for i in range(count))


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Regions in the order of the graph, no two overlapping; what is in none stays whole.

    `one_launch`: all kernels are one super kernel. `prefetch`: weights are loaded into L2 ahead.
    `inside`: borders of kernels are decided at the price of a barrier; only with `one_launch`.
    """

    regions: tuple[Region, ...] = ()
    one_launch: bool = False
    prefetch: bool = False
    inside: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` for kernels of one launch without it."""
        if self.inside and not self.one_launch:
            raise InputError("one_launch for inside", "separate launches", "set one_launch, too")

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON."""
        rows = [{**asdict(region), "parts": list(region.parts)} for region in self.regions]
        return {"regions": rows, **{name: getattr(self, name) for name in HOW}}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "SlicePlan":
        """Return the plan of plain data, as `plain` wrote it."""
        rows = ({**one, "parts": tuple(one["parts"])} for one in data["regions"])
        regions = tuple(Region(**row) for row in rows)
        known = {"inside": False, **data}  # plans of before have none
        return cls(regions, **{name: known[name] is True for name in HOW})

    def road(self, chip: Chip, road: Road = DEFAULT_ROAD) -> Road:
        """Return the road on which kernels get the plan's borders; cores of two kinds meet."""
        within: Start = "inside" if chip.combined else "across"
        return replace(road, start=within) if self.inside else road

    def launched(self, compiled: Compiled) -> Compiled:
        """Return a compiled network with its kernels launched as the plan says."""
        scopes = ((0, len(compiled.tasks)),) if self.one_launch else ()
        return replace(
            compiled, scopes=scopes, prefetch=self.prefetch, spilled=frozenset(_borders(compiled))
        )

    def ranges(self, graph: Graph) -> list[tuple[int, int, Region]]:
        """Return first and last position of every region; `InputError` out of order."""
        place = {node.name: i for i, node in enumerate(graph.nodes)}
        found = []
        end = -1
        for region in self.regions:
            if missing := [n for n in (region.first, region.last) if n not in place]:
                raise InputError(f"nodes of {graph.name}", missing[0], "name nodes of this graph")
            low = place[region.first]
            high = place[region.last]
            if not end < low <= high:
                needed = f"regions in order, each behind node {end}"
                raise InputError(needed, f"{region.first} .. {region.last}: {low} .. {high}")
            found.append((low, high, region))
            end = high
        return found

    def __str__(self) -> str:
        """Return one line a region, and one for launches and prefetch if they are not as ever."""
        lines = [str(region) for region in self.regions] or ["no slices"]
        how = [word for name, word in HOW.items() if getattr(self, name)]
        return "\n".join([*lines, *filter(None, [", ".join(how)])])


def _borders(compiled: Compiled) -> Iterator[str]:
    """Yield the tensors that slices of images are cut out of, or are joined to.

    They live as long as all slices of a region and would leave these no room in a buffer.
    """
    graph = compiled.graph
    for task in compiled.tasks:
        node = graph.node(task.name) if task.lowered is None else None
        if node is not None and node.op == "concat" and node.attr("axis", 0) == 0:
            yield node.output
        if node is not None and node.op == "slice":
            whole = graph.types[node.inputs[0]]
            part = graph.types[node.output]
            if whole.shape[:1] != part.shape[:1]:
                yield node.inputs[0]


def axis_number(axis: str, kind: TensorType, name: str) -> int:
    """Return which axis of a tensor a word means; raise `InputError` if it has none."""
    rank = len(kind.shape)
    places = {"batch": 0, "sequence": rank - 2, "channel": 1 if rank == 4 else rank - 1}
    if rank == 4:
        places |= {"height": 2, "width": 3}
    number = places.get(axis, -1)
    if not 0 <= number < rank:
        raise InputError(f"{name} with an axis {axis}", str(kind), "end the region before it")
    return number


# -- which part of every tensor each slice computes ------------------------------------------------


@dataclass(frozen=True)
class Ranges:
    """How a part of a graph is sliced: the axis of every tensor cut, and ranges slice by slice.

    `wanted` are the ranges of the part's outputs, `spans` what each slice computes of each node's
    results, by (node name, slice); a node has none where a slice finds all it needs computed.
    """

    part: Graph
    rules: Rules
    axes: Mapping[str, int]
    wanted: list[dict[str, Range]]
    spans: Mapping[tuple[str, int], Range]

    def cut(self, node: Node, span: Range) -> Cut:
        """Return what a slice of a node's results needs."""
        return cut_node(self.part, node, self.rules[node.name], self.axes, span)


def ranges_of(part: Graph, region: Region) -> Ranges:
    """Return the ranges of all slices.

    Raises `InputError` where a tensor is needed whole, or along two axes; `ShapeError` where a
    slice would read padding only, or part of what belongs together.
    """
    rules = all_rules(part)
    axes = _axes(part, region, rules)
    sizes = {n: region.spans(part.types[n].shape[axes[n]]) for n in part.outputs}
    wanted = [{n: sizes[n][i] for n in part.outputs} for i in range(len(region.parts))]
    needs = [walk(part, rules, axes, one).need for one in wanted]
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
    return Ranges(part, rules, axes, wanted, spans)


def _axes(part: Graph, region: Region, rules: Rules) -> dict[str, int]:
    """Return the axis along which each tensor is cut, from the outputs backwards."""
    found = {n: axis_number(region.axis, part.types[n], n) for n in part.outputs}
    whole: dict[str, str] = {}
    for node in reversed(part.nodes):
        if not any(name in found for name in node.outputs):  # somebody needs it whole
            break
        _, rule = split_rule(node, rules[node.name], found)
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


def sliced(graph: Graph, plan: SlicePlan) -> Graph:
    """Return the graph with each region of the plan in slices; raises as `ranges_of`."""
    draft = Draft(graph, ())
    done = 0
    cuts: dict[Any, str] = {}

    def keep(nodes: Sequence[Node]) -> None:
        for node in nodes:
            draft.put(node, *(graph.types[name] for name in node.outputs))

    for low, high, region in plan.ranges(graph):
        keep(graph.nodes[done:low])
        part = part_of(graph, graph.nodes[low : high + 1], region.first)
        if len(region.parts) > 1:
            _Slices(draft, cuts, ranges_of(part, region), region).add()
        else:
            keep(part.nodes)
        done = high + 1
    keep(graph.nodes[done:])
    return draft.finish()


def one_slice(part: Graph, region: Region) -> tuple[Graph, dict[str, str]]:
    """Return the first slice of a part as a graph of its own, and what its tensors are parts of.

    What it reads of the part's inputs is all its inputs have. Raises as `ranges_of`.
    """
    ranges = ranges_of(part, region)
    need = walk(part, ranges.rules, ranges.axes, ranges.wanted[0]).need
    draft = Draft(part, ())
    work = _Slices(draft, {}, ranges, region)
    for name in part.inputs:
        if name in ranges.axes and name in need:
            low, high = need[name]
            shape = list(part.types[name].shape)
            shape[ranges.axes[name]] = high - low
            draft.types[name] = replace(part.types[name], shape=tuple(shape))
            work.pieces[name] = [(0, need[name], name)]
    for node in part.nodes:
        if (node.name, 0) in ranges.spans:
            work.slice_of(node, 0)
    wanted = ranges.wanted[0]
    outs = tuple(work.piece(n, ranges.axes[n], wanted[n], 0) for n in part.outputs)
    graph = replace(
        part,
        outputs=outs,
        nodes=tuple(draft.nodes.values()),
        types=draft.types,
        constants=draft.constants,
    )
    whole = {new: name for name, pieces in work.pieces.items() for _, _, new in pieces}
    return pruned(graph), whole | dict(zip(outs, part.outputs, strict=True))


class _Slices:
    """The slices of a region, added to a graph under construction.

    `pieces` are slices of tensors by name; `cuts`, of all regions, what is cut out of tensors, once
    for all readers.
    """

    def __init__(self, draft: Draft, cuts: dict[Any, str], ranges: Ranges, region: Region) -> None:
        self.draft = draft
        self.cuts = cuts
        self.ranges = ranges
        self.region = region
        self.pieces: dict[str, list[tuple[int, Range, str]]] = {}

    def add(self) -> None:
        """Append the nodes of the region, slice by slice, and the joins of its outputs."""
        ranges = self.ranges
        for node, i in _steps(ranges.part, self.region):
            if (node.name, i) in ranges.spans:
                self.slice_of(node, i)
        for name in ranges.part.outputs:
            axis = ranges.axes[name]
            spans = [one[name] for one in ranges.wanted]
            parts = [self.piece(name, axis, span, i) for i, span in enumerate(spans)]
            self.append("concat", parts, {"axis": axis}, name, self.draft.types[name])

    def slice_of(self, node: Node, i: int) -> None:
        """Append slice i of a node."""
        draft = self.draft
        axes = self.ranges.axes
        span = self.ranges.spans[node.name, i]
        found = self.ranges.cut(node, span)
        reads = []
        for name, taken in zip(node.inputs, found.ranges, strict=True):
            if name in draft.constants:
                reads.append(self.constant(name, taken))
            elif axes.get(name) in taken:
                reads.append(self.piece(name, axes[name], taken[axes[name]], i))
            else:
                reads.append(name)
        names = tuple(draft.new_name(f"{name}.{i}") for name in node.outputs)
        title = names[0] if node.name == node.output else f"{node.name}.{i}"
        attrs = given_attrs(node.op, dict(found.attrs))
        kinds = infer(node.op, [draft.types[n] for n in reads], found.attrs)
        draft.put(Node(title, node.op, tuple(reads), names, attrs), *kinds)
        for name, new in zip(node.outputs, names, strict=True):
            self.pieces.setdefault(name, []).append((i, span, new))

    def piece(self, name: str, axis: int, span: Range, i: int) -> str:
        """Return a part of a tensor for slice i, from the slices there are or the whole tensor."""
        whole = [(i, (0, self.size(name, axis)), name)]
        shared = self.region.halo == "store"
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
        return self.once((name, axis, span), "concat", parts, {"axis": axis})

    def size(self, name: str, axis: int) -> int:
        """Return the entries of an axis of a tensor."""
        return self.draft.types[name].shape[axis]

    def cut(self, name: str, axis: int, span: Range) -> str:
        """Return entries of an axis of a tensor."""
        if span == (0, self.size(name, axis)):
            return name
        shape = self.draft.types[name].shape
        begin = [0] * len(shape)
        end = list(shape)
        begin[axis], end[axis] = span
        attrs = {"begin": tuple(begin), "end": tuple(end)}
        return self.once((name, axis, span), "slice", [name], attrs)

    def once(
        self, key: tuple[str, int, Range], op: str, reads: Sequence[str], attrs: Mapping[str, Any]
    ) -> str:
        """Append a node that makes a range of a tensor, if nobody has asked for it before."""
        if key not in self.cuts:
            name, _, (low, high) = key
            new = self.draft.new_name(f"{name}.{low}_{high}")
            self.cuts[key] = self.append(op, reads, attrs, new)
        return self.cuts[key]

    def append(
        self, op: str, reads: Sequence[str], attrs: Mapping[str, Any], name: str, *kinds: TensorType
    ) -> str:
        """Append a node that writes one tensor of its name; return it."""
        node = Node(name, op, tuple(reads), (name,), given_attrs(op, dict(attrs)))
        return self.draft.put(node, *kinds)

    def constant(self, name: str, taken: Mapping[int, Range]) -> str:
        """Return a part of a constant; the constant itself if all of it is taken."""
        old = self.draft.constants[name]
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
            self.cuts[key] = self.draft.add(Constant(kind, data), f"{name}.{ends}")
        return self.cuts[key]


def _part(constant: Constant, index: tuple[slice, ...]) -> np.ndarray:
    return np.ascontiguousarray(constant.array()[index])


def _steps(part: Graph, region: Region) -> Iterator[tuple[Node, int]]:
    """Yield nodes and slices in the order in which they run."""
    order = range(len(region.parts))
    if region.order == "depth":
        yield from ((node, i) for i in order for node in part.nodes)
        return
    for place, node in enumerate(part.nodes):
        if place and not node.has("lanes"):
            order = order[::-1]
        yield from ((node, i) for i in order)
