"""Vector operators as jobs: how long a schedule takes, and how far one can get."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ascend_lab.aoe import operators
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.space import COUNTED, VectorSpace
from ascend_lab.compiler.lower import Choice, vector
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators.dsl import Tensor, lower
from ascend_lab.operators.ops.matmul import warm_cycles

__all__ = ["VectorJob", "VectorMeasure", "VectorSpace", "vector_bound"]
PATIENCE = 48
"""Trials without a gain that end a search: from defaults near their bound, gains come early."""


@dataclass(frozen=True)
class VectorMeasure:
    """Point -> cycles of one launch of the kernel, its host overhead included.

    Every phase starts on a cold L2, or with `warm` the first one on an L2 that holds these tensors
    and later ones on what is left there.
    """

    outputs: tuple[Tensor, ...]
    chip: Chip
    warm: frozenset[str] | None = None

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises `AscendLabError` where it cannot be built."""
        return _cycles(self, point)

    def space(self) -> VectorSpace:
        """Return the space, made once in a process."""
        return _space(self)

    def __hash__(self) -> int:
        """Hash outputs, chip name, and what L2 holds."""
        return hash((self.outputs, self.chip.name, self.warm))

    def __reduce__(self) -> tuple[object, ...]:
        """Send everything as bytes: a worker unpacks them once, not for every point."""
        return _unpacked, (pickle.dumps((self.outputs, self.chip, self.warm)),)


@lru_cache(maxsize=64)
def _unpacked(data: bytes) -> VectorMeasure:
    return VectorMeasure(*pickle.loads(data))


@lru_cache(maxsize=64)
def _space(measure: VectorMeasure) -> VectorSpace:
    return VectorSpace(measure.outputs, measure.chip)


@lru_cache(maxsize=1024)
def _cycles(measure: VectorMeasure, point: Point) -> float:
    """Return the cycles of a point, remembered: one search after another asks for the same."""
    # Every candidate is written out and simulated: a vector kernel has too many special cases for a
    # formula.
    kernel = lower(measure.space().build(point))
    if measure.warm is None:
        return simulate_kernel(kernel, measure.chip).total_cycles
    return warm_cycles(kernel, measure.chip, measure.warm)


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
        """Cycles that no schedule beats, whatever it is."""
        return vector_bound(self.outputs, self.operator.chip, self.operator.warm)

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the bound, and whether all of the space was timed."""
        count_limit = min(COUNTED, 1 << len(trials).bit_length())  # more of them were not all timed
        return self.operator.bounded(self.least_cycles, trials, self.space.counted(count_limit))
