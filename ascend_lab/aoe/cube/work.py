"""What one core does under every tiling of a table, as arrays: sizes, trip counts, load costs.

The core is one that owns as much as any. Its tiles of pixels (or rows of A) are listed one after
another in `Sides`; `first` is where a tiling's list begins.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.cube.space import area_of, uses
from ascend_lab.aoe.cube.table import Array, Columns, Mask, same_rows, up
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.isa import c0_of
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmShape

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sides:
    """Tiles along m, lists of many tilings end to end: fractals, pixels, bytes a unit of depth."""

    fractals: Array
    pixels: Array
    unit_bytes: Array


@dataclass(frozen=True, slots=True)
class Load:
    """Loads of A or B from GM: cycles per byte, latency, and the bytes all cores fetch at least."""

    cycles_per_byte: Floats
    latency_cycles: Array
    fetched_bytes: Array


@dataclass(frozen=True, slots=True)
class Work:
    """One core's work, one entry per tiling.

    Tiles along m and n, `bundles` times; depth in units of `taps` fractals of K, `stage` units a
    stage; `hold_a` / `hold_b`: what an outer loop keeps in L1 (`hold_all`: B for all m tiles, in
    order mn); `outer_n`: order nm. `n_own` blocks a core, in tiles of `n`, the last `n_last`.
    `ragged`: cores begin at various places of several images.
    """

    rows: Array
    cores: Array
    bundles: Array
    first: Array
    m_tiles: Array
    m: Array
    m_sum: Array
    pixel_sum: Array
    unit_sum: Array
    n_tiles: Array
    n: Array
    n_last: Array
    n_own: Array
    units: Array
    stage: Array
    k: Array
    outer_n: Mask
    hold_a: Mask
    hold_b: Mask
    hold_all: Mask
    by_a: Mask
    by_b: Mask
    a_l1: Array
    b_l1: Array
    a_l0: Array
    b_l0: Array
    ragged: Mask

    def take(self, index: Array) -> Work:
        """Return the work of some tilings."""
        return Work(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Job:
    """The work of all tilings of a table, and what they share."""

    chip: Chip
    dtype: str
    taps: int
    is_conv: bool
    sides: Sides
    work: Work
    a: Load
    b: Load
    out_pixels: int
    out_blocks: int

    @property
    def area_bytes(self) -> int:
        """Bytes of a fractal of A or B."""
        return area_of(self.dtype)

    def take(self, index: Array) -> Job:
        """Return the job of some tilings."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        loads = {
            name: Load(*(getattr(parts[name], f.name)[index] for f in fields(Load)))
            for name in "ab"
        }
        return Job(**(parts | loads | {"work": self.work.take(index)}))


def load_of(chip: Chip, reads: Array, once: Array | int, cores: Array) -> Load:
    """Return the cost of loads if `reads` bytes in all are read and `once` different ones exist.

    The mix of L2 and memory of `sim.cost`, where each byte comes from memory once.
    """
    path, n = chip.path("GM", "L1"), cores.astype(np.float64)
    fresh = np.minimum(1.0, once / np.maximum(reads, 1))
    own = 1.0 / path.rate_bytes_per_cycle
    hit = np.maximum(own, n * chip.clock_hz / chip.l2.rate_bytes_per_s)
    memory = np.maximum(own, n * chip.clock_hz / chip.device_memory.rate_bytes_per_s)
    extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    latency = path.latency_cycles + chip.l2.latency_cycles + fresh * extra
    least = np.minimum(reads, once)
    per_byte = fresh * memory + (1.0 - fresh) * hit
    return Load(per_byte, np.rint(latency).astype(np.int64), least.astype(np.int64))


def gemm_job(shape: GemmShape, chip: Chip, t: Columns, warm: Collection[str] = ()) -> Job:
    """Return the work of every tiling of a product's table; L2 holds the sides `warm`."""
    m1, k1, n1 = shape.fractals
    area = area_of(shape.dtype)
    cores = t["rows"] * t["cols"]
    m_all, n_all = up(m1, t["m"]), up(n1, t["n"])
    m_own = np.minimum(up(m_all, t["rows"]) * t["m"], m1)
    n_own = np.minimum(up(n_all, t["cols"]) * t["n"], n1)
    m_tiles, n_tiles = up(m_own, t["m"]), up(n_own, t["n"])
    keep_a, keep_b = uses(t, "keep", "a"), uses(t, "keep", "b")
    sides, first = _listed(m_own, t["m"], area)
    reads_a = m1 * k1 * area * np.where(keep_a, t["cols"], n_all)
    reads_b = n1 * k1 * area * np.where(keep_b, t["rows"], m_all)
    no = np.zeros(len(cores), bool)
    work = Work(
        t["rows"], cores, np.ones_like(cores), first, m_tiles, t["m"],
        m_own, m_own * FRACTAL, m_own * area,
        n_tiles, t["n"], n_own - (n_tiles - 1) * t["n"], n_own,
        np.full_like(cores, k1), np.minimum(t["k"] * t["step"], k1), t["k"],
        t["order"] == 1, keep_a, keep_b, no, uses(t, "bypass", "a"), uses(t, "bypass", "b"),
        t["a_l1"], t["b_l1"], t["a_l0"], t["b_l0"], no,
    )  # fmt: skip
    a = load_of(chip, reads_a, 0 if "a" in warm else m1 * k1 * area, cores)
    b = load_of(chip, reads_b, 0 if "b" in warm else n1 * k1 * area, cores)
    return Job(chip, shape.dtype, 1, False, sides, work, a, b, m1 * FRACTAL, n1)


def _listed(own: Array, tile: Array, area: int) -> tuple[Sides, Array]:
    """List the tiles of every (own, tile) pair: full ones, then the tail."""
    (owns, tiles), _, which = same_rows([own, tile])
    counts = up(owns, tiles)
    starts = np.cumsum(counts) - counts
    sizes = np.repeat(tiles, counts)
    sizes[starts + counts - 1] = owns - (counts - 1) * tiles
    return Sides(sizes, sizes * FRACTAL, sizes * area), starts[which]


def pixel_bytes(dtype: str) -> int:
    """Bytes of a pixel of one channel block."""
    return c0_of(dtype) * DTYPE_BYTES[dtype]
