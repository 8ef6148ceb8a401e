"""The algorithms of one level, as small templates of rounds over ranks 0 .. p-1 and slots.

A template is turned round (a gather read backwards is a reduction), laid upon many groups of ranks
at once, and cut into chunks that follow each other through it. Gathers, broadcasts and all-to-alls
stand here for any number of ranks; reductions are made of them. Ring, halving and doubling after
Thakur, Rabenseifner and Gropp (2005); mesh and NHR after the cost formulas of HCCL.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ascend_lab.cluster.schedule import NONE, Ints, Round, together

Rounds = tuple[Round, ...]


# -- what makes large schedules of templates ------------------------------------------------------
def turned(rounds: Rounds) -> Rounds:
    """Return the reduction that is a distribution read backwards.

    Where every rank receives a slot once and passes it on later, the messages of the slot are a
    tree; the same tree from the leaves to the root adds up.
    """
    return tuple(Round.of(r.targets, r.sources, r.blocks, True) for r in reversed(rounds))


def backwards(rounds: Rounds) -> Rounds:
    """Return the gathering at one rank that is a scatter read backwards; nothing is added."""
    return tuple(Round.of(r.targets, r.sources, r.blocks) for r in reversed(rounds))


def laid(rounds: Rounds, ranks: Ints, blocks: Ints) -> Rounds:
    """Lay a template upon groups of ranks that act at once.

    `ranks`: (groups, p); `blocks`: (groups or 1, slots, w), the blocks that slot stands for.
    """
    return tuple(_laid(step, ranks, blocks) for step in rounds)


def _laid(step: Round, ranks: Ints, blocks: Ints) -> Round:
    (messages, count), groups, width = step.blocks.shape, len(ranks), blocks.shape[2]
    picked = np.where((step.blocks == NONE)[None, :, :, None], NONE, blocks[:, step.blocks])
    rows = np.broadcast_to(picked, (groups, messages, count, width))
    return Round(
        ranks[:, step.sources].reshape(-1),
        ranks[:, step.targets].reshape(-1),
        rows.reshape(groups * messages, count * width),
        np.tile(step.reduces, groups),
    )


def in_order(rounds: Rounds, order: Ints, slots: int) -> Rounds:
    """Lay a template upon one group of ranks; slot i stays block i."""
    return laid(rounds, order[None, :], np.arange(slots)[None, :, None])


def chunked(rounds: Rounds, chunks: int, lag: int) -> Rounds:
    """Cut every block in `chunks`; each chunk goes through all rounds, `lag` rounds after the last.

    Block b becomes blocks b * chunks .. b * chunks + chunks - 1. Rounds of different chunks that
    fall together travel at once.
    """
    waves: list[list[Round]] = [[] for _ in range(len(rounds) + (chunks - 1) * lag)]
    for chunk in range(chunks):
        for t, step in enumerate(rounds):
            finer = np.where(step.blocks == NONE, NONE, step.blocks * chunks + chunk)
            waves[t + chunk * lag].append(replace(step, blocks=finer))
    return tuple(together(wave) for wave in waves if wave)


# -- all-gather: slot i is rank i's ---------------------------------------------------------------
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
        return tuple(replace(r, blocks=2 * r.blocks + np.arange(2)) for r in ring_gather(p))
    return tuple(
        together((replace(a, blocks=2 * a.blocks), replace(b, blocks=2 * b.blocks + 1)))
        for a, b in zip(ring_gather(p), ring_gather(p, -1), strict=True)
    )


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


def reduce_scatter(name: str, p: int) -> Rounds:
    """Return the reduce-scatter of that name; the ring keeps its direction."""
    return turned(ring_gather(p, -1) if name == "ring" else GATHERS[name](p))


# -- all-reduce -----------------------------------------------------------------------------------
def all_reduce(name: str, p: int) -> tuple[int, Rounds]:
    """Return slots and rounds of a flat all-reduce: by name, or reduce-scatter and all-gather.

    Halving and doubling scatter and gather among a power of two ranks; recursive doubling swaps
    and adds the whole tensor with ranks 1, 2, 4 .. away, the fewest rounds. Others fold in and out.
    """
    stay, fold, into = folded(p)
    count, active = len(stay), np.arange(len(stay))
    if name == "halving-doubling":
        inner = (*turned(doubling_gather(count)), *doubling_gather(count))
        slots, rounds = count, in_order(inner, stay, count)
    elif name == "recursive-doubling":
        slots, whole = 1, np.zeros((count, 1), np.int64)
        steps = [2**k for k in range(count.bit_length() - 1)]
        rounds = tuple(Round.of(stay, stay[active ^ step], whole, True) for step in steps)
    else:
        return p, (*reduce_scatter(name, p), *GATHERS[name](p))
    if not len(fold):
        return slots, rounds
    all_slots = np.tile(np.arange(slots), (len(fold), 1))
    first, last = Round.of(fold, into, all_slots, True), Round.of(into, fold, all_slots)
    return slots, (first, *rounds, last)


# -- broadcast from rank 0, reduction to it -------------------------------------------------------
def tree_cast(p: int) -> Rounds:
    """Send all to ranks p/2, p/4 .. 1 on: the ranks that have it double each round."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sources = np.arange(0, p - 2**k, 2 ** (k + 1))
        rounds.append(Round.of(sources, sources + 2**k, np.zeros((len(sources), 1), np.int64)))
    return tuple(rounds)


