"""Builds the algorithms of collectives: which rank sends which block to which rank, by round.

Each algorithm is a template: rounds of messages between ranks 0 .. p - 1. A message carries slots;
a slot represents one or more blocks of the tensor. A ring all-gather of 3 ranks, for example, has 2
rounds, and in the first of them rank r sends slot r to rank r + 1. Reductions are templates read
backwards, `applied` uses a template for several groups of ranks at once, and `chunked` sends a
tensor through it in chunks. Ring, halving and doubling follow Thakur, Rabenseifner and Gropp
(2005), mesh and NHR (nonuniform hierarchical ring) the cost formulas of HCCL.

Algorithms in two levels work inside servers and along rails: rail i joins the i-th ranks of all
servers. An all-reduce adds inside servers of g ranks first, so that each rank sends only n / g
bytes to other servers. A gather works between servers first for the same reason.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ascend_lab.cluster.schedule import NO_BLOCK, Ints, Round, merge_rounds

Rounds = tuple[Round, ...]
Stages = tuple[Rounds, ...]


# -- from templates to schedules -------------------------------------------------------------------
def as_reduction(rounds: Rounds) -> Rounds:
    """Return the rounds of a distribution read backwards, which are a reduction.

    In a distribution every rank receives a slot once, so the messages of a slot form a tree. The
    same tree from the leaves to the root adds up the slot.
    """
    return tuple(Round.of(r.targets, r.sources, r.blocks, True) for r in reversed(rounds))


def reversed_rounds(rounds: Rounds) -> Rounds:
    """Return the rounds of a scatter read backwards: a gather of the slots at one rank."""
    return tuple(Round.of(r.targets, r.sources, r.blocks) for r in reversed(rounds))


def applied(rounds: Rounds, ranks: Ints, blocks: Ints) -> Rounds:
    """Return the rounds of a template for several groups of p ranks that act at once.

    `ranks` is (groups, p). `blocks` is (groups or 1, slots, w): each slot stands for w blocks.
    """
    group_rounds = []
    groups = len(ranks)
    width = blocks.shape[2]
    for template in rounds:
        messages, count = template.blocks.shape
        # A gather of 2 ranks and 2 slots on groups (0, 1) and (2, 3), each slot standing for 2
        # blocks: messages 0 -> 1, 1 -> 0, 2 -> 3, 3 -> 2 carry blocks (0, 1), (2, 3), (0, 1), (2,
        # 3).
        is_padding = (template.blocks == NO_BLOCK)[None, :, :, None]
        slot_blocks = np.where(is_padding, NO_BLOCK, blocks[:, template.blocks])
        # a single row of `blocks` serves all groups
        all_blocks = np.broadcast_to(slot_blocks, (groups, messages, count, width))
        message_blocks = all_blocks.reshape(groups * messages, count * width)
        sources = ranks[:, template.sources].reshape(-1)
        targets = ranks[:, template.targets].reshape(-1)
        reduces = np.tile(template.reduces, groups)
        group_rounds.append(Round(sources, targets, message_blocks, reduces))
    return tuple(group_rounds)


def chunked(rounds: Rounds, chunks: int, lag: int) -> Rounds:
    """Divide every block into `chunks`, each of which starts `lag` rounds after the one before.

    Block b becomes blocks b * chunks .. b * chunks + chunks - 1. Messages of different chunks that
    fall into one round are sent at once.
    """
    # A chain of 4 ranks has 3 rounds; in 8 chunks with lag 1 it takes 3 + 7 rounds of an eighth
    # of the tensor each, the time of 10 / 8 instead of 3 whole tensors.
    rounds_at: list[list[Round]] = [[] for _ in range(len(rounds) + (chunks - 1) * lag)]
    for chunk in range(chunks):
        for t, message_round in enumerate(rounds):
            finer = np.where(
                message_round.blocks == NO_BLOCK, NO_BLOCK, message_round.blocks * chunks + chunk
            )
            rounds_at[t + chunk * lag].append(replace(message_round, blocks=finer))
    return tuple(merge_rounds(group) for group in rounds_at if group)


# -- all-gather: slot i belongs to rank i ----------------------------------------------------------
def ring_gather(p: int, step: int = 1) -> Rounds:
    """Gather in p - 1 rounds, in each of which every rank passes on the slot received last."""
    ranks = np.arange(p)
    # Of 3 ranks: round 0 sends slots 0, 1, 2 to ranks 1, 2, 0; round 1 sends on slots 2, 0, 1.
    targets = (ranks + step) % p
    return tuple(Round.of(ranks, targets, ((ranks - step * t) % p)[:, None]) for t in range(p - 1))


def double_ring_gather(p: int) -> Rounds:
    """Gather two blocks per rank: even blocks go round the ring one way, odd blocks the other way.

    With two ranks both ways are the same, and one message carries both blocks.
    """
    if p <= 2:
        return tuple(replace(r, blocks=2 * r.blocks + np.arange(2)) for r in ring_gather(p))
    return tuple(
        merge_rounds((replace(a, blocks=2 * a.blocks), replace(b, blocks=2 * b.blocks + 1)))
        for a, b in zip(ring_gather(p), ring_gather(p, -1), strict=True)
    )


def mesh_gather(p: int) -> Rounds:
    """Gather in one round, in which every rank sends its slot to all others."""
    if p == 1:
        return ()
    sources, targets = pairs(p)
    return (Round.of(sources, targets, sources[:, None]),)


def pairs(p: int) -> tuple[Ints, Ints]:
    """Return the sources and targets of all pairs of ranks; each rank begins with the next one."""
    ranks = np.arange(p)
    distances = np.arange(1, p)
    # Of 3 ranks: 0 -> 1, 0 -> 2, 1 -> 2, 1 -> 0, 2 -> 0, 2 -> 1.
    return np.repeat(ranks, p - 1), ((ranks[:, None] + distances) % p).reshape(-1)


def nhr_gather(p: int) -> Rounds:
    """Gather in ceil(log2 p) rounds for any p, over distances 2^k that fall from round to round.

    At distance 2^k a rank sends its own slot and those from multiples of 2^(k+1) ranks before it.
    The number of slots doubles as the distance halves, so most bytes go to the next rank.
    """
    ranks = np.arange(p)
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        # Of 8 ranks each sends 1 slot 4 ranks on, then 2 slots 2 ranks on, then 4 slots to the
        # next rank: 7 slots in 3 rounds.
        back = np.arange(0, p - 2**k, 2 ** (k + 1))
        rounds.append(Round.of(ranks, (ranks + 2**k) % p, (ranks[:, None] - back) % p))
    return tuple(rounds)


def fold_ranks(p: int) -> tuple[Ints, Ints, Ints]:
    """Return (active ranks, folded ranks, their neighbours), with a power of two of active ranks.

    A folded rank sends its data to an active neighbour and gets the result from it at the end.
    """
    active_count = 2 ** (p.bit_length() - 1)
    # Of 6 ranks 4 stay (0, 2, 4, 5); ranks 1 and 3 fold into ranks 0 and 2.
    spare = np.arange(p - active_count)
    active_ranks = np.concatenate([2 * spare, np.arange(2 * (p - active_count), p)])
    return active_ranks, 2 * spare + 1, 2 * spare


def doubling_gather(p: int) -> Rounds:
    """Gather by exchanging all slots gathered so far with the ranks at distances p/2, p/4 .. 1.

    If p is not a power of two, some ranks are folded: such a rank gives its slot to its left
    neighbour and gets all others from it at the end.
    """
    active_ranks, folded_ranks, neighbours = fold_ranks(p)
    own_blocks = active_ranks[:, None]
    if len(folded_ranks):
        second = np.full(len(active_ranks), NO_BLOCK)
        second[: len(folded_ranks)] = folded_ranks
        own_blocks = np.stack([active_ranks, second], axis=1)
    count = len(active_ranks)
    active = np.arange(len(active_ranks))
    rounds = (
        [Round.of(folded_ranks, neighbours, folded_ranks[:, None])] if len(folded_ranks) else []
    )
    for k in reversed(range(count.bit_length() - 1)):
        span = 2 ** (k + 1)
        # Of 4 ranks, rank 0 swaps slot 0 with rank 2, then slots 0 and 2 with rank 1.
        have = active[:, None] % span + span * np.arange(count // span)
        rounds.append(
            Round.of(active_ranks, active_ranks[active ^ 2**k], own_blocks[have].reshape(count, -1))
        )
    if len(folded_ranks):
        # Every slot except the folded rank's own: rank 1 of 4 still lacks slots 0, 2 and 3.
        other_blocks = np.arange(p - 1) + (np.arange(p - 1) >= folded_ranks[:, None])
        rounds.append(Round.of(neighbours, folded_ranks, other_blocks))
    return tuple(rounds)


GATHERS: dict[str, Callable[[int], Rounds]] = {
    "ring": ring_gather,
    "mesh": mesh_gather,
    "halving-doubling": doubling_gather,
    "nhr": nhr_gather,
}
"""All-gathers by name, as functions of p; they have p slots."""


def reduce_scatter(name: str, p: int) -> Rounds:
    """Return the reduce-scatter of an algorithm, which is its all-gather read backwards."""
    # A ring read backwards would send to the left: the gather to the left gives one to the right.
    return as_reduction(ring_gather(p, -1) if name == "ring" else GATHERS[name](p))


# -- all-reduce -----------------------------------------------------------------------------------
def all_reduce(name: str, p: int) -> tuple[int, Rounds]:
    """Return the number of slots and the rounds of an all-reduce.

    Recursive doubling exchanges the whole tensor with the ranks at distances 1, 2, 4 .. and adds,
    in the fewest rounds. All others are a reduce-scatter and an all-gather. Halving-doubling and
    recursive doubling work on a power of two ranks; the ranks beyond it are folded.
    """
    active_ranks, folded_ranks, neighbours = fold_ranks(p)
    count = len(active_ranks)
    active = np.arange(len(active_ranks))
    if name == "halving-doubling":
        # Of 4 ranks: rank 0 adds slots 0 and 2 from rank 1, then slot 0 from rank 2 and gathers
        # slot 2, then slots 1 and 3: 4 rounds, in which 2 * 3/4 of the tensor arrive.
        inner = (*as_reduction(doubling_gather(count)), *doubling_gather(count))
        slots = count
        rounds = applied(inner, active_ranks[None], np.arange(count)[None, :, None])
    elif name == "recursive-doubling":
        slots = 1
        whole_tensor = np.zeros((count, 1), np.int64)
        steps = [2**k for k in range(count.bit_length() - 1)]
        rounds = tuple(
            Round.of(active_ranks, active_ranks[active ^ step], whole_tensor, True)
            for step in steps
        )
    else:
        return p, (*reduce_scatter(name, p), *GATHERS[name](p))
    if not len(folded_ranks):
        return slots, rounds
    # Ranks beyond the power of two add their tensor to a neighbour's first and get the sum last.
    all_slots = np.tile(np.arange(slots), (len(folded_ranks), 1))
    fold_round = Round.of(folded_ranks, neighbours, all_slots, True)
    unfold_round = Round.of(neighbours, folded_ranks, all_slots)
    return slots, (fold_round, *rounds, unfold_round)


# -- broadcast from rank 0, reduction to it -------------------------------------------------------
def tree_cast(p: int) -> Rounds:
    """Send the tensor over distances p/2, p/4 .. 1: each round doubles the ranks that have it."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        # Of 8 ranks: 0 sends to 4; then 0 and 4 to 2 and 6; then 0, 2, 4, 6 to 1, 3, 5, 7.
        sources = np.arange(0, p - 2**k, 2 ** (k + 1))
        rounds.append(Round.of(sources, sources + 2**k, np.zeros((len(sources), 1), np.int64)))
    return tuple(rounds)


