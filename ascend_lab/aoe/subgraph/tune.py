"""The subgraph tuner: choose the slicing under which a network is fastest on a chip.

Dynamic programming over cut points gives the best plan under the costs of segments alone; a search
from there times plans on the whole network: all of them where they are few, else by annealing. The
network as it is takes part, so that the result is never slower.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ascend_lab.aoe.drive import Trace, Trial, drive
from ascend_lab.aoe.search import Annealing, exhaustive
from ascend_lab.aoe.settings import Progress
from ascend_lab.aoe.space import Point, random_completion
from ascend_lab.aoe.subgraph.segments import (
    WHOLE,
    Choice,
    Segments,
    Way,
    cheapest,
    compiled,
    prepared,
)
from ascend_lab.aoe.subgraph.slicing import ORDERS, Region, SlicePlan, sliced
from ascend_lab.aoe.workers import Deadline, TimeUpError
from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import Graph, bound_of, simulate_graph
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.compile import Front
from ascend_lab.graph.counts import live_bytes, weight_bytes

COVERED = ("covered",)
"""The decision of a unit that lies in a region that started before it."""
WHOLE_UNIT = ("whole",)
MOST_COUNTED = 1_000_000


@dataclass(frozen=True)
class PlanSpace:
    """One decision per unit: stay whole, or start a region (stop, axis, sizes, order, halo)."""

    segments: Segments
    table: Mapping[tuple[int, int], Sequence[Way]]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        graph, points = self.segments.graph, self.segments.points
        names = tuple(graph.nodes[i].name for i in points[:-1])
        object.__setattr__(self, "names", names)

    @cached_property
    def _starts(self) -> list[tuple[Any, ...]]:
        """What each unit may decide if no region covers it."""
        found = []
        for first in range(self.segments.count):
            own: list[Any] = [WHOLE_UNIT]
            for stop in range(first + 1, self.segments.count + 1):
                for axis, parts in self.table.get((first, stop), ()):
                    halos = ("recompute",) if axis == "batch" else ("recompute", "store")
                    own += [(stop, axis, parts, o, h) for o in ORDERS for h in halos]
            found.append(tuple(own))
        return found

    @cached_property
    def size(self) -> int | None:
        """Number of plans; None if there are more than a million."""
        counts = [1]
        for starts in reversed(self._starts):
            first = len(self._starts) - len(counts)
            stops = (first + 1 if s == WHOLE_UNIT else s[0] for s in starts)
            counts.append(sum(counts[len(self._starts) - stop] for stop in stops))
        return counts[-1] if counts[-1] <= MOST_COUNTED else None

    def options(self, prefix: Point) -> tuple[Any, ...]:
        """Return what the next unit may decide."""
        place = len(prefix)
        stop = max((v[0] for v in prefix if isinstance(v[0], int)), default=0)
        return (COVERED,) if place < stop else self._starts[place]

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random plan."""
        return random_completion(self, (), rng)

    def key(self, point: Point) -> Point:
        """Return the point: no two are the same plan."""
        return point

    def points(self, prefix: Point = ()) -> Iterator[Point]:
        """Yield all plans."""
        if len(prefix) == len(self.names):
            yield prefix
            return
        for value in self.options(prefix):
            yield from self.points((*prefix, value))

    def whole(self) -> Point:
        """Return the plan that slices nothing."""
        return (WHOLE_UNIT,) * len(self.names)

    def point(self, chosen: Sequence[Choice]) -> Point:
        """Return segments of a chain as a point."""
        found: list[Any] = []
        for first, stop, (axis, parts) in chosen:
            if axis:
                start = (stop, axis, parts, "depth", "recompute")
                found += [start, *(COVERED,) * (stop - first - 1)]
            else:
                found.append(WHOLE_UNIT)
        return tuple(found)

    def near(self, point: Point) -> list[Point]:
        """Return a plan, the whole network, and the plan with each region once whole or zigzag."""
        found = [self.whole(), point]
        for first, value in enumerate(point):
            if value not in (COVERED, WHOLE_UNIT):
                stop, axis, parts, _, halo = value
                rest, alone = point[stop:], (WHOLE_UNIT,) * (stop - first)
                turned = ((stop, axis, parts, "zigzag", halo), *point[first + 1 : stop])
                found += [(*point[:first], *own, *rest) for own in (alone, turned)]
        return found

    def plan(self, point: Point) -> SlicePlan:
        """Return a point as a plan."""
        regions = []
        for first, value in enumerate(point):
            if value not in (COVERED, WHOLE_UNIT):
                stop, axis, parts, order, halo = value
                own = self.segments.region(first, stop, (axis, parts), order)
                regions.append(Region(own.first, own.last, axis, parts, order, halo))
        return SlicePlan(tuple(regions))

    def time(self, point: Point) -> float:
        """Return the seconds of the whole network; raises what slicing or lowering raises."""
        return plan_time(self.segments.graph, self.plan(point), self.segments.chip)


