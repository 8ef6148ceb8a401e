"""Divide vector work on NC1HWC0 images: planes and rows over cores, rows into blocks that fit UB.

A plane is one channel block of one image, (H, W, C0). Channel blocks, images and rows are divided
over the vector cores; each core loops over its planes in blocks of rows.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import (
    Affine,
    KernelBuilder,
    Launch,
    Program,
    Share,
    ceil_div,
    spread,
)
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.tiles import chunks, repeat

C0 = 16
"""Channels of a pixel's block in two-byte formats."""
PIXELS = 8
"""Pixels of one repeat of a vector instruction: 8 blocks of 32 bytes."""
IMAGE_ROWS_BESIDE = 1.5
"""Image rows' worth of time that each block of rows of a depthwise convolution costs extra.

A block of 4 output rows with stride 2 counts as 4 + 1.5 / 2 rows. Of 0 to 3 the best for 105 random
convolutions on four chips: kernels took 0.5 % longer than with the best of all divisions on
average, 9 % at most, where counting no such rows took 9 % and 161 % longer.
"""


@dataclass(frozen=True, slots=True)
class PlaneShare:
    """The share of one core: channel blocks and images, and rows low .. high-1 of each plane.

    Such a range of rows is called a band; `band` is its number among the bands of a plane.
    """

    channels: Share
    images: Share
    rows: tuple[int, int]
    band: int

    @property
    def planes(self) -> int:
        """Planes of one core."""
        return self.channels[0] * self.images[0]


def deal_planes(
    totals: tuple[int, int, int],
    cores: int,
    *,
    large_folds: bool = False,
    rows_beside: float = 0.0,
) -> tuple[list[int], list[int], list[int]]:
    """Return the sizes of shares of channel blocks, images and rows over at most `cores` cores.

    The busiest core gets the least work possible; among equal divisions the one with the fewest
    bands of rows is taken. The work of a block of rows is its rows plus `rows_beside`, for loads
    that reach beyond the block and for its start and end. Among still equal divisions a core gets
    many channel blocks, or with `large_folds` few: then it adds up more numbers of each channel.
    """
    all_blocks, all_images, all_rows = totals
    options = []
    for block_cores in range(1, min(all_blocks, cores) + 1):
        for image_cores in range(1, min(all_images, cores // block_cores) + 1):
            # The cores that channel blocks and images do not use divide the rows into bands.
            row_cores = min(all_rows, cores // (block_cores * image_cores))
            core_blocks = ceil_div(all_blocks, block_cores)
            planes = core_blocks * ceil_div(all_images, image_cores)
            core_rows = ceil_div(all_rows, row_cores)
            # A core should have 4 blocks of rows, so that loads, work and stores overlap.
            blocks = ceil_div(core_rows, _rows_of_four_blocks(core_rows, planes))
            work = planes * (core_rows + rows_beside * blocks)
            # min takes the least work, then the fewest bands, then with `large_folds` the fewest
            # channel blocks of a core; the smallest grid among equals has the most of them.
            blocks_if_folded = core_blocks if large_folds else 0
            grid = (block_cores, image_cores, row_cores)
            options.append((work, row_cores, blocks_if_folded, grid))
    block_cores, image_cores, row_cores = min(options)[-1]
    return (
        chunks(all_blocks, 1, block_cores),
        chunks(all_images, 1, image_cores),
        chunks(all_rows, 1, row_cores),
    )


def plane_launch(
    name: str,
    sizes: tuple[list[int], list[int], list[int]],
    program_of: Callable[[PlaneShare], Program],
) -> Launch:
    """Return a launch with one program, written by `program_of`, for each share of `sizes`.

    `sizes` are those that `deal_planes` returns.
    """

    def program(channels: Share, images: Share, band: Share) -> Program:
        return program_of(PlaneShare(channels, images, band[1:], band[0]))

    return spread(name, {"channel": sizes[0], "batch": sizes[1]}, program, apart=sizes[2])


def walk(
    k: KernelBuilder,
    share: PlaneShare,
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
    """Output rows start .. start+rows-1 and the image rows they read.

    They read `seen` rows, of which `count` rows from `first` on are in the image; `before` rows of
    zeros lie above these, the other rows of zeros below.
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
    """Return the image rows that `rows` output rows from `start` on read."""
    seen = (rows - 1) * shape.strides[0] + shape.reach[0]
    top_row = start * shape.strides[0] - shape.pads[0]
    first_row = max(top_row, 0)
    end = min(top_row + seen, shape.h)
    zeros_above = min(max(-top_row, 0), seen)
    return RowBlock(
        start, rows, min(first_row, shape.h - 1), max(end - first_row, 0), zeros_above, seen
    )


def row_blocks(
    k: KernelBuilder, shape: ConvShape, share: PlaneShare, size: int
) -> Iterator[tuple[RowBlock, Affine]]:
    """Yield a core's blocks of `size` output rows, equal ones in a loop, with its counter."""
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


def rows_per_block(share: PlaneShare, rows_that_fit: int) -> int:
    """Return the rows of a block: as many as fit, but few enough for four blocks per core."""
    rows = share.rows[1] - share.rows[0]
    return max(1, min(rows_that_fit, _rows_of_four_blocks(rows, share.planes)))


def _rows_of_four_blocks(rows: int, planes: int) -> int:
    """Return the rows of a block for four blocks in all, of `planes` planes of `rows` rows."""
    return ceil_div(rows, ceil_div(4, planes))


def columns_seen(shape: ConvShape) -> tuple[int, int, int]:
    """Return (columns that a row of windows spans, zeros on the left, image columns among them)."""
    # 3 windows of 3 with stride 2 span 7 columns.
    columns = (shape.out_hw[1] - 1) * shape.strides[1] + shape.reach[1]
    zeros_left = min(shape.pads[2], columns)
    return columns, zeros_left, max(0, min(shape.w, columns - zeros_left))


def image_sizes(shape: ConvShape, chip: Chip) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and output rows of a convolution over the vector cores."""
    totals = (shape.blocks[0], shape.n, shape.out_hw[0])
    beside = IMAGE_ROWS_BESIDE / shape.strides[0]
    return deal_planes(totals, chip.cores_of("vector"), rows_beside=beside)
