"""Tunes the operators of the cube unit: products of matrices, and convolutions.

A job has the search space of an operator, the first candidates, and a lower bound: the cycles that
no tiling of the space undercuts. `prove` continues a search until the best tiling is certain: a
tiling that took 5,000 cycles is optimal if every other one has a bound of at least 5,000.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from ascend_lab.aoe import operators, workers
from ascend_lab.aoe.cube.bound import Bounds, CubeProblem
from ascend_lab.aoe.cube.conv_space import CONV
from ascend_lab.aoe.cube.space import (
    GEMM,
    MAX_POINTS,
    TEXT_GENES,
    CubeSpace,
    OperatorKind,
    Shape,
    number_of,
    word_of,
)
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.space import Point, TableSpace, completed
from ascend_lab.compiler import lower, tasks
from ascend_lab.fused.added_convolutions import joint_job
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import ACCUMULATOR, Launch, as_kernel
from ascend_lab.machine.sim.timeline import start_cycles
from ascend_lab.operators.dsl.auto import share_of
from ascend_lab.operators.kernels import conv_launch, conv_shape, conv_windows, gemm, gemm_schedule
from ascend_lab.operators.kernels.conv_schedules import (
    conv_candidates,
    conv_estimate,
    conv_schedule,
)
from ascend_lab.operators.kernels.default_schedules import candidates, default_schedule
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.kernels.epilogue_plan import Demand, chip_left, demand_of, fitting
from ascend_lab.operators.ops.matmul import base_name, least_cycles, warm_cycles


def _kind(shape: Shape) -> OperatorKind:
    return CONV if isinstance(shape, conv_shape.ConvShape) else GEMM


def cube_space(
    shape: Shape,
    chip: Chip,
    demand: Demand | None = None,
    max_points: int = MAX_POINTS,
    *,
    default: bool | gemm_schedule.GemmSchedule = True,
) -> CubeSpace:
    """Return the space of a product or a convolution, thinned out to about `max_points` points.

    `default` adds the default schedule: a thinned space may skip its sizes, and then no search
    could find it.
    """
    return _kind(shape).space(shape, chip, demand, max_points, default=default)


def schedule_of(shape: Shape, point: Point) -> gemm_schedule.GemmSchedule:
    """Return the schedule of a point of the space of `shape`."""
    return _kind(shape).schedule(shape, point)


def point_of(space: CubeSpace, schedule: gemm_schedule.GemmSchedule) -> Point:
    """Return the point of a schedule, or the nearest point if the space lacks its tiling."""
    row = _kind(space.shape).row(space.shape, space.chip, schedule)
    return completed(space, [word_of(name, int(row[name][0])) for name in space.names])


@dataclass(frozen=True, slots=True)
class CubeMeasure(CubeProblem):
    """Measures a point: returns the cycles of one launch, host overhead included.

    Images of convolutions are stored as NC1HWC0 planes. `own_default` is the operator's default
    schedule if it differs from the best one by the closed-form bounds.
    """

    own_default: gemm_schedule.GemmSchedule | None = None

    @property
    def demand(self) -> Demand | None:
        """The on-chip memory that the epilogue needs."""
        return demand_of(self.epilogue, self.chip, ACCUMULATOR[self.shape.dtype])

    @property
    def default(self) -> gemm_schedule.GemmSchedule:
        """The tiling that is used without a search."""
        return self.own_default or _kind(self.shape).default(self.shape, self.chip, self.epilogue)

    def space(self) -> CubeSpace:
        """Return the space of all tilings."""
        # the space has no schedule that divides K among cores: then it gets the default by the
        # closed form
        schedule = self.own_default
        in_space = schedule is not None and schedule.split_k == 1
        default = schedule if schedule is not None and in_space else True
        return cube_space(self.shape, self.chip, self.demand, default=default)

    def launch(self, point: Point) -> Launch:
        """Return the kernel of a point."""
        schedule = schedule_of(self.shape, point)
        if isinstance(self.shape, conv_shape.ConvShape):
            placement = conv_windows.dense_placement(self.shape)
            return conv_launch(self.shape, self.chip, schedule, placement, self.epilogue)
        return gemm.gemm_launch(self.shape, self.chip, schedule, self.epilogue)

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point."""
        kernel = as_kernel(self.launch(point))
        roles = _kind(self.shape).roles
        # the tensors of a convolution are named x and weight; `warm` calls them a and b
        in_l2 = {b.name for b in kernel.tensors if roles.get(b.name, base_name(b)) in self.warm}
        return warm_cycles(kernel, self.chip, in_l2)

    def bound(self, point: Point) -> float:
        """Return a lower bound on the point's cycles, without building its kernel."""
        genes = zip(_kind(self.shape).names, point, strict=True)
        # the bounds are computed for tables: this one has a single row
        table = {n: np.array([number_of(n, value)], np.int64) for n, value in genes}
        return float(Bounds(self, table).closed_form[0])


