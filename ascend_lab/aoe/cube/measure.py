"""How long a point takes: its kernel, built and simulated as the graph compiler launches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.cube.bound import Bounds, CubeProblem
from ascend_lab.aoe.cube.conv_space import NAMES as CONV_NAMES
from ascend_lab.aoe.cube.conv_space import canonical_row as conv_row
from ascend_lab.aoe.cube.conv_space import conv_schedule_of, conv_space
from ascend_lab.aoe.cube.space import NAMES as GEMM_NAMES
from ascend_lab.aoe.cube.space import canonical_row as gemm_row
from ascend_lab.aoe.cube.space import gemm_schedule_of, gemm_space
from ascend_lab.aoe.cube.table import MOST, Columns, CubeSpace, Shape, number_of, word_of
from ascend_lab.aoe.moves import completed
from ascend_lab.aoe.operators import base_name, warm_cycles
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.workers import attempt
from ascend_lab.chip import Chip
from ascend_lab.isa import Launch, as_kernel
from ascend_lab.kernels.conv import conv_launch
from ascend_lab.kernels.conv_default import conv_schedule
from ascend_lab.kernels.conv_place import dense_placement
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.epilogue_plan import Demand, demand_of
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_default import default_schedule
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, GemmSchedule

SMALL = 3000
"""Points of a space that is measured as a whole."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What products, and what convolutions do in a way of their own; `roles` of their tensors."""

    names: tuple[str, ...]
    space: Callable[..., CubeSpace]
    row: Callable[..., Columns]
    schedule: Callable[..., GemmSchedule]
    default: Callable[..., GemmSchedule]
    roles: Mapping[str, str]


_GEMM = _Kind(GEMM_NAMES, gemm_space, gemm_row, gemm_schedule_of, default_schedule, {})
_CONV = _Kind(
    CONV_NAMES, conv_space, conv_row, conv_schedule_of, conv_schedule, {"x": "a", "weight": "b"}
)


def _kind(shape: Shape) -> _Kind:
    return _CONV if isinstance(shape, ConvShape) else _GEMM


def cube_space(
    shape: Shape, chip: Chip, demand: Demand | None = None, most: int = MOST
) -> CubeSpace:
    """Return the space of a product or a convolution, thinned out to about `most` points."""
    return _kind(shape).space(shape, chip, demand, most)


def small_space(
    shape: Shape, chip: Chip, demand: Demand | None = None, most: int = SMALL
) -> CubeSpace:
    """Return a coarse space: every size so far above the last that all can be measured.

    The default schedule is not added to it: between such sizes no search could find its way there.
    """
    return _kind(shape).space(shape, chip, demand, most, default=False)


def cube_table(space: CubeSpace, measure: CubeMeasure) -> NDArray[np.float64]:
    """Return the cycles of every row of a space, infinite where there is no kernel."""
    return np.array([attempt(measure, point)[0] for point in space.points()])


def schedule_of(shape: Shape, point: Point) -> GemmSchedule:
    """Return the schedule of a point of the space of `shape`."""
    return _kind(shape).schedule(shape, point)


def point_of(space: CubeSpace, schedule: GemmSchedule) -> Point:
    """Return the point of a schedule, or the nearest one where the space has no such tiling."""
    row = _kind(space.shape).row(space.shape, space.chip, schedule)
    return completed(space, [word_of(name, int(row[name][0])) for name in space.names])


@dataclass(frozen=True, slots=True)
class CubeMeasure(CubeProblem):
    """Point -> cycles of one launch of the kernel, its host overhead included.

    A convolution fills dense planes (NC1HWC0), as in a graph.
    """

    @property
    def demand(self) -> Demand | None:
        """What the epilogue needs."""
        return demand_of(self.epilogue, self.chip, ACCUMULATOR[self.shape.dtype])

    @property
    def default(self) -> GemmSchedule:
        """The tiling that is taken without a search."""
        return _kind(self.shape).default(self.shape, self.chip, self.epilogue)

    def space(self) -> CubeSpace:
        """Return all tilings."""
        return cube_space(self.shape, self.chip, self.demand)

    def launch(self, point: Point) -> Launch:
        """Return the kernel of a point."""
        schedule = schedule_of(self.shape, point)
        if isinstance(self.shape, ConvShape):
            place = dense_placement(self.shape)
            return conv_launch(self.shape, self.chip, schedule, place, self.epilogue)
        return gemm_launch(self.shape, self.chip, schedule, self.epilogue)

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point."""
        kernel, roles = as_kernel(self.launch(point)), _kind(self.shape).roles
        held = {b.name for b in kernel.tensors if roles.get(b.name, base_name(b)) in self.warm}
        return warm_cycles(kernel, self.chip, held)

    def bound(self, point: Point) -> float:
        """Return cycles that the point does not go below, without building its kernel."""
        genes = zip(_kind(self.shape).names, point, strict=True)
        table = {n: np.array([number_of(n, value)], np.int64) for n, value in genes}
        return float(Bounds(self, table).closed[0])
