"""Figures of the vector and the cube tuner: search trees, and populations of a genetic search."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ascend_lab.aoe import Point, Space, drive
from ascend_lab.aoe.cube.space import CubeSpace
from ascend_lab.aoe.search import Mcts, Node, tree_of
from ascend_lab.aoe.space import completed
from ascend_lab.aoe.workers import Measure
from ascend_lab.lab.figures import gantt, style as st
from ascend_lab.lab.tuning import Person, SimpleGenetic
from ascend_lab.machine.sim import Timeline

SHADES = LinearSegmentedColormap.from_list("cost", ["#FFFFFF", st.BLUE])
WORST = 2.0
"""Costs this many times the best are drawn as white."""
Tree = Mapping[Point, Node]
People = Sequence[Person]


def fig_dials(rows: int, columns: int, answers: Mapping[str, Any]) -> st.LabFigure:
    """Draw how a tuner's answers for one nest divide rows x columns: among cores, tiles and steps.

    `answers` has the rows of a core under "share 1", the rows of a tile under "width 1" (0 for the
    whole share), and the columns that one step of a fold adds up under "fold 1".
    """
    share = answers["share 1"]
    width = answers["width 1"] or share  # 0: the share is one tile
    fold = answers["fold 1"]
    counts = (-(-rows // share), -(-share // width), -(-columns // fold))
    steps = "steps" if counts[2] > 1 else "step"
    labels = (
        f"{rows} rows x {columns}\nshare = {share} rows: {counts[0]} cores",
        f"one core: {share} rows\nwidth = {width} rows: {counts[1]} tiles",
        f"one tile: {width} rows\nfold = {fold}: {counts[2]} {steps} a row",
    )
    fig, ax = st.new_figure(height_in=2.3)
    for x, count, text in zip((0.0, 1.35, 2.7), counts, labels, strict=True):
        is_horizontal = x == 2.7  # folds go along the columns
        for part in range(count):
            offset = part / count
            fill = st.BLUE if part == 0 else "#FFFFFF"
            if is_horizontal:
                st.box(ax, x + offset, 0.0, 1 / count, 1.0, fc=fill, ec=st.INK, lw=0.6)
            else:
                st.box(ax, x, offset, 1.0, 1 / count, fc=fill, ec=st.INK, lw=0.6)
        st.put(ax, x + 0.5, -0.25, text)
    for x in (1.0, 2.35):
        look = {"arrowstyle": "->", "color": st.INK}
        ax.annotate("", (x + 0.32, 0.5), (x + 0.03, 1 / counts[0] / 2), arrowprops=look)
    ax.set(xlim=(-0.1, 3.8), ylim=(1.05, -0.5), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    summary = "; ".join(text.replace("\n", ", ") for text in labels)
    return st.finish(fig, alt=f"Three rectangles, each the dark part of the last: {summary}.")


def fig_toy_tree(
    costs: Mapping[Point, float], visits: Mapping[Point, int], path: Point = ()
) -> st.LabFigure:
    """Draw a tree of two decisions: costs at the leaves, edges as wide as they were visited.

    Leaves never visited are grey; `path` is drawn bold.
    """
    fig, ax = st.new_figure(height_in=2.5)
    spots: dict[Point, tuple[float, float]] = {p: (i, 0.0) for i, p in enumerate(costs)}
    for value in dict.fromkeys(point[0] for point in costs):
        leaf_places = [x for x, point in enumerate(costs) if point[0] == value]
        spots[(value,)] = (sum(leaf_places) / len(leaf_places), 1.0)
    spots[()] = ((len(costs) - 1) / 2, 2.0)
    for point, (x, y) in spots.items():
        n = visits.get(point, 0)
        bold = bool(path) and path[: len(point)] == point
        if point:
            parent_x, parent_y = spots[point[:-1]]
            colour = st.INK if n else st.LIGHT
            if bold:
                colour = st.VERMILLION
            ax.plot((parent_x, x), (parent_y, y), color=colour, ls="-", lw=0.8 + 1.2 * n, zorder=1)
        label = f"{point[-1]}\nn = {n}" if point else f"N = {n}"
        if len(point) == 2:
            label = f"{point[-1]}\n{costs[point]:g}"
        box = {"boxstyle": "round", "fc": "#FFFFFF", "ec": st.VERMILLION if bold else st.INK}
        look = {"color": st.INK if n or len(point) < 2 else "#767676"}
        st.put(ax, x, y, label, bbox=box, **look)
    ax.set(xlim=(-0.6, len(costs) - 0.4), ylim=(-0.45, 2.35), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    summary = ", ".join(f"{'-'.join(map(str, p))} {c:g}" for p, c in costs.items())
    visits_text = ", ".join(
        f"{'-'.join(map(str, p)) or 'root'} {n}" for p, n in visits.items() if n
    )
    alt = f"A tree of two decisions. Costs of leaves: {summary}. Visits: {visits_text}."
    return st.finish(fig, alt=alt)


def fig_search_tree(root: Node, names: Sequence[str], deepest: int = 9) -> st.LabFigure:
    """Draw the tree of a search: bars as high as visits, dark where the best below is cheap.

    Each column is a decision; those are left out for which only one value was tried after all
    earlier decisions. The path to the best point has a bold edge. Low bars have no label.
    """
    deepest_drawn = min(deepest, len(names))
    tree = tree_of(root, deepest_drawn)
    forks = {len(p) + 1 for p, n in tree.items() if len(n.children) > 1 and len(p) < deepest_drawn}
    levels = [0, *(sorted(forks) or [1])]  # depths at which some node has a sibling
    spans = _spans(tree, root)
    node = root
    best: Point = ()
    while node.children:  # along the children of least cost
        value, node = min(node.children.items(), key=lambda child: child[1].best)
        best = (*best, value)
    fig, ax = st.new_figure(height_in=3.6)
    for point, span in spans.items():
        if len(point) in levels:
            column = levels.index(len(point))
            _draw(ax, tree, span, column, point, best[: len(point)] == point)
    ax.set(xlim=(-0.1, len(levels) - 0.3), ylim=(0, 1.0), yticks=[])
    ax.invert_yaxis()
    ax.set_xticks([i + 0.17 for i in range(len(levels))], ["", *(names[i - 1] for i in levels[1:])])
    ax.xaxis.tick_top()
    st.bare(ax)
    first = [(point[0], node) for point, node in tree.items() if len(point) == 1]
    summary = "; ".join(f"{name} {n.visits} visits, best {n.best:,.0f}" for name, n in first)
    path = ", ".join(f"{names[i - 1]} {best[i - 1]}" for i in levels[1:])
    text = (
        f"{root.visits} visits, best {root.best:,.0f}. First decision: {summary}. Best path: {path}"
    )
    return st.finish(fig, alt=f"The tree of a search: {text}.")


def _spans(tree: Tree, root: Node) -> dict[Point, tuple[float, float]]:
    """Return the top and bottom of every node: children share the height of their parent."""
    spans: dict[Point, tuple[float, float]] = {(): (0.0, 1.0)}
    for point, node in tree.items():
        low, high = spans[point]
        size = high - low
        children = {v: c.visits for v, c in node.children.items() if (*point, v) in tree}
        for value in sorted(children, key=lambda v: (str(type(v)), v)):
            share = size * children[value] / sum(children.values())
            spans[(*point, value)] = (low, low + share)
            low += share
    return spans


def _draw(
    ax: Any, tree: Tree, span: tuple[float, float], column: int, point: Point, bold: bool
) -> None:
    """Draw one node as a bar, the band that leads to it, and its value if there is room."""
    gap = 0.004 if len(point) else 0.0
    top = span[0] + gap / 2
    bottom = max(span[1] - gap / 2, top + 0.001)
    worst = (tree[point].best / tree[()].best - 1) / (WORST - 1)
    shade = SHADES(1 - min(worst, 1.0) * 0.95)
    if point:
        band = Path(
            [(column - 0.66, top), (column, top), (column, bottom), (column - 0.66, bottom)]
        )
        edge = st.VERMILLION if bold else "none"
        ax.add_patch(PathPatch(band, fc=shade, alpha=0.35, ec=edge, lw=0, zorder=1))
    look: dict[str, Any] = (
        {"ec": st.VERMILLION, "lw": 2.2, "zorder": 4} if bold else {"ec": st.INK, "lw": 0.3}
    )
    st.box(ax, column, top, 0.34, bottom - top, fc=to_hex(shade), **look)
    if bottom - top > 0.045:
        value = point[-1] if point else "start"
        text = "none" if value in ("", 0) else str(value)
        ink: dict[str, Any] = {"color": "#FFFFFF" if worst < 0.45 else st.INK, "zorder": 5}
        ink |= {"fontsize": 7, "weight": "bold" if bold else None}
        st.put(ax, column + 0.17, (top + bottom) / 2, text, **ink)


def fig_grown_tree(
    space: Space, measure: Measure, exploration: float = 1.0, budget: int = 60, seed: int = 0
) -> st.LabFigure:
    """Run the plain tree search with these settings and draw its tree."""
    search = Mcts(exploration=exploration, batch=1, completions=1)
    drive(search, space, measure, budget, seed=seed)
    return fig_search_tree(search.root, space.names)


def fig_before_after(timelines: Mapping[str, Timeline]) -> st.LabFigure:
    """Draw the Gantt charts of several schedules of one operator below each other, to one scale."""
    rows = len(gantt.pipes_of(timelines.values()))
    longest = max(line.cycles for line in timelines.values())
    fig, axes = st.new_figure(nrows=len(timelines), height_in=(0.6 + 0.3 * rows) * len(timelines))
    for ax, (name, line) in zip(st.panels(axes), timelines.items(), strict=True):
        gantt.draw_gantt(ax, line, critical=True, numbers=False)
        ax.set(xlim=(0, longest), title=f"{name}: {line.cycles:,} cycles")
    gantt.gantt_legend(fig, timelines.values())
    summary = " ".join(f"{name}: {gantt.describe(line)}" for name, line in timelines.items())
    return st.finish(fig, alt=f"Gantt charts. {summary}")


# -- the cube tuner --------------------------------------------------------------------------------
Floats = np.ndarray
SHARES = ((0.5, "half"), (0.1, "10 %"), (0.01, "1 %"), (0.001, "0.1 %"))
"""Shares of the space whose worst tiling is marked, and how they are called."""


def fig_toy_tiles(cycles: Mapping[tuple[int, int], int | None]) -> st.LabFigure:
    """Draw cycles by tile: rows m down, columns n across, in fractals; None: does not fit."""
    legal = {tile: cost for tile, cost in cycles.items() if cost is not None}
    rows, cols = (sorted({tile[i] for tile in cycles}) for i in (0, 1))
    best = min(legal, key=lambda t: legal[t])
    least_cost = min(legal.values())
    largest_cost = max(legal.values())
    fig, ax = st.new_figure(height_in=2.5)
    for (m, n), cost in cycles.items():
        x = cols.index(n)
        y = rows.index(m)
        if cost is None:
            box: dict[str, Any] = {"fc": "none", "ec": st.VERMILLION, "hatch": "xx", "lw": 0.8}
        else:
            shade = 0.05 + 0.75 * (cost - least_cost) / max(largest_cost - least_cost, 1)
            box = {"fc": st.BLUE, "alpha": 1 - shade, "ec": st.INK, "lw": 0.8}
        st.box(ax, x, y, 0.94, 0.9, **box)
        text = "does not fit" if cost is None else f"{cost:,}"
        dark = cost is not None and cost - least_cost < 0.45 * (largest_cost - least_cost)
        paper = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.5} if cost is None else None
        ink = "#FFFFFF" if dark else st.INK
        weight = "bold" if (m, n) == best else None
        st.put(ax, x + 0.47, y + 0.45, text, bbox=paper, color=ink, weight=weight)
    ax.set(xlim=(-0.05, len(cols)), ylim=(len(rows), -0.05), xlabel="n (fractals)")
    ax.set(ylabel="m (fractals)", title="cycles of a tile m x n")
    ax.set_xticks([i + 0.47 for i in range(len(cols))], [str(n) for n in cols])
    ax.set_yticks([i + 0.45 for i in range(len(rows))], [str(m) for m in rows])
    st.bare(ax)
    cost_texts = {tile: "does not fit" if c is None else f"{c:,}" for tile, c in cycles.items()}
    summary = ", ".join(f"{m}x{n} {cost}" for (m, n), cost in cost_texts.items())
    return st.finish(fig, alt=f"Cycles by tile m x n: {summary}. The best is {best[0]}x{best[1]}.")


def fig_crossover(space: Space, one: Point, two: Point, picks: Sequence[bool]) -> st.LabFigure:
    """Draw two parents, their mix (a decision of `one` where a pick is true), the legal child."""
    mixed = [a if pick else b for a, b, pick in zip(one, two, picks, strict=True)]
    child = completed(space, mixed)
    colours = [st.SKY if pick else st.ORANGE for pick in picks]
    parents = ("one", one, [st.SKY] * len(one)), ("two", two, [st.ORANGE] * len(two))
    lines = *parents, ("mixed", mixed, colours), ("child", child, colours)
    fig, ax = st.new_figure(height_in=2.0)
    for y, (label, values, fills) in enumerate(lines):
        ax.text(-0.15, y + 0.42, label, ha="right", va="center")
        for x, value in enumerate(values):
            fill: dict[str, Any] = {"fc": fills[x], "ec": st.INK}
            box: dict[str, Any] | None = None
            if label == "child" and value != mixed[x]:
                fill = {"fc": "#FFFFFF", "ec": st.VERMILLION, "hatch": "////"}
                box = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.2}
            st.box(ax, x, y, 0.94, 0.84, lw=0.8, **fill)
            st.put(ax, x + 0.47, y + 0.42, str(value), bbox=box)
    ax.set(xlim=(-1.2, len(one)), ylim=(len(lines), -0.1), yticks=[])
    ax.set_xticks([i + 0.47 for i in range(len(one))], space.names)
    ax.xaxis.tick_top()
    st.bare(ax)
    pairs = zip(space.names, mixed, child, strict=True)
    repaired = [f"{name} from {a} to {b}" for name, a, b in pairs if a != b]
    summary = "; ".join(f"{label}: {', '.join(map(str, values))}" for label, values, _ in lines)
    return st.finish(fig, alt=f"{summary}. Repaired: {', '.join(repaired) or 'nothing'}.")


def fig_population(space: CubeSpace, costs: Floats, log: Sequence[People]) -> st.LabFigure:
    """Draw three generations of `log` over the landscape `costs` of a whole space, and all costs.

    Maps: cores across, width n of the tile up; the darker a cell, the cheaper its cheapest tiling;
    white is not legal. Dots are points, at random places in their cell, the star the best one.
    Below: every point of every generation, relative to the least of `costs`, and how
    many tilings of the space are cheaper.
    """
    fig, _ = st.new_figure(height_in=4.4)
    fig.clear()
    grid = fig.add_gridspec(2, 3, height_ratios=(1.0, 1.15))
    least_cost = float(costs.min())
    alt_parts = []
    for i, number in enumerate((0, len(log) // 3, len(log) - 1)):
        ax = fig.add_subplot(grid[0, i])
        people = log[number]
        _draw_map(ax, space, costs, people, first=i == 0)
        ax.set_title(f"generation {number}", loc="left")
        best = people[0][0] / least_cost
        median = float(np.median([c for c, _ in people])) / least_cost
        count = f"{len({p for _, p in people})} different points"
        alt_parts.append(f"generation {number}: best {best:.3f}, median {median:.2f}, {count}")
    _draw_cloud(fig.add_subplot(grid[1, :]), costs, log, least_cost)
    summary = "; ".join(alt_parts)
    marks = ", ".join(f"{name} {np.quantile(costs, s) / least_cost:.2f}" for s, name in SHARES)
    alt = f"Costs relative to the best of {len(costs):,} tilings. {summary}. Cheapest shares of the"
    return st.finish(fig, alt=f"{alt} space end at: {marks}.")


def _draw_map(ax: Any, space: CubeSpace, costs: Floats, people: People, *, first: bool) -> None:
    """Draw the least cost for each number of cores and width of tile, and where people are."""
    cores = space.genes["rows"] * space.genes["cols"]
    tile_widths = space.genes["n"]
    xs, x = np.unique(cores, return_inverse=True)
    ys, y = np.unique(tile_widths, return_inverse=True)
    cells = np.full((len(ys), len(xs)), np.inf)
    np.minimum.at(cells, (y, x), np.log(costs))
    cells[np.isinf(cells)] = np.nan
    ax.pcolormesh(cells, cmap="Blues_r", vmin=np.nanmin(cells) - 0.6, vmax=np.nanmax(cells) + 0.3)
    rng = np.random.default_rng(0)
    rows = [space.row(point) for _, point in people]
    best = rows[0]
    shift = rng.uniform(0.2, 0.8, (2, len(rows)))
    ax.scatter(x[rows] + shift[0], y[rows] + shift[1], s=15, c=st.ORANGE, ec=st.INK, lw=0.5)
    ax.scatter(x[best] + 0.5, y[best] + 0.5, s=80, c=st.VERMILLION, marker="*", ec=st.INK, lw=0.6)
    step = max(1, len(xs) // 6)
    ax.set_xticks(np.arange(len(xs))[::step] + 0.5, [str(v) for v in xs[::step]])
    ax.set_yticks(np.arange(len(ys)) + 0.5, [str(v) if first else "" for v in ys], fontsize=6)
    ax.set_xlabel("cores")
    ax.tick_params(length=0)
    if first:
        ax.set_ylabel("n (fractals)")


def _draw_cloud(ax: Any, costs: Floats, log: Sequence[People], least: float) -> None:
    """Draw every point of every generation: blue in its first one, light in later ones."""
    for share, name in SHARES:
        level = float(np.quantile(costs, share)) / least
        ax.axhline(level, color=st.GREY, ls=(0, (3, 2)), lw=0.8)
        ax.text(len(log) - 0.4, level, f"{name} are cheaper", fontsize=7, va="bottom", color=st.INK)
    rng = np.random.default_rng(0)
    earlier_points = set[Point]()
    for number, people in enumerate(log):
        ratios = np.array([cost / least for cost, _ in people])
        is_new = np.array([point not in earlier_points for _, point in people])
        earlier_points |= {point for _, point in people}
        x = number + rng.uniform(-0.25, 0.25, len(ratios))
        for drawn, colour in ((~is_new, st.LIGHT), (is_new, st.BLUE)):
            ax.scatter(x[drawn], ratios[drawn], s=11, c=colour, ec=st.INK, lw=0.3)
    ax.plot(range(len(log)), [people[0][0] / least for people in log], color=st.GREEN, lw=1.4)
    ax.axhline(1.0, color=st.INK, lw=0.8)
    ax.set_yscale("log")
    top = max(2.0, float(np.quantile(costs, 0.6)) / least)
    ax.set(ylim=(0.97, top * 1.3), xlim=(-0.6, max(len(log), 4) * 1.2), xlabel="generation")
    st.numbered(ax.yaxis, [t for t in (1, 1.2, 1.5, 2, 3, 5, 8, 16) if t < top * 1.3])
    ax.set_ylabel("cycles / best")


def fig_evolution(
    space: CubeSpace,
    costs: Floats,
    mutation: float = 0.3,
    keep: int = 4,
    size: int = 20,
    seed: int = 0,
    budget: int = 200,
) -> st.LabFigure:
    """Run the simple genetic search on a table of costs and draw it as `fig_population`."""
    search = SimpleGenetic(size, keep, mutation)
    drive(search, space, lambda p: float(costs[space.row(p)]), budget, seed=seed)
    return fig_population(space, costs, search.log)


def fig_anytime(
    curves: Mapping[str, Floats], lines: Mapping[str, float] | None = None
) -> st.LabFigure:
    """Draw best cost so far over trials: median and quartiles over seeds, one row a seed.

    `lines` are levels to mark.
    """
    fig, ax = st.new_figure(height_in=2.9)
    alt_parts = []
    colours = (st.BLUE, st.VERMILLION, st.PURPLE, st.GREEN, st.ORANGE)
    dashes = ("-", "--", "-.", ":", "-")
    for (name, rows), colour, dash in zip(curves.items(), colours, dashes, strict=False):
        low, middle, high = np.quantile(rows, (0.25, 0.5, 0.75), axis=0)
        x = np.arange(1, rows.shape[1] + 1)
        ax.plot(x, middle, color=colour, ls=dash, label=name)
        ax.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        named_trials = [i for i in (49, 99, 199) if i < len(x)] or [len(x) - 1]
        medians = ", ".join(f"{middle[i]:.3f} after {i + 1}" for i in named_trials)
        alt_parts.append(f"{name} {medians}")
    for name, level in (lines or {}).items():
        ax.axhline(level, color=st.GREY, lw=1, ls=(0, (3, 2)))
        ax.text(1.01 * ax.get_xlim()[1], level, name, va="center", fontsize=8)
        alt_parts.append(f"{name} at {level:.3f}")
    ax.set_yscale("log")
    top = float(max(np.quantile(rows[:, 9 % rows.shape[1]], 0.75) for rows in curves.values()))
    ax.set(xlabel="trials", ylabel="best so far / best of all", ylim=(0.98, max(top, 1.1)))
    st.numbered(ax.yaxis, [t for t in (1, 1.05, 1.1, 1.2, 1.5, 2, 3) if t < max(top, 1.1)])
    ax.legend(loc="upper right")
    count = len(next(iter(curves.values())))
    return st.finish(fig, alt=f"Medians over {count} seeds, best so far: {'; '.join(alt_parts)}.")