START_COUNT = 16
"""Number of points with the lowest bounds that are timed before the search proposes others."""
MAX_WALKED = 1024
"""Number of tilings whose bounds are tightened by a walk, to find those points."""


@dataclass(frozen=True, slots=True)
class SharedMeasure(CubeMeasure):
    """Measures points of operators whose epilogue reads a cube operand again: y = x + conv(x).

    It times the whole kernel after lowering. The tensor is fetched once for both uses. For the
    bounds it counts as `warm` (in L2): they contain no fetch of it, and so remain lower bounds.
    """

    operator: operators.Tunable | None = None

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises what lowering raises."""
        assert self.operator is not None
        return self.operator.cycles_of(lower.Choice(tiling=schedule_of(self.shape, point)))


class CubeJob:
    """A convolution, or a product of two matrices, with its epilogue."""

    search = "genetic"

    def __init__(self, operator: operators.Tunable) -> None:
        """Take an operator of the cube; raises what its space raises."""
        self.operator = operator
        piece = operator.piece
        chip = operator.chip
        if piece.graph.nodes[0].op in lower.CONVOLUTIONS:
            shape, epilogue, _ = lower.conv.conv_job(piece, chip)
            self.measure = self._measure(shape, epilogue)
        else:
            self.measure = self._measure(*lower.matmul.product_job(piece, chip))
        self.divided_k_bound = self._divided_k_bound()
        self.space: CubeSpace = self.measure.space()
        self.bounds = Bounds(self.measure, self.space.genes)
        # a walk (see `bound`) is slow: only the 1024 tilings with the lowest closed forms are
        # walked
        self.lower_bounds = self.bounds.closed_form.copy()
        lowest = np.argsort(self.lower_bounds, kind="stable")[:MAX_WALKED]
        self.lower_bounds[lowest] = self.bounds.walk(lowest)

    def _measure(self, shape: Shape, epilogue: Epilogue | None) -> CubeMeasure:
        """Return the measure on the contents of L2; the cube's operands are called "a" and "b"."""
        operator = self.operator
        a, b = operator.piece.graph.nodes[0].inputs[:2]
        operand_sides = ((a, "a"), (b, "b"))
        warm = operator.warm.union(side for name, side in operand_sides if name in operator.warm)
        epilogue_operands = epilogue.operands if epilogue else ()
        # x0.b is the second operand of x0 @ x0: the tensor is x0
        epilogue_tensors = {o.name.partition(".")[0] for o in epilogue_operands}
        shared: set[str] = set()
        for name, side in operand_sides:
            if name in epilogue_tensors:
                shared |= {name, side}
        default_tiling = tasks.lowered_once(operator.piece, operator.chip).tiling
        if not shared:
            return CubeMeasure(shape, operator.chip, epilogue, warm, default_tiling)
        all_warm = warm | shared
        return SharedMeasure(shape, operator.chip, epilogue, all_warm, default_tiling, operator)

    def _divided_k_bound(self) -> float:
        """Return a lower bound for schedules that divide K, which the space does not contain.

        It is infinite where the default does not divide K: then none is considered.
        """
        shape = self.measure.shape
        operator = self.operator
        default_tiling = self.measure.own_default
        if not (
            isinstance(shape, gemm_schedule.GemmShape)
            and default_tiling
            and default_tiling.split_k > 1
        ):
            return math.inf
        least_cycles_of_product = least_cycles(shape, operator.chip, self.measure.warm)
        return start_cycles(operator.chip, "cold") + least_cycles_of_product

    @property
    def default(self) -> Point:
        """The point of the tiling that is used without a search."""
        return point_of(self.space, self.measure.default)

    def points(self, choices: Sequence[lower.Choice]) -> list[Point]:
        """Return the points closest to tilings of other shapes."""
        return [point_of(self.space, c.tiling) for c in choices if c.tiling]

    def choice(self, point: Point) -> lower.Choice:
        """Return the tiling of a point."""
        return lower.Choice(tiling=schedule_of(self.measure.shape, point))

    def start(self) -> Sequence[Point]:
        """Return the default and the points with the lowest bounds."""
        rows = np.argsort(self.lower_bounds, kind="stable")[:START_COUNT]
        return [self.default, *map(self.space.point, rows)]

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return a lower bound on the cycles of all tilings, and whether the best one was found."""
        # a point that could not be built has no time: it keeps its bound
        costs = {t.point: t.cost for t in trials if t.cost < np.inf}
        lower_bounds, best = self._untimed_bounds(costs)
        least = min(float(lower_bounds.min()), self.divided_k_bound)
        return int(min(best, least)), best <= least

    def may_be_quickest(self, costs: Mapping[Point, float]) -> list[Point]:
        """Return the untimed points whose bound is below the best time, the lowest bound first."""
        lower_bounds, best = self._untimed_bounds(costs)
        rows = np.flatnonzero(lower_bounds < best)
        # few enough to walk them all: the tighter bounds exclude some more
        if len(rows) <= 2 * MAX_WALKED:
            lower_bounds[rows] = self.bounds.walk(rows)
            self.lower_bounds[rows] = lower_bounds[rows]
            rows = rows[lower_bounds[rows] < best]
        by_bound = np.argsort(lower_bounds[rows], kind="stable")
        return [self.space.point(row) for row in rows[by_bound]]

    def _untimed_bounds(self, costs: Mapping[Point, float]) -> tuple[gemm_schedule.Floats, float]:
        """Return the bounds of all points, infinite for timed ones, and the best time so far."""
        lower_bounds = self.lower_bounds.copy()
        lower_bounds[[self.space.row(point) for point in costs]] = np.inf
        return lower_bounds, min(float(self.operator.default_cycles), *costs.values(), np.inf)


FIRST_CHUNK = 512
"""Number of tilings whose bounds the first walk tightens; each later walk takes twice as many."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The best point, its cycles, a lower bound for all points, and the kernels simulated."""

    point: Point
    cycles: float
    lower_bound: float
    trials: int

    @property
    def proven(self) -> bool:
        """Whether the point is an optimum of the space."""
        return self.cycles <= self.lower_bound

    @property
    def gap(self) -> float:
        """How far the best point is above the bound: cycles / lower_bound - 1."""
        # 10,500 cycles above a bound of 10,000: 5 %
        return self.cycles / self.lower_bound - 1.0


