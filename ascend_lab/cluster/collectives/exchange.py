"""All-to-all: block s * p + d goes from rank s to rank d."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.collectives.build import Rounds
from ascend_lab.cluster.collectives.flat import pairs
from ascend_lab.cluster.schedule import Round

Ints = NDArray[np.int64]


def mesh(p: int) -> Rounds:
    """Send everything at once."""
    if p == 1:
        return ()
    sources, targets = pairs(p)
    return (Round.of(sources, targets, (sources * p + targets)[:, None]),)


def pairwise(p: int) -> Rounds:
    """Send in round t to the rank t on: one message out and one in for every rank."""
    ranks = np.arange(p)
    return tuple(
        Round.of(ranks, (ranks + t) % p, (ranks * p + (ranks + t) % p)[:, None])
        for t in range(1, p)
    )


def bruck(p: int) -> Rounds:
    """Send in round k to the rank 2^k on all whose way has bit k (Bruck et al. 1997).

    A block's way is (d - s) mod p; before round k it has gone its lower k bits. Few rounds, but
    blocks travel several times.
    """
    ranks, rounds = np.arange(p)[:, None], []
    for k in range((p - 1).bit_length()):
        ways = np.arange(p)
        ways = ways[(ways >> k) & 1 == 1]
        starts = (ranks - ways % 2**k) % p
        blocks = starts * p + (starts + ways) % p
        rounds.append(Round.of(ranks[:, 0], (ranks[:, 0] + 2**k) % p, blocks))
    return tuple(rounds)


def two_levels(groups: Ints) -> Rounds:
    """Hand inside each server what goes along a rail to the rank on that rail, then send it there.

    `groups`: (servers, ranks a server). Inside at once, between servers pairwise.
    """
    servers, each = groups.shape
    p, rounds = groups.size, []
    if each > 1:
        one, two = pairs(each)
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
