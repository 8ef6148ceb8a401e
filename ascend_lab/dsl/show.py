"""Print the loop nests of a schedule, as written down and as completed for the chip."""

from __future__ import annotations

from ascend_lab.dsl.complete import complete, loop_count, roots
from ascend_lab.dsl.expr import Call, Expr, Read
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Fixed, Leaf, Stage, State


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
