"""A hand-written convolution as a matrix product whose A matrix is never stored.

M = output pixels, K = (C1, kh, kw, C0), N = output channels. The feature map (N, C1, H, W, C0) goes
to L1 as rows, `load3d` forms tiles of the im2col matrix on the way to L0A, weights come in
FRACTAL_Z (C1*kh*kw, N1, 16, C0), the result leaves as (N, Cout1, OH*OW, 16).

The cores form a grid: rows share the pixels, columns the output channels. Pixel tiles never span
two images. Tiles that see the same window of rows (only moved) are one loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import (
    Affine,
    Buffer,
    Instruction,
    KernelBuilder,
    Launch,
    Part,
    Program,
    Queue,
    Region,
    binding_of,
    c0_of,
    load3d,
)
from ascend_lab.kernels.conv_default import conv_schedule
from ascend_lab.kernels.conv_shape import (
    ConvShape,
    c1_stage,
    check_conv,
    max_rows,
    tiles_per_image,
)
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL, GemmSchedule, up
from ascend_lab.kernels.tiles import (
    by_size,
    chunks,
    load_b,
    out_queue,
    repeat,
    segments,
    store_tile,
    sum_queue,
)
from ascend_lab.kernels.windows import Window, runs_of


@dataclass(frozen=True, slots=True)
class _Conv:
    """What the parts of one core's kernel share."""

    shape: ConvShape
    builder: KernelBuilder
    tensors: tuple[Buffer, Buffer, Buffer]
    l1: tuple[Queue, Queue]
    l0: tuple[Queue, Queue]
    acc: Queue
    out: Queue | None
    c1_total: int
    n1: int
    c1_stage: int
    tile_k: int


