"""Short rules that place buffers one by one: fast, good, without a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.memory.buffers import Buffer, Offsets

Ints = NDArray[np.int64]
Choice = Callable[[Ints], int]
"""Of gaps with room, by their bytes and from the lowest up: the one to take."""
ENDLESS = 1 << 62


def by_size(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the largest buffers first, of equal ones the longest-lived."""
    return sorted(buffers, key=lambda b: (-b.size_bytes, b.lower - b.upper, b.lower))


def by_start(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the earliest born first, as a run-time allocator meets them."""
    return sorted(buffers, key=lambda b: (b.lower, -b.size_bytes))


def by_life(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the longest-lived first."""
    return sorted(buffers, key=lambda b: (b.lower - b.upper, -b.size_bytes))


def first_fit(lengths: Ints) -> int:
    """Return the lowest gap."""
    return 0


def best_fit(lengths: Ints) -> int:
    """Return the tightest gap, the lowest of equal ones."""
    return int(lengths.argmin())


def place(order: Sequence[Buffer], choose: Choice) -> Offsets:
    """Give each buffer, in this order, a gap among those placed that live at the same time."""
    offsets: Offsets = {}
    placed = np.empty((4, len(order)), np.int64)  # births, deaths, first bytes, ends; by first byte
    for b in order:
        lower, upper, starts, ends = placed[:, : (count := len(offsets))]
        meets = (lower < b.upper) & (upper > b.lower)
        tops = np.maximum.accumulate(np.append(0, ends[meets]))
        lengths = np.append(starts[meets], ENDLESS) - tops
        fits = np.flatnonzero(lengths >= b.size_bytes)
        at = int(tops[fits[choose(lengths[fits])]]) if b.size_bytes else 0
        row = int(starts.searchsorted(at))
        placed[:, row + 1 : count + 1] = placed[:, row:count]
        placed[:, row] = b.lower, b.upper, at, at + b.size_bytes
        offsets[b.id] = at
    return offsets


def height(buffers: Iterable[Buffer], offsets: Offsets) -> int:
    """Return the end of the highest buffer."""
    return max((offsets[b.id] + b.size_bytes for b in buffers if b.size_bytes), default=0)
