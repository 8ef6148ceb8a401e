"""Add rows whose indices are known before the launch: updates of one row brought together.

They are summed in UB, so that memory is touched once a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import kernels
from ascend_lab.operators.kernels.indexed_rows import BATCH, IndexFeed, Table, batches

MOST = 64
"""Most updates of one row that a core sums before it goes to memory."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` rows that get `updates` updates each."""

    updates: int
    count: int
    order_start: int
    index_start: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Updates in the order they are made, their rows, and the runs of all cores.

    `order` says which update comes next, `index` which row it goes to.
    """

    order: np.ndarray
    index: np.ndarray
    cores: tuple[tuple[Run, ...], ...]


def group_indices(indices: np.ndarray, rows: int, cores: int) -> Groups:
    """Sort rows by how many updates they get; deal the rows of every count over the cores."""
    flat = kernels.check_indices(indices, rows)
    by_row = np.argsort(flat, kind="stable")
    starts = np.searchsorted(flat[by_row], flat[by_row])
    piece = np.empty(flat.size, np.int64)
    piece[by_row] = (np.arange(flat.size) - starts) // MOST
    unique, where, counts = np.unique(flat + piece * rows, return_inverse=True, return_counts=True)
    by_count = np.argsort(counts, kind="stable")
    place = np.empty(unique.size, np.int64)
    place[by_count] = np.arange(unique.size)
    order = np.argsort(place[where], kind="stable")
    runs: list[list[Run]] = [[] for _ in range(cores)]
    order_start = index_start = 0
    for count in (int(n) for n in np.unique(counts)):
        total = int(np.sum(counts == count))
        per = -(-total // cores)
        for core in range(-(-total // per)):
            size = min(per, total - core * per)
            begin = order_start + core * per * count, index_start + core * per
            runs[core].append(Run(count, size, *begin))
        order_start = order_start + total * count
        index_start = index_start + total
    index = (unique[by_count] % rows).astype(np.int32)
    return Groups(order.astype(np.int32), index, tuple(tuple(r) for r in runs if r))


def grouped_launch(
    chip: Chip, groups: Groups, rows: int, columns: int, picks: int, dtype: str
) -> isa.Launch:
    """Add `picks` updates u to y (rows, columns) by lists; tensors u, order, index, y.

    Adds go through atomic copies of rows of whole 32-byte blocks.
    """
    table = Table(rows, columns, picks, dtype)
    parts = []
    for mine in groups.cores:
        k = isa.KernelBuilder("scatter_add_grouped", chip)
        writer = _ListWriter(k, groups, mine, table)
        for run in mine:
            for at, count in batches(k, "t", run.count, max(BATCH // run.updates // 8 * 8, 8)):
                writer.batch(run, at, count)
        parts.append(isa.Part(k.finish()))
    return isa.Launch("scatter_add_grouped", tuple(parts))


class _ListWriter:
    """Loads rows of u by `order`, sums those of one row of y, stores by `index`."""

    def __init__(
        self, k: isa.KernelBuilder, groups: Groups, mine: Sequence[Run], table: Table
    ) -> None:
        self.k = k
        self.table = table
        columns = table.columns
        self.u = k.tensor("u", table.dtype, table.index_count * columns)
        self.y = k.tensor("y", table.dtype, table.rows * columns)
        order = k.tensor("order", "int32", groups.order.size)
        self.order = IndexFeed.make(k, order, "MTE2", most=8 * MOST)
        self.index = IndexFeed.make(k, k.tensor("index", "int32", groups.index.size), "MTE3")
        self.sums = max(run.updates for run in mine) > 1
        row_bytes = columns * layout.item_bytes(table.dtype)
        self.some = max(min(8, k.chip.buffers["UB"] // 2 // (2 * row_bytes)), 1)
        drain = "V" if self.sums else "MTE3"
        self.rows = k.queue("rows", "UB", table.dtype, self.some * columns, src="MTE2", dst=drain)
        if self.sums:
            self.total = k.queue("total", "UB", table.dtype, columns, src="V", dst="MTE3")

    def batch(self, run: Run, at: isa.Affine | int, count: int) -> None:
        """Emit `count` rows of a run, from row `at` of it on."""
        self.order.open(at * run.updates + run.order_start, count * run.updates)
        self.index.open(at + run.index_start, count)
        if self.sums:
            head = min(run.updates, self.some)
            full, rest = divmod(run.updates - head, self.some)
            with self.k.loop("r", count) as r:
                begin = r * run.updates
                total = self.total.alloc()
                self._add(total, begin, head, fresh=True)
                if full:
                    with self.k.loop("m", full) as m:
                        self._add(total, begin + head + m * self.some, self.some)
                if rest:
                    self._add(total, begin + (run.updates - rest), rest)
                self.total.enqueue()
                self._store(self.total.dequeue(), 0, r)
                self.total.free()
        else:
            for first, some in batches(self.k, "r", count, self.some):
                self._load(isa.Affine() + first, some)
                tile = self.rows.dequeue()
                with self.k.loop("g", some) as g:
                    self._store(tile, g * self.table.columns, first + g)
                self.rows.free()
        self.order.close()
        self.index.close()

    def _load(self, first: isa.Affine, count: int) -> None:
        """Bring the rows of u that indices first .. first+count-1 of the batch name."""
        tile = self.rows.alloc()
        columns = self.table.columns
        with self.k.loop("l", count) as i:
            target = tile.region(i * columns, columns)
            row = self.order.index_region(first + i)
            self.k.copy_row(target, self.u.region(0, columns), row, columns, self.table.index_count)
        self.rows.enqueue()

    def _store(self, tile: isa.Tile, place: isa.Affine | int, i: isa.Affine) -> None:
        columns = self.table.columns
        row = self.index.index_region(i)
        source = tile.region(place, columns)
        goal = self.y.region(0, columns)
        self.k.copy_row(goal, source, row, columns, self.table.rows, atomic="add")

    def _add(self, total: isa.Tile, first: isa.Affine, count: int, *, fresh: bool = False) -> None:
        self._load(first, count)
        tile = self.rows.dequeue()
        columns = self.table.columns
        if fresh:
            self.k.copy(total.region(), tile.region(0, columns))
        with self.k.loop("a", count - fresh) as a:
            row = tile, (a + int(fresh)) * columns
            self.k.each("vadd", columns, (total, 0), (total, 0), row)
        self.rows.free()
