"""Blocks of rows of the gradient of pooling: which windows see them, how many fit UB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, product

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import CapacityError
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
from ascend_lab.kernels.gemm_schedule import up
from ascend_lab.kernels.planes import vector_cores
from ascend_lab.kernels.tiles import by_size, chunks, repeat


@dataclass(frozen=True, slots=True)
class PoolGradient:
    """What to do: the pooling as a convolution with a group per channel, and its kind.

    `share` is what the gradient of an average is multiplied by, 0 where that differs from window
    to window: then `rate` holds it for each, (OH, OW, 16). `weighted` is the gradient of a
    depthwise convolution's image: each tap has a weight per channel, (C1, r, s, 16).
    """

    shape: ConvShape
    maximum: bool
    share: float = 1.0
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class RowBlock:
    """`rows` rows of dx and the `windows` that see them; all row numbers count from `base`.

    Relative to the block's first row of dx: `base` is the first row in UB, `window` the first
    window's first row; `first` .. `end`-1 of `span` rows in UB are in the image.
    """

    rows: int
    windows: int
    base: int
    window: int
    span: int
    first: int
    end: int


def block_of(shape: ConvShape, rows: int, index: int) -> RowBlock:
    """Return what block `index` of `rows` rows of dx needs."""
    stride, top, oh = shape.strides[0], shape.pads[0], shape.out_hw[0]
    start = index * rows
    end = min(start + rows, shape.h)
    low = max(0, up(start + top - shape.r + 1, stride))
    windows = max(0, min(oh - 1, (end - 1 + top) // stride) - low + 1)
    window = low * stride - top if windows else start
    base = min(start, window)
    span = max(end, window + (windows - 1) * stride + shape.r if windows else end) - base
    first, last = max(-base, 0), min(span, shape.h - base)
    return RowBlock(end - start, windows, base - start, window - start, span, first, last)


def blocks_of(shape: ConvShape, rows: int) -> list[RowBlock]:
    """Return all blocks of an image."""
    return [block_of(shape, rows, i) for i in range(up(shape.h, rows))]


def line_of(shape: ConvShape) -> int:
    """Pixels of a row in UB: what windows see, and all of the image."""
    seen = (shape.out_hw[1] - 1) * shape.strides[1] + shape.s
    return max(seen, shape.pads[2] + shape.w)


def _needed(job: PoolGradient, rows: int) -> int:
    """32-byte blocks of UB: dx and the gradient twice; of maximum also x and y, and the hits."""
    shape = job.shape
    blocks, ow = blocks_of(shape, rows), shape.out_hw[1]
    span, windows = max(b.span for b in blocks), max(b.windows for b in blocks)
    planes, runs = (4, 5) if job.maximum else (2, 2 if job.share else 4)
    weights = 2 * shape.taps if job.weighted else 0
    return planes * span * line_of(shape) + (runs + job.weighted) * max(windows, 1) * ow + weights


def rows_of_block(job: PoolGradient, chip: Chip) -> int:
    """Most rows of dx that fit UB, whole strides where there are several."""
    shape, room = job.shape, chip.buffers["UB"] // BLOCK_BYTES
    stride = shape.strides[0]
    fitting = [
        r
        for r in range(1, shape.h + 1)
        if (r % stride == 0 or r == shape.h) and _needed(job, r) <= room
    ]
    if not fitting:
        raise CapacityError(
            f"UB for {stride} rows of {shape.w} pixels: {_needed(job, min(stride, shape.h))}"
            " blocks of 32 bytes",
            f"{room} on {chip.name}",
            "cut the image into columns",
        )
    return fitting[-1]


# The gradients of pooling on the vector unit, images in NC1HWC0, fp16.
#
# Maximum, for each tap in order: hit = (x at the tap == y), part = hit * left, left = left -
# part,
# and part is added to dx at the tap. `left` starts as the gradient: after a window's first hit it
# is
# zero, so that later equal elements get nothing. Average: the gradient, divided by what its
# window
# averaged, is added at every tap. The image gradient of a depthwise convolution is the same with
# a
# weight per tap and channel. Rows of dx are walked in blocks; windows that reach across the end
# of a block are computed in both.


C0, PIXELS, LOWEST = 16, 8, -65504.0


@dataclass(frozen=True, slots=True)
class _Work:
    """What the parts of one core's kernel share; `line` pixels of x and dx lie from row to row."""

    job: PoolGradient
    builder: KernelBuilder
    x: Buffer | None
    top: Buffer | None
    grad: Buffer
    y: Buffer
    left: Queue
    tiles: tuple[Buffer, ...]
    sums: Queue
    line: int
    rows: int

    @property
    def shape(self) -> ConvShape:
        return self.job.shape


