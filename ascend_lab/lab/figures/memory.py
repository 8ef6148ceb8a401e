"""Figures of chapter 3: tile sides, one roofline per level, sharing, L2 residency, energy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from ascend_lab.chip import Chip, load_chip
from ascend_lab.kernels import GemmSchedule, GemmShape, gemm_launch, tile_bytes
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.figures.matmul import squarest_grid
from ascend_lab.lab.machines import roofline as rf
from ascend_lab.sim import Timeline, simulate

LOOK = {rf.INTO_L0: (st.BLUE, "-"), rf.INTO_L1: (st.VERMILLION, "--"), rf.INTO_L2: (st.GREEN, "-.")}
MARKERS = "osD^vP"
WIDGET_XLIM = (4.0, 2000.0)


@st.styled
def fig_tile_sides(tiles: Sequence[tuple[int, int]] = ((16, 256), (64, 64))) -> st.LabFigure:
    """Draw tiles of C to scale with the slices of A and B that one step of k brings in."""
    fig, axes = st.new_figure(ncols=len(tiles), height_in=1.75)
    facts = []
    gap, thick = 8, 8
    tallest = max(m for m, _ in tiles)
    for ax, (m, n) in zip(st.panels(axes), tiles, strict=True):
        parts = (
            ((0, 0), n, m, st.LIGHT, ""),
            ((-gap - thick, 0), thick, m, st.SKY, "\\\\\\"),
            ((0, -gap - thick), n, thick, st.ORANGE, "///"),
        )
        for corner, width, height, colour, hatch in parts:
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": st.INK}
            st.box(ax, *corner, width, height, **look)
        ax.text(n / 2, m + 4, f"C: {m} × {n}", ha="center", va="top", fontsize=8)
        ax.text(n / 2, -gap - thick - 4, f"B: {n}", ha="center", va="bottom", fontsize=8)
        ax.text(-gap - thick - 4, m / 2, f"A: {m}", ha="right", va="center", fontsize=8)
        ax.set(xlim=(-60, 262), ylim=(tallest + 24, -38), aspect="equal")
        ax.axis("off")
        each = f"{m * n / (m + n):.3g}"
        ax.set_title(f"{m * n} MACs from {m + n} elements: {each} each", fontsize=8.5)
        facts.append(
            f"A tile of {m} x {n} does {m * n} multiply-accumulates per step of k from "
            f"{m} + {n} = {m + n} loaded elements, {each} for each"
        )
    return st.finish(fig, alt=". ".join(facts) + ".")


@st.styled
def fig_nested_rooflines(timelines: Mapping[str, Timeline]) -> st.LabFigure:
    """Draw one roofline per level side by side; each program is a dot in each, at one height.

    The heavy line is the level's own roof, the thin grey ones are the other levels'. Into L0 the
    roof is a band: A and B have paths of different rates and a program's mix of them decides; the
    line is an equal mix. The thin upright line is what a program misses of its roof.
    """
    return _nested(timelines, None)


def _nested(timelines: Mapping[str, Timeline], xlim: tuple[float, float] | None) -> st.LabFigure:
    runs = list(timelines.values())
    if not runs or any(run.chip != runs[0].chip for run in runs):
        raise st.FigureError(
            "rooflines need at least one timeline, all of one chip", str(len(runs))
        )
    chip = runs[0].chip
    peak = chip.peak_ops_per_s(runs[0].dtype)
    dots = [rf.level_dot(name, run) for name, run in timelines.items()]
    roofs = [rf.levels_of(run) for run in runs]
    fig, axes = st.new_figure(ncols=3, height_in=3.4, sharex=True, sharey=True)
    reach = [dot.ops_per_byte(name) for dot in dots for name in LOOK]
    reach += [rf.ridge_point(peak, level) for level in rf.chip_levels(chip)]
    low, high = xlim or (min(reach) / 2, max(reach) * 2)
    for number, ax in enumerate(axes):
        _draw_roofs(ax, np.geomspace(low, high, 300), peak, chip, number)
        for dot, own, marker in zip(dots, roofs, MARKERS * 4, strict=False):
            _draw_dot(ax, dot, peak, own[number], marker)
    lowest = min(100 * dot.ops_per_s / peak for dot in dots)
    axes[0].set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(lowest / 1.6, 8), 140))
    axes[0].set_ylabel("share of cube peak")
    axes[1].set_xlabel("operations per byte that crosses the level")
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes[0].set_yticks([5, 10, 20, 50, 100], ["5%", "10%", "20%", "50%", "100%"])
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].set_xticks([10, 100, 1000], ["10", "100", "1000"])
    look: dict[str, Any] = {"linestyle": "none", "mfc": "#FFFFFF", "mec": st.INK, "ms": 7}
    pairs = zip(dots, MARKERS * 4, strict=False)
    marks = [Line2D([], [], marker=mark, label=dot.name, **look) for dot, mark in pairs]
    fig.legend(handles=marks, loc="outside lower center", ncols=2)
    return st.finish(fig, alt=_roof_alt(chip, peak, dots, roofs))


def _draw_dot(ax: Any, dot: rf.Dot, peak: float, level: rf.Level, marker: str) -> None:
    """Draw the dot and the line up to the roof that this program has at this level."""
    at, height = dot.ops_per_byte(level.name), 100 * dot.ops_per_s / peak
    roof = 100 * rf.attainable(at, peak, level) / peak
    ax.plot([at, at], [height, roof], color=st.INK, linestyle="-", linewidth=0.9, zorder=3)
    ax.plot(at, height, marker, color=LOOK[level.name][0], ms=7, mec=st.INK, mew=0.9, zorder=4)


def _draw_roofs(ax: Any, x: Any, peak: float, chip: Chip, own: int) -> None:
    """Draw the roof of one level heavily, the others thinly, and shade its compute side."""
    for number, level in enumerate(rf.chip_levels(chip)):
        y = 100 * np.minimum(1.0, x * level.rate_bytes_per_s / peak)
        colour, style = LOOK[level.name]
        if number != own:
            ax.plot(x, y, color=st.GREY, linestyle=style, linewidth=0.8, zorder=1)
            continue
        ridge = rf.ridge_point(peak, level)
        ax.plot(x, y, color=colour, linestyle=style, linewidth=2.2, zorder=2)
        ax.axvspan(ridge, x[-1], color=st.LIGHT, alpha=0.6, zorder=0)
        ax.set_title(f"{level.name}: ridge {ridge:.3g}", fontsize=8.5)
    if own == 0:
        sides = [rf.chip_levels(chip, share_of_a=share)[0] for share in (0.0, 1.0)]
        a, b = (100 * np.minimum(1.0, x * side.rate_bytes_per_s / peak) for side in sides)
        ax.fill_between(x, a, b, color=st.SKY, alpha=0.35, linewidth=0, zorder=1)


def _roof_alt(
    chip: Chip, peak: float, dots: Sequence[rf.Dot], roofs: Sequence[Sequence[rf.Level]]
) -> str:
    text = f"Three log-log rooflines of {chip.name}, share of cube peak over operations per byte."
    for dot, own in zip(dots, roofs, strict=True):
        places = []
        for level in own:
            at, ridge = dot.ops_per_byte(level.name), rf.ridge_point(peak, level)
            side = "right" if at > ridge else "left"
            places.append(f"{at:.3g} at {level.name}, {side} of its ridge {ridge:.3g}")
        text += f" {dot.name} reaches {dot.ops_per_s / peak:.0%} of peak: {'; '.join(places)}."
    return text


@st.styled
def fig_tile_roofline(
    tile_m: int = 64, tile_n: int = 64, chip_name: str = "Ascend910A", size: int = 4096
) -> st.LabFigure:
    """Simulate C = A @ B, `size` cubed, with tiles of tile_m x tile_n under the three roofs.

    Raises `CapacityError` for a tile that overflows a buffer, `InputError` for sides that are no
    multiples of 16.
    """
    run = _tiled_matmul(load_chip(chip_name), size, tile_m, tile_n)
    return _nested({f"{size} cubed in tiles of {tile_m} × {tile_n}": run}, WIDGET_XLIM)


def _tiled_matmul(chip: Chip, size: int, tile_m: int, tile_n: int) -> Timeline:
    """All cores in the squarest grid, tiles as deep in k as L0 allows, deepest L1 stage."""
    room = min(chip.buffers["L0A"] // tile_m, chip.buffers["L0B"] // tile_n) // 4
    depth = min(256, max(16, room // 16 * 16))
    shape = GemmShape(size, size, size, "fp16", "fp16")
    grid = squarest_grid(chip)
    choices = [GemmSchedule(tile_m, depth, tile_n, step, *grid) for step in range(8, 0, -1)]
    fits = [s for s in choices if tile_bytes(shape, s)["L1"] <= chip.buffers["L1"]]
    return simulate(gemm_launch(shape, chip, fits[0] if fits else choices[-1]), chip)


@st.styled
def fig_sharing(
    chip: Chip, cores: Sequence[int], memory_rates: Sequence[float], l2_rates: Sequence[float]
) -> st.LabFigure:
    """Draw the total rate n cores read with: marks measured, lines n * min(port, shared / n).

    Rates in bytes/cycle of all cores together.
    """
    fig, ax = st.new_figure(height_in=2.8)
    port = chip.path("GM", "UB").rate_bytes_per_cycle
    n = np.arange(1, max(cores) + 1)
    series = (
        ("later touches, from L2", "L2", l2_rates, st.VERMILLION, "s", "--"),
        ("first touch, from memory", "memory", memory_rates, st.GREEN, "o", "-."),
    )
    facts = []
    for label, level, rates, colour, marker, style in series:
        shared = chip.shared_rate_bytes_per_cycle(level, 1)
        ax.plot(n, np.minimum(n * port, shared), color=colour, linestyle=style, linewidth=1.2)
        ax.plot(cores, rates, marker, color=colour, markeredgecolor=st.INK, mew=0.8, label=label)
        facts.append(
            f"{label}: {rates[0]:.0f} bytes per cycle with {cores[0]} core, "
            f"{rates[-1]:.0f} with {cores[-1]}, where the formula gives "
            f"{min(cores[-1] * port, shared):.0f}"
        )
    ax.set(xlabel="cores that read at once", ylabel="bytes per cycle, all cores")
    ax.set(xlim=(0, max(cores) + 1), ylim=(0, None))
    ax.grid(axis="y")
    ax.legend(loc="upper left")
    return st.finish(fig, alt=f"Read rate of {chip.name}. " + "; ".join(facts) + ".")


@st.styled
def fig_working_set(sides: Sequence[int], runs: Sequence[Timeline]) -> st.LabFigure:
    """Draw memory traffic and share of peak of a layer against the side of its square weights."""
    if len(sides) != len(runs) or not runs:
        raise st.FigureError("one timeline per side", f"{len(sides)} and {len(runs)}", "pair them")
    chip = runs[0].chip
    fig, (upper, lower) = st.new_figure(nrows=2, height_in=3.6, sharex=True)
    edge = (chip.l2.size_bytes / 2) ** 0.5
    traffic = [run.memory_bytes / 1e6 for run in runs]
    asked = [run.path_bytes["GM", "L1"] / 1e6 for run in runs]
    share = [100 * run.peak_share for run in runs]
    look = {"markeredgecolor": st.INK, "markeredgewidth": 0.6}
    upper.plot(sides, asked, "s--", color=st.VERMILLION, label="asked for by the cores", **look)
    upper.plot(sides, traffic, "o-", color=st.GREEN, label="moved by memory", **look)
    upper.set_ylabel("MB")
    upper.legend(loc="upper left")
    lower.plot(sides, share, "o-", color=st.BLUE, **look)
    lower.set(ylabel="% of cube peak", xlabel="side of the square weight matrix", ylim=(0, 100))
    for ax in (upper, lower):
        ax.axvline(edge, color=st.INK, linestyle=":", linewidth=1.2)
        ax.grid(axis="y")
    lower.text(edge, 4, " weights alone fill L2", ha="left", va="bottom", fontsize=8)
    points = "; ".join(
        f"{side}: {t:.0f} MB of {a:.0f} MB asked for, {s:.0f} % of peak"
        for side, t, a, s in zip(sides, traffic, asked, share, strict=True)
    )
    return st.finish(fig, alt=f"Weight side on {chip.name}, memory traffic and speed: {points}.")


@st.styled
def fig_energy(timelines: Mapping[str, Timeline]) -> st.LabFigure:
    """Draw picojoules per multiply-accumulate of each program, split by where they go."""
    fig, ax = st.new_figure(height_in=0.9 + 0.4 * len(timelines))
    colours = (st.VERMILLION, st.SKY, st.BLUE, st.GREEN, st.ORANGE)
    pairs = zip(colours, ("", "\\\\", "xx", "..", "++"), strict=True)
    looks = [{"facecolor": c, "hatch": h, "edgecolor": st.INK} for c, h in pairs]
    facts = []
    for row, (name, run) in enumerate(timelines.items()):
        parts = rf.energy_parts(run)
        whole = st.stack(ax, row, zip(parts.values(), looks, strict=True))
        told = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
        facts.append(f"{name} {whole:.2f} pJ per MAC ({told})")
    st.name_rows(ax, timelines)
    ax.set_xlabel("pJ per multiply-accumulate")
    if timelines:
        st.key(fig, dict(zip(parts, looks, strict=True)), loc="outside lower center", ncols=5)
    return st.finish(fig, alt="Energy by place: " + "; ".join(facts) + ".")
