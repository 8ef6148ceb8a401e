"""Describe a tandem: its two convolutions, the schedule that divides them, and checks of both.

A tandem computes in one kernel a 1 x 1 convolution (`point`), which has more output than input
channels, and a depthwise convolution (`depth`) of its result:

    unfused        x -> point -> GM -> depth -> y        two kernels
    fused          x -> point -> L1 -> depth -> y        one kernel (`tandem_kernel`)

A core takes its output rows in bands, ranges of rows. For 8 output rows of a 3 x 3 depthwise
convolution with a stride of 1 it computes 10 rows of the pointwise result, so that rows at the
border of two bands are computed twice.

`Half`, below, is one of the two convolutions on a core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    Buffer,
    KernelBuilder,
    Queue,
    Region,
    Tile,
    ceil_div,
)
from ascend_lab.operators.kernels import conv_shape, epilogue_emit, tiles
from ascend_lab.operators.kernels.conv_tiles import WindowFeed
from ascend_lab.operators.kernels.conv_windows import Window, tiles_per_image, window_of
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue, check_epilogue
from ascend_lab.operators.kernels.epilogue_plan import CubeBias
from ascend_lab.operators.kernels.tiles import ResidentFeed, Sums, accumulate, sums_region

SUMS = "fp32"
"""The format of sums in L0C."""
Job = tuple[conv_shape.ConvShape, Epilogue | None]
"""A convolution and what is done to its sums on their way out of L0C."""


@dataclass(frozen=True, slots=True)
class Tandem:
    """A pointwise and a depthwise convolution, and the epilogue of each (bias, relu, ...).

    With `means` the kernel also writes the mean of each channel of the result.
    """

    point: conv_shape.ConvShape
    depth: conv_shape.ConvShape
    after_point: Epilogue | None = None
    after_depth: Epilogue | None = None
    means: bool = False

    @property
    def halves(self) -> tuple[Job, Job]:
        """Each convolution with its epilogue."""
        return (self.point, self.after_point), (self.depth, self.after_depth)

    def of(self, images: int) -> Tandem:
        """Return the tandem with the rows of every `images` images interleaved to one image.

        16 images of 7 x 7 in fours are 4 images of 28 x 7, with rows 0 0 0 0 1 1 1 1 ... of the
        four.
        """
        n = self.depth.n // images
        point, depth = (replace(s, n=n, mixed=images) for s in (self.point, self.depth))
        return replace(self, point=point, depth=depth)


@dataclass(frozen=True, slots=True)
class TandemSchedule:
    """How a tandem is divided over cores, and over time on a core.

    grid      cores along channel blocks, images and output rows
    bands     number of bands into which a core divides its rows
    blocks    channel blocks that are computed together, in one unit of work
    tile      fractals of 16 output pixels in a tile
    resident  what stays in L1 or L0B for several units: "rows" of an image for all channel
              blocks, or "weights" of channel blocks for all images
    images    images whose rows are interleaved to one: 7 x 7 = 49 pixels are 3.06 fractals of 16
              and take 4; four images together are 12.25 and take 13
    """

    grid: tuple[int, int, int]
    bands: int
    blocks: int
    tile: int
    resident: str
    images: int = 1


def check_tandem(tandem: Tandem, chip: Chip) -> None:
    """Raise `UnsupportedError` if the convolutions or the chip do not fit the tandem kernel."""
    point = tandem.point
    depth = tandem.depth
    pointwise_geometry = (
        point.r,
        point.s,
        point.stride,
        point.pad,
        point.groups,
        point.stored,
        point.lanes,
    )
    epilogues = [epilogue for _, epilogue in tandem.halves if epilogue]
    kinds = {point.dtype, point.out_dtype, depth.dtype, depth.out_dtype}
    kinds |= {epilogue.out_dtype for epilogue in epilogues}
    pointwise_epilogue = tandem.after_point
    reads_own_channel = depth.groups == depth.c == depth.k == point.k and min(depth.pads) >= 0
    reads_tile = pointwise_epilogue is not None and bool(pointwise_epilogue.of_kind("tile"))
    # requirement -> whether it is met; the first that is not is named in the error
    needed = {
        f"cores that bring sums through UB to L1, not {chip.name}": chip.combined,
        "a 1x1 convolution with a stride of 1": pointwise_geometry == (1, 1, 1, 0, 1, (0, 1), 0),
        "one convolution, nothing beside it": point.beside is None,
        "each channel it writes read alone": reads_own_channel,
        "images as it writes them": (depth.n, depth.h, depth.w) == (point.n, *point.out_hw),
        "fp16 all the way": kinds == {"fp16"},
        "no operand per element in between": not reads_tile,
        "flags for six slots of the cube, for means": chip.event_ids >= 6 or not tandem.means,
    }
    for requirement, fits in needed.items():
        if not fits:
            got = f"{point}, {depth}"
            raise UnsupportedError(f"for a tandem {requirement}", got, "use two kernels")
    for epilogue in epilogues:
        check_epilogue(epilogue, chip, SUMS)


def check_division(tandem: Tandem, chip: Chip, schedule: TandemSchedule) -> None:
    """Raise `InputError` for a schedule with empty shares, or with more cores than the chip has."""
    shape = tandem.depth
    s = schedule
    sizes = (*s.grid, s.bands, s.blocks, s.tile, s.images)
    sizes_are_integers = all(type(n) is int for n in sizes) and len(s.grid) == 3
    # a schedule may come from a file
    if not sizes_are_integers or s.images not in mixed_counts(shape):
        needed = f"{', '.join(map(str, mixed_counts(shape)))} images as one"
        raise InputError(needed, str(s.images), "take one at a time")
    # 64 channels, 8 images in twos, 14 rows: at most (4, 4, 14)
    limits = (shape.blocks[1], shape.n // s.images, shape.out_hw[0])
    grid_fits = sizes_are_integers and all(1 <= g <= m for g, m in zip(s.grid, limits, strict=True))
    if tandem.means and s.grid[2:] != (1,):
        raise InputError("all rows of an image on a core, for means", str(s.grid), "divide images")
    if not grid_fits or math.prod(s.grid) > chip.core_count:
        cores = f"{chip.core_count} cores"
        needed = f"a grid of at most {limits} (channel blocks, images, rows), {cores}"
        raise InputError(needed, str(s.grid), "divide less")
    if min(s.bands, s.blocks, s.tile) < 1 or s.resident not in ("rows", "weights"):
        needed = "at least 1 band, block and fractal; 'rows' or 'weights' that stay"
        raise InputError(needed, f"{s.bands}, {s.blocks}, {s.tile}, {s.resident!r}", "correct it")


def mixed_counts(shape: conv_shape.ConvShape) -> tuple[int, ...]:
    """Return the numbers of images whose rows may be interleaved to one image.

    With m images the next row of the same image is m rows further down: the window's dilation and
    padding grow m times, and load3d takes at most 255. With a stride of 2 only m = 1 works.
    """
    # 3 x 3 with a padding of 1: up to 255 images as one
    halo = max(shape.dilations[0], *shape.pads[:2])
    max_images = conv_shape.MAX_SPREAD // halo if shape.strides[0] == 1 else 1
    return tuple(m for m in range(1, min(shape.n, max_images) + 1) if shape.n % m == 0)


@dataclass(frozen=True, slots=True)
class Band:
    """A band of output rows of a core, with the rows of the pointwise result that it reads.

        low           the first output row
        first_seen    the first row of the pointwise result that these outputs read
        depth         the depthwise convolution of just those rows, padded at the image's border
        tile          fractals of pixels of a tile of the pointwise convolution: there are never
                      more of these tiles than of output tiles, so that they can alternate

    With interleaved images the rows are counted per image.
    """

    low: int
    first_seen: int
    depth: conv_shape.ConvShape
    tile: int

    @property
    def pixels(self) -> int:
        """Pixels of a channel block between the two convolutions."""
        return self.depth.h * self.depth.w * self.depth.mixed


def bands_of(tandem: Tandem, rows: tuple[int, int], schedule: TandemSchedule) -> list[Band]:
    """Return the bands of the output rows low .. high-1, where `rows` is (low, high).

    Raises `UnsupportedError` for a band that reads nothing but padding.
    """
    (low, high) = rows
    shape = tandem.depth
    unmixed = replace(shape, mixed=1)
    # 10 rows in 3 bands: 4, 4 and 2
    band_rows = ceil_div(high - low, schedule.bands)
    ow = shape.out_hw[1]
    bands = []
    for first_row in range(low, high, band_rows):
        rows_seen = window_of(
            unmixed, first_row * ow, (min(first_row + band_rows, high) - first_row) * ow
        ).rows
        if rows_seen.skipped:
            raise UnsupportedError("rows of the image", f"rows {first_row} see none", "two kernels")
        depth = replace(
            shape, n=1, h=rows_seen.count, pad=(rows_seen.before, rows_seen.after, *shape.pads[2:])
        )
        # as many pointwise tiles as depthwise ones, so that they can alternate
        turns = tiles_per_image(depth, schedule.tile)
        pixels = rows_seen.count * shape.w * shape.mixed
        bands.append(
            Band(first_row, rows_seen.first, depth, ceil_div(ceil_div(pixels, FRACTAL), turns))
        )
    return bands


# -- one of the two convolutions on a core --------------------------------------------------------
AREA = FRACTAL * FRACTAL


class Half:
    """One of the two convolutions on a core: weights, bias, epilogue.

    is_depthwise       each channel block is read alone; a block has one diagonal fractal a tap
    sum_depth          depth of a sum in fractals: taps, times input blocks if pointwise
    weight_fractals    fractals of the weights of a unit, and of its bias behind them
    weights_l0b        the queue of these weights in L0B, which the program allocates
    """

    def __init__(
        self,
        k: KernelBuilder,
        job: Job,
        channels: tuple[int, int],
        tile: int,
        stored: int,
        shares: int,
    ) -> None:
        """Allocate weights, bias and the buffers of the epilogue.

        `channels` are the channel blocks of the core and of a unit, `tile` fractals of pixels,
        `stored` the elements of the result. The half may take 1 / `shares` of what is free in UB.
        """
        (shape, epilogue) = job
        (count, blocks) = channels
        self.k = k
        self.shape = shape
        self.count = count
        self.blocks = blocks
        self.weights_l0b: Queue
        self.is_depthwise = shares > 1
        self.prefix = "depth_" if self.is_depthwise else ""
        self.sum_depth = shape.taps * (1 if self.is_depthwise else shape.blocks[0])
        self.weight = k.tensor(
            f"{self.prefix}weight", "fp16", self.sum_depth * shape.blocks[1] * AREA
        )
        bias = epilogue.bias if epilogue else ""
        self.weight_fractals = (self.sum_depth + bool(bias)) * blocks
        self.bias = (
            CubeBias.make(k, bias, shape, 1 if self.is_depthwise else count) if bias else None
        )
        output_sizes = (count, shape.blocks[1], stored)
        ub_bytes = k.used_bytes("UB")
        sizes = epilogue_emit.Sizes(tile, blocks, *output_sizes, self.prefix, shares, ub_bytes)
        finish = epilogue_emit.new_finish(k, epilogue or PLAIN, SUMS, sizes)
        assert finish is not None
        self.finish = finish

    def load_bias(self, col: Affine) -> None:
        """Load the bias of the core's blocks, which begin at `col`, to L1."""
        if self.bias and self.is_depthwise:
            self.bias.load(self.count, False, col, Affine())
        elif self.bias:
            self.bias.load(1, False, Affine(), col)

    def weights(self, first_block: Affine) -> Region:
        """Return the weights in GM of a unit's blocks from `first_block` on."""
        # block 3 begins behind 3 fractals of 256 numbers: at 768, times the taps if depthwise
        start = first_block * AREA
        size = self.blocks * AREA
        n1 = self.shape.blocks[1]
        # depthwise: the taps of a block are one run; pointwise: a run in each row of fractals
        if self.is_depthwise:
            return self.weight.region(start * self.sum_depth, (1, self.sum_depth * size))
        return self.weight.region(start, (self.sum_depth, size), (n1 * AREA, 1))

    def add(
        self,
        acc: Queue,
        feed: tuple[Queue, Buffer | None],
        window: Window,
        view: Region,
        weights_l0b: Tile,
    ) -> None:
        """Emit the sums of a tile for all blocks of a unit, into a slot of `acc`.

        `feed` is the queue of L0A, and the ones there that a bias is multiplied by; `view` are the
        pixels in L1 that the window sees.
        """
        (left_queue, ones) = feed
        k = self.k
        m = window.fractals
        count = self.blocks
        sums_tile = acc.alloc()
        # how often L0A is filled for one tile
        load_count = ceil_div(self.sum_depth, left_queue.buffer.elements // (m * AREA))
        # 10 fractals deep where 8 fit L0A: two loads of 5, not of 8 and 2
        tile_depth = ceil_div(self.sum_depth, load_count)
        blocks_at_once = 1 if self.is_depthwise else count
        depth_blocks = 1 if self.is_depthwise else self.shape.blocks[0]
        with tiles.repeat(k, "block", count if self.is_depthwise else 1) as j:
            block_view = replace(view, offset=view.offset + j * view.strides[0])
            x = WindowFeed(k, left_queue, m, self.shape, window, block_view)
            weights = ResidentFeed(weights_l0b, blocks_at_once, j * (self.sum_depth * AREA))
            sums = Sums(sums_region(sums_tile, m, blocks_at_once, j * (m * AREA)))
            accumulate(k, sums, x, weights, depth_blocks * self.shape.taps, tile_depth)
        # bias: a product one fractal deep, ones (pixels, 16) @ (16, channels), the bias in a row
        if self.bias and ones:
            a = ones.region(0, (m, 1, FRACTAL, FRACTAL))
            b = weights_l0b.region(self.sum_depth * count * AREA, (1, count, FRACTAL, FRACTAL))
            k.mmad(sums_tile.region(0, (count, m, FRACTAL, FRACTAL)), a, b, accumulate=1)
        acc.enqueue()
