"""Finds the quickest algorithm of a collective on a topology, and its time.

An all-reduce of 16 devices can run as a ring, by halving and doubling, in levels, in chunks: each
has a lower bound, and only those are simulated whose bound is below the best time.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations

from ascend_lab.cluster.build import make
from ascend_lab.cluster.schedule import ALGORITHMS, LEVELS, op_name, parse_name
from ascend_lab.cluster.timing import CollectiveTime, Places, Prepared, placed, prepare, timed
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Rows = tuple[tuple[int, ...], ...]
"""The ranks on each server."""
MESH_RANKS = 32
"""With more ranks "auto" does not try mesh and star, which send p^2 messages at once."""
CHAIN_RANKS = 256
"""With more ranks "auto" tries no chains, which have as many rounds as ranks."""
CHAIN_CHUNKS = (4, 16, 64)
"""Numbers of chunks that "auto" tries for a chain, besides 1."""
HIERARCHICAL_CHUNKS = (1, 4)
"""Numbers of chunks that "auto" tries for a hierarchical collective."""


def collective_time(
    op: str,
    topology: Topology,
    size_bytes: float,
    algorithm: str = "auto",
    placement: Sequence[int] | None = None,
    root: int = 0,
) -> CollectiveTime:
    """Time a collective of all devices, or of those in `placement`, by one algorithm.

    `algorithm` is a name of `ALGORITHMS`, which stands for its quickest variant, a full name such
    as "hierarchical(mesh,nhr)*4", or "auto" for the quickest of all. Raises `ClusterError` if no
    algorithm can run.
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
    for candidate in candidates:
        named.setdefault(parse_name(op, candidate.algorithm)[0], []).append(candidate)
    best = (_quickest(named[name], size_bytes) for name in sorted(named))
    return tuple(sorted((timed(op, b, size_bytes, root) for b in best), key=lambda t: t.time_s))


def servers_of(topology: Topology, places: Sequence[int]) -> Rows:
    """Return the ranks on each server, given the device of each rank."""
    # Ranks on devices 0, 8, 1, 9 of a 910a-roce:16: server 0 has ranks 0 and 2, server 1 ranks 1,
    # 3.
    rank_of = {device: rank for rank, device in enumerate(places)}
    rows = (tuple(rank_of[d] for d in group if d in rank_of) for group in topology.groups)
    return tuple(row for row in rows if row)


def islands(topology: Topology, places: Places, servers: Rows) -> int | None:
    """Return k if two ranks of a server are linked directly only within the same k ranks.

    These are successive ranks, such as 0 .. k - 1. Without such a k the result is None.
    """
    direct_links = topology.between
    # A 910a-server has direct links among NPUs 0-3 and among 4-7 only, so k = 4; in a 910b-server
    # all 8 are linked directly, no smaller k fits, and the answer is None.
    for island_ranks in range(2, min(max(map(len, servers)), MESH_RANKS + 1)):
        candidates = []
        for row in servers:
            candidates += [row[i : i + island_ranks] for i in range(0, len(row), island_ranks)]
        if {len(island) for island in candidates} != {island_ranks}:
            continue
        island_of = {places[rank]: n for n, island in enumerate(candidates) for rank in island}
        device_pairs = _pairs_in_servers(servers, places)
        if all(((a, b) in direct_links) == (island_of[a] == island_of[b]) for a, b in device_pairs):
            return island_ranks
    return None


def _pairs_in_servers(servers: Rows, places: Places) -> Iterator[tuple[int, int]]:
    """Yield every ordered pair of devices of one server."""
    for server in servers:
        yield from permutations([places[rank] for rank in server], 2)


