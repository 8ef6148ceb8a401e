"""Small spaces and candidates that misbehave, for the tests of searches and the driver."""

import math
import os
from dataclasses import dataclass
from itertools import product

from ascend_lab.aoe.space import TableSpace, random_completion
from ascend_lab.errors import ScheduleError


def table():
    """Return a space with holes: a + b + c is never a multiple of 5."""
    points = [p for p in product((1, 2, 4, 8), (1, 3, 9), ("x", "y", "z")) if sum(p[:2]) % 5]
    return TableSpace(("a", "b", "c"), list(zip(*points, strict=True)))


@dataclass(frozen=True)
class Triangle:
    """Pairs with b <= a; a point and its mirror from above (a, 7 - a) are one candidate."""

    names: tuple[str, ...] = ("a", "b", "flag")
    counted: bool = True

    @property
    def size(self):
        return sum(1 for _ in self.points()) if self.counted else None

    def options(self, prefix):
        if len(prefix) == 2:
            return (False, True)
        return tuple(range(1, 8)) if not prefix else tuple(range(1, prefix[0] + 1))

    def sample(self, rng):
        return random_completion(self, (), rng)

    def key(self, point):
        # where a equals b the flag means nothing
        return (*point[:2], point[2] and point[0] != point[1])

    def points(self):
        return ((a, b, f) for a in range(1, 8) for b in range(1, a + 1) for f in (False, True))


def cost(point):
    """Return a bumpy cost above 0, the same for a candidate however it is written."""
    first, second = point[:2]
    flag = point[2] if isinstance(point[2], str) else point[2] and first != second
    extra = {"x": 3.0, "y": 0.5, "z": 1.0, False: 2.0, True: 0.25}[flag]
    return abs(first - 5) + 1.5 * abs(second - 3) + extra + (first * second) % 3


def bound(prefix):
    """Return what no point that begins with the prefix undercuts."""
    low = abs(prefix[0] - 5) if prefix else 0.0
    return low + (1.5 * abs(prefix[1] - 3) if len(prefix) > 1 else 0.0)


def keys(space):
    """Return all candidates."""
    return {space.key(point) for point in space.points()}


def optimum(space):
    """Return the least cost."""
    return min(cost(point) for point in space.points())


def failing(point):
    """Return the cost, but raise for a = 4 an error of ours and for a = 8 a foreign one."""
    if point[0] == 4:
        raise ScheduleError("a schedule that fits", "one that does not")
    if point[0] == 8:
        raise ZeroDivisionError("division by zero")
    return cost(point)


def endless(point):
    """Return the cost, but never end for a = 4."""
    while point[0] == 4:
        pass
    return cost(point)


def deadly(point):
    """Return the cost, but end the process for one candidate."""
    if point == (2, 9, "y"):
        os._exit(7)
    return cost(point)


def nothing_runs(point):
    """Raise for every candidate."""
    raise ScheduleError("a schedule that fits", str(point))


def not_a_number(point):
    """Return no number for a = 4."""
    return math.nan if point[0] == 4 else cost(point)
