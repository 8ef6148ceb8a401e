"""Search methods on complete points: exhaustive, random, local search, annealing, genetic.

Iterated local search (H. R. Lourenco, O. C. Martin, T. Stuetzle, "Iterated Local Search", 2003):
walk to better neighbours until there is none, then jump some decisions away and walk again.

Simulated annealing (S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated
Annealing", Science, 1983): a random walk that accepts worse points less and less often.

Genetic algorithm (J. H. Holland, "Adaptation in Natural and Artificial Systems", 1975): in every
generation, parents chosen by tournament are crossed and mutated into many children. A model of the
trials so far (`surrogate`) ranks the children, the neighbours of the best point and some random
points; only the most promising few are measured (L. Zheng et al., "Ansor: Generating
High-Performance Tensor Programs", OSDI 2020). The best points of all generations are the next
parents.
"""

import math
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.search.surrogate import Surrogate
from ascend_lab.aoe.space import Point, Space, completed, crossed, mutated, neighbours

MAX_REPEATS = 50
"""After this many samples in a row that were proposed before, the space is enumerated instead."""
BATCH_SIZE = 16
"""Number of points that are proposed at a time."""
MAX_REPEATED_MOVES = 100
"""After this many moves in a row to known points, annealing goes on from a random point."""


class SearchHistory:
    """The candidates that a search has proposed, with their costs, and a source of new ones."""

    def __init__(self, space: Space, rng: np.random.Generator) -> None:
        self.space = space
        self.rng = rng
        self.costs: dict[Hashable, float] = {}
        self._remaining: list[Point] | None = None

    def ask(self, batch: list[Point]) -> Generator[list[Point], list[float], list[float]]:
        """Propose a batch, remember its costs and return them."""
        costs = yield batch
        for point, cost in zip(batch, costs, strict=True):
            self.costs[self.space.key(point)] = cost
        return costs

    def best_of(
        self, batch: list[Point]
    ) -> Generator[list[Point], list[float], tuple[float, Point]]:
        """Propose a batch; return its lowest cost and the first point that has it."""
        costs = yield from self.ask(batch)
        cost, _, point = min(zip(costs, range(len(batch)), batch, strict=True))
        return cost, point

    def cost(self, point: Point) -> float | None:
        """Return the cost of a point, or None if it was never proposed."""
        return self.costs.get(self.space.key(point))

    def untried(self, points: Sequence[Point]) -> list[Point]:
        """Return the points that were not proposed before, without repetitions."""
        candidates: dict[Hashable, Point] = {}
        for point in points:
            candidates.setdefault(self.space.key(point), point)
        return [point for key, point in candidates.items() if key not in self.costs]

    def legal_starts(self, start: Sequence[Point]) -> list[Point]:
        """Return the untried start points, each moved to the nearest legal point."""
        return self.untried([completed(self.space, point) for point in start])

    def sample(self, count: int) -> list[Point]:
        """Return `count` random points that were never proposed, or as many as there are."""
        candidates: dict[Hashable, Point] = {}
        misses = 0
        while len(candidates) < count and self._remaining is None:
            point = self.space.sample(self.rng)
            key = self.space.key(point)
            if key not in self.costs and key not in candidates:
                candidates[key] = point
                misses = 0
                continue
            misses += 1
            # Most of a small space is known by now: from here on, its remaining points are listed
            # and shuffled.
            if misses > MAX_REPEATS:
                if self.space.size is None:
                    break
                untried = self.untried(list(self.space.points()))
                self._remaining = [untried[i] for i in self.rng.permutation(len(untried))]
        if self._remaining is not None and len(candidates) < count:
            self._remaining = self.untried(self._remaining)
            for point in self._remaining:
                if len(candidates) == count:
                    break
                candidates.setdefault(self.space.key(point), point)
        return list(candidates.values())


