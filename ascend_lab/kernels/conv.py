"""A hand-written convolution as a matrix product whose A matrix is never stored.

M = output pixels, K = (C1, kh, kw, C0), N = output channels. The feature map (N, C1, H, W, C0) goes
to L1 as rows, `load3d` forms tiles of the im2col matrix on the way to L0A, weights come in
FRACTAL_Z (C1*kh*kw, N1, 16, C0), the result leaves as (N, Cout1, OH*OW, 16).

The cores form a grid: rows share the pixels, columns the output channels. Pixel tiles never span
two images. Tiles that see the same window of rows (only moved) are one loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import Affine, KernelBuilder, Launch, Part, Program, Queue, binding_of, c0_of
from ascend_lab.isa import instructions as ins
from ascend_lab.isa.memory import Buffer, Region
from ascend_lab.isa.program import Instruction
from ascend_lab.kernels.gemm import (
    ACCUMULATOR,
    FRACTAL,
    GemmSchedule,
    GemmShape,
    by_size,
    check_schedule,
    chunks,
    default_schedule,
    load_b,
    out_queue,
    repeat,
    segments,
    store_tile,
    up,
)


@dataclass(frozen=True, slots=True)
class ConvShape:
    """An NCHW convolution: batch, channels, image, kernel count and size, stride, padding."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: int = 1
    pad: int = 0
    dtype: str = "fp16"
    out_dtype: str = ""

    def __post_init__(self) -> None:
        """Check sizes; the default output is what a next layer reads: fp16, or int32 sums."""
        sizes = (self.n, self.c, self.h, self.w, self.k, self.r, self.s, self.stride)
        if min(sizes) < 1 or self.pad < 0 or max(sizes) > 1 << 20:
            raise InputError(
                "sizes and stride from 1 to 1048576, padding of at least 0",
                f"{sizes}, padding {self.pad}",
                "check the order N C H W K R S",
            )
        if self.dtype not in ACCUMULATOR:
            raise InputError("dtype fp16 or int8", self.dtype, "convert the operands")
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", "fp16" if self.dtype == "fp16" else "int32")
        if min(self.out_hw) < 1:
            raise InputError(
                f"a kernel no larger than the padded image {self.h + 2 * self.pad}x"
                f"{self.w + 2 * self.pad}",
                f"{self.r}x{self.s}",
                "add padding",
            )

    @property
    def out_hw(self) -> tuple[int, int]:
        """Output height and width: (size + 2 pad - kernel) // stride + 1."""
        return tuple(  # type: ignore[return-value]
            (size + 2 * self.pad - kernel) // self.stride + 1
            for size, kernel in ((self.h, self.r), (self.w, self.s))
        )

    @property
    def gemm(self) -> GemmShape:
        """The matrix product it amounts to: m = pixels, k = c*r*s, n = output channels."""
        oh, ow = self.out_hw
        c1 = up(self.c, c0_of(self.dtype))
        depth = c1 * c0_of(self.dtype) * self.r * self.s
        return GemmShape(self.n * oh * ow, depth, self.k, self.dtype, self.out_dtype)


@dataclass(frozen=True, slots=True)
class _Window:
    """Image rows a pixel tile needs: first row, row count, padding above and below, m offset."""

    first: int
    rows: int
    top: int
    bottom: int
    m_start: int
    fractals: int

    def moved(self, by: int) -> _Window:
        return _Window(
            self.first + by, self.rows, self.top, self.bottom, self.m_start, self.fractals
        )


