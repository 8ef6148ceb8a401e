"""Certified lower bounds on the simulated cycles of every tiling of a space.

Three of them, each tighter and dearer than the last: closed forms for the whole table; a walk
through the kernels of some tilings, side by side; the simulator itself. None ends before memory has
moved its bytes, and the host's launch is counted.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ascend_lab.aoe.cube.pipe_work import After, after_of, closed_bounds, turns_of
from ascend_lab.aoe.cube.space import Array, Columns, Shape
from ascend_lab.aoe.cube.walk import Walk
from ascend_lab.aoe.cube.work import CubeWork, Floats, conv_work, gemm_work, rows_of
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.gemm_schedule import FRACTAL

TURNS = 1024
"""Turns of the cube that a walk follows; what remains then counts by the busiest pipe."""


@dataclass(frozen=True, slots=True)
class CubeProblem:
    """A product or a convolution on a chip, what follows it, and what L2 holds at the start.

    `warm`: "a" (rows, pixels), "b" (columns, weights), or names of operands of the epilogue.
    """

    shape: Shape
    chip: Chip
    epilogue: Epilogue | None = None
    warm: frozenset[str] = frozenset()


class Bounds:
    """Lower bounds for the rows of a table; the loads and sums are computed once."""

    def __init__(self, problem: CubeProblem, table: Columns) -> None:
        """Prepare the rows of `table`."""
        shape, chip, warm = problem.shape, problem.chip, problem.warm
        if isinstance(shape, ConvShape):
            self.job: CubeWork = conv_work(shape, chip, table, warm)
        else:
            self.job = gemm_work(shape, chip, table, warm)
        self.after: After = after_of(self.job, problem.epilogue, shape.out_dtype, warm)
        self.least = _memory_cycles(self.job, self.after, warm)
        self.launch_cycles = round(chip.launch_overhead_s * chip.clock_hz)

    @cached_property
    def closed(self) -> Floats:
        """The bounds in closed form, for all rows."""
        core = closed_bounds(self.job, self.after)
        return np.maximum(core, self.least) + self.launch_cycles

    def walked(self, rows: Array) -> Floats:
        """Return tighter bounds of some rows, by walking through their kernels."""
        order = np.argsort(self.turns[rows], kind="stable")
        out = np.zeros(len(rows))
        for part in np.array_split(order, max(1, len(order) // 2048)):
            walk = Walk(rows_of(self.job, rows[part]), rows_of(self.after, rows[part]))
            out[part] = walk.run(TURNS)
        return np.maximum(out + self.launch_cycles, self.closed[rows])

    @cached_property
    def turns(self) -> Array:
        """Turns of the cube on one core, per row."""
        w = self.job.work
        return turns_of(self.job) * w.m_tiles * w.n_tiles * w.bundles


def _memory_cycles(job: CubeWork, after: After, warm: Collection[str]) -> Floats:
    """Cycles memory needs for what is read once and not in L2, and for what L2 cannot keep."""
    chip = job.chip
    elements = job.out_pixels * job.out_blocks * FRACTAL
    operands = after.epilogue.of_kind("tile") if after.epilogue else ()
    cold = [o for o in operands if o.name.partition(".")[0] not in warm]
    width = sum(DTYPE_BYTES[o.dtype] for o in cold) if chip.combined else 0
    more = np.where(job.work.ragged, 0, elements * width)
    read = job.a.fetched_bytes + job.b.fetched_bytes + more
    written = elements * DTYPE_BYTES[after.out_dtype]
    total = read + max(0, written - chip.l2.size_bytes)
    cycles: Floats = np.ceil(total / chip.device_memory.rate_bytes_per_s * chip.clock_hz - 1e-9)
    return cycles
