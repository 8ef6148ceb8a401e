"""Two sums over each channel of images in NC1HWC0, on the vector unit: sum(a) and sum(a b).

In NC1HWC0 all pixels of a channel lie in the same one of 16 lanes. So tiles of any pixels are
added lane by lane, in fp32, to a tile of sums; at the end its rows of 16 lanes are folded onto the
first. Channel blocks, images and rows are divided over the cores. Each writes its partial sums; a
second phase adds them and computes what is wanted of them:

    a = b = x:        mean = sum(x) / m,  variance = sum(x x) / m - mean^2     (m per channel)
    a = grad, b = x:  dscale = (sum(a b) - mean sum(a)) / sqrt(variance + epsilon), dbias = sum(a)

so that batch norm reads its images once for the statistics, and once for both gradients.

Not even once where the cube sums what a convolution stores. A tile goes to L1, too; a tile later,
so that no pipe waits, it is multiplied for each channel block,

    ones (16, pixels) @ y (pixels, 16)      y transposed (16, pixels) @ y (pixels, 16)

the first product has sum(y) in each row, the second sum(y y) on its diagonal. Before the first tile
stands one of zeros, so that each has one in front. Both stay in L0C to the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels import conv_shape, conv_tiles, planes, tiles

LANES, TILES = 64, 4
C0, AREA = planes.C0, planes.AREA
SPARE_BYTES = 4096
SMALL = 4096
"""Elements up to which a tile is not made smaller only to have several of them."""


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """Images (n, c, h, w) in a 2-byte format; `epsilon` of the gradients, None: the statistics."""

    n: int
    c: int
    h: int
    w: int
    dtype: str = "fp16"
    epsilon: float | None = None

    @property
    def blocks(self) -> int:
        """Blocks of 16 channels."""
        return isa.up(self.c, C0)

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the tensors that are read: a, and b if it is another."""
        return ("x",) if self.epsilon is None else ("grad", "x")


def channel_sums_kernel(job: ChannelSums, chip: Chip) -> isa.Kernel:
    """Return the kernel: x, or grad, x, mean and variance, to y0 and y1, one fp32 per channel.

    Numbers per channel are stored as (1, C1, 1, 1, 16). Raises `CapacityError` where UB is small.
    """
    cores = chip.cores_of("vector")
    sizes = planes.dealt((job.blocks, job.n, job.h), cores, large_folds=True)
    bands = len(sizes[2])
    slots = len(sizes[1]) * bands
    first = planes.plane_launch(
        "partial", sizes, lambda own: _partial(job, own, bands, slots, chip)
    )
    return isa.Kernel("channel_sums", (first, _last(job, slots, chip, _final)))


