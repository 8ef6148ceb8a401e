"""Try every point, in order or shuffled: the searches that need no idea of the space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.search.fresh import Fresh
from ascend_lab.aoe.space import Point, Space

BATCH = 16
"""Points proposed at a time."""


def exhaustive(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the points to start with, then all points of the space in its order."""
    fresh = Fresh(space, rng)
    points: Iterator[Point] = chain(fresh.legal(start), space.points())
    while chunk := list(islice(points, BATCH)):
        if batch := fresh.new(chunk):
            yield from fresh.ask(batch)


def random_order(space: Space, rng: np.random.Generator, start: Sequence[Point] = ()) -> Steps:
    """Propose the points to start with, then random ones, none of them twice."""
    fresh = Fresh(space, rng)
    batch = fresh.legal(start) or fresh.sample(BATCH)
    while batch:
        yield from fresh.ask(batch)
        batch = fresh.sample(BATCH)
