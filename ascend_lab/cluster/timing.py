"""Computes the time of a collective on a topology, and a lower bound on all schedules.

Rounds run one after another. A message starts alpha (the sum along its path) after its round
begins; messages that leave a device by the same link are issued one after another, alpha apart.
Then its bytes flow, all messages of the round sharing the links (`finish_times`). Received bytes
that are added take gamma per byte more.

    round = start + max over messages (issue + alpha + bytes / fair rate)
            + max over ranks gamma * bytes
    time  = call + sum of the rounds

The topology states the cost of a call and of the start of a round (`call_s`, `round_s`).

The barrier between rounds makes this an upper bound for schedules whose ranks could run ahead.

Transfers are modelled as fluid flows. A flow uses its rate on every link of its path. Rates are
max-min fair: no flow can go faster without slowing down another flow that is at most as fast. They
change only when a flow starts or ends, so the simulation steps from one such event to the next.

A schedule is prepared for a topology so that timing it for one more size is cheap. Rounds between
the same devices with the same counts of blocks form one pattern, which is analysed once. If
messages that share links start together, their times are linear in the size; only the other
messages need an event simulation for each size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ascend_lab.cluster.schedule import Floats, Ints, Mask, Round, Schedule
from ascend_lab.cluster.topology import Path, Topology
from ascend_lab.errors import ClusterError

Places = tuple[int, ...]
"""The device of every rank."""
MAX_MESSAGES = 2**17
MAX_USES = 2**23
"""Largest number of messages in a round, and of links in all patterns, to be timed in minutes."""
BUS_FACTOR = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
"""(Bytes over the busiest link / size) * p / (p - 1), as nccl-tests defines it."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """The time of a collective: total seconds, seconds of each round, and a lower bound.

    The total includes the time before the first round. No schedule is quicker than the bound.
    """

    op: str
    algorithm: str
    ranks: int
    size_bytes: float
    time_s: float
    rounds_s: tuple[float, ...]
    lower_bound_s: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes / seconds, or 0 if the collective takes no time."""
        return self.size_bytes / self.time_s if self.time_s else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second on the busiest link of an ideal schedule."""
        # 100 MB all-reduced by 8 ranks in 1 ms: 100 GB/s * 2 * 7/8 = 175 GB/s on the wire.
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

    `placement[r]` is the device of rank r (default r). If there is nothing to move, the time is 0.
    Raises `ClusterError` for negative sizes, wrong placements, and devices without a path between
    them.
    """
    places = placed(schedule.ranks, topology, placement)
    return timed(schedule.op, _prepared(schedule, topology, places), size_bytes, schedule.root)


def placed(ranks: int, topology: Topology, placement: Sequence[int] | None = None) -> Places:
    """Return the device of every rank; raise `ClusterError` unless they are distinct devices."""
    places = tuple(range(ranks)) if placement is None else tuple(map(int, placement))
    fits = len(places) == ranks == len(set(places)) and min(places) >= 0
    if not fits or max(places) >= topology.size:
        needed = f"{topology.name}: {ranks} different devices of {topology.size}"
        raise ClusterError(needed, str(list(places))[:60], "use a larger topology or fewer ranks")
    return places


# -- fluid flows -----------------------------------------------------------------------------------
EPSILON = 1e-9
"""Rates and times whose relative difference is smaller count as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Which flow uses which resource: two arrays of one length, and how many flows."""

    flow: Ints
    resource: Ints
    count: int

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> "Uses":
        """Return the uses of flows, given for each flow the resources on its path."""
        lengths = np.array([len(path) for path in paths], np.intp)
        flat = np.array([r for path in paths for r in path], np.intp)
        return Uses(np.repeat(np.arange(len(paths)), lengths), flat, len(paths))

    def only(self, selected: Mask) -> "Uses":
        """Return the uses of the `selected` flows only, numbered anew in order."""
        new_number = np.cumsum(selected) - 1
        rows = selected[self.flow]
        return Uses(new_number[self.flow[rows]], self.resource[rows], int(selected.sum()))

    def components(self) -> Ints:
        """Return for every flow the lowest number of a flow in its connected component.

        Two flows are connected if they share a resource, directly or through other flows.
        """
        # Flows by links (0), (0, 1), (1), (2): flow 2 shares nothing with flow 0, but both share
        # with flow 1, so the labels are 0, 0, 0, 3.
        label = np.arange(self.count)
        least_label = np.full(int(self.resource.max(initial=0)) + 1, self.count)
        while True:
            np.minimum.at(least_label, self.resource, label[self.flow])
            relabelled = label.copy()
            np.minimum.at(relabelled, self.flow, least_label[self.resource])
            # Follow each label to its own label, which halves the distance to the least one.
            relabelled = relabelled[relabelled]
            if (relabelled == label).all():
                return label
            label = relabelled


