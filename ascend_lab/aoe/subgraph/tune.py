"""The subgraph tuner: choose the slicing under which a network is fastest on a chip.

Dynamic programming over cut points gives the best plan under the costs of segments alone; a search
from there times plans on the whole network: all of them where they are few, else by annealing. The
network as it is takes part, so that the result is never slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ascend_lab.aoe.clock import Deadline, TimeUpError
from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.search import Annealing, exhaustive
from ascend_lab.aoe.settings import Progress
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.subgraph.bound import network_bound
from ascend_lab.aoe.subgraph.chain import Choice, cheapest
from ascend_lab.aoe.subgraph.front import prepared
from ascend_lab.aoe.subgraph.plans import PlanSpace, PlanTime, plan_time
from ascend_lab.aoe.subgraph.regions import SlicePlan
from ascend_lab.aoe.subgraph.segments import WHOLE, Segments, Way
from ascend_lab.aoe.subgraph.slicing import sliced
from ascend_lab.aoe.trace import Trace, Trial
from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import Graph
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.pipeline import Front
from ascend_lab.graph.tiling.bytes import live_bytes, weight_bytes

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
    before, bound = plan_time(graph, SlicePlan(), chip), network_bound(graph, chip)
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
    measure = PlanTime(space, space.segments.graph, space.segments.chip)
    left = None if math.isinf(deadline.end) else deadline.left_s

    def on_trial(trial: Trial) -> None:
        told("plans", trial.number + 1, budget, f"{trial.cost:g} s")

    return drive(
        search, space, measure, budget, seed=seed, start=start, time_limit_s=left, on_trial=on_trial
    )


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
