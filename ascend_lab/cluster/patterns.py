"""A schedule on a topology, prepared so that timing it for one more size is cheap.

Rounds between the same devices with the same counts of blocks are one pattern: routes, starts and
shares are worked out once. Where messages that share links all start together, their times are
straight lines in the size. Only the others go through the events of `fluid` for each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.fluid import Uses, finish_times
from ascend_lab.cluster.routing import router_of
from ascend_lab.cluster.schedule import Round, Schedule
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_MESSAGES, MOST_USES = 2**17, 2**23
"""Messages of a round, links that all different rounds use: more would take minutes to time."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Messages between devices: `counts` blocks each, their links, and when their bytes start.

    `slopes_s` are seconds a block byte of every message; `bent` are the messages whose time is no
    straight line, `bent_uses` their links. `added` is the most blocks one rank adds.
    """

    sources: Ints
    targets: Ints
    reduces: NDArray[np.bool_]
    counts: Floats
    uses: Uses
    starts_s: Floats
    slopes_s: Floats
    bent: Ints
    bent_uses: Uses
    added: float

    def ends_s(self, block_bytes: float, topology: Topology) -> Floats:
        """Return when each message has arrived."""
        ends: Floats = self.starts_s + self.slopes_s * block_bytes
        if len(self.bent):
            sizes = self.counts[self.bent] * block_bytes
            capacity = topology.rate_bytes_per_s
            ends[self.bent] = finish_times(
                self.starts_s[self.bent], sizes, self.bent_uses, capacity
            )
        return ends

    def floor(self, topology: Topology) -> tuple[float, float, float]:
        """Return the last start, the first start, and seconds a block byte of the busiest link.

        The round takes at least max(last, first + busiest * block bytes).
        """
        if not len(self.starts_s):
            return 0.0, 0.0, 0.0
        blocks = self.counts[self.uses.flow] * self.uses.weight
        load = np.bincount(self.uses.resource, blocks, len(topology.links))
        busiest = float((load / topology.rate_bytes_per_s).max(initial=0.0))
        return float(self.starts_s.max()), float(self.starts_s.min()), busiest

    def time_s(self, block_bytes: float, topology: Topology) -> float:
        """Return how long the round takes: the slowest message, then the busiest rank's adding."""
        adding_s = self.added * block_bytes * topology.gamma_s_per_byte
        return float(self.ends_s(block_bytes, topology).max(initial=0.0)) + adding_s


def pattern_of(step: Round, topology: Topology, places: Ints) -> Pattern:
    """Return the pattern of a round whose rank r is device `places[r]`."""
    paths, starts = routed(step, topology, places)
    uses, counts = Uses.of(paths), step.counts.astype(np.float64)
    received = np.bincount(step.targets[step.reduces], counts[step.reduces])
    bent = _bent(uses, starts)
    slopes = finish_times(np.zeros(len(starts)), counts, uses, topology.rate_bytes_per_s)
    return Pattern(
        places[step.sources],
        places[step.targets],
        step.reduces,
        counts,
        uses,
        starts,
        slopes,
        np.flatnonzero(bent),
        uses.only(bent),
        float(received.max(initial=0.0)),
    )


def _bent(uses: Uses, starts: Floats) -> NDArray[np.bool_]:
    """Return which messages share links, if only through others, with ones that start elsewhen."""
    label = uses.components()
    first, last = np.full(uses.count, np.inf), np.full(uses.count, -np.inf)
    np.minimum.at(first, label, starts)
    np.maximum.at(last, label, starts)
    found: NDArray[np.bool_] = (last > first)[label]
    return found


def routed(step: Round, topology: Topology, places: Ints) -> tuple[list[tuple[int, ...]], Floats]:
    """Return the links of every message and when its first byte flows.

    Messages that leave by the same link are issued one after another, alpha apart.
    """
    router = router_of(topology)
    ways = zip(places[step.sources].tolist(), places[step.targets].tolist(), strict=True)
    paths = [router.route(a, b) for a, b in ways]
    delay = {path: float(sum(topology.alpha_s[i] for i in path)) for path in set(paths)}
    issued: dict[int, float] = {}
    starts = np.zeros(len(paths))
    for i, path in enumerate(paths):
        issued[path[0]] = issued.get(path[0], 0.0) + delay[path]
        starts[i] = issued[path[0]]
    return paths, starts


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A schedule's patterns on a topology and which of them each round is.

    `floors`: (rounds, 4), the patterns' `floor` and the blocks their busiest rank adds.
    """

    topology: Topology
    patterns: tuple[Pattern, ...]
    rounds: Ints
    parts: int
    floors: Floats

    def floor_s(self, size_bytes: float) -> float:
        """Return seconds this schedule cannot go below, without going through any events."""
        block_bytes = size_bytes / self.parts
        last, first, busiest, added = self.floors.T
        adding = added * self.topology.gamma_s_per_byte * block_bytes
        return float((np.maximum(last, first + busiest * block_bytes) + adding).sum())

    def times_s(self, size_bytes: float) -> Floats:
        """Return the seconds of every pattern."""
        block_bytes = size_bytes / self.parts
        return np.array([p.time_s(block_bytes, self.topology) for p in self.patterns])

    def time_s(self, size_bytes: float) -> float:
        """Return the seconds of all rounds."""
        return float(self.rounds_s(size_bytes).sum()) if size_bytes else 0.0

    def rounds_s(self, size_bytes: float) -> Floats:
        """Return the seconds of every round."""
        found: Floats = self.times_s(size_bytes)[self.rounds]
        return found


def plan_of(schedule: Schedule, topology: Topology, places: Ints) -> Plan:
    """Return the plan of a schedule, made when first asked for and kept with the topology."""
    kept: WeakKeyDictionary[Schedule, dict[bytes, Plan]]
    kept = topology.__dict__.setdefault("_plans", WeakKeyDictionary())
    plans = kept.setdefault(schedule, {})
    key = places.tobytes()
    if key not in plans:
        plans[key] = _plan(schedule.rounds, topology, places, schedule.parts)
    return plans[key]


def _plan(rounds: Sequence[Round], topology: Topology, places: Ints, parts: int) -> Plan:
    """Return the plan; raise `ClusterError` if there is too much in it to be timed."""
    known: dict[tuple[bytes, ...], int] = {}
    patterns: list[Pattern] = []
    which, uses = np.zeros(len(rounds), np.int64), 0
    for number, step in enumerate(rounds):
        arrays = (step.sources, step.targets, step.counts, step.reduces)
        key = tuple(a.tobytes() for a in arrays)
        if key not in known:
            known[key] = len(patterns)
            _check_work(len(step.sources), uses)
            patterns.append(pattern_of(step, topology, places))
            uses += len(patterns[-1].uses.flow)
        which[number] = known[key]
    floors = np.array([(*one.floor(topology), one.added) for one in patterns]).reshape(-1, 4)
    return Plan(topology, tuple(patterns), which, parts, floors[which])


def _check_work(messages: int, uses: int) -> None:
    if messages > MOST_MESSAGES or uses > MOST_USES:
        what = f"{MOST_MESSAGES} messages a round and {MOST_USES} hops in all at most"
        got = f"{messages} and {uses}"
        raise ClusterError(what, got, "take fewer ranks, or an algorithm of fewer messages")