def fair_rates(uses: Uses, capacity: Floats, active: Mask | None = None) -> Floats:
    """Return max-min fair rates of the active flows (others 0) by progressive filling.

    The resource with the least capacity per flow fills first and fixes the rate of its flows. The
    capacity that remains on the other resources is shared in the same way. Flows that use nothing,
    or only resources without limit, are infinitely fast.
    """
    rate = np.zeros(uses.count)
    open_flow = np.ones(uses.count, bool) if active is None else active.copy()
    spare = np.array(capacity, float)
    finite = np.isfinite(spare)
    while open_flow.any():
        live = open_flow[uses.flow]
        load = np.bincount(uses.resource[live], minlength=len(spare))
        busy = (load > 0) & finite
        if not busy.any():
            rate[open_flow] = math.inf
            break
        # Three flows share a link of 10 GB/s and one of them also crosses a link of 2 GB/s: that
        # flow is fixed at 2, and the other two get (10 - 2) / 2 = 4 GB/s each.
        share = np.where(busy, np.maximum(spare, 0.0) / np.maximum(load, 1), math.inf)
        least_share = share.min()
        tight = share <= least_share * (1 + EPSILON)
        fixed = np.zeros(uses.count, bool)
        fixed[uses.flow[live & tight[uses.resource]]] = True
        rate[fixed] = least_share
        open_flow &= ~fixed
        spare -= least_share * np.bincount(uses.resource[fixed[uses.flow]], minlength=len(spare))
    return rate


def finish_times(starts_s: Floats, sizes: Floats, uses: Uses, capacity: Floats) -> Floats:
    """Return the end time of each flow, which starts at `starts_s` and carries `sizes` bytes.

    A flow of size 0 ends when it starts; a flow on a resource of capacity 0 never ends (infinity).
    """
    # A link of 10 bytes/s and two flows of 10 bytes that start at 0 s and 1 s end at 1 s and 2 s:
    # the first flow is over when the second begins.
    ends = np.array(starts_s, float)
    remaining = np.array(sizes, float)
    waiting = remaining > 0
    now = 0.0
    running = np.zeros(uses.count, bool)
    while waiting.any() or running.any():
        if not running.any():
            now = max(now, float(starts_s[waiting].min()))
        begin = waiting & (starts_s <= now * (1 + EPSILON))
        running |= begin
        waiting &= ~begin
        rate = fair_rates(uses, capacity, running)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(running, remaining / rate, math.inf)
        need[running & np.isinf(rate)] = 0.0
        coming = float(starts_s[waiting].min()) - now if waiting.any() else math.inf
        # Rates are constant until a flow ends or the next one starts, whichever comes first.
        step = min(float(need.min()), coming)
        if math.isinf(step):
            ends[running] = math.inf
            break
        over = running & (need <= step * (1 + EPSILON))
        with np.errstate(invalid="ignore"):
            remaining = np.where(running & ~over, remaining - rate * step, remaining)
        now += step
        ends[over] = now
        running &= ~over
    return ends


