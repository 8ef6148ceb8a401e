"""Nests do not disturb each other: cycles of any point from those of its nests, and the best point.

With nothing in L2 at the start of a phase, cycles of a kernel = sum over its phases + barriers. So
each nest is simulated once, and the best of all combinations of layouts is that of the best ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector import VectorMeasure, VectorSpace
from ascend_lab.aoe.vector.layout import Layout, lay
from ascend_lab.aoe.vector.nest import LEAST, NestSpace
from ascend_lab.dsl.lower import lower, lower_stage
from ascend_lab.sim import simulate, simulate_kernel

Known = dict[tuple[NestSpace, Layout], int]
"""Cycles of nests laid out, as far as they were simulated."""


def nest_cycles(nest: NestSpace, layout: Layout, known: Known) -> int:
    """Return the cycles of a nest alone, L2 cold."""
    if (nest, layout) not in known:
        laid = lay(nest.schedule, nest.nest, layout)
        launches = lower_stage(laid, nest.nest.phase.root)
        cycles = sum(simulate(launch, nest.schedule.chip).cycles for launch in launches)
        known[nest, layout] = cycles
    return known[nest, layout]


@dataclass
class NestCosts:
    """Point -> cycles, equal to those of `measure`, for which L2 is cold before every nest.

    Cycles = sum over nests + barriers between them + launch; the last two are taken from the first
    point of so many nests that is asked for.
    """

    measure: VectorMeasure
    known: Known = field(default_factory=dict)
    rest: dict[int, float] = field(default_factory=dict)

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; simulates only nests not met before."""
        parts = self.measure.space().parts(point)
        total = sum(nest_cycles(nest, nest.layout(own), self.known) for nest, own in parts)
        if len(parts) not in self.rest:
            self.rest[len(parts)] = self.measure(point) - total
        return total + self.rest[len(parts)]


def optimum(space: VectorSpace, known: Known | None = None) -> tuple[Point, int]:
    """Return the best point of a space and its cycles, launch included, L2 cold.

    Takes one simulation per layout of every nest, not per point: seconds for most operators.
    `known` of a `NestCosts` is read and filled, so that neither simulates what the other has.
    """
    known, nests = {} if known is None else known, dict[NestSpace, Point]()
    best: tuple[Point, float] = ((), math.inf)
    for head in space.grouping.heads():
        for nest in space.structure(head).nests:
            if nest not in nests:
                nests[nest] = _best_layout(nest, known)
        point = space.joined(head, [nests[nest] for nest in space.structure(head).nests])
        cycles = simulate_kernel(lower(space.build(point)), space.chip).total_cycles
        best = min(best, (point, cycles), key=lambda pair: pair[1])
    return best[0], int(best[1])


def _best_layout(nest: NestSpace, known: Known) -> Point:
    """Return the best decisions about a nest."""

    def cycles(point: Point) -> int:
        return nest_cycles(nest, nest.layout(point), known)

    return min(nest.points(), key=cycles, default=LEAST)
