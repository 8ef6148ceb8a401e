"""What the tuners are compared with: a plain genetic search, and the best point known exactly.

The genetic algorithm of the textbooks: selection, crossover, mutation, generation by generation.

Parents are picked by tournament, crossed decision by decision, repaired where the mix is not legal,
and sometimes mutated; the best parents stay. J. H. Holland, "Adaptation in Natural and Artificial
Systems", 1975.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.space import Point, Space, completed, crossed, mutated
from ascend_lab.aoe.vector import VectorMeasure, VectorSpace
from ascend_lab.aoe.vector.bound import NestWork, nest_work
from ascend_lab.aoe.vector.layout import Layout, lay
from ascend_lab.aoe.vector.nest import LEAST, NestSpace
from ascend_lab.dsl.lower import lower, lower_stage
from ascend_lab.sim import simulate, simulate_kernel

Person = tuple[float, Point]
"""Cost and point."""
TRIES = 10
"""So often a child that was born before is replaced."""


@dataclass
class SimpleGenetic:
    """That of the textbooks; `log` holds every generation of the latest run, in order of cost.

    `population` points make a generation, of which the best `keep` live on. A child is mutated with
    probability `mutation`; each parent is the best of `tournament` random points. A child that
    was born before is replaced, a few times if need be.
    """

    population: int = 20
    keep: int = 4
    mutation: float = 0.3
    tournament: int = 3
    log: list[list[Person]] = field(default_factory=list, init=False, repr=False)

    def __call__(
        self, space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Steps:
        """Breed for ever."""
        self.log = []
        points = [completed(space, point) for point in start][: self.population]
        points += [space.sample(rng) for _ in range(self.population - len(points))]
        people: list[Person] = []
        known: set[Point] = set()
        while True:
            costs = yield points
            known.update(points)
            born = [(cost, point) for cost, point in zip(costs, points, strict=True)]
            people = sorted(people[: self.keep] + born, key=lambda person: person[0])
            people = people[: self.population]
            self.log.append(people)
            points = []
            for _ in range(self.population - self.keep):
                points.append(self.newborn(space, people, rng, known.union(points)))

    def newborn(
        self, space: Space, people: Sequence[Person], rng: np.random.Generator, known: Set[Point]
    ) -> Point:
        """Return a child that is not among the known points, or what came of the last try."""
        child = self.child(space, people, rng)
        for _ in range(TRIES):
            if child not in known:
                break
            child = self.child(space, people, rng)
        return child

    def child(self, space: Space, people: Sequence[Person], rng: np.random.Generator) -> Point:
        """Return a child of two of the people, which stand in order of cost."""
        one, two = (people[self.pick(len(people), rng)][1] for _ in range(2))
        point = crossed(space, one, two, rng)
        return mutated(space, point, rng) if rng.random() < self.mutation else point

    def pick(self, count: int, rng: np.random.Generator) -> int:
        """Return the best place among some random ones: a tournament."""
        return int(rng.integers(count, size=self.tournament).min())


# Nests do not disturb each other: cycles of any point from those of its nests, and the best
# point.
#
# With nothing in L2 at the start of a phase, cycles of a kernel = sum over its phases + barriers.
# So each nest is simulated once, and the best of all combinations of layouts is that of the best
# ones.
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

    Takes at most one simulation per layout of every nest, not per point: seconds for most
    operators. A layout is left whose core with most elements works as long as the best one takes,
    and a way as soon as the best layouts of some of its nests, and the bare work of the others,
    take as long as the best point.
    `known` of a `NestCosts` is read and filled, so that neither simulates what the other has.
    """
    known, least = {} if known is None else known, dict[NestSpace, tuple[int, Point]]()
    launch = space.chip.launch_overhead_s * space.chip.clock_hz
    best: tuple[Point, float] = ((), math.inf)
    for head in sorted(space.grouping.heads(), key=lambda one: len(space.structure(one).nests)):
        nests = space.structure(head).nests
        spent = {nest: least[nest][0] if nest in least else _work(nest).cycles() for nest in nests}
        left = [nest for nest in nests if nest not in least]
        while launch + sum(spent[nest] for nest in nests) < best[1]:
            if not left:
                point = space.joined(head, [least[nest][1] for nest in nests])
                cycles = simulate_kernel(lower(space.build(point)), space.chip).total_cycles
                best = min(best, (point, cycles), key=lambda pair: pair[1])
                break
            # those of few elements have few layouts
            nest = min(left, key=lambda one: (math.prod(one.extents.values()), -spent[one]))
            left.remove(nest)
            least[nest] = _best_layout(nest, known)
            spent[nest] = least[nest][0]
    return best[0], int(best[1])


def _work(nest: NestSpace) -> NestWork:
    """Return what no layout of a nest does without."""
    phase = nest.nest.phase
    return nest_work(nest.schedule.state, nest.schedule.chip, (*phase.tiles, phase.root))


def layout_bound(nest: NestSpace, work: NestWork, point: Point) -> float:
    """Return cycles that a layout does not beat: the work of its core with most elements.

    All stages of a nest follow the axes that are cut: each computes something for every tile.
    """
    root = nest.schedule.state.stage(nest.nest.phase.root)
    cuts, extents = nest.layout(point).cuts, {axis.name: axis.extent for axis in root.axes}
    share = math.prod(own / extents[axis] for axis, own, _ in cuts)
    return work.cycles(share, math.prod(-(-own // width) for _, own, width in cuts))


def _best_layout(nest: NestSpace, known: Known) -> tuple[int, Point]:
    """Return the least cycles of a nest, and the decisions behind them."""
    best: tuple[float, Point] = (math.inf, LEAST)
    points, work = list(nest.points()) or [LEAST], _work(nest)
    bounds = [layout_bound(nest, work, point) for point in points]
    for at in sorted(range(len(points)), key=bounds.__getitem__):
        if bounds[at] >= best[0]:
            break
        cycles = nest_cycles(nest, nest.layout(points[at]), known)
        best = min(best, (cycles, points[at]), key=lambda pair: pair[0])
    return int(best[0]), best[1]
