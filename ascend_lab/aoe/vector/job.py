"""A vector operator as a job: its chain of schedule decisions, and how far one can get."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from ascend_lab.aoe.operators import Operator
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.trace import Trial
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.measure import VectorMeasure
from ascend_lab.aoe.vector.space import VectorSpace
from ascend_lab.graph.lower import Choice
from ascend_lab.graph.lower.vector import vector_outputs


class VectorJob:
    """Elementwise work, reductions and what combines them, by a chain of primitives."""

    search = "mcts"

    def __init__(self, operator: Operator) -> None:
        """Take an operator of the vector unit; raises what its space raises."""
        self.operator = operator
        self.outputs = tuple(vector_outputs(operator.piece)[0])
        self.measure = VectorMeasure(self.outputs, operator.chip, operator.warm)
        self.space: VectorSpace = self.measure.space()

    def choice(self, point: Point) -> Choice:
        """Return the steps of a point."""
        return Choice(steps=self.space.build(point).to_json())

    def start(self) -> Sequence[Point]:
        """Return the default."""
        return [self.space.default_point]

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return nothing: steps name the loops of their own shape."""
        return []

    @cached_property
    def least_cycles(self) -> int:
        """Cycles that no schedule beats, whatever it is."""
        return vector_bound(self.outputs, self.operator.chip, self.operator.warm)

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the bound, and whether all of the space was timed."""
        best = int(min([self.operator.default_cycles, *(t.cost for t in trials)]))
        if sum(t.cost < math.inf for t in trials) == self.space.size:
            return best, True
        return min(self.least_cycles, best), best <= self.least_cycles
