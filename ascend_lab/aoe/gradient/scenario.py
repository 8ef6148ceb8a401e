"""What the dynamic programming leaves out: streams, memory bandwidth, noise; and a search there.

Events in order of time: backward goes on, a bucket gets ready, an all-reduce ends its startup or
its bytes. Buckets start in order, up to `streams` at once. Startups do not disturb each other; the
bytes of m all-reduces share the link, each at the rate 1 / (1 + (m - 1) * sharing). While one is
under way backward goes on at the rate 1 / (1 + slowdown).

The search is iterated local search on the last gradients of the buckets, with the dynamic
programming's answer as the start: a step moves one of them, drops one or adds one; where no step
helps, a few random ones are taken from the best split and the walk begins anew.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab import cluster, errors
from ascend_lab.aoe.gradient import planning, splits

NOTHING = 1e-12
"""A rest of work this small, relative to the whole, is rounding."""
KICK = 3
"""Random steps taken from the best split when none helps."""
MOST_STARTS = 8
"""The best splits in at most 1, 2, ... so many buckets are tried first."""
MOST_IDLE = 50
"""Walks in a row that find nothing new, after which the search ends."""


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
    price, draws = splits.price_of(scenario.cost), _draws(table, scenario)
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
    rng, sigma = np.random.default_rng(scenario.seed), scenario.noise
    gaps = np.diff(table.ready_s, prepend=0.0)
    factors = rng.lognormal(-sigma * sigma / 2, sigma, (scenario.samples, table.count))
    return list(np.cumsum(gaps * factors, axis=1))


def _end_s(
    ready: list[float], backward: float, works: list[tuple[float, float]], scenario: Scenario
) -> float:
    """Return when all is done; bucket k waits for `ready[k]` of backward's own seconds.

    `works`: the startup of each bucket and the seconds its bytes take alone.
    """
    nothing = (backward + sum(a + b for a, b in works)) * NOTHING
    now, done, coming = 0.0, 0.0, 0
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
        sending = sum(startup <= 0 for startup, _ in active)
        pace = 1 / (1 + scenario.slowdown) if active else 1.0
        rate = 1 / (1 + max(sending - 1, 0) * scenario.sharing)
        times = [startup if startup > 0 else rest / rate for startup, rest in active]
        marks = [backward, *ready[coming : coming + 1]]
        times += [(mark - done) / pace for mark in marks if mark > done + nothing]
        step = min(times)
        now, done = now + step, min(backward, done + step * pace)
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
    table, price = splits.table_of(rows, max_bytes), splits.price_of(scenario.cost)
    start, _ = splits.best_split(table, price, max_segments)
    walk = _Walk(table, scenario, max_segments, budget, seed)
    start_s = walk.cost(start)
    for few in range(1, min(MOST_STARTS, max_segments or table.count, table.count) + 1):
        try:
            walk.cost(splits.best_split(table, price, few)[0])
        except errors.InputError:  # so few cannot keep the formats apart
            continue
    for name in planning.BASELINES:
        walk.cost(planning.baseline(name, table, scenario.cost))
    walk.run()
    return Improved(walk.best, walk.end_s, start_s, len(walk.known))


class _Walk:
    """The state of a search: what is known, and the best of it."""

    def __init__(
        self, table: splits.Table, scenario: Scenario, most: int | None, budget: int, seed: int
    ) -> None:
        self.table, self.most, self.budget = table, most, budget
        self.score = scorer(table, scenario)
        self.rng = np.random.default_rng(seed)
        self.known: dict[splits.Split, float] = {}
        self.best: splits.Split = ()
        self.end_s = np.inf

    def cost(self, split: splits.Split) -> float:
        """Return the end of a split; infinity if it breaks a limit or the budget is spent."""
        if split not in self.known:
            if len(self.known) >= self.budget or not self.table.allows(split, self.most):
                return np.inf
            self.known[split] = self.score(split)
            if self.known[split] < self.end_s:
                self.best, self.end_s = split, self.known[split]
        return self.known[split]

    def run(self) -> None:
        """Walk down, jump, walk down again, until the budget is spent or nothing is new."""
        self._down(self.best)
        idle = 0
        while len(self.known) < self.budget and idle < MOST_IDLE:
            known, split = len(self.known), self.best
            for _ in range(KICK):
                near = self._near(split)
                split = near[int(self.rng.integers(len(near)))] if near else split
            self._down(split)
            idle = idle + 1 if len(self.known) == known else 0

    def _down(self, split: splits.Split) -> None:
        """Take the first step that helps, until there is none."""
        end, moved = self.cost(split), True
        while moved and len(self.known) < self.budget:
            moved = False
            near = self._near(split)
            for i in self.rng.permutation(len(near)):
                reached = self.cost(near[i])
                if reached < end:
                    split, end, moved = near[i], reached, True
                    break

    def _near(self, split: splits.Split) -> list[splits.Split]:
        """Return the splits one step away that keep the limits."""
        last = self.table.count - 1
        cuts = [end for _, end in split[:-1]]
        walls = [-1, *cuts, last]
        steps = [2**i for i in range(last.bit_length())]
        found: set[tuple[int, ...]] = set()
        for k, cut in enumerate(cuts):
            others = (*cuts[:k], *cuts[k + 1 :])
            places = [cut + way * step for step in steps for way in (-1, 1)]
            moved = [c for c in places if walls[k] < c < walls[k + 2]]
            found |= {others, *(tuple(sorted((*others, c))) for c in moved)}
        for first, end in split:
            drawn = {(first + end) // 2, *self.rng.integers(first, end + 1, 2).tolist()}
            found |= {tuple(sorted({*cuts, int(c)})) for c in drawn if first <= c < end}
        near = [splits.split_at((*ends, last)) for ends in sorted(found)]
        return [s for s in near if self.table.allows(s, self.most)]
