"""Plans which gradients share an all-reduce: best split, baselines, settings for frameworks.

The baselines are other ways to split, by name:

| name | rule | source |
|---|---|---|
| one_bucket | everything in one all-reduce | |
| per_layer | one all-reduce per gradient | |
| hccl_default | 96.54 % of the bytes, then 3.46 % | HCCL's Python API, gradient splitting |
| ddp_25mb | 25 MiB, the first 1 MiB; closed when reached | PyTorch DDP, `reducer.hpp` |
| best_threshold | the best single bucket size, tried in steps of a factor 1.41 | |
| mg_wfbp | merge while the next is ready soon enough | Shi et al., INFOCOM 2019, released code |
| gdat | fill the time the last bucket is sent in | CANN's gradient tuner, as published |

All of them begin a new bucket where the number format changes.

The forms in which frameworks accept a split:

HCCL (Python API, `hccl.split.api`): `set_split_strategy_by_idx` takes the last gradient of every
segment, `[20, 100, 159]` for 0-20, 21-100, 101-159. `set_split_strategy_by_size` takes shares of
the bytes that add up to 100 percent, and has precedence. There are at most 8 segments. Gradients
are counted in the order of the all-reduces in the graph, which is that of backward.

MindSpore (`set_auto_parallel_context`): `all_reduce_fusion_config` takes last gradients as well,
without the very last one (`communication_op_fusion.cc`, `GetSplitSegments`); releases before 2.0
refuse 0 as the first. The same list is the "config" of
`comm_fusion={"allreduce": {"mode": "index", "config": ...}}`.

PyTorch (`DistributedDataParallel`): a bucket is closed when it reaches `bucket_cap_mb` (in MiB). A
cap that the user sets holds for the first bucket as well (`bucket_bytes_cap_default`).
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.gradient import splits
from ascend_lab.aoe.gradient.splits import Gradient, Price, Split, Table, end_s, price_of, split_at
from ascend_lab.cluster.buckets import BUCKET_BYTES, FIRST_BYTES, checked, closed
from ascend_lab.cluster.cost import Cost
from ascend_lab.errors import InputError

MIB = 2**20
DDP_PER_OCTAVE = 16
"""Bucket caps for PyTorch are tried in steps of a factor 2^(1/16) = 1.044."""
HCCL_FIRST_SHARE = 0.9654
"""Share of the bytes in the first of HCCL's two default segments (the best for ResNet-50)."""
HCCL_SEGMENTS = 8
"""Largest number of segments that HCCL takes."""
GDAT_SEGMENTS = 8
"""Largest number of segments of the rule of CANN's gradient tuner."""
SHARE_UNITS = 6400
"""Shares are multiples of 1/64 percent, which floats represent exactly: their sum is 100."""


# -- other ways to split --------------------------------------------------------------------------
def one_bucket(table: Table, cost: Cost) -> Split:
    """Return everything in one bucket."""
    return ((0, table.count - 1),)


def per_layer(table: Table, cost: Cost) -> Split:
    """Return a bucket for each gradient."""
    return split_at(range(table.count))


def hccl_default(table: Table, cost: Cost) -> Split:
    """Return two buckets, of which the first is as close as possible to 96.54 % of the bytes."""
    sums = table.sums_bytes
    # Of sizes 10, 60, 25, 5 the running sums are 10, 70, 95, 100 %: 95 is nearest to 96.54.
    cut = int(np.argmin(np.abs(sums[1:] - HCCL_FIRST_SHARE * sums[-1])))
    return split_at(sorted({cut, table.count - 1}))


def by_cap(table: Table, cap_bytes: float, first_bytes: float | None = None) -> Split:
    """Return the buckets if each is closed as soon as it has at least `cap_bytes`.

    `first_bytes` is another cap for the first bucket.
    """
    first_cap_bytes = cap_bytes if first_bytes is None else first_bytes
    return closed(table.sums_bytes.tolist(), cap_bytes, first_cap_bytes)


def ddp_25mb(table: Table, cost: Cost) -> Split:
    """Return the buckets of DDP's defaults: 25 MiB, but 1 MiB for the first."""
    return by_cap(table, BUCKET_BYTES, FIRST_BYTES)


def best_cap(table: Table, price: Price, per_octave: int = 2) -> tuple[float, Split, float]:
    """Return the best bucket cap in bytes, its split, and the end of that split.

    `per_octave` caps are tried per doubling, from the smallest gradient to the sum of all: smaller
    caps make every gradient a bucket, and larger ones make a single bucket.
    """
    total_bytes = max(float(table.sums_bytes[-1]), 1.0)
    smallest_bytes = min((s for s in np.diff(table.sums_bytes).tolist() if s > 0), default=1.0)
    count = 1
    if total_bytes > smallest_bytes:
        # from 1 KiB to 1 MiB with 2 caps per doubling: 10 doublings, 20 steps
        count = int(np.ceil(per_octave * np.log2(total_bytes / smallest_bytes))) + 1
    sizes = [smallest_bytes * 2 ** (step / per_octave) for step in range(count + 1)]
    caps = [float(round(min(total_bytes, size))) for size in sizes]
    splits_by_cap = [with_format_cuts(table, by_cap(table, cap)) for cap in caps]
    ends = [end_s(table, price, split) for split in splits_by_cap]
    best = ends.index(min(ends))
    return caps[best], splits_by_cap[best], ends[best]


