"""A collective as data: rounds of messages between ranks, each message some blocks of the tensor.

The same object is executed on arrays (`execute`) and timed on a topology (`cluster.timing`). Within
a round all messages are read before any is written, and the next round begins when the slowest
message of this one has arrived.

A schedule has the name of its algorithm, which makes it again (`cluster.make`). A name may say
more: "hierarchical(4:mesh,nhr)*2" is mesh inside fours of each server's ranks, NHR between the
fours, in two chunks.
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
NONE = -1
"""Fills up rows of blocks where messages of one round carry different counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Messages that travel at once.

    `sources`, `targets`: (m,) ranks; `blocks`: (m, k) numbers of the blocks each message carries,
    padded with `NONE`; `reduces`: (m,) whether the target adds them to its own or keeps them
    instead.
    """

    sources: Ints
    targets: Ints
    blocks: Ints
    reduces: Mask

    @property
    def counts(self) -> Ints:
        """Blocks in each message."""
        block_counts: Ints = (self.blocks != NONE).sum(axis=1)
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
            widest = max((len(row) for row in blocks), default=0)
            # Messages of blocks [4, 5] and [1] become the rows (4, 5) and (1, -1).
            filled = [(*row, *[NONE] * (widest - len(row))) for row in blocks]
            blocks = np.array(filled, np.int64).reshape(len(blocks), widest)
        source_ranks = np.asarray(sources, np.int64)
        target_ranks = np.asarray(targets, np.int64)
        flags = np.broadcast_to(np.asarray(reduces, bool), source_ranks.shape)
        return Round(source_ranks, target_ranks, blocks.astype(np.int64, copy=False), flags)


def together(rounds: Iterable[Round]) -> Round:
    """Return one round with the messages of several, as they travel at the same time."""
    parts = tuple(rounds)
    if len(parts) == 1:
        return parts[0]
    widest = max(member.blocks.shape[1] for member in parts)
    blocks = np.full((sum(len(member.sources) for member in parts), widest), NONE)
    row = 0
    for member in parts:
        messages, count = member.blocks.shape
        blocks[row : row + messages, :count] = member.blocks
        row += messages
    return Round(
        np.concatenate([p.sources for p in parts]),
        np.concatenate([p.targets for p in parts]),
        blocks,
        np.concatenate([p.reduces for p in parts]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A collective for `ranks` ranks: what it computes, how, and its rounds.

    The tensor is `blocks` equal blocks. all_reduce, reduce_scatter, reduce: every rank starts with
    all blocks; all_gather: rank r starts with the blocks of `share(r)`; broadcast: the root has
    all. reduce_scatter leaves rank r the sum of `share(r)`. In all_to_all block s * ranks + d goes
    from rank s to rank d.
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
        """Blocks that make up the bytes a size counts: for all_to_all one rank's send buffer."""
        return self.blocks // self.ranks if self.op == "all_to_all" else self.blocks

    def share(self, rank: int) -> range:
        """Return the blocks that are a rank's own in reduce_scatter, all_gather, all_to_all."""
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
            return Name(name, match[4], match[5], chunks, split)
    raise ClusterError(f"{op} by one of {', '.join(algorithms)}", repr(text), "choose one")


# -- on arrays ------------------------------------------------------------------------------------
def execute(schedule: Schedule, arrays: Sequence[Values]) -> list[Values]:
    """Return each rank's result, flat, from each rank's flat input of equal length n.

    all_reduce, reduce (root; None of the others' matter and they are returned as received) and
    reduce_scatter take n elements a rank and add; all_gather takes each rank's share and returns
    all; broadcast takes the root's; all_to_all takes ranks * k elements and returns as many.
    Raises `ClusterError` for other inputs, and where a rank sends what it has not.
    """
    checked_arrays = _checked(schedule, arrays)
    memory, has_block = _load(schedule, checked_arrays)
    for number, step in enumerate(schedule.rounds):
        rows, columns = np.nonzero(step.blocks != NONE)
        sources = step.sources[rows]
        targets = step.targets[rows]
        blocks = step.blocks[rows, columns]
        if not has_block[sources, blocks].all():
            bad = int(np.argmin(has_block[sources, blocks]))
            needed = f"{schedule.algorithm}: round {number}, rank {sources[bad]} with its block"
            raise ClusterError(needed, f"no block {blocks[bad]}", "mend the schedule")
        # Indexing with arrays copies: all messages of a round read what was there before the round.
        moved = memory[sources, blocks]
        adds = step.reduces[rows]
        memory[targets[~adds], blocks[~adds]] = moved[~adds]
        # `memory[...] += moved` would count only one of several messages that add to the same
        # block.
        np.add.at(memory, (targets[adds], blocks[adds]), moved[adds])
        has_block[targets, blocks] = True
    return [
        _result(schedule, memory, has_block, len(checked_arrays[0]), r)
        for r in range(schedule.ranks)
    ]


