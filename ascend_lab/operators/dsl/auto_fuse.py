"""Fusion in the default schedule: stages move into the loops of others, neighbouring axes join.

For y = exp(x) + 1 there is one nest: exp(x) is computed inside the loops of y. The two axes of a
64 x 100 tensor become one of 6,400. A stage is a tensor with its loops, a nest the loops of one
stage and of all stages computed inside them, a fold a reduction.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.operators.dsl import boxes, primitives_loops, primitives_tiles, tensor
from ascend_lab.operators.dsl.schedule import Schedule
from ascend_lab.operators.dsl.stages import Fixed, Stage, State, copied_element, fits_in


@dataclass(frozen=True, slots=True)
class Phase:
    """A root stage with its own nest, the tiles computed inside it, and further outputs there."""

    root: str
    tiles: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All stages of the phase, the root last."""
        return (*self.tiles, *self.outputs, self.root)


def fuse_stages(s: Schedule) -> tuple[Schedule, list[Phase]]:
    """Inline stages that are used once, or are cheap; return the phases of all other stages.

    A value that is used twice in one nest becomes a tile of that nest.
    """
    for stage in s.state.stages:
        if _inlines(s.state, stage):
            s = _try_inline(s, stage)
    cores = s.chip.core_count * s.chip.vector_cores_per_core
    groups = _groups(s.state, cores)
    for stage in s.state.stages:
        if groups[stage.name] == stage.name and _inlines(s.state, stage, cheap=True):
            s = _try_inline(s, stage)
            groups = _groups(s.state, cores)
    loops = [x for x in s.state.stages if isinstance(x, Stage)]
    phases = []
    for root in (x.name for x in loops if groups[x.name] == x.name):
        inside = [x for x in loops if groups[x.name] == root != x.name]
        # Softmax has one phase: the maximum and the sum are tiles in the nest of the result.
        tiles = tuple(x.name for x in inside if not x.output)
        phases.append(Phase(root, tiles, tuple(x.name for x in inside if x.output)))
    return s, phases


def _try_inline(s: Schedule, stage: Stage | Fixed) -> Schedule:
    """Compute a stage where it is read, if that is possible."""
    with suppress(errors.ScheduleError):  # a reshape of a reshape stays a copy
        return primitives_tiles.inline(s, stage.name)
    return s


def _groups(state: State, cores: int) -> dict[str, str]:
    """Return the root stage of the nest in which each stage is computed."""
    groups: dict[str, str] = {}
    for stage in reversed(state.stages):
        groups[stage.name] = _root(state, stage, groups)
    return _join_outputs(state, groups, cores)


def _reads(state: State, name: str) -> list[tensor.Read] | None:
    """Return all reads of a tensor; None if a product or a hand-written kernel reads it."""
    reads: list[tensor.Read] = []
    for reader in state.readers(name):
        if isinstance(reader, Fixed) or reader.is_cube:
            return None
        reads += [read for read in reader.reads if read.source == name]
    return reads


def _inlines(state: State, stage: Stage | Fixed, *, cheap: bool = False) -> bool:
    """True for elementwise stages that are read once, and for plain copies.

    With `cheap` it is true for stages of at most one operation that no stage reads in another
    shape, however often they are read.
    """
    reads = _reads(state, stage.name)
    if isinstance(stage, Fixed) or stage.output or stage.fold or stage.is_cube or reads is None:
        return False
    is_plain_copy = copied_element(stage.expr) is not None
    if is_plain_copy and not cheap:
        return True
    # A value read twice is computed twice if it is inlined: only one operation is cheap enough for
    # that.
    costs_little = weight(stage.expr) <= 1 if cheap else len(reads) == 1
    return costs_little and not any(read.view for read in reads)


def weight(expr: tensor.Expr) -> int:
    """Count the operations of an expression that are not casts."""
    if not isinstance(expr, tensor.Call):
        return 0
    return (expr.op not in ("vconv", "vcopy")) + sum(map(weight, expr.args))


def _root(state: State, stage: Stage | Fixed, groups: dict[str, str]) -> str:
    """Return the stage in whose nest this one is computed: itself, or its readers' common one."""
    reads = _reads(state, stage.name)
    if isinstance(stage, Fixed) or stage.output or stage.is_cube or reads is None:
        return stage.name
    reader_groups = {groups[r.name] for r in state.readers(stage.name)}
    if len(reader_groups) == 1 and not any(read.view for read in reads):
        return reader_groups.pop()
    return stage.name


