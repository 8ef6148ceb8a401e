"""The subgraph tuner (job 1): compute operators slice by slice, so that their data stay in L2.

A convolution may write 40 MB for 32 images, more than L2 holds; the next operator then reads them
from memory. If both are computed for 4 images at a time, each slice of 5 MB is still in L2 when it
is read. The tuner looks for the slices, for one launch or many, and for prefetching of weights.

Cut points divide the network into a sequence of units (runs of nodes), and a segment is one or more
consecutive units that are sliced in the same way (see `segments`). A chain divides the units into
segments. Dynamic programming gives the chain with the least sum of segment costs, which are
estimates. Similar chains are then timed on the whole network, the most promising first; whenever
one is faster, the search goes on from it. The unsliced network is timed as well, so that the result
is never slower.

If the whole network fits into L2, no slices are searched. The search leaves out several super
kernels (either all kernels share one launch, or none do), other orders of the slices, and stored
halos.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge, Outcome, settle
from ascend_lab.aoe.drive import Progress, Settings
from ascend_lab.aoe.subgraph.segments import UNSLICED, Segments, Slicing
from ascend_lab.aoe.subgraph.slicing import Region, SlicePlan, even, ranges_of, sliced
from ascend_lab.aoe.workers import Deadline, TimeUpError
from ascend_lab.compiler import Graph, bound_of, lower, placement, simulate_graph
from ascend_lab.compiler.canonical import canonical
from ascend_lab.compiler.compile import DEFAULT_ROAD, Front, Road
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import Chip, load_chip

__all__ = [
    "Region",
    "Segments",
    "SlicePlan",
    "SubgraphResult",
    "all_chains",
    "cheapest",
    "compiled",
    "even",
    "plan_time",
    "prepared",
    "ranges_of",
    "sliced",
    "timed_plan",
    "tune_subgraph",
]
PLAN_BUDGET = 13
"""Default number of plans that are timed on the whole network."""
MAX_COST_RATIO = 1.1
"""A chain that costs more than this many times the best one is not timed on the network."""
PLAN_TIME_SHARE = 0.25
"""Share of the time limit that is reserved for timing plans on the whole network."""
SegmentChoice = tuple[int, int, Slicing]
"""The segment of the units first .. stop - 1, and how it is sliced: (0, 3, ("batch", (4, 4)))."""
SlicingsOf = Callable[[int, int], Iterable[Slicing]]
"""Maps first and stop of a segment to its slicings."""
Cost = Callable[[int, int, Slicing], float]
"""Maps first, stop and slicing of a segment to its cost in seconds."""
Chain = tuple[SegmentChoice, ...]
"""Segments that cover all units, in order."""


def prepared(graph: Graph, chip: Chip, *, dtype: str = "fp16") -> Graph:
    """Return a graph in the form that is sliced: rewritten, with number formats, canonical."""
    road = Road(dtype=dtype)
    return road.prepare(road.rewrite(graph)[0], chip)


def compiled(graph: Graph, chip: Chip, road: Road = DEFAULT_ROAD) -> Compiled:
    """Assign layouts and return the kernels of a prepared graph; raises as `compile_stages`."""
    return road.kernels(road.lay_out(graph, chip), chip)


def plan_time(graph: Graph, plan: SlicePlan, chip: Chip) -> float:
    """Return the simulated time in seconds of a prepared graph under a plan."""
    return simulate_graph(_launched(sliced(graph, plan), plan, chip)).time_s


def _launched(cut: Graph, plan: SlicePlan, chip: Chip) -> Compiled:
    return plan.with_launches(compiled(cut, chip, plan.road(chip)))


@dataclass(frozen=True, slots=True)
class SubgraphResult:
    """The best plan, and the network under it.

    `graph` is the sliced graph and `compiled` its kernels with the launches of the plan. Times are
    those of the whole network; `bound_s` is a lower bound for every slicing. `tried` is the number
    of plans that were timed. `interrupted` says that the user pressed Ctrl-C.
    """

    plan: SlicePlan
    graph: Graph
    compiled: Compiled
    before_s: float
    after_s: float
    bound_s: float
    tried: int
    interrupted: bool = False

    @property
    def gain(self) -> float:
        """Improvement as the published reports print it: (before - after) / after."""
        return (self.before_s - self.after_s) / self.after_s if self.after_s else 0.0

    @property
    def gap(self) -> float:
        """How far the result is above the bound, after / bound - 1."""
        return self.after_s / self.bound_s - 1.0


def tune_subgraph(
    source: Front | Graph,
    chip: Chip | str,
    *,
    budget: int = PLAN_BUDGET,
    time_limit_s: float | None = 60.0,
    progress: Progress | None = None,
) -> SubgraphResult:
    """Search for the plan under which a network is fastest on a chip.

    `budget` is the number of plans that are timed on the whole network. Ctrl-C and the time limit
    end the search with the best plan so far; the result is reproducible only if the time limit is
    not reached. Raises as `compile_stages`.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    deadline = Deadline.of(time_limit_s)
    rewritten = source.rewritten if isinstance(source, Front) else DEFAULT_ROAD.rewrite(source)[0]
    graph = canonical(rewritten, chip)
    search = _Search(graph, chip, deadline, budget, progress or (lambda *_: None))
    before_s = search.time(SlicePlan())
    try:
        search.try_variant(one_launch=True)
        search.try_variant(one_launch=True, inside=True)
        search.toggle_prefetch()
        # If all of a network fits into L2, every byte is read from memory once, sliced or not.
        if max(placement.live_bytes(graph)) + placement.weight_bytes(graph) > chip.l2.size_bytes:
            search.search_slices(time_limit_s)
            search.toggle_prefetch()
            if search.best.one_launch:
                search.try_variant(inside=not search.best.inside)
    except TimeUpError:
        pass
    except KeyboardInterrupt:
        search.interrupted = True
    return SubgraphResult(
        plan=search.best,
        graph=sliced(graph, search.best),
        compiled=search.compiled,
        before_s=before_s,
        after_s=search.best_s,
        bound_s=bound_of(rewritten, chip).time_s,
        tried=search.tried,
        interrupted=search.interrupted,
    )


