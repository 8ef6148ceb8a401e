"""The decision space of a vector operator: how its stages are grouped, then nest by nest."""

import pickle
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product, zip_longest
from typing import Any

import numpy as np

from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.operators import Tunable
from ascend_lab.aoe.space import Point, Value, random_completion
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.grouping import Grouping, Structure
from ascend_lab.aoe.vector.layout import lay
from ascend_lab.aoe.vector.nest import DECISIONS, LEAST, NestSpace
from ascend_lab.chip import Chip, load_chip
from ascend_lab.dsl import Schedule, Tensor, auto_schedule, lower
from ascend_lab.errors import InputError
from ascend_lab.graph.lower import Choice
from ascend_lab.graph.lower.vector import vector_outputs
from ascend_lab.ops.matmul import warm_cycles
from ascend_lab.sim import simulate_kernel

COUNTED = 10_000
"""Spaces with more points than this are not counted: nests alone can have thousands of layouts."""


PATIENCE = 48
"""Trials without a gain that end a search: from defaults near their bound, gains come early."""


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
        nests = list(zip_longest(*(self.structure(h).nests for h in heads)))
        opened = [set[int]().union(*(n.open_decisions for n in slot if n)) for slot in nests]
        self._slots = [tuple(sorted(places)) for places in opened]
        ends = [f" {k + 1}" if len(nests) > 1 else "" for k in range(len(nests))]
        pairs = zip(self._slots, ends, strict=True)
        own = (DECISIONS[at] + end for slot, end in pairs for at in slot)
        self.names = (*self.grouping.names, *own)
        self._options: dict[Point, tuple[Value, ...]] = {}
        self._places = [(k, at) for k, slot in enumerate(self._slots) for at in slot]

    # -- points and schedules ---------------------------------------------------------------------
    def structure(self, point: Point) -> Structure:
        """Return the stages as a point groups them; raise `InputError` if it is not legal."""
        found = self.grouping.structure(point[: self._head]) if len(point) >= self._head else None
        if found is None:
            raise InputError("a point of the space", str(point), "take values from `options`")
        return found

    def parts(self, point: Point) -> list[tuple[NestSpace, Point]]:
        """Return the nests of a point, each with the decisions about it."""
        found, at = [], self._head
        for nest, slot in zip(self.structure(point).nests, self._slots, strict=False):
            found.append((nest, _filled(slot, point[at : at + len(slot)])))
            at += len(slot)
        return found

    def joined(self, head: Point, owns: Sequence[Point]) -> Point:
        """Return the point of a grouping and of the decisions about each of its nests."""
        pairs = zip_longest(self._slots, owns, fillvalue=LEAST)
        return (*head, *(own[at] for slot, own in pairs for at in slot))

    def build(self, point: Point) -> Schedule:
        """Return the schedule of a point; `AscendLabError` for a point of another space."""
        if len(point) != len(self.names):
            raise InputError(f"{len(self.names)} decisions", str(len(point)), "complete the point")
        s = self.structure(point).schedule
        for nest, own in self.parts(point):
            s = lay(s, nest.nest, nest.layout(own))
        return s

    @property
    def default_point(self) -> Point:
        """The point of the default schedule."""
        head = self.grouping.default_head
        return self.joined(head, [n.default_point or LEAST for n in self.structure(head).nests])

    # -- the contract of a space ------------------------------------------------------------------
    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`, remembered for searches."""
        found = self._options.get(prefix)
        if found is None:
            found = self._options[prefix] = self._found(prefix)
        return found

    def _found(self, prefix: Point) -> tuple[Value, ...]:
        if len(prefix) < self._head:
            return self.grouping.options(prefix)
        number, at = self._places[len(prefix) - self._head]
        nests, slot = self.structure(prefix).nests, self._slots[number]
        if number >= len(nests):
            return (LEAST[at],)
        own = prefix[len(prefix) - slot.index(at) :] if at else ()
        return nests[number].options(_filled(slot, own)[:at])

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point: every decision in turn, each option with the same chance."""
        return random_completion(self, (), rng)

    def key(self, point: Point) -> Hashable:
        """Return what a point builds: its grouping and the numbers of every nest."""
        return (point[: self._head], *(nest.layout(own) for nest, own in self.parts(point)))

    @property
    def size(self) -> int | None:
        """Number of points; None above `COUNTED`."""
        total = 0
        for head in self.grouping.heads():
            points = 1
            for nest in self.structure(head).nests:
                points *= nest.count(COUNTED // points)
                if total + points > COUNTED:
                    return None
            total += points
        return total

    def points(self) -> Iterator[Point]:
        """Yield all points, grouping by grouping."""
        for head in self.grouping.heads():
            nests = [list(nest.points()) for nest in self.structure(head).nests]
            for chosen in product(*nests):
                yield self.joined(head, chosen)


def _filled(slot: Sequence[int], values: Sequence[Value]) -> Point:
    """Return all decisions about a nest, those without a choice and those still open at least."""
    given = dict(zip(slot, values, strict=False))
    return tuple(given.get(at, value) for at, value in enumerate(LEAST))


def vector_space(outputs: Tensor | Sequence[Tensor], chip: Chip | str) -> VectorSpace:
    """Return the decision space of outputs on a chip; `UnsupportedError` for products."""
    return VectorSpace(outputs, load_chip(chip) if isinstance(chip, str) else chip)


# Vector operators as jobs: how long a point takes, and how far one can get.


@dataclass(frozen=True)
class VectorMeasure:
    """Point -> cycles of one launch of the kernel, its host overhead included.

    Every phase starts on a cold L2, or with `warm` the first one on an L2 that holds these tensors
    and later ones on what is left there.
    """

    outputs: tuple[Tensor, ...]
    chip: Chip
    warm: frozenset[str] | None = None

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; raises `AscendLabError` where it cannot be built."""
        kernel = lower(self.space().build(point))
        if self.warm is None:
            return simulate_kernel(kernel, self.chip).total_cycles
        return warm_cycles(kernel, self.chip, self.warm)

    def space(self) -> VectorSpace:
        """Return the space, made once in a process."""
        return _space(self)

    def __hash__(self) -> int:
        """Hash outputs, chip name, and what L2 holds."""
        return hash((self.outputs, self.chip.name, self.warm))

    def __reduce__(self) -> tuple[Any, ...]:
        """Send everything as bytes: a worker unpacks them once, not for every point."""
        return _unpacked, (pickle.dumps((self.outputs, self.chip, self.warm)),)


@lru_cache(maxsize=64)
def _unpacked(data: bytes) -> VectorMeasure:
    return VectorMeasure(*pickle.loads(data))


@lru_cache(maxsize=64)
def _space(measure: VectorMeasure) -> VectorSpace:
    return vector_space(measure.outputs, measure.chip)


class VectorJob:
    """Elementwise work, reductions and what combines them, by a chain of primitives."""

    search = "mcts"

    def __init__(self, operator: Tunable) -> None:
        """Take an operator of the vector unit; raises what its space raises."""
        self.operator = operator
        self.outputs = tuple(vector_outputs(operator.piece)[0])
        self.measure = VectorMeasure(self.outputs, operator.chip, operator.warm)
        self.space: VectorSpace = self.measure.space()

    def choice(self, point: Point) -> Choice:
        """Return the steps of a point."""
        return Choice(steps=self.space.build(point).to_json())

    def start(self) -> Sequence[Point]:
        """Return the default."""
        return [self.space.default_point]

    def points(self, choices: Sequence[Choice]) -> list[Point]:
        """Return nothing: steps name the loops of their own shape."""
        return []

    @cached_property
    def least_cycles(self) -> int:
        """Cycles that no schedule beats, whatever it is."""
        return vector_bound(self.outputs, self.operator.chip, self.operator.warm)

    def bound(self, trials: Sequence[Trial]) -> tuple[int, bool]:
        """Return the bound, and whether all of the space was timed."""
        return self.operator.bounded(self.least_cycles, trials, self.space.size)
