"""Finds the best split of a sequence of gradients into buckets, by dynamic programming.

A bucket is a run of consecutive gradients that one all-reduce sends. A split is a tuple of buckets,
each given as (first, last), both inclusive and counted from 0: ((0, 2), (3, 3)) for 4 gradients.

Gradient j is ready at time r[j], and S[j] is the number of bytes of gradients 0 .. j-1. Let E[j] be
the earliest time at which gradients 0 .. j-1 can all be sent. Their last bucket begins with some
gradient i. It starts when gradient j-1 is ready and the previous bucket has been sent, and so

    E[0] = 0,   E[j] = min over i < j of max(E[i], r[j-1]) + cost(S[j] - S[i]).

This is exact for every cost that depends only on the bytes of a bucket: if the first gradients are
sent earlier, the others are never sent later. With at most K buckets there is one row of E for each
number of buckets.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.buckets import Segments
from ascend_lab.cluster.cost import Cost
from ascend_lab.errors import InputError

Split = Segments
Floats = NDArray[np.float64]
Price = Callable[[Floats], Floats]
"""A cost on arrays; one that has a method `many(sizes) -> seconds` makes planning faster."""
MAX_BYTES = 2**53
"""Floats represent all whole numbers up to this one exactly."""
MAX_TIME_S = 1e12
"""Longer times raise an error, because they must be mistakes."""
MAX_ENUMERATED = 20
"""All splits are only tried for this many gradients, which have 2^19 = 524,288 splits."""


# -- gradients and buckets ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient: its size, and when it is computed, from the start of the backward pass."""

    name: str
    ready_s: float
    size_bytes: int
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        """Raise `InputError` for a time or a size that is negative or too large."""
        if not 0 <= self.ready_s <= MAX_TIME_S:
            raise InputError(f"{self.name}: a ready time of at least 0 s", str(self.ready_s))
        if not (0 <= self.size_bytes <= MAX_BYTES and self.size_bytes == int(self.size_bytes)):
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

    - ready_s[j]: the time at which gradients 0 .. j are all ready
    - sums_bytes[j]: the bytes of gradients 0 .. j-1; this array has one entry more than the others
    - first[j]: the first gradient that may share a bucket with gradient j
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
        """Tell whether a split keeps all limits: number formats, bytes, and number of buckets."""
        few_enough = max_segments is None or len(split) <= max_segments
        return few_enough and all(begin >= self.first[end] for begin, end in split)


def table_of(rows: Sequence[Gradient], max_bytes: float | None = None) -> Table:
    """Return gradients as arrays; a bucket holds one number format and at most `max_bytes`.

    A larger gradient is a bucket by itself. Measured ready times may be slightly out of order. They
    are replaced by their running maximum, which changes no end, because buckets are sent in order:
    a gradient that is ready before its predecessor waits for it. Raises `InputError` without rows
    or for a limit that is not above 0.
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
    """Return the number of gradients that are ready earlier than one that precedes them."""
    ready = np.array([row.ready_s for row in rows], np.float64)
    return int(np.sum(ready < np.maximum.accumulate(ready))) if len(ready) else 0


def split_at(lasts: Iterable[int]) -> Split:
    """Return the split whose buckets end at these gradients, in ascending order."""
    ends = list(lasts)
    return tuple(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))


# -- what an all-reduce costs ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The cost alpha + beta * bytes: a startup, and a time for every byte."""

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
        """Return the seconds of several all-reduces, as an array."""
        times_s: Floats = self.alpha_s + self.beta_s_per_byte * sizes_bytes
        return times_s


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A cost that interpolates in a measured table.

    If a measured time falls although the size rises, neighbouring rows are replaced by their mean
    until no time falls (least squares: "pool adjacent violators", Ayer et al. 1955). Below the
    first row the cost is that of the first row. Above the last row it rises with the slope of the
    line from the origin to the last row.
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
        """Return the seconds of several all-reduces, as an array."""
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
        # 10, 14, 12 us become the pools 10 and (14 + 12) / 2 = 13. Means are compared without
        # dividing.
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    return np.concatenate([np.full(int(count), total / count) for total, count in pools])


def sampled(
    cost: Cost, max_bytes: float, *, min_bytes: float = 1024.0, per_octave: int = 2
) -> Piecewise:
    """Return a slow cost function as a table from `min_bytes` to `max_bytes`.

    It has `per_octave` sizes per doubling: with 2 from 1 KiB on 1,024, 1,448, 2,048, ... bytes. If
    the cost is one straight line per algorithm, the table errs only near sizes at which the
    algorithm changes.
    """
    top_bytes = max(float(max_bytes), 2 * min_bytes)
    count = math.ceil(per_octave * math.log2(top_bytes / min_bytes)) + 1
    # the cost of one byte is that of starting an all-reduce
    sizes = [1.0, *np.geomspace(min_bytes, top_bytes, count).round().tolist()]
    return Piecewise(tuple(sizes), tuple(float(cost(size)) for size in sizes))


