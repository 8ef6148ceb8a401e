"""Segments of a network between cut points: how each may be sliced, and what that costs.

Slicing stands behind rewriting and number formats, before layouts: there every operator is one that
lowering knows, no layout hides an axis, and equal slices become equal pieces, lowered once.

A segment is timed alone, all in one launch. Assumed: when it starts, L2 holds what writing its
inputs, whole and in order, leaves there, and nothing else. Costs of segments so add up along a
chain; the real network's differ by what else happens to be in L2, and the tuner times plans on it.

A rule says of every step of a slice what it finds in L2 and how many bytes go to memory. A *buffer*
(the Ascend310's) is allocated ahead (see `graph.placement`); weights and what crosses the border of
the slice are never there. A *cache* keeps what was used last, weights of the slice before included,
and drops what nobody reads again.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from ascend_lab.aoe.subgraph.slicing import Region, SlicePlan, even, one_slice, ranges_of, sliced
from ascend_lab.compiler import (
    Compiled,
    Graph,
    Road,
    live_bytes,
    pruned,
    simulate_graph,
    weight_bytes,
)
from ascend_lab.compiler.compile import DEFAULT_ROAD
from ascend_lab.compiler.layout import images_outermost
from ascend_lab.compiler.placement import Use, allocate, node_spans, owners
from ascend_lab.compiler.rules import fusions
from ascend_lab.compiler.slice import part_of
from ascend_lab.compiler.tasks import CpuKernel
from ascend_lab.errors import AscendLabError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Launch
from ascend_lab.machine.sim import time_launch, timeline, traffic_of

SLACK = 4.0
"""Slices are tried if they need at most so many times L2: part of what they reuse still hits."""
SIZES = 3
"""Sizes of slices tried for a segment: the largest that pass, along each axis."""
MOST_SLICES = 64
MOST_ROWS = 8
"""The most slices of images, and of rows."""
MOST_POINTS = 20
"""Cut points used at most."""
Way = tuple[str, tuple[int, ...]]
"""Axis and sizes."""
WHOLE: Way = ("", ())


def compiled_part(part: Graph, laid: Graph, chip: Chip, road: Road = DEFAULT_ROAD) -> Compiled:
    """Return the kernels of a part of a network, its inputs and outputs as `laid` has them."""
    types = dict(part.types)
    for name in part.inputs:
        if name in laid.types:
            types[name] = replace(types[name], layout=laid.types[name].layout)
    laid_part = road.lay_out(replace(part, types=types), chip)
    outs = []
    for output, name in zip(part.outputs, laid_part.outputs, strict=True):
        node = laid_part.producers.get(name)
        inner = node is not None and node.op == "trans_data" and output not in laid.outputs
        outs.append(node.inputs[0] if node is not None and inner else name)
    return road.kernels(pruned(replace(laid_part, outputs=tuple(outs))), chip)


def cut_points(graph: Graph, road: Road = DEFAULT_ROAD) -> list[int]:
    """Return the positions at which a network may be cut, 0 and its end included.

    Behind a cut stands no elementwise node, which is fused with what it follows, nor, inside a
    launch, the second half of a tandem. Of many cuts those that one tensor crosses are used, and in
    the longest gaps those that the fewest bytes cross.
    """
    nodes = graph.nodes
    # A network of n nodes has positions 0 .. n; a cut at i separates node i - 1 from node i.
    end = len(graph.nodes)
    inner = set[str]()
    if road.start != "queued":
        inside = [fusion.rule for fusion in fusions() if fusion.rule.needs_shared_launch]
        groups = (rule.propose(graph, node) for rule in inside for node in nodes)
        inner = {node.name for group in groups for node in group[1:]}
    free = [i for i in range(1, end) if not nodes[i].has("lanes") and nodes[i].name not in inner]
    if len(free) <= MOST_POINTS:
        return [0, *free, end]
    live = [(n, ends) for n, ends in node_spans(graph).items() if n not in graph.inputs]
    crossing = {i: [n for n, (first, last) in live if first < i <= last] for i in free}
    cost = {i: sum(graph.types[n].size_bytes for n in names) for i, names in crossing.items()}
    chain = [i for i in free if len(crossing[i]) == 1]
    cuts = [0, *chain[:: -(-len(chain) // MOST_POINTS) or 1], end]
    while len(cuts) < MOST_POINTS + 2:
        # More cuts are worth most in the longest stretch without one.
        gaps = [[i for i in free if a < i < b] for a, b in pairwise(cuts)]
        longest = max(gaps, key=len)
        if not longest:
            break
        # From the middle third only: a cut beside a known one would divide nothing.
        third = len(longest) // 3
        middle = longest[third : len(longest) - third]
        cuts = sorted([*cuts, min(middle, key=lambda i: cost[i])])
    return cuts


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a slice: bytes that it reads and writes of each tensor."""

    reads: Mapping[str, int]
    writes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Met:
    """What a step finds in L2 whole, and the bytes that go to memory meanwhile."""

    found: frozenset[str]
    written_bytes: int


