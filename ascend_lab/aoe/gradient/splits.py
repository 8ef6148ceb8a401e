"""What the gradient tuner splits, what sending costs, and the best split of all.

A bucket is a run of neighbouring gradients that one all-reduce sends; a split is a tuple of
buckets, each as (first, last), both inclusive and counted from 0. Let E[j] be the earliest end of
the buckets of gradients 0..j-1. The last of them begins with some gradient i, starts when gradient
j-1 is ready and the bucket before has been sent, and so

    E[0] = 0,   E[j] = min over i < j of max(E[i], r[j-1]) + cost(S[j] - S[i]).

An earlier end of a part is never worse for the whole, because max and + keep the order; so the best
split of each part is part of a best split. Nothing is asked of the cost but that it depends on the
bytes of a bucket alone. With at most K buckets there is one row of E for each number of buckets.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster import Cost, Segments
from ascend_lab.errors import InputError

Split = Segments
Floats = NDArray[np.float64]
Price = Callable[[Floats], Floats]
"""A cost on arrays; one that has a method `many(sizes) -> seconds` makes planning faster."""
MOST_BYTES = 2**53
"""Sizes are counted exactly up to here."""
LONGEST_S = 1e12
"""Longer times are taken for mistakes."""
MOST_ENUMERATED = 20
"""Gradients up to which all splits are tried: half a million."""


# -- gradients and buckets ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient: when backward has computed it (from the start of backward), and its size."""

    name: str
    ready_s: float
    size_bytes: int
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        """Raise `InputError` for times and sizes that mean nothing."""
        if not 0 <= self.ready_s <= LONGEST_S:
            raise InputError(f"{self.name}: a ready time of at least 0 s", str(self.ready_s))
        if not (0 <= self.size_bytes <= MOST_BYTES and self.size_bytes == int(self.size_bytes)):
            raise InputError(f"{self.name}: a whole number of bytes", str(self.size_bytes))


def gradients_of(rows: Iterable[Any], dtype: str = "fp16") -> tuple[Gradient, ...]:
    """Return rows with a name, `ready_s` and `size_bytes` as gradients; they may have a `dtype`."""
    return tuple(
        Gradient(row.name, float(row.ready_s), int(row.size_bytes), getattr(row, "dtype", dtype))
        for row in rows
    )


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Gradients as arrays.

    `ready_s[j]`: when gradients 0..j are all ready. `sums_bytes[j]`: bytes of gradients 0..j-1, one
    longer than the rest. `first[j]`: the first gradient that may share a bucket with j.
    """

    ready_s: Floats
    sums_bytes: Floats
    first: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Number of gradients."""
        return len(self.ready_s)

    def sizes_bytes(self, split: Split) -> Floats:
        """Return the bytes of each bucket."""
        ends = np.array(split, np.int64).reshape(-1, 2)
        sizes: Floats = self.sums_bytes[ends[:, 1] + 1] - self.sums_bytes[ends[:, 0]]
        return sizes

    def allows(self, split: Split, max_segments: int | None = None) -> bool:
        """Tell whether no bucket mixes formats or exceeds a limit, and they are few enough."""
        few = max_segments is None or len(split) <= max_segments
        return few and all(first >= self.first[last] for first, last in split)


def table_of(rows: Sequence[Gradient], max_bytes: float | None = None) -> Table:
    """Return gradients as arrays; a bucket holds one number format and at most `max_bytes`.

    A gradient larger than that is a bucket by itself. Measured times may be a little out of order:
    buckets are sent in order, so a gradient that is ready before its predecessor waits for it, and
    the running maximum of the ready times gives every split the same end. Raises `InputError`
    without rows or with a limit that is not above 0.
    """
    if not rows:
        raise InputError("at least one gradient", "none", "check the profile")
    if max_bytes is not None and not max_bytes > 0:
        raise InputError("a largest bucket of more than 0 bytes", str(max_bytes), "raise it")
    sums = np.concatenate([[0.0], np.cumsum([float(row.size_bytes) for row in rows])])
    # Ready at 1.0, 1.2, 1.1 ms: the third is sent in order, so it counts as ready at 1.2 ms.
    ready = np.maximum.accumulate([float(row.ready_s) for row in rows])
    starts = [0]
    for j in range(1, len(rows)):
        starts.append(starts[-1] if rows[j].dtype == rows[j - 1].dtype else j)
    first = np.array(starts, np.int64)
    if max_bytes is not None:
        # The first gradient i with S[j + 1] - S[i] <= max_bytes. Sizes of 4, 4, 4 and 8 bytes with
        # at most 8 give first = 0, 0, 1, 3.
        fitting = np.searchsorted(sums, sums[1:] - max_bytes, "left")
        first = np.minimum(np.maximum(first, fitting), np.arange(len(rows)))
    return Table(ready, sums, first)


def out_of_order(rows: Sequence[Gradient]) -> int:
    """Return how many gradients are ready before one that stands above them."""
    ready = np.array([row.ready_s for row in rows], np.float64)
    return int(np.sum(ready < np.maximum.accumulate(ready))) if len(ready) else 0