def best_threshold(table: Table, cost: Cost) -> Split:
    """Return the buckets of the best single cap, tried with two caps per doubling."""
    return best_cap(table, price_of(cost))[1]


def mg_wfbp(table: Table, cost: Cost) -> Split:
    """Return the buckets of the MG-WFBP rule, as in its released code.

    A bucket that could be sent from `start` on takes in the next gradient if that one is ready
    before the bucket would be sent, and at most a startup after `start`.
    """
    startup = splits.startup_s(cost)
    sums = table.sums_bytes.tolist()
    ready = table.ready_s.tolist()
    lasts = list[int]()
    begin = 0
    start = ready[0]
    for i in range(table.count - 1):
        time_s = float(cost(sums[i + 1] - sums[begin]))
        # below 0 if the link is still busy when the next gradient is ready: waiting is free then
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

    For every possible end of the first bucket, each following bucket takes the gradients that are
    computed while the previous one is sent. Of these splits, that with at most eight buckets whose
    last all-reduce ends first is returned.
    """
    startup_s = splits.startup_s(cost)
    sums = table.sums_bytes.tolist()
    # CANN counts from the first gradient, which is ready at 0.
    ready_s = (table.ready_s - table.ready_s[0]).tolist()
    count = table.count
    backward_s = ready_s[-1]
    # a split must beat one bucket, which has its whole all-reduce behind the end of backward
    best_tail_s = float(cost(sums[-1]))
    best_split = one_bucket(table, cost)
    for first_count in range(1, count):
        sending_s = float(cost(sums[first_count]))
        end = ready_s[first_count - 1] + sending_s
        begin = first_count
        lasts = [first_count - 1]
        while begin < count and len(lasts) < GDAT_SEGMENTS:
            # the gradients that are ready when the previous bucket has been sent
            stop = bisect_right(ready_s, ready_s[begin - 1] + sending_s + startup_s, begin)
            if stop == begin:  # a slow layer: no gradient is ready, so wait for one
                end += ready_s[begin] - ready_s[begin - 1] - sending_s
                stop = begin + 1
            sending_s = float(cost(sums[stop] - sums[begin]))
            end = end + sending_s
            begin = stop
            lasts.append(stop - 1)
        if begin == count and end - backward_s < best_tail_s:
            best_tail_s = end - backward_s
            best_split = split_at(lasts)
    return best_split


BASELINES: dict[str, Callable[[Table, Cost], Split]] = {
    f.__name__: f
    for f in (one_bucket, per_layer, hccl_default, ddp_25mb, best_threshold, mg_wfbp, gdat)
}


def with_format_cuts(table: Table, split: Split) -> Split:
    """Return the split with additional cuts wherever a bucket would mix number formats."""
    # a bucket must end before a gradient that may not share a bucket with its predecessor
    forced = np.flatnonzero(table.first[1:] == np.arange(1, table.count)).tolist()
    return split_at(sorted({*forced, *(last for _, last in split)}))


def baseline(name: str, table: Table, cost: Cost) -> Split:
    """Return the split of a named baseline, cut where the number format changes."""
    return with_format_cuts(table, BASELINES[name](table, cost))


# -- the plan -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GradientPlan:
    """The best split of the gradients within some limits, and its end.

    - segments: (first, last) of each bucket, both inclusive, counted from 0 in backward order
    - end_s: the time from the start of backward until all are sent; no split within the limits ends
      earlier
    - baselines: the ends of other splits, by name
    - over_limit: baselines that break a limit, and may therefore end earlier than the plan
    - ready_s: the time at which the last gradient is ready
    - max_segments, max_bytes: the limits
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
        """The time from the end of backward until everything is sent: end - ready."""
        return self.end_s - self.ready_s

    def gain(self, name: str) -> float:
        """Return the share by which a baseline ends later: its end / this end - 1."""
        # a baseline that ends at 110 us against 100 us for this plan: 10 %
        return self.baselines[name] / self.end_s - 1.0 if self.end_s else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return JSON data, times in microseconds; baselines over a limit have their own key."""
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

    All-reduces run one after another; one of n bytes takes `cost(n)` seconds. There are at most
    `max_segments` buckets (HCCL allows 8) of at most `max_bytes`; a larger gradient is a bucket by
    itself. A bucket holds one number format. Raises `InputError` for impossible rows, costs or
    limits, and if no split keeps the limits.
    """
    table = splits.table_of(rows, max_bytes)
    price = price_of(cost)
    split, end = splits.best_split(table, price, max_segments)
    # the baselines know no limit of bytes: whether they keep it anyway is asked below
    unlimited = splits.table_of(rows)
    baseline_ends = {}
    over_limit = []
    for name in BASELINES:
        baseline_split = baseline(name, unlimited, cost)
        baseline_ends[name] = end_s(table, price, baseline_split)
        if not table.allows(baseline_split, max_segments):
            over_limit.append(name)
    return GradientPlan(
        segments=split,
        end_s=end,
        baselines=baseline_ends,
        over_limit=tuple(over_limit),
        ready_s=float(table.ready_s[-1]),
        max_segments=max_segments,
        max_bytes=max_bytes,
    )


