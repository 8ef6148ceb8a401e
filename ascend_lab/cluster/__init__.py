"""Simulates clusters of NPUs: topologies, collective operations on real arrays, and their times.

Begin with these:

- `load_topology`: a cluster by name, such as "910a-roce:64", or from a TOML file.
- `Topology`, `ring`, `star`, `full_mesh`: build a topology of your own.
- `collective_time`: the quickest algorithm of a collective on a topology, and its time.
- `compare`: all algorithms that apply, the quickest first.
- `make`: the schedule of one algorithm; `execute` moves arrays by it, `time_collective` times it.
- `fit_collective`: latency and rate of links from measured times.

Schedules prepared for a topology are cached, so that timing them for another size takes
microseconds to milliseconds. Data-parallel training all-reduces gradients in buckets of about 25
MiB: `closed` forms the buckets. Training graphs are in `train`, parallel plans in `parallel`.

Four ranks add up their arrays along a ring; on a cluster of 16 devices 100 MB take milliseconds:

>>> import numpy as np
>>> from ascend_lab.cluster import collective_time, execute, load_topology, make
>>> schedule = make("all_reduce", "ring", 4)
>>> execute(schedule, [np.full(8, rank) for rank in range(4)])[0]
array([6, 6, 6, 6, 6, 6, 6, 6])
>>> best = collective_time("all_reduce", load_topology("910a-roce:16"), size_bytes=100e6)
>>> best.lower_bound_s <= best.time_s < 0.1
True
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations

import numpy as np

# fmt: off
# isort: off
from ascend_lab.cluster.algorithms import CASTS, GATHERS, chunked, flat, in_two
from ascend_lab.cluster.fit import fit_collective, held_out, mape, read_table
from ascend_lab.cluster.loader import TOPOLOGIES, load_topology
from ascend_lab.cluster.schedule import (
    ALGORITHMS, ALIASES, LEVELS, OPS, Ints, LinkCosts, Round, Schedule, closed_form_s, execute,
    merge_rounds, op_name, parse_name,
)
from ascend_lab.cluster.timing import (
    CollectiveTime, Places, Prepared, placed, prepare, time_collective, timed,
)
from ascend_lab.cluster.topology import Link, Topology, full_mesh, ring, star
from ascend_lab.errors import ClusterError, InputError
# fmt: on
# isort: on

__all__ = [
    "ALGORITHMS",
    "OPS",
    "TOPOLOGIES",
    "CollectiveTime",
    "Link",
    "LinkCosts",
    "Round",
    "Schedule",
    "Topology",
    "closed_form_s",
    "collective_time",
    "compare",
    "execute",
    "fit_collective",
    "full_mesh",
    "held_out",
    "load_topology",
    "make",
    "mape",
    "merge_rounds",
    "read_table",
    "ring",
    "star",
    "time_collective",
]

Cost = Callable[[float], float]
"""A function from bytes to seconds."""
Segments = tuple[tuple[int, int], ...]
"""(first, last) gradient of each bucket, both included, counted from 0 in backward order."""
BUCKET_BYTES = 25 * 2**20
FIRST_BYTES = 2**20
"""Sizes of PyTorch's DistributedDataParallel: 25 MiB, the first 1 MiB ({cite}`ddp2020`)."""
SMALLEST_BYTES = 1024.0
SIZE_FACTOR = 4.0
"""`Interpolated` computes costs at 1, 4, 16, ... KiB."""


def checked(segments: Sequence[Sequence[int]], count: int) -> Segments:
    """Return segments of gradients; raise `InputError` unless they cover 0 .. count - 1 in turn."""
    bounds = tuple((int(a), int(b)) for a, b in segments)
    # For 5 gradients ((0, 1), (2, 4)) is valid; ((0, 1), (3, 4)) misses gradient 2.
    covered = [i for a, b in bounds for i in range(a, b + 1)]
    if covered != list(range(count)) or any(a > b for a, b in bounds):
        needed = f"segments (first, last) that are gradients 0 to {count - 1} in order"
        raise InputError(needed, str(bounds)[:80], "leave no gap")
    return bounds


