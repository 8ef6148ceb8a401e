"""Nested rooflines: one slanted roof per memory level, one dot per program and level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.lines import Line2D

from ascend_lab.figures.style import GREY, INK, PALETTE, LabFigure, finish, new_figure, styled
from ascend_lab.machines.roofline import Dot, Level, attainable, binding_level, ridge_point

MARKERS = "osD^vP*X"
LINES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")


@styled
def fig_roofline(
    peak_ops_per_s: float,
    levels: Sequence[Level],
    dots: Sequence[Dot] = (),
    title: str = "",
) -> LabFigure:
    """Draw a roof per level under a common peak, and each program once per level it moves bytes on.

    Colour and line style tell the level, the marker tells the program. All dots of a program lie
    at one height, the rate it reached; a program is limited by the level whose dot is nearest
    below its roof.
    """
    fig, ax = new_figure(height_in=3.8)
    low, high = _span(peak_ops_per_s, levels, dots)
    x = np.geomspace(low, high, 400)
    for number, level in enumerate(levels):
        y = np.minimum(peak_ops_per_s, x * level.rate_bytes_per_s)
        ax.plot(x, y, color=PALETTE[number], linestyle=LINES[number % 4], zorder=2)
    _draw_dots(ax, levels, dots)
    ax.axhline(peak_ops_per_s, color=INK, linewidth=1.0, zorder=1)
    ax.text(high, peak_ops_per_s * 1.12, f"peak {_si(peak_ops_per_s)}op/s", ha="right", va="bottom")
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=_heights(peak_ops_per_s, dots))
    ax.set(xlabel="operations per byte moved through the level", ylabel="operations per second")
    ax.yaxis.set_major_formatter(lambda value, _: f"{_si(value)}op/s")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.grid(which="major")
    if title:
        ax.set_title(title, loc="left")
    _legends(fig, ax, peak_ops_per_s, levels, dots)
    return finish(fig, alt=_alt(peak_ops_per_s, levels, dots))


def _span(peak: float, levels: Sequence[Level], dots: Sequence[Dot]) -> tuple[float, float]:
    """Return the range of the horizontal axis: all ridge points and all finite dots, and room."""
    marks = [ridge_point(peak, level) for level in levels]
    marks += [dot.ops_per_byte(level.name) for dot in dots for level in levels]
    finite = [mark for mark in marks if math.isfinite(mark)]
    return min(finite) / 4, max(finite) * 6


def _heights(peak: float, dots: Sequence[Dot]) -> tuple[float, float]:
    lowest = min([dot.ops_per_s for dot in dots], default=peak / 100)
    return min(lowest, peak / 30) / 3, peak * 3


def _draw_dots(ax: Any, levels: Sequence[Level], dots: Sequence[Dot]) -> None:
    for row, dot in enumerate(dots):
        marker = MARKERS[row % len(MARKERS)]
        points = [
            (dot.ops_per_byte(level.name), PALETTE[number], max(4.0, 13.0 - 3.0 * number))
            for number, level in enumerate(levels)
            if math.isfinite(dot.ops_per_byte(level.name))
        ]
        if len(points) > 1:
            reach = [point[0] for point in points]
            ends = (min(reach), max(reach))
            ax.plot(ends, [dot.ops_per_s] * 2, color=GREY, linestyle="-", linewidth=0.8, zorder=2)
        for at, colour, size in points:  # dots at one place stay visible as rings
            ax.plot(
                at,
                dot.ops_per_s,
                marker=marker,
                color=colour,
                markersize=size,
                markeredgecolor=INK,
                markeredgewidth=0.8,
                linestyle="none",
                zorder=3,
            )


def _legends(
    fig: LabFigure, ax: Any, peak: float, levels: Sequence[Level], dots: Sequence[Dot]
) -> None:
    """Put the key of levels and the key of programs beside each other below the axes."""
    roofs = [
        Line2D(
            [],
            [],
            color=PALETTE[number],
            linestyle=LINES[number % 4],
            label=f"{level.name}: {_si(level.rate_bytes_per_s)}B/s, "
            f"ridge {ridge_point(peak, level):.3g} op/B",
        )
        for number, level in enumerate(levels)
    ]
    marks = [
        Line2D(
            [],
            [],
            color="none",
            marker=MARKERS[row % len(MARKERS)],
            markerfacecolor="#FFFFFF",
            markeredgecolor=INK,
            markersize=7,
            label=f"{dot.name}: {_si(dot.ops_per_s)}op/s",
        )
        for row, dot in enumerate(dots)
    ]
    fig.legend(handles=[*roofs, *marks], loc="outside lower center", ncols=2)


def _alt(peak: float, levels: Sequence[Level], dots: Sequence[Dot]) -> str:
    roofs = "; ".join(
        f"{level.name} {_si(level.rate_bytes_per_s)}B/s meets the peak at "
        f"{ridge_point(peak, level):.3g} operations per byte"
        for level in levels
    )
    text = f"Log-log roofline with peak {_si(peak)}op/s. Roofs: {roofs}."
    for dot in dots:
        name, roof = binding_level(dot, peak, levels)
        places = ", ".join(
            f"{dot.ops_per_byte(level.name):.3g} at {level.name} "
            f"(roof {_si(attainable(dot.ops_per_byte(level.name), peak, level))}op/s)"
            for level in levels
            if math.isfinite(dot.ops_per_byte(level.name))
        )
        text += (
            f" {dot.name} reaches {_si(dot.ops_per_s)}op/s; its operations per byte are {places}; "
            f"its lowest roof is {name} at {_si(roof)}op/s."
        )
    return text


def _si(value: float) -> str:
    """Return a number with three digits and an SI prefix: 1.2e12 is "1.2 T"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
