"""The subgraph tuner: operators in slices, so that what one leaves in L2 the next finds there.

It looks for the slices, launches and prefetch under which a network is fastest on a chip.

Dynamic programming over cut points gives the best slices under the costs of segments alone; plans
near them are then timed on the whole network, the most promising first, and each that is faster is
the next to start from. The network as it is takes part, so that the result is never slower. Borders
of kernels are searched as two ways: at the price of a launch, and of a barrier inside one launch.

Not searched, because nothing can be gained: slices where all of a network fits into L2 (every byte
is read once already); several super kernels (a barrier inside one costs less than a launch, and no
kernel runs longer there: all kernels apart or all in one is timed); the order of slices and stored
halos (depth first moves the fewest bytes unless weights alone overflow L2).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge, Outcome, settle
from ascend_lab.aoe.drive import Progress, Settings
from ascend_lab.aoe.subgraph.segments import WHOLE, Segments, Way
from ascend_lab.aoe.subgraph.slicing import Region, SlicePlan, even, ranges_of, sliced
from ascend_lab.aoe.workers import Deadline, TimeUpError
from ascend_lab.compiler import Compiled, Graph, Road, bound_of, lower, placement, simulate_graph
from ascend_lab.compiler.canonical import canonical
from ascend_lab.compiler.compile import DEFAULT_ROAD, Front
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
    "planned",
    "prepared",
    "ranges_of",
    "sliced",
    "tune_subgraph",
]
BUDGET = 13
"""Plans timed on the whole network, unless stated."""
FAR = 1.1
"""A plan is not timed if its segments cost so much more than the best one's."""
CHECKS = 0.25
"""Share of a time limit that is kept for plans on the whole network."""
Choice = tuple[int, int, Way]
"""Units first .. stop-1 and how they are sliced."""
Ways = Callable[[int, int], Iterable[Way]]
Cost = Callable[[int, int, Way], float]
Chain = tuple[Choice, ...]
"""How all units are taken, in order."""


def prepared(graph: Graph, chip: Chip, *, dtype: str = "fp16") -> Graph:
    """Return a model's graph as slicing takes it: rewritten, in a number format, canonical."""
    road = Road(dtype=dtype)
    return road.prepare(road.rewrite(graph)[0], chip)


def compiled(graph: Graph, chip: Chip, road: Road = DEFAULT_ROAD) -> Compiled:
    """Return the kernels of a prepared graph, sliced or not; raises as `compile_stages`."""
    return road.kernels(road.lay_out(graph, chip), chip)


def plan_time(graph: Graph, plan: SlicePlan, chip: Chip) -> float:
    """Return the seconds a prepared graph takes under a plan."""
    return simulate_graph(_launched(sliced(graph, plan), plan, chip)).time_s


def _launched(cut: Graph, plan: SlicePlan, chip: Chip) -> Compiled:
    return plan.launched(compiled(cut, chip, plan.road(chip)))


@dataclass(frozen=True, slots=True)
class SubgraphResult:
    """The best plan found; `graph` is the prepared graph in slices, `compiled` launched as planned.

    Times are of whole networks. `tried` counts plans timed; `bound_s` holds for every slicing and
    order. `interrupted`: the user stopped the search.
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
        """How far above the bound the result is: after / bound - 1."""
        return self.after_s / self.bound_s - 1.0


def tune_subgraph(
    source: Front | Graph,
    chip: Chip | str,
    *,
    budget: int = BUDGET,
    time_limit_s: float | None = 60.0,
    progress: Progress | None = None,
) -> SubgraphResult:
    """Return the best plan found; Ctrl-C and the time limit keep the best one so far.

    `budget` counts plans timed on the whole network. A time limit that is reached leaves segments
    or plans untried, so that results are equal only if it is not. Raises as `compile_stages`.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    deadline = Deadline.of(time_limit_s)
    rewritten = source.rewritten if isinstance(source, Front) else DEFAULT_ROAD.rewrite(source)[0]
    graph = canonical(rewritten, chip)
    search = _Search(graph, chip, deadline, budget, progress or (lambda *_: None))
    before_s = search.time(SlicePlan())
    try:
        search.also(one_launch=True)
        search.also(one_launch=True, inside=True)
        search.prefetch()
        # Where all of a network fits into L2 every byte is read from memory once, sliced or not.
        if max(placement.live_bytes(graph)) + placement.weight_bytes(graph) > chip.l2.size_bytes:
            search.slices(time_limit_s)
            search.prefetch()
            if search.best.one_launch:  # the kernels that are best inside a launch, or the others
                search.also(inside=not search.best.inside)
    except TimeUpError:
        pass
    except KeyboardInterrupt:
        search.interrupted = True
    bound = bound_of(rewritten, chip).time_s
    return SubgraphResult(
        search.best,
        sliced(graph, search.best),
        search.compiled,
        before_s,
        search.best_s,
        bound,
        search.tried,
        search.interrupted,
    )


