"""A collective as data: rounds of messages between ranks, which carry blocks of the tensor.

For example a ring all-gather of 4 ranks: in each of 3 rounds rank r sends one block to rank r + 1.
The same object is executed on arrays (`execute`) and timed on a topology (`cluster.timing`). Within
a round all messages are read before any is written, and the next round begins when the slowest
message of this one has arrived.

A schedule keeps the name of its algorithm, from which `cluster.make` builds it. A name can hold
parameters: "hierarchical(4:mesh,nhr)*2" forms groups of 4 ranks in each server, uses mesh inside
the groups and NHR (nonuniform hierarchical ring) between them, and sends the tensor in two chunks.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Values = NDArray[Any]
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
NO_BLOCK = -1
"""Pads the rows of `Round.blocks` where messages of one round carry different numbers of blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Messages that are sent at the same time.

    Of m messages with at most k blocks each, `sources` and `targets` are (m,) ranks, and `blocks`
    is (m, k) with the numbers of the blocks that each message carries, padded with `NO_BLOCK`.
    Where `reduces`, of shape (m,), is true, the target adds a block to its own, otherwise it
    replaces it.
    """

    sources: Ints
    targets: Ints
    blocks: Ints
    reduces: Mask

    @property
    def counts(self) -> Ints:
        """The number of blocks in each message."""
        block_counts: Ints = (self.blocks != NO_BLOCK).sum(axis=1)
        return block_counts

    @staticmethod
    def of(
        sources: Sequence[int] | Ints,
        targets: Sequence[int] | Ints,
        blocks: Sequence[Sequence[int]] | Ints,
        reduces: bool | Mask = False,
    ) -> "Round":
        """Return a round from lists; rows of blocks may differ in length."""
        if not isinstance(blocks, np.ndarray):
            max_blocks = max((len(row) for row in blocks), default=0)
            # Messages of blocks [4, 5] and [1] become the rows (4, 5) and (1, -1).
            filled = [(*row, *[NO_BLOCK] * (max_blocks - len(row))) for row in blocks]
            blocks = np.array(filled, np.int64).reshape(len(blocks), max_blocks)
        source_ranks = np.asarray(sources, np.int64)
        target_ranks = np.asarray(targets, np.int64)
        flags = np.broadcast_to(np.asarray(reduces, bool), source_ranks.shape)
        return Round(source_ranks, target_ranks, blocks.astype(np.int64, copy=False), flags)


def merge_rounds(rounds: Iterable[Round]) -> Round:
    """Return one round that holds the messages of several rounds, which then travel at once."""
    merged = tuple(rounds)
    if len(merged) == 1:
        return merged[0]
    max_blocks = max(member.blocks.shape[1] for member in merged)
    blocks = np.full((sum(len(member.sources) for member in merged), max_blocks), NO_BLOCK)
    row = 0
    for member in merged:
        messages, count = member.blocks.shape
        blocks[row : row + messages, :count] = member.blocks
        row += messages
    return Round(
        np.concatenate([p.sources for p in merged]),
        np.concatenate([p.targets for p in merged]),
        blocks,
        np.concatenate([p.reduces for p in merged]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A collective operation of `ranks` ranks by one algorithm, as rounds of messages.

    The tensor is divided into `blocks` equal blocks. In all_reduce, reduce_scatter and reduce every
    rank starts with all blocks. In all_gather rank r starts with the blocks of `share(r)`, and in
    broadcast only the root has blocks. After reduce_scatter rank r has the sum of `share(r)`. In
    all_to_all, block s * ranks + d goes from rank s to rank d.
    """

    op: str
    algorithm: str
    ranks: int
    blocks: int
    rounds: tuple[Round, ...]
    root: int = 0

    def __post_init__(self) -> None:
        """Check operation, root, and that blocks divide among the ranks."""
        if self.op not in OPS:
            raise ClusterError(f"one of {', '.join(OPS)}", repr(self.op), "choose one")
        if self.ranks < 1 or not 0 <= self.root < self.ranks:
            raise ClusterError(f"a root below {self.ranks} ranks", str(self.root), "choose one")
        if self.op in ("reduce_scatter", "all_gather") and self.blocks % self.ranks:
            needed = f"{self.op}: a multiple of {self.ranks} blocks"
            raise ClusterError(needed, str(self.blocks), "cut the tensor finer")
        if self.op == "all_to_all" and self.blocks % self.ranks**2:
            needed = f"all_to_all: a multiple of {self.ranks}^2 blocks"
            raise ClusterError(needed, str(self.blocks), "one block for each pair of ranks")

    @property
    def parts(self) -> int:
        """The number of blocks in one rank's buffer, whose bytes are the size of a collective.

        In all_to_all each of p ranks sends 1 / p of all blocks; in the others a buffer has them
        all.
        """
        return self.blocks // self.ranks if self.op == "all_to_all" else self.blocks

    def share(self, rank: int) -> range:
        """Return the blocks that belong to a rank in reduce_scatter, all_gather and all_to_all."""
        rank_blocks = self.blocks // self.ranks
        return range(rank * rank_blocks, (rank + 1) * rank_blocks)

    def starts_with(self, rank: int) -> range:
        """Return the blocks a rank has at the beginning."""
        if self.op in ("all_gather", "all_to_all"):
            return self.share(rank)
        if self.op == "broadcast" and rank != self.root:
            return range(0)
        return range(self.blocks)

    def ends_with(self, rank: int) -> Ints:
        """Return the blocks a rank must have in the end."""
        if self.op == "reduce_scatter":
            return np.array(self.share(rank))
        if self.op == "all_to_all":
            # Of 3 ranks with 9 blocks, rank 1 ends with blocks 1 (from 0), 4 (its own) and 7 (from
            # 2).
            pairs = np.arange(self.blocks).reshape(self.ranks, self.ranks, -1)
            return pairs[:, rank].reshape(-1)
        return np.arange(self.blocks)


