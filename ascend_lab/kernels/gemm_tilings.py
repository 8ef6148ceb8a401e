"""Many GEMM tilings as arrays, and the bytes each makes the chip fetch from device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.isa import c0_of
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, GemmShape

Array = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tilings:
    """Candidates as arrays of one length, in fractals: tile sides, K tiles a stage, core grid."""

    m: Array
    k: Array
    n: Array
    step: Array
    rows: Array
    cols: Array

    def take(self, index: Array) -> Tilings:
        """Return the candidates at `index`."""
        return Tilings(*(getattr(self, f.name)[index] for f in fields(self)))

    def schedule(self, index: int, dtype: str) -> GemmSchedule:
        """Return one candidate as a schedule in elements."""
        sides = (FRACTAL, c0_of(dtype), FRACTAL, 1, 1, 1)
        values = [int(getattr(self, f.name)[index]) for f in fields(self)]
        m, k, n, step, rows, cols = (v * unit for v, unit in zip(values, sides, strict=True))
        return GemmSchedule(m, k, n, step, rows, cols)


def tilings_of(schedules: Sequence[GemmSchedule], dtype: str) -> Tilings:
    """Return schedules as arrays."""
    units = (FRACTAL, c0_of(dtype), FRACTAL, 1, 1, 1)
    names = [f.name for f in fields(GemmSchedule)][: len(units)]
    return Tilings(
        *(
            np.array([getattr(s, name) for s in schedules], np.int64) // unit
            for name, unit in zip(names, units, strict=True)
        )
    )


def memory_traffic(shape: GemmShape, chip: Chip, t: Tilings) -> tuple[dict[str, Floats], Array]:
    """Return the share of A and of B read from memory, and all memory bytes, per candidate.

    The rule of `sim.traffic` written out for this nest: the outermost loop whose body fits in L2
    fetches every byte once. Exact for tilings that divide the problem evenly.
    """
    m1, k1, n1 = shape.fractals
    area = FRACTAL * c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    out = 256 * DTYPE_BYTES[shape.out_dtype]
    a, b, c = m1 * k1 * area, k1 * n1 * area, m1 * n1 * out
    m_turns, n_turns = -(-m1 // (t.rows * t.m)), -(-n1 // (t.cols * t.n))
    capacity = chip.l2.size_bytes
    per_m = t.rows * t.m * (k1 * area + n1 * out) + b
    per_n = k1 * area * (t.rows * t.m + t.cols * t.n) + t.rows * t.m * t.cols * t.n * out
    whole = (a + b + c <= capacity) | (per_m <= capacity)
    by_m = ~whole & (per_n <= capacity)
    a_missed = np.where(whole | by_m, a, a * n_turns)
    b_missed = np.where(whole, b, b * m_turns)
    a_read, b_read = a * t.cols * n_turns, b * t.rows * m_turns
    fresh = {"a": np.minimum(1.0, a_missed / a_read), "b": np.minimum(1.0, b_missed / b_read)}
    written = c if a + b + c > capacity else 0
    total = np.minimum(a_missed, a_read) + np.minimum(b_missed, b_read) + written
    return fresh, total.astype(np.int64)


def load_cycles_per_byte(chip: Chip, fresh: Floats, cores: Array) -> Floats:
    """Cycles a byte takes from GM to L1: the mix of memory and L2 of `sim.cost`, on arrays."""
    own = 1.0 / chip.path("GM", "L1").rate_bytes_per_cycle
    hit = np.maximum(own, cores * chip.clock_hz / chip.l2.rate_bytes_per_s)
    shared = chip.device_memory.rate_bytes_per_s / cores / chip.clock_hz
    mixed: Floats = fresh * np.maximum(own, 1.0 / shared) + (1.0 - fresh) * hit
    return mixed


def store_cycles_per_byte(chip: Chip, cores: Array) -> Floats:
    """Cycles a byte takes on the last hop to GM."""
    own = 1.0 / chip.path("UB" if chip.combined else "L0C", "GM").rate_bytes_per_cycle
    rate: Floats = np.maximum(own, cores * chip.clock_hz / chip.l2.rate_bytes_per_s)
    return rate
