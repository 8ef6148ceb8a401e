"""Gradients sent together: lists of buckets, the rule that closes them, what sending costs."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ascend_lab.errors import InputError

Cost = Callable[[float], float]
"""Bytes to seconds."""
Segments = tuple[tuple[int, int], ...]
"""(first, last) gradient of each bucket, both included, counted from 0 in backward order."""
BUCKET_BYTES, FIRST_BYTES = 25 * 2**20, 2**20
"""Sizes of PyTorch's DistributedDataParallel: 25 MiB, the first 1 MiB ({cite}`ddp2020`)."""
SMALLEST_BYTES, STEP = 1024.0, 4.0


def checked(segments: Sequence[Sequence[int]], count: int) -> Segments:
    """Return the segments; raise `InputError` unless they cover 0 .. count - 1 in order."""
    found = tuple((int(a), int(b)) for a, b in segments)
    flat = [i for a, b in found for i in range(a, b + 1)]
    if flat != list(range(count)) or any(a > b for a, b in found):
        what = f"segments (first, last) that are gradients 0 to {count - 1} in order"
        raise InputError(what, str(found)[:80], "leave no gap")
    return found


def closed(sums_bytes: Sequence[float], limit_bytes: float, first_bytes: float) -> Segments:
    """Return the buckets of gradients whose bytes add up to these sums, 0 in front."""
    found: list[tuple[int, int]] = []
    start, limit, count = 0, first_bytes, len(sums_bytes) - 1
    while start < count:
        last = bisect_left(sums_bytes, sums_bytes[start] + limit, start) - 1
        found.append((start, min(max(last, start), count - 1)))
        start, limit = found[-1][1] + 1, limit_bytes
    return tuple(found)


@dataclass(frozen=True)
class Interpolated:
    """A cost known at 1 KiB times powers of 4, straight between them; found when first needed.

    Exact where the cost is alpha + n beta between neighbours; the time of an algorithm chosen anew
    at every size is overstated between, by less than the algorithms differ.
    """

    exact: Cost
    known: dict[int, float] = field(default_factory=dict)

    def __call__(self, size_bytes: float) -> float:
        """Return the seconds; 0 for nothing."""
        if size_bytes <= 0:
            return 0.0
        place = math.log(size_bytes / SMALLEST_BYTES, STEP)
        low = max(0, math.floor(place))
        least, most = (SMALLEST_BYTES * STEP**k for k in (low, low + 1))
        start, end = self._at(low), self._at(low + 1)
        return max(0.0, start + (end - start) * (size_bytes - least) / (most - least))

    def _at(self, k: int) -> float:
        if k not in self.known:
            self.known[k] = self.exact(SMALLEST_BYTES * STEP**k)
        return self.known[k]
