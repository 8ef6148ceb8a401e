"""Branch and bound: simulate in the order of certified bounds until no bound is below the best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.clock import Deadline
from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.measure import CubeMeasure
from ascend_lab.aoe.cube.table import CubeSpace
from ascend_lab.aoe.space import Point

CHUNK = 512
"""Bounds are made tighter for so many tilings at once at first, twice as many each time."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The best point found, its cycles, and a bound that no point of the space is below.

    `trials` kernels were simulated, `walked` bounded by a walk, of `points` in the space.
    """

    point: Point
    cycles: float
    lower_bound: float
    trials: int
    walked: int
    points: int

    @property
    def proven(self) -> bool:
        """Whether the point is an optimum of the space."""
        return self.cycles <= self.lower_bound

    @property
    def gap(self) -> float:
        """How far above the bound the best is at most: cycles / lower_bound - 1."""
        return self.cycles / self.lower_bound - 1.0


class _Search:
    """Rows by their bounds: closed forms in `order`, tighter ones in a heap."""

    def __init__(self, space: CubeSpace, measure: CubeMeasure) -> None:
        self.space, self.measure = space, measure
        self.bounds = Bounds(measure, space.genes)
        self.order = np.argsort(self.bounds.closed, kind="stable")
        self.sorted = self.bounds.closed[self.order]
        self.heap: list[tuple[float, int]] = []
        self.walked, self.chunk = 0, CHUNK
        self.best: tuple[float, Point] = (math.inf, ())
        self.trials = 0

    @property
    def least(self) -> tuple[float, float]:
        """The least bound in the heap, and the least outside."""
        inside = self.heap[0][0] if self.heap else math.inf
        return inside, self.sorted[self.walked] if self.walked < len(self.sorted) else math.inf

    def step(self) -> None:
        """Simulate the row of the least bound, or make more bounds tighter."""
        inside, outside = self.least
        # the first kernel is simulated at once, so that hopeless bounds are never walked
        if self.heap and (inside <= outside or not self.trials):
            _, row = heapq.heappop(self.heap)
            point = self.space.point(row)
            self.trials += 1
            self.best = min(self.best, (self.measure(point), point))
            return
        stop = min(self.walked + self.chunk, int(np.searchsorted(self.sorted, self.best[0])))
        rows = self.order[self.walked : stop]
        for bound, row in zip(self.bounds.walked(rows).tolist(), rows.tolist(), strict=True):
            heapq.heappush(self.heap, (bound, row))
        self.walked, self.chunk = stop, 2 * self.chunk


def prove(
    space: CubeSpace,
    measure: CubeMeasure,
    *,
    most: int | None = None,
    time_limit_s: float | None = None,
    told: Callable[[int, int], None] = lambda trials, most: None,
) -> Proof:
    """Return the optimum of a space, or the best of `most` kernels or of the time, and a bound.

    `told` hears of the kernels simulated, and of how many at most.
    """
    deadline = Deadline.of(time_limit_s)
    search, most = _Search(space, measure), most or space.size
    while min(search.least) < search.best[0] and search.trials < most:
        if search.trials and deadline.over:
            break
        search.step()
        told(search.trials, most)
    cycles, point = search.best
    low = min(cycles, *search.least)
    return Proof(point, cycles, low, search.trials, search.walked, space.size)
