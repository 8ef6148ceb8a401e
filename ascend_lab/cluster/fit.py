"""Fits the latency and the rate of links to measured times of all-reduces.

For n bytes on p ranks the time of a ring all-reduce is t = 2 (p - 1) alpha + 2 (p - 1) / p n beta
(the "ring law"), which is linear in the latency alpha and the time per byte beta. The fit minimises
the sum of squared relative errors, with alpha and beta >= 0. Protocols change with the size of the
tensor, so the sizes may be divided into bands (ranges of at least two measured sizes), each with
its own alpha and beta. The number of bands is chosen by cross-validation, which compares
predictions with rows that the fit has not seen. A larger size never gets a smaller prediction.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, csv_of, number_of, read_file, shown

Floats = NDArray[np.float64]
Fitted = tuple[float, float, float]
"""alpha, beta, sum of squared relative errors."""
MAX_BANDS = 4
"""Largest number of bands of a fit."""
MAX_CUTS_AND_FOLDS = 20
"""Largest number of possible ends of bands, and of folds of a cross-validation."""
CLEAR_ERRORS = 2.0
"""Standard errors by which the gain from more bands must exceed 0."""
NEGLIGIBLE_ERROR = 0.01
"""Relative error below which further improvement counts little."""
MIN_DETERMINANT = 1e-12
"""Relative determinant below which latency and rate cannot be determined separately."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured collective: bytes of the tensor, ranks, seconds."""

    size_bytes: float
    ranks: int
    time_s: float

    def __post_init__(self) -> None:
        """Check that the numbers are possible; raise `InputError` otherwise."""
        row = f"{self.size_bytes:g} bytes on {self.ranks} ranks in {self.time_s:g} s"
        finite = math.isfinite(self.size_bytes) and math.isfinite(self.time_s)
        if not (finite and self.size_bytes > 0 and self.time_s > 0 and self.ranks > 1):
            raise InputError("bytes > 0, ranks > 1, time_s > 0", row, "correct the row")


