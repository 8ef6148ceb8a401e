"""A batch of products as a job: each is tiled alike, on the cores that are its share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ascend_lab.aoe.operators import Operator
from ascend_lab.aoe.space import Point, TableSpace
from ascend_lab.aoe.trace import Trial
from ascend_lab.dsl.auto_cube import share_of
from ascend_lab.graph.lower import Choice
from ascend_lab.isa import c0_of
from ascend_lab.kernels.gemm_default import candidates, default_schedule
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, GemmShape
from ascend_lab.kernels.gemm_tilings import Tilings

TILING_NAMES = tuple(f.name for f in fields(Tilings))


@dataclass(frozen=True, slots=True)
class ProductMeasure:
    """Point -> cycles of the whole batch, launch included."""

    operator: Operator
    shape: GemmShape

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises what lowering raises."""
        return self.operator.cycles_of(Choice(tiling=tiling_of(self.shape, point)))


class ProductJob:
    """A batch of products by the schedule language."""

    search = "genetic"

    def __init__(self, operator: Operator) -> None:
        """Take a batch of products; raises what its space raises."""
        self.operator = operator
        node, piece = operator.piece.graph.nodes[0], operator.piece
        left, out = piece.type(node.inputs[0]), piece.type(node.output)
        k = left.shape[-2 if node.attr("trans_a", False) else -1]
        self.batch = math.prod(out.shape[:-2])
        self.shape = GemmShape(out.shape[-2], k, out.shape[-1], left.dtype, out.dtype)
        self.share = share_of(operator.chip, self.batch)
        self.measure = ProductMeasure(operator, self.shape)
        found = candidates(self.shape, self.share)
        self.space = TableSpace(TILING_NAMES, [getattr(found, name) for name in TILING_NAMES])

    def choice(self, point: Point) -> Choice:
        """Return the tiling of a point."""
        return Choice(tiling=tiling_of(self.shape, point))

    def start(self) -> Sequence[Point]:
        """Return the default."""
        default = default_schedule(self.shape, self.share)
        return [p for p in self.space.points() if tiling_of(self.shape, p) == default][:1]

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return nothing: few shapes of batches are alike."""
        return []

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the cycles of the products at the cubes' peak, and whether all was timed."""
        best = int(min([self.operator.default_cycles, *(t.cost for t in trials)]))
        chip, macs = self.operator.chip, self.batch * self.shape.ops // 2
        launch = round(chip.launch_overhead_s * chip.clock_hz)
        least = launch + -(-macs // (chip.macs_per_cycle(self.shape.dtype) * chip.core_count))
        if sum(t.cost < math.inf for t in trials) == self.space.size:
            return best, True
        return min(least, best), best <= least


def tiling_of(shape: GemmShape, point: Point) -> GemmSchedule:
    """Return the schedule of a point."""
    m, k, n, step, rows, cols = point
    return GemmSchedule(FRACTAL * m, c0_of(shape.dtype) * k, FRACTAL * n, step, rows, cols)