def pool_gradient_launch(job: PoolGradient, chip: Chip) -> Launch:
    """Return the kernel: grad (N, C1, OH, OW, 16) to y (N, C1, H, W, 16).

    Maximum also reads x (like y) and `top` (like grad), what pooling read and wrote; depthwise
    convolutions `weight` (C1, r, s, 16); averages of different size `rate` (OH, OW, 16). Raises
    `CapacityError` where one block of rows does not fit UB.
    """
    shape, rows = job.shape, rows_of_block(job, chip)
    sizes = (shape.blocks[0], shape.n, up(shape.h, rows))
    grid = _grid(sizes, vector_cores(chip))
    c_sizes, n_sizes, bands = (chunks(t, 1, g) for t, g in zip(sizes, grid, strict=True))
    parts = []
    for (c, c_at), (n, n_at) in product(by_size(c_sizes).items(), by_size(n_sizes).items()):
        for index, size in enumerate(bands):
            own = range(index * bands[0], index * bands[0] + size)
            counts = ((c, c_sizes[0], c_at[-1] + 1), (n, n_sizes[0], n_at[-1] + 1))
            program = _program(_new(job, chip, rows), counts, own)
            binds = [binding_of({"channel": i, "batch": j}) for i in c_at for j in n_at]
            parts.append(Part(program, tuple(binds)))
    return Launch(f"pool_gradient_{shape.n}x{shape.c}x{shape.h}x{shape.w}", tuple(parts))