def timed_plan(graph: Graph, plan: SlicePlan, chip: Chip, bound_s: float) -> SubgraphResult:
    """Return the result of a given plan, without a search; raises as `sliced`, `compile_stages`."""
    sliced_graph = sliced(graph, plan)
    before_s = plan_time(graph, SlicePlan(), chip)
    launched = _launched(sliced_graph, plan, chip)
    after_s = simulate_graph(launched).time_s
    return SubgraphResult(
        plan=plan,
        graph=sliced_graph,
        compiled=launched,
        before_s=before_s,
        after_s=after_s,
        bound_s=bound_s,
        tried=0,
    )


class _Search:
    """One run of the search: the best plan so far, and the times of all plans that were tried."""

    def __init__(
        self, graph: Graph, chip: Chip, deadline: Deadline, budget: int, progress: Progress
    ) -> None:
        self.graph = graph
        self.chip = chip
        self.deadline = deadline
        self.budget = budget
        self.progress = progress
        self.best = SlicePlan()
        self.best_s = math.inf
        self.interrupted = False
        self.times_s: dict[SlicePlan, float] = {}
        self.compiled = compiled(graph, chip)
        # the kernels that were built last, and the regions and `inside` that they were built for
        self._kernels = self.compiled
        self._kernels_for: tuple[tuple[Region, ...], bool] = (), False

    @property
    def tried(self) -> int:
        """Number of plans that were timed."""
        return len(self.times_s)

    def time(self, plan: SlicePlan) -> float:
        """Return the seconds of a plan, infinite if it cannot be built; remember the best plan."""
        if plan in self.times_s:
            return self.times_s[plan]
        time_s = math.inf
        with suppress(AscendLabError):
            # Plans that differ only in launches or prefetch have the same kernels: these are not
            # built again.
            if (plan.regions, plan.inside) != self._kernels_for:
                sliced_graph = sliced(self.graph, plan)
                self._kernels = compiled(sliced_graph, self.chip, plan.road(self.chip))
                self._kernels_for = plan.regions, plan.inside
            time_s = simulate_graph(plan.with_launches(self._kernels)).time_s
        self.times_s[plan] = time_s
        if time_s < self.best_s:
            self.best = plan
            self.best_s = time_s
            self.compiled = plan.with_launches(self._kernels)
        self.progress("plans", min(self.tried, self.budget), self.budget, f"{self.best_s:g} s")
        return time_s

    def try_variant(self, **options: bool) -> None:
        """Time the best plan with some of its options changed."""
        with self.deadline.cut():
            self.time(replace(self.best, **options))  # type: ignore[arg-type]

    def toggle_prefetch(self) -> None:
        """Time the best plan with prefetching of weights, or without it if it has that already.

        An L2 that is a buffer does not hold weights.
        """
        if self.chip.l2.kind == "cache":
            self.try_variant(prefetch=not self.best.prefetch)

    def search_slices(self, time_limit_s: float | None) -> None:
        """Find the cheapest chain of segments, then time it and similar chains on the network."""
        segments = Segments(self.graph, self.chip, self.best.road(self.chip))
        # Costs of segments are estimates; a quarter of the time is for plans on the whole network.
        chain_deadline = self.deadline.reserving(PLAN_TIME_SHARE * (time_limit_s or 0.0))
        chain = cheapest_chain(segments, chain_deadline, self.progress)
        if chain is not None:
            with self.deadline.cut():
                self._climb(segments, chain)

    def _climb(self, segments: Segments, chain: Chain) -> None:
        """Time a chain and its neighbours on the network, and move to the first that is faster.

        If none is faster, chains with uneven slices are tried as well.
        """
        best_s = self.time(self._plan(segments, chain))
        propose = neighbours
        tried_chains = {chain}
        while self.tried < self.budget:
            cost_s = {}
            for candidate in propose(segments, chain):
                if candidate not in tried_chains:
                    cost_s[candidate] = chain_cost(segments, candidate)
            # A chain whose segments cost over 10 % more is unlikely to be faster as a network.
            limit_s = MAX_COST_RATIO * chain_cost(segments, chain)
            promising = [candidate for candidate in cost_s if cost_s[candidate] <= limit_s]
            for candidate in sorted(promising, key=cost_s.__getitem__):
                if self.tried >= self.budget:
                    return
                tried_chains.add(candidate)
                time_s = self.time(self._plan(segments, candidate))
                if time_s < best_s:
                    chain = candidate
                    best_s = time_s
                    break
            else:
                # no candidate was faster
                if propose is uneven:
                    return
                propose = uneven

    def _plan(self, segments: Segments, chain: Chain) -> SlicePlan:
        """Return the plan that slices the segments of a chain, with the best options so far."""
        regions = []
        for first, stop, slicing in chain:
            if slicing != UNSLICED:
                regions.append(segments.region(first, stop, slicing))
        return replace(self.best, regions=tuple(regions))


