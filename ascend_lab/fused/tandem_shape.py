"""Describe a tandem: its two convolutions, the schedule that divides them, and checks of both.

A tandem computes in one kernel a 1 x 1 convolution (`point`), which has more output than input
channels, and a depthwise convolution (`depth`) of its result:

    unfused        x -> point -> GM -> depth -> y        two kernels
    fused          x -> point -> L1 -> depth -> y        one kernel (`tandem_kernel`)

A core takes its output rows in bands, ranges of rows. For 8 output rows of a 3 x 3 depthwise
convolution with a stride of 1 it computes 10 rows of the pointwise result, so that rows at the
border of two bands are computed twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, ceil_div
from ascend_lab.operators.kernels import conv_shape
from ascend_lab.operators.kernels.conv_windows import tiles_per_image, window_of
from ascend_lab.operators.kernels.epilogue import Epilogue, check_epilogue

SUMS = "fp32"
"""The format of sums in L0C."""
AREA = FRACTAL * FRACTAL
"""Elements of a fractal: 16 x 16."""
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
        needed_images = f"{', '.join(map(str, mixed_counts(shape)))} images as one"
        raise InputError(needed_images, str(s.images), "take one at a time")
    # 64 channels, 8 images in twos, 14 rows: at most (4, 4, 14)
    limits = (shape.blocks[1], shape.n // s.images, shape.out_hw[0])
    grid_fits = sizes_are_integers and all(1 <= g <= m for g, m in zip(s.grid, limits, strict=True))
    if tandem.means and s.grid[2:] != (1,):
        raise InputError("all rows of an image on a core, for means", str(s.grid), "divide images")
    if not grid_fits or math.prod(s.grid) > chip.core_count:
        cores = f"{chip.core_count} cores"
        needed_grid = f"a grid of at most {limits} (channel blocks, images, rows), {cores}"
        raise InputError(needed_grid, str(s.grid), "divide less")
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
        row_count = min(band_rows, high - first_row)
        rows_seen = window_of(unmixed, first_row * ow, row_count * ow).rows
        if rows_seen.skipped:
            raise UnsupportedError("rows of the image", f"rows {first_row} see none", "two kernels")
        pads = (rows_seen.before, rows_seen.after, *shape.pads[2:])
        depth = replace(shape, n=1, h=rows_seen.count, pad=pads)
        # as many pointwise tiles as depthwise ones, so that they can alternate
        turns = tiles_per_image(depth, schedule.tile)
        pixels = rows_seen.count * shape.w * shape.mixed
        tile = ceil_div(ceil_div(pixels, FRACTAL), turns)
        bands.append(Band(first_row, rows_seen.first, depth, tile))
    return bands
