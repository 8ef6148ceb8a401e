"""Pieces of attention whose scores fit in L2, and how tall a block the cube can take of them."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError
from ascend_lab.isa import Affine, Buffer, KernelBuilder, Region
from ascend_lab.kernels.flash_gm import Tensors
from ascend_lab.kernels.flash_grid import Span
from ascend_lab.kernels.flash_shape import AREA, FlashShape
from ascend_lab.kernels.gemm_schedule import FRACTAL, up

SCORE_BYTES = 6
"""A score in fp32 and its weight in fp16."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Matrices and rows (in fractals) computed at a time; `room` is the most of both."""

    shape: FlashShape
    chip: Chip
    first: int
    count: int
    top: int
    rows: int
    room: tuple[int, int]

    def tensors(self, k: KernelBuilder, *names: str) -> Tensors:
        """Declare tensors of the operator."""
        return Tensors.declare(k, self.shape, names)

    def space(self, k: KernelBuilder, name: str, dtype: str, columns: int) -> Buffer:
        """Declare a workspace of `columns` fractals a row."""
        return k.tensor(name, dtype, self.room[0] * columns * self.room[1] * AREA)

    def piece(self, space: Buffer, matrix: Affine, rows: Span, columns: Span) -> Region:
        """Return a block of a workspace: (columns, rows x 16)."""
        (count, height), (at, size) = self.room, rows
        each, pitch = space.elements // count, height * AREA
        start = matrix * each + columns[0] * pitch + at * AREA
        return space.region(start, (columns[1], size * AREA), (pitch, 1))

    def moved(self, matrix: Affine, rows: Span) -> tuple[Affine, Span]:
        """Return matrix and rows as the operator's tensors count them."""
        return matrix + self.first, (rows[0] + self.top, rows[1])


def chunks_of(shape: FlashShape, chip: Chip) -> list[Chunk]:
    """Cut the batch, or the rows of each matrix, into even chunks that fit in half of L2."""
    rows, keys, _, _ = shape.fractals
    lines = max(1, chip.l2.size_bytes // 2 // (keys * AREA * SCORE_BYTES))
    count = max(1, min(shape.batch, lines // rows))
    count = up(shape.batch, up(shape.batch, count))
    height = up(rows, up(rows, lines))
    return [
        Chunk(
            shape, chip, first, min(count, shape.batch - first), top, min(height, rows - top),
            (count, height),
        )
        for first in range(0, shape.batch, count)
        for top in range(0, rows, height)
    ]  # fmt: skip


def widest(chip: Chip) -> int:
    """Return the widest matrices, in fractals, of which two blocks of 16 rows fit every L0."""
    operands = min(chip.buffers["L0A"], chip.buffers["L0B"]) // (4 * AREA)
    return min(operands, chip.buffers["L0C"] // (8 * AREA))


def cube_block(shape: FlashShape, chip: Chip) -> int:
    """Return the side of a block of scores, in fractals, with two of everything in L0.

    Raises `CapacityError` if not even one fractal fits.
    """
    wide, room = max(shape.fractals[2:]), widest(chip)
    for side in (8, 4, 2, 1):
        if side * max(wide, side) <= room:
            return side
    raise CapacityError(
        f"blocks of 16 rows and width {wide * FRACTAL} twice in L0",
        f"room for width {room * FRACTAL} on {chip.name}",
        "use the operator attention",
    )
