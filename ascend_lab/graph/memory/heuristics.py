"""Short rules that place buffers one by one: fast, good, without a promise."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from ascend_lab.graph.memory.buffers import Buffer

Offsets = dict[Hashable, int]
Gap = tuple[int, int]
"""A free range of addresses: first byte, bytes; the last gap is as long as anyone needs."""
Choice = Callable[[list[Gap], int], int]
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


def first_fit(gaps: list[Gap], size_bytes: int) -> int:
    """Return the lowest address with room."""
    return next(start for start, length in gaps if length >= size_bytes)


def best_fit(gaps: list[Gap], size_bytes: int) -> int:
    """Return the address of the tightest gap with room."""
    return min((length, start) for start, length in gaps if length >= size_bytes)[1]


def free_gaps(taken: Iterable[tuple[int, int]]) -> list[Gap]:
    """Return the gaps between taken ranges (first byte, end), and the endless one above."""
    gaps, end = [], 0
    for start, stop in sorted(taken):
        if start > end:
            gaps.append((end, start - end))
        end = max(end, stop)
    return [*gaps, (end, ENDLESS)]


def place(order: Sequence[Buffer], choose: Choice) -> Offsets:
    """Give each buffer, in this order, a gap among those placed that live at the same time."""
    offsets: Offsets = {}
    placed: list[tuple[int, int, int, int]] = []
    for b in order:
        taken = [
            (at, end) for lower, upper, at, end in placed if lower < b.upper and upper > b.lower
        ]
        offsets[b.id] = at = choose(free_gaps(taken), b.size_bytes) if b.size_bytes else 0
        if b.size_bytes:
            placed.append((b.lower, b.upper, at, at + b.size_bytes))
    return offsets


def height(buffers: Iterable[Buffer], offsets: Offsets) -> int:
    """Return the end of the highest buffer."""
    return max((offsets[b.id] + b.size_bytes for b in buffers if b.size_bytes), default=0)