def split_at(lasts: Iterable[int]) -> Split:
    """Return the split whose buckets end at these gradients, in ascending order."""
    ends = list(lasts)
    return tuple(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))


# -- what an all-reduce costs ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """alpha + beta * bytes: a startup, and a time for every byte."""

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that are not finite and at least 0."""
        for value in (self.alpha_s, self.beta_s_per_byte):
            if not (math.isfinite(value) and value >= 0):
                raise InputError("alpha and beta of at least 0", str(value), "check the units")

    def __call__(self, size_bytes: float) -> float:
        """Return the seconds of one all-reduce."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes

    def many(self, sizes_bytes: Floats) -> Floats:
        """Return the seconds of many."""
        times_s: Floats = self.alpha_s + self.beta_s_per_byte * sizes_bytes
        return times_s


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A measured table, made non-decreasing and joined by lines.

    Where a measured time falls with the size, neighbouring rows are replaced by their mean until
    it does not (least squares: "pool adjacent violators", Ayer et al. 1955). Below the first row
    its time holds; above the last the line goes on with the slope from the origin to the last row.
    """

    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]
    _x: Floats = field(init=False, repr=False, compare=False)
    _y: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise `InputError` for a table that is empty, unordered, negative or not finite."""
        x = np.array(self.sizes_bytes, np.float64)
        y = np.array(self.times_s, np.float64)
        if not len(x) or len(x) != len(y):
            raise InputError("a time for each size, one at least", f"{len(x)} and {len(y)}")
        if not (np.all(np.isfinite(x)) and x[0] >= 0 and np.all(np.diff(x) > 0)):
            raise InputError("sizes of at least 0, each above the one before", str(x)[:80])
        if not (np.all(np.isfinite(y)) and np.all(y >= 0)):
            raise InputError("times of at least 0 s", str(y)[:80])
        object.__setattr__(self, "_x", x)
        object.__setattr__(self, "_y", _rising(y))

    def __call__(self, size_bytes: float) -> float:
        """Return the seconds of one all-reduce."""
        return float(self.many(np.array([size_bytes], np.float64))[0])

    def many(self, sizes_bytes: Floats) -> Floats:
        """Return the seconds of many."""
        x = self._x
        y = self._y
        slope = y[-1] / x[-1] if x[-1] > 0 else 0.0
        times_s: Floats = np.interp(sizes_bytes, x, y) + slope * np.maximum(
            sizes_bytes - x[-1], 0.0
        )
        return times_s


def _rising(values: Floats) -> Floats:
    """Return the non-decreasing values closest to `values` by least squares."""
    pools: list[list[float]] = []  # sum and count of each
    for value in values.tolist():
        pools.append([value, 1.0])
        # Means are compared without a division: 10, 14, 12 us become the pools 10 and (14 + 12) / 2
        # = 13.
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    return np.concatenate([np.full(int(count), total / count) for total, count in pools])


def sampled(
    cost: Cost, most_bytes: float, *, least_bytes: float = 1024.0, per_octave: int = 2
) -> Piecewise:
    """Return a slow cost function as a table, with `per_octave` sizes per doubling.

    For times with one straight line per algorithm the table errs only where the algorithm changes.
    Below one byte its cost holds: an all-reduce of nothing is still started.
    """
    top_bytes = max(float(most_bytes), 2 * least_bytes)
    count = math.ceil(per_octave * math.log2(top_bytes / least_bytes)) + 1
    # 2 per octave from 1 KiB: 1,024, 1,448, 2,048, ... bytes; one byte is the price of a start
    # alone.
    sizes = [1.0, *np.geomspace(least_bytes, top_bytes, count).round().tolist()]
    return Piecewise(tuple(sizes), tuple(float(cost(size)) for size in sizes))


