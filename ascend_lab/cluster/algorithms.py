"""The algorithms of one level, as small templates of rounds over ranks 0 .. p-1 and slots; of two.

A template is turned round (a gather read backwards is a reduction), laid upon many groups of ranks
at once, and cut into chunks that follow each other through it. Gathers, broadcasts and all-to-alls
stand here for any number of ranks; reductions are made of them. Ring, halving and doubling after
Thakur, Rabenseifner and Gropp (2005); mesh and NHR after the cost formulas of HCCL.

In two levels rail i joins the i-th ranks of all servers. An all-reduce adds up inside first, so
that only n / g bytes a rank cross between servers; a gather goes between servers first for the
same reason.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ascend_lab.cluster.schedule import NO_BLOCK, Ints, Round, merge_rounds

Rounds = tuple[Round, ...]
Stages = tuple[Rounds, ...]


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
    laid_rounds = []
    groups = len(ranks)
    width = blocks.shape[2]
    for step in rounds:
        messages, count = step.blocks.shape
        # A gather of 2 ranks and 2 slots on groups (0, 1) and (2, 3), each slot standing for 2
        # blocks: messages 0 -> 1, 1 -> 0, 2 -> 3, 3 -> 2 carry blocks (0, 1), (2, 3), (0, 1), (2,
        # 3).
        picked = np.where(
            (step.blocks == NO_BLOCK)[None, :, :, None], NO_BLOCK, blocks[:, step.blocks]
        )
        rows = np.broadcast_to(picked, (groups, messages, count, width))
        sources, targets = (ranks[:, x].reshape(-1) for x in (step.sources, step.targets))
        rows = rows.reshape(groups * messages, count * width)
        laid_rounds.append(Round(sources, targets, rows, np.tile(step.reduces, groups)))
    return tuple(laid_rounds)


def chunked(rounds: Rounds, chunks: int, lag: int) -> Rounds:
    """Cut every block in `chunks`; each chunk goes through all rounds, `lag` rounds after the last.

    Block b becomes blocks b * chunks .. b * chunks + chunks - 1. Rounds of different chunks that
    fall together travel at once.
    """
    # A chain of 4 ranks has 3 rounds; in 8 chunks with lag 1 it takes 3 + 7 rounds of an eighth
    # of the tensor each, the time of 10 / 8 instead of 3 whole tensors.
    waves: list[list[Round]] = [[] for _ in range(len(rounds) + (chunks - 1) * lag)]
    for chunk in range(chunks):
        for t, step in enumerate(rounds):
            finer = np.where(step.blocks == NO_BLOCK, NO_BLOCK, step.blocks * chunks + chunk)
            waves[t + chunk * lag].append(replace(step, blocks=finer))
    return tuple(merge_rounds(wave) for wave in waves if wave)


# -- all-gather: slot i is rank i's ---------------------------------------------------------------
def ring_gather(p: int, step: int = 1) -> Rounds:
    """Pass on in p - 1 rounds, to the next rank, the slot received in the round before."""
    ranks = np.arange(p)
    # Of 3 ranks: round 0 sends slots 0, 1, 2 to ranks 1, 2, 0; round 1 sends on slots 2, 0, 1.
    targets = (ranks + step) % p
    return tuple(Round.of(ranks, targets, ((ranks - step * t) % p)[:, None]) for t in range(p - 1))


def double_ring_gather(p: int) -> Rounds:
    """Gather even blocks round one way and odd ones the other, two blocks a rank.

    Between two ranks both ways are one, and one message takes both blocks.
    """
    if p <= 2:
        return tuple(replace(r, blocks=2 * r.blocks + np.arange(2)) for r in ring_gather(p))
    return tuple(
        merge_rounds((replace(a, blocks=2 * a.blocks), replace(b, blocks=2 * b.blocks + 1)))
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
    ranks = np.arange(p)
    apart = np.arange(1, p)
    # Of 3 ranks: 0 -> 1, 0 -> 2, 1 -> 2, 1 -> 0, 2 -> 0, 2 -> 1.
    return np.repeat(ranks, p - 1), ((ranks[:, None] + apart) % p).reshape(-1)


def nhr_gather(p: int) -> Rounds:
    """Send ever more slots ever nearer: 2^k ranks on, what lies multiples of 2^(k+1) back.

    ceil(log2 p) rounds for any p and p - 1 slots a rank in all: each slot spreads along a tree, the
    trees of the slots are one tree turned on. Most bytes go to the next rank.
    """
    ranks = np.arange(p)
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        # Of 8 ranks each sends 1 slot 4 ranks on, then 2 slots 2 ranks on, then 4 slots to the
        # next rank: 7 slots in 3 rounds.
        back = np.arange(0, p - 2**k, 2 ** (k + 1))
        rounds.append(Round.of(ranks, (ranks + 2**k) % p, (ranks[:, None] - back) % p))
    return tuple(rounds)


def folded(p: int) -> tuple[Ints, Ints, Ints]:
    """Return (the ranks that stay, those that fold, whom they fold into): powers of 2 stay."""
    kept = 2 ** (p.bit_length() - 1)
    # Of 6 ranks 4 stay (0, 2, 4, 5); ranks 1 and 3 fold into ranks 0 and 2.
    spare = np.arange(p - kept)
    stay = np.concatenate([2 * spare, np.arange(2 * (p - kept), p)])
    return stay, 2 * spare + 1, 2 * spare


def doubling_gather(p: int) -> Rounds:
    """Swap all one has with ranks p/2, p/4 .. 1 away; ranks beyond a power of two fold in and out.

    A folded rank gives its slot to its left neighbour and gets all others from it in the end.
    """
    stay, fold, into = folded(p)
    own_blocks = stay[:, None]
    if len(fold):
        second = np.full(len(stay), NO_BLOCK)
        second[: len(fold)] = fold
        own_blocks = np.stack([stay, second], axis=1)
    count = len(stay)
    active = np.arange(len(stay))
    rounds = [Round.of(fold, into, fold[:, None])] if len(fold) else []
    for k in reversed(range(count.bit_length() - 1)):
        span = 2 ** (k + 1)
        # Of 4 ranks, rank 0 swaps slot 0 with rank 2, then slots 0 and 2 with rank 1.
        have = active[:, None] % span + span * np.arange(count // span)
        rounds.append(Round.of(stay, stay[active ^ 2**k], own_blocks[have].reshape(count, -1)))
    if len(fold):
        # Every slot except the folded rank's own: rank 1 of 4 still lacks slots 0, 2 and 3.
        other_blocks = np.arange(p - 1) + (np.arange(p - 1) >= fold[:, None])
        rounds.append(Round.of(into, fold, other_blocks))
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
    count = len(stay)
    active = np.arange(len(stay))
    if name == "halving-doubling":
        # Of 4 ranks: rank 0 adds slots 0 and 2 from rank 1, then slot 0 from rank 2 and gathers
        # slot 2, then slots 1 and 3: 4 rounds, in which 2 * 3/4 of the tensor arrive.
        inner = (*turned(doubling_gather(count)), *doubling_gather(count))
        slots = count
        rounds = laid(inner, stay[None], np.arange(count)[None, :, None])
    elif name == "recursive-doubling":
        slots = 1
        whole_tensor = np.zeros((count, 1), np.int64)
        steps = [2**k for k in range(count.bit_length() - 1)]
        rounds = tuple(Round.of(stay, stay[active ^ step], whole_tensor, True) for step in steps)
    else:
        return p, (*reduce_scatter(name, p), *GATHERS[name](p))
    if not len(fold):
        return slots, rounds
    # Ranks beyond the power of two add their tensor to a neighbour's first and get the sum last.
    all_slots = np.tile(np.arange(slots), (len(fold), 1))
    fold_round = Round.of(fold, into, all_slots, True)
    unfold_round = Round.of(into, fold, all_slots)
    return slots, (fold_round, *rounds, unfold_round)


# -- broadcast from rank 0, reduction to it -------------------------------------------------------
def tree_cast(p: int) -> Rounds:
    """Send all to ranks p/2, p/4 .. 1 on: the ranks that have it double each round."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        # Of 8 ranks: 0 sends to 4; then 0 and 4 to 2 and 6; then 0, 2, 4, 6 to 1, 3, 5, 7.
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
    leaves = np.arange(1, p)
    return (Round.of(np.zeros_like(leaves), leaves, leaves[:, None]),) if p > 1 else ()


