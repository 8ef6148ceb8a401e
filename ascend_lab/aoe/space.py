"""Search spaces: a schedule as a sequence of decisions, and moves from one schedule to another.

A point has one value per decision, in a fixed order: (128, 256, 64) for the tile sizes m, n and k.
The legal values of a decision depend on the earlier ones: after m = 128, n may be at most 256
because L0C is full. A prefix is a point cut short, such as (128, 256). Every prefix of legal values
can be completed to a legal point, so that a search that takes its values from `options` never
proposes an illegal point.

A recorded space is a CSV file with every configuration of a kernel and its measured time. On it a
search runs in a moment, without measuring, and the optimum is known.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ascend_lab import limits
from ascend_lab.errors import InputError
from ascend_lab.limits import csv_of, number_of, read_file, refuse_above

Reals = NDArray[np.float64]
Value = Any
"""A number, a text, or a tuple of them."""
Point = tuple[Value, ...]
"""One value per decision; a prefix has values for the first decisions only."""


class Space(Protocol):
    """The interface of a search space."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the decisions, in order."""

    @property
    def size(self) -> int | None:
        """Number of legal points; None if they are too many to count."""

    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`."""

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random legal point."""

    def key(self, point: Point) -> Hashable:
        """Return a key that is equal for points that give the same kernel."""

    def points(self) -> Iterator[Point]:
        """Yield all legal points."""


class TableSpace:
    """A space given by a table of its legal points.

    The rows are sorted, so that all points with the same prefix form one range of rows.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[Sequence[Value]]) -> None:
        """Take one column of values per decision; raise `InputError` without rows or columns."""
        lengths = {len(column) for column in columns}
        if len(names) != len(columns) or len(lengths) != 1 or 0 in lengths:
            got = f"{len(names)} names, columns of {sorted(lengths)} rows"
            raise InputError("a column of equal length per name, with rows", got, "fill the table")
        coded = [_coded(column) for column in columns]
        # A code is the index of a value among the values of its decision. 20,000 tilings of 8
        # decisions take 640 KB.
        codes = np.unique(np.stack([code for _, code in coded], axis=1), axis=0)
        self._set_table(names, tuple(values for values, _ in coded), codes)

    def _set_table(
        self, names: Sequence[str], values: tuple[tuple[Value, ...], ...], codes: NDArray[np.int32]
    ) -> None:
        """Set the table: the different values of each decision, and sorted rows of their codes."""
        self.names = tuple(names)
        self.values = values
        self.codes = codes
        self._ranges: dict[Point, tuple[int, int]] = {(): (0, len(self.codes))}
        self._options: dict[Point, tuple[Value, ...]] = {}
        self._code_of = [{v: i for i, v in enumerate(choices)} for choices in self.values]

    @property
    def size(self) -> int:
        """Number of legal points."""
        return len(self.codes)

    def point(self, row: int) -> Point:
        """Return the point in a row of the sorted table."""
        return tuple(v[c] for v, c in zip(self.values, self.codes[row], strict=True))

    def row(self, point: Point) -> int:
        """Return the row of a point; raise `InputError` if it is not legal."""
        low, high = self._range(point)
        if len(point) != len(self.names) or low == high:
            raise InputError("a point of the space", str(point), "take values from `options`")
        return low

    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`, in ascending order."""
        legal_values = self._options.get(prefix)
        if legal_values is None:
            low, high = self._range(prefix)
            column = self.codes[low:high, len(prefix)]
            # The column is sorted within the prefix: a new value begins wherever neighbours differ.
            changes = np.flatnonzero(column[1:] != column[:-1]) + 1
            codes = column[:1].tolist() + column[changes].tolist()
            values = self.values[len(prefix)]
            legal_values = tuple(values[c] for c in codes)
            self._options[prefix] = legal_values
        return legal_values

    def _range(self, prefix: Point) -> tuple[int, int]:
        """Return the rows of the points that begin with `prefix`: the first, and the end."""
        if prefix not in self._ranges:
            low, high = self._range(prefix[:-1])
            column = self.codes[low:high, len(prefix) - 1]
            code = self._code_of[len(prefix) - 1].get(prefix[-1], -1)
            start, stop = column.searchsorted((code, code + 1)).tolist() if code >= 0 else (0, 0)
            self._ranges[prefix] = (low + start, low + stop)
        return self._ranges[prefix]

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point, every point with the same probability."""
        return self.point(int(rng.integers(self.size)))

    def key(self, point: Point) -> Hashable:
        """Return the point itself: different rows are different kernels."""
        return point

    def points(self) -> Iterator[Point]:
        """Yield all points in ascending order."""
        return map(self.point, range(self.size))