def conv_launch(shape: ConvShape, chip: Chip, schedule: GemmSchedule | None = None) -> Launch:
    """Return the kernel as a launch; raise `CapacityError` if a stage does not fit L1."""
    schedule = schedule or conv_schedule(shape, chip)
    check_conv(shape, schedule, chip)
    tile_m, tile_n = schedule.base_m // FRACTAL, schedule.base_n // FRACTAL
    per_image = tiles_per_image(shape, tile_m)
    n1 = up(shape.k, FRACTAL)
    rows = chunks(shape.n * per_image, 1, schedule.grid_rows)
    cols = chunks(n1, tile_n, schedule.grid_cols)
    parts: list[Part] = []
    starts = [rows[0] * i for i in range(len(rows))]
    for size, ids in _same_rows(starts, rows, per_image).items():
        for col_size, col_ids in by_size(cols).items():
            pitch = (rows[0] // per_image, cols[0])
            counts = (ids[-1] + 1, col_ids[-1] + 1)
            program = _program(shape, schedule, chip, size, col_size, pitch, counts)
            binds = [binding_of({"row": r, "col": c}) for r in ids for c in col_ids]
            parts.append(Part(program, tuple(binds)))
    return Launch(f"conv_{shape.n}x{shape.c}x{shape.h}x{shape.w}", tuple(parts))


Tiles = tuple[int, int]
"""Pixel tiles first .. last-1, counted over all images."""


def _same_rows(starts: list[int], sizes: list[int], per_image: int) -> dict[Tiles, list[int]]:
    """Rows of cores that own whole images share a program; the others have one each."""
    groups: dict[Tiles, list[int]] = {}
    for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        whole = start % per_image == 0 and sizes[0] % per_image == 0
        groups.setdefault((0, size) if whole else (start, start + size), []).append(index)
    return groups


def _program(
    shape: ConvShape,
    schedule: GemmSchedule,
    chip: Chip,
    tiles: Tiles,
    n_own: int,
    pitch: tuple[int, int],
    counts: tuple[int, int],
) -> Program:
    conv = _kernel(shape, schedule, chip, n_own)
    k = conv.builder
    tile_m, tile_n = schedule.base_m // FRACTAL, schedule.base_n // FRACTAL
    per_image = tiles_per_image(shape, tile_m)
    row = k.param("row", counts[0])
    image_base = row * pitch[0] if tiles[0] == 0 and pitch[0] else Affine()
    col = k.param("col", counts[1]) * pitch[1]
    for image, first, last in _images(k, tiles, per_image):
        for run in runs_of(shape, tile_m, first, last):
            with repeat(k, "run", run.count) as turn:
                for pixel, window in run.tiles:
                    for n_at, n_size in segments(k, "n", n_own, tile_n):
                        place = _Place(image_base + image, window, turn * run.rows)
                        _tile(conv, place, (col + n_at, n_size), pixel + turn * run.pixels)
    return k.finish()


def _images(k: KernelBuilder, tiles: Tiles, per_image: int) -> Iterator[tuple[Affine, int, int]]:
    """Yield (image, first tile, last tile): a part image, a loop over whole ones, a part."""
    at, end = tiles
    if at % per_image:
        stop = min(end, at - at % per_image + per_image)
        yield Affine(at // per_image), at % per_image, at % per_image + stop - at
        at = stop
    whole = (end - at) // per_image
    if whole:
        with k.loop("image", whole) as image:
            yield image + at // per_image, 0, per_image
        at += whole * per_image
    if at < end:
        yield Affine(at // per_image), 0, end - at


def _kernel(shape: ConvShape, schedule: GemmSchedule, chip: Chip, n_own: int) -> _Conv:
    c0, dtype = c0_of(shape.dtype), shape.dtype
    c1, n1 = up(shape.c, c0), up(shape.k, FRACTAL)
    oh, ow = shape.out_hw
    area, taps = FRACTAL * c0, shape.r * shape.s
    tile_m, tile_n = schedule.base_m // FRACTAL, min(schedule.base_n // FRACTAL, n_own)
    tile_m = min(tile_m, up(oh * ow, FRACTAL))
    stage = c1_stage(shape, schedule)
    tile_k = min(schedule.base_k // c0, stage * taps)
    k = KernelBuilder(f"conv_{n_own * FRACTAL}", chip)
    pixels = up(oh * ow, FRACTAL) * FRACTAL
    tensors = (
        k.tensor("x", dtype, shape.n * c1 * shape.h * shape.w * c0),
        k.tensor("weight", dtype, c1 * taps * n1 * area),
        k.tensor("y", shape.out_dtype, shape.n * n1 * pixels * FRACTAL),
    )
    image = stage * max_rows(shape, schedule.base_m // FRACTAL) * shape.w * c0
    return _Conv(
        shape,
        k,
        tensors,
        (
            k.queue("x_l1", "L1", dtype, image, src="MTE2", dst="MTE1"),
            k.queue("w_l1", "L1", dtype, stage * taps * tile_n * area, src="MTE2", dst="MTE1"),
        ),
        (
            k.queue("x_l0", "L0A", dtype, tile_m * tile_k * area, src="MTE1", dst="M"),
            k.queue("w_l0", "L0B", dtype, tile_k * tile_n * area, src="MTE1", dst="M"),
        ),
        sum_queue(k, "y_l0", ACCUMULATOR[dtype], tile_m, tile_n),
        out_queue(k, shape.out_dtype, tile_m, tile_n) if chip.combined else None,
        c1,
        n1,
        stage,
        tile_k,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Which image, which window of it, and how far the window moves per turn of its run."""

    image: Affine
    window: Window
    moved: Affine


def _tile(conv: _Conv, place: _Place, n: tuple[Affine, int], pixel: Affine) -> None:
    """One output tile: sum over channel blocks and kernel taps, then store."""
    k, shape = conv.builder, conv.shape
    m = place.window.fractals
    c = conv.acc.alloc()
    taps = shape.r * shape.s
    for c_at, c_size in segments(k, "stage", conv.c1_total, conv.c1_stage):
        _stage(conv, place, n, (c_at, c_size))
        x1, w1 = (q.dequeue() for q in conv.l1)
        view = x1.region(0, (c_size, place.window.rows, shape.w, c0_of(shape.dtype)))
        for k_at, depth in segments(k, "k", c_size * taps, conv.tile_k):
            qa, qb = conv.l0
            c0 = c0_of(shape.dtype)
            a = qa.alloc().region(0, (m, depth, FRACTAL, c0))
            k.emit(_im2col(conv, a, view, place.window, k_at * c0))
            qa.enqueue()
            load_b(k, qb.alloc(), w1, n[1], depth, k_at)
            qb.enqueue()
            a0, b0 = qa.dequeue(), qb.dequeue()
            k.mmad(
                c.region(0, (n[1], m, FRACTAL, FRACTAL)),
                a0.region(0, (m, depth, FRACTAL, c0)),
                b0.region(0, (depth, n[1], FRACTAL, c0)),
                accumulate=c_at * taps + k_at,
            )
            qa.free()
            qb.free()
        for queue in conv.l1:
            queue.free()
    conv.acc.enqueue()
    oh, ow = shape.out_hw
    column = up(oh * ow, FRACTAL)
    start = (
        place.image * (conv.n1 * column * FRACTAL) + n[0] * (column * FRACTAL) + pixel
    ) * FRACTAL
    store_tile(k, conv.acc, conv.out, conv.tensors[2], (m, n[1]), start, column)


def _stage(conv: _Conv, place: _Place, n: tuple[Affine, int], channels: tuple[Affine, int]) -> None:
    """Bring rows of c1 channel blocks and their weights to L1."""
    k, shape = conv.builder, conv.shape
    c0, (c_at, c_size) = c0_of(shape.dtype), channels
    row = shape.w * c0
    first = (place.moved + place.window.first) * row
    start = (place.image * conv.c1_total + c_at) * (shape.h * row) + first
    rows = conv.tensors[0].region(start, (c_size, place.window.rows * row), (shape.h * row, 1))
    k.copy(conv.l1[0].alloc().region(0, rows.sizes), rows)
    conv.l1[0].enqueue()
    area, taps = FRACTAL * c0, shape.r * shape.s
    at = (c_at * (taps * conv.n1) + n[0]) * area
    weights = conv.tensors[1].region(at, (c_size * taps, n[1] * area), (conv.n1 * area, 1))
    k.copy(conv.l1[1].alloc().region(0, weights.sizes), weights)
    conv.l1[1].enqueue()


def _im2col(
    conv: _Conv, dst: Region, image: Region, window: Window, k_start: Affine
) -> Instruction:
    shape = conv.shape
    return load3d(
        conv.builder.chip,
        dst,
        image,
        kernel=(shape.r, shape.s),
        stride=(shape.stride, shape.stride),
        pad=(window.top, window.bottom, shape.pad, shape.pad),
        m_start=window.m_start,
        k_start=k_start,
    )
