"""The search space of a vector operator: which stages share a loop nest, and each nest's layout.

A stage computes one tensor. A softmax of rows, for example, has stages for the maximum, the
exponentials, their sum and the quotient. The first decisions of a point group the stages into nests
of loops: all four in one, or some of them apart. They may also divide reductions (folds) into
partial ones, so that more cores have work: sums of 4,096 numbers into 8 sums of 512. Then follow
the decisions about each nest (see `nest.DECISIONS`).

The decisions about the grouping are the head of a point.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, zip_longest

import numpy as np

from ascend_lab.aoe.space import Point, Value, random_completion
from ascend_lab.aoe.vector.layout import Nest, lay_out, read_layout
from ascend_lab.aoe.vector.nest import DECISIONS, LEAST, NestSpace
from ascend_lab.errors import AscendLabError, InputError, ScheduleError, UnsupportedError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators import dsl, dsl as steps
from ascend_lab.operators.dsl.auto_fuse import Phase, fuse_stages, merge_axes, row_axes
from ascend_lab.operators.dsl.auto_tile import keeps_lanes, vector_core_count
from ascend_lab.operators.dsl.schedule import Schedule, Step, create_schedule, moves_only, replay
from ascend_lab.operators.dsl.stages import Stage, State

WAYS = ("fused", "stages", "inlined", "folds")
"""The ways to divide a group of stages into nests.

