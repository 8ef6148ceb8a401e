"""How searches get from point to point; every result is legal, because it follows options."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ascend_lab.aoe.space import Point, Space, Value


def completed(space: Space, wanted: Sequence[Value], prefix: Point = ()) -> Point:
    """Return the legal point that takes every wanted value it can, else the nearest option.

    It begins with `prefix`, which must be legal; the values wanted there do not matter.
    """
    point = prefix
    for value in wanted[len(prefix) :]:
        options = space.options(point)
        point = (*point, value if value in options else nearest(options, value))
    return point


def nearest(options: Sequence[Value], value: Value) -> Value:
    """Return `value` if it is an option, else the option with the closest ratio, or the first."""
    if value in options:
        return value
    if not _is_number(value):
        return options[0]
    numbers = [v for v in options if _is_number(v)]
    return min(numbers, key=lambda v: (abs(_log(v) - _log(value)), v), default=options[0])


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float)


def _log(value: float) -> float:
    return math.copysign(math.log1p(abs(value)), value)


def random_completion(space: Space, prefix: Point, rng: np.random.Generator) -> Point:
    """Return a point that begins with `prefix`, every further decision taken at random."""
    while len(prefix) < len(space.names):
        options = space.options(prefix)
        prefix = (*prefix, options[int(rng.integers(len(options)))])
    return prefix


def mutated(space: Space, point: Point, rng: np.random.Generator, count: int = 1) -> Point:
    """Return the point with `count` decisions that have a choice changed at random."""
    for _ in range(count):
        options = [space.options(point[:i]) for i in range(len(point))]
        free = [i for i, values in enumerate(options) if len(values) > 1]
        if not free:
            return point
        at = free[int(rng.integers(len(free)))]
        others = [v for v in options[at] if v != point[at]]
        value = others[int(rng.integers(len(others)))]
        point = completed(space, point, (*point[:at], value))
    return point


def crossed(space: Space, one: Point, two: Point, rng: np.random.Generator) -> Point:
    """Return a point that takes every decision as one of two parents does, as far as legal."""
    picks = rng.random(len(one)) < 0.5
    mixed = [a if pick else b for a, b, pick in zip(one, two, picks, strict=True)]
    return completed(space, mixed)


def neighbours(space: Space, point: Point) -> list[Point]:
    """Return the points that differ in one decision, and where they must in later ones."""
    found: dict[Point, None] = {}
    for at, value in enumerate(point):
        for other in space.options(point[:at]):
            if other != value:
                found[completed(space, point, (*point[:at], other))] = None
    return list(found)
