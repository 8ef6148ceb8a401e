"""One output tile of a matrix product: stage in L1, load to L0, mmad, store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError
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
from ascend_lab.kernels.default_schedules import default_schedule
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
from ascend_lab.kernels.gemm_schedule import (
    ACCUMULATOR,
    FRACTAL,
    GemmSchedule,
    GemmShape,
    check_schedule,
)
from ascend_lab.kernels.tiles import (
    Area,
    Fractals,
    by_size,
    chunks,
    feed_a,
    feed_b,
    out_queue,
    segments,
    store_tile,
    sum_queue,
)

Share = tuple[int, int, int]
"""What one part owns of an axis: its fractals, the pitch between cores, number of positions."""
Span = tuple[Affine, int]
"""(start, size) of a tile along one axis, in fractals."""
Kept = tuple[Tile | None, Tile | None]
"""All K of A's rows and of B's columns, where a loop outside holds them in L1."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A or B: its tensor of `whole` fractals a row, its way through L1 (or not) to L0."""

    tensor: Buffer
    whole: int
    l1: Queue | None
    l0: Queue
    keep: bool


@dataclass(frozen=True, slots=True)
class Gemm:
    """Everything the parts of one core's kernel share; sizes in fractals."""

    builder: KernelBuilder
    operands: tuple[Operand, Operand]
    c: Buffer
    acc: Queue
    out: Queue | None
    whole: tuple[int, int, int]
    tile_k: int
    stage_k: int
    area: int
    finish: Finish | None


