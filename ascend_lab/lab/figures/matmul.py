"""Figures of matrix products: blocks, useful work, traffic by tile, what fits, rooflines."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon
from matplotlib.ticker import NullFormatter, NullLocator

from ascend_lab import errors
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.machines import roofline as rf
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import Timeline, simulate
from ascend_lab.operators import kernels

OPERANDS: Mapping[str, Mapping[str, Any]] = {
    "A": {"facecolor": st.SKY, "hatch": "\\\\\\", "edgecolor": st.INK},
    "B": {"facecolor": st.ORANGE, "hatch": "///", "edgecolor": st.INK},
    "C": {"facecolor": st.LIGHT, "hatch": "", "edgecolor": st.INK},
}
"""How the three matrices look in every figure of the chapter."""
SIZE = 4096
"""Sides of the matmul whose tiles are drawn."""
STAYS = {"k": "C", "n": "A", "m": "B"}
"""The operand that does not depend on a loop stays while that loop runs innermost."""
LINES = ((st.BLUE, "-", "o"), (st.VERMILLION, "--", "s"), (st.GREEN, "-.", "^"))
OVERFULL = {"facecolor": st.VERMILLION, "hatch": "xxx", "edgecolor": st.INK}
FITS = {"facecolor": st.SKY, "hatch": "", "edgecolor": st.INK}


def fig_blocks() -> st.LabFigure:
    """Draw 16^3 multiply-adds as one block, and cut into smaller cubes pulled apart."""
    side = 16
    cuts = (1, 4)
    fig, axes = st.new_figure(ncols=len(cuts), height_in=2.9)
    facts = []
    for ax, cut in zip(st.panels(axes), cuts, strict=True):
        small = side // cut
        step = side / cut * (1.0 if cut == 1 else 1.3)
        back_to_front = range(
            cut - 1, -1, -1
        )  # m runs down, n to the right, k away from the reader
        for depth, row, column in product(back_to_front, back_to_front, range(cut)):
            _cube(ax, (column * step, row * step, depth * step), side / cut)
        total_side = (cut - 1) * step + side / cut
        ax.set(
            xlim=(-0.3, total_side * 1.5 + 0.5), ylim=(-0.5, total_side * 1.5 + 0.5), aspect="equal"
        )
        ax.axis("off")
        if cut == 1:
            for letter, x, y in (("n", 0.52, -0.01), ("m", -0.02, 0.5), ("k", 1.27, 0.12)):
                ax.text(x * side, y * side, letter, ha="right", va="top", style="italic")
        numbers = 2 * cut**3 * small**2
        unit = "block" if cut == 1 else "blocks"
        ax.set_title(f"{cut**3} {unit} of {small} × {small} × {small}")
        text = f"{side**3:,} MACs, {numbers:,} numbers of A and B"
        place = ax.transAxes
        st.put(ax, 0.5, -0.1, text, va="top", transform=place, fontsize=8.5)
        verb = "takes" if cut == 1 else "take"
        facts.append(f"{cut**3} {unit} of side {small} {verb} {numbers} numbers of A and B")
    st.key(fig, OPERANDS, loc="outside right center")
    alt = f"{side**3} multiply-adds drawn as cubes whose faces are the operands: "
    return st.finish(fig, alt=alt + "; ".join(facts) + ".")


def _cube(ax: Any, corner: tuple[float, float, float], size: float) -> None:
    """Draw a cube in cabinet projection: depth goes up and to the right."""
    x, y, z = corner
    for name, points in {
        "C": ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)),  # front: m x n
        "B": ((0, 1, 0), (1, 1, 0), (1, 1, 1), (0, 1, 1)),  # top: k x n
        "A": ((1, 0, 0), (1, 0, 1), (1, 1, 1), (1, 1, 0)),  # right: m x k
    }.items():
        corners = [(x + a * size, y + b * size, z + c * size) for a, b, c in points]
        flat = [(right + 0.45 * deep, up + 0.4 * deep) for right, up, deep in corners]
        ax.add_patch(Polygon(flat, closed=True, linewidth=0.6, **OPERANDS[name]))


def fig_useful_share(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> st.LabFigure:
    """Draw the useful share of the cube's work (0 to 1) for sizes 1, 2, 3, ...; one panel each.

    `panels` maps a panel's title to its curves, a curve's name to its shares.
    """
    fig, axes = st.new_figure(ncols=len(panels), height_in=2.7, sharey=True)
    facts = []
    for ax, (title, curves) in zip(st.panels(axes), panels.items(), strict=True):
        looks = zip(LINES, (8, 5, 3), curves.items(), strict=False)
        for (colour, style, marker), dot, (name, shares) in looks:
            sizes = np.arange(1, len(shares) + 1)
            percent = 100 * np.asarray(shares)
            full_places = np.flatnonzero(percent > 100 - 1e-9)
            ax.plot(sizes, percent, color=colour, linestyle=style, label=name, linewidth=1.4)
            ax.plot(
                sizes[full_places],
                percent[full_places],
                marker,
                color=colour,
                mec=st.INK,
                mew=0.7,
                ms=dot,
            )
            summary = ", ".join(f"{percent[at - 1]:.0f}% at {at}" for at in (1, 17, 48))
            facts.append(
                f"{title}, {name}: {summary}; full at {', '.join(map(str, sizes[full_places][:4]))}"
            )
        ax.set(title=title, xlim=(0, len(sizes) + 1), ylim=(0, 108), xticks=range(0, 65, 16))
        ax.grid(axis="y")
        ax.legend(loc="lower right")
        ax.set_xlabel("size")
    st.panels(axes)[0].set_ylabel("useful share of the MACs, %")
    return st.finish(fig, alt="Useful share of multiply-adds. " + ". ".join(facts) + ".")


def fig_traffic(
    by_tile: Mapping[tuple[int, int], Mapping[str, float]],
    by_order: Mapping[str, Mapping[str, float]],
) -> st.LabFigure:
    """Draw bytes of A, B and C stacked: against the tile (m, n), and against the loop order.

    `by_order` has keys like "mnk", outer to inner loop. Every bar is the bytes of "A", "B", "C".
    """
    tiles = {f"{m} ×\n{n}": parts for (m, n), parts in by_tile.items()}
    orders = {f"{' '.join(o)}\n{STAYS[o[-1]]} stays": parts for o, parts in by_order.items()}
    ratio = [len(tiles), 1.25 * len(orders)]
    fig, (left, right) = st.new_figure(ncols=2, height_in=3.1, width_ratios=ratio)
    facts = []
    panels = (left, tiles, "tile of C, m × n"), (right, orders, "loops, outer to inner")
    for ax, bars, label in panels:
        totals = [sum(parts.values()) for parts in bars.values()]
        for x, (parts, total) in enumerate(zip(bars.values(), totals, strict=True)):
            bottom = 0.0
            for operand, size in parts.items():
                look = {"width": 0.72, "linewidth": 0.6, **OPERANDS[operand]}
                ax.bar(x, 1e-9 * size, bottom=1e-9 * bottom, **look)
                bottom += size
            ax.text(x, 1e-9 * total, f"{1e-9 * total:.2f}", ha="center", va="bottom", fontsize=8)
        ax.set_xticks(range(len(bars)), list(bars))
        ax.set(xlabel=label, ymargin=0.1)
        ax.tick_params(axis="x", length=0)
        for name, total in zip(bars, totals, strict=True):
            summary = ", ".join(f"{x} {1e-9 * b:.2f}" for x, b in bars[name].items())
            facts.append(f"{' '.join(name.split())}: {1e-9 * total:.2f} GB ({summary})")
    left.set(title="the sums stay: which tile?", ylabel="GB moved")
    right.set_title("one tile: what stays?")
    st.key(left, OPERANDS, loc="upper center", ncols=3)
    return st.finish(fig, alt="Bytes moved, A, B and C stacked. " + "; ".join(facts) + ".")


def fig_tile_fit(
    tile_m: int = 128,
    tile_n: int = 256,
    tile_k: int = 64,
    step_k: int = 4,
    chip_name: str = "Ascend910A",
) -> st.LabFigure:
    """Draw what a tile needs of each buffer, red and hatched beyond its size, and how it runs.

    On the right a matmul of 4096 cubed is simulated with the tile: share of the time that each
    pipe of the busiest core works.
    """
    chip = load_chip(chip_name)
    shape = kernels.GemmShape(SIZE, SIZE, SIZE, "fp16", "fp16")
    schedule = kernels.GemmSchedule(tile_m, tile_k, tile_n, step_k, *squarest_grid(chip))
    needs = kernels.tile_bytes(shape, schedule)
    fig, (left, right) = st.new_figure(ncols=2, height_in=2.5, width_ratios=(1.15, 1))
    overflowing = _capacity_bars(left, chip, needs)
    run = None
    try:
        run = simulate(kernels.gemm_launch(shape, chip, schedule), chip)
    except errors.CapacityError:
        text = f"does not fit:\n{', '.join(overflowing)}"
        big = {"fontsize": 11, "fontweight": "bold"}
        st.put(right, 0.5, 0.5, text, transform=right.transAxes, **big)
        right.axis("off")
    summary = _pipe_bars(right, run) if run else f"it does not fit in {', '.join(overflowing)}"
    fig.suptitle(f"{chip.name}, tile {tile_m} × {tile_n}, {tile_k} deep, {step_k} a stage")
    fill_text = ", ".join(f"{b} {100 * n / chip.buffers[b]:.0f}%" for b, n in needs.items())
    alt = f"Tile {tile_m} x {tile_n} x {tile_k} on {chip.name}: {fill_text}; {summary}."
    return st.finish(fig, alt=alt)


def squarest_grid(chip: Chip) -> tuple[int, int]:
    """Return the rows and columns of the squarest grid of all cores."""
    rows = [r for r in range(1, chip.core_count + 1) if chip.core_count % r == 0]
    best = max(r for r in rows if r * r <= chip.core_count)
    return best, chip.core_count // best


def _capacity_bars(ax: Any, chip: Chip, needs: Mapping[str, int]) -> list[str]:
    """Draw one bar for each buffer in percent of its size; return the buffers that overflow."""
    overflowing = []
    for row, (buffer, size) in enumerate(needs.items()):
        percent = 100 * size / chip.buffers[buffer]
        ax.barh(row, min(percent, 100), height=0.62, linewidth=0.6, **FITS)
        if percent > 100:
            overflowing.append(buffer)
            ax.barh(row, min(percent, 240) - 100, left=100, height=0.62, linewidth=0.6, **OVERFULL)
        text = f"{size / 1024:g} of {chip.buffers[buffer] // 1024} KiB"
        ax.text(max(105, min(percent, 240) + 5), row, text, va="center", fontsize=8)
    ax.axvline(100, color=st.INK, linestyle="-", linewidth=1.4)
    ax.set_yticks(range(len(needs)), list(needs))
    ax.set(xlim=(0, 345), ylim=(len(needs) - 0.4, -0.6), xlabel="% of the buffer")
    ax.set(xticks=[0, 50, 100, 200], title="what it needs")
    return overflowing


def _pipe_bars(ax: Any, run: Timeline) -> str:
    """Draw how much of the time each pipe works; return it in words."""
    shown = [p for p in ("M", "MTE1", "MTE2", "FIX", "V", "MTE3") if p in run.busy_cycles]
    for row, pipe in enumerate(shown):
        percent = 100 * run.busy[pipe]
        ax.barh(row, percent, height=0.62, **st.PIPE_STYLE[pipe].patch_args())
        ax.text(percent + 2, row, f"{percent:.0f}%", va="center", fontsize=8)
    ax.set(xlim=(0, 118), ylim=(len(shown) - 0.4, -0.6), xlabel="% of the time at work")
    ax.set_yticks(range(len(shown)), shown)
    ax.set_title(f"how it runs: {run.peak_share:.0%} of the peak")
    busy = ", ".join(f"{p} {run.busy[p]:.0%}" for p in shown)
    return f"it reaches {run.peak_share:.0%} of the peak, pipes at work {busy}"


def fig_rule(
    estimates: Mapping[str, np.ndarray], simulated: Mapping[str, np.ndarray]
) -> st.LabFigure:
    """Draw, per problem, the rule's estimate of every tiling against its simulated cycles."""
    fig, axes = st.new_figure(ncols=len(estimates), height_in=3.0)
    facts = []
    for ax, (title, guess) in zip(st.panels(axes), estimates.items(), strict=True):
        real = simulated[title]
        chosen = int(np.argmin(guess))
        best = int(np.argmin(real))
        low = 0.85 * min(guess.min(), real.min())
        high = 1.2 * max(guess.max(), real.max())
        ax.plot([low, high], [low, high], color=st.INK, linestyle="-", linewidth=0.8)
        ax.plot(real, guess, ".", color=st.GREY, markersize=3, alpha=0.6, label="a tiling")
        look = {"mec": st.INK, "mew": 0.9, "linestyle": "none"}
        ax.plot(real[best], guess[best], "D", color=st.GREEN, ms=8, label="fastest", **look)
        look |= {"color": st.VERMILLION, "label": "the rule's"}
        ax.plot(real[chosen], guess[chosen], "o", ms=6, **look)
        ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
        loss = real[chosen] / real[best]
        ticks = [a * 10**b for b in range(3, 9) for a in (1, 2, 5) if low < a * 10**b < high]
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks(ticks, labels=[f"{tick / 1000:g}k" for tick in ticks])
        ax.minorticks_off()
        ax.set_title(f"{title}: {loss:.2f} × the fastest", fontsize=8.5)
        ax.set_xlabel("simulated cycles")
        facts.append(
            f"{title}: {len(real)} tilings from {real.min()} to {real.max()} cycles; the rule's "
            f"choice takes {real[chosen]}, {loss:.2f} times the fastest"
        )
    st.panels(axes)[0].set_ylabel("estimated cycles")
    st.panels(axes)[0].legend(loc="upper left")
    return st.finish(fig, alt="Estimate against simulation. " + ". ".join(facts) + ".")


