"""Vector work on NC1HWC0 images: which core takes which planes and rows, and row blocks in UB.

A plane is one channel block of one image, (H, W, C0). Channel blocks, images and output rows are
divided over the vector cores; each core walks its planes in blocks of output rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, KernelBuilder, Launch, Part, Program, binding_of
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import up
from ascend_lab.kernels.tiles import by_size, chunks, repeat


@dataclass(frozen=True, slots=True)
class Share:
    """What the cores of one part own: channel blocks and images (size, pitch, count), rows."""

    channels: tuple[int, int, int]
    images: tuple[int, int, int]
    rows: tuple[int, int]

    @property
    def planes(self) -> int:
        """Planes of one core."""
        return self.channels[0] * self.images[0]


def vector_cores(chip: Chip) -> int:
    """Cores that run vector work."""
    return chip.core_count * chip.vector_cores_per_core


def plane_launch(
    name: str, shape: ConvShape, chip: Chip, make: Callable[[Share], Program]
) -> Launch:
    """Divide channel blocks, images and output rows over the vector cores; `make` one program."""
    (c1, _), rows = shape.blocks, shape.out_hw[0]
    grid = _grid((c1, shape.n, rows), vector_cores(chip))
    channels, images, bands = (
        chunks(total, 1, cores) for total, cores in zip((c1, shape.n, rows), grid, strict=True)
    )
    parts = []
    for (c, c_ids), (n, n_ids) in product(by_size(channels).items(), by_size(images).items()):
        for band, size in enumerate(bands):
            own = (band * bands[0], band * bands[0] + size)
            share = Share((c, channels[0], c_ids[-1] + 1), (n, images[0], n_ids[-1] + 1), own)
            binds = [binding_of({"channel": i, "batch": j}) for i in c_ids for j in n_ids]
            parts.append(Part(make(share), tuple(binds)))
    return Launch(name, tuple(parts))


def _grid(totals: tuple[int, int, int], cores: int) -> tuple[int, ...]:
    """Return how many cores divide each axis: the least work of a core, then the fewest bands."""
    options = []
    for c in range(1, min(totals[0], cores) + 1):
        for n in range(1, min(totals[1], cores // c) + 1):
            rows = min(totals[2], cores // (c * n))
            work = up(totals[0], c) * up(totals[1], n) * up(totals[2], rows)
            options.append((work, rows, (c, n, rows)))
    return min(options)[2]


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


def row_block(shape: ConvShape, start: int, rows: int) -> RowBlock:
    """Return what `rows` output rows from `start` on see of the image."""
    seen = (rows - 1) * shape.strides[0] + shape.reach[0]
    low = start * shape.strides[0] - shape.pads[0]
    first, end = max(low, 0), min(low + seen, shape.h)
    before = min(max(-low, 0), seen)
    return RowBlock(start, rows, min(first, shape.h - 1), max(end - first, 0), before, seen)


def row_runs(shape: ConvShape, own: tuple[int, int], size: int) -> list[tuple[int, RowBlock]]:
    """Cut output rows into blocks of `size`; (how often, first block) of equal ones in a row."""
    runs: list[tuple[int, RowBlock]] = []
    for start in range(own[0], own[1], size):
        block = row_block(shape, start, min(size, own[1] - start))
        if runs:
            count, head = runs[-1]
            moved = head.first + count * head.rows * shape.strides[0]
            same = (head.rows, head.count, head.before) == (block.rows, block.count, block.before)
            if same and block.first == moved and block.count:
                runs[-1] = (count + 1, head)
                continue
        runs.append((1, block))
    return runs


def rows_per_block(own: Share, most: int) -> int:
    """Rows of a block: as many as fit, but four blocks a core where that is possible."""
    rows = own.rows[1] - own.rows[0]
    return max(1, min(most, up(rows, up(4, own.planes))))


@dataclass(frozen=True, slots=True)
class Place:
    """One block of one plane: channel block, image, the block, and its turn in a run."""

    channel: Affine
    image: Affine
    block: RowBlock
    turn: Affine


def places(
    k: KernelBuilder,
    shape: ConvShape,
    own: Share,
    size: int,
    around: Callable[[Affine], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Place]:
    """Walk the blocks of a core: channel blocks (each inside `around`), images, row blocks."""
    (c, c_pitch, c_count), (n, n_pitch, n_count) = own.channels, own.images
    first_c, first_n = k.param("channel", c_count) * c_pitch, k.param("batch", n_count) * n_pitch
    with repeat(k, "c", c) as index, around(first_c + index), repeat(k, "image", n) as image:
        for count, block in row_runs(shape, own.rows, size):
            with repeat(k, "run", count) as turn:
                yield Place(first_c + index, first_n + image, block, turn)


def columns_seen(shape: ConvShape) -> tuple[int, int, int]:
    """Return (columns all windows of a row span, zeros on the left, image columns among them)."""
    seen = (shape.out_hw[1] - 1) * shape.strides[1] + shape.reach[1]
    left = min(shape.pads[2], seen)
    return seen, left, max(0, min(shape.w, seen - left))
