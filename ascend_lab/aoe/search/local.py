"""Iterated local search: walk down to the nearest valley, jump a little, walk down again.

H. R. Lourenco, O. C. Martin, T. Stuetzle, "Iterated Local Search", 2003.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.moves import mutated, neighbours
from ascend_lab.aoe.search.fresh import Fresh
from ascend_lab.aoe.space import Point, Space

Walk = Generator[list[Point], list[float], tuple[float, Point]]


@dataclass(frozen=True)
class IteratedLocal:
    """`batch` neighbours are tried at a time; a jump changes `jump` decisions of the best point."""

    batch: int = 4
    jump: int = 3

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Walk down from the start, then from jumps, until no point is left."""
        fresh = Fresh(space, rng)
        batch = fresh.legal(start) or fresh.sample(self.batch)
        costs = yield from fresh.ask(batch)
        cost, _, point = min(zip(costs, range(len(batch)), batch, strict=True))
        cost, point = yield from self._down(fresh, cost, point)
        while batch := self._jumps(fresh, point):
            costs = yield from fresh.ask(batch)
            reached, _, foot = min(zip(costs, range(len(batch)), batch, strict=True))
            reached, foot = yield from self._down(fresh, reached, foot)
            if reached < cost:
                cost, point = reached, foot

    def _jumps(self, fresh: Fresh, point: Point) -> list[Point]:
        """Return a new point some decisions away, or random ones where those are all known."""
        for _ in range(20):
            if found := fresh.new([mutated(fresh.space, point, fresh.rng, self.jump)]):
                return found
        return fresh.sample(1)

    def _down(self, fresh: Fresh, cost: float, point: Point) -> Walk:
        """Go to the first batch of neighbours with a better one, until there is none."""
        moved = True
        while moved:
            moved = False
            nearby = fresh.new(neighbours(fresh.space, point))
            order = [nearby[i] for i in fresh.rng.permutation(len(nearby))]
            for first in range(0, len(order), self.batch):
                batch = order[first : first + self.batch]
                costs = yield from fresh.ask(batch)
                reached, _, best = min(zip(costs, range(len(batch)), batch, strict=True))
                if reached < cost:
                    cost, point, moved = reached, best, True
                    break
        return cost, point
