"""Ways of splitting that others use, each by its name, to compare with.

| name | rule | source |
|---|---|---|
| one_bucket | everything in one all-reduce | |
| per_layer | one all-reduce a gradient | |
| hccl_default | 96.54 % of the bytes, then 3.46 % | HCCL's Python API, gradient splitting |
| ddp_25mb | 25 MiB, the first 1 MiB; closed when reached | PyTorch DDP, `reducer.hpp` |
| best_threshold | the best single size of half octaves | |
| mg_wfbp | merge while the next is ready soon enough | Shi et al., INFOCOM 2019, released code |
| gdat | fill the time the last bucket is sent in | CANN's gradient tuner, as published |

Where number formats change every one of them begins a new bucket.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np

from ascend_lab.aoe.gradient.cost import Cost, Price, price_of, startup_s
from ascend_lab.aoe.gradient.exact import end_s
from ascend_lab.aoe.gradient.rows import Split, Table, split_at

MIB = 2**20
DDP_CAP_BYTES, DDP_FIRST_BYTES = 25 * MIB, MIB
HCCL_FIRST = 0.9654
"""Share of the bytes in the first of HCCL's two default segments (ResNet-50's best)."""
GDAT_SEGMENTS = 8


def one_bucket(table: Table, cost: Cost) -> Split:
    """Return everything in one bucket."""
    return ((0, table.count - 1),)


def per_layer(table: Table, cost: Cost) -> Split:
    """Return a bucket for each gradient."""
    return split_at(range(table.count))


def hccl_default(table: Table, cost: Cost) -> Split:
    """Return two buckets, cut where the first is closest to 96.54 % of the bytes."""
    sums = table.sums_bytes
    cut = int(np.argmin(np.abs(sums[1:] - HCCL_FIRST * sums[-1])))
    return split_at(sorted({cut, table.count - 1}))


def by_cap(table: Table, cap_bytes: float, first_bytes: float | None = None) -> Split:
    """Return buckets that are closed by the gradient with which they reach a size.

    `first_bytes`: another size for the first bucket.
    """
    sums, lasts, begin = table.sums_bytes.tolist(), list[int](), 0
    limit = cap_bytes if first_bytes is None else first_bytes
    while begin < table.count:
        last = bisect_left(sums, sums[begin] + limit, begin) - 1
        lasts.append(min(max(last, begin), table.count - 1))
        begin, limit = lasts[-1] + 1, cap_bytes
    return split_at(lasts)


def ddp_25mb(table: Table, cost: Cost) -> Split:
    """Return the buckets of DDP as it comes: 25 MiB, but 1 MiB for the first."""
    return by_cap(table, DDP_CAP_BYTES, DDP_FIRST_BYTES)


def best_cap(table: Table, price: Price, per_octave: int = 2) -> tuple[float, Split, float]:
    """Return the best single cap of a grid of sizes, its buckets and their end."""
    total = max(float(table.sums_bytes[-1]), 1.0)
    least = min((s for s in np.diff(table.sums_bytes).tolist() if s > 0), default=1.0)
    count = int(np.ceil(per_octave * np.log2(total / least))) + 1 if total > least else 1
    best: tuple[float, float, Split] | None = None
    for step in range(count + 1):
        cap = float(round(min(total, least * 2 ** (step / per_octave))))
        split = legal(table, by_cap(table, cap))
        end = end_s(table, price, split)
        if best is None or end < best[0]:
            best = end, cap, split
    assert best is not None
    return best[1], best[2], best[0]


def best_threshold(table: Table, cost: Cost) -> Split:
    """Return the buckets of the best single size, tried in half octaves."""
    return best_cap(table, price_of(cost))[1]


def mg_wfbp(table: Table, cost: Cost) -> Split:
    """Return the buckets of the released MG-WFBP rule.

    A gradient that could be sent from `start` on goes into the next one's bucket if that one is
    ready before it would have been sent, and either before `start` or less than a startup after it.
    """
    startup, sums, ready = startup_s(cost), table.sums_bytes.tolist(), table.ready_s.tolist()
    lasts, begin, start = list[int](), 0, ready[0]
    for i in range(table.count - 1):
        time_s = float(cost(sums[i + 1] - sums[begin]))
        wait = ready[i + 1] - start
        if wait < time_s and (wait < 0 or wait < startup):
            start = max(start, ready[i + 1])
            continue
        lasts.append(i)
        begin, start = i + 1, max(start + time_s, ready[i + 1])
    return split_at([*lasts, table.count - 1])


def gdat(table: Table, cost: Cost) -> Split:
    """Return the buckets of CANN's published greedy rule.

    For every end of the first bucket: the following ones take the gradients that are computed while
    the last bucket is sent. The one with the shortest tail of at most eight buckets wins.
    """
    start, sums = startup_s(cost), table.sums_bytes.tolist()
    at = (table.ready_s - table.ready_s[0]).tolist()  # the time of the first gradient counts as 0
    count, whole = table.count, at[-1]
    best, found = float(cost(sums[-1])), one_bucket(table, cost)
    for first in range(1, count):
        sent = float(cost(sums[first]))
        end, begin, lasts = at[first - 1] + sent, first, [first - 1]
        while begin < count and len(lasts) < GDAT_SEGMENTS:
            stop = bisect_right(at, at[begin - 1] + sent + start, begin)
            if stop == begin:  # one slow layer: wait for it
                end += at[begin] - at[begin - 1] - sent
                stop = begin + 1
            sent = float(cost(sums[stop] - sums[begin]))
            end, begin = end + sent, stop
            lasts.append(stop - 1)
        if begin == count and end - whole < best:
            best, found = end - whole, split_at(lasts)
    return found


BASELINES: dict[str, Callable[[Table, Cost], Split]] = {
    f.__name__: f
    for f in (one_bucket, per_layer, hccl_default, ddp_25mb, best_threshold, mg_wfbp, gdat)
}


def legal(table: Table, split: Split) -> Split:
    """Return the split with a cut more wherever a bucket would mix number formats."""
    lasts: list[int] = []
    for first, last in split:
        lasts += [j - 1 for j in range(first + 1, last + 1) if table.first[j] == j]
        lasts.append(last)
    return split_at(lasts)


def baseline(name: str, table: Table, cost: Cost) -> Split:
    """Return the split of a named baseline, cut where the number format changes."""
    return legal(table, BASELINES[name](table, cost))