class _BranchAndBound:
    """Branch and bound over the rows of a table.

    Rows of the table are first in `order`, sorted by their closed-form bounds, which are
    `sorted_bounds`. A walk tightens the bounds of some rows and moves them to `heap`;
    `walked_count` rows are there or were simulated. The row at the top of the heap is simulated
    next.
    """

    def __init__(self, space: CubeSpace, bounds: Bounds, measure: workers.Measure) -> None:
        self.space = space
        self.bounds = bounds
        self.measure = measure
        self.order = np.argsort(self.bounds.closed_form, kind="stable")
        self.sorted_bounds = self.bounds.closed_form[self.order]
        self.heap: list[tuple[float, int]] = []
        self.walked_count = 0
        self.chunk_size = FIRST_CHUNK
        self.best: tuple[float, Point] = (math.inf, ())
        self.trials = 0

    @property
    def least(self) -> tuple[float, float]:
        """The lowest bound in the heap, and the lowest outside."""
        inside = self.heap[0][0] if self.heap else math.inf
        outside = (
            self.sorted_bounds[self.walked_count]
            if self.walked_count < len(self.sorted_bounds)
            else math.inf
        )
        return inside, float(outside)

    def step(self) -> None:
        """Simulate the row with the lowest bound, or tighten more bounds."""
        inside, outside = self.least
        # the first kernel is simulated at once: its time is the limit `best`, and rows whose closed
        # form is above it need no walk
        if self.heap and (inside <= outside or not self.trials):
            _, row = heapq.heappop(self.heap)
            point = self.space.point(row)
            self.trials += 1
            self.best = min(self.best, (self.measure(point), point))
            return
        # rows whose bound is not below the best time cannot win: they are never walked
        promising_count = int(np.searchsorted(self.sorted_bounds, self.best[0]))
        end = min(self.walked_count + self.chunk_size, promising_count)
        rows = self.order[self.walked_count : end]
        for bound, row in zip(self.bounds.walk(rows).tolist(), rows.tolist(), strict=True):
            heapq.heappush(self.heap, (bound, row))
        self.walked_count = end
        self.chunk_size = 2 * self.chunk_size


