"""Search spaces as chains of decisions, and how searches get from point to point in them.

The legal values of a decision depend on those before. A point is complete when every decision is
taken. From every prefix that `options` allows some complete point can be reached, so a search that
only follows options never proposes what is illegal.

A space may be recorded: every configuration of a kernel with the time it took, as a CSV file. There
a search can be replayed in a moment, and the optimum is known.
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
"""One value per decision; a prefix is a point cut short."""


class Space(Protocol):
    """What a search may ask of a space."""

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
        """Return what points that are the same candidate have in common."""

    def points(self) -> Iterator[Point]:
        """Yield all legal points."""


class TableSpace:
    """A space given by all its legal points, sorted, so that a prefix is a range of rows."""

    def __init__(self, names: Sequence[str], columns: Sequence[Sequence[Value]]) -> None:
        """Take one column of values per decision; raise `InputError` without rows or columns."""
        lengths = {len(column) for column in columns}
        if len(names) != len(columns) or len(lengths) != 1 or 0 in lengths:
            got = f"{len(names)} names, columns of {sorted(lengths)} rows"
            raise InputError("a column of equal length per name, with rows", got, "fill the table")
        coded = [_coded(column) for column in columns]
        # Rows sorted by their codes: all points that begin with one prefix are neighbours, so that
        # a prefix is a pair of row numbers. 20,000 tilings of 8 decisions take 640 KB.
        codes = np.unique(np.stack([code for _, code in coded], axis=1), axis=0)
        self._take(names, tuple(values for values, _ in coded), codes)

    def _take(
        self, names: Sequence[str], values: tuple[tuple[Value, ...], ...], codes: NDArray[np.int32]
    ) -> None:
        """Take the distinct values per decision, and sorted rows of their places."""
        self.names = tuple(names)
        self.values = values
        self.codes = codes
        self._ranges: dict[Point, tuple[int, int]] = {(): (0, len(self.codes))}
        self._options: dict[Point, tuple[Value, ...]] = {}
        self._places = [{v: i for i, v in enumerate(values)} for values in self.values]

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
        values_here = self._options.get(prefix)
        if values_here is None:
            low, high = self._range(prefix)
            column = self.codes[low:high, len(prefix)]
            # The column is sorted within the prefix: a new value begins wherever neighbours differ.
            changes = np.flatnonzero(column[1:] != column[:-1]) + 1
            codes = column[:1].tolist() + column[changes].tolist()
            values = self.values[len(prefix)]
            values_here = self._options[prefix] = tuple(values[c] for c in codes)
        return values_here

    def _range(self, prefix: Point) -> tuple[int, int]:
        """Return first row and end of the points that begin with `prefix`."""
        if prefix not in self._ranges:
            low, high = self._range(prefix[:-1])
            column = self.codes[low:high, len(prefix) - 1]
            code = self._places[len(prefix) - 1].get(prefix[-1], -1)
            start, stop = column.searchsorted((code, code + 1)).tolist() if code >= 0 else (0, 0)
            self._ranges[prefix] = (low + start, low + stop)
        return self._ranges[prefix]

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point, each with the same chance."""
        return self.point(int(rng.integers(self.size)))

    def key(self, point: Point) -> Hashable:
        """Return the point: no two are the same candidate."""
        return point

    def points(self) -> Iterator[Point]:
        """Yield all points in ascending order."""
        return map(self.point, range(self.size))


def _coded(column: Sequence[Value]) -> tuple[tuple[Value, ...], NDArray[np.int32]]:
    """Return the distinct values in order, and the place of each entry among them."""
    if isinstance(column, np.ndarray):
        values, code = np.unique(column, return_inverse=True)
        return tuple(v.item() for v in values), code.astype(np.int32)
    # Words and numbers do not compare with each other: sorted by type first.
    ordered = tuple(sorted(set(column), key=lambda v: (str(type(v)), v)))
    places = {v: i for i, v in enumerate(ordered)}
    return ordered, np.array([places[v] for v in column], np.int32)


def completed(space: Space, values: Sequence[Value], prefix: Point = ()) -> Point:
    """Return the legal point behind `prefix` with each wanted value or the nearest one."""
    point = prefix
    for value in values[len(prefix) :]:
        point = (*point, nearest(space.options(point), value))
    return point


def nearest(options: Sequence[Value], value: Value) -> Value:
    """Return `value` if it is an option, else the option with the closest ratio, or the first."""
    if value in options:
        return value
    if not _is_number(value):
        return options[0]
    numbers = [v for v in options if _is_number(v)]
    return min(numbers, key=lambda v: (abs(_log(v) - _log(value)), v), default=options[0])


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float)


