"""A genetic search whose many children are screened by a learned model.

Every generation, parents picked by tournament are crossed and mutated into many children (J. H.
Holland, "Adaptation in Natural and Artificial Systems", 1975). A model of the trials so far ranks
these, the neighbours of the best point and some random strangers, and only the most promising few
are measured (L. Zheng et al., "Ansor: Generating High-Performance Tensor Programs", OSDI 2020). The
best points of all generations are the next parents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.search.plain import Fresh
from ascend_lab.aoe.search.surrogate import Surrogate
from ascend_lab.aoe.space import Point, Space, crossed, mutated, neighbours

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
