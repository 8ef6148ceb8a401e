"""Recorded tuning spaces: every configuration of a kernel with the time it took, as a CSV file.

A search can be replayed on one in a moment, and the optimum is known.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.drive import Search, drive
from ascend_lab.aoe.space import Point, TableSpace, Value
from ascend_lab.errors import InputError
from ascend_lab.limits import COLUMNS, ROWS, TABLE_BYTES, number_of, read_file, refuse_above

TIME = "time_ms"
"""The column of times; an empty cell is a configuration that failed."""


@dataclass(frozen=True)
class RecordedSpace:
    """A space with the cost of each row of it; calling it with a point measures the point."""

    space: TableSpace
    costs: NDArray[np.float64]

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


@dataclass(frozen=True, slots=True)
class Replay:
    """Results of one search on a recorded space with several seeds; infinite if nothing ran."""

    optimum: float
    best_per_seed: tuple[float, ...]
    evaluations_per_seed: tuple[int, ...]

    @property
    def median_ratio(self) -> float:
        """Median over seeds of best found / optimum."""
        return float(np.median(self.best_per_seed)) / self.optimum

    def share_within(self, gap: float) -> float:
        """Return the share of seeds whose best is at most `gap` above the optimum."""
        return float(np.mean(np.array(self.best_per_seed) <= (1 + gap) * self.optimum))


def replay(space: RecordedSpace, search: Search, budget: int, seeds: Iterable[int]) -> Replay:
    """Return what a search finds with `budget` trials, once per seed."""
    traces = []
    for seed in seeds:
        traces.append(drive(search, space.space, space, budget, seed=seed))
        if traces[-1].end == "interrupted":
            raise KeyboardInterrupt
    best = tuple(min(t.cost for t in trace.trials) for trace in traces)
    return Replay(space.optimum, best, tuple(len(trace.trials) for trace in traces))


def recorded(
    names: Sequence[str], columns: Sequence[Sequence[Value]], costs: Sequence[float]
) -> RecordedSpace:
    """Return the space of these rows, infinite ones failed; `InputError` for repeats, or no run."""
    space = TableSpace(names, columns)
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
    heads, rows = _table(Path(path))
    if not heads or heads[-1] != TIME or len(heads) < 2 or len(set(heads)) != len(heads):
        got = f"the columns {', '.join(heads)[:200] or '(none)'} in {where}"
        raise InputError(f"parameters with different names, then {TIME}", got)
    refuse_above(f"{where}: columns", len(heads), COLUMNS)
    refuse_above(f"{where}: rows", len(rows), ROWS)
    if not rows:
        raise InputError("rows of configurations", f"none in {where}")
    for line, row in enumerate(rows, 2):
        if len(row) != len(heads):
            got = f"{len(row)} in row {line} of {where}"
            raise InputError(f"{len(heads)} cells in every row", got)
    cells = list(zip(*rows, strict=True))
    columns = [_values(n, column, where) for n, column in zip(heads[:-1], cells, strict=False)]
    return recorded(heads[:-1], columns, _times(cells[-1], where))


def _table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a file, cells without blanks around them."""
    data = read_file(path, "a CSV file", TABLE_BYTES)
    try:
        found = csv.reader(data.decode("utf-8-sig").splitlines(), strict=True)
        rows = [[cell.strip() for cell in row] for row in found if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError("a CSV file", f"{path}: {error}", "check the file") from error
    return (rows[0], rows[1:]) if rows else ([], [])


def _values(name: str, cells: Sequence[str], where: str) -> Sequence[Value]:
    """Return a column of integers, of other numbers, or of words."""
    numbers = [number_of(cell) for cell in cells]
    found = [n for n in numbers if n is not None]
    if not found and all(cells):
        return cells
    if len(found) < len(cells):
        wrong = numbers.index(None)
        got = f"{cells[wrong]!r} in row {wrong + 2} of {where}"
        raise InputError(f"numbers in the column {name}", got)
    return [int(n) for n in found] if all(n == int(n) for n in found) else found


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
