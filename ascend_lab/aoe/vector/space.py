"""The decision space of a vector operator: how its stages are grouped, then nest by nest."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import product

import numpy as np

from ascend_lab.aoe.moves import random_completion
from ascend_lab.aoe.space import Point, Value
from ascend_lab.aoe.vector.grouping import Grouping, Structure
from ascend_lab.aoe.vector.layout import lay
from ascend_lab.aoe.vector.nest_space import DECISIONS, LEAST, NestSpace
from ascend_lab.chip import Chip, load_chip
from ascend_lab.dsl.auto import auto_schedule
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import InputError

COUNTED = 200_000
"""Nests with more layouts than this are not counted."""


class VectorSpace:
    """Every schedule that the decisions can say; built step by step, as a search looks at it.

    The first decisions group the stages (a way and a number of partial folds per group), then
    `DECISIONS` follow for the first nest, the second, and so on; a grouping with fewer nests than
    others leaves the last ones at their only value.
    """

    def __init__(self, outputs: Tensor | Sequence[Tensor], chip: Chip) -> None:
        """Find the groupings; raise what `auto_schedule` raises, and for products of the cube."""
        self.outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        self.chip = chip
        self.default = auto_schedule(self.outputs, chip)
        self.grouping = Grouping(self.default)
        self._head = len(self.grouping.names)
        heads = self.grouping.heads()
        self.nest_count = max(len(self.structure(h).nests) for h in heads)
        self.names = (*self.grouping.names, *_nest_names(self.nest_count))

    # -- points and schedules ---------------------------------------------------------------------
    def structure(self, point: Point) -> Structure:
        """Return the stages as a point groups them; raise `InputError` if it is not legal."""
        found = self.grouping.structure(point[: self._head]) if len(point) >= self._head else None
        if found is None:
            raise InputError("a point of the space", str(point), "take values from `options`")
        return found

    def parts(self, point: Point) -> list[tuple[NestSpace, Point]]:
        """Return the nests of a point, each with the decisions about it."""
        nests, step = self.structure(point).nests, len(DECISIONS)
        return [(nest, point[self._head + k * step :][:step]) for k, nest in enumerate(nests)]

    def build(self, point: Point) -> Schedule:
        """Return the schedule of a point; raise `AscendLabError` if it is not one of the space."""
        if len(point) != len(self.names):
            raise InputError(f"{len(self.names)} decisions", str(len(point)), "complete the point")
        s = self.structure(point).schedule
        for nest, own in self.parts(point):
            s = lay(s, nest.nest.phase, nest.nest.rows, nest.layout(own))
        return s

    @property
    def default_point(self) -> Point:
        """The point of the default schedule."""
        head = self.grouping.default_head
        nests = [n.default_point or LEAST for n in self.structure(head).nests]
        nests += [LEAST] * (self.nest_count - len(nests))
        return (*head, *(value for own in nests for value in own))

    # -- the contract of a space ------------------------------------------------------------------
    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`."""
        if len(prefix) < self._head:
            return self.grouping.options(prefix)
        number, at = divmod(len(prefix) - self._head, len(DECISIONS))
        nests = self.structure(prefix).nests
        if number >= len(nests):
            return (LEAST[at],)
        return nests[number].options(prefix[len(prefix) - at :])

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point: every decision in turn, each option with the same chance."""
        return random_completion(self, (), rng)

    def key(self, point: Point) -> Hashable:
        """Return what a point builds: its grouping and the numbers of every nest."""
        return (point[: self._head], *(nest.layout(own) for nest, own in self.parts(point)))

    @property
    def size(self) -> int | None:
        """Number of points; None if a nest has more than `COUNTED` layouts."""
        total = 0
        for head in self.grouping.heads():
            counts = [nest.count(COUNTED) for nest in self.structure(head).nests]
            if None in counts:
                return None
            total += math.prod(c for c in counts if c is not None)
        return total

    def points(self) -> Iterator[Point]:
        """Yield all points, grouping by grouping."""
        for head in self.grouping.heads():
            nests = [list(nest.points()) for nest in self.structure(head).nests]
            nests += [[LEAST]] * (self.nest_count - len(nests))
            for chosen in product(*nests):
                yield (*head, *(value for own in chosen for value in own))


def _nest_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return DECISIONS
    return tuple(f"{name} {k + 1}" for k in range(count) for name in DECISIONS)


def vector_space(outputs: Tensor | Sequence[Tensor], chip: Chip | str) -> VectorSpace:
    """Return the decision space of one or several outputs on a chip.

    Raises `UnsupportedError` for products of the cube, and what `auto_schedule` raises.
    """
    return VectorSpace(outputs, load_chip(chip) if isinstance(chip, str) else chip)


def build(space: VectorSpace, point: Point) -> Schedule:
    """Return the schedule of a point: a chain of primitives that prints, stores and replays."""
    return space.build(point)
