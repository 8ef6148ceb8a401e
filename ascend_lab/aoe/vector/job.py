"""Vector operators as jobs: how long a point takes, how far one can get, and the proven best."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.operators import Tunable, warm_cycles
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.layout import Layout, lay
from ascend_lab.aoe.vector.nest import LEAST, NestSpace
from ascend_lab.aoe.vector.space import VectorSpace, vector_space
from ascend_lab.chip import Chip
from ascend_lab.dsl.lower import lower, lower_stage
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.graph.lower import Choice
from ascend_lab.graph.lower.vector import vector_outputs
from ascend_lab.sim import simulate, simulate_kernel


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
        best = int(min([self.operator.default_cycles, *(t.cost for t in trials)]))
        if sum(t.cost < math.inf for t in trials) == self.space.size:
            return best, True
        return min(self.least_cycles, best), best <= self.least_cycles


def optimum(
    space: VectorSpace, known: dict[tuple[int, Layout], int] | None = None
) -> tuple[Point, int]:
    """Return the best point of a space and its cycles, launch included, L2 cold.

    With nothing in L2 at the start of a phase, cycles of a kernel = sum over its phases + barriers:
    the best of all combinations of layouts is the combination of the best ones. Takes
    one simulation per layout of every nest, not per point: seconds for most operators.
    `known` of a `NestCosts` is read and filled, so that neither simulates what the other has.
    """
    nests: dict[int, tuple[Point, int]] = {}
    best: tuple[Point, float] = ((), math.inf)
    known = {} if known is None else known
    for head in space.grouping.heads():
        found = []
        for nest in space.structure(head).nests:
            if id(nest) not in nests:
                nests[id(nest)] = _best_layout(nest, known)
            found.append(nests[id(nest)][0])
        point = space.joined(head, found)
        cycles = simulate_kernel(lower(space.build(point)), space.chip).total_cycles
        best = min(best, (point, cycles), key=lambda pair: pair[1])
    return best[0], int(best[1])


def _best_layout(nest: NestSpace, known: dict[tuple[int, Layout], int]) -> tuple[Point, int]:
    """Return the best decisions about a nest, and its cycles."""
    best, least = LEAST, 0
    for point in nest.points():
        key = (id(nest), nest.layout(point))
        if key not in known:
            known[key] = nest_cycles(nest, key[1])
        if not least or known[key] < least:
            best, least = point, known[key]
    return best, least


def nest_cycles(nest: NestSpace, layout: Layout) -> int:
    """Return the cycles of a nest alone, L2 cold."""
    laid = lay(nest.schedule, nest.nest, layout)
    launches = lower_stage(laid, nest.nest.phase.root)
    return sum(simulate(launch, nest.schedule.chip).cycles for launch in launches)


@dataclass
class NestCosts:
    """Point -> cycles, equal to those of `measure`, for which L2 is cold before every nest.

    Cycles = sum over nests + barriers between them + launch; the last two are taken from the first
    point of so many nests that is asked for.
    """

    measure: VectorMeasure
    known: dict[tuple[int, Layout], int] = field(default_factory=dict)
    rest: dict[int, float] = field(default_factory=dict)

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; simulates only nests not met before."""
        total, parts = 0, self.measure.space().parts(point)
        for nest, own in parts:
            key = (id(nest), nest.layout(own))
            if key not in self.known:
                self.known[key] = nest_cycles(nest, key[1])
            total += self.known[key]
        if len(parts) not in self.rest:
            self.rest[len(parts)] = self.measure(point) - total
        return total + self.rest[len(parts)]
