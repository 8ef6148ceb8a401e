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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from ascend_lab.chip import Chip
from ascend_lab.isa import (
    FRACTAL, Affine, Buffer, KernelBuilder, Launch, Program, Queue, Region, Tile, up,
)  # fmt: skip
from ascend_lab.kernels import epilogue_emit
from ascend_lab.kernels.channel_sums import LANES, SMALL, TILES, fold_rows
from ascend_lab.kernels.epilogue import Epilogue, pattern
from ascend_lab.kernels.epilogue_plan import plan_of
from ascend_lab.kernels.planes import Own, dealt, plane_launch
from ascend_lab.kernels.tiles import Span, chunks, repeat, segments, sum_queue

AREA, MOST = FRACTAL * FRACTAL, 28
"""Elements of a fractal, and fractals of a plane that the cube multiplies at once."""
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
    sizes = _divided(job, chip)
    parts = len(sizes[0]) * len(sizes[2])
    first = plane_launch("squeeze", sizes, lambda own: _squeeze(job, own, sizes, chip))
    ends = dealt((job.blocks, job.n, 1), cores)
    last = plane_launch("excite", ends, lambda own: _excite(job, own, parts, chip))
    return first, last


def _divided(job: Excitation, chip: Chip) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and rows over cores: least vector work, parts added counted.

    Of 64 values in fp32 a conversion, a product or a sum takes 2 cycles each; pixels that the cube
    adds up are loaded, about three a cycle.
    """
    cores, pace = chip.cores_of("vector"), 3 if chip.combined else 1

    def cycles(grid: tuple[int, int, int]) -> int:
        blocks, images, rows = (up(t, g) for t, g in zip(totals, grid, strict=True))
        pixels, matrix = rows * job.w * blocks, job.hidden * blocks
        turns = job.hidden * (4 * up(blocks, LANES // FRACTAL) + grid[0] * grid[2] // 32)
        return images * (pixels // pace + turns) + matrix // 2

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


Place = tuple[Tile | Buffer, Affine | int]
"""Where something begins."""


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

    def times(self, vector: Buffer, to: Place) -> None:
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

    def _eighths(self, to: Place, source: Buffer, count: int) -> None:
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
    way = _ByCube if chip.combined and pixels >= FRACTAL else _ByVector
    planes = way(k, x, (count, pixels, plane))
    matrix.load(squeeze.region(core * (pitch * FRACTAL), (job.hidden, lanes), (width, 1)))
    with planes.ready(), repeat(k, "image", images) as turn:
        image, one = batch + turn, (planes.sums, 0)
        planes.add((image * job.blocks + core * pitch) * plane + low)
        k.each("vmuls", lanes, one, one, scalar=1.0 / (job.h * job.w))
        matrix.times(planes.sums, (out.alloc(), 0))
        out.enqueue()
        place = ((core * bands + own.band) * job.n + image) * job.hidden
        k.copy(parts.region(place, job.hidden), out.dequeue().region(0, job.hidden))
        out.free()
    return k.finish()


class _ByVector:
    """Sums over `pixels` of `count` planes, some pixels of all planes at once."""

    def __init__(self, k: KernelBuilder, x: Buffer, sizes: tuple[int, int, int]) -> None:
        """Allocate; `sizes` are (count, pixels, elements from plane to plane)."""
        self.k, self.x, (self.count, self.pixels, self.plane) = k, x, sizes
        lanes = self.count * FRACTAL
        room = (k.chip.buffers["UB"] - k.used_bytes("UB")) // (PIXEL_BYTES * lanes)
        some = max(1, min(self.pixels, room, max(up(self.pixels, TILES), SMALL // lanes)))
        self.some, self.lanes = some, lanes
        self.loaded = k.queue("x_ub", "UB", "fp16", some * lanes, src="MTE2", dst="V")
        self.sums = k.buffer("sums", "UB", "fp32", some * lanes)
        size = some * lanes if some < self.pixels else LANES
        self.wide = k.buffer("wide", "UB", "fp32", size)

    def ready(self) -> AbstractContextManager[None]:
        """Have nothing to prepare."""
        return nullcontext()

    def add(self, start: Affine) -> None:
        """Sum planes from `start` on."""
        k, one = self.k, (self.sums, 0)
        self._widen(start, self.some, self.sums)
        for at, more in segments(k, "pixels", self.pixels - self.some, self.some):
            self._widen(start + (at + self.some) * FRACTAL, more, self.wide)
            k.each("vadd", more * self.lanes, one, one, (self.wide, 0))
        fold_rows(k, self.sums, self.some, self.lanes)

    def _widen(self, start: Affine, pixels: int, to: Buffer) -> None:
        shape, own = (self.count, pixels, FRACTAL), (FRACTAL, self.lanes, 1)
        source = self.x.region(start, shape, (self.plane, FRACTAL, 1))
        self.k.copy(self.loaded.alloc().region(0, shape, own), source)
        self.loaded.enqueue()
        self.k.each("vconv", pixels * self.lanes, (to, 0), (self.loaded.dequeue(), 0))
        self.loaded.free()


class _ByCube:
    """The same on the cube, a plane after the other: ones (1, pixels) @ x (pixels, 16).

    The last fractal of a plane ends with it. Of its pixels those count that no other one has.
    """

    def __init__(self, k: KernelBuilder, x: Buffer, sizes: tuple[int, int, int]) -> None:
        """Allocate; `sizes` are (count, pixels, elements from plane to plane)."""
        self.k, self.x, (self.count, self.pixels, self.plane) = k, x, sizes
        self.whole = up(self.pixels, FRACTAL) - 1
        self.depth = max(1, min(self.whole, MOST))
        size, plane = self.depth * AREA, self.pixels * FRACTAL
        self.some = self.count if self.count * plane <= SMALL * TILES else up(self.count, TILES)
        self.made = k.queue("ones_ub", "UB", "fp16", 2 * AREA, src="V", dst="MTE3", depth=1)
        self.near = k.queue("ones_l1", "L1", "fp16", 2 * AREA, src="MTE3", dst="MTE1", depth=1)
        self.left = k.queue("ones_l0", "L0A", "fp16", size + AREA, src="MTE1", dst="M", depth=1)
        self.loaded = k.queue("x_l1", "L1", "fp16", self.some * plane, src="MTE2", dst="MTE1")
        self.right = k.queue("x_l0", "L0B", "fp16", size, src="MTE1", dst="M")
        self.found = sum_queue(k, "plane_sums", "fp32", 1, self.count)
        self.sums = k.buffer("sums", "UB", "fp32", self.count * FRACTAL)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Hold ones in L0A, and a fractal of those for the last pixels."""
        k, slot, sizes = self.k, self.made.alloc(), (self.depth, AREA)
        k.each("vdup", 2 * AREA, (slot, 0), scalar=1.0)
        if missing := -self.pixels % FRACTAL:
            lanes = k.chip.vector_bytes_per_repeat // 2
            mask = sum((1 << i) for i in range(lanes) if i % FRACTAL < missing)
            k.vector("vdup", slot.region(AREA, (AREA // lanes, lanes)), scalar=0.0, mask=mask)
        self.made.enqueue()
        k.copy(self.near.alloc().region(0, 2 * AREA), self.made.dequeue().region(0, 2 * AREA))
        self.made.free()
        self.near.enqueue()
        near, left = self.near.dequeue(), self.left.alloc()
        k.load2d(left.region(0, sizes), near.region(0, sizes, (0, 1)))
        k.load2d(left.region(self.depth * AREA, (1, AREA)), near.region(AREA, (1, AREA)))
        self.near.free()
        self.left.enqueue()
        self.ones = self.left.dequeue()
        yield
        self.left.free()

    def add(self, start: Affine) -> None:
        """Sum planes from `start` on."""
        k, found, line = self.k, self.found.alloc(), self.pixels * FRACTAL
        for first, count in segments(k, "planes", self.count, self.some):
            sizes = count, line
            source = self.x.region(start + first * self.plane, sizes, (self.plane, 1))
            k.copy(self.loaded.alloc().region(0, sizes), source)
            self.loaded.enqueue()
            x = self.loaded.dequeue()
            with repeat(k, "plane", count) as plane:
                to, own = (found, (first + plane) * AREA), plane * line
                for at, depth in segments(k, "fractals", self.whole, self.depth):
                    self._product(to, x.region(own + at * AREA, depth * AREA), Affine(), at)
                last = x.region(own + line - AREA, AREA)
                self._product(to, last, Affine(self.depth * AREA), Affine(self.whole))
            self.loaded.free()
        self.found.enqueue()
        rows = self.count, FRACTAL
        k.copy(self.sums.region(0, rows), self.found.dequeue().region(0, rows, (AREA, 1)))
        self.found.free()

    def _product(self, to: Place, x: Region, ones: Affine, after: Affine) -> None:
        """Add fractals times ones, `after` others."""
        k, side, (memory, place) = self.k, (FRACTAL, FRACTAL), to
        sizes = x.elements // AREA, *side
        turned = replace(x, sizes=sizes, strides=(AREA, 1, FRACTAL))
        k.load2d(self.right.alloc().region(0, sizes), turned)
        self.right.enqueue()
        a, b = self.ones.region(ones, (1, *sizes)), self.right.dequeue()
        c = memory.region(place, (1, 1, *side))
        k.mmad(c, a, b.region(0, (sizes[0], 1, *side)), accumulate=after)
        self.right.free()


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

    def of(self, sums: Place) -> Buffer:
        """Return where its values are, of sums in fp32."""
        size = self.blocks * FRACTAL
        self.k.each("vconv", size, (self.tiles[self.plan.start], 0), sums)
        rates = {tensor.name: slot for tensor, slot in self.operands}
        piece = epilogue_emit.Piece(self.tiles, {}, rates, Affine(), self.blocks, FRACTAL)
        epilogue_emit.write_steps(self.k, self.plan, piece)
        return self.tiles[0]


def _excite(job: Excitation, own: Own, count: int, chip: Chip) -> Program:
    """Return the program of the cores that own equally much, which add up `count` parts."""
    k, hidden, (blocks, pitch, cores) = KernelBuilder("excite", chip), job.hidden, own.channels
    (images, apart, batches), lanes, every = own.images, blocks * FRACTAL, hidden // FRACTAL
    excite = k.tensor("excite", "fp16", job.blocks * FRACTAL * hidden)
    parts = k.tensor("parts", "fp32", count * job.n * hidden)
    first, batch = k.param("channel", cores) * pitch, k.param("batch", batches) * apart
    sizes = (images, count, hidden)
    loaded = k.queue("parts_ub", "UB", "fp32", math.prod(sizes), src="MTE2", dst="V", depth=1)
    matrix = _Matrix(k, "excite", lanes, hidden)
    one = _Function(k, "f1", job.after[0], (every, every), matrix.narrow)
    two = _Function(k, "f2", job.after[1], (blocks, job.blocks), matrix.narrow)
    wide, sums = k.buffer("hidden", "UB", "fp32", hidden), k.buffer("sums", "UB", "fp32", lanes)
    one.load(Affine())
    two.load(first)
    matrix.load(excite.region(first * (FRACTAL * hidden), lanes * hidden))
    source = parts.region(batch * hidden, sizes, (hidden, job.n * hidden, 1))
    k.copy(loaded.alloc().region(0, sizes), source)
    loaded.enqueue()
    way_out = _WayOut(k, job, (first, blocks))
    tile = loaded.dequeue()
    with way_out.weights(images == 1), repeat(k, "image", images) as image:
        at = image * (count * hidden)
        fold_rows(k, tile, count, hidden, at)
        k.each("vconv", hidden, (wide, 0), (one.of((tile, at)), 0))
        matrix.times(wide, (sums, 0))
        way_out.leave(two.of((sums, 0)), batch + image)
    loaded.free()
    return k.finish()


class _WayOut:
    """Gates of a core's channel blocks (first, count) on their way out, or weights that they scale.

    A block's weights leave while the next one's are scaled.
    """

    def __init__(self, k: KernelBuilder, job: Excitation, own: Span) -> None:
        """Allocate, and load the weights."""
        self.k, self.job, self.own = k, job, own
        first, count = own
        self.line = (job.rows or count) * FRACTAL
        self.y = k.tensor("y", "fp16", job.n * job.blocks * (job.rows or 1) * FRACTAL)
        self.out = k.queue("y_ub", "UB", "fp16", self.line, src="V", dst="MTE3")
        self.tile: Tile | None = None
        if job.rows:
            weight = k.tensor("weight", "fp16", job.blocks * self.line)
            size = count * self.line
            self.loaded = k.queue("w_ub", "UB", "fp16", size, src="MTE2", dst="V", depth=1)
            k.copy(self.loaded.alloc().region(0, size), weight.region(first * self.line, size))
            self.loaded.enqueue()

    @contextmanager
    def weights(self, late: bool) -> Iterator[None]:
        """Hold the weights, which are waited for `late`, when gates are there, or at once."""
        if self.job.rows and not late:
            self.tile = self.loaded.dequeue()
        yield
        if self.job.rows:
            self.loaded.free()

    def leave(self, gates: Buffer, image: Affine) -> None:
        """Store the gates of an image, or all weights times the gates."""
        k, (first, count) = self.k, self.own
        if not self.job.rows:
            k.each("vcopy", self.line, (self.out.alloc(), 0), (gates, 0))
            self._store((image * self.job.blocks + first) * FRACTAL)
            return
        self.tile = self.tile or self.loaded.dequeue()
        with repeat(k, "block", count) as block:
            slot = self.out.alloc()
            for at, shape in k.runs(self.line, k.chip.vector_bytes_per_repeat // 2):
                sizes = shape[0], shape[1] // FRACTAL, FRACTAL
                gate = gates.region(block * FRACTAL, sizes, (0, 0, 1))
                weights = self.tile.region(block * self.line + at, sizes)
                k.vector("vmul", slot.region(at, sizes), weights, gate)
            self._store((image * self.job.blocks + first + block) * self.line)

    def _store(self, place: Affine) -> None:
        self.out.enqueue()
        tile = self.out.dequeue()
        self.k.copy(self.y.region(place, self.line), tile.region(0, self.line))
        self.out.free()
