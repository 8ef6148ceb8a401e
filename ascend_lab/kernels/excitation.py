"""Squeeze and excite of few images: from pixels to a gate per channel, by vector units, in fp32.

    hidden (images, mid) = f1(means (images, c) @ squeeze (c, mid))
    gates (images, c)    = f2(hidden @ excite (mid, c))

Means and the first product are one sum, over pixels and channels, of which a core adds up a part:
it needs the pixels of some rows of some channels, and these channels' weights, but no other core.

    part (mid) = sum over own channels (sum over own pixels x / pixels) squeeze

In a second phase each core adds all parts, which are few numbers, and multiplies them by what makes
its own channels of them. Where nothing but a pointwise convolution reads the scaled images, gates
scale its weights, which are fewer than pixels, there and then (`squeeze`).

A matrix by a vector is a product lane by lane, 64 columns a repeat, and a sum of each row in two
steps, 8 lanes and 8 of these:

    (rows, 64) * (1, 64) -> (rows, 64) -> (rows, 8) -> (rows)"""

import math
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import (
    FRACTAL, Affine, Buffer, KernelBuilder, Launch, Program, Queue, Region, Tile, up,
)  # fmt: skip
from ascend_lab.kernels import epilogue_emit
from ascend_lab.kernels.channel_sums import LANES, SMALL, TILES, fold_rows
from ascend_lab.kernels.epilogue import Epilogue, pattern
from ascend_lab.kernels.epilogue_plan import plan_of
from ascend_lab.kernels.planes import Own, dealt, plane_launch
from ascend_lab.kernels.squeeze import SCALED
from ascend_lab.kernels.tiles import Span, chunks, repeat, segments

EIGHT = 8
"""fp32 lanes of a block of 32 bytes, which `vcgadd` sums."""
PIXEL_BYTES = 2 * 2 + 4 + 4
"""Of UB for a pixel of a channel: two slots, and two values in fp32."""


