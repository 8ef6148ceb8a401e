"""A collective as data: rounds of messages between ranks, each message some blocks of the tensor.

The same object is executed on arrays (`cluster.execute`) and timed on a topology
(`cluster.timing`). Within a round all messages are read before any is written, and the next round
begins when the slowest message of this one has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import ClusterError

Ints = NDArray[np.int64]
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
    ) -> Round:
        """Return a round from lists; rows of blocks may differ in length."""
        if not isinstance(blocks, np.ndarray):
            widest = max((len(row) for row in blocks), default=0)
            blocks = np.array(
                [(*row, *[NONE] * (widest - len(row))) for row in blocks], np.int64
            ).reshape(len(blocks), widest)
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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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
