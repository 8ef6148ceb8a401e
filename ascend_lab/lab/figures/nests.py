"""Figures of loop nests, as boxes in boxes: of one schedule, or before and after a primitive.

`nest_items` walks through a schedule and makes boxes (loops) and statements; `draw_nest` draws
them. Its stages are loads, formulas and stores; a stage may be attached to a loop of another one,
and is then computed tile by tile inside that loop.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.colors import to_rgb

from ascend_lab import errors
from ascend_lab.lab.figures import style as st
from ascend_lab.machine import chip, sim
from ascend_lab.operators.dsl import Schedule, lower, tensor
from ascend_lab.operators.dsl.boxes import first_boxes, row_steps, tile_sizes
from ascend_lab.operators.dsl.schedule import complete, loop_count, roots
from ascend_lab.operators.dsl.stages import Fixed, Leaf, Stage, State

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
    inside: "tuple[Box | Work, ...]"
    note: str = ""


Items = tuple[Box | Work, ...]


def nest_of(schedule: Schedule) -> Items:
    """Return the nests of a schedule, one box per phase if there are several."""
    items: list[Box | Work] = []
    for root in roots(schedule.state):
        if isinstance(root, Fixed):
            items.append(Work("MTE2", f"{root.kind} (by hand)"))
        else:
            state = complete(schedule.state, root.name)
            describe = partial(_statement, state), partial(_loop, state)
            items += nest_items(state, state.stage(root.name), *describe)
    return tuple(items)


def nest_items(
    state: State,
    stage: Stage,
    statement_of: Callable[[Stage], Work],
    loop_around: Callable[[Stage, Leaf, Items], Items],
) -> Items:
    """Return a stage with its loops, built from the inside out; cores are the outermost loops.

    `statement_of` describes a stage, and `loop_around` puts a loop around items. A stage that is
    attached to a loop stands first inside it.
    """

    def attached(*loops: str) -> Items:
        """Return the stages that are attached to some loops of this stage, "" for above them."""
        points = {(stage.name, loop) for loop in loops}
        items: list[Box | Work] = []
        for other in state.stages:
            if isinstance(other, Stage) and other.attach in points:
                items += nest_items(state, other, statement_of, loop_around)
        return tuple(items)

    drawn_loops = stage.loops[: loop_count(state, stage)]
    items: Items = (statement_of(stage),)
    for leaf in reversed([x for x in drawn_loops if x.name not in stage.bound]):
        items = loop_around(stage, leaf, (*attached(leaf.name), *items))
    items = (*attached("", *stage.bound), *items)
    for leaf in reversed([x for x in drawn_loops if x.name in stage.bound]):
        items = loop_around(stage, leaf, items)
    return items


def _loop(state: State, stage: Stage, leaf: Leaf, inside: Items) -> Items:
    """Return a loop as a box; all that the cores share is one box."""
    bound = [x for x in stage.loops if x.name in stage.bound]
    if leaf in bound[1:] or (leaf.extent == 1 and leaf not in bound):
        return inside
    if leaf in bound:
        cores = math.prod(x.extent for x in bound)
        return (Box(f"{cores} cores" if cores > 1 else "1 core", inside),)
    stages = [s for s in state.stages if isinstance(s, Stage)]
    is_one_axis = all(len(s.axes) + len(s.reduce) == 1 for s in stages)
    rows_or_columns = "rows" if leaf.root == stage.axes[0].name else "columns"
    what = "elements" if is_one_axis else rows_or_columns
    return (Box(f"{leaf.extent} × {leaf.width:,} {what}", inside),)


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
    """Return a stage's name without what the scheduler adds to it: x_ub_2 is x."""
    return re.sub(r"_ub(_\d+)?$", "", name).removeprefix("reduce_")


def formula(expr: tensor.Expr, inside: bool = False) -> str:
    """Return an expression as a short formula without indices and casts: exp(x − max)."""
    if isinstance(expr, tensor.Read):
        return _name(expr.source)
    assert isinstance(expr, tensor.Call)
    if expr.op in ("vconv", "vcopy"):
        return formula(expr.args[0], inside)
    args = [formula(a, expr.op in INFIX) for a in expr.args]
    if expr.number is not None:
        args.append(f"{expr.number:.3g}".replace("-", "−"))
    if expr.op in INFIX:
        text = f" {INFIX[expr.op]} ".join(args)
        return f"({text})" if inside else text
    return f"{expr.op.removeprefix('v')}({', '.join(args)})"


def pipes_in(items: Items) -> Iterator[str]:
    """Yield the pipe of every statement, top to bottom."""
    for item in items:
        if isinstance(item, Work):
            yield item.pipe
        else:
            yield from pipes_in(item.inside)


def height_of(items: Items) -> float:
    """Return the rows a drawn nest takes: one per statement, heading and a margin per box."""
    return sum(1.0 if isinstance(i, Work) else 1.35 + height_of(i.inside) for i in items)


