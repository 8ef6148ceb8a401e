"""Searches without a model: all points, random ones, walks from valley to valley, proofs.

Iterated local search: H. R. Lourenco, O. C. Martin, T. Stuetzle, "Iterated Local Search", 2003.
Annealing: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing",
Science, 1983. Branch and bound: A. H. Land, A. G. Doig, "An Automatic Method of Solving Discrete
Programming Problems", 1960.
"""

import heapq
import math
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.space import Point, Space, completed, mutated, neighbours

PATIENCE = 50
"""Samples in a row that are no news, after which a space is enumerated instead."""
BATCH = 16
"""Points proposed at a time."""
STUCK = 100
"""Moves in a row to points tried before, after which annealing goes on from a random point."""


class Fresh:
    """What every search remembers: costs of the candidates it proposed, and a source of others."""

    def __init__(self, space: Space, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng
        self.costs: dict[Hashable, float] = {}
        self._rest: list[Point] | None = None

    def ask(self, batch: list[Point]) -> Generator[list[Point], list[float], list[float]]:
        """Propose a batch of a search, remember the answer and return it."""
        costs = yield batch
        for point, cost in zip(batch, costs, strict=True):
            self.costs[self.space.key(point)] = cost
        return costs

    def best_of(
        self, batch: list[Point]
    ) -> Generator[list[Point], list[float], tuple[float, Point]]:
        """Propose a batch; return its least cost and the first point that has it."""
        costs = yield from self.ask(batch)
        cost, _, point = min(zip(costs, range(len(batch)), batch, strict=True))
        return cost, point

    def cost(self, point: Point) -> float | None:
        """Return the cost of a point, or None if it was never proposed."""
        return self.costs.get(self.space.key(point))

    def new(self, points: Sequence[Point]) -> list[Point]:
        """Return those of the points that were never proposed, each candidate once."""
        found: dict[Hashable, Point] = {}
        for point in points:
            found.setdefault(self.space.key(point), point)
        return [point for key, point in found.items() if key not in self.costs]

    def legal(self, start: Sequence[Point]) -> list[Point]:
        """Return the points to start with, each moved to the nearest legal one."""
        return self.new([completed(self.space, point) for point in start])

    def sample(self, count: int) -> list[Point]:
        """Return up to `count` random points never proposed; fewer only if there are no more."""
        found: dict[Hashable, Point] = {}
        misses = 0
        while len(found) < count and self._rest is None:
            point = self.space.sample(self.rng)
            key = self.space.key(point)
            if key not in self.costs and key not in found:
                found[key], misses = point, 0
                continue
            misses += 1
            if misses > PATIENCE:
                if self.space.size is None:
                    break
                left = self.new(list(self.space.points()))  # from now on, from a list of all
                self._rest = [left[i] for i in self.rng.permutation(len(left))]
        if self._rest is not None and len(found) < count:
            self._rest = self.new(self._rest)
            for point in self._rest:
                if len(found) == count:
                    break
                found.setdefault(self.space.key(point), point)
        return list(found.values())


def exhaustive(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the points to start with, then all points of the space in its order."""
    fresh = Fresh(space, rng)
    points: Iterator[Point] = chain(fresh.legal(start), space.points())
    while chunk := list(islice(points, BATCH)):
        if batch := fresh.new(chunk):
            yield from fresh.ask(batch)


def random_order(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the points to start with, then random ones, none of them twice."""
    fresh = Fresh(space, rng)
    batch = fresh.legal(start) or fresh.sample(BATCH)
    while batch:
        yield from fresh.ask(batch)
        batch = fresh.sample(BATCH)


@dataclass(frozen=True)
class IteratedLocal:
    """Walk down, `batch` neighbours at a time; then change `jump` decisions and walk down again."""

    batch: int = 4
    jump: int = 3

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Walk down from the start, then from jumps, until no point is left."""
        fresh = Fresh(space, rng)
        cost, point = yield from fresh.best_of(fresh.legal(start) or fresh.sample(self.batch))
        cost, point = yield from self._down(fresh, cost, point)
        while batch := self._jumps(fresh, point):
            reached, foot = yield from fresh.best_of(batch)
            reached, foot = yield from self._down(fresh, reached, foot)
            if reached < cost:
                cost, point = reached, foot

    def _jumps(self, fresh: Fresh, point: Point) -> list[Point]:
        """Return a new point some decisions away, or random ones where those are all known."""
        for _ in range(20):
            if found := fresh.new([mutated(fresh.space, point, fresh.rng, self.jump)]):
                return found
        return fresh.sample(1)

    def _down(
        self, fresh: Fresh, cost: float, point: Point
    ) -> Generator[list[Point], list[float], tuple[float, Point]]:
        """Go to the first batch of neighbours with a better one, until there is none."""
        moved = True
        while moved:
            moved = False
            nearby = fresh.new(neighbours(fresh.space, point))
            order = [nearby[i] for i in fresh.rng.permutation(len(nearby))]
            for first in range(0, len(order), self.batch):
                reached, best = yield from fresh.best_of(order[first : first + self.batch])
                if reached < cost:
                    cost, point, moved = reached, best, True
                    break
        return cost, point


@dataclass(frozen=True)
class Annealing:
    """A walk that accepts worse points with a chance that falls with time.

    A step to a neighbour whose cost is `d` relative to the current one is taken with probability
    exp(-d / T), where T falls from `hot` to `cold` over `length` trials and then starts anew: at
    0.5 a step up of 50 % passes by 1 / e.
    """

    length: int = 500
    hot: float = 0.5
    cold: float = 0.01

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Walk until there is no point left that was not tried."""
        fresh = Fresh(space, rng)
        cost, point = yield from fresh.best_of(fresh.legal(start) or fresh.sample(1))
        trials = moves = 0
        while True:
            moves = moves + 1
            nearby = mutated(space, point, rng, 1 if rng.random() < 0.8 else 2)
            reached = fresh.cost(nearby)
            if reached is None or moves > STUCK:
                batch = [nearby] if reached is None else fresh.sample(1)
                if not batch:
                    return
                (reached,) = yield from fresh.ask(batch)
                nearby, trials, moves = batch[0], trials + 1, 0
            if rng.random() < self._chance(cost, reached, trials):
                point, cost = nearby, reached

    def _chance(self, cost: float, other: float, trials: int) -> float:
        """Return the probability of going from one cost to another."""
        if other <= cost:
            return 1.0
        if math.isinf(other) or cost <= 0:
            return 0.0
        heat = self.hot * (self.cold / self.hot) ** (trials % self.length / self.length)
        return math.exp(-(other / cost - 1) / heat)


Bound = Callable[[Point], float]
"""Prefix -> a number that no point beginning with it can undercut."""
_Open = tuple[float, int, int, Point]
"""Bound, minus the length (deep prefixes first among equal bounds), order of arrival, prefix."""


def no_bound(prefix: Point) -> float:
    """Return minus infinity: nothing is known of the points behind a prefix."""
    return -math.inf


@dataclass
class BranchAndBound:
    """Open the prefix of least certified `bound` first, until no bound is below the best cost.

    `batch` points are measured at a time. `lower_bound` is what no point of the space undercuts, as
    far as known; `opened` counts prefixes; `proven` says that the best of the run is the optimum.
    """

    bound: Bound = no_bound
    batch: int = 4
    lower_bound: float = field(default=-math.inf, init=False)
    opened: int = field(default=0, init=False)
    proven: bool = field(default=False, init=False)

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Measure points in the order of their bounds, until none can be better than the best."""
        self.lower_bound, self.opened, self.proven = -math.inf, 0, False
        fresh, best = Fresh(space, rng), math.inf
        if batch := fresh.legal(start):
            best = min((yield from fresh.ask(batch)))
        heap: list[_Open] = [(self.bound(()), 0, 0, ())]
        while batch := self._leaves(fresh, heap, best):
            best = min(best, *(yield from fresh.ask(batch)))
            self.lower_bound = min(best, heap[0][0] if heap else math.inf)
        self.lower_bound, self.proven = best, True

    def _leaves(self, fresh: Fresh, heap: list[_Open], best: float) -> list[Point]:
        """Open prefixes until a batch of points is found or nothing below the best is left."""
        batch: list[Point] = []
        while heap and len(batch) < self.batch and heap[0][0] < best:
            bound, _, _, prefix = heapq.heappop(heap)
            if len(prefix) == len(fresh.space.names):
                batch = fresh.new([*batch, prefix])
                continue
            for value in fresh.space.options(prefix):
                self.opened += 1
                child = (*prefix, value)
                low = max(bound, self.bound(child))  # a bound never falls on the way down
                if low < best:
                    heapq.heappush(heap, (low, -len(child), self.opened, child))
        return batch
