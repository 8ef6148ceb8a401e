"""Which core computes which rows of which matrix: a grid over the batch and over blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ascend_lab.isa import Affine, KernelBuilder, Launch, Part, Program, binding_of
from ascend_lab.kernels.gemm_schedule import up
from ascend_lab.kernels.tiles import by_size, chunks, repeat, segments

Span = tuple[Affine, int]
"""(start, size) of a block along one axis, in fractals."""

Share = tuple[int, int, int]
"""What a part owns of an axis: its size, the pitch between cores, the number of positions."""

Own = tuple[Share, Share]
"""What a part owns of the batch and of the rows."""


def grid(batch: int, blocks: int, cores: int) -> tuple[int, int]:
    """Return cores over the batch and over row blocks: the fewest blocks for the busiest core."""

    def busiest(over: int) -> tuple[int, int]:
        return up(batch, over) * up(blocks, min(blocks, cores // over)), -over

    over = min(range(1, min(batch, cores) + 1), key=busiest)
    return over, min(blocks, cores // over)


def spread(
    name: str,
    batch: int,
    rows: int,
    block: int,
    cores: tuple[int, int],
    program: Callable[[Own], Program],
) -> Launch:
    """Return a launch of `program(own)` over `batch` matrices and `rows`, in blocks of `block`.

    Rows count fractals; `cores` is the grid. Cores with equal shares are one part.
    """
    matrices, heights = chunks(batch, 1, cores[0]), chunks(rows, block, cores[1])
    parts = []
    for count, groups in by_size(matrices).items():
        for size, places in by_size(heights).items():
            own = (count, matrices[0], groups[-1] + 1), (size, heights[0], places[-1] + 1)
            bound = [binding_of({"group": g, "row": r}) for g in groups for r in places]
            parts.append(Part(program(own), tuple(bound)))
    return Launch(name, tuple(parts))


def walk(k: KernelBuilder, own: Own, block: int) -> Iterator[tuple[Affine, Span]]:
    """Yield (matrix, rows) of every block a core owns, in loops."""
    (count, batch_pitch, groups), (rows, row_pitch, positions) = own
    first = k.param("group", groups) * batch_pitch
    top = k.param("row", positions) * row_pitch
    with repeat(k, "matrix", count) as index:
        for at, size in segments(k, "block", rows, block):
            yield first + index, (top + at, size)