@dataclass(frozen=True, slots=True)
class Excitation:
    """Images (n, c, h, w) in fp16, `mid` numbers between; `after`: what follows each product.

    With `rows` gates scale weights, of which each channel block has so many rows of 16.
    """

    n: int
    c: int
    h: int
    w: int
    mid: int
    after: tuple[Epilogue, Epilogue]
    rows: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of 16 channels."""
        return up(self.c, FRACTAL)

    @property
    def hidden(self) -> int:
        """Numbers between, in whole blocks."""
        return up(self.mid, FRACTAL) * FRACTAL


def excitation_launches(job: Excitation, chip: Chip) -> tuple[Launch, Launch]:
    """Return both phases; raise `CapacityError` where UB is small.

    Tensors are x in NC1HWC0, squeeze (hidden, channels), excite (channels, hidden) and y, a gate
    per image and channel, the epilogues' operands and `parts`. With `rows` y are those weights of
    each image, and `weight` those before.
    """
    cores = chip.cores_of("vector")
    sizes = _divided(job, cores)
    parts = len(sizes[0]) * len(sizes[2])
    first = plane_launch("squeeze", sizes, lambda own: _squeeze(job, own, sizes, chip))
    ends = dealt((job.blocks, job.n, 1), cores)
    last = plane_launch("excite", ends, lambda own: _excite(job, own, parts, chip))
    return first, last


def _divided(job: Excitation, cores: int) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and rows over cores: least vector work, parts added counted.

    Of 64 values in fp32 a conversion, a product or a sum takes 2 cycles each.
    """

    def cycles(grid: tuple[int, int, int]) -> int:
        blocks, images, rows = (up(t, g) for t, g in zip(totals, grid, strict=True))
        pixels, matrix = rows * job.w * blocks, job.hidden * blocks
        turns = job.hidden * (4 * up(blocks, LANES // FRACTAL) + grid[0] * grid[2] // 32)
        return images * (pixels + turns) + matrix // 2

    totals = job.blocks, job.n, job.h
    grids = [
        (c, n, rows)
        for c in range(1, min(job.blocks, cores) + 1)
        for n in range(1, min(job.n, cores // c) + 1)
        for rows in range(1, min(job.h, cores // (c * n)) + 1)
    ]
    channels, images, bands = (
        chunks(t, 1, g) for t, g in zip(totals, min(grids, key=cycles), strict=True)
    )
    return channels, images, bands


class _Matrix:
    """A matrix of `rows` in UB in fp32, and what it makes of vectors of its `width`."""

    def __init__(self, k: KernelBuilder, name: str, rows: int, width: int) -> None:
        """Allocate; `name` is that of its tensor."""
        self.k, self.rows, self.width, size = k, rows, width, rows * width
        self.narrow = k.queue(f"{name}_ub", "UB", "fp16", size, src="MTE2", dst="V", depth=1)
        self.wide = k.buffer(f"{name}_wide", "UB", "fp32", size)
        self.sums = k.buffer(f"{name}_sums", "UB", "fp32", rows * LANES)
        self.products = k.buffer(f"{name}_products", "UB", "fp32", rows * LANES)

    def load(self, source: Region) -> None:
        """Bring it to UB; columns that it lacks of 64 are 0. What came beside it stays, too."""
        k = self.k
        k.copy(self.narrow.alloc().region(0, source.sizes), source)
        self.narrow.enqueue()
        if self.width < LANES:
            k.each("vdup", self.rows * LANES, (self.sums, 0), scalar=0.0)
        k.each("vconv", self.rows * self.width, (self.wide, 0), (self.narrow.dequeue(), 0))
        self.narrow.free()

    def times(self, vector: Buffer, to: tuple[Tile | Buffer, int]) -> None:
        """Write its product with a vector."""
        k = self.k
        for start in range(0, self.width, LANES):
            lanes = min(LANES, self.width - start)
            found = self.products if start else self.sums
            for at, count in segments(k, "row", self.rows, k.chip.max_repeat):
                place, sizes = (at * LANES, (count, lanes), (LANES, 1)), (count, lanes)
                own = self.wide.region(at * self.width + start, sizes, (self.width, 1))
                k.vector("vmul", found.region(*place), own, vector.region(start, sizes, (0, 1)))
                if start:
                    sums = self.sums.region(*place)
                    k.vector("vadd", sums, sums, found.region(*place))
        self._eighths((self.products, 0), self.sums, self.rows * EIGHT)
        self._eighths(to, self.products, self.rows)

    def _eighths(self, to: tuple[Tile | Buffer, int], source: Buffer, count: int) -> None:
        """Write `count` sums of 8 neighbours each."""
        memory, start = to
        for at, (repeats, lanes) in self.k.runs(count, EIGHT):
            values = source.region(at * EIGHT, (repeats, lanes * EIGHT))
            self.k.vector("vcgadd", memory.region(start + at, (repeats, lanes)), values)


# -- first phase: sums of pixels, and what they add to the hidden numbers -------------------------
def _squeeze(job: Excitation, own: Own, sizes: tuple[list[int], ...], chip: Chip) -> Program:
    """Return the program of the cores that own equally much."""
    k, row, bands = KernelBuilder("squeeze", chip), job.w * FRACTAL, len(sizes[2])
    (count, pitch, cores), (images, apart, batches) = own.channels, own.images
    lanes, width, plane, low = count * FRACTAL, job.blocks * FRACTAL, job.h * row, own.rows[0] * row
    x = k.tensor("x", "fp16", job.n * job.blocks * plane)
    squeeze = k.tensor("squeeze", "fp16", job.hidden * width)
    parts = k.tensor("parts", "fp32", len(sizes[0]) * bands * job.n * job.hidden)
    core, batch = k.param("channel", cores), k.param("batch", batches) * apart
    matrix = _Matrix(k, "squeeze", job.hidden, lanes)
    out = k.queue("parts_ub", "UB", "fp32", job.hidden, src="V", dst="MTE3")
    pixels = (own.rows[1] - own.rows[0]) * job.w
    room = (chip.buffers["UB"] - k.used_bytes("UB")) // (PIXEL_BYTES * lanes)
    some = max(1, min(pixels, room, max(up(pixels, TILES), SMALL // lanes)))
    loaded = k.queue("x_ub", "UB", "fp16", some * lanes, src="MTE2", dst="V")
    sums = k.buffer("sums", "UB", "fp32", some * lanes)
    wide = k.buffer("wide", "UB", "fp32", some * lanes if some < pixels else LANES)
    matrix.load(squeeze.region(core * (pitch * FRACTAL), (job.hidden, lanes), (width, 1)))

    def widen(image: Affine, at: Affine, pixels: int, to: Buffer) -> None:
        start = (image * job.blocks + core * pitch) * plane + low + at * FRACTAL
        shape, own = (count, pixels, FRACTAL), (FRACTAL, lanes, 1)
        k.copy(loaded.alloc().region(0, shape, own), x.region(start, shape, (plane, FRACTAL, 1)))
        loaded.enqueue()
        k.each("vconv", pixels * lanes, (to, 0), (loaded.dequeue(), 0))
        loaded.free()

    with repeat(k, "image", images) as turn:
        image, one = batch + turn, (sums, 0)
        widen(image, Affine(), some, sums)
        for at, more in segments(k, "pixels", pixels - some, some):
            widen(image, at + some, more, wide)
            k.each("vadd", more * lanes, one, one, (wide, 0))
        fold_rows(k, sums, some, lanes)
        k.each("vmuls", lanes, one, one, scalar=1.0 / (job.h * job.w))
        matrix.times(sums, (out.alloc(), 0))
        out.enqueue()
        place = ((core * bands + own.band) * job.n + image) * job.hidden
        k.copy(parts.region(place, job.hidden), out.dequeue().region(0, job.hidden))
        out.free()
    return k.finish()


# -- second phase: gates ---------------------------------------------------------------------------
class _Function:
    """What follows a product, its numbers per channel beside `stay`, its values in tiles of UB."""

    def __init__(
        self, k: KernelBuilder, name: str, epilogue: Epilogue, own: tuple[int, int], stay: Queue
    ) -> None:
        """Allocate; `own` are channel blocks of a core, and of all."""
        blocks, every = own
        self.k, self.blocks, self.plan = k, blocks, plan_of(epilogue, "fp16")
        self.operands = [
            (
                k.tensor(o.name, o.dtype, every * FRACTAL),
                Tile(stay.join(f"{o.name}_ub", o.dtype, blocks * pattern(o.dtype)), Affine()),
            )
            for o in epilogue.operands
        ]
        self.tiles = [
            k.buffer(f"{name}.{i}", "UB", dtype, blocks * FRACTAL)
            for i, dtype in enumerate(self.plan.tiles)
        ]

    def load(self, first: Affine) -> None:
        """Bring the numbers per channel of blocks from `first` on to UB."""
        for tensor, slot in self.operands:
            unit = pattern(tensor.dtype)
            epilogue_emit.load_channels(self.k, slot, tensor, (first, self.blocks), unit)

    def of(self, sums: Buffer) -> Buffer:
        """Return where its values are, of sums in fp32."""
        self.k.each("vconv", sums.elements, (self.tiles[self.plan.start], 0), (sums, 0))
        rates = {tensor.name: slot for tensor, slot in self.operands}
        piece = epilogue_emit.Piece(self.tiles, {}, rates, Affine(), self.blocks, FRACTAL)
        epilogue_emit.write_steps(self.k, self.plan, piece)
        return self.tiles[0]


def _excite(job: Excitation, own: Own, count: int, chip: Chip) -> Program:
    """Return the program of the cores that own equally much, which add up `count` parts."""
    k, hidden, (blocks, pitch, cores) = KernelBuilder("excite", chip), job.hidden, own.channels
    (images, apart, batches), lanes, line = own.images, blocks * FRACTAL, (job.rows or 1) * FRACTAL
    excite = k.tensor("excite", "fp16", job.blocks * FRACTAL * hidden)
    parts = k.tensor("parts", "fp32", count * job.n * hidden)
    y = k.tensor("y", "fp16", job.n * job.blocks * line)
    first, batch = k.param("channel", cores) * pitch, k.param("batch", batches) * apart
    sizes = (images, count, hidden)
    loaded = k.queue("parts_ub", "UB", "fp32", math.prod(sizes), src="MTE2", dst="V", depth=1)
    matrix = _Matrix(k, "excite", lanes, hidden)
    every = hidden // FRACTAL
    one = _Function(k, "f1", job.after[0], (every, every), matrix.narrow)
    two = _Function(k, "f2", job.after[1], (blocks, job.blocks), matrix.narrow)
    wide, sums = k.buffer("hidden", "UB", "fp32", hidden), k.buffer("sums", "UB", "fp32", lanes)
    out = k.queue("y_ub", "UB", "fp16", blocks * line, src="V", dst="MTE3")
    one.load(Affine())
    two.load(first)
    matrix.load(excite.region(first * (FRACTAL * hidden), lanes * hidden))
    source = parts.region(batch * hidden, sizes, (hidden, job.n * hidden, 1))
    k.copy(loaded.alloc().region(0, sizes), source)
    loaded.enqueue()
    rates = _Rates(k, job, (first, blocks)) if job.rows else None
    if rates and images > 1:
        rates.wait()
    tile = loaded.dequeue()
    with repeat(k, "image", images) as image:
        at = image * (count * hidden)
        fold_rows(k, tile, count, hidden, at)
        k.each("vcopy", hidden, (wide, 0), (tile, at))
        k.each("vconv", hidden, (wide, 0), (one.of(wide), 0))
        matrix.times(wide, (sums, 0))
        gates, slot = two.of(sums), out.alloc()
        if rates:
            rates.scale(slot, gates)
        else:
            k.each("vcopy", lanes, (slot, 0), (gates, 0))
        out.enqueue()
        place = ((batch + image) * job.blocks + first) * line
        k.copy(y.region(place, blocks * line), out.dequeue().region(0, blocks * line))
        out.free()
    loaded.free()
    if rates:
        rates.loaded.free()
    return k.finish()


class _Rates:
    """Weights of a core's channel blocks (first, count), which gates scale."""

    def __init__(self, k: KernelBuilder, job: Excitation, own: Span) -> None:
        """Allocate and load."""
        self.k, self.run, (first, self.count) = k, job.rows * FRACTAL, own
        weight = k.tensor("weight", "fp16", job.blocks * self.run)
        size = self.count * self.run
        self.loaded = k.queue("w_ub", "UB", "fp16", size, src="MTE2", dst="V", depth=1)
        k.copy(self.loaded.alloc().region(0, size), weight.region(first * self.run, size))
        self.loaded.enqueue()
        self.tile: Tile | None = None

    def wait(self) -> Tile:
        """Return the weights, which have come."""
        self.tile = self.tile or self.loaded.dequeue()
        return self.tile

    def scale(self, to: Tile, gates: Buffer) -> None:
        """Write the weights times the gates."""
        named, rates = {"x": self.wait()}, {"scale": Tile(gates, Affine())}
        piece = epilogue_emit.Piece([to], named, rates, Affine(), self.count, self.run)
        epilogue_emit.write_steps(self.k, SCALED, piece)