# -- operations and algorithms by name ------------------------------------------------------------
_SCATTER_ALGORITHMS = (
    *("ring", "double-ring", "mesh", "halving-doubling", "nhr"),
    *("hierarchical", "pipeline"),
)
_ROOTED_ALGORITHMS = ("tree", "chain", "star", "mesh", "nhr", "hierarchical")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        *("ring", "double-ring", "mesh", "halving-doubling", "recursive-doubling", "nhr"),
        *("tree", "chain", "hierarchical", "pipeline"),
    ),
    "reduce_scatter": _SCATTER_ALGORITHMS,
    "all_gather": _SCATTER_ALGORITHMS,
    "broadcast": _ROOTED_ALGORITHMS,
    "reduce": _ROOTED_ALGORITHMS,
    "all_to_all": ("mesh", "pairwise", "bruck", "hierarchical"),
}
"""Operation -> the algorithms that can do it."""
LEVELS = ("hierarchical", "pipeline")
"""Algorithms in levels: inside each server, and between servers."""
ALIASES = {
    "binomial": "tree",
    "binomial-tree": "tree",
    "rhd": "halving-doubling",
    "h-d-r": "halving-doubling",
    "recursive-halving-doubling": "halving-doubling",
    "direct": "mesh",
}
"""Other names of algorithms in the literature -> the name here."""
_LEVEL_PART = r"\((?:(\d+)|(?:(\d+):)?([a-z-]+),([a-z-]+))\)"
_NAME = re.compile(rf"([a-z-]+)(?:{_LEVEL_PART})?(?:\*(\d+))?")


class AlgorithmName(NamedTuple):
    """The parts of an algorithm's name, such as "hierarchical(4:mesh,nhr)*2"; None if absent.

    `inside` is mesh, `between` is nhr, `chunks` is 2, `split` is 4.
    """

    algorithm: str
    inside: str | None = None
    between: str | None = None
    chunks: int | None = None
    split: int | None = None


def op_name(text: str) -> str:
    """Return the standard name of an operation: "all_reduce" for allreduce or All-Reduce."""
    plain = re.sub(r"[^a-z]", "", text.lower())
    for op in OPS:
        if plain == op.replace("_", ""):
            return op
    raise ClusterError(f"one of {', '.join(OPS)}", repr(text), "choose one")


