"""Slice plans of a network as a space of decisions, and what a plan costs on the whole network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ascend_lab.aoe.moves import random_completion
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.subgraph.chain import Choice
from ascend_lab.aoe.subgraph.front import compiled
from ascend_lab.aoe.subgraph.regions import ORDERS, Region, SlicePlan
from ascend_lab.aoe.subgraph.segments import Segments, Way
from ascend_lab.aoe.subgraph.slicing import sliced
from ascend_lab.chip import Chip
from ascend_lab.graph import Graph, simulate_graph

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


@dataclass(frozen=True)
class PlanTime:
    """Seconds of the whole network under a plan; raises what slicing or lowering raises."""

    space: PlanSpace
    graph: Graph
    chip: Chip

    def __call__(self, point: Point) -> float:
        """Return the time of a point."""
        return plan_time(self.graph, self.space.plan(point), self.chip)


def plan_time(graph: Graph, plan: SlicePlan, chip: Chip) -> float:
    """Return the seconds a prepared graph takes under a plan."""
    return simulate_graph(compiled(sliced(graph, plan), chip)).time_s