def prove(
    space: CubeSpace,
    measure: workers.Measure,
    bounds: Bounds | None = None,
    *,
    most: int | None = None,
    time_limit_s: float | None = None,
    report: Callable[[int, int], None] = lambda trials, most: None,
) -> Proof:
    """Return the best point and a lower bound, after at most `most` kernels or `time_limit_s`.

    `bounds` are those of the space; without them `measure` must be a `CubeMeasure`, from which they
    are computed. `report` is called after each step with the kernels simulated and `most`.
    """
    deadline = workers.Deadline.of(time_limit_s)
    if bounds is None:
        assert isinstance(measure, CubeMeasure)
        bounds = Bounds(measure, space.genes)
    search = _BranchAndBound(space, bounds, measure)
    max_kernels = most or space.size
    while min(search.least) < search.best[0] and search.trials < max_kernels:
        # one kernel is simulated even without any time, so that there is a result
        if search.trials and deadline.has_passed:
            break
        search.step()
        report(search.trials, max_kernels)
    cycles, point = search.best
    return Proof(point, cycles, min(cycles, *search.least), search.trials)


# -- jobs whose space is a short list --------------------------------------------------------------
TILING_NAMES = tuple(f.name for f in fields(gemm_schedule.Tilings))
ORDERS = TEXT_GENES["order"]


def tiled_cycles(operator: operators.Tunable, dtype: str, point: Point) -> float:
    """Return the cycles of a point, launch included; raises what lowering raises."""
    return operator.cycles_of(lower.Choice(tiling=tiling_of(dtype, point)))


def tiling_of(dtype: str, point: Point) -> gemm_schedule.GemmSchedule:
    """Return the schedule of a point: a tiling, its window, and the order of its loops."""
    *sizes, window, order = point
    columns = {name: np.array([size]) for name, size in zip(TILING_NAMES, sizes, strict=True)}
    tilings = gemm_schedule.Tilings(**columns)
    return replace(tilings.schedule(0, dtype), window=str(window), order=str(order))