def parse_name(op: str, text: str) -> AlgorithmName:
    """Return the parts of an algorithm's name; raise `ClusterError` for an unknown algorithm."""
    algorithms = ALGORITHMS[op_name(op)]
    # "hierarchical(4:mesh,nhr)*2" gives the groups hierarchical, None, 4, mesh, nhr, 2; in
    # "pipeline(4)" the 4 is the second group instead.
    match = _NAME.fullmatch(re.sub(r"\s", "", text.lower()).replace("_", "-"))
    if match is not None:
        name = ALIASES.get(match[1], match[1])
        if name == "pipeline" and "chain" in algorithms and name not in algorithms:
            name = "chain"
        chunks, split = (int(n) if n else None for n in (match[6], match[2] or match[3]))
        plain = not (match[4] or split)
        if name in algorithms and (plain or name in LEVELS) and chunks != 0 and split != 0:
            return AlgorithmName(name, match[4], match[5], chunks, split)
    raise ClusterError(f"{op} by one of {', '.join(algorithms)}", repr(text), "choose one")


# -- on arrays ------------------------------------------------------------------------------------
def execute(schedule: Schedule, arrays: Sequence[Values]) -> list[Values]:
    """Return the flat result of each rank, computed from the flat input of each rank.

    All inputs have the same length n. all_reduce, reduce and reduce_scatter add them; after a
    reduce only the result of the root is the sum. all_gather joins the inputs, broadcast copies the
    root's, and all_to_all, where n is a multiple of the number of ranks, exchanges them. Raises
    `ClusterError` for other inputs, and if a rank sends a block that it does not have.
    """
    checked_arrays = _checked_arrays(schedule, arrays)
    memory, has_block = _initial_memory(schedule, checked_arrays)
    for number, message_round in enumerate(schedule.rounds):
        rows, columns = np.nonzero(message_round.blocks != NO_BLOCK)
        sources = message_round.sources[rows]
        targets = message_round.targets[rows]
        blocks = message_round.blocks[rows, columns]
        if not has_block[sources, blocks].all():
            missing = int(np.argmin(has_block[sources, blocks]))
            needed = f"{schedule.algorithm}: round {number}, rank {sources[missing]} with its block"
            raise ClusterError(needed, f"no block {blocks[missing]}", "correct the schedule")
        # Indexing with arrays copies: all messages of a round read what was there before the round.
        moved = memory[sources, blocks]
        adds = message_round.reduces[rows]
        memory[targets[~adds], blocks[~adds]] = moved[~adds]
        # `memory[...] += moved` would count only one of several messages that add to the same
        # block.
        np.add.at(memory, (targets[adds], blocks[adds]), moved[adds])
        has_block[targets, blocks] = True
    return [
        _result(schedule, memory, has_block, len(checked_arrays[0]), r)
        for r in range(schedule.ranks)
    ]


def _checked_arrays(schedule: Schedule, arrays: Sequence[Values]) -> list[Values]:
    """Return the inputs as NumPy arrays; raise `ClusterError` if their number or shapes differ."""
    converted = [np.asarray(a) for a in arrays]
    needed = f"{schedule.op}: {schedule.ranks} flat arrays of one length and kind"
    kinds = {(a.shape, a.dtype) for a in converted}
    if len(converted) != schedule.ranks or len(kinds) > 1 or any(a.ndim != 1 for a in converted):
        got = f"{len(converted)} of shapes {sorted({a.shape for a in converted})}"
        raise ClusterError(needed, got, "one ravelled array a rank")
    if schedule.op == "all_to_all" and len(converted[0]) % schedule.ranks:
        needed = f"all_to_all: elements for each of {schedule.ranks} ranks alike"
        raise ClusterError(needed, str(len(converted[0])), "pad them")
    return converted


