"""The subgraph tuner: slices, launches and prefetch under which a network is fastest on a chip.

Dynamic programming over cut points gives the best slices under the costs of segments alone; plans
near them are then timed on the whole network, the most promising first, and each that is faster is
the next to start from. The network as it is takes part, so that the result is never slower.

Not searched, because nothing can be gained: slices where all of a network fits into L2 (every byte
is read once already); how many launches (a barrier inside a super kernel costs less than a launch,
and no kernel runs longer there: one scope is best); the order of slices and stored halos (depth
first moves the fewest bytes unless weights alone overflow L2).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ascend_lab.aoe.settings import Progress
from ascend_lab.aoe.subgraph.segments import (
    WHOLE,
    Choice,
    Segments,
    Way,
    cheapest,
    compiled,
    even,
    prepared,
)
from ascend_lab.aoe.subgraph.slicing import SlicePlan, sliced
from ascend_lab.aoe.workers import Deadline, TimeUpError
from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Graph, bound_of, simulate_graph
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.compile import Front
from ascend_lab.graph.counts import live_bytes, weight_bytes

BUDGET = 12
"""Plans timed on the whole network, unless stated."""
FAR = 1.1
"""A plan is not timed if its segments cost so much more than the best one's."""
CHECKS = 0.5
"""Share of a time limit that is kept for plans on the whole network."""
Chain = tuple[Choice, ...]
"""How all units are taken, in order."""


def plan_time(graph: Graph, plan: SlicePlan, chip: Chip) -> float:
    """Return the seconds a prepared graph takes under a plan."""
    return simulate_graph(plan.launched(compiled(sliced(graph, plan), chip))).time_s


@dataclass(frozen=True, slots=True)
class SubgraphResult:
    """The best plan found; `graph` is the prepared graph in slices, times are of whole networks.

    `tried` counts plans timed; `bound_s` holds for every slicing and order. `interrupted`: the user
    stopped the search.
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
    progress: Progress | None = None,
) -> SubgraphResult:
    """Return the best plan found; Ctrl-C and the time limit keep the best one so far.

    `budget` counts plans timed on the whole network. A time limit that is reached leaves segments
    or plans untried, so that results are equal only if it is not. Raises as `compile_stages`.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    deadline = Deadline.of(time_limit_s)
    if isinstance(source, Front):
        graph = canonical(source.rewritten, chip)
    else:
        graph = prepared(source, chip)
    search = _Search(graph, chip, deadline, budget, progress or (lambda *_: None))
    before = search.time(SlicePlan())
    try:
        search.launches()
        if max(live_bytes(graph)) + weight_bytes(graph) > chip.l2.size_bytes:
            search.slices(time_limit_s)
        search.prefetch()
    except TimeUpError:
        pass
    except KeyboardInterrupt:
        search.interrupted = True
    bound = bound_of(graph, chip).time_s
    return SubgraphResult(
        search.best, sliced(graph, search.best), before, search.best_s, bound, search.tried,
        search.interrupted,
    )  # fmt: skip


class _Search:
    """The best plan so far, and what is needed to time others."""

    def __init__(
        self, graph: Graph, chip: Chip, deadline: Deadline, budget: int, told: Progress
    ) -> None:
        self.graph, self.chip, self.deadline = graph, chip, deadline
        self.budget, self.told = budget, told
        self.best, self.best_s, self.interrupted = SlicePlan(), math.inf, False
        self.known: dict[SlicePlan, float] = {}

    @property
    def tried(self) -> int:
        """Plans timed."""
        return len(self.known)

    def time(self, plan: SlicePlan) -> float:
        """Return the seconds of a plan, infinite if it cannot be built; keep the best."""
        if plan in self.known:
            return self.known[plan]
        try:
            time_s = plan_time(self.graph, plan, self.chip)
        except AscendLabError:
            if not plan.regions:
                raise
            time_s = math.inf
        self.known[plan] = time_s
        if time_s < self.best_s:
            self.best, self.best_s = plan, time_s
        self.told("plans", min(self.tried, self.budget), self.budget, f"{self.best_s:g} s")
        return time_s

    def launches(self) -> None:
        """Put all kernels into one launch."""
        with self.deadline.cut():
            self.time(replace(self.best, one_launch=True))

    def prefetch(self) -> None:
        """Load weights ahead, if that helps."""
        with self.deadline.cut():
            self.time(replace(self.best, prefetch=True))

    def slices(self, time_limit_s: float | None) -> None:
        """Slice: the cheapest chain of segments, and what lies near."""
        keeping = self.deadline.keeping(CHECKS * (time_limit_s or 0.0))
        with keeping.cut():
            segments = Segments(self.graph, self.chip)
            chain = cheapest_chain(segments, self.told)
        if chain is None:
            return
        with self.deadline.cut():
            self._climb(segments, chain)

    def _climb(self, segments: Segments, chain: Chain) -> None:
        """Time a chain and its neighbours on the network, and go on from each that is faster."""
        seen, best_s = {chain}, self.time(self._plan(segments, chain))
        while self.tried < self.budget:
            cost = {c: total(segments, c) for c in neighbours(segments, chain) if c not in seen}
            most = FAR * total(segments, chain)
            near = sorted((c for c in cost if cost[c] <= most), key=cost.__getitem__)
            for one in near[: self.budget - self.tried]:
                seen.add(one)
                time_s = self.time(self._plan(segments, one))
                if time_s < best_s:
                    chain, best_s = one, time_s
                    break
            else:
                return

    def _plan(self, segments: Segments, chain: Chain) -> SlicePlan:
        regions = tuple(segments.region(*choice) for choice in chain if choice[2][0])
        return replace(self.best, regions=regions)


def cheapest_chain(segments: Segments, told: Progress) -> Chain | None:
    """Return the chain of least cost; None if a unit cannot be built."""
    count = segments.count

    def ways(first: int, stop: int) -> list[Way]:
        if stop == first + 1:
            told("cuts", stop, count, "")
        return segments.ways(first, stop)

    total_s, chosen = cheapest(count, ways, segments.cost, segments.least)
    # a unit that cannot be built alone leaves the chain without a cost
    return tuple(chosen) if math.isfinite(total_s) else None


def total(segments: Segments, chain: Chain) -> float:
    """Return what the segments of a chain cost."""
    return sum(segments.cost(*choice) for choice in chain)


def neighbours(segments: Segments, chain: Chain) -> Iterator[Chain]:
    """Yield chains with one segment sliced otherwise, two joined, or a border moved by a unit."""
    for i, (first, stop, way) in enumerate(chain):
        for other in finer(segments, first, stop):
            if other != way:
                yield (*chain[:i], (first, stop, other), *chain[i + 1 :])
    for i, ((first, cut, left), (_, stop, right)) in enumerate(pairwise(chain)):
        ends = chain[:i], chain[i + 2 :]
        for way in {left, right}:
            if way in (WHOLE, *segments.ways(first, stop)):
                yield (*ends[0], (first, stop, way), *ends[1])
        for place in (cut - 1, cut + 1):
            if first < place < stop:
                yield (*ends[0], (first, place, left), (place, stop, right), *ends[1])


def finer(segments: Segments, first: int, stop: int) -> Sequence[Way]:
    """Return the ways of a segment, uneven slices included."""
    known = segments.ways(first, stop)
    if not known or known[0][0] != "batch":
        return [WHOLE, *known]
    numbers = range(2, segments.batch + 1)
    uneven = {even(segments.batch, n)[0]: ("batch", even(segments.batch, n)) for n in numbers[::-1]}
    return [WHOLE, *uneven.values()]
