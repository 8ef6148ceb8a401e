"""Clusters: topologies, collectives that move real arrays, and how long they take.

Begin with these:

- `load_topology`: a cluster by name, such as "910a-roce:64", or from a TOML file.
- `Topology`, `ring`, `star`, `full_mesh`: one of your own.
- `collective_time`: the quickest algorithm of a collective there, and its time.
- `compare`: all algorithms that apply, the quickest first.
- `make`: the schedule of one algorithm; `execute` moves arrays by it, `time_collective` times it.
- `fit_collective`: latency and rate of links from measured times.

What was prepared for a topology is remembered, so that the next size costs microseconds to
milliseconds. Gradients go together in buckets: here are the rule that closes them, and what
sending costs. Training graphs are in `train`, parallel plans in `parallel`.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
"""Bytes to seconds."""
Segments = tuple[tuple[int, int], ...]
"""(first, last) gradient of each bucket, both included, counted from 0 in backward order."""
BUCKET_BYTES = 25 * 2**20
FIRST_BYTES = 2**20
"""Sizes of PyTorch's DistributedDataParallel: 25 MiB, the first 1 MiB ({cite}`ddp2020`)."""
SMALLEST_BYTES = 1024.0
STEP = 4.0


def checked(segments: Sequence[Sequence[int]], count: int) -> Segments:
    """Return the segments; raise `InputError` unless they cover 0 .. count - 1 in order."""
    bounds = tuple((int(a), int(b)) for a, b in segments)
    # For 5 gradients ((0, 1), (2, 4)) is valid; ((0, 1), (3, 4)) misses gradient 2.
    flat = [i for a, b in bounds for i in range(a, b + 1)]
    if flat != list(range(count)) or any(a > b for a, b in bounds):
        needed = f"segments (first, last) that are gradients 0 to {count - 1} in order"
        raise InputError(needed, str(bounds)[:80], "leave no gap")
    return bounds


