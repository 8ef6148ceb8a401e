"""Rows picked by an index, element by element through the scalar unit: right for any width."""

from __future__ import annotations

from typing import Any

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, KernelBuilder, Program, Region
from ascend_lab.kernels.index_feed import l2_steps
from ascend_lab.kernels.rows import Table, Work


def single_program(chip: Chip, table: Table, work: Work, cores: int, *, mode: str) -> Program:
    """y[i] = x[index[i]] ("gather"), y[index[i]] = u[i] ("update") or += u[i] ("add").

    Every element costs S a trip to L2 per load and per store; V makes the sums.
    """
    writer = _Writer(chip, table, mode)
    k, columns = writer.k, table.columns
    core = k.param("core", cores)
    first, column = core * work.first_step + work.first, core * work.column_step + work.column
    with k.loop("p", work.picks) as p:
        k.scalar(writer.place, writer.index.region(first + p, 1), steps=writer.wait)
        with k.loop("j", work.width) as j:
            writer.element((first + p) * columns + column + j, column + j)
    return k.finish()


class _Writer:
    """`big` is the table rows are picked from, `small` holds the picked rows one after another."""

    def __init__(self, chip: Chip, table: Table, mode: str) -> None:
        self.k, self.mode, self.wait = KernelBuilder(f"single_{mode}", chip), mode, l2_steps(chip)
        k, dtype = self.k, table.dtype
        self.index = k.tensor("index", "int32", table.picks)
        names = ("x", "y") if mode == "gather" else ("y", "u")
        self.big = k.tensor(names[0], dtype, table.rows * table.columns)
        self.small = k.tensor(names[1], dtype, table.picks * table.columns)
        self.place = k.buffer("place", "UB", "int32", 1).region()
        self.one = k.buffer("one", "UB", dtype, 1).region()
        self.block = table.block
        if mode == "add":
            self.pair = k.queue("pair", "UB", dtype, 2 * table.block, src="S", dst="V", depth=1)
            self.sum = k.queue("sum", "UB", dtype, 1, src="V", dst="S", depth=1)
        self.pick: dict[str, Any] = {
            "index": self.place,
            "pitch": table.columns,
            "bound": table.rows,
            "steps": self.wait,
        }

    def element(self, at: Affine, column: Affine) -> None:
        """Emit the work of one element: `at` in `small`, `column` of the picked row."""
        near, far = self.small.region(at, 1), self.big.region(column, 1)
        if self.mode == "gather":
            self.k.scalar(self.one, far, **self.pick)
            self.k.scalar(near, self.one, steps=self.wait)
        elif self.mode == "update":
            self.k.scalar(self.one, near, steps=self.wait)
            self.k.scalar(far, self.one, **self.pick)
        else:
            self._add(near, far)

    def _add(self, near: Region, far: Region) -> None:
        tile, cell = self.pair.alloc(), (1, 1)
        self.k.scalar(tile.region(0, 1), near, steps=self.wait)
        self.k.scalar(tile.region(self.block, 1), far, **self.pick)
        self.pair.enqueue()
        tile = self.pair.dequeue()
        operands = tile.region(0, cell), tile.region(self.block, cell)
        self.k.vector("vadd", self.sum.alloc().region(0, cell), *operands)
        self.pair.free()
        self.sum.enqueue()
        self.k.scalar(far, self.sum.dequeue().region(), **self.pick)
        self.sum.free()
