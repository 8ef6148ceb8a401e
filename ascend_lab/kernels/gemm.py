"""A hand-written matrix multiplication for every chip: C = A @ B on all cores.

Operands lie in GM in the private layouts the cube reads fastest (16 x C0 fractals, C0 = 32 bytes):
A as (K1, M1, 16, C0), B as (K1, N1, 16, C0) with the last two axes (n, k), C as (N1, M1, 16, 16).
Converting from row-major is not part of the time. The tiling is the published one of the PTO GEMM
example: base tiles in L0, `step_k` of them staged in L1, double buffers, cores in a grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import (
    Affine,
    KernelBuilder,
    Launch,
    Part,
    Program,
    Queue,
    Tile,
    binding_of,
    c0_of,
)
from ascend_lab.isa.memory import Buffer

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


def _tiles(
    shape: GemmShape, chip: Chip, rows: int, cols: int
) -> Iterator[tuple[int, int, int]]:
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


# -- the kernel ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Everything the parts of one core's kernel share; sizes in fractals."""

    builder: KernelBuilder
    tensors: tuple[Buffer, Buffer, Buffer]
    l1: tuple[Queue, Queue]
    l0: tuple[Queue, Queue]
    acc: Queue
    out: Queue | None
    whole: tuple[int, int, int]
    tile_k: int
    stage_k: int
    area: int


