"""What the dynamic programming leaves out: streams, memory bandwidth, noise.

Events in order of time: backward goes on, a bucket gets ready, an all-reduce ends its startup or
its bytes. Buckets start in order, up to `streams` at once. Startups do not disturb each other; the
bytes of m all-reduces share the link, each at the rate 1 / (1 + (m - 1) * sharing). While one is
under way backward goes on at the rate 1 / (1 + slowdown).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.gradient.cost import Cost, price_of, startup_s
from ascend_lab.aoe.gradient.rows import Gradient, Split, Table, check_split, table_of
from ascend_lab.errors import InputError

NOTHING = 1e-12
"""A rest of work this small, relative to the whole, is rounding."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """How all-reduces and backward disturb each other.

    `sharing`: 1.0 shares the link fairly and without loss (max-min); 0.5 is what two all-reduces on
    one 10 Gb/s link took (Shi et al., ASC-WFBP 2021: each a + 1.5 b). `slowdown`: how much longer
    backward takes while it shares memory bandwidth. `noise`: the time of each gradient is drawn
    `samples` times, log-normal with this sigma and mean 1; the end is the mean of the ends.
    """

    cost: Cost
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
            raise InputError("at least 1 stream and 1 sample", got)
        for value in (self.sharing, self.slowdown, self.noise):
            if not (math.isfinite(value) and value >= 0):
                raise InputError("sharing, slowdown and noise of at least 0", str(value))


def evaluate(
    segments: Sequence[Sequence[int]], rows: Sequence[Gradient], scenario: Scenario
) -> float:
    """Return when backward is over and everything sent, in seconds (the mean over the samples).

    With one stream, no slowdown and no noise this is the end that `plan` minimises.
    """
    table = table_of(rows)
    return scorer(table, scenario)(check_split(segments, table.count))


def scorer(table: Table, scenario: Scenario) -> Callable[[Split], float]:
    """Return the function split -> end; the same samples serve every split."""
    price, draws = price_of(scenario.cost), _draws(table, scenario)
    startup = startup_s(scenario.cost)

    def score(split: Split) -> float:
        lasts = np.array([last for _, last in split])
        times = price(table.sizes_bytes(split))
        starts = np.minimum(times, startup)
        works = list(zip(starts.tolist(), (times - starts).tolist(), strict=True))
        runs = (_Run(draw[lasts].tolist(), float(draw[-1]), works, scenario) for draw in draws)
        ends = [run.end() for run in runs]
        return math.fsum(ends) / len(ends)

    return score


def _draws(table: Table, scenario: Scenario) -> list[np.ndarray]:
    """Return ready times, one array a sample."""
    if scenario.noise == 0:
        return [table.ready_s]
    rng, sigma = np.random.default_rng(scenario.seed), scenario.noise
    gaps = np.diff(table.ready_s, prepend=0.0)
    factors = rng.lognormal(-sigma * sigma / 2, sigma, (scenario.samples, table.count))
    return list(np.cumsum(gaps * factors, axis=1))


class _Run:
    """One simulation: `ready[k]` is the work of backward that bucket k waits for."""

    def __init__(
        self,
        ready: list[float],
        backward: float,
        works: list[tuple[float, float]],
        scenario: Scenario,
    ) -> None:
        self.ready, self.backward, self.works = ready, backward, works
        self.scenario = scenario
        self.done, self.next = 0.0, 0
        self.active: list[list[float]] = []  # rest of the startup, rest of the bytes
        whole = backward + sum(a + b for a, b in works)
        self.nothing = whole * NOTHING

    def end(self) -> float:
        """Return the end."""
        now = 0.0
        while True:
            self._start()
            if not self.active and self.next == len(self.ready):
                return now + self.backward - self.done
            step = self._step()
            now += step
            self._advance(step)

    def _start(self) -> None:
        """Start the buckets that are ready, as far as there are streams."""
        while (
            self.next < len(self.ready)
            and len(self.active) < self.scenario.streams
            and self.ready[self.next] <= self.done + self.nothing
        ):
            self.active.append(list(self.works[self.next]))
            self.next += 1

    def _rates(self) -> tuple[float, float]:
        """Return the rates of backward and of the bytes of each all-reduce."""
        sending = sum(startup <= 0 for startup, _ in self.active)
        pace = 1 / (1 + self.scenario.slowdown) if self.active else 1.0
        return pace, 1 / (1 + max(sending - 1, 0) * self.scenario.sharing)

    def _step(self) -> float:
        """Return the time to the next event."""
        pace, rate = self._rates()
        times = [startup if startup > 0 else rest / rate for startup, rest in self.active]
        marks = [self.backward]
        if self.next < len(self.ready):
            marks.append(self.ready[self.next])
        times += [(mark - self.done) / pace for mark in marks if mark > self.done + self.nothing]
        return min(times)

    def _advance(self, step: float) -> None:
        pace, rate = self._rates()
        self.done = min(self.backward, self.done + step * pace)
        for work in self.active:
            phase, speed = (0, 1.0) if work[0] > 0 else (1, rate)
            work[phase] -= step * speed
            if work[phase] <= self.nothing:
                work[phase] = 0.0
        self.active = [work for work in self.active if work[0] > 0 or work[1] > 0]
