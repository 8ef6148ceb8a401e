"""A model of the costs of a space, learned from the trials so far: Gaussian process regression.

It predicts the mean and the deviation of the logarithm of a point's cost (C. E. Rasmussen, C. K. I.
Williams, "Gaussian Processes for Machine Learning", 2006, chapter 2). The covariance of two points
is

    exp(-d / (2 * LENGTH_SCALE)),

where the distance d adds up over the decisions: 1 if the values differ, and for numbers in addition
the number of doublings between them / MAX_DOUBLINGS, at most 1. Tile sizes (128, 64) and (256, 64)
differ in one decision by about one doubling: d is about 1 + 1/4.

The covariance matrix K of the trials has the Cholesky factor L. The model stores R, the inverse of
L, and adds rows to it as trials arrive, in place of factoring K anew. Products use `einsum` because
the matrices are small: the threads of BLAS would cost more than they save on a busy machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.space import Point, Reals, Value

LENGTH_SCALE = 2.0
"""Half the distance at which the covariance of two points falls to 1 / e."""
NOISE = 0.01
"""Variance of the noise, as a share of the variance of the costs."""
MAX_DOUBLINGS = 4.0
"""Numbers further apart than this many doublings (a factor of 16) count as equally different."""
COST_QUANTILE = 0.5
"""Costs above this quantile count as the quantile: bad points need not be distinguished."""
MAX_MODEL_TRIALS = 640
"""When there are more trials, the best quarter of them and half of the others are kept."""


@dataclass
class Surrogate:
    """The trials so far, and R, the inverse of the Cholesky factor of their covariance matrix."""

    points: list[Point] = field(default_factory=list, repr=False)
    costs: list[float] = field(default_factory=list, repr=False)
    _codes: list[dict[Value, int]] = field(default_factory=list, repr=False)
    _coded_points: tuple[Reals, Reals] | None = field(default=None, repr=False)
    _inverse_factor: Reals = field(default_factory=lambda: np.zeros((0, 0)), repr=False)

    def learn(self, points: Sequence[Point], costs: Sequence[float]) -> None:
        """Add trials of new points; a failed trial counts as much as the worst one."""
        self.points += points
        self.costs += costs
        if len(self.points) > MAX_MODEL_TRIALS:
            self._thin()
        elif points:
            self._grow(points)

    def predict(self, pool: Sequence[Point]) -> tuple[Reals, Reals]:
        """Return mean and deviation of the scaled logarithm of the cost of each point in `pool`.

        At least one trial must have succeeded.
        """
        assert self._coded_points is not None
        target = np.einsum("ij,j->i", self._inverse_factor, scaled(self.costs))
        cross = np.einsum(
            "pj,ij->pi",
            self._covariance(self._coded(pool), self._coded_points),
            self._inverse_factor,
        )
        variance = float(target @ target) / len(target)
        # Near the trials the variance of a point falls from 1 towards 0; far from all of them it
        # stays 1.
        unexplained = np.maximum(1.0 + NOISE - np.einsum("pi,pi->p", cross, cross), 0.0)
        return np.einsum("pi,i->p", cross, target), np.sqrt(variance * unexplained)

    def _grow(self, points: Sequence[Point]) -> None:
        """Add the rows of new points to R, which becomes [[R, 0], [-S V R, S]].

        V is the covariance of the new with the old points, times the transpose of R. S is the
        inverse of the Cholesky factor of the new points' covariance minus V times its transpose.
        """
        codes = self._coded(points)
        # The noise on the diagonal keeps the matrix invertible where two points are nearly alike.
        own_covariance = self._covariance(codes, codes) + NOISE * np.eye(len(points))
        if self._coded_points is None:
            self._coded_points = codes
            self._inverse_factor = np.linalg.inv(np.linalg.cholesky(own_covariance))
            return
        # V, S and S V R of the docstring
        v = np.einsum(
            "pj,ij->pi", self._covariance(codes, self._coded_points), self._inverse_factor
        )
        own_factor = np.linalg.cholesky(own_covariance - np.einsum("pi,qi->pq", v, v))
        s = np.linalg.inv(own_factor)
        svr = np.einsum("pq,qi->pi", s, np.einsum("pi,ij->pj", v, self._inverse_factor))
        zeros = np.zeros((len(self._inverse_factor), len(points)))
        self._inverse_factor = np.block([[self._inverse_factor, zeros], [-svr, s]])
        pairs = zip(self._coded_points, codes, strict=True)
        self._coded_points = tuple(np.concatenate(pair) for pair in pairs)  # type: ignore[assignment]

    def _thin(self) -> None:
        """Keep the best quarter of the trials and every second of the others."""
        # The model's time grows with the square of its trials: of 640, 160 + 240 stay.
        order = np.argsort(self.costs, kind="stable").tolist()
        quarter = len(order) // 4
        kept_indices = sorted(order[:quarter] + order[quarter::2])
        points = [self.points[i] for i in kept_indices]
        costs = [self.costs[i] for i in kept_indices]
        self.points = []
        self.costs = []
        self._coded_points = None
        for start in range(0, len(points), 16):
            self.learn(points[start : start + 16], costs[start : start + 16])

    def _coded(self, points: Sequence[Point]) -> tuple[Reals, Reals]:
        """Return arrays (points, decisions): codes of the values v, sign(v) log2(1 + |v|).

        The first value of a decision that occurs has the code 0, the second 1, and so on. Values
        that are not numbers have the logarithm 0.
        """
        self._codes = self._codes or [{} for _ in points[0]]
        codes = []
        for point in points:
            codes_of_point = []
            for code_of, value in zip(self._codes, point, strict=True):
                codes_of_point.append(code_of.setdefault(value, len(code_of)))
            codes.append(codes_of_point)
        return np.array(codes, float), np.array([[_doublings(v) for v in p] for p in points])

    def _covariance(self, rows: tuple[Reals, Reals], columns: tuple[Reals, Reals]) -> Reals:
        """Return exp(-d / (2 * LENGTH_SCALE)) for every pair of points, given as `_coded` does."""
        distance = np.zeros((len(rows[0]), len(columns[0])))
        for decision, code_of in enumerate(self._codes):
            # a decision that has had one value so far adds nothing
            if len(code_of) < 2:
                continue
            distance += rows[0][:, decision, None] != columns[0][None, :, decision]
            doublings = np.abs(rows[1][:, decision, None] - columns[1][None, :, decision])
            distance += np.minimum(doublings / MAX_DOUBLINGS, 1.0)
        covariance: Reals = np.exp(-distance / (2 * LENGTH_SCALE))
        return covariance


def _doublings(value: Value) -> float:
    """Return log2(1 + |value|) with the sign of the value; 0 for text and tuples."""
    if not isinstance(value, int | float):
        return 0.0
    return math.copysign(math.log2(1 + abs(value)), value)


def scaled(costs: Sequence[float]) -> Reals:
    """Return the logarithms of costs, shifted and scaled to mean 0 and deviation 1.

    Failures count as the highest cost, and costs above `COST_QUANTILE` as that quantile.
    """
    raw = np.asarray(costs, np.float64)
    finite = np.isfinite(raw)
    logs = np.log(np.maximum(np.where(finite, raw, raw[finite].max()), 1e-300))
    logs = np.minimum(logs, np.quantile(logs, COST_QUANTILE))
    deviation = float(logs.std())
    standardised: Reals = (logs - logs.mean()) / (deviation if deviation > 0 else 1.0)
    return standardised
