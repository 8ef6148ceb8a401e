"""A model of costs learned from the trials so far, to choose which new points are worth one.

Gaussian process regression of the logarithm of the cost (C. E. Rasmussen, C. K. I. Williams,
"Gaussian Processes for Machine Learning", 2006, chapter 2). Two points are alike as
exp(-d / LENGTH), where d adds up, over decisions, half a unit if the values differ and half the
number of doublings between them / DOUBLINGS, at most half a unit (a text or a tuple only differs).

The root of the matrix grows step by step as trials come in. Products are taken with `einsum`
on purpose: matrices are small, and the threads of BLAS cost more than they save on a busy machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.search.plain import Fresh
from ascend_lab.aoe.space import Point, Space, Value, crossed, mutated, neighbours

Array = NDArray[np.float64]
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
    _known: tuple[Array, Array] | None = field(default=None, repr=False)
    _root: Array = field(default_factory=lambda: np.zeros((0, 0)), repr=False)

    def learn(self, points: Sequence[Point], costs: Sequence[float]) -> None:
        """Take in trials; every point once. A failure counts as the worst cost there was."""
        self.points += points
        self.costs += costs
        if len(self.points) > MOST:
            self._thin()
        elif points:
            self._grow(points)

    def predict(self, pool: Sequence[Point]) -> tuple[Array, Array]:
        """Return mean and deviation of the scaled log cost of points; some trial succeeded."""
        assert self._known is not None
        target = np.einsum("ij,j->i", self._root, scaled(self.costs))
        cross = np.einsum("pj,ij->pi", self._alike(self._coded(pool), self._known), self._root)
        variance = float(target @ target) / len(target)
        left = np.maximum(1.0 + NOISE - np.einsum("pi,pi->p", cross, cross), 0.0)
        return np.einsum("pi,i->p", cross, target), np.sqrt(variance * left)

    def _grow(self, points: Sequence[Point]) -> None:
        """Extend the root by new rows: [[R, 0], [-S V R, S]], with V and S of the new rows."""
        new = self._coded(points)
        corner = self._alike(new, new) + NOISE * np.eye(len(points))
        if self._known is None:
            self._known, self._root = new, np.linalg.inv(np.linalg.cholesky(corner))
            return
        cross = np.einsum("pj,ij->pi", self._alike(new, self._known), self._root)
        rest = np.linalg.cholesky(corner - np.einsum("pi,qi->pq", cross, cross))
        block = np.linalg.inv(rest)
        side = np.einsum("pq,qi->pi", block, np.einsum("pi,ij->pj", cross, self._root))
        nothing = np.zeros((len(self._root), len(points)))
        self._root = np.block([[self._root, nothing], [-side, block]])
        pairs = zip(self._known, new, strict=True)
        self._known = tuple(np.concatenate(pair) for pair in pairs)  # type: ignore[assignment]

    def _thin(self) -> None:
        """Keep the best quarter of the trials and every second of the others."""
        order = np.argsort(self.costs, kind="stable").tolist()
        best = len(order) // 4
        keep = sorted(order[:best] + order[best::2])
        points, costs = [self.points[i] for i in keep], [self.costs[i] for i in keep]
        self.points, self.costs, self._known = [], [], None
        for at in range(0, len(points), 16):
            self.learn(points[at : at + 16], costs[at : at + 16])

    def _coded(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Return the values as places among those seen, and in doublings (0 for other values)."""
        self._codes = self._codes or [{} for _ in points[0]]
        codes = [
            [seen.setdefault(v, len(seen)) for seen, v in zip(self._codes, p, strict=True)]
            for p in points
        ]
        return np.array(codes, float), np.array([[_doublings(v) for v in p] for p in points])

    def _alike(self, one: tuple[Array, Array], two: tuple[Array, Array]) -> Array:
        total = np.zeros((len(one[0]), len(two[0])))
        for d in range(one[0].shape[1]):
            if len(self._codes[d]) < 2:
                continue
            total += one[0][:, d, None] != two[0][None, :, d]
            apart = np.abs(one[1][:, d, None] - two[1][None, :, d])
            total += np.minimum(apart / DOUBLINGS, 1.0)
        found: Array = np.exp(-total / (2 * LENGTH))
        return found


def _doublings(value: Value) -> float:
    if not isinstance(value, int | float):
        return 0.0
    return math.copysign(math.log2(1 + abs(value)), value)


def scaled(costs: Sequence[float]) -> Array:
    """Return clipped logarithms of costs with mean 0 and deviation 1, failures as the worst."""
    given = np.asarray(costs, np.float64)
    good = np.isfinite(given)
    logs = np.log(np.maximum(np.where(good, given, given[good].max()), 1e-300))
    logs = np.minimum(logs, np.quantile(logs, CLIP))
    deviation = float(logs.std())
    found: Array = (logs - logs.mean()) / (deviation if deviation > 0 else 1.0)
    return found


# A genetic search whose many children are screened by a learned model.
#
# Every generation, parents picked by tournament are crossed and mutated into many children (J. H.
# Holland, "Adaptation in Natural and Artificial Systems", 1975). A model of the trials so far
# ranks these, the neighbours of the best point and some random strangers, and only the most
# promising few are measured (L. Zheng et al., "Ansor: Generating High-Performance Tensor
# Programs", OSDI 2020). The best points of all generations are the next parents.


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
        fresh, model, generation = Fresh(space, rng), Surrogate(), 0
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
        children, strangers = self._children(fresh, parents), fresh.sample(2 * self.measured)
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
        for daring in np.linspace(0.0, 2 * self.caution, count):
            # rounded, so that the order does not hang on the last bit
            order = np.argsort(np.round(mean - daring * deviation, 9), kind="stable").tolist()
            chosen += [i for i in order[: len(chosen) + 1] if i not in chosen][:1]
        return [pool[i] for i in chosen]

    def _children(self, fresh: Fresh, parents: list[Scored]) -> Brood:
        """Return the neighbours of the best point and many children, none of them known."""
        rng, space = fresh.rng, fresh.space
        found = dict.fromkeys(neighbours(space, parents[0][2]), "neighbour")
        picks = rng.integers(len(parents), size=(self.children, 2, self.tournament)).min(2)
        for one, two in picks.tolist():
            child, origin = parents[one][2], "mutated"
            if rng.random() < self.crossover:
                child, origin = crossed(space, child, parents[two][2], rng), "crossed"
            if origin == "mutated" or rng.random() < 0.5:
                child = mutated(space, child, rng, 1 + int(rng.integers(2)))
            found.setdefault(child, origin)
        return {point: found[point] for point in fresh.new(list(found))}
