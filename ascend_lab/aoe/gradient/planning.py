"""A plan: the best split of a gradient sequence, what other ways take, and as frameworks take it.

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

HCCL (Python API, `hccl.split.api`): `set_split_strategy_by_idx` takes the last gradient of every
segment, `[20, 100, 159]` for 0-20, 21-100, 101-159; `set_split_strategy_by_size` takes shares of
the bytes that add up to 100 percent; at most 8 segments. Where both are set the sizes count.
Gradients are counted in the order of the all-reduces in the graph, which is that of backward.

MindSpore (`set_auto_parallel_context`): `all_reduce_fusion_config` takes last gradients too, the
very last one implied (`communication_op_fusion.cc`, `GetSplitSegments`); releases before 2.0 refuse
0 as the first. The same list is `comm_fusion={"allreduce": {"mode": "index", "config": ...}}`.

PyTorch (`DistributedDataParallel`): one `bucket_cap_mb` in MiB, a bucket is closed when it reaches
that; a cap that the user gives holds for the first as well (`bucket_bytes_cap_default`).
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.gradient import splits
from ascend_lab.aoe.gradient.splits import Gradient, Price, Split, Table, end_s, price_of, split_at
from ascend_lab.cluster import BUCKET_BYTES, FIRST_BYTES, Cost, checked, closed
from ascend_lab.errors import InputError

MIB = 2**20
DDP_PER_OCTAVE = 16
HCCL_FIRST = 0.9654
"""Share of the bytes in the first of HCCL's two default segments (ResNet-50's best)."""
HCCL_SEGMENTS = GDAT_SEGMENTS = 8
PARTS = 6400
"""Shares are whole 64ths of a percent: exact in binary, so that their sum is 100 and no less."""


# -- other ways to split --------------------------------------------------------------------------
def one_bucket(table: Table, cost: Cost) -> Split:
    """Return everything in one bucket."""
    return ((0, table.count - 1),)


def per_layer(table: Table, cost: Cost) -> Split:
    """Return a bucket for each gradient."""
    return split_at(range(table.count))


def hccl_default(table: Table, cost: Cost) -> Split:
    """Return two buckets, cut where the first is closest to 96.54 % of the bytes."""
    sums = table.sums_bytes
    # Of sizes 10, 60, 25, 5 the running sums are 10, 70, 95, 100 %: 95 is nearest to 96.54.
    cut = int(np.argmin(np.abs(sums[1:] - HCCL_FIRST * sums[-1])))
    return split_at(sorted({cut, table.count - 1}))


def by_cap(table: Table, cap_bytes: float, first_bytes: float | None = None) -> Split:
    """Return buckets that are closed by the gradient with which they reach a size.

    `first_bytes`: another size for the first bucket.
    """
    first_cap_bytes = cap_bytes if first_bytes is None else first_bytes
    return closed(table.sums_bytes.tolist(), cap_bytes, first_cap_bytes)


def ddp_25mb(table: Table, cost: Cost) -> Split:
    """Return the buckets of DDP as it comes: 25 MiB, but 1 MiB for the first."""
    return by_cap(table, BUCKET_BYTES, FIRST_BYTES)


def best_cap(table: Table, price: Price, per_octave: int = 2) -> tuple[float, Split, float]:
    """Return the best single cap of a grid of sizes, its buckets and their end."""
    total = max(float(table.sums_bytes[-1]), 1.0)
    least_bytes = min((s for s in np.diff(table.sums_bytes).tolist() if s > 0), default=1.0)
    count = (
        int(np.ceil(per_octave * np.log2(total / least_bytes))) + 1 if total > least_bytes else 1
    )
    # Below the smallest gradient each is a bucket by itself, above the sum all are one: no cap
    # outside this range gives another split.
    caps = [float(round(min(total, least_bytes * 2 ** (k / per_octave)))) for k in range(count + 1)]
    splits = [legal(table, by_cap(table, cap)) for cap in caps]
    ends = [end_s(table, price, split) for split in splits]
    best = ends.index(min(ends))
    return caps[best], splits[best], ends[best]


def best_threshold(table: Table, cost: Cost) -> Split:
    """Return the buckets of the best single size, tried in half octaves."""
    return best_cap(table, price_of(cost))[1]


def mg_wfbp(table: Table, cost: Cost) -> Split:
    """Return the buckets of the released MG-WFBP rule.

    A gradient that could be sent from `start` on goes into the next one's bucket if that one is
    ready before it would have been sent, and either before `start` or less than a startup after it.
    """
    startup = splits.startup_s(cost)
    sums = table.sums_bytes.tolist()
    ready = table.ready_s.tolist()
    lasts = list[int]()
    begin = 0
    start = ready[0]
    for i in range(table.count - 1):
        time_s = float(cost(sums[i + 1] - sums[begin]))
        wait = ready[i + 1] - start
        # Waiting less than a startup is cheaper than paying for one more.
        if wait < time_s and (wait < 0 or wait < startup):
            start = max(start, ready[i + 1])
            continue
        lasts.append(i)
        begin = i + 1
        start = max(start + time_s, ready[i + 1])
    return split_at([*lasts, table.count - 1])


def gdat(table: Table, cost: Cost) -> Split:
    """Return the buckets of CANN's published greedy rule.

    For every end of the first bucket: the following ones take the gradients that are computed while
    the last bucket is sent. The one with the shortest tail of at most eight buckets wins.
    """
    start = splits.startup_s(cost)
    sums = table.sums_bytes.tolist()
    # CANN counts from the first gradient, which is ready at 0.
    ready_s = (table.ready_s - table.ready_s[0]).tolist()
    count = table.count
    backward_s = ready_s[-1]
    best = float(cost(sums[-1]))
    best_split = one_bucket(table, cost)
    for first_count in range(1, count):
        sent = float(cost(sums[first_count]))
        end = ready_s[first_count - 1] + sent
        begin = first_count
        lasts = [first_count - 1]
        # While this bucket is sent, backward computes the gradients of the next.
        while begin < count and len(lasts) < GDAT_SEGMENTS:
            stop = bisect_right(ready_s, ready_s[begin - 1] + sent + start, begin)
            if stop == begin:  # one slow layer: wait for it
                end += ready_s[begin] - ready_s[begin - 1] - sent
                stop = begin + 1
            sent = float(cost(sums[stop] - sums[begin]))
            end = end + sent
            begin = stop
            lasts.append(stop - 1)
        if begin == count and end - backward_s < best:
            best = end - backward_s
            best_split = split_at(lasts)
    return best_split


BASELINES: dict[str, Callable[[Table, Cost], Split]] = {
    f.__name__: f
    for f in (one_bucket, per_layer, hccl_default, ddp_25mb, best_threshold, mg_wfbp, gdat)
}


def legal(table: Table, split: Split) -> Split:
    """Return the split with additional cuts wherever a bucket would mix number formats."""
    # Where a gradient may share no bucket with the one before it, a bucket ends.
    forced = np.flatnonzero(table.first[1:] == np.arange(1, table.count)).tolist()
    return split_at(sorted({*forced, *(last for _, last in split)}))


def baseline(name: str, table: Table, cost: Cost) -> Split:
    """Return the split of a named baseline, cut where the number format changes."""
    return legal(table, BASELINES[name](table, cost))


# -- the plan -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GradientPlan:
    """Which gradients are sent together, and when all are sent (from the start of backward).

    No split in the limits ends earlier, by dynamic programming. `segments`: (first, last), both
    inclusive, 0-based, in backward order. `baselines`: ends of other ways by name; those
    in `over_limit` break a limit that this plan keeps, and may end earlier for it. `ready_s`: when
    the last gradient is ready; no plan ends before. `max_segments`, `max_bytes`: the limits.
    """

    segments: Split
    end_s: float
    baselines: Mapping[str, float] = field(hash=False)
    over_limit: tuple[str, ...] = ()
    ready_s: float = 0.0
    max_segments: int | None = None
    max_bytes: float | None = None

    @property
    def tail_s(self) -> float:
        """What is still to be sent when backward is over: end - ready."""
        return self.end_s - self.ready_s

    def gain(self, name: str) -> float:
        """Return how much longer a baseline takes: its end / this end - 1."""
        return self.baselines[name] / self.end_s - 1.0 if self.end_s else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return JSON data, times in microseconds; baselines that break a limit stand apart."""
        ends = {name: end * 1e6 for name, end in self.baselines.items()}
        return {
            "segments": [list(bucket) for bucket in self.segments],
            "end_us": self.end_s * 1e6,
            "optimal": True,
            "baselines": {n: end for n, end in ends.items() if n not in self.over_limit},
            "baselines_over_limit": {n: ends[n] for n in self.over_limit},
            "tail_us": self.tail_s * 1e6,
        }


