"""Squeeze and excite of few images: from pixels to a gate per channel, by vector units, in fp32.

    hidden (images, mid) = f1(means (images, c) @ squeeze (c, mid) + bias1)
    gates (images, c)    = f2(hidden @ excite (mid, c) + bias2)

A core adds up its part of means and first product at once, some rows of some channels. In a second
phase each adds all parts, few numbers, and computes the gates of its own channels. Where nothing
but a pointwise convolution reads what is scaled (`squeeze`), gates scale its weights at once.

A matrix by a vector is a product lane by lane, 64 columns a repeat, and sums of 8 lanes, twice."""

from dataclasses import dataclass, replace
from itertools import product

from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Region, Tile, up
from ascend_lab.operators.kernels import epilogue, epilogue_emit, epilogue_plan
from ascend_lab.operators.kernels.channel_sums import LANES, SMALL, TILES, fold_rows
from ascend_lab.operators.kernels.planes import Own, dealt, plane_launch
from ascend_lab.operators.kernels.tiles import chunks, repeat, segments, sum_queue

AREA = FRACTAL * FRACTAL
MOST = 28
EIGHT = 8
PIXEL_BYTES = 12
"""Elements; fractals the cube adds up at once; lanes that `vcgadd` does; two slots, two sums."""
Place = tuple[Tile | Buffer, Affine | int]
"""Where something begins."""


