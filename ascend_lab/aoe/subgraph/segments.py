"""Segments of a network between cut points: how each may be sliced, what that costs, the cheapest.

Slicing stands behind rewriting and number formats, before layouts: there every operator is one that
lowering knows, no layout hides an axis, and equal slices become equal pieces, lowered once.

A segment is compiled and timed alone. Assumed: when it starts, L2 holds what writing its inputs,
whole and in order, leaves there, and nothing else. Costs of segments so add up along a chain; the
real network's differ by what else happens to be in L2, so that plans are timed on it in the end.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ascend_lab.aoe.subgraph.slicing import Region, SlicePlan, ranges_of, sliced
from ascend_lab.chip import Chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Compiled, Graph, Road, live_bytes, pruned, simulate_graph, weight_bytes
from ascend_lab.graph.compile import DEFAULT_ROAD
from ascend_lab.graph.counts import spans
from ascend_lab.graph.lower import piece_of
from ascend_lab.graph.slice import part_of
from ascend_lab.isa import Launch
from ascend_lab.sim import analyse
from ascend_lab.sim.simulate import time_launch

SLACK = 2.0
"""Slices are tried if they need at most so many times L2: part of what they reuse still hits."""
SIZES = 3
"""Sizes of slices tried for a segment: the largest that pass, along each axis."""
MOST_PARTS = {"batch": 64, "height": 8, "sequence": 8}
"""Axes tried, and the most slices along each."""
MOST_POINTS = 20
"""Cut points used at most."""
Way = tuple[str, tuple[int, ...]]
"""Axis and sizes."""
WHOLE: Way = ("", ())


def prepared(graph: Graph, chip: Chip, *, dtype: str = "fp16") -> Graph:
    """Return a model's graph as slicing takes it: rewritten, in a number format, canonical."""
    road = Road(dtype=dtype)
    return road.prepare(road.rewrite(graph)[0], chip)


def laid_out(graph: Graph, chip: Chip) -> Graph:
    """Return a prepared graph with layouts."""
    return DEFAULT_ROAD.lay_out(graph, chip)


def compiled(graph: Graph, chip: Chip) -> Compiled:
    """Return the kernels of a prepared graph, sliced or not; raises as `compile_stages`."""
    return DEFAULT_ROAD.kernels(laid_out(graph, chip), chip)


def compiled_part(part: Graph, laid: Graph, chip: Chip) -> Compiled:
    """Return the kernels of a part of a network, its inputs and outputs as `laid` has them."""
    types = dict(part.types)
    for name in part.inputs:
        if name in laid.types:
            types[name] = replace(types[name], layout=laid.types[name].layout)
    own = laid_out(replace(part, types=types), chip)
    outs = []
    for wanted, name in zip(part.outputs, own.outputs, strict=True):
        node = own.producers.get(name)
        inner = node is not None and node.op == "trans_data" and wanted not in laid.outputs
        outs.append(node.inputs[0] if node is not None and inner else name)
    own = pruned(replace(own, outputs=tuple(outs)))
    return DEFAULT_ROAD.kernels(own, chip)


