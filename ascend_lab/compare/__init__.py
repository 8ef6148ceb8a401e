"""Compares times measured on boards with the times that the model predicts, row by row.

`compare` reads a table of measured rows, or a profile that msprof wrote. For every row it gives
the model's time, the lower bound that no schedule beats, and

    error = model / measured - 1.

If the model cannot time a row, the row is marked as refused, with the reason; the others are timed.

Ten products measured on an Ascend910B2, from a table that comes with the package:

>>> from ascend_lab.compare import compare
>>> from ascend_lab.data import data_path
>>> comparison = compare(data_path("measured/gemm_910b2_warm.csv"))
>>> comparison.timed
10
>>> max(abs(row.error) for row in comparison.rows) < 0.25
True
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compare import profile, table
from ascend_lab.compare.estimates import Estimate
from ascend_lab.compare.model import LIKE, estimate
from ascend_lab.compare.rows import Measured, Work, reasons_in
from ascend_lab.errors import InputError
from ascend_lab.limits import COLUMNS, ROWS, TABLE_BYTES, csv_of, labelled, read_file, refuse_above
from ascend_lab.machine.chip import Chip

__all__ = ["Compared", "Comparison", "Group", "compare", "compare_rows", "read_measured"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured row and the model's answer; `refused` gives the reason if the model has none.

    `limit` names what takes longest in the model. `busy` holds the share of the measured time that
    each pipe (queue of one kind of instruction) works, `model_busy` its share of the model's time.
    """

    case: str
    group: str
    measured_s: float | None
    model_s: float | None = None
    bound_s: float | None = None
    refused: str | None = None
    limit: str = ""
    marks: tuple[str, ...] = ()
    busy: Mapping[str, float] = field(default_factory=dict)
    model_busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Return model / measured - 1."""
        if self.model_s is None or not self.measured_s:
            return None
        # 12 us by the model, 10 us measured: +20 %
        return self.model_s / self.measured_s - 1.0

    @property
    def is_below_bound(self) -> bool:
        """Tell whether the measured time is shorter than the bound: then the model is wrong."""
        has_both = self.measured_s is not None and self.bound_s is not None
        return has_both and self.measured_s < self.bound_s  # type: ignore[operator]

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data, ready for JSON."""
        return {
            "case": self.case,
            "group": self.group,
            "measured_s": self.measured_s,
            "model_s": self.model_s,
            "bound_s": self.bound_s,
            "error": self.error,
            "refused": self.refused,
            "limit": self.limit or None,
            "marks": list(self.marks),
            "busy": dict(self.busy),
            "model_busy": dict(self.model_busy),
        }

    def line(self) -> str:
        """Return the row as a line of text."""
        name = labelled(self.case, self.group, 52)
        marks = f"  [{'; '.join(self.marks)}]" if self.marks else ""
        if self.error is None:
            return f"{name:<52}  refused: {self.refused}"
        times = (self.measured_s, self.model_s, self.bound_s)
        columns = "".join(" " + _microseconds(time_s) for time_s in times)
        # a bound that a measurement beats is a bug of the model, so the line says so
        below = "  below our bound" if self.is_below_bound else ""
        return f"{name:<52}{columns} {self.error:>+8.0%}  {self.limit}{below}{marks}"


def _microseconds(time_s: float | None) -> str:
    """Return a time as a column of text; a dash stands for None."""
    return f"{'-':>12}" if time_s is None else f"{time_s * 1e6:>12.2f}"


