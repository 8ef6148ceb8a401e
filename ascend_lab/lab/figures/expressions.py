"""Figures of the chapter on expressions: one formula in three loop nests; any formula's nest."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import FuncFormatter

from ascend_lab import dsl as te
from ascend_lab.chip import load_chip
from ascend_lab.dsl import Tensor
from ascend_lab.dsl.tensor import Call, Compute, topological, unique_names
from ascend_lab.errors import CapacityError
from ascend_lab.lab.figures import nests as ns
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.figures.schedules import gm_bytes
from ascend_lab.sim import KernelTimeline, simulate_kernel

PIPES_AT = {"loc": "lower left", "ncols": 3, "columnspacing": 0.8, "handlelength": 1.6}


@st.styled
def fig_three_nests(
    operator: ns.Operator,
    chip: str = "Ascend910A",
    shapes: tuple[tuple[int, int], ...] = ((16384, 1024), (512, 32768)),
    title: str = "",
) -> st.LabFigure:
    """Draw the three nests of an operator over rows, with bytes per element and cycles beneath.

    The nests are those of the first shape; a bar is missing where a tile of rows does not fit.
    """
    runs = [_runs(operator, chip, shape) for shape in shapes]
    first = ns.three_nests(operator(_input(*shapes[0])), chip)
    nests = {name: ns.nest_of(make()) for name, make in first.items()}
    heights = [ns.height_of(nest) for nest in nests.values()]
    upper = max(heights[1:])
    rest = max(heights[0] - upper, 1.0)
    fig, axes = st.new_figure(2, 3, 5.6, height_ratios=(upper, rest), width_ratios=(1, 1, 1.08))
    grid = axes[0, 0].get_gridspec()
    axes[0, 0].remove()
    axes[1, 0].remove()
    places = [fig.add_subplot(grid[:, 0]), axes[0, 1], axes[0, 2]]
    for letter, ax, (name, nest) in zip("abc", places, nests.items(), strict=True):
        ns.draw_nest(ax, nest, rows=heights[0] if letter == "a" else upper)
        ax.set_title(f"({letter}) {name}", loc="left", pad=3, fontsize=8.5)
    st.pipe_legend(axes[0, 1], ["MTE2", "V", "MTE3"], **PIPES_AT)
    if title:
        fig.suptitle(title, fontsize=10.5)
    _bars_of_bytes(axes[1, 1], runs[0], shapes[0])
    _bars_of_cycles(axes[1, 2], runs, shapes)
    return st.finish(fig, alt=_alt(chip, runs, shapes))


def _input(rows: int, columns: int) -> Tensor:
    return te.placeholder((rows, columns), name="x")


def _runs(
    operator: ns.Operator, chip: str, shape: tuple[int, int]
) -> dict[str, KernelTimeline | None]:
    """Time the three nests; None for one whose tiles do not fit."""
    found: dict[str, KernelTimeline | None] = {}
    for name, make in ns.three_nests(operator(_input(*shape)), chip).items():
        try:
            found[name] = simulate_kernel(te.lower(make()), load_chip(chip))
        except CapacityError:
            found[name] = None
    return found


def _bars_of_bytes(
    ax: Any, runs: Mapping[str, KernelTimeline | None], shape: tuple[int, int]
) -> None:
    values = [gm_bytes(r) / (shape[0] * shape[1]) if r else 0.0 for r in runs.values()]
    for row, value in enumerate(values):
        ax.barh(row, value, height=0.45, facecolor=st.BLUE, edgecolor=st.INK, linewidth=0.6)
        ax.text(value + 0.02 * max(values), row, f"{value:.0f}", va="center", fontsize=8)
    ax.set_title("bytes per element", loc="left", pad=3, fontsize=8.5)
    _letters(ax, len(values), 1.15 * max(values))


def _bars_of_cycles(
    ax: Any, runs: list[dict[str, KernelTimeline | None]], shapes: tuple[tuple[int, int], ...]
) -> None:
    looks = ((st.ORANGE, ""), (st.SKY, "///"))
    top = max(r.cycles for each in runs for r in each.values() if r)
    height = 0.68 / len(runs)
    for number, (each, shape) in enumerate(zip(runs, shapes, strict=True)):
        colour, hatch = looks[number % len(looks)]
        label = f"rows of {shape[1]:,}"
        for row, run in enumerate(each.values()):
            at = row + (number - (len(runs) - 1) / 2) * height
            if run is None:
                ax.text(0.01 * top, at, "whole rows do not fit", va="center", fontsize=7.5)
                continue
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": st.INK, "linewidth": 0.6}
            ax.barh(at, run.cycles, height=height, label=label, **look)
            text = f"{run.cycles / 1000:,.0f}"
            ax.text(run.cycles + 0.02 * top, at, text, va="center", fontsize=8)
            label = ""
    ax.set_title("thousand cycles", loc="left", pad=3, fontsize=8.5)
    ax.legend(loc="upper left", bbox_to_anchor=(-0.02, 0.0), fontsize=7.5, borderpad=0.2)
    _letters(ax, len(runs[0]), 1.22 * top)


def _letters(ax: Any, count: int, right: float) -> None:
    ax.set_yticks(range(count), [f"({letter})" for letter in "abc"[:count]])
    ax.set(ylim=(count - 0.45, -0.55), xlim=(0, right), xticks=[])
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _alt(
    chip: str, runs: list[dict[str, KernelTimeline | None]], shapes: tuple[tuple[int, int], ...]
) -> str:
    parts = []
    for each, (rows, columns) in zip(runs, shapes, strict=True):
        told = [
            f"{name} {gm_bytes(run) / rows / columns:.0f} bytes per element, {run.cycles} cycles"
            if run
            else f"{name} does not fit"
            for name, run in each.items()
        ]
        parts.append(f"{rows} rows of {columns}: {'; '.join(told)}")
    return f"Three loop nests of one formula on the {chip}. " + ". ".join(parts) + "."


@st.styled
def fig_expression(
    expression: str = "softmax", chip: str = "Ascend910A", rows: int = 4096, columns: int = 1024
) -> st.LabFigure:
    """Draw the default nest of a named expression and the share of its time each pipe is busy."""
    y = ns.EXPRESSIONS[expression](_input(rows, columns))
    schedule = te.auto_schedule(y, load_chip(chip))
    nest = ns.nest_of(schedule)
    run = simulate_kernel(te.lower(schedule), load_chip(chip))
    per_element = gm_bytes(run) / (rows * columns)
    rows_drawn = max(14.0, ns.height_of(nest))
    fig, (left, right) = st.new_figure(ncols=2, height_in=0.2 + 0.24 * rows_drawn)
    ns.draw_nest(left, nest, rows=rows_drawn)
    left.set_title(f"{expression} on {chip}", loc="left", pad=3)
    pipes = [p for p in st.PIPE_STYLE if p in {*ns.pipes_in(nest), *run.busy_cycles}]
    shares = [100 * run.busy_cycles.get(p, 0) / run.cycles for p in pipes]
    for row, (pipe, share) in enumerate(zip(pipes, shares, strict=True)):
        right.barh(row, share, height=0.62, **st.PIPE_STYLE[pipe].patch_args())
        right.text(share + 1.5, row, f"{share:.0f}%", va="center", fontsize=8)
    right.set_yticks(range(len(pipes)), pipes)
    right.set(ylim=(len(pipes) - 0.4, -0.6), xlim=(0, 112))
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    right.set_xlabel("busy share of the kernel's cycles")
    right.set_title(
        f"{run.cycles:,} cycles, {per_element:.1f} bytes per element", loc="left", pad=3
    )
    told = ", ".join(f"{p} {s:.0f}%" for p, s in zip(pipes, shares, strict=True))
    alt = (
        f"Default nest of {expression} on {rows} x {columns} on the {chip}: {len(run.phases)} "
        f"phases, {run.cycles} cycles, {per_element:.1f} bytes per element. Busy: {told}."
    )
    return st.finish(fig, alt=alt)


# -- the graph of an expression: tensors as boxes, full ones above, reduced ones below -------------
FORMAT_EDGE = {"fp16": (st.BLUE, "-"), "bf16": (st.BLUE, ":"), "fp32": (st.ORANGE, "-")}
HALF_WIDTH, HALF_HEIGHT = 0.43, 0.22


def operation_of(tensor: Tensor) -> str:
    """Return what computes a tensor in one word: input, max, sum, vexp, broadcast, ..."""
    body = tensor.body
    if body is None:
        return "input"
    if not isinstance(body, Compute):
        return body.kind
    if body.fold:
        return body.fold
    return tensor.hint or (body.expr.op if isinstance(body.expr, Call) else "copy")


def sources_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors a tensor reads; through reshapes, which change no element."""
    found: list[Tensor] = []
    for source in tensor.inputs:
        found += sources_of(source) if source.hint == "reshape" else [source]
    return tuple(found)