def _coded(column: Sequence[Value]) -> tuple[tuple[Value, ...], NDArray[np.int32]]:
    """Return the different values in ascending order, and for each entry the index of its value.

    The column [32, 16, 32] gives (16, 32) and [1, 0, 1].
    """
    if isinstance(column, np.ndarray):
        values, codes = np.unique(column, return_inverse=True)
        return tuple(v.item() for v in values), codes.astype(np.int32)
    # Text and numbers cannot be compared in Python: values are sorted by type first.
    ordered = tuple(sorted(set(column), key=lambda v: (str(type(v)), v)))
    code_of = {v: i for i, v in enumerate(ordered)}
    return ordered, np.array([code_of[v] for v in column], np.int32)


def completed(space: Space, values: Sequence[Value], prefix: Point = ()) -> Point:
    """Return the legal point that begins with `prefix` and else is as near to `values` as can be.

    With the values (128, 256, 64) and the prefix (256,), n may be at most 128: (256, 128, 64).
    """
    point = prefix
    for value in values[len(prefix) :]:
        point = (*point, nearest(space.options(point), value))
    return point


def nearest(options: Sequence[Value], value: Value) -> Value:
    """Return the option nearest to `value` by ratio; the first option if there are no numbers."""
    if value in options:
        return value
    if not _is_number(value):
        return options[0]
    numbers = [v for v in options if _is_number(v)]
    return min(numbers, key=lambda v: (abs(_log(v) - _log(value)), v), default=options[0])


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float)


def _log(value: float) -> float:
    # By ratio 96 is nearer to 128 (1.33) than to 64 (1.5). log1p(x) = log(1 + x) also takes x = 0.
    return math.copysign(math.log1p(abs(value)), value)


def random_completion(space: Space, prefix: Point, rng: np.random.Generator) -> Point:
    """Return a point that begins with `prefix`, every further decision taken at random."""
    while len(prefix) < len(space.names):
        options = space.options(prefix)
        # Most decisions have a single option: no random number is drawn for these.
        index = int(rng.integers(len(options))) if len(options) > 1 else 0
        prefix = (*prefix, options[index])
    return prefix


def mutated(space: Space, point: Point, rng: np.random.Generator, count: int = 1) -> Point:
    """Return the point after `count` random changes of decisions that have other options."""
    for _ in range(count):
        options = [space.options(point[:i]) for i in range(len(point))]
        # Most decisions of a long point have a single option: these cannot be changed.
        changeable = [i for i, values in enumerate(options) if len(values) > 1]
        if not changeable:
            return point
        index = changeable[int(rng.integers(len(changeable)))]
        alternatives = [v for v in options[index] if v != point[index]]
        value = alternatives[int(rng.integers(len(alternatives)))]
        # Later decisions keep their values where these are still legal.
        point = completed(space, point, (*point[:index], value))
    return point


def crossed(space: Space, parent_a: Point, parent_b: Point, rng: np.random.Generator) -> Point:
    """Return a child of two points: each value from one of them at random, or the nearest legal."""
    # Uniform crossover: every decision is drawn by itself, neighbours such as m and n as well.
    picks = rng.random(len(parent_a)) < 0.5
    mixed = [a if pick else b for a, b, pick in zip(parent_a, parent_b, picks, strict=True)]
    return completed(space, mixed)


def neighbours(space: Space, point: Point) -> list[Point]:
    """Return the points that differ from `point` in one decision.

    Later decisions also differ where their value is no longer legal.
    """
    # a dict in place of a set: it drops repeated points and keeps their order
    points: dict[Point, None] = {}
    for index, value in enumerate(point):
        for alternative in space.options(point[:index]):
            if alternative != value:
                points[completed(space, point, (*point[:index], alternative))] = None
    return list(points)


# -- recorded spaces ------------------------------------------------------------------------------
TIME_COLUMN = "time_ms"
"""The last column of the CSV file; an empty cell is a configuration that failed."""


