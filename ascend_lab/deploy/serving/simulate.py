"""A served model, an ensemble or two versions, simulated request by request from one seed.

Arrivals, services, levels and failures draw from streams of their own, so that two policies can be
compared on the same requests (common random numbers). Requests before the measured ones warm the
system up and count nowhere. How far a mean can be trusted says an `interval` around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.deploy.agenda import Agenda
from ascend_lab.deploy.serving.canary import Rollout, rollout_of
from ascend_lab.deploy.serving.queues import Batches, Jobs, Policy, Station
from ascend_lab.deploy.serving.scenario import Floats, Scenario, Service
from ascend_lab.errors import InputError

GROUPS = 20
T_99 = 2.8609
"""Two-sided 99 % quantile of Student's t with GROUPS - 1 degrees of freedom."""


# -- what became of it ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Served:
    """What became of the measured requests: arrays in order of arrival, lost ones in `lost`.

    Rates and shares are of the window in which they arrived: `throughput_per_s` counts all answers
    in it.
    """

    arrival_s: Floats
    finish_s: Floats
    wait_s: Floats
    level: NDArray[np.int64]
    lost: NDArray[np.bool_]
    window_s: tuple[float, float]
    throughput_per_s: float
    stations: dict[str, tuple[Policy, Batches]]
    rollout: Rollout | None = None

    @property
    def latency_s(self) -> Floats:
        """Seconds from arrival to answer of those served."""
        return (self.finish_s - self.arrival_s)[~self.lost]

    def batches(self, name: str = "") -> NDArray[np.int64]:
        """Return the items of the batches of a step (the first) since the window began."""
        kept = self.stations[name or next(iter(self.stations))][1]
        return np.array(kept.items, np.int64)[np.array(kept.start_s) >= self.window_s[0]]

    def utilisation(self, name: str = "") -> float:
        """Return the busy share of the instances of a step (the first) in the window."""
        policy, kept = self.stations[name or next(iter(self.stations))]
        start_s, end_s = self.window_s
        ends = np.clip([kept.start_s, kept.end_s], start_s, end_s)
        return float((ends[1] - ends[0]).sum() / (policy.instances * (end_s - start_s)))

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain data, ready for JSON; percentiles of sorted samples."""
        sizes = self.batches()
        served = ~self.lost
        data: dict[str, Any] = {
            "throughput_per_s": self.throughput_per_s,
            "latency_s": latencies(self.latency_s),
            "wait_s": {"mean": _mean(self.wait_s[served])},
            "mean_batch": _mean(sizes),
            "utilisation": self.utilisation(),
            "lost": int(self.lost.sum()),
            "served": int(served.sum()),
            "batches": {
                str(s): int(n) for s, n in zip(*np.unique(sizes, return_counts=True), strict=True)
            },
        }
        if len(self.stations) > 1:
            data["steps"] = {
                n: {"mean_batch": _mean(self.batches(n)), "utilisation": self.utilisation(n)}
                for n in self.stations
            }
        if len(next(iter(self.stations.values()))[0].levels) > 1:
            data["priorities"] = [self._of_level(n) for n in range(int(self.level.max()) + 1)]
        if self.rollout:
            data["canary"] = self.rollout.summary()
        return data

    def _of_level(self, level: int) -> dict[str, Any]:
        mine = self.level == level
        kept = mine & ~self.lost
        return {
            "priority": level + 1,
            "latency_s": latencies((self.finish_s - self.arrival_s)[kept]),
            "wait_s": {"mean": _mean(self.wait_s[kept])},
            "lost": int((mine & self.lost).sum()),
        }


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and what holds the true one in 99 of 100 simulations."""

    mean: float
    half: float

    def __contains__(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half


def interval(samples: Any) -> Interval:
    """Return mean and 99 % interval of samples that depend on their neighbours, by batch means.

    The means of `GROUPS` long stretches are nearly independent. Raises `InputError` for fewer than
    ten samples a stretch.
    """
    values = np.asarray(samples, float)
    if len(values) < 10 * GROUPS:
        raise InputError(f"at least {10 * GROUPS} samples", str(len(values)), "simulate longer")
    means = np.array([part.mean() for part in np.array_split(values, GROUPS)])
    return Interval(float(values.mean()), T_99 * float(means.std(ddof=1)) / GROUPS**0.5)


def latencies(values: Floats) -> dict[str, float]:
    """Return median, p95, p99 and mean of samples."""
    found = np.percentile(values, (50, 95, 99)) if len(values) else np.full(3, np.nan)
    return {**dict(zip(("p50", "p95", "p99"), found.tolist(), strict=True)), "mean": _mean(values)}


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


# -- one simulation -------------------------------------------------------------------------------
class _Run:
    """One simulation on its way: stations wired to each other and to the arrivals."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.agenda = Agenda()
        self.total = total = scenario.warmup + scenario.requests
        streams = np.random.SeedSequence(scenario.seed).spawn(4 + len(scenario.steps))
        self.rng = [np.random.default_rng(stream) for stream in streams]
        shares = np.cumsum([level.share for level in scenario.steps[0].policy.levels])
        drawn = np.searchsorted(shares[:-1] / shares[-1], self.rng[1].random(total), side="right")
        items = scenario.arrivals.items
        sizes = self.rng[2].choice(items, total).tolist() if len(items) > 1 else [items[0]] * total
        self.jobs = Jobs(drawn.tolist(), sizes, [0.0] * total, [False] * total)
        self.arrival_s = [0.0] * total
        self.finish_s = [0.0] * total
        self.sent = 0
        self.open = scenario.arrivals.law != "closed"
        think = Service(scenario.arrivals.think_law, scenario.arrivals.think_s)
        self.think = think.noise(self.rng[0])
        self.plain = len(scenario.steps) == 1
        self.stations = [
            Station(
                self.agenda,
                step.policy,
                step.service.sampler(self.rng[4 + n], step.policy.max_batch),
                self.jobs,
                self._over if self.plain else partial(self._done, n),
                self._over,
            )
            for n, step in enumerate(scenario.steps)
        ]
        self.rollout = None
        if scenario.canary:
            self.rollout = rollout_of(scenario, scenario.canary, self.rng[3])
        self.firsts = [n for n, step in enumerate(scenario.steps) if not step.after]
        self.next = {
            n: [m for m, other in enumerate(scenario.steps) if step.name in other.after]
            for n, step in enumerate(scenario.steps)
        }
        self.left: dict[int, list[int]] = {}

    def send(self, now: float, job: int) -> None:
        """Let a request in at the first steps, or at the version it is routed to."""
        self.arrival_s[job] = now
        if self.plain:
            self.stations[0].arrive(now, job)
            return
        if self.rollout:
            self.stations[self.rollout.route(job)].arrive(now, job)
            return
        self.left[job] = [len(step.after) for step in self.scenario.steps]
        for place in self.firsts:
            if not self.jobs.lost[job]:
                self.stations[place].arrive(now, job)

    def _done(self, place: int, now: float, job: int) -> None:
        if self.rollout:
            self.rollout.answered(now, job, place, now - self.arrival_s[job])
            self._over(now, job)
        elif left := self.left.get(job):  # else lost in another branch
            left[place] = -1
            for other in self.next[place]:
                left[other] -= 1
                if not left[other] and not self.jobs.lost[job]:
                    self.stations[other].arrive(now, job)
            if max(left) < 0:
                self._over(now, job)

    def _over(self, now: float, job: int) -> None:
        """Note the end of a request, answered or lost; its client thinks and asks again."""
        self.left.pop(job, None)
        self.finish_s[job] = now
        if not self.open and self.sent < self.total:
            think_s = self.scenario.arrivals.think_s
            self.agenda.at(now + think_s * next(self.think) if think_s else now, self._ask)

    def _ask(self, now: float, _: object = None) -> None:
        if self.sent < self.total:
            self.sent += 1
            self.send(now, self.sent - 1)

    def arrivals(self) -> Sequence[float]:
        """Return the times of an open stream; let closed clients begin."""
        arrivals = self.scenario.arrivals
        if arrivals.law == "closed":
            for _ in range(min(arrivals.clients, self.total)):
                self.agenda.at(0.0, self._ask)
            return ()
        if arrivals.times_s:
            return arrivals.times_s
        gaps = self.rng[0].standard_exponential(self.total) / arrivals.rate_per_s
        found: list[float] = np.cumsum(gaps).tolist()
        return found


def simulate_serving(scenario: Scenario) -> Served:
    """Return what becomes of a scenario's requests: the same for the same seed.

    Raises `InputError` for given times that are not one a request.
    """
    times = scenario.arrivals.times_s
    if times and len(times) != scenario.warmup + scenario.requests:
        raise InputError("a time for each request", f"{len(times)} times", "count them again")
    run = _Run(scenario)
    run.agenda.run(run.arrivals(), run.send)
    cut = scenario.warmup
    lost = np.array(run.jobs.lost)
    arrival_s = np.array(run.arrival_s)
    finish_s = np.array(run.finish_s)
    start_s = float(arrival_s[cut])
    end_s = float(arrival_s[-1])
    if end_s <= start_s:  # all came at once
        end_s = max(float(finish_s.max()), float(np.nextafter(start_s, np.inf)))
    answers = ~lost & (finish_s > start_s) & (finish_s <= end_s)
    names = [v.name for v in scenario.versions] or [step.name for step in scenario.steps]
    kept = [(station.policy, station.batches) for station in run.stations]
    return Served(
        arrival_s[cut:],
        finish_s[cut:],
        np.array(run.jobs.waited_s)[cut:],
        np.array(run.jobs.level)[cut:],
        lost[cut:],
        (start_s, end_s),
        float(answers.sum() / (end_s - start_s)),
        dict(zip(names, kept, strict=True)),
        run.rollout,
    )
