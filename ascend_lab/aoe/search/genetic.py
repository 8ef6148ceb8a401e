"""Genetic searches: that of the textbooks, and one whose children are screened by a model.

In both, parents are picked by tournament, crossed decision by decision, repaired where the mix is
not legal, and mutated (J. H. Holland, "Adaptation in Natural and Artificial Systems", 1975). In the
second, a model of the trials so far ranks many children, the neighbours of the best point and some
random strangers, and only the most promising few are measured, as in L. Zheng et al., "Ansor:
Generating High-Performance Tensor Programs", OSDI 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.search.plain import Fresh
from ascend_lab.aoe.search.surrogate import Surrogate
from ascend_lab.aoe.space import Point, Space, completed, crossed, mutated, neighbours

Person = tuple[float, Point]
"""Cost and point."""
TRIES = 10
"""So often a child that was born before is replaced."""


@dataclass
class SimpleGenetic:
    """That of the textbooks; `log` holds every generation of the latest run, in order of cost.

    `population` points make a generation, of which the best `keep` live on. A child is mutated with
    probability `mutation`; each parent is the best of `tournament` random points. A child that
    was born before is replaced, a few times if need be.
    """

    population: int = 20
    keep: int = 4
    mutation: float = 0.3
    tournament: int = 3
    log: list[list[Person]] = field(default_factory=list, init=False, repr=False)

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Breed for ever."""
        self.log = []
        points = [completed(space, point) for point in start][: self.population]
        points += [space.sample(rng) for _ in range(self.population - len(points))]
        people: list[Person] = []
        known: set[Point] = set()
        while True:
            costs = yield points
            known.update(points)
            born = [(cost, point) for cost, point in zip(costs, points, strict=True)]
            people = sorted(people[: self.keep] + born, key=lambda person: person[0])
            people = people[: self.population]
            self.log.append(people)
            points = []
            for _ in range(self.population - self.keep):
                points.append(self.newborn(space, people, rng, known.union(points)))

    def newborn(
        self, space: Space, people: Sequence[Person], rng: np.random.Generator, known: Set[Point]
    ) -> Point:
        """Return a child that is not among the known points, or what came of the last try."""
        child = self.child(space, people, rng)
        for _ in range(TRIES):
            if child not in known:
                break
            child = self.child(space, people, rng)
        return child

    def child(self, space: Space, people: Sequence[Person], rng: np.random.Generator) -> Point:
        """Return a child of two of the people, which stand in order of cost."""
        one, two = (people[self.pick(len(people), rng)][1] for _ in range(2))
        point = crossed(space, one, two, rng)
        return mutated(space, point, rng) if rng.random() < self.mutation else point

    def pick(self, count: int, rng: np.random.Generator) -> int:
        """Return the best place among some random ones: a tournament."""
        return int(rng.integers(count, size=self.tournament).min())


Scored = tuple[float, int, Point]
"""Cost, number of the trial, point."""
Brood = dict[Point, str]
"""Points to measure, and where each comes from."""


@dataclass(frozen=True, slots=True)
class Birth:
    """A measured point: its generation, cost, and origin.

    The origin is "start", "random", "crossed", "mutated", or "neighbour" (of the best point).
    """

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
    `bench_search` says on which spaces the numbers were chosen.
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