@dataclass
class Cache:
    """The rule of a cache of whole tensors; it remembers what one slice leaves for the next."""

    size_bytes: int
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    dirty: dict[str, int] = field(default_factory=dict)

    def left(self, names: Mapping[str, int]) -> None:
        """Let tensors lie there as writing them one after another leaves them."""
        for name, size in names.items():
            self._use(name, size)
            self.dirty[name] = size
            self._shrink()

    def passed(self, names: Collection[str]) -> None:
        """Forget tensors of which the next slice reads another part."""
        for name in names:
            self.held.pop(name, None)
            self.dirty.pop(name, None)

    def __call__(self, steps: Sequence[Step], needed_behind: Collection[str]) -> Iterator[Met]:
        """Yield what each step meets."""
        written = {name for step in steps for name in step.writes}
        left = Counter(name for step in steps for name in step.reads)
        for step in steps:
            found = frozenset(self.held).intersection(step.reads)
            # `left` counts the reads still to come: a tensor without any is dead when this step has
            # run.
            left.subtract(step.reads.keys())
            for name, size in step.reads.items():
                self._use(name, max(size, self.held.get(name, 0)))
            for name, size in step.writes.items():
                self._use(name, size + self.held.get(name, 0))
                self.dirty[name] = self.held[name]
            out = self._shrink()
            # Only what this slice has written itself and nobody needs behind it may be dropped
            # without a write to memory; weights and inputs stay until something pushes them out.
            inner = written.difference(needed_behind).intersection({*step.reads, *step.writes})
            self.passed([name for name in inner if not left[name]])
            yield Met(found, out)

    def _use(self, name: str, size: int) -> None:
        self.held[name] = size
        self.held.move_to_end(name)

    def _shrink(self) -> int:
        """Evict the least recently used tensors until the others fit; return the dirty bytes."""
        out = 0
        total = sum(self.held.values())
        # Least recently used first; a tensor that was changed since it was read goes to memory.
        while total > self.size_bytes:
            name, size = self.held.popitem(last=False)
            total -= size
            out += self.dirty.pop(name, 0)
        return out


