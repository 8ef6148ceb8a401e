"""How long a point takes: its schedule lowered, and its kernel simulated."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ascend_lab.aoe.operators import warm_cycles
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.space import VectorSpace, vector_space
from ascend_lab.chip import Chip
from ascend_lab.dsl.lower import lower
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.sim import simulate_kernel


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
        kernel = lower(self.space().build(point))
        if self.warm is None:
            return simulate_kernel(kernel, self.chip).total_cycles
        return warm_cycles(kernel, self.chip, self.warm)

    def space(self) -> VectorSpace:
        """Return the space, made once in a process."""
        return _space(self)

    def __hash__(self) -> int:
        """Hash outputs, chip name, and what L2 holds."""
        return hash((self.outputs, self.chip.name, self.warm))

    def __reduce__(self) -> tuple[Any, ...]:
        """Send everything as bytes: a worker unpacks them once, not for every point."""
        return _unpacked, (pickle.dumps((self.outputs, self.chip, self.warm)),)


@lru_cache(maxsize=64)
def _unpacked(data: bytes) -> VectorMeasure:
    return VectorMeasure(*pickle.loads(data))


@lru_cache(maxsize=64)
def _space(measure: VectorMeasure) -> VectorSpace:
    return vector_space(measure.outputs, measure.chip)