def _log(value: float) -> float:
    # Sizes differ by ratios: 96 is nearer to 128 than to 64, on a scale of logarithms. log1p lets 0
    # in.
    return math.copysign(math.log1p(abs(value)), value)


def random_completion(space: Space, prefix: Point, rng: np.random.Generator) -> Point:
    """Return a point that begins with `prefix`, every further decision taken at random."""
    while len(prefix) < len(space.names):
        options = space.options(prefix)
        # one option draws nothing, and is most of what there is
        place = int(rng.integers(len(options))) if len(options) > 1 else 0
        prefix = (*prefix, options[place])
    return prefix


def mutated(space: Space, point: Point, rng: np.random.Generator, count: int = 1) -> Point:
    """Return the point with `count` decisions that have a choice changed at random."""
    for _ in range(count):
        options = [space.options(point[:i]) for i in range(len(point))]
        # Most decisions of a long point have one option left: to change one of those changes
        # nothing.
        free = [i for i, values in enumerate(options) if len(values) > 1]
        if not free:
            return point
        at = free[int(rng.integers(len(free)))]
        alternatives = [v for v in options[at] if v != point[at]]
        value = alternatives[int(rng.integers(len(alternatives)))]
        # Later decisions stay as they were where that is still legal, else take the nearest legal
        # value.
        point = completed(space, point, (*point[:at], value))
    return point


def crossed(space: Space, parent_a: Point, parent_b: Point, rng: np.random.Generator) -> Point:
    """Return a point that takes each decision from one of two parents, if that is legal."""
    # Uniform crossover: neighbouring decisions of a tiling, such as m and n, are not linked.
    picks = rng.random(len(parent_a)) < 0.5
    mixed = [a if pick else b for a, b, pick in zip(parent_a, parent_b, picks, strict=True)]
    return completed(space, mixed)


def neighbours(space: Space, point: Point) -> list[Point]:
    """Return the points that differ in one decision, and where they must in later ones."""
    points: dict[Point, None] = {}
    for at, value in enumerate(point):
        for alternative in space.options(point[:at]):
            if alternative != value:
                points[completed(space, point, (*point[:at], alternative))] = None
    return list(points)


# -- recorded spaces ------------------------------------------------------------------------------
TIME = "time_ms"
"""The column of times; an empty cell is a configuration that failed."""


@dataclass(frozen=True)
class RecordedSpace:
    """A space with the cost of each row of it; calling it with a point measures the point."""

    space: TableSpace
    costs: Reals

    @cached_property
    def optimum(self) -> float:
        """The least cost in the space."""
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
    """Return the space of these rows, infinite ones failed; `InputError` for repeats, or no run."""
    space = TableSpace(names, columns)
    # Rows of the file may come in any order; nan marks configurations that no row has named yet.
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
    heads, *rows = [row for _, row in csv_of(data, path)] or [[]]
    if not heads or heads[-1] != TIME or len(heads) < 2 or len(set(heads)) != len(heads):
        got = f"the columns {', '.join(heads)[:200] or '(none)'} in {where}"
        remedy = f"name them in the first line, the last {TIME}"
        raise InputError(f"parameters with different names, then {TIME}", got, remedy)
    refuse_above(f"{where}: columns", len(heads), limits.COLUMNS)
    refuse_above(f"{where}: rows", len(rows), limits.ROWS)
    if not rows:
        raise InputError("rows of configurations", f"none in {where}")
    for line, row in enumerate(rows, 2):
        if len(row) != len(heads):
            got = f"{len(row)} in row {line} of {where}"
            raise InputError(f"{len(heads)} cells in every row", got)
    cells = list(zip(*rows, strict=True))
    columns = [_values(n, column, where) for n, column in zip(heads[:-1], cells, strict=False)]
    return recorded(heads[:-1], columns, _times(cells[-1], where))


def _values(name: str, cells: Sequence[str], where: str) -> Sequence[Value]:
    """Return a column of integers, of other numbers, or of words."""
    numbers = [number_of(cell) for cell in cells]
    present = [n for n in numbers if n is not None]
    if not present and all(cells):
        return cells
    if len(present) < len(cells):
        wrong = numbers.index(None)
        got = f"{cells[wrong]!r} in row {wrong + 2} of {where}"
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
            raise InputError(f"a time above 0 or an empty cell in the column {TIME}", got)
        times.append(time_ms)
    return times
