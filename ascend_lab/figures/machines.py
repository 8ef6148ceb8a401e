"""Figures of chapter 1 that compare machines: streams with bars, the bracket, TOPS per watt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ascend_lab.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LIGHT,
    ORANGE,
    PURPLE,
    LabFigure,
    finish,
    new_figure,
    styled,
)
from ascend_lab.machines import Breakdown, Port, Run, Simd, Simt, run, sample_inputs, two_sided
from ascend_lab.machines.facts import tops_per_watt

CAUSES: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": BLUE, "hatch": "", "edgecolor": INK},
    "move": {"facecolor": ORANGE, "hatch": "//", "edgecolor": INK},
    "wait": {"facecolor": LIGHT, "hatch": "..", "edgecolor": INK},
}
"""Look of each cause of a cycle, the same in every figure of the chapter."""

UNIT_MARKS = {"scalar": ("v", ORANGE), "vector": ("s", GREEN), "matrix": ("o", PURPLE)}


@styled
def fig_streams(runs: Sequence[Run], peaks: Sequence[float], elements: int) -> LabFigure:
    """Draw one column per run: its instruction stream, how its time divides, and how long it is.

    `peaks` are the machines' operations per cycle, `elements` the size of the program.
    """
    fig, axes = new_figure(2, len(runs), height_in=4.5, height_ratios=(4.0, 1.9))
    grid = axes[1, 0].get_gridspec()
    for ax in axes[1]:
        ax.remove()
    for ax, one, peak in zip(axes[0], runs, peaks, strict=True):
        _stream_column(ax, one, peak, elements)
    _lengths(fig.add_subplot(grid[1, :]), runs, elements)
    handles = [Patch(label=cause, **look) for cause, look in CAUSES.items()]
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    alt = "; ".join(
        f"{one.machine}: {one.instructions:,} instructions, {one.cycles / elements:.2f} cycles per "
        f"element ({_shares(one)}), {one.ops_per_cycle / peak:.1%} of its peak of {peak:g} "
        "operations per cycle"
        for one, peak in zip(runs, peaks, strict=True)
    )
    return finish(fig, alt=f"{runs[0].program} of {elements:,} elements on each machine. {alt}.")


def _shares(one: Run) -> str:
    bar = one.bar
    parts = {"compute": bar.compute, "move": bar.move, "wait": bar.wait}
    return ", ".join(f"{cycles / one.cycles:.0%} {cause}" for cause, cycles in parts.items())


def _stream_column(ax: Any, one: Run, peak: float, elements: int) -> None:
    """Write the instructions from the top down and end in the bar of where the time went."""
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.text(0, 1, one.machine, weight="bold", va="top")
    ax.text(0, 0.93, f"peak {peak:,.0f} ops/cycle", va="top", fontsize=8)
    small = {"va": "top", "fontsize": 6.5, "family": "DejaVu Sans Mono"}
    for row, line in enumerate(one.stream):
        y = 0.82 - 0.09 * row
        ax.text(0, y, line.text, **small)
        ax.text(1.0, y, f"x{line.count:,}", ha="right", color=BLUE, **small)
    left = 0.0
    for cause, look in CAUSES.items():
        width = getattr(one.bar, cause) / one.cycles
        ax.barh(0.13, width, height=0.12, left=left, linewidth=0.6, **look)
        left += width
    ax.text(0.5, 0.05, f"{one.cycles / elements:.2f} cycles/element", ha="center", va="top")


def _lengths(ax: Any, runs: Sequence[Run], elements: int) -> None:
    """Draw the same times to one scale."""
    shortest = min(one.cycles for one in runs)
    for row, one in enumerate(runs):
        left = 0.0
        for cause, look in CAUSES.items():
            width = getattr(one.bar, cause) / elements
            ax.barh(row, width, left=left, height=0.62, **{**look, "linewidth": 0.4})
            left += width
        ax.text(left, row, f"  {one.cycles / shortest:.1f}x", va="center", fontsize=8)
    ax.set_yticks(range(len(runs)), [one.machine for one in runs])
    ax.invert_yaxis()
    ax.set_xlim(0, max(one.cycles for one in runs) / elements * 1.09)
    ax.set_xlabel("cycles per element, all four to one scale")


def mask_of(n: int, density: float, run_length: int, seed: int = 0) -> np.ndarray:
    """Return n booleans, a share `density` of them true, equal in runs of `run_length`."""
    rng = np.random.default_rng(seed)
    runs = rng.permutation(-(-n // run_length)) < round(density * -(-n // run_length))
    return np.repeat(runs, run_length)[:n]


@styled
def fig_bound(
    lanes: int = 64,
    mask_density: float = 0.5,
    run_length: int = 1,
    bytes_per_cycle: int = 32,
) -> LabFigure:
    """Draw the parts, the bracket from longest part to their sum, and the time of a branchy kernel.

    The kernel has 8 multiply-adds on each side of an `if`, for 65,536 elements; `run_length`
    neighbours take the same side.
    """
    kernel = two_sided(65536)
    inputs = sample_inputs(kernel) | {"mask": mask_of(kernel.n, mask_density, run_length)}
    port = Port(rate_bytes_per_cycle=bytes_per_cycle)
    machines = (Simd(vector_bytes=4 * lanes, port=port), Simt(lanes=lanes, port=port))
    runs = [run(machine, kernel, inputs) for machine in machines]
    fig, axes = new_figure(2, 1, height_in=3.4, sharex=True)
    for ax, one in zip(axes, runs, strict=True):
        _bracket(ax, one, kernel.n)
    axes[1].set_xlim(0, max(one.parts.total for one in runs) / kernel.n * 1.45)
    axes[1].set_xlabel("cycles per element")
    diverged = runs[1].counters["divergent_warps"] / runs[1].counters["warps"]
    setting = (
        f"{lanes} lanes, {mask_density:.0%} of the mask set in runs of {run_length}, "
        f"{bytes_per_cycle} bytes per cycle; {diverged:.0%} of the warps diverge."
    )
    alt = " ".join([setting, *(_bracket_text(one, kernel.n) for one in runs)])
    return finish(fig, alt=alt)


def _bracket(ax: Any, one: Run, elements: int) -> None:
    for row, (cause, look) in enumerate(CAUSES.items()):
        ax.barh(row, getattr(one.parts, cause) / elements, height=0.6, linewidth=0.6, **look)
    ends = [one.parts.longest / elements, one.parts.total / elements]
    ax.plot(ends, [3, 3], color=GREY, linewidth=5, solid_capstyle="butt")
    ax.plot(one.cycles / elements, 3, marker="D", color=INK, markersize=6)
    ax.text(ends[1], 3, f"  {one.cycles / elements:.3f}, {one.parts.bound_by} bound", va="center")
    ax.set_yticks(range(4), [*CAUSES, "bracket"])
    ax.set_ylim(3.6, -0.6)
    ax.set_title(one.machine, loc="left")


def _bracket_text(one: Run, elements: int) -> str:
    parts: Breakdown = one.parts
    return (
        f"{one.machine}: compute {parts.compute / elements:.3f}, move {parts.move / elements:.3f}, "
        f"wait {parts.wait / elements:.3f} cycles per element; it takes "
        f"{one.cycles / elements:.3f}, {parts.bound_by} bound."
    )


@styled
def fig_tops_per_watt() -> LabFigure:
    """Draw peak operations per second and watt of real chips, by kind of unit and number format."""
    rows = tops_per_watt()
    fig, ax = new_figure(height_in=4.0)
    for y, row in enumerate(rows):
        marker, colour = UNIT_MARKS[row.kind]
        value = row.tops_per_watt
        if value is None:
            ax.text(0.0023, y, "no source gives it", va="center", fontsize=8, color=GREY)
            continue
        face = "#FFFFFF" if row.trust == "assumed" else colour
        ax.plot(value, y, marker=marker, color=colour, markerfacecolor=face, markersize=7)
        ax.text(value * 1.18, y, f"{value:.2g}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [f"{row.title}, {row.number_format}" for row in rows])
    ax.invert_yaxis()
    ax.set(xscale="log", xlim=(0.002, 5), xlabel="peak TOPS per watt of the whole chip")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.grid(axis="x")
    handles = [
        Line2D([], [], marker=marker, color=colour, linestyle="none", label=f"{kind} unit")
        for kind, (marker, colour) in UNIT_MARKS.items()
    ]
    hollow = Line2D([], [], marker="s", color=GREY, markerfacecolor="#FFFFFF", linestyle="none")
    hollow.set_label("hollow: assumed")
    handles.append(hollow)
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    alt = "; ".join(
        f"{row.title} {row.kind} unit {row.number_format} "
        + ("not known" if row.tops_per_watt is None else f"{row.tops_per_watt:.2g}")
        for row in rows
    )
    return finish(fig, alt=f"Peak TOPS per watt: {alt}.")