def draw_nest(
    ax: Any, items: Items, *, rows: float = 0.0, size: float = 7.5, swatch: float = 0.075
) -> None:
    """Draw a nest into empty axes, top to bottom; `rows` keeps several of them at one scale.

    A loop is a box around what is inside it, a statement its text on a tint behind a swatch of its
    pipe; notes stand in smaller type at the right end.
    """
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(max(rows, height_of(items)), 0))

    def write(text: str, note: str, left: float, right: float, middle: float) -> None:
        """Write a text at the left and its note at the right end."""
        ax.text(left, middle, text, va="center", fontsize=size, color=st.INK)
        if note:
            style = {"va": "center", "ha": "right", "fontsize": size - 1, "color": "#555555"}
            ax.text(right - 0.012, middle, note, **style)

    def draw(items: Items, top: float, left: float, right: float, level: int) -> None:
        """Draw items from `top` down; boxes are darker the deeper they are."""
        for item in items:
            if isinstance(item, Work):
                style = st.PIPE_STYLE[item.pipe]
                low = top + 0.07
                height = 0.86
                tint = [1 - 0.22 * (1 - c) for c in to_rgb(style.colour)]
                look: dict[str, Any] = {"facecolor": tint, "edgecolor": st.INK, "linewidth": 0.6}
                st.box(ax, left, low, right - left, height, **look)
                st.box(ax, left, low, swatch, height, **style.patch_args())
                write(item.text, item.note, left + swatch * 4 / 3, right, top + 0.52)
                top += 1.0
                continue
            end = top + 1.15 + height_of(item.inside)
            shade = SHADES[min(level, len(SHADES) - 1)]
            look = {"facecolor": shade, "edgecolor": st.GREY, "linewidth": 0.7}
            st.box(ax, left, top + 0.06, right - left, end - top, **look)
            write(item.heading, item.note, left + swatch / 4, right, top + 0.6)
            draw(item.inside, top + 1.05, left + swatch * 0.47, right - swatch * 0.27, level + 1)
            top = end + 0.2

    draw(items, 0.0, 0.0, 1.0, 0)


PIPES = ("MTE2", "MTE1", "M", "V", "FIX", "MTE3")
ROW_IN = 0.235
"""Height of one statement of a nest."""
Sizes = Mapping[str, tuple[int, ...]]


# -- what is drawn: boxes and statements of a completed schedule ---------------------------------
def nests(schedule: Schedule) -> Items:
    """Return one box per phase, with notes of the sizes of steps, buffers and slots."""
    boxes_of_phases = []
    for number, root in enumerate(roots(schedule.state), start=1):
        shape = " × ".join(f"{n:,}" for n in root.shape)
        heading = f"phase {number}: {root.name}"
        if isinstance(root, Fixed):
            inside: Items = (Work("MTE2", f"{root.kind}, written by hand"),)
        else:
            state = complete(schedule.state, root.name)
            boxes = first_boxes(state, root.name)
            tiles = (state.stage(n) for n in boxes if state.stage(n).scope != "GM")
            sizes = {tile.name: tile_sizes(state, tile, boxes) for tile in tiles}
            describe = partial(_noted_statement, state, sizes), partial(_noted_loop, sizes)
            inside = nest_items(state, state.stage(root.name), *describe)
        boxes_of_phases.append(Box(heading, inside, f"{shape} {root.dtype} in GM"))
    return tuple(boxes_of_phases)


def _noted_loop(sizes: Sizes, stage: Stage, leaf: Leaf, inside: Items) -> Items:
    """Return a loop as a box: its steps, and what the last one does if they do not divide."""
    place = stage.loops.index(leaf)
    outer = [x.width for x in stage.loops[:place] if x.root == leaf.root]
    extents = {a.name: a.extent for a in (*stage.axes, *stage.reduce)}
    data = [a.name for a in stage.axes]
    extents |= dict(zip(data, sizes.get(stage.name, ()), strict=False))
    extent = min([*outer, extents[leaf.root]])
    full_steps, last_elements = divmod(extent, leaf.width)
    trips = full_steps + bool(last_elements)
    last_note = ""
    if last_elements and full_steps:
        last_note = f", the last {last_elements:,}"
        if leaf.tail == "guard":
            last_note = f", the last moved back by {leaf.width - last_elements:,}"
    if leaf.name in stage.bound:
        return (
            Box(f"cores: {leaf.name} = 0 … {trips - 1}", inside, f"{leaf.width:,} each{last_note}"),
        )
    if trips == 1:
        return inside
    word = "fold" if leaf.reduce else "for"
    return (Box(f"{word} {leaf.name} in {trips:,}", inside, f"steps of {leaf.width:,}{last_note}"),)


