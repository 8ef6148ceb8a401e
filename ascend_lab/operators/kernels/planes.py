"""Vector work on NC1HWC0 images: which core takes which planes and rows, and row blocks in UB.

A plane is one channel block of one image, (H, W, C0). Channel blocks, images and rows are divided
over the vector cores; each core walks its planes in blocks of rows.

Means over the pixels of each channel are work for the cube, a product with a matrix of ones: a
plane is a matrix, a row of 16 channels per pixel. The cube sums its rows, 16 pixels a cycle, while
the vector unit needs casts and additions in fp32:

    sums (1, 16 channels) = ones (1, pixels) @ x (pixels, 16 channels)     for each plane

15 of 16 rows of the cube repeat the first: memory is slower still. The ones stay in L0A, planes are
turned on their way to L0B, ragged ones end in zeros that are loaded.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    KernelBuilder,
    Launch,
    Program,
    Share,
    ceil_div,
    spread,
)
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.epilogue import Epilogue, Step
from ascend_lab.operators.kernels.epilogue_emit import Finish, Sizes, drain, new_finish
from ascend_lab.operators.kernels.tiles import Area, Span, chunks, repeat, segments, sum_queue

C0 = 16
"""Channels of a pixel's block in two-byte formats."""
PIXELS = 8
"""Pixels of one repeat of a vector instruction: 8 blocks of 32 bytes."""
IMAGE_ROWS_BESIDE = 1.5
"""Image rows that a block of a depthwise convolution costs beside the rows it moves on.

Of 0 to 3 the best for 105 random ones on four chips: kernels took 0.5 % longer than with the best
of all divisions on average, 9 % at most, where counting no such rows took 9 % and 161 % longer.
"""


@dataclass(frozen=True, slots=True)
class Own:
    """What the cores of a part own: channel blocks and images, rows low .. high-1, a band each."""

    channels: Share
    images: Share
    rows: tuple[int, int]
    band: int

    @property
    def planes(self) -> int:
        """Planes of one core."""
        return self.channels[0] * self.images[0]


def dealt(
    totals: tuple[int, int, int],
    cores: int,
    *,
    large_folds: bool = False,
    rows_beside: float = 0.0,
) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and rows over cores: least work of a core, then fewest bands.

    A block of rows takes as long as its rows and `rows_beside` more: loads that reach beyond it,
    and what begins and ends with it. Among equals few channel blocks go together, with
    `large_folds` many.
    """
    options = []
    for c in range(1, min(totals[0], cores) + 1):
        for n in range(1, min(totals[1], cores // c) + 1):
            # All cores that channel blocks and images leave go to bands of rows.
            rows = min(totals[2], cores // (c * n))
            core_blocks = ceil_div(totals[0], c)
            planes = core_blocks * ceil_div(totals[1], n)
            core_rows = ceil_div(totals[2], rows)
            # A core should have 4 blocks of rows, so that loads, work and stores overlap.
            blocks = ceil_div(core_rows, _rows_of_four_blocks(core_rows, planes))
            work = planes * (core_rows + rows_beside * blocks)
            # min takes the least work, then the fewest bands, then the few (or many) channel
            # blocks.
            options.append((work, rows, core_blocks if large_folds else 0, (c, n, rows)))
    grid = min(options)[-1]
    channels, images, bands = (chunks(t, 1, g) for t, g in zip(totals, grid, strict=True))
    return channels, images, bands


def plane_launch(
    name: str, sizes: tuple[list[int], list[int], list[int]], program_of: Callable[[Own], Program]
) -> Launch:
    """Return a launch on the cores that `dealt` gave `sizes`; `program_of` writes one program."""

    def program(channels: Share, images: Share, band: Share) -> Program:
        return program_of(Own(channels, images, band[1:], band[0]))

    return spread(name, {"channel": sizes[0], "batch": sizes[1]}, program, apart=sizes[2])


def walk(
    k: KernelBuilder,
    share: Own,
    around: Callable[[Affine], AbstractContextManager[object]] = nullcontext,
) -> Iterator[tuple[Affine, Affine]]:
    """Yield (channel block, image) of a core's planes; each channel block inside `around`."""
    (channels, c_pitch, c_count) = share.channels
    (images, n_pitch, n_count) = share.images
    first_c = k.param("channel", c_count) * c_pitch
    first_n = k.param("batch", n_count) * n_pitch
    with (
        repeat(k, "c", channels) as index,
        around(first_c + index),
        repeat(k, "image", images) as image,
    ):
        yield first_c + index, first_n + image


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Output rows start .. start+rows-1 and the image rows they see.

    Of `seen` rows in all, `count` rows from `first` on are in the image; `before` rows of zeros
    lie above them, the rest below.
    """

    start: int
    rows: int
    first: int
    count: int
    before: int
    seen: int

    @property
    def after(self) -> int:
        """Rows of zeros below."""
        return self.seen - self.before - self.count


def _row_block(shape: ConvShape, start: int, rows: int) -> RowBlock:
    """Return what `rows` output rows from `start` on see of the image."""
    seen = (rows - 1) * shape.strides[0] + shape.reach[0]
    top_row = start * shape.strides[0] - shape.pads[0]
    first_row = max(top_row, 0)
    end = min(top_row + seen, shape.h)
    zeros_above = min(max(-top_row, 0), seen)
    return RowBlock(
        start, rows, min(first_row, shape.h - 1), max(end - first_row, 0), zeros_above, seen
    )


def row_blocks(
    k: KernelBuilder, shape: ConvShape, share: Own, size: int
) -> Iterator[tuple[RowBlock, Affine]]:
    """Yield a core's blocks of `size` output rows, equal ones in a loop, and the turn in it."""
    runs: list[tuple[int, RowBlock]] = []
    for start in range(share.rows[0], share.rows[1], size):
        block = _row_block(shape, start, min(size, share.rows[1] - start))
        if runs:
            count, head = runs[-1]
            moved = head.first + count * head.rows * shape.strides[0]
            # Blocks in the middle of an image are alike but for where they begin: they become a
            # loop.
            same = (head.rows, head.count, head.before) == (block.rows, block.count, block.before)
            if same and block.first == moved and block.count:
                runs[-1] = (count + 1, head)
                continue
        runs.append((1, block))
    for count, block in runs:
        with repeat(k, "run", count) as turn:
            yield block, turn


