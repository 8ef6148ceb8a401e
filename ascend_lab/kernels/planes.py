"""Vector work on NC1HWC0 images: which core takes which planes and rows, and row blocks in UB.

A plane is one channel block of one image, (H, W, C0). Channel blocks, images and rows are divided
over the vector cores; each core walks its planes in blocks of rows.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, KernelBuilder, Launch, Program, Share, spread
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import up
from ascend_lab.kernels.tiles import chunks, repeat

C0 = 16
"""Channels of a pixel's block in two-byte formats."""
PIXELS = 8
"""Pixels of one repeat of a vector instruction: 8 blocks of 32 bytes."""


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
    totals: tuple[int, int, int], cores: int, *, large_folds: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and rows over cores: least work of a core, then fewest bands.

    Among equals few channel blocks go together, with `large_folds` many.
    """
    options = []
    for c in range(1, min(totals[0], cores) + 1):
        for n in range(1, min(totals[1], cores // c) + 1):
            rows = min(totals[2], cores // (c * n))
            fold = up(totals[0], c)
            work = fold * up(totals[1], n) * up(totals[2], rows)
            options.append((work, rows, fold if large_folds else 0, (c, n, rows)))
    grid = min(options)[-1]
    channels, images, bands = (chunks(t, 1, g) for t, g in zip(totals, grid, strict=True))
    return channels, images, bands


def plane_launch(
    name: str, sizes: tuple[list[int], list[int], list[int]], make: Callable[[Own], Program]
) -> Launch:
    """Return a launch on the cores that `dealt` gave `sizes`; `make` writes one program."""

    def program(channels: Share, images: Share, band: Share) -> Program:
        return make(Own(channels, images, band[1:], band[0]))

    return spread(name, {"channel": sizes[0], "batch": sizes[1]}, program, apart=sizes[2])


def walk(
    k: KernelBuilder,
    own: Own,
    around: Callable[[Affine], AbstractContextManager[object]] = nullcontext,
) -> Iterator[tuple[Affine, Affine]]:
    """Yield (channel block, image) of a core's planes; each channel block inside `around`."""
    (c, c_pitch, c_count), (n, n_pitch, n_count) = own.channels, own.images
    first_c, first_n = k.param("channel", c_count) * c_pitch, k.param("batch", n_count) * n_pitch
    with repeat(k, "c", c) as index, around(first_c + index), repeat(k, "image", n) as image:
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
    low = start * shape.strides[0] - shape.pads[0]
    first, end = max(low, 0), min(low + seen, shape.h)
    before = min(max(-low, 0), seen)
    return RowBlock(start, rows, min(first, shape.h - 1), max(end - first, 0), before, seen)


def row_blocks(
    k: KernelBuilder, shape: ConvShape, own: Own, size: int
) -> Iterator[tuple[RowBlock, Affine]]:
    """Yield a core's blocks of `size` output rows, equal ones in a loop, and the turn in it."""
    runs: list[tuple[int, RowBlock]] = []
    for start in range(own.rows[0], own.rows[1], size):
        block = _row_block(shape, start, min(size, own.rows[1] - start))
        if runs:
            count, head = runs[-1]
            moved = head.first + count * head.rows * shape.strides[0]
            same = (head.rows, head.count, head.before) == (block.rows, block.count, block.before)
            if same and block.first == moved and block.count:
                runs[-1] = (count + 1, head)
                continue
        runs.append((1, block))
    for count, block in runs:
        with repeat(k, "run", count) as turn:
            yield block, turn


def rows_per_block(own: Own, most: int) -> int:
    """Rows of a block: as many as fit, but four blocks a core where that is possible."""
    rows = own.rows[1] - own.rows[0]
    return max(1, min(most, up(rows, up(4, own.planes))))


def columns_seen(shape: ConvShape) -> tuple[int, int, int]:
    """Return (columns all windows of a row span, zeros on the left, image columns among them)."""
    seen = (shape.out_hw[1] - 1) * shape.strides[1] + shape.reach[1]
    left = min(shape.pads[2], seen)
    return seen, left, max(0, min(shape.w, seen - left))


def image_sizes(shape: ConvShape, chip: Chip) -> tuple[list[int], list[int], list[int]]:
    """Divide channel blocks, images and output rows of a convolution over the vector cores."""
    return dealt((shape.blocks[0], shape.n, shape.out_hw[0]), chip.cores_of("vector"))
