"""A data-parallel step on two lanes: compute, and the exchange of gradients in buckets.

    compute:        forward | backward                | update
    communication:            bucket 0 | bucket 1 | ...

A bucket starts when its last gradient is written and the bucket before has arrived; the update
starts when all have. Compute and communication do not slow each other here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ascend_lab.cluster import Topology
from ascend_lab.errors import InputError
from ascend_lab.train.profile import GradientRow, StepProfile

Cost = Callable[[float], float]
"""Bytes to seconds."""
Segments = tuple[tuple[int, int], ...]
"""(first, last) gradient of each bucket, both included, counted from 0 in backward order."""
BUCKET_BYTES, FIRST_BYTES = 25 * 2**20, 2**20
"""Sizes of PyTorch's DistributedDataParallel: 25 MiB, the first 1 MiB ({cite}`ddp2020`)."""


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

    @property
    def hidden_share(self) -> float:
        """Share of the communication behind which backward computes; 1 if there is none."""
        if not self.communication_s:
            return 1.0
        return 1.0 - self.exposed_s / self.communication_s

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
    spans = [
        Span("compute", "forward", 0.0, start),
        Span("compute", "backward", start, back),
    ]
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


def checked(segments: Sequence[tuple[int, int]], count: int) -> Segments:
    """Return the segments; raise `InputError` unless they cover 0 .. count - 1 in order."""
    found = tuple((int(a), int(b)) for a, b in segments)
    flat = [i for a, b in found for i in range(a, b + 1)]
    if flat != list(range(count)) or any(a > b for a, b in found):
        what = f"segments (first, last) that are gradients 0 to {count - 1} in order"
        raise InputError(what, str(found)[:80], "leave no gap")
    return found


def bucketed(
    rows: Sequence[GradientRow], limit_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BYTES
) -> Segments:
    """Return buckets that are closed when they hold `limit_bytes` (the first: `first_bytes`)."""
    return closed([0, *accumulate(row.size_bytes for row in rows)], limit_bytes, first_bytes)


def closed(sums_bytes: Sequence[float], limit_bytes: float, first_bytes: float) -> Segments:
    """Return the buckets of gradients whose bytes add up to these sums, 0 in front."""
    found: list[tuple[int, int]] = []
    start, limit, count = 0, first_bytes, len(sums_bytes) - 1
    while start < count:
        last = bisect_left(sums_bytes, sums_bytes[start] + limit, start) - 1
        found.append((start, min(max(last, start), count - 1)))
        start, limit = found[-1][1] + 1, limit_bytes
    return tuple(found)


# -- many devices ---------------------------------------------------------------------------------
SMALLEST_BYTES, STEP = 1024.0, 4.0


@dataclass(frozen=True)
class Interpolated:
    """A cost known at 1 KiB times powers of 4, straight between them; found when first needed.

    Exact where the cost is alpha + n beta between neighbours; the time of an algorithm chosen anew
    at every size is overstated between, by less than the algorithms differ.
    """

    exact: Cost
    known: dict[int, float] = field(default_factory=dict)

    def __call__(self, size_bytes: float) -> float:
        """Return the seconds; 0 for nothing."""
        if size_bytes <= 0:
            return 0.0
        place = math.log(size_bytes / SMALLEST_BYTES, STEP)
        low = max(0, math.floor(place))
        least, most = (SMALLEST_BYTES * STEP**k for k in (low, low + 1))
        start, end = self._at(low), self._at(low + 1)
        return max(0.0, start + (end - start) * (size_bytes - least) / (most - least))

    def _at(self, k: int) -> float:
        if k not in self.known:
            self.known[k] = self.exact(SMALLEST_BYTES * STEP**k)
        return self.known[k]


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A step on some devices, each with the same batch; efficiency = step of one / step."""

    devices: int
    step_s: float
    efficiency: float
    exposed_s: float
    hidden_share: float


def all_reduce_cost(topology: Topology) -> Cost:
    """Return the cost of an all-reduce among all devices, the best algorithm at each size."""
    from ascend_lab.cluster import collective_time

    if topology.size == 1:
        return lambda size_bytes: 0.0
    return Interpolated(lambda n: collective_time("all_reduce", topology, n).time_s)


def scaling_curve(
    profile: StepProfile,
    topology: str,
    counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    segments: Sequence[tuple[int, int]] | None = None,
) -> tuple[ScalingPoint, ...]:
    """Return the step on "NAME:n" for every n, the batch of each device as it was profiled."""
    from ascend_lab.cluster.presets import load_topology

    found = []
    for count in counts:
        cost = all_reduce_cost(load_topology(f"{topology}:{count}"))
        step = step_timeline(profile, cost, segments)
        share = profile.step_s / step.step_s
        found.append(ScalingPoint(count, step.step_s, share, step.exposed_s, step.hidden_share))
    return tuple(found)
