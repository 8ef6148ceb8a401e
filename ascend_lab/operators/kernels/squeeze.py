"""Squeeze and excite beside its convolutions: means summed on the way out, scales on the way in.

What leaves UB for memory goes to L1, too. A unit later, so that no pipe waits, the cube sums it:

    sums (images, 16 channels) = own (images, pixels) @ y (pixels, 16 channels)    for each block

`own` has a 1 where a pixel is of an image: several may be one, whose rows take turns. It comes from
16 rows with a 1 on the diagonal, and one of ones, for a single image; those serve a bias, too.
Before the first unit stands one of zeros, so that each has one in front. Sums of all units stay in
UB to the end.

A pointwise convolution of images that are scaled per image and channel is one kernel: some channel
blocks of some images at a time are scaled on their way to L1, by the vector unit; what the cube
makes of them is added up in L0C:

    GM -x-> UB (x scale) -> L1 -> cube, += for all channel blocks -> epilogue -> UB -> GM

Cores share images, and where there are fewer of those, their rows."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Launch, Program, Tile, up
from ascend_lab.operators.kernels import epilogue_emit, epilogue_plan
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.conv_tiles import Feeds, add_products
from ascend_lab.operators.kernels.conv_windows import Seen, Window
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue
from ascend_lab.operators.kernels.planes import PIXELS, Own, dealt, plane_launch
from ascend_lab.operators.kernels.tandem_shape import SUMS, Band, Tandem
from ascend_lab.operators.kernels.tiles import Area, repeat, segments, sum_queue

AREA = FRACTAL * FRACTAL


# -- squeeze: means over the pixels of each channel of what a tandem writes -----------------------
TOGETHER = 14
"""Fractals of a load, at most: two of them leave L0B to the weights."""


def diagonal() -> NDArray[np.float16]:
    """Return the tensor `ones`: 16 rows with a 1 each, a row of ones."""
    rows = np.eye(FRACTAL + 1, FRACTAL, dtype=np.float16)
    rows[FRACTAL] = 1
    return rows.reshape(-1)


class Means:
    """The sums of a core: `units` of `blocks` channel blocks in each band, a band after the other.

    What is summed of a unit is as long as that of the longest band, zeros behind its last pixel.
    """

    def __init__(
        self,
        k: KernelBuilder,
        tandem: Tandem,
        bands: list[Band],
        units: int,
        blocks: int,
        tile: int,
    ) -> None:
        """Allocate everything; raise `CapacityError` for rows of which few fractals are alike."""
        shape, self.k, self.units, self.blocks = tandem.depth, k, units, blocks
        (oh, ow), m = shape.out_hw, shape.mixed
        self.images, self.width, self.lines = m, ow, shape.blocks[1]
        self.pixels = oh // m * ow
        alike = ow * m // math.gcd(ow * m, FRACTAL) if m > 1 else 1
        if alike > TOGETHER or m > FRACTAL:
            needed = f"rows of {m} images that begin a fractal each {TOGETHER} times"
            raise CapacityError(needed, f"{alike}", "take fewer images at a time")
        self.depth = TOGETHER // alike * alike
        self.size = blocks * m * FRACTAL
        self.count = max(up(math.prod(band.depth.out_hw), FRACTAL) for band in bands)
        self.ones = k.tensor("ones", "fp16", AREA + FRACTAL)
        self.y = k.tensor("means", "fp16", shape.images * shape.blocks[1] * FRACTAL)
        self.line, size = self.count * AREA, self.depth * AREA
        self.held = k.queue("y_l1", "L1", "fp16", self.line * blocks, src="MTE3", dst="MTE1")
        self.right = k.queue("y_l0", "L0B", "fp16", size, src="MTE1", dst="M")
        self.own = k.buffer("own_l1", "L1", "fp16", size)
        self.left = k.buffer("own_l0", "L0A", "fp16", size if m > 1 else max(size, tile * AREA))
        self.sums = sum_queue(k, "plane_sums", SUMS, 1, blocks)
        self.totals = k.buffer("totals", "UB", SUMS, (len(bands) * units + 1) * self.size)
        self.zeros = k.buffer("zeros", "UB", "fp16", FRACTAL)
        self.out = k.buffer("means_ub", "UB", "fp16", units * self.size)

    def begin(self) -> None:
        """Bring to L0A what tells the images apart, and a row of zeros to UB."""
        k, rows = self.k, self.depth * FRACTAL // (self.images * self.width)
        sizes: tuple[int, ...] = (rows, self.images, self.width, FRACTAL)
        source = self.ones.region(0, sizes, (0, FRACTAL, 0, 1))
        count, apart = self.depth, AREA
        if self.images == 1:
            sizes, count, apart = (FRACTAL, FRACTAL), self.left.elements // AREA, 0
            source = self.ones.region(AREA, sizes, (0, 1))
        k.copy(self.own.region(0, sizes), source)
        k.each("vdup", FRACTAL, (self.zeros, 0), scalar=0.0)
        k.barrier()
        to, turned = (count, FRACTAL, FRACTAL), (apart, 1, FRACTAL)
        k.load2d(self.left.region(0, to), self.own.region(0, to, turned))
        k.barrier()
        self.slot(0)
        self.held.enqueue()

    def slot(self, pixels: int) -> Tile:
        """Return the place in L1 of a unit of `pixels` that begins, zeros behind the last."""
        slot, missing = self.held.alloc(), self.count * FRACTAL - pixels
        if missing:
            sizes = (self.blocks, missing, FRACTAL)
            to = slot.region(pixels * FRACTAL, sizes, (self.line, FRACTAL, 1))
            self.k.copy(to, self.zeros.region(0, sizes, (0, 0, 1)))
        return slot

    def place(self, area: Area, pixel: Affine) -> Area:
        """Return where what goes to `area` lies in a slot, from `pixel` on."""
        pieces = ((0, pixel, area.pixels),)
        return replace(area, base=Affine(), pieces=pieces, plane=self.count * FRACTAL)

    def add(self, number: Affine) -> None:
        """Sum the unit in front of unit `number`."""
        k, n, size = self.k, self.blocks, (FRACTAL, FRACTAL)
        slot, sums = self.held.dequeue(), self.sums.alloc()
        with repeat(k, "block", n) as block:
            for at, depth in segments(k, "sum", self.count, self.depth):
                some, start = (depth, *size), block * self.line + at * AREA
                source = slot.region(start, some, (AREA, 1, FRACTAL))
                k.load2d(self.right.alloc().region(0, some), source)
                self.right.enqueue()
                a = self.left.region(0, (1, depth, *size))
                b = self.right.dequeue().region(0, (depth, 1, *size))
                k.mmad(sums.region(block * AREA, (1, 1, *size)), a, b, accumulate=at)
                self.right.free()
        self.held.free()
        self.sums.enqueue()
        rows = (n, self.images * FRACTAL)
        to = self.totals.region(number * self.size, rows)
        k.copy(to, self.sums.dequeue().region(0, rows, (AREA, 1)))
        self.sums.free()

    def end(
        self, bands: int, place: Affine, counts: tuple[int, int], strides: tuple[int, int]
    ) -> None:
        """Store the means of units (images, groups of channel blocks) that lie `strides` apart."""
        k, count, one = self.k, self.units * self.size, (self.totals, self.size)
        for band in range(1, bands):
            k.each("vadd", count, one, one, (self.totals, band * count + self.size))
        k.each("vmuls", count, one, one, scalar=1.0 / self.pixels)
        k.each("vconv", count, (self.out, 0), one)
        k.barrier()
        m, line = self.images, self.lines * FRACTAL
        sizes = (*counts, self.blocks, m, FRACTAL)
        own = (*(self.size * s for s in strides), m * FRACTAL, FRACTAL, 1)
        apart = (m * line, self.blocks * FRACTAL, FRACTAL, line, 1)
        k.copy(self.y.region(place * FRACTAL, sizes, apart), self.out.region(0, sizes, own))


# -- excite: images times a scale, then a convolution ---------------------------------------------
SCALED = epilogue_plan.Plan((epilogue_plan.Placed("vmul", ("x", "scale"), None, 0),), ("fp16",), 0)


def scaled_launch(shape: ConvShape, chip: Chip, epilogue: Epilogue | None) -> Launch:
    """Return the kernel as a launch; raise `CapacityError` if L0C holds no sums of an image.

    Tensors are x, scale, weight and y, and the epilogue's operands.
    """
    lone = (shape.r, shape.s, shape.stride, shape.pad, shape.groups, shape.stored, shape.lanes)
    if lone != (1, 1, 1, 0, 1, (0, 1), 0) or shape.beside or not chip.combined:
        needed = "a 1x1 convolution with a stride of 1, on cores with both units"
        raise UnsupportedError(needed, f"{shape} on {chip.name}", "scale the images apart")
    sizes = dealt((1, shape.n, shape.h), chip.core_count)
    return plane_launch("scaled", sizes, lambda own: _Writer(shape, chip, epilogue, own).program())


class _Writer:
    """The program of the cores that own equally much of images."""

    def __init__(self, shape: ConvShape, chip: Chip, epilogue: Epilogue | None, own: Own) -> None:
        """Allocate everything: room for some images at once, and for some channel blocks."""
        k = self.k = KernelBuilder("scaled", chip)
        self.shape, self.own, (c1, n1) = shape, own, shape.blocks
        self.pixels = (own.rows[1] - own.rows[0]) * shape.w
        self.run = up(self.pixels, PIXELS) * PIXELS * FRACTAL
        room = chip.buffers["UB"] // (8 * DTYPE_BYTES["fp16"] * self.run)
        self.images = self._together(chip, room)
        self.m = up(self.images * self.pixels, FRACTAL)
        self.some = min(c1, room // self.images)
        tiles = self.some * self.images
        self.x = k.tensor("x", "fp16", shape.n * c1 * shape.plane)
        self.scale = k.tensor("scale", "fp16", shape.n * c1 * FRACTAL)
        self.weight = k.tensor("weight", "fp16", c1 * n1 * AREA)
        self.y = k.tensor("y", "fp16", shape.n * n1 * shape.plane)
        self.loaded = k.queue("x_ub", "UB", "fp16", tiles * self.run, src="MTE2", dst="V")
        self.rates = self.loaded.join("scale_ub", "fp16", tiles * FRACTAL)
        self.out = k.queue("x_out", "UB", "fp16", tiles * self.run, src="V", dst="MTE3")
        size = tiles * self.pixels * FRACTAL
        self.rows = k.queue("x_l1", "L1", "fp16", size, src="MTE3", dst="MTE1")
        size = self.some * n1 * AREA
        self.weights = k.queue("w_l1", "L1", "fp16", size, src="MTE2", dst="MTE1")
        sizes = epilogue_emit.Sizes(self.m, n1, n1, n1, self.y.elements, taken=k.used_bytes("UB"))
        finish = epilogue_emit.new_finish(k, epilogue or PLAIN, SUMS, sizes)
        assert finish is not None
        self.finish = finish
        fractals = (chip.buffers[space] // (4 * AREA) for space in ("L0A", "L0B"))
        depth = min(room // size for room, size in zip(fractals, (self.m, n1), strict=True))
        depth = max(1, min(depth, self.some))
        left = k.queue("x_l0", "L0A", "fp16", self.m * depth * AREA, src="MTE1", dst="M")
        right = k.queue("w_l0", "L0B", "fp16", n1 * depth * AREA, src="MTE1", dst="M")
        self.feeds = Feeds(left, right, depth)
        self.acc = sum_queue(k, "sums", SUMS, self.m, n1)

    def _together(self, chip: Chip, most: int) -> int:
        """Return how many images are summed at once: all, or as many as L0C holds twice."""
        n, fractals = self.own.images[0], chip.buffers["L0C"] // (AREA * DTYPE_BYTES[SUMS])
        for images in (i for i in range(min(n, most), 0, -1) if n % i == 0):
            sums = up(images * self.pixels, FRACTAL) * self.shape.blocks[1]
            if sums <= (fractals if images == n else fractals // 2):
                return images
        got = f"{self.pixels} pixels, {self.shape.k} channels on {chip.name}"
        raise CapacityError("sums of a whole image in L0C", got, "scale the images apart")

    def program(self) -> Program:
        """Scale and add up, images by images."""
        k, (n, pitch, count), (c1, n1) = self.k, self.own.images, self.shape.blocks
        k.param("channel", 1)
        self._clear()
        begin, plane = k.param("batch", count) * pitch, self.shape.plane
        low = self.own.rows[0] * self.shape.w * FRACTAL
        apart = n1 * plane // FRACTAL
        pieces = tuple(
            (i * self.pixels, Affine(i * apart), self.pixels) for i in range(self.images)
        )
        sizes = n1, plane // FRACTAL, 1, self.m, self.images * self.pixels
        with (
            epilogue_emit.held_channels(self.finish, (Affine(), n1), Affine(), None) as held,
            repeat(k, "images", n // self.images) as turn,
        ):
            first, sums = begin + turn * self.images, self.acc.alloc()
            for at, some in segments(k, "some", c1, self.some):
                self._load(first * c1 + at, low, some)
                self._multiply(sums, at, some)
            self.acc.enqueue()
            area = Area(first * (n1 * plane) + low, pieces, *sizes)
            epilogue_emit.drain(self.finish, self.acc, self.y, area, Affine(), held)
        return k.finish()

    def _clear(self) -> None:
        """Put zeros behind the last pixels, where the vector unit works to the end of a repeat."""
        line, count = self.pixels * FRACTAL, self.some * self.images
        for slot in range(self.loaded.buffer.slots) if self.run > line else ():
            behind = Tile(self.loaded.buffer, slot)
            self.k.vector(
                "vdup", behind.region(line, (count, self.run - line), (self.run, 1)), scalar=0.0
            )

    def _load(self, first: Affine, low: int, some: int) -> None:
        """Bring channel blocks from `first` on to L1, scaled, and their weights."""
        k, c1, plane, m = self.k, self.shape.blocks[0], self.shape.plane, self.images
        slot, sizes = self.loaded.alloc(), (some, m, self.pixels * FRACTAL)
        source = self.x.region(first * plane + low, sizes, (plane, c1 * plane, 1))
        own = (m * self.run, self.run, 1)
        k.copy(slot.region(0, sizes, own), source)
        numbers = (some, m, FRACTAL)
        source = self.scale.region(first * FRACTAL, numbers, (FRACTAL, c1 * FRACTAL, 1))
        k.copy(Tile(self.rates, slot.slot).region(0, numbers), source)
        self.loaded.enqueue()
        slot, out = self.loaded.dequeue(), self.out.alloc()
        named, rates = {"x": slot}, {"scale": Tile(self.rates, slot.slot)}
        epilogue_emit.write_steps(
            k, SCALED, epilogue_emit.Piece([out], named, rates, Affine(), some * m, self.run)
        )
        self.loaded.free()
        self.out.enqueue()
        k.copy(self.rows.alloc().region(0, sizes), self.out.dequeue().region(0, sizes, own))
        self.out.free()
        self.rows.enqueue()

    def _multiply(self, sums: Tile, at: Affine, some: int) -> None:
        """Add the products of channel blocks from `at` on, which have come, and their weights."""
        n1, pixels = self.shape.blocks[1], self.images * self.pixels
        size = some * n1 * AREA
        source = self.weight.region(at * (n1 * AREA), size)
        self.k.copy(self.weights.alloc().region(0, size), source)
        self.weights.enqueue()
        window = Window(Seen(0, 1, 0, 0, 0), Seen(0, pixels, 0, 0, 0), 0, self.m, pixels)
        view = self.rows.dequeue().region(0, (some, 1, pixels, FRACTAL))
        near, sizes = (self.weights.dequeue(), None), (n1, at, some)
        add_products(self.k, self.shape, self.feeds, sums, window, view, near, sizes, None, (0, 0))
        self.rows.free()
        self.weights.free()
