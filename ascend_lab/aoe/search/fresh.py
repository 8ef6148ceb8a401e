"""What every search remembers: costs by candidate, and which points it has not tried."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence

import numpy as np

from ascend_lab.aoe.moves import completed
from ascend_lab.aoe.space import Point, Space

PATIENCE = 50
"""Samples in a row that are no news, after which a space is enumerated instead."""


class Fresh:
    """The costs of the candidates a search has proposed, and a source of others."""

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
            if misses > PATIENCE and not self._enumerate():
                break
        if self._rest is not None and len(found) < count:
            self._rest = self.new(self._rest)
            for point in self._rest:
                if len(found) == count:
                    break
                found.setdefault(self.space.key(point), point)
        return list(found.values())

    def _enumerate(self) -> bool:
        """From now on take points from a list of all that are left, if they can be counted."""
        if self.space.size is None:
            return False
        left = self.new(list(self.space.points()))
        self._rest = [left[i] for i in self.rng.permutation(len(left))]
        return True
