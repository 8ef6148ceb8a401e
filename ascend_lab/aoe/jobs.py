"""From an operator to what a search needs: its space, its measure, and points to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ascend_lab.aoe.cube.job import CubeJob
from ascend_lab.aoe.cube.products import ProductJob
from ascend_lab.aoe.operators import Operator
from ascend_lab.aoe.space import Point, Space
from ascend_lab.aoe.trace import Trial
from ascend_lab.aoe.vector.job import VectorJob
from ascend_lab.aoe.workers import Measure
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.lower import Choice


class Job(Protocol):
    """An operator with its space of schedules."""

    @property
    def operator(self) -> Operator:
        """The operator to tune."""

    @property
    def space(self) -> Space:
        """Its schedules."""

    @property
    def measure(self) -> Measure:
        """Cycles of a point, launch included, on what L2 holds when the operator starts."""

    @property
    def search(self) -> str:
        """Name of the search that suits the space."""

    def choice(self, point: Point) -> Choice:
        """Return a point as what lowering takes."""

    def start(self) -> Sequence[Point]:
        """Return points worth trying first, the default among them if it is in the space."""

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return the points closest to choices that suited other shapes."""

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return cycles that no schedule of the space can beat, and whether the best is proven."""


def job_of(operator: Operator) -> Job:
    """Return the job of an operator; raise `UnsupportedError` with the reason if it has none."""
    if operator.unit == "vector":
        return VectorJob(operator)
    if operator.unit == "cube":
        return CubeJob(operator)
    if operator.unit == "product":
        return ProductJob(operator)
    raise UnsupportedError("an operator with a schedule", operator.op, operator.reason)