@dataclass
class Buffer(Cache):
    """The rule of a buffer: a slice finds only what it wrote itself and had room to keep."""

    def left(self, names: Mapping[str, int]) -> None:
        """Let tensors lie there that were just written: none, of what is read in slices."""

    def __call__(self, steps: Sequence[Step], needed_behind: Collection[str]) -> Iterator[Met]:
        """Yield what each step meets; `needed_behind` are needed behind the slice."""
        uses = [Use(tuple(step.reads), tuple(step.writes)) for step in steps]
        sizes = Counter[str]()
        for step in steps:
            sizes.update(step.writes)
        held_before = frozenset[str]()
        for step, held_now in zip(
            steps, allocate(uses, sizes, {*needed_behind}, self.size_bytes), strict=True
        ):
            out = sum(size for name, size in step.writes.items() if name not in held_now)
            yield Met(held_before & held_now & step.reads.keys(), out)
            held_before = held_now


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One phase of a kernel in a slice: its step in L2, and whether the kernel begins with it."""

    step: Step
    launch: Launch
    starts: bool
    names: Mapping[str, str]


@dataclass
class Segments:
    """The segments of a prepared graph on a chip; costs in seconds are remembered.

    Slices along the batch are all alike, so that a segment is its first slice and as often its
    second one, which finds weights in L2. Kernels are lowered once per unit and size of a slice,
    and timed once per state of L2: thousands of segments cost as many sums.
    """

    graph: Graph
    chip: Chip
    road: Road = DEFAULT_ROAD
    points: list[int] = field(default_factory=list)
    costs: dict[tuple[int, int, Way], float] = field(default_factory=dict)
    timed: dict[Hashable, float] = field(default_factory=dict)
    built: dict[Hashable, tuple[Run, ...] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.points = self.points or cut_points(self.graph, self.road)
        self.laid = images_outermost(self.road.lay_out(self.graph, self.chip))
        self.launch_s = timeline.start_cycles(self.chip, "inside") / self.chip.clock_hz

    @property
    def count(self) -> int:
        """Number of units: segments between neighbouring cut points."""
        return len(self.points) - 1

    @cached_property
    def batch(self) -> int:
        """Images: the common divisor of the entries of all first axes, 1 where one has none."""
        names = (*self.graph.inputs, *self.graph.outputs)
        # Inputs of (32, 3, 224, 224) and (32, 10), an output of (32, 1000): 32 images. A table of
        # (7, 64) beside them leaves gcd(32, 7) = 1: no slices along the batch.
        shapes = [self.graph.types[name].shape for name in names]
        return math.gcd(*(shape[0] if shape else 1 for shape in shapes)) if shapes else 1

    def part(self, first: int, stop: int) -> Graph:
        """Return units first .. stop-1 as a graph."""
        nodes = self.graph.nodes[self.points[first] : self.points[stop]]
        return part_of(self.graph, nodes, f"{self.graph.name}.{first}_{stop}")

    def region(self, first: int, stop: int, slicing: Way) -> Region:
        """Return units first .. stop-1 as a region."""
        low = self.points[first]
        high = self.points[stop] - 1
        names = self.graph.nodes[low].name, self.graph.nodes[high].name
        return Region(*names, *slicing)

    # -- ways -------------------------------------------------------------------------------------
    def ways(self, first: int, stop: int) -> list[Way]:
        """Return the slicings of a segment worth timing; none if all of it fits into L2.

        Images, in every number of slices that divides the batch, or, where that leaves nothing to
        try, in every number; rows only where images cannot be cut. Slices that are much larger than
        L2 still spill; slices of slices that fit read the same bytes again.
        """
        part = self.part(first, stop)
        room = self.chip.l2.size_bytes
        live = max(live_bytes(part))
        if self.chip.l2.kind == "cache":
            room -= min(weight_bytes(part), room // 2)
        if stop > self.reach[first]:
            rows = not self.numbers and live > room
            return list(self._rows(part, SLACK * room / live)) if rows else []
        slicings = []
        coarser = 1
        # With L2 of 8 MB and 20 MB live at once, 2 slices need 10 MB each and 4 need 5: both are
        # tried, as is every number up to SLACK times L2 a slice. 8 slices would only read the
        # weights more often.
        for n in self.numbers:
            if live > coarser * room and live <= SLACK * n * room:
                slicings.append(("batch", even(self.batch, n)))
            coarser = n
        return slicings

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers of slices of the batch."""
        counts = list(range(2, min(self.batch, MOST_SLICES) + 1))
        divisors = [n for n in counts if self.batch % n == 0]
        return divisors if len(divisors) > 1 else counts

    @cached_property
    def reach(self) -> list[int]:
        """Of each unit the end of the longest segment from there on that images can be cut in."""
        ends = list[int]()
        stop = 0
        for first in range(self.count):
            stop = max(stop, first)
            # If units 3 .. 7 can be cut together, so can 4 .. 7: `stop` never moves back, and each
            # unit is looked at once or twice instead of once for every start.
            while self.numbers and stop < self.count and self._sliceable(first, stop + 1):
                stop += 1
            ends.append(stop)
        return ends

    def _sliceable(self, first: int, stop: int) -> bool:
        part = self.part(first, stop)
        slicing = ("batch", even(self.batch, self.numbers[-1]))
        with suppress(AscendLabError):
            ranges_of(part, self.region(first, stop, slicing))
            return True
        return False

    def _rows(self, part: Graph, share: float) -> Iterator[Way]:
        """Yield slicings along rows, the largest slices first, of at most a share of the rows."""
        ends = part.nodes[0].name, part.nodes[-1].name
        for axis in ("height", "sequence"):
            size = _size(part, axis)
            sizes_tried = set[int]()
            for count in range(2, min(size, MOST_ROWS) + 1):
                parts = even(size, count)
                # 25 and 26 slices of 224 rows both begin with 9 rows: one of them is enough.
                if parts[0] in sizes_tried or parts[0] > share * size or len(sizes_tried) == SIZES:
                    continue
                sizes_tried.add(parts[0])
                try:
                    ranges_of(part, Region(*ends, axis, parts))
                except AscendLabError:
                    break
                yield axis, parts

    # -- costs ------------------------------------------------------------------------------------
    def cost(self, first: int, stop: int, slicing: Way = WHOLE) -> float:
        """Return the seconds of a segment, whole or in slices; infinite if it cannot be built."""
        key = (first, stop, slicing)
        if key not in self.costs:
            rows = slicing[0] not in ("", "batch")
            # Slices of rows overlap and differ from each other: they are compiled as a network of
            # their own. Slices of a batch are alike, and their cost is a sum of launches that are
            # timed once.
            self.costs[key] = self._built(*key) if rows else self._summed(*key)
        return self.costs[key]

    def least(self, first: int, stop: int, slicing: Way) -> float:
        """Return the seconds of a segment if all reads hit and nothing is written to memory."""
        sizes = Counter(slicing[1] if slicing[0] == "batch" else (self.batch,))
        units = range(first, stop)
        return sum(n * sum(self._warm(u, size) for u in units) for size, n in sizes.items())

    def floor(self, unit: int) -> tuple[float, int]:
        """Return the seconds of a whole unit if all it reads is in L2, and its kernels."""
        runs = self.runs(unit, self.batch) or ()
        return self._warm(unit, self.batch), sum(run.starts for run in runs)

    def _warm(self, unit: int, size: int) -> float:
        runs = self.runs(unit, size)
        if runs is None:
            return math.inf
        return sum(self._time(run, Met(frozenset(run.step.reads), 0)) for run in runs)

    def _summed(self, first: int, stop: int, slicing: Way) -> float:
        """Return the cost from runs: of every size the first slice, then its like."""
        part = self.part(first, stop)
        total = 0.0
        l2 = self.chip.l2
        cache = (Buffer if l2.kind == "buffer" else Cache)(l2.size_bytes)
        kept = frozenset(part.outputs)
        types = part.types
        produced = [n for n in part.inputs if n not in self.graph.inputs]
        cache.left({name: types[name].size_bytes for name in produced})
        for size, times in Counter(slicing[1] or (self.batch,)).items():
            runs_by_unit = [self.runs(unit, size) for unit in range(first, stop)]
            if None in runs_by_unit:
                return math.inf
            runs = [run for unit in runs_by_unit for run in unit or ()]
            steps = [run.step for run in runs]
            # The first slice reads the weights from memory, the second and all later ones find them
            # in L2: 8 slices are one first and seven second ones.
            for count in (1, times - 1):
                if count:
                    gone = [n for n in part.inputs if n not in cache.held]
                    total += count * sum(map(self._time, runs, cache(steps, kept)))
                    cache.passed(gone)
        return total

    def _time(self, run: Run, met: Met) -> float:
        """Return the seconds of a run, its launch included."""
        hits = tuple(buffer for buffer, name in run.names.items() if name in met.found)
        # The same launch with the same hits and the same writes takes the same time: thousands of
        # segments share a few hundred simulations.
        key = id(run.launch), hits, met.written_bytes
        if key not in self.timed:
            traffic = traffic_of(run.launch, self.chip)
            warm = {name: 1.0 for name in hits if name in traffic.read_once}
            seen = time_launch(run.launch, self.chip, traffic.warmed(warm, met.written_bytes))
            self.timed[key] = seen.cycles / self.chip.clock_hz
        # Inside one launch a kernel of several phases waits at a barrier of all cores between them.
        between = self.chip.all_cores_cycles / self.chip.clock_hz
        return self.timed[key] + (self.launch_s if run.starts else between)

    def runs(self, unit: int, size: int) -> tuple[Run, ...] | None:
        """Return the launches of a unit for `size` images; None if it cannot be cut or built."""
        key = unit, size
        if key not in self.built:
            self.built[key] = None
            with suppress(AscendLabError):
                self.built[key] = tuple(self._runs(unit, size))
        return self.built[key]

    def _runs(self, unit: int, size: int) -> Iterator[Run]:
        part = self.part(unit, unit + 1)
        uncut_name = dict[str, str]()
        if size < self.batch:
            slicing = "batch", (size, self.batch - size)
            part, uncut_name = one_slice(part, self.region(unit, unit + 1, slicing))
        built = compiled_part(part, self.laid, self.chip, self.road)
        outs = zip(built.graph.outputs, part.outputs, strict=True)
        uncut_name |= {built_name: uncut_name.get(name, name) for built_name, name in outs}
        owner = owners(built)
        for task in built.tasks:
            if task.lowered is None:
                continue
            # A call of the AI CPU costs more than slices gain: once a slice would be too often.
            if isinstance(task.lowered.kernel, CpuKernel) and size < self.batch:
                raise UnsupportedError("kernels", f"{task.name} on the AI CPU", "leave it whole")
            names = {}
            for buffer in task.lowered.kernel.tensors:
                name = task.value(buffer.name)
                name = owner.get(name, name)
                names[buffer.name] = uncut_name.get(name, name)
            for i, launch in enumerate(task.lowered.kernel.phases):
                traffic = traffic_of(launch, self.chip)
                step = Step(_named(traffic.read_once, names), _named(traffic.write_once, names))
                yield Run(step, launch, not i, names)

    def _built(self, first: int, stop: int, slicing: Way) -> float:
        """Return the cost of rows: the segment as a network, behind what wrote its inputs."""
        part = self.part(first, stop)
        try:
            cut = sliced(part, SlicePlan((self.region(first, stop, slicing),)))
            built = compiled_part(cut, self.laid, self.chip, self.road)
        except AscendLabError:
            return math.inf
        produced = [n for n in built.graph.inputs if n not in self.graph.inputs]
        built = SlicePlan(one_launch=True).launched(built)
        times = simulate_graph(built, written=produced, passed=built.graph.outputs, first="inside")
        return times.time_s


def _named(sizes: Mapping[str, int], names: Mapping[str, str]) -> Mapping[str, int]:
    bytes_by_tensor = Counter[str]()
    for buffer, size in sizes.items():
        bytes_by_tensor[names[buffer]] += size
    return bytes_by_tensor


def _size(part: Graph, axis: str) -> int:
    """Return the size of an axis of the smallest result; 0 if a result has none."""
    ranks = {len(part.types[n].shape) for n in part.outputs}
    fits = {"height": ranks == {4}, "sequence": min(ranks) > 1 and max(ranks) < 4}
    place = {"height": 2, "sequence": -2}[axis]
    return min(part.types[n].shape[place] for n in part.outputs) if fits[axis] else 0
