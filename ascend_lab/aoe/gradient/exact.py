"""The best split of all, by dynamic programming; and a bound and an enumeration to check it.

Let E[j] be the earliest end of the buckets of gradients 0..j-1. The last of them begins with some
gradient i, starts when gradient j-1 is ready and the bucket before has been sent, and so

    E[0] = 0,   E[j] = min over i < j of max(E[i], r[j-1]) + cost(S[j] - S[i]).

An earlier end of a part is never worse for the whole, because max and + keep the order; so the best
split of each part is part of a best split. Nothing is asked of the cost but that it depends on the
bytes of a bucket alone. With at most K buckets there is one row of E for each number of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ascend_lab.aoe.gradient.cost import Price
from ascend_lab.aoe.gradient.rows import Floats, Split, Table, split_at
from ascend_lab.errors import InputError

MOST_ENUMERATED = 20
"""Gradients up to which all splits are tried: half a million."""


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
    count, free = table.count, max_segments is None
    levels = 1 if max_segments is None else min(max_segments, count)
    ends = np.full((levels + 1, count + 1), np.inf)
    ends[:, 0] = 0.0
    came = np.zeros((levels + 1, count + 1), np.int64)
    rows = np.arange(levels)
    for j in range(1, count + 1):
        low = int(table.first[j - 1])
        times = price(table.sums_bytes[j] - table.sums_bytes[low:j])
        before = ends[1:, low:j] if free else ends[:-1, low:j]
        found = np.maximum(before, table.ready_s[j - 1]) + times
        pick = found.argmin(axis=1)
        ends[1:, j] = found[rows, pick]
        came[1:, j] = low + pick
    end = float(ends[levels, count])
    if not np.isfinite(end):
        remedy = "allow more, or let buckets be larger"
        raise InputError(f"a split in at most {max_segments} segments", "none exists", remedy)
    return _fewer(table, price, _walked(came, free), end), end


def _walked(came: np.ndarray, free: bool) -> Split:
    """Return the split that the choices lead back to."""
    level, j = came.shape[0] - 1, came.shape[1] - 1
    lasts: list[int] = []
    while j > 0:
        lasts.append(j - 1)
        j, level = int(came[level, j]), level if free else level - 1
    return split_at(reversed(lasts))


def _fewer(table: Table, price: Price, split: Split, end: float) -> Split:
    """Join neighbouring buckets where the whole still ends in time."""
    times = price(table.sizes_bytes(split))
    latest = np.full(len(split) + 1, end)  # when bucket k-1 must be sent, so that all is in time
    for k in range(len(split) - 1, 0, -1):
        latest[k] = latest[k + 1] - times[k]
    made: list[tuple[int, int]] = []
    done = [0.0]
    for k, (first, last) in enumerate(split):
        ready = float(table.ready_s[last])
        if made and made[-1][0] >= table.first[last]:
            both = (made[-1][0], last)
            sent = max(done[-2], ready) + float(price(table.sizes_bytes((both,)))[0])
            if sent <= latest[k + 1]:
                made[-1], done[-1] = both, sent
                continue
        made.append((first, last))
        done.append(max(done[-1], ready) + float(times[k]))
    return tuple(made) if end_s(table, price, tuple(made)) <= end else split


def lower_bound_s(table: Table, price: Price) -> float:
    """Return a time before which no split of a non-decreasing cost ends.

    max over j of r[j] + h[j]: the bucket with gradient j starts at r[j] at the earliest, and from
    then on gradients j.. are still to be sent, which takes at least the cheapest split of them
    without any waiting, h[j] = min over k of cost(S[k] - S[j]) + h[k].
    """
    count = table.count
    rest = np.zeros(count + 1)
    sums = table.sums_bytes
    for j in range(count - 1, -1, -1):
        rest[j] = np.min(price(sums[j + 1 :] - sums[j]) + rest[j + 1 :])
    bounds: Floats = table.ready_s + rest[:-1]
    return float(bounds.max())


def all_splits(count: int, max_segments: int | None = None) -> Iterator[Split]:
    """Yield all 2^(count-1) splits, or those of at most `max_segments` buckets; `InputError`."""
    if not 1 <= count <= MOST_ENUMERATED:
        raise InputError(f"1 to {MOST_ENUMERATED} gradients to try all splits", str(count))
    for cuts in range(2 ** (count - 1)):
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
