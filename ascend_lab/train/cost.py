"""Seconds of communication by size, evaluated at a few sizes only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Cost = Callable[[float], float]
"""Bytes to seconds."""
SMALLEST_BYTES, STEP = 1024.0, 4.0


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
