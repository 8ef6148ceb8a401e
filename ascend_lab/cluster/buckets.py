"""Divides gradients into buckets, each of which one all-reduce sends, as PyTorch does.

Gradients of 10, 20 and 5 MiB, in the order in which the backward pass computes them, make two
buckets of at most 25 MiB if the first limit is as large: ((0, 0), (1, 2)).
"""

from bisect import bisect_left
from collections.abc import Sequence

from ascend_lab.errors import InputError

Segments = tuple[tuple[int, int], ...]
"""(first, last) gradient of each bucket, both included, counted from 0 in backward order."""
BUCKET_BYTES = 25 * 2**20
FIRST_BYTES = 2**20
"""Sizes of PyTorch's DistributedDataParallel: 25 MiB, the first 1 MiB ({cite}`ddp2020`)."""


def checked(segments: Sequence[Sequence[int]], count: int) -> Segments:
    """Return segments of gradients; raise `InputError` unless they cover 0 .. count - 1 in turn."""
    bounds = tuple((int(a), int(b)) for a, b in segments)
    # For 5 gradients ((0, 1), (2, 4)) is valid; ((0, 1), (3, 4)) misses gradient 2.
    covered = [i for a, b in bounds for i in range(a, b + 1)]
    if covered != list(range(count)) or any(a > b for a, b in bounds):
        needed = f"segments (first, last) that are gradients 0 to {count - 1} in order"
        raise InputError(needed, str(bounds)[:80], "leave no gap")
    return bounds


def closed(
    sums_bytes: Sequence[float],
    limit_bytes: float = BUCKET_BYTES,
    first_bytes: float = FIRST_BYTES,
) -> Segments:
    """Return the buckets of gradients, given the cumulative sums of their bytes, which start at 0.

    A bucket is closed once it holds `limit_bytes`, the first one once it holds `first_bytes`.
    """
    buckets: list[tuple[int, int]] = []
    start = 0
    limit = first_bytes
    count = len(sums_bytes) - 1
    while start < count:
        # Gradients of 10, 20 and 5 MiB, limit 25 MiB: the second closes the bucket, because
        # a gradient is never cut.
        end = bisect_left(sums_bytes, sums_bytes[start] + limit, start) - 1
        buckets.append((start, min(max(end, start), count - 1)))
        start = buckets[-1][1] + 1
        limit = limit_bytes
    return tuple(buckets)
