"""Stages of the weight gradient: pixels of x and of the gradient as flat planes in L1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product

from ascend_lab.isa import Affine, Buffer, KernelBuilder, Queue, Tile
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.tiles import repeat
from ascend_lab.kernels.weight_lattice import Gap, axes_of
from ascend_lab.kernels.weight_plan import WeightPlan, grad_plane, image_pixels, image_plane

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
