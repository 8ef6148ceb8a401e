"""Vector operators as jobs of the tuner: their space, where a search starts, and their bound."""

from collections.abc import Sequence
from functools import cached_property

from ascend_lab.aoe import operators
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.measure import VectorMeasure
from ascend_lab.aoe.vector.space import COUNTED, VectorSpace
from ascend_lab.compiler.lower import Choice, vector

__all__ = ["VectorJob", "VectorMeasure", "VectorSpace", "vector_bound"]
PATIENCE = 48
"""Trials without a gain that end a search: from defaults near their bound, gains come early."""


class VectorJob:
    """Elementwise work, reductions and what combines them, by a chain of primitives."""

    search = "mcts"

    def __init__(self, operator: operators.Tunable) -> None:
        """Take an operator of the vector unit; raises what its space raises."""
        self.operator = operator
        self.outputs = tuple(vector.vector_outputs(operator.piece)[0])
        self.measure = VectorMeasure(self.outputs, operator.chip, operator.warm)
        self.space: VectorSpace = self.measure.space()

    def choice(self, point: Point) -> Choice:
        """Return the steps of a point."""
        # Steps and not numbers are stored: they can be replayed by any version that has the
        # primitives.
        return Choice(steps=self.space.build(point).to_json())

    def start(self) -> Sequence[Point]:
        """Return the default, and the default without parts of rows."""
        return self.space.default_points

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return nothing: steps name the loops of their own shape."""
        return []

    @cached_property
    def least_cycles(self) -> int:
        """A lower bound on the cycles of every schedule."""
        return vector_bound(self.outputs, self.operator.chip, self.operator.warm)

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the bound, and whether all of the space was timed."""
        count_limit = min(COUNTED, 1 << len(trials).bit_length())  # more of them were not all timed
        return self.operator.bounded(self.least_cycles, trials, self.space.counted(count_limit))
