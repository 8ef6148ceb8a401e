"""What to multiply and how to tile it: problem, tiling, legality."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import c0_of

FRACTAL = 16
ACCUMULATOR = {"fp16": "fp32", "bf16": "fp32", "int8": "int32"}


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """Tiling in elements: base tiles of L0, `step_k` base_k per L1 stage, a grid of cores."""

    base_m: int
    base_k: int
    base_n: int
    step_k: int
    grid_rows: int
    grid_cols: int

    def as_dict(self) -> dict[str, int]:
        """Return the fields as plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Problem size and number formats."""

    m: int
    k: int
    n: int
    dtype: str = "fp16"
    out_dtype: str = ""

    def __post_init__(self) -> None:
        """Check sizes and formats; the default output format is the accumulator's."""
        if min(self.m, self.k, self.n) < 1:
            raise InputError(
                "m, k and n of at least 1",
                f"{self.m}, {self.k}, {self.n}",
                "give three positive sizes",
            )
        if max(self.m, self.k, self.n) > 1 << 24 or self.ops > 1 << 56:
            raise InputError(
                "m, k and n of at most 16777216, and 2 m k n of at most 2^56",
                f"{self.m}, {self.k}, {self.n}",
                "split it",
            )
        if self.dtype not in ACCUMULATOR:
            raise InputError(f"dtype {', '.join(ACCUMULATOR)}", self.dtype, "convert the operands")
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", ACCUMULATOR[self.dtype])
        short = "bf16" if self.dtype == "bf16" else "fp16"
        if self.out_dtype not in (ACCUMULATOR[self.dtype], short):
            raise InputError(
                f"out dtype {ACCUMULATOR[self.dtype]} or {short} for {self.dtype} operands",
                self.out_dtype,
                "leave it out for the accumulator's own format",
            )

    @property
    def ops(self) -> int:
        """Useful operations, 2 m k n; padding to fractals is not counted."""
        return 2 * self.m * self.k * self.n

    @property
    def fractals(self) -> tuple[int, int, int]:
        """(M1, K1, N1): sizes in fractals, rounded up."""
        return up(self.m, FRACTAL), up(self.k, c0_of(self.dtype)), up(self.n, FRACTAL)


def up(value: int, unit: int) -> int:
    """Return value / unit rounded up."""
    return -(-value // unit)


def check_schedule(shape: GemmShape, schedule: GemmSchedule, chip: Chip) -> None:
    """Raise `InputError` or `CapacityError` with the bytes needed and available."""
    c0 = c0_of(shape.dtype)
    for name, unit in (("base_m", FRACTAL), ("base_n", FRACTAL), ("base_k", c0)):
        value = getattr(schedule, name)
        if value < 1 or value % unit:
            raise InputError(f"{name} in multiples of {unit}", str(value), "round it")
    if min(schedule.step_k, schedule.grid_rows, schedule.grid_cols) < 1:
        raise InputError(
            "step_k, grid rows and grid columns of at least 1",
            f"{schedule.step_k}, {schedule.grid_rows}x{schedule.grid_cols}",
            "use positive numbers",
        )
    cores = schedule.grid_rows * schedule.grid_cols
    if cores > chip.core_count:
        raise InputError(
            f"a grid of at most {chip.core_count} cores on {chip.name}", str(cores), "shrink it"
        )
    for space, size in tile_bytes(shape, schedule).items():
        if size > chip.buffers[space]:
            raise CapacityError(
                f"{space} for tile {schedule.base_m},{schedule.base_k},{schedule.base_n} "
                f"step {schedule.step_k}: {size} bytes",
                f"{chip.buffers[space]} on {chip.name}",
                "halve a side of the tile",
            )


def tile_bytes(shape: GemmShape, schedule: GemmSchedule) -> dict[str, int]:
    """Bytes each buffer needs: double buffers everywhere, one tile of C at least."""
    size = DTYPE_BYTES[shape.dtype]
    m, k, n = schedule.base_m, schedule.base_k, schedule.base_n
    return {
        "L0A": 2 * m * k * size,
        "L0B": 2 * k * n * size,
        "L0C": m * n * 4,
        "L1": 2 * (m + n) * k * schedule.step_k * size,
    }
