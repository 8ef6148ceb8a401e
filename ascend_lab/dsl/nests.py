"""Fill in what a schedule leaves unsaid: tiles in UB for everything the vector unit touches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from ascend_lab.dsl.fractals import is_fractal
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import (
    Fixed,
    Input,
    Leaf,
    Stage,
    State,
    bare,
    copy_of,
    fresh,
    identity,
    redirect,
)
from ascend_lab.dsl.tensor import Axis, Call, Expr, Read, Shape, swap
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine


def loop_count(state: State, stage: Stage) -> int:
    """Return how many loops stand in front of the whole-tile instructions of a stage.

    Loops up to `vector_at`; without it, up to the last that is bound, carries a tile, or has a
    finer part of the same axis inside it.
    """
    if stage.vector_at:
        return stage.position(stage.vector_at)
    hosts = {
        s.attach[1]
        for s in state.stages
        if isinstance(s, Stage) and s.attach and s.attach[0] == stage.name
    }
    count = 0
    for place, leaf in enumerate(stage.loops):
        if leaf.width > 1 or leaf.name in stage.bound or leaf.name in hosts:
            count = place + 1
    return count


def members(state: State, root: str) -> list[str]:
    """Return the stages computed inside the nest of `root`, itself last, in order."""
    inside = {root}
    found = True
    while found:
        found = False
        for s in state.stages:
            if isinstance(s, Stage) and s.name not in inside and _belongs(state, s, inside):
                inside.add(s.name)
                found = True
    return [s.name for s in state.stages if s.name in inside]


def _belongs(state: State, stage: Stage, inside: set[str]) -> bool:
    if stage.attach is not None:
        return stage.attach[0] in inside
    return stage.scope != "GM" and any(r.name in inside for r in state.readers(stage.name))


def roots(state: State) -> list[Stage | Fixed]:
    """Return the stages with a phase of their own: in GM and not attached."""
    return [
        s for s in state.stages if isinstance(s, Fixed) or (s.scope == "GM" and s.attach is None)
    ]


def moves_only(state: State, stage: Stage) -> bool:
    """True for an unscheduled stage that only moves elements between GM tensors."""
    plain = stage.is_copy and stage.loops == fresh(stage.axes) and not stage.vector_at
    return plain and _in_gm(state, stage.sources[0]) and members(state, stage.name) == [stage.name]


def complete(state: State, root: str) -> State:
    """Return the stages of the phase of `root`, with every implicit tile made explicit.

    Tensors of other phases are inputs of this one.
    """
    own = members(state, root)
    others = [s for s in state.stages if s.name not in own]
    there = tuple(Input(s.name, s.dtype, s.shape) for s in others)
    stages = tuple(s for s in state.stages if s.name in own)
    state = State((*state.inputs, *there), stages)
    for name in members(state, root):
        stage = state.stage(name)
        if stage.scope != "GM" and stage.attach is None:
            state = state.put(replace(stage, attach=(root, "")))
    for name in members(state, root):
        stage = state.stage(name)
        inside = {r.name for r in state.readers(name)} & set(members(state, root))
        if stage.scope == "GM" and not is_fractal(state, stage) and (inside or not stage.is_copy):
            state = _computed_in_tile(state, stage, root)
    for name in members(state, root):
        stage = state.stage(name)
        if stage.scope in ("UB", "GM") and not _loads(state, stage):
            state = _loaded_through_tiles(state, stage)
    return state


def _loads(state: State, stage: Stage) -> bool:
    """True for a tile in UB that is a copy of something in GM."""
    return stage.scope == "UB" and stage.is_copy and _in_gm(state, stage.sources[0])


def _in_gm(state: State, name: str) -> bool:
    return getattr(state.find(name), "scope", "GM") == "GM"


def _computed_in_tile(state: State, stage: Stage, root: str) -> State:
    """Compute an output into UB and let the stage itself be the copy to GM."""
    count = loop_count(state, stage)
    inside = [n for n in members(state, root) if stage.name in state.stage(n).sources]
    if stage.attach and count and inside:
        raise ScheduleError(
            f"{stage.name}: an attached output without loops of its own, as others read its tile",
            ", ".join(x.name for x in stage.loops[:count]),
            f"split {stage.attach[0]} instead",
        )
    outside = next((n for n, x in enumerate(stage.loops[:count]) if x.reduce), count)
    kept, moved = stage.loops[:outside], stage.loops[outside:]
    here = (stage.name, kept[-1].name if kept else "")
    local = replace(
        stage,
        name=state.new_name(f"{stage.name}_ub"),
        scope="UB",
        output=False,
        attach=here if kept or stage.attach is None else stage.attach,
        loops=moved,
        bound=(),
        vector_at=stage.vector_at if outside < count else _first(moved, stage),
    )
    gone = {x.name for x in moved}
    for s in state.stages:
        if isinstance(s, Stage) and s.attach and s.attach[0] == stage.name and s.attach[1] in gone:
            state = state.put(replace(s, attach=(local.name, s.attach[1])))
    state = state.put(_copy_out(stage, local.name, kept)).insert(local, before=stage.name)
    for name in inside:
        state = state.put(redirect(state.stage(name), stage.name, local.name))
    return state


def _copy_out(stage: Stage, tile: str, loops: tuple[Leaf, ...]) -> Stage:
    """Return the stage as the copy of a tile to GM, inside `loops`."""
    read = Read(tile, stage.dtype, identity(stage.axes))
    end = _end(stage.axes)
    return replace(
        stage,
        expr=Call("vcopy", (read,), stage.dtype),
        fold="",
        reduce=(),
        loops=(*loops, *end),
        vector_at=end[0].name,
    )


def _first(loops: tuple[Leaf, ...], stage: Stage) -> str:
    """Return where the whole-tile part of a tile begins: at once, if the stage says so itself."""
    return loops[0].name if loops and stage.vector_at else ""


def _end(axes: tuple[Axis, ...]) -> tuple[Leaf, ...]:
    """Loops that stand for "the whole tile", behind all real loops of a copy."""
    return tuple(replace(leaf, name=f"{leaf.name}_tile") for leaf in fresh(axes))


def _loaded_through_tiles(state: State, stage: Stage) -> State:
    """Let a stage read GM tensors through tiles in UB."""
    count = loop_count(state, stage)
    loops = stage.loops[:count]
    attach = (stage.name, loops[-1].name) if loops else stage.attach
    if attach is None:
        attach = (stage.name, "")
    extents = {a.name: a.extent for a in (*stage.axes, *stage.reduce)}
    for given in stage.reads:
        if not _in_gm(state, given.source):
            continue
        read = _unmixed(given, given.view or state.find(given.source).shape, extents)
        current = state.stage(stage.name)
        state = state.put(replace(current, expr=swap(current.expr, given, read)))
        served = [s for s in state.stages if _serves(s, read, attach)]
        served = [t for t in served if _same_pipe(state, stage, t)]
        tile = next((t for t in served if _walks_alike(state, stage.name, t.name, read)), None)
        if tile is None:
            name = state.new_name(f"{read.source}_ub")
            tile = copy_of(name, state.find(read.source), read.view)
            tile = replace(tile, attach=attach, depth=stage.depth)
            state = state.insert(tile, before=stage.name)
        current = state.stage(stage.name)
        through = replace(read, source=tile.name, view=())
        state = state.put(replace(current, expr=swap(current.expr, read, through)))
    return state


def _unmixed(read: Read, shape: Shape, extents: Mapping[str, int]) -> Read:
    """Give every axis of an index such as 8 i + j a dimension of its own: rows can align."""
    index: list[Affine] = []
    view: list[int] = []
    for part, size in zip(read.index, shape, strict=True):
        terms = sorted(part.terms, key=lambda t: -t[1])
        steps = [c for _, c in terms]
        inner = zip(terms[1:], steps, strict=False)
        nested = all(step % c == 0 and extents[name] * c <= step for (name, c), step in inner)
        if len(terms) < 2 or part.const or steps[-1] != 1 or not nested or size % steps[0]:
            index.append(part)
            view.append(size)
            continue
        index += [Affine(0, ((name, 1),)) for name, _ in terms]
        view += [size // steps[0], *(a // b for a, b in pairwise(steps))]
    return (
        read if tuple(view) == tuple(shape) else replace(read, index=tuple(index), view=tuple(view))
    )


def _walks_alike(state: State, stage: str, tile: str, read: Read) -> bool:
    """True if a stage already reads a tile with the same steps, and the same start of rows.

    Reads that start elsewhere in a row need a tile of their own, whose rows then are aligned.
    """
    others = [r for r in state.stage(stage).reads if r.source == tile]
    return all(_walk(r) == _walk(read) for r in others)


def _walk(read: Read) -> tuple[object, ...]:
    return (*(i.terms for i in read.index), read.index[-1].const)


def _same_pipe(state: State, stage: Stage, tile: Stage | Fixed) -> bool:
    """True if a tile is read like the stage reads: all compute with it, or all copy it out."""
    readers = state.readers(tile.name)
    return all((getattr(r, "scope", "GM") == "GM") == (stage.scope == "GM") for r in readers)


def _serves(stage: Stage | Fixed, read: Read, attach: tuple[str, str]) -> bool:
    if not isinstance(stage, Stage) or stage.attach != attach or stage.scope != "UB":
        return False
    own = bare(stage.expr)
    return own is not None and own.source == read.source and own.view == read.view


# Print the loop nests of a schedule, as written down and as completed for the chip.


def show(schedule: Schedule, *, tiles: bool = True) -> str:
    """Return the loop nests as text; `tiles`: with the tiles the chip's buffers need."""
    lines: list[str] = []
    for number, stage in enumerate(roots(schedule.state)):
        lines.append(f"phase {number + 1}: {stage.name} {tuple(stage.shape)} {stage.dtype}")
        if isinstance(stage, Fixed):
            lines.append(f"  {stage.kind}({', '.join(stage.sources)}), a hand-written kernel")
            continue
        state = complete(schedule.state, stage.name) if tiles else schedule.state
        lines += _nest(state, state.stage(stage.name), "  ")
    return "\n".join(lines)


