"""Max pooling of NC1HWC0 fp16 images on the vector unit.

A window of r x s is folded in two steps: the largest of s neighbours in every row of the image, for
as many columns as the output has, then the largest of r such rows. Rows are shared by windows that
overlap: 3 x 3 with a stride of 2 takes 6 comparisons for each result instead of 8.
"""

from dataclasses import replace

from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Launch, Program, Tile
from ascend_lab.operators.kernels import planes
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.planes import C0, PlaneShare, RowBlock, plane_launch
from ascend_lab.operators.kernels.rows import (
    LEAST,
    Grid,
    RowWriter,
    fold_largest,
    largest_lines,
    most_rows,
)


def max_pool_launch(shape: ConvShape, chip: Chip) -> Launch:
    """Return the launch from x (N, C1, H, W, C0) to the maxima y, on all vector cores.

    `shape` gives the windows in the form of a depthwise convolution in fp16. Raises `CapacityError`
    if one output row does not fit UB.
    """
    pooled = _as_one_image(shape)
    lines = largest_lines(pooled)
    rows_that_fit = most_rows(pooled, chip, lines)

    def program(share: PlaneShare) -> Program:
        rows = planes.rows_per_block(share, rows_that_fit)
        return _MaxPoolWriter("max_pool", pooled, chip, lines, rows, LEAST).program(share)

    return plane_launch(
        f"max_pool_{pooled.n}x{pooled.c}", planes.image_sizes(pooled, chip), program
    )


def row_fits(shape: ConvShape, chip: Chip) -> bool:
    """Tell whether UB has room for an output row, so that `max_pool_launch` has a kernel."""
    pooled = _as_one_image(shape)
    try:
        most_rows(pooled, chip, largest_lines(pooled))
    except CapacityError:
        return False
    return True


def _as_one_image(shape: ConvShape) -> ConvShape:
    """Return all planes as one image if no window would reach from one plane into the next."""
    (top, bottom, *_) = shape.pads
    plane_count = shape.n * shape.blocks[0]
    # Windows that touch but do not overlap, in whole rows: 2 x 2 with stride 2 on 56 rows.
    if shape.r != shape.strides[0] or shape.h % shape.r or top or bottom:
        return shape
    return replace(shape, n=1, c=C0, k=C0, groups=C0, h=plane_count * shape.h)


class _MaxPoolWriter(RowWriter):
    """Folds rows, then columns; a window of one row or column takes one step."""

    def compute(self, x: Tile, results: Tile, block: RowBlock) -> None:
        """Find the largest number of each window."""
        shape = self.shape
        lines = self.lines
        grid = lines.grid(shape, block.rows)
        if not lines.folded:
            all_taps = [i * lines.line + j for i in range(shape.r) for j in range(shape.s)]
            fold_largest(self.k, grid, all_taps, x, results)
            return
        # First the largest of s neighbours in each row, then of r such rows.
        fold_largest(self.k, grid, list(range(shape.s)), x, self.scratch)
        down = shape.strides[0] * lines.pitch
        columns = Grid(block.rows, lines.width, down, lines.pitch, 1)
        row_taps = [i * lines.pitch for i in range(shape.r)]
        fold_largest(self.k, columns, row_taps, self.scratch, results)
