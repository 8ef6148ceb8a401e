"""What is sent together, and by which algorithm: time all that apply, take the quickest.

What was prepared for a topology is remembered, so that the next size costs microseconds to
milliseconds.

Gradients go together in buckets: here are the rule that closes them, and what sending costs.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ascend_lab.cluster.collectives import ALGORITHMS, LEVELS, make, op_name, parse_name
from ascend_lab.cluster.timing import CollectiveTime, Places, Prepared, placed, prepare, timed
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError, InputError

Cost = Callable[[float], float]
"""Bytes to seconds."""
Segments = tuple[tuple[int, int], ...]
"""(first, last) gradient of each bucket, both included, counted from 0 in backward order."""
BUCKET_BYTES, FIRST_BYTES = 25 * 2**20, 2**20
"""Sizes of PyTorch's DistributedDataParallel: 25 MiB, the first 1 MiB ({cite}`ddp2020`)."""
SMALLEST_BYTES, STEP = 1024.0, 4.0


def checked(segments: Sequence[Sequence[int]], count: int) -> Segments:
    """Return the segments; raise `InputError` unless they cover 0 .. count - 1 in order."""
    found = tuple((int(a), int(b)) for a, b in segments)
    flat = [i for a, b in found for i in range(a, b + 1)]
    if flat != list(range(count)) or any(a > b for a, b in found):
        what = f"segments (first, last) that are gradients 0 to {count - 1} in order"
        raise InputError(what, str(found)[:80], "leave no gap")
    return found


def closed(
    sums_bytes: Sequence[float],
    limit_bytes: float = BUCKET_BYTES,
    first_bytes: float = FIRST_BYTES,
) -> Segments:
    """Return the buckets of gradients whose bytes add up to these sums, 0 in front.

    One is closed when it holds `limit_bytes`, the first when it holds `first_bytes`.
    """
    found: list[tuple[int, int]] = []
    start, limit, count = 0, first_bytes, len(sums_bytes) - 1
    while start < count:
        last = bisect_left(sums_bytes, sums_bytes[start] + limit, start) - 1
        found.append((start, min(max(last, start), count - 1)))
        start, limit = found[-1][1] + 1, limit_bytes
    return tuple(found)


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
        place = math.log(size_bytes / SMALLEST_BYTES, STEP)
        low = max(0, math.floor(place))
        least, most = (SMALLEST_BYTES * STEP**k for k in (low, low + 1))
        start, end = self._at(low), self._at(low + 1)
        return max(0.0, start + (end - start) * (size_bytes - least) / (most - least))

    def _at(self, k: int) -> float:
        if k not in self.known:
            self.known[k] = self.exact(SMALLEST_BYTES * STEP**k)
        return self.known[k]


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
    for name in _names(op, topology, algorithm, places, servers):
        try:
            schedule = make(op, name, len(places), root=root, groups=servers)
            found.append(prepare(schedule, topology, places))
        except ClusterError as error:
            last = error
    if not found:
        assert last is not None
        raise last
    return tuple(found)


def _names(
    op: str, topology: Topology, algorithm: str, places: Places, servers: Rows
) -> tuple[str, ...]:
    """Return the full names of what to try; a name that says more than the algorithm is one."""
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


# Published costs of collectives: alpha a message, beta a byte sent, gamma a byte added.
#
# From Thakur, Rabenseifner and Gropp (2005), Bruck et al. (1997) and the HCCL user guide. They
# hold where every pair has a path of its own and a device sends to all others at once; `timing`
# agrees there and differs where links are shared or messages queue for one link.


class Terms(NamedTuple):
    """A cost as counts: messages one after another, tensors sent, tensors added."""

    alphas: float
    betas: float
    gammas: float = 0.0

    def then(self, other: "Terms") -> "Terms":
        """Return one after the other."""
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))