@dataclass(frozen=True)
class RecordedSpace:
    """A space whose costs are known; calling it with a point returns the cost, as if measured.

    `costs` has one entry per row of the table, infinite for a configuration that failed.
    """

    space: TableSpace
    costs: Reals

    @cached_property
    def optimum(self) -> float:
        """The lowest cost in the space."""
        return float(self.costs.min())

    @cached_property
    def _by_point(self) -> dict[Point, float]:
        return dict(zip(self.space.points(), self.costs.tolist(), strict=True))

    def __call__(self, point: Point) -> float:
        """Return the cost of a point; raise `InputError` if it failed when it was recorded."""
        cost = self._by_point[point]
        if not math.isfinite(cost):
            raise InputError("a configuration that ran", f"{point}, which failed when recorded")
        return cost


def recorded(
    names: Sequence[str], columns: Sequence[Sequence[Value]], costs: Sequence[float]
) -> RecordedSpace:
    """Return the recorded space of these configurations and costs; an infinite cost is a failure.

    Raises `InputError` if a configuration occurs twice, or if all of them failed.
    """
    space = TableSpace(names, columns)
    # Rows of the file may come in any order; nan marks configurations without a cost so far.
    ordered = np.full(space.size, math.nan)
    for point, cost in zip(zip(*columns, strict=True), costs, strict=True):
        row = space.row(point)
        if not math.isnan(ordered[row]):
            raise InputError("every configuration once", f"{point} twice", "keep one of them")
        ordered[row] = cost
    if not np.isfinite(ordered).any():
        raise InputError("a configuration that ran", f"{len(costs)} failed ones")
    return RecordedSpace(space, ordered)


def read_recorded(path: str | Path) -> RecordedSpace:
    """Return the space in a CSV file, gzipped or plain: a column per parameter, then `time_ms`.

    A parameter is a column of numbers, or a column of words. Raises `InputError` for a file that
    cannot be read, has no such columns or no rows, or rows that repeat or are not complete.
    """
    where = Path(path).name
    data = read_file(path, "a CSV file", limits.TABLE_BYTES)
    header, *rows = [row for _, row in csv_of(data, path)] or [[]]
    is_header = len(header) >= 2 and header[-1] == TIME_COLUMN
    if not is_header or len(set(header)) != len(header):
        got = f"the columns {', '.join(header)[:200] or '(none)'} in {where}"
        remedy = f"name them in the first line, the last {TIME_COLUMN}"
        raise InputError(f"parameters with different names, then {TIME_COLUMN}", got, remedy)
    refuse_above(f"{where}: columns", len(header), limits.COLUMNS)
    refuse_above(f"{where}: rows", len(rows), limits.ROWS)
    if not rows:
        raise InputError("rows of configurations", f"none in {where}")
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            got = f"{len(row)} in row {line} of {where}"
            raise InputError(f"{len(header)} cells in every row", got)
    cells = list(zip(*rows, strict=True))
    names = header[:-1]
    columns = [_values(name, cells[index], where) for index, name in enumerate(names)]
    return recorded(names, columns, _times(cells[-1], where))


def _values(name: str, cells: Sequence[str], where: str) -> Sequence[Value]:
    """Return a column as integers if all are whole, else as numbers, else as text."""
    numbers = [number_of(cell) for cell in cells]
    present = [n for n in numbers if n is not None]
    if not present and all(cells):
        return cells
    if len(present) < len(cells):
        wrong_index = numbers.index(None)
        # the header is row 1, so that the first cell is in row 2
        got = f"{cells[wrong_index]!r} in row {wrong_index + 2} of {where}"
        raise InputError(f"numbers in the column {name}", got)
    # "16.0" counts as 16, so that a tiling read from a table is made of integers.
    return [int(n) for n in present] if all(n == int(n) for n in present) else present


def _times(cells: Sequence[str], where: str) -> list[float]:
    """Return times in ms, infinite where the cell is empty."""
    times = []
    for line, cell in enumerate(cells, 2):
        time_ms = number_of(cell) if cell else math.inf
        if time_ms is None or time_ms <= 0:
            got = f"{cell!r} in row {line} of {where}"
            raise InputError(f"a time above 0 or an empty cell in the column {TIME_COLUMN}", got)
        times.append(time_ms)
    return times
