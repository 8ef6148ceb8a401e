"""The part of an epilogue that vector cores do, on chips with separate cube and vector cores.

The fix pipe of the cube core does what it can of an epilogue: bias, scale, ReLU, a conversion. A
special kernel may do the rest (the tail) on vector cores in the same launch; tiles of sums reach
them through a ring:

    cube core -> ring of slots in GM, which stays in L2 -> vector cores -> GM

The programs of the vector cores are optional: modules of `ascend_lab.fused` list them as
TAIL_PROGRAMS. Without them, the operators that follow the cube become a separate kernel.
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
"""Elements of a fractal of sums: 16 x 16."""


@dataclass(frozen=True, slots=True)
class VectorTail:
    """The work of the vector cores of a `grid` of AI cores, on tiles in the format `sums`.

    Tiles have at most `tile` fractals (high, wide); the result has `blocks` blocks of 16 columns,
    and `elements` elements in all.
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
        """The ring of tiles, in the format in which the steps read them: the fix pipe converts."""
        (m, n) = self.tile
        (rows, cols) = self.grid
        plan = self.plan
        size = m * n * AREA
        arriving_dtype = plan.tiles[plan.start]
        cores = rows * cols
        return isa.Ring("tiles", arriving_dtype, size, SLOTS, cores, ready=0, empty=1)

    def core(self, row: isa.Affine, col: isa.Affine) -> isa.Affine:
        """Return the number of an AI core of the grid."""
        return row * self.grid[1] + col


def tail_programs(kind: str) -> Callable[..., Any]:
    """Return the function that writes the vector cores' programs after a cube kernel.

    For `kind` "product" it takes the job, shares and tail and returns programs; for "convolution"
    it takes the job and columns and returns writers. Raises `UnsupportedError` if no module
    provides such a function.
    """
    writers: dict[str, Callable[..., Any]] = dict(listed("TAIL_PROGRAMS"))
    if kind in writers:
        return writers[kind]
    got = "no special kernel for vector cores"
    raise UnsupportedError("an epilogue that the fix pipe can do", got, "cut here")