# -- one roofline per level of memory, and tiles under them ----------------------------------------
# The wires of a level have the colour of the pipe that works them; no pipe works those of memory.
LOOK = {rf.INTO_L0: (st.SKY, "-"), rf.INTO_L1: (st.BLUE, "--"), rf.INTO_L2: (st.INK, "-.")}
MARKERS = "osD^vP"
WIDGET_XLIM = (4.0, 2000.0)


def fig_tile_sides() -> st.LabFigure:
    """Draw tiles of C to scale with the slices of A and B that one step of k brings in."""
    tiles = ((16, 256), (64, 64))
    fig, axes = st.new_figure(ncols=len(tiles), height_in=1.75)
    facts = []
    gap = 8
    thick = 8
    tallest = max(m for m, _ in tiles)
    for ax, (m, n) in zip(st.panels(axes), tiles, strict=True):
        st.box(ax, 0, 0, n, m, **OPERANDS["C"])
        st.box(ax, -gap - thick, 0, thick, m, **OPERANDS["A"])
        st.box(ax, 0, -gap - thick, n, thick, **OPERANDS["B"])
        ax.text(n / 2, m + 4, f"C: {m} × {n}", ha="center", va="top", fontsize=8)
        ax.text(n / 2, -gap - thick - 4, f"B: {n}", ha="center", va="bottom", fontsize=8)
        ax.text(-gap - thick - 4, m / 2, f"A: {m}", ha="right", va="center", fontsize=8)
        ax.set(xlim=(-60, 262), ylim=(tallest + 24, -38), aspect="equal")
        ax.axis("off")
        macs_per_element = f"{m * n / (m + n):.3g}"
        ax.set_title(f"{m * n} MACs from {m + n} elements: {macs_per_element} each", fontsize=8.5)
        work_text = f"A tile of {m} x {n} does {m * n} multiply-accumulates per step of k from "
        facts.append(f"{work_text}{m} + {n} = {m + n} loaded elements, {macs_per_element} for each")
    return st.finish(fig, alt=". ".join(facts) + ".")


