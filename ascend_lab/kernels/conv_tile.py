"""One output tile of a convolution: stage rows and weights in L1, im2col to L0A, mmad, store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import (
    Affine,
    Buffer,
    Instruction,
    KernelBuilder,
    Queue,
    Region,
    Tile,
    c0_of,
    load3d,
)
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.kernels.conv_windows import Placement, Run, Window, area_of, plain_placement
from ascend_lab.kernels.default_schedules import c1_stage, window_sides
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.epilogue_emit import (
    Channels,
    Finish,
    Sizes,
    bias_of,
    drain,
    held_channels,
    new_finish,
)
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL, GemmSchedule, up
from ascend_lab.kernels.tiles import load_b, out_queue, segments, store_area, store_tile, sum_queue


@dataclass(frozen=True, slots=True)
class Conv:
    """What the parts of one core's kernel share; channel counts in blocks."""

    shape: ConvShape
    builder: KernelBuilder
    tensors: tuple[Buffer, Buffer, Buffer]
    l1: tuple[Queue, Queue]
    l0: tuple[Queue, Queue]
    acc: Queue
    out: Queue | None
    c1_stage: int
    tile_k: int
    place: Placement
    strip: bool
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Held:
    """What stays for all pixel tiles of a bundle on a core, where it fits."""

    weights: Tile | None
    channels: Channels | None


@dataclass(frozen=True, slots=True)
class At:
    """A bundle of groups: its index and its input and output channel blocks."""

    index: Affine
    c1: int
    n1: int


@dataclass(frozen=True, slots=True)
class Where:
    """One tile: image, bundle, output blocks (start, count), pixels, window, turn of its run.

    `down` output rows are added to the window and the pixels.
    """

    image: Affine
    bundle: At
    n: tuple[Affine, int]
    pixel: int
    window: Window
    turn: Affine
    run: Run
    down: Affine