def plan(
    rows: Sequence[Gradient],
    cost: Cost,
    max_segments: int | None = None,
    *,
    max_bytes: float | None = None,
) -> GradientPlan:
    """Return the split of `rows` (in backward order) whose last all-reduce ends first.

    All-reduces run one after another; one of n bytes takes `cost(n)` seconds. `max_segments`: at
    most so many (HCCL takes 8). `max_bytes`: of a bucket; a larger gradient is one by itself. A
    bucket holds one number format. Raises `InputError` for rows, costs and limits that mean nothing
    and for limits that no split keeps.
    """
    table = splits.table_of(rows, max_bytes)
    price = price_of(cost)
    split, end = splits.best_split(table, price, max_segments)
    unlimited = splits.table_of(rows)
    baselines = {name: baseline(name, unlimited, cost) for name in BASELINES}
    ends = {name: end_s(table, price, rival) for name, rival in baselines.items()}
    over = tuple(name for name, rival in baselines.items() if not table.allows(rival, max_segments))
    return GradientPlan(split, end, ends, over, float(table.ready_s[-1]), max_segments, max_bytes)


def end_of(segments: Sequence[Sequence[int]], rows: Sequence[Gradient], cost: Cost) -> float:
    """Return when the last bucket of any split has been sent, in seconds; `InputError`."""
    return end_s(splits.table_of(rows), price_of(cost), checked(segments, len(rows)))