def _grid(sizes: tuple[int, int, int], cores: int) -> tuple[int, int, int]:
    """Return how many cores divide channel blocks, images and blocks of rows."""
    options = []
    for c in range(1, min(sizes[0], cores) + 1):
        for n in range(1, min(sizes[1], cores // c) + 1):
            bands = min(sizes[2], cores // (c * n))
            work = up(sizes[0], c) * up(sizes[1], n) * up(sizes[2], bands)
            options.append((work, bands, (c, n, bands)))
    return min(options)[2]


# -- the program ----------------------------------------------------------------------------------
def _new(job: PoolGradient, chip: Chip, rows: int) -> _Work:
    shape = job.shape
    k, (c1, _), (oh, ow) = KernelBuilder("pool_gradient", chip), shape.blocks, shape.out_hw
    blocks = blocks_of(shape, rows)
    image = max(b.span for b in blocks) * line_of(shape) * C0
    pixels = max([1, *(b.windows for b in blocks)]) * ow * C0
    planes, hw = shape.n * c1 * C0, shape.h * shape.w
    left = k.queue("left", "UB", "fp16", pixels, src="MTE2", dst="V")
    x = top = None
    tiles: tuple[Buffer, ...] = ()
    if job.maximum:
        x, top = k.tensor("x", "fp16", planes * hw), k.tensor("top", "fp16", planes * oh * ow)
        hit = k.buffer("hit", "UB", "fp16", pixels)
        tiles = (left.join("x_ub", "fp16", image), left.join("top_ub", "fp16", pixels), hit)
    elif not job.share:
        top = k.tensor("rate", "fp16", oh * ow * C0)
        tiles = (left.join("rate_ub", "fp16", pixels),)
    elif job.weighted:
        top = k.tensor("weight", "fp16", c1 * shape.taps * C0)
        part = k.buffer("part", "UB", "fp16", pixels)
        tiles = (left.join("weight_ub", "fp16", shape.taps * C0), part)
    grad = k.tensor("grad", "fp16", planes * oh * ow)
    y = k.tensor("y", "fp16", planes * hw)
    sums = k.queue("dx_ub", "UB", "fp16", image, src="V", dst="MTE3")
    return _Work(job, k, x, top, grad, y, left, tiles, sums, line_of(shape), rows)


Counts = tuple[tuple[int, int, int], tuple[int, int, int]]
"""(blocks, pitch, positions) of channels and of images of a core."""


def _program(work: _Work, counts: Counts, own: range) -> Program:
    k, shape = work.builder, work.shape
    (c, c_pitch, c_count), (n, n_pitch, n_count) = counts
    first_c, first_n = k.param("channel", c_count) * c_pitch, k.param("batch", n_count) * n_pitch
    if work.job.maximum:  # loads leave the columns around the image alone
        for slot in range(2):
            _fill(k, Tile(work.tiles[0], slot).region(), LOWEST)
        k.barrier()
    with repeat(k, "c", c) as at, repeat(k, "image", n) as image:
        channel = first_c + at
        plane = (first_n + image) * shape.blocks[0] + channel
        for block, index in _runs(work, own):
            _whole_block(work, block, (plane, channel), index)
    return k.finish()


def _runs(work: _Work, own: range) -> Iterator[tuple[RowBlock, Affine]]:
    """Loop over a core's blocks, equal ones in a loop."""
    for block, run in groupby(own, lambda i: block_of(work.shape, work.rows, i)):
        members = list(run)
        with repeat(work.builder, "rows", len(members)) as turn:
            yield block, turn + members[0]


def _fill(k: KernelBuilder, region: Region, number: float) -> None:
    """Write one number to a run of pixels."""
    for part in _flat(k, region):
        k.vector("vdup", part, scalar=number)


def _flat(k: KernelBuilder, region: Region) -> Iterator[Region]:
    """Yield a run of elements as whole repeats, and what is left."""
    lanes, total, done = PIXELS * C0, region.elements, 0
    while done < total:
        count = min((total - done) // lanes, k.chip.max_repeat)
        sizes = (count, lanes) if count else (1, total - done)
        yield Region(region.buffer, region.offset + done, sizes, (lanes, 1), region.slot)
        done += sizes[0] * sizes[1]


def _whole_block(work: _Work, block: RowBlock, place: tuple[Affine, Affine], index: Affine) -> None:
    """One block of rows of one plane; `place` is the plane and its channel block."""
    k, shape, plane = work.builder, work.shape, place[0]
    _load(work, work.left.alloc().slot, block, place, index)
    work.left.enqueue()
    left, dx, row = work.left.dequeue(), work.sums.alloc(), work.line * C0
    if work.job.maximum:
        x = Tile(work.tiles[0], left.slot)
        if block.first:
            _fill(k, x.region(0, block.first * row), LOWEST)
        if block.end < block.span:
            _fill(k, x.region(block.end * row, (block.span - block.end) * row), LOWEST)
    _fill(k, dx.region(0, block.span * row), 0.0)
    if block.windows:
        _share(work, left, block)
        for tap in product(range(shape.r), range(shape.s)):
            _tap(work, left, dx, block, tap)
    work.left.free()
    work.sums.enqueue()
    held, hw = work.sums.dequeue(), shape.h * shape.w
    sizes = (block.rows, shape.w * C0)
    source = held.region((-block.base * work.line + shape.pads[2]) * C0, sizes, (row, 1))
    start = (plane * hw + index * (work.rows * shape.w)) * C0
    k.copy(work.y.region(start, sizes), source)
    work.sums.free()


def _load(
    work: _Work, slot: int, block: RowBlock, place: tuple[Affine, Affine], index: Affine
) -> None:
    """Bring rows of x between the borders, and the windows' gradients and y, rates or weights."""
    k, shape, (oh, ow), (plane, channel) = work.builder, work.shape, work.shape.out_hw, place
    if work.x is not None:
        row = index * work.rows + (block.base + block.first)
        sizes = (block.end - block.first, shape.w * C0)
        start = (block.first * work.line + shape.pads[2]) * C0
        to = Tile(work.tiles[0], slot).region(start, sizes, (work.line * C0, 1))
        start_x = (plane * (shape.h * shape.w) + row * shape.w) * C0
        k.copy(to, work.x.region(start_x, sizes))
    if not block.windows:
        return
    size = block.windows * ow * C0
    first = index * (work.rows // shape.strides[0])
    first = (first + (block.window + shape.pads[0]) // shape.strides[0]) * (ow * C0)
    at = plane * (oh * ow * C0) + first
    k.copy(Tile(work.left.buffer, slot).region(0, size), work.grad.region(at, size))
    if work.top is not None and work.job.weighted:
        weights = shape.taps * C0
        to = Tile(work.tiles[0], slot).region(0, weights)
        k.copy(to, work.top.region(channel * weights, weights))
    elif work.top is not None:
        to = Tile(work.tiles[1 if work.job.maximum else 0], slot).region(0, size)
        k.copy(to, work.top.region(at if work.job.maximum else first, size))


def _share(work: _Work, left: Tile, block: RowBlock) -> None:
    """Divide the gradients of averages by how many elements each window averaged."""
    k, share = work.builder, work.job.share
    if work.job.maximum or share == 1.0:
        return
    for flat in _flat(k, left.region(0, block.windows * work.shape.out_hw[1] * C0)):
        if share:
            k.vector("vmuls", flat, flat, scalar=share)
        else:
            rate = Region(work.tiles[0], flat.offset, flat.sizes, flat.strides, flat.slot)
            k.vector("vmul", flat, flat, rate)


def _tap(work: _Work, left: Tile, dx: Tile, block: RowBlock, tap: tuple[int, int]) -> None:
    """Add one tap of every window: the gradient, or what is left of it if x is the largest."""
    k, shape, ow = work.builder, work.shape, work.shape.out_hw[1]
    first = ((block.window - block.base + tap[0]) * work.line + tap[1]) * C0
    pitch, step, part = shape.strides[0] * work.line * C0, shape.strides[1], left
    if work.job.maximum:
        x, top, part = (Tile(buffer, left.slot) for buffer in work.tiles)
        with repeat(k, "line", block.windows) as line:
            for here, there in _lines(work, line * (ow * C0), line * pitch + first, step):
                k.vector("vcmp", here(part), there(x), here(top), compare="eq")
        for flat in _flat(k, left.region(0, block.windows * ow * C0)):
            same = Region(work.tiles[2], flat.offset, flat.sizes, flat.strides)
            k.vector("vmul", same, same, flat)
            k.vector("vsub", flat, flat, same)
    if work.job.weighted:
        part = _weighted(work, left, block.windows * ow, tap)
    with repeat(k, "line", block.windows) as line:
        for here, there in _lines(work, line * (ow * C0), line * pitch + first, step):
            k.vector("vadd", there(dx), there(dx), here(part))


def _weighted(work: _Work, left: Tile, pixels: int, tap: tuple[int, int]) -> Tile:
    """Return the gradients times the weights of one tap, one for each of 16 channels."""
    weights, part = Tile(work.tiles[0], left.slot), Tile(work.tiles[1], 0)
    most, done = work.builder.chip.max_repeat, 0
    while done < pixels:
        count = min((pixels - done) // PIXELS, most)
        sizes = (count, PIXELS, C0) if count else (1, pixels - done, C0)
        rate = weights.region((tap[0] * work.shape.s + tap[1]) * C0, sizes, (0, 0, 1))
        views = (tile.region(done * C0, sizes) for tile in (part, left))
        work.builder.vector("vmul", *views, rate)
        done += sizes[0] * sizes[1]
    return part


View = Callable[[Tile], Region]


def _lines(work: _Work, near: Affine, far: Affine, step: int) -> Iterator[tuple[View, View]]:
    """Yield views of one row of windows: side by side from `near` on, `step` apart from `far` on.

    Whole repeats of 8 pixels, then the rest of the row.
    """
    ow = work.shape.out_hw[1]
    most = work.builder.chip.max_repeat * PIXELS
    done = 0
    while done < ow:
        count = min(ow - done, most) // PIXELS
        sizes = (count, PIXELS, C0) if count else (1, ow - done, C0)

        def view(start: Affine, step: int, sizes: tuple[int, ...] = sizes) -> View:
            strides = (PIXELS * step * C0, step * C0, 1)
            return lambda tile: tile.region(start, sizes, strides)

        yield view(near + done * C0, 1), view(far + done * step * C0, step)
        done += sizes[0] * sizes[1]
