"""What vector cores do to the sums of a cube core where both are cores of their own.

The fix pipe of the cube core takes what it can of an epilogue: bias, scale, ReLU, a conversion. A
special kernel may do the rest on vector cores in the same launch; tiles reach them through a ring:

    cube core -> ring of slots in GM, which stays in L2 -> vector cores -> GM

The kernel plugs in: modules of `ascend_lab.fused` list their programs as TAIL_PROGRAMS. Without it
such an epilogue has no kernel, and what follows the cube is a kernel of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ascend_lab.errors import UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.operators.kernels import epilogue, epilogue_plan
from ascend_lab.plugins import listed

SLOTS = 8
"""Tiles between a cube core and its vector cores: as many as PTO's rings have in one direction."""
AREA = isa.FRACTAL * isa.FRACTAL


@dataclass(frozen=True, slots=True)
class VectorTail:
    """What the vector cores of a `grid` of AI cores do after a cube that leaves `sums`.

    Tiles are `tile` fractals (high, wide) at most; the result has `blocks` of 16 columns, and
    `elements` in all.
    """

    tail: epilogue.Epilogue
    sums: str
    tile: tuple[int, int]
    grid: tuple[int, int]
    blocks: int
    elements: int

    @property
    def plan(self) -> epilogue_plan.Plan:
        """The steps on tiles of UB."""
        return epilogue_plan.plan_of(self.tail, self.sums)

    @property
    def ring(self) -> isa.Ring:
        """The ring of tiles, in the format the steps want: the fix pipe converts."""
        (m, n) = self.tile
        (rows, cols) = self.grid
        plan = self.plan
        return isa.Ring("tiles", plan.tiles[plan.start], m * n * AREA, SLOTS, rows * cols, 0, 1)

    def core(self, row: isa.Affine, col: isa.Affine) -> isa.Affine:
        """Return the number of an AI core of the grid."""
        return row * self.grid[1] + col


def tail_programs(kind: str) -> Callable[..., Any]:
    """Return the writer of the vector cores' programs behind a kind of cube kernel.

    "product": from its job, shares and tail to programs; "convolution": from its job and columns
    to writers. Raises `UnsupportedError` without such a special kernel.
    """
    writers: dict[str, Callable[..., Any]] = dict(listed("TAIL_PROGRAMS"))
    if kind in writers:
        return writers[kind]
    got = "no special kernel for vector cores"
    raise UnsupportedError("an epilogue that the fix pipe can do", got, "cut here")
