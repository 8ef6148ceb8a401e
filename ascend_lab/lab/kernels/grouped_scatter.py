"""A kernel that adds rows to a table whose indices are known before the launch.

The updates of one row of the table are brought together and summed in UB, so that memory is touched
once a row: of indices 5, 2, 5, 5 the three updates of row 5 become one atomic addition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import kernels
from ascend_lab.operators.kernels.indexed_rows import BATCH, IndexFeed, Table, batches

MAX_UPDATES = 64
"""Most updates of one row that a core sums before it writes to memory; a row with more is treated
as several rows."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` rows that get `updates` updates each, and their places in the lists of `Groups`."""

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
    """Sort rows by how many updates they get; divide the rows of every count among the cores.

    A target is a row, or 64 of its updates if it has more.
    """
    flat = kernels.check_indices(indices, rows)
    # number the updates of each row, and so the pieces of up to 64 that they fall into
    updates_by_row = np.argsort(flat, kind="stable")
    starts = np.searchsorted(flat[updates_by_row], flat[updates_by_row])
    piece = np.empty(flat.size, np.int64)
    piece[updates_by_row] = (np.arange(flat.size) - starts) // MAX_UPDATES
    targets, target_of_update, counts = np.unique(
        flat + piece * rows, return_inverse=True, return_counts=True
    )
    # updates in the order of their targets, those with few updates first
    targets_by_count = np.argsort(counts, kind="stable")
    place = np.empty(targets.size, np.int64)
    place[targets_by_count] = np.arange(targets.size)
    order = np.argsort(place[target_of_update], kind="stable")
    runs: list[list[Run]] = [[] for _ in range(cores)]
    order_start = 0
    index_start = 0
    for updates in map(int, np.unique(counts)):
        total = int(np.sum(counts == updates))  # targets with so many updates
        rows_per_core = -(-total // cores)
        for core in range(-(-total // rows_per_core)):
            earlier_rows = core * rows_per_core
            run = Run(
                updates=updates,
                count=min(rows_per_core, total - earlier_rows),
                order_start=order_start + earlier_rows * updates,
                index_start=index_start + earlier_rows,
            )
            runs[core].append(run)
        order_start += total * updates
        index_start += total
    index = (targets[targets_by_count] % rows).astype(np.int32)
    return Groups(order.astype(np.int32), index, tuple(tuple(run) for run in runs if run))


def grouped_launch(
    chip: Chip, groups: Groups, rows: int, columns: int, picks: int, dtype: str
) -> isa.Launch:
    """Return the launch that adds `picks` updates u to y (rows, columns).

    Its tensors are u, order, index and y. Additions are atomic copies of rows of whole 32-byte
    blocks.
    """
    table = Table(rows, columns, picks, dtype)
    parts = []
    for core_runs in groups.cores:
        k = isa.KernelBuilder("scatter_add_grouped", chip)
        writer = _ListWriter(k, groups, core_runs, table)
        for run in core_runs:
            # rows whose updates fill a batch of indices, a multiple of 8
            batch_rows = max(BATCH // run.updates // 8 * 8, 8)
            for first_row, count in batches(k, "t", run.count, batch_rows):
                writer.batch(run, first_row, count)
        parts.append(isa.Part(k.finish()))
    return isa.Launch("scatter_add_grouped", tuple(parts))


class _ListWriter:
    """Loads rows of u by `order`, sums those of one row of y, stores by `index`."""

    def __init__(
        self, k: isa.KernelBuilder, groups: Groups, core_runs: Sequence[Run], table: Table
    ) -> None:
        self.k = k
        self.table = table
        columns = table.columns
        self.u = k.tensor("u", table.dtype, table.index_count * columns)
        self.y = k.tensor("y", table.dtype, table.rows * columns)
        order = k.tensor("order", "int32", groups.order.size)
        self.order = IndexFeed.make(k, order, "MTE2", most=8 * MAX_UPDATES)
        self.index = IndexFeed.make(k, k.tensor("index", "int32", groups.index.size), "MTE3")
        self.sums = max(run.updates for run in core_runs) > 1
        row_bytes = columns * layout.item_bytes(table.dtype)
        # a tile has up to 8 rows; both slots of its queue take at most half of UB
        self.tile_rows = max(min(8, k.chip.buffers["UB"] // 2 // (2 * row_bytes)), 1)
        reader = "V" if self.sums else "MTE3"
        self.rows = k.queue(
            "rows", "UB", table.dtype, self.tile_rows * columns, src="MTE2", dst=reader
        )
        if self.sums:
            self.total = k.queue("total", "UB", table.dtype, columns, src="V", dst="MTE3")

    def batch(self, run: Run, first_row: isa.Affine | int, count: int) -> None:
        """Emit `count` rows of a run, from row `at` of it on."""
        self.order.open(first_row * run.updates + run.order_start, count * run.updates)
        self.index.open(first_row + run.index_start, count)
        if self.sums:
            first_count = min(run.updates, self.tile_rows)
            full_batches, last_count = divmod(run.updates - first_count, self.tile_rows)
            with self.k.loop("r", count) as r:
                begin = r * run.updates
                total = self.total.alloc()
                self._add(total, begin, first_count, fresh=True)
                if full_batches:
                    with self.k.loop("m", full_batches) as m:
                        self._add(total, begin + first_count + m * self.tile_rows, self.tile_rows)
                if last_count:
                    self._add(total, begin + (run.updates - last_count), last_count)
                self.total.enqueue()
                self._store(self.total.dequeue(), 0, r)
                self.total.free()
        else:
            for first, row_count in batches(self.k, "r", count, self.tile_rows):
                self._load(isa.Affine() + first, row_count)
                tile = self.rows.dequeue()
                with self.k.loop("g", row_count) as g:
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
        """Add the row at `place` of a tile to the row of y that index i of the batch names."""
        columns = self.table.columns
        row = self.index.index_region(i)
        source = tile.region(place, columns)
        target = self.y.region(0, columns)
        self.k.copy_row(target, source, row, columns, self.table.rows, atomic="add")

    def _add(self, total: isa.Tile, first: isa.Affine, count: int, *, fresh: bool = False) -> None:
        """Add `count` rows of u to a total; `fresh` copies the first of them into it."""
        self._load(first, count)
        tile = self.rows.dequeue()
        columns = self.table.columns
        if fresh:
            self.k.copy(total.region(), tile.region(0, columns))
        first_added = 1 if fresh else 0
        with self.k.loop("a", count - first_added) as a:
            row = (tile, (a + first_added) * columns)
            self.k.each("vadd", columns, (total, 0), (total, 0), row)
        self.rows.free()
