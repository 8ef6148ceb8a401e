"""Loop nests drawn as boxes in boxes, read off a completed schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from ascend_lab.dsl import Schedule
from ascend_lab.dsl.complete import complete, loop_count, roots
from ascend_lab.dsl.expr import Call, Expr, Read
from ascend_lab.dsl.stages import Fixed, Leaf, Stage, State
from ascend_lab.figures.style import GREY, INK, PIPE_STYLE

SHADES = ("#F1F1EC", "#E4E4DD", "#D6D6CE", "#C8C8BF")
INFIX = {"vadd": "+", "vadds": "+", "vsub": "−", "vmul": "×", "vmuls": "×", "vdiv": "/"}


@dataclass(frozen=True, slots=True)
class Work:
    """One statement of a nest: the pipe that does it and what it does; `note` stands at its end."""

    pipe: str
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A loop of a nest, or the cores that share one: its heading and what is inside."""

    heading: str
    inside: tuple[Box | Work, ...]
    note: str = ""


def nest_of(schedule: Schedule) -> tuple[Box | Work, ...]:
    """Return the nests of a schedule, one box per phase if there are several."""
    found: list[tuple[Box | Work, ...]] = []
    for root in roots(schedule.state):
        if isinstance(root, Fixed):
            found.append((Work("MTE2", f"{root.kind} (by hand)"),))
        else:
            state = complete(schedule.state, root.name)
            found.append(_stage(state, state.stage(root.name)))
    return tuple(item for nest in found for item in nest)


def _stage(state: State, stage: Stage) -> tuple[Box | Work, ...]:
    """Return one stage: its cores, its loops, the tiles attached to them, its statement."""
    leaves = stage.loops[: loop_count(state, stage)]
    bound = [leaf for leaf in leaves if leaf.name in stage.bound]
    loops = [leaf for leaf in leaves if leaf.name not in stage.bound]
    items: tuple[Box | Work, ...] = (_statement(state, stage),)
    for leaf in reversed(loops):
        items = (*_tiles(state, stage, (leaf.name,)), *items)
        items = (Box(_loop(state, stage, leaf), items),) if leaf.extent > 1 else items
    items = (*_tiles(state, stage, ("", *stage.bound)), *items)
    cores = 1
    for leaf in bound:
        cores *= leaf.extent
    return (Box(f"{cores} cores" if cores > 1 else "1 core", items),) if bound else items


def _tiles(state: State, stage: Stage, places: Sequence[str]) -> tuple[Box | Work, ...]:
    wanted = {(stage.name, place) for place in places}
    found = (s for s in state.stages if isinstance(s, Stage) and s.attach in wanted)
    return tuple(item for guest in found for item in _stage(state, guest))


def _loop(state: State, stage: Stage, leaf: Leaf) -> str:
    stages = [s for s in state.stages if isinstance(s, Stage)]
    flat = all(len(s.axes) + len(s.reduce) == 1 for s in stages)
    what = "elements" if flat else "rows" if leaf.root == stage.axes[0].name else "columns"
    return f"{leaf.extent} × {leaf.width:,} {what}"


def _statement(state: State, stage: Stage) -> Work:
    """Return what a stage does: a load, a store, or a formula on the vector unit."""
    source = stage.sources[0] if stage.is_copy else ""
    if stage.scope == "GM":
        return Work("MTE3", f"store {_name(stage.name)}")
    if source and getattr(state.find(source), "scope", "GM") == "GM":
        return Work("MTE2", f"load {_name(source)}")
    text = formula(stage.expr)
    return Work("V", f"{stage.fold}({text})" if stage.fold else f"{_name(stage.name)} = {text}")


def _name(name: str) -> str:
    return re.sub(r"_ub(_\d+)?$", "", name).removeprefix("reduce_")


def formula(expr: Expr, inside: bool = False) -> str:
    """Return an expression as a short formula without indices and casts: exp(x − max)."""
    if isinstance(expr, Read):
        return _name(expr.source)
    assert isinstance(expr, Call)
    if expr.op in ("vconv", "vcopy"):
        return formula(expr.args[0], inside)
    args = [formula(a, expr.op in INFIX) for a in expr.args]
    if expr.number is not None:
        args.append(f"{expr.number:.3g}".replace("-", "−"))
    if expr.op in INFIX:
        text = f" {INFIX[expr.op]} ".join(args)
        return f"({text})" if inside else text
    return f"{expr.op.removeprefix('v')}({', '.join(args)})"


def pipes_in(items: Sequence[Box | Work]) -> Iterator[str]:
    """Yield the pipe of every statement, top to bottom."""
    for item in items:
        if isinstance(item, Work):
            yield item.pipe
        else:
            yield from pipes_in(item.inside)


def height_of(items: Sequence[Box | Work]) -> float:
    """Return the rows a drawn nest takes: one per statement, heading and a margin per box."""
    return sum(1.0 if isinstance(i, Work) else 1.35 + height_of(i.inside) for i in items)


def draw_nest(
    ax: Any,
    items: Sequence[Box | Work],
    *,
    rows: float = 0.0,
    size: float = 7.5,
    swatch: float = 0.075,
) -> None:
    """Draw a nest into empty axes, top to bottom; `rows` keeps several of them at one scale."""
    ax.set_axis_off()
    ax.set_xlim(0, 1)
    ax.set_ylim(max(rows, height_of(items)), 0)
    _draw(ax, items, 0.0, (0.0, 1.0), 0, size, swatch)


def _draw(
    ax: Any,
    items: Sequence[Box | Work],
    top: float,
    sides: tuple[float, float],
    level: int,
    size: float,
    swatch: float,
) -> float:
    """Draw items from `top` down between two sides; return where they end."""
    left, right = sides
    for item in items:
        if isinstance(item, Work):
            _draw_work(ax, item, top, sides, size, swatch)
            top += 1.0
            continue
        end = top + 1.15 + height_of(item.inside)
        shade = SHADES[min(level, len(SHADES) - 1)]
        place = (left, top + 0.06), right - left, end - top
        ax.add_patch(Rectangle(*place, facecolor=shade, edgecolor=GREY, linewidth=0.7))
        ax.text(left + swatch / 4, top + 0.6, item.heading, va="center", fontsize=size, color=INK)
        _draw_note(ax, item.note, right, top + 0.6, size)
        inner = (left + swatch * 0.47, right - swatch * 0.27)
        _draw(ax, item.inside, top + 1.05, inner, level + 1, size, swatch)
        top = end + 0.2
    return top


def _draw_work(
    ax: Any, item: Work, top: float, sides: tuple[float, float], size: float, swatch: float
) -> None:
    """Draw one statement: a swatch of its pipe, and its text on a tint of the same colour."""
    left, right = sides
    style = PIPE_STYLE[item.pipe]
    low, height = top + 0.07, 0.86
    tint = [1 - 0.22 * (1 - c) for c in to_rgb(style.colour)]
    whole = Rectangle(
        (left, low), right - left, height, facecolor=tint, edgecolor=INK, linewidth=0.6
    )
    ax.add_patch(whole)
    ax.add_patch(Rectangle((left, low), swatch, height, **style.patch_args()))
    ax.text(left + swatch * 4 / 3, top + 0.52, item.text, va="center", fontsize=size, color=INK)
    _draw_note(ax, item.note, right, top + 0.52, size)


def _draw_note(ax: Any, note: str, right: float, middle: float, size: float) -> None:
    """Write a note in smaller type at the right end of a box."""
    if note:
        style = {"va": "center", "ha": "right", "fontsize": size - 1, "color": "#555555"}
        ax.text(right - 0.012, middle, note, **style)
