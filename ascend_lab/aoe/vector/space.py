"""The search space of a vector operator: which stages share a loop nest, and each nest's layout.

A stage computes one tensor. The first decisions group the stages into nests, and divide reductions
(folds) into partial ones. Then follow the decisions about each nest.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, zip_longest

import numpy as np

from ascend_lab.aoe.space import Point, Value, random_completion
from ascend_lab.aoe.vector.layout import Nest, lay, read_layout
from ascend_lab.aoe.vector.nest import DECISIONS, LEAST, NestSpace
from ascend_lab.errors import AscendLabError, InputError, ScheduleError, UnsupportedError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators import dsl, dsl as steps
from ascend_lab.operators.dsl.auto_fuse import Phase, fuse_stages, merge_axes, row_axes
from ascend_lab.operators.dsl.auto_tile import core_count, keeps_lanes
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
PARTS = 4
"""The largest number of different counts of partial folds to try."""
COUNTED = 10_000
"""Spaces with more points than this are not counted: nests alone can have thousands of layouts."""


def regroup(
    s: Schedule, phase: Phase, grouping: str, parts: int
) -> tuple[Schedule, tuple[Nest, ...]]:
    """Return the schedule with a group of stages divided into nests without layouts, and the nests.

    Raises `ScheduleError` if the grouping does not apply.
    """
    base = grouping.removesuffix(APART)
    merge = not grouping.endswith(APART)
    s, phases = _phases(s, phase, base)
    nest_phases: list[Phase] = []
    cut = False
    for nest_phase in phases:
        partial = ""
        # Only a nest with a single fold is divided: the parts of two folds would need two nests.
        fold = _own_fold(s, nest_phase) if parts > 1 else None
        if fold is not None and parts in part_counts(s, fold):
            axis = max(fold.reduce, key=lambda a: a.extent)
            # A row sum of 4,096 in 8 parts: y_rf[p] = sum of 512 numbers on core p, then y = sum of
            # 8 numbers.
            s = steps.split(s, fold.name, axis.name, axis.extent // parts)
            s = steps.rfactor(s, fold.name, f"{axis.name}_o")
            partial = f"{fold.name}_rf"
        cut = cut or bool(partial)
        nest_phases += [Phase(partial), nest_phase] if partial else [nest_phase]
    if parts > 1 and not cut:
        raise ScheduleError(f"a fold of {parts} equal parts", grouping, "take 1 part")
    nests = []
    for nest_phase in nest_phases:
        if moves_only(s.state, s.state.stage(nest_phase.root)) and not nest_phase.tiles:
            continue  # a strided copy has a separate kernel
        s = merge_axes(s, nest_phase) if merge else s
        rows = tuple(row_axes(s.state, nest_phase))
        if not rows and (nest_phase.tiles or nest_phase.outputs):
            raise ScheduleError(
                f"an axis of {nest_phase.root} all tiles follow", "none", "take stages"
            )
        nests.append(Nest(nest_phase, rows))
    return s, tuple(nests)


def _phases(s: Schedule, phase: Phase, grouping: str) -> tuple[Schedule, list[Phase]]:
    """Return the nests of a group before folds are cut; values used twice may be inlined."""
    if grouping == "fused":
        return s, [phase]
    if grouping == "stages":
        return s, [Phase(n) for n in (*phase.tiles, *phase.outputs, phase.root)]
    folds = [n for n in phase.tiles if s.state.stage(n).fold]
    for name in phase.tiles:
        if name not in folds:
            s = steps.inline(s, name)
    if grouping == "inlined":
        return s, [Phase(phase.root, tuple(folds), phase.outputs)]
    return s, [Phase(n) for n in (*folds, *phase.outputs, phase.root)]


def _own_fold(s: Schedule, phase: Phase) -> Stage | None:
    """Return the fold of a nest if it has exactly one, else None."""
    folds = [s.state.stage(n) for n in (*phase.tiles, phase.root) if s.state.stage(n).fold]
    return folds[0] if len(folds) == 1 and len(phase.tiles) < 2 else None


def part_counts(s: Schedule, stage: Stage) -> tuple[int, ...]:
    """Return the numbers of parts of a fold that give idle cores work, the largest first."""
    cores = core_count(s)
    # Without partial folds at most one core per result has work: 64 rows keep 32 cores busy.
    units = math.prod(stage.shape)
    if keeps_lanes(stage):
        units = max(1, units * DTYPE_BYTES[stage.expr.dtype] // LINE_BYTES)
    extent = max((a.extent for a in stage.reduce), default=1)
    size = units * math.prod(a.extent for a in stage.reduce) * DTYPE_BYTES[stage.expr.dtype]
    if units >= cores or size < LINE_BYTES or any(a.name == "p" for a in stage.reduce):
        return ()
    divisors = [d for d in range(min(cores, extent // 2), 1, -1) if extent % d == 0]
    # Of 12 divisors every third is taken: 4 numbers of parts, the largest first.
    step = max(1, -(-len(divisors) // PARTS))
    return tuple(divisors[::step])


def ways(s: Schedule, phase: Phase) -> dict[str, tuple[int, ...]]:
    """Return the ways that apply to a group (see `WAYS`), each with its numbers of parts."""
    structures: dict[str, tuple[tuple[Nest, ...], State]] = {}

    def is_flat(nests: tuple[Nest, ...], state: State) -> bool:
        return all(len(state.stage(n.phase.root).axes) == 1 for n in nests)

    for way in WAYS:
        with suppress(AscendLabError):
            merged, nests = regroup(s, phase, way, 1)
            # Two ways may give the same nests, as "fused" and "inlined" where all tiles are folds.
            if (nests, merged.state) in structures.values():
                continue
            structures[way] = nests, merged.state
        with suppress(AscendLabError):
            apart, nests = regroup(s, phase, way + APART, 1)
            # if every nest has one merged axis, its tiles cover all choices of the separate axes
            one_axis = way in structures and is_flat(*structures[way])
            if (nests, apart.state) not in structures.values() and not one_axis:
                structures[way + APART] = nests, apart.state
    return {name: (1, *_parts(s, phase, name)) for name in structures}


def _parts(s: Schedule, phase: Phase, way: str) -> Sequence[int]:
    counts: dict[int, None] = {}
    s, phases = _phases(s, phase, way.removesuffix(APART))
    for nest_phase in phases:
        stage = _own_fold(s, nest_phase)
        counts |= dict.fromkeys(part_counts(s, stage) if stage is not None else ())
    return tuple(counts)


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
        self._bare, self._nests = _stripped(default)
        self._ways = [(p, ways(start, p)) for p in phases]
        self._ways = [(p, parts_by_way) for p, parts_by_way in self._ways if parts_by_way]
        self._spaces: dict[object, NestSpace] = {}
        self._known: dict[Point, Structure | None] = {(): Structure(start)}
        ends = [f" {g + 1}" if len(self._ways) > 1 else "" for g in range(len(self._ways))]
        self.names = tuple(f"{word}{end}" for end in ends for word in ("way", "parts"))
        self._whole: tuple[str, ...] = ()
        self.plain_head = self._match(()) or self._as_whole(AS_DEFAULT, self._bare, self._nests)
        no_parts = quickest.steps == default.steps
        self.default_head = self.plain_head if no_parts else self._as_whole(IN_PARTS, quickest)

    def _as_whole(self, way: str, s: Schedule, nests: Sequence[Nest] = ()) -> Point:
        """Add a way for all groups at once, and return its grouping."""
        head: Point = (way, 1) * len(self._ways)
        self._known[head] = Structure(s, tuple(self._nest(s, n) for n in nests))
        self._whole += (way,)
        return head

    def options(self, head: Point) -> tuple[Value, ...]:
        """Return the ways of the next group, or its numbers of partial folds."""
        if head and head[0] in self._whole:
            return (1,) if len(head) % 2 else head[:1]
        parts_by_way = self._ways[len(head) // 2][1]
        if len(head) % 2:
            return tuple(p for p in parts_by_way[head[-1]] if self.structure((*head, p)))
        # A way that cannot be lowered is no option, so that a search never proposes what fails.
        legal = tuple(w for w in parts_by_way if self.structure((*head, w, 1)))
        return legal if head else (*legal, *self._whole)

    def heads(self, head: Point = ()) -> list[Point]:
        """Return all groupings whose first decisions are `head`."""
        if len(head) == len(self.names):
            return [head]
        return [h for value in self.options(head) for h in self.heads((*head, value))]

    def structure(self, head: Point) -> Structure | None:
        """Return the structure of a grouping `head`; None if it cannot be lowered."""
        if head not in self._known:
            outer = self.structure(head[:-2]) if len(head) <= len(self.names) else None
            parts_by_way = self._ways[len(head) // 2 - 1][1] if outer else {}
            legal = head[-1] in parts_by_way.get(head[-2], ())
            self._known[head] = self._grown(outer, head) if outer and legal else None
        return self._known[head]

    def _grown(self, outer: Structure, head: Point) -> Structure | None:
        phase = self._ways[len(head) // 2 - 1][0]
        try:
            s, new_nests = regroup(outer.schedule, phase, head[-2], head[-1])
            nests = tuple(self._nest(s, nest) for nest in new_nests)
            if not all(nest.has_points for nest in nests):
                return None
        except AscendLabError:
            return None
        return Structure(s, (*outer.nests, *nests))

    def _nest(self, s: Schedule, nest: Nest) -> NestSpace:
        """Return the space of a nest, with the default's layout if the default has this nest."""
        stages = [
            s.state.stage(n) for n in (*nest.phase.tiles, *nest.phase.outputs, nest.phase.root)
        ]
        shapes = {r.source: s.state.find(r.source).shape for x in stages for r in x.reads}
        # Nests of the same stages over the same shapes share a space, in all groupings where they
        # occur.
        key = (nest, tuple(stages), tuple(shapes.items()))
        if key not in self._spaces:
            is_default = nest in self._nests and all(
                x == self._bare.state.stage(x.name) for x in stages
            )
            layout = read_layout(self.default.state, nest.phase) if is_default else None
            self._spaces[key] = NestSpace(s, nest, layout)
        return self._spaces[key]

    def _match(self, head: Point) -> Point | None:
        """Return the grouping that gives the nests of the default."""
        if len(head) == len(self.names):
            grouped = self.structure(head)
            assert grouped is not None
            nests = [n.nest for n in grouped.nests if n.default is not None]
            return head if sorted(map(str, nests)) == sorted(map(str, self._nests)) else None
        for way in self.options(head):
            for parts in self.options((*head, way)):
                grouped = self.structure((*head, way, parts))
                if grouped and all(n.default is not None for n in grouped.nests):
                    match = self._match((*head, way, parts))
                    if match is not None:
                        return match
        return None