- fused: all stages in one nest
- stages: a nest for each stage
- inlined: stages that are not folds are computed where their values are used
- folds: the same, with a nest for each fold
"""
APART = " apart"
"""Suffix of a way that keeps the axes of the tensors separate instead of merging neighbours."""
LINE_BYTES = 512
"""Results that lie side by side are divided among cores in lines of this many bytes."""
MAX_PART_COUNTS = 4
"""The largest number of different counts of partial folds to try."""
MAX_COUNTED = 10_000
"""Spaces with more points than this are not counted: nests alone can have thousands of layouts."""


def regroup(s: Schedule, phase: Phase, way: str, parts: int) -> tuple[Schedule, tuple[Nest, ...]]:
    """Return the schedule with a group of stages divided into nests without layouts, and the nests.

    Raises `ScheduleError` if the way does not apply.
    """
    s, phases = _phases(s, phase, way.removesuffix(APART))
    nest_phases: list[Phase] = []
    for nest_phase in phases:
        s, partial = _with_partial_fold(s, nest_phase, parts)
        nest_phases += [*partial, nest_phase]
    if parts > 1 and len(nest_phases) == len(phases):
        raise ScheduleError(f"a fold of {parts} equal parts", way, "take 1 part")
    nests = []
    for nest_phase in nest_phases:
        if moves_only(s.state, s.state.stage(nest_phase.root)) and not nest_phase.tiles:
            continue  # a strided copy has a separate kernel
        s = s if way.endswith(APART) else merge_axes(s, nest_phase)
        rows = tuple(row_axes(s.state, nest_phase))
        if not rows and (nest_phase.tiles or nest_phase.outputs):
            raise ScheduleError(
                f"an axis of {nest_phase.root} all tiles follow", "none", "take stages"
            )
        nests.append(Nest(nest_phase, rows))
    return s, tuple(nests)


def _phases(s: Schedule, phase: Phase, way: str) -> tuple[Schedule, list[Phase]]:
    """Return the nests of a group before folds are divided; values used twice may be inlined."""
    if way == "fused":
        return s, [phase]
    if way == "stages":
        return s, [Phase(n) for n in (*phase.tiles, *phase.outputs, phase.root)]
    folds = [n for n in phase.tiles if s.state.stage(n).fold]
    for name in phase.tiles:
        if name not in folds:
            s = steps.inline(s, name)
    if way == "inlined":
        return s, [Phase(phase.root, tuple(folds), phase.outputs)]
    return s, [Phase(n) for n in (*folds, *phase.outputs, phase.root)]


def _with_partial_fold(s: Schedule, phase: Phase, parts: int) -> tuple[Schedule, list[Phase]]:
    """Divide the fold of a nest into `parts`; return the nest of the partial fold, if there is one.

    Only a nest with a single fold is divided: the parts of two folds would need two nests.
    """
    fold = _single_fold(s, phase) if parts > 1 else None
    if fold is None or parts not in part_counts(s, fold):
        return s, []
    axis = max(fold.reduce, key=lambda a: a.extent)
    # A row sum of 4,096 in 8 parts: y_rf[p] = sum of 512 numbers on core p, then y = sum of 8
    # numbers.
    s = steps.split(s, fold.name, axis.name, axis.extent // parts)
    s = steps.rfactor(s, fold.name, f"{axis.name}_o")
    return s, [Phase(f"{fold.name}_rf")]


def _single_fold(s: Schedule, phase: Phase) -> Stage | None:
    """Return the fold of a nest if it has exactly one, else None."""
    folds = [s.state.stage(n) for n in (*phase.tiles, phase.root) if s.state.stage(n).fold]
    return folds[0] if len(folds) == 1 and len(phase.tiles) < 2 else None


def part_counts(s: Schedule, stage: Stage) -> tuple[int, ...]:
    """Return the numbers of parts of a fold that give idle cores work, the largest first."""
    cores = vector_core_count(s)
    # Without partial folds at most one core per result has work: 64 rows keep 32 cores busy.
    results = math.prod(stage.shape)
    if keeps_lanes(stage):
        results = max(1, results * DTYPE_BYTES[stage.expr.dtype] // LINE_BYTES)
    extents = [axis.extent for axis in stage.reduce]
    size_bytes = results * math.prod(extents) * DTYPE_BYTES[stage.expr.dtype]
    # rfactor calls the axis of the parts p: a fold over it is divided already
    is_partial = any(axis.name == "p" for axis in stage.reduce)
    if results >= cores or size_bytes < LINE_BYTES or is_partial:
        return ()
    extent = max(extents, default=1)
    divisors = [d for d in range(min(cores, extent // 2), 1, -1) if extent % d == 0]
    # Of 12 divisors every third is taken: 4 numbers of parts, the largest first.
    step = max(1, -(-len(divisors) // MAX_PART_COUNTS))
    return tuple(divisors[::step])


def ways_of(s: Schedule, phase: Phase) -> dict[str, tuple[int, ...]]:
    """Return the ways that apply to a group (see `WAYS`), each with its numbers of parts."""
    structures: dict[str, tuple[tuple[Nest, ...], State]] = {}
    for way in WAYS:
        # Two ways may give the same nests, as "fused" and "inlined" where all tiles are folds.
        with suppress(AscendLabError):
            merged, nests = regroup(s, phase, way, 1)
            if (nests, merged.state) in structures.values():
                continue
            structures[way] = nests, merged.state
        with suppress(AscendLabError):
            apart, nests = regroup(s, phase, way + APART, 1)
            # if every nest has one merged axis, its tiles cover all choices of the separate axes
            one_axis = way in structures and _has_one_axis(*structures[way])
            if (nests, apart.state) not in structures.values() and not one_axis:
                structures[way + APART] = nests, apart.state
    return {way: (1, *_group_part_counts(s, phase, way)) for way in structures}


def _has_one_axis(nests: tuple[Nest, ...], state: State) -> bool:
    return all(len(state.stage(nest.phase.root).axes) == 1 for nest in nests)


def _group_part_counts(s: Schedule, phase: Phase, way: str) -> list[int]:
    """Return the numbers of parts of all folds of a group, without repetitions."""
    s, phases = _phases(s, phase, way.removesuffix(APART))
    counts: dict[int, None] = {}
    for nest_phase in phases:
        fold = _single_fold(s, nest_phase)
        counts |= dict.fromkeys(part_counts(s, fold) if fold is not None else ())
    return list(counts)


AS_DEFAULT = "default"
IN_PARTS = "parts of rows"
"""Two ways for all nests at once.