def _window(shape: ConvShape, pixel: int, fractals: int) -> _Window:
    oh, ow = shape.out_hw
    last = min(pixel + fractals * FRACTAL, oh * ow) - 1
    low = pixel // ow * shape.stride - shape.pad
    high = last // ow * shape.stride - shape.pad + shape.r - 1
    first, end = min(max(low, 0), shape.h - 1), max(min(high, shape.h - 1), 0)
    end = max(end, first)
    top, bottom = max(0, -low), max(0, high - (shape.h - 1))
    return _Window(first, end - first + 1, top, bottom, pixel % ow, fractals)


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` repetitions of `tiles`, each `rows` image rows and `pixels` further down."""

    count: int
    tiles: tuple[tuple[int, _Window], ...]
    rows: int
    pixels: int


def _runs(shape: ConvShape, tile: int, first: int, last: int) -> list[_Run]:
    """Group pixel tiles first..last-1 of an image into runs that differ by a shift only."""
    oh, ow = shape.out_hw
    pixels = tile * FRACTAL
    total = up(oh * ow, FRACTAL)
    tiles = [
        (t * pixels, _window(shape, t * pixels, min(tile, total - t * tile)))
        for t in range(first, last)
    ]
    period = ow // np.gcd(pixels, ow)
    shift = int(period) * pixels // ow * shape.stride
    runs: list[_Run] = []
    i = 0
    while i < len(tiles):
        count = 1
        block = tiles[i : i + period]
        while True:
            after = tiles[i + count * period : i + (count + 1) * period]
            moved = [w.moved(count * shift) for _, w in block]
            if len(after) < period or [w for _, w in after] != moved:
                break
            count += 1
        if count > 1:
            runs.append(_Run(count, tuple(block), shift, int(period) * pixels))
            i += count * int(period)
        else:
            runs.append(_Run(1, (tiles[i],), 0, 0))
            i += 1
    return runs


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


def conv_schedule(shape: ConvShape, chip: Chip) -> GemmSchedule:
    """The default: the matrix product's schedule, base_k kept inside one kernel window."""
    s = default_schedule(shape.gemm, chip)
    c0 = c0_of(shape.dtype)
    taps = shape.r * shape.s
    rows = min(s.grid_rows, shape.n * _tiles_per_image(shape, s.base_m // FRACTAL))
    tile_k = min(s.base_k // c0, 8)
    fitting = [d for d in range(1, tile_k + 1) if taps % d == 0 or d % taps == 0]
    base = replace(s, base_k=max(fitting) * c0, step_k=1, grid_rows=rows)
    while _stage_bytes(shape, base) > chip.buffers["L1"]:
        side = "base_m" if base.base_m > base.base_n else "base_n"
        if getattr(base, side) <= FRACTAL:
            break
        base = replace(base, **{side: up(getattr(base, side), 2 * FRACTAL) * FRACTAL})
    fits = [base]
    for step in range(2, 33):
        deeper = replace(base, step_k=step)
        if _stage_bytes(shape, deeper) <= chip.buffers["L1"]:
            fits.append(deeper)
    return fits[-1]


def _tiles_per_image(shape: ConvShape, tile: int) -> int:
    oh, ow = shape.out_hw
    return up(up(oh * ow, FRACTAL), tile)


def _c1_stage(shape: ConvShape, schedule: GemmSchedule) -> int:
    """Channel blocks staged at once: step_k * base_k rounded to whole kernel windows."""
    c0 = c0_of(shape.dtype)
    depth = schedule.base_k // c0 * schedule.step_k
    return min(max(1, depth // (shape.r * shape.s)), up(shape.c, c0))


def _max_rows(shape: ConvShape, tile: int) -> int:
    ow = shape.out_hw[1]
    spanned = (tile * FRACTAL + ow - 2) // ow + 1
    return min((spanned - 1) * shape.stride + shape.r, shape.h)


def _stage_bytes(shape: ConvShape, schedule: GemmSchedule) -> int:
    c1, c0 = _c1_stage(shape, schedule), c0_of(shape.dtype)
    rows = _max_rows(shape, schedule.base_m // FRACTAL)
    image = c1 * rows * shape.w * c0
    weights = c1 * shape.r * shape.s * schedule.base_n * c0
    return 2 * (image + weights) * DTYPE_BYTES[shape.dtype]


def conv_launch(shape: ConvShape, chip: Chip, schedule: GemmSchedule | None = None) -> Launch:
    """Return the kernel as a launch; raise `CapacityError` if a stage does not fit L1."""
    schedule = schedule or conv_schedule(shape, chip)
    _check(shape, schedule, chip)
    tile_m, tile_n = schedule.base_m // FRACTAL, schedule.base_n // FRACTAL
    per_image = _tiles_per_image(shape, tile_m)
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


def _check(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> None:
    check_schedule(shape.gemm, replace(schedule, step_k=1), chip)
    needed = _stage_bytes(shape, schedule)
    if needed > chip.buffers["L1"]:
        raise CapacityError(
            f"L1 for two stages of rows and weights: {needed} bytes",
            f"{chip.buffers['L1']} on {chip.name}",
            "use a smaller base_m, base_n or step_k",
        )


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
    per_image = _tiles_per_image(shape, tile_m)
    row = k.param("row", counts[0])
    image_base = row * pitch[0] if tiles[0] == 0 and pitch[0] else Affine()
    col = k.param("col", counts[1]) * pitch[1]
    for image, first, last in _images(k, tiles, per_image):
        for run in _runs(shape, tile_m, first, last):
            with repeat(k, "run", run.count) as turn:
                for pixel, window in run.tiles:
                    for n_at, n_size in segments(k, "n", n_own, tile_n):
                        place = _Place(image_base + image, window, turn * run.rows)
                        _tile(conv, place, (col + n_at, n_size), pixel + turn * run.pixels)
    return k.finish()


def _images(
    k: KernelBuilder, tiles: Tiles, per_image: int
) -> Iterator[tuple[Affine, int, int]]:
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
    stage = _c1_stage(shape, schedule)
    tile_k = min(schedule.base_k // c0, stage * taps)
    k = KernelBuilder(f"conv_{n_own * FRACTAL}", chip)
    pixels = up(oh * ow, FRACTAL) * FRACTAL
    tensors = (
        k.tensor("x", dtype, shape.n * c1 * shape.h * shape.w * c0),
        k.tensor("weight", dtype, c1 * taps * n1 * area),
        k.tensor("y", shape.out_dtype, shape.n * n1 * pixels * FRACTAL),
    )
    image = stage * _max_rows(shape, schedule.base_m // FRACTAL) * shape.w * c0
    slots = 2 if tile_m * tile_n * 2048 <= chip.buffers["L0C"] else 1
    drain = "V" if chip.combined else "FIX"
    wide = ACCUMULATOR[dtype]
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
        k.queue("y_l0", "L0C", wide, tile_m * tile_n * 256, src="M", dst=drain, depth=slots),
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
    window: _Window
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
    start = (place.image * (conv.n1 * column * FRACTAL) + n[0] * (column * FRACTAL) + pixel) * FRACTAL
    store_tile(k, conv.acc, conv.out, conv.tensors[2], (m, n[1]), start, column)


def _stage(
    conv: _Conv, place: _Place, n: tuple[Affine, int], channels: tuple[Affine, int]
) -> None:
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
    conv: _Conv, dst: Region, image: Region, window: _Window, k_start: Affine
) -> Instruction:
    shape = conv.shape
    return ins.load3d(
        conv.builder.chip,
        dst,
        image,
        kernel=(shape.r, shape.s),
        stride=(shape.stride, shape.stride),
        pad=(window.top, window.bottom, shape.pad, shape.pad),
        m_start=window.m_start,
        k_start=k_start,
    )


def pack_conv(
    shape: ConvShape, x: NDArray[Any], weight: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Lay NCHW x and (K, C, R, S) weights out as NC1HWC0 and FRACTAL_Z, padded with zeros."""
    c0 = c0_of(shape.dtype)
    c1, n1 = up(shape.c, c0), up(shape.k, FRACTAL)
    if x.shape != (shape.n, shape.c, shape.h, shape.w):
        raise InputError("x as (n, c, h, w)", str(x.shape), "reshape it")
    if weight.shape != (shape.k, shape.c, shape.r, shape.s):
        raise InputError("weight as (k, c, r, s)", str(weight.shape), "reshape it")
    wide = np.zeros((shape.n, c1 * c0, shape.h, shape.w), x.dtype)
    wide[:, : shape.c] = x
    kernel = np.zeros((n1 * FRACTAL, c1 * c0, shape.r, shape.s), weight.dtype)
    kernel[: shape.k, : shape.c] = weight
    return {
        "x": wide.reshape(shape.n, c1, c0, shape.h, shape.w).transpose(0, 1, 3, 4, 2).copy(),
        "weight": kernel.reshape(n1, FRACTAL, c1, c0, shape.r, shape.s)
        .transpose(2, 4, 5, 0, 1, 3)
        .copy(),
    }


def unpack_conv(shape: ConvShape, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the output as (n, k, oh, ow)."""
    oh, ow = shape.out_hw
    n1, pixels = up(shape.k, FRACTAL), up(oh * ow, FRACTAL) * FRACTAL
    y = tensors["y"].reshape(shape.n, n1, pixels, FRACTAL)[:, :, : oh * ow]
    y = y.transpose(0, 1, 3, 2).reshape(shape.n, n1 * FRACTAL, oh, ow)
    return y[:, : shape.k]
