"""What the dynamic programming leaves out: streams, memory bandwidth, noise; and a search there.

Events in order of time: backward goes on, a bucket gets ready, an all-reduce ends its startup or
its bytes. Buckets start in order, up to `streams` at once. Startups do not disturb each other; the
bytes of m all-reduces share the link, each at the rate 1 / (1 + (m - 1) * sharing). While one is
under way backward goes on at the rate 1 / (1 + slowdown).

The search is iterated local search over the places where a bucket ends, with the dynamic
programming's answers as the start: a step takes away one end or adds one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import numpy as np

from ascend_lab import cluster, errors
from ascend_lab.aoe.drive import Rules, drive
from ascend_lab.aoe.gradient import planning, splits
from ascend_lab.aoe.search.points import IteratedLocal
from ascend_lab.aoe.space import Point

NOTHING = 1e-12
"""A rest of work this small, relative to the whole, is rounding."""
MOST_STARTS = 8
"""The best splits in at most 1, 2, ... so many buckets are tried first."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """How all-reduces and backward disturb each other.

    `sharing`: 1.0 shares the link fairly and without loss (max-min); 0.5 is what two all-reduces on
    one 10 Gb/s link took (Shi et al., ASC-WFBP 2021: each a + 1.5 b). `slowdown`: how much longer
    backward takes while it shares memory bandwidth. `noise`: the time of each gradient is drawn
    `samples` times, log-normal with this sigma and mean 1; the end is the mean of the ends.
    """

    cost: cluster.Cost
    streams: int = 1
    sharing: float = 1.0
    slowdown: float = 0.0
    noise: float = 0.0
    samples: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that mean nothing."""
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
    """Return when backward is over and everything sent, in seconds (the mean over the samples).

    With one stream, no slowdown and no noise this is the end that `plan` minimises.
    """
    table = splits.table_of(rows)
    return scorer(table, scenario)(cluster.checked(segments, table.count))


def scorer(table: splits.Table, scenario: Scenario) -> Callable[[splits.Split], float]:
    """Return the function split -> end; the same samples serve every split."""
    price = splits.price_of(scenario.cost)
    draws = _draws(table, scenario)
    startup = splits.startup_s(scenario.cost)

    def score(split: splits.Split) -> float:
        lasts = np.array([last for _, last in split])
        times = price(table.sizes_bytes(split))
        starts = np.minimum(times, startup)
        works = list(zip(starts.tolist(), (times - starts).tolist(), strict=True))
        ends = [_end_s(draw[lasts].tolist(), float(draw[-1]), works, scenario) for draw in draws]
        return math.fsum(ends) / len(ends)

    return score


def _draws(table: splits.Table, scenario: Scenario) -> list[splits.Floats]:
    """Return ready times, one array a sample."""
    if scenario.noise == 0:
        return [table.ready_s]
    rng = np.random.default_rng(scenario.seed)
    sigma = scenario.noise
    # Noise is in what each gradient's own computation takes, so that the order of gradients stays.
    gaps = np.diff(table.ready_s, prepend=0.0)
    # exp(mu + sigma^2 / 2) is the mean of a log-normal number: mu = -sigma^2 / 2 makes it 1.
    factors = rng.lognormal(-sigma * sigma / 2, sigma, (scenario.samples, table.count))
    return list(np.cumsum(gaps * factors, axis=1))


