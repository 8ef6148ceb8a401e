"""Branch and bound: the search that proves its result.

A certified bound says of a prefix that no point behind it costs less. The prefix of least bound is
opened first; when that bound reaches the best cost, nothing better is left and the best is proven.
A. H. Land, A. G. Doig, "An Automatic Method of Solving Discrete Programming Problems", 1960.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.search.fresh import Fresh
from ascend_lab.aoe.space import Point, Space

Bound = Callable[[Point], float]
"""Prefix -> a number that no point beginning with it can undercut."""
_Open = tuple[float, int, int, Point]
"""Bound, minus the length (deep prefixes first among equal bounds), order of arrival, prefix."""


@dataclass
class BranchAndBound:
    """Best bound first; `batch` points are measured at a time.

    `lower_bound` is what no point of the space undercuts, as far as known; `opened` counts
    prefixes; `proven` says that the best of the run is the optimum.
    """

    bound: Bound
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
                # a bound never falls on the way down
                low = max(bound, self.bound(child))
                if low < best:
                    heapq.heappush(heap, (low, -len(child), self.opened, child))
        return batch


def branch_and_bound(bound: Bound, batch: int = 4) -> BranchAndBound:
    """Return the search that uses a certified bound."""
    return BranchAndBound(bound, batch)


def no_bound(prefix: Point) -> float:
    """Return minus infinity: nothing is known of the points behind a prefix."""
    return -math.inf
