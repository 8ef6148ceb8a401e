"""Operators of the cube as jobs: their tilings, what to try first, and how far one can get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.measure import CubeMeasure, point_of, schedule_of
from ascend_lab.aoe.cube.table import CubeSpace, Shape
from ascend_lab.aoe.operators import Operator
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.trace import Trial
from ascend_lab.graph.lower import CONVOLUTIONS, Choice
from ascend_lab.graph.lower.images import conv_job
from ascend_lab.graph.lower.matrices import product_job
from ascend_lab.kernels.epilogue import Epilogue

FIRST = 16
"""Points with the least bounds, tried before the search breeds its own."""
WALKED = 1024
"""Tilings whose bounds are made tight to find those."""


@dataclass(frozen=True, slots=True)
class SharedMeasure(CubeMeasure):
    """Where what follows reads an operand of the cube again: cycles of the lowered piece.

    Such a tensor is fetched once for both, so that bounds hold if they count none of it: `warm` has
    it for them.
    """

    operator: Operator | None = None

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises what lowering raises."""
        assert self.operator is not None
        return self.operator.cycles_of(Choice(tiling=schedule_of(self.shape, point)))


class CubeJob:
    """A convolution, or a product of two matrices, with what follows it."""

    search = "genetic"

    def __init__(self, operator: Operator) -> None:
        """Take an operator of the cube; raises what its space raises."""
        self.operator = operator
        piece, chip = operator.piece, operator.chip
        if piece.graph.nodes[0].op in CONVOLUTIONS:
            shape, epilogue, _ = conv_job(piece, chip)
            self.measure = self._measure(shape, epilogue)
        else:
            self.measure = self._measure(*product_job(piece, chip))
        self.space: CubeSpace = self.measure.space()
        self.bounds = Bounds(self.measure, self.space.genes)
        self.low = self.bounds.closed.copy()
        near = np.argsort(self.low, kind="stable")[:WALKED]
        self.low[near] = self.bounds.walked(near)

    def _measure(self, shape: Shape, epilogue: Epilogue | None) -> CubeMeasure:
        """Return the measure, on what L2 holds: operands of the epilogue bear their own names."""
        operator = self.operator
        a, b = operator.piece.graph.nodes[0].inputs[:2]
        sides = (a, "a"), (b, "b")
        warm = operator.warm.union(side for name, side in sides if name in operator.warm)
        again = {o.name.partition(".")[0] for o in epilogue.operands} if epilogue else set()
        shared = frozenset(n for pair in sides if pair[0] in again for n in pair)
        if not shared:
            return CubeMeasure(shape, operator.chip, epilogue, warm)
        return SharedMeasure(shape, operator.chip, epilogue, warm | shared, operator)

    @property
    def default(self) -> Point:
        """The point of the tiling that is taken without a search."""
        return point_of(self.space, self.measure.default)

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return the points closest to tilings of other shapes."""
        return [point_of(self.space, c.tiling) for c in choices if c.tiling is not None]

    def choice(self, point: Point) -> Choice:
        """Return the tiling of a point."""
        return Choice(tiling=schedule_of(self.measure.shape, point))

    def start(self) -> Sequence[Point]:
        """Return the default and the points with the least bounds."""
        least = np.argsort(self.low, kind="stable")[:FIRST]
        return [self.default, *map(self.space.point, least)]

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return cycles that no tiling of the space beats, and whether the best one was found.

        What was measured bounds itself; the rest, candidates that failed among it, is bounded in
        closed form, or by a walk.
        """
        low, best = self.low.copy(), float(self.operator.default_cycles)
        for trial in (t for t in trials if t.cost < np.inf):
            low[self.space.row(trial.point)] = np.inf
            best = min(best, trial.cost)
        least = float(low.min())
        return int(min(best, least)), best <= least
