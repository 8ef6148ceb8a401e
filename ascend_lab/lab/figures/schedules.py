"""Figures of schedules: their loop nests, alone and before and after a primitive."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.ticker import MaxNLocator

from ascend_lab import dsl as te
from ascend_lab.chip import DTYPE_BYTES, Chip, load_chip
from ascend_lab.dsl import Schedule, lower
from ascend_lab.dsl.boxes import Range, first_boxes, row_steps, tile_sizes
from ascend_lab.dsl.run import steps
from ascend_lab.dsl.schedule import complete, roots
from ascend_lab.dsl.stages import Fixed, Leaf, Stage, State
from ascend_lab.errors import CapacityError
from ascend_lab.isa import Affine
from ascend_lab.lab.figures import nests as ns
from ascend_lab.lab.figures import style as st
from ascend_lab.sim import KernelTimeline, simulate_kernel

PIPES = ("MTE2", "MTE1", "M", "V", "FIX", "MTE3")

ROW_IN = 0.235
"""Height of one statement of a nest."""

Sizes = Mapping[str, tuple[int, ...]]


# -- what is drawn: boxes and statements of a completed schedule ---------------------------------
def nests(schedule: Schedule, *, notes: bool = True) -> ns.Items:
    """Return one box per phase; `notes` adds sizes of steps, buffers and slots."""
    found = []
    for number, root in enumerate(roots(schedule.state), start=1):
        shape = " × ".join(f"{n:,}" for n in root.shape)
        heading = f"phase {number}: {root.name}"
        if isinstance(root, Fixed):
            inside: ns.Items = (ns.Work("MTE2", f"{root.kind}, written by hand"),)
        else:
            state = complete(schedule.state, root.name)
            boxes = first_boxes(state, root.name)
            sizes = {
                s.name: tile_sizes(state, s, boxes)
                for s in state.stages
                if isinstance(s, Stage) and s.name in boxes and s.scope != "GM"
            }
            ways = partial(_statement, state, sizes), partial(_loop, sizes)
            inside = ns.walked(state, state.stage(root.name), *ways)
        box = ns.Box(heading, inside, f"{shape} {root.dtype} in GM")
        found.append(box if notes else _without_notes(box))
    return tuple(found)


def _without_notes(item: ns.Box | ns.Work) -> ns.Box | ns.Work:
    if isinstance(item, ns.Work):
        return replace(item, note="")
    return ns.Box(item.heading, tuple(map(_without_notes, item.inside)))


def _loop(sizes: Sizes, stage: Stage, leaf: Leaf, inside: ns.Items) -> ns.Items:
    """Return a loop as a box: its steps, and what the last one does if they do not divide."""
    at = stage.loops.index(leaf)
    outer = [x.width for x in stage.loops[:at] if x.root == leaf.root]
    extents = {a.name: a.extent for a in (*stage.axes, *stage.reduce)}
    data = [a.name for a in stage.axes]
    extents |= dict(zip(data, sizes.get(stage.name, ()), strict=False))
    whole = min([*outer, extents[leaf.root]])
    full, rest = divmod(whole, leaf.width)
    trips, last = full + bool(rest), ""
    if rest and full:
        last = f", the last {rest:,}"
        if leaf.tail == "guard":
            last = f", the last moved back by {leaf.width - rest:,}"
    if leaf.name in stage.bound:
        return (
            ns.Box(f"cores: {leaf.name} = 0 … {trips - 1}", inside, f"{leaf.width:,} each{last}"),
        )
    if trips == 1:
        return inside
    word = "fold" if leaf.reduce else "for"
    return (ns.Box(f"{word} {leaf.name} in {trips:,}", inside, f"steps of {leaf.width:,}{last}"),)


def _statement(state: State, sizes: Sizes, stage: Stage) -> ns.Work:
    """Return what a stage does and the pipe that does it."""
    source = stage.sources[0]
    if stage.scope == "GM":
        pipe = "FIX" if getattr(state.find(source), "scope", "GM") == "L0C" else "MTE3"
        return ns.Work(pipe, f"store {stage.name}")
    note = _buffer(stage, sizes[stage.name])
    if stage.is_copy and getattr(state.find(source), "scope", "GM") != "UB":
        return ns.Work("MTE1" if stage.scope in ("L0A", "L0B") else "MTE2", f"load {source}", note)
    if stage.is_cube:
        left, right = (r.source for r in stage.reads)
        return ns.Work("M", f"{stage.name} += {left} · {right}", note)
    text = ns.formula(stage.expr)
    name = stage.name.removesuffix("_ub")
    return ns.Work(
        "V", f"{name} = {stage.fold}({text})" if stage.fold else f"{name} = {text}", note
    )


def _buffer(stage: Stage, sizes: tuple[int, ...]) -> str:
    """Return where a tile lies and how large it is: 2 x 16 KiB of UB."""
    elements = math.prod(sizes)
    if stage.scope == "UB":
        elements = row_steps(stage, sizes)[1]
    size = -(-elements * DTYPE_BYTES[stage.dtype] // 32) * 32
    amount = f"{size / 1024:.4g} KiB" if size >= 1024 else f"{size} B"
    slots = f"{stage.depth} × " if stage.depth > 1 else ""
    return f"{slots}{amount} of {stage.scope}"


def lines_of(items: Sequence[ns.Box | ns.Work], depth: int = 0) -> list[str]:
    """Return a nest as short lines of text, for alt texts and tests."""
    out = []
    for item in items:
        text = f"{item.pipe} {item.text}" if isinstance(item, ns.Work) else item.heading
        out.append("  " * depth + (f"{text} ({item.note})" if item.note else text))
        if isinstance(item, ns.Box):
            out += lines_of(item.inside, depth + 1)
    return out


def compact(schedule: Schedule) -> ns.Items:
    """Return the nests in few words: a single phase without its box, slots as the only notes."""

    def short(item: ns.Box | ns.Work) -> ns.Box | ns.Work:
        if isinstance(item, ns.Box):
            return ns.Box(item.heading, tuple(map(short, item.inside)))
        slots = item.note.partition(" × ")[0] if " × " in item.note else ""
        return replace(item, note=f"{slots} slots" if slots else "")

    items = tuple(map(short, nests(schedule)))
    only = items[0]
    return only.inside if len(items) == 1 and isinstance(only, ns.Box) else items


# -- the figures ---------------------------------------------------------------------------------
@st.styled
def fig_nest(schedule: Schedule) -> st.LabFigure:
    """Draw the loop nests of a schedule: cores, loops, tiles with buffer and slots, instructions.

    A box is a loop; a bar is done by whole-tile instructions of the pipe whose colour it has.
    """
    items = nests(schedule)
    rows = ns.height_of(items)
    fig, ax = st.new_figure(height_in=min(12.0, ROW_IN * rows + 0.5))
    ns.draw_nest(ax, items, rows=rows, size=8.5, swatch=0.034)
    ax.set_xlim(-0.003, 1.004)
    pipes = [p for p in PIPES if p in set(ns.pipes_in(items))]
    st.pipe_legend(ax, pipes, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(pipes))
    text = "; ".join(line.strip() for line in lines_of(items))
    return st.finish(fig, alt=f"Loop nests for {schedule.chip.name}: {text}")


@st.styled
def fig_pairs(pairs: Mapping[str, tuple[Schedule, Schedule]]) -> st.LabFigure:
    """Draw a nest before and after every primitive, with its cycles and its traffic with GM."""
    drawn = {name: tuple(map(compact, pair)) for name, pair in pairs.items()}
    lines = [list(drawn)[at : at + 2] for at in range(0, len(drawn), 2)]
    heights = [max(ns.height_of(n) for name in line for n in drawn[name]) + 1.6 for line in lines]
    inches = [0.19 * h + 0.24 for h in heights]
    fig, axes = st.new_figure(len(lines), 4, min(12.0, sum(inches) + 0.35), height_ratios=inches)
    said, pipes = [], set[str]()
    for row, line in enumerate(lines):
        for ax in axes.reshape(len(lines), 4)[row]:
            ax.set_axis_off()
        for column, name in enumerate(line):
            two = axes.reshape(len(lines), 4)[row, 2 * column : 2 * column + 2]
            costs = [cost_text(s) for s in pairs[name]]
            for ax, items, cost in zip(two, drawn[name], costs, strict=True):
                ns.draw_nest(ax, items, rows=heights[row], size=7)
                ax.set_xlim(-0.01, 1.01)
                ax.text(0, ns.height_of(items) + 0.85, cost, va="center", fontsize=7, weight="bold")
                pipes |= set(ns.pipes_in(items))
            two[0].set_title(name, loc="left", color=st.BLUE)
            st.put(two[1], -0.1, 1.2, "→", fontsize=11, color=st.BLUE, in_layout=False)
            said.append(f"{name}: {costs[0]} before, {costs[1]} after")
    order = [p for p in PIPES if p in pipes]
    st.pipe_legend(fig, order, loc="outside lower center", ncols=len(order))
    return st.finish(fig, alt="Loop nests before and after a primitive. " + "; ".join(said))


def cost_text(schedule: Schedule) -> str:
    """Return cycles and bytes between GM and the cores, or why the schedule cannot be lowered."""
    try:
        run = simulate_kernel(lower(schedule), schedule.chip)
    except CapacityError:
        return "does not fit in UB"
    return f"{run.cycles:,} cycles, {gm_bytes(run) / 1e6:.3g} MB"


def gm_bytes(run: KernelTimeline) -> int:
    """Return the bytes that cross between GM and the buffers of all cores, both ways."""
    return sum(size for path, size in run.path_bytes.items() if "GM" in path)


# -- tails of split loops, and a schedule put together from five choices ---------------------------
@st.styled
def fig_tails(n: int = 22, factor: int = 8) -> st.LabFigure:
    """Draw the parts of a loop of n steps split by `factor`, with tails "cut" and "guard"."""
    fig, ax = st.new_figure(height_in=1.7)
    said = []
    for line, tail in enumerate(("cut", "guard")):
        s = te.split(_line(n), "y", "i", factor, tail=tail)
        parts = list(steps(s.state.stage("y").loops[0], Range(Affine(), n)))
        ranges = [(part.start.const, part.count) for part in parts]
        twice = sum(count for _, count in ranges) - n
        for number, (start, count) in enumerate(ranges):
            moved = bool(twice) and number == len(ranges) - 1
            colour = 2 if moved else number % 2
            _draw_part(ax, 2.4 * line + moved, start, count, colour, twice * moved)
        if twice:
            shared = {"facecolor": "none", "edgecolor": st.INK, "hatch": "////", "linewidth": 0}
            ax.barh(2.4 * line + 0.5, twice, 1.8, n - factor, **shared)
        counts = ", ".join(str(count) for _, count in ranges)
        said.append(f"{tail}: parts of {counts}, {twice} elements computed twice")
    ax.set_yticks([0, 2.9], ["cut", "guard"])
    ax.set(ylim=(4.1, -0.7), xlim=(-0.05, n + 0.05))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(f"element of y, n = {n}, split by {factor} (hatched: computed twice)")
    return st.finish(fig, alt=f"A loop of {n} steps split by {factor}. " + "; ".join(said))


def _draw_part(ax: Any, low: float, start: int, count: int, colour: int, hidden: int) -> None:
    """Draw one part of a split loop; its label keeps out of the first `hidden` elements."""
    face, ink = ((st.BLUE, "#FFFFFF"), (st.SKY, st.INK), (st.ORANGE, st.INK))[colour]
    ax.barh(low, count, 0.8, start, facecolor=face, edgecolor=st.INK, linewidth=0.8)
    st.put(ax, start + hidden + (count - hidden) / 2, low, f"{count} from {start}", color=ink)


def _line(n: int) -> Schedule:
    x = te.placeholder((n,), name="x")
    return te.create_schedule(te.compute((n,), lambda i: x[i] * 2.0, name="y"), load_chip("Toy"))


# -- choices -------------------------------------------------------------------------------------
def add_relu(chip: Chip, n: int) -> te.Tensor:
    """Return y = relu(a + b) for vectors of n half-precision numbers."""
    a, b = te.placeholder((n,), name="a"), te.placeholder((n,), name="b")
    return te.renamed(te.vrelu(te.vadd(a, b)), "y")


def chosen(
    chip: Chip, n: int, *, inline: bool, tile: int, tail: str, slots: int, cores: int
) -> Schedule:
    """Return the schedule of relu(a + b) that five choices make; the share of a core is cut."""
    s = te.create_schedule(add_relu(chip, n), chip)
    if inline:
        s = te.inline(s, "vadd")
    for name in [stage.name for stage in s.state.stages]:
        loop = "i"
        if cores > 1:
            s = te.split(s, name, loop, -(-n // (128 * cores)) * 128)
            s, loop = te.bind(s, name, "i_o"), "i_i"
        s = te.split(s, name, loop, tile, tail=tail)
        s = te.double_buffer(s, name, slots)
    return s


@st.styled
def fig_choices(
    inline: bool = False,
    tile: int = 1024,
    tail: str = "cut",
    slots: int = 1,
    cores: int = 1,
    *,
    n: int = 1_000_000,
    chip: str = "Ascend910B2",
) -> st.LabFigure:
    """Draw the nest of relu(a + b) under five choices, and its cycles beside the default's."""
    machine = load_chip(chip)
    schedule = chosen(machine, n, inline=inline, tile=tile, tail=tail, slots=slots, cores=cores)
    run = simulate_kernel(te.lower(schedule), machine)
    default = te.auto_schedule(add_relu(machine, n), machine)
    best = simulate_kernel(te.lower(default), machine)
    fig, (left, right) = st.new_figure(1, 2, 2.9, width_ratios=(3, 2))
    ns.draw_nest(left, compact(schedule), rows=max(ns.height_of(compact(schedule)), 11.0), size=8)
    left.set_xlim(-0.01, 1.01)
    bars = {"yours": (run.cycles, st.BLUE), "default": (best.cycles, st.GREY)}
    for place, (name, (cycles, colour)) in enumerate(bars.items()):
        right.plot([cycles], [place], "o", color=colour, markersize=9, markeredgecolor=st.INK)
        right.text(1200, place - 0.3, f"{name}: {cycles:,} cycles", fontsize=8, va="center")
    right.set(xscale="log", xlim=(1000, 1e7), ylim=(1.5, -0.7), yticks=[])
    right.grid(axis="x")
    right.set_xlabel(f"cycles; {gm_bytes(run) / 1e6:.2f} MB cross the GM interface")
    text = (
        f"relu(a + b) on {n:,} elements of {chip}, inline {inline}, tile {tile}, tail {tail}, "
        f"{slots} slots, {cores} cores: {run.cycles:,} cycles and {gm_bytes(run):,} bytes to and "
        f"from GM; the default schedule takes {best.cycles:,} cycles"
    )
    return st.finish(fig, alt=text)
