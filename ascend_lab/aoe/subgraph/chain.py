"""The cheapest slicing of a chain of units, exactly: dynamic programming over cut points.

    best(j) = min over i < j and ways w of units i .. j-1:  best(i) + cost(i, j, w)

where a unit may also stay whole. Exact for costs that add up; see `segments` for what that assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from ascend_lab.aoe.subgraph.segments import WHOLE, Way

Choice = tuple[int, int, Way]
"""Units first .. stop-1 and how they are sliced."""
Ways = Callable[[int, int], Iterable[Way]]
Cost = Callable[[int, int, Way], float]


def free(first: int, stop: int, way: Way) -> float:
    """Return the bound that holds for all costs."""
    return 0.0


def cheapest(count: int, ways: Ways, cost: Cost, least: Cost = free) -> tuple[float, list[Choice]]:
    """Return the least cost of `count` units and the segments that reach it, in order.

    No cost is asked for if `least`, a bound below it, shows that the segment cannot help.
    """
    best: list[tuple[float, Choice | None]] = [(0.0, None)]
    for stop in range(1, count + 1):
        found: tuple[float, Choice | None] = (math.inf, None)
        for first in reversed(range(stop)):
            for way in choices(first, stop, ways):
                if best[first][0] + least(first, stop, way) >= found[0]:
                    continue
                total = best[first][0] + cost(first, stop, way)
                if total < found[0]:
                    found = total, (first, stop, way)
        best.append(found)
    return best[-1][0], _walk_back(best)


def _walk_back(best: list[tuple[float, Choice | None]]) -> list[Choice]:
    chosen: list[Choice] = []
    last = best[-1][1]
    while last is not None:
        chosen.append(last)
        last = best[last[0]][1]
    return chosen[::-1]


def choices(first: int, stop: int, ways: Ways) -> list[Way]:
    """Return how units may be taken: whole if it is one, and in slices."""
    return [*([WHOLE] if stop == first + 1 else []), *ways(first, stop)]


def every(count: int, ways: Ways, first: int = 0) -> Iterator[list[Choice]]:
    """Yield all ways to take the units from `first` on: for small chains."""
    if first == count:
        yield []
        return
    for stop in range(first + 1, count + 1):
        for way in choices(first, stop, ways):
            for rest in every(count, ways, stop):
                yield [(first, stop, way), *rest]
