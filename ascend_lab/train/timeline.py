"""A data-parallel step on two lanes: compute, and the exchange of gradients in buckets.

    compute:        forward | backward                | update
    communication:            bucket 0 | bucket 1 | ...

A bucket starts when its last gradient is written and the bucket before has arrived; the update
starts when all have. Compute and communication do not slow each other here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ascend_lab.cluster import Topology
from ascend_lab.cluster.choice import (
    BUCKET_BYTES,
    FIRST_BYTES,
    Cost,
    Interpolated,
    Segments,
    checked,
    closed,
)
from ascend_lab.train.profile import GradientRow, StepProfile


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane does from start to end."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """A step's spans, its end, seconds of compute and of communication, and the tail.

    `tail_s` passes between the end of backward and the arrival of the last bucket.
    """

    name: str
    spans: tuple[Span, ...]
    step_s: float
    compute_s: float
    communication_s: float
    tail_s: float

    @property
    def exposed_s(self) -> float:
        """Communication during which nothing is computed: step - compute."""
        return self.step_s - self.compute_s

    def lane(self, name: str) -> tuple[Span, ...]:
        """Return the spans of a lane, "compute" or "communication"."""
        return tuple(span for span in self.spans if span.lane == name)


def step_timeline(
    profile: StepProfile, cost: Cost, segments: Sequence[tuple[int, int]] | None = None
) -> StepTimeline:
    """Return a step whose gradients travel in these segments (default: buckets of 25 MiB).

    Raises `InputError` unless the segments are all gradients in order.
    """
    rows = profile.gradients
    cuts = bucketed(rows) if segments is None else checked(segments, len(rows))
    start, back = profile.forward_s, profile.forward_s + profile.backward_s
    spans = [Span("compute", "forward", 0.0, start), Span("compute", "backward", start, back)]
    lane = total = 0.0
    for number, (first, last) in enumerate(cuts):
        seconds = cost(sum(row.size_bytes for row in rows[first : last + 1]))
        ready = start + max(row.ready_s for row in rows[first : last + 1])
        begin = max(lane, ready)
        lane, total = begin + seconds, total + seconds
        spans.append(Span("communication", f"bucket {number}", begin, lane))
    free = max(back, lane)
    spans.append(Span("compute", "update", free, free + profile.update_s))
    end = free + profile.update_s
    return StepTimeline(
        profile.name, tuple(spans), end, profile.step_s, total, max(0.0, lane - back)
    )


def bucketed(
    rows: Sequence[GradientRow], limit_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BYTES
) -> Segments:
    """Return buckets that are closed when they hold `limit_bytes` (the first: `first_bytes`)."""
    return closed([0, *accumulate(row.size_bytes for row in rows)], limit_bytes, first_bytes)


def all_reduce_cost(topology: Topology) -> Cost:
    """Return the cost of an all-reduce among all devices, the best algorithm at each size."""
    from ascend_lab.cluster import collective_time

    if topology.size == 1:
        return lambda size_bytes: 0.0
    return Interpolated(lambda n: collective_time("all_reduce", topology, n).time_s)
