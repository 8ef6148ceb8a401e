"""What the default schedule fuses: what disappears, what becomes a tile, what stays in GM."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from ascend_lab.dsl.boxes import Range, needed, whole
from ascend_lab.dsl.primitives_loops import fuse
from ascend_lab.dsl.primitives_tiles import inline
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Fixed, Stage, State, bare
from ascend_lab.dsl.tensor import Call, Expr
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import var


@dataclass(frozen=True, slots=True)
class Phase:
    """A stage with a nest of its own, the tiles computed inside it, and further outputs."""

    root: str
    tiles: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def fuse_stages(s: Schedule) -> tuple[Schedule, list[Phase]]:
    """Inline what is cheap or used once; return the phases the other stages belong to."""
    for stage in s.state.stages:
        if _inlines(s.state, stage):
            with suppress(ScheduleError):  # a reshape of a reshape stays a copy
                s = inline(s, stage.name)
    groups: dict[str, str] = {}
    for stage in reversed(s.state.stages):
        groups[stage.name] = _root(s.state, stage, groups)
    groups = _join_outputs(s.state, groups)
    phases = []
    for stage in s.state.stages:
        if isinstance(stage, Stage) and groups[stage.name] == stage.name:
            inside = [n for n, root in groups.items() if root == stage.name and n != stage.name]
            inside = [x.name for x in s.state.stages if x.name in inside]
            outs = tuple(n for n in inside if s.state.stage(n).output)
            tiles = tuple(n for n in inside if n not in outs)
            phases.append(Phase(stage.name, tiles, outs))
    return s, phases


def _inlines(state: State, stage: Stage | Fixed) -> bool:
    """True for elementwise stages read once, and for plain copies, whoever reads them."""
    if isinstance(stage, Fixed) or stage.output or stage.fold or stage.is_cube:
        return False
    current = state.stage(stage.name)
    readers = state.readers(stage.name)
    if any(isinstance(r, Fixed) or r.is_cube for r in readers):
        return False
    reads = [x for r in readers if isinstance(r, Stage) for x in r.reads if x.source == stage.name]
    if any(x.view for x in reads) and bare(current.expr) is None:
        return False
    return len(reads) == 1 or bare(current.expr) is not None or _weight(current.expr) <= 1


def _weight(expr: Expr) -> int:
    """Count the operations of an expression that are not casts."""
    if not isinstance(expr, Call):
        return 0
    return (expr.op not in ("vconv", "vcopy")) + sum(map(_weight, expr.args))


def _root(state: State, stage: Stage | Fixed, groups: dict[str, str]) -> str:
    """Return the stage in whose nest this one is computed: itself, or its readers' common one."""
    readers = state.readers(stage.name)
    if isinstance(stage, Fixed) or stage.output or stage.is_cube:
        return stage.name
    if any(isinstance(r, Fixed) or r.is_cube for r in readers):
        return stage.name
    if any(
        x.view for r in readers if isinstance(r, Stage) for x in r.reads if x.source == stage.name
    ):
        return stage.name
    found = {groups[r.name] for r in readers}
    return found.pop() if len(found) == 1 else stage.name


def _join_outputs(state: State, groups: dict[str, str]) -> dict[str, str]:
    """Compute outputs of one shape that feed each other in one nest, the last one's."""
    roots = [
        s
        for s in state.stages
        if isinstance(s, Stage) and groups[s.name] == s.name and not s.is_cube and not s.fold
    ]
    for i, one in enumerate(roots):
        for two in reversed(roots[i + 1 :]):
            if one.output and one.shape == two.shape and _only_read_in(state, one, two, groups):
                groups = {n: two.name if r == one.name else r for n, r in groups.items()}
                break
    for stage in reversed(state.stages):
        if isinstance(stage, Stage) and not stage.output and groups[stage.name] == stage.name:
            groups[stage.name] = _root(state, stage, groups)
    return groups


def _only_read_in(state: State, one: Stage, two: Stage, groups: dict[str, str]) -> bool:
    """True if `one` feeds, or shares a source with, the nest of `two` and nothing else reads it."""
    readers = state.readers(one.name)
    if any(groups[r.name] != two.name for r in readers):
        return False
    inside = [s for s in state.stages if groups[s.name] == two.name]
    shared = any(set(one.sources) & set(s.sources) for s in inside)
    return bool(readers) or shared


# Which axes of a phase become one, and along which its tiles can be cut.


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
            s = fuse(s, name, pair[0], pair[1])
        place -= 1
    return s


def _fuse_everywhere(s: Schedule, names: list[str], first: str, second: str) -> Schedule:
    """Fuse two axes in all stages that have both, or in none."""
    trial = s
    try:
        for name in names:
            own = [a.name for a in trial.state.stage(name).axes]
            if first in own and second in own:
                trial = fuse(trial, name, first, second)
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