def totals_launch(first: isa.Launch, shape: conv_shape.ConvShape, chip: Chip) -> isa.Launch:
    """Return the phase behind a convolution that stored `partial`: mean and variance of y."""
    partial = next(tensor for tensor in first.tensors if tensor.name == "partial")
    job = ChannelSums(shape.n, shape.k, *shape.out_hw)
    return _last(job, partial.elements // (job.blocks * PAIR), chip, _diagonals)


def _last(job: ChannelSums, slots: int, chip: Chip, make: Callable[..., isa.Program]) -> isa.Launch:
    """Return the second phase, partial sums in `slots` to y0 and y1, by the programs of `make`."""
    some = isa.up(job.blocks, isa.up(job.blocks, chip.cores_of("vector")))
    channels = [C0 * size for size in tiles.chunks(job.blocks, 1, some)]
    return isa.spread("final", {"channel": channels}, lambda own: make(job, slots, own, chip))


# -- first phase: partial sums --------------------------------------------------------------------
def _tile_elements(job: ChannelSums, run: int, images: int, chip: Chip) -> tuple[int, int]:
    """Return the elements of a tile and the images in it, the latter 1 where it is cut.

    Per element and image UB holds two slots and a copy in fp32, and two sums in fp32.
    """
    each = len(job.images) * (2 * DTYPE_BYTES[job.dtype] + 4) + 8
    most = (chip.buffers["UB"] - SPARE_BYTES) // each
    most = min(most // LANES, chip.max_repeat) * LANES
    if run > most:
        return isa.up(isa.up(run, isa.up(run, most)), LANES) * LANES, 1
    together = min(most // run, images, max(isa.up(images, TILES), isa.up(SMALL, run)))
    return together * run, together


def _partial(job: ChannelSums, own: planes.Own, bands: int, slots: int, chip: Chip) -> isa.Program:
    """Add the tiles of one core, and their products with the other image, or themselves."""
    k, row, total = isa.KernelBuilder("channel_sums", chip), job.w * C0, job.blocks * C0
    plane, low = job.h * row, own.rows[0] * row
    run, pitch = own.rows[1] * row - low, job.blocks * plane
    size, together = _tile_elements(job, run, own.images[0], chip)
    tensors = [k.tensor(x, job.dtype, job.n * pitch) for x in job.images]
    partial = k.tensor("partial", "fp32", slots * 2 * total)
    loaded = k.queue("a_ub", "UB", job.dtype, size, src="MTE2", dst="V")
    slot_of = [loaded.buffer, *(loaded.join(f"{x}_ub", job.dtype, size) for x in job.images[1:])]
    wide = [k.buffer(f"{x}_wide", "UB", "fp32", size) for x in job.images]
    sums = [k.buffer(x, "UB", "fp32", size) for x in ("sums", "products")]
    out = k.queue("out", "UB", "fp32", 2 * C0, src="V", dst="MTE3")
    c_at = k.param("channel", own.channels[2]) * own.channels[1]
    batch = k.param("batch", own.images[2])
    with tiles.repeat(k, "c", own.channels[0]) as c:
        for one in sums:
            k.each("vdup", size, (one, 0), scalar=0.0)
        block = c_at + c
        for image, at, sizes in _tiles(k, own.images[0], run, together, size):
            start = (
                (batch * (own.images[1] * job.blocks) + block) * plane + image * pitch + at + low
            )
            slot, count = loaded.alloc().slot, sizes[0] * sizes[1]
            for tensor, buffer in zip(tensors, slot_of, strict=True):
                source = tensor.region(start, sizes, (pitch, 1))
                k.copy(isa.Tile(buffer, slot).region(0, sizes), source)
            loaded.enqueue()
            _add(k, loaded, wide, sums, count)
        tile = out.alloc()
        for number, one in enumerate(sums):
            fold_rows(k, one, size // C0, C0)
            k.each("vcopy", C0, (tile, number * C0), (one, 0))
        out.enqueue()
        start = (batch * bands + own.band) * (2 * total) + block * C0
        k.copy(partial.region(start, (2, C0), (total, 1)), out.dequeue().region(0, (2, C0)))
        out.free()
    return k.finish()


def _add(
    k: isa.KernelBuilder,
    loaded: isa.Queue,
    wide: list[isa.Buffer],
    sums: list[isa.Buffer],
    count: int,
) -> None:
    """Add a tile to the sums, and its products with the other one, or with itself."""
    slot, (a, b) = loaded.dequeue().slot, ((wide[0], 0), (wide[-1], 0))
    for buffer, to in zip((loaded.buffer, *loaded.members), wide, strict=True):
        k.each("vconv", count, (to, 0), (isa.Tile(buffer, slot), 0))
    loaded.free()
    k.each("vadd", count, (sums[0], 0), (sums[0], 0), a)
    k.each("vmul", count, b, a, b)
    k.each("vadd", count, (sums[1], 0), (sums[1], 0), b)


def _tiles(
    k: isa.KernelBuilder, images: int, run: int, together: int, size: int
) -> Iterator[tuple[isa.Affine, isa.Affine, tuple[int, int]]]:
    """Yield the image and element where each tile starts and its (images, elements of each)."""
    if size >= run:
        for at, count in tiles.segments(k, "image", images, together):
            yield at, isa.Affine(), (count, run)
        return
    with tiles.repeat(k, "image", images) as image:
        for at, count in tiles.segments(k, "pixels", run, size):
            yield image, at, (1, count)


# -- second phase: sums of the cores' sums --------------------------------------------------------
def _final(job: ChannelSums, slots: int, own: isa.Share, chip: Chip) -> isa.Program:
    """Add the partial sums of a core's channels, and compute both results."""
    k, total, count = isa.KernelBuilder("channel_totals", chip), job.blocks * C0, own[0]
    start = k.param("channel", own[2]) * own[1]
    partial = k.tensor("partial", "fp32", slots * 2 * total)
    given = [k.tensor(x, "fp32", total) for x in ("mean", "variance") if job.epsilon is not None]
    loaded = k.queue("sums", "UB", "fp32", slots * count, src="MTE2", dst="V", depth=1)
    inputs = [loaded.buffer, loaded.join("products", "fp32", slots * count)]
    inputs += [loaded.join(f"{x.name}_ub", "fp32", count) for x in given]
    slot = loaded.alloc().slot
    for number, tile in enumerate(inputs[:2]):
        rows = partial.region(start + number * total, (slots, count), (2 * total, 1))
        k.copy(isa.Tile(tile, slot).region(0, (slots, count)), rows)
    for tensor, tile in zip(given, inputs[2:], strict=True):
        k.copy(isa.Tile(tile, slot).region(0, count), tensor.region(start, count))
    loaded.enqueue()
    loaded.dequeue()
    for tile in inputs[:2]:
        fold_rows(k, tile, slots, count)
    _store_results(k, job, inputs, start, count)
    loaded.free()
    return k.finish()


def _store_results(
    k: isa.KernelBuilder, job: ChannelSums, inputs: list[isa.Buffer], start: isa.Affine, count: int
) -> None:
    """Compute the two results of `count` channels from `start` on, and store them."""
    results = [k.tensor(x, "fp32", job.blocks * C0) for x in ("y0", "y1")]
    out = k.queue("y0_ub", "UB", "fp32", count, src="V", dst="MTE3", depth=1)
    outs = [out.buffer, out.join("y1_ub", "fp32", count)]
    out.alloc()
    _results(k, job, inputs, outs, count)
    out.enqueue()
    out.dequeue()
    for tensor, tile in zip(results, outs, strict=True):
        k.copy(tensor.region(start, count), tile.region(0, count))
    out.free()


def _results(
    k: isa.KernelBuilder,
    job: ChannelSums,
    inputs: list[isa.Buffer],
    outs: list[isa.Buffer],
    count: int,
) -> None:
    """Compute the two results from the sums, in the first row of each tile."""

    def put(op: str, *buffers: isa.Buffer, scalar: float | None = None) -> None:
        k.each(op, count, *((buffer, 0) for buffer in buffers), scalar=scalar)

    sums, products, y0, y1 = *inputs[:2], *outs
    if job.epsilon is None:
        share = 1.0 / (job.n * job.h * job.w)
        put("vmuls", y0, sums, scalar=share)
        put("vmul", sums, y0, y0)
        put("vmuls", products, products, scalar=share)
        put("vsub", y1, products, sums)
        put("vrelu", y1, y1)  # rounding may leave it slightly below 0
        return
    mean, variance = inputs[2:]
    put("vcopy", y1, sums)
    put("vmul", mean, mean, sums)
    put("vsub", products, products, mean)
    put("vadds", variance, variance, scalar=job.epsilon)
    put("vrsqrt", variance, variance)
    put("vmul", y0, products, variance)


def fold_rows(
    k: isa.KernelBuilder,
    place: isa.Tile | isa.Buffer,
    rows: int,
    width: int,
    start: isa.Affine | int = 0,
) -> None:
    """Add all rows from `start` on onto the first, half of them at a time."""
    one = (place, start)
    while rows > 1:
        half = rows // 2
        k.each("vadd", half * width, one, one, (place, start + (rows - half) * width))
        rows -= half


# -- first phase: sums of what a convolution stores ------------------------------------------------
PAIR = 2 * AREA
"""Elements of both products of a block."""


def ones_and_diagonal() -> np.ndarray:
    """Return the tensor `ones`: fractals of ones, with ones on the diagonal, and of zeros."""
    fractals = np.ones((C0, C0)), np.eye(C0), np.zeros((C0, C0))
    return np.concatenate(fractals).astype(np.float16).reshape(-1)


class Totals:
    """The sums of a core that stores tiles of `m` fractals of pixels, `n` channel blocks wide.

    All of them have the same `n` blocks. `feeds` are the slots of L0A and L0B that the products
    use, too. What is summed of a tile is always as high, zeros behind its last pixel.
    """

    def __init__(
        self,
        k: isa.KernelBuilder,
        job: conv_tiles.Job,
        own: int,
        feeds: tuple[isa.Queue, isa.Queue],
    ) -> None:
        """Allocate everything for a core with `own` output blocks.

        Raises `CapacityError` unless a tile has all of them.
        """
        shape, (self.m, self.n), self.k, self.feeds = job.shape, job.sides(own), k, feeds
        self.slots, self.blocks = job.rows, shape.blocks[1]
        plain = (shape.dtype, shape.out_dtype, shape.groups) == ("fp16", "fp16", 1)
        if own > self.n or not plain or shape.pool:
            wanted = f"fp16, one group, no pooling, tiles of all {own} output blocks of a core"
            raise errors.CapacityError(wanted, f"{self.n}", "raise base_n, or sum apart")
        size, source = self.m * self.n * AREA, "MTE3" if k.chip.combined else "FIX"
        self.ones = k.tensor("ones", "fp16", 3 * AREA)
        self.partial = k.tensor("partial", "fp32", self.slots * self.blocks * PAIR)
        self.held = k.queue("y_l1", "L1", "fp16", size, src=source, dst="MTE1")
        self.given = k.buffer("ones_l1", "L1", "fp16", 2 * AREA)
        high = min(self.m, k.chip.buffers["L0A"] // (8 * 2 * AREA))
        self.column = k.buffer("ones_l0", "L0A", "fp16", high * AREA)
        zeros = AREA * (not k.chip.combined)
        self.sums = k.buffer("totals_l0", "L0C", "fp32", self.n * PAIR + zeros)
        if k.chip.combined:
            self.zeros = k.buffer("zeros", "UB", "fp16", C0)
            self.out = k.buffer("totals", "UB", "fp32", self.n * PAIR)

    def begin(self) -> None:
        """Bring ones to L0A; let sums begin at 0, after a tile of zeros."""
        k, one = self.k, (1, 1, C0, C0)
        self.place = k.param("slot", self.slots) * (self.blocks * PAIR)
        k.copy(self.given.region(0, (2, AREA)), self.ones.region(0, (2, AREA), (2 * AREA, 1)))
        k.barrier()
        high = (self.column.elements // AREA, AREA)
        k.load2d(self.column.region(0, high), self.given.region(0, high, (0, 1)))
        for queue in self.feeds:
            k.load2d(queue.alloc().region(0, (1, AREA)), self.given.region(AREA, (1, AREA)))
            queue.enqueue()
        a, b = (queue.dequeue().region(0, one) for queue in self.feeds)
        with tiles.repeat(k, "zero", self.sums.elements // AREA) as i:
            k.mmad(self.sums.region(i * AREA, one), a, b, accumulate=0)
        for queue in self.feeds:
            queue.free()
        if k.chip.combined:
            k.each("vdup", C0, (self.zeros, 0), scalar=0.0)
        k.barrier()
        self.slot(0)
        self.held.enqueue()

    def slot(self, pixels: int) -> isa.Tile:
        """Return the place in L1 of a tile of `pixels` that begins, zeros behind the last."""
        k, slot, missing = self.k, self.held.alloc(), self.m * C0 - pixels
        sizes = (self.n, missing, C0)
        if missing:
            to = slot.region(pixels * C0, sizes, (self.m * AREA, C0, 1))
            if k.chip.combined:
                k.copy(to, self.zeros.region(0, sizes, (0, 0, 1)))
            else:  # the last fractal of sums stays 0
                k.fixpipe(to, self.sums.region(self.n * PAIR, sizes, (0, 0, 1)))
        return slot

    def places(self, area: tiles.Area) -> list[tuple[isa.Tile, tiles.Area]]:
        """Sum the tile in front; return where the one that goes to `area` goes, too."""
        self.add()
        pieces = ((0, isa.Affine(), area.pixels),)
        to = replace(area, base=isa.Affine(), pieces=pieces, plane=self.m * C0, step=1)
        return [(self.slot(area.pixels), to)]

    def add(self) -> None:
        """Sum the tile in front of the one whose products have been issued."""
        k, (left, right), slot = self.k, self.feeds, self.held.dequeue()
        room = min(left.buffer.elements, right.buffer.elements) // AREA
        depth = min(self.m, self.column.elements // AREA, room)
        together = max(1, room // depth) if depth == self.m else 1
        for first, count in tiles.segments(k, "blocks", self.n, min(together, self.n)):
            for at, some in tiles.segments(k, "sum", self.m, depth):
                start, sizes = (first * self.m + at) * AREA, (count * some, C0, C0)
                turned = slot.region(start, sizes, (AREA, 1, C0))
                for queue in self.feeds:
                    k.load2d(queue.alloc().region(0, sizes), turned)
                    queue.enqueue()
                a, b = left.dequeue(), right.dequeue()
                with tiles.repeat(k, "block", count) as block:
                    start, row = block * (some * AREA), (1, some, C0, C0)
                    lefts = self.column.region(0, row), a.region(start, row)
                    for number, own in enumerate(lefts):
                        place = (first + block) * PAIR + number * AREA
                        sums = self.sums.region(place, (1, 1, C0, C0))
                        k.mmad(sums, own, b.region(start, (some, 1, C0, C0)), accumulate=1)
                left.free()
                right.free()
        self.held.free()

    def end(self, first: isa.Affine) -> None:
        """Sum the last tile; store the products of blocks from `first` on."""
        k, size = self.k, self.n * PAIR
        self.add()
        k.barrier()
        to, sums = self.partial.region(self.place + first * PAIR, size), self.sums.region(0, size)
        if not k.chip.combined:
            k.fixpipe(to, sums)
            return
        k.copy(self.out.region(0, size), sums)
        k.barrier()
        k.copy(to, self.out.region(0, size))


def _diagonals(job: ChannelSums, slots: int, own: isa.Share, chip: Chip) -> isa.Program:
    """Add the products of a core's channels, and compute mean and variance of the sums in them."""
    k, blocks, count = isa.KernelBuilder("channel_totals", chip), own[0] // C0, own[0]
    start, size = k.param("channel", own[2]) * own[1], blocks * PAIR
    partial = k.tensor("partial", "fp32", slots * job.blocks * PAIR)
    ones = k.tensor("ones", "fp16", 3 * AREA)
    loaded = k.queue("products_ub", "UB", "fp32", slots * size, src="MTE2", dst="V", depth=1)
    narrow, whole = loaded.join("diagonal", "fp16", AREA), loaded.buffer
    wide = k.buffer("diagonal_wide", "UB", "fp32", AREA)
    inputs = [k.buffer(x, "UB", "fp32", count) for x in ("sums", "products")]
    loaded.alloc()
    source = partial.region(start * (PAIR // C0), (slots, size), (job.blocks * PAIR, 1))
    k.copy(whole.region(0, (slots, size)), source)
    k.copy(narrow.region(0, AREA), ones.region(AREA, AREA))
    loaded.enqueue()
    loaded.dequeue()
    fold_rows(k, whole, slots, size)
    k.each("vconv", AREA, (wide, 0), (narrow, 0))
    with tiles.repeat(k, "block", blocks) as block:
        sums, squares = ((whole, block * PAIR + at) for at in (0, AREA))
        k.each("vmul", AREA, squares, squares, (wide, 0))
        fold_rows(k, squares[0], C0, C0, squares[1])
        for tile, one in zip(inputs, (sums, squares), strict=True):
            k.each("vcopy", C0, (tile, block * C0), one)
    loaded.free()
    _store_results(k, job, inputs, start, count)
    return k.finish()
