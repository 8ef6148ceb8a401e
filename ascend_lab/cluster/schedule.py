"""A collective as data: rounds of messages between ranks, each message some blocks of the tensor.

The same object is executed on arrays (`execute`) and timed on a topology (`cluster.timing`). Within
a round all messages are read before any is written, and the next round begins when the slowest
message of this one has arrived.

Transfers are fluids. A flow takes its rate from every resource (link) on its way. Rates are max-min
fair: no flow can go faster without slowing one that is not faster. They change only when a flow
starts or ends, so time goes from event to event, whatever the bytes.
"""

import math
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


# -- fluids ----------------------------------------------------------------------------------------
Floats = NDArray[np.float64]
EPSILON = 1e-9
"""Shares and moments that differ relatively by less are one."""


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Which flow uses which resource: two arrays of one length, and how many flows."""

    flow: Ints
    resource: Ints
    count: int

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> "Uses":
        """Return the uses of flows that take these resources."""
        lengths = np.array([len(path) for path in paths], np.intp)
        flat = np.array([r for path in paths for r in path], np.intp)
        return Uses(np.repeat(np.arange(len(paths)), lengths), flat, len(paths))

    def only(self, kept: NDArray[np.bool_]) -> "Uses":
        """Return the uses of some of the flows, numbered anew in order."""
        number, keep = np.cumsum(kept) - 1, kept[self.flow]
        return Uses(number[self.flow[keep]], self.resource[keep], int(kept.sum()))

    def components(self) -> Ints:
        """Return for every flow the least flow it shares resources with, if only through others."""
        label = np.arange(self.count)
        least = np.full(int(self.resource.max(initial=0)) + 1, self.count)
        while True:
            np.minimum.at(least, self.resource, label[self.flow])
            found = label.copy()
            np.minimum.at(found, self.flow, least[self.resource])
            found = found[found]
            if (found == label).all():
                return label
            label = found


def fair_rates(uses: Uses, capacity: Floats, active: NDArray[np.bool_] | None = None) -> Floats:
    """Return max-min fair rates of the active flows (others 0) by progressive filling.

    Of all resources the one with the least capacity a flow fills first and fixes the rate of its
    flows; what they leave of the others is shared on. Flows that use nothing, or only
    resources without limit, are infinitely fast.
    """
    rate = np.zeros(uses.count)
    open_flow = np.ones(uses.count, bool) if active is None else active.copy()
    left = np.array(capacity, float)
    finite = np.isfinite(left)
    while open_flow.any():
        live = open_flow[uses.flow]
        load = np.bincount(uses.resource[live], minlength=len(left))
        busy = (load > 0) & finite
        if not busy.any():
            rate[open_flow] = math.inf
            break
        share = np.full(len(left), math.inf)
        share[busy] = np.maximum(left[busy], 0.0) / load[busy]
        least = share.min()
        tight = share <= least * (1 + EPSILON)
        fixed = np.zeros(uses.count, bool)
        fixed[uses.flow[live & tight[uses.resource]]] = True
        rate[fixed] = least
        open_flow &= ~fixed
        left -= least * np.bincount(uses.resource[fixed[uses.flow]], minlength=len(left))
    return rate


def finish_times(starts_s: Floats, sizes: Floats, uses: Uses, capacity: Floats) -> Floats:
    """Return when each flow ends that starts at `starts_s` with `sizes` to carry.

    A flow of size 0 ends when it starts; one on a resource of capacity 0 never does (infinity).
    """
    ends, left = np.array(starts_s, float), np.array(sizes, float)
    waiting, now = left > 0, 0.0
    running = np.zeros(uses.count, bool)
    while waiting.any() or running.any():
        if not running.any():
            now = max(now, float(starts_s[waiting].min()))
        begin = waiting & (starts_s <= now * (1 + EPSILON))
        running |= begin
        waiting &= ~begin
        rate = fair_rates(uses, capacity, running)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(running, left / rate, math.inf)
        need[running & np.isinf(rate)] = 0.0
        coming = float(starts_s[waiting].min()) - now if waiting.any() else math.inf
        step = min(float(need.min()), coming)
        if math.isinf(step):
            ends[running] = math.inf
            break
        over = running & (need <= step * (1 + EPSILON))
        with np.errstate(invalid="ignore"):
            left = np.where(running & ~over, left - rate * step, left)
        now += step
        ends[over] = now
        running &= ~over
    return ends