@dataclass(frozen=True, slots=True)
class Group:
    """Statistics of one group of rows: how many there are, how many are timed, and their errors.

    `bias` is the geometric mean of model / measured, less 1: for two rows, one at twice and one at
    half the measured time, it is 0. `median` and `p90` are those of the error without its sign.
    `below_bound` counts rows that were measured below the bound.
    """

    group: str
    rows: int
    timed: int
    bias: float | None
    median: float | None
    p90: float | None
    below_bound: int

    def as_dict(self) -> dict[str, Any]:
        """Return the group as plain data, ready for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def line(self) -> str:
        """Return the group as a line of text."""
        bias = "-" if self.bias is None else f"{self.bias:+.0%}"
        median = "-" if self.median is None else f"{self.median:.0%}"
        p90 = "-" if self.p90 is None else f"{self.p90:.0%}"
        counts = f"{self.group:<24}{self.rows:>6}{self.timed:>7}"
        return f"{counts}{bias:>9} {median:>8} {p90:>8}{self.below_bound:>13}"


HEAD = f"{'group':<24}{'rows':>6}{'timed':>7}{'bias':>9}{'median':>9}{'p90':>9}{'below bound':>13}"
ROW_HEAD = f"{'row':<52}{'measured us':>13}{'model us':>13}{'bound us':>13}{'error':>9}  limit"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of a file with the model's answers, in the file's order."""

    name: str
    rows: tuple[Compared, ...]

    def groups(self) -> tuple[Group, ...]:
        """Return the groups in the order of their first rows."""
        names = dict.fromkeys(row.group for row in self.rows)
        members: dict[str, list[Compared]] = {name: [] for name in names}
        for row in self.rows:
            members[row.group].append(row)
        return tuple(group_of(name, rows) for name, rows in members.items())

    def as_dict(self) -> dict[str, Any]:
        """Return rows and groups as plain data, ready for JSON."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "groups": [group.as_dict() for group in self.groups()],
        }

    def group_lines(self) -> list[str]:
        """Return the groups as lines of text."""
        return [HEAD, *(group.line() for group in self.groups())]

    @property
    def timed(self) -> int:
        """Return how many rows have both a measured time and one of the model."""
        return sum(row.error is not None for row in self.rows)

    def lines(self) -> list[str]:
        """Return rows, then groups, as lines of text."""
        counts = f"{len(self.rows)} rows, {self.timed} timed"
        title = f"{self.name}: {counts}; error = model / measured - 1"
        return [title, ROW_HEAD, *(row.line() for row in self.rows), "", *self.group_lines()]


def group_of(name: str, rows: list[Compared]) -> Group:
    """Return the statistics of a group's rows; errors are None where no row is timed."""
    errors = np.array([row.error for row in rows if row.error is not None])
    below = sum(row.is_below_bound for row in rows)
    if not len(errors):
        return Group(
            group=name,
            rows=len(rows),
            timed=0,
            bias=None,
            median=None,
            p90=None,
            below_bound=below,
        )
    # exp(mean of log(1 + error)) - 1; a least value keeps a model time of 0 from log(0)
    bias = math.expm1(float(np.mean(np.log1p(np.maximum(errors, -1 + 1e-12)))))
    # without the sign: a model 20 % too slow and one 20 % too fast are equally wrong
    median, p90 = (float(q) for q in np.percentile(np.abs(errors), (50, 90)))
    return Group(
        group=name,
        rows=len(rows),
        timed=len(errors),
        bias=bias,
        median=median,
        p90=p90,
        below_bound=below,
    )


def compare(path: str | Path, chip: Chip | None = None, like: str = "") -> Comparison:
    """Return the rows of a file with the model's answers.

    A profile does not name its chip: `chip` says on which it was recorded. In a table `chip` is
    used for rows that name it and for rows that name no chip. With `like` "cann" networks and
    matrix products are compiled as CANN, the vendor's compiler, would compile them. Raises
    `InputError` for a file that is neither a table nor a profile, one without rows, and an unknown
    compiler.
    """
    rows = read_measured(path, chip)
    return Comparison(Path(path).name, tuple(compare_rows(rows, chip, like)))


def read_measured(path: str | Path, chip: Chip | None = None) -> list[Measured]:
    """Return the measured rows of a table or a profile; raises `InputError` for other files."""
    data = read_file(path, "a table of measured rows", TABLE_BYTES)
    # lines that begin with "#" are remarks
    lines = [(line, row) for line, row in csv_of(data, path) if not row[0].startswith("#")]
    if not lines:
        raise InputError(f"{path}: a header and rows", "an empty file", "write at least one row")
    refuse_above(f"{path}: rows", len(lines) - 1, ROWS)
    header = lines[0][1]
    # a table in our format names the chip in every row; a profile of msprof never names it
    if profile.is_profile(header):
        if chip is None:
            needed = f"{path}: the chip that this profile was recorded on"
            raise InputError(needed, "none", "name it: a profile does not")
        measured = profile.read_rows(lines, chip.name, str(path))
    else:
        refuse_above(f"{path}: columns", len(header), COLUMNS)
        measured = table.read_rows(lines, str(path))
    if not measured:
        raise InputError(f"{path}: rows below the header", "none", "write at least one row")
    return measured


def compare_rows(
    rows: list[Measured], chip: Chip | None = None, like: str = ""
) -> Iterator[Compared]:
    """Yield each measured row with the model's answer; equal work is timed once.

    Raises `InputError` for an unknown compiler in `like`.
    """
    if like not in ("", *LIKE):
        raise InputError(f"a compiler to be like: {', '.join(LIKE)}", like, "or none: ours")
    answers: dict[str, Estimate | str] = {}  # by work: an estimate, or why there is none
    for row in rows:
        if row.work is None or row.refused:
            yield Compared(row.case, row.group, row.measured_s, refused=row.refused or "no work")
            continue
        # Tables repeat the same work with other schedules, and one estimate takes up to seconds.
        # Records of work hold mappings, which cannot be keys of a dict; their text can.
        key = repr(row.work)
        if key not in answers:
            answers[key] = _answer(row.work, chip, like)
        answer = answers[key]
        if isinstance(answer, str):
            yield Compared(row.case, row.group, row.measured_s, refused=answer, marks=row.marks)
            continue
        yield Compared(
            row.case,
            row.group,
            row.measured_s,
            answer.model_s,
            answer.bound_s,
            limit=answer.limit,
            marks=(*row.marks, *answer.marks),
            busy=row.busy,
            model_busy=answer.busy,
        )


def _answer(work: Work, chip: Chip | None, like: str) -> Estimate | str:
    """Return the model's estimate, or the reason why it has none."""
    reasons: list[str] = []
    with reasons_in(reasons):
        return estimate(work, chip, like)
    return "; ".join(reasons)
