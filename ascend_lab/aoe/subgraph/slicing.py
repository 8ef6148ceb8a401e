"""Rewrites a graph so that it computes the same values in slices.

A `SlicePlan` names regions of the graph (runs of consecutive nodes), and for each the axis that is
cut, the sizes of the slices and their order. Every operator has a slice rule, which gives the
ranges of its inputs that a range of its output needs: rows 0 .. 7 of a 3 x 3 convolution with
padding 1 need rows 0 .. 8. Applied from the outputs of a region backwards, the rules give the range
of every tensor in every slice. Each node of the region becomes one node per slice, which reads only
these ranges. A weight is cut if a slice needs only a range of it, as with slices of channels;
otherwise all slices read the same weight, which later slices find in L2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, Node, TensorType
from ascend_lab.compiler.compile import DEFAULT_ROAD, Road
from ascend_lab.compiler.draft import Draft, given_attrs, pruned
from ascend_lab.compiler.ir import Constant, Fill, infer
from ascend_lab.compiler.slice import Rules, all_rules, cut_node, part_of, split_rule, walk
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start
from ascend_lab.operators.ops.slicing import Cut, Range

AXES = ("batch", "channel", "height", "width", "sequence")
ORDERS = ("depth", "zigzag")
HALOS = ("recompute", "store")
NETWORK_OPTIONS = {
    "one_launch": "one launch",
    "inside": "kernels chosen for it",
    "prefetch": "weights ahead",
}
"""Options of a plan for the whole network -> its words in the printed plan."""


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive nodes `first` .. `last` of a graph, computed in slices along an axis.

    - parts: the slices' sizes, in entries of the smallest result: (4, 3) for 7 images
    - order: "depth" computes the whole region for one slice before the next slice; "zigzag"
      computes one layer for all slices before the next layer, every other layer backwards, so that
      it starts with the slice that the layer before has just written
    - halo: whether rows that two slices need, for example because of a 3 x 3 kernel, are computed
      twice ("recompute") or stored in memory ("store")
    """

    first: str
    last: str
    axis: str
    parts: tuple[int, ...]
    order: str = "depth"
    halo: str = "recompute"

    def __post_init__(self) -> None:
        """Raise `InputError` for an unknown axis, order or halo, or sizes below 1."""
        choices = ((self.axis, AXES), (self.order, ORDERS), (self.halo, HALOS))
        for choice, allowed in choices:
            if choice not in allowed:
                raise InputError(f"one of {', '.join(allowed)}", repr(choice), "choose one")
        if not self.parts or min(self.parts) < 1:
            raise InputError("sizes of at least 1", str(self.parts), "state each slice's size")

    def slice_ranges(self, size: int) -> list[Range]:
        """Return the ranges of an axis of `size` entries, one per slice.

        Each is its part times ceil(size / sum(parts)) long; the last one is shortened. Parts
        (4, 3) cut 14 rows into (0, 8) and (8, 14), and 13 rows into (0, 8) and (8, 13). Raises
        `InputError` for an empty slice.
        """
        # a tensor with twice the rows of the smallest result has slices twice as long
        scale = -(-size // sum(self.parts))
        ends = [min(end * scale, size) for end in accumulate(self.parts)]
        ranges = list(pairwise([0, *ends[:-1], size]))
        if any(low >= high for low, high in ranges):
            raise InputError(f"slices of {size} entries", str(self.parts), "use fewer or smaller")
        return ranges

    def __str__(self) -> str:
        """Return one line of text: "conv1 .. pool1: batch 4+4, depth"."""
        sizes = "+".join(map(str, self.parts))
        halo = "" if self.axis == "batch" else f", halo {self.halo}"
        return f"{self.first} .. {self.last}: {self.axis} {sizes}, {self.order}{halo}"


def even(size: int, count: int) -> tuple[int, ...]:
    """Divide a size into `count` parts that differ by at most 1, larger first: 8 = 3 + 3 + 2."""
    return tuple(size // count + (i < size % count) for i in range(count))


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Regions in the order of the graph, without overlap; nodes outside them are not sliced.

    - one_launch: all kernels run as one super kernel, with barriers in place of launches
    - prefetch: load weights into L2 before their kernel runs
    - inside: fusion and layouts are chosen for kernels that start at a barrier inside one launch,
      not for kernels with a separate launch each; only with `one_launch`
    """

    regions: tuple[Region, ...] = ()
    one_launch: bool = False
    prefetch: bool = False
    inside: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` for `inside` without `one_launch`."""
        if self.inside and not self.one_launch:
            raise InputError("one_launch for inside", "separate launches", "set one_launch, too")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as dictionaries and lists, ready for JSON."""
        rows = [{**asdict(region), "parts": list(region.parts)} for region in self.regions]
        return {"regions": rows, **{name: getattr(self, name) for name in NETWORK_OPTIONS}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SlicePlan":
        """Return the plan that `as_dict` wrote."""
        regions = [Region(**{**row, "parts": tuple(row["parts"])}) for row in data["regions"]]
        options = {}
        for name in NETWORK_OPTIONS:
            # older files have no "inside"
            value = data.get(name, False) if name == "inside" else data[name]
            options[name] = value is True
        return cls(tuple(regions), **options)

    def road(self, chip: Chip, road: Road = DEFAULT_ROAD) -> Road:
        """Return the compiler options (`Road`) under which the plan's kernels are chosen.

        With `inside` a kernel starts at a barrier of all cores; on chips with separate vector
        cores, at a barrier of cube and vector cores, as is usual there.
        """
        barrier: Start = "inside" if chip.combined else "across"
        return replace(road, start=barrier) if self.inside else road

    def with_launches(self, compiled: Compiled) -> Compiled:
        """Return a compiled network with the launches and the prefetching of the plan.

        Tensors from which slices are cut, or into which they are joined, are marked as spilled: an
        L2 that is a buffer does not hold them.
        """
        # a scope is a range of tasks that share one launch
        scopes = ((0, len(compiled.tasks)),) if self.one_launch else ()
        spilled = frozenset(_border_tensors(compiled))
        return replace(compiled, scopes=scopes, prefetch=self.prefetch, spilled=spilled)

    def ranges(self, graph: Graph) -> list[tuple[int, int, Region]]:
        """Return the positions of the first and last node of every region, with the region.

        Raises `InputError` for unknown nodes, or regions that overlap or are out of order.
        """
        positions = {node.name: i for i, node in enumerate(graph.nodes)}
        placed = []
        end = -1
        for region in self.regions:
            if missing := [n for n in (region.first, region.last) if n not in positions]:
                raise InputError(f"nodes of {graph.name}", missing[0], "name nodes of this graph")
            low = positions[region.first]
            high = positions[region.last]
            if not end < low <= high:
                needed = "regions in order, each from an earlier node to a later one"
                raise InputError(needed, f"{region.first} .. {region.last}: nodes {low} .. {high}")
            placed.append((low, high, region))
            end = high
        return placed

    def __str__(self) -> str:
        """Return one line for each region, and one for options that differ from the defaults."""
        lines = [str(region) for region in self.regions] or ["no slices"]
        options = [text for name, text in NETWORK_OPTIONS.items() if getattr(self, name)]
        if options:
            lines.append(", ".join(options))
        return "\n".join(lines)


def _border_tensors(compiled: Compiled) -> Iterator[str]:
    """Yield the tensors from which slices of a batch are cut, and into which they are joined.

    They are live while all slices of a region run. An L2 that is a buffer would hold them all this
    time and have no room for the slices.
    """
    graph = compiled.graph
    for task in compiled.tasks:
        node = graph.node(task.name) if task.lowered is None else None
        if node is not None and node.op == "concat" and node.attr("axis", 0) == 0:
            yield node.output
        if node is not None and node.op == "slice":
            source = graph.types[node.inputs[0]]
            piece = graph.types[node.output]
            if source.shape[:1] != piece.shape[:1]:
                yield node.inputs[0]


def axis_number(axis: str, tensor_type: TensorType, name: str) -> int:
    """Return the position of a named axis; raise `InputError` if the tensor has no such axis."""
    rank = len(tensor_type.shape)
    # rank 4 is (n, c, h, w), rank 3 (batch, sequence, channel)
    axes_of = {"batch": 0, "sequence": rank - 2, "channel": 1 if rank == 4 else rank - 1}
    if rank == 4:
        axes_of |= {"height": 2, "width": 3}
    number = axes_of.get(axis, -1)
    if not 0 <= number < rank:
        raise InputError(
            f"{name} with an axis {axis}", str(tensor_type), "end the region before it"
        )
    return number


# -- the range of every tensor that each slice computes --------------------------------------------


@dataclass(frozen=True)
class RegionRanges:
    """How a part of a graph is sliced.

    - axes: the axis along which each tensor is cut
    - output_ranges: for each slice, the ranges of the part's outputs
    - spans: by (node name, slice), the range of the node's results that the slice computes; missing
      if earlier slices have already computed everything that this one needs
    """

    part: Graph
    rules: Rules
    axes: Mapping[str, int]
    output_ranges: list[dict[str, Range]]
    spans: Mapping[tuple[str, int], Range]

    def cut(self, node: Node, span: Range) -> Cut:
        """Return the ranges of a node's inputs, and its attributes, for a range of its results."""
        return cut_node(self.part, node, self.rules[node.name], self.axes, span)


def ranges_of(part: Graph, region: Region) -> RegionRanges:
    """Return the ranges of all tensors in all slices of a region.

    Raises `InputError` if a node needs all of a tensor that is cut, or if a tensor would be cut
    along two axes; `ShapeError` if a slice would read only padding, or part of a channel group.
    """
    rules = all_rules(part)
    axes = _axes(part, region, rules)
    # each output has its own number of rows and is cut in the same proportions
    ranges_by_output = {n: region.slice_ranges(part.types[n].shape[axes[n]]) for n in part.outputs}
    output_ranges = [
        {n: ranges[i] for n, ranges in ranges_by_output.items()} for i in range(len(region.parts))
    ]
    needs = [walk(part, rules, axes, outputs).need for outputs in output_ranges]
    spans: dict[tuple[str, int], Range] = {}
    for node in part.nodes:
        computed_end: int | None = None
        for i, need in enumerate(needs):
            low, high = need[node.output]
            # earlier slices have stored everything before `computed_end`
            if region.halo == "store" and computed_end is not None:
                low = computed_end
            if low < high:
                spans[node.name, i] = low, high
                computed_end = high
    return RegionRanges(part, rules, axes, output_ranges, spans)


def _axes(part: Graph, region: Region, rules: Rules) -> dict[str, int]:
    """Return the axis along which each tensor is cut, derived from the outputs backwards."""
    axes = {n: axis_number(region.axis, part.types[n], n) for n in part.outputs}
    # tensors that some node reads uncut, with the name of that node
    uncut_reader: dict[str, str] = {}
    for node in reversed(part.nodes):
        # a node none of whose results is cut: its readers need all of it, which is reported below
        if not any(name in axes for name in node.outputs):
            break
        _, rule = split_rule(node, rules[node.name], axes)
        pairs = list(zip(node.outputs, rule.joins, strict=True))
        reads = {s.input: s.axis for s in rule.sources}
        pairs += [(node.inputs[i], axis) for i, axis in reads.items()]
        for name, axis in pairs:
            if axes.setdefault(name, axis) != axis and name not in part.constants:
                got = f"axes {axes[name]} and {axis}, {node.name}"
                raise InputError(f"{name} cut along one axis", got, "end the region before it")
        for i, name in enumerate(node.inputs):
            if i not in reads:
                uncut_reader.setdefault(name, node.name)
    for name in part.producers:
        if name in uncut_reader:
            got = f"{uncut_reader[name]}, which needs it whole"
            raise InputError(f"{name} in slices", got, "end the region before it")
    return axes


def sliced(graph: Graph, plan: SlicePlan) -> Graph:
    """Return the graph with the regions of a plan in slices; raises as `ranges_of`.

    Nodes outside the regions keep their names; the first slice of "conv1" is called "conv1.0".
    """
    draft = Draft(graph, ())
    next_position = 0
    cuts: dict[Any, str] = {}

    def copy(nodes: Sequence[Node]) -> None:
        for node in nodes:
            draft.put(node, *(graph.types[name] for name in node.outputs))

    for low, high, region in plan.ranges(graph):
        copy(graph.nodes[next_position:low])
        part = part_of(graph, graph.nodes[low : high + 1], region.first)
        if len(region.parts) > 1:
            _Slices(draft, cuts, ranges_of(part, region), region).add()
        else:  # a region in one slice is not sliced
            copy(part.nodes)
        next_position = high + 1
    copy(graph.nodes[next_position:])
    return draft.finish()


def one_slice(part: Graph, region: Region) -> tuple[Graph, dict[str, str]]:
    """Return the first slice of a part as a graph, and a map from its tensors to the uncut ones.

    The inputs of that graph have only the range that the slice reads. Raises as `ranges_of`.
    """
    ranges = ranges_of(part, region)
    need = walk(part, ranges.rules, ranges.axes, ranges.output_ranges[0]).need
    draft = Draft(part, ())
    slices = _Slices(draft, {}, ranges, region)
    for name in part.inputs:
        if name in ranges.axes and name in need:
            low, high = need[name]
            shape = list(part.types[name].shape)
            shape[ranges.axes[name]] = high - low
            draft.types[name] = replace(part.types[name], shape=tuple(shape))
            slices.pieces[name] = [(0, need[name], name)]
    for node in part.nodes:
        if (node.name, 0) in ranges.spans:
            slices.add_slice(node, 0)
    spans = ranges.output_ranges[0]
    outputs = tuple(slices.piece(n, ranges.axes[n], spans[n], 0) for n in part.outputs)
    graph = replace(
        part,
        outputs=outputs,
        nodes=tuple(draft.nodes.values()),
        types=draft.types,
        constants=draft.constants,
    )
    uncut_names = slices.uncut_names() | dict(zip(outputs, part.outputs, strict=True))
    return pruned(graph), uncut_names


class _Slices:
    """The slices of a region, added to a graph under construction.

    - pieces: the slices of each tensor: (slice number, range, name of the slice)
    - shared_nodes: nodes that cut a range out of a tensor, for all readers in all regions
    """

    def __init__(
        self, draft: Draft, shared_nodes: dict[Any, str], ranges: RegionRanges, region: Region
    ) -> None:
        self.draft = draft
        self.shared_nodes = shared_nodes
        self.ranges = ranges
        self.region = region
        self.pieces: dict[str, list[tuple[int, Range, str]]] = {}

    def add(self) -> None:
        """Append all slices of the region's nodes, and a `concat` for each of its outputs."""
        ranges = self.ranges
        for node, i in _steps(ranges.part, self.region):
            if (node.name, i) in ranges.spans:
                self.add_slice(node, i)
        for name in ranges.part.outputs:
            axis = ranges.axes[name]
            # The slices are joined again, so that nodes after the region still read one tensor.
            spans = [span_of[name] for span_of in ranges.output_ranges]
            slices = [self.piece(name, axis, span, i) for i, span in enumerate(spans)]
            self.append("concat", slices, {"axis": axis}, name, self.draft.types[name])

    def uncut_names(self) -> dict[str, str]:
        """Return, by the name of each slice, the name of the tensor that it is cut from."""
        uncut_names = {}
        for name, pieces in self.pieces.items():
            for _, _, piece_name in pieces:
                uncut_names[piece_name] = name
        return uncut_names

    def add_slice(self, node: Node, i: int) -> None:
        """Append a node that computes slice i of a node."""
        draft = self.draft
        axes = self.ranges.axes
        span = self.ranges.spans[node.name, i]
        part_cut = self.ranges.cut(node, span)
        reads = []
        for name, ranges in zip(node.inputs, part_cut.ranges, strict=True):
            if name in draft.constants:
                reads.append(self.constant(name, ranges))
            # an activation that is cut is read from its slices, any other as it is
            elif axes.get(name) in ranges:
                reads.append(self.piece(name, axes[name], ranges[axes[name]], i))
            else:
                reads.append(name)
        names = tuple(draft.new_name(f"{name}.{i}") for name in node.outputs)
        title = names[0] if node.name == node.output else f"{node.name}.{i}"
        attrs = given_attrs(node.op, dict(part_cut.attrs))
        result_types = infer(node.op, [draft.types[n] for n in reads], part_cut.attrs)
        draft.put(Node(title, node.op, tuple(reads), names, attrs), *result_types)
        for name, piece in zip(node.outputs, names, strict=True):
            self.pieces.setdefault(name, []).append((i, span, piece))

    def piece(self, name: str, axis: int, span: Range, i: int) -> str:
        """Return a range of a tensor for slice i: cut from one slice, or joined from several."""
        # a tensor that has no slices counts as one slice, from 0 to its size
        uncut = [(i, (0, self.size(name, axis)), name)]
        # with "recompute" a slice reads only what it has computed itself
        reads_other_slices = self.region.halo == "store"
        available = [
            (piece_span, piece_name)
            for number, piece_span, piece_name in self.pieces.get(name, uncut)
            if reads_other_slices or number == i
        ]
        low, high = span
        for (start, end), piece_name in available:
            # Rows 4 .. 11 are within the slice 0 .. 15. Rows 12 .. 19 are in two slices: they are
            # joined from 12 .. 15 and 16 .. 19.
            if start <= low and high <= end:
                return self.cut_piece(piece_name, axis, (low - start, high - start))
        pieces = [
            self.cut_piece(piece_name, axis, (max(low, start) - start, min(high, end) - start))
            for (start, end), piece_name in sorted(available, key=lambda pair: pair[0])
            if start < high and low < end
        ]
        return self.shared_piece((name, axis, span), "concat", pieces, {"axis": axis})

    def size(self, name: str, axis: int) -> int:
        """Return the length of an axis of a tensor."""
        return self.draft.types[name].shape[axis]

    def cut_piece(self, name: str, axis: int, span: Range) -> str:
        """Return a range of an axis of a tensor; the tensor itself if the range is all of it."""
        if span == (0, self.size(name, axis)):
            return name
        shape = self.draft.types[name].shape
        begin = [0] * len(shape)
        end = list(shape)
        begin[axis] = span[0]
        end[axis] = span[1]
        attrs = {"begin": tuple(begin), "end": tuple(end)}
        return self.shared_piece((name, axis, span), "slice", [name], attrs)

    def shared_piece(
        self, key: tuple[str, int, Range], op: str, reads: Sequence[str], attrs: Mapping[str, Any]
    ) -> str:
        """Return the tensor with this range; append the node that makes it only the first time."""
        if key not in self.shared_nodes:
            name, _, (low, high) = key
            piece_name = self.draft.new_name(f"{name}.{low}_{high}")
            self.shared_nodes[key] = self.append(op, reads, attrs, piece_name)
        return self.shared_nodes[key]

    def append(
        self,
        op: str,
        reads: Sequence[str],
        attrs: Mapping[str, Any],
        name: str,
        *result_types: TensorType,
    ) -> str:
        """Append a node that writes one tensor, named like the node; return that name."""
        node = Node(name, op, tuple(reads), (name,), given_attrs(op, dict(attrs)))
        return self.draft.put(node, *result_types)

    def constant(self, name: str, ranges: Mapping[int, Range]) -> str:
        """Return the `ranges` of a constant, by axis; the constant itself if they are all of it."""
        constant = self.draft.constants[name]
        cuts = {a: span for a, span in ranges.items() if span != (0, constant.type.shape[a])}
        if not cuts:
            return name
        key = (name, *sorted(cuts.items()))
        if key not in self.shared_nodes:
            spans = [cuts.get(a, (0, size)) for a, size in enumerate(constant.type.shape)]
            tensor_type = TensorType(tuple(high - low for low, high in spans), constant.type.dtype)
            index = tuple(slice(low, high) for low, high in spans)
            data = (
                constant.data
                if isinstance(constant.data, Fill)
                else partial(_part, constant, index)
            )
            ends = "_".join(f"{low}_{high}" for low, high in cuts.values())
            self.shared_nodes[key] = self.draft.add(Constant(tensor_type, data), f"{name}.{ends}")
        return self.shared_nodes[key]


def _part(constant: Constant, index: tuple[slice, ...]) -> np.ndarray:
    return np.ascontiguousarray(constant.array()[index])


def _steps(part: Graph, region: Region) -> Iterator[tuple[Node, int]]:
    """Yield (node, slice number) in the order in which they run."""
    slice_numbers = range(len(region.parts))
    if region.order == "depth":
        for i in slice_numbers:
            for node in part.nodes:
                yield node, i
        return
    for layer, node in enumerate(part.nodes):
        # an elementwise node keeps the order of the layer before, with which it is fused
        if layer and not node.has("lanes"):
            slice_numbers = slice_numbers[::-1]
        for i in slice_numbers:
            yield node, i