# -- prepared for many sizes ----------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Pattern:
    """Messages between devices: the blocks in each (`counts`), their links, and their start times.

    `rates` are the links' bytes per second; `added` is the largest number of blocks a rank adds.
    """

    counts: Floats
    uses: Uses
    starts_s: Floats
    rates: Floats
    added: float

    @cached_property
    def slopes_s(self) -> Floats:
        """Seconds per byte of a block for every message, if all messages started together."""
        return finish_times(np.zeros(len(self.starts_s)), self.counts, self.uses, self.rates)

    @cached_property
    def nonlinear(self) -> tuple[Ints, Uses]:
        """The messages whose time is not linear in the size, and their links.

        They share links, directly or through other messages, with messages that start at another
        time.
        """
        label = self.uses.components()
        first_start = np.full(self.uses.count, np.inf)
        last_start = np.full(self.uses.count, -np.inf)
        np.minimum.at(first_start, label, self.starts_s)
        np.maximum.at(last_start, label, self.starts_s)
        nonlinear = (last_start > first_start)[label]
        return np.flatnonzero(nonlinear), self.uses.only(nonlinear)

    def ends_s(self, block_bytes: float) -> Floats:
        """Return the arrival time of each message, in seconds from the start of the round."""
        ends: Floats = self.starts_s + self.slopes_s * block_bytes
        nonlinear, uses = self.nonlinear
        # The time is linear in the size if all flows that share links start together. The others
        # are simulated for this size: which of them overlap depends on how long each takes.
        if len(nonlinear):
            starts = self.starts_s[nonlinear]
            sizes = self.counts[nonlinear] * block_bytes
            ends[nonlinear] = finish_times(starts, sizes, uses, self.rates)
        return ends

    def floor(self, topology: Topology) -> tuple[float, float, float]:
        """Return (last start, first start, seconds per block byte of the busiest link).

        The round takes at least max(last, first + busiest * block bytes).
        """
        if not len(self.starts_s):
            return 0.0, 0.0, 0.0
        # Fair sharing cannot beat the busiest link: 3 blocks over 10 GB/s need 3 * block bytes / 10
        # GB/s even if the link never idles.
        load = np.bincount(self.uses.resource, self.counts[self.uses.flow], len(topology.links))
        busiest = float((load / topology.rate_bytes_per_s).max(initial=0.0))
        return float(self.starts_s.max()), float(self.starts_s.min()), busiest

    def time_s(self, block_bytes: float, topology: Topology) -> float:
        """Return the seconds of the round: the slowest message, then the additions of a rank."""
        adding_s = self.added * block_bytes * topology.gamma_s_per_byte
        return float(self.ends_s(block_bytes).max(initial=0.0)) + adding_s


def pattern_of(step: Round, topology: Topology, places: Places) -> Pattern:
    """Return the pattern of a round whose rank r is device `places[r]`."""
    paths, starts = routed(step, topology, places)
    uses = Uses.of(paths)
    counts = step.counts.astype(np.float64)
    # In a star reduction of 4 ranks the root adds 3 blocks while the others add none: added = 3.
    received = np.bincount(step.targets[step.reduces].astype(np.intp), counts[step.reduces])
    rates = topology.rate_bytes_per_s
    added = float(received.max(initial=0.0))
    return Pattern(counts, uses, starts, rates, added)


