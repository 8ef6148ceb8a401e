"""A pointwise convolution of images that are scaled per image and channel, in one kernel.

What squeezes and excites a small image ends so. Some channel blocks of some images at a time are
scaled on their way to L1, by the vector unit; what the cube makes of them is added up in L0C:

    GM -x-> UB (x scale) -> L1 -> cube, += for all channel blocks -> epilogue -> UB -> GM

Cores share images, and where there are fewer of those, their rows.
"""

from __future__ import annotations

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.isa import Affine, KernelBuilder, Launch, Program, Tile
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.conv_stage import Feeds, add_products
from ascend_lab.kernels.conv_windows import Seen, Window
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.epilogue_emit import (
    Piece,
    Sizes,
    drain,
    held_channels,
    new_finish,
    write_steps,
)
from ascend_lab.kernels.epilogue_plan import Placed, Plan
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.planes import PIXELS, Own, dealt, plane_launch
from ascend_lab.kernels.tandem_shape import PLAIN, SUMS
from ascend_lab.kernels.tiles import Area, repeat, segments, sum_queue

AREA = FRACTAL * FRACTAL
SCALED = Plan((Placed("vmul", ("x", "scale"), None, 0),), ("fp16",), 0)


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
        sizes = Sizes(self.m, n1, n1, n1, self.y.elements, taken=k.used_bytes("UB"))
        finish = new_finish(k, epilogue or PLAIN, SUMS, sizes)
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
            held_channels(self.finish, (Affine(), n1), Affine(), None) as held,
            repeat(k, "images", n // self.images) as turn,
        ):
            first, sums = begin + turn * self.images, self.acc.alloc()
            for at, some in segments(k, "some", c1, self.some):
                self._load(first * c1 + at, low, some)
                self._multiply(sums, at, some)
            self.acc.enqueue()
            area = Area(first * (n1 * plane) + low, pieces, *sizes)
            drain(self.finish, self.acc, self.y, area, Affine(), held)
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
        write_steps(k, SCALED, Piece([out], named, rates, Affine(), some * m, self.run))
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
