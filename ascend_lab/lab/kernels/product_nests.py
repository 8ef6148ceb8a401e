"""A tiled matrix product with its three loops in any order, and the bytes that it moves."""

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip

AXES = {
    "a": (("m", "k"), "L0A", "fp16"),
    "b": (("k", "n"), "L0B", "fp16"),
    "c": (("m", "n"), "L0C", "fp32"),
}
"""Per operand of the nest: the loops it depends on, its buffer, its number format."""


def product_nest(chip: Chip, order: str, trips: Mapping[str, int], tile: int = 8) -> isa.Program:
    """Return C += A B in tiles of `tile` x `tile` fractals, loops in `order` from outer to inner.

    Every operand is loaded under the innermost loop that it depends on; C is stored where that
    loop's body ends. Tiles lie in GM one after the other. Barriers everywhere: it is for counting.
    """
    kernel = isa.KernelBuilder(order, chip)
    area = (tile * tile, 256)
    size = tile * tile * 256
    at = dict[str, isa.Affine]()
    gm = {x: kernel.tensor(x, t, size * trips[p] * trips[q]) for x, ((p, q), _, t) in AXES.items()}
    l0 = {x: kernel.buffer(f"{x}_l0", space, t, size) for x, (_, space, t) in AXES.items()}
    ub = kernel.buffer("c_ub", "UB", "fp32", size).region(0, area)

    def move(*way: isa.Region) -> None:
        for src, dst in pairwise(way):
            (kernel.load2d if dst.space in ("L0A", "L0B") else kernel.copy)(dst, src)
            kernel.barrier()

    with ExitStack() as loops:
        for axis in order:
            at[axis] = loops.enter_context(kernel.loop(axis, trips[axis]))
            for x, ((p, q), _, _) in AXES.items():
                # With loops m, k, n open so far m and k: A is loaded here, B and C in loop n.
                if axis not in (p, q) or not {p, q} <= set(at):
                    continue
                on_core = l0[x].region(0, area)
                in_gm = gm[x].region((at[p] * trips[q] + at[q]) * size, area)
                move(*((in_gm, ub, on_core) if x == "c" else (in_gm, on_core)))
                if x == "c":
                    loops.callback(move, on_core, ub, in_gm)
        kernel.mmad(*(l0[x].region(0, (tile, tile, 16, 16)) for x in "cab"), accumulate=1)
        kernel.barrier()
    return kernel.finish()


def nest_bytes(program: isa.Program, chip: Chip) -> dict[str, int]:
    """Return the bytes of A, B and C that such a program moves; C counts on its way in and out."""
    moved = sim.simulate(program, chip).path_bytes
    c_bytes = moved["GM", "UB"] + moved["UB", "GM"]
    return {"A": moved["GM", "L0A"], "B": moved["GM", "L0B"], "C": c_bytes}


def in_tiles(matrix: npt.NDArray[np.generic], operand: str) -> npt.NDArray[np.generic]:
    """Return a matrix fractal after fractal, as operand `"a"`, `"b"` or `"c"` lies in GM.

    >>> matrix = np.arange(32 * 16).reshape(32, 16)
    >>> in_tiles(matrix, "a")[:3], in_tiles(matrix, "b")[:3]
    (array([0, 1, 2]), array([ 0, 16, 32]))
    """
    rows, columns = matrix.shape
    fractals = matrix.reshape(rows // 16, 16, columns // 16, 16).swapaxes(1, 2)
    # The cube takes the fractals of B with their columns in one piece.
    return (fractals.swapaxes(2, 3) if operand == "b" else fractals).ravel()