def exhaustive(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the start points, then all points of the space in its order."""
    history = SearchHistory(space, rng)
    points: Iterator[Point] = chain(history.legal_starts(start), space.points())
    while chunk := list(islice(points, BATCH_SIZE)):
        if batch := history.untried(chunk):
            yield from history.ask(batch)


def random_order(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the start points, then random points without repetition."""
    history = SearchHistory(space, rng)
    batch = history.legal_starts(start) or history.sample(BATCH_SIZE)
    while batch:
        yield from history.ask(batch)
        batch = history.sample(BATCH_SIZE)


@dataclass(frozen=True)
class IteratedLocal:
    """Iterated local search: walk to better neighbours, then change `jump` decisions and repeat.

    Neighbours are measured `batch` at a time.
    """

    batch: int = 4
    jump: int = 3

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Propose points until none is left."""
        history = SearchHistory(space, rng)
        first_batch = history.legal_starts(start) or history.sample(self.batch)
        cost, point = yield from history.best_of(first_batch)
        cost, point = yield from self._down(history, cost, point)
        while batch := self._jumps(history, point):
            jump_cost, jump_point = yield from history.best_of(batch)
            local_cost, local_optimum = yield from self._down(history, jump_cost, jump_point)
            if local_cost < cost:
                cost = local_cost
                point = local_optimum

    def _jumps(self, history: SearchHistory, point: Point) -> list[Point]:
        """Return a point some decisions away, or, if all of these seem known, a random one."""
        # Near a local optimum whose surroundings are explored, most jumps land on known points.
        for _ in range(20):
            if jumped := history.untried([mutated(history.space, point, history.rng, self.jump)]):
                return jumped
        return history.sample(1)

    def _down(
        self, history: SearchHistory, cost: float, point: Point
    ) -> Generator[list[Point], list[float], tuple[float, Point]]:
        """Move to the best of the first batch with a better neighbour, until there is none."""
        has_moved = True
        while has_moved:
            has_moved = False
            nearby = history.untried(neighbours(history.space, point))
            # In random order, or the first decisions would always be tried before the others.
            shuffled = [nearby[i] for i in history.rng.permutation(len(nearby))]
            # Measuring all neighbours before moving would use up the budget.
            for start in range(0, len(shuffled), self.batch):
                batch = shuffled[start : start + self.batch]
                batch_cost, batch_point = yield from history.best_of(batch)
                if batch_cost < cost:
                    cost = batch_cost
                    point = batch_point
                    has_moved = True
                    break
        return cost, point


@dataclass(frozen=True)
class Annealing:
    """Simulated annealing: a random walk that accepts worse points less and less often.

    A step to a point that costs more by a share d is accepted with probability exp(-d / T). The
    temperature T falls from `hot` to `cold` over `length` trials, and then starts again. At T = 0.5
    a point that costs 50 % more is accepted with probability 1 / e = 0.37.
    """

    length: int = 500
    hot: float = 0.5
    cold: float = 0.01

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Propose points until none is left."""
        history = SearchHistory(space, rng)
        cost, point = yield from history.best_of(history.legal_starts(start) or history.sample(1))
        trial_count = 0
        repeated_moves = 0
        while True:
            repeated_moves += 1
            # one decision is changed, in a fifth of the moves two
            next_point = mutated(space, point, rng, 1 if rng.random() < 0.8 else 2)
            next_cost = history.cost(next_point)
            if next_cost is None or repeated_moves > MAX_REPEATED_MOVES:
                batch = [next_point] if next_cost is None else history.sample(1)
                if not batch:
                    return
                (next_cost,) = yield from history.ask(batch)
                next_point = batch[0]
                trial_count += 1
                repeated_moves = 0
            if rng.random() < self._acceptance(cost, next_cost, trial_count):
                point = next_point
                cost = next_cost

    def _acceptance(self, cost: float, next_cost: float, trial_count: int) -> float:
        """Return the probability of accepting a step from one cost to another."""
        if next_cost <= cost:
            return 1.0
        if math.isinf(next_cost) or cost <= 0:
            return 0.0
        # From 0.5 to 0.01 in 500 trials, by the same factor each trial: 0.07 after 250.
        progress = trial_count % self.length / self.length
        temperature = self.hot * (self.cold / self.hot) ** progress
        return math.exp(-(next_cost / cost - 1) / temperature)


# -- a genetic search, guided by a model of costs --------------------------------------------------
ScoredPoint = tuple[float, int, Point]
"""Cost, number of the trial, point."""
Origins = dict[Point, str]
"""Points to measure, each with its origin: "start", "random", "crossed", "mutated", "neighbour"."""


@dataclass(frozen=True, slots=True)
class Birth:
    """A measured point with its cost, its generation and its origin (see `Origins`)."""

    generation: int
    origin: str
    point: Point
    cost: float


@dataclass
class Genetic:
    """A genetic algorithm; `log` has a `Birth` for every point of the latest run.

    - first: points of the first generation
    - measured: points of every later generation, of which `immigrants` are random
    - population: the number of best points that may become parents
    - tournament: the number of random points of the population of which the best becomes a parent
    - children: number of children, of which a share `crossover` has two parents
    - screened: the children to measure are chosen by a model of the costs, else at random
    - caution: those with the lowest mean - k * deviation of the predicted cost are chosen; k rises
      from 0 for the first to twice the caution for the last, which may be an uncertain point

    `bench/search.py` compares settings.
    """

    first: int = 16
    measured: int = 8
    immigrants: int = 1
    population: int = 20
    tournament: int = 3
    children: int = 100
    crossover: float = 0.7
    caution: float = 1.0
    screened: bool = True
    log: list[Birth] = field(default_factory=list, init=False, repr=False)

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Propose one generation after another until no point is left."""
        self.log = log = []
        history = SearchHistory(space, rng)
        model = Surrogate()
        generation = 0
        scored: list[ScoredPoint] = []
        origins = dict.fromkeys(history.legal_starts(start), "start")
        self._fill(origins, history.sample(self.first), self.first)
        while origins:
            costs = yield from history.ask(list(origins))
            model.learn(list(origins), costs)
            for (point, origin), cost in zip(origins.items(), costs, strict=True):
                scored.append((cost, len(scored), point))
                log.append(Birth(generation, origin, point, cost))
            generation += 1
            origins = self._next(history, model, sorted(scored)[: self.population])

    def _next(
        self, history: SearchHistory, model: Surrogate, parents: list[ScoredPoint]
    ) -> Origins:
        """Return the next generation: chosen children, then immigrants."""
        children = self._children(history, parents)
        # Random points keep the search from staying near one local optimum. Some are measured in
        # any case, the others compete with the children.
        random_points = history.sample(2 * self.measured)
        count = self.measured - self.immigrants
        if self.screened and math.isfinite(parents[0][0]):
            pool = dict.fromkeys(random_points[self.immigrants :], "random") | children
            chosen = self._screened(model, list(pool), count)
        else:
            pool = children
            chosen = [list(pool)[i] for i in history.rng.permutation(len(pool))[:count]]
        origins = {point: pool[point] for point in chosen}
        self._fill(origins, random_points, self.measured)
        return origins

    @staticmethod
    def _fill(origins: Origins, random_points: Sequence[Point], count: int) -> None:
        """Add random points until there are `count` points."""
        for point in random_points:
            if len(origins) < count:
                origins.setdefault(point, "random")

    def _screened(self, model: Surrogate, pool: list[Point], count: int) -> list[Point]:
        """Return the `count` points that the model prefers, from certain to uncertain ones."""
        if not pool:
            return []
        mean, deviation = model.predict(pool)
        chosen: list[int] = []
        # The first point has the lowest expected cost; the last has the lowest cost if the model
        # errs by two deviations.
        for factor in np.linspace(0.0, 2 * self.caution, count):
            # rounded: the last bits of a float may differ between machines
            scores = np.round(mean - factor * deviation, 9)
            order = np.argsort(scores, kind="stable").tolist()
            # the best one not chosen yet is among the first len(chosen) + 1
            chosen += [i for i in order[: len(chosen) + 1] if i not in chosen][:1]
        return [pool[i] for i in chosen]

    def _children(self, history: SearchHistory, parents: list[ScoredPoint]) -> Origins:
        """Return new points: neighbours of the best point, and many children of the parents."""
        rng = history.rng
        space = history.space
        origins = dict.fromkeys(neighbours(space, parents[0][2]), "neighbour")
        # Parents are sorted by cost: the smallest of 3 random indices wins the tournament.
        pairs = rng.integers(len(parents), size=(self.children, 2, self.tournament)).min(2)
        for parent_a, parent_b in pairs.tolist():
            child = parents[parent_a][2]
            origin = "mutated"
            if rng.random() < self.crossover:
                child = crossed(space, child, parents[parent_b][2], rng)
                origin = "crossed"
            if origin == "mutated" or rng.random() < 0.5:
                child = mutated(space, child, rng, 1 + int(rng.integers(2)))
            origins.setdefault(child, origin)
        return {point: origins[point] for point in history.untried(list(origins))}