def _join_outputs(state: State, groups: dict[str, str], cores: int) -> dict[str, str]:
    """Let outputs of one shape that depend on each other be computed in the nest of the last one.

    An output with one number per row joins the nest of the rows, unless there are fewer rows than
    cores: then it gets its own nest, in which cores can share a row.
    """
    loops = [s for s in state.stages if isinstance(s, Stage)]
    roots = [s for s in loops if groups[s.name] == s.name and not s.is_cube and not s.fold]
    for number, output in enumerate(roots):
        for target in reversed(roots[number + 1 :]):
            has_row_per_core = fits_in(output, target) and math.prod(output.shape) >= cores
            fits = output.shape == target.shape or has_row_per_core
            if output.output and fits and _only_read_in(state, output, target, groups):
                groups = {n: target.name if r == output.name else r for n, r in groups.items()}
                break
    for stage in reversed(loops):
        if not stage.output and groups[stage.name] == stage.name:
            groups[stage.name] = _root(state, stage, groups)
        elif not stage.output:  # its nest may have become a part of another one
            groups[stage.name] = groups[groups[stage.name]]
    return groups


def _only_read_in(state: State, output: Stage, target: Stage, groups: dict[str, str]) -> bool:
    """True if an output may join the nest of `target`: no other nest reads it.

    The nest must read `output`, or both must read the same tensor.
    """
    readers = state.readers(output.name)
    if any(groups[r.name] != target.name for r in readers):
        return False
    inside = [s for s in state.stages if groups[s.name] == target.name]
    shares_source = any(set(output.sources) & set(s.sources) for s in inside)
    return bool(readers) or shares_source


# -- axes -----------------------------------------------------------------------------------------
def merge_axes(s: Schedule, phase: Phase) -> Schedule:
    """Fuse neighbouring axes, from the innermost pair outwards, if all stages of the phase can."""
    # (8, 64, 100) elementwise: j and k become one axis of 6,400, then i joins: one axis of 51,200.
    for position in reversed(range(len(s.state.stage(phase.root).axes) - 1)):
        outer, inner = s.state.stage(phase.root).axes[position : position + 2]
        s = _fuse_everywhere(s, phase.names, outer.name, inner.name)
    for name in phase.names:
        for position in reversed(range(len(s.state.stage(name).reduce) - 1)):
            outer, inner = s.state.stage(name).reduce[position : position + 2]
            with suppress(errors.ScheduleError):
                s = primitives_loops.fuse(s, name, outer.name, inner.name)
    return s


def _fuse_everywhere(s: Schedule, names: Sequence[str], first: str, second: str) -> Schedule:
    """Fuse two axes in all stages, or in none if some stage has, or reads with, only one."""
    trial = s
    for name in names:
        stage = trial.state.stage(name)
        present = {first, second} & {a.name for a in stage.axes}
        read_axes = [present & read.axis_names for read in stage.reads]
        if 1 in map(len, (present, *read_axes)):
            return s
        if present:
            try:
                trial = primitives_loops.fuse(trial, name, first, second)
            except errors.ScheduleError:
                return s
    return s if any(_reads_by_two_loops(trial.state.stage(n), names) for n in names) else trial


def _reads_by_two_loops(stage: Stage, tiles: Sequence[str]) -> bool:
    """True if a stage reads a tile's fused axis by two loops, or under another shape.

    The rows of the tile could then not be aligned, or not be addressed.
    """
    reads = [r for r in stage.reads if r.source in tiles]
    return any(r.view or any(len(i.terms) > 1 for i in r.index) for r in reads)


def row_axes(state: State, phase: Phase) -> list[str]:
    """Return the root's axes on which all its tiles depend; cutting these repeats no work.

    Further outputs depend on all axes, except that those with one number per row do not depend on
    the last axis.
    """
    root = state.stage(phase.root)
    for name in phase.outputs:
        output = state.stage(name)
        state = state.put(replace(output, attach=(phase.root, root.axes[0].name)))
    names = [a.name for a in root.axes]
    if any(state.stage(name).shape != root.shape for name in phase.outputs):
        names.pop()
    return [n for n in names if all(_depends_on(state, root, t, n) for t in phase.tiles)]


def _depends_on(state: State, root: Stage, tile: str, axis: str) -> bool:
    """True if a step along `axis` of the root needs another part of the tile."""
    if boxes.whole_box(root)[axis].count == 1:
        return True
    # One step of the axis: if the tile it needs starts at a place that depends on the step, the
    # tile depends on it, and cutting the axis computes nothing twice.
    active = {root.name: boxes.whole_box(root) | {axis: boxes.Range(isa.var(axis), 1)}}
    try:
        box = boxes.needed_box(state, state.stage(tile), active)
    except errors.ScheduleError:
        return False  # one reader needs all of it, another a part
    return any(name == axis for span in box.values() for name, _ in span.start.terms)
