"""Which algorithm: time all that apply, take the quickest.

What was prepared for a topology stays with it, so that the next size costs microseconds to
milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.collectives import ALGORITHMS, LEVELS, make, op_name, parse_name
from ascend_lab.cluster.schedule import Schedule
from ascend_lab.cluster.timing import CollectiveTime, Plan, lower_bound_s, placed, plan_of
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
Rows = tuple[tuple[int, ...], ...]
Named = tuple[str, Plan]
"""A plan and the full name of its algorithm."""
CROWD = 32
"""From more ranks than these "auto" does not try mesh and star: p^2 messages at once."""
LONG = 256
"""With more ranks than these "auto" tries no chains, whose rounds are as many as ranks."""
CHUNKS = (1, 4, 16, 64)
"""Chunks "auto" tries for a chain."""
OVERLAPS = (1, 4)
"""Chunks "auto" tries for a hierarchical collective."""


def collective_time(
    op: str,
    topology: Topology,
    size_bytes: float,
    algorithm: str = "auto",
    placement: Sequence[int] | None = None,
    root: int = 0,
) -> CollectiveTime:
    """Time a collective of all devices, or of `placement`, by one algorithm or the quickest.

    `algorithm`: a name of `ALGORITHMS` (its quickest variant), a full name such as
    "hierarchical(mesh,nhr)*4", or "auto". Raises `ClusterError` where none can run.
    """
    op = op_name(op)
    places = _places(topology, placement)
    plans = _plans(op, topology, algorithm, places, root)
    return _timed(op, topology, size_bytes, plans, places, root)


def choose(
    op: str,
    topology: Topology,
    size_bytes: float,
    placement: Sequence[int] | None = None,
    root: int = 0,
) -> Schedule:
    """Return the schedule of the algorithm that takes least time at this size."""
    op = op_name(op)
    places = _places(topology, placement)
    name, _ = _quickest(_plans(op, topology, "auto", places, root), size_bytes)
    return make(op, name, len(places), root=root, groups=servers_of(topology, places))


def compare(
    op: str,
    topology: Topology,
    size_bytes: float,
    placement: Sequence[int] | None = None,
    root: int = 0,
) -> tuple[CollectiveTime, ...]:
    """Return the quickest variant of every algorithm that "auto" tries, quickest first."""
    op = op_name(op)
    places = _places(topology, placement)
    named: dict[str, list[Named]] = {}
    for full, plan in _plans(op, topology, "auto", places, root):
        named.setdefault(parse_name(op, full)[0], []).append((full, plan))
    times = (_timed(op, topology, size_bytes, named[n], places, root) for n in sorted(named))
    return tuple(sorted(times, key=lambda one: one.time_s))


def servers_of(topology: Topology, places: Ints) -> Rows:
    """Return the ranks of each server: which ranks have their device there."""
    rank_of = {int(device): rank for rank, device in enumerate(places)}
    rows = (tuple(rank_of[d] for d in group if d in rank_of) for group in topology.groups)
    return tuple(row for row in rows if row)


def islands(topology: Topology, places: Ints, servers: Rows) -> int | None:
    """Return k if every k ranks of a server, in order, are linked directly and others are not."""
    linked = topology.between
    for each in range(2, min(max(map(len, servers)), CROWD + 1)):
        pieces = [row[i : i + each] for row in servers for i in range(0, len(row), each)]
        sizes = {len(piece) for piece in pieces}
        of = {int(places[rank]): n for n, piece in enumerate(pieces) for rank in piece}
        if sizes == {each} and all(
            ((a, b) in linked) == (of[a] == of[b])
            for row in servers
            for a in (int(places[r]) for r in row)
            for b in (int(places[r]) for r in row)
            if a != b
        ):
            return each
    return None


def variants(op: str, name: str, servers: Rows, split: int | None = None) -> tuple[str, ...]:
    """Return the full names of an algorithm worth trying with these servers, or parts of them."""
    if name == "chain":
        return ("chain", *(f"chain*{c}" for c in CHUNKS if c > 1))
    if name not in LEVELS:
        return (name,)
    if op == "all_to_all" or name == "pipeline":
        return (f"{name}({split})" if split else name,)
    big = sum(map(len, servers)) > LONG
    insides, betweens = ["ring", "halving-doubling"], ["halving-doubling", "nhr", "ring"]
    if op in ("broadcast", "reduce"):
        insides, betweens = ["tree", "nhr"], ["tree", "nhr"][: len(servers) if not split else 2]
    if (split or len(servers[0])) <= CROWD:
        insides = ["mesh", *insides][: 2 if big else 3]
    part, overlaps = f"{split}:" if split else "", (1,) if big else OVERLAPS
    return tuple(
        f"{name}({part}{inside},{between})" + (f"*{chunks}" if chunks > 1 else "")
        for inside in insides
        for between in betweens
        for chunks in overlaps
    )


def _applies(op: str, name: str, servers: Rows) -> bool:
    """Tell whether "auto" tries an algorithm; hierarchical in one server where that has a root."""
    ranks = sum(map(len, servers))
    if name in LEVELS:
        alike = len({len(row) for row in servers}) == 1 < len(servers[0])
        return alike and (len(servers) > 1 or op in ("broadcast", "reduce"))
    if name in ("mesh", "star"):
        return ranks <= CROWD
    return name not in ("chain", "pairwise") or ranks <= LONG


def _places(topology: Topology, placement: Sequence[int] | None) -> Ints:
    ranks = topology.size if placement is None else len(placement)
    return placed(ranks, topology, placement)


def _timed(
    op: str,
    topology: Topology,
    size_bytes: float,
    plans: Sequence[Named],
    places: Ints,
    root: int,
) -> CollectiveTime:
    """Return the time of the quickest of the plans."""
    name, plan = _quickest(plans, size_bytes)
    if size_bytes == 0 or len(places) == 1:
        return CollectiveTime(op, name, len(places), size_bytes, 0.0, (), 0.0)
    rounds = tuple(plan.rounds_s(size_bytes).tolist())
    bound = lower_bound_s(op, topology, size_bytes, places, root)
    return CollectiveTime(op, name, len(places), size_bytes, sum(rounds), rounds, bound)


def _quickest(plans: Sequence[Named], size_bytes: float) -> Named:
    if not 0 <= size_bytes < float("inf"):
        raise ClusterError("a size of at least 0 bytes", str(size_bytes), "correct it")
    floors = [plan.floor_s(size_bytes) for _, plan in plans]
    best, best_s = 0, float("inf")
    for i in sorted(range(len(plans)), key=lambda i: (floors[i], i)):
        if floors[i] > best_s:
            break
        time_s = plans[i][1].time_s(size_bytes)
        if time_s < best_s or (time_s == best_s and i < best):
            best, best_s = i, time_s
    return plans[best]


def _plans(
    op: str, topology: Topology, algorithm: str, places: Ints, root: int
) -> tuple[Named, ...]:
    """Return the candidates, prepared when first asked for; the schedules are not kept."""
    kept = topology.__dict__.setdefault("_candidates", {})
    key = (op, algorithm, places.tobytes(), root)
    if key not in kept:
        kept[key] = _prepared(op, topology, _names(op, topology, algorithm, places), places, root)
    found: tuple[Named, ...] = kept[key]
    return found


def _names(op: str, topology: Topology, algorithm: str, places: Ints) -> tuple[str, ...]:
    """Return the full names of what to try; a name that says more than the algorithm is one."""
    servers = servers_of(topology, places)
    split = islands(topology, places, servers)

    def tried(name: str, asked: bool) -> tuple[str, ...]:
        levels = name in LEVELS
        whole = _applies(op, name, servers) or (asked and not (levels and split))
        parts = variants(op, name, servers, split) if levels and split else ()
        return (*(variants(op, name, servers) if whole else ()), *parts)

    if algorithm == "auto":
        return tuple(full for name in ALGORITHMS[op] for full in tried(name, asked=False))
    name, *details = parse_name(op, algorithm)
    return (algorithm,) if any(details) else tried(name, asked=True)


def _prepared(
    op: str, topology: Topology, names: tuple[str, ...], places: Ints, root: int
) -> tuple[Named, ...]:
    """Return plans by name; where no path joins two devices, only those that can do without."""
    servers, found, last = servers_of(topology, places), [], None
    for name in names:
        try:
            schedule = make(op, name, len(places), root=root, groups=servers)
            found.append((schedule.algorithm, plan_of(schedule, topology, places)))
        except ClusterError as error:
            last = error
    if not found:
        assert last is not None
        raise last
    return tuple(found)