@dataclass(frozen=True, slots=True)
class Excitation:
    """Images (n, c, h, w) in fp16, `mid` numbers between; `after`: f1 and f2, without operands.

    With `rows` gates scale weights, of which each channel block has so many rows of 16.
    """

    n: int
    c: int
    h: int
    w: int
    mid: int
    after: tuple[epilogue.Epilogue, epilogue.Epilogue]
    rows: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of 16 channels."""
        return up(self.c, FRACTAL)

    @property
    def hidden(self) -> int:
        """Numbers between, in whole blocks."""
        return up(self.mid, FRACTAL) * FRACTAL


def excitation_launches(job: Excitation, chip: Chip) -> tuple[isa.Launch, isa.Launch]:
    """Return both phases; raise `CapacityError` where UB is small.

    Tensors: x in NC1HWC0, squeeze (hidden, channels), excite (channels, hidden), fp32 bias1, bias2
    and `parts`; y, a gate per image and channel, or with `rows` these times `weight`.
    """
    sizes = _divided(job, chip)
    parts = len(sizes[0]) * len(sizes[2])
    first = plane_launch("squeeze", sizes, lambda own: _squeeze(job, own, sizes, chip))
    ends = dealt((job.blocks, job.n, 1), chip.cores_of("vector"))
    return first, plane_launch("excite", ends, lambda own: _Gates(job, own, parts, chip).program())


def _divided(job: Excitation, chip: Chip) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and rows over cores; cubes add up about 3 pixels a cycle."""
    cores = chip.cores_of("vector")
    pace = 3 if chip.combined else 1
    totals = (job.blocks, job.n)

    def cycles(grid: tuple[int, int, int]) -> int:
        blocks, images, rows = (up(t, g) for t, g in zip((*totals, job.h), grid, strict=True))
        turns = job.hidden * (4 * up(blocks, LANES // FRACTAL) + grid[0] * grid[2] // 32)
        return images * (rows * job.w * blocks // pace + turns) + job.hidden * blocks // 2

    pairs = product(*(range(1, min(total, cores) + 1) for total in totals))
    grids = ((c, n, r) for c, n in pairs for r in range(1, min(job.h, cores // (c * n)) + 1))
    c, n, rows = min(grids, key=cycles)
    return chunks(job.blocks, 1, c), chunks(job.n, 1, n), chunks(job.h, 1, rows)


class _Matrix:
    """A matrix of `rows` in UB in fp32, and what it makes of vectors of its `width`."""

    def __init__(self, k: KernelBuilder, name: str, rows: int, width: int) -> None:
        """Allocate; `name` is that of its tensor."""
        self.k = k
        self.rows = rows
        self.width = width
        size = rows * width
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
                place = (at * LANES, (count, lanes), (LANES, 1))
                sizes = (count, lanes)
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
def _squeeze(job: Excitation, own: Own, sizes: tuple[list[int], ...], chip: Chip) -> isa.Program:
    """Return the program of the cores that own equally much."""
    k = KernelBuilder("squeeze", chip)
    row = job.w * FRACTAL
    bands = len(sizes[2])
    (count, pitch, cores) = own.channels
    (images, apart, batches) = own.images
    lanes = count * FRACTAL
    width = job.blocks * FRACTAL
    plane = job.h * row
    low = own.rows[0] * row
    x = k.tensor("x", "fp16", job.n * job.blocks * plane)
    squeeze = k.tensor("squeeze", "fp16", job.hidden * width)
    parts = k.tensor("parts", "fp32", len(sizes[0]) * bands * job.n * job.hidden)
    core = k.param("channel", cores)
    batch = k.param("batch", batches) * apart
    matrix = _Matrix(k, "squeeze", job.hidden, lanes)
    out = k.queue("parts_ub", "UB", "fp32", job.hidden, src="V", dst="MTE3")
    pixels = (own.rows[1] - own.rows[0]) * job.w
    way = _ByCube if chip.combined and pixels >= FRACTAL else _ByVector
    planes = way(k, x, (count, pixels, plane))
    matrix.load(squeeze.region(core * (pitch * FRACTAL), (job.hidden, lanes), (width, 1)))
    with repeat(k, "image", images) as turn:
        image = batch + turn
        one = (planes.sums, 0)
        planes.add((image * job.blocks + core * pitch) * plane + low)
        k.each("vmuls", lanes, one, one, scalar=1.0 / (job.h * job.w))
        matrix.times(planes.sums, (out.alloc(), 0))
        out.enqueue()
        place = ((core * bands + own.band) * job.n + image) * job.hidden
        k.copy(parts.region(place, job.hidden), out.dequeue().region())
        out.free()
    return k.finish()


class _ByVector:
    """Sums over `pixels` of `count` planes, some pixels of all planes at once."""

    def __init__(self, k: KernelBuilder, x: Buffer, sizes: tuple[int, int, int]) -> None:
        """Allocate; `sizes` are (count, pixels, elements from plane to plane)."""
        self.k = k
        self.x = x
        (self.count, self.pixels, self.plane) = sizes
        lanes = self.lanes = self.count * FRACTAL
        room = (k.chip.buffers["UB"] - k.used_bytes("UB")) // (PIXEL_BYTES * lanes)
        some = max(1, min(self.pixels, room, max(up(self.pixels, TILES), SMALL // lanes)))
        self.some = some
        size = some * lanes
        self.loaded = k.queue("x_ub", "UB", "fp16", size, src="MTE2", dst="V")
        self.sums = k.buffer("sums", "UB", "fp32", size)
        self.wide = k.buffer("wide", "UB", "fp32", size if some < self.pixels else LANES)

    def add(self, start: Affine) -> None:
        """Sum planes from `start` on."""
        k = self.k
        one = (self.sums, 0)
        self._widen(start, self.some, self.sums)
        for at, more in segments(k, "pixels", self.pixels - self.some, self.some):
            self._widen(start + (at + self.some) * FRACTAL, more, self.wide)
            k.each("vadd", more * self.lanes, one, one, (self.wide, 0))
        fold_rows(k, self.sums, self.some, self.lanes)

    def _widen(self, start: Affine, pixels: int, to: Buffer) -> None:
        shape = (self.count, pixels, FRACTAL)
        own = (FRACTAL, self.lanes, 1)
        source = self.x.region(start, shape, (self.plane, FRACTAL, 1))
        self.k.copy(self.loaded.alloc().region(0, shape, own), source)
        self.loaded.enqueue()
        self.k.each("vconv", pixels * self.lanes, (to, 0), (self.loaded.dequeue(), 0))
        self.loaded.free()


class _ByCube:
    """The same on the cube: ones (1, pixels) @ x (pixels, 16). The last fractals may overlap."""

    def __init__(self, k: KernelBuilder, x: Buffer, sizes: tuple[int, int, int]) -> None:
        """Allocate; `sizes` are (count, pixels, elements from plane to plane)."""
        self.k = k
        self.x = x
        (self.count, self.pixels, self.plane) = sizes
        self.whole = up(self.pixels, FRACTAL) - 1
        self.depth, line = max(1, min(self.whole, MOST)), self.pixels * FRACTAL
        self.some = self.count if self.count * line <= SMALL * TILES else up(self.count, TILES)
        self.loaded = k.queue("x_l1", "L1", "fp16", self.some * line, src="MTE2", dst="MTE1")
        self.right = k.queue("x_l0", "L0B", "fp16", self.depth * AREA, src="MTE1", dst="M")
        self.found = sum_queue(k, "plane_sums", "fp32", 1, self.count)
        self.sums = k.buffer("sums", "UB", "fp32", self.count * FRACTAL)
        self._make_ones()

    def _make_ones(self) -> None:
        """Bring ones to L0A to stay, and behind them those for the last pixels."""
        k = self.k
        size = (self.depth + 1) * AREA
        made = k.queue("ones_ub", "UB", "fp16", 2 * AREA, src="V", dst="MTE3", depth=1)
        near = k.queue("ones_l1", "L1", "fp16", 2 * AREA, src="MTE3", dst="MTE1", depth=1)
        left = k.queue("ones_l0", "L0A", "fp16", size, src="MTE1", dst="M", depth=1)
        slot = made.alloc()
        sizes = (self.depth, AREA)
        k.each("vdup", 2 * AREA, (slot, 0), scalar=1.0)
        if missing := -self.pixels % FRACTAL:
            lanes = k.chip.vector_bytes_per_repeat // 2
            mask = sum(1 << lane for lane in range(lanes) if lane % FRACTAL < missing)
            k.vector("vdup", slot.region(AREA, (AREA // lanes, lanes)), scalar=0.0, mask=mask)
        made.enqueue()
        k.copy(near.alloc().region(), made.dequeue().region())
        made.free()
        near.enqueue()
        one = near.dequeue()
        self.ones = left.alloc()
        k.load2d(self.ones.region(0, sizes), one.region(0, sizes, (0, 1)))
        k.load2d(self.ones.region(self.depth * AREA, (1, AREA)), one.region(AREA, (1, AREA)))
        near.free()
        left.enqueue()
        left.dequeue()
        left.free()

    def add(self, start: Affine) -> None:
        """Sum planes from `start` on."""
        k = self.k
        found = self.found.alloc()
        line = self.pixels * FRACTAL
        for first, count in segments(k, "planes", self.count, self.some):
            source = self.x.region(start + first * self.plane, (count, line), (self.plane, 1))
            k.copy(self.loaded.alloc().region(0, (count, line)), source)
            self.loaded.enqueue()
            x = self.loaded.dequeue()
            with repeat(k, "plane", count) as plane:
                to = found.region((first + plane) * AREA, (1, 1, FRACTAL, FRACTAL))
                own = plane * line
                for at, depth in segments(k, "fractals", self.whole, self.depth):
                    self._product(to, x.region(own + at * AREA, depth * AREA), 0, at)
                last = x.region(own + line - AREA, AREA)
                self._product(to, last, self.depth, Affine(self.whole))
            self.loaded.free()
        self.found.enqueue()
        rows = self.count, FRACTAL
        k.copy(self.sums.region(0, rows), self.found.dequeue().region(0, rows, (AREA, 1)))
        self.found.free()

    def _product(self, to: Region, x: Region, first: int, after: Affine) -> None:
        """Add fractals times ones from fractal `first` on, `after` others."""
        k = self.k
        side = (FRACTAL, FRACTAL)
        count = x.elements // AREA
        turned = replace(x, sizes=(count, *side), strides=(AREA, 1, FRACTAL))
        k.load2d(self.right.alloc().region(0, (count, *side)), turned)
        self.right.enqueue()
        a = self.ones.region(first * AREA, (1, count, *side))
        b = self.right.dequeue()
        k.mmad(to, a, b.region(0, (count, 1, *side)), accumulate=after)
        self.right.free()


# -- second phase: gates ---------------------------------------------------------------------------
class _Gates:
    """The program of the cores that own equally much, which add up `count` parts."""

    def __init__(self, job: Excitation, own: Own, count: int, chip: Chip) -> None:
        """Allocate everything."""
        k = KernelBuilder("excite", chip)
        hidden = job.hidden
        blocks = own.channels[0]
        self.k = k
        self.job = job
        self.own = own
        self.lanes = blocks * FRACTAL
        lanes = self.lanes
        self.line = (job.rows or blocks) * FRACTAL
        each = (job.rows or 1) * FRACTAL
        size = (count + 1) * hidden
        self.excite = k.tensor("excite", "fp16", job.blocks * FRACTAL * hidden)
        self.parts = k.tensor("parts", "fp32", count * job.n * hidden)
        self.bias1 = k.tensor("bias1", "fp32", hidden)
        self.bias2 = k.tensor("bias2", "fp32", job.blocks * FRACTAL)
        self.y = k.tensor("y", "fp16", job.n * job.blocks * each)
        self.loaded = k.queue("parts_ub", "UB", "fp32", size, src="MTE2", dst="V", depth=1)
        self.out = k.queue("y_ub", "UB", "fp16", self.line, src="V", dst="MTE3")
        self.matrix = _Matrix(k, "excite", lanes, hidden)
        self.added = Tile(self.matrix.narrow.join("bias2_ub", "fp32", lanes), Affine())
        self.wide = k.buffer("hidden", "UB", "fp32", hidden)
        self.sums = k.buffer("sums", "UB", "fp32", lanes)
        if job.rows:
            self.weight = k.tensor("weight", "fp16", job.blocks * each)
            self.rates = k.queue("w_ub", "UB", "fp16", blocks * each, src="MTE2", dst="V", depth=1)

    def program(self) -> isa.Program:
        """Add up parts, an image after the other."""
        k = self.k
        hidden = self.job.hidden
        lanes = self.lanes
        sums = (self.sums, 0)
        (_, pitch, cores) = self.own.channels
        (images, apart, batches) = self.own.images
        first = k.param("channel", cores) * pitch
        batch = k.param("batch", batches) * apart
        k.copy(self.added.region(0, lanes), self.bias2.region(first * FRACTAL, lanes))
        self.matrix.load(self.excite.region(first * (FRACTAL * hidden), lanes * hidden))
        with repeat(k, "image", images) as turn:
            tile = self._load(batch + turn, first)
            fold_rows(k, tile, self.loaded.buffer.elements // hidden, hidden)
            values = _applied(k, "f1", self.job.after[0], (tile, 0), hidden)
            k.each("vconv", hidden, (self.wide, 0), (values, 0))
            self.loaded.free()
            self.matrix.times(self.wide, sums)
            k.each("vadd", lanes, sums, sums, (self.added, 0))
            gates = _applied(k, "f2", self.job.after[1], sums, lanes)
            self._leave(gates, (batch + turn) * self.job.blocks + first)
        return k.finish()

    def _load(self, image: Affine, first: Affine) -> Tile:
        """Bring the parts of an image, the bias behind them, and weights that are scaled."""
        k = self.k
        hidden = self.job.hidden
        slot = self.loaded.alloc()
        sizes = self.loaded.buffer.elements // hidden - 1, hidden
        k.copy(slot.region(sizes[0] * hidden, hidden), self.bias1.region(0, hidden))
        source = self.parts.region(image * hidden, sizes, (self.job.n * hidden, 1))
        k.copy(slot.region(0, sizes), source)
        self.loaded.enqueue()
        if self.job.rows:
            source = self.weight.region(first * self.line, self.rates.buffer.elements)
            k.copy(self.rates.alloc().region(), source)
            self.rates.enqueue()
        return self.loaded.dequeue()

    def _leave(self, gates: Buffer, first: Affine) -> None:
        """Store gates, or the weights that they scale; `first` is their first block of all."""
        k = self.k
        line = self.line
        rows = self.job.rows
        weights = self.rates.dequeue() if rows else self.added
        with repeat(k, "block", self.own.channels[0] if rows else 1) as turn:
            slot = self.out.alloc()
            if not rows:
                k.each("vcopy", line, (slot, 0), (gates, 0))
            for at, (repeats, lanes) in k.runs(line if rows else 0, 2 * LANES):
                sizes = repeats, lanes // FRACTAL, FRACTAL
                gate = gates.region(turn * FRACTAL, sizes, (0, 0, 1))
                k.vector(
                    "vmul", slot.region(at, sizes), weights.region(turn * line + at, sizes), gate
                )
            self.out.enqueue()
            to = self.y.region((first + turn) * ((rows or 1) * FRACTAL), line)
            k.copy(to, self.out.dequeue().region(0, line))
            self.out.free()
        if rows:
            self.rates.free()


def _applied(
    k: KernelBuilder, name: str, after: epilogue.Epilogue, sums: Place, size: int
) -> Buffer:
    """Return where the values of what follows are, of `size` sums in fp32."""
    plan = epilogue_plan.plan_of(after, "fp16")
    tiles = [k.buffer(f"{name}.{i}", "UB", dtype, size) for i, dtype in enumerate(plan.tiles)]
    k.each("vconv", size, (tiles[plan.start], 0), sums)
    epilogue_emit.write_steps(k, plan, epilogue_emit.Piece(tiles, {}, {}, Affine(), 1, size))
    return tiles[0]
