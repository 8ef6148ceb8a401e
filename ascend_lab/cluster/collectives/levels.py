"""Collectives in two levels: inside the servers, and between them along rails.

Rail i joins the i-th ranks of all servers. An all-reduce adds up inside first, so that only n / g
bytes a rank cross between servers; a gather goes between servers first for the same reason.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.collectives import flat
from ascend_lab.cluster.collectives.build import Rounds, laid, turned
from ascend_lab.cluster.collectives.rooted import cast, collect
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
    """Broadcast along the root's rail, then inside every server."""
    outer, rail = cast(between, len(groups))
    inner, local = cast(inside, groups.shape[1])
    home, blocks = _from(groups, root), np.arange(outer * inner).reshape(outer, inner)
    return outer * inner, (
        laid(rail, home[:, 0][None], blocks[None]),
        laid(local, home, blocks.T[None]),
    )


def reduce(groups: Ints, root: int, inside: str, between: str) -> tuple[int, Stages]:
    """Reduce inside every server, then along the root's rail."""
    outer, rail = collect(between, len(groups))
    inner, local = collect(inside, groups.shape[1])
    home, blocks = _from(groups, root), np.arange(outer * inner).reshape(outer, inner)
    return outer * inner, (
        laid(local, home, blocks.T[None]),
        laid(rail, home[:, 0][None], blocks[None]),
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
