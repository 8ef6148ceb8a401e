"""Stages of the weight gradient: pixels of x and of the gradient as flat planes in L1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, product

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
)
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL
from ascend_lab.kernels.tiles import (
    by_size,
    chunks,
    out_queue,
    repeat,
    segments,
    store_tile,
    sum_queue,
)
from ascend_lab.kernels.weight_plan import (
    Gap,
    WeightPlan,
    axes_of,
    columns_per_step,
    fractals_of,
    grad_plane,
    image_pixels,
    image_plane,
    tile_blocks,
    weight_plan,
)

C0 = 16
"""Channels of a block in two-byte formats."""
ZEROS = 8192
"""Elements of the tensor of zeros: 512 pixels."""
Span = tuple[Affine, int]
"""First block and number of blocks."""


Band = tuple[Affine, int, tuple[tuple[int, int], ...]]
"""Bands before it, the first of its run, rows inside the image for each phase of rows."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the parts of one core's kernel share; `blocks` channel blocks of x fill a slot of L1."""

    shape: ConvShape
    plan: WeightPlan
    builder: KernelBuilder
    x: Buffer
    grad: Buffer
    zeros: Buffer
    sums: Buffer
    l1: tuple[Queue, Queue]
    l0: tuple[Queue, Queue]
    acc: Queue
    out: Queue | None
    blocks: int