def rows_per_block(share: Own, rows_that_fit: int) -> int:
    """Rows of a block: as many as fit, but four blocks a core where that is possible."""
    rows = share.rows[1] - share.rows[0]
    return max(1, min(rows_that_fit, _rows_of_four_blocks(rows, share.planes)))


def _rows_of_four_blocks(rows: int, planes: int) -> int:
    """Return the rows of a block if a core has four, so many `rows` of each of its planes."""
    return ceil_div(rows, ceil_div(4, planes))


def columns_seen(shape: ConvShape) -> tuple[int, int, int]:
    """Return (columns all windows of a row span, zeros on the left, image columns among them)."""
    # 3 windows of 3 with stride 2 span 7 columns.
    columns = (shape.out_hw[1] - 1) * shape.strides[1] + shape.reach[1]
    zeros_left = min(shape.pads[2], columns)
    return columns, zeros_left, max(0, min(shape.w, columns - zeros_left))


def image_sizes(shape: ConvShape, chip: Chip) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and output rows of a convolution over the vector cores."""
    totals = (shape.blocks[0], shape.n, shape.out_hw[0])
    beside = IMAGE_ROWS_BESIDE / shape.strides[0]
    return dealt(totals, chip.cores_of("vector"), rows_beside=beside)


# -- means of planes -------------------------------------------------------------------------------
AREA = FRACTAL * FRACTAL
LOADED = 64
"""Fractals of a load, and of a product, at most."""


@dataclass(frozen=True, slots=True)
class PlaneMeans:
    """`planes` of `pixels` x 16 channels in a 2-byte format that the cube multiplies."""

    planes: int
    pixels: int
    dtype: str = "fp16"

    @property
    def fractals(self) -> int:
        """Fractals of a plane."""
        return ceil_div(self.pixels, FRACTAL)


def ones_and_zeros(dtype: DTypeLike) -> NDArray[Any]:
    """Return the tensor `ones`: a fractal of ones, then one of zeros."""
    return np.repeat(np.array([1, 0], dtype), AREA)


def plane_means_launch(job: PlaneMeans, chip: Chip) -> Launch:
    """Return the kernel: x and ones (`ones_and_zeros`) to y (planes, 16), planes over cores."""
    sizes = chunks(job.planes, 1, chip.core_count)
    return spread("plane_means", {"core": sizes}, lambda share: _Writer(job, chip, share).program())


class _Writer:
    """The program of cores that own equally many planes."""

    def __init__(self, job: PlaneMeans, chip: Chip, share: Share) -> None:
        """Allocate everything."""
        self.job = job
        self.share = share
        self.k = KernelBuilder("plane_means", chip)
        k = self.k
        dtype = job.dtype
        self.group = min(share[0], FRACTAL)
        # Ones once in L0A, planes twice in L0B and four times in L1.
        room = min(chip.buffers["L0A"], chip.buffers["L0B"] // 2, chip.buffers["L1"] // 8)
        max_fractals = min(LOADED, room // (2 * AREA))
        self.planes_per_load = min(max(1, max_fractals // job.fractals), self.group)
        self.depth = min(max_fractals, job.fractals)
        size = self.planes_per_load * self.depth * AREA
        self.x = k.tensor("x", dtype, job.planes * job.pixels * FRACTAL)
        self.ones = k.tensor("ones", dtype, 2 * AREA)
        self.y = k.tensor("y", dtype, job.planes * FRACTAL)
        self.loaded = k.queue("x_l1", "L1", dtype, size, src="MTE2", dst="MTE1", depth=4)
        self.fed = k.queue("x_l0", "L0B", dtype, size, src="MTE1", dst="M")
        self.ones_l1 = k.buffer("ones_l1", "L1", dtype, AREA)
        self.ones_l0 = k.buffer("ones_l0", "L0A", dtype, self.depth * AREA)
        self.sums = sum_queue(k, "sums", "fp32", 1, self.group)
        # The mean: sums in fp32 times 1 / pixels, rounded once.
        steps = (Step("vmuls", ("sums",), 1.0 / job.pixels), Step("vconv", (0,), None, dtype))
        finish = new_finish(k, Epilogue((), steps, dtype), "fp32", Sizes(1, self.group, 1, 1, 0))
        assert finish is not None
        self.finish: Finish = finish

    def program(self) -> Program:
        """Sum the planes of a core, 16 at a time."""
        k = self.k
        (count, pitch, cores) = self.share
        first_plane = k.param("core", cores) * pitch
        k.copy(self.ones_l1.region(0, AREA), self.ones.region(0, AREA))
        k.barrier()
        # A stride of 0 repeats the fractal of ones in L0A.
        repeated = (self.depth, AREA)
        k.load2d(self.ones_l0.region(0, repeated), self.ones_l1.region(0, repeated, (0, 1)))
        k.barrier()
        for start, planes in segments(k, "group", count, self.group):
            self._group(first_plane + start, planes)
        return k.finish()

    def _group(self, first_plane: Affine, planes: int) -> None:
        """Sum up to 16 planes from `first` on, and store their means."""
        sums = self.sums.alloc()
        for at in range(0, planes, self.planes_per_load):
            indices = range(min(self.planes_per_load, planes - at))
            for start, depth in self._parts():
                self._feed(first_plane + at, len(indices), start, depth)
                tile = self.fed.dequeue()
                # 16 equal rows of ones: every row of the result has the sums, and one is stored.
                a = self.ones_l0.region(0, (1, depth, FRACTAL, FRACTAL))
                for i in indices:
                    b = tile.region(i * depth * AREA, (depth, 1, FRACTAL, FRACTAL))
                    c = sums.region((at + i) * AREA, (1, 1, FRACTAL, FRACTAL))
                    self.k.mmad(c, a, b, accumulate=start)
                self.fed.free()
        self.sums.enqueue()
        area = Area(first_plane * FRACTAL, ((0, Affine(), 1),), planes, 1, 1, 1, 1)
        drain(self.finish, self.sums, ((self.y, area),), Affine(), None)

    def _parts(self) -> Iterator[Span]:
        """Yield (first fractal, fractals) of what is loaded of a plane at once."""
        full_parts = self.job.pixels // FRACTAL // self.depth
        if self.job.fractals == self.depth:
            yield Affine(), self.depth
            return
        # A plane of 196 pixels is 13 fractals; in parts of 8 it is 8 fractals and 5 fractals.
        with repeat(self.k, "part", full_parts) as part:
            yield part * self.depth, self.depth
        if remainder := self.job.fractals - full_parts * self.depth:
            yield Affine(full_parts * self.depth), remainder

    def _feed(self, first_plane: Affine, planes: int, start: Affine, depth: int) -> None:
        """Bring a part of some planes to L0B, turned; behind ragged ones come zeros."""
        k = self.k
        pixels = self.job.pixels
        pixels_left = pixels if start.terms else pixels - start.const * FRACTAL
        # Elements of the part that are pixels; zeros fill the last fractal.
        run = min(depth * FRACTAL, pixels_left) * FRACTAL
        # A plane of 196 pixels ends 12 pixels before its 13th fractal does.
        missing = max(depth * FRACTAL - pixels_left, 0)
        tile = self.loaded.alloc()
        line = depth * AREA
        source = (first_plane * pixels + start * FRACTAL) * FRACTAL
        window = self.x.region(source, (planes, run), (pixels * FRACTAL, 1))
        k.copy(tile.region(0, (planes, run), (line, 1)), window)
        if missing:
            zeros = self.ones.region(AREA, (planes, missing * FRACTAL), (0, 1))
            k.copy(tile.region(run, zeros.sizes, (line, 1)), zeros)
        self.loaded.enqueue()
        loaded = self.loaded.dequeue()
        fed = self.fed.alloc()
        sizes = (planes * depth, FRACTAL, FRACTAL)
        # Each fractal is transposed on its way: the cube wants (pixels, channels) by columns.
        k.load2d(fed.region(0, sizes), loaded.region(0, sizes, (AREA, 1, FRACTAL)))
        self.loaded.free()
        self.fed.enqueue()
