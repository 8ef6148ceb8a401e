"""Means of the channels of what a tandem writes, summed on the way out (squeeze and excite).

What leaves UB for memory goes to L1, too. A unit later, so that no pipe waits, the cube sums it:

    sums (images, 16 channels) = own (images, pixels) @ y (pixels, 16 channels)    for each block

`own` has a 1 where a pixel is of an image: several may be one, whose rows take turns. It comes from
16 rows with a 1 on the diagonal, and one of ones, for a single image; those serve a bias, too.
Before the first unit stands one of zeros, so that each has one in front. Sums of all units stay in
UB to the end."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import CapacityError
from ascend_lab.fused.tandem_shape import SUMS, Band, Tandem
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Tile, up
from ascend_lab.operators.kernels.tiles import Area, repeat, segments, sum_queue

AREA = FRACTAL * FRACTAL


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
        shape = tandem.depth
        self.k = k
        self.units = units
        self.blocks = blocks
        (oh, ow) = shape.out_hw
        m = shape.mixed
        self.images = m
        self.width = ow
        self.lines = shape.blocks[1]
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
        k = self.k
        rows = self.depth * FRACTAL // (self.images * self.width)
        sizes: tuple[int, ...] = (rows, self.images, self.width, FRACTAL)
        source = self.ones.region(0, sizes, (0, FRACTAL, 0, 1))
        count = self.depth
        apart = AREA
        if self.images == 1:
            sizes = (FRACTAL, FRACTAL)
            count = self.left.elements // AREA
            apart = 0
            source = self.ones.region(AREA, sizes, (0, 1))
        k.copy(self.own.region(0, sizes), source)
        k.each("vdup", FRACTAL, (self.zeros, 0), scalar=0.0)
        k.barrier()
        to = (count, FRACTAL, FRACTAL)
        turned = (apart, 1, FRACTAL)
        k.load2d(self.left.region(0, to), self.own.region(0, to, turned))
        k.barrier()
        self.slot(0)
        self.held.enqueue()

    def slot(self, pixels: int) -> Tile:
        """Return the place in L1 of a unit of `pixels` that begins, zeros behind the last."""
        slot = self.held.alloc()
        missing = self.count * FRACTAL - pixels
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
        k = self.k
        n = self.blocks
        size = (FRACTAL, FRACTAL)
        slot = self.held.dequeue()
        sums = self.sums.alloc()
        with repeat(k, "block", n) as block:
            for at, depth in segments(k, "sum", self.count, self.depth):
                some = (depth, *size)
                start = block * self.line + at * AREA
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
        k = self.k
        count = self.units * self.size
        one = (self.totals, self.size)
        for band in range(1, bands):
            k.each("vadd", count, one, one, (self.totals, band * count + self.size))
        k.each("vmuls", count, one, one, scalar=1.0 / self.pixels)
        k.each("vconv", count, (self.out, 0), one)
        k.barrier()
        m = self.images
        line = self.lines * FRACTAL
        sizes = (*counts, self.blocks, m, FRACTAL)
        own = (*(self.size * s for s in strides), m * FRACTAL, FRACTAL, 1)
        apart = (m * line, self.blocks * FRACTAL, FRACTAL, line, 1)
        k.copy(self.y.region(place * FRACTAL, sizes, apart), self.out.region(0, sizes, own))
