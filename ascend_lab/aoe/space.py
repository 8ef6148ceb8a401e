"""Search spaces as chains of decisions, and how searches get from point to point in them.

The legal values of a decision depend on those before. A point is complete when every decision is
taken. From every prefix that `options` allows some complete point can be reached, so a search that
only follows options never proposes what is illegal.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError

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
        found = [_coded(column) for column in columns]
        codes = np.unique(np.stack([code for _, code in found], axis=1), axis=0)
        self._take(names, tuple(values for values, _ in found), codes)

    def _take(
        self, names: Sequence[str], values: tuple[tuple[Value, ...], ...], codes: NDArray[np.int32]
    ) -> None:
        """Take the distinct values per decision, and sorted rows of their places."""
        self.names, self.values, self.codes = tuple(names), values, codes
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
        known = self._options.get(prefix)
        if known is None:
            low, high = self._range(prefix)
            column = self.codes[low:high, len(prefix)]
            first = np.flatnonzero(np.diff(column, prepend=-1))
            values = self.values[len(prefix)]
            known = self._options[prefix] = tuple(values[c] for c in column[first])
        return known

    def _range(self, prefix: Point) -> tuple[int, int]:
        """Return first row and end of the points that begin with `prefix`."""
        if prefix not in self._ranges:
            low, high = self._range(prefix[:-1])
            column = self.codes[low:high, len(prefix) - 1]
            code = self._places[len(prefix) - 1].get(prefix[-1], -1)
            ends = np.searchsorted(column, [code, code + 1]) if code >= 0 else (0, 0)
            self._ranges[prefix] = (low + int(ends[0]), low + int(ends[1]))
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
    ordered = tuple(sorted(set(column), key=lambda v: (str(type(v)), v)))
    places = {v: i for i, v in enumerate(ordered)}
    return ordered, np.array([places[v] for v in column], np.int32)


def completed(space: Space, wanted: Sequence[Value], prefix: Point = ()) -> Point:
    """Return the legal point behind `prefix` with each wanted value or the nearest one."""
    point = prefix
    for value in wanted[len(prefix) :]:
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
        free = [i for i, values in enumerate(options) if len(values) > 1]
        if not free:
            return point
        at = free[int(rng.integers(len(free)))]
        others = [v for v in options[at] if v != point[at]]
        value = others[int(rng.integers(len(others)))]
        point = completed(space, point, (*point[:at], value))
    return point


def crossed(space: Space, one: Point, two: Point, rng: np.random.Generator) -> Point:
    """Return a point that takes every decision as one of two parents does, as far as legal."""
    picks = rng.random(len(one)) < 0.5
    mixed = [a if pick else b for a, b, pick in zip(one, two, picks, strict=True)]
    return completed(space, mixed)


def neighbours(space: Space, point: Point) -> list[Point]:
    """Return the points that differ in one decision, and where they must in later ones."""
    found: dict[Point, None] = {}
    for at, value in enumerate(point):
        for other in space.options(point[:at]):
            if other != value:
                found[completed(space, point, (*point[:at], other))] = None
    return list(found)