def new_conv(
    shape: ConvShape,
    schedule: GemmSchedule,
    chip: Chip,
    n_own: int,
    place: Placement,
    strip: bool,
    epilogue: Epilogue | None,
) -> Conv:
    """Allocate the tensors and queues of one core's kernel, which owns `n_own` output blocks."""
    c0, dtype, bundle = c0_of(shape.dtype), shape.dtype, bundles_of(shape)
    area, taps, tile = FRACTAL * c0, shape.taps, schedule.base_m // FRACTAL
    oh, ow = shape.out_hw
    tile_m = min(tile, up(ow if strip else oh * ow, FRACTAL))
    tile_n = min(schedule.base_n // FRACTAL, n_own)
    stage = c1_stage(shape, schedule)
    tile_k = min(schedule.base_k // c0, stage * taps)
    rows, columns = window_sides(shape, tile, strip=strip)
    image, weights = stage * rows * columns * c0, stage * taps * tile_n * area
    k = KernelBuilder(f"conv_{n_own * FRACTAL}", chip)
    tensors = _tensors(k, shape, place, epilogue.out_dtype if epilogue else shape.out_dtype)
    a, b = schedule.a_l1_slots, schedule.b_l1_slots
    l1 = (
        k.queue("x_l1", "L1", dtype, image, src="MTE2", dst="MTE1", depth=a),
        k.queue("w_l1", "L1", dtype, weights, src="MTE2", dst="MTE1", depth=b),
    )
    a, b = schedule.a_l0_slots, schedule.b_l0_slots
    l0 = (
        k.queue("x_l0", "L0A", dtype, tile_m * tile_k * area, src="MTE1", dst="M", depth=a),
        k.queue("w_l0", "L0B", dtype, tile_k * tile_n * area, src="MTE1", dst="M", depth=b),
    )
    acc = sum_queue(k, "y_l0", ACCUMULATOR[dtype], tile_m, tile_n, schedule.c_l0_slots)
    out = None
    if chip.combined and epilogue is None:
        out = out_queue(k, shape.out_dtype, tile_m, tile_n)
    sizes = Sizes(tile_m, tile_n, n_own, shape.blocks[1], tensors[2].elements)
    finish = new_finish(k, epilogue, ACCUMULATOR[dtype], sizes)
    stage = min(stage, bundle.c1)
    return Conv(shape, k, tensors, l1, l0, acc, out, stage, tile_k, place, strip, finish)


def _tensors(
    k: KernelBuilder, shape: ConvShape, place: Placement, out_dtype: str
) -> tuple[Buffer, Buffer, Buffer]:
    (c1, n1), c0 = shape.blocks, c0_of(shape.dtype)
    return (
        k.tensor("x", shape.dtype, shape.n * c1 * shape.h * shape.w * c0),
        k.tensor(place.weight, shape.dtype, weight_blocks(shape) * FRACTAL * c0),
        k.tensor("y", out_dtype, shape.n * n1 * place.plane * FRACTAL),
    )


def weight_blocks(shape: ConvShape) -> int:
    """16 x C0 fractals of all weights, the zeros of the bundles counted."""
    bundle = bundles_of(shape)
    full = (bundle.count - 1) * bundle.c1 * bundle.n1
    return (full + bundle.last_c1 * bundle.last_n1) * shape.taps


def tile(conv: Conv, at: Where, rows: Tile | None, held: Held) -> None:
    """One output tile: sum over channel blocks and kernel taps, then store.

    `rows` and weights are those of all channel blocks where a loop outside holds them in L1.
    """
    n_at = at.bundle.index * bundles_of(conv.shape).n1
    with held_channels(conv.finish, at.n, n_at, held.channels) as channels:
        _sum(conv, at, rows, held.weights, channels)
        _store(conv, at, n_at, channels)


def _sum(
    conv: Conv, at: Where, rows: Tile | None, weights: Tile | None, channels: Channels | None
) -> None:
    """Sum over channel blocks and kernel taps in L0C."""
    k, shape, c0 = conv.builder, conv.shape, c0_of(conv.shape.dtype)
    m, n, taps = at.window.fractals, at.n[1], conv.shape.taps
    (qa, qb), c = conv.l0, conv.acc.alloc()
    bias = bias_of(conv.finish, channels, at.n)
    for c_at, c_size in segments(k, "stage", at.bundle.c1, conv.c1_stage):
        if rows is None:
            stage_rows(conv, at, (c_at, c_size))
        if weights is None:
            stage_weights(conv, at.bundle, at.n, (c_at, c_size))
        x1 = rows or conv.l1[0].dequeue()
        w1 = weights or conv.l1[1].dequeue()
        view = x1.region(0, (c_size, at.window.rows.count, at.window.columns.count, c0))
        for k_at, depth in segments(k, "k", c_size * taps, conv.tile_k):
            to = qa.alloc().region(0, (m, depth, FRACTAL, c0))
            k.emit(im2col_load(k.chip, shape, to, view, at.window, k_at * c0))
            qa.enqueue()
            load_b(k, qb.alloc(), w1, n, depth, k_at)
            qb.enqueue()
            a0, b0 = qa.dequeue(), qb.dequeue()
            k.mmad(
                c.region(0, (n, m, FRACTAL, FRACTAL)),
                a0.region(0, (m, depth, FRACTAL, c0)),
                b0.region(0, (depth, n, FRACTAL, c0)),
                accumulate=c_at * taps + k_at,
                bias=bias,
            )
            qa.free()
            qb.free()
        for queue, held in zip(conv.l1, (rows, weights), strict=True):
            if held is None:
                queue.free()
    conv.acc.enqueue()


@contextmanager
def held_rows(conv: Conv, at: Where, hold: bool) -> Iterator[Tile | None]:
    """Load the rows of all channel blocks once, for all tiles of output channels inside."""
    if not hold:
        yield None
        return
    stage_rows(conv, at, (Affine(), at.bundle.c1))
    yield conv.l1[0].dequeue()
    conv.l1[0].free()


@contextmanager
def held_weights(
    conv: Conv, bundle: At, n: tuple[Affine, int], hold: bool
) -> Iterator[Tile | None]:
    """Load all weights of a bundle once, for all pixel tiles inside."""
    if not hold:
        yield None
        return
    stage_weights(conv, bundle, n, (Affine(), bundle.c1))
    yield conv.l1[1].dequeue()
    conv.l1[1].free()


def stage_rows(conv: Conv, at: Where, channels: tuple[Affine, int]) -> None:
    """Bring a window of c1 channel blocks to L1."""
    k, shape, (rows, columns) = conv.builder, conv.shape, (at.window.rows, at.window.columns)
    c0, (c_at, c_size) = c0_of(shape.dtype), channels
    row, plane = shape.w * c0, shape.h * shape.w * c0
    block = at.image * shape.blocks[0] + at.bundle.index * bundles_of(shape).c1 + c_at
    first = at.turn * at.run.rows + at.down * shape.strides[0] + rows.first
    start = block * plane + first * row + columns.first * c0
    if columns.count == shape.w:
        window = conv.tensors[0].region(start, (c_size, rows.count * row), (plane, 1))
    else:
        sizes = (c_size, rows.count, columns.count * c0)
        window = conv.tensors[0].region(start, sizes, (plane, row, 1))
    k.copy(conv.l1[0].alloc().region(0, window.sizes), window)
    conv.l1[0].enqueue()


def stage_weights(conv: Conv, at: At, n: tuple[Affine, int], channels: tuple[Affine, int]) -> None:
    """Bring the weights of c1 channel blocks and n output blocks to L1."""
    shape, bundle, (c_at, c_size) = conv.shape, bundles_of(conv.shape), channels
    area, taps = FRACTAL * c0_of(shape.dtype), shape.taps
    before = at.index * (bundle.c1 * taps * bundle.n1 * area)
    start = before + (c_at * (taps * at.n1) + n[0]) * area
    sizes = (c_size * taps, n[1] * area)
    weights = conv.tensors[1].region(start, sizes, (at.n1 * area, 1))
    conv.builder.copy(conv.l1[1].alloc().region(0, weights.sizes), weights)
    conv.l1[1].enqueue()


def im2col_load(
    chip: Chip,
    shape: ConvShape,
    dst: Region,
    image: Region,
    window: Window,
    k_start: Affine | int = 0,
) -> Instruction:
    """Return the load3d that forms columns k_start.. of the im2col rows of `window` in `dst`."""
    rows, columns = window.rows, window.columns
    return load3d(
        chip,
        dst,
        image,
        kernel=(shape.r, shape.s),
        stride=shape.strides,
        pad=(rows.before, rows.after, columns.before, columns.after),
        dilation=shape.dilations,
        m_start=window.m_start,
        k_start=k_start,
    )


def _store(conv: Conv, at: Where, n_at: Affine, channels: Channels | None) -> None:
    """Write the tile as one run where the plane is filled in order, else row by row of pixels."""
    place, ow, y = conv.place, conv.shape.out_hw[1], conv.tensors[2]
    plane = (at.image * conv.shape.blocks[1] + n_at + at.n[0]) * place.plane
    plain = not conv.strip and place == plain_placement(conv.shape)
    if plain and conv.finish is None:
        start = (plane + at.turn * at.run.pixels + at.down * ow + at.pixel) * FRACTAL
        sizes = (at.window.fractals, at.n[1])
        store_tile(conv.builder, conv.acc, conv.out, y, sizes, start, place.plane // FRACTAL)
        return
    row = at.turn * (at.run.pixels // ow) + at.down
    area = area_of(conv.shape, place, plane, row, (at.pixel, at.n[1], at.window))
    if conv.finish is None:
        store_area(conv.builder, conv.acc, conv.out, y, area)
    else:
        drain(conv.finish, conv.acc, y, area, at.n[0], channels)