@dataclass(frozen=True, slots=True)
class Band:
    """A range of sizes from `bytes_from` to `bytes_to`, with the alpha and beta that hold there."""

    bytes_from: float
    bytes_to: float
    alpha_s: float
    beta_s_per_byte: float

    def time_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds that the ring law gives with this band's alpha and beta."""
        # alpha 5 us, beta 1 ns/B, 8 ranks, 1 MB: 14 * 5 us + 1.75 ms = 1.82 ms.
        on_alpha, on_beta = _law(size_bytes, ranks)
        return on_alpha * self.alpha_s + on_beta * self.beta_s_per_byte


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A measured row, and the prediction of a fit that has not seen its size (or its ranks)."""

    row: Measured
    predicted_s: float

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s - self.row.time_s) / self.row.time_s


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """A fit: its bands in rising order; outside the measured sizes the nearest band applies."""

    bands: tuple[Band, ...]

    def time_s(self, size_bytes: float, ranks: int) -> float:
        """Return the predicted seconds, which never fall as sizes grow; 0 for one rank."""
        if size_bytes <= 0 or ranks < 2:
            return 0.0
        band = self.band_of(size_bytes)
        # A band may begin with a smaller latency than the band below it has at its end. More bytes
        # never take less time: the prediction is at least the one at the end of each band below.
        below = [b.time_s(b.bytes_to, ranks) for b in self.bands if b.bytes_to < band.bytes_to]
        return max([band.time_s(size_bytes, ranks), *below])

    def band_of(self, size_bytes: float) -> Band:
        """Return the band that contains a size, or the nearest band if none does."""
        return next((b for b in self.bands if size_bytes < b.bytes_to), self.bands[-1])

    def cost(self, ranks: int) -> Callable[[float], float]:
        """Return the predicted seconds for `ranks` ranks, as a function of the bytes."""
        return lambda size_bytes: self.time_s(size_bytes, ranks)


def _law(size_bytes: float, ranks: int) -> tuple[float, float]:
    """Return the factors of alpha and beta in the ring law."""
    # 8 ranks, 1 MB: 14 alphas, and 1.75 MB that pass each link.
    return 2.0 * (ranks - 1), 2.0 * (ranks - 1) / ranks * size_bytes


# -- fitting --------------------------------------------------------------------------------------
def fit_collective(rows: Sequence[Measured]) -> CollectiveFit:
    """Return the fit to the rows; raise `InputError` if they do not determine alpha and beta.

    At least two rows must differ in bytes / ranks: otherwise one equation has two unknowns.
    """
    if not _determines_both(rows):
        needed = "rows of two or more sizes, or of one size on two or more counts of ranks"
        raise InputError(needed, f"{len(rows)} rows that are alike", "measure more sizes")
    return _fits(rows, _band_count(rows))[-1]


def _determines_both(rows: Sequence[Measured]) -> bool:
    """Tell whether the rows determine latency and rate."""
    # t / (2 (p - 1)) = alpha + (n / p) beta: with only one n / p this is one equation for two
    # numbers.
    return len({row.size_bytes / row.ranks for row in rows}) > 1


def _band_count(rows: Sequence[Measured]) -> int:
    """Return the smallest number of bands that no larger number clearly improves on.

    This is decided by cross-validation over the sizes and over the numbers of ranks. A gain is
    clear if it exceeds two standard errors of the gain in log(error + 1 %), so that no single row
    decides.
    """
    sizes = {row.size_bytes for row in rows}
    max_bands = min(MAX_BANDS, (len(sizes) - 1) // 2)
    if max_bands < 2:
        return 1
    folds = _folds(rows, "size_bytes")
    if len({row.ranks for row in rows}) > 1:
        folds += _folds(rows, "ranks")
    logs = np.zeros((max_bands, len(folds)))
    for i, (fitted_rows, left_out) in enumerate(folds):
        errors = [
            np.mean([predicted(fit, r).error for r in left_out])
            for fit in _fits(fitted_rows, max_bands)
        ]
        logs[:, i] = np.log(
            np.pad(errors, (0, max_bands - len(errors)), mode="edge") + NEGLIGIBLE_ERROR
        )
    for count in range(max_bands - 1):
        gains = logs[count] - logs[count + 1 :]
        # More bands always fit the fitted rows better, so only a gain on the other rows counts.
        slack = CLEAR_ERRORS * np.std(gains, axis=1, ddof=1) / math.sqrt(len(folds))
        if not (gains.mean(axis=1) > slack).any():
            return count + 1
    return max_bands


def _folds(rows: Sequence[Measured], by: str) -> list[tuple[list[Measured], list[Measured]]]:
    """Return the folds of a cross-validation as (rows to fit, rows left out).

    Each fold leaves out one size (or number of ranks). If there are more than `MAX_CUTS_AND_FOLDS`
    values, each of `MAX_CUTS_AND_FOLDS` folds leaves out every `MAX_CUTS_AND_FOLDS`-th value.
    """
    values = sorted({getattr(row, by) for row in rows})
    # 5 sizes make 5 folds of one size; 50 sizes make 20 folds of two or three.
    fold_count = min(MAX_CUTS_AND_FOLDS, len(values))
    folds = []
    for i in range(fold_count):
        left_out = set(values[i::MAX_CUTS_AND_FOLDS])
        to_fit = [row for row in rows if getattr(row, by) not in left_out]
        folds.append((to_fit, [row for row in rows if getattr(row, by) in left_out]))
    return folds


def _fits(rows: Sequence[Measured], max_bands: int) -> list[CollectiveFit]:
    """Return the best fits with 1, 2, ... up to `max_bands` bands, each of at least two sizes."""
    sizes = sorted({row.size_bytes for row in rows})
    sums = _Sums.of(rows, sizes)
    count = len(sizes)
    # A band of one size cannot tell latency from rate.
    min_sizes = min(2, len(sizes))
    # 50 sizes: bands may end at 21 places, 0, 2, 5, 8, 10, ..., 50, which leaves 210 pairs to fit.
    edges = np.unique(
        np.linspace(0, count, min(count, MAX_CUTS_AND_FOLDS) + 1).round().astype(int)
    ).tolist()
    fitted: dict[tuple[int, int], Fitted] = {}
    for start in edges:
        for end in edges:
            if end >= start + min_sizes:
                fitted[start, end] = sums.fit(start, end)
    # Dynamic programming: the least error of the sizes before `end`, by number of bands, and where
    # the bands start.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    fits = []
    for _ in range(max(1, min(max_bands, count // 2))):
        options_by_end: dict[int, list[tuple[float, list[int]]]] = {}
        for (start, end), (_, _, error) in fitted.items():
            if start in best:
                options_by_end.setdefault(end, []).append(
                    (best[start][0] + error, [*best[start][1], start])
                )
        best = {end: min(options) for end, options in options_by_end.items()}
        fits.append(_with_bands(sizes, [*best[count][1], count], fitted))
    return fits


def _with_bands(
    sizes: Sequence[float], cuts: Sequence[int], fitted: Mapping[tuple[int, int], Fitted]
) -> CollectiveFit:
    """Return the fit whose bands are the sizes between neighbouring cuts."""
    # Bands meet half way on a logarithmic scale: between 1 KiB and 4 KiB at 2 KiB.
    borders = [math.sqrt(sizes[cut - 1] * sizes[cut]) for cut in cuts[1:-1]]
    edges = pairwise([sizes[0], *borders, sizes[-1]])
    bands = []
    for (low, high), interval in zip(edges, pairwise(cuts), strict=True):
        alpha_s, beta_s_per_byte, _ = fitted[interval]
        bands.append(Band(low, high, alpha_s, beta_s_per_byte))
    return CollectiveFit(tuple(bands))


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Prefix sums over the sizes, from which the fit of any range of sizes follows.

    Each row has x = (factor of alpha, factor of beta) / measured time. `products`, of shape
    (sizes + 1, 3), are the sums of x0 x0, x0 x1 and x1 x1. `terms`, (sizes + 1, 2), are the sums of
    x, and `counts`, (sizes + 1,), the numbers of rows.
    """

    products: Floats
    terms: Floats
    counts: Floats

    @staticmethod
    def of(rows: Sequence[Measured], sizes: Sequence[float]) -> "_Sums":
        """Return the sums for these rows, whose different sizes are `sizes` in rising order."""
        size_number = np.searchsorted(sizes, [row.size_bytes for row in rows])
        x = np.array([_law(r.size_bytes, r.ranks) for r in rows]) / [[r.time_s] for r in rows]
        products = np.stack([x[:, 0] ** 2, x[:, 0] * x[:, 1], x[:, 1] ** 2], axis=1)
        sums = np.zeros((len(sizes) + 1, 6))
        np.add.at(sums, size_number + 1, np.hstack([products, x, np.ones((len(rows), 1))]))
        sums = sums.cumsum(axis=0)
        return _Sums(sums[:, :3], sums[:, 3:5], sums[:, 5])

    def fit(self, start: int, end: int) -> Fitted:
        """Return alpha, beta >= 0 and the squared relative errors of sizes start .. end - 1."""
        aa, ab, bb = (self.products[end] - self.products[start]).tolist()
        a, b = (self.terms[end] - self.terms[start]).tolist()
        rows = float(self.counts[end] - self.counts[start])
        # Least squares of 1 = x0 alpha + x1 beta (each row divided by its time) has the normal
        # equations aa alpha + ab beta = a and ab alpha + bb beta = b; Cramer's rule solves them.
        determinant = aa * bb - ab * ab
        # If the free optimum has a negative number, the best allowed one has alpha or beta = 0.
        candidates = [(a / aa, 0.0), (0.0, b / bb)]
        if determinant > MIN_DETERMINANT * aa * bb:
            candidates.append(((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant))
        errors = [
            (rows - 2 * (x * a + y * b) + x * x * aa + 2 * x * y * ab + y * y * bb, x, y)
            for x, y in candidates
            if x >= 0 and y >= 0
        ]
        error, alpha, beta = min(errors)
        return alpha, beta, max(error, 0.0)


# -- judging --------------------------------------------------------------------------------------
def held_out(rows: Sequence[Measured], by: str = "size_bytes") -> list[HeldOut]:
    """Predict every row by a fit to the rows of other sizes (or of other `ranks`, if `by` says so).

    The number of bands is chosen anew in each fit. With many sizes a twentieth of them is left out
    at a time. The result is empty if the remaining rows do not determine alpha and beta.
    """
    judged = []
    for fitted_rows, left_out in _folds(rows, by):
        if not _determines_both(fitted_rows):
            return []
        fit = fit_collective(fitted_rows)
        judged += [predicted(fit, row) for row in left_out]
    return judged


def predicted(fit: CollectiveFit, row: Measured) -> HeldOut:
    """Return a measured row together with the prediction of a fit."""
    return HeldOut(row, fit.time_s(row.size_bytes, row.ranks))


def mape(judged: Iterable[HeldOut]) -> float | None:
    """Return the mean relative error, or None if there are no rows."""
    errors = [item.error for item in judged]
    return float(np.mean(errors)) if errors else None


# -- tables: a CSV file with bytes, ranks, time_s, or DeepBench's columns --------------------------
COLUMNS = ("bytes", "ranks", "time_s")
DEEPBENCH_COLUMNS = ("num_floats", "num_procs", "mean_time_ms")
FLOAT_BYTES = 4
MAX_ROWS = 2000
"""Largest number of rows: cross-validation needs many fits and would take minutes with more."""
LARGEST_NUMBER = 1e18
"""Largest credible number in a table: a larger one is a mistake, for example in the unit."""


def read_table(
    file: str | Path, *, device: str | None = None, max_ranks: int | None = None
) -> list[Measured]:
    """Return the rows of a CSV file, of one `device` only and of at most `max_ranks` ranks.

    Columns: bytes, ranks, time_s; or those of Baidu's DeepBench, num_floats, num_procs and
    mean_time_ms, in upper or lower case. Other columns, and lines that begin with #, are ignored.
    Raises `InputError` with file and line.
    """
    name = str(file)
    lines = csv_of(read_file(name, "a CSV file", TABLE_BYTES), name)
    lines = [(n, line) for n, line in lines if not line[0].startswith("#")]
    columns = [column.lower() for column in lines[0][1]] if lines else []
    names = next((kind for kind in (COLUMNS, DEEPBENCH_COLUMNS) if set(kind) <= set(columns)), None)
    if names is None:
        got = ", ".join(columns)[:80] or "nothing"
        raise InputError(
            f"{name}: columns {', '.join(COLUMNS)}", got, "name them in the first line"
        )
    rows = [(number, dict(zip(columns, line, strict=False))) for number, line in lines[1:]]
    _one_device(name, rows, device)
    measured = [
        _measured(f"{name}, line {number}", row, names)
        for number, row in rows
        if device is None or row.get("device") == device
    ]
    kept = [row for row in measured if max_ranks is None or row.ranks <= max_ranks]
    if len(kept) > MAX_ROWS:
        needed = f"{name}: at most {MAX_ROWS} rows"
        raise InputError(needed, str(len(kept)), "average those of one size, or take fewer ranks")
    if not kept:
        got = f"{len(measured)} rows, none of at most {max_ranks} ranks" if measured else "no rows"
        raise InputError(f"{name}: measured rows", got, "measure some")
    return kept


def _one_device(name: str, rows: list[tuple[int, dict[str, str]]], device: str | None) -> None:
    """Raise `InputError` unless the table has the chosen device, or has only one device."""
    devices = sorted({row["device"] for _, row in rows if row.get("device")})
    if device is None and len(devices) > 1:
        raise InputError(f"{name}: rows of one device", ", ".join(devices), "choose one device")
    if device is not None and device not in devices:
        got = ", ".join(devices) or "no column device"
        raise InputError(f"{name}: rows of device {device}", got, "choose one of them")


def _measured(where: str, row: Mapping[str, str], names: tuple[str, str, str]) -> Measured:
    """Return the measurement in a row of a table; raise `InputError` for wrong numbers."""
    values = [_number(where, column, row.get(column)) for column in names]
    if values[1] != int(values[1]):
        raise InputError(f"{where}: a whole count of ranks", row[names[1]], "correct it")
    size = values[0]
    ranks = int(values[1])
    time = values[2]
    if names is DEEPBENCH_COLUMNS:
        size = size * FLOAT_BYTES
        time = time / 1e3
    try:
        return Measured(size, ranks, time)
    except InputError as error:
        raise InputError(f"{where}: {error.needed}", error.got, error.remedy) from error


def _number(where: str, column: str, text: str | None) -> float:
    value = number_of(text or "")
    if value is None or abs(value) > LARGEST_NUMBER:
        raise InputError(f"{where}: {column} as a number", shown(text), "correct it")
    return value