def price_of(cost: Cost) -> Price:
    """Return a cost on arrays, checked: `InputError` for times below 0 or without end."""
    cached: dict[float, float] = {}

    def one_by_one(sizes: Floats) -> Floats:
        keys = sizes.tolist()
        cached.update({size: float(cost(size)) for size in keys if size not in cached})
        return np.array([cached[size] for size in keys], np.float64)

    many: Price = getattr(cost, "many", one_by_one)

    def price(sizes: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            times = many(sizes)
        if not ((times >= 0) & (times <= LONGEST_S)).all():
            needed = f"a cost of at least 0 and at most {LONGEST_S:g} s"
            raise InputError(needed, str(times)[:80])
        return times

    return price


def startup_s(cost: Cost) -> float:
    """Return what an all-reduce takes beyond its bytes: alpha, else the cost of one byte."""
    alpha_s = getattr(cost, "alpha_s", None)
    return float(cost(1.0) if alpha_s is None else alpha_s)


# -- the best split -------------------------------------------------------------------------------
def end_s(table: Table, price: Price, split: Split) -> float:
    """Return when the last bucket has been sent, one after another on one stream."""
    end = 0.0
    times = price(table.sizes_bytes(split)).tolist()
    for (_, last), time_s in zip(split, times, strict=True):
        end = max(end, float(table.ready_s[last])) + time_s
    return end


def best_split(table: Table, price: Price, max_segments: int | None = None) -> tuple[Split, float]:
    """Return a split with the earliest end, and that end; of few buckets where that costs nothing.

    Raises `InputError` if formats or sizes need more than `max_segments` buckets.
    """
    if max_segments is not None and max_segments < 1:
        raise InputError("at least 1 segment", str(max_segments))
    count = table.count
    is_unlimited = max_segments is None
    # Row k of `ends` holds the earliest ends with at most k buckets. Without a limit one row is
    # enough, which is then computed from itself.
    levels = 1 if max_segments is None else min(max_segments, count)
    ends = np.full((levels + 1, count + 1), np.inf)
    ends[:, 0] = 0.0
    bucket_start = np.zeros((levels + 1, count + 1), np.int64)
    rows = np.arange(levels)
    for j in range(1, count + 1):
        # All starts of the last bucket at once: low .. j - 1.
        low = int(table.first[j - 1])
        times = price(table.sums_bytes[j] - table.sums_bytes[low:j])
        bucket_free_s = ends[1:, low:j] if is_unlimited else ends[:-1, low:j]
        ends_s = np.maximum(bucket_free_s, table.ready_s[j - 1]) + times
        pick = ends_s.argmin(axis=1)
        ends[1:, j] = ends_s[rows, pick]
        bucket_start[1:, j] = low + pick
    end = float(ends[levels, count])
    if not np.isfinite(end):
        remedy = "allow more, or let buckets be larger"
        raise InputError(f"a split in at most {max_segments} segments", "none exists", remedy)
    lasts = list[int]()
    level = levels
    j = count
    while j > 0:  # the choices lead back to the first gradient
        lasts.append(j - 1)
        j = int(bucket_start[level, j])
        level = level if is_unlimited else level - 1
    return _fewer(table, price, split_at(reversed(lasts)), end), end


def _fewer(table: Table, price: Price, split: Split, end: float) -> Split:
    """Join neighbouring buckets where the whole still ends in time."""
    times = price(table.sizes_bytes(split))
    latest = np.full(len(split) + 1, end)  # when bucket k-1 must be sent, so that all is in time
    # From the last bucket backwards: it must begin `times` before the end, the one before it
    # earlier.
    for k in range(len(split) - 1, 0, -1):
        latest[k] = latest[k + 1] - times[k]
    joined: list[tuple[int, int]] = []
    done = [0.0]
    for k, (first, last) in enumerate(split):
        ready = float(table.ready_s[last])
        if joined and joined[-1][0] >= table.first[last]:
            bucket = (joined[-1][0], last)
            # The joined bucket starts when its last gradient is ready, which may be later than the
            # first bucket's start; it is kept if everything behind it is still in time.
            sent = max(done[-2], ready) + float(price(table.sizes_bytes((bucket,)))[0])
            if sent <= latest[k + 1]:
                joined[-1] = bucket
                done[-1] = sent
                continue
        joined.append((first, last))
        done.append(max(done[-1], ready) + float(times[k]))
    return tuple(joined) if end_s(table, price, tuple(joined)) <= end else split


def lower_bound_s(table: Table, price: Price) -> float:
    """Return a time before which no split of a non-decreasing cost ends.

    max over j of r[j] + h[j]: the bucket with gradient j starts at r[j] at the earliest, and from
    then on gradients j.. are still to be sent, which takes at least the cheapest split of them
    without any waiting, h[j] = min over k of cost(S[k] - S[j]) + h[k].
    """
    sending_s = np.zeros(table.count + 1)
    sums = table.sums_bytes
    for j in range(table.count - 1, -1, -1):
        sending_s[j] = np.min(price(sums[j + 1 :] - sums[j]) + sending_s[j + 1 :])
    return float((table.ready_s + sending_s[:-1]).max())


def all_splits(count: int, max_segments: int | None = None) -> Iterator[Split]:
    """Yield all 2^(count-1) splits, or those of at most `max_segments` buckets; `InputError`."""
    if not 1 <= count <= MOST_ENUMERATED:
        raise InputError(f"1 to {MOST_ENUMERATED} gradients to try all splits", str(count))
    for cuts in range(2 ** (count - 1)):
        # Bit i of `cuts` ends a bucket behind gradient i: 0b101 of 4 gradients is (0..0), (1..2),
        # (3..3).
        if max_segments is None or cuts.bit_count() < max_segments:
            yield split_at([*(i for i in range(count - 1) if cuts >> i & 1), count - 1])


def brute_force(
    table: Table, score: Callable[[Split], float], max_segments: int | None = None
) -> tuple[Split, float]:
    """Return the best of all allowed splits by `score`; `InputError` if there is none."""
    allowed = (s for s in all_splits(table.count, max_segments) if table.allows(s))
    best = min(((score(split), split) for split in allowed), default=None)
    if best is None:
        raise InputError("a split within the limits", "none exists", "loosen them")
    return best[1], best[0]