def plan_time(graph: Graph, plan: SlicePlan, chip: Chip) -> float:
    """Return the seconds a prepared graph takes under a plan."""
    return simulate_graph(compiled(sliced(graph, plan), chip)).time_s


BUDGET = 24
"""Plans timed on the whole network, unless stated."""
CHECKS = 0.25
"""Share of a time limit that is kept for plans on the whole network."""
Ways = Mapping[tuple[int, int], Sequence[Way]]
"""How each segment may be sliced."""
WALK = (0.005, 0.0005)
"""Annealing's temperatures: relative costs of plans differ little."""


@dataclass(frozen=True, slots=True)
class SubgraphResult:
    """The best plan found; `graph` is the prepared graph in slices, times are of whole networks.

    `tried` counts segments and plans timed; `bound_s` holds for every slicing and order.
    `interrupted`: the user stopped the search.
    """

    plan: SlicePlan
    graph: Graph
    before_s: float
    after_s: float
    bound_s: float
    tried: int
    interrupted: bool = False

    @property
    def gain(self) -> float:
        """Improvement as the published reports print it: (before - after) / after."""
        return (self.before_s - self.after_s) / self.after_s

    @property
    def gap(self) -> float:
        """How far above the bound the result is: after / bound - 1."""
        return self.after_s / self.bound_s - 1.0


def tune_subgraph(
    source: Front | Graph,
    chip: Chip | str,
    *,
    budget: int = BUDGET,
    time_limit_s: float | None = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> SubgraphResult:
    """Return the best slicing found; nothing is tried where all of a network fits into L2.

    `budget` counts plans timed on the whole network. A time limit that is reached leaves segments
    untried, so that results with one seed are equal only if none is. Raises as `compile_stages`.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    deadline = Deadline.of(time_limit_s)
    if isinstance(source, Front):
        graph = canonical(source.rewritten, chip)
    else:
        graph = prepared(source, chip)
    before, bound = plan_time(graph, SlicePlan(), chip), bound_of(graph, chip).time_s
    whole = SubgraphResult(SlicePlan(), graph, before, before, bound, 1)
    if max(live_bytes(graph)) + weight_bytes(graph) <= chip.l2.size_bytes:
        return whole
    told = progress or (lambda *_: None)
    try:
        with deadline.cut():
            segments = Segments(graph, chip)
            space = PlanSpace(segments, _table(segments, told))
            if not space.table:
                return whole
            timed = deadline.keeping(CHECKS * (time_limit_s or 0.0))
            chosen = _chain(segments, space.table, timed, told)
            start = space.near(space.point(chosen))
    except TimeUpError:
        return whole
    trace = _searched(space, start, budget, seed, deadline, told)
    tried, ended = len(trace.trials) + len(segments.timed), trace.end == "interrupted"
    best = min(trace.trials, key=lambda t: t.cost, default=None)
    if best is None or not best.cost < before:
        return replace(whole, tried=tried, interrupted=ended)
    plan = space.plan(best.point)
    return SubgraphResult(plan, sliced(graph, plan), before, best.cost, bound, tried, ended)


def _searched(
    space: PlanSpace, start: list[Point], budget: int, seed: int, deadline: Deadline, told: Progress
) -> Trace:
    """Return the plans timed on the whole network, from the chain's on."""
    few = space.size is not None and space.size <= budget
    search = exhaustive if few else Annealing(max(budget, 2), *WALK)
    left = None if math.isinf(deadline.end) else deadline.left_s

    def on_trial(trial: Trial) -> None:
        told("plans", trial.number + 1, budget, f"{trial.cost:g} s")

    return drive(search, space, space.time, budget, seed=seed, start=start, time_limit_s=left,
                 on_trial=on_trial)  # fmt: skip


def _table(segments: Segments, told: Progress) -> Ways:
    """Return how each segment may be sliced; segments that nothing helps are left out."""
    count = segments.count
    found: dict[tuple[int, int], Sequence[Way]] = {}
    for i in range(count):
        found |= {(i, j): segments.ways(i, j) for j in range(i + 1, count + 1)}
        told("cuts", i + 1, count, "")
    return {ends: ways for ends, ways in found.items() if ways}


def _chain(segments: Segments, table: Ways, deadline: Deadline, told: Progress) -> list[Choice]:
    """Return the cheapest chain of segments; behind the deadline no more of them are timed."""
    total, done = sum(map(len, table.values())), 0

    def cost(first: int, stop: int, way: Way) -> float:
        nonlocal done
        done += bool(way[0])
        if way[0] and deadline.over:
            return math.inf
        if way[0]:
            told("segments", done, total, "")
        return segments.cost(first, stop, way)

    count = segments.count
    total_s, chosen = cheapest(count, lambda i, j: table.get((i, j), ()), cost, segments.least)
    # a unit that cannot be built alone leaves the chain without a cost
    return [(i, i + 1, WHOLE) for i in range(count)] if math.isinf(total_s) else chosen
