"""The genetic algorithm of the textbooks: selection, crossover, mutation, generation by generation.

Parents are picked by tournament, crossed decision by decision, repaired where the mix is not legal,
and sometimes mutated; the best parents stay. J. H. Holland, "Adaptation in Natural and Artificial
Systems", 1975.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.space import Point, Space, completed, crossed, mutated

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