def _end_s(
    ready: list[float], backward: float, works: list[tuple[float, float]], scenario: Scenario
) -> float:
    """Return when all is done; bucket k waits for `ready[k]` of backward's own seconds.

    `works`: the startup of each bucket and the seconds its bytes take alone.
    """
    nothing = (backward + sum(a + b for a, b in works)) * NOTHING
    now = 0.0
    done = 0.0
    coming = 0
    active: list[list[float]] = []  # rest of the startup, rest of the bytes
    while True:
        while (
            coming < len(ready)
            and len(active) < scenario.streams
            and ready[coming] <= done + nothing
        ):
            active.append(list(works[coming]))
            coming += 1
        if not active and coming == len(ready):
            return now + backward - done
        # Only all-reduces behind their startup share the link: with sharing 1.0, two of them send
        # at half the rate each.
        sending = sum(startup <= 0 for startup, _ in active)
        pace = 1 / (1 + scenario.slowdown) if active else 1.0
        rate = 1 / (1 + max(sending - 1, 0) * scenario.sharing)
        times = [startup if startup > 0 else bytes_s / rate for startup, bytes_s in active]
        marks = [backward, *ready[coming : coming + 1]]
        times += [(mark - done) / pace for mark in marks if mark > done + nothing]
        # The time to the next event: an all-reduce ends a phase, a bucket gets ready, backward
        # ends.
        step = min(times)
        # Wall-clock time goes on by `step`, backward's own work by less while an all-reduce slows
        # it down.
        now = now + step
        done = min(backward, done + step * pace)
        for work in active:
            phase, speed = (0, 1.0) if work[0] > 0 else (1, rate)
            work[phase] -= step * speed
            if work[phase] <= nothing:
                work[phase] = 0.0
        active = [work for work in active if work[0] > 0 or work[1] > 0]


# -- the search -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Improved:
    """The best split found for a scenario, its end, and the end of the dynamic programming's."""

    segments: splits.Split
    end_s: float
    start_s: float
    tried: int

    @property
    def gain(self) -> float:
        """How much longer the dynamic programming's answer takes."""
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
    """Return a split for a scenario, found by trying at most `budget` of them.

    Never worse there than the best split without streams, slowdown and noise, which is tried first,
    nor than a baseline that keeps the limits, if the budget reaches them. Raises as `plan`.
    """
    if budget < 1:
        raise errors.InputError("a budget of at least 1", str(budget), "raise it")
    table = splits.table_of(rows, max_bytes)
    price = splits.price_of(scenario.cost)
    start, _ = splits.best_split(table, price, max_segments)
    # Splits that are good without disturbance, and those of the baselines, begin the search.
    likely = [start]
    for few in range(1, min(MOST_STARTS, max_segments or table.count, table.count) + 1):
        with suppress(errors.InputError):  # so few cannot keep the formats apart
            likely.append(splits.best_split(table, price, few)[0])
    likely += [planning.baseline(name, table, scenario.cost) for name in planning.BASELINES]
    space = _Cuts(table, max_segments)
    score = scorer(table, scenario)

    def measure(point: Point) -> float:
        """Return the end of a split; infinity if it breaks a limit."""
        split = space.key(point)
        return math.inf if split is None else score(split)

    points = [space.point(split) for split in likely]
    trace = drive(IteratedLocal(), space, measure, budget, seed=seed, rules=Rules(start=points))
    best = space.key(trace.best.point)
    assert best is not None  # the start keeps all limits
    return Improved(best, trace.best.cost, score(start), len(trace.trials))


class _Cuts:
    """Splits as points: for every gradient but the last, does a bucket end with it?"""

    size = None

    def __init__(self, table: splits.Table, max_segments: int | None) -> None:
        self.table = table
        self.max_segments = max_segments
        self.names = tuple(f"after {place}" for place in range(table.count - 1))

    def options(self, prefix: Point) -> tuple[bool, ...]:
        """Return both answers: what breaks a limit has no key."""
        return (False, True)

    def point(self, split: splits.Split) -> Point:
        """Return the answers that give a split."""
        lasts = {last for _, last in split}
        return tuple(place in lasts for place in range(len(self.names)))

    def key(self, point: Point) -> splits.Split | None:
        """Return the split, or None if it breaks a limit (one candidate for all such points)."""
        cuts = [place for place, cut in enumerate(point) if cut]
        split = splits.split_at([*cuts, len(point)])
        return split if self.table.allows(split, self.max_segments) else None

    def sample(self, rng: np.random.Generator) -> Point:
        """Return random answers."""
        return tuple(rng.integers(0, 2, len(self.names)).astype(bool).tolist())

    def points(self) -> Iterator[Point]:
        """Yield all answers."""
        return product((False, True), repeat=len(self.names))
