"""Which stages of an expression share a nest: the ways to fuse, and folds cut into partial ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ascend_lab.aoe.vector.layout import Nest
from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl import schedule as steps
from ascend_lab.dsl.auto_axes import merge_axes, row_axes
from ascend_lab.dsl.auto_cores import core_count
from ascend_lab.dsl.auto_fuse import Phase
from ascend_lab.dsl.complete import moves_only
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Stage
from ascend_lab.errors import AscendLabError, ScheduleError

WAYS = ("fused", "stages", "inlined", "folds")
"""All stages of a group in one nest; one nest a stage; values that are no folds computed where
they are used; that, and one nest a fold."""
APART = " apart"
"""Ending of a way that keeps the axes of the tensors as they are, instead of merging neighbours."""
LINE_BYTES = 512
PARTS = 4
"""Numbers of partial folds worth trying, at most."""


@dataclass(frozen=True)
class Group:
    """Stages regrouped one way: the schedule after it, nothing laid out yet, and the nests."""

    schedule: Schedule
    nests: tuple[Nest, ...]


def regroup(s: Schedule, phase: Phase, way: str, parts: int) -> Group:
    """Return a group of stages as nests; raises `ScheduleError` where the way does not apply."""
    base, merge = way.removesuffix(APART), not way.endswith(APART)
    s, phases = _phases(s, phase, base)
    found: list[Phase] = []
    cut = False
    for each in phases:
        partial = ""
        if parts > 1:
            s, partial = _partial(s, each, parts)
        cut = cut or bool(partial)
        found += [Phase(partial), each] if partial else [each]
    if parts > 1 and not cut:
        raise ScheduleError(f"a fold of {parts} equal parts", way, "take 1 part")
    nests = []
    for each in found:
        if moves_only(s.state, s.state.stage(each.root)) and not each.tiles:
            continue  # a strided copy has a kernel of its own
        s = merge_axes(s, each) if merge else s
        rows = tuple(row_axes(s.state, each))
        if not rows and (each.tiles or each.outputs):
            raise ScheduleError(f"an axis of {each.root} all tiles follow", "none", "take stages")
        nests.append(Nest(each, rows))
    return Group(s, tuple(nests))


def _phases(s: Schedule, phase: Phase, way: str) -> tuple[Schedule, list[Phase]]:
    """Return the nests of a group before folds are cut; values used twice may be inlined."""
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


def _partial(s: Schedule, phase: Phase, parts: int) -> tuple[Schedule, str]:
    """Cut the fold of a nest into `parts`; return the name of the partial fold, if it divides."""
    stage = _own_fold(s, phase)
    if stage is None or parts not in part_counts(s, stage):
        return s, ""
    axis = max(stage.reduce, key=lambda a: a.extent)
    s = steps.split(s, stage.name, axis.name, axis.extent // parts)
    return steps.rfactor(s, stage.name, f"{axis.name}_o"), f"{stage.name}_rf"


def _own_fold(s: Schedule, phase: Phase) -> Stage | None:
    """Return the only fold of a nest."""
    folds = [s.state.stage(n) for n in (*phase.tiles, phase.root) if s.state.stage(n).fold]
    return folds[0] if len(folds) == 1 and len(phase.tiles) < 2 else None


def part_counts(s: Schedule, stage: Stage) -> tuple[int, ...]:
    """Return into how many parts a fold may be cut so that idle cores get work, most first."""
    cores = core_count(s)
    units = math.prod(stage.shape)
    if _keeps_lanes(stage):
        units = max(1, units * DTYPE_BYTES[stage.expr.dtype] // LINE_BYTES)
    extent = max((a.extent for a in stage.reduce), default=1)
    size = units * math.prod(a.extent for a in stage.reduce) * DTYPE_BYTES[stage.expr.dtype]
    if units >= cores or size < LINE_BYTES or any(a.name == "p" for a in stage.reduce):
        return ()
    found = [d for d in range(min(cores, extent // 2), 1, -1) if extent % d == 0]
    step = max(1, -(-len(found) // PARTS))
    return tuple(found[::step])


def _keeps_lanes(stage: Stage) -> bool:
    """True if a fold walks its source along an axis that stays: lanes are not folded together."""
    folded, last = {a.name for a in stage.reduce}, stage.axes[-1].name
    sources = [r for r in stage.reads if folded & {n for i in r.index for n, _ in i.terms}]
    return any(dict(r.index[-1].terms).get(last) == 1 for r in sources)


def ways(s: Schedule, phase: Phase) -> dict[str, tuple[int, ...]]:
    """Return the ways that apply to a group, each with the numbers of partial folds."""
    found: dict[str, Group] = {}
    for way in WAYS:
        with suppress(AscendLabError):
            merged = regroup(s, phase, way, 1)
            if any(_same(merged, other) for other in found.values()):
                continue
            found[way] = merged
        with suppress(AscendLabError):
            apart = regroup(s, phase, way + APART, 1)
            known = any(_same(apart, other) for other in found.values())
            if not known and not (way in found and _flat(found[way])):
                found[way + APART] = apart
    return {name: (1, *_parts(s, phase, name)) for name in found}


def _flat(group: Group) -> bool:
    """True if every nest has one axis: whatever its tensors' axes allow, tiles of it do too."""
    return all(len(group.schedule.state.stage(n.phase.root).axes) == 1 for n in group.nests)


def _same(one: Group, two: Group) -> bool:
    return one.nests == two.nests and one.schedule.state == two.schedule.state


def _parts(s: Schedule, phase: Phase, way: str) -> Sequence[int]:
    counts: dict[int, None] = {}
    s, phases = _phases(s, phase, way.removesuffix(APART))
    for each in phases:
        stage = _own_fold(s, each)
        counts |= dict.fromkeys(part_counts(s, stage) if stage is not None else ())
    return tuple(counts)