def end_of(segments: Sequence[Sequence[int]], rows: Sequence[Gradient], cost: Cost) -> float:
    """Return the time in seconds at which the last bucket of a split is sent.

    Raises `InputError` if `segments` is not a split of these gradients.
    """
    return end_s(splits.table_of(rows), price_of(cost), checked(segments, len(rows)))


def bound(rows: Sequence[Gradient], cost: Cost, *, max_bytes: float | None = None) -> float:
    """Return a time that no split beats if the cost does not fall with the size."""
    return splits.lower_bound_s(splits.table_of(rows, max_bytes), price_of(cost))


# -- forms for other frameworks -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Forms:
    """A plan in the forms of three frameworks.

    - hccl: the plan for HCCL, which may differ because it has at most 8 segments
    - by_idx, by_size: its arguments for HCCL; `shares_end_s` is the end with the rounded shares
    - hccl_too_large: 8 segments cannot keep the limit of bytes, so that HCCL's plan has no limit
    - mindspore: the argument for MindSpore
    - ddp_cap_mib, ddp_segments, ddp_end_s: the best bucket cap for PyTorch, its split and its end
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
    """Return a plan in all forms; if it has more than 8 segments, HCCL gets a plan of its own.

    Raises `InputError` if number formats change more than seven times, so that 8 segments are not
    enough.
    """
    hccl = best
    too_large = False
    if len(best.segments) > HCCL_SEGMENTS:
        try:
            hccl = plan(rows, cost, HCCL_SEGMENTS, max_bytes=max_bytes)
        except InputError:
            # without a limit of bytes it is changes of the number format that need more than 8
            if max_bytes is None:
                raise
            hccl = plan(rows, cost, HCCL_SEGMENTS)
            too_large = True
    table = splits.table_of(rows)
    price = price_of(cost)
    shares = by_size(hccl.segments, rows)
    cap_bytes, ddp_segments, ddp_end_s = best_cap(table, price, DDP_PER_OCTAVE)
    return Forms(
        hccl=hccl,
        by_idx=tuple(last for _, last in hccl.segments),
        by_size=shares,
        mindspore=tuple(last for _, last in best.segments[:-1]),
        ddp_cap_mib=cap_bytes / MIB,
        ddp_segments=ddp_segments,
        ddp_end_s=ddp_end_s,
        shares_end_s=end_s(table, price, with_format_cuts(table, split_by_size(shares, rows))),
        hccl_too_large=too_large,
    )


def by_size(split: Split, rows: Sequence[Gradient]) -> tuple[float, ...]:
    """Return the shares of the segments in percent, in multiples of 1/64, whose sum is exactly 100.

    A segment whose share rounds to 0 is joined with the next one, or at the end with the previous
    one. Without any bytes there is a single share of 100.
    """
    sums = splits.table_of(rows).sums_bytes
    total = float(sums[-1]) or 1.0
    # Running sums are rounded, not single shares: the differences then add up to 6400 units. Three
    # equal segments end at 2133, 4267 and 6400: they are 2133, 2134 and 2133 units long.
    segment_ends = [round(SHARE_UNITS * float(sums[last + 1]) / total) for _, last in split]
    segment_ends[-1] = SHARE_UNITS
    segment_starts = [0, *segment_ends[:-1]]
    units = [end - start for start, end in zip(segment_starts, segment_ends, strict=True)]
    return tuple(unit_count * 100 / SHARE_UNITS for unit_count in units if unit_count)


def split_by_size(shares: Sequence[float], rows: Sequence[Gradient]) -> Split:
    """Return the segments whose ends are closest to the shares: the inverse of `by_size`.

    A share that is too small for a gradient makes no segment.
    """
    sums = splits.table_of(rows).sums_bytes
    # Shares of 50, 25 and 25 % end at 50 and 75 %; the last one ends with the last gradient.
    end_shares = np.cumsum(shares[:-1])
    lasts = {int(abs(sums[1:] - share / 100 * sums[-1]).argmin()) for share in end_shares.tolist()}
    return split_at(sorted({*lasts, len(rows) - 1}))