def _initial_memory(schedule: Schedule, arrays: list[Values]) -> tuple[Values, Mask]:
    """Return the ranks' memory before the first round, and which blocks each rank has.

    The memory is (rank, block, element), the second array (rank, block). Blocks are padded with
    zeros to equal length.
    """
    ranks = schedule.ranks
    starts_with_own = schedule.op in ("all_gather", "all_to_all")
    blocks = schedule.blocks // ranks if starts_with_own else schedule.blocks
    pieces = ranks if schedule.op == "all_to_all" else 1  # each is cut into blocks evenly
    block_length = len(arrays[0]) // pieces
    per_piece = blocks // pieces
    # 10 elements in 4 blocks: 3 a block (rounded up), so the last block holds 1 element and 2
    # zeros.
    block_size = -(-block_length // per_piece)
    padded = np.zeros((ranks, pieces, per_piece * block_size), arrays[0].dtype)
    padded[:, :, :block_length] = np.stack(arrays).reshape(ranks, pieces, block_length)
    memory = np.zeros((ranks, schedule.blocks, block_size), arrays[0].dtype)
    has_block = np.zeros((ranks, schedule.blocks), bool)
    for rank in range(ranks):
        rank_blocks = schedule.starts_with(rank)
        if len(rank_blocks):
            memory[rank, rank_blocks.start : rank_blocks.stop] = padded[rank].reshape(
                blocks, block_size
            )
            has_block[rank, rank_blocks.start : rank_blocks.stop] = True
    return memory, has_block


def _result(schedule: Schedule, memory: Values, has_block: Mask, length: int, rank: int) -> Values:
    """Return the result of a rank; raise `ClusterError` if one of its blocks has not arrived."""
    expected = schedule.ends_with(rank)
    ranks = schedule.ranks
    if not has_block[rank, expected].all():
        missing = [int(b) for b in expected if not has_block[rank, b]][:4]
        needed = f"{schedule.algorithm}: every block of rank {rank} delivered"
        raise ClusterError(needed, f"blocks {missing} missing", "correct the schedule")
    flat = memory[rank, expected].reshape(-1)
    if schedule.op == "all_gather":
        flat = flat.reshape(ranks, -1)[:, :length]
    elif schedule.op == "all_to_all":
        flat = flat.reshape(ranks, -1)[:, : length // ranks]
    elif schedule.op == "reduce_scatter":
        # 10 elements over 4 ranks: 3, 3, 3 and 1; the two zeros that filled up the last block are
        # dropped.
        flat = flat[: max(0, length - rank * len(flat))]
    else:
        flat = flat[:length]
    result: Values = flat.reshape(-1).copy()
    return result


# -- published costs: alpha per message, beta per byte sent, gamma per byte added ------------------
# From Thakur, Rabenseifner and Gropp (2005), Bruck et al. (1997) and the HCCL user guide. They hold
# if every pair has a path of its own and a device can send to all others at once. Then `timing`
# agrees with them; it differs if links are shared or messages queue for a link.
class LinkCosts(NamedTuple):
    """The costs of links that are all equal: seconds per message, per byte sent and byte added."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0


def closed_form_s(
    op: str, algorithm: str, ranks: int, size_bytes: float, costs: LinkCosts
) -> float:
    """Return the time of an algorithm by its published formula, in seconds.

    "chain*8" is a chain that sends the tensor in 8 chunks. `size_bytes` is as in `time_collective`.
    Raises `ClusterError` for algorithms in levels, which have no formula here.
    """
    op = op_name(op)
    parsed = parse_name(op, algorithm)
    if ranks < 1 or not size_bytes >= 0:
        raise ClusterError("ranks >= 1 and bytes >= 0", f"{ranks}, {size_bytes}", "count")
    if ranks == 1 or size_bytes == 0:
        return 0.0
    name = parsed.algorithm
    chunks = parsed.chunks or 1
    table = _cost_table(op, ranks, chunks)
    if name not in table or (chunks > 1 and name != "chain"):
        needed = f"{op} by one of {', '.join(table)}"
        raise ClusterError(needed, name, "add the costs of the levels yourself")
    alphas, betas, gammas = table[name].tolist()
    # Ring all-reduce of 1 MB on 4 ranks, alpha 5 us, beta 1e-10 s/B (10 GB/s), gamma 0: 6 alphas
    # are 30 us, 1.5 tensors are 150 us, together 180 us.
    cost_s = size_bytes * (betas * costs.beta_s_per_byte + gammas * costs.gamma_s_per_byte)
    return float(alphas * costs.alpha_s + cost_s)


def _terms(alphas: float, betas: float, gammas: float = 0.0) -> Floats:
    """Return a cost as an array: messages one after another, tensors sent, tensors added.

    (6, 1.5, 0.75) is the ring all-reduce of 4 ranks.
    """
    return np.array((alphas, betas, gammas))


def _cost_table(op: str, p: int, chunks: int) -> dict[str, Floats]:
    """Return the costs of an operation on p ranks by algorithm, as `_terms`."""
    if op == "all_to_all":
        round_count = math.ceil(math.log2(p))
        tensors_moved = (
            sum((distance >> k) & 1 for k in range(round_count) for distance in range(p)) / p
        )
        # (alphas, tensors sent). 8 ranks: mesh 1 and 1/8, pairwise 7 and 7/8, Bruck 3 and 1.5.
        exchange = {
            "mesh": (1, 1 / p),
            "pairwise": (p - 1, (p - 1) / p),
            "bruck": (round_count, tensors_moved),
        }
        return {name: _terms(*counts) for name, counts in exchange.items()}
    if op in ("broadcast", "reduce"):
        return _rooted_costs(p, chunks, additions=float(op == "reduce"))
    if op in ("all_gather", "reduce_scatter"):
        return _gather_costs(p, additions=float(op == "reduce_scatter"))
    scatter = _gather_costs(p, 1.0)
    gather = _gather_costs(p, 0.0)
    table = {name: scatter[name] + gather[name] for name in scatter}
    round_count = int(math.log2(p))
    sent_share = (2**round_count - 1) / 2**round_count
    fold = _terms(2, 2, 1) if 2**round_count < p else _terms(0, 0)
    # Chain there and back: 4 ranks and 8 chunks take 6 + 7 = 13 messages of n / 8 instead of 6 of
    # n.
    message_count = 2 * (p - 1) + chunks - 1
    addition_count = p - 1 + chunks - 1
    return {
        **table,
        "halving-doubling": _terms(2 * round_count, 2 * sent_share, sent_share) + fold,
        # 8 ranks: 3 alphas but 3 tensors sent, where halving-doubling has 6 alphas and 2 * 7/8
        # tensors: the first is better for small tensors, the second for large ones.
        "recursive-doubling": _terms(round_count, round_count, round_count) + fold,
        "tree": _rooted_costs(p, 1, 1.0)["tree"] + _rooted_costs(p, 1, 0.0)["tree"],
        "chain": _terms(message_count, message_count / chunks, addition_count / chunks),
    }


def _gather_costs(p: int, additions: float) -> dict[str, Floats]:
    """Return the costs of an all-gather (`additions` 0) or a reduce-scatter (1) by algorithm."""
    share = (p - 1) / p
    round_count = math.ceil(math.log2(p))
    doubling = _terms(round_count, share, additions * share)
    return {
        "ring": _terms(p - 1, share, additions * share),
        "double-ring": _terms(p - 1, share / 2 if p > 2 else share, additions * share),
        # All p - 1 messages of n / p leave at once, each by its own link: one alpha, one n / p.
        "mesh": _terms(1, 1 / p, additions * share),
        "halving-doubling": _folded_gather_costs(p, additions) if p & (p - 1) else doubling,
        "nhr": doubling,
    }


def _folded_gather_costs(p: int, additions: float) -> Floats:
    """Return the cost of halving-doubling where p is not a power of two.

    The ranks above the largest power of two hand their block to a neighbour in one round, the
    others double what they hold in every round, and a last round sends the result back.
    """
    remaining = 2 ** int(math.log2(p))
    terms = _terms(2, 1.0, additions)
    # 6 ranks: two of the 4 that remain hold a folded neighbour's block besides their own: 2, 2, 1,
    # 1.
    block_counts = [2] * (p - remaining) + [1] * (2 * remaining - p)
    for bit in reversed(range(remaining.bit_length() - 1)):
        span = 2 ** (bit + 1)
        max_blocks = max(sum(block_counts[first::span]) for first in range(min(span, remaining)))
        terms = terms + _terms(1, max_blocks / p, additions * max_blocks / p)
    return terms


def _rooted_costs(p: int, chunks: int, additions: float) -> dict[str, Floats]:
    """Return the costs of a broadcast (`additions` 0) or a reduce (1) by algorithm."""
    round_count = math.ceil(math.log2(p))
    share = (p - 1) / p
    hops = p - 1 + chunks - 1
    gather = _gather_costs(p, additions)
    return {
        "tree": _terms(round_count, round_count, additions * round_count),
        "chain": _terms(hops, hops / chunks, additions * hops / chunks),
        "star": _terms(1, 1, additions * (p - 1)),
        "mesh": _terms(1, 1 / p) + gather["mesh"],
        "nhr": _terms(round_count, share) + gather["nhr"],
    }
