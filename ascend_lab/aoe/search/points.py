"""Searches from point to point: all in order, random ones, walks from valley to valley, breeding.

Iterated local search: H. R. Lourenco, O. C. Martin, T. Stuetzle, "Iterated Local Search", 2003.
Annealing: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing",
Science, 1983.

Genetic: every generation, parents picked by tournament are crossed and mutated into many children
(J. H. Holland, "Adaptation in Natural and Artificial Systems", 1975). A model of the trials so far
ranks these, the neighbours of the best point and some random strangers, and only the most promising
few are measured (L. Zheng et al., "Ansor: Generating High-Performance Tensor Programs", OSDI 2020).
The best points of all generations are the next parents.

The model: Gaussian process regression of the logarithm of the cost (C. E. Rasmussen, C. K. I.
Williams, "Gaussian Processes for Machine Learning", 2006, chapter 2). Two points are alike as
exp(-d / LENGTH), where d adds up, over decisions, half a unit if the values differ and half the
number of doublings between them / DOUBLINGS, at most half a unit (a text or a tuple only differs).
The root of the matrix grows step by step as trials come in. Products are taken with `einsum`
on purpose: matrices are small, and the threads of BLAS cost more than they save on a busy machine.
"""

import math
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.space import Point, Reals, Space, Value, completed, crossed, mutated, neighbours

PATIENCE = 50
"""Samples in a row that are no news, after which a space is enumerated instead."""
BATCH = 16
"""Points proposed at a time."""
STUCK = 100
"""Moves in a row to points tried before, after which annealing goes on from a random point."""


class Fresh:
    """What every search remembers: costs of the candidates it proposed, and a source of others."""

    def __init__(self, space: Space, rng: np.random.Generator) -> None:
        self.space = space
        self.rng = rng
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
        """Return the points that were not proposed before, each candidate once."""
        candidates: dict[Hashable, Point] = {}
        for point in points:
            candidates.setdefault(self.space.key(point), point)
        return [point for key, point in candidates.items() if key not in self.costs]

    def legal(self, start: Sequence[Point]) -> list[Point]:
        """Return the points to start with, each moved to the nearest legal one."""
        return self.new([completed(self.space, point) for point in start])

    def sample(self, count: int) -> list[Point]:
        """Return up to `count` random points never proposed; fewer only if there are no more."""
        candidates: dict[Hashable, Point] = {}
        misses = 0
        while len(candidates) < count and self._rest is None:
            point = self.space.sample(self.rng)
            key = self.space.key(point)
            if key not in self.costs and key not in candidates:
                candidates[key] = point
                misses = 0
                continue
            misses += 1
            # Most of a small space is known by now: the points left over are listed and shuffled
            # instead.
            if misses > PATIENCE:
                if self.space.size is None:
                    break
                remaining = self.new(list(self.space.points()))  # from now on, from a list of all
                self._rest = [remaining[i] for i in self.rng.permutation(len(remaining))]
        if self._rest is not None and len(candidates) < count:
            self._rest = self.new(self._rest)
            for point in self._rest:
                if len(candidates) == count:
                    break
                candidates.setdefault(self.space.key(point), point)
        return list(candidates.values())