The first one gives the nests of the default schedule, if no other way does. The second one is the
default with long rows in parts, which no decisions about a nest can express.
"""


@dataclass(frozen=True)
class Structure:
    """A schedule whose stages are grouped but whose nests have no layout, and its nests."""

    schedule: Schedule
    nests: tuple[NestSpace, ...] = ()


class Grouping:
    """The ways to group the stages of a tensor program: two decisions per group, way and parts."""

    def __init__(self, default: Schedule, quickest: Schedule) -> None:
        """Take two default schedules; raise `UnsupportedError` for products of the cube.

        `quickest` may process long rows in parts, `default` does not.
        """
        # The automatic schedule begins with the same groups, so that its result is among the
        # groupings.
        start, phases = fuse_stages(create_schedule(default.outputs, default.chip))
        if any(isinstance(s, Stage) and s.is_cube for s in start.state.stages):
            raise UnsupportedError("operators of the vector unit", "a product", "tune its tiling")
        self.default = default
        self._without_layouts, self._default_nests = _without_layouts(default)
        self._groups: list[tuple[Phase, dict[str, tuple[int, ...]]]] = []
        for phase in phases:
            if parts_by_way := ways_of(start, phase):
                self._groups.append((phase, parts_by_way))
        # caches: the space of each nest, the structure of each head
        self._spaces: dict[object, NestSpace] = {}
        self._structures: dict[Point, Structure | None] = {(): Structure(start)}
        names: list[str] = []
        for number in range(1, len(self._groups) + 1):
            ending = f" {number}" if len(self._groups) > 1 else ""
            names += [f"way{ending}", f"parts{ending}"]
        self.names = tuple(names)
        self._whole_ways: tuple[str, ...] = ()
        self.plain_head = self._default_head(()) or self._add_whole_way(
            AS_DEFAULT, self._without_layouts, self._default_nests
        )
        if quickest.steps == default.steps:
            self.default_head = self.plain_head
        else:
            self.default_head = self._add_whole_way(IN_PARTS, quickest, ())

    def _add_whole_way(self, way: str, s: Schedule, nests: Sequence[Nest]) -> Point:
        """Add a way for all groups at once, and return its head."""
        head: Point = (way, 1) * len(self._groups)
        self._structures[head] = Structure(s, tuple(self._nest(s, nest) for nest in nests))
        self._whole_ways += (way,)
        return head

    def options(self, head: Point) -> tuple[Value, ...]:
        """Return the ways of the next group, or its numbers of partial folds."""
        # decisions alternate: way and parts of group 0, way and parts of group 1, ...
        decides_parts = len(head) % 2 == 1
        if head and head[0] in self._whole_ways:
            return (1,) if decides_parts else head[:1]
        _, parts_by_way = self._groups[len(head) // 2]
        if decides_parts:
            return tuple(p for p in parts_by_way[head[-1]] if self.structure((*head, p)))
        # A way that cannot be lowered is no option, so that a search never proposes what fails.
        legal = tuple(way for way in parts_by_way if self.structure((*head, way, 1)))
        return legal if head else (*legal, *self._whole_ways)

    def heads(self, prefix: Point = ()) -> list[Point]:
        """Return all heads that begin with `prefix`."""
        if len(prefix) == len(self.names):
            return [prefix]
        heads = []
        for value in self.options(prefix):
            heads += self.heads((*prefix, value))
        return heads

    def structure(self, head: Point) -> Structure | None:
        """Return the structure of a head or a part of it; None if it cannot be lowered."""
        if head not in self._structures:
            self._structures[head] = None
            outer = self.structure(head[:-2]) if len(head) <= len(self.names) else None
            if outer is not None:
                phase, parts_by_way = self._groups[len(head) // 2 - 1]
                if head[-1] in parts_by_way.get(head[-2], ()):
                    self._structures[head] = self._extended(outer, phase, head[-2], head[-1])
        return self._structures[head]

    def _extended(self, outer: Structure, phase: Phase, way: str, parts: int) -> Structure | None:
        """Return a structure with one more group in nests; None if a nest has no legal layout."""
        try:
            s, new_nests = regroup(outer.schedule, phase, way, parts)
            nests = tuple(self._nest(s, nest) for nest in new_nests)
            if not all(nest.has_points for nest in nests):
                return None
        except AscendLabError:
            return None
        return Structure(s, (*outer.nests, *nests))

    def _nest(self, s: Schedule, nest: Nest) -> NestSpace:
        """Return the space of a nest, with the default's layout if the default has this nest."""
        phase = nest.phase
        stages = [s.state.stage(n) for n in (*phase.tiles, *phase.outputs, phase.root)]
        shapes: dict[str, tuple[int, ...]] = {}
        for stage in stages:
            shapes |= {read.source: s.state.find(read.source).shape for read in stage.reads}
        # Nests of the same stages over the same shapes share a space, in all groupings where they
        # occur.
        key = (nest, tuple(stages), tuple(shapes.items()))
        if key not in self._spaces:
            default_state = self._without_layouts.state
            is_default = nest in self._default_nests and all(
                stage == default_state.stage(stage.name) for stage in stages
            )
            layout = read_layout(self.default.state, phase) if is_default else None
            self._spaces[key] = NestSpace(s, nest, layout)
        return self._spaces[key]

    def _default_head(self, prefix: Point) -> Point | None:
        """Return the head that begins with `prefix` and gives the nests of the default, or None."""
        if len(prefix) == len(self.names):
            structure = self.structure(prefix)
            assert structure is not None
            nests = [space.nest for space in structure.nests if space.default is not None]
            is_default = sorted(map(str, nests)) == sorted(map(str, self._default_nests))
            return prefix if is_default else None
        for way in self.options(prefix):
            for parts in self.options((*prefix, way)):
                longer = (*prefix, way, parts)
                structure = self.structure(longer)
                if structure and all(space.default is not None for space in structure.nests):
                    head = self._default_head(longer)
                    if head is not None:
                        return head
        return None


