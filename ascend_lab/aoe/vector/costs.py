"""Cycles of any point from those of single nests, each simulated once: for searches to replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from ascend_lab.aoe.space import Point
from ascend_lab.aoe.vector.exact import nest_cycles
from ascend_lab.aoe.vector.layout import Layout
from ascend_lab.aoe.vector.measure import VectorMeasure


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
