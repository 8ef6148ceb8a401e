"""A discrete-event simulation of a server: of one model, of an ensemble, or of two versions.

Random numbers come from separate streams: one for arrivals and the thinking times of clients, one
for levels (priorities), one for the sizes of requests, one for a canary, and one for the service
times of each step. So two policies can be compared on the same requests (common random numbers).
The first requests warm the system up and are not measured. `interval` gives the confidence
interval of a mean.
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
from ascend_lab.deploy.serving.scenario import Floats, Scenario, Service, Step
from ascend_lab.errors import InputError

BATCH_MEANS = 20
"""Groups of consecutive samples, whose means are treated as independent."""
STUDENT_T_99 = 2.8609
"""Two-sided 99 % quantile of Student's t with `BATCH_MEANS` - 1 degrees of freedom."""


# -- results --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Served:
    """The result of a simulation: arrays over the measured requests, in order of arrival.

    `lost` marks requests without an answer. The window is the time in which the measured requests
    arrived; `throughput_per_s` counts all answers in it.
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
        """Seconds from arrival to answer of the requests that were answered."""
        return (self.finish_s - self.arrival_s)[~self.lost]

    def batches(self, name: str = "") -> NDArray[np.int64]:
        """Return the sizes of the batches that a step starts once the window has begun.

        The default is the first step. Batches that start after the window's end are included.
        """
        batches = self.stations[name or next(iter(self.stations))][1]
        return np.array(batches.items, np.int64)[np.array(batches.start_s) >= self.window_s[0]]

    def utilisation(self, name: str = "") -> float:
        """Return the utilisation of a step's instances in the window; by default the first step."""
        policy, batches = self.stations[name or next(iter(self.stations))]
        start_s, end_s = self.window_s
        # A batch counts only with its time inside the window.
        clipped = np.clip([batches.start_s, batches.end_s], start_s, end_s)
        return float((clipped[1] - clipped[0]).sum() / (policy.instances * (end_s - start_s)))

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain data for JSON."""
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
            data["priorities"] = [self._level_summary(n) for n in range(int(self.level.max()) + 1)]
        if self.rollout:
            data["canary"] = self.rollout.summary()
        return data

    def _level_summary(self, level: int) -> dict[str, Any]:
        """Return the numbers of the requests of one level."""
        in_level = self.level == level
        served = in_level & ~self.lost
        return {
            "priority": level + 1,
            "latency_s": latencies((self.finish_s - self.arrival_s)[served]),
            "wait_s": {"mean": _mean(self.wait_s[served])},
            "lost": int((in_level & self.lost).sum()),
        }


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the half width of its 99 % confidence interval."""

    mean: float
    half: float

    def __contains__(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half


def interval(samples: Any) -> Interval:
    """Return the mean of correlated samples and its 99 % confidence interval, by batch means.

    The means of `BATCH_MEANS` long groups of consecutive samples are nearly independent. Raises
    `InputError` for fewer than ten samples a group.
    """
    values = np.asarray(samples, float)
    if len(values) < 10 * BATCH_MEANS:
        raise InputError(
            f"at least {10 * BATCH_MEANS} samples", str(len(values)), "simulate longer"
        )
    # A wait of 5 s is followed by similar waits: single samples would give too small an interval.
    means = np.array([group.mean() for group in np.array_split(values, BATCH_MEANS)])
    return Interval(
        float(values.mean()), STUDENT_T_99 * float(means.std(ddof=1)) / BATCH_MEANS**0.5
    )


def latencies(values: Floats) -> dict[str, float]:
    """Return median, p95, p99 and mean of samples."""
    percentiles = np.percentile(values, (50, 95, 99)) if len(values) else np.full(3, np.nan)
    return {
        **dict(zip(("p50", "p95", "p99"), percentiles.tolist(), strict=True)),
        "mean": _mean(values),
    }


def _mean(values: Any) -> float:
    """Return the mean of samples, or nan if there are none."""
    return float(np.mean(values)) if len(values) else float("nan")


# -- one simulation -------------------------------------------------------------------------------
class _Run:
    """A simulation in progress: stations that pass requests on to each other."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.agenda = Agenda()
        total = scenario.warmup + scenario.requests
        self.total = total
        # Arrivals and thinking, levels, sizes, the canary; then a stream for each step.
        streams = np.random.SeedSequence(scenario.seed).spawn(4 + len(scenario.steps))
        self.rng = [np.random.default_rng(stream) for stream in streams]
        # Shares 0.2, 0.3, 0.5: a random number below 0.2 gives level 0, one below 0.5 level 1.
        shares = np.cumsum([level.share for level in scenario.steps[0].policy.levels])
        drawn = np.searchsorted(shares[:-1] / shares[-1], self.rng[1].random(total), side="right")
        items = scenario.arrivals.items
        sizes = self.rng[2].choice(items, total).tolist() if len(items) > 1 else [items[0]] * total
        self.jobs = Jobs(drawn.tolist(), sizes, [0.0] * total, [False] * total)
        self.arrival_s = [0.0] * total
        self.finish_s = [0.0] * total
        self.sent = 0
        self.is_open = scenario.arrivals.law != "closed"
        think = Service(scenario.arrivals.think_law, scenario.arrivals.think_s)
        self.think_factors = think.noise(self.rng[0])
        self.has_one_step = len(scenario.steps) == 1
        self.stations = [self._station(n, step) for n, step in enumerate(scenario.steps)]
        self.rollout = None
        if scenario.canary:
            self.rollout = rollout_of(scenario, scenario.canary, self.rng[3])
        # The first steps of a request, and for each step the steps that wait for it.
        self.entry_steps = [n for n, step in enumerate(scenario.steps) if not step.after]
        self.successors = {
            n: [
                later
                for later, later_step in enumerate(scenario.steps)
                if step.name in later_step.after
            ]
            for n, step in enumerate(scenario.steps)
        }
        # Request of an ensemble -> for each step, the steps it still waits for (-1: it ended).
        self.pending_steps: dict[int, list[int]] = {}

    def _station(self, number: int, step: Step) -> Station:
        """Return the station of a step; it reports its requests to this simulation."""
        draw_s = step.service.sampler(self.rng[4 + number], step.policy.max_batch)
        done = self._finish if self.has_one_step else partial(self._step_done, number)
        return Station(self.agenda, step.policy, draw_s, self.jobs, done, self._finish)

    def send(self, now: float, job: int) -> None:
        """Send a request to the steps that wait for no other, or to the version it is routed to."""
        self.arrival_s[job] = now
        if self.has_one_step:
            self.stations[0].arrive(now, job)
            return
        if self.rollout:
            self.stations[self.rollout.route(job)].arrive(now, job)
            return
        self.pending_steps[job] = [len(step.after) for step in self.scenario.steps]
        for step in self.entry_steps:
            if not self.jobs.lost[job]:
                self.stations[step].arrive(now, job)

    def _step_done(self, step: int, now: float, job: int) -> None:
        """Pass a request on to the steps that waited for this step, or end it."""
        if self.rollout:
            self.rollout.count_answer(now, job, step, now - self.arrival_s[job])
            self._finish(now, job)
        elif missing := self.pending_steps.get(job):  # none if another branch lost the request
            missing[step] = -1
            for successor in self.successors[step]:
                missing[successor] -= 1
                if not missing[successor] and not self.jobs.lost[job]:
                    self.stations[successor].arrive(now, job)
            if max(missing) < 0:
                self._finish(now, job)

    def _finish(self, now: float, job: int) -> None:
        """Record the end of a request; a client of a closed system then thinks and asks again."""
        self.pending_steps.pop(job, None)
        self.finish_s[job] = now
        # A closed system has a constant number of clients, each with one request at a time.
        if not self.is_open and self.sent < self.total:
            think_s = self.scenario.arrivals.think_s
            self.agenda.at(now + think_s * next(self.think_factors) if think_s else now, self._ask)

    def _ask(self, now: float, _: object = None) -> None:
        """Let a closed client send the next request, if one is left to send."""
        if self.sent < self.total:
            self.sent += 1
            self.send(now, self.sent - 1)

    def arrivals(self) -> Sequence[float]:
        """Return the times of arrivals; in a closed system, start its clients and return none."""
        arrivals = self.scenario.arrivals
        if arrivals.law == "closed":
            # Later requests of a client follow its answers: see `_finish`.
            for _ in range(min(arrivals.clients, self.total)):
                self.agenda.at(0.0, self._ask)
            return ()
        if arrivals.times_s:
            return arrivals.times_s
        gaps = self.rng[0].standard_exponential(self.total) / arrivals.rate_per_s
        times_s: list[float] = np.cumsum(gaps).tolist()
        return times_s


def simulate_serving(scenario: Scenario) -> Served:
    """Simulate a scenario; the result depends only on the scenario and its seed.

    Raises `InputError` if the scenario lists times of arrival, but not one for each request.
    """
    times_s = scenario.arrivals.times_s
    if times_s and len(times_s) != scenario.warmup + scenario.requests:
        raise InputError("a time for each request", f"{len(times_s)} times", "count them again")
    run = _Run(scenario)
    run.agenda.run(run.arrivals(), run.send)
    first_measured = scenario.warmup
    lost = np.array(run.jobs.lost)
    arrival_s = np.array(run.arrival_s)
    finish_s = np.array(run.finish_s)
    start_s = float(arrival_s[first_measured])
    end_s = float(arrival_s[-1])
    # If all requests came at the same time, the window ends with the last answer.
    if end_s <= start_s:
        end_s = max(float(finish_s.max()), float(np.nextafter(start_s, np.inf)))
    # Answers in the window include those to requests of the warm-up.
    answers = ~lost & (finish_s > start_s) & (finish_s <= end_s)
    names = [v.name for v in scenario.versions] or [step.name for step in scenario.steps]
    logs = [(station.policy, station.batches) for station in run.stations]
    return Served(
        arrival_s=arrival_s[first_measured:],
        finish_s=finish_s[first_measured:],
        wait_s=np.array(run.jobs.waited_s)[first_measured:],
        level=np.array(run.jobs.level)[first_measured:],
        lost=lost[first_measured:],
        window_s=(start_s, end_s),
        throughput_per_s=float(answers.sum() / (end_s - start_s)),
        stations=dict(zip(names, logs, strict=True)),
        rollout=run.rollout,
    )