def even(size: int, count: int) -> tuple[int, ...]:
    """Return a size in `count` parts that differ by at most 1, the larger ones first."""
    return tuple(size // count + (i < size % count) for i in range(count))


def cut_points(graph: Graph) -> list[int]:
    """Return the positions at which a network may be cut, 0 and its end included.

    Behind a cut stands no elementwise node, which is fused with what it follows. Of many cuts those
    that one tensor crosses are used, and in the longest gaps those that the fewest bytes cross.
    """
    end = len(graph.nodes)
    free = [i for i in range(1, end) if not graph.nodes[i].has("lanes")]
    if len(free) <= MOST_POINTS:
        return [0, *free, end]
    live = [(n, ends) for n, ends in spans(graph).items() if n not in graph.inputs]
    crossing = {i: [n for n, (first, last) in live if first < i <= last] for i in free}
    cost = {i: sum(graph.types[n].size_bytes for n in names) for i, names in crossing.items()}
    chain = [i for i in free if len(crossing[i]) == 1]
    found = [0, *chain[:: -(-len(chain) // MOST_POINTS) or 1], end]
    while len(found) < MOST_POINTS + 2:
        gaps = [[i for i in free if a < i < b] for a, b in pairwise(found)]
        longest = max(gaps, key=len)
        if not longest:
            break
        third = len(longest) // 3
        inner = longest[third : len(longest) - third]
        found = sorted([*found, min(inner, key=lambda i: cost[i])])
    return found


@dataclass
class Segments:
    """The segments of a prepared graph on a chip; costs in seconds are remembered."""

    graph: Graph
    chip: Chip
    points: list[int] = field(default_factory=list)
    costs: dict[tuple[int, int, Way], float] = field(default_factory=dict)
    timed: dict[Hashable, float] = field(default_factory=dict)
    floors: dict[int, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.points = self.points or cut_points(self.graph)
        self.laid = laid_out(self.graph, self.chip)

    @property
    def count(self) -> int:
        """Number of units: segments between neighbouring cut points."""
        return len(self.points) - 1

    def part(self, first: int, stop: int) -> Graph:
        """Return units first .. stop-1 as a graph."""
        nodes = self.graph.nodes[self.points[first] : self.points[stop]]
        return part_of(self.graph, nodes, f"{self.graph.name}.{first}_{stop}")

    def region(self, first: int, stop: int, way: Way, order: str = "depth") -> Region:
        """Return units first .. stop-1 as a region."""
        low, high = self.points[first], self.points[stop] - 1
        names = self.graph.nodes[low].name, self.graph.nodes[high].name
        return Region(*names, way[0], way[1], order)

    def ways(self, first: int, stop: int) -> list[Way]:
        """Return the slicings of a segment worth timing; none if all of it fits into L2."""
        part = self.part(first, stop)
        room, weights, live = self.chip.l2.size_bytes, weight_bytes(part), max(live_bytes(part))
        if live + weights <= room:
            return []
        share = (SLACK * room - weights) / live
        for axis, count in MOST_PARTS.items():
            most = min(count, self._most_parts(first, stop, axis, part))
            if found := list(self._ways_along(axis, most, part, share)):
                return found
        return []

    def _most_parts(self, first: int, stop: int, axis: str, part: Graph) -> int:
        """Return with how many slices launches and copies cost less than L2 can save at most.

        A slice is taken to need no less than its share of the time the kernel takes if everything
        it reads lies in L2; rows of images, to be copied in and out. Rules of thumb: smaller
        kernels may split better, and images of few channels are cut without a copy.
        """
        whole = sum(self.cost(i, i + 1) for i in range(first, stop))
        floors = [self.floor(i) for i in range(first, stop)]
        if math.isinf(whole):
            return 1
        spare = whole - sum(time_s for time_s, _ in floors)
        if axis == "height":
            ends = sum(part.types[n].size_bytes for n in (*part.inputs, *part.outputs))
            spare -= 2 * ends / self.chip.l2.rate_bytes_per_s
        launches = self.chip.launch_overhead_s * sum(kernels for _, kernels in floors)
        return 1 + max(0, int(spare / launches)) if launches else 1

    def least(self, first: int, stop: int, way: Way) -> float:
        """Return the seconds below which a segment does not come, by the rule of thumb above."""
        floors = [self.floor(i) for i in range(first, stop)]
        launches = self.chip.launch_overhead_s * sum(kernels for _, kernels in floors)
        return sum(time_s for time_s, _ in floors) + max(0, len(way[1]) - 1) * launches

    def floor(self, unit: int) -> tuple[float, int]:
        """Return the seconds of a unit if all it reads is in L2, and its kernels."""
        if unit not in self.floors:
            built = compiled_part(self.part(unit, unit + 1), self.laid, self.chip)
            kernels = [t.lowered.kernel for t in built.tasks if t.lowered is not None]
            times = (_warm_cycles(launch, self.chip) for k in kernels for launch in k.phases)
            seconds = sum(times) / self.chip.clock_hz
            self.floors[unit] = seconds + len(kernels) * self.chip.launch_overhead_s, len(kernels)
        return self.floors[unit]

    def _ways_along(self, axis: str, most: int, part: Graph, share: float) -> Iterator[Way]:
        """Yield the largest slices along an axis whose share of it is small enough, if any."""
        first, last = part.nodes[0].name, part.nodes[-1].name
        size = _size(part, axis)
        known, done = set(), 0
        for count in range(2, min(size, most) + 1):
            parts = even(size, count)
            if parts[0] in known or parts[0] > share * size or done == SIZES:
                continue
            known.add(parts[0])
            try:
                ranges_of(part, Region(first, last, axis, parts))
            except AscendLabError:
                if done == 0:
                    return
                continue
            done += 1
            yield axis, parts

    def cost(self, first: int, stop: int, way: Way = WHOLE) -> float:
        """Return the seconds of a segment, whole or in slices; infinite if it cannot be built."""
        key = (first, stop, way)
        if key not in self.costs:
            part = self.part(first, stop)
            same = (*self._kind(part), way)
            if same not in self.timed:
                self.timed[same] = self._time(part, first, stop, way)
            self.costs[key] = self.timed[same]
        return self.costs[key]

    def _kind(self, part: Graph) -> tuple[Hashable, ...]:
        """Return what segments of one cost have in common, such as the blocks of a stage."""
        types, graph = self.laid.types, self.graph
        reads = tuple((n in graph.inputs, n in types and types[n].layout) for n in part.inputs)
        writes = tuple(n in graph.outputs for n in part.outputs)
        return piece_of(graph, part.nodes).key, reads, writes

    def _time(self, part: Graph, first: int, stop: int, way: Way) -> float:
        plan = SlicePlan((self.region(first, stop, way),) if way[0] else ())
        try:
            built = compiled_part(sliced(part, plan), self.laid, self.chip)
        except AscendLabError:
            return math.inf
        before = [n for n in built.graph.inputs if n not in self.graph.inputs]
        return simulate_graph(built, written=before).time_s


def _warm_cycles(launch: Launch, chip: Chip) -> int:
    traffic = analyse(launch, chip)
    warm = traffic.warmed(dict.fromkeys(traffic.read_once, 1.0), 0)
    return time_launch(launch, chip, warm).cycles


def _size(part: Graph, axis: str) -> int:
    """Return the size of an axis of the smallest result; 0 if a result has none."""
    ranks = {len(part.types[n].shape) for n in part.outputs}
    fits = {
        "batch": min(ranks) > 0,
        "height": ranks == {4},
        "sequence": min(ranks) > 1 and max(ranks) < 4,
    }
    place = {"batch": 0, "height": 2, "sequence": -2}[axis]
    return min(part.types[n].shape[place] for n in part.outputs) if fits[axis] else 0


Choice = tuple[int, int, Way]
"""Units first .. stop-1 and how they are sliced."""
Ways = Callable[[int, int], Iterable[Way]]
Cost = Callable[[int, int, Way], float]


def cheapest(
    count: int, ways: Ways, cost: Cost, least: Cost = lambda first, stop, way: 0.0
) -> tuple[float, list[Choice]]:
    """Return the least cost of `count` units and the segments that reach it, in order.

        best(j) = min over i < j and ways w of units i .. j-1:  best(i) + cost(i, j, w)

    where a unit may also stay whole: dynamic programming, exact for costs that add up. No cost is
    asked for if `least`, a bound below it, shows that the segment cannot help.
    """
    best: list[tuple[float, list[Choice]]] = [(0.0, [])]
    for stop in range(1, count + 1):
        found: tuple[float, list[Choice]] = (math.inf, [])
        for first in reversed(range(stop)):
            before, chosen = best[first]
            for way in choices(first, stop, ways):
                if before + least(first, stop, way) >= found[0]:
                    continue
                total = before + cost(first, stop, way)
                if total < found[0]:
                    found = total, [*chosen, (first, stop, way)]
        best.append(found)
    return best[-1]


def choices(first: int, stop: int, ways: Ways) -> list[Way]:
    """Return how units may be taken: whole if it is one, and in slices."""
    return [*([WHOLE] if stop == first + 1 else []), *ways(first, stop)]


def every(count: int, ways: Ways, first: int = 0) -> Iterator[list[Choice]]:
    """Yield all ways to take the units from `first` on: for small chains."""
    if first == count:
        yield []
        return
    for stop in range(first + 1, count + 1):
        for way in choices(first, stop, ways):
            for rest in every(count, ways, stop):
                yield [(first, stop, way), *rest]