def cheapest_chain(segments: Segments, deadline: Deadline, progress: Progress) -> Chain | None:
    """Return the chain of lowest cost; None if a unit cannot be built.

    After the deadline, no further slicings are considered.
    """
    count = segments.count

    def slicings(first: int, stop: int) -> list[Slicing]:
        # segments of a single unit come once for every unit
        if stop == first + 1:
            progress("cuts", stop, count, "")
        return [] if deadline.has_passed else segments.slicings(first, stop)

    total_s, chain = cheapest(count, slicings, segments.cost, segments.lower_bound)
    # the cost is infinite if some unit cannot be built in any segment
    return tuple(chain) if math.isfinite(total_s) else None


def chain_cost(segments: Segments, chain: Chain) -> float:
    """Return the sum of the costs of a chain's segments."""
    return sum(segments.cost(*choice) for choice in chain)


def neighbours(segments: Segments, chain: Chain) -> Iterator[Chain]:
    """Yield chains with one segment sliced otherwise, some joined, or a border moved by a unit."""
    # Neighbouring segments with the same number of slices are joined: units 0, 1 in 4 slices and
    # units 2, 3, 4 in 4 slices become units 0 .. 4 in 4 slices.
    joined: list[SegmentChoice] = []
    for _, equal_counts in groupby(chain, key=_slice_count):
        group = list(equal_counts)
        first, _, slicing = group[0]
        _, stop, _ = group[-1]
        joined.append((first, stop, slicing))
    yield tuple(joined)
    for i, (first, stop, slicing) in enumerate(chain):
        for alternative in (UNSLICED, *segments.slicings(first, stop)):
            if alternative != slicing:
                yield (*chain[:i], (first, stop, alternative), *chain[i + 1 :])
    for i, ((first, border, left_slicing), (_, stop, right_slicing)) in enumerate(pairwise(chain)):
        head = chain[:i]
        tail = chain[i + 2 :]
        for slicing in {left_slicing, right_slicing}:
            if slicing in (UNSLICED, *segments.slicings(first, stop)):
                yield (*head, (first, stop, slicing), *tail)
        for moved in (border - 1, border + 1):
            if first < moved < stop:
                yield (*head, (first, moved, left_slicing), (moved, stop, right_slicing), *tail)


