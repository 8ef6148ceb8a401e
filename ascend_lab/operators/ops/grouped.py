"""Grouped products: one kernel that multiplies each group of rows g by its own matrix w[g].

    y[rows of g] = x[rows of g] w[g]

In a mixture of experts the rows are sorted by expert, and each expert has a matrix. Some groups run
at the same time, each on an equal share of the cores and with its own tiling. Groups are sorted by
their number of rows, so that those at the same time take about equally long. The number of groups
at the same time is chosen by simulation: with few groups many cores divide one matrix, and with
many groups all cores are busy although each group has few rows.

x (K1, M1, 16, C0) and y (N1, M1, 16, 16) are in fractals, with the rows of each group padded to
multiples of 16. w is (K1, N1, 16, C0), one group after another.
"""

from dataclasses import dataclass, replace

from ascend_lab.errors import InputError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators.kernels import GemmShape, default_schedules, gemm
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.kernels.gemm_schedule import GemmSchedule


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """The rows of each group (0: the group is empty), and k, n and formats of a grouped product.

    Raises `InputError` if all groups are empty, and the errors of `GemmShape`.
    """

    rows: tuple[int, ...]
    k: int
    n: int
    dtype: str = "fp16"
    out_dtype: str = ""

    def __post_init__(self) -> None:
        """Check the rows; `whole` checks the other fields."""
        if not any(self.rows) or min(self.rows) < 0:
            raise InputError("rows of at least one group", str(self.rows), "give whole numbers")
        object.__setattr__(self, "out_dtype", self.whole.out_dtype)

    @property
    def fractal_rows(self) -> tuple[int, ...]:
        """Fractals of rows of each group."""
        return tuple(isa.ceil_div(rows, isa.FRACTAL) for rows in self.rows)

    @property
    def whole(self) -> GemmShape:
        """The single product that has all rows of x and y."""
        m = sum(self.fractal_rows) * isa.FRACTAL
        return GemmShape(m, self.k, self.n, self.dtype, self.out_dtype)


def grouped_kernel(
    shape: GroupedShape, chip: Chip, groups_per_phase: int, epilogue: Epilogue | None = None
) -> isa.Kernel:
    """Return the kernel that runs some groups at the same time, in one phase after another.

    Operands of an epilogue have a tensor for each group, named with its number ("bias3"). Raises
    the errors of `gemm_launch`.
    """
    phases = []
    for number, groups in enumerate(_phase_groups(shape, groups_per_phase)):
        launches = [
            _group_launch(shape, g, _chip_share(chip, len(groups)), chip, epilogue) for g in groups
        ]
        parts = tuple(part for launch in launches for part in launch.parts)
        phases.append(isa.Launch(f"groups_{number * groups_per_phase}", parts, launches[0].mix))
    nonempty = sum(rows > 0 for rows in shape.rows)
    return isa.Kernel(f"grouped_{nonempty}x{shape.k}x{shape.n}", tuple(phases))


def _phase_groups(shape: GroupedShape, groups_per_phase: int) -> list[list[int]]:
    """Return the groups of each phase, those with most rows first.

    Rows (10, 0, 90, 40) with two groups at a time give [[2, 3], [0]]: group 1 is empty.
    """
    # rows 10, 0, 90, 40 are 1, 0, 6 and 3 fractals of 16
    fractal_rows = shape.fractal_rows
    nonempty = [g for g, height in enumerate(fractal_rows) if height]
    nonempty.sort(key=lambda g: -fractal_rows[g])  # stable: equal groups stay in order
    return [
        nonempty[first : first + groups_per_phase]
        for first in range(0, len(nonempty), groups_per_phase)
    ]


def _chip_share(chip: Chip, parts: int) -> Chip:
    """Return a chip with one of `parts` equal shares of the cores and of the memories' rates."""
    # Half of the cores see half of the rate, as the other half reads at the same time.
    l2, memory = (
        replace(m, rate_bytes_per_s=m.rate_bytes_per_s / parts)
        for m in (chip.l2, chip.device_memory)
    )
    return replace(chip, core_count=chip.core_count // parts, l2=l2, device_memory=memory)


def _best_estimate(
    shape: GroupedShape, group: int, share: Chip, epilogue: Epilogue | None
) -> tuple[float, GemmSchedule]:
    """Return the lowest estimate for a group on its share of the cores, with its schedule."""
    group_shape = replace(shape.whole, m=shape.fractal_rows[group] * isa.FRACTAL)
    best, *_ = default_schedules.promising(group_shape, share, epilogue, frozenset(), 1)
    return best


def _estimate(
    shape: GroupedShape, chip: Chip, groups_per_phase: int, epilogue: Epilogue | None
) -> float:
    """Return the estimated cycles of a kernel: in each phase all wait for the slowest group."""
    total = 0.0
    for groups in _phase_groups(shape, groups_per_phase):
        share = _chip_share(chip, len(groups))
        total += max(_best_estimate(shape, g, share, epilogue)[0] for g in groups)
    return total


def _group_launch(
    shape: GroupedShape, group: int, share: Chip, chip: Chip, epilogue: Epilogue | None
) -> isa.Launch:
    """Return the product of one group on its share of the cores."""
    fractal_rows = shape.fractal_rows
    all_rows = shape.whole
    _, schedule = _best_estimate(shape, group, share, epilogue)
    _, k1, n1 = all_rows.fractals
    # the product of all rows, restricted to this group's rows (begin, count) and all columns
    area = (sum(fractal_rows[:group]), fractal_rows[group]), (0, n1)
    launch = gemm.gemm_launch(all_rows, chip, schedule, epilogue, area)
    size = k1 * n1 * isa.FRACTAL * isa.c0_of(shape.dtype)
    names = {o.name: f"{o.name}{group}" for o in epilogue.operands} if epilogue else {}
    names["tiles"] = f"tiles{group}"
    # w holds all matrices one behind the other: this group's begins at element group * size
    return isa.renamed(launch, names, b=(group * size, len(fractal_rows) * size))


TIMED_CANDIDATES = 2
"""Number of candidates with the lowest estimates that are simulated."""


def default_grouped(
    shape: GroupedShape, chip: Chip, epilogue: Epilogue | None = None
) -> isa.Kernel:
    """Return the fastest of the `TIMED_CANDIDATES` kernels with the lowest estimates.

    The candidates run a number of groups at the same time that divides the number of cores, or all
    groups.
    """
    cores = chip.core_count
    nonempty = sum(rows > 0 for rows in shape.rows)
    # 32 cores and 6 groups with rows: 1, 2, 4 and 6 side by side are tried.
    numbers = [n for n in range(1, min(cores, nonempty) + 1) if cores % n == 0 or n == nonempty]
    numbers.sort(key=lambda n: _estimate(shape, chip, n, epilogue))
    kernels = [grouped_kernel(shape, chip, n, epilogue) for n in numbers[:TIMED_CANDIDATES]]
    return min(kernels, key=lambda kernel: simulate_kernel(kernel, chip).cycles)
