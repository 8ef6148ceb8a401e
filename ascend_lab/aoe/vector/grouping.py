"""The first decisions: how every group of stages is split into nests, and its folds into parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from ascend_lab.aoe.space import Point, Value
from ascend_lab.aoe.vector.layout import Nest, read_layout
from ascend_lab.aoe.vector.nest_space import NestSpace
from ascend_lab.aoe.vector.structure import regroup, ways
from ascend_lab.dsl.auto_axes import row_axes
from ascend_lab.dsl.auto_fuse import Phase, fuse_stages
from ascend_lab.dsl.schedule import Schedule, Step, create_schedule, replay
from ascend_lab.dsl.stages import Stage
from ascend_lab.errors import AscendLabError, UnsupportedError

AS_DEFAULT = "default"
"""The way that stands for all nests of the default, where no way makes the same ones."""


@dataclass(frozen=True)
class Structure:
    """A schedule in which stages are grouped but no nest is laid out, and its nests."""

    schedule: Schedule
    nests: tuple[NestSpace, ...] = ()


class Grouping:
    """The ways to group the stages of a tensor program: two decisions a group, way and parts."""

    def __init__(self, default: Schedule) -> None:
        """Take the default schedule; raise `UnsupportedError` for products of the cube."""
        start, phases = fuse_stages(create_schedule(default.outputs, default.chip))
        if any(isinstance(s, Stage) and s.is_cube for s in start.state.stages):
            raise UnsupportedError("operators of the vector unit", "a product", "tune its tiling")
        self.default = default
        self._bare, self._nests = _stripped(default)
        self._ways = [(p, ways(start, p)) for p in phases]
        self._ways = [(p, found) for p, found in self._ways if found]
        self._spaces: dict[object, NestSpace] = {}
        self._known: dict[Point, Structure | None] = {(): Structure(start)}
        self.names = tuple(n for g in range(len(self._ways)) for n in self._names(g))
        self.default_head: Point = ()
        self.default_head = self._match(()) or (AS_DEFAULT, 1) * len(self._ways)
        if self.default_head[:1] == (AS_DEFAULT,):
            nests = tuple(self._nest(self._bare, n) for n in self._nests)
            self._known[self.default_head] = Structure(self._bare, nests)

    def _names(self, group: int) -> tuple[str, str]:
        end = f" {group + 1}" if len(self._ways) > 1 else ""
        return f"way{end}", f"parts{end}"

    def options(self, head: Point) -> tuple[Value, ...]:
        """Return the ways of the next group, or its numbers of partial folds."""
        if head and head[0] == AS_DEFAULT:
            return (1,) if len(head) % 2 else (AS_DEFAULT,)
        found = self._ways[len(head) // 2][1]
        if len(head) % 2:
            return tuple(p for p in found[head[-1]] if self.structure((*head, p)))
        legal = tuple(w for w in found if self.structure((*head, w, 1)))
        return (*legal, AS_DEFAULT) if not head and AS_DEFAULT in self.default_head else legal

    def heads(self, head: Point = ()) -> list[Point]:
        """Return all groupings that begin with `head`."""
        if len(head) == len(self.names):
            return [head]
        return [h for value in self.options(head) for h in self.heads((*head, value))]

    def structure(self, head: Point) -> Structure | None:
        """Return the stages as `head` groups them; None where that cannot be lowered."""
        if head not in self._known:
            before = self.structure(head[:-2]) if len(head) <= len(self.names) else None
            found = self._ways[len(head) // 2 - 1][1] if before else {}
            legal = head[-1] in found.get(head[-2], ())
            self._known[head] = self._grown(before, head) if before and legal else None
        return self._known[head]

    def _grown(self, before: Structure, head: Point) -> Structure | None:
        phase = self._ways[len(head) // 2 - 1][0]
        try:
            group = regroup(before.schedule, phase, head[-2], head[-1])
            nests = tuple(self._nest(group.schedule, nest) for nest in group.nests)
            if not all(nest.has_points for nest in nests):
                return None
        except AscendLabError:
            return None
        return Structure(group.schedule, (*before.nests, *nests))

    def _nest(self, s: Schedule, nest: Nest) -> NestSpace:
        """Return the space of a nest; the default's layout is in it if it has the same nest."""
        stages = [
            s.state.stage(n) for n in (*nest.phase.tiles, *nest.phase.outputs, nest.phase.root)
        ]
        shapes = {r.source: s.state.find(r.source).shape for x in stages for r in x.reads}
        key = (nest, tuple(stages), tuple(shapes.items()))
        if key not in self._spaces:
            same = nest in self._nests and _alike(s, self._bare, nest.phase)
            layout = read_layout(self.default.state, nest.phase) if same else None
            self._spaces[key] = NestSpace(s, nest, layout)
        return self._spaces[key]

    def _match(self, head: Point) -> Point | None:
        """Return the grouping that gives the nests of the default."""
        if len(head) == len(self.names):
            found = self.structure(head)
            assert found is not None
            nests = [n.nest for n in found.nests if n.default is not None]
            return head if sorted(map(str, nests)) == sorted(map(str, self._nests)) else None
        for way in self.options(head):
            for parts in self.options((*head, way)):
                found = self.structure((*head, way, parts))
                if found and all(n.default is not None for n in found.nests):
                    match = self._match((*head, way, parts))
                    if match is not None:
                        return match
        return None


def _alike(one: Schedule, two: Schedule, phase: Phase) -> bool:
    names = (*phase.tiles, *phase.outputs, phase.root)
    return all(one.state.stage(n) == two.state.stage(n) for n in names)


def _stripped(default: Schedule) -> tuple[Schedule, tuple[Nest, ...]]:
    """Return a schedule without its layouts, and the nests these belong to."""
    keep: list[Step] = []
    follow = [s.primitive for s in default.steps[1:]]
    for step, after in zip_longest(default.steps, follow):
        factored = step.primitive == "split" and after == "rfactor"
        if factored or step.primitive in ("inline", "fuse", "materialise", "rfactor"):
            keep.append(step)
    bare = replay(default.outputs, default.chip, keep)
    nests = []
    for stage in default.state.stages:
        if isinstance(stage, Stage) and stage.attach is None and stage.vector_at:
            phase = _phase_of(default, stage)
            nests.append(Nest(phase, tuple(row_axes(bare.state, phase))))
    return bare, tuple(nests)


def _phase_of(s: Schedule, root: Stage) -> Phase:
    inside = [
        x
        for x in s.state.stages
        if isinstance(x, Stage) and x.attach is not None and x.attach[0] == root.name
    ]
    tiles = tuple(x.name for x in inside if not x.output)
    return Phase(root.name, tiles, tuple(x.name for x in inside if x.output))