def _slice_count(choice: SegmentChoice) -> int:
    _, _, (_, slice_sizes) = choice
    return len(slice_sizes)


def uneven(segments: Segments, chain: Chain) -> Iterator[Chain]:
    """Yield chains in which one segment has a slice more or less, so that slices may be uneven.

    It is the segment that loses most time by misses in L2: that time is the most that other slices
    can gain.
    """
    cut_in_batch = []
    for choice in chain:
        _, _, (axis, _) = choice
        if axis == "batch":
            cut_in_batch.append(choice)
    if not cut_in_batch:
        return

    def lost_s(choice: SegmentChoice) -> float:
        return segments.cost(*choice) - segments.lower_bound(*choice)

    worst = max(cut_in_batch, key=lost_s)
    first, stop, (axis, slice_sizes) = worst
    index = chain.index(worst)
    for count in (len(slice_sizes) - 1, len(slice_sizes) + 1):
        if 1 < count <= segments.batch:
            resliced = first, stop, (axis, even(segments.batch, count))
            yield (*chain[:index], resliced, *chain[index + 1 :])


def cheapest(
    count: int, slicings: SlicingsOf, cost: Cost, least: Cost = lambda first, stop, slicing: 0.0
) -> tuple[float, list[SegmentChoice]]:
    """Return the lowest total cost of `count` units, and the chain that has it.

    This is dynamic programming over the first j units:

        best(j) = min over i < j and slicings w of the units i .. j-1:  best(i) + cost(i, j, w)

    `least` is a lower bound on `cost`; the cost of a segment is not computed if its bound shows
    that it cannot be part of a better chain.
    """
    best: list[tuple[float, list[SegmentChoice]]] = [(0.0, [])]
    for stop in range(1, count + 1):
        lowest: tuple[float, list[SegmentChoice]] = (math.inf, [])
        # short segments first: their costs are computed fastest, and exclude longer ones
        for first in reversed(range(stop)):
            previous_cost, previous_chain = best[first]
            for slicing in (UNSLICED, *slicings(first, stop)):
                # the cost may need simulations, the bound is a sum of known times
                if previous_cost + least(first, stop, slicing) >= lowest[0]:
                    continue
                total_cost = previous_cost + cost(first, stop, slicing)
                if total_cost < lowest[0]:
                    lowest = total_cost, [*previous_chain, (first, stop, slicing)]
        best.append(lowest)
    return best[-1]