def planned(graph: Graph, plan: SlicePlan, chip: Chip, bound_s: float) -> SubgraphResult:
    """Return a prepared graph under a plan that is known; raises as `sliced`, `compile_stages`."""
    cut = sliced(graph, plan)
    before_s = plan_time(graph, SlicePlan(), chip)
    built = _launched(cut, plan, chip)
    return SubgraphResult(plan, cut, built, before_s, simulate_graph(built).time_s, bound_s, 0)


class _Search:
    """The best plan so far, and what is needed to time others."""

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
        self.known: dict[SlicePlan, float] = {}
        self.compiled = self._built = compiled(graph, chip)
        self._of: tuple[tuple[Region, ...], bool] = (), False

    @property
    def tried(self) -> int:
        """Plans timed."""
        return len(self.known)

    def time(self, plan: SlicePlan) -> float:
        """Return the seconds of a plan, infinite if it cannot be built; keep the best."""
        if plan in self.known:
            return self.known[plan]
        time_s = math.inf
        with suppress(AscendLabError):
            # Plans that differ only in launches or prefetch have the same kernels: these are built
            # once.
            if (plan.regions, plan.inside) != self._of:
                cut = sliced(self.graph, plan)
                road = plan.road(self.chip)
                self._built = compiled(cut, self.chip, road)
                self._of = plan.regions, plan.inside
            time_s = simulate_graph(plan.launched(self._built)).time_s
        self.known[plan] = time_s
        if time_s < self.best_s:
            self.best, self.best_s, self.compiled = plan, time_s, plan.launched(self._built)
        self.progress("plans", min(self.tried, self.budget), self.budget, f"{self.best_s:g} s")
        return time_s

    def also(self, **how: Any) -> None:
        """Take the best plan with other launches, kernels for them or prefetch, if that helps."""
        with self.deadline.cut():
            self.time(replace(self.best, **how))

    def prefetch(self) -> None:
        """Load weights ahead if that helps, or no more if it does not; a buffer holds none."""
        if self.chip.l2.kind == "cache":
            self.also(prefetch=not self.best.prefetch)

    def slices(self, time_limit_s: float | None) -> None:
        """Slice: the cheapest chain of segments, and what lies near."""
        segments = Segments(self.graph, self.chip, self.best.road(self.chip))
        # Costs of segments are estimates; a quarter of the time is for plans on the whole network.
        reserving = self.deadline.reserving(CHECKS * (time_limit_s or 0.0))
        chain = cheapest_chain(segments, reserving, self.progress)
        if chain is not None:
            with self.deadline.cut():
                self._climb(segments, chain)

    def _climb(self, segments: Segments, chain: Chain) -> None:
        """Time a chain and its neighbours on the network, and go on from each that is faster.

        When none is, the segment furthest from what it costs if all reads hit is sliced unevenly.
        """
        best_s = self.time(self._plan(segments, chain))
        propose = neighbours
        tried_chains = {chain}
        while self.tried < self.budget:
            cost = {
                c: total(segments, c) for c in propose(segments, chain) if c not in tried_chains
            }
            # A chain whose segments cost 10 % more than those of the best one will not be quicker
            # as a network.
            limit_s = FAR * total(segments, chain)
            for candidate in sorted((c for c in cost if cost[c] <= limit_s), key=cost.__getitem__):
                if self.tried >= self.budget:
                    return
                tried_chains.add(candidate)
                time_s = self.time(self._plan(segments, candidate))
                if time_s < best_s:
                    chain = candidate
                    best_s = time_s
                    break
            else:
                # Neither neighbours nor uneven slices gained: this is the foot of the valley.
                if propose is uneven:
                    return
                propose = uneven

    def _plan(self, segments: Segments, chain: Chain) -> SlicePlan:
        regions = tuple(segments.region(*choice) for choice in chain if choice[2][0])
        return replace(self.best, regions=regions)


