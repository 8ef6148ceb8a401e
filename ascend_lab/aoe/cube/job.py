"""Operators of the cube as jobs: their tilings, what to try first, and how far one can get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.conv_space import canonical_row as conv_row
from ascend_lab.aoe.cube.measure import CubeMeasure, schedule_of
from ascend_lab.aoe.cube.space import canonical_row as gemm_row
from ascend_lab.aoe.cube.table import Array, CubeSpace, Shape, word_of
from ascend_lab.aoe.cube.work import Floats
from ascend_lab.aoe.moves import completed
from ascend_lab.aoe.operators import Operator
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.trace import Trial
from ascend_lab.aoe.workers import Measure
from ascend_lab.graph.lower import CONVOLUTIONS, Choice, lower
from ascend_lab.graph.lower.images import conv_job
from ascend_lab.graph.lower.matrices import product_job
from ascend_lab.kernels.conv_default import conv_schedule
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_default import default_schedule
from ascend_lab.kernels.gemm_schedule import GemmSchedule

FIRST = 16
"""Points with the least bounds, tried before the search breeds its own."""
WALKED = 1024
"""Tilings whose bounds are made tight to find those."""


@dataclass(frozen=True, slots=True)
class SharedMeasure:
    """Point -> cycles of the lowered piece: exact where what follows reads an operand again."""

    operator: Operator
    shape: Shape

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises what lowering raises."""
        operator, choice = self.operator, Choice(tiling=schedule_of(self.shape, point))
        return operator.cycles(lower(operator.piece, operator.chip, choice).kernel)


class CubeJob:
    """A convolution, or a product of two matrices, with what follows it."""

    search = "genetic"

    def __init__(self, operator: Operator) -> None:
        """Take an operator of the cube; raises what its space raises."""
        self.operator = operator
        piece, chip = operator.piece, operator.chip
        first = piece.graph.nodes[0]
        if first.op in CONVOLUTIONS:
            shape, epilogue, _ = conv_job(piece, chip)
            self.model = CubeMeasure(shape, chip, epilogue, self._warm())
        else:
            product, epilogue = product_job(piece, chip)
            self.model = CubeMeasure(product, chip, epilogue, self._warm())
        shared = self._shared()
        self.measure: Measure = self.model
        if shared:
            self.measure = SharedMeasure(operator, self.model.shape)
        self.space: CubeSpace = self.model.space()
        # a tensor read twice is fetched once: bounds hold if they count none of it
        counted = replace(self.model, warm=self.model.warm | shared)
        self.bounds = Bounds(counted, self.space.genes)
        self.low = self.bounds.closed.copy()
        near = self._least(self.low, WALKED)
        self.low[near] = self.bounds.walked(near)

    def _sides(self) -> tuple[tuple[str, str], ...]:
        """Return the operands of the cube with the names the kernels give them."""
        a, b = self.operator.piece.graph.nodes[0].inputs[:2]
        return (a, "a"), (b, "b")

    def _warm(self) -> frozenset[str]:
        """Return what L2 holds: operands of the epilogue bear names of the piece."""
        warm = self.operator.warm
        return warm.union(side for name, side in self._sides() if name in warm)

    def _shared(self) -> frozenset[str]:
        """Return the operands of the cube that the epilogue reads, too, under both names."""
        epilogue = self.model.epilogue
        names = {o.name.partition(".")[0] for o in epilogue.operands} if epilogue else set()
        return frozenset(n for pair in self._sides() if pair[0] in names for n in pair)

    @staticmethod
    def _least(values: Floats, count: int) -> Array:
        return np.argsort(values, kind="stable")[:count]

    @property
    def default(self) -> Point:
        """The tiling that is taken without a search."""
        m = self.model
        default = conv_schedule if isinstance(m.shape, ConvShape) else default_schedule
        return point_of(self.space, default(m.shape, m.chip, m.epilogue))  # type: ignore[arg-type]

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return the points closest to tilings of other shapes."""
        tilings = [c.tiling for c in choices if c.tiling is not None]
        return [point_of(self.space, t) for t in tilings]

    def choice(self, point: Point) -> Choice:
        """Return the tiling of a point."""
        return Choice(tiling=schedule_of(self.model.shape, point))

    def start(self) -> Sequence[Point]:
        """Return the default and the points with the least bounds."""
        return [self.default, *map(self.space.point, self._least(self.low, FIRST))]

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return cycles that no tiling of the space beats, and whether the best one was found.

        What was measured bounds itself; the rest is bounded in closed form, or by a walk.
        """
        low, best = self.low.copy(), float(self.operator.default_cycles)
        for trial in trials:
            low[self.space.row(trial.point)] = np.inf
            best = min(best, trial.cost)
        least = float(low.min())
        return int(min(best, least)), best <= least


def point_of(space: CubeSpace, schedule: GemmSchedule) -> Point:
    """Return the point of a schedule, or the nearest one where the space has no such tiling."""
    if isinstance(space.shape, ConvShape):
        row = conv_row(space.shape, space.chip, schedule)
    else:
        row = gemm_row(space.shape, schedule)
    return completed(space, [word_of(name, int(row[name][0])) for name in space.names])