def chain_cast(p: int) -> Rounds:
    """Send the tensor from each rank to the next, one hop per round; quick only in many chunks."""
    return tuple(Round.of([r], [r + 1], [[0]]) for r in range(p - 1))


def star_cast(p: int) -> Rounds:
    """Send the tensor from rank 0 to all others at once."""
    return tuple(
        replace(message_round, blocks=0 * message_round.blocks) for message_round in star_scatter(p)
    )


def star_scatter(p: int) -> Rounds:
    """Send each rank its slot from rank 0, all in one round."""
    leaves = np.arange(1, p)
    return (Round.of(np.zeros_like(leaves), leaves, leaves[:, None]),) if p > 1 else ()


def tree_scatter(p: int) -> Rounds:
    """Send each rank its slot down a binomial tree: half of the slots first go to rank p/2."""
    rounds = []
    for k in reversed(range((p - 1).bit_length())):
        sources = np.arange(0, p - 2**k, 2 ** (k + 1))
        # Of 6 ranks: 0 sends slots 4, 5 to rank 4; then 2, 3 to rank 2; then 0, 2, 4 send 1, 3, 5
        # on.
        slots = [range(s + 2**k, min(s + 2 ** (k + 1), p)) for s in sources]
        rounds.append(Round.of(sources, sources + 2**k, slots))
    return tuple(rounds)