def chain_cast(p: int) -> Rounds:
    """Send all from each rank to the next, a rank a round; worth its while in chunks."""
    return tuple(Round.of([r], [r + 1], [[0]]) for r in range(p - 1))


def star_cast(p: int) -> Rounds:
    """Send all to every other rank at once."""
    return tuple(replace(step, blocks=0 * step.blocks) for step in star_scatter(p))


def star_scatter(p: int) -> Rounds:
    """Send each rank its slot at once."""
    others = np.arange(1, p)
    return (Round.of(np.zeros_like(others), others, others[:, None]),) if p > 1 else ()


def tree_scatter(p: int) -> Rounds:
    """Send half of the slots to rank p/2, and so on: slots go down a binomial tree."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sources = np.arange(0, p - 2**k, 2 ** (k + 1))
        slots = [range(s + 2**k, min(s + 2 ** (k + 1), p)) for s in sources]
        rounds.append(Round.of(sources, sources + 2**k, slots))
    return tuple(rounds)


WHOLE = {"tree": tree_cast, "chain": chain_cast, "star": star_cast}
"""Broadcasts that send the tensor whole."""
CUT = {"mesh": (star_scatter, mesh_gather), "nhr": (tree_scatter, nhr_gather)}
"""Broadcasts that scatter a slot to each rank and gather."""
CASTS = (*WHOLE, *CUT)
"""Names of broadcasts and reductions."""


def cast(name: str, p: int) -> tuple[int, Rounds]:
    """Return slots and rounds of the broadcast of that name from rank 0, which has all."""
    if name in WHOLE:
        return 1, WHOLE[name](p)
    scatter, gather = CUT[name]
    rounds = list(scatter(p))
    for step in gather(p):
        keep = step.targets != 0
        rounds.append(Round.of(step.sources[keep], step.targets[keep], step.blocks[keep]))
    return p, tuple(rounds)


def collect(name: str, p: int) -> tuple[int, Rounds]:
    """Return slots and rounds of the reduction of that name to rank 0.

    A tensor sent whole goes the broadcast's tree upwards; one in slots is reduce-scattered, and the
    finished slots come together.
    """
    if name in WHOLE:
        return 1, turned(WHOLE[name](p))
    scatter, gather = CUT[name]
    return p, (*turned(gather(p)), *backwards(scatter(p)))


# -- all-to-all: block s * p + d goes from rank s to rank d ---------------------------------------
def mesh_exchange(p: int) -> Rounds:
    """Send everything at once."""
    sources, targets = pairs(p)
    return (Round.of(sources, targets, (sources * p + targets)[:, None]),) if p > 1 else ()


def pairwise_exchange(p: int) -> Rounds:
    """Send in round t to the rank t on: one message out and one in for every rank."""
    ranks = np.arange(p)
    ways = ((ranks + t) % p for t in range(1, p))
    return tuple(Round.of(ranks, to, (ranks * p + to)[:, None]) for to in ways)


def bruck_exchange(p: int) -> Rounds:
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


EXCHANGES = {"mesh": mesh_exchange, "pairwise": pairwise_exchange, "bruck": bruck_exchange}
