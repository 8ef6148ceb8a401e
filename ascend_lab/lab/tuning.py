"""What the chapters on tuning compare tuners and compilers with.

- `SimpleGenetic` is a plain genetic search, and `optimum` finds the best point of a space exactly.
- `compile_with` is a compiler whose techniques can be switched off one by one. With none of them
  the graph stays as the model states it; every cube operator has its operands converted; each
  operator is a kernel; tiles fit buffers of an eighth of their size; and each buffer has one slot,
  so that loads and use alternate. With all of them it is the default compiler, which `tune` starts
  from. All cores work in either case.
- `shares` divides the gain of several techniques fairly among them (Shapley values).
- `Workbench` is a temporary folder in which the commands are run.
"""

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np

from ascend_lab import cli, errors
from ascend_lab.aoe.drive import Steps
from ascend_lab.aoe.operators import unit_of
from ascend_lab.aoe.space import Point, Space, completed, crossed, mutated
from ascend_lab.aoe.vector import VectorMeasure, VectorSpace, bound
from ascend_lab.aoe.vector.layout import Layout, lay_out
from ascend_lab.aoe.vector.nest import LEAST, NestSpace
from ascend_lab.compiler import Graph, like_cann, passes, simulate_graph
from ascend_lab.compiler.compile import Layouts, Road
from ascend_lab.compiler.layout import assign_layouts
from ascend_lab.compiler.lower import CONVOLUTIONS, Choice, Lowered, Piece, matmul, vector
from ascend_lab.compiler.tasks import Compiled, CpuKernel, lowered_once
from ascend_lab.fused.added_convolutions import joint_job
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import simulate, simulate_kernel
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.dsl.lower import lower_stage

# -- the genetic search of the textbooks ----------------------------------------------------------
Person = tuple[float, Point]
"""Cost and point."""
TRIES = 10
"""So often a child that was born before is replaced."""


