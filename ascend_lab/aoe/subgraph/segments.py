"""Lists the ways to slice each segment of a network, and estimates their costs.

Cut points divide a network into units; a segment is one unit or several consecutive ones. The graph
is sliced after rewriting and the choice of number formats, and before layouts are assigned: every
operator can then be lowered, no layout hides an axis, and equal slices become equal kernels, which
are lowered once.

The cost of a segment is an estimate. It is timed alone, in one launch. At its start L2 is assumed
to hold only those tensors that remain after its inputs were written in order (see `l2_rules`). So
the costs of consecutive segments can be added. In the real network L2 holds other tensors as well,
which is why the tuner times promising plans on the whole network.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from ascend_lab.aoe.subgraph.l2_rules import Buffer, Cache, L2Hits, LaunchTraffic
from ascend_lab.aoe.subgraph.slicing import Region, SlicePlan, even, one_slice, ranges_of, sliced
from ascend_lab.compiler import Graph, simulate_graph
from ascend_lab.compiler.compile import DEFAULT_ROAD, Road
from ascend_lab.compiler.draft import pruned
from ascend_lab.compiler.layout import images_outermost
from ascend_lab.compiler.placement import live_bytes, node_spans, owners, weight_bytes
from ascend_lab.compiler.rules import fusions
from ascend_lab.compiler.slice import part_of
from ascend_lab.compiler.tasks import Compiled, CpuKernel
from ascend_lab.errors import AscendLabError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Launch, ceil_div
from ascend_lab.machine.sim import time_launch, timeline, traffic_of

MAX_L2_RATIO = 4.0
"""A slice may need up to this many times the size of L2: a part of its reads still hits."""
MAX_SIZES_PER_AXIS = 3
"""Number of slice sizes that are tried along an axis of rows, the largest first."""
MAX_IMAGE_SLICES = 64
"""Largest number of slices along the batch."""
MAX_ROW_SLICES = 8
"""Largest number of slices along the rows."""
MAX_CUT_POINTS = 20
"""Largest number of cut points in a network."""
Slicing = tuple[str, tuple[int, ...]]
"""An axis and the sizes of the slices: ("batch", (4, 4))."""
UNSLICED: Slicing = ("", ())


def compile_part(part: Graph, network: Graph, chip: Chip, road: Road = DEFAULT_ROAD) -> Compiled:
    """Return the kernels of a part of a network.

    `network` is the whole network with layouts assigned; the part's inputs and outputs have the
    same layouts as in it.
    """
    types = dict(part.types)
    for name in part.inputs:
        if name in network.types:
            types[name] = replace(types[name], layout=network.types[name].layout)
    part_with_layouts = road.lay_out(replace(part, types=types), chip)
    outputs = []
    for output, name in zip(part.outputs, part_with_layouts.outputs, strict=True):
        node = part_with_layouts.producers.get(name)
        # An output of the part alone would be converted to ND at the end. Inside the network it is
        # not, unless it is an output of the network as well.
        is_conversion = node is not None and node.op == "trans_data"
        if node is not None and is_conversion and output not in network.outputs:
            outputs.append(node.inputs[0])
        else:
            outputs.append(name)
    return road.kernels(pruned(replace(part_with_layouts, outputs=tuple(outputs))), chip)


def cut_points(graph: Graph, road: Road = DEFAULT_ROAD) -> list[int]:
    """Return the positions at which a network may be cut, including 0 and the end.

    There is no cut before an elementwise node, which is fused with its predecessor, nor within a
    group of nodes that are fused when they share a launch. If more than `MAX_CUT_POINTS` positions
    remain, those that a single tensor crosses are used first; then the longest gaps are divided at
    the position that the fewest bytes cross.
    """
    # A network of n nodes has positions 0 .. n; a cut at i separates node i - 1 from node i.
    end = len(graph.nodes)
    joined_names = _joined_names(graph) if road.start != "queued" else set()
    positions = []
    for i, node in enumerate(graph.nodes):
        if i > 0 and not node.has("lanes") and node.name not in joined_names:
            positions.append(i)
    if len(positions) <= MAX_CUT_POINTS:
        return [0, *positions, end]
    crossing_count = dict.fromkeys(positions, 0)
    crossing_bytes = dict.fromkeys(positions, 0)
    for name, (producer, last_reader) in node_spans(graph).items():
        if name in graph.inputs:
            continue
        for position in positions:
            if producer < position <= last_reader:
                crossing_count[position] += 1
                crossing_bytes[position] += graph.types[name].size_bytes
    single = [position for position in positions if crossing_count[position] == 1]
    # of 45 such positions every third is used
    step = ceil_div(len(single), MAX_CUT_POINTS) or 1
    cuts = [0, *single[::step], end]
    while len(cuts) < MAX_CUT_POINTS + 2:
        gaps = [[i for i in positions if low < i < high] for low, high in pairwise(cuts)]
        longest = max(gaps, key=len)
        if not longest:
            break
        # Only the middle third: a cut next to another one would make a segment of a single node.
        third = len(longest) // 3
        middle = longest[third : len(longest) - third]
        cuts = sorted([*cuts, min(middle, key=lambda i: crossing_bytes[i])])
    return cuts


def _joined_names(graph: Graph) -> set[str]:
    """Return the nodes that are fused with those before them when they share a launch."""
    names: set[str] = set()
    for fusion in fusions():
        if fusion.rule.needs_shared_launch:
            for node in graph.nodes:
                names.update(member.name for member in fusion.rule.propose(graph, node)[1:])
    return names


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """One phase of a kernel for a slice.

    `starts_kernel` is True for the first phase of a kernel. `tensor_of` maps the kernel's buffers
    to the tensors of the unsliced network.
    """

    traffic: LaunchTraffic
    launch: Launch
    starts_kernel: bool
    tensor_of: Mapping[str, str]


@dataclass
class Segments:
    """The segments of a prepared graph on a chip, with their costs in seconds.

    Slices along the batch are alike. A segment in 8 slices costs as much as its first slice and 7
    times its second one, which finds the weights in L2. Kernels are lowered once for each unit and
    size of a slice, and simulated once for each state of L2; the cost of a segment is then a sum.

    `points` are the cut points, `laid_out` is the graph with layouts. `cost_of`, `timed` and
    `phases_of` are caches: costs of segments, cycles of launches, kernels of units.
    """

    graph: Graph
    chip: Chip
    road: Road = DEFAULT_ROAD
    points: list[int] = field(default_factory=list)
    cost_of: dict[tuple[int, int, Slicing], float] = field(default_factory=dict)
    timed: dict[Hashable, float] = field(default_factory=dict)
    phases_of: dict[Hashable, tuple[Phase, ...] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.points = self.points or cut_points(self.graph, self.road)
        self.laid_out = images_outermost(self.road.lay_out(self.graph, self.chip))
        self.launch_s = timeline.start_cycles(self.chip, "inside") / self.chip.clock_hz

    @property
    def count(self) -> int:
        """Number of units: segments between neighbouring cut points."""
        return len(self.points) - 1

    @cached_property
    def batch(self) -> int:
        """Number of images: the greatest common divisor of the first axes of inputs and outputs."""
        names = (*self.graph.inputs, *self.graph.outputs)
        # Inputs of (32, 3, 224, 224) and (32, 10), an output of (32, 1000): 32 images. A table of
        # (7, 64) beside them leaves gcd(32, 7) = 1: no slices along the batch.
        shapes = [self.graph.types[name].shape for name in names]
        return math.gcd(*(shape[0] if shape else 1 for shape in shapes)) if shapes else 1

    def part(self, first: int, stop: int) -> Graph:
        """Return units first .. stop-1 as a graph."""
        nodes = self.graph.nodes[self.points[first] : self.points[stop]]
        return part_of(self.graph, nodes, f"{self.graph.name}.{first}_{stop}")

    def region(self, first: int, stop: int, slicing: Slicing) -> Region:
        """Return units first .. stop-1 as a region."""
        low = self.points[first]
        high = self.points[stop] - 1
        names = self.graph.nodes[low].name, self.graph.nodes[high].name
        return Region(*names, *slicing)

    # -- slicings ---------------------------------------------------------------------------------
    def slicings(self, first: int, stop: int) -> list[Slicing]:
        """Return the slicings of a segment that are worth timing; empty if all of it fits into L2.

        The batch is cut if it can be, else the rows.
        """
        part = self.part(first, stop)
        free_bytes = self.chip.l2.size_bytes
        needed_bytes = max(live_bytes(part))
        if self.chip.l2.kind == "cache":
            # weights of up to half the cache stay in it
            free_bytes -= min(weight_bytes(part), free_bytes // 2)
        if stop > self.sliceable_ends[first]:
            if self.slice_counts or needed_bytes <= free_bytes:
                return []
            return list(self._row_slicings(part, MAX_L2_RATIO * free_bytes / needed_bytes))
        slicings = []
        coarser = 1
        # With an L2 of 8 MB and 20 MB live at once, 2 slices need 10 MB each and 4 need 5 MB: both
        # are tried. 8 slices are not: 4 fit already, and more slices read the weights more often.
        for count in self.slice_counts:
            fits_coarser = needed_bytes <= coarser * free_bytes
            if not fits_coarser and needed_bytes <= MAX_L2_RATIO * count * free_bytes:
                slicings.append(("batch", even(self.batch, count)))
            coarser = count
        return slicings

    @cached_property
    def slice_counts(self) -> list[int]:
        """Possible numbers of slices of the batch: its divisors, or if it is prime all numbers."""
        counts = list(range(2, min(self.batch, MAX_IMAGE_SLICES) + 1))
        divisors = [n for n in counts if self.batch % n == 0]
        return divisors if len(divisors) > 1 else counts

    @cached_property
    def sliceable_ends(self) -> list[int]:
        """For each unit, the end of the longest segment starting there whose batch can be cut."""
        ends = list[int]()
        stop = 0
        for first in range(self.count):
            stop = max(stop, first)
            # If units 3 .. 7 can be cut together, so can 4 .. 7: `stop` never moves back, so that a
            # unit is tested once or twice, and not once for every start.
            while self.slice_counts and stop < self.count and self._sliceable(first, stop + 1):
                stop += 1
            ends.append(stop)
        return ends

    def _sliceable(self, first: int, stop: int) -> bool:
        """Tell whether the batch of the units first .. stop-1 can be cut together."""
        part = self.part(first, stop)
        slicing = ("batch", even(self.batch, self.slice_counts[-1]))
        with suppress(AscendLabError):
            ranges_of(part, self.region(first, stop, slicing))
            return True
        return False

    def _row_slicings(self, part: Graph, share: float) -> Iterator[Slicing]:
        """Yield slicings along the rows, the largest slices first, of at most a share of them."""
        ends = part.nodes[0].name, part.nodes[-1].name
        for axis in ("height", "sequence"):
            row_count = _smallest_output(part, axis)
            sizes_tried = set[int]()
            for count in range(2, min(row_count, MAX_ROW_SLICES) + 1):
                if len(sizes_tried) == MAX_SIZES_PER_AXIS:
                    break
                parts = even(row_count, count)
                # 6 and 7 slices of 12 rows both begin with 2 rows: one of them is enough.
                if parts[0] in sizes_tried or parts[0] > share * row_count:
                    continue
                sizes_tried.add(parts[0])
                try:
                    ranges_of(part, Region(*ends, axis, parts))
                except AscendLabError:
                    break
                yield axis, parts

    # -- costs ------------------------------------------------------------------------------------
    def cost(self, first: int, stop: int, slicing: Slicing = UNSLICED) -> float:
        """Return the seconds of a segment, whole or in slices; infinite if it cannot be built."""
        key = (first, stop, slicing)
        if key not in self.cost_of:
            # Slices of rows overlap and differ from each other, so that they are compiled and timed
            # as a network. Slices of a batch are alike: their launches are timed once and added.
            is_cut_in_rows = slicing[0] not in ("", "batch")
            self.cost_of[key] = self._rows_cost(*key) if is_cut_in_rows else self._batch_cost(*key)
        return self.cost_of[key]

    def lower_bound(self, first: int, stop: int, slicing: Slicing) -> float:
        """Return the seconds of a segment if all reads hit and nothing is written to memory."""
        sizes = Counter(slicing[1] if slicing[0] == "batch" else (self.batch,))
        total_s = 0.0
        for size, count in sizes.items():
            total_s += count * sum(self._warm_time(unit, size) for unit in range(first, stop))
        return total_s

    def warm_time(self, unit: int) -> tuple[float, int]:
        """Return the seconds of a unit if all its reads hit in L2, and its number of kernels."""
        phases = self.phases(unit, self.batch) or ()
        return self._warm_time(unit, self.batch), sum(phase.starts_kernel for phase in phases)

    def _warm_time(self, unit: int, size: int) -> float:
        """Return the seconds of a unit for `size` images if all its reads hit in L2."""
        phases = self.phases(unit, size)
        if phases is None:
            return math.inf
        return sum(self._time(phase, L2Hits(frozenset(phase.traffic.reads), 0)) for phase in phases)

    def _batch_cost(self, first: int, stop: int, slicing: Slicing) -> float:
        """Return the cost of a segment whose batch is cut, or not cut at all."""
        part = self.part(first, stop)
        total_s = 0.0
        l2 = self.chip.l2
        l2_rule = Buffer(l2.size_bytes) if l2.kind == "buffer" else Cache(l2.size_bytes)
        outputs = frozenset(part.outputs)
        produced = [name for name in part.inputs if name not in self.graph.inputs]
        l2_rule.write({name: part.types[name].size_bytes for name in produced})
        for size, slice_count in Counter(slicing[1] or (self.batch,)).items():
            phases: list[Phase] = []
            for unit in range(first, stop):
                phases_of_unit = self.phases(unit, size)
                if phases_of_unit is None:
                    return math.inf
                phases += phases_of_unit
            traffic = [phase.traffic for phase in phases]
            # The first slice reads the weights from memory, the others find them in L2: 8 slices
            # cost as much as the first and 7 times the second.
            for count in (1, slice_count - 1):
                if count:
                    # of an input that L2 did not hold, the next slice reads another part
                    missing = [name for name in part.inputs if name not in l2_rule.contents]
                    total_s += count * sum(map(self._time, phases, l2_rule(traffic, outputs)))
                    l2_rule.forget(missing)
        return total_s

    def _time(self, phase: Phase, l2_hits: L2Hits) -> float:
        """Return the seconds of a phase, its launch included."""
        hits = tuple(buffer for buffer, name in phase.tensor_of.items() if name in l2_hits.hits)
        # The same launch with the same hits and the same writes takes the same time: thousands of
        # segments share a few hundred simulations.
        key = id(phase.launch), hits, l2_hits.written_bytes
        if key not in self.timed:
            traffic = traffic_of(phase.launch, self.chip)
            warm = {name: 1.0 for name in hits if name in traffic.read_once}
            warmed = traffic.warmed(warm, l2_hits.written_bytes)
            self.timed[key] = time_launch(phase.launch, self.chip, warmed).cycles
        # Before a later phase of the same kernel all cores wait for each other.
        barrier_s = self.chip.all_cores_cycles / self.chip.clock_hz
        start_s = self.launch_s if phase.starts_kernel else barrier_s
        return self.timed[key] / self.chip.clock_hz + start_s

    def phases(self, unit: int, size: int) -> tuple[Phase, ...] | None:
        """Return the kernel phases of a unit for `size` images; None if it cannot be built."""
        key = unit, size
        if key not in self.phases_of:
            self.phases_of[key] = None
            with suppress(AscendLabError):
                self.phases_of[key] = tuple(self._unit_phases(unit, size))
        return self.phases_of[key]

    def _unit_phases(self, unit: int, size: int) -> Iterator[Phase]:
        """Compile a unit for `size` images and yield the phases of its kernels."""
        part = self.part(unit, unit + 1)
        # from the tensors of a slice to those of the network that they are cut from
        uncut_name = dict[str, str]()
        if size < self.batch:
            slicing = "batch", (size, self.batch - size)
            part, uncut_name = one_slice(part, self.region(unit, unit + 1, slicing))
        built = compile_part(part, self.laid_out, self.chip, self.road)
        outs = zip(built.graph.outputs, part.outputs, strict=True)
        uncut_name |= {built_name: uncut_name.get(name, name) for built_name, name in outs}
        owner = owners(built)
        for task in built.tasks:
            if task.lowered is None:
                continue
            # A call of the AI CPU for every slice would cost more than slicing gains.
            if isinstance(task.lowered.kernel, CpuKernel) and size < self.batch:
                raise UnsupportedError("kernels", f"{task.name} on the AI CPU", "leave it whole")
            names = {}
            for buffer in task.lowered.kernel.tensors:
                name = task.value(buffer.name)
                name = owner.get(name, name)
                names[buffer.name] = uncut_name.get(name, name)
            for i, launch in enumerate(task.lowered.kernel.phases):
                traffic = traffic_of(launch, self.chip)
                reads = _bytes_by_tensor(traffic.read_once, names)
                writes = _bytes_by_tensor(traffic.write_once, names)
                yield Phase(LaunchTraffic(reads, writes), launch, i == 0, names)

    def _rows_cost(self, first: int, stop: int, slicing: Slicing) -> float:
        """Return the cost of a segment whose rows are cut, timed as a separate network."""
        part = self.part(first, stop)
        try:
            cut = sliced(part, SlicePlan((self.region(first, stop, slicing),)))
            built = compile_part(cut, self.laid_out, self.chip, self.road)
        except AscendLabError:
            return math.inf
        produced = [n for n in built.graph.inputs if n not in self.graph.inputs]
        built = SlicePlan(one_launch=True).with_launches(built)
        times = simulate_graph(built, written=produced, passed=built.graph.outputs, first="inside")
        return times.time_s


def _bytes_by_tensor(
    bytes_by_buffer: Mapping[str, int], tensor_of: Mapping[str, str]
) -> Mapping[str, int]:
    """Add up the bytes of a kernel's buffers by the tensors that they belong to."""
    bytes_by_tensor = Counter[str]()
    for buffer, size_bytes in bytes_by_buffer.items():
        bytes_by_tensor[tensor_of[buffer]] += size_bytes
    return bytes_by_tensor


def _smallest_output(part: Graph, axis: str) -> int:
    """Return the smallest size of "height" or "sequence" among the outputs; 0 if one lacks it."""
    shapes = [part.types[name].shape for name in part.outputs]
    ranks = {len(shape) for shape in shapes}
    if axis == "height":
        return min(shape[2] for shape in shapes) if ranks == {4} else 0
    has_sequence = min(ranks) > 1 and max(ranks) < 4
    return min(shape[-2] for shape in shapes) if has_sequence else 0