def price_of(cost: Cost) -> Price:
    """Return a cost as a function of arrays, which raises `InputError` for impossible times."""
    cached: dict[float, float] = {}

    def one_by_one(sizes: Floats) -> Floats:
        keys = sizes.tolist()
        cached.update({size: float(cost(size)) for size in keys if size not in cached})
        return np.array([cached[size] for size in keys], np.float64)

    many: Price = getattr(cost, "many", one_by_one)

    def price(sizes: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow raises an error below
            times = many(sizes)
        if not ((times >= 0) & (times <= MAX_TIME_S)).all():
            needed = f"a cost of at least 0 and at most {MAX_TIME_S:g} s"
            raise InputError(needed, str(times)[:80])
        return times

    return price


def startup_s(cost: Cost) -> float:
    """Return the startup time of an all-reduce: alpha, or else the cost of one byte."""
    alpha_s = getattr(cost, "alpha_s", None)
    return float(cost(1.0) if alpha_s is None else alpha_s)


# -- the best split -------------------------------------------------------------------------------
def end_s(table: Table, price: Price, split: Split) -> float:
    """Return the time at which the last bucket is sent, if they are sent one after another."""
    end = 0.0
    times = price(table.sizes_bytes(split)).tolist()
    for (_, last), time_s in zip(split, times, strict=True):
        end = max(end, float(table.ready_s[last])) + time_s
    return end


def best_split(table: Table, price: Price, max_segments: int | None = None) -> tuple[Split, float]:
    """Return a split with the earliest end, and that end.

    Buckets are joined if that does not change the end. Raises `InputError` if number formats or
    sizes need more than `max_segments` buckets.
    """
    if max_segments is not None and max_segments < 1:
        raise InputError("at least 1 segment", str(max_segments))
    count = table.count
    is_unlimited = max_segments is None
    # Row k of `ends` holds the earliest ends with at most k buckets. Without a limit a single row
    # is enough, which is computed from itself.
    levels = 1 if max_segments is None else min(max_segments, count)
    ends = np.full((levels + 1, count + 1), np.inf)
    ends[:, 0] = 0.0
    bucket_start = np.zeros((levels + 1, count + 1), np.int64)
    rows = np.arange(levels)
    for j in range(1, count + 1):
        # E[j] of the module's formula, for all first gradients i = low .. j - 1 of the last bucket
        low = int(table.first[j - 1])
        times = price(table.sums_bytes[j] - table.sums_bytes[low:j])
        previous_ends = ends[1:, low:j] if is_unlimited else ends[:-1, low:j]
        ends_by_start = np.maximum(previous_ends, table.ready_s[j - 1]) + times
        best_start = ends_by_start.argmin(axis=1)
        ends[1:, j] = ends_by_start[rows, best_start]
        bucket_start[1:, j] = low + best_start
    end = float(ends[levels, count])
    if not np.isfinite(end):
        remedy = "allow more, or let buckets be larger"
        raise InputError(f"a split in at most {max_segments} segments", "none exists", remedy)
    lasts = list[int]()
    level = levels
    j = count
    while j > 0:  # follow the best starts back to the first gradient
        lasts.append(j - 1)
        j = int(bucket_start[level, j])
        level = level if is_unlimited else level - 1
    return _with_joined_buckets(table, price, split_at(reversed(lasts)), end), end


def _with_joined_buckets(table: Table, price: Price, split: Split, end: float) -> Split:
    """Return the split with neighbouring buckets joined if all are still sent by `end`."""
    times = price(table.sizes_bytes(split))
    # latest_end[k]: bucket k - 1 must be sent by then, so that the others are sent by `end`
    latest_end = np.full(len(split) + 1, end)
    for k in range(len(split) - 1, 0, -1):
        latest_end[k] = latest_end[k + 1] - times[k]
    joined: list[tuple[int, int]] = []
    sent_s = [0.0]
    for k, (begin, last) in enumerate(split):
        ready = float(table.ready_s[last])
        if joined and joined[-1][0] >= table.first[last]:
            bucket = (joined[-1][0], last)
            # A joined bucket starts when its last gradient is ready. It stays joined if all later
            # buckets are still in time.
            joined_sent_s = max(sent_s[-2], ready) + float(price(table.sizes_bytes((bucket,)))[0])
            if joined_sent_s <= latest_end[k + 1]:
                joined[-1] = bucket
                sent_s[-1] = joined_sent_s
                continue
        joined.append((begin, last))
        sent_s.append(max(sent_s[-1], ready) + float(times[k]))
    return tuple(joined) if end_s(table, price, tuple(joined)) <= end else split


def lower_bound_s(table: Table, price: Price) -> float:
    """Return a time before which no split ends, if the cost does not fall with the size.

    It is the maximum over j of r[j] + h[j]. The bucket with gradient j starts at r[j] at the
    earliest. From then on gradients j, j + 1, ... must be sent, which takes at least as long as
    their best split without any waiting: h[j] = min over k of cost(S[k] - S[j]) + h[k].
    """
    sending_s = np.zeros(table.count + 1)
    sums = table.sums_bytes
    for j in range(table.count - 1, -1, -1):
        sending_s[j] = np.min(price(sums[j + 1 :] - sums[j]) + sending_s[j + 1 :])
    return float((table.ready_s + sending_s[:-1]).max())


def all_splits(count: int, max_segments: int | None = None) -> Iterator[Split]:
    """Yield all 2^(count - 1) splits, or those of at most `max_segments` buckets.

    Raises `InputError` for more than `MAX_ENUMERATED` gradients.
    """
    if not 1 <= count <= MAX_ENUMERATED:
        raise InputError(f"1 to {MAX_ENUMERATED} gradients to try all splits", str(count))
    for cuts in range(2 ** (count - 1)):
        # bit i of `cuts` ends a bucket after gradient i: 0b101 is ((0, 0), (1, 2), (3, 3))
        if max_segments is None or cuts.bit_count() < max_segments:
            yield split_at([*(i for i in range(count - 1) if cuts >> i & 1), count - 1])


def brute_force(
    table: Table, score: Callable[[Split], float], max_segments: int | None = None
) -> tuple[Split, float]:
    """Return the allowed split with the lowest score, and its score; for few gradients only.

    Raises `InputError` if no split is allowed.
    """
    allowed = (s for s in all_splits(table.count, max_segments) if table.allows(s))
    best = min(((score(split), split) for split in allowed), default=None)
    if best is None:
        raise InputError("a split within the limits", "none exists", "loosen them")
    return best[1], best[0]