def routed(step: Round, topology: Topology, places: Places) -> tuple[list[Path], Floats]:
    """Return the links of every message and the time at which its first byte flows.

    Messages that leave by the same link are issued one after another, alpha apart.
    """
    endpoints = zip(step.sources.tolist(), step.targets.tolist(), strict=True)
    paths = [topology.route(places[a], places[b]) for a, b in endpoints]
    delay = {path: float(sum(topology.alpha_s[i] for i in path)) for path in set(paths)}
    issued: dict[int, float] = {}
    starts = np.zeros(len(paths))
    for i, path in enumerate(paths):
        # With an alpha of 1 us, two messages by one link start at 1 us and at 2 us.
        issued[path[0]] = issued.get(path[0], 0.0) + delay[path]
        starts[i] = issued[path[0]]
    return paths, starts


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A schedule prepared for a topology: its patterns, and the pattern of each round.

    `floors` is an array (rounds, 4): each pattern's `floor`, and the most blocks a rank adds.
    """

    algorithm: str
    topology: Topology
    places: Places
    patterns: tuple[Pattern, ...]
    rounds: Ints
    parts: int
    floors: Floats

    def floor_s(self, size_bytes: float) -> float:
        """Return a lower bound on the seconds of this schedule, without an event simulation."""
        block_bytes = size_bytes / self.parts
        last_start, first_start, busiest, added = self.floors.T
        adding = added * self.topology.gamma_s_per_byte * block_bytes
        rounds_s = (
            np.maximum(last_start, first_start + busiest * block_bytes)
            + adding
            + self.topology.round_s
        )
        return self.topology.call_s + float(rounds_s.sum())

    def time_s(self, size_bytes: float) -> float:
        """Return the seconds of the call and all rounds."""
        if not size_bytes:
            return 0.0
        return self.topology.call_s + float(self.rounds_s(size_bytes).sum())

    def rounds_s(self, size_bytes: float) -> Floats:
        """Return the seconds of every round."""
        block_bytes = size_bytes / self.parts
        times = np.array([p.time_s(block_bytes, self.topology) for p in self.patterns])
        return np.asarray(times[self.rounds] + self.topology.round_s)


def prepare(schedule: Schedule, topology: Topology, places: Places) -> Prepared:
    """Return the schedule prepared for timing; raise `ClusterError` if it is too large for it."""
    pattern_numbers: dict[tuple[bytes, ...], int] = {}
    patterns: list[Pattern] = []
    pattern_of_round = np.zeros(len(schedule.rounds), np.int64)
    uses = 0
    for number, step in enumerate(schedule.rounds):
        # A ring all-reduce of 4 ranks has 6 rounds but two patterns: 3 rounds that add, 3 that do
        # not.
        key = tuple(a.tobytes() for a in (step.sources, step.targets, step.counts, step.reduces))
        pattern_of_round[number] = pattern_numbers.setdefault(key, len(patterns))
        if pattern_of_round[number] == len(patterns):
            if len(step.sources) > MAX_MESSAGES or uses > MAX_USES:
                needed = f"{MAX_MESSAGES} messages a round and {MAX_USES} hops in all at most"
                got = f"{len(step.sources)} and {uses}"
                raise ClusterError(
                    needed, got, "take fewer ranks, or an algorithm of fewer messages"
                )
            patterns.append(pattern_of(step, topology, places))
            uses += len(patterns[-1].uses.flow)
    rows = [(*pattern.floor(topology), pattern.added) for pattern in patterns]
    floors = np.array(rows).reshape(-1, 4)
    return Prepared(
        algorithm=schedule.algorithm,
        topology=topology,
        places=places,
        patterns=tuple(patterns),
        rounds=pattern_of_round,
        parts=schedule.parts,
        floors=floors[pattern_of_round],
    )


_prepared = lru_cache(maxsize=16)(prepare)
"""The schedules that were timed last, cached: timing another size is then quick."""


def timed(op: str, ready: Prepared, size_bytes: float, root: int = 0) -> CollectiveTime:
    """Return a prepared schedule's time and lower bound; raise `ClusterError` for a wrong size."""
    if not (math.isfinite(size_bytes) and size_bytes >= 0):
        raise ClusterError("a size of at least 0 bytes", str(size_bytes), "correct it")
    name = ready.algorithm
    ranks = len(ready.places)
    if size_bytes == 0 or ranks == 1:
        return CollectiveTime(op, name, ranks, size_bytes, 0.0, (), 0.0)
    rounds = tuple(ready.rounds_s(size_bytes).tolist())
    slope, latency_s = _bounds(op, ready.topology, ready.places, root)
    bound = float(max(slope * size_bytes, latency_s))
    time_s = ready.topology.call_s + sum(rounds)
    return CollectiveTime(op, name, ranks, size_bytes, time_s, rounds, bound)


