"""The largest number of each window of NC1HWC0 images, on the vector unit.

A window of r x s is folded in two steps: the largest of s neighbours in every row of the image, for
as many columns as the output has, then the largest of r such rows. Rows are shared by windows that
overlap: 3 x 3 with a stride of 2 takes 6 comparisons for each result instead of 8.
"""

import math
from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.isa import Buffer, Launch, Program, Tile
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import up
from ascend_lab.kernels.planes import (
    C0,
    Own,
    RowBlock,
    columns_seen,
    image_sizes,
    plane_launch,
    rows_per_block,
)
from ascend_lab.kernels.rows import Grid, Lines, RowWriter, most_rows

Place = Tile | Buffer
LEAST = -math.inf
"""What stands around an image whose largest numbers are sought: no number is smaller."""


def max_pool_launch(shape: ConvShape, chip: Chip) -> Launch:
    """Return the largest number of each window, x (N, C1, H, W, C0) to y, on all vector cores.

    The windows are those of a depthwise convolution in fp16. Raises `CapacityError` where one
    output row does not fit UB.
    """
    shape = _stacked(shape)
    lines = _lines(shape)
    most = most_rows(shape, chip, lines)

    def program(own: Own) -> Program:
        rows = rows_per_block(own, most)
        return _Writer("max_pool", shape, chip, lines, rows, LEAST).program(own)

    return plane_launch(f"max_pool_{shape.n}x{shape.c}", image_sizes(shape, chip), program)


def _stacked(shape: ConvShape) -> ConvShape:
    """Return all planes as one image where no window reaches from one to the next."""
    (top, bottom, *_), planes = shape.pads, shape.n * shape.blocks[0]
    if shape.r != shape.strides[0] or shape.h % shape.r or top or bottom:
        return shape
    return replace(shape, n=1, c=C0, k=C0, groups=C0, h=planes * shape.h)


def _lines(shape: ConvShape) -> Lines:
    """Return rows whose results lie as far apart as what they read of the image."""
    pitch = up(columns_seen(shape)[0], shape.strides[1])
    folded = min(shape.r, shape.s) > 1
    return Lines(pitch * shape.strides[1], pitch, shape.out_hw[1], folded)


class _Writer(RowWriter):
    """Folds rows, then columns; a window of one row or column takes one step."""

    def compute(self, x: Tile, results: Tile, block: RowBlock) -> None:
        """Find the largest number of each window."""
        shape, lines = self.shape, self.lines
        grid = lines.grid(shape, block.rows)
        if not lines.folded:
            taps = [i * lines.line + j for i in range(shape.r) for j in range(shape.s)]
            self._fold(grid, taps, x, results)
            return
        self._fold(grid, list(range(shape.s)), x, self.beside)
        pitch, down = lines.pitch, shape.strides[0] * lines.pitch
        columns = Grid(block.rows, lines.width, down, pitch, 1)
        self._fold(columns, [i * pitch for i in range(shape.r)], self.beside, results)

    def _fold(self, grid: Grid, taps: list[int], source: Place, target: Place) -> None:
        """Write the largest of what lies so many pixels behind each place of a grid."""
        for run in grid.runs(self.k):
            total, (one, *others) = run.written(target), [run.read(source, tap) for tap in taps]
            for number, other in enumerate(others or [one]):
                self.k.vector("vmax", total, total if number else one, other)
