"""What to multiply and how to tile it: problem, tiling, legality, and the default rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import c0_of

FRACTAL = 16
ACCUMULATOR = {"fp16": "fp32", "int8": "int32"}


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
        if max(self.m, self.k, self.n) > 1 << 24:
            raise InputError(
                "m, k and n of at most 16777216", f"{self.m}, {self.k}, {self.n}", "split it"
            )
        if self.dtype not in ACCUMULATOR:
            raise InputError("dtype fp16 or int8", self.dtype, "convert the operands")
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", ACCUMULATOR[self.dtype])
        if self.out_dtype not in (ACCUMULATOR[self.dtype], "fp16"):
            raise InputError(
                f"out dtype {ACCUMULATOR[self.dtype]} or fp16 for {self.dtype} operands",
                self.out_dtype,
                "leave it out for the accumulator's own format",
            )

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


def default_schedule(shape: GemmShape, chip: Chip) -> GemmSchedule:
    """The greedy rule: full grid, then the L0 tile that moves fewest bytes per MAC, deepest L1.

    For every way to arrange the cores: balance the rows and columns of tiles, take the tile with
    the least estimated time = max(cube, L1 traffic, GM traffic) of the busiest core.
    """
    best: tuple[float, GemmSchedule] | None = None
    for rows, cols in _grids(chip.core_count):
        for base in _tiles(shape, chip, rows, cols):
            schedule = GemmSchedule(*base, 1, rows, cols)
            score = _estimate(shape, schedule, chip)
            if best is None or score < best[0]:
                best = (score, schedule)
    if best is None:
        raise CapacityError("a 16x16 tile in L0", str(dict(chip.buffers)), "enlarge the buffers")
    return _deepen(shape, best[1], chip)


def _grids(cores: int) -> Iterator[tuple[int, int]]:
    return ((r, cores // r) for r in range(1, cores + 1) if cores % r == 0)


def _tiles(shape: GemmShape, chip: Chip, rows: int, cols: int) -> Iterator[tuple[int, int, int]]:
    """Candidate (m, k, n) tiles: sides of 16 * 2^i or what one core has, k as large as fits."""
    m1, k1, n1 = shape.fractals
    c0, size = c0_of(shape.dtype), DTYPE_BYTES[shape.dtype]
    for tm in _sides(up(m1, rows)):
        for tn in _sides(up(n1, cols)):
            if tm * tn * 1024 > chip.buffers["L0C"]:
                continue
            room = min(chip.buffers["L0A"] // tm, chip.buffers["L0B"] // tn) // 2
            tk = min(room // (FRACTAL * c0 * size), k1, 8)
            if tk >= 1:
                yield tm * FRACTAL, tk * c0, tn * FRACTAL


def _sides(limit: int) -> list[int]:
    return sorted({min(s, limit) for s in (1, 2, 4, 6, 8, 12, 16, 24, 32)})


def _estimate(shape: GemmShape, s: GemmSchedule, chip: Chip) -> float:
    """Cycles of the busiest core if everything overlaps: the largest of its three loads."""
    size = DTYPE_BYTES[shape.dtype]
    m1, k1, n1 = shape.fractals
    tiles = up(up(m1 * FRACTAL, s.base_m), s.grid_rows) * up(
        up(n1 * FRACTAL, s.base_n), s.grid_cols
    )
    k = k1 * c0_of(shape.dtype)
    cube = s.base_m * k * s.base_n / chip.macs_per_cycle(shape.dtype)
    l0a, l0b = chip.path("L1", "L0A"), chip.path("L1", "L0B")
    loads = up(k, s.base_k) * (l0a.startup_cycles + l0b.startup_cycles)
    mte1 = loads + k * size * (
        s.base_m / l0a.rate_bytes_per_cycle + s.base_n / l0b.rate_bytes_per_cycle
    )
    gm = min(
        chip.path("GM", "L1").rate_bytes_per_cycle,
        chip.shared_rate_bytes_per_cycle("L2", s.grid_rows * s.grid_cols),
    )
    mte2 = k * size * (s.base_m + s.base_n) / gm
    drain_path = chip.path("L0C", "UB" if chip.combined else "GM")
    drain = s.base_m * s.base_n * 4 / drain_path.rate_bytes_per_cycle
    if s.base_m * s.base_n * 8 <= chip.buffers["L0C"]:
        drain *= 0.1
    return tiles * (max(cube + drain, mte1, mte2) + 0.05 * (cube + mte1 + mte2))


def _deepen(shape: GemmShape, schedule: GemmSchedule, chip: Chip) -> GemmSchedule:
    """Return the schedule with the deepest L1 stage that fits, at most 8 and all of k."""
    steps = up(shape.fractals[1] * c0_of(shape.dtype), schedule.base_k)
    best = schedule
    for step in range(1, min(8, steps) + 1):
        deeper = replace(schedule, step_k=step)
        if tile_bytes(shape, deeper)["L1"] <= chip.buffers["L1"]:
            best = deeper
    return best
