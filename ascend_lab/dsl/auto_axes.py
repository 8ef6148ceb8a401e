"""Which axes of a phase become one, and along which its tiles can be cut."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ascend_lab.dsl import schedule as steps
from ascend_lab.dsl.auto_fuse import Phase
from ascend_lab.dsl.boxes import Range, needed, whole
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Stage, State
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import var


def merge_axes(s: Schedule, phase: Phase) -> Schedule:
    """Fuse neighbours, from the innermost pair out, wherever all stages of the phase can."""
    names = [*phase.tiles, *phase.outputs, phase.root]
    for key in ("axes", "reduce"):
        place = len(getattr(s.state.stage(phase.root), key)) - 2
        if key == "reduce":
            names = [n for n in names if s.state.stage(n).fold]
        for name in names if key == "reduce" else ():
            s = _fuse_folds(s, name)
        while key == "axes" and place >= 0:
            pair = [a.name for a in s.state.stage(phase.root).axes[place : place + 2]]
            s = _fuse_everywhere(s, names, pair[0], pair[1])
            place -= 1
    return s


def _fuse_folds(s: Schedule, name: str) -> Schedule:
    place = len(s.state.stage(name).reduce) - 2
    while place >= 0:
        pair = [a.name for a in s.state.stage(name).reduce[place : place + 2]]
        with suppress(ScheduleError):
            s = steps.fuse(s, name, pair[0], pair[1])
        place -= 1
    return s


def _fuse_everywhere(s: Schedule, names: list[str], first: str, second: str) -> Schedule:
    """Fuse two axes in all stages that have both, or in none."""
    trial = s
    try:
        for name in names:
            own = [a.name for a in trial.state.stage(name).axes]
            if first in own and second in own:
                trial = steps.fuse(trial, name, first, second)
            elif first in own or second in own:
                return s
    except ScheduleError:
        return s
    return s if any(_mixes(trial.state.stage(n), names) for n in names) else trial


def _mixes(stage: Stage, tiles: list[str]) -> bool:
    """True if a stage walks a fused axis of a tile in two loops, or under another shape.

    The rows of the tile would not be aligned, or not be found.
    """
    reads = [r for r in stage.reads if r.source in tiles]
    return any(r.view or any(len(i.terms) > 1 for i in r.index) for r in reads)


def row_axes(state: State, phase: Phase) -> list[str]:
    """Return the axes of the root that all its tiles depend on; these can be cut without waste."""
    root = state.stage(phase.root)
    names = [a.name for a in root.axes]
    state = _outputs_attached(state, phase, names[0])
    return [n for n in names if all(_follows(state, root, t, n) for t in phase.tiles)]


def _follows(state: State, root: Stage, tile: str, axis: str) -> bool:
    """True if a step along `axis` of the root needs another part of the tile."""
    if whole(root)[axis].count == 1:
        return True
    active = {root.name: whole(root) | {axis: Range(var(axis), 1)}}
    try:
        box = needed(state, state.stage(tile), active)
    except ScheduleError:
        return False  # one reader needs all of it, another a part
    return any(name == axis for part in box.values() for name, _ in part.start.terms)


def _outputs_attached(state: State, phase: Phase, axis: str) -> State:
    for name in phase.outputs:
        state = state.put(replace(state.stage(name), attach=(phase.root, axis)))
    return state