def gemm_launch(shape: GemmShape, chip: Chip, schedule: GemmSchedule | None = None) -> Launch:
    """Return the kernel as a launch: full cores and tail cores are separate parts."""
    schedule = schedule or default_schedule(shape, chip)
    check_schedule(shape, schedule, chip)
    m1, _, n1 = shape.fractals
    rows = chunks(m1, schedule.base_m // FRACTAL, schedule.grid_rows)
    cols = chunks(n1, schedule.base_n // FRACTAL, schedule.grid_cols)
    parts = []
    for row_size, row_ids in by_size(rows).items():
        for col_size, col_ids in by_size(cols).items():
            own = ((row_size, rows[0], row_ids[-1] + 1), (col_size, cols[0], col_ids[-1] + 1))
            program = _program(shape, schedule, chip, own)
            cores = [binding_of({"row": r, "col": c}) for r in row_ids for c in col_ids]
            parts.append(Part(program, tuple(cores)))
    return Launch(f"gemm_{shape.m}x{shape.k}x{shape.n}", tuple(parts))


def chunks(total: int, tile: int, cores: int) -> list[int]:
    """Sizes in fractals per core: whole tiles, equal except for the last core."""
    each = up(up(total, tile), cores) * tile
    return [min(each, total - i * each) for i in range(cores) if total > i * each]


def by_size(chunks: list[int]) -> dict[int, list[int]]:
    """Group the positions of equal chunks."""
    groups: dict[int, list[int]] = {}
    for index, size in enumerate(chunks):
        groups.setdefault(size, []).append(index)
    return groups


Share = tuple[int, int, int]
"""What one part owns of an axis: its fractals, the pitch between cores, number of positions."""


def _program(
    shape: GemmShape, schedule: GemmSchedule, chip: Chip, own: tuple[Share, Share]
) -> Program:
    kernel = _kernel(shape, schedule, chip, own)
    k = kernel.builder
    (m_own, m_pitch, m_count), (n_own, n_pitch, n_count) = own
    m_base = k.param("row", m_count) * m_pitch
    n_base = k.param("col", n_count) * n_pitch
    tile_m, tile_n = schedule.base_m // FRACTAL, schedule.base_n // FRACTAL
    for m_at, m_size in segments(k, "m", m_own, tile_m):
        for n_at, n_size in segments(k, "n", n_own, tile_n):
            c = kernel.acc.alloc()
            _reduce(kernel, c, (m_base + m_at, m_size), (n_base + n_at, n_size))
            kernel.acc.enqueue()
            _store(kernel, (m_base + m_at, m_size), (n_base + n_at, n_size))
    return k.finish()


def _kernel(
    shape: GemmShape, schedule: GemmSchedule, chip: Chip, own: tuple[Share, Share]
) -> _Kernel:
    """Allocate tensors and queues."""
    m1, k1, n1 = shape.fractals
    c0 = c0_of(shape.dtype)
    area, dtype = FRACTAL * c0, shape.dtype
    tile_m = min(schedule.base_m // FRACTAL, own[0][0])
    tile_n = min(schedule.base_n // FRACTAL, own[1][0])
    tile_k = min(schedule.base_k // c0, k1)
    stage = min(tile_k * schedule.step_k, k1)
    k = KernelBuilder(f"gemm_{own[0][0] * FRACTAL}x{own[1][0] * FRACTAL}", chip)
    tensors = (
        k.tensor("a", dtype, k1 * m1 * area),
        k.tensor("b", dtype, k1 * n1 * area),
        k.tensor("c", shape.out_dtype, n1 * m1 * 256),
    )
    slots = 2 if tile_m * tile_n * 2048 <= chip.buffers["L0C"] else 1
    drain = "V" if chip.combined else "FIX"
    return _Kernel(
        k,
        tensors,
        (
            k.queue("a_l1", "L1", dtype, stage * tile_m * area, src="MTE2", dst="MTE1"),
            k.queue("b_l1", "L1", dtype, stage * tile_n * area, src="MTE2", dst="MTE1"),
        ),
        (
            k.queue("a_l0", "L0A", dtype, tile_m * tile_k * area, src="MTE1", dst="M"),
            k.queue("b_l0", "L0B", dtype, tile_k * tile_n * area, src="MTE1", dst="M"),
        ),
        k.queue(
            "c_l0", "L0C", ACCUMULATOR[dtype], tile_m * tile_n * 256, src="M", dst=drain, depth=slots
        ),
        out_queue(k, shape.out_dtype, tile_m, tile_n) if chip.combined else None,
        (m1, k1, n1),
        tile_k,
        stage,
        area,
    )


def segments(
    builder: KernelBuilder, name: str, total: int, tile: int
) -> Iterator[tuple[Affine, int]]:
    """Yield (start, size) for a loop over full tiles, then once for the tail."""
    full = total // tile
    if full:
        with builder.loop(name, full) as index:
            yield index * tile, tile
    if total % tile:
        yield Affine(full * tile), total % tile


def out_queue(builder: KernelBuilder, dtype: str, tile_m: int, tile_n: int) -> Queue:
    """Allocate UB slots for draining C by as many 16-wide columns as fit twice."""
    column = tile_m * 256 * DTYPE_BYTES[dtype]
    columns = max(1, min(tile_n, builder.chip.buffers["UB"] // (2 * column)))
    return builder.queue("c_ub", "UB", dtype, columns * tile_m * 256, src="V", dst="MTE3")


Span = tuple[Affine, int]
"""(start, size) of a tile along one axis, in fractals."""


def _reduce(kernel: _Kernel, c: Tile, m: Span, n: Span) -> None:
    """C tile = sum over k: stages GM -> L1, tiles L1 -> L0, mmad."""
    k, (qa, qb) = kernel.builder, kernel.l1
    m1, k1, n1 = kernel.whole
    for stage_at, size in segments(k, "stage", k1, kernel.stage_k):
        for queue, tensor, (at, width), whole in (
            (qa, kernel.tensors[0], m, m1),
            (qb, kernel.tensors[1], n, n1),
        ):
            src = tensor.region(
                (stage_at * whole + at) * kernel.area,
                (size, width * kernel.area),
                (whole * kernel.area, 1),
            )
            k.copy(queue.alloc().region(0, src.sizes), src)
            queue.enqueue()
        a1, b1 = qa.dequeue(), qb.dequeue()
        for k_at, k_size in segments(k, "k", size, kernel.tile_k):
            multiply(kernel.builder, kernel.l0, (a1, b1), c, (m[1], k_size, n[1]), k_at, stage_at)
        qa.free()
        qb.free()


def multiply(
    k: KernelBuilder,
    l0: tuple[Queue, Queue],
    staged: tuple[Tile, Tile],
    c: Tile,
    sizes: tuple[int, int, int],
    k_at: Affine,
    stage_at: Affine,
) -> None:
    """Load one tile of A and of B from L1 to L0 and multiply them into C; sizes in fractals."""
    (qa, qb), (m, depth, n) = l0, sizes
    c0 = c0_of(qa.buffer.dtype)
    load_a(k, qa.alloc(), staged[0], m, depth, k_at)
    qa.enqueue()
    load_b(k, qb.alloc(), staged[1], n, depth, k_at)
    qb.enqueue()
    a, b = qa.dequeue(), qb.dequeue()
    k.mmad(
        c.region(0, (n, m, FRACTAL, FRACTAL)),
        a.region(0, (m, depth, FRACTAL, c0)),
        b.region(0, (depth, n, FRACTAL, c0)),
        accumulate=stage_at + k_at,
    )
    qa.free()
    qb.free()


def load_a(k: KernelBuilder, dst: Tile, src: Tile, m: int, depth: int, k_at: Affine) -> None:
    """(K1, M1) fractals of L1 to (M1, K1) of L0A: one load2d per row or column of fractals."""
    area = FRACTAL * c0_of(src.buffer.dtype)
    start = k_at * (m * area)
    if depth <= m:
        with repeat(k, "row", depth) as i:
            to = dst.region(i * area, (m, area), (depth * area, 1))
            k.load2d(to, src.region(start + i * (m * area), (m, area)))
        return
    with repeat(k, "row", m) as i:
        to = dst.region(i * (depth * area), (depth, area))
        k.load2d(to, src.region(start + i * area, (depth, area), (m * area, 1)))


def load_b(k: KernelBuilder, dst: Tile, src: Tile, n: int, depth: int, k_at: Affine) -> None:
    """(K1, N1) fractals of L1 to the same order in L0B: one load2d per row of fractals."""
    area = FRACTAL * c0_of(src.buffer.dtype)
    with repeat(k, "row", depth) as i:
        to = dst.region(i * (n * area), (n, area))
        k.load2d(to, src.region((k_at + i) * (n * area), (n, area)))


@contextmanager
def repeat(k: KernelBuilder, name: str, count: int) -> Iterator[Affine]:
    """A loop, or its body alone where it runs once."""
    if count == 1:
        yield Affine()
        return
    with k.loop(name, count) as index:
        yield index


def _store(kernel: _Kernel, m: Span, n: Span) -> None:
    """Drain the C tile to GM: fix pipe, or V to UB and MTE3 on chips without one."""
    m1 = kernel.whole[0]
    start = (n[0] * m1 + m[0]) * 256
    store_tile(kernel.builder, kernel.acc, kernel.out, kernel.tensors[2], (m[1], n[1]), start, m1)


def store_tile(
    k: KernelBuilder,
    acc: Queue,
    out: Queue | None,
    tensor: Buffer,
    sizes: tuple[int, int],
    start: Affine,
    pitch: int,
) -> None:
    """Move a finished (N1, M1) tile of L0C to GM at `start`; `pitch` fractals a column."""
    m, n = sizes
    c = acc.dequeue()
    if out is None:
        to = tensor.region(start, (n, m * 256), (pitch * 256, 1))
        k.fixpipe(to, c.region(0, to.sizes))
        acc.free()
        return
    columns = out.buffer.elements // (m * 256)
    for at, size in segments(k, "column", n, min(columns, n)):
        k.copy(out.alloc().region(0, size * m * 256), c.region(at * (m * 256), size * m * 256))
        out.enqueue()
        held = out.dequeue()
        to = tensor.region(start + at * (pitch * 256), (size, m * 256), (pitch * 256, 1))
        k.copy(to, held.region(0, to.sizes))
        out.free()
    acc.free()


# -- layouts of the operands ----------------------------------------------------------------------


def pack_gemm(
    shape: GemmShape, a: NDArray[Any], b: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Lay row-major A (m, k) and B (k, n) out as the kernel reads them, padded with zeros."""
    m1, k1, n1 = shape.fractals
    c0 = c0_of(shape.dtype)
    if a.shape != (shape.m, shape.k) or b.shape != (shape.k, shape.n):
        raise InputError(
            f"A {shape.m}x{shape.k} and B {shape.k}x{shape.n}",
            f"{a.shape} and {b.shape}",
            "pass row-major matrices of the problem's size",
        )
    left = np.zeros((m1 * FRACTAL, k1 * c0), a.dtype)
    left[: shape.m, : shape.k] = a
    right = np.zeros((k1 * c0, n1 * FRACTAL), b.dtype)
    right[: shape.k, : shape.n] = b
    return {
        "a": left.reshape(m1, FRACTAL, k1, c0).transpose(2, 0, 1, 3).copy(),
        "b": right.reshape(k1, c0, n1, FRACTAL).transpose(0, 2, 3, 1).copy(),
    }


def unpack_gemm(shape: GemmShape, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return C (m, n) row-major from the kernel's output tensor."""
    m1, _, n1 = shape.fractals
    tile = tensors["c"].reshape(n1, m1, FRACTAL, FRACTAL).transpose(1, 2, 0, 3)
    return tile.reshape(m1 * FRACTAL, n1 * FRACTAL)[: shape.m, : shape.n]
