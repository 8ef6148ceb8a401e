"""Every collective by operation and name of its algorithm, in one level or two.

A name may say more: "hierarchical(4:mesh,nhr)*2" is mesh inside fours of each server's ranks, NHR
between the fours, in two chunks. A schedule's `algorithm` is such a name and makes it again.

In two levels rail i joins the i-th ranks of all servers. An all-reduce adds up inside first, so
that only n / g bytes a rank cross between servers; a gather goes between servers first for the
same reason.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ascend_lab.cluster import algorithms as flat
from ascend_lab.cluster.algorithms import CASTS, CUT, EXCHANGES, GATHERS, WHOLE, Rounds
from ascend_lab.cluster.schedule import OPS, Ints, Round, Schedule, together
from ascend_lab.cluster.topology import Topology
from ascend_lab.errors import ClusterError

Groups = Sequence[Sequence[int]]
Stages = tuple[Rounds, ...]
MOST_STEPS = 2**17
"""Chunks times rounds at most: more would take minutes to lay out."""
_SCATTERS = ("ring", "double-ring", "mesh", "halving-doubling", "nhr", "hierarchical", "pipeline")
_CASTS = ("tree", "chain", "star", "mesh", "nhr", "hierarchical")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        *("ring", "double-ring", "mesh", "halving-doubling", "recursive-doubling", "nhr"),
        *("tree", "chain", "hierarchical", "pipeline"),
    ),
    "reduce_scatter": _SCATTERS,
    "all_gather": _SCATTERS,
    "broadcast": _CASTS,
    "reduce": _CASTS,
    "all_to_all": ("mesh", "pairwise", "bruck", "hierarchical"),
}
"""The algorithms of every operation."""
LEVELS = ("hierarchical", "pipeline")
"""Algorithms that need servers."""
ALIASES = {
    "binomial": "tree",
    "binomial-tree": "tree",
    "rhd": "halving-doubling",
    "h-d-r": "halving-doubling",
    "recursive-halving-doubling": "halving-doubling",
    "direct": "mesh",
}
"""Other names people use."""
_LEVEL_PART = r"\((?:(\d+)|(?:(\d+):)?([a-z-]+),([a-z-]+))\)"
_NAME = re.compile(rf"([a-z-]+)(?:{_LEVEL_PART})?(?:\*(\d+))?")


class Name(NamedTuple):
    """What a name says; None where it does not."""

    algorithm: str
    inside: str | None = None
    between: str | None = None
    chunks: int | None = None
    split: int | None = None


def op_name(text: str) -> str:
    """Return the operation a spelling means (allreduce, all-reduce, All_Reduce)."""
    plain = re.sub(r"[^a-z]", "", text.lower())
    for op in OPS:
        if plain == op.replace("_", ""):
            return op
    raise ClusterError(f"one of {', '.join(OPS)}", repr(text), "choose one")


def parse_name(op: str, text: str) -> Name:
    """Return what the name of an algorithm says; raise `ClusterError` if there is none such."""
    known = ALGORITHMS[op_name(op)]
    found = _NAME.fullmatch(re.sub(r"\s", "", text.lower()).replace("_", "-"))
    if found is not None:
        name = ALIASES.get(found[1], found[1])
        if name == "pipeline" and "chain" in known and name not in known:
            name = "chain"
        chunks, split = (int(n) if n else None for n in (found[6], found[2] or found[3]))
        plain = not (found[4] or split)
        if name in known and (plain or name in LEVELS) and chunks != 0 and split != 0:
            return Name(name, found[4], found[5], chunks, split)
    raise ClusterError(f"{op} by one of {', '.join(known)}", repr(text), "choose one")


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
    said = parse_name(op, algorithm)
    if isinstance(ranks, Topology):
        groups = ranks.groups if groups is None else groups
        ranks = ranks.size
    chunks = chunks if said.chunks is None else said.chunks
    if ranks < 1 or chunks < 1 or not 0 <= root < ranks:
        got = f"{ranks} ranks, {chunks} chunks, root {root}"
        raise ClusterError("ranks and chunks of at least 1, a root among the ranks", got, "count")
    if said.algorithm in LEVELS:
        said = said._replace(inside=said.inside or inside, between=said.between or between)
        label, blocks, stages = _levelled(op, said, _servers(ranks, groups, said.split), root)
    else:
        label, (blocks, stages) = said.algorithm, _flat(op, said.algorithm, ranks, root)
    rounds = tuple(step for stage in stages for step in stage)
    if chunks > 1:
        if chunks * len(rounds) > MOST_STEPS:
            what = f"{label}: at most {MOST_STEPS // max(len(rounds), 1)} chunks on {ranks} ranks"
            raise ClusterError(what, str(chunks), "take fewer")
        lag = 1 if said.algorithm == "chain" else max(map(len, stages), default=0)
        rounds, label = flat.chunked(rounds, chunks, lag), f"{label}*{chunks}"
    return Schedule(op, label, ranks, blocks * chunks, rounds, root)


def _flat(op: str, name: str, p: int, root: int) -> tuple[int, Stages]:
    """Return blocks and stages in one level."""
    if op == "all_to_all":
        return p * p, (EXCHANGES[name](p),)
    if op in ("broadcast", "reduce"):
        slots, rounds = flat.cast(name, p) if op == "broadcast" else flat.collect(name, p)
        return slots, (flat.in_order(rounds, (np.arange(p) + root) % p, slots),)
    if name == "double-ring":
        up = flat.double_ring_gather(p)
        down = flat.turned(up)
        return 2 * p, {"all_gather": (up,), "reduce_scatter": (down,)}.get(op, (down + up,))
    if op == "all_gather":
        return p, (GATHERS[name](p),)
    if op == "reduce_scatter":
        return p, (flat.reduce_scatter(name, p),)
    if name in CASTS and name not in GATHERS:
        slots, rounds = flat.cast(name, p)
        return slots, ((*flat.turned(rounds), *rounds),)
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
) -> tuple[str, str]:
    """Return the algorithms of both levels, checked; two empty names where there are none."""
    if name == "pipeline" or op == "all_to_all":
        if inside or between:
            what = f"{op} by {name} without names of levels"
            raise ClusterError(what, f"{inside}, {between}", "leave them out")
        return "", ""
    rooted = op in ("broadcast", "reduce")
    usual = "ring" if len(servers) & (len(servers) - 1) else "halving-doubling"
    inside = inside or ("tree" if rooted else "mesh")
    between = between or ("tree" if rooted else usual)
    known = CASTS if rooted else tuple(GATHERS)
    wider = (*known, "recursive-doubling") if op == "all_reduce" else known
    inside, between = (ALIASES.get(x, x).replace("_", "-") for x in (inside, between))
    if inside not in known or between not in wider:
        raise ClusterError(f"levels by {', '.join(known)}", f"{inside}, {between}", "choose these")
    return inside, between


def _levelled(op: str, said: Name, servers: Ints, root: int) -> tuple[str, int, Stages]:
    """Return the name in full, blocks and stages; `servers`: (servers, ranks a server)."""
    levels = _level_names(op, said.algorithm, servers, said.inside, said.between)
    parts = ([str(said.split)] if said.split else []) + ([",".join(levels)] if levels[0] else [])
    label = said.algorithm + (f"({':'.join(parts)})" if parts else "")
    return label, *_in_two(op, said.algorithm, servers, root, *levels)


def _in_two(
    op: str, name: str, groups: Ints, root: int, inside: str, between: str
) -> tuple[int, Stages]:
    """Return blocks and stages in two levels."""
    servers, each = groups.shape
    p = groups.size
    if op == "all_to_all":
        return p * p, (_exchange(groups),)
    if name == "pipeline":
        up = _pipeline_gather(groups)
        down = flat.turned(up)
        return p, {"all_reduce": (down, up), "reduce_scatter": (down,), "all_gather": (up,)}[op]
    if op == "all_reduce":  # scatter inside, add up along each rail, gather inside
        slots, rail = flat.all_reduce(between, servers)
        blocks = np.arange(each * slots).reshape(each, slots)
        return each * slots, (
            flat.laid(flat.reduce_scatter(inside, each), groups, blocks[None]),
            flat.laid(rail, groups.T, blocks[:, :, None]),
            flat.laid(GATHERS[inside](each), groups, blocks[None]),
        )
    if op == "all_gather":
        return p, (
            flat.laid(GATHERS[between](servers), groups.T, groups.T[:, :, None]),
            flat.laid(GATHERS[inside](each), groups, groups.T[None]),
        )
    if op == "reduce_scatter":
        return p, (
            flat.laid(flat.reduce_scatter(inside, each), groups, groups.T[None]),
            flat.laid(flat.reduce_scatter(between, servers), groups.T, groups.T[:, :, None]),
        )
    return _rooted(op, groups, root, inside, between)


def _rooted(op: str, groups: Ints, root: int, inside: str, between: str) -> tuple[int, Stages]:
    """Scatter inside the root's server, broadcast along all rails, gather inside every server.

    Where `inside` sends whole tensors: broadcast along the root's rail, then inside every server.
    A reduction goes the same ways backwards and adds up.
    """
    server, place = (int(i[0]) for i in np.nonzero(groups == root))
    home: Ints = np.roll(np.roll(groups, -server, axis=0), -place, axis=1)  # the root is first
    rooted, each = flat.cast if op == "broadcast" else flat.collect, groups.shape[1]
    outer, rail = rooted(between, len(groups))
    slots, local = rooted(inside, each) if inside in WHOLE else (each, ())
    blocks = np.arange(slots * outer).reshape(slots, outer)
    if inside in WHOLE:
        one = (
            flat.laid(rail, home[:, 0][None], blocks[:, :, None]),
            flat.laid(local, home, blocks[None]),
        )
        return outer, one if op == "broadcast" else one[::-1]
    scatter, gather = (template(each) for template in CUT[inside])
    along = flat.laid(rail, home.T, blocks[:, :, None])
    if op == "broadcast":
        first = flat.laid(scatter, home[:1], blocks[None])
        return slots * outer, (first, along, flat.laid(gather, home, blocks[None]))
    last = flat.laid(flat.backwards(scatter), home[:1], blocks[None])
    return slots * outer, (flat.laid(flat.turned(gather), home, blocks[None]), along, last)


def _exchange(groups: Ints) -> Rounds:
    """Hand inside each server what goes along a rail to the rank on that rail, then send it there.

    Inside at once, between servers pairwise.
    """
    servers, each = groups.shape
    p, rounds = groups.size, []
    if each > 1:
        one, two = flat.pairs(each)
        to = groups.T[two]
        parts = [groups[s, one][:, None] * p + to for s in range(servers)]
        inside = (groups[:, one].reshape(-1), groups[:, two].reshape(-1))
        rounds.append(Round.of(*inside, np.concatenate(parts)))
    here = np.arange(servers)
    for t in range(1, servers):
        there = (here + t) % servers
        blocks = groups[here][:, None, :] * p + groups[there][:, :, None]
        rounds.append(
            Round.of(groups[here].reshape(-1), groups[there].reshape(-1), blocks.reshape(p, each))
        )
    return tuple(rounds)


def _pipeline_gather(groups: Ints) -> Rounds:
    """Gather along rails in a ring while what came the round before spreads inside over the mesh.

    As many rounds as servers: (m - 1) max(between, inside) + inside, HCCL's pipeline.
    """
    servers, each = groups.shape
    rail = flat.laid(flat.ring_gather(servers), groups.T, groups.T[:, :, None])
    one, two = flat.pairs(each)
    sides = groups[:, one].reshape(-1), groups[:, two].reshape(-1)
    rounds = []
    for t in range(servers):
        parts = [*rail[t : t + 1]]
        if each > 1:
            parts.append(Round.of(*sides, np.roll(groups, t, axis=0)[:, one].reshape(-1, 1)))
        if parts:
            rounds.append(together(parts))
    return tuple(rounds)