def all_chains(count: int, slicings: SlicingsOf, first: int = 0) -> Iterator[list[SegmentChoice]]:
    """Yield every chain of the units `first` .. `count` - 1; their number grows exponentially."""
    if first == count:
        yield []
        return
    for stop in range(first + 1, count + 1):
        for slicing in (UNSLICED, *slicings(first, stop)):
            for remaining_chain in all_chains(count, slicings, stop):
                yield [(first, stop, slicing), *remaining_chain]


# -- slicing with the knowledge bank --------------------------------------------------------------
def slice_network(
    front: Front,
    chip: Chip,
    settings: Settings,
    knowledge: Knowledge,
    progress: Progress,
    deadline: Deadline,
) -> tuple[SubgraphResult, Outcome | None]:
    """Take the slicing of a network from the bank, or search it and store it there.

    The second value is the outcome for the bank, or None if the user stopped the search.
    """
    graph = canonical(front.rewritten, chip)
    bound_s = bound_of(front.rewritten, chip).time_s
    key = graph_key(graph, chip)
    stored = None if settings.repeat else knowledge.find(key)
    if stored and (plan := _from_bank(graph, chip, stored[0], bound_s)):
        return plan, "hit"
    try:
        result = tune_subgraph(front, chip, time_limit_s=deadline.limit_s, progress=progress)
    except KeyboardInterrupt:  # before any plan was timed
        result = replace(timed_plan(graph, SlicePlan(), chip, bound_s), interrupted=True)
    if result.interrupted:
        return result, None
    times_s = (result.before_s, result.after_s, result.bound_s)
    before_cycles, after_cycles, bound_cycles = (round(t * chip.clock_hz) for t in times_s)
    # rounding must not turn the order around: bound <= after <= before
    after_cycles = min(after_cycles, before_cycles)
    entry = BankEntry(
        key=key,
        schedule=plan_as_data(result.plan, graph),
        before_cycles=before_cycles,
        after_cycles=after_cycles,
        bound_cycles=min(bound_cycles, after_cycles),
        proven=False,
        search="dynamic programming, descent",
        seed=settings.seed,
        trials=result.tried,
    )
    return result, settle(knowledge, entry)


def graph_key(graph: Graph, chip: Chip) -> BankKey:
    """Return the bank's key of a network; names of nodes and tensors do not matter."""
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        # For a batch of 8, reshapes to (-1, 1000) and to (8, 1000) are the same: -1 is replaced.
        if node.op == "reshape":
            shape = graph.types[node.output].shape
            nodes[i] = replace(node, attrs={**node.attrs, "shape": shape})
    return BankKey.of(chip, "graph", "network", lower.piece_of(graph, nodes).key)


def plan_as_data(plan: SlicePlan, graph: Graph) -> dict[str, Any]:
    """Return a plan as data for the bank, with the positions of nodes in place of their names."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    data = plan.as_dict()
    for row in data["regions"]:
        row["first"] = position[row["first"]]
        row["last"] = position[row["last"]]
    return data


def plan_from_data(data: Mapping[str, Any], graph: Graph) -> SlicePlan:
    """Return the plan that `plan_as_data` wrote, with the node names of this graph."""
    names = [node.name for node in graph.nodes]
    rows = [
        {**row, "first": names[row["first"]], "last": names[row["last"]]} for row in data["regions"]
    ]
    return SlicePlan.from_dict({**data, "regions": rows})


def _from_bank(graph: Graph, chip: Chip, entry: BankEntry, bound_s: float) -> SubgraphResult | None:
    """Return the bank's plan, timed again; None if it does not fit or is slower than no slicing."""
    try:
        result = timed_plan(graph, plan_from_data(entry.schedule, graph), chip, bound_s)
    except (AscendLabError, LookupError, TypeError):  # data of another version, or damaged
        return None
    return None if result.after_s > result.before_s else result