TENSOR_CASTS = {"tree": tree_cast, "chain": chain_cast, "star": star_cast}
"""Broadcasts that send the tensor in one piece."""
SLOT_CASTS = {"mesh": (star_scatter, mesh_gather), "nhr": (tree_scatter, nhr_gather)}
"""Broadcasts that scatter a slot to each rank, then gather them everywhere."""
CASTS = (*TENSOR_CASTS, *SLOT_CASTS)
"""Names of broadcasts and reductions."""


def cast(name: str, p: int) -> tuple[int, Rounds]:
    """Return the number of slots and the rounds of a broadcast from rank 0."""
    if name in TENSOR_CASTS:
        return 1, TENSOR_CASTS[name](p)
    scatter, gather = SLOT_CASTS[name]
    rounds = list(scatter(p))
    for message_round in gather(p):
        # The root has all slots from the start: messages of the all-gather to it are left out.
        is_needed = message_round.targets != 0
        rounds.append(
            Round.of(
                message_round.sources[is_needed],
                message_round.targets[is_needed],
                message_round.blocks[is_needed],
            )
        )
    return p, tuple(rounds)


def collect(name: str, p: int) -> tuple[int, Rounds]:
    """Return the number of slots and the rounds of a reduction to rank 0.

    A tensor in one piece is reduced along the tree of the broadcast, backwards. A tensor in slots
    is reduce-scattered, and then the finished slots are gathered at rank 0.
    """
    if name in TENSOR_CASTS:
        return 1, as_reduction(TENSOR_CASTS[name](p))
    scatter, gather = SLOT_CASTS[name]
    return p, (*as_reduction(gather(p)), *reversed_rounds(scatter(p)))


