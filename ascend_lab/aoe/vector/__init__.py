"""Tunes the operators of the vector unit: elementwise operators, reductions and their combinations.

A job has the search space of an operator, the first candidates, and a lower bound: the cycles that
no schedule undercuts.
"""

from collections.abc import Sequence
from functools import cached_property

from ascend_lab.aoe import operators
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.measure import VectorMeasure
from ascend_lab.aoe.vector.space import MAX_COUNTED, VectorSpace
from ascend_lab.compiler.lower import Choice, vector

__all__ = ["VectorJob", "VectorMeasure", "VectorSpace", "vector_bound"]
PATIENCE = 48
"""Trials without a gain that end a search: from defaults near their bound, gains come early."""


class VectorJob:
    """A tuning job for elementwise operators, reductions, and combinations of the two.

    Its schedules are sequences of scheduling primitives, such as split and fuse.
    """

    search = "mcts"

    def __init__(self, operator: operators.Tunable) -> None:
        """Take an operator of the vector unit; raises what its space raises."""
        self.operator = operator
        self.outputs = tuple(vector.vector_outputs(operator.piece)[0])
        self.measure = VectorMeasure(self.outputs, operator.chip, operator.warm)
        self.space: VectorSpace = self.measure.space()

    def choice(self, point: Point) -> Choice:
        """Return the scheduling steps of a point as a choice."""
        # Steps are stored, not the numbers of the point: any version that has the primitives can
        # replay them.
        return Choice(steps=self.space.build(point).to_json())

    def start(self) -> Sequence[Point]:
        """Return the default schedule, and the default without tiles that are a part of a row."""
        return self.space.default_points

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return nothing: steps refer to the loops of one shape and do not fit another."""
        return []

    @cached_property
    def least_cycles(self) -> int:
        """A lower bound on the cycles of every schedule."""
        return vector_bound(self.outputs, self.operator.chip, self.operator.warm)

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the lower bound, and whether the best trial is proven optimal."""
        # A space of more than twice as many points as trials was certainly not timed completely, so
        # that it need not be counted further: 100 trials, at most 128 points.
        count_limit = min(MAX_COUNTED, 1 << len(trials).bit_length())
        return self.operator.bounded(self.least_cycles, trials, self.space.counted(count_limit))
