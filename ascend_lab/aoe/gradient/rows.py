"""What the gradient tuner splits: gradients in backward order, and the buckets made of them.

A bucket is a run of neighbouring gradients that one all-reduce sends; a split is a tuple of
buckets, each as (first, last), both inclusive and counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError

Bucket = tuple[int, int]
"""First and last gradient of a bucket, both inclusive, counted from 0."""
Split = tuple[Bucket, ...]
Floats = NDArray[np.float64]
MOST_BYTES = 2**53
"""Sizes are counted exactly up to here."""
LONGEST_S = 1e12
"""Longer times are taken for mistakes."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient: when backward has computed it (from the start of backward), and its size."""

    name: str
    ready_s: float
    size_bytes: int
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        """Raise `InputError` for times and sizes that mean nothing."""
        if not 0 <= self.ready_s <= LONGEST_S:
            raise InputError(f"{self.name}: a ready time of at least 0 s", str(self.ready_s))
        if not (0 <= self.size_bytes <= MOST_BYTES and self.size_bytes == int(self.size_bytes)):
            raise InputError(f"{self.name}: a whole number of bytes", str(self.size_bytes))


class _Row(Protocol):
    """What a row of a training profile has."""

    @property
    def name(self) -> str: ...
    @property
    def ready_s(self) -> float: ...
    @property
    def size_bytes(self) -> int: ...


def gradients_of(rows: Iterable[_Row], dtype: str = "fp16") -> tuple[Gradient, ...]:
    """Return the rows of a training profile as gradients of one number format."""
    return tuple(Gradient(row.name, row.ready_s, row.size_bytes, dtype) for row in rows)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Gradients as arrays.

    `ready_s[j]`: when gradients 0..j are all ready. `sums_bytes[j]`: bytes of gradients 0..j-1, one
    longer than the rest. `first[j]`: the first gradient that may share a bucket with j.
    """

    ready_s: Floats
    sums_bytes: Floats
    first: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Number of gradients."""
        return len(self.ready_s)

    def sizes_bytes(self, split: Split) -> Floats:
        """Return the bytes of each bucket."""
        ends = np.array(split, np.int64).reshape(-1, 2)
        sizes: Floats = self.sums_bytes[ends[:, 1] + 1] - self.sums_bytes[ends[:, 0]]
        return sizes

    def allows(self, split: Split, max_segments: int | None = None) -> bool:
        """Tell whether no bucket mixes formats or exceeds a limit, and they are few enough."""
        few = max_segments is None or len(split) <= max_segments
        return few and all(first >= self.first[last] for first, last in split)


def table_of(rows: Sequence[Gradient], max_bytes: float | None = None) -> Table:
    """Return gradients as arrays; a bucket holds one number format and at most `max_bytes`.

    A gradient larger than that is a bucket by itself. Measured times may be a little out of order:
    buckets are sent in order, so a gradient that is ready before its predecessor waits for it, and
    the running maximum of the ready times gives every split the same end. Raises `InputError`
    without rows or with a limit that is not above 0.
    """
    if not rows:
        raise InputError("at least one gradient", "none", "check the profile")
    if max_bytes is not None and not max_bytes > 0:
        raise InputError("a largest bucket of more than 0 bytes", str(max_bytes))
    sums = np.concatenate([[0.0], np.cumsum([float(row.size_bytes) for row in rows])])
    ready = np.maximum.accumulate([float(row.ready_s) for row in rows])
    starts = [0]
    for j in range(1, len(rows)):
        starts.append(starts[-1] if rows[j].dtype == rows[j - 1].dtype else j)
    first = np.array(starts, np.int64)
    if max_bytes is not None:
        fitting = np.searchsorted(sums, sums[1:] - max_bytes, "left")
        first = np.minimum(np.maximum(first, fitting), np.arange(len(rows)))
    return Table(ready, sums, first)


def out_of_order(rows: Sequence[Gradient]) -> int:
    """Return how many gradients are ready before one that stands above them."""
    ready = np.array([row.ready_s for row in rows], np.float64)
    return int(np.sum(ready < np.maximum.accumulate(ready))) if len(ready) else 0


def split_at(lasts: Iterable[int]) -> Split:
    """Return the split whose buckets end at these gradients, in ascending order."""
    ends = list(lasts)
    return tuple(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))


def check_split(split: Sequence[Sequence[int]], count: int) -> Split:
    """Return `split` as tuples if it covers gradients 0..count-1 in order; else `InputError`."""
    made = tuple((int(first), int(last)) for first, last in split)
    if not made or made != split_at([b for _, b in made]) or made[-1][1] != count - 1:
        remedy = "buckets are (first, last), both inclusive, counted from 0"
        raise InputError(f"buckets that cover 0..{count - 1} in order", str(made)[:80], remedy)
    if any(first > last for first, last in made):
        raise InputError("buckets of at least one gradient", str(made)[:80])
    return made