def _noted_statement(state: State, sizes: Sizes, stage: Stage) -> Work:
    """Return what a stage does and the pipe that does it."""
    source = stage.sources[0]
    if stage.scope == "GM":
        pipe = "FIX" if getattr(state.find(source), "scope", "GM") == "L0C" else "MTE3"
        return Work(pipe, f"store {stage.name}")
    elements = math.prod(sizes[stage.name])
    if stage.scope == "UB":
        elements = row_steps(stage, sizes[stage.name])[1]
    size = -(-elements * chip.DTYPE_BYTES[stage.dtype] // 32) * 32
    amount = f"{size / 1024:.4g} KiB" if size >= 1024 else f"{size} B"
    slots = f"{stage.depth} × " if stage.depth > 1 else ""
    note = f"{slots}{amount} of {stage.scope}"
    if stage.is_copy and getattr(state.find(source), "scope", "GM") != "UB":
        return Work("MTE1" if stage.scope in ("L0A", "L0B") else "MTE2", f"load {source}", note)
    if stage.is_cube:
        left, right = (r.source for r in stage.reads)
        return Work("M", f"{stage.name} += {left} · {right}", note)
    text = formula(stage.expr)
    name = stage.name.removesuffix("_ub")
    return Work("V", f"{name} = {stage.fold}({text})" if stage.fold else f"{name} = {text}", note)


def lines_of(items: Items, depth: int = 0) -> list[str]:
    """Return a nest as short lines of text, for alt texts and tests."""
    lines = []
    for item in items:
        text = f"{item.pipe} {item.text}" if isinstance(item, Work) else item.heading
        lines.append("  " * depth + (f"{text} ({item.note})" if item.note else text))
        if isinstance(item, Box):
            lines += lines_of(item.inside, depth + 1)
    return lines


def compact(schedule: Schedule) -> Items:
    """Return the nests in few words: a single phase without its box, slots as the only notes."""

    def short(item: Box | Work) -> Box | Work:
        """Return an item with slots as its only note."""
        if isinstance(item, Box):
            return Box(item.heading, tuple(map(short, item.inside)))
        slots = item.note.partition(" × ")[0] if " × " in item.note else ""
        return replace(item, note=f"{slots} slots" if slots else "")

    items = tuple(map(short, nests(schedule)))
    first_item = items[0]
    return first_item.inside if len(items) == 1 and isinstance(first_item, Box) else items


# -- the figures ---------------------------------------------------------------------------------
def fig_nest(schedule: Schedule) -> st.LabFigure:
    """Draw the loop nests of a schedule: cores, loops, tiles with buffer, slots, instructions."""
    items = nests(schedule)
    rows = height_of(items)
    fig, ax = st.new_figure(height_in=min(12.0, ROW_IN * rows + 0.5))
    draw_nest(ax, items, rows=rows, size=8.5, swatch=0.034)
    ax.set_xlim(-0.003, 1.004)
    pipes = [p for p in PIPES if p in set(pipes_in(items))]
    st.pipe_legend(ax, pipes, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(pipes))
    text = "; ".join(line.strip() for line in lines_of(items))
    return st.finish(fig, alt=f"Loop nests for {schedule.chip.name}: {text}")


def fig_pairs(pairs: Mapping[str, tuple[Schedule, Schedule]]) -> st.LabFigure:
    """Draw a nest before and after every primitive, with its cycles and its traffic with GM."""
    drawn = {name: tuple(map(compact, pair)) for name, pair in pairs.items()}
    lines = [list(drawn)[at : at + 2] for at in range(0, len(drawn), 2)]
    heights = [max(height_of(n) for name in line for n in drawn[name]) + 1.6 for line in lines]
    inches = [0.19 * h + 0.24 for h in heights]
    fig, axes = st.new_figure(len(lines), 4, min(12.0, sum(inches) + 0.35), height_ratios=inches)
    alt_parts = []
    pipes = set[str]()
    for row, line in enumerate(lines):
        for ax in axes.reshape(len(lines), 4)[row]:
            ax.set_axis_off()
        for column, name in enumerate(line):
            pair_axes = axes.reshape(len(lines), 4)[row, 2 * column : 2 * column + 2]
            costs = [cost_text(s) for s in pairs[name]]
            for ax, items, cost in zip(pair_axes, drawn[name], costs, strict=True):
                draw_nest(ax, items, rows=heights[row], size=7)
                ax.set_xlim(-0.01, 1.01)
                ax.text(0, height_of(items) + 0.85, cost, va="center", fontsize=7, weight="bold")
                pipes |= set(pipes_in(items))
            pair_axes[0].set_title(name, loc="left", color=st.BLUE)
            st.put(pair_axes[1], -0.1, 1.2, "→", fontsize=11, color=st.BLUE, in_layout=False)
            alt_parts.append(f"{name}: {costs[0]} before, {costs[1]} after")
    order = [p for p in PIPES if p in pipes]
    st.pipe_legend(fig, order, loc="outside lower center", ncols=len(order))
    return st.finish(fig, alt="Loop nests before and after a primitive. " + "; ".join(alt_parts))


def cost_text(schedule: Schedule) -> str:
    """Return cycles and bytes between GM and the cores, or why the schedule cannot be lowered."""
    try:
        run = sim.simulate_kernel(lower(schedule), schedule.chip)
    except errors.CapacityError:
        return "does not fit in UB"
    return f"{run.cycles:,} cycles, {gm_bytes(run) / 1e6:.3g} MB"


def gm_bytes(run: sim.KernelTimeline) -> int:
    """Return the bytes that cross between GM and the buffers of all cores, both ways."""
    return sum(size for path, size in run.path_bytes.items() if "GM" in path)
