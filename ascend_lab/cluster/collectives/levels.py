"""Collectives in two levels: inside the servers, and between them along rails.

Rail i joins the i-th ranks of all servers. An all-reduce adds up inside first, so that only n / g
bytes a rank cross between servers; a gather goes between servers first for the same reason.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.collectives import flat
from ascend_lab.cluster.collectives.build import Rounds, backwards, laid, turned
from ascend_lab.cluster.collectives.rooted import CUT, WHOLE, cast, collect
from ascend_lab.cluster.schedule import Round, together

Ints = NDArray[np.int64]
Stages = tuple[Rounds, ...]


def all_reduce(groups: Ints, inside: str, between: str) -> tuple[int, Stages]:
    """Reduce-scatter inside, all-reduce along each rail, all-gather inside: blocks and stages."""
    servers, each = groups.shape
    slots, rail = flat.all_reduce(between, servers)
    blocks = np.arange(each * slots).reshape(each, slots)
    return each * slots, (
        laid(flat.reduce_scatter(inside, each), groups, blocks[None]),
        laid(rail, groups.T, blocks[:, :, None]),
        laid(flat.gather(inside, each), groups, blocks[None]),
    )


def gather(groups: Ints, inside: str, between: str) -> Stages:
    """All-gather along each rail, then inside."""
    servers, each = groups.shape
    return (
        laid(flat.gather(between, servers), groups.T, groups.T[:, :, None]),
        laid(flat.gather(inside, each), groups, groups.T[None]),
    )


def reduce_scatter(groups: Ints, inside: str, between: str) -> Stages:
    """Reduce-scatter inside, then along each rail."""
    servers, each = groups.shape
    return (
        laid(flat.reduce_scatter(inside, each), groups, groups.T[None]),
        laid(flat.reduce_scatter(between, servers), groups.T, groups.T[:, :, None]),
    )


def broadcast(groups: Ints, root: int, inside: str, between: str) -> tuple[int, Stages]:
    """Scatter inside the root's server, broadcast along all rails, gather inside every server.

    Where `inside` sends whole tensors: broadcast along the root's rail, then inside every server.
    """
    home, (outer, rail) = _from(groups, root), cast(between, len(groups))
    each = groups.shape[1]
    slots, local = cast(inside, each) if inside in WHOLE else (each, ())
    blocks = np.arange(slots * outer).reshape(slots, outer)
    if inside in WHOLE:
        first = laid(rail, home[:, 0][None], blocks[:, :, None])
        return outer, (first, laid(local, home, blocks[None]))
    scatter, gather = CUT[inside]
    return slots * outer, (
        laid(scatter(each), home[:1], blocks[None]),
        laid(rail, home.T, blocks[:, :, None]),
        laid(gather(each), home, blocks[None]),
    )


def reduce(groups: Ints, root: int, inside: str, between: str) -> tuple[int, Stages]:
    """Reduce-scatter inside every server, reduce along all rails, collect in the root's server.

    Where `inside` sends whole tensors: reduce inside every server, then along the root's rail.
    """
    home, (outer, rail) = _from(groups, root), collect(between, len(groups))
    each = groups.shape[1]
    slots, local = collect(inside, each) if inside in WHOLE else (each, ())
    blocks = np.arange(slots * outer).reshape(slots, outer)
    if inside in WHOLE:
        last = laid(rail, home[:, 0][None], blocks[:, :, None])
        return outer, (laid(local, home, blocks[None]), last)
    scatter, gather = CUT[inside]
    return slots * outer, (
        laid(turned(gather(each)), home, blocks[None]),
        laid(rail, home.T, blocks[:, :, None]),
        laid(backwards(scatter(each)), home[:1], blocks[None]),
    )


def _from(groups: Ints, root: int) -> Ints:
    """Return the groups turned so that the root is first of the first."""
    server, place = (int(i[0]) for i in np.nonzero(groups == root))
    found: Ints = np.roll(np.roll(groups, -server, axis=0), -place, axis=1)
    return found


def pipeline_gather(groups: Ints) -> Rounds:
    """Gather along rails in a ring while what came the round before spreads inside over the mesh.

    As many rounds as servers: (m - 1) max(between, inside) + inside, HCCL's pipeline.
    """
    servers, each = groups.shape
    rail = laid(flat.ring_gather(servers), groups.T, groups.T[:, :, None])
    rounds = []
    for t in range(servers):
        parts = [rail[t]] if t < servers - 1 else []
        if each > 1:
            one, two = flat.pairs(each)
            what = np.roll(groups, t, axis=0)[:, one].reshape(-1, 1)
            sides = groups[:, one].reshape(-1), groups[:, two].reshape(-1)
            parts.append(Round.of(*sides, what))
        if parts:
            rounds.append(together(parts))
    return tuple(rounds)


def pipeline_reduce_scatter(groups: Ints) -> Rounds:
    """Reduce-scatter as `pipeline_gather` turned round."""
    return turned(pipeline_gather(groups))
