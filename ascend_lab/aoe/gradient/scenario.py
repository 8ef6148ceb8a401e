"""Evaluates and searches gradient splits if all-reduces slow each other and the backward pass.

Dynamic programming (`splits`) assumes one all-reduce at a time that slows nothing down. Here up to
`streams` all-reduces run at once, in the order of their buckets. Their startups do not disturb each
other, but the bytes of m all-reduces share the link: each is sent at the rate
1 / (1 + (m - 1) * sharing). Meanwhile the backward pass runs at the rate 1 / (1 + slowdown). The
ready times of gradients may be noisy.

The search is iterated local search, which adds or removes the end of a bucket. It starts from the
results of dynamic programming.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import numpy as np

from ascend_lab import errors
from ascend_lab.aoe.drive import Rules, drive
from ascend_lab.aoe.gradient import planning, splits
from ascend_lab.aoe.search.points import IteratedLocal
from ascend_lab.aoe.space import Point
from ascend_lab.cluster.buckets import checked
from ascend_lab.cluster.cost import Cost

ROUNDING = 1e-12
"""Remaining work below this share of all work counts as none: it is a rounding error."""
MAX_START_BUCKETS = 8
"""The best splits into at most 1, 2, ... this many buckets are tried first."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """How all-reduces and the backward pass disturb each other.

    - cost: the seconds of an all-reduce, by its bytes
    - sharing: 1.0 divides the link fairly and without loss (max-min); 0.5 was measured for two
      all-reduces on one 10 Gb/s link (Shi et al., ASC-WFBP 2021: each took a + 1.5 b)
    - slowdown: the share by which backward takes longer while an all-reduce uses memory bandwidth
    - noise: the times between gradients are multiplied by log-normal numbers with this sigma and
      mean 1, drawn `samples` times; the result is the mean
    """

    cost: Cost
    streams: int = 1
    sharing: float = 1.0
    slowdown: float = 0.0
    noise: float = 0.0
    samples: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that are negative, not finite, or 0 streams or samples."""
        if self.streams < 1 or self.samples < 1:
            got = f"{self.streams} and {self.samples}"
            raise errors.InputError("at least 1 stream and 1 sample", got, "raise it")
        for value in (self.sharing, self.slowdown, self.noise):
            if not (math.isfinite(value) and value >= 0):
                needed = "sharing, slowdown and noise of at least 0"
                raise errors.InputError(needed, str(value), "leave it out for none")


def evaluate(
    segments: Sequence[Sequence[int]], rows: Sequence[splits.Gradient], scenario: Scenario
) -> float:
    """Return the time in seconds at which backward is over and everything is sent.

    It is the mean over the samples. With one stream, no slowdown and no noise it is the end that
    `planning.plan` minimises.
    """
    table = splits.table_of(rows)
    return scorer(table, scenario)(checked(segments, table.count))


def scorer(table: splits.Table, scenario: Scenario) -> Callable[[splits.Split], float]:
    """Return a function from a split to its end, which uses the same samples for every split."""
    price = splits.price_of(scenario.cost)
    samples = _samples(table, scenario)
    startup = splits.startup_s(scenario.cost)

    def score(split: splits.Split) -> float:
        last_gradients = np.array([last for _, last in split])
        times = price(table.sizes_bytes(split))
        startups = np.minimum(times, startup)
        work = list(zip(startups.tolist(), (times - startups).tolist(), strict=True))
        ends = []
        for ready_s in samples:
            bucket_ready_s = ready_s[last_gradients].tolist()
            ends.append(_end_s(bucket_ready_s, float(ready_s[-1]), work, scenario))
        return math.fsum(ends) / len(ends)

    return score


def _samples(table: splits.Table, scenario: Scenario) -> list[splits.Floats]:
    """Return the ready times of all gradients, one array per sample."""
    if scenario.noise == 0:
        return [table.ready_s]
    rng = np.random.default_rng(scenario.seed)
    sigma = scenario.noise
    # The times between gradients are noisy, not the ready times: so the order never changes.
    gaps = np.diff(table.ready_s, prepend=0.0)
    # exp(mu + sigma^2 / 2) is the mean of a log-normal number: mu = -sigma^2 / 2 makes it 1.
    factors = rng.lognormal(-sigma * sigma / 2, sigma, (scenario.samples, table.count))
    return list(np.cumsum(gaps * factors, axis=1))


