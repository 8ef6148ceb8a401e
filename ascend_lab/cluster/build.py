"""Builds the schedule of a collective from names: of the operation, and of an algorithm.

`make("all_reduce", "ring", 4)` has 6 rounds; "hierarchical(mesh,nhr)" works in servers first.
"""

from collections.abc import Sequence

import numpy as np

from ascend_lab.cluster.algorithms import CASTS, GATHERS, chunked, flat, in_two
from ascend_lab.cluster.schedule import ALIASES, LEVELS, Ints, Round, Schedule, op_name, parse_name
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

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