def _nest(state: State, stage: Stage, indent: str) -> list[str]:
    """Return the lines of one stage: its loops, what is computed in them, its own statement."""
    lines: list[str] = []
    bound = ("", *stage.bound)
    for leaf in stage.loops[: loop_count(state, stage)]:
        if leaf.name in stage.bound:
            lines.append(f"{indent}cores {leaf.name} in {leaf.extent}:")
            indent += "  "
    for guest in _guests(state, stage, bound):
        lines += _guest(state, guest, indent)
    for leaf in stage.loops[: loop_count(state, stage)]:
        if leaf.name in stage.bound:
            continue
        lines.append(f"{indent}{_loop(leaf)}")
        indent += "  "
        for guest in _guests(state, stage, (leaf.name,)):
            lines += _guest(state, guest, indent)
    return [*lines, f"{indent}{statement(stage)}"]


def _guests(state: State, stage: Stage, places: tuple[str, ...]) -> list[Stage]:
    wanted = {(stage.name, place) for place in places}
    return [s for s in state.stages if isinstance(s, Stage) and s.attach in wanted]


def _guest(state: State, stage: Stage, indent: str) -> list[str]:
    slots = f", {stage.depth} slots" if stage.depth > 1 else ""
    where = "" if stage.scope == "GM" else f"   # tile in {stage.scope}{slots}"
    inner = _nest(state, stage, indent)
    return [f"{inner[0]}{where}", *inner[1:]]


def _loop(leaf: Leaf) -> str:
    kind = " (fold)" if leaf.reduce else ""
    tail = " guard" if leaf.tail == "guard" and leaf.width > 1 else ""
    return f"for {leaf.name} in {leaf.extent}{tail}:{kind}"


def statement(stage: Stage) -> str:
    """Return what a stage does as one line, e.g. y[i, j] = vadd(a[i, j], b[j])."""
    index = ", ".join(a.name for a in stage.axes)
    body = _text(stage.expr)
    if stage.fold:
        names = ", ".join(a.name for a in stage.reduce)
        body = f"{stage.fold} over {names} of {body}"
    return f"{stage.name}[{index}] = {body}"


def _text(expr: Expr) -> str:
    if isinstance(expr, Call) and expr.op == "vcopy" and isinstance(expr.args[0], Read):
        return str(expr.args[0])
    if isinstance(expr, Call):
        rest = [f"{expr.number:g}"] if expr.number is not None else []
        rest += [expr.format] if expr.op == "vconv" else []
        return f"{expr.op}({', '.join([*map(_text, expr.args), *rest])})"
    return str(expr)