def _end_s(
    ready_s: list[float], backward_s: float, work: list[tuple[float, float]], scenario: Scenario
) -> float:
    """Simulate a split event by event; return the time at which everything is done.

    Bucket k is ready after `ready_s[k]` seconds of undisturbed backward work, which takes
    `backward_s` in all. `work` is the startup of each bucket and the time its bytes take alone.
    """
    tolerance = (backward_s + sum(startup + sending for startup, sending in work)) * ROUNDING
    now_s = 0.0
    backward_done_s = 0.0
    next_bucket = 0
    active: list[list[float]] = []  # [remaining startup, remaining time of the bytes]
    while True:
        while (
            next_bucket < len(ready_s)
            and len(active) < scenario.streams
            and ready_s[next_bucket] <= backward_done_s + tolerance
        ):
            active.append(list(work[next_bucket]))
            next_bucket += 1
        if not active and next_bucket == len(ready_s):
            return now_s + backward_s - backward_done_s
        # Only all-reduces after their startup share the link: with sharing 1.0, two of them send
        # at half the rate each.
        sending_count = sum(startup <= 0 for startup, _ in active)
        backward_rate = 1 / (1 + scenario.slowdown) if active else 1.0
        link_rate = 1 / (1 + max(sending_count - 1, 0) * scenario.sharing)
        # the times to all next events: an all-reduce ends its startup or its bytes, a bucket gets
        # ready, backward ends
        times_to_event = []
        for startup, sending in active:
            times_to_event.append(startup if startup > 0 else sending / link_rate)
        backward_events_s = [backward_s, *ready_s[next_bucket : next_bucket + 1]]
        times_to_event += [
            (event_s - backward_done_s) / backward_rate
            for event_s in backward_events_s
            if event_s > backward_done_s + tolerance
        ]
        step_s = min(times_to_event)
        now_s = now_s + step_s
        backward_done_s = min(backward_s, backward_done_s + step_s * backward_rate)
        active = _advanced(active, step_s, link_rate, tolerance)


def _advanced(
    active: list[list[float]], step_s: float, link_rate: float, tolerance: float
) -> list[list[float]]:
    """Return the remaining times of the all-reduces after a step, without those that have ended."""
    for remaining in active:
        phase, rate = (0, 1.0) if remaining[0] > 0 else (1, link_rate)
        remaining[phase] -= step_s * rate
        if remaining[phase] <= tolerance:
            remaining[phase] = 0.0
    return [remaining for remaining in active if remaining[0] > 0 or remaining[1] > 0]


# -- the search -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Improved:
    """The best split for a scenario, its end, and the end of the split by dynamic programming."""

    segments: splits.Split
    end_s: float
    start_s: float
    tried: int

    @property
    def gain(self) -> float:
        """The share by which the split by dynamic programming takes longer."""
        return self.start_s / self.end_s - 1.0 if self.end_s else 0.0


def improve(
    rows: Sequence[splits.Gradient],
    scenario: Scenario,
    *,
    max_segments: int | None = None,
    max_bytes: float | None = None,
    budget: int = 1000,
    seed: int = 0,
) -> Improved:
    """Search for the best split in a scenario, by trying at most `budget` splits.

    The first ones are the results of dynamic programming and the baselines, so that the result is
    not worse than these, if the budget suffices to try them. Raises as `planning.plan`.
    """
    if budget < 1:
        raise errors.InputError("a budget of at least 1", str(budget), "raise it")
    table = splits.table_of(rows, max_bytes)
    price = splits.price_of(scenario.cost)
    start, _ = splits.best_split(table, price, max_segments)
    first_splits = [start]
    max_buckets = min(MAX_START_BUCKETS, max_segments or table.count, table.count)
    for bucket_count in range(1, max_buckets + 1):
        with suppress(errors.InputError):  # raised if number formats need more buckets
            first_splits.append(splits.best_split(table, price, bucket_count)[0])
    first_splits += [planning.baseline(name, table, scenario.cost) for name in planning.BASELINES]
    space = _SplitSpace(table, max_segments)
    score = scorer(table, scenario)

    def measure(point: Point) -> float:
        """Return the end of a split, or infinity if it breaks a limit."""
        split = space.key(point)
        return math.inf if split is None else score(split)

    points = [space.point(split) for split in first_splits]
    trace = drive(IteratedLocal(), space, measure, budget, seed=seed, rules=Rules(start=points))
    best = space.key(trace.best.point)
    assert best is not None  # the start keeps all limits
    return Improved(best, trace.best.cost, score(start), len(trace.trials))


class _SplitSpace:
    """The space of all splits: for every gradient but the last, whether a bucket ends with it."""

    size = None

    def __init__(self, table: splits.Table, max_segments: int | None) -> None:
        self.table = table
        self.max_segments = max_segments
        self.names = tuple(f"after {gradient}" for gradient in range(table.count - 1))

    def options(self, prefix: Point) -> tuple[bool, ...]:
        """Return both values; a split that breaks a limit is found by `key`."""
        return (False, True)

    def point(self, split: splits.Split) -> Point:
        """Return the point of a split."""
        lasts = {last for _, last in split}
        return tuple(gradient in lasts for gradient in range(len(self.names)))

    def key(self, point: Point) -> splits.Split | None:
        """Return the split of a point, or None if it breaks a limit."""
        lasts = [gradient for gradient, ends_bucket in enumerate(point) if ends_bucket]
        split = splits.split_at([*lasts, len(point)])
        return split if self.table.allows(split, self.max_segments) else None

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point."""
        return tuple(rng.integers(0, 2, len(self.names)).astype(bool).tolist())

    def points(self) -> Iterator[Point]:
        """Yield all points."""
        return product((False, True), repeat=len(self.names))