def exhaustive(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the points to start with, then all points of the space in its order."""
    fresh = Fresh(space, rng)
    points: Iterator[Point] = chain(fresh.legal(start), space.points())
    while chunk := list(islice(points, BATCH)):
        if batch := fresh.new(chunk):
            yield from fresh.ask(batch)


def random_order(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the points to start with, then random points without repetition."""
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
                cost = reached
                point = foot

    def _jumps(self, fresh: Fresh, point: Point) -> list[Point]:
        """Return a new point some decisions away, or random ones where those are all known."""
        # Near a valley that is explored, most jumps land on known points: a few tries, then
        # anywhere.
        for _ in range(20):
            if jumped := fresh.new([mutated(fresh.space, point, fresh.rng, self.jump)]):
                return jumped
        return fresh.sample(1)

    def _down(
        self, fresh: Fresh, cost: float, point: Point
    ) -> Generator[list[Point], list[float], tuple[float, Point]]:
        """Go to the first batch of neighbours with a better one, until there is none."""
        moved = True
        while moved:
            moved = False
            nearby = fresh.new(neighbours(fresh.space, point))
            # In random order, or the first decisions would always be tried before the others.
            order = [nearby[i] for i in fresh.rng.permutation(len(nearby))]
            # The first batch with a better point is taken: looking at all neighbours would cost the
            # budget.
            for start in range(0, len(order), self.batch):
                reached, best = yield from fresh.best_of(order[start : start + self.batch])
                if reached < cost:
                    cost = reached
                    point = best
                    moved = True
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
                nearby = batch[0]
                trials = trials + 1
                moves = 0
            # A step up is taken often while the walk is hot and hardly ever when it is cold.
            if rng.random() < self._chance(cost, reached, trials):
                point = nearby
                cost = reached

    def _chance(self, cost: float, reached: float, trials: int) -> float:
        """Return the probability of going from one cost to another."""
        if reached <= cost:
            return 1.0
        if math.isinf(reached) or cost <= 0:
            return 0.0
        # From 0.5 to 0.01 in 500 trials, by the same factor each trial: 0.07 after 250.
        heat = self.hot * (self.cold / self.hot) ** (trials % self.length / self.length)
        return math.exp(-(reached / cost - 1) / heat)


# -- a model of costs, and a genetic search that it guides ----------------------------------------
LENGTH = 2.0
"""Decisions by which points differ that are no longer alike (by a factor e)."""
NOISE = 0.01
"""Share of the variance that is left unexplained."""
DOUBLINGS = 4.0
"""Numbers so many doublings apart are as different as words."""
CLIP = 0.5
"""Costs above this quantile count as the quantile: what is bad need not be told apart."""
MOST = 640
"""More trials than this are thinned out: all of the best quarter stay, and half of the rest."""


@dataclass
class Surrogate:
    """Trials so far, and R, the inverse of the Cholesky root of how alike they are."""

    points: list[Point] = field(default_factory=list, repr=False)
    costs: list[float] = field(default_factory=list, repr=False)
    _codes: list[dict[Value, int]] = field(default_factory=list, repr=False)
    _known: tuple[Reals, Reals] | None = field(default=None, repr=False)
    _root: Reals = field(default_factory=lambda: np.zeros((0, 0)), repr=False)

    def learn(self, points: Sequence[Point], costs: Sequence[float]) -> None:
        """Take in trials; every point once. A failure counts as the worst cost there was."""
        self.points += points
        self.costs += costs
        if len(self.points) > MOST:
            self._thin()
        elif points:
            self._grow(points)

    def predict(self, pool: Sequence[Point]) -> tuple[Reals, Reals]:
        """Return mean and deviation of the scaled log cost of points; some trial succeeded."""
        assert self._known is not None
        target = np.einsum("ij,j->i", self._root, scaled(self.costs))
        cross = np.einsum("pj,ij->pi", self._alike(self._coded(pool), self._known), self._root)
        variance = float(target @ target) / len(target)
        # What the known trials say about a point reduces its variance from 1 towards 0: near them
        # the model is sure, far from all of them it knows nothing.
        unexplained = np.maximum(1.0 + NOISE - np.einsum("pi,pi->p", cross, cross), 0.0)
        return np.einsum("pi,i->p", cross, target), np.sqrt(variance * unexplained)

    def _grow(self, points: Sequence[Point]) -> None:
        """Extend the root by new rows: [[R, 0], [-S V R, S]], with V and S of the new rows."""
        codes = self._coded(points)
        # The noise on the diagonal keeps the matrix invertible where two points are nearly alike.
        corner = self._alike(codes, codes) + NOISE * np.eye(len(points))
        if self._known is None:
            self._known = codes
            self._root = np.linalg.inv(np.linalg.cholesky(corner))
            return
        cross = np.einsum("pj,ij->pi", self._alike(codes, self._known), self._root)
        corner_root = np.linalg.cholesky(corner - np.einsum("pi,qi->pq", cross, cross))
        block = np.linalg.inv(corner_root)
        side = np.einsum("pq,qi->pi", block, np.einsum("pi,ij->pj", cross, self._root))
        nothing = np.zeros((len(self._root), len(points)))
        self._root = np.block([[self._root, nothing], [-side, block]])
        pairs = zip(self._known, codes, strict=True)
        self._known = tuple(np.concatenate(pair) for pair in pairs)  # type: ignore[assignment]

    def _thin(self) -> None:
        """Keep the best quarter of the trials and every second of the others."""
        # The model's time grows with the square of its trials: of 640, 160 + 240 stay.
        order = np.argsort(self.costs, kind="stable").tolist()
        best = len(order) // 4
        keep = sorted(order[:best] + order[best::2])
        points = [self.points[i] for i in keep]
        costs = [self.costs[i] for i in keep]
        self.points = []
        self.costs = []
        self._known = None
        for at in range(0, len(points), 16):
            self.learn(points[at : at + 16], costs[at : at + 16])

    def _coded(self, points: Sequence[Point]) -> tuple[Reals, Reals]:
        """Return the values as places among those seen, and in doublings (0 for other values)."""
        self._codes = self._codes or [{} for _ in points[0]]
        codes = [
            [seen.setdefault(v, len(seen)) for seen, v in zip(self._codes, p, strict=True)]
            for p in points
        ]
        return np.array(codes, float), np.array([[_doublings(v) for v in p] for p in points])

    def _alike(self, left_codes: tuple[Reals, Reals], two: tuple[Reals, Reals]) -> Reals:
        total = np.zeros((len(left_codes[0]), len(two[0])))
        for d in range(left_codes[0].shape[1]):
            if len(self._codes[d]) < 2:
                continue
            total += left_codes[0][:, d, None] != two[0][None, :, d]
            apart = np.abs(left_codes[1][:, d, None] - two[1][None, :, d])
            total += np.minimum(apart / DOUBLINGS, 1.0)
        likeness: Reals = np.exp(-total / (2 * LENGTH))
        return likeness


def _doublings(value: Value) -> float:
    if not isinstance(value, int | float):
        return 0.0
    return math.copysign(math.log2(1 + abs(value)), value)


def scaled(costs: Sequence[float]) -> Reals:
    """Return clipped logarithms of costs with mean 0 and deviation 1, failures as the worst."""
    raw = np.asarray(costs, np.float64)
    good = np.isfinite(raw)
    logs = np.log(np.maximum(np.where(good, raw, raw[good].max()), 1e-300))
    logs = np.minimum(logs, np.quantile(logs, CLIP))
    deviation = float(logs.std())
    standardised: Reals = (logs - logs.mean()) / (deviation if deviation > 0 else 1.0)
    return standardised


Scored = tuple[float, int, Point]
"""Cost, number of the trial, point."""
Brood = dict[Point, str]
"""Points to measure, and where each comes from."""


@dataclass(frozen=True, slots=True)
class Birth:
    """A measured point and its origin: start, random, crossed, mutated or neighbour."""

    generation: int
    origin: str
    point: Point
    cost: float


@dataclass
class Genetic:
    """The search; `log` has a birth per point of the latest run.

    `first` points begin. Of every generation of `measured` points, `immigrants` are random; parents
    are the `population` best points, each the best of `tournament` drawn from these; a share
    `crossover` of the `children` has two of them. `caution` weighs the model's doubt: the points of
    a generation are those of least mean - k * deviation, k from 0 to twice the caution. The module
    `bench/search.py` says on which spaces the numbers were chosen.
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
        """Breed until no point is left that was not tried."""
        self.log = log = []
        fresh = Fresh(space, rng)
        model = Surrogate()
        generation = 0
        scored: list[Scored] = []
        brood = dict.fromkeys(fresh.legal(start), "start")
        self._fill(brood, fresh.sample(self.first), self.first)
        while brood:
            costs = yield from fresh.ask(list(brood))
            model.learn(list(brood), costs)
            for (point, origin), cost in zip(brood.items(), costs, strict=True):
                scored.append((cost, len(scored), point))
                log.append(Birth(generation, origin, point, cost))
            generation += 1
            brood = self._next(fresh, model, sorted(scored)[: self.population])

    def _next(self, fresh: Fresh, model: Surrogate, parents: list[Scored]) -> Brood:
        """Return the next generation: chosen children, then immigrants."""
        children = self._children(fresh, parents)
        # Random points keep the search from staying in one valley: some are taken in any case, the
        # others compete with the children.
        strangers = fresh.sample(2 * self.measured)
        count = self.measured - self.immigrants
        if self.screened and math.isfinite(parents[0][0]):
            pool = dict.fromkeys(strangers[self.immigrants :], "random") | children
            chosen = self._screened(model, list(pool), count)
        else:
            pool = children
            chosen = [list(pool)[i] for i in fresh.rng.permutation(len(pool))[:count]]
        brood = {point: pool[point] for point in chosen}
        self._fill(brood, strangers, self.measured)
        return brood

    @staticmethod
    def _fill(brood: Brood, strangers: Sequence[Point], count: int) -> None:
        """Add strangers until there are `count` points."""
        for point in strangers:
            if len(brood) < count:
                brood.setdefault(point, "random")

    def _screened(self, model: Surrogate, pool: list[Point], count: int) -> list[Point]:
        """Return the points that the model likes best, from sure ones to daring ones."""
        if not pool:
            return []
        mean, deviation = model.predict(pool)
        chosen: list[int] = []
        # The first child is the one of least expected cost; the last, the one that might be best if
        # the model errs by two deviations.
        for daring in np.linspace(0.0, 2 * self.caution, count):
            # rounded, so that the order does not hang on the last bit
            order = np.argsort(np.round(mean - daring * deviation, 9), kind="stable").tolist()
            chosen += [i for i in order[: len(chosen) + 1] if i not in chosen][:1]
        return [pool[i] for i in chosen]

    def _children(self, fresh: Fresh, parents: list[Scored]) -> Brood:
        """Return new points: neighbours of the best point, and many children of the parents."""
        rng = fresh.rng
        space = fresh.space
        origins = dict.fromkeys(neighbours(space, parents[0][2]), "neighbour")
        # Parents are sorted by cost: the smallest of 3 random places wins the tournament.
        picks = rng.integers(len(parents), size=(self.children, 2, self.tournament)).min(2)
        for parent_a, parent_b in picks.tolist():
            child = parents[parent_a][2]
            origin = "mutated"
            if rng.random() < self.crossover:
                child = crossed(space, child, parents[parent_b][2], rng)
                origin = "crossed"
            if origin == "mutated" or rng.random() < 0.5:
                child = mutated(space, child, rng, 1 + int(rng.integers(2)))
            origins.setdefault(child, origin)
        return {point: origins[point] for point in fresh.new(list(origins))}