# -- all-to-all: block s * p + d goes from rank s to rank d ---------------------------------------
def mesh_exchange(p: int) -> Rounds:
    """Send all blocks directly, in one round."""
    sources, targets = pairs(p)
    return (Round.of(sources, targets, (sources * p + targets)[:, None]),) if p > 1 else ()


def pairwise_exchange(p: int) -> Rounds:
    """Send in round t to the rank at distance t: every rank sends and receives one message."""
    ranks = np.arange(p)
    shifted = ((ranks + t) % p for t in range(1, p))
    return tuple(Round.of(ranks, to, (ranks * p + to)[:, None]) for to in shifted)


def bruck_exchange(p: int) -> Rounds:
    """Send in round k, to the rank at distance 2^k, all blocks whose distance has bit k.

    The distance of a block is (d - s) mod p; before round k it has travelled the lower k bits of
    it. There are few rounds, but blocks are sent several times (Bruck et al. 1997).
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
    """Return the number of blocks and the stages of an algorithm that ignores servers."""
    if op == "all_to_all":
        return p * p, (EXCHANGES[name](p),)
    if op in ("broadcast", "reduce"):
        slots, rounds = cast(name, p) if op == "broadcast" else collect(name, p)
        ranks = (np.arange(p) + root) % p
        return slots, (applied(rounds, ranks[None], np.arange(slots)[None, :, None]),)
    if name == "double-ring":
        gather_rounds = double_ring_gather(p)
        reduce_rounds = as_reduction(gather_rounds)
        stages = {
            "all_gather": (gather_rounds,),
            "reduce_scatter": (reduce_rounds,),
            "all_reduce": (reduce_rounds + gather_rounds,),
        }
        return 2 * p, stages[op]
    if op == "all_gather":
        return p, (GATHERS[name](p),)
    if op == "reduce_scatter":
        return p, (reduce_scatter(name, p),)
    if name in CASTS and name not in GATHERS:
        slots, rounds = cast(name, p)
        return slots, ((*as_reduction(rounds), *rounds),)
    slots, rounds = all_reduce(name, p)
    return slots, (rounds,)


def in_two(
    op: str, name: str, groups: Ints, root: int, inside: str, between: str
) -> tuple[int, Stages]:
    """Return the number of blocks and the stages of an algorithm in two levels.

    `groups` are the ranks of each server, `inside` and `between` the algorithms of the two levels.
    """
    servers, server_ranks = groups.shape
    rails = groups.T
    p = groups.size
    if op == "all_to_all":
        return p * p, (_exchange(groups),)
    if name == "pipeline":
        gather_rounds = _pipeline_gather(groups)
        reduce_rounds = as_reduction(gather_rounds)
        stages = {
            "all_reduce": (reduce_rounds, gather_rounds),
            "reduce_scatter": (reduce_rounds,),
            "all_gather": (gather_rounds,),
        }
        return p, stages[op]
    if op == "all_reduce":  # scatter inside, add up along each rail, gather inside
        # Two servers of two ranks, ring on both levels: 4 blocks. Rank 0 adds up blocks 0 and 1
        # inside, exchanges them with rank 2 along rail 0, and gathers blocks 2 and 3 from rank 1.
        slots, rail_rounds = all_reduce(between, servers)
        blocks = np.arange(server_ranks * slots).reshape(server_ranks, slots)
        return server_ranks * slots, (
            applied(reduce_scatter(inside, server_ranks), groups, blocks[None]),
            applied(rail_rounds, rails, blocks[:, :, None]),
            applied(GATHERS[inside](server_ranks), groups, blocks[None]),
        )
    if op == "all_gather":
        return p, (
            applied(GATHERS[between](servers), rails, rails[:, :, None]),
            applied(GATHERS[inside](server_ranks), groups, rails[None]),
        )
    if op == "reduce_scatter":
        return p, (
            applied(reduce_scatter(inside, server_ranks), groups, rails[None]),
            applied(reduce_scatter(between, servers), rails, rails[:, :, None]),
        )
    return _rooted(op, groups, root, inside, between)


def _rooted(op: str, groups: Ints, root: int, inside: str, between: str) -> tuple[int, Stages]:
    """Return a broadcast or reduction in two levels.

    A broadcast scatters inside the root's server, broadcasts along all rails, and gathers inside
    every server. If `inside` sends the tensor in one piece, it broadcasts along the root's rail,
    then inside every server. A reduction is the same backwards, and adds.
    """
    server, rail_number = (int(i[0]) for i in np.nonzero(groups == root))
    # the root becomes the first rank of the first server
    ordered_groups: Ints = np.roll(groups, (-server, -rail_number), axis=(0, 1))
    rooted = cast if op == "broadcast" else collect
    server_ranks = groups.shape[1]
    # Root 3, servers (0, 1), (2, 3), mesh inside and tree between: 3 sends block 1 to 2; along the
    # rails 3 sends block 0 to 1 and 2 sends block 1 to 0; then both servers gather.
    rail_slots, rail_rounds = rooted(between, len(groups))
    if inside in TENSOR_CASTS:
        _, server_rounds = rooted(inside, server_ranks)
        blocks = np.arange(rail_slots)[None]
        root_rail = ordered_groups[:, 0][None]
        along_root_rail = applied(rail_rounds, root_rail, blocks[:, :, None])
        in_servers = applied(server_rounds, ordered_groups, blocks[None])
        if op == "broadcast":
            return rail_slots, (along_root_rail, in_servers)
        return rail_slots, (in_servers, along_root_rail)
    blocks = np.arange(server_ranks * rail_slots).reshape(server_ranks, rail_slots)
    scatter_of, gather_of = SLOT_CASTS[inside]
    scatter = scatter_of(server_ranks)
    gather = gather_of(server_ranks)
    along_rails = applied(rail_rounds, ordered_groups.T, blocks[:, :, None])
    if op == "broadcast":
        stages = (
            applied(scatter, ordered_groups[:1], blocks[None]),
            along_rails,
            applied(gather, ordered_groups, blocks[None]),
        )
    else:
        stages = (
            applied(as_reduction(gather), ordered_groups, blocks[None]),
            along_rails,
            applied(reversed_rounds(scatter), ordered_groups[:1], blocks[None]),
        )
    return server_ranks * rail_slots, stages


def _exchange(groups: Ints) -> Rounds:
    """Return an all-to-all in two levels.

    Inside each server, a block is first sent to the rank on the rail of its target, in one round of
    a mesh. Then it is sent along the rail, in pairwise rounds.
    """
    servers, server_ranks = groups.shape
    p = groups.size
    rounds = []
    if server_ranks > 1:
        sender, receiver = pairs(server_ranks)
        # Servers (0, 1) and (2, 3): rank 0 hands rank 1 blocks 1 (0 to 1) and 3 (0 to 3, on the
        # rail of rank 1); then it sends along its own rail to rank 2 blocks 2 (0 to 2) and 6 (1 to
        # 2).
        targets = groups.T[receiver]
        handed_blocks = [groups[s, sender][:, None] * p + targets for s in range(servers)]
        inside = (groups[:, sender].reshape(-1), groups[:, receiver].reshape(-1))
        rounds.append(Round.of(*inside, np.concatenate(handed_blocks)))
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
    """Return an all-gather by a ring along the rails that overlaps with a mesh inside servers.

    In each round the mesh spreads the blocks that arrived by the rails in the round before. m
    servers take (m - 1) max(between, inside) + inside, as in the pipeline algorithm of HCCL.
    """
    servers, server_ranks = groups.shape
    rail = applied(ring_gather(servers), groups.T, groups.T[:, :, None])
    sender, receiver = pairs(server_ranks)
    mesh_pairs = groups[:, sender].reshape(-1), groups[:, receiver].reshape(-1)
    rounds = []
    for t in range(servers):
        simultaneous = [*rail[t : t + 1]]
        if server_ranks > 1:
            # Servers (0, 1), (2, 3): in round 0 rank 0 sends its block to rank 2 (rail) and to rank
            # 1 (mesh); in round 1 it spreads block 2, which arrived by the rail, to rank 1.
            simultaneous.append(
                Round.of(*mesh_pairs, np.roll(groups, t, axis=0)[:, sender].reshape(-1, 1))
            )
        if simultaneous:
            rounds.append(merge_rounds(simultaneous))
    return tuple(rounds)