def closed(
    sums_bytes: Sequence[float],
    limit_bytes: float = BUCKET_BYTES,
    first_bytes: float = FIRST_BYTES,
) -> Segments:
    """Return the buckets of gradients whose bytes add up to these sums, 0 in front.

    One is closed when it holds `limit_bytes`, the first when it holds `first_bytes`.
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
    """A cost known at 1 KiB times powers of 4, straight between them; found when first needed.

    Exact where the cost is alpha + n beta between neighbours; the time of an algorithm chosen anew
    at every size is overstated between, by less than the algorithms differ.
    """

    exact: Cost
    known: dict[int, float] = field(default_factory=dict)

    def __call__(self, size_bytes: float) -> float:
        """Return the seconds; 0 for nothing."""
        if size_bytes <= 0:
            return 0.0
        # 6 KiB is between 4 KiB (k = 1) and 16 KiB (k = 2), a sixth of the way.
        place = math.log(size_bytes / SMALLEST_BYTES, STEP)
        low = max(0, math.floor(place))
        below_bytes, above_bytes = (SMALLEST_BYTES * STEP**k for k in (low, low + 1))
        start = self._at(low)
        end = self._at(low + 1)
        return max(
            0.0, start + (end - start) * (size_bytes - below_bytes) / (above_bytes - below_bytes)
        )

    def _at(self, k: int) -> float:
        if k not in self.known:
            self.known[k] = self.exact(SMALLEST_BYTES * STEP**k)
        return self.known[k]


# -- a collective by name -------------------------------------------------------------------------
Groups = Sequence[Sequence[int]]
MOST_STEPS = 2**17
"""Chunks times rounds at most: more would take minutes to lay out."""


def make(
    op: str,
    algorithm: str,
    ranks: int | Topology,
    *,
    root: int = 0,
    chunks: int = 1,
    groups: Groups | None = None,
) -> Schedule:
    """Return the schedule of a collective for `ranks` ranks, or one rank for each device.

    `chunks` cuts the tensor: stages of a hierarchical collective and hops of a chain overlap, other
    algorithms run chunk after chunk (staging buffers of size / chunks). `groups` are the ranks of
    each server, needed by the algorithms in `LEVELS`; default: the topology's, or one server. A
    name with "(4" takes every four ranks of a server, in order, for a server. "(mesh,nhr)" after
    the name gives the algorithms inside and between servers (default: mesh or tree inside;
    halving-doubling between if there are 2^k servers, else ring, as HCCL does on the 910).
    Raises `ClusterError` for what does not exist.
    """
    op = op_name(op)
    parsed = parse_name(op, algorithm)
    if isinstance(ranks, Topology):
        groups = ranks.groups if groups is None else groups
        ranks = ranks.size
    chunks = chunks if parsed.chunks is None else parsed.chunks
    if ranks < 1 or chunks < 1 or not 0 <= root < ranks:
        got = f"{ranks} ranks, {chunks} chunks, root {root}"
        raise ClusterError("ranks and chunks of at least 1, a root among the ranks", got, "count")
    label = parsed.algorithm
    if label in LEVELS:
        servers = _servers(ranks, groups, parsed.split)
        levels = _levels(op, label, servers, parsed.inside, parsed.between)
        blocks, stages = in_two(op, label, servers, root, *levels)
        parts = [str(parsed.split or ""), ",".join(filter(None, levels))]
        label += f"({':'.join(filter(None, parts))})" if any(parts) else ""
    else:
        blocks, stages = flat(op, label, ranks, root)
    rounds = tuple(step for stage in stages for step in stage)
    if chunks > 1:
        if chunks * len(rounds) > MOST_STEPS:
            needed = f"{label}: at most {MOST_STEPS // max(len(rounds), 1)} chunks on {ranks} ranks"
            raise ClusterError(needed, str(chunks), "take fewer")
        # A chunk of a chain may follow one round later, because each round uses another link.
        # Stages of a hierarchical all-reduce of 2 servers of 4 ranks have 1, 2 and 1 rounds: the
        # lag is 2, and two chunks take 4 + 2 rounds.
        lag = 1 if parsed.algorithm == "chain" else max(map(len, stages), default=0)
        rounds = chunked(rounds, chunks, lag)
        label = f"{label}*{chunks}"
    return Schedule(op, label, ranks, blocks * chunks, rounds, root)


def _servers(ranks: int, groups: Groups | None, split: int | None) -> Ints:
    """Return (servers, ranks a server); raise `ClusterError` unless they are of one size."""
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
    """Return the algorithms of both levels, checked; two empty names where there are none."""
    if name == "pipeline" or op == "all_to_all":
        if inside or between:
            needed = f"{op} by {name} without names of levels"
            raise ClusterError(needed, f"{inside}, {between}", "leave them out")
        return "", ""
    rooted = op in ("broadcast", "reduce")
    # x & (x - 1) is 0 for powers of two only: 8 & 7 = 0, but 6 & 5 = 4.
    usual = "ring" if len(servers) & (len(servers) - 1) else "halving-doubling"
    inside = inside or ("tree" if rooted else "mesh")
    between = between or ("tree" if rooted else usual)
    flat_names = CASTS if rooted else tuple(GATHERS)
    wider = (*flat_names, "recursive-doubling") if op == "all_reduce" else flat_names
    inside, between = (ALIASES.get(x, x).replace("_", "-") for x in (inside, between))
    if inside not in flat_names or between not in wider:
        raise ClusterError(
            f"levels by {', '.join(flat_names)}", f"{inside}, {between}", "choose these"
        )
    return inside, between


# -- the algorithm ---------------------------------------------------------------------------------
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
    for candidate in candidates:
        named.setdefault(parse_name(op, candidate.algorithm)[0], []).append(candidate)
    best = (_quickest(named[name], size_bytes) for name in sorted(named))
    return tuple(sorted((timed(op, b, size_bytes, root) for b in best), key=lambda t: t.time_s))


def servers_of(topology: Topology, places: Sequence[int]) -> Rows:
    """Return the ranks of each server: which ranks have their device there."""
    # Ranks on devices 0, 8, 1, 9 of a 910a-roce:16: server 0 has ranks 0 and 2, server 1 ranks 1,
    # 3.
    rank_of = {device: rank for rank, device in enumerate(places)}
    rows = (tuple(rank_of[d] for d in group if d in rank_of) for group in topology.groups)
    return tuple(row for row in rows if row)


def islands(topology: Topology, places: Places, servers: Rows) -> int | None:
    """Return k if every k ranks of a server, in order, are linked directly and others are not."""
    linked = topology.between
    # A 910a-server has direct links among NPUs 0-3 and among 4-7 only, so k = 4; in a 910b-server
    # all 8 are linked directly, no smaller k fits, and the answer is None.
    for island_ranks in range(2, min(max(map(len, servers)), CROWD + 1)):
        pieces = [
            row[i : i + island_ranks] for row in servers for i in range(0, len(row), island_ranks)
        ]
        of = {places[rank]: n for n, piece in enumerate(pieces) for rank in piece}
        if {len(piece) for piece in pieces} == {island_ranks} and all(
            ((a, b) in linked) == (of[a] == of[b])
            for row in ([places[rank] for rank in server] for server in servers)
            for a in row
            for b in row
            if a != b
        ):
            return island_ranks
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
    insides = ["ring", "halving-doubling"]
    betweens = ["halving-doubling", "nhr", "ring"]
    if op in ("broadcast", "reduce"):
        insides = ["tree", "nhr"]
        betweens = ["tree", "nhr"][: len(servers) if not split else 2]
    if (split or len(servers[0])) <= CROWD:
        insides = ["mesh", *insides][: 2 if big else 3]
    # With split 4: "hierarchical(4:mesh,ring)" and, in four chunks, "hierarchical(4:mesh,ring)*4".
    prefix = f"{split}:" if split else ""
    overlaps = (1,) if big else OVERLAPS
    return tuple(
        f"{name}({prefix}{inside},{between})" + (f"*{chunks}" if chunks > 1 else "")
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
    if not 0 <= size_bytes < math.inf:
        raise ClusterError("a size of at least 0 bytes", str(size_bytes), "correct it")
    # Branch and bound: a floor costs a few array operations, the exact time may need a simulation.
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
    op = op_name(op)
    ranks = topology.size if placement is None else len(placement)
    places = placed(ranks, topology, placement)
    return op, _candidates(op, topology, algorithm, places, root)


@lru_cache(maxsize=1024)
def _candidates(
    op: str, topology: Topology, algorithm: str, places: Places, root: int
) -> tuple[Prepared, ...]:
    """Return what to try; where no path joins two devices, only what can do without."""
    servers = servers_of(topology, places)
    candidates = []
    previous = None
    for name in _names(op, topology, algorithm, places, servers):
        try:
            schedule = make(op, name, len(places), root=root, groups=servers)
            candidates.append(prepare(schedule, topology, places))
        except ClusterError as error:
            previous = error
    if not candidates:
        assert previous is not None
        raise previous
    return tuple(candidates)


def _names(
    op: str, topology: Topology, algorithm: str, places: Places, servers: Rows
) -> tuple[str, ...]:
    """Return the full names of what to try; a name that says more than the algorithm is one."""
    split = islands(topology, places, servers)

    def tried(name: str, asked: bool) -> tuple[str, ...]:
        levels = name in LEVELS
        is_flat = _applies(op, name, servers) or (asked and not (levels and split))
        parts = variants(op, name, servers, split) if levels and split else ()
        return (*(variants(op, name, servers) if is_flat else ()), *parts)

    if algorithm == "auto":
        return tuple(full_name for name in ALGORITHMS[op] for full_name in tried(name, asked=False))
    name, *details = parse_name(op, algorithm)
    return (algorithm,) if any(details) else tried(name, asked=True)
