"""Small templates of rounds, and what makes large schedules of them.

A template is rounds over ranks 0 .. p-1 and slots of the tensor. It is turned round (a gather read
backwards is a reduction), laid upon many groups of ranks at once, and cut into chunks that follow
each other through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.schedule import NONE, Round, together

Ints = NDArray[np.int64]
Rounds = tuple[Round, ...]


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
    groups, width = len(ranks), blocks.shape[2]
    picked = blocks[:, step.blocks]
    if (step.blocks == NONE).any():
        picked = np.where((step.blocks == NONE)[None, :, :, None], NONE, picked)
    messages, count = step.blocks.shape
    shape = (groups, messages, count, width)
    rows = np.broadcast_to(picked, shape).reshape(groups * messages, count * width)
    return Round(
        ranks[:, step.sources].reshape(-1),
        ranks[:, step.targets].reshape(-1),
        rows,
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
    if chunks == 1:
        return rounds
    waves: list[list[Round]] = [[] for _ in range(len(rounds) + (chunks - 1) * lag)]
    for chunk in range(chunks):
        for t, step in enumerate(rounds):
            finer = np.where(step.blocks == NONE, NONE, step.blocks * chunks + chunk)
            waves[t + chunk * lag].append(replace(step, blocks=finer))
    return tuple(together(wave) for wave in waves if wave)


def longest(stages: Sequence[Rounds]) -> int:
    """Return the rounds of the longest stage."""
    return max((len(stage) for stage in stages), default=0)
