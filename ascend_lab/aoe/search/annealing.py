"""Simulated annealing: a walk that accepts worse points with a chance that falls with time.

A step to a neighbour whose cost is `d` relative to the current one is taken with probability
exp(-d / T), where T falls from `hot` to `cold` over `length` trials and then starts anew.
S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by Simulated Annealing", Science, 1983.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.moves import mutated
from ascend_lab.aoe.search.fresh import Fresh
from ascend_lab.aoe.space import Point, Space

STUCK = 100
"""Moves in a row to points tried before, after which the walk goes on from a random point."""


@dataclass(frozen=True)
class Annealing:
    """One walk; temperatures are relative costs: at 0.5 a step up of 50 % passes by 1 / e."""

    length: int = 500
    hot: float = 0.5
    cold: float = 0.01

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Walk until there is no point left that was not tried."""
        fresh = Fresh(space, rng)
        batch = fresh.legal(start) or fresh.sample(1)
        costs = yield from fresh.ask(batch)
        cost, _, point = min(zip(costs, range(len(batch)), batch, strict=True))
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
        if math.isinf(other):
            return 0.0
        done = trials % self.length / self.length
        heat = self.hot * (self.cold / self.hot) ** done
        return math.exp(-(other / cost - 1) / heat) if cost > 0 else 0.0
