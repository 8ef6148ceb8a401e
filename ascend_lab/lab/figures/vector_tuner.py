"""Figures of the vector tuner: a toy tree, and the tree that a search has grown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ascend_lab.aoe import Point, Space, drive
from ascend_lab.aoe.search import Mcts, Node, tree_of
from ascend_lab.aoe.workers import Measure
from ascend_lab.errors import InputError
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.figures.gantt import describe, draw_gantt, gantt_legend, pipes_of
from ascend_lab.sim import Timeline

SHADES = LinearSegmentedColormap.from_list("cost", ["#FFFFFF", st.BLUE])
WORST = 2.0
"""Costs this many times the best are drawn as white."""
Tree = Mapping[Point, Node]


@st.styled
def fig_toy_tree(
    costs: Mapping[Point, float], visits: Mapping[Point, int], path: Point = ()
) -> st.LabFigure:
    """Draw a tree of two decisions: costs at the leaves, edges as wide as they were visited.

    Leaves never visited are grey; `path` is drawn bold. Raises `InputError` without leaves.
    """
    if not costs or any(len(point) != 2 for point in costs):
        raise InputError("points of two decisions", f"{len(costs)} points", "give some")
    fig, ax = st.new_figure(height_in=2.5)
    spots: dict[Point, tuple[float, float]] = {p: (i, 0.0) for i, p in enumerate(costs)}
    for first in dict.fromkeys(p[0] for p in costs):
        places = [x for p, (x, _) in list(spots.items()) if len(p) == 2 and p[0] == first]
        spots[(first,)] = (sum(places) / len(places), 1.0)
    spots[()] = ((len(costs) - 1) / 2, 2.0)
    for point, (x, y) in spots.items():
        n, bold = visits.get(point, 0), bool(path) and path[: len(point)] == point
        if point:
            a, b = spots[point[:-1]]
            colour = st.VERMILLION if bold else st.INK if n else st.LIGHT
            ax.plot((a, x), (b, y), color=colour, ls="-", lw=0.8 + 1.2 * n, zorder=1)
        label = f"{point[-1]}\nn = {n}" if point else f"N = {n}"
        if len(point) == 2:
            label = f"{point[-1]}\n{costs[point]:g}"
        box = {"boxstyle": "round", "fc": "#FFFFFF", "ec": st.VERMILLION if bold else st.INK}
        look = {"color": st.INK if n or len(point) < 2 else "#767676"}
        st.put(ax, x, y, label, bbox=box, **look)
    ax.set(xlim=(-0.6, len(costs) - 0.4), ylim=(-0.45, 2.35), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    said = ", ".join(f"{'-'.join(map(str, p))} {c:g}" for p, c in costs.items())
    seen = ", ".join(f"{'-'.join(map(str, p)) or 'root'} {n}" for p, n in visits.items() if n)
    return st.finish(fig, alt=f"A tree of two decisions. Costs of leaves: {said}. Visits: {seen}.")


@st.styled
def fig_search_tree(
    root: Node, names: Sequence[str], deepest: int = 9, labels: float = 0.045
) -> st.LabFigure:
    """Draw the tree of a search: bars as high as visits, dark where the best below is cheap.

    One column a decision; decisions in which every prefix had one value tried are left out. The
    path to the best point has a bold edge. Bars lower than `labels` of the height stay nameless.
    Raises `InputError` for a tree without trials.
    """
    if not root.visits or not math.isfinite(root.best):
        raise InputError("a tree of trials", f"{root.visits} visits", "run the search first")
    tree = tree_of(root, min(deepest, len(names)))
    levels = [0, *_choices(tree, min(deepest, len(names)))]
    spans, best = _spans(tree, root), _best_path(root)
    fig, ax = st.new_figure(height_in=3.6)
    for point in spans:
        if len(point) in levels:
            _draw(ax, tree, spans, levels, point, best[: len(point)] == point, labels)
    ax.set(xlim=(-0.1, len(levels) - 0.3), ylim=(0, 1.0), yticks=[])
    ax.invert_yaxis()
    ax.set_xticks([i + 0.17 for i in range(len(levels))], ["", *(names[i - 1] for i in levels[1:])])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    said = "; ".join(
        f"{point[0]} {node.visits} visits, best {node.best:,.0f}"
        for point, node in tree.items()
        if len(point) == 1
    )
    path = ", ".join(f"{names[i - 1]} {best[i - 1]}" for i in levels[1:])
    text = f"{root.visits} visits, best {root.best:,.0f}. First decision: {said}. Best path: {path}"
    return st.finish(fig, alt=f"The tree of a search: {text}.")


def _choices(tree: Tree, deepest: int) -> list[int]:
    """Return the depths at which some node has a sibling."""
    forks = {len(p) + 1 for p, n in tree.items() if len(n.children) > 1 and len(p) < deepest}
    return sorted(forks) or [1]


def _spans(tree: Tree, root: Node) -> dict[Point, tuple[float, float]]:
    """Return the top and bottom of every node: children share the height of their parent."""
    spans: dict[Point, tuple[float, float]] = {(): (0.0, 1.0)}
    for point, node in tree.items():
        low, high = spans[point]
        size = high - low
        children = {v: c for v, c in node.children.items() if (*point, v) in tree}
        total = sum(child.visits for child in children.values())
        for value in sorted(children, key=lambda v: (str(type(v)), v)):
            share = size * children[value].visits / total
            spans[(*point, value)] = (low, low + share)
            low += share
    return spans


def _best_path(root: Node) -> Point:
    """Return the point along the children of least cost."""
    path: Point = ()
    while root.children:
        value = min(root.children, key=lambda v: root.children[v].best)
        path, root = (*path, value), root.children[value]
    return path


def _draw(
    ax: Any,
    tree: Tree,
    spans: Mapping[Point, tuple[float, float]],
    levels: Sequence[int],
    point: Point,
    bold: bool,
    labels: float,
) -> None:
    """Draw one node as a bar, the band that leads to it, and its value if there is room."""
    at = levels.index(len(point))
    (top, bottom), gap = spans[point], 0.004 if len(point) else 0.0
    top, bottom = top + gap / 2, max(bottom - gap / 2, top + 0.001)
    worst = (tree[point].best / tree[()].best - 1) / (WORST - 1)
    shade = SHADES(1 - min(worst, 1.0) * 0.95)
    if point:
        band = Path([(at - 0.66, top), (at, top), (at, bottom), (at - 0.66, bottom)])
        edge = st.VERMILLION if bold else "none"
        ax.add_patch(PathPatch(band, fc=shade, alpha=0.35, ec=edge, lw=0, zorder=1))
    look: dict[str, Any] = (
        {"ec": st.VERMILLION, "lw": 2.2, "zorder": 4} if bold else {"ec": st.INK, "lw": 0.3}
    )
    st.box(ax, at, top, 0.34, bottom - top, fc=to_hex(shade), **look)
    if bottom - top > labels:
        text = "start" if not point else "none" if point[-1] in ("", 0) else str(point[-1])
        ink: dict[str, Any] = {"color": "#FFFFFF" if worst < 0.45 else st.INK, "zorder": 5}
        weight = "bold" if bold else None
        st.put(ax, at + 0.17, (top + bottom) / 2, text, fontsize=7, weight=weight, **ink)


@st.styled
def fig_grown_tree(
    space: Space,
    measure: Measure,
    exploration: float = 1.0,
    budget: int = 60,
    seed: int = 0,
    deepest: int = 9,
) -> st.LabFigure:
    """Run the plain tree search with these settings and draw its tree."""
    search = Mcts(exploration=exploration, batch=1, completions=1)
    drive(search, space, measure, budget, seed=seed)
    return fig_search_tree(search.root, space.names, deepest)


@st.styled
def fig_before_after(timelines: Mapping[str, Timeline]) -> st.LabFigure:
    """Draw the Gantt charts of several schedules of one operator below each other, to one scale.

    Raises `InputError` without timelines.
    """
    if not timelines:
        raise InputError("at least one timeline", "none", "simulate a schedule")
    rows = len(pipes_of(timelines.values()))
    last = max(line.cycles for line in timelines.values())
    fig, axes = st.new_figure(nrows=len(timelines), height_in=(0.6 + 0.3 * rows) * len(timelines))
    for ax, (name, line) in zip(st.panels(axes), timelines.items(), strict=True):
        draw_gantt(ax, line, critical=True, numbers=False)
        ax.set(xlim=(0, last), title=f"{name}: {line.cycles:,} cycles")
    gantt_legend(fig, timelines.values())
    said = " ".join(f"{name}: {describe(line)}" for name, line in timelines.items())
    return st.finish(fig, alt=f"Gantt charts. {said}")