def variants(op: str, name: str, servers: Rows, split: int | None = None) -> tuple[str, ...]:
    """Return the full names of an algorithm that are worth trying with these servers.

    With `split`, groups of `split` ranks take the place of servers.
    """
    if name == "chain":
        return ("chain", *(f"chain*{c}" for c in CHAIN_CHUNKS))
    if name not in LEVELS:
        return (name,)
    if op == "all_to_all" or name == "pipeline":
        return (f"{name}({split})" if split else name,)
    is_large = sum(map(len, servers)) > CHAIN_RANKS
    insides = ["ring", "halving-doubling"]
    betweens = ["halving-doubling", "nhr", "ring"]
    if op in ("broadcast", "reduce"):
        insides = ["tree", "nhr"]
        betweens = ["tree", "nhr"][: len(servers) if not split else 2]
    if (split or len(servers[0])) <= MESH_RANKS:
        insides = ["mesh", *insides][: 2 if is_large else 3]
    # With split 4: "hierarchical(4:mesh,ring)" and, in four chunks, "hierarchical(4:mesh,ring)*4".
    prefix = f"{split}:" if split else ""
    chunk_counts = (1,) if is_large else HIERARCHICAL_CHUNKS
    return tuple(
        f"{name}({prefix}{inside},{between})" + (f"*{chunks}" if chunks > 1 else "")
        for inside in insides
        for between in betweens
        for chunks in chunk_counts
    )


def _applies(op: str, name: str, servers: Rows) -> bool:
    """Tell whether "auto" tries an algorithm with these servers.

    Algorithms in levels need servers of one size, and several of them unless the collective has a
    root.
    """
    ranks = sum(map(len, servers))
    if name in LEVELS:
        is_uniform = len({len(row) for row in servers}) == 1 < len(servers[0])
        return is_uniform and (len(servers) > 1 or op in ("broadcast", "reduce"))
    if name in ("mesh", "star"):
        return ranks <= MESH_RANKS
    return name not in ("chain", "pairwise") or ranks <= CHAIN_RANKS


def _quickest(candidates: Sequence[Prepared], size_bytes: float) -> Prepared:
    """Return the quickest candidate, or the first of several that are equally quick.

    Candidates are timed in the order of their lower bounds, until the bound of the next is above
    the best time.
    """
    if not 0 <= size_bytes < math.inf:
        raise ClusterError("a size of at least 0 bytes", str(size_bytes), "correct it")
    # Branch and bound: a lower bound costs a few array operations, the exact time may need a
    # simulation.
    floors = sorted((candidate.floor_s(size_bytes), i) for i, candidate in enumerate(candidates))
    best = 0
    best_s = math.inf
    for floor_s, i in floors:
        if floor_s > best_s:
            break
        best_s, best = min((best_s, best), (candidates[i].time_s(size_bytes), i))
    return candidates[best]


def _candidates_of(
    op: str, topology: Topology, algorithm: str, placement: Sequence[int] | None, root: int
) -> tuple[str, tuple[Prepared, ...]]:
    """Return the operation by its standard name, and the schedules to try."""
    op = op_name(op)
    ranks = topology.size if placement is None else len(placement)
    places = placed(ranks, topology, placement)
    return op, _candidates(op, topology, algorithm, places, root)


@lru_cache(maxsize=1024)
def _candidates(
    op: str, topology: Topology, algorithm: str, places: Places, root: int
) -> tuple[Prepared, ...]:
    """Return the schedules to try, prepared; those that need a missing link are left out."""
    servers = servers_of(topology, places)
    candidates = []
    last_error = None
    for name in _names(op, topology, algorithm, places, servers):
        try:
            schedule = make(op, name, len(places), root=root, groups=servers)
            candidates.append(prepare(schedule, topology, places))
        except ClusterError as error:
            last_error = error
    if not candidates:
        assert last_error is not None
        raise last_error
    return tuple(candidates)


def _names(
    op: str, topology: Topology, algorithm: str, places: Places, servers: Rows
) -> tuple[str, ...]:
    """Return the full names of the algorithms to try; a full name such as "chain*4" stays one."""
    split = islands(topology, places, servers)

    def full_names(name: str, is_requested: bool) -> tuple[str, ...]:
        has_levels = name in LEVELS
        by_server = _applies(op, name, servers) or (is_requested and not (has_levels and split))
        server_names = variants(op, name, servers) if by_server else ()
        split_names = variants(op, name, servers, split) if has_levels and split else ()
        return (*server_names, *split_names)

    if algorithm == "auto":
        return tuple(
            full for name in ALGORITHMS[op] for full in full_names(name, is_requested=False)
        )
    name, *details = parse_name(op, algorithm)
    return (algorithm,) if any(details) else full_names(name, is_requested=True)
