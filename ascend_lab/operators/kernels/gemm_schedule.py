"""Describe a matrix product and its tiling, and check that the tiling fits the chip.

`Tilings` are many schedules as arrays, for estimates of thousands of candidates at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import CapacityError, InputError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import ACCUMULATOR, FRACTAL, c0_of, ceil_div

CHOICES: dict[str, tuple[int | str, ...]] = {
    "order": ("mn", "nm"),
    "keep": ("", "a", "b"),
    "a_l1_slots": (1, 2),
    "b_l1_slots": (1, 2),
    "a_l0_slots": (1, 2),
    "b_l0_slots": (1, 2),
    "c_l0_slots": (0, 1, 2),
    "window": ("", "flat", "strip", "stacked"),
    "bypass": ("", "a", "b", "ab"),
}
"""Allowed values of the fields of a schedule that are a choice among few.

The default is the first value, except for the slots of A and B, which default to 2.
`check_schedule` has the limits of the fields that count something (base_m .. grid_cols, split_k).
"""
MAX_STAGES_IN_L1 = 4
"""Most slots of L1 for the stages of a convolution.

A slot holds one stage, its rows and weights together.
"""
KEEP_ORDER = {"a": "mn", "b": "nm"}
"""The operand that stays in L1 -> the order of loops in which its tiles are the outer loop."""


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """Tiling in elements: base tiles of L0, `step_k` base_k per L1 stage, a grid of cores.

    With base_m 128, base_k 64 and step_k 4 an L1 stage of A is 128 x 256. In a convolution m
    counts pixels and n output channels.

    `order`: "mn" loops over the n tiles inside each m tile, "nm" over the m tiles inside each n
    tile. `keep` (products only): "a" loads all K of an m tile's rows once for all n tiles (order
    mn), "b" all K of an n tile's columns (order nm). L1 and L0 have 2 slots for A and for B (loads
    and use overlap) or 1 (they alternate, and tiles may be larger); c_l0_slots 0 means two slots if
    they fit. `window` (convolutions only): pixel tiles are "flat" (across rows), "strip" (inside a
    row) or "stacked" (across images); "" lets the kernel choose. `bypass` (products only, if the
    chip has the path): "a", "b" or "ab" go from GM straight to L0. `split_k` (products without an
    epilogue only) is the number of grids of cores that divide K; each grid writes a tensor of
    partial sums, and a second phase adds them.
    """

    base_m: int
    base_k: int
    base_n: int
    step_k: int
    grid_rows: int
    grid_cols: int
    order: str = "mn"
    keep: str = ""
    a_l1_slots: int = 2
    b_l1_slots: int = 2
    a_l0_slots: int = 2
    b_l0_slots: int = 2
    c_l0_slots: int = 0
    window: str = ""
    bypass: str = ""
    split_k: int = 1

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "GemmSchedule":
        """Return the tiling that `as_dict` wrote; raise `TypeError` for anything else."""
        kinds = {f.name: f.type for f in fields(cls)}
        for name, value in data.items():
            if type(value) is not kinds.get(name):
                raise TypeError(f"{name} of {value!r:.40}")
        return cls(**data)

    def as_dict(self) -> dict[str, Any]:
        """Return the tiling fields, and those other fields that differ from their defaults."""
        sizes = [f for f in fields(self) if f.default is MISSING]
        return {f.name: getattr(self, f.name) for f in sizes} | self.extras

    def __repr__(self) -> str:
        """Return the constructor call that makes the schedule, without default values."""
        arguments = [f"{name}={value!r}" for name, value in self.as_dict().items()]
        return f"GemmSchedule({', '.join(arguments)})"

    @property
    def extras(self) -> dict[str, Any]:
        """Return the fields beyond the tiling that are not the default."""
        optional = [f for f in fields(self) if f.default is not MISSING]
        values = {f.name: getattr(self, f.name) for f in optional}
        return {f.name: values[f.name] for f in optional if values[f.name] != f.default}


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
        sizes = f"m {self.m}, n {self.n}, k {self.k}"
        if min(self.m, self.k, self.n) < 1:
            raise InputError("m, n and k of at least 1", sizes, "give three positive sizes")
        if max(self.m, self.k, self.n) > 1 << 24 or self.ops > 1 << 56:
            needed = "m, n and k of at most 16777216, and 2 m n k of at most 2^56"
            raise InputError(needed, sizes, "split it")
        if self.dtype not in ACCUMULATOR:
            raise InputError(f"dtype {', '.join(ACCUMULATOR)}", self.dtype, "convert the operands")
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", ACCUMULATOR[self.dtype])
        # fp16 products may leave as fp32 or fp16, bf16 ones as fp32 or bf16, int8 ones as int32,
        # fp16 or int8.
        short_format = "bf16" if self.dtype == "bf16" else "fp16"
        if self.out_dtype not in (ACCUMULATOR[self.dtype], short_format, self.dtype):
            raise InputError(
                f"out dtype {ACCUMULATOR[self.dtype]} or {short_format} for {self.dtype} operands",
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
        return (
            ceil_div(self.m, FRACTAL),
            ceil_div(self.k, c0_of(self.dtype)),
            ceil_div(self.n, FRACTAL),
        )


def check_schedule(shape: GemmShape, schedule: GemmSchedule, chip: Chip) -> None:
    """Raise `InputError` or `CapacityError` with the bytes needed and available."""
    c0 = c0_of(shape.dtype)
    for name, unit in (("base_m", FRACTAL), ("base_n", FRACTAL), ("base_k", c0)):
        value = getattr(schedule, name)
        if value < 1 or value % unit:
            raise InputError(f"{name} in multiples of {unit}", str(value), "round it")
    grid = schedule.grid_rows, schedule.grid_cols, schedule.split_k
    if min(schedule.step_k, *grid) < 1:
        raise InputError(
            "step_k, grid rows, grid columns and split_k of at least 1",
            f"{schedule.step_k}, {'x'.join(map(str, grid))}",
            "use positive numbers",
        )
    # A grid of 4 x 5 with split_k 2 takes 40 cores.
    cores = math.prod(grid)
    if cores > chip.core_count:
        needed = f"a grid of at most {chip.core_count} cores on {chip.name}"
        raise InputError(needed, str(cores), "shrink it")
    _check_choices(schedule, chip)
    optional_fields = "".join(f" {name} {value}" for name, value in schedule.extras.items())
    for space, size in tile_bytes(shape, schedule).items():
        if size > chip.buffers[space]:
            raise CapacityError(
                f"{space} for tile m,k,n {schedule.base_m},{schedule.base_k},{schedule.base_n} "
                f"step {schedule.step_k}{optional_fields}: {size} bytes",
                f"{chip.buffers[space]} on {chip.name}",
                "halve a side of the tile",
            )


def _check_choices(schedule: GemmSchedule, chip: Chip) -> None:
    """Raise `InputError` for a value that a field cannot have, alone or together with others."""
    for name, allowed in CHOICES.items():
        value = getattr(schedule, name)
        if value not in allowed:
            choices = ", ".join(repr(v) for v in allowed)
            raise InputError(f"{name} of {choices}", repr(value), "take one of these")
    if schedule.keep and schedule.order != KEEP_ORDER[schedule.keep]:
        needed_order = f'order "{KEEP_ORDER[schedule.keep]}" to keep {schedule.keep.upper()}'
        remedy = "what stays in L1 belongs to the outer loop"
        raise InputError(needed_order, repr(schedule.order), remedy)
    if schedule.keep and schedule.keep in schedule.bypass:
        needed_operand = "another operand to bypass L1 than the one kept there"
        raise InputError(needed_operand, schedule.keep, "drop one of both")
    for operand in schedule.bypass.upper():
        if ("GM", "L0" + operand) not in chip.paths:
            needed_path = f"a chip with a path from GM to L0{operand}"
            raise InputError(needed_path, chip.name, "stage it in L1")


def tile_bytes(shape: GemmShape, schedule: GemmSchedule) -> dict[str, int]:
    """Return the bytes that each buffer needs: the slots of A and B, and at least one tile of C."""
    s = schedule
    element_bytes = DTYPE_BYTES[shape.dtype]
    # With split_k 2 a core keeps half of K: 128 of 256 fractals.
    all_k = ceil_div(shape.fractals[1], s.split_k) * c0_of(shape.dtype)

    def l1_depth(operand: str) -> int:
        """Return the depth of an operand's slot in L1, in elements."""
        if operand in s.bypass:
            return 0
        return all_k if s.keep == operand else s.base_k * s.step_k

    depth_a = l1_depth("a")
    depth_b = l1_depth("b")
    l1_elements = s.a_l1_slots * s.base_m * depth_a + s.b_l1_slots * s.base_n * depth_b
    return {
        "L0A": s.a_l0_slots * s.base_m * s.base_k * element_bytes,
        "L0B": s.b_l0_slots * s.base_k * s.base_n * element_bytes,
        "L0C": max(s.c_l0_slots, 1) * s.base_m * s.base_n * 4,  # sums have 4 bytes in every format
        "L1": l1_elements * element_bytes,
    }