def closed_form_s(
    op: str,
    algorithm: str,
    ranks: int,
    size_bytes: float,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> float:
    """Return the published seconds of a flat algorithm; chains may say their chunks ("chain*8").

    `size_bytes` as in `time_collective`. Raises `ClusterError` for algorithms in levels.
    """
    op = op_name(op)
    name, _, _, chunks, _ = parse_name(op, algorithm)
    if ranks < 1 or not size_bytes >= 0:
        raise ClusterError("ranks >= 1 and bytes >= 0", f"{ranks}, {size_bytes}", "count")
    if ranks == 1 or size_bytes == 0:
        return 0.0
    table = _table(op, ranks, chunks or 1)
    if name not in table or ((chunks or 1) > 1 and name != "chain"):
        what = f"{op} by one of {', '.join(table)}"
        raise ClusterError(what, name, "add the costs of the levels yourself")
    alphas, betas, gammas = table[name]
    return alphas * alpha_s + size_bytes * (betas * beta_s_per_byte + gammas * gamma_s_per_byte)


def _table(op: str, p: int, chunks: int) -> dict[str, Terms]:
    if op == "all_to_all":
        return _exchange(p)
    if op in ("broadcast", "reduce"):
        return _rooted(p, chunks, adds=float(op == "reduce"))
    if op in ("all_gather", "reduce_scatter"):
        return _gather(p, adds=float(op == "reduce_scatter"))
    return _all_reduce(p, chunks)


def _gather(p: int, adds: float) -> dict[str, Terms]:
    """All-gather, or (adds = 1) reduce-scatter."""
    share, log = (p - 1) / p, math.ceil(math.log2(p))
    even = Terms(log, share, adds * share)
    return {
        "ring": Terms(p - 1, share, adds * share),
        "double-ring": Terms(p - 1, share / 2 if p > 2 else share, adds * share),
        "mesh": Terms(1, 1 / p, adds * share),
        "halving-doubling": _folded_gather(p, adds) if p & (p - 1) else even,
        "nhr": even,
    }


def _folded_gather(p: int, adds: float) -> Terms:
    """Fold in one slot, double what pairs hold, fold out all but the own."""
    kept, terms = 2 ** int(math.log2(p)), Terms(2, 1.0, adds)
    held = [2] * (p - kept) + [1] * (2 * kept - p)
    for k in reversed(range(kept.bit_length() - 1)):
        near = 2 ** (k + 1)
        most = max(sum(held[a] for a in range(a0, kept, near)) for a0 in range(min(near, kept)))
        terms = terms.then(Terms(1, most / p, adds * most / p))
    return terms


def _all_reduce(p: int, chunks: int) -> dict[str, Terms]:
    scatter, gather = _gather(p, 1.0), _gather(p, 0.0)
    found = {name: scatter[name].then(gather[name]) for name in scatter}
    log = int(math.log2(p))
    share = (2**log - 1) / 2**log
    fold = Terms(2, 2, 1) if 2**log < p else Terms(0, 0)
    hops, adding = 2 * (p - 1) + chunks - 1, p - 1 + chunks - 1
    return {
        **found,
        "halving-doubling": Terms(2 * log, 2 * share, share).then(fold),
        "recursive-doubling": Terms(log, log, log).then(fold),
        "tree": _rooted(p, 1, 1.0)["tree"].then(_rooted(p, 1, 0.0)["tree"]),
        "chain": Terms(hops, hops / chunks, adding / chunks),
    }


def _rooted(p: int, chunks: int, adds: float) -> dict[str, Terms]:
    log, share, hops = math.ceil(math.log2(p)), (p - 1) / p, p - 1 + chunks - 1
    gather = _gather(p, adds)
    return {
        "tree": Terms(log, log, adds * log),
        "chain": Terms(hops, hops / chunks, adds * hops / chunks),
        "star": Terms(1, 1, adds * (p - 1)),
        "mesh": Terms(1, 1 / p).then(gather["mesh"]),
        "nhr": Terms(log, share).then(gather["nhr"]),
    }


def _exchange(p: int) -> dict[str, Terms]:
    log = math.ceil(math.log2(p))
    moved = sum((way >> k) & 1 for k in range(log) for way in range(p)) / p
    return {
        "mesh": Terms(1, 1 / p),
        "pairwise": Terms(p - 1, (p - 1) / p),
        "bruck": Terms(log, moved),
    }
