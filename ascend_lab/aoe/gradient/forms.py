"""Plans as others take them.

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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ascend_lab.aoe.gradient.baselines import MIB, best_cap, legal
from ascend_lab.aoe.gradient.cost import Cost, price_of
from ascend_lab.aoe.gradient.planning import GradientPlan, end_of, plan
from ascend_lab.aoe.gradient.rows import Gradient, Split, table_of
from ascend_lab.errors import InputError

HCCL_SEGMENTS = 8
PARTS = 6400
"""Shares are whole 64ths of a percent: exact in binary, so that their sum is 100 and no less."""
DDP_PER_OCTAVE = 16


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

    def as_dict(self) -> dict[str, Any]:
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
    found: GradientPlan, rows: Sequence[Gradient], cost: Cost, *, max_bytes: float | None = None
) -> Forms:
    """Return a plan in all forms; plans of more than 8 segments are made anew for HCCL.

    Raises `InputError` where number formats change more than seven times: HCCL has no such split.
    """
    hccl, too_large = found, False
    if len(found.segments) > HCCL_SEGMENTS:
        try:
            hccl = plan(rows, cost, HCCL_SEGMENTS, max_bytes=max_bytes)
        except InputError:
            if max_bytes is None:
                raise
            hccl, too_large = plan(rows, cost, HCCL_SEGMENTS), True
    shares = by_size(hccl.segments, rows)
    cap, split, end = best_cap(table_of(rows), price_of(cost), DDP_PER_OCTAVE)
    return Forms(
        hccl,
        by_idx(hccl.segments),
        shares,
        mindspore(found.segments),
        cap / MIB,
        split,
        end,
        end_of(legal(table_of(rows), split_by_size(shares, rows)), rows, cost),
        too_large,
    )


def by_idx(split: Split) -> tuple[int, ...]:
    """Return the last gradient of every segment."""
    return tuple(last for _, last in split)


def mindspore(split: Split) -> tuple[int, ...]:
    """Return the last gradient of every segment but the last; empty for one segment."""
    return by_idx(split)[:-1]


def by_size(split: Split, rows: Sequence[Gradient]) -> tuple[float, ...]:
    """Return the share of each segment in percent, in 64ths that sum to 100 exactly.

    A segment whose share rounds to nothing goes with the next, the last ones with the one before:
    there are no shares of 0, and without any bytes one share has all.
    """
    sums = table_of(rows).sums_bytes
    total = float(sums[-1]) or 1.0
    marks = [round(PARTS * float(sums[last + 1]) / total) for _, last in split]
    marks[-1] = PARTS
    parts = [b - a for a, b in zip([0, *marks[:-1]], marks, strict=True)]
    return tuple(part * 100 / PARTS for part in parts if part)


def split_by_size(shares: Sequence[float], rows: Sequence[Gradient]) -> Split:
    """Return the segments whose ends are closest to the shares: how `by_size` can be read.

    A share too small for a gradient of its own makes no segment.
    """
    sums = table_of(rows).sums_bytes
    lasts: set[int] = {len(rows) - 1}
    reached = 0.0
    for share in shares[:-1]:
        reached += share
        lasts.add(int(abs(sums[1:] - reached / 100 * sums[-1]).argmin()))
    ordered = sorted(lasts)
    return tuple(zip([0, *(last + 1 for last in ordered[:-1])], ordered, strict=True))
