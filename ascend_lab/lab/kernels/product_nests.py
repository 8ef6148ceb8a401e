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
    index_of = dict[str, isa.Affine]()
    gm_tensors = {}
    l0_buffers = {}
    for operand, (axes, space, dtype) in AXES.items():
        tiles = trips[axes[0]] * trips[axes[1]]
        gm_tensors[operand] = kernel.tensor(operand, dtype, size * tiles)
        l0_buffers[operand] = kernel.buffer(f"{operand}_l0", space, dtype, size)
    ub = kernel.buffer("c_ub", "UB", "fp32", size).region(0, area)

    def move(*stations: isa.Region) -> None:
        """Copy a tile from the first region to the next, and so on."""
        for src, dst in pairwise(stations):
            copy = kernel.load2d if dst.space in ("L0A", "L0B") else kernel.copy
            copy(dst, src)
            kernel.barrier()

    with ExitStack() as loops:
        for axis in order:
            index_of[axis] = loops.enter_context(kernel.loop(axis, trips[axis]))
            for operand, ((row, column), _, _) in AXES.items():
                # With loops m, k, n open so far m and k: A is loaded here, B and C in loop n.
                if axis not in (row, column) or not {row, column} <= set(index_of):
                    continue
                on_core = l0_buffers[operand].region(0, area)
                tile_number = index_of[row] * trips[column] + index_of[column]
                in_gm = gm_tensors[operand].region(tile_number * size, area)
                if operand == "c":
                    move(in_gm, ub, on_core)
                    loops.callback(move, on_core, ub, in_gm)
                else:
                    move(in_gm, on_core)
        kernel.mmad(*(l0_buffers[x].region(0, (tile, tile, 16, 16)) for x in "cab"), accumulate=1)
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
