"""Every collective by operation and name of its algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.collectives import exchange, flat, levels
from ascend_lab.cluster.collectives.build import Rounds, chunked, in_order, longest, turned
from ascend_lab.cluster.collectives.names import ALIASES, LEVELS, op_name, parse_name
from ascend_lab.cluster.collectives.rooted import CASTS, cast, collect
from ascend_lab.cluster.schedule import Schedule
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
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
    inside: str | None = None,
    between: str | None = None,
) -> Schedule:
    """Return the schedule of a collective for `ranks` ranks, or one rank for each device.

    `chunks` cuts the tensor: stages of a hierarchical collective and hops of a chain overlap, other
    algorithms run chunk after chunk (staging buffers of size / chunks). `groups` are the ranks of
    each server, needed by the algorithms in `LEVELS`; default: the topology's, or one server. A
    name with "(4" takes every four ranks of a server, in order, for a server.
    `inside` and `between` name the algorithms of the two levels (default: mesh or tree inside;
    halving-doubling between if there are 2^k servers, else ring, as HCCL does on the 910).
    Raises `ClusterError` for what does not exist.
    """
    op = op_name(op)
    name, one, two, cut, split = parse_name(op, algorithm)
    if isinstance(ranks, Topology):
        groups = ranks.groups if groups is None else groups
        ranks = ranks.size
    chunks = chunks if cut is None else cut
    if ranks < 1 or chunks < 1 or not 0 <= root < ranks:
        got = f"{ranks} ranks, {chunks} chunks, root {root}"
        raise ClusterError("ranks and chunks of at least 1, a root among the ranks", got, "count")
    label = name
    if name in LEVELS:
        servers = _servers(ranks, groups, split)
        inside, between = _level_names(op, name, servers, one or inside, two or between)
        blocks, stages = _levelled(op, name, servers, root, inside, between)
        parts = [str(split)] if split else []
        parts += [f"{inside},{between}"] if inside else []
        label += f"({':'.join(parts)})" if parts else ""
    else:
        blocks, stages = _flat(op, name, ranks, root)
    rounds = tuple(step for stage in stages for step in stage)
    if chunks > 1:
        if chunks * len(rounds) > MOST_STEPS:
            what = f"{label}: at most {MOST_STEPS // max(len(rounds), 1)} chunks on {ranks} ranks"
            raise ClusterError(what, str(chunks), "take fewer")
        lag = 1 if name == "chain" else longest(stages)
        rounds, label = chunked(rounds, chunks, lag), f"{label}*{chunks}"
    return Schedule(op, label, ranks, blocks * chunks, rounds, root)


def _flat(op: str, name: str, p: int, root: int) -> tuple[int, tuple[Rounds, ...]]:
    if op == "all_to_all":
        templates = {"mesh": exchange.mesh, "pairwise": exchange.pairwise, "bruck": exchange.bruck}
        return p * p, (templates[name](p),)
    if op in ("broadcast", "reduce"):
        slots, rounds = cast(name, p) if op == "broadcast" else collect(name, p)
        return slots, (in_order(rounds, (np.arange(p) + root) % p, slots),)
    if name == "double-ring":
        up = flat.double_ring_gather(p)
        down = turned(up)
        return 2 * p, {"all_gather": (up,), "reduce_scatter": (down,)}.get(op, (down + up,))
    if op == "all_gather":
        return p, (flat.gather(name, p),)
    if op == "reduce_scatter":
        return p, (flat.reduce_scatter(name, p),)
    if name in CASTS and name not in flat.GATHERS:
        slots, rounds = cast(name, p)
        return slots, ((*turned(rounds), *rounds),)
    slots, rounds = flat.all_reduce(name, p)
    return slots, (rounds,)


# -- two levels -----------------------------------------------------------------------------------
def _servers(ranks: int, groups: Groups | None, split: int | None) -> Ints:
    """Return (servers, ranks a server); raise `ClusterError` unless they are of one size."""
    rows = [list(range(ranks))] if groups is None else [list(map(int, row)) for row in groups]
    if split:
        rows = [row[i : i + split] for row in rows for i in range(0, len(row), split)]
    sizes = sorted({len(row) for row in rows})
    if sorted(r for row in rows for r in row) != list(range(ranks)) or len(sizes) != 1:
        what = f"servers of one size that hold {ranks} ranks"
        raise ClusterError(what, f"servers of {sizes} ranks", "use a flat algorithm")
    return np.array(rows, np.int64)


def _level_names(
    op: str, name: str, servers: Ints, inside: str | None, between: str | None
) -> tuple[str | None, str | None]:
    """Return the algorithms of both levels, checked."""
    if name == "pipeline" or op == "all_to_all":
        if inside or between:
            what = f"{op} by {name} without names of levels"
            raise ClusterError(what, f"{inside}, {between}", "leave them out")
        return None, None
    rooted = op in ("broadcast", "reduce")
    usual = "tree" if rooted else "ring" if len(servers) & (len(servers) - 1) else None
    inside = inside or ("tree" if rooted else "mesh")
    between = between or usual or "halving-doubling"
    known = CASTS if rooted else tuple(flat.GATHERS)
    wider = (*known, "recursive-doubling") if op == "all_reduce" else known
    inside, between = (ALIASES.get(x, x).replace("_", "-") for x in (inside, between))
    if inside not in known or between not in wider:
        raise ClusterError(f"levels by {', '.join(known)}", f"{inside}, {between}", "choose these")
    return inside, between


def _levelled(
    op: str, name: str, servers: Ints, root: int, inside: str | None, between: str | None
) -> tuple[int, tuple[Rounds, ...]]:
    p = servers.size
    if op == "all_to_all":
        return p * p, (exchange.two_levels(servers),)
    if name == "pipeline":
        down, up = levels.pipeline_reduce_scatter(servers), levels.pipeline_gather(servers)
        return p, {"all_reduce": (down, up), "reduce_scatter": (down,), "all_gather": (up,)}[op]
    assert inside is not None and between is not None
    if op == "all_reduce":
        return levels.all_reduce(servers, inside, between)
    if op == "all_gather":
        return p, levels.gather(servers, inside, between)
    if op == "reduce_scatter":
        return p, levels.reduce_scatter(servers, inside, between)
    rooted = levels.broadcast if op == "broadcast" else levels.reduce
    return rooted(servers, root, inside, between)