def _checked(schedule: Schedule, arrays: Sequence[Values]) -> list[Values]:
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


def _load(schedule: Schedule, given: list[Values]) -> tuple[Values, Mask]:
    """Return memory (rank, block, element) and which blocks are held; zeros fill up blocks."""
    ranks = schedule.ranks
    starts_with_own = schedule.op in ("all_gather", "all_to_all")
    blocks = schedule.blocks // ranks if starts_with_own else schedule.blocks
    pieces = ranks if schedule.op == "all_to_all" else 1  # each is cut into blocks evenly
    block_length = len(given[0]) // pieces
    per_piece = blocks // pieces
    # 10 elements in 4 blocks: 3 a block (rounded up), so the last block holds 1 element and 2
    # zeros.
    size = -(-block_length // per_piece)
    cut = np.zeros((ranks, pieces, per_piece * size), given[0].dtype)
    cut[:, :, :block_length] = np.stack(given).reshape(ranks, pieces, block_length)
    memory = np.zeros((ranks, schedule.blocks, size), given[0].dtype)
    has_block = np.zeros((ranks, schedule.blocks), bool)
    for rank in range(ranks):
        mine = schedule.starts_with(rank)
        if len(mine):
            memory[rank, mine.start : mine.stop] = cut[rank].reshape(blocks, size)
            has_block[rank, mine.start : mine.stop] = True
    return memory, has_block


def _result(schedule: Schedule, memory: Values, held: Mask, length: int, rank: int) -> Values:
    """Return what a rank ends with; raise `ClusterError` where it lacks a block of that."""
    expected = schedule.ends_with(rank)
    ranks = schedule.ranks
    if not held[rank, expected].all():
        lack = [int(b) for b in expected if not held[rank, b]][:4]
        needed = f"{schedule.algorithm}: every block of rank {rank} delivered"
        raise ClusterError(needed, f"blocks {lack} missing", "mend the schedule")
    flat = memory[rank, expected].reshape(-1)
    if schedule.op == "all_gather":
        flat = flat.reshape(ranks, -1)[:, :length]
    elif schedule.op == "all_to_all":
        flat = flat.reshape(ranks, -1)[:, : length // ranks]
    elif schedule.op == "reduce_scatter":
        # 10 elements over 4 ranks: 3, 3, 3 and 1; the two zeros that filled up the last block go.
        flat = flat[: max(0, length - rank * len(flat))]
    else:
        flat = flat[:length]
    result: Values = flat.reshape(-1).copy()
    return result


# -- published costs: alpha a message, beta a byte sent, gamma a byte added ------------------------
# From Thakur, Rabenseifner and Gropp (2005), Bruck et al. (1997) and the HCCL user guide. They
# hold where every pair has a path of its own and a device sends to all others at once; `timing`
# agrees there and differs where links are shared or messages queue for one link.
class LinkCosts(NamedTuple):
    """The costs of equal links: seconds a message, a byte sent, and a byte added."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0


def closed_form_s(
    op: str, algorithm: str, ranks: int, size_bytes: float, costs: LinkCosts
) -> float:
    """Return the published seconds of a flat algorithm; chains may say their chunks ("chain*8").

    `size_bytes` as in `time_collective`. Raises `ClusterError` for algorithms in levels.
    """
    op = op_name(op)
    parsed = parse_name(op, algorithm)
    if ranks < 1 or not size_bytes >= 0:
        raise ClusterError("ranks >= 1 and bytes >= 0", f"{ranks}, {size_bytes}", "count")
    if ranks == 1 or size_bytes == 0:
        return 0.0
    name = parsed.algorithm
    chunks = parsed.chunks or 1
    table = _table(op, ranks, chunks)
    if name not in table or (chunks > 1 and name != "chain"):
        needed = f"{op} by one of {', '.join(table)}"
        raise ClusterError(needed, name, "add the costs of the levels yourself")
    alphas, betas, gammas = table[name].tolist()
    # Ring all-reduce of 1 MB on 4 ranks, alpha 5 us, beta 1e-10 s/B (10 GB/s), gamma 0: 6 alphas
    # are 30 us, 1.5 tensors are 150 us, together 180 us.
    cost_s = size_bytes * (betas * costs.beta_s_per_byte + gammas * costs.gamma_s_per_byte)
    return float(alphas * costs.alpha_s + cost_s)


def _terms(alphas: float, betas: float, gammas: float = 0.0) -> Floats:
    """Return a cost as counts: messages one after another, tensors sent, tensors added."""
    return np.array((alphas, betas, gammas))


def _table(op: str, p: int, chunks: int) -> dict[str, Floats]:
    """Return the costs of an operation by algorithm."""
    if op == "all_to_all":
        log = math.ceil(math.log2(p))
        moved = sum((distance >> k) & 1 for k in range(log) for distance in range(p)) / p
        # (alphas, tensors sent). 8 ranks: mesh 1 and 1/8, pairwise 7 and 7/8, Bruck 3 and 1.5.
        exchange = {"mesh": (1, 1 / p), "pairwise": (p - 1, (p - 1) / p), "bruck": (log, moved)}
        return {name: _terms(*counts) for name, counts in exchange.items()}
    if op in ("broadcast", "reduce"):
        return _rooted(p, chunks, adds=float(op == "reduce"))
    if op in ("all_gather", "reduce_scatter"):
        return _gather(p, adds=float(op == "reduce_scatter"))
    scatter = _gather(p, 1.0)
    gather = _gather(p, 0.0)
    table = {name: scatter[name] + gather[name] for name in scatter}
    log = int(math.log2(p))
    share = (2**log - 1) / 2**log
    fold = _terms(2, 2, 1) if 2**log < p else _terms(0, 0)
    # Chain there and back: 4 ranks and 8 chunks take 6 + 7 = 13 messages of n / 8 instead of 6 of
    # n.
    hops = 2 * (p - 1) + chunks - 1
    adding = p - 1 + chunks - 1
    return {
        **table,
        "halving-doubling": _terms(2 * log, 2 * share, share) + fold,
        # 8 ranks: 3 alphas but 3 tensors sent, where halving-doubling has 6 alphas and 2 * 7/8
        # tensors: the first is better for small tensors, the second for large ones.
        "recursive-doubling": _terms(log, log, log) + fold,
        "tree": _rooted(p, 1, 1.0)["tree"] + _rooted(p, 1, 0.0)["tree"],
        "chain": _terms(hops, hops / chunks, adding / chunks),
    }


def _gather(p: int, adds: float) -> dict[str, Floats]:
    """All-gather, or (adds = 1) reduce-scatter."""
    share = (p - 1) / p
    log = math.ceil(math.log2(p))
    even = _terms(log, share, adds * share)
    return {
        "ring": _terms(p - 1, share, adds * share),
        "double-ring": _terms(p - 1, share / 2 if p > 2 else share, adds * share),
        # All p - 1 messages of n / p leave at once, each by its own link: one alpha, one n / p.
        "mesh": _terms(1, 1 / p, adds * share),
        "halving-doubling": _folded_gather(p, adds) if p & (p - 1) else even,
        "nhr": even,
    }


def _folded_gather(p: int, adds: float) -> Floats:
    """Fold in one slot, double what pairs hold, fold out all but the own."""
    kept = 2 ** int(math.log2(p))
    terms = _terms(2, 1.0, adds)
    # 6 ranks: two of the 4 that stay hold a folded neighbour's block besides their own: 2, 2, 1, 1.
    block_counts = [2] * (p - kept) + [1] * (2 * kept - p)
    for k in reversed(range(kept.bit_length() - 1)):
        span = 2 ** (k + 1)
        max_blocks = max(
            sum(block_counts[a] for a in range(a0, kept, span)) for a0 in range(min(span, kept))
        )
        terms = terms + _terms(1, max_blocks / p, adds * max_blocks / p)
    return terms


def _rooted(p: int, chunks: int, adds: float) -> dict[str, Floats]:
    log = math.ceil(math.log2(p))
    share = (p - 1) / p
    hops = p - 1 + chunks - 1
    gather = _gather(p, adds)
    return {
        "tree": _terms(log, log, adds * log),
        "chain": _terms(hops, hops / chunks, adds * hops / chunks),
        "star": _terms(1, 1, adds * (p - 1)),
        "mesh": _terms(1, 1 / p) + gather["mesh"],
        "nhr": _terms(log, share) + gather["nhr"],
    }
