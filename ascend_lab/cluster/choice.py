"""Which algorithm: time all that apply, take the quickest.

What was prepared for a topology is remembered, so that the next size costs microseconds to
milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ascend_lab.cluster.collectives import ALGORITHMS, LEVELS, make, op_name, parse_name
from ascend_lab.cluster.timing import CollectiveTime, Places, Prepared, placed, prepare, timed
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Rows = tuple[tuple[int, ...], ...]
CROWD = 32
"""From more ranks than these "auto" does not try mesh and star: p^2 messages at once."""
LONG = 256
"""With more ranks than these "auto" tries no chains, whose rounds are as many as ranks."""
CHUNKS = (4, 16, 64)
"""Chunks "auto" tries for a chain, beside the whole."""
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
    op, candidates = _candidates_of(op, topology, algorithm, placement, root)
    return timed(op, _quickest(candidates, size_bytes), size_bytes, root)


def compare(
    op: str,
    topology: Topology,
    size_bytes: float,
    placement: Sequence[int] | None = None,
    root: int = 0,
) -> tuple[CollectiveTime, ...]:
    """Return the quickest variant of every algorithm that "auto" tries, quickest first."""
    op, candidates = _candidates_of(op, topology, "auto", placement, root)
    named: dict[str, list[Prepared]] = {}
    for one in candidates:
        named.setdefault(parse_name(op, one.algorithm)[0], []).append(one)
    best = (_quickest(named[name], size_bytes) for name in sorted(named))
    return tuple(sorted((timed(op, b, size_bytes, root) for b in best), key=lambda t: t.time_s))


def servers_of(topology: Topology, places: Sequence[int]) -> Rows:
    """Return the ranks of each server: which ranks have their device there."""
    rank_of = {device: rank for rank, device in enumerate(places)}
    rows = (tuple(rank_of[d] for d in group if d in rank_of) for group in topology.groups)
    return tuple(row for row in rows if row)


def islands(topology: Topology, places: Places, servers: Rows) -> int | None:
    """Return k if every k ranks of a server, in order, are linked directly and others are not."""
    linked = topology.between
    for each in range(2, min(max(map(len, servers)), CROWD + 1)):
        pieces = [row[i : i + each] for row in servers for i in range(0, len(row), each)]
        of = {places[rank]: n for n, piece in enumerate(pieces) for rank in piece}
        if {len(piece) for piece in pieces} == {each} and all(
            ((a, b) in linked) == (of[a] == of[b])
            for row in ([places[rank] for rank in server] for server in servers)
            for a in row
            for b in row
            if a != b
        ):
            return each
    return None


def variants(op: str, name: str, servers: Rows, split: int | None = None) -> tuple[str, ...]:
    """Return the full names of an algorithm worth trying with these servers, or parts of them."""
    if name == "chain":
        return ("chain", *(f"chain*{c}" for c in CHUNKS))
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


def _quickest(candidates: Sequence[Prepared], size_bytes: float) -> Prepared:
    """Return the quickest, the first of equals; by rising floors, while one may be quicker."""
    if not 0 <= size_bytes < float("inf"):
        raise ClusterError("a size of at least 0 bytes", str(size_bytes), "correct it")
    floors = sorted((one.floor_s(size_bytes), i) for i, one in enumerate(candidates))
    best, best_s = 0, float("inf")
    for floor_s, i in floors:
        if floor_s > best_s:
            break
        best_s, best = min((best_s, best), (candidates[i].time_s(size_bytes), i))
    return candidates[best]


def _candidates_of(
    op: str, topology: Topology, algorithm: str, placement: Sequence[int] | None, root: int
) -> tuple[str, tuple[Prepared, ...]]:
    op, ranks = op_name(op), topology.size if placement is None else len(placement)
    places = placed(ranks, topology, placement)
    return op, _candidates(op, topology, algorithm, places, root)


@lru_cache(maxsize=1024)
def _candidates(
    op: str, topology: Topology, algorithm: str, places: Places, root: int
) -> tuple[Prepared, ...]:
    """Return what to try; where no path joins two devices, only what can do without."""
    servers, found, last = servers_of(topology, places), [], None
    for name in _names(op, topology, algorithm, places):
        try:
            schedule = make(op, name, len(places), root=root, groups=servers)
            found.append(prepare(schedule, topology, places))
        except ClusterError as error:
            last = error
    if not found:
        assert last is not None
        raise last
    return tuple(found)


def _names(op: str, topology: Topology, algorithm: str, places: Places) -> tuple[str, ...]:
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