@st.styled
def fig_graph(outputs: Tensor | Sequence[Tensor]) -> st.LabFigure:
    """Draw the tensors an expression consists of, left to right in the order they are needed.

    One line of boxes per size, the largest on top; the edge of a box is coloured by number format.
    Reshapes are left out.
    """
    wanted = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    tensors = [t for t in topological(wanted) if t.hint != "reshape" or t in wanted]
    names = unique_names(topological(wanted))
    place, sizes = _places(tensors)
    fig, ax = st.new_figure(height_in=0.45 + 0.75 * (1 - min(y for _, y in place.values())))
    ax.set_axis_off()
    ax.set_xlim(-0.55, max(x for x, _ in place.values()) + 0.55)
    ax.set_ylim(min(y for _, y in place.values()) - 0.3, 0.95)
    _edges(ax, tensors, place)
    for tensor in tensors:
        _box(ax, tensor, place[tensor])
    for lane, elements in enumerate(sizes):
        first = next(t for t in tensors if t.elements == elements)
        at = place[first][0] - HALF_WIDTH, HALF_HEIGHT + 0.06 - lane
        ax.text(*at, _shape(first), fontsize=7.5, va="bottom")
    return st.finish(fig, alt=_graph_alt(tensors, names))


def _places(tensors: Sequence[Tensor]) -> tuple[dict[Tensor, tuple[float, float]], list[int]]:
    """Return where the boxes stand, and the sizes of the lines from top to bottom."""
    depth: dict[Tensor, int] = {}
    for tensor in tensors:
        depth[tensor] = max((depth[t] + 1 for t in sources_of(tensor)), default=0)
    sizes = sorted({t.elements for t in tensors}, reverse=True)
    place: dict[Tensor, tuple[float, float]] = {}
    for tensor in tensors:
        x, y = float(depth[tensor]), -float(sizes.index(tensor.elements))
        while (x, y) in place.values():
            y -= 0.5
        place[tensor] = x, y
    return place, sizes


