"""The best point of a space, proven: nests do not disturb each other, so each is enumerated alone.

With nothing in L2 at the start of a phase, cycles of a kernel = sum over its phases + barriers.
So the best of all combinations of layouts is the combination of the best ones.
"""

from __future__ import annotations

import math

from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.layout import Layout, lay
from ascend_lab.aoe.vector.nest_space import LEAST, NestSpace
from ascend_lab.aoe.vector.space import VectorSpace
from ascend_lab.dsl.lower import lower, lower_stage
from ascend_lab.sim import simulate, simulate_kernel


def optimum(
    space: VectorSpace, known: dict[tuple[int, Layout], int] | None = None
) -> tuple[Point, int]:
    """Return the best point of a space and its cycles, launch included, L2 cold.

    Takes one simulation per layout of every nest, not per point: seconds for most operators.
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
