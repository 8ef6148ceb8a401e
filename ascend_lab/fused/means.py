"""Channel means of a tandem's result, added up while it is stored (for squeeze and excite).

A tandem is a pointwise convolution and the depthwise one that reads it, in one kernel (`tandem`).

    unfused        tandem -> y in GM;  y from GM -> mean of every channel -> GM
    fused          tandem -> y in GM, and in L1 -> cube -> sums in UB ... -> means in GM
    saved          reading y once (144 channels of 56 x 56 in fp16: 0.9 MB) and a kernel start

A unit of work is some blocks of 16 channels in a band of rows of an image. Its result goes from UB
to GM and also to L1. The cube sums it while the next unit is computed, so that no pipe waits for
the unit's last tile:

    sums (images, 16 channels) = I (images, pixels) @ y (pixels, 16 channels)    for each block

I[i, p] is 1 if pixel p belongs to image i. A tandem may interleave the rows of several images:
two images with rows of 4 pixels have I = [11110000 11110000 ...; 00001111 00001111 ...].
I is made from the tensor `ones`, a 16 x 16 unit matrix; its 17th row, all ones, is used for
a single image, and for a bias that the cube adds. A unit of zeros precedes the first one, so that
"sum the previous unit" needs no special case. The sums of all units stay in UB until the end.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import CapacityError
from ascend_lab.fused.tandem_shape import SUMS, Band, Tandem
from ascend_lab.machine.isa import FRACTAL, Affine, KernelBuilder, Tile, ceil_div
from ascend_lab.operators.kernels.tiles import Area, repeat, segments, sum_queue

AREA = FRACTAL * FRACTAL
LOAD_FRACTALS = 14
"""Fractals of a load, at most: two slots of 14 (of L0B's 128 on 910B) leave room for weights."""


def diagonal() -> NDArray[np.float16]:
    """Return the tensor `ones`: a 16 x 16 unit matrix, and a row of ones."""
    rows = np.eye(FRACTAL + 1, FRACTAL, dtype=np.float16)
    rows[FRACTAL] = 1
    return rows.reshape(-1)


def _fractals_of_load(width: int, images: int) -> int:
    """Return the most fractals of a load after which the pattern of I starts again.

    Each load uses the same fractals of I. Raises `CapacityError` if the period is too long.
    """
    # Rows of 7 pixels of 2 images: 14 pixels; the pattern repeats after 14 x 16 pixels, that is
    # 14 / gcd(14, 16) = 7 fractals.
    row = width * images
    period = row // math.gcd(row, FRACTAL) if images > 1 else 1
    if period > LOAD_FRACTALS or images > FRACTAL:
        needed = f"rows of {images} images that begin a fractal each {LOAD_FRACTALS} times"
        raise CapacityError(needed, f"{period}", "take fewer images at a time")
    return LOAD_FRACTALS // period * period


class Means:
    """The channel sums of a core, which does `units` units of `blocks` channel blocks in each band.

    A unit's slot in L1 has room for the longest band, with zeros behind the last pixel.

    images        images whose rows are interleaved
    width         pixels of an output row
    pixels        pixels of an image, by which its sums are divided
    depth         fractals of pixels that one load brings to L0B
    size          sums of a unit
    count         fractals of the longest band
    block_size    elements of a channel block in a slot
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
        """Allocate buffers; raise `CapacityError` if the pattern of I has too long a period."""
        shape = tandem.depth
        self.k = k
        self.units = units
        self.blocks = blocks
        (oh, ow) = shape.out_hw
        m = shape.mixed
        self.images = m
        self.width = ow
        self.channel_blocks = shape.blocks[1]
        self.pixels = oh // m * ow
        self.depth = _fractals_of_load(ow, m)
        # the sums of a unit: 16 channels for each block and image
        self.size = blocks * m * FRACTAL
        # fractals of the longest band
        self.count = max(ceil_div(math.prod(band.depth.out_hw), FRACTAL) for band in bands)
        self.ones = k.tensor("ones", "fp16", AREA + FRACTAL)
        self.y = k.tensor("means", "fp16", shape.images * shape.blocks[1] * FRACTAL)
        self.block_size = self.count * AREA
        size = self.depth * AREA
        self.results = k.queue(
            "y_l1", "L1", "fp16", self.block_size * blocks, src="MTE3", dst="MTE1"
        )
        self.right = k.queue("y_l0", "L0B", "fp16", size, src="MTE1", dst="M")
        self.image_rows = k.buffer("own_l1", "L1", "fp16", size)
        self.image_rows_l0 = k.buffer(
            "own_l0", "L0A", "fp16", size if m > 1 else max(size, tile * AREA)
        )
        self.sums = sum_queue(k, "plane_sums", SUMS, 1, blocks)
        # one place more than there are units, because the unit of zeros is summed, too
        self.totals = k.buffer("totals", "UB", SUMS, (len(bands) * units + 1) * self.size)
        self.zeros = k.buffer("zeros", "UB", "fp16", FRACTAL)
        self.out = k.buffer("means_ub", "UB", "fp16", units * self.size)

    def begin(self) -> None:
        """Load I to L0A and a row of zeros to UB, and enqueue the unit of zeros."""
        k = self.k
        if self.images == 1:
            # I is one row of ones, repeated 16 times for a whole fractal
            source = self.ones.region(AREA, (FRACTAL, FRACTAL), (0, 1))
            count = self.image_rows_l0.elements // AREA
            fractal_stride = 0
        else:
            # image i is row i of the unit matrix, once for every pixel of its row (stride 0)
            rows = self.depth * FRACTAL // (self.images * self.width)
            sizes = (rows, self.images, self.width, FRACTAL)
            source = self.ones.region(0, sizes, (0, FRACTAL, 0, 1))
            count = self.depth
            fractal_stride = AREA
        k.copy(self.image_rows.region(0, source.sizes), source)
        k.each("vdup", FRACTAL, (self.zeros, 0), scalar=0.0)
        k.barrier()
        shape = (count, FRACTAL, FRACTAL)
        transposed = (fractal_stride, 1, FRACTAL)
        k.load2d(self.image_rows_l0.region(0, shape), self.image_rows.region(0, shape, transposed))
        k.barrier()
        self.slot(0)
        self.results.enqueue()

    def slot(self, pixels: int) -> Tile:
        """Return the slot in L1 for a unit of `pixels` pixels, with zeros behind the last."""
        slot = self.results.alloc()
        # zeros add nothing to a sum, whatever I has there
        missing = self.count * FRACTAL - pixels
        if missing:
            sizes = (self.blocks, missing, FRACTAL)
            tail = slot.region(pixels * FRACTAL, sizes, (self.block_size, FRACTAL, 1))
            self.k.copy(tail, self.zeros.region(0, sizes, (0, 0, 1)))
        return slot

    def place(self, area: Area, pixel: Affine) -> Area:
        """Return where in a slot the pixels go that are also stored to `area` of GM."""
        pieces = ((0, pixel, area.pixels),)
        return replace(area, base=Affine(), pieces=pieces, plane=self.count * FRACTAL)

    def add(self, number: Affine) -> None:
        """Sum the unit before unit `number`: all its tiles are in L1 by now."""
        k = self.k
        n = self.blocks
        size = (FRACTAL, FRACTAL)
        slot = self.results.dequeue()
        sums = self.sums.alloc()
        with repeat(k, "block", n) as block:
            for first_fractal, depth in segments(k, "sum", self.count, self.depth):
                shape = (depth, *size)
                start = block * self.block_size + first_fractal * AREA
                # transposed, because the cube sums over the rows of its right operand
                source = slot.region(start, shape, (AREA, 1, FRACTAL))
                k.load2d(self.right.alloc().region(0, shape), source)
                self.right.enqueue()
                a = self.image_rows_l0.region(0, (1, depth, *size))
                b = self.right.dequeue().region(0, (depth, 1, *size))
                k.mmad(sums.region(block * AREA, (1, 1, *size)), a, b, accumulate=first_fractal)
                self.right.free()
        self.results.free()
        self.sums.enqueue()
        rows = (n, self.images * FRACTAL)
        region = self.totals.region(number * self.size, rows)
        k.copy(region, self.sums.dequeue().region(0, rows, (AREA, 1)))
        self.sums.free()

    def end(
        self, bands: int, first_mean: Affine, counts: tuple[int, int], unit_strides: tuple[int, int]
    ) -> None:
        """Divide the sums by the number of pixels and store them.

        `counts` are the images and the groups of channel blocks of the core. From one image, or
        group, to the next the unit number grows by `unit_strides`, depending on which loop is the
        inner one.
        """
        k = self.k
        count = self.units * self.size
        totals = (self.totals, self.size)
        # element 0 .. size - 1 of the totals belongs to the unit of zeros
        for band in range(1, bands):
            k.each("vadd", count, totals, totals, (self.totals, band * count + self.size))
        # The mean is sum / pixels, computed in fp32; the conversion to fp16 comes last.
        k.each("vmuls", count, totals, totals, scalar=1.0 / self.pixels)
        k.each("vconv", count, (self.out, 0), totals)
        k.barrier()
        m = self.images
        line = self.channel_blocks * FRACTAL
        sizes = (*counts, self.blocks, m, FRACTAL)
        ub_strides = (*(self.size * s for s in unit_strides), m * FRACTAL, FRACTAL, 1)
        gm_strides = (m * line, self.blocks * FRACTAL, FRACTAL, line, 1)
        k.copy(
            self.y.region(first_mean * FRACTAL, sizes, gm_strides),
            self.out.region(0, sizes, ub_strides),
        )