def clear(work: Work) -> None:
    """Write zeros between the lines of all slots: loads leave them alone."""
    shape, stage = work.shape, work.plan.stage
    rows = axes_of(shape)[0]
    for slot in range(2):
        x, grad = (Tile(queue.buffer, slot) for queue in work.l1)
        pixels = image_pixels(shape, stage)
        for number, phase in enumerate(_phases(work)):
            whole = stage.rows == shape.out_hw[0]
            p = rows.phases[phase[0]]
            inside = (p.low, p.high) if whole else (0, stage.rows + rows.reach)
            plane = image_plane(shape, stage, phase, inside)
            for gap in plane.gaps():
                _zero(work, x, number * work.blocks * pixels, (work.blocks, pixels), gap)
        pixels = grad_plane(shape, stage).pixels
        for gap in grad_plane(shape, stage).gaps():
            _zero(work, grad, 0, (grad.buffer.elements // (pixels * C0), pixels), gap)


def _zero(work: Work, tile: Tile, start: int, planes: tuple[int, int], gap: Gap) -> None:
    """Copy zeros to a gap of each of (count, pitch) planes."""
    most = ZEROS // C0
    for first in range(0, gap.length, most):
        run = min(most, gap.length - first) * C0
        sizes = (planes[0], *gap.counts, run)
        strides = (planes[1] * C0, gap.steps[0] * C0, gap.steps[1] * C0, 1)
        to = tile.region((start + gap.start + first) * C0, sizes, strides)
        work.builder.copy(to, work.zeros.region(0, sizes, (0, 0, 0, 1)))


def _phases(work: Work) -> Iterator[tuple[int, int]]:
    rows, columns = axes_of(work.shape)
    yield from product(range(len(rows.phases)), range(len(columns.phases)))


def bands(work: Work, own: tuple[int, int]) -> Iterator[tuple[Band, Affine]]:
    """Loop over a core's bands, equal ones in a loop; also how many are done."""
    rows, size = axes_of(work.shape)[0], work.plan.stage.rows
    count = size + rows.reach

    def inside(band: int) -> tuple[tuple[int, int], ...]:
        return tuple(p.inside(band * size, count) for p in rows.phases)

    for seen, run in groupby(range(*own), inside):
        members = list(run)
        with repeat(work.builder, "band", len(members)) as turn:
            yield (turn, members[0], seen), turn + (members[0] - own[0])


def load_stage(work: Work, sides: tuple[Span, Span], group: Affine, band: Band) -> None:
    """Bring the pixels of a stage to L1: the gradient's, and each phase of x."""
    k, shape, stage = work.builder, work.shape, work.plan.stage
    (m_at, m), (c_at, c) = sides
    x, grad = (queue.alloc() for queue in work.l1)
    pixels, image = image_pixels(shape, stage), group * stage.images
    for number, phase in enumerate(_phases(work)):
        _load_phase(work, x, number * work.blocks * pixels, phase, (image, c_at, c), band)
    work.l1[0].enqueue()
    plane, (oh, ow) = grad_plane(shape, stage), shape.out_hw
    row = (band[0] + band[1]) * stage.rows
    start = ((image * shape.blocks[1] + m_at) * oh + row) * (ow * C0)
    sizes = (m, stage.images, stage.rows, ow * C0)
    steps = (oh * ow * C0, shape.blocks[1] * oh * ow * C0, ow * C0, 1)
    here = (plane.pixels * C0, plane.image_pitch * C0, plane.pitch * C0, 1)
    k.copy(grad.region(0, sizes, here), work.grad.region(start, sizes, steps))
    work.l1[1].enqueue()


def _load_phase(
    work: Work,
    tile: Tile,
    start: int,
    phase: tuple[int, int],
    blocks: tuple[Affine, Affine, int],
    band: Band,
) -> None:
    """Bring one phase of x: its rows inside the image, zeros for those outside."""
    shape, stage = work.shape, work.plan.stage
    rows, columns = axes_of(shape)
    p, q, inside = rows.phases[phase[0]], columns.phases[phase[1]], band[2][phase[0]]
    (image, c_at, c), pixels = blocks, image_pixels(shape, stage)
    plane = image_plane(shape, stage, phase, inside)
    if stage.rows < shape.out_hw[0]:
        top, end = inside[0] * plane.pitch, inside[1] * plane.pitch
        last = (stage.rows + rows.reach) * plane.pitch
        for first, length in ((0, top), (end, min(last, pixels) - end)):
            if length > 0 and (first or inside[0]):
                _zero(work, tile, start, (c, pixels), Gap(first, (1, 1), (0, 0), length))
    (height, width), hw = plane.sizes, shape.h * shape.w
    if not height or not width:
        return
    entry = band[1] * stage.rows + inside[0] - p.low
    row = band[0] * (stage.rows * rows.stride) + p.first + entry * rows.stride
    block = image * shape.blocks[0] + c_at
    at = (block * hw + row * shape.w + q.first) * C0
    sizes = (c, stage.images, height, width, C0)
    there = (hw * C0, shape.blocks[0] * hw * C0, rows.stride * shape.w * C0, columns.stride * C0, 1)
    here = (pixels * C0, plane.image_pitch * C0, plane.pitch * C0, C0, 1)
    to = tile.region((start + plane.first) * C0, sizes, here)
    work.builder.copy(to, work.x.region(at, sizes, there))


# The gradient of a convolution's weights on the cube.
#
# dW (k, c r s) = grad (k, pixels) x im2col(x) (pixels, c r s). x and the gradient lie in GM as
# NC1HWC0 and come to L1 as flat planes of pixels with zeros between the lines (`weight_lattice`):
# each tap then reads its operand as a shifted view, and load2d transposes the fractals of 16
# pixels
# by 16 channels on their way to L0. dW leaves as (C1 r s, K1, 16, 16), FRACTAL_Z. Where cores
# share
# the pixels of one result each writes fp32 partial sums, which a second phase adds.
#
# `zeros` is a tensor of zeros in GM: what pads the planes is copied from it, once, and at the
# first
# and last rows of an image.


AREA = FRACTAL * C0


@dataclass(frozen=True, slots=True)
class _Share:
    """A core's part: (blocks, pitch, positions) of m and c, image groups, bands first .. last-1."""

    m: tuple[int, int, int]
    c: tuple[int, int, int]
    groups: tuple[int, int, int]
    bands: tuple[int, int]
    band_index: int


def weight_gradient_launch(shape: ConvShape, chip: Chip, plan: WeightPlan | None = None) -> Launch:
    """Return the product: x, grad, zeros to y, or to `partial` sums where the plan splits pixels.

    `partial` is (splits, C1 r s, K1, 16, 16) in fp32. The shape has one group, or one per channel:
    then K1 is 1, and dW lies on the diagonals. Raises `CapacityError` where no plan fits.
    """
    plan = plan or weight_plan(shape, chip)
    (c_all, m_all), stage = tile_blocks(shape), plan.stage
    rows, columns, images, cuts = plan.grid
    m_sizes, c_sizes = chunks(m_all, plan.m, rows), chunks(c_all, plan.c1, columns)
    group_sizes = chunks(shape.n // stage.images, 1, images)
    band_sizes = chunks(shape.out_hw[0] // stage.rows, 1, cuts)
    splits = len(group_sizes) * len(band_sizes)
    parts = []
    sides = [by_size(s).items() for s in (m_sizes, c_sizes, group_sizes)]
    for (m, m_at), (c, c_at), (g, g_at) in product(*sides):
        for index, band in enumerate(band_sizes):
            first = index * band_sizes[0]
            share = _Share(
                (m, m_sizes[0], m_at[-1] + 1),
                (c, c_sizes[0], c_at[-1] + 1),
                (g, group_sizes[0], g_at[-1] + 1),
                (first, first + band),
                index,
            )
            program = _program(_new(shape, plan, chip, share, splits), share, len(band_sizes))
            binds = [
                binding_of({"row": i, "col": j, "batch": n})
                for i in m_at
                for j in c_at
                for n in g_at
            ]
            parts.append(Part(program, tuple(binds)))
    return Launch(f"weights_{shape.k}x{shape.c}x{shape.r}x{shape.s}", tuple(parts))


def splits_of(shape: ConvShape, plan: WeightPlan) -> int:
    """Return how many partial sums the cores write."""
    groups = chunks(shape.n // plan.stage.images, 1, plan.grid[2])
    return len(groups) * len(chunks(shape.out_hw[0] // plan.stage.rows, 1, plan.grid[3]))


def _new(shape: ConvShape, plan: WeightPlan, chip: Chip, share: _Share, splits: int) -> Work:
    """Allocate tensors and queues."""
    (c_all, m_all), (oh, ow), dtype = shape.blocks, shape.out_hw, shape.dtype
    k = KernelBuilder(f"weights_{share.m[0]}x{share.c[0]}", chip)
    m, c = min(plan.m, share.m[0]), min(plan.c1, share.c[0])
    axes, sums = axes_of(shape), ACCUMULATOR[dtype]
    phases = len(axes[0].phases) * len(axes[1].phases)
    x_slot = phases * c * image_pixels(shape, plan.stage) * C0
    grad_slot = m * grad_plane(shape, plan.stage).pixels * C0
    step = columns_per_step(chip, plan)
    name, out_dtype = ("y", shape.out_dtype) if splits == 1 else ("partial", sums)
    wide, high = tile_blocks(shape)
    total = splits * wide * shape.taps * high * AREA
    return Work(
        shape,
        plan,
        k,
        k.tensor("x", dtype, shape.n * c_all * shape.h * shape.w * C0),
        k.tensor("grad", dtype, shape.n * m_all * oh * ow * C0),
        k.tensor("zeros", dtype, ZEROS),
        k.tensor(name, out_dtype, total),
        (
            k.queue("x_l1", "L1", dtype, x_slot, src="MTE2", dst="MTE1"),
            k.queue("g_l1", "L1", dtype, grad_slot, src="MTE2", dst="MTE1"),
        ),
        (
            k.queue("g_l0", "L0A", dtype, m * plan.depth * AREA, src="MTE1", dst="M"),
            k.queue("x_l0", "L0B", dtype, step * plan.depth * AREA, src="MTE1", dst="M"),
        ),
        sum_queue(k, "y_l0", sums, m, c * shape.taps),
        out_queue(k, out_dtype, m, c * shape.taps) if chip.combined else None,
        c,
    )


def _program(work: Work, share: _Share, band_count: int) -> Program:
    k, plan = work.builder, work.plan
    m_base = k.param("row", share.m[2]) * share.m[1]
    c_base = k.param("col", share.c[2]) * share.c[1]
    batch = k.param("batch", share.groups[2])
    clear(work)
    split = batch * band_count + share.band_index
    for m_at, m in segments(k, "m", share.m[0], plan.m):
        for c_at, c in segments(k, "c", share.c[0], plan.c1):
            sides = (m_base + m_at, m), (c_base + c_at, c)
            read = sides if work.shape.groups == 1 else (sides[1], sides[1])
            with _sums(work, sides, split) as tile, repeat(k, "group", share.groups[0]) as group:
                at = batch * share.groups[1] + group
                for band, done in bands(work, share.bands):
                    load_stage(work, read, at, band)
                    _reduce(work, sides, tile, group + done)
    return k.finish()


# -- L0 -------------------------------------------------------------------------------------------
@contextmanager
def _sums(work: Work, sides: tuple[Span, Span], split: Affine) -> Iterator[Tile]:
    """Hold a tile of dW in L0C while the pixels are walked, then store it."""
    shape, ((m_at, m), (c_at, c)) = work.shape, sides
    c_all, m_all = tile_blocks(shape)
    yield work.acc.alloc()
    work.acc.enqueue()
    column = split * (c_all * shape.taps) + c_at * shape.taps
    start = (column * m_all + m_at) * AREA
    store_tile(work.builder, work.acc, work.out, work.sums, (m, c * shape.taps), start, m_all)


def _reduce(work: Work, sides: tuple[Span, Span], total: Tile, done: Affine) -> None:
    """Add the products of the pixels in L1 to the sums; the first where `done` is 0."""
    k, plan = work.builder, work.plan
    x, grad = (queue.dequeue() for queue in work.l1)
    m, c = sides[0][1], sides[1][1]
    views = list(_views(work, c))
    step = columns_per_step(k.chip, plan)
    pixels = grad_plane(work.shape, plan.stage).pixels
    for at, depth in segments(k, "k", fractals_of(work.shape, plan.stage), plan.depth):
        left = work.l0[0].alloc()
        with repeat(k, "block", m) as block:
            to = left.region(block * (depth * AREA), (depth, FRACTAL, C0))
            k.load2d(to, _turned(grad, block * pixels + at * FRACTAL, depth))
        work.l0[0].enqueue()
        a = work.l0[0].dequeue().region(0, (m, depth, FRACTAL, C0))
        for first in range(0, len(views), step):
            some = views[first : first + step]
            right = work.l0[1].alloc()
            for number, view in enumerate(some):
                steps = (len(some) * AREA, C0, 1)
                to = right.region(number * AREA, (depth, FRACTAL, C0), steps)
                k.load2d(to, _turned(x, at * FRACTAL + view, depth))
            work.l0[1].enqueue()
            b = work.l0[1].dequeue().region(0, (depth, len(some), FRACTAL, C0))
            sums = total.region(first * (m * AREA), (len(some), m, FRACTAL, FRACTAL))
            k.mmad(sums, a, b, accumulate=done + at)
            work.l0[1].free()
        work.l0[0].free()
    for queue in work.l1:
        queue.free()


def _turned(tile: Tile, pixel: Affine, depth: int) -> Region:
    """Return fractals of 16 pixels each with channels as rows: load2d transposes them."""
    return tile.region(pixel * C0, (depth, FRACTAL, C0), (AREA, 1, C0))


def _views(work: Work, c: int) -> Iterator[int]:
    """Yield the first pixel of each column of dW, (c1, r, s): a channel block, a tap's shift."""
    rows, columns = axes_of(work.shape)
    pixels = image_pixels(work.shape, work.plan.stage)
    for block in range(c):
        for (p, down), (q, right) in product(rows.taps, columns.taps):
            plane = (p * len(columns.phases) + q) * work.blocks + block
            yield plane * pixels + down * columns.pitch + right
