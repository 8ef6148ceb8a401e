"""A plan: the best split of a gradient sequence, and what other ways of splitting take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ascend_lab.aoe.gradient.baselines import BASELINES, baseline
from ascend_lab.aoe.gradient.cost import Cost, price_of
from ascend_lab.aoe.gradient.exact import best_split, end_s, lower_bound_s
from ascend_lab.aoe.gradient.rows import Gradient, Split, check_split, table_of


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """Which gradients are sent together, and when all are sent (from the start of backward).

    `segments`: (first, last), both inclusive, 0-based, in backward order. `optimal`: no split in
    the limits ends earlier, by dynamic programming. `baselines`: ends of other ways by name; those
    in `over_limit` break a limit that this plan keeps, and may end earlier for it. `ready_s`: when
    the last gradient is ready; no plan ends before. `max_segments`, `max_bytes`: the limits.
    """

    segments: Split
    end_s: float
    optimal: bool
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

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data, times in microseconds; baselines that break a limit stand apart."""
        ends = {name: end * 1e6 for name, end in self.baselines.items()}
        return {
            "segments": [list(bucket) for bucket in self.segments],
            "end_us": self.end_s * 1e6,
            "optimal": self.optimal,
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
    table, price = table_of(rows, max_bytes), price_of(cost)
    split, end = best_split(table, price, max_segments)
    ends: dict[str, float] = {}
    over: list[str] = []
    unlimited = table_of(rows)
    for name in BASELINES:
        other = baseline(name, unlimited, cost)
        ends[name] = end_s(table, price, other)
        if not table.allows(other, max_segments):
            over.append(name)
    ready_s = float(table.ready_s[-1])
    return GradientPlan(split, end, True, ends, tuple(over), ready_s, max_segments, max_bytes)


def end_of(segments: Sequence[Sequence[int]], rows: Sequence[Gradient], cost: Cost) -> float:
    """Return when the last bucket of any split has been sent, in seconds; `InputError`."""
    return end_s(table_of(rows), price_of(cost), check_split(segments, len(rows)))


def bound(rows: Sequence[Gradient], cost: Cost, *, max_bytes: float | None = None) -> float:
    """Return a time that no split beats if the cost does not fall with the size; see `exact`."""
    return lower_bound_s(table_of(rows, max_bytes), price_of(cost))