def _stripped(default: Schedule) -> tuple[Schedule, tuple[Nest, ...]]:
    """Return a schedule without its layouts, and its nests."""
    keep: list[Step] = []
    follow = [s.primitive for s in default.steps[1:]]
    for step, next_primitive in zip_longest(default.steps, follow):
        # A split that rfactor turns into a tensor belongs to the grouping; all other splits are
        # layout.
        factored = step.primitive == "split" and next_primitive == "rfactor"
        if factored or step.primitive in ("inline", "fuse", "materialise", "rfactor"):
            keep.append(step)
    bare = replay(default.outputs, default.chip, keep)
    nests = []
    for stage in default.state.stages:
        if isinstance(stage, Stage) and stage.attach is None and stage.vector_at:
            inside = [
                x
                for x in default.state.stages
                if isinstance(x, Stage) and x.attach is not None and x.attach[0] == stage.name
            ]
            tiles = tuple(x.name for x in inside if not x.output)
            phase = Phase(stage.name, tiles, tuple(x.name for x in inside if x.output))
            nests.append(Nest(phase, tuple(row_axes(bare.state, phase))))
    return bare, tuple(nests)


# -- a point is a grouping and the decisions about each of its nests -------------------------------
class VectorSpace:
    """The space of all schedules of a vector operator; it is built only as far as a search needs.

    The first decisions group the stages (a way and a number of partial folds per group), then
    `DECISIONS` follow for the first nest, the second, and so on; if a grouping has fewer nests than
    others, the decisions for the missing nests have a single value.
    """

    def __init__(self, outputs: dsl.Tensor | Sequence[dsl.Tensor], chip: Chip) -> None:
        """Find the groupings; raises as `auto_schedule`, and for products of the cube."""
        self.outputs = (outputs,) if isinstance(outputs, dsl.Tensor) else tuple(outputs)
        self.chip = chip
        self.default = dsl.auto_schedule(self.outputs, chip)
        self.grouping = Grouping(dsl.auto_schedule(self.outputs, chip, parts=False), self.default)
        self._head = len(self.grouping.names)
        # Few enough to list: up to eight ways and five numbers of parts per group.
        heads = self.grouping.heads()
        nests = list(zip_longest(*(self.structure(h).nests for h in heads)))
        opened = [set[int]().union(*(n.open_decisions for n in slot if n)) for slot in nests]
        self._slots = [tuple(sorted(places)) for places in opened]
        ends = [f" {k + 1}" if len(nests) > 1 else "" for k in range(len(nests))]
        pairs = zip(self._slots, ends, strict=True)
        nest_names = (DECISIONS[at] + end for slot, end in pairs for at in slot)
        self.names = (*self.grouping.names, *nest_names)
        self._options: dict[Point, tuple[Value, ...]] = {}
        self._places = [(k, at) for k, slot in enumerate(self._slots) for at in slot]

    # -- points and schedules ---------------------------------------------------------------------
    def structure(self, point: Point) -> Structure:
        """Return the structure that a point chooses; raise `InputError` if it is not legal."""
        structure = (
            self.grouping.structure(point[: self._head]) if len(point) >= self._head else None
        )
        if structure is None:
            raise InputError("a point of the space", str(point), "take values from `options`")
        return structure

    def parts(self, point: Point) -> list[tuple[NestSpace, Point]]:
        """Return the nests of a point, each with the decisions about it."""
        nests = []
        at = self._head
        for nest, slot in zip(self.structure(point).nests, self._slots, strict=False):
            nests.append((nest, _filled(slot, point[at : at + len(slot)])))
            at += len(slot)
        return nests

    def joined(self, head: Point, owns: Sequence[Point]) -> Point:
        """Return the point with grouping `head` and the decisions `owns` about its nests."""
        pairs = zip_longest(self._slots, owns, fillvalue=LEAST)
        return (*head, *(decisions[at] for slot, decisions in pairs for at in slot))

    def build(self, point: Point) -> Schedule:
        """Return the schedule of a point; raise `AscendLabError` for a point of another space."""
        if len(point) != len(self.names):
            raise InputError(f"{len(self.names)} decisions", str(len(point)), "complete the point")
        s = self.structure(point).schedule
        for nest, decisions in self.parts(point):
            s = lay(s, nest.nest, nest.layout(decisions))
        return s

    @property
    def default_points(self) -> tuple[Point, ...]:
        """The points of the default schedule, and of the default without parts of rows."""
        heads = dict.fromkeys((self.grouping.default_head, self.grouping.plain_head))
        nests = (self.structure(head).nests for head in heads)
        decisions = ([n.default_point or LEAST for n in nest_spaces] for nest_spaces in nests)
        return tuple(map(self.joined, heads, decisions))

    @property
    def default_point(self) -> Point:
        """The point of the default schedule."""
        return self.default_points[0]

    # -- the interface of a space (see `aoe.space.Space`) -----------------------------------------
    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`; they are cached."""
        values = self._options.get(prefix)
        if values is None:
            values = self._options[prefix] = self._found(prefix)
        return values

    def _found(self, prefix: Point) -> tuple[Value, ...]:
        if len(prefix) < self._head:
            return self.grouping.options(prefix)
        number, at = self._places[len(prefix) - self._head]
        nests = self.structure(prefix).nests
        slot = self._slots[number]
        if number >= len(nests):
            return (LEAST[at],)
        taken = prefix[len(prefix) - slot.index(at) :] if at else ()
        return nests[number].options(_filled(slot, taken)[:at])

    def sample(self, rng: np.random.Generator) -> Point:
        """Return a random point: each decision takes one of its options with equal probability."""
        return random_completion(self, (), rng)

    def key(self, point: Point) -> Hashable:
        """Return a key of the schedule that a point builds: grouping and layouts."""
        return (
            point[: self._head],
            *(nest.layout(decisions) for nest, decisions in self.parts(point)),
        )

    @property
    def size(self) -> int | None:
        """The number of points; None above `COUNTED`."""
        return self.counted(COUNTED)

    def counted(self, limit: int) -> int | None:
        """Return the number of points; None if there are more than `limit`."""
        total = 0
        for head in self.grouping.heads():
            points = 1
            for nest in self.structure(head).nests:
                points *= nest.count(limit // points)
                # Counting stops as soon as it is certain that there are more than `most`.
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


def _filled(slot: Sequence[int], values: Sequence[Value]) -> Point:
    """Return all decisions about a nest; missing decisions get their least value."""
    value_at = dict(zip(slot, values, strict=False))
    return tuple(value_at.get(at, value) for at, value in enumerate(LEAST))