def _without_layouts(default: Schedule) -> tuple[Schedule, tuple[Nest, ...]]:
    """Return a schedule without its layouts, and its nests."""
    grouping_steps: list[Step] = []
    next_primitives = [step.primitive for step in default.steps[1:]]
    for step, next_primitive in zip_longest(default.steps, next_primitives):
        # A split that rfactor turns into a tensor belongs to the grouping; all other splits are
        # layout.
        is_factored = step.primitive == "split" and next_primitive == "rfactor"
        if is_factored or step.primitive in ("inline", "fuse", "materialise", "rfactor"):
            grouping_steps.append(step)
    bare = replay(default.outputs, default.chip, grouping_steps)
    nests = []
    stages = [stage for stage in default.state.stages if isinstance(stage, Stage)]
    for root in stages:
        if root.attach is not None or not root.vector_at:
            continue
        inside = [s for s in stages if s.attach is not None and s.attach[0] == root.name]
        tiles = tuple(stage.name for stage in inside if not stage.output)
        phase = Phase(root.name, tiles, tuple(stage.name for stage in inside if stage.output))
        nests.append(Nest(phase, tuple(row_axes(bare.state, phase))))
    return bare, tuple(nests)


# -- a point is a grouping and the decisions about each of its nests -------------------------------
class VectorSpace:
    """The space of all schedules of a vector operator; it is built only as far as a search needs.

    The head of a point groups the stages (a way and a number of partial folds per group). Then
    `DECISIONS` follow for the first nest, the second, and so on; if a grouping has fewer nests than
    others, the decisions for the missing nests have a single value. A decision that has a single
    value in every grouping is left out.
    """

    def __init__(self, outputs: dsl.Tensor | Sequence[dsl.Tensor], chip: Chip) -> None:
        """Find the groupings; raises as `auto_schedule`, and for products of the cube."""
        self.outputs = (outputs,) if isinstance(outputs, dsl.Tensor) else tuple(outputs)
        self.chip = chip
        self.default = dsl.auto_schedule(self.outputs, chip)
        self.grouping = Grouping(dsl.auto_schedule(self.outputs, chip, parts=False), self.default)
        self._head_length = len(self.grouping.names)
        # for nest number k of any grouping, the indices of its open decisions in `DECISIONS`; few
        # heads enough to list: up to eight ways and five numbers of parts per group
        open_sets: list[set[int]] = []
        for head in self.grouping.heads():
            for number, nest in enumerate(self.structure(head).nests):
                if number == len(open_sets):
                    open_sets.append(set())
                open_sets[number] |= nest.open_decisions
        self._open_decisions = [tuple(sorted(indices)) for indices in open_sets]
        names = list(self.grouping.names)
        # (nest number, index in `DECISIONS`) of each decision after the head
        self._nest_decisions: list[tuple[int, int]] = []
        for number, indices in enumerate(self._open_decisions):
            ending = f" {number + 1}" if len(open_sets) > 1 else ""
            names += [DECISIONS[index] + ending for index in indices]
            self._nest_decisions += [(number, index) for index in indices]
        self.names = tuple(names)
        self._options: dict[Point, tuple[Value, ...]] = {}

    # -- points and schedules ---------------------------------------------------------------------
    def structure(self, point: Point) -> Structure:
        """Return the structure that a point chooses; raise `InputError` if it is not legal."""
        head = point[: self._head_length]
        structure = self.grouping.structure(head) if len(head) == self._head_length else None
        if structure is None:
            raise InputError("a point of the space", str(point), "take values from `options`")
        return structure

    def parts(self, point: Point) -> list[tuple[NestSpace, Point]]:
        """Return the nests of a point, each with the decisions about it."""
        nests = []
        start = self._head_length
        # a grouping may have fewer nests than the longest one
        for nest, indices in zip(self.structure(point).nests, self._open_decisions, strict=False):
            stop = start + len(indices)
            nests.append((nest, _filled(indices, point[start:stop])))
            start = stop
        return nests

    def joined(self, head: Point, nest_points: Sequence[Point]) -> Point:
        """Return the point with a head, and with all decisions about each of its nests."""
        point = head
        pairs = zip_longest(self._open_decisions, nest_points, fillvalue=LEAST)
        for indices, nest_point in pairs:
            point += tuple(nest_point[index] for index in indices)
        return point

    def build(self, point: Point) -> Schedule:
        """Return the schedule of a point; raise `AscendLabError` for a point of another space."""
        if len(point) != len(self.names):
            raise InputError(f"{len(self.names)} decisions", str(len(point)), "complete the point")
        s = self.structure(point).schedule
        for nest, decisions in self.parts(point):
            s = lay_out(s, nest.nest, nest.layout(decisions))
        return s

    @property
    def default_points(self) -> tuple[Point, ...]:
        """The points of the default schedule, and of the default without parts of rows."""
        points = []
        for head in dict.fromkeys((self.grouping.default_head, self.grouping.plain_head)):
            nest_points = [nest.default_point or LEAST for nest in self.structure(head).nests]
            points.append(self.joined(head, nest_points))
        return tuple(points)

    @property
    def default_point(self) -> Point:
        """The point of the default schedule."""
        return self.default_points[0]

    # -- the interface of a space (see `aoe.space.Space`) -----------------------------------------
    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`; they are cached."""
        if prefix not in self._options:
            self._options[prefix] = self._compute_options(prefix)
        return self._options[prefix]

    def _compute_options(self, prefix: Point) -> tuple[Value, ...]:
        if len(prefix) < self._head_length:
            return self.grouping.options(prefix)
        number, index = self._nest_decisions[len(prefix) - self._head_length]
        nests = self.structure(prefix).nests
        if number >= len(nests):
            return (LEAST[index],)
        # the values that the prefix has for this nest, the last ones
        indices = self._open_decisions[number]
        taken = prefix[len(prefix) - indices.index(index) :] if index else ()
        return nests[number].options(_filled(indices, taken)[:index])

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point: each decision takes one of its options with equal probability."""
        return random_completion(self, (), rng)

    def key(self, point: Point) -> Hashable:
        """Return a key of the schedule that a point builds: grouping and layouts."""
        return (
            point[: self._head_length],
            *(nest.layout(decisions) for nest, decisions in self.parts(point)),
        )

    @property
    def size(self) -> int | None:
        """The number of points; None above `MAX_COUNTED`."""
        return self.counted(MAX_COUNTED)

    def counted(self, limit: int) -> int | None:
        """Return the number of points; None if there are more than `limit`."""
        total = 0
        for head in self.grouping.heads():
            points = 1
            for nest in self.structure(head).nests:
                points *= nest.count(limit // points)
                # Counting stops as soon as it is certain that there are more than `limit`.
                if total + points > limit:
                    return None
            total += points
        return total

    def points(self) -> Iterator[Point]:
        """Yield all points, grouping by grouping."""
        for head in self.grouping.heads():
            # Decisions about one nest do not restrict those about another: all combinations are
            # legal.
            nests = [list(nest.points()) for nest in self.structure(head).nests]
            for chosen in product(*nests):
                yield self.joined(head, chosen)


def _filled(indices: Sequence[int], values: Sequence[Value]) -> Point:
    """Return all decisions about a nest; those without a value get their least value."""
    value_of = dict(zip(indices, values, strict=False))
    return tuple(value_of.get(index, least) for index, least in enumerate(LEAST))