def fig_nested_rooflines(
    timelines: Mapping[str, Timeline], xlim: tuple[float, float] | None = None
) -> st.LabFigure:
    """Draw one roofline per level side by side; each program is a dot in each, at one height.

    The heavy line is the level's roof. Into L0 it is a band: A and B have paths of different rates
    and a program's mix of them decides; the line is an equal mix. The thin upright line is what a
    program misses of its roof. `xlim`: the operations per byte shown; default: those of all dots
    and ridges.
    """
    runs = list(timelines.values())
    chip = runs[0].chip
    peak = chip.peak_ops_per_s(runs[0].dtype)
    dots = [rf.level_dot(name, run) for name, run in timelines.items()]
    roofs = [rf.levels_of(run) for run in runs]
    fig, axes = st.new_figure(ncols=3, height_in=3.4, sharex=True, sharey=True)
    reach = [dot.ops_per_byte(name) for dot in dots for name in LOOK]
    reach += [rf.ridge_point(peak, level) for level in rf.chip_levels(chip)]
    low, high = xlim or (min(reach) / 2, max(reach) * 2)
    for number, ax in enumerate(axes):
        _draw_roof(ax, np.geomspace(low, high, 300), peak, chip, number)
        for dot, levels, marker in zip(dots, roofs, MARKERS * 4, strict=False):
            level = levels[number]
            height = 100 * dot.ops_per_s / peak
            x = dot.ops_per_byte(level.name)
            roof = 100 * rf.attainable(x, peak, level) / peak  # of the program's own mix
            ax.plot([x, x], [height, roof], color=st.INK, linestyle="-", lw=0.9, zorder=3)
            colour = LOOK[level.name][0]
            ax.plot(x, height, marker, color=colour, ms=7, mec=st.INK, mew=0.9, zorder=4)
    lowest = min(100 * dot.ops_per_s / peak for dot in dots)
    axes[0].set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(lowest / 1.6, 8), 140))
    axes[0].set_ylabel("share of cube peak")
    axes[1].set_xlabel("operations per byte that crosses the level")
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes[0].set_yticks([5, 10, 20, 50, 100], ["5%", "10%", "20%", "50%", "100%"])
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].set_xticks([10, 100, 1000], ["10", "100", "1000"])
    axes[0].set_xlim(low, high)  # ticks outside would widen it
    look: dict[str, Any] = {"linestyle": "none", "mfc": "#FFFFFF", "mec": st.INK, "ms": 7}
    pairs = zip(dots, MARKERS * 4, strict=False)
    marks = [Line2D([], [], marker=mark, label=dot.name, **look) for dot, mark in pairs]
    fig.legend(handles=marks, loc="outside lower center", ncols=2)
    return st.finish(fig, alt=_roof_alt(chip, peak, dots, roofs))