# -- many tilings as arrays -----------------------------------------------------------------------
Array = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tilings:
    """Candidates as arrays of one length: tile sides in fractals, K tiles per stage, core grid."""

    m: Array
    k: Array
    n: Array
    step: Array
    rows: Array
    cols: Array

    def take(self, index: Array) -> "Tilings":
        """Return the candidates at `index`."""
        return Tilings(*(getattr(self, f.name)[index] for f in fields(self)))

    def schedule(self, index: int, dtype: str) -> GemmSchedule:
        """Return one candidate as a schedule in elements."""
        return GemmSchedule(
            base_m=int(self.m[index]) * FRACTAL,
            base_k=int(self.k[index]) * c0_of(dtype),
            base_n=int(self.n[index]) * FRACTAL,
            step_k=int(self.step[index]),
            grid_rows=int(self.rows[index]),
            grid_cols=int(self.cols[index]),
        )


def _units(dtype: str) -> tuple[int, ...]:
    """Return by how many elements each of the first six fields is counted in a `Tilings`."""
    return FRACTAL, c0_of(dtype), FRACTAL, 1, 1, 1


def tilings_of(schedules: Sequence[GemmSchedule], dtype: str) -> Tilings:
    """Return schedules as arrays."""
    # The first six fields of a schedule are those of `Tilings`, in the same order.
    names = [f.name for f in fields(GemmSchedule)][: len(fields(Tilings))]
    columns = []
    for name, unit in zip(names, _units(dtype), strict=True):
        values = [getattr(schedule, name) for schedule in schedules]
        columns.append(np.array(values, np.int64) // unit)
    return Tilings(*columns)


def memory_traffic(shape: GemmShape, chip: Chip, t: Tilings) -> tuple[dict[str, Floats], Array]:
    """Return, per candidate, the shares of A's and B's reads that miss L2, and all memory bytes.

    This is the rule of `sim.cost`, written out for this loop nest: the outermost loop whose body
    fits in L2 reads every byte from memory once. It is exact for tilings that divide the problem
    evenly.
    """
    m1, k1, n1 = shape.fractals
    fractal_bytes = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    out_fractal_bytes = FRACTAL**2 * DTYPE_BYTES[shape.out_dtype]
    a_bytes = m1 * k1 * fractal_bytes
    b_bytes = k1 * n1 * fractal_bytes
    c_bytes = m1 * n1 * out_fractal_bytes
    # In one turn all cores do one tile each. The m loop is outside: its body touches the turn's
    # rows of A and C and all of B. The n loop inside touches one turn's rows, columns and tiles.
    m_turns = -(-m1 // (t.rows * t.m))
    n_turns = -(-n1 // (t.cols * t.n))
    capacity = chip.l2.size_bytes
    m_turn_bytes = t.rows * t.m * (k1 * fractal_bytes + n1 * out_fractal_bytes) + b_bytes
    n_turn_bytes = (
        k1 * fractal_bytes * (t.rows * t.m + t.cols * t.n)
        + t.rows * t.m * t.cols * t.n * out_fractal_bytes
    )
    # Everything fits in L2, or a turn of m does: A and B are read from memory once.
    all_once = (a_bytes + b_bytes + c_bytes <= capacity) | (m_turn_bytes <= capacity)
    # Only a turn of n fits: A is read once, B once per turn of m.
    a_once = ~all_once & (n_turn_bytes <= capacity)
    # Nothing fits: A is read once per turn of n as well.
    a_missed = np.where(all_once | a_once, a_bytes, a_bytes * n_turns)
    b_missed = np.where(all_once, b_bytes, b_bytes * m_turns)
    # What cores load, L2 hits included: each column of the grid reads A's rows, each row B's
    # columns.
    a_read = a_bytes * t.cols * n_turns
    b_read = b_bytes * t.rows * m_turns
    miss_share = {"a": np.minimum(1.0, a_missed / a_read), "b": np.minimum(1.0, b_missed / b_read)}
    # Where everything fits in L2 the result stays there: memory sees no write during the kernel.
    written = c_bytes if a_bytes + b_bytes + c_bytes > capacity else 0
    total = np.minimum(a_missed, a_read) + np.minimum(b_missed, b_read) + written
    return miss_share, total.astype(np.int64)


def load_cycles_per_byte(chip: Chip, miss_share: Floats, cores: Array) -> Floats:
    """Return the cycles per byte from GM to L1, if the share `miss_share` of bytes misses L2.

    This is the rule of `sim.cost` on arrays: `cores` share the rates of L2 and of memory equally.
    """
    # The slowest of three limits counts: the path into the core, its share of L2, that of memory.
    path_cycles = 1.0 / chip.path("GM", "L1").rate_bytes_per_cycle
    hit_cycles = np.maximum(path_cycles, cores * chip.clock_hz / chip.l2.rate_bytes_per_s)
    memory_bytes_per_cycle = chip.device_memory.rate_bytes_per_s / cores / chip.clock_hz
    miss_cycles = np.maximum(path_cycles, 1.0 / memory_bytes_per_cycle)
    cycles: Floats = miss_share * miss_cycles + (1.0 - miss_share) * hit_cycles
    return cycles


def store_cycles_per_byte(chip: Chip, cores: Array) -> Floats:
    """Return the cycles per byte of the last copy to GM."""
    path_cycles = 1.0 / chip.path("UB" if chip.combined else "L0C", "GM").rate_bytes_per_cycle
    cycles: Floats = np.maximum(path_cycles, cores * chip.clock_hz / chip.l2.rate_bytes_per_s)
    return cycles
