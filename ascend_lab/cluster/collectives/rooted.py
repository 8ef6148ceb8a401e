"""Broadcasts from rank 0 and reductions to it, for any number of ranks."""

from __future__ import annotations

import numpy as np

from ascend_lab.cluster.collectives.build import Rounds, backwards, turned
from ascend_lab.cluster.collectives.flat import mesh_gather, nhr_gather
from ascend_lab.cluster.schedule import Round


def tree_cast(p: int) -> Rounds:
    """Send all to ranks p/2, p/4 .. 1 on: the ranks that have it double each round."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sources = np.arange(0, p - 2**k, 2 ** (k + 1))
        whole = np.zeros((len(sources), 1), np.int64)
        rounds.append(Round.of(sources, sources + 2**k, whole))
    return tuple(rounds)


def chain_cast(p: int) -> Rounds:
    """Send all from each rank to the next, a rank a round; worth its while in chunks."""
    return tuple(Round.of([r], [r + 1], [[0]]) for r in range(p - 1))


def star_cast(p: int) -> Rounds:
    """Send all to every other rank at once."""
    if p == 1:
        return ()
    others = np.arange(1, p)
    return (Round.of(np.zeros_like(others), others, np.zeros((p - 1, 1), np.int64)),)


def star_scatter(p: int) -> Rounds:
    """Send each rank its slot at once."""
    if p == 1:
        return ()
    others = np.arange(1, p)
    return (Round.of(np.zeros_like(others), others, others[:, None]),)


def tree_scatter(p: int) -> Rounds:
    """Send half of the slots to rank p/2, and so on: slots go down a binomial tree."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sources = np.arange(0, p - 2**k, 2 ** (k + 1))
        slots = [range(s + 2**k, min(s + 2 ** (k + 1), p)) for s in sources]
        rounds.append(Round.of(sources, sources + 2**k, slots))
    return tuple(rounds)


def _without_root(rounds: Rounds) -> Rounds:
    """Return the rounds without messages to rank 0, which has all."""
    kept = []
    for step in rounds:
        keep = step.targets != 0
        kept.append(Round.of(step.sources[keep], step.targets[keep], step.blocks[keep]))
    return tuple(kept)


WHOLE = {"tree": tree_cast, "chain": chain_cast, "star": star_cast}
"""Broadcasts that send the tensor whole."""
CUT = {"mesh": (star_scatter, mesh_gather), "nhr": (tree_scatter, nhr_gather)}
"""Broadcasts that scatter a slot to each rank and gather."""
CASTS = (*WHOLE, *CUT)
"""Names of broadcasts and reductions."""


def cast(name: str, p: int) -> tuple[int, Rounds]:
    """Return slots and rounds of the broadcast of that name from rank 0."""
    if name in WHOLE:
        return 1, WHOLE[name](p)
    scatter, gather = CUT[name]
    return p, (*scatter(p), *_without_root(gather(p)))


def collect(name: str, p: int) -> tuple[int, Rounds]:
    """Return slots and rounds of the reduction of that name to rank 0.

    A tensor sent whole goes the broadcast's tree upwards; one in slots is reduce-scattered, and the
    finished slots come together.
    """
    if name in WHOLE:
        return 1, turned(WHOLE[name](p))
    scatter, gather = CUT[name]
    return p, (*turned(gather(p)), *backwards(scatter(p)))
