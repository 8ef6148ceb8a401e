"""A model of costs learned from the trials so far, to choose which new points are worth one.

Gaussian process regression of the logarithm of the cost (C. E. Rasmussen, C. K. I. Williams,
"Gaussian Processes for Machine Learning", 2006, chapter 2). Two points are alike as
exp(-d / LENGTH), where d adds up, over decisions, half a unit if the values differ and half the
number of doublings between them / DOUBLINGS, at most half a unit (a text or a tuple only differs).

The root of the matrix grows step by step as trials come in. Products are taken with `einsum`
on purpose: matrices are small, and the threads of BLAS cost more than they save on a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.space import Point, Value

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