def bound(rows: Sequence[Gradient], cost: Cost, *, max_bytes: float | None = None) -> float:
    """Return a time that no split beats if the cost does not fall with the size."""
    return splits.lower_bound_s(splits.table_of(rows, max_bytes), price_of(cost))


# -- as others take it ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Forms:
    """A plan in the forms of three frameworks; `hccl` may differ from it, being of 8 segments.

    `hccl_too_large`: no 8 segments keep the limit of bytes, so HCCL's have none.
    `ddp_cap_mib`: the best single cap; `ddp_end_s`: what it ends at, to compare with the plan.
    """

    hccl: GradientPlan
    by_idx: tuple[int, ...]
    by_size: tuple[float, ...]
    mindspore: tuple[int, ...]
    ddp_cap_mib: float
    ddp_segments: Split
    ddp_end_s: float
    shares_end_s: float
    hccl_too_large: bool = False

    def as_dict(self) -> dict[str, object]:
        """Return the forms as JSON data, times in microseconds."""
        return {
            "hccl": {
                "set_split_strategy_by_idx": list(self.by_idx),
                "set_split_strategy_by_size": list(self.by_size),
                "end_us": self.hccl.end_s * 1e6,
                "by_size_end_us": self.shares_end_s * 1e6,
            },
            "mindspore": {"all_reduce_fusion_config": list(self.mindspore)},
            "pytorch": {
                "bucket_cap_mb": self.ddp_cap_mib,
                "buckets": len(self.ddp_segments),
                "end_us": self.ddp_end_s * 1e6,
            },
        }


def forms_of(
    best: GradientPlan, rows: Sequence[Gradient], cost: Cost, *, max_bytes: float | None = None
) -> Forms:
    """Return a plan in all forms; plans of more than 8 segments are made anew for HCCL.

    Raises `InputError` where number formats change more than seven times: HCCL has no such split.
    """
    hccl = best
    too_large = False
    if len(best.segments) > HCCL_SEGMENTS:
        try:
            hccl = plan(rows, cost, HCCL_SEGMENTS, max_bytes=max_bytes)
        except InputError:
            if max_bytes is None:
                raise
            hccl = plan(rows, cost, HCCL_SEGMENTS)
            too_large = True
    table = splits.table_of(rows)
    price = price_of(cost)
    shares = by_size(hccl.segments, rows)
    cap, split, end = best_cap(table, price, DDP_PER_OCTAVE)
    shares_end_s = end_s(table, price, legal(table, split_by_size(shares, rows)))
    lasts, implied = (tuple(last for _, last in p.segments) for p in (hccl, best))
    return Forms(hccl, lasts, shares, implied[:-1], cap / MIB, split, end, shares_end_s, too_large)


def by_size(split: Split, rows: Sequence[Gradient]) -> tuple[float, ...]:
    """Return the share of each segment in percent, in 64ths that sum to 100 exactly.

    A segment whose share rounds to nothing goes with the next, the last ones with the one before:
    there are no shares of 0, and without any bytes one share has all.
    """
    sums = splits.table_of(rows).sums_bytes
    total = float(sums[-1]) or 1.0
    marks = [round(PARTS * float(sums[last + 1]) / total) for _, last in split]
    # Shares are differences of rounded sums, not rounded shares: they always add up to 64 / 64.
    marks[-1] = PARTS
    parts = [b - a for a, b in zip([0, *marks[:-1]], marks, strict=True)]
    return tuple(share * 100 / PARTS for share in parts if share)


def split_by_size(shares: Sequence[float], rows: Sequence[Gradient]) -> Split:
    """Return the segments whose ends are closest to the shares: how `by_size` can be read.

    A share too small for a gradient of its own makes no segment.
    """
    sums = splits.table_of(rows).sums_bytes
    # Shares of 50, 25 and 25 % end at 50 and 75 %; the last one ends with the last gradient.
    reached = np.cumsum(shares[:-1])
    lasts = {int(abs(sums[1:] - share / 100 * sums[-1]).argmin()) for share in reached.tolist()}
    return split_at(sorted({*lasts, len(rows) - 1}))
