"""What the default schedule fuses: what disappears, what becomes a tile, what stays in GM."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ascend_lab.dsl import schedule as steps
from ascend_lab.dsl.expr import Call, Expr
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Fixed, Stage, State, bare
from ascend_lab.errors import ScheduleError


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
                s = steps.inline(s, stage.name)
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
