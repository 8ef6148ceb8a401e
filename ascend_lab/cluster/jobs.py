"""Jobs that run beside others, and their stages: flows that start, flow, and a rest after them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.fluid import Uses, finish_times
from ascend_lab.cluster.patterns import Pattern, plan_of
from ascend_lab.cluster.schedule import Schedule
from ascend_lab.cluster.timing import placed
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
BYTES_PER_ADD = 3
"""Memory traffic of adding a received byte: two read, one written."""


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective of `size_bytes`: begins at `start_s` and after the jobs named have ended."""

    name: str
    schedule: Schedule
    size_bytes: float
    start_s: float = 0.0
    after: tuple[str, ...] = ()
    placement: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of one device: `time_s` alone, moving `memory_bytes` through its memory meanwhile."""

    name: str
    device: int
    time_s: float
    memory_bytes: float = 0.0
    start_s: float = 0.0
    after: tuple[str, ...] = ()


Job = Communication | Compute


@dataclass(frozen=True, slots=True)
class Span:
    """When a job began and ended."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Flows of `sizes` bytes that begin at `starts_s` of the stage, and the rest after the last.

    `alone_s` is how long the stage takes if nothing else runs.
    """

    uses: Uses
    sizes: Floats
    starts_s: Floats
    rest_s: float
    alone_s: float


class Stages:
    """Makes stages; its resources are all links, all memories, and limits of single flows."""

    def __init__(self, topology: Topology, memory_bytes_per_s: float | None) -> None:
        self.topology = topology
        self.memory = math.inf if memory_bytes_per_s is None else memory_bytes_per_s
        self.links = len(topology.links)
        memories = np.full(topology.size, self.memory)
        self.capacity: Floats = np.concatenate([topology.rate_bytes_per_s, memories])

    def of(self, job: Job) -> tuple[tuple[Stage, ...], Ints]:
        """Return the stages of a job and in which order they come."""
        size = job.size_bytes if isinstance(job, Communication) else job.memory_bytes
        seconds = 0.0 if isinstance(job, Communication) else job.time_s
        if not (0 <= size < math.inf and 0 <= seconds < math.inf):
            what = f"{job.name}: bytes and seconds of at least 0"
            raise ClusterError(what, f"{size}, {seconds}", "correct them")
        return self._collective(job) if isinstance(job, Communication) else self._compute(job)

    def _compute(self, job: Compute) -> tuple[tuple[Stage, ...], Ints]:
        if not 0 <= job.device < self.topology.size:
            what = f"{job.name}: a device below {self.topology.size}"
            raise ClusterError(what, str(job.device), "choose one")
        if not job.memory_bytes or math.isinf(self.memory):
            return (self._stage([], np.zeros(0), np.zeros(0), job.time_s),), np.zeros(1, np.int64)
        rate = job.memory_bytes / job.time_s if job.time_s else math.inf
        uses = self._capped(np.array([job.device]), rate)
        sizes = np.array([float(job.memory_bytes)])
        return (self._stage(uses, sizes, np.zeros(1), 0.0),), np.zeros(1, np.int64)

    def _collective(self, job: Communication) -> tuple[tuple[Stage, ...], Ints]:
        schedule, topology = job.schedule, self.topology
        places = placed(schedule.ranks, topology, job.placement)
        if not job.size_bytes or schedule.ranks == 1:
            return (), np.zeros(0, np.int64)
        plan = plan_of(schedule, topology, places)
        block_bytes = job.size_bytes / schedule.parts
        stages: list[Stage] = []
        of_pattern = []
        for pattern in plan.patterns:
            parts = self._round(pattern, block_bytes)
            of_pattern.append(range(len(stages), len(stages) + len(parts)))
            stages += parts
        order = [i for number in plan.rounds for i in of_pattern[number]]
        return tuple(stages), np.array(order, np.int64)

    def _round(self, pattern: Pattern, block_bytes: float) -> list[Stage]:
        """Return the messages and, where memory counts, the adding as a stage of its own."""
        sizes, gamma = pattern.counts * block_bytes, self.topology.gamma_s_per_byte
        adding_s = pattern.added * block_bytes * gamma
        if math.isinf(self.memory):
            return [self._stage([pattern.uses], sizes, pattern.starts_s, adding_s)]
        flows, one = np.arange(len(sizes)), np.ones(len(sizes))
        ends = [
            Uses(flows, self.links + devices, one, len(sizes))
            for devices in (pattern.sources, pattern.targets)
        ]
        found = [self._stage([pattern.uses, *ends], sizes, pattern.starts_s, 0.0)]
        if adding_s:
            adds = pattern.reduces
            received = np.bincount(pattern.targets[adds], sizes[adds])
            devices = np.flatnonzero(received)
            traffic = BYTES_PER_ADD * received[devices].astype(np.float64)
            uses = self._capped(devices, BYTES_PER_ADD / gamma)
            found.append(self._stage(uses, traffic, np.zeros(len(devices)), 0.0))
        return found

    def _capped(self, devices: Ints, rate_bytes_per_s: float) -> list[Uses]:
        """Return uses of the devices' memories by flows that each have a limit of their own."""
        flows, one = np.arange(len(devices)), np.ones(len(devices))
        limits = len(self.capacity) + flows
        self.capacity = np.concatenate([self.capacity, rate_bytes_per_s * one])
        return [
            Uses(flows, self.links + devices, one, len(devices)),
            Uses(flows, limits, one, len(devices)),
        ]

    def _stage(self, uses: list[Uses], sizes: Floats, starts: Floats, rest_s: float) -> Stage:
        flow, resource, weight = (
            np.concatenate([getattr(part, name) for part in uses]) if uses else np.zeros(0, kind)
            for name, kind in (("flow", np.int64), ("resource", np.int64), ("weight", float))
        )
        both = Uses(flow, resource, weight, len(sizes))
        ends = finish_times(starts, sizes, both, self.capacity)
        return Stage(both, sizes, starts, rest_s, float(ends.max(initial=0.0)) + rest_s)
