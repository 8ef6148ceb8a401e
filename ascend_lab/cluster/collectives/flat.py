"""All-gather templates for any number of ranks, and the all-reduces made of them.

Slot i is rank i's. The reduce-scatters are the all-gathers turned round. Ring, halving and doubling
after Thakur, Rabenseifner and Gropp (2005); mesh and NHR after the cost formulas of HCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.collectives.build import Rounds, in_order, turned
from ascend_lab.cluster.schedule import NONE, Round, together

Ints = NDArray[np.int64]


def ring_gather(p: int, step: int = 1) -> Rounds:
    """Pass on in p - 1 rounds, to the next rank, the slot received in the round before."""
    ranks = np.arange(p)
    targets = (ranks + step) % p
    return tuple(Round.of(ranks, targets, ((ranks - step * t) % p)[:, None]) for t in range(p - 1))


def double_ring_gather(p: int) -> Rounds:
    """Gather even blocks round one way and odd ones the other, two blocks a rank.

    Between two ranks both ways are one, and one message takes both blocks.
    """
    if p <= 2:
        both = (replace(r, blocks=2 * r.blocks + np.arange(2)) for r in ring_gather(p))
        return tuple(both)
    ways = zip(_half(ring_gather(p), 0), _half(ring_gather(p, -1), 1), strict=True)
    return tuple(together(way) for way in ways)


def _half(rounds: Rounds, which: int) -> Rounds:
    return tuple(replace(step, blocks=2 * step.blocks + which) for step in rounds)


def mesh_gather(p: int) -> Rounds:
    """Send the own slot to all others in one round."""
    if p == 1:
        return ()
    sources, targets = pairs(p)
    return (Round.of(sources, targets, sources[:, None]),)


def pairs(p: int) -> tuple[Ints, Ints]:
    """Return all (source, target); a rank's first target is its right neighbour, and so on."""
    ranks, apart = np.arange(p), np.arange(1, p)
    return np.repeat(ranks, p - 1), ((ranks[:, None] + apart) % p).reshape(-1)


def nhr_gather(p: int) -> Rounds:
    """Send ever more slots ever nearer: 2^k ranks on, what lies multiples of 2^(k+1) back.

    ceil(log2 p) rounds for any p and p - 1 slots a rank in all: each slot spreads along a tree, the
    trees of the slots are one tree turned on. Most bytes go to the next rank.
    """
    ranks, rounds = np.arange(p), []
    for k in reversed(range((p - 1).bit_length())):
        back = np.arange(0, p - 2**k, 2 ** (k + 1))
        rounds.append(Round.of(ranks, (ranks + 2**k) % p, (ranks[:, None] - back) % p))
    return tuple(rounds)


def folded(p: int) -> tuple[Ints, Ints, Ints]:
    """Return (the ranks that stay, those that fold, whom they fold into): powers of 2 stay."""
    kept = 2 ** (p.bit_length() - 1)
    spare = np.arange(p - kept)
    stay = np.concatenate([2 * spare, np.arange(2 * (p - kept), p)])
    return stay, 2 * spare + 1, 2 * spare


def doubling_gather(p: int) -> Rounds:
    """Swap all one has with ranks p/2, p/4 .. 1 away; ranks beyond a power of two fold in and out.

    A folded rank gives its slot to its left neighbour and gets all others from it in the end.
    """
    stay, fold, into = folded(p)
    own = stay[:, None]
    if len(fold):
        second = np.full(len(stay), NONE)
        second[: len(fold)] = fold
        own = np.stack([stay, second], axis=1)
    count, active = len(stay), np.arange(len(stay))
    rounds = [Round.of(fold, into, fold[:, None])] if len(fold) else []
    for k in reversed(range(count.bit_length() - 1)):
        near = 2 ** (k + 1)
        have = active[:, None] % near + near * np.arange(count // near)
        rounds.append(Round.of(stay, stay[active ^ 2**k], own[have].reshape(count, -1)))
    if len(fold):
        rest = np.arange(p - 1) + (np.arange(p - 1) >= fold[:, None])
        rounds.append(Round.of(into, fold, rest))
    return tuple(rounds)


GATHERS: dict[str, Callable[[int], Rounds]] = {
    "ring": ring_gather,
    "mesh": mesh_gather,
    "halving-doubling": doubling_gather,
    "nhr": nhr_gather,
}
"""All-gathers by name: rounds of p ranks and p slots."""


def gather(name: str, p: int) -> Rounds:
    """Return the all-gather of that name."""
    return GATHERS[name](p)


def reduce_scatter(name: str, p: int) -> Rounds:
    """Return the reduce-scatter of that name; the ring keeps its direction."""
    return turned(ring_gather(p, -1) if name == "ring" else gather(name, p))


# -- all-reduce -----------------------------------------------------------------------------------
def halving_doubling(p: int) -> tuple[int, Rounds]:
    """Reduce-scatter by halving, all-gather by doubling, on a power of two; others fold."""
    stay, fold, into = folded(p)
    slots = len(stay)
    inner = (*turned(doubling_gather(slots)), *doubling_gather(slots))
    return slots, _fold(in_order(inner, stay, slots), fold, into, slots)


def recursive_doubling(p: int) -> tuple[int, Rounds]:
    """Swap and add the whole tensor with ranks 1, 2, 4 .. away: the fewest rounds."""
    stay, fold, into = folded(p)
    active, whole = np.arange(len(stay)), np.zeros((len(stay), 1), np.int64)
    rounds = tuple(
        Round.of(stay, stay[active ^ 2**k], whole, True) for k in range(len(stay).bit_length() - 1)
    )
    return 1, _fold(rounds, fold, into, 1)


def _fold(rounds: Rounds, fold: Ints, into: Ints, slots: int) -> Rounds:
    if not len(fold):
        return rounds
    whole = np.tile(np.arange(slots), (len(fold), 1))
    return (Round.of(fold, into, whole, True), *rounds, Round.of(into, fold, whole))


def all_reduce(name: str, p: int) -> tuple[int, Rounds]:
    """Return slots and rounds of a flat all-reduce: by name, or reduce-scatter and all-gather."""
    if name == "halving-doubling":
        return halving_doubling(p)
    if name == "recursive-doubling":
        return recursive_doubling(p)
    return p, (*reduce_scatter(name, p), *gather(name, p))