def cheapest_chain(segments: Segments, deadline: Deadline, progress: Progress) -> Chain | None:
    """Return the chain of least cost; None if a unit cannot be built.

    Behind the deadline, units are only taken whole.
    """
    count = segments.count

    def ways(first: int, stop: int) -> list[Way]:
        if stop == first + 1:
            progress("cuts", stop, count, "")
        return [] if deadline.has_passed else segments.ways(first, stop)

    total_s, chosen = cheapest(count, ways, segments.cost, segments.least)
    # a unit that cannot be built alone leaves the chain without a cost
    return tuple(chosen) if math.isfinite(total_s) else None


def total(segments: Segments, chain: Chain) -> float:
    """Return what the segments of a chain cost."""
    return sum(segments.cost(*choice) for choice in chain)


def neighbours(segments: Segments, chain: Chain) -> Iterator[Chain]:
    """Yield chains with one segment sliced otherwise, some joined, or a border moved by a unit."""
    # Segments in the same number of slices, next to each other, may be one: (0, 2, 4 slices) and
    # (2, 5, 4 slices) become (0, 5, 4 slices), and what crosses unit 2 stays in L2.
    alike = [list(run) for _, run in groupby(chain, key=lambda choice: len(choice[2][1]))]
    yield tuple((run[0][0], run[-1][1], run[0][2]) for run in alike)
    for i, (first, stop, way) in enumerate(chain):
        for alternative in (WHOLE, *segments.ways(first, stop)):
            if alternative != way:
                yield (*chain[:i], (first, stop, alternative), *chain[i + 1 :])
    for i, ((first, cut, left), (_, stop, right)) in enumerate(pairwise(chain)):
        ends = chain[:i], chain[i + 2 :]
        for way in {left, right}:
            if way in (WHOLE, *segments.ways(first, stop)):
                yield (*ends[0], (first, stop, way), *ends[1])
        for place in (cut - 1, cut + 1):
            if first < place < stop:
                yield (*ends[0], (first, place, left), (place, stop, right), *ends[1])


def uneven(segments: Segments, chain: Chain) -> Iterator[Chain]:
    """Yield chains with the segment that misses most in one slice of images more or less."""
    sliced = [choice for choice in chain if choice[2][0] == "batch"]
    if sliced:
        # What a segment costs above its time with all reads in L2 is the most that other slices can
        # gain.
        worst = max(sliced, key=lambda choice: segments.cost(*choice) - segments.least(*choice))
        first, stop, (axis, parts) = worst
        place = chain.index(worst)
        for count in (len(parts) - 1, len(parts) + 1):
            if 1 < count <= segments.batch:
                resliced = first, stop, (axis, even(segments.batch, count))
                yield (*chain[:place], resliced, *chain[place + 1 :])


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
        cheapest_here: tuple[float, list[Choice]] = (math.inf, [])
        # Short segments first: they are the cheapest to price, and give a low bar for the longer
        # ones.
        for first in reversed(range(stop)):
            before_s, chosen = best[first]
            for way in choices(first, stop, ways):
                # Pricing a segment lowers and simulates kernels; its bound is a sum that is known
                # already.
                if before_s + least(first, stop, way) >= cheapest_here[0]:
                    continue
                total = before_s + cost(first, stop, way)
                if total < cheapest_here[0]:
                    cheapest_here = total, [*chosen, (first, stop, way)]
        best.append(cheapest_here)
    return best[-1]