def closed(
    sums_bytes: Sequence[float],
    limit_bytes: float = BUCKET_BYTES,
    first_bytes: float = FIRST_BYTES,
) -> Segments:
    """Return the buckets of gradients, given the cumulative sums of their bytes, which start at 0.

    A bucket is closed once it holds `limit_bytes`, the first one once it holds `first_bytes`.
    """
    buckets: list[tuple[int, int]] = []
    start = 0
    limit = first_bytes
    count = len(sums_bytes) - 1
    while start < count:
        # Gradients of 10, 20 and 5 MiB, limit 25 MiB: the second closes the bucket, because
        # a gradient is never cut.
        end = bisect_left(sums_bytes, sums_bytes[start] + limit, start) - 1
        buckets.append((start, min(max(end, start), count - 1)))
        start = buckets[-1][1] + 1
        limit = limit_bytes
    return tuple(buckets)


@dataclass(frozen=True)
class Interpolated:
    """A cost as a function of bytes, interpolated linearly between 1, 4, 16, ... KiB.

    The costs at these sizes are computed when first needed. The interpolation is exact where the
    cost is alpha + n beta. If the quickest algorithm changes between two sizes, the result is too
    high, by less than the difference of the algorithms.
    """

    exact: Cost
    computed_s: dict[int, float] = field(default_factory=dict)

    def __call__(self, size_bytes: float) -> float:
        """Return the cost of a size in seconds; 0 for 0 bytes."""
        if size_bytes <= 0:
            return 0.0
        # 6 KiB is between 4 KiB (k = 1) and 16 KiB (k = 2), a sixth of the way.
        exponent = math.log(size_bytes / SMALLEST_BYTES, SIZE_FACTOR)
        low = max(0, math.floor(exponent))
        below_bytes, above_bytes = (SMALLEST_BYTES * SIZE_FACTOR**k for k in (low, low + 1))
        start = self._at(low)
        end = self._at(low + 1)
        return max(
            0.0, start + (end - start) * (size_bytes - below_bytes) / (above_bytes - below_bytes)
        )

    def _at(self, k: int) -> float:
        """Return the cost of 4^k KiB."""
        if k not in self.computed_s:
            self.computed_s[k] = self.exact(SMALLEST_BYTES * SIZE_FACTOR**k)
        return self.computed_s[k]


# -- a collective by name -------------------------------------------------------------------------
Groups = Sequence[Sequence[int]]
MAX_ROUNDS = 2**17
"""Largest product of rounds and chunks of a schedule: more would take minutes to build."""


def make(
    op: str,
    algorithm: str,
    ranks: int | Topology,
    *,
    root: int = 0,
    chunks: int = 1,
    groups: Groups | None = None,
) -> Schedule:
    """Return the schedule of a collective for `ranks` ranks, or for one rank on each device.

    The tensor is sent in `chunks` equal parts. The stages of a hierarchical collective and
    the hops of a chain then overlap; other algorithms run chunk after chunk. `groups` are the ranks
    of each server, for the algorithms in `LEVELS`; by default those of the topology, or one server.
    In "hierarchical(4:mesh,nhr)" every four ranks of a server count as a server of their own; mesh
    is used inside these groups and nhr between them. By default it is mesh or tree inside; between
    2^k servers it is halving-doubling, otherwise ring, as in HCCL on the 910. Raises `ClusterError`
    for unknown names and for counts that do not fit.
    """
    op = op_name(op)
    parsed = parse_name(op, algorithm)
    if isinstance(ranks, Topology):
        groups = ranks.groups if groups is None else groups
        rank_count = ranks.size
    else:
        rank_count = ranks
    chunks = chunks if parsed.chunks is None else parsed.chunks
    if rank_count < 1 or chunks < 1 or not 0 <= root < rank_count:
        got = f"{rank_count} ranks, {chunks} chunks, root {root}"
        raise ClusterError("ranks and chunks of at least 1, a root among the ranks", got, "count")
    label = parsed.algorithm
    if label in LEVELS:
        servers = _servers(rank_count, groups, parsed.split)
        levels = _levels(op, label, servers, parsed.inside, parsed.between)
        blocks, stages = in_two(op, label, servers, root, *levels)
        details = [str(parsed.split or ""), ",".join(filter(None, levels))]
        label += f"({':'.join(filter(None, details))})" if any(details) else ""
    else:
        blocks, stages = flat(op, label, rank_count, root)
    if chunks == 1:
        rounds = tuple(message_round for stage in stages for message_round in stage)
    else:
        rounds = _in_chunks(parsed.algorithm, label, rank_count, stages, chunks)
        label = f"{label}*{chunks}"
    return Schedule(op, label, rank_count, blocks * chunks, rounds, root)