def _shape(tensor: Tensor) -> str:
    return " × ".join(f"{n:,}" for n in tensor.shape)


def _edges(ax: Any, tensors: Sequence[Tensor], place: dict[Tensor, tuple[float, float]]) -> None:
    look: dict[str, Any] = {"mutation_scale": 8, "color": st.GREY, "linewidth": 1.1}
    for tensor in tensors:
        x1, y1 = place[tensor]
        for source in sources_of(tensor):
            x0, y0 = place[source]
            far = y0 == y1 and x1 - x0 > 1
            start = (x0 + 0.3, y0 + HALF_HEIGHT) if far else (x0 + HALF_WIDTH, y0)
            end = (x1 - 0.1, y1 + HALF_HEIGHT) if far else (x1 - HALF_WIDTH, y1)
            bend = f"arc3,rad={-0.42 / math.sqrt(x1 - x0) if far else 0.0:.2f}"
            way = (start, end)
            ax.add_patch(FancyArrowPatch(*way, arrowstyle="-|>", connectionstyle=bend, **look))


def _box(ax: Any, tensor: Tensor, at: tuple[float, float]) -> None:
    colour, line = FORMAT_EDGE.get(tensor.dtype, (st.GREEN, "-"))
    corner = at[0] - HALF_WIDTH, at[1] - HALF_HEIGHT
    box = st.box(ax, *corner, 2 * HALF_WIDTH, 2 * HALF_HEIGHT, zorder=2, facecolor=st.PAPER)
    box.set(edgecolor=colour, linewidth=1.6, linestyle=line)
    word = tensor.label if tensor.body is None else operation_of(tensor)
    st.put(ax, at[0], at[1] + 0.07, word, fontsize=7, zorder=3)
    st.put(ax, at[0], at[1] - 0.1, tensor.dtype, fontsize=6.5, zorder=3)


def _graph_alt(tensors: Sequence[Tensor], names: dict[Tensor, str]) -> str:
    parts = []
    for tensor in tensors:
        sources = ", ".join(names[t] for t in sources_of(tensor))
        after = f" of {sources}" if sources else ""
        parts.append(
            f"{names[tensor]} ({_shape(tensor)} {tensor.dtype}) is {operation_of(tensor)}{after}"
        )
    return f"A graph of {len(tensors)} tensors: {'; '.join(parts)}."