# -- bounds ---------------------------------------------------------------------------------------
@lru_cache(maxsize=512)
def _bounds(op: str, topology: Topology, places: Places, root: int) -> tuple[float, float]:
    """Return lower bounds for all schedules: seconds per byte, and seconds of latency.

    The bandwidth bound counts the bytes that each rank, and each server, must send and receive. An
    all_reduce must send 2 (m - 1) n bytes over the links of all m ranks (Patarasuk and Yuan 2009).
    The latency bound: with d links out of a device, k alphas inform at most (1 + d)^k ranks; in a
    reduction all may send at once.
    """
    used = set(places)
    servers = [group for group in topology.groups if used.intersection(group)]
    bounds = [0.0]
    for parts in ([(device,) for device in places], servers):
        if len(parts) > 1:
            ranks_held = np.array([len(used.intersection(devices)) for devices in parts])
            has_root = np.array([places[root] in devices for devices in parts], float)
            out, into = _cuts(topology, parts)
            bounds.append(
                _parts_s_per_byte(op, ranks_held / len(places), len(places), has_root, out, into)
            )
    ports = max(len(topology.leaving[device]) for device in places)
    if not ports:
        return max(bounds), math.inf
    # star:8, one port per device: after 3 alphas of 5 us 2^3 = 8 ranks can know, so the bound is 15
    # us.
    steps = 1 if op == "reduce" else math.ceil(math.log(len(places), 1 + ports) - 1e-9)
    return max(bounds), steps * _least_alpha_s(topology)


def _parts_s_per_byte(
    op: str, share: Floats, ranks: int, has_root: Floats, out: Floats, into: Floats
) -> float:
    """Return seconds per byte if each part of the devices has this `share` of the ranks.

    `has_root` is 1 for the part that holds the root, else 0; `out`, `into` are the parts' rates.
    """
    full_tensor = np.ones(len(share))
    # 2 of 8 ranks on a server each send 6/8 of their tensor out of it: 8 * 1/4 * 3/4 = 1.5.
    crossing = ranks * share * (1 - share)
    sends, receives = {
        "reduce_scatter": (1 - share, share),
        "all_gather": (share, 1 - share),
        "all_to_all": (crossing, crossing),
        "broadcast": (has_root, 1.0 - has_root),
        "reduce": (1.0 - has_root, has_root),
    }.get(op, (full_tensor, full_tensor))
    pairs = [(sends, out), (receives, into)]
    if op == "all_reduce":
        pairs.append((np.array([2.0 * (len(share) - 1)]), np.array([float(out.sum())])))
    with np.errstate(divide="ignore", invalid="ignore"):
        return max(float(np.nanmax(size / rate)) for size, rate in pairs)


def _cuts(topology: Topology, parts: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
    """Return the rates, in bytes per second, out of and into each part of the devices.

    Links count with their rated rate, because the bound must hold even if more of it is achieved
    than is known. A switch belongs to a part if all devices at it do.
    """
    part_of_node = np.full(topology.size + len(topology.switches), -1)
    for number, devices in enumerate(parts):
        part_of_node[list(devices)] = number
    links = np.fromiter(topology.between.values(), np.int64)
    nodes = np.array(list(topology.between), np.int64).reshape(-1, 2)
    least_part = np.full(len(part_of_node), len(parts))
    greatest_part = np.full(len(part_of_node), -1)
    # 910a-roce:16 has 8 ports of 12.5 GB/s a server: 100 GB/s leave each. Links inside a server,
    # and links to hosts that serve only this server, do not count.
    for device, switch in (nodes.T, nodes.T[::-1]):
        joins = (device < topology.size) & (switch >= topology.size)
        np.minimum.at(least_part, switch[joins], part_of_node[device[joins]])
        np.maximum.at(greatest_part, switch[joins], part_of_node[device[joins]])
    part_of_node = np.where(
        (least_part == greatest_part) & (greatest_part >= 0), greatest_part, part_of_node
    )
    rates = np.zeros((2, len(parts)))
    sides = part_of_node[nodes].T
    for row, side in zip(rates, sides, strict=True):
        counts = (sides[0] != sides[1]) & (side >= 0)
        np.add.at(row, side[counts], topology.rated_bytes_per_s[links[counts]])
    return rates[0], rates[1]


def _least_alpha_s(topology: Topology) -> float:
    """Return a lower bound on the latency of a message between two devices."""
    least_alpha = {(True, True): math.inf, (True, False): math.inf, (False, True): math.inf}
    # A way from device to device is one direct link or at least a link up and a link down: in a
    # star with 2.5 us a link no message is faster than 5 us.
    for link in topology.links:
        ends = link.source < topology.size, link.target < topology.size
        least_alpha[ends] = min(least_alpha.get(ends, math.inf), link.alpha_s)
    return min(least_alpha[True, True], least_alpha[True, False] + least_alpha[False, True])