def new_kernel(
    shape: GemmShape,
    schedule: GemmSchedule,
    chip: Chip,
    own: tuple[Share, Share],
    epilogue: Epilogue | None,
) -> Gemm:
    """Allocate tensors and queues."""
    m1, k1, n1 = shape.fractals
    c0 = c0_of(shape.dtype)
    tile_m = min(schedule.base_m // FRACTAL, own[0][0])
    tile_n = min(schedule.base_n // FRACTAL, own[1][0])
    tile_k = min(schedule.base_k // c0, k1)
    stage = min(tile_k * schedule.step_k, k1)
    k = KernelBuilder(f"gemm_{own[0][0] * FRACTAL}x{own[1][0] * FRACTAL}", chip)
    out_dtype = epilogue.out_dtype if epilogue else shape.out_dtype
    a, b, c = _tensors(k, shape, out_dtype)
    sums = ACCUMULATOR[shape.dtype]
    depth_a, depth_b = (k1 if schedule.keep == name else stage for name in "ab")
    a_l1 = _l1(k, a, depth_a * tile_m, schedule)
    b_l1 = _l1(k, b, depth_b * tile_n, schedule)
    a_l0 = _l0(k, a, tile_m * tile_k, schedule)
    b_l0 = _l0(k, b, tile_k * tile_n, schedule)
    return Gemm(
        k,
        (
            Operand(a, m1, a_l1, a_l0, schedule.keep == "a"),
            Operand(b, n1, b_l1, b_l0, schedule.keep == "b"),
        ),
        c,
        sum_queue(k, "c_l0", sums, tile_m, tile_n, schedule.c_l0_slots),
        out_queue(k, out_dtype, tile_m, tile_n) if chip.combined and not epilogue else None,
        (m1, k1, n1),
        tile_k,
        stage,
        FRACTAL * c0,
        new_finish(k, epilogue, sums, Sizes(tile_m, tile_n, own[1][0], n1, n1 * m1 * 256)),
    )


def _l1(k: KernelBuilder, tensor: Buffer, fractals: int, schedule: GemmSchedule) -> Queue | None:
    """Allocate slots of tensor a or b in L1, none where it bypasses L1."""
    name, slots = tensor.name, {"a": schedule.a_l1_slots, "b": schedule.b_l1_slots}
    if name in schedule.bypass:
        return None
    size = fractals * FRACTAL * c0_of(tensor.dtype)
    return k.queue(
        f"{name}_l1", "L1", tensor.dtype, size, src="MTE2", dst="MTE1", depth=slots[name]
    )


def _l0(k: KernelBuilder, tensor: Buffer, fractals: int, schedule: GemmSchedule) -> Queue:
    """Allocate slots of tensor a or b in L0A or L0B."""
    name, slots = tensor.name, {"a": schedule.a_l0_slots, "b": schedule.b_l0_slots}
    size, space = fractals * FRACTAL * c0_of(tensor.dtype), "L0" + name.upper()
    pipe = "MTE2" if name in schedule.bypass else "MTE1"
    return k.queue(f"{name}_l0", space, tensor.dtype, size, src=pipe, dst="M", depth=slots[name])


def _tensors(k: KernelBuilder, shape: GemmShape, out: str) -> tuple[Buffer, Buffer, Buffer]:
    (m1, k1, n1), area = shape.fractals, FRACTAL * c0_of(shape.dtype)
    return (
        k.tensor("a", shape.dtype, k1 * m1 * area),
        k.tensor("b", shape.dtype, k1 * n1 * area),
        k.tensor("c", out, n1 * m1 * 256),
    )


def tile(kernel: Gemm, at: tuple[Span, Span], kept: Kept, held: Channels | None) -> None:
    """One tile of C; `held` are numbers per column loaded before."""
    m, n = at
    with held_channels(kernel.finish, n, Affine(), held) as channels:
        c = kernel.acc.alloc()
        _reduce(kernel, c, at, kept, bias_of(kernel.finish, channels, n))
        kernel.acc.enqueue()
        _store(kernel, m, n, channels)


def _stage(kernel: Gemm, operand: Operand, at: Span, depth: Span) -> None:
    """Bring a piece of A or B to L1: `at` along m or n, `depth` along k."""
    assert operand.l1 is not None
    src = operand.tensor.region(
        (depth[0] * operand.whole + at[0]) * kernel.area,
        (depth[1], at[1] * kernel.area),
        (operand.whole * kernel.area, 1),
    )
    kernel.builder.copy(operand.l1.alloc().region(0, src.sizes), src)
    operand.l1.enqueue()


@contextmanager
def kept_tile(kernel: Gemm, side: int, at: Span) -> Iterator[Tile | None]:
    """Load all K of A (side 0) or B once, for all tiles of C inside, where the schedule does."""
    operand = kernel.operands[side]
    if not operand.keep or operand.l1 is None:
        yield None
        return
    _stage(kernel, operand, at, (Affine(), kernel.whole[1]))
    yield operand.l1.dequeue()
    operand.l1.free()


def _reduce(kernel: Gemm, c: Tile, at: tuple[Span, Span], kept: Kept, bias: Region | None) -> None:
    """C tile = sum over k (+ bias): stages GM -> L1, tiles L1 -> L0, mmad."""
    k = kernel.builder
    sides = list(zip(kernel.operands, at, kept, strict=True))
    staged = [(o, span) for o, span, tile in sides if tile is None and o.l1 is not None]
    for stage_at, size in segments(k, "stage", kernel.whole[1], kernel.stage_k):
        for operand, span in staged:
            _stage(kernel, operand, span, (stage_at, size))
        sources = [_source(kernel, *side, stage_at) for side in sides]
        for k_at, depth in segments(k, "k", size, kernel.tile_k):
            sizes = (at[0][1], depth, at[1][1])
            _multiply(kernel, c, [s.down(k_at) for s in sources], sizes, stage_at + k_at, bias)
        for operand, _ in staged:
            assert operand.l1 is not None
            operand.l1.free()


def _source(
    kernel: Gemm, operand: Operand, at: Span, kept: Tile | None, stage_at: Affine
) -> Fractals:
    """Return where the stage at `stage_at` of an operand begins: a slot of L1, or GM."""
    if operand.l1 is None:
        pitch = operand.whole * kernel.area
        return Fractals(operand.tensor, stage_at * pitch + at[0] * kernel.area, pitch)
    pitch = at[1] * kernel.area
    if kept is not None:
        return Fractals(kept, stage_at * pitch, pitch)
    return Fractals(operand.l1.dequeue(), Affine(), pitch)


def _multiply(
    kernel: Gemm,
    c: Tile,
    sources: Sequence[Fractals],
    sizes: tuple[int, int, int],
    done: Affine,
    bias: Region | None,
) -> None:
    """Load a tile of A and of B to L0 and add their product to c; the first where done is 0."""
    k, (m, depth, n) = kernel.builder, sizes
    qa, qb = (operand.l0 for operand in kernel.operands)
    c0 = kernel.area // FRACTAL
    feed_a(k, qa.alloc(), sources[0], m, depth)
    qa.enqueue()
    feed_b(k, qb.alloc(), sources[1], n, depth)
    qb.enqueue()
    a, b = qa.dequeue(), qb.dequeue()
    k.mmad(
        c.region(0, (n, m, FRACTAL, FRACTAL)),
        a.region(0, (m, depth, FRACTAL, c0)),
        b.region(0, (depth, n, FRACTAL, c0)),
        accumulate=done,
        bias=bias,
    )
    qa.free()
    qb.free()


def _store(kernel: Gemm, m: Span, n: Span, channels: Channels | None) -> None:
    """Drain the C tile to GM: fix pipe, or V to UB and MTE3 on chips without one."""
    m1, c = kernel.whole[0], kernel.c
    start = (n[0] * m1 + m[0]) * 256
    if kernel.finish is None:
        store_tile(kernel.builder, kernel.acc, kernel.out, c, (m[1], n[1]), start, m1)
        return
    rows = m[1] * FRACTAL
    area = Area(((0, start, rows),), n[1], m1 * 256, FRACTAL, m[1], rows)
    drain(kernel.finish, kernel.acc, c, area, n[0], channels)


# A hand-written matrix multiplication for every chip: C = A @ B on all cores.
#
# Operands lie in GM in the private layouts the cube reads fastest (16 x C0 fractals, C0 = 32
# bytes):
# A as (K1, M1, 16, C0), B as (K1, N1, 16, C0) with the last two axes (n, k), C as (N1, M1, 16,
# 16).
# Converting from row-major is not part of the time. The tiling is the published one of the PTO
# GEMM
# example: base tiles in L0, `step_k` of them staged in L1, double buffers, cores in a grid.


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
    if schedule.window:
        raise InputError("no window for a matrix product", schedule.window, "convolutions have it")
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


def _program(
    shape: GemmShape,
    schedule: GemmSchedule,
    chip: Chip,
    own: tuple[Share, Share],
    epilogue: Epilogue | None,
) -> Program:
    kernel = new_kernel(shape, schedule, chip, own, epilogue)
    k = kernel.builder
    (m_own, m_pitch, m_count), (n_own, n_pitch, n_count) = own
    m_base = k.param("row", m_count) * m_pitch
    n_base = k.param("col", n_count) * n_pitch
    m_axis = _Axis("m", m_base, m_own, schedule.base_m // FRACTAL)
    n_axis = _Axis("n", n_base, n_own, schedule.base_n // FRACTAL)
    with held_channels(kernel.finish, (n_base, n_own), Affine(), None) as held:
        if schedule.order == "mn":
            for m in m_axis.tiles(k):
                with kept_tile(kernel, 0, m) as a:
                    for n in n_axis.tiles(k):
                        tile(kernel, (m, n), (a, None), held)
        else:
            for n in n_axis.tiles(k):
                with (
                    held_channels(kernel.finish, n, Affine(), held) as channels,
                    kept_tile(kernel, 1, n) as b,
                ):
                    for m in m_axis.tiles(k):
                        tile(kernel, (m, n), (None, b), channels)
    return k.finish()


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of C on one core: its first fractal, how many it owns, fractals of a tile."""

    name: str
    base: Affine
    own: int
    tile: int

    def tiles(self, k: KernelBuilder) -> Iterator[Span]:
        """Loop over the tiles, the tail last."""
        for at, size in segments(k, self.name, self.own, self.tile):
            yield self.base + at, size