def tree_scatter(p: int) -> Rounds:
    """Send half of the slots to rank p/2, and so on: slots go down a binomial tree."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sources = np.arange(0, p - 2**k, 2 ** (k + 1))
        # Of 6 ranks: 0 sends slots 4, 5 to rank 4; then 2, 3 to rank 2; then 0, 2, 4 send 1, 3, 5
        # on.
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
        # The root had all slots from the start: what the all-gather sends it is left out.
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
    shifted = ((ranks + t) % p for t in range(1, p))
    return tuple(Round.of(ranks, to, (ranks * p + to)[:, None]) for to in shifted)


def bruck_exchange(p: int) -> Rounds:
    """Send in round k to the rank 2^k on all whose way has bit k (Bruck et al. 1997).

    A block's way is (d - s) mod p; before round k it has gone its lower k bits. Few rounds, but
    blocks travel several times.
    """
    ranks = np.arange(p)[:, None]
    rounds = []
    for k in range((p - 1).bit_length()):
        # Of 4 ranks, round 0 moves distances 1 and 3 one rank on: rank 0 sends blocks 1 (for rank
        # 1) and 3 (for rank 3). Round 1 moves distances 2 and 3 two on: rank 0 sends its block 2,
        # and block 14 (from rank 3 to rank 2), which it received in round 0.
        distances = np.arange(p)
        distances = distances[(distances >> k) & 1 == 1]
        starts = (ranks - distances % 2**k) % p
        blocks = starts * p + (starts + distances) % p
        rounds.append(Round.of(ranks[:, 0], (ranks[:, 0] + 2**k) % p, blocks))
    return tuple(rounds)


EXCHANGES = {"mesh": mesh_exchange, "pairwise": pairwise_exchange, "bruck": bruck_exchange}


# -- by name, in one level and in two -----------------------------------------------------------
def flat(op: str, name: str, p: int, root: int) -> tuple[int, Stages]:
    """Return blocks and stages in one level."""
    if op == "all_to_all":
        return p * p, (EXCHANGES[name](p),)
    if op in ("broadcast", "reduce"):
        slots, rounds = cast(name, p) if op == "broadcast" else collect(name, p)
        ranks = (np.arange(p) + root) % p
        return slots, (laid(rounds, ranks[None], np.arange(slots)[None, :, None]),)
    if name == "double-ring":
        up = double_ring_gather(p)
        down = turned(up)
        return 2 * p, {"all_gather": (up,), "reduce_scatter": (down,)}.get(op, (down + up,))
    if op == "all_gather":
        return p, (GATHERS[name](p),)
    if op == "reduce_scatter":
        return p, (reduce_scatter(name, p),)
    if name in CASTS and name not in GATHERS:
        slots, rounds = cast(name, p)
        return slots, ((*turned(rounds), *rounds),)
    slots, rounds = all_reduce(name, p)
    return slots, (rounds,)


def in_two(
    op: str, name: str, groups: Ints, root: int, inside: str, between: str
) -> tuple[int, Stages]:
    """Return blocks and stages in two levels."""
    servers, server_ranks = groups.shape
    p = groups.size
    if op == "all_to_all":
        return p * p, (_exchange(groups),)
    if name == "pipeline":
        up = _pipeline_gather(groups)
        down = turned(up)
        return p, {"all_reduce": (down, up), "reduce_scatter": (down,), "all_gather": (up,)}[op]
    if op == "all_reduce":  # scatter inside, add up along each rail, gather inside
        # Two servers of two ranks, ring on both levels: 4 blocks. Rank 0 adds up blocks 0 and 1
        # inside, exchanges them with rank 2 along rail 0, and gathers blocks 2 and 3 from rank 1.
        slots, rail = all_reduce(between, servers)
        blocks = np.arange(server_ranks * slots).reshape(server_ranks, slots)
        return server_ranks * slots, (
            laid(reduce_scatter(inside, server_ranks), groups, blocks[None]),
            laid(rail, groups.T, blocks[:, :, None]),
            laid(GATHERS[inside](server_ranks), groups, blocks[None]),
        )
    if op == "all_gather":
        return p, (
            laid(GATHERS[between](servers), groups.T, groups.T[:, :, None]),
            laid(GATHERS[inside](server_ranks), groups, groups.T[None]),
        )
    if op == "reduce_scatter":
        return p, (
            laid(reduce_scatter(inside, server_ranks), groups, groups.T[None]),
            laid(reduce_scatter(between, servers), groups.T, groups.T[:, :, None]),
        )
    return _rooted(op, groups, root, inside, between)


def _rooted(op: str, groups: Ints, root: int, inside: str, between: str) -> tuple[int, Stages]:
    """Scatter inside the root's server, broadcast along all rails, gather inside every server.

    Where `inside` sends whole tensors: broadcast along the root's rail, then inside every server.
    A reduction goes the same ways backwards and adds up.
    """
    server, place = (int(i[0]) for i in np.nonzero(groups == root))
    home: Ints = np.roll(np.roll(groups, -server, axis=0), -place, axis=1)  # the root is first
    rooted = cast if op == "broadcast" else collect
    server_ranks = groups.shape[1]
    # Root 3, servers (0, 1), (2, 3), mesh inside and tree between: 3 sends block 1 to 2; along the
    # rails 3 sends block 0 to 1 and 2 sends block 1 to 0; then both servers gather.
    outer, rail = rooted(between, len(groups))
    slots, local = rooted(inside, server_ranks) if inside in WHOLE else (server_ranks, ())
    blocks = np.arange(slots * outer).reshape(slots, outer)
    if inside in WHOLE:
        one_server = (
            laid(rail, home[:, 0][None], blocks[:, :, None]),
            laid(local, home, blocks[None]),
        )
        return outer, one_server if op == "broadcast" else one_server[::-1]
    scatter, gather = (template(server_ranks) for template in CUT[inside])
    along = laid(rail, home.T, blocks[:, :, None])
    if op == "broadcast":
        root_scatter = laid(scatter, home[:1], blocks[None])
        return slots * outer, (root_scatter, along, laid(gather, home, blocks[None]))
    root_gather = laid(backwards(scatter), home[:1], blocks[None])
    return slots * outer, (laid(turned(gather), home, blocks[None]), along, root_gather)


def _exchange(groups: Ints) -> Rounds:
    """Hand inside each server what goes along a rail to the rank on that rail, then send it there.

    Inside at once, between servers pairwise.
    """
    servers, server_ranks = groups.shape
    p = groups.size
    rounds = []
    if server_ranks > 1:
        sender, receiver = pairs(server_ranks)
        # Servers (0, 1) and (2, 3): rank 0 hands rank 1 blocks 1 (0 to 1) and 3 (0 to 3, on the
        # rail of rank 1); then it sends along its own rail to rank 2 blocks 2 (0 to 2) and 6 (1 to
        # 2).
        to = groups.T[receiver]
        parts = [groups[s, sender][:, None] * p + to for s in range(servers)]
        inside = (groups[:, sender].reshape(-1), groups[:, receiver].reshape(-1))
        rounds.append(Round.of(*inside, np.concatenate(parts)))
    source_server = np.arange(servers)
    for t in range(1, servers):
        target_server = (source_server + t) % servers
        blocks = groups[source_server][:, None, :] * p + groups[target_server][:, :, None]
        rounds.append(
            Round.of(
                groups[source_server].reshape(-1),
                groups[target_server].reshape(-1),
                blocks.reshape(p, server_ranks),
            )
        )
    return tuple(rounds)


def _pipeline_gather(groups: Ints) -> Rounds:
    """Gather along rails in a ring while what came the round before spreads inside over the mesh.

    As many rounds as servers: (m - 1) max(between, inside) + inside, HCCL's pipeline.
    """
    servers, server_ranks = groups.shape
    rail = laid(ring_gather(servers), groups.T, groups.T[:, :, None])
    sender, receiver = pairs(server_ranks)
    sides = groups[:, sender].reshape(-1), groups[:, receiver].reshape(-1)
    rounds = []
    for t in range(servers):
        parts = [*rail[t : t + 1]]
        if server_ranks > 1:
            # Servers (0, 1), (2, 3): in round 0 rank 0 sends its block to rank 2 (rail) and to rank
            # 1 (mesh); in round 1 it spreads block 2, which arrived by the rail, to rank 1.
            parts.append(Round.of(*sides, np.roll(groups, t, axis=0)[:, sender].reshape(-1, 1)))
        if parts:
            rounds.append(merge_rounds(parts))
    return tuple(rounds)
