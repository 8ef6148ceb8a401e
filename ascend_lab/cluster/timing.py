"""How long a collective takes on a topology: round after round, links shared fairly.

A message starts alpha (the sum along its path) after its round begins; messages that leave a device
by the same link are issued one after another, alpha apart. Then its bytes flow, all messages of the
round sharing the links (`fluid`). What arrives to be added takes gamma a byte more.

    round = max over messages (issue + alpha + bytes / fair rate) + max over ranks gamma * bytes

The barrier between rounds makes this an upper bound for schedules whose ranks could run ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.patterns import plan_of
from ascend_lab.cluster.schedule import Schedule
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Floats = NDArray[np.float64]
BUS_FACTOR = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
"""Bytes over the busiest wire / size, times p / (p - 1): the convention of nccl-tests."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """A collective timed: seconds in all and of each round, and the least any schedule needs."""

    op: str
    algorithm: str
    ranks: int
    size_bytes: float
    time_s: float
    rounds_s: tuple[float, ...]
    lower_bound_s: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes / seconds; 0 where no time passes."""
        return self.size_bytes / self.time_s if self.time_s else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second on the busiest wire of an ideal schedule."""
        share = (self.ranks - 1) / self.ranks
        factor = BUS_FACTOR[self.op] * share if self.op in BUS_FACTOR else 1.0
        return self.algorithm_bandwidth * factor


def time_collective(
    schedule: Schedule,
    topology: Topology,
    size_bytes: float,
    placement: Sequence[int] | None = None,
) -> CollectiveTime:
    """Time a schedule of `size_bytes` (all_to_all: one rank's send buffer; all_gather: the result).

    `placement[r]` is the device of rank r (default r). Nothing to move takes no time. Raises
    `ClusterError` for negative sizes, wrong placements and devices no path joins.
    """
    if not (math.isfinite(size_bytes) and size_bytes >= 0):
        raise ClusterError("a size of at least 0 bytes", str(size_bytes), "correct it")
    places = placed(schedule.ranks, topology, placement)
    bound = lower_bound_s(schedule.op, topology, size_bytes, places, schedule.root)
    if size_bytes == 0 or schedule.ranks == 1:
        return CollectiveTime(
            schedule.op, schedule.algorithm, schedule.ranks, size_bytes, 0.0, (), 0.0
        )
    times = tuple(plan_of(schedule, topology, places).rounds_s(size_bytes).tolist())
    return CollectiveTime(
        schedule.op, schedule.algorithm, schedule.ranks, size_bytes, sum(times), times, bound
    )


def placed(
    ranks: int, topology: Topology, placement: Sequence[int] | None = None
) -> NDArray[np.int64]:
    """Return the device of every rank; raise `ClusterError` unless they are distinct devices."""
    places = np.arange(ranks) if placement is None else np.asarray(placement, np.int64)
    fits = len(places) == ranks == len(set(places.tolist()))
    if not fits or places.min() < 0 or places.max() >= topology.size:
        what = f"{topology.name}: {ranks} different devices of {topology.size}"
        raise ClusterError(what, str(places.tolist())[:60], "use a larger topology or fewer ranks")
    return places


# -- bounds ---------------------------------------------------------------------------------------
def lower_bound_s(
    op: str, topology: Topology, size_bytes: float, places: NDArray[np.int64], root: int = 0
) -> float:
    """Return the larger of the latency and the bandwidth bound: no schedule is faster.

    Latency: with d links out of a device, k alphas inform at most (1 + d)^k ranks; to reduce, all
    may send to the root at once. Bandwidth: what each rank, and each server, must send and receive,
    and for all_reduce 2 (m - 1) n bytes over the links of all m (Patarasuk and Yuan 2009).
    """
    if len(places) == 1 or size_bytes == 0:
        return 0.0
    kept = topology.__dict__.setdefault("_bounds", {})
    key = (op, places.tobytes(), root)
    if key not in kept:
        kept[key] = _bound_s_per_byte(op, topology, places, root), _latency_s(op, topology, places)
    slope, latency_s = kept[key]
    return float(max(slope * size_bytes, latency_s))


def _bound_s_per_byte(op: str, topology: Topology, places: NDArray[np.int64], root: int) -> float:
    """Return the seconds a byte that no rank, no server and not all together can go below."""
    ranks = tuple((int(device),) for device in places)
    used = set(places.tolist())
    servers = tuple(group for group in topology.groups if used.intersection(group))
    bounds = [0.0]
    for parts in (ranks, servers):
        if len(parts) > 1:
            held = np.array([len(used.intersection(part)) for part in parts])
            home = np.array([int(places[root]) in part for part in parts])
            out, into = _cuts(topology, parts)
            bounds.append(_parts_s_per_byte(op, held / len(places), len(places), home, out, into))
    return max(bounds)


def _parts_s_per_byte(
    op: str, share: Floats, ranks: int, home: NDArray[np.bool_], out: Floats, into: Floats
) -> float:
    """Return seconds a byte if each part has this share of the ranks; the root is at `home`."""
    all_of_it = np.ones(len(share))
    crossing = ranks * share * (1 - share)
    sends, receives = {
        "reduce_scatter": (1 - share, share),
        "all_gather": (share, 1 - share),
        "all_to_all": (crossing, crossing),
        "broadcast": (home.astype(float), 1.0 - home),
        "reduce": (1.0 - home, home.astype(float)),
    }.get(op, (all_of_it, all_of_it))
    found = max(_seconds(sends, out), _seconds(receives, into))
    if op == "all_reduce":
        both_ways, all_links = np.array([2.0 * (len(share) - 1)]), np.array([float(out.sum())])
        found = max(found, _seconds(both_ways, all_links))
    return found


def _cuts(topology: Topology, parts: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
    """Return the bytes a second that can leave and that can reach each part of the devices.

    A switch whose devices are all of one part belongs to it.
    """
    part = np.full(topology.size + len(topology.switches), -1)
    for number, devices in enumerate(parts):
        part[list(devices)] = number
    links = np.fromiter(topology.between.values(), np.int64)
    nodes = np.array([(topology.links[i].source, topology.links[i].target) for i in links])
    nodes = nodes.reshape(-1, 2).astype(np.int64)
    least, most = np.full(len(part), len(parts)), np.full(len(part), -1)
    for device, switch in (nodes.T, nodes.T[::-1]):
        joins = (device < topology.size) & (switch >= topology.size)
        np.minimum.at(least, switch[joins], part[device[joins]])
        np.maximum.at(most, switch[joins], part[device[joins]])
    part = np.where((least == most) & (most >= 0), most, part)
    rates = np.zeros((2, len(parts)))
    sides = part[nodes].T
    for row, side in zip(rates, sides, strict=True):
        counts = (sides[0] != sides[1]) & (side >= 0)
        np.add.at(row, side[counts], topology.rate_bytes_per_s[links[counts]])
    return rates[0], rates[1]


def _seconds(size_bytes: Floats, rate_bytes_per_s: Floats) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nanmax(size_bytes / rate_bytes_per_s))


def _latency_s(op: str, topology: Topology, places: NDArray[np.int64]) -> float:
    ports = max(len(topology.leaving[int(d)]) for d in places)
    if not ports:
        return math.inf
    steps = 1 if op == "reduce" else math.ceil(math.log(len(places), 1 + ports) - 1e-9)
    return steps * _least_alpha_s(topology)


def _least_alpha_s(topology: Topology) -> float:
    """Return a latency no message between two devices can beat."""
    direct = out = into = math.inf
    for link in topology.links:
        starts, ends = link.source < topology.size, link.target < topology.size
        if starts and ends:
            direct = min(direct, link.alpha_s)
        elif starts:
            out = min(out, link.alpha_s)
        elif ends:
            into = min(into, link.alpha_s)
    return min(direct, out + into)
