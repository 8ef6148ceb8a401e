"""Tables of genes: columns of one length, grown gene by gene, and the space they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.space import TableSpace
from ascend_lab.chip import Chip
from ascend_lab.errors import InputError
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.epilogue_plan import Demand
from ascend_lab.kernels.gemm_schedule import GemmShape

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]
Columns = dict[str, Array]
Shape = GemmShape | ConvShape
TEXTS: Mapping[str, tuple[str, ...]] = {
    "order": ("mn", "nm"),
    "keep": ("", "a", "b"),
    "bypass": ("", "a", "ab", "b"),
    "window": ("flat", "strip"),
}
"""Genes that are words; a table holds their places in these tuples."""
MOST = 1 << 19
"""Points of a space at most; larger tables are thinned out."""
RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Least ratios between neighbouring sizes of tiles, tried until a table is small enough."""


def up(value: Array | int, unit: Array | int) -> Array:
    """Return value / unit rounded up."""
    return np.asarray(-(-np.asarray(value, np.int64) // unit))


def evens(total: int) -> Array:
    """Return the sizes that cut `total` as evenly as can be: the least for each number of parts."""
    return np.unique(up(total, np.arange(1, total + 1)))


def spaced(values: Array, ratio: float) -> Array:
    """Return ascending values thinned out: the least, then each `ratio` times the last kept."""
    kept: list[int] = []
    for value in values.tolist():
        if not kept or value >= ratio * kept[-1]:
            kept.append(value)
    return np.array(kept, np.int64)


def core_counts(most: int, ratio: float) -> list[int]:
    """Return how many cores may share a side, thinned out; 1 and all of them are there."""
    counts: list[int] = np.union1d(spaced(np.arange(1, most + 1), ratio), [most]).tolist()
    return counts


def coded(column: Array) -> tuple[Array, Array]:
    """Return the distinct values in order, and the place of each entry among them."""
    there = np.bincount(column) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[column]


def same_rows(columns: Sequence[Array]) -> tuple[list[Array], Array, Array]:
    """Return distinct rows in order, as columns; the first place of each; which one each row is."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return [column[first] for column in columns], first, which


def taken(table: Columns, index: Array | Mask) -> Columns:
    """Return the rows at `index`."""
    return {name: column[index] for name, column in table.items()}


def crossed(table: Columns, more: Columns) -> Columns:
    """Return every row of one table with every row of another."""
    count = len(next(iter(table.values())))
    times = len(next(iter(more.values())))
    out = {name: np.repeat(column, times) for name, column in table.items()}
    return out | {name: np.tile(column, count) for name, column in more.items()}


def grown(table: Columns, name: str, lists: Sequence[Array], which: Array) -> Columns:
    """Return each row once for every value of list number `which[row]`, as column `name`."""
    lengths = np.array([len(values) for values in lists], np.int64)
    starts = np.cumsum(lengths) - lengths
    times = lengths[which]
    index = np.repeat(np.arange(len(which)), times)
    within = np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)
    flat = np.concatenate([np.asarray(values, np.int64) for values in lists])
    return taken(table, index) | {name: flat[starts[which[index]] + within]}


class CubeSpace(TableSpace):
    """All tilings of one cube operator on one chip; `genes` are the columns by name, as numbers.

    `chip` has the L1 that is left to the operands; `demand` is what the epilogue needs.
    """

    def __init__(
        self,
        shape: Shape,
        chip: Chip,
        demand: Demand | None,
        names: Sequence[str],
        table: Columns,
    ) -> None:
        """Sort the rows and drop those that are there twice; raise `InputError` without any."""
        if not len(table[names[0]]):
            raise InputError("a tiling that fits", f"none of {shape} on {chip.name}", "split it")
        self.shape, self.chip, self.demand = shape, chip, demand
        found = [coded(table[name]) for name in names]
        _, first, _ = same_rows([code for _, code in found])
        self.genes: Columns = {name: table[name][first] for name in names}
        pairs = zip(names, found, strict=True)
        values = tuple(tuple(word_of(n, int(v)) for v in numbers) for n, (numbers, _) in pairs)
        codes = np.stack([code[first] for _, code in found], axis=1)
        self._take(names, values, codes.astype(np.int32))


def word_of(name: str, number: int) -> int | str:
    """Return the value of a gene whose place a table holds."""
    return TEXTS[name][number] if name in TEXTS else number


def number_of(name: str, value: int | str) -> int:
    """Return how a table writes the value of a gene."""
    return TEXTS[name].index(str(value)) if name in TEXTS else int(value)