@dataclass
class SimpleGenetic:
    """The genetic search of textbooks; `log` holds each generation of the last run, best first.

    Parents are picked by tournament, crossed decision by decision, repaired where the mix is not
    legal, and sometimes mutated; the best parents stay. J. H. Holland, "Adaptation in Natural and
    Artificial Systems", 1975.

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
        """Yield a generation of points and take their costs, for ever."""
        self.log = []
        points = [completed(space, point) for point in start][: self.population]
        points += [space.sample(rng) for _ in range(self.population - len(points))]
        people: list[Person] = []
        born_points: set[Point] = set()
        while True:
            costs = yield points
            born_points.update(points)
            newborn = list(zip(costs, points, strict=True))
            people = sorted(people[: self.keep] + newborn, key=lambda person: person[0])
            people = people[: self.population]
            self.log.append(people)
            points = []
            for _ in range(self.population - self.keep):
                earlier_points = born_points.union(points)
                for _ in range(TRIES + 1):
                    child = self.child(space, people, rng)
                    if child not in earlier_points:
                        break
                points.append(child)

    def child(self, space: Space, people: Sequence[Person], rng: np.random.Generator) -> Point:
        """Return a child of two of the people, which stand in order of cost."""

        def tournament_winner() -> Point:
            """Return the best of some random points."""
            # people are in order of cost, so the smallest place drawn is the best of them
            places = rng.integers(len(people), size=self.tournament)
            winner = people[int(places.min())]
            return winner[1]

        mother = tournament_winner()
        father = tournament_winner()
        point = crossed(space, mother, father, rng)
        return mutated(space, point, rng) if rng.random() < self.mutation else point


# -- the best point of a space, exactly -----------------------------------------------------------
# A nest is the loops of one phase of a kernel. With nothing in L2 at the start of a phase, the
# cycles of a kernel are the sum over its phases, plus barriers. So no nest changes the time of
# another: each is simulated alone, and the best layouts of all nests make the best kernel.
Known = dict[tuple[NestSpace, Layout], int]
"""Cycles of nests laid out, as far as they were simulated."""


def nest_cycles(nest: NestSpace, layout: Layout, known: Known) -> int:
    """Return the cycles of a nest alone, L2 cold."""
    if (nest, layout) not in known:
        launches = lower_stage(lay_out(nest.schedule, nest.nest, layout), nest.nest.phase.root)
        chip = nest.schedule.chip
        known[nest, layout] = sum(simulate(launch, chip).cycles for launch in launches)
    return known[nest, layout]


@dataclass
class NestCosts:
    """Point -> cycles, equal to those of `measure`, for which L2 is cold before every nest.

    Cycles = sum over nests + barriers between them + launch. The last two depend only on the number
    of nests: `extra_cycles` has them by that number, measured at its first point.
    """

    measure: VectorMeasure
    known: Known = field(default_factory=dict)
    extra_cycles: dict[int, float] = field(default_factory=dict)

    def __call__(self, point: Point) -> float:
        """Return the cycles of a point; simulates only nests not met before."""
        parts = self.measure.space().parts(point)
        total = sum(
            nest_cycles(nest, nest.layout(nest_point), self.known) for nest, nest_point in parts
        )
        if len(parts) not in self.extra_cycles:
            self.extra_cycles[len(parts)] = self.measure(point) - total
        return total + self.extra_cycles[len(parts)]


def optimum(space: VectorSpace, known: Known | None = None) -> tuple[Point, int]:
    """Return the best point of a space and its cycles, launch included, L2 cold.

    Takes at most one simulation per layout of every nest, not per point: seconds for most
    operators. Two bounds save simulations. A layout is skipped if its core with most elements
    alone works as long as the best layout takes. A grouping of stages into nests is skipped once
    the best layouts of some of its nests, and the least work of the others, take as long as the
    best point. `known` of a `NestCosts` is read and filled, so that neither simulates what the
    other has.
    """
    known = {} if known is None else known
    best_of_nest = dict[NestSpace, tuple[int, Point]]()
    launch_cycles = space.chip.launch_overhead_s * space.chip.clock_hz
    best: tuple[Point, float] = ((), math.inf)
    for head in sorted(space.grouping.heads(), key=lambda head: len(space.structure(head).nests)):
        nests = space.structure(head).nests
        least_cycles = {
            nest: best_of_nest[nest][0] if nest in best_of_nest else _work(nest).cycles()
            for nest in nests
        }
        open_nests = [nest for nest in nests if nest not in best_of_nest]
        while launch_cycles + sum(least_cycles[nest] for nest in nests) < best[1]:
            if not open_nests:
                point = space.joined(head, [best_of_nest[nest][1] for nest in nests])
                cycles = simulate_kernel(te.lower(space.build(point)), space.chip).total_cycles
                best = min(best, (point, cycles), key=lambda pair: pair[1])
                break
            # those of few elements have few layouts
            nest = min(
                open_nests,
                key=lambda nest: (math.prod(nest.extents.values()), -least_cycles[nest]),
            )
            open_nests.remove(nest)
            best_of_nest[nest] = _best_layout(nest, known)
            least_cycles[nest] = best_of_nest[nest][0]
    return best[0], int(best[1])


def _work(nest: NestSpace) -> bound.NestWork:
    """Return the work that every layout of a nest has to do."""
    phase = nest.nest.phase
    return bound.nest_work(nest.schedule.state, nest.schedule.chip, (*phase.tiles, phase.root))


def layout_bound(nest: NestSpace, work: bound.NestWork, point: Point) -> float:
    """Return a lower bound of a layout's cycles: the work of its core with most elements."""
    root = nest.schedule.state.stage(nest.nest.phase.root)
    cuts = nest.layout(point).cuts
    extents = {axis.name: axis.extent for axis in root.axes}
    # a cut (axis, n, width): a core gets n elements of the axis, in tiles of the width
    core_share = math.prod(core_extent / extents[axis] for axis, core_extent, _ in cuts)
    tiles = math.prod(-(-core_extent // width) for _, core_extent, width in cuts)
    return work.cycles(core_share, tiles)


def _best_layout(nest: NestSpace, known: Known) -> tuple[int, Point]:
    """Return the least cycles of a nest, and the decisions behind them."""
    best: tuple[float, Point] = (math.inf, LEAST)
    points = list(nest.points()) or [LEAST]
    work = _work(nest)
    bounds = [layout_bound(nest, work, point) for point in points]
    for number in sorted(range(len(points)), key=bounds.__getitem__):
        if bounds[number] >= best[0]:
            break
        cycles = nest_cycles(nest, nest.layout(points[number]), known)
        best = min(best, (cycles, points[number]), key=lambda pair: pair[0])
    return int(best[0]), best[1]


# -- techniques, on and off ------------------------------------------------------------------------
TECHNIQUES = ("rewriting", "layouts", "fusion", "large tiles", "double buffers")
"""In the order of the waterfall."""
SMALL = 8
"""Without large tiles a scheduler sees an eighth of L0 and UB; L1 must hold rows of images."""
BUFFERS = ("L0A", "L0B", "L0C", "UB")


def compile_with(graph: Graph, chip: Chip, on: Iterable[str]) -> Compiled:
    """Return the kernels of a graph by a compiler with only these techniques."""
    return _compiler(graph, chip)(frozenset(on))


def _compiler(graph: Graph, chip: Chip) -> Callable[[frozenset[str]], Compiled]:
    """Return a function that compiles the graph with a set of techniques, slots last."""

    @cache
    def doubled(on: frozenset[str]) -> Compiled:
        """Return the network by techniques other than double buffers, with double buffers."""
        seen_chip = chip if "large tiles" in on else small_chip(chip)
        layouts_spread = "layouts" in on
        road = Road(
            passes.DEFAULT if "rewriting" in on else (),
            dtype="fp16",
            layouts=Layouts(
                partial(assign_layouts, follow=layouts_spread), cancels_conversions=layouts_spread
            ),
            fusion="fusion" in on,
        )
        return road.stages(graph, seen_chip).compiled

    def compiled(on: frozenset[str]) -> Compiled:
        """Return the network by a set of techniques."""
        if unknown := sorted(on - set(TECHNIQUES)):
            raise errors.InputError(", ".join(TECHNIQUES), ", ".join(unknown), "choose among them")
        compiled_doubled = doubled(on - {"double buffers"})
        return replace(
            compiled_doubled if "double buffers" in on else single_buffered(compiled_doubled),
            chip=chip,
        )

    return compiled


def ladder(graph: Graph, chip: Chip) -> list[tuple[str, Compiled, float]]:
    """Return (technique, network, seconds) from the naive compiler on, one technique more a row."""
    build = _compiler(graph, chip)
    rows = []
    for count, name in enumerate(("naive", *TECHNIQUES)):
        compiled = build(frozenset(TECHNIQUES[:count]))
        rows.append((name, compiled, simulate_graph(compiled).time_s))
    return rows


def compilers(graph: Graph, chip: Chip) -> dict[str, float]:
    """Return the seconds of a network by the compiler as the vendor documents it, and by ours."""
    roads = {"as documented": like_cann.cann_road(chip, "fp16"), "ours": Road()}
    return {name: way.stages(graph, chip).timeline().time_s for name, way in roads.items()}


def all_times(graph: Graph, chip: Chip) -> dict[frozenset[str], float]:
    """Return the seconds of a graph under every subset of the techniques: 2^n networks."""
    build = _compiler(graph, chip)
    return {on: simulate_graph(build(on)).time_s for on in subsets(TECHNIQUES)}


@lru_cache(64)
def small_chip(chip: Chip) -> Chip:
    """Return the chip as a scheduler sees it that makes small tiles only."""
    sizes = {
        name: size // SMALL if name in BUFFERS else size for name, size in chip.buffers.items()
    }
    return replace(chip, buffers=sizes)


def single_buffered(compiled: Compiled) -> Compiled:
    """Return a network with one slot per buffer wherever a schedule says how many there are."""
    tasks = [
        replace(task, lowered=_with_one_slot(task.piece, task.lowered, compiled.chip))
        for task in compiled.tasks
    ]
    return replace(compiled, tasks=tuple(tasks))


def _with_one_slot(piece: Piece, lowered: Lowered | None, chip: Chip) -> Lowered | None:
    """Return a piece's kernel with one slot per buffer; work of the CPU stays as it is."""
    if lowered is None or isinstance(lowered.kernel, CpuKernel):
        return lowered
    unit, _ = unit_of(piece, chip)
    if unit in ("cube", "joint"):
        one_slot = {f"{name}_slots": 1 for name in ("a_l1", "b_l1", "a_l0", "b_l0", "c_l0")}
        tiling = replace(default_tiling(piece, chip), **one_slot)  # type: ignore[arg-type]
        return lowered_once(piece, chip, Choice(tiling=tiling))
    if not unit:
        return lowered
    return replace(lowered, kernel=_one_slot_kernel(piece, unit, chip))


@lru_cache(1024)
def _one_slot_kernel(piece: Piece, unit: str, chip: Chip) -> isa.Kernel:
    """Return the kernel of the default schedule without its steps of double buffering."""
    product = unit == "product"
    outputs = [matmul.batched_output(piece)] if product else vector.vector_outputs(piece)[0]
    steps = json.loads(te.auto_schedule(outputs, chip).to_json())
    steps["steps"] = [s for s in steps["steps"] if s[0] != "double_buffer"]
    return te.lower(te.replay(outputs, chip, json.dumps(steps)))


def default_tiling(piece: Piece, chip: Chip) -> kernels.GemmSchedule:
    """Return the tiling that a convolution or product gets without a tuner."""
    if piece.graph.nodes[0].op in CONVOLUTIONS:
        shape, epilogue, _ = joint_job(piece, chip)
        return lowered_once(piece, chip).tiling or kernels.conv_schedule(shape, chip, epilogue)
    product, epilogue = matmul.product_job(piece, chip)
    return kernels.default_schedule(product, chip, epilogue)


# -- credit for what several techniques reach together, whatever their order ----------------------
Value = Callable[[frozenset[str]], float]
"""The value of a set of techniques, such as the logarithm of the speed that they reach."""
Times = Mapping[frozenset[str], float]
"""Seconds for every set of techniques."""


def shares(value: Value, names: Sequence[str]) -> dict[str, float]:
    """Return the Shapley value of each name: what it adds to `value`, mean over all orders.

        share(i) = sum over S without i of (value(S + i) - value(S)) / (n C(n - 1, |S|))

    Shares add up to value(all) - value(none). Source: Shapley 1953.
    """
    n = len(names)
    share_of = dict.fromkeys(names, 0.0)
    for name in names:
        for earlier in subsets(x for x in names if x != name):
            gain = value(earlier | {name}) - value(earlier)
            share_of[name] += gain / (n * math.comb(n - 1, len(earlier)))
    return share_of


def subsets(names: Iterable[str]) -> Iterator[frozenset[str]]:
    """Yield every set of some names, small ones first."""
    all_names = tuple(names)
    for size in range(len(all_names) + 1):
        yield from map(frozenset, combinations(all_names, size))


def factors(times: Times, names: Sequence[str]) -> dict[str, float]:
    """Return how many times faster each name makes it: its share of the logarithm of the speed.

    Speed-ups multiply and their logarithms add, so that the factors multiply to
    time(none) / time(all).
    """
    log_shares = shares(lambda on: -math.log(times[on]), names)
    return {name: math.exp(share) for name, share in log_shares.items()}


def factor_range(times: Times, name: str, names: Sequence[str]) -> tuple[float, float]:
    """Return the least and the largest factor of a name, over all sets that may stand before it."""
    sets = subsets(x for x in names if x != name)
    ratios = [times[earlier] / times[earlier | {name}] for earlier in sets]
    return min(ratios), max(ratios)


# -- a folder to run the commands in --------------------------------------------------------------
class Workbench:
    """A temporary folder with a knowledge bank of its own, for one chip.

    What a command prints is returned; its files stay in the folder.
    """

    def __init__(self, chip: str) -> None:
        self._folder = TemporaryDirectory()
        self.chip = chip
        self.path = Path(self._folder.name)
        (self.path / "bank").mkdir()

    def aoe(self, *arguments: object, bank: str = "bank") -> str:
        """Run `aoe` on ONNX models with results in the folder; return what it printed."""
        common_arguments = [
            "--framework",
            "5",
            "--soc_version",
            self.chip,
            "--output",
            str(self.path),
        ]
        printed = io.StringIO()
        environment = {"TUNE_BANK_PATH": str(self.path / bank)}
        stdout = contextlib.redirect_stdout(printed)
        stderr = contextlib.redirect_stderr(printed)
        with stdout, stderr, mock.patch.dict(os.environ, environment):
            code = cli.aoe([*map(str, arguments), *common_arguments, "--progress_bar", "off"])
        text = printed.getvalue().replace(str(self.path), "WORK").strip()
        return f"{text}\nexit code {code}"

    def simulate(self, model: str, *arguments: object) -> dict[str, Any]:
        """Run `ascend-lab simulate` on a model of the folder; return its JSON report."""
        report = self.path / "simulated.json"
        all_arguments = [str(self.path / model), *map(str, arguments)]
        with contextlib.redirect_stdout(io.StringIO()):
            cli.ascend_lab(["simulate", *all_arguments, "--chip", self.chip, "--json", str(report)])
        return dict(json.loads(report.read_text("utf-8")))

    def report(self, job: str) -> dict[str, Any]:
        """Return the latest report of a job, "sgat" or "opat"."""
        path = max(self.path.glob(f"aoe_result_{job}_*.json"))
        return dict(json.loads(path.read_text("utf-8"))[0])