def _in_chunks(
    algorithm: str, label: str, ranks: int, stages: Sequence[Sequence[Round]], chunks: int
) -> tuple[Round, ...]:
    """Return the rounds that send every block in chunks; raise `ClusterError` for too many."""
    rounds = tuple(message_round for stage in stages for message_round in stage)
    if chunks * len(rounds) > MAX_ROUNDS:
        needed = f"{label}: at most {MAX_ROUNDS // max(len(rounds), 1)} chunks on {ranks} ranks"
        raise ClusterError(needed, str(chunks), "take fewer")
    # A chunk of a chain may follow one round later, because each round uses another link. Stages of
    # a hierarchical all-reduce of 2 servers of 4 ranks have 1, 2 and 1 rounds: the lag is 2, and
    # two chunks take 4 + 2 rounds.
    lag = 1 if algorithm == "chain" else max(map(len, stages), default=0)
    return chunked(rounds, chunks, lag)


def _servers(ranks: int, groups: Groups | None, split: int | None) -> Ints:
    """Return the ranks of each server as an array; raise `ClusterError` if sizes differ."""
    rows = [list(range(ranks))] if groups is None else [list(map(int, row)) for row in groups]
    if split:
        # One server of ranks 0-7 with split 4 becomes two, ranks 0-3 and 4-7.
        rows = [row[i : i + split] for row in rows for i in range(0, len(row), split)]
    sizes = sorted({len(row) for row in rows})
    if sorted(r for row in rows for r in row) != list(range(ranks)) or len(sizes) != 1:
        needed = f"servers of one size that hold {ranks} ranks"
        raise ClusterError(needed, f"servers of {sizes} ranks", "use a flat algorithm")
    return np.array(rows, np.int64)


def _levels(
    op: str, name: str, servers: Ints, inside: str | None, between: str | None
) -> tuple[str, str]:
    """Return the algorithms inside and between servers, checked; "" and "" if the name has none."""
    if name == "pipeline" or op == "all_to_all":
        if inside or between:
            needed = f"{op} by {name} without names of levels"
            raise ClusterError(needed, f"{inside}, {between}", "leave them out")
        return "", ""
    is_rooted = op in ("broadcast", "reduce")
    # x & (x - 1) is 0 for powers of two only: 8 & 7 = 0, but 6 & 5 = 4.
    default_between = "ring" if len(servers) & (len(servers) - 1) else "halving-doubling"
    inside = inside or ("tree" if is_rooted else "mesh")
    between = between or ("tree" if is_rooted else default_between)
    flat_names = CASTS if is_rooted else tuple(GATHERS)
    between_names = (*flat_names, "recursive-doubling") if op == "all_reduce" else flat_names
    inside, between = (ALIASES.get(x, x).replace("_", "-") for x in (inside, between))
    if inside not in flat_names or between not in between_names:
        raise ClusterError(
            f"levels by {', '.join(flat_names)}", f"{inside}, {between}", "choose these"
        )
    return inside, between


# -- the algorithm ---------------------------------------------------------------------------------
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
