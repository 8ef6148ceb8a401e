"""A collective as data: rounds of messages between ranks, each message some blocks of the tensor.

The same object is executed on arrays (`execute`) and timed on a topology (`cluster.timing`). Within
a round all messages are read before any is written, and the next round begins when the slowest
message of this one has arrived.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
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
    reduces: NDArray[np.bool_]

    @property
    def counts(self) -> Ints:
        """Blocks in each message."""
        found: Ints = (self.blocks != NONE).sum(axis=1)
        return found

    @staticmethod
    def of(
        sources: Sequence[int] | Ints,
        targets: Sequence[int] | Ints,
        blocks: Sequence[Sequence[int]] | Ints,
        reduces: bool | NDArray[np.bool_] = False,
    ) -> "Round":
        """Return a round from lists; rows of blocks may differ in length."""
        if not isinstance(blocks, np.ndarray):
            widest = max((len(row) for row in blocks), default=0)
            filled = [(*row, *[NONE] * (widest - len(row))) for row in blocks]
            blocks = np.array(filled, np.int64).reshape(len(blocks), widest)
        one, two = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        flags = np.broadcast_to(np.asarray(reduces, bool), one.shape)
        return Round(one, two, blocks.astype(np.int64, copy=False), flags)


def together(rounds: Iterable[Round]) -> Round:
    """Return one round with the messages of several, as they travel at the same time."""
    parts = tuple(rounds)
    if len(parts) == 1:
        return parts[0]
    widest = max(part.blocks.shape[1] for part in parts)
    blocks = np.full((sum(len(part.sources) for part in parts), widest), NONE)
    row = 0
    for part in parts:
        messages, count = part.blocks.shape
        blocks[row : row + messages, :count] = part.blocks
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
            what = f"{self.op}: a multiple of {self.ranks} blocks"
            raise ClusterError(what, str(self.blocks), "cut the tensor finer")
        if self.op == "all_to_all" and self.blocks % self.ranks**2:
            what = f"all_to_all: a multiple of {self.ranks}^2 blocks"
            raise ClusterError(what, str(self.blocks), "one block for each pair of ranks")

    @property
    def parts(self) -> int:
        """Blocks that make up the bytes a size counts: for all_to_all one rank's send buffer."""
        return self.blocks // self.ranks if self.op == "all_to_all" else self.blocks

    def share(self, rank: int) -> range:
        """Return the blocks that are a rank's own in reduce_scatter, all_gather, all_to_all."""
        own = self.blocks // self.ranks
        return range(rank * own, (rank + 1) * own)

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
            pairs = np.arange(self.blocks).reshape(self.ranks, self.ranks, -1)
            return pairs[:, rank].reshape(-1)
        return np.arange(self.blocks)


# -- on arrays ------------------------------------------------------------------------------------
def execute(schedule: Schedule, arrays: Sequence[Values]) -> list[Values]:
    """Return each rank's result, flat, from each rank's flat input of equal length n.

    all_reduce, reduce (root; None of the others' matter and they are returned as received) and
    reduce_scatter take n elements a rank and add; all_gather takes each rank's share and returns
    all; broadcast takes the root's; all_to_all takes ranks * k elements and returns as many.
    Raises `ClusterError` for other inputs, and where a rank sends what it has not.
    """
    given = _checked(schedule, arrays)
    memory, held = _load(schedule, given)
    for number, step in enumerate(schedule.rounds):
        rows, columns = np.nonzero(step.blocks != NONE)
        sources, targets = step.sources[rows], step.targets[rows]
        blocks = step.blocks[rows, columns]
        if not held[sources, blocks].all():
            bad = int(np.argmin(held[sources, blocks]))
            what = f"{schedule.algorithm}: round {number}, rank {sources[bad]} with its block"
            raise ClusterError(what, f"no block {blocks[bad]}", "mend the schedule")
        moved = memory[sources, blocks]
        adds = step.reduces[rows]
        memory[targets[~adds], blocks[~adds]] = moved[~adds]
        np.add.at(memory, (targets[adds], blocks[adds]), moved[adds])
        held[targets, blocks] = True
    return [_result(schedule, memory, held, len(given[0]), r) for r in range(schedule.ranks)]


def _checked(schedule: Schedule, arrays: Sequence[Values]) -> list[Values]:
    given = [np.asarray(a) for a in arrays]
    what = f"{schedule.op}: {schedule.ranks} flat arrays of one length and kind"
    kinds = {(a.shape, a.dtype) for a in given}
    if len(given) != schedule.ranks or len(kinds) > 1 or any(a.ndim != 1 for a in given):
        got = f"{len(given)} of shapes {sorted({a.shape for a in given})}"
        raise ClusterError(what, got, "one ravelled array a rank")
    if schedule.op == "all_to_all" and len(given[0]) % schedule.ranks:
        what = f"all_to_all: elements for each of {schedule.ranks} ranks alike"
        raise ClusterError(what, str(len(given[0])), "pad them")
    return given


def _load(schedule: Schedule, given: list[Values]) -> tuple[Values, NDArray[np.bool_]]:
    """Return memory (rank, block, element) and which blocks are held; zeros fill up blocks."""
    ranks, own = schedule.ranks, schedule.op in ("all_gather", "all_to_all")
    blocks = schedule.blocks // ranks if own else schedule.blocks
    pieces = ranks if schedule.op == "all_to_all" else 1  # each is cut into blocks evenly
    each, per_piece = len(given[0]) // pieces, blocks // pieces
    size = -(-each // per_piece)
    cut = np.zeros((ranks, pieces, per_piece * size), given[0].dtype)
    cut[:, :, :each] = np.stack(given).reshape(ranks, pieces, each)
    memory = np.zeros((ranks, schedule.blocks, size), given[0].dtype)
    held = np.zeros((ranks, schedule.blocks), bool)
    for rank in range(ranks):
        mine = schedule.starts_with(rank)
        if len(mine):
            memory[rank, mine.start : mine.stop] = cut[rank].reshape(blocks, size)
            held[rank, mine.start : mine.stop] = True
    return memory, held


def _result(
    schedule: Schedule, memory: Values, held: NDArray[np.bool_], length: int, rank: int
) -> Values:
    """Return what a rank ends with; raise `ClusterError` where it lacks a block of that."""
    wanted, ranks = schedule.ends_with(rank), schedule.ranks
    if not held[rank, wanted].all():
        lack = [int(b) for b in wanted if not held[rank, b]][:4]
        what = f"{schedule.algorithm}: every block of rank {rank} delivered"
        raise ClusterError(what, f"blocks {lack} missing", "mend the schedule")
    flat = memory[rank, wanted].reshape(-1)
    if schedule.op == "all_gather":
        flat = flat.reshape(ranks, -1)[:, :length]
    elif schedule.op == "all_to_all":
        flat = flat.reshape(ranks, -1)[:, : length // ranks]
    elif schedule.op == "reduce_scatter":
        flat = flat[: max(0, length - rank * len(flat))]
    else:
        flat = flat[:length]
    found: Values = flat.reshape(-1).copy()
    return found
