"""A hand-written matrix multiplication for every chip: C = A @ B on all cores.

Operands lie in GM in the private layouts the cube reads fastest (16 x C0 fractals, C0 = 32 bytes):
A as (K1, M1, 16, C0), B as (K1, N1, 16, C0) with the last two axes (n, k), C as (N1, M1, 16, 16).
Converting from row-major is not part of the time. The tiling is the published one of the PTO GEMM
example: base tiles in L0, `step_k` of them staged in L1, double buffers, cores in a grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Launch,
    Part,
    Program,
    Queue,
    Region,
    Tile,
    binding_of,
    c0_of,
)
from ascend_lab.kernels.epilogue import Epilogue, check_epilogue
from ascend_lab.kernels.epilogue_emit import (
    Channels,
    Finish,
    Sizes,
    bias_of,
    drain,
    held_channels,
    new_finish,
)
from ascend_lab.kernels.gemm_default import default_schedule
from ascend_lab.kernels.gemm_schedule import (
    ACCUMULATOR,
    FRACTAL,
    GemmSchedule,
    GemmShape,
    check_schedule,
)
from ascend_lab.kernels.tiles import (
    Area,
    by_size,
    chunks,
    load_a,
    load_b,
    out_queue,
    segments,
    store_tile,
    sum_queue,
)


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
    finish: Finish | None


def gemm_launch(
    shape: GemmShape,
    chip: Chip,
    schedule: GemmSchedule | None = None,
    epilogue: Epilogue | None = None,
) -> Launch:
    """Return the kernel as a launch: full cores and tail cores are separate parts.

    `epilogue` is done to the sums before they are stored; its operands are tensors of the launch.
    """
    check_epilogue(epilogue, chip, ACCUMULATOR[shape.dtype])
    schedule = schedule or default_schedule(shape, chip, epilogue)
    check_schedule(shape, schedule, chip)
    m1, _, n1 = shape.fractals
    rows = chunks(m1, schedule.base_m // FRACTAL, schedule.grid_rows)
    cols = chunks(n1, schedule.base_n // FRACTAL, schedule.grid_cols)
    parts = []
    for row_size, row_ids in by_size(rows).items():
        for col_size, col_ids in by_size(cols).items():
            own = ((row_size, rows[0], row_ids[-1] + 1), (col_size, cols[0], col_ids[-1] + 1))
            program = _program(shape, schedule, chip, own, epilogue)
            cores = [binding_of({"row": r, "col": c}) for r in row_ids for c in col_ids]
            parts.append(Part(program, tuple(cores)))
    return Launch(f"gemm_{shape.m}x{shape.k}x{shape.n}", tuple(parts))


Share = tuple[int, int, int]
"""What one part owns of an axis: its fractals, the pitch between cores, number of positions."""


def _program(
    shape: GemmShape,
    schedule: GemmSchedule,
    chip: Chip,
    own: tuple[Share, Share],
    epilogue: Epilogue | None,
) -> Program:
    kernel = _kernel(shape, schedule, chip, own, epilogue)
    k = kernel.builder
    (m_own, m_pitch, m_count), (n_own, n_pitch, n_count) = own
    m_base = k.param("row", m_count) * m_pitch
    n_base = k.param("col", n_count) * n_pitch
    tile_m, tile_n = schedule.base_m // FRACTAL, schedule.base_n // FRACTAL
    with held_channels(kernel.finish, (n_base, n_own), Affine(), None) as held:
        for m_at, m_size in segments(k, "m", m_own, tile_m):
            for n_at, n_size in segments(k, "n", n_own, tile_n):
                _tile(kernel, (m_base + m_at, m_size), (n_base + n_at, n_size), held)
    return k.finish()


def _kernel(
    shape: GemmShape,
    schedule: GemmSchedule,
    chip: Chip,
    own: tuple[Share, Share],
    epilogue: Epilogue | None,
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
    out_dtype = epilogue.out_dtype if epilogue else shape.out_dtype
    sizes = Sizes(tile_m, tile_n, own[1][0], n1, n1 * m1 * 256)
    return _Kernel(
        k,
        _tensors(k, shape, out_dtype),
        (
            k.queue("a_l1", "L1", dtype, stage * tile_m * area, src="MTE2", dst="MTE1"),
            k.queue("b_l1", "L1", dtype, stage * tile_n * area, src="MTE2", dst="MTE1"),
        ),
        (
            k.queue("a_l0", "L0A", dtype, tile_m * tile_k * area, src="MTE1", dst="M"),
            k.queue("b_l0", "L0B", dtype, tile_k * tile_n * area, src="MTE1", dst="M"),
        ),
        sum_queue(k, "c_l0", ACCUMULATOR[dtype], tile_m, tile_n),
        out_queue(k, out_dtype, tile_m, tile_n) if chip.combined and not epilogue else None,
        (m1, k1, n1),
        tile_k,
        stage,
        area,
        new_finish(k, epilogue, ACCUMULATOR[dtype], sizes),
    )


def _tensors(k: KernelBuilder, shape: GemmShape, out: str) -> tuple[Buffer, Buffer, Buffer]:
    (m1, k1, n1), area = shape.fractals, FRACTAL * c0_of(shape.dtype)
    return (
        k.tensor("a", shape.dtype, k1 * m1 * area),
        k.tensor("b", shape.dtype, k1 * n1 * area),
        k.tensor("c", out, n1 * m1 * 256),
    )


Span = tuple[Affine, int]
"""(start, size) of a tile along one axis, in fractals."""


def _tile(kernel: _Kernel, m: Span, n: Span, held: Channels | None) -> None:
    """One tile of C; `held` are numbers per column loaded before."""
    with held_channels(kernel.finish, n, Affine(), held) as channels:
        c = kernel.acc.alloc()
        _reduce(kernel, c, m, n, bias_of(kernel.finish, channels, n))
        kernel.acc.enqueue()
        _store(kernel, m, n, channels)


def _reduce(kernel: _Kernel, c: Tile, m: Span, n: Span, bias: Region | None) -> None:
    """C tile = sum over k (+ bias): stages GM -> L1, tiles L1 -> L0, mmad."""
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
            sizes = (m[1], k_size, n[1])
            multiply(k, kernel.l0, (a1, b1), c, sizes, k_at, stage_at, bias)
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
    bias: Region | None = None,
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
        bias=bias,
    )
    qa.free()
    qb.free()


def _store(kernel: _Kernel, m: Span, n: Span, channels: Channels | None) -> None:
    """Drain the C tile to GM: fix pipe, or V to UB and MTE3 on chips without one."""
    m1, c = kernel.whole[0], kernel.tensors[2]
    start = (n[0] * m1 + m[0]) * 256
    if kernel.finish is None:
        store_tile(kernel.builder, kernel.acc, kernel.out, c, (m[1], n[1]), start, m1)
        return
    rows = m[1] * FRACTAL
    area = Area(((0, start, rows),), n[1], m1 * 256, FRACTAL, m[1], rows)
    drain(kernel.finish, kernel.acc, c, area, n[0], channels)
