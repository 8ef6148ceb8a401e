"""Scatter with indices that are known before the launch: grouped by owner, or sorted.

"owner" gives every core a range of destination rows; S looks at all indices, and the core makes
its own updates, in their order. "sorted" brings updates of one row together: an update keeps only
the last, an add sums them in UB and touches memory once a row.
"""

from dataclasses import dataclass

import numpy as np

from ascend_lab import errors, isa, kernels, layout
from ascend_lab.chip import Chip
from ascend_lab.isa.operands import ATOMIC_FORMATS
from ascend_lab.kernels.indexed_rows import BATCH, Feed, Table, batches

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
class CoreList:
    """What one core does: `runs`, on the destination rows first .. first+rows-1."""

    runs: tuple[Run, ...]
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Updates in the order they are made, their rows, and the lists of all cores.

    `order` says which update comes next, `index` which row it goes to, counted from the core's
    first row; `looks` is how many indices S looks at on every core.
    """

    order: np.ndarray
    index: np.ndarray
    cores: tuple[CoreList, ...]
    looks: int

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors `order` and `index` to execute the launch with."""
        return {"order": self.order, "index": self.index}


def group_indices(
    indices: np.ndarray, rows: int, cores: int, *, mode: str = "update", method: str = "sorted"
) -> Groups:
    """Return the lists for `cores` cores. Raises `InputError` for bad indices and names."""
    if mode not in ("update", "add") or method not in ("owner", "sorted"):
        wanted, got = "mode update or add, method owner or sorted", f"{mode}, {method}"
        raise errors.InputError(wanted, got, "choose one of each")
    flat = kernels.check_indices(indices, rows)
    if method == "sorted" and mode == "add":
        return _by_count(flat, rows, cores)
    order = np.argsort(flat, kind="stable")
    if method == "sorted":
        last = np.append(flat[order][1:] != flat[order][:-1], True)
        order = order[last]
    else:
        per = -(-rows // cores)
        order = np.argsort(flat // per, kind="stable")
    return _by_range(flat, order, rows, cores, flat.size if method == "owner" else 0)


def _by_range(flat: np.ndarray, order: np.ndarray, rows: int, cores: int, looks: int) -> Groups:
    """Give every core an equal range of rows and the updates that fall into it."""
    per = -(-rows // cores)
    owner = flat[order] // per
    lists = []
    for core in np.unique(owner):
        places = np.flatnonzero(owner == core)
        start, first = int(places[0]), int(core) * per
        run = Run(1, places.size, start, start)
        lists.append(CoreList((run,), first, min(per, rows - first)))
    local = flat[order] - owner * per
    return Groups(order.astype(np.int32), local.astype(np.int32), tuple(lists), looks)


def _by_count(flat: np.ndarray, rows: int, cores: int) -> Groups:
    """Sort rows by how many updates they get; deal the rows of every count over the cores."""
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
        order_start, index_start = order_start + total * count, index_start + total
    lists = tuple(CoreList(tuple(r), 0, rows) for r in runs if r)
    index = (unique[by_count] % rows).astype(np.int32)
    return Groups(order.astype(np.int32), index, lists, 0)


def grouped_launch(
    chip: Chip, groups: Groups, rows: int, columns: int, picks: int, dtype: str, *, mode: str
) -> isa.Launch:
    """Scatter `picks` updates u into y (rows, columns) by lists; tensors u, order, index, y.

    Adds go through atomic copies. Raises `ShapeError` for rows that are not whole 32-byte blocks,
    `TypeMismatchError` for an add in a format memory cannot add.
    """
    table = Table(rows, columns, picks, dtype)
    if columns % table.block:
        wanted, got = f"rows of whole blocks, multiples of {table.block} columns", str(columns)
        raise errors.ShapeError(wanted, got, "pad them")
    if mode == "add" and dtype not in ATOMIC_FORMATS:
        wanted, got = f"an add in {', '.join(ATOMIC_FORMATS)}", dtype
        raise errors.TypeMismatchError(wanted, got, "use scatter_launch, method owner")
    parts = [isa.Part(_program(chip, groups, mine, table, mode)) for mine in groups.cores]
    return isa.Launch(f"scatter_{mode}_grouped", tuple(parts))


def _program(chip: Chip, groups: Groups, mine: CoreList, table: Table, mode: str) -> isa.Program:
    k = isa.KernelBuilder(f"scatter_{mode}_grouped", chip)
    writer = _ListWriter(k, groups, mine, table, mode)
    if groups.looks:
        k.scalar(steps=groups.looks)
    for run in mine.runs:
        most = max(BATCH // run.updates // 8 * 8, 8)
        for at, count in batches(k, "t", run.count, most):
            writer.batch(run, at, count)
    return k.finish()


class _ListWriter:
    """Loads rows of u by `order`, sums those of one row of y, stores by `index`."""

    def __init__(
        self, k: isa.KernelBuilder, groups: Groups, mine: CoreList, table: Table, mode: str
    ) -> None:
        self.k, self.mine, self.table = k, mine, table
        self.how = "add" if mode == "add" else None
        columns = table.columns
        self.u = k.tensor("u", table.dtype, table.picks * columns)
        self.y = k.tensor("y", table.dtype, table.rows * columns)
        order = k.tensor("order", "int32", groups.order.size)
        self.order = Feed.make(k, order, "MTE2", most=8 * MOST)
        self.index = Feed.make(k, k.tensor("index", "int32", groups.index.size), "MTE3")
        self.sums = max(run.updates for run in mine.runs) > 1
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
            with self.k.loop("r", count) as r:
                self._sum(r * run.updates, run.updates)
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
        tile, columns = self.rows.alloc(), self.table.columns
        with self.k.loop("l", count) as i:
            target = tile.region(i * columns, columns)
            row = self.order.take(first + i)
            self.k.copy_row(target, self.u.region(0, columns), row, columns, self.table.picks)
        self.rows.enqueue()

    def _store(self, tile: isa.Tile, place: isa.Affine | int, i: isa.Affine) -> None:
        columns = self.table.columns
        goal = self.y.region(self.mine.first * columns, columns)
        row, source = self.index.take(i), tile.region(place, columns)
        self.k.copy_row(goal, source, row, columns, self.mine.rows, atomic=self.how)

    def _sum(self, first: isa.Affine, updates: int) -> None:
        """Emit total = the sum of `updates` rows of u, some at a time."""
        total = self.total.alloc()
        head = min(updates, self.some)
        self._add(total, first, head, fresh=True)
        full, rest = divmod(updates - head, self.some)
        if full:
            with self.k.loop("m", full) as m:
                self._add(total, first + head + m * self.some, self.some)
        if rest:
            self._add(total, first + (updates - rest), rest)
        self.total.enqueue()

    def _add(self, total: isa.Tile, first: isa.Affine, count: int, *, fresh: bool = False) -> None:
        self._load(first, count)
        tile, columns = self.rows.dequeue(), self.table.columns
        if fresh:
            self.k.copy(total.region(), tile.region(0, columns))
        with self.k.loop("a", count - fresh) as a:
            row = tile, (a + int(fresh)) * columns
            self.k.each("vadd", columns, (total, 0), (total, 0), row)
        self.rows.free()
