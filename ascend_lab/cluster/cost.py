"""The time of a collective as a function of its bytes, interpolated: each exact time is a search.

A training step asks for the time of hundreds of buckets, 25 MiB or a little more each: the exact
times at 16 and 64 MiB answer for all of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Cost = Callable[[float], float]
"""A function from bytes to seconds."""
SMALLEST_BYTES = 1024.0
SIZE_FACTOR = 4.0
"""`Interpolated` computes costs at 1, 4, 16, ... KiB."""


@dataclass(frozen=True)
class Interpolated:
    """A cost as a function of bytes, interpolated linearly between 1, 4, 16, ... KiB.

    The costs at these sizes are computed when first needed. The interpolation is exact where the
    cost is alpha + n beta. If the quickest algorithm changes between two sizes, the result is too
    high, by less than the difference of the algorithms.
    """

    exact: Cost
    computed_s: dict[int, float] = field(default_factory=dict)

    def __call__(self, size_bytes: float) -> float:
        """Return the cost of a size in seconds; 0 for 0 bytes."""
        if size_bytes <= 0:
            return 0.0
        # 6 KiB is between 4 KiB (k = 1) and 16 KiB (k = 2), a sixth of the way.
        exponent = math.log(size_bytes / SMALLEST_BYTES, SIZE_FACTOR)
        low = max(0, math.floor(exponent))
        below_bytes, above_bytes = (SMALLEST_BYTES * SIZE_FACTOR**k for k in (low, low + 1))
        start = self._at(low)
        end = self._at(low + 1)
        return max(
            0.0, start + (end - start) * (size_bytes - below_bytes) / (above_bytes - below_bytes)
        )

    def _at(self, k: int) -> float:
        """Return the cost of 4^k KiB."""
        if k not in self.computed_s:
            self.computed_s[k] = self.exact(SMALLEST_BYTES * SIZE_FACTOR**k)
        return self.computed_s[k]