def choices(first: int, stop: int, ways: Ways) -> list[Way]:
    """Return how units may be taken: whole, and in slices."""
    return [WHOLE, *ways(first, stop)]


def all_chains(count: int, ways: Ways, first: int = 0) -> Iterator[list[Choice]]:
    """Yield all ways to take the units from `first` on: for small chains."""
    if first == count:
        yield []
        return
    for stop in range(first + 1, count + 1):
        for way in choices(first, stop, ways):
            for remainder in all_chains(count, ways, stop):
                yield [(first, stop, way), *remainder]


# -- as the bank keeps it -------------------------------------------------------------------------
def slice_network(
    front: Front,
    chip: Chip,
    settings: Settings,
    knowledge: Knowledge,
    progress: Progress,
    deadline: Deadline,
) -> tuple[SubgraphResult, Outcome | None]:
    """Return the slicing of a network, and what became of the bank: nothing if it was stopped."""
    graph = canonical(front.rewritten, chip)
    bound_s = bound_of(front.rewritten, chip).time_s
    key = key_of_graph(graph, chip)
    stored = None if settings.repeat else knowledge.find(key)
    if stored and (plan := _from_bank(graph, chip, stored[0], bound_s)):
        return plan, "hit"
    try:
        result = tune_subgraph(front, chip, time_limit_s=deadline.limit_s, progress=progress)
    except KeyboardInterrupt:  # before any plan was timed
        result = replace(planned(graph, SlicePlan(), chip, bound_s), interrupted=True)
    if result.interrupted:
        return result, None
    cycles = (result.before_s, result.after_s, result.bound_s)
    before_cycles, after_cycles, bound_cycles = (round(t * chip.clock_hz) for t in cycles)
    entry = BankEntry(
        key,
        numbered(result.plan, graph),
        before_cycles,
        min(after_cycles, before_cycles),
        min(bound_cycles, after_cycles),
        False,
        "dynamic programming, descent",
        settings.seed,
        result.tried,
    )
    return result, settle(knowledge, entry)


def key_of_graph(graph: Graph, chip: Chip) -> BankKey:
    """Return the bank's key of a network: independent of names and of how reshapes are spelled."""
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        # A reshape to (-1, 1000) and one to (8, 1000) are the same where the batch is 8: both are
        # spelled out.
        if node.op == "reshape":
            shape = graph.types[node.output].shape
            nodes[i] = replace(node, attrs={**node.attrs, "shape": shape})
    return BankKey.of(chip, "graph", "network", lower.piece_of(graph, nodes).key)


def numbered(plan: SlicePlan, graph: Graph) -> dict[str, Any]:
    """Return a plan as the bank keeps it: nodes by their place in the graph."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    data = plan.plain()
    rows = [row | {end: place[row[end]] for end in ("first", "last")} for row in data["regions"]]
    return data | {"regions": rows}


def named(data: Mapping[str, Any], graph: Graph) -> SlicePlan:
    """Return the plan that `numbered` wrote, for a graph with these nodes in this order."""
    names = [node.name for node in graph.nodes]
    rows = [{**r, **{end: names[r[end]] for end in ("first", "last")}} for r in data["regions"]]
    return SlicePlan.of({**data, "regions": rows})


def _from_bank(graph: Graph, chip: Chip, entry: BankEntry, bound_s: float) -> SubgraphResult | None:
    """Return the plan of a bank, timed again; None if it is slower than the whole network now."""
    try:
        result = planned(graph, named(entry.schedule, graph), chip, bound_s)
    except (AscendLabError, LookupError, TypeError):  # a plan for another graph, or none at all
        return None
    return None if result.after_s > result.before_s else result
