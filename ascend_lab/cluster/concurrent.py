"""Several collectives and computations at once, sharing links and memory fairly.

Time goes from event to event: a message starts to flow, a message has arrived, a rank has added, a
job may begin. Between events all rates are max-min fair (`fluid`). A collective's next round begins
when the slowest message of this one has arrived and been added, as in `timing`; latencies of
different jobs overlap, and messages of different jobs are not issued one after another.

Where a device's memory has a rate, sending reads a byte, receiving writes one, adding reads two and
writes one more, and computing moves its `memory_bytes`: all take from the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.fluid import EPSILON, fair_rates, joined
from ascend_lab.cluster.jobs import Job, Span, Stage, Stages
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Run:
    """A job under way: its stage, the bytes left, when flows begin, until when it rests."""

    name: str
    start_s: float
    stages: tuple[Stage, ...]
    order: Ints
    at: int = -1
    stage_start_s: float = 0.0
    left: Floats = field(default_factory=lambda: np.zeros(0))
    begins_s: Floats = field(default_factory=lambda: np.zeros(0))
    rests_until_s: float | None = None

    @property
    def stage(self) -> Stage:
        return self.stages[int(self.order[self.at])]

    def next_stage(self, now: float) -> bool:
        """Begin the next stage; return whether there was one."""
        self.at += 1
        if self.at >= len(self.order):
            return False
        self.stage_start_s = now
        self.left, self.begins_s = self.stage.sizes.copy(), now + self.stage.starts_s
        self.rests_until_s = now + self.stage.rest_s if not len(self.left) else None
        return True


def run_together(
    jobs: Sequence[Job], topology: Topology, memory_bytes_per_s: float | None = None
) -> Mapping[str, Span]:
    """Return when each job begins and ends if all run on the topology together.

    `memory_bytes_per_s` is the rate of every device's memory; None: no limit. Raises `ClusterError`
    for jobs of one name, for jobs that wait for each other or for none, for a rate that is not
    positive.
    """
    if memory_bytes_per_s is not None and not memory_bytes_per_s > 0:
        raise ClusterError("a memory rate above 0", str(memory_bytes_per_s), "give bytes a second")
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise ClusterError("a name for each job", str(sorted(names))[:80], "number them")
    return _Events(jobs, topology, memory_bytes_per_s).run()


class _Events:
    """The simulation: what waits, what runs, what is done, and the time."""

    def __init__(self, jobs: Sequence[Job], topology: Topology, memory: float | None) -> None:
        self.now = 0.0
        self.waiting = {job.name: job for job in jobs}
        self.running: list[_Run] = []
        self.done: dict[str, Span] = {}
        self.builder = Stages(topology, memory)
        self._check()

    def _check(self) -> None:
        for job in self.waiting.values():
            unknown = [name for name in job.after if name not in self.waiting]
            if unknown:
                raise ClusterError(f"{job.name}: jobs to wait for", f"no {unknown[0]}", "name one")
            if not (math.isfinite(job.start_s) and job.start_s >= 0):
                raise ClusterError(f"{job.name}: a start >= 0 s", str(job.start_s), "correct it")

    def run(self) -> Mapping[str, Span]:
        """Go from event to event until all jobs are done."""
        while self.waiting or self.running:
            self._admit()
            if not self.running and self.waiting:
                coming = self._next_start()
                if math.isinf(coming):
                    names = ", ".join(sorted(self.waiting)[:4])
                    raise ClusterError("jobs that can begin", f"{names} wait for each other", "cut")
                self.now = coming
            elif self.running and not self._alone():
                self._step()
            self._advance()
        return self.done

    def _ready(self) -> list[Job]:
        return [j for j in self.waiting.values() if all(name in self.done for name in j.after)]

    def _next_start(self) -> float:
        return min((max(job.start_s, self.now) for job in self._ready()), default=math.inf)

    def _admit(self) -> None:
        """Begin what may begin now."""
        while beginning := [job for job in self._ready() if job.start_s <= self.now]:
            for job in beginning:
                del self.waiting[job.name]
                stages, order = self.builder.of(job)
                self._continue(_Run(job.name, self.now, stages, order))

    def _continue(self, run: _Run) -> None:
        """Begin the run's next stage, or end it."""
        if run.next_stage(self.now):
            if run not in self.running:
                self.running.append(run)
            return
        self.running = [one for one in self.running if one is not run]
        self.done[run.name] = Span(run.start_s, self.now)

    def _others_until(self, but: _Run | None = None) -> float:
        """Return the next moment something else than a flow happens."""
        rests = [r.rests_until_s for r in self.running if r is not but]
        return min([self._next_start(), *(t for t in rests if t is not None)])

    def _alone(self) -> bool:
        """Let the only run with flows do a whole stage at once if nothing happens meanwhile."""
        moving = [run for run in self.running if run.rests_until_s is None]
        if not moving:
            self.now = self._others_until()
            return True
        end = moving[0].stage_start_s + moving[0].stage.alone_s
        begun = moving[0].stage_start_s < self.now
        if len(moving) > 1 or begun or end > self._others_until(moving[0]):
            return False
        self.now = moving[0].rests_until_s = end
        return True

    def _step(self) -> None:
        """Let all flow until the next event."""
        moving = [run for run in self.running if run.rests_until_s is None]
        uses = joined([run.stage.uses for run in moving])
        left = np.concatenate([run.left for run in moving])
        begins = np.concatenate([run.begins_s for run in moving])
        flowing = (begins <= self.now) & (left > 0)
        rate = fair_rates(uses, self.builder.capacity, flowing)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(flowing, left / rate, math.inf)
        need[flowing & np.isinf(rate)] = 0.0
        later = begins[begins > self.now].min(initial=math.inf)
        end = min(self.now + float(need.min()), float(later), self._others_until())
        step = end - self.now
        with np.errstate(invalid="ignore"):
            over = flowing & (need <= step * (1 + EPSILON))
            left = np.where(over, 0.0, np.where(flowing, left - rate * step, left))
        self.now = end
        cuts = np.cumsum([len(run.left) for run in moving])[:-1]
        for run, part in zip(moving, np.split(left, cuts), strict=True):
            run.left = part
            if not part.any() and (run.begins_s <= end).all():
                run.rests_until_s = end + run.stage.rest_s

    def _advance(self) -> None:
        """Begin the next stages of runs whose rest is over."""
        for run in list(self.running):
            if run.rests_until_s is not None and run.rests_until_s <= self.now:
                self._continue(run)
