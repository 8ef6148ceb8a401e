"""Measures the schedules of a vector operator: writes the kernel and simulates it."""

import pickle
from dataclasses import dataclass
from functools import lru_cache

from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.space import VectorSpace
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators.dsl import Tensor, lower
from ascend_lab.operators.ops.matmul import warm_cycles


@dataclass(frozen=True)
class VectorMeasure:
    """Maps a point to the cycles of one launch of its kernel, host overhead included.

    Every phase starts with an empty L2. With `warm`, L2 holds these tensors before the first phase,
    and each later phase finds what the earlier ones left.
    """

    outputs: tuple[Tensor, ...]
    chip: Chip
    warm: frozenset[str] | None = None

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises `AscendLabError` if it cannot be built."""
        return _cycles(self, point)

    def space(self) -> VectorSpace:
        """Return the space, which is built once per process."""
        return _space(self)

    def __hash__(self) -> int:
        """Hash outputs, chip name, and the tensors in L2."""
        return hash((self.outputs, self.chip.name, self.warm))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the measure as bytes: a worker unpacks them once, not for every point."""
        return _unpacked, (pickle.dumps((self.outputs, self.chip, self.warm)),)


@lru_cache(maxsize=64)
def _unpacked(data: bytes) -> VectorMeasure:
    return VectorMeasure(*pickle.loads(data))


@lru_cache(maxsize=64)
def _space(measure: VectorMeasure) -> VectorSpace:
    return VectorSpace(measure.outputs, measure.chip)


@lru_cache(maxsize=1024)
def _cycles(measure: VectorMeasure, point: Point) -> float:
    """Return the cycles of a point; they are cached, because several searches ask for them."""
    # Every candidate is written out and simulated: a vector kernel has too many special cases for a
    # formula.
    kernel = lower(measure.space().build(point))
    if measure.warm is None:
        return simulate_kernel(kernel, measure.chip).total_cycles
    return warm_cycles(kernel, measure.chip, measure.warm)