class TableJob:
    """A job whose space is a short list of tilings, from which also the default is chosen.

    Its parameter `tilings_by_window` holds the tilings of each type of window, each of which is
    tried in every loop order of `orders`. The only lower bound is that of the cubes' peak rate.
    """

    search = "genetic"

    def __init__(
        self,
        operator: operators.Tunable,
        shape: Shape,
        times: int,
        tilings_by_window: Mapping[str, gemm_schedule.Tilings],
        orders: Sequence[str],
    ) -> None:
        """Take a product or convolution that is done `times` times, and the tilings for it."""
        self.operator = operator
        self.shape = shape
        # two operations are one multiply-accumulate
        self.macs = times * shape.ops // 2
        self.measure = partial(tiled_cycles, operator, shape.dtype)
        rows = []
        for order in orders:
            for window, tilings in tilings_by_window.items():
                columns = [getattr(tilings, name).tolist() for name in TILING_NAMES]
                rows += [(*sizes, window, order) for sizes in zip(*columns, strict=True)]
        names = (*TILING_NAMES, "window", "order")
        self.space = TableSpace(names, [list(column) for column in zip(*rows, strict=True)])

    def point(self, schedule: gemm_schedule.GemmSchedule) -> Point:
        """Return the point of a schedule."""
        table = gemm_schedule.tilings_of([schedule], self.shape.dtype)
        sizes = (int(getattr(table, name)[0]) for name in TILING_NAMES)
        return (*sizes, schedule.window, schedule.order)

    def choice(self, point: Point) -> lower.Choice:
        """Return the tiling of a point."""
        return lower.Choice(tiling=tiling_of(self.shape.dtype, point))

    def points(self, choices: Sequence[lower.Choice]) -> list[Point]:
        """Return nothing: schedules of other shapes are rarely in the table."""
        return []

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the cycles of the products at the cubes' peak, and whether all points ran."""
        chip = self.operator.chip
        # macs / (macs per cycle and core * cores), rounded up
        peak_cycles = -(-self.macs // (chip.macs_per_cycle(self.shape.dtype) * chip.core_count))
        lower_bound = start_cycles(chip, "cold") + peak_cycles
        return self.operator.bounded(lower_bound, trials, self.space.size)


class ProductJob(TableJob):
    """A batch of products in the schedule language: equal tilings, each on its share of cores."""

    def __init__(self, operator: operators.Tunable) -> None:
        """Take a batch of products; raises what its space raises."""
        node = operator.piece.graph.nodes[0]
        piece = operator.piece
        left_type = piece.type(node.inputs[0])
        out_type = piece.type(node.output)
        # A lies as (k, m) if it is transposed, else as (m, k)
        k = left_type.shape[-2 if node.attr("trans_a", False) else -1]
        batch = math.prod(out_type.shape[:-2])
        shape = gemm_schedule.GemmShape(
            out_type.shape[-2], k, out_type.shape[-1], left_type.dtype, out_type.dtype
        )
        # a batch of 8 products on 32 cores: each is tiled for a chip of 4 cores
        chip = share_of(operator.chip, batch)
        super().__init__(operator, shape, batch, {"": candidates(shape, chip)}, ORDERS[:1])
        self.default = self.point(default_schedule(shape, chip))

    def start(self) -> Sequence[Point]:
        """Return the default."""
        return [self.default]


class JointJob(TableJob):
    """Two convolutions whose sums are added, with their epilogue."""

    def __init__(self, operator: operators.Tunable) -> None:
        """Take a piece with two convolutions; raises what its space raises."""
        shape, epilogue, _ = joint_job(operator.piece, operator.chip)
        demand = demand_of(epilogue, operator.chip, ACCUMULATOR[shape.dtype])
        chip = chip_left(operator.chip, demand)
        by_window = {}
        first_tilings = [conv_schedule(shape, operator.chip, epilogue)]
        # where no images can be stacked both keys are equal, and only the entry "" remains
        for image, window in {conv_shape.stacked(shape): "stacked", shape: ""}.items():
            all_tilings = conv_candidates(image, chip)
            conv_tilings = all_tilings.take(fitting(demand, chip, all_tilings.tilings))
            tilings = conv_tilings.tilings
            by_window[window] = tilings
            cycles = conv_estimate(image, chip, conv_tilings, demand)
            for row in np.argsort(cycles, kind="stable")[:START_COUNT].tolist():
                tiling = tilings.schedule(row, shape.dtype)
                first_tilings.append(replace(tiling, window=window))
        super().__init__(operator, shape, 1, by_window, ORDERS)
        # a dictionary drops duplicates and keeps the order, the default first
        self.first_points = dict.fromkeys(map(self.point, first_tilings))

    def start(self) -> Sequence[Point]:
        """Return the default and the best tilings by the closed form, in both loop orders."""
        return [(*point[:-1], order) for order in ORDERS for point in self.first_points]