def _draw_roof(ax: Any, x: Any, peak: float, chip: Chip, number: int) -> None:
    """Draw the roof of one level of a chip, and shade its compute side."""
    level = rf.chip_levels(chip)[number]
    y = 100 * np.minimum(1.0, x * level.rate_bytes_per_s / peak)
    colour, style = LOOK[level.name]
    ridge = rf.ridge_point(peak, level)
    ax.plot(x, y, color=colour, linestyle=style, linewidth=2.2, zorder=2)
    ax.axvspan(ridge, x[-1], color=st.LIGHT, alpha=0.6, zorder=0)
    ax.set_title(f"{level.name}: ridge {ridge:.3g}", fontsize=8.5)
    if level.name == rf.INTO_L0:
        sides = [rf.chip_levels(chip, share_of_a=share)[0] for share in (0.0, 1.0)]
        a, b = (100 * np.minimum(1.0, x * side.rate_bytes_per_s / peak) for side in sides)
        ax.fill_between(x, a, b, color=st.SKY, alpha=0.35, linewidth=0, zorder=1)


def _roof_alt(
    chip: Chip, peak: float, dots: Sequence[rf.Dot], roofs: Sequence[Sequence[rf.Level]]
) -> str:
    """Return where each program stands under each roof, in words."""
    text = f"Three log-log rooflines of {chip.name}, share of cube peak over operations per byte."
    for dot, levels in zip(dots, roofs, strict=True):
        places = []
        for level in levels:
            ops_per_byte = dot.ops_per_byte(level.name)
            ridge = rf.ridge_point(peak, level)
            side = "right" if ops_per_byte > ridge else "left"
            places.append(f"{ops_per_byte:.3g} at {level.name}, {side} of its ridge {ridge:.3g}")
        text += f" {dot.name} reaches {dot.ops_per_s / peak:.0%} of peak: {'; '.join(places)}."
    return text


def fig_tile_roofline(
    tile_m: int = 64, tile_n: int = 64, chip_name: str = "Ascend910A"
) -> st.LabFigure:
    """Simulate C = A @ B, 4096 cubed, with tiles of tile_m x tile_n under the three roofs."""
    chip = load_chip(chip_name)
    # all cores in the squarest grid, tiles as deep in k as L0 allows, deepest L1 stage
    room = min(chip.buffers["L0A"] // tile_m, chip.buffers["L0B"] // tile_n) // 4
    depth = min(256, max(16, room // 16 * 16))
    shape = kernels.GemmShape(SIZE, SIZE, SIZE, "fp16", "fp16")
    grid = squarest_grid(chip)
    choices = [kernels.GemmSchedule(tile_m, depth, tile_n, step, *grid) for step in range(8, 0, -1)]
    fits = [s for s in choices if kernels.tile_bytes(shape, s)["L1"] <= chip.buffers["L1"]]
    run = simulate(kernels.gemm_launch(shape, chip, fits[0] if fits else choices[-1]), chip)
    return fig_nested_rooflines({f"{SIZE} cubed in tiles of {tile_m} × {tile_n}": run}, WIDGET_XLIM)
