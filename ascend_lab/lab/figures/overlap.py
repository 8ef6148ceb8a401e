"""Figures of the overlap chapter: Gantt charts compared, circuits, what one more buffer buys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from ascend_lab.chip import Chip
from ascend_lab.isa import Program
from ascend_lab.lab.figures import style as st
from ascend_lab.lab.figures.gantt import Window, draw_gantt, gantt_legend, pipes_of
from ascend_lab.sim import Timeline, simulate

Kernel = Callable[[Chip, Sequence[int], int, int], Program]
"""A queue kernel as the chapter writes it: (chip, polynomial degree of each tile, slots of each
queue, number of rounds over those tiles) -> program."""

LOOKS = ((st.BLUE, "o"), (st.VERMILLION, "s"), (st.GREEN, "^"), (st.ORANGE, "D"))


@st.styled
def fig_buffer_depths(
    timelines: Mapping[str, Timeline], *, window: Window | None = None, critical: bool = False
) -> st.LabFigure:
    """Draw labelled timelines as Gantt charts one under the other, on one time axis in cycles."""
    pipes = pipes_of(timelines.values())
    shown = window or (0, max(t.cycles for t in timelines.values()))
    height = 0.7 + len(timelines) * (0.28 + 0.23 * len(pipes))
    fig, axes = st.new_figure(nrows=len(timelines), height_in=height, sharex=True)
    panels = [axes] if len(timelines) == 1 else list(axes)
    for ax, (label, timeline) in zip(panels, timelines.items(), strict=True):
        draw_gantt(ax, timeline, window=shown, pipes=pipes, critical=critical)
        ax.set_title(f"{label}: {timeline.cycles:,} cycles", loc="left", pad=3)
        ax.spines["bottom"].set_visible(ax is panels[-1])
        ax.tick_params(axis="x", length=3 if ax is panels[-1] else 0)
    panels[-1].set_xlabel("cycles")
    gantt_legend(fig, timelines.values(), critical=critical)
    parts = [f"{label} {t.cycles} cycles ({_shares(t)})" for label, t in timelines.items()]
    return st.finish(fig, alt=f"Gantt charts, busy shares in brackets: {'; '.join(parts)}.")


def _shares(timeline: Timeline) -> str:
    busy = timeline.busy_cycles
    return ", ".join(f"{p} {busy[p] / timeline.cycles:.0%}" for p in pipes_of([timeline]))


@st.styled
def fig_circuits(
    load: int, compute: int, latency: int = 0, tail: int = 0, buffers: int = 2
) -> st.LabFigure:
    """Draw the event graph of a two-stage pipeline: circuits, their cycles, their tokens.

    A circuit with w cycles and t tokens lets a tile pass every w / t cycles at best; the greatest
    of the three, drawn bold, sets the rate. Times in cycles, flags included; `latency` delays the
    full flag, `tail` the free flag.
    """
    trip = load + latency + compute + tail
    rates = {"load": float(load), "compute": float(compute), "slots": trip / buffers}
    slowest = max(rates, key=lambda name: rates[name])
    fig, ax = st.new_figure(height_in=2.6)
    ax.set(xlim=(0, 10), ylim=(-1.95, 2.3))
    ax.axis("off")
    for x, pipe, name, cycles in ((2.6, "MTE2", "load", load), (7.4, "V", "compute", compute)):
        _node(ax, x, pipe, f"{name}\n{cycles}")
        _arc(ax, (x - 0.5, 0.55), (x + 0.5, 0.55), -1.5, name == slowest)
        _token(ax, x, 1.36)
        _label(ax, x, 1.9, f"{cycles} / 1 = {cycles}", name == slowest)
    bold = slowest == "slots"
    _arc(ax, (3.45, 0.2), (6.55, 0.2), -0.12, bold)
    _arc(ax, (6.55, -0.25), (3.45, -0.25), -0.28, bold)
    ax.text(5, 0.66, f"full, after latency {latency}", ha="center", fontsize=8)
    ax.text(5, -0.3, f"free, after tail {tail}", ha="center", fontsize=8)
    for i in range(buffers):
        _token(ax, 5 + 0.3 * (i - (buffers - 1) / 2), -0.69)
    sum_text = f"({load} + {latency} + {compute} + {tail}) / {buffers} = {rates['slots']:.4g}"
    _label(ax, 5, -1.45, sum_text, bold)
    alt = (
        f"Two nodes, load on MTE2 ({load} cycles) and compute on V ({compute} cycles), and three "
        f"circuits: load on itself {load} cycles a tile, compute on itself {compute}, and the "
        f"round trip of {buffers} slots {rates['slots']:.4g}. The slowest is {slowest}."
    )
    return st.finish(fig, alt=alt)


def _node(ax: Any, x: float, pipe: str, text: str) -> None:
    look = st.PIPE_STYLE[pipe]
    box = FancyBboxPatch((x - 0.75, -0.45), 1.5, 0.9, boxstyle="round,pad=0.08")
    box.set(facecolor=look.colour, edgecolor=st.INK, linewidth=0.8)
    ax.add_patch(box)
    ax.text(x, 0, text, ha="center", va="center", color=look.text_colour)
    ax.text(x, -0.82, pipe, ha="center", va="center", fontweight="bold")


def _arc(
    ax: Any, start: tuple[float, float], end: tuple[float, float], bend: float, bold: bool
) -> None:
    arrow = FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>")
    arrow.set(mutation_scale=12, linewidth=2.8 if bold else 1.0, color=st.INK if bold else st.GREY)
    ax.add_patch(arrow)


def _token(ax: Any, x: float, y: float) -> None:
    ax.plot([x], [y], marker="o", markersize=7, color=st.INK, markeredgecolor="#FFFFFF", zorder=5)


def _label(ax: Any, x: float, y: float, text: str, bold: bool) -> None:
    weight = "bold" if bold else "normal"
    ax.text(x, y, f"{text} cycles a tile", ha="center", va="center", fontweight=weight)


def steady_cycles(
    kernel: Kernel, chip: Chip, degrees: Sequence[int], depth: int, rounds: int = 60
) -> float:
    """Return cycles per tile far from both ends: (T(2 n) - T(n)) / n passes / tiles a pass."""
    short, long = (
        simulate(kernel(chip, degrees, depth, n), chip).cycles for n in (rounds, 2 * rounds)
    )
    return (long - short) / rounds / len(degrees)


@st.styled
def fig_more_buffers(
    kernel: Kernel,
    chips: Mapping[str, Chip],
    *,
    degrees: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
    depths: Sequence[int] = (2, 3, 4),
) -> st.LabFigure:
    """Draw how many times faster d buffers are than one, steadily, against compute / load.

    One panel per chip; every marker is a program that was simulated. d buffers never give more
    than a factor d, drawn as a thin line.
    """
    fig, axes = st.new_figure(ncols=len(chips), height_in=2.9, sharey=True)
    panels = [axes] if len(chips) == 1 else list(axes)
    said = []
    for ax, (label, chip) in zip(panels, chips.items(), strict=True):
        ratios = [_ratio(simulate(kernel(chip, (g,), 1, 4), chip)) for g in degrees]
        one = [steady_cycles(kernel, chip, (g,), 1) for g in degrees]
        for depth, (colour, marker) in zip(depths, LOOKS, strict=False):
            many = [steady_cycles(kernel, chip, (g,), depth) for g in degrees]
            gain = [a / b for a, b in zip(one, many, strict=True)]
            ax.axhline(depth, color=colour, linewidth=0.6, linestyle="-", alpha=0.6)
            size = max(14 - 2.5 * depth, 2)  # curves coincide where a pipe is the limit
            ax.plot(ratios, gain, color=colour, marker=marker, markersize=size, label=str(depth))
            said.append(f"{label}, {depth} buffers: {min(gain):.2f} to {max(gain):.2f}")
        ax.set_title(label)
        ax.set_xlabel("compute cycles / load cycles")
    panels[0].set_ylabel("times faster than one buffer")
    panels[0].set_ylim(1.0, max(depths) + 0.15)
    panels[-1].legend(title="buffers")
    alt = f"Speed-up over one buffer for compute/load from {ratios[0]:.2f} to {ratios[-1]:.2f}. "
    return st.finish(fig, alt=alt + "; ".join(said) + ".")


def _ratio(timeline: Timeline) -> float:
    return timeline.busy_cycles["V"] / timeline.busy_cycles["MTE2"]


@st.styled
def fig_overlap(
    kernel: Kernel,
    chip: Chip,
    degree: int = 3,
    buffers: int = 2,
    latency_cycles: int = 0,
    tiles: int = 8,
) -> st.LabFigure:
    """Draw `kernel` with tiles of one degree, on `chip` with a memory of that latency.

    The title gives compute / load and the speed-up over one buffer. Raises `CapacityError` when
    the slots do not fit.
    """
    memory = replace(chip.device_memory, latency_cycles=latency_cycles)
    chip = replace(chip, device_memory=memory)
    one, many = (simulate(kernel(chip, (degree,), d, tiles), chip) for d in (1, buffers))
    gain = one.cycles / many.cycles
    fig, ax = st.new_figure(height_in=2.2)
    draw_gantt(ax, many)
    ax.set_xlabel("cycles")
    text = (
        f"compute / load = {_ratio(many):.2f}, latency {latency_cycles}, buffers {buffers}: "
        f"{many.cycles:,} cycles, {gain:.2f}x one buffer"
    )
    ax.set_title(text)
    gantt_legend(fig, [many])
    return st.finish(fig, alt=f"Gantt chart of {tiles} tiles; {text}; busy: {_shares(many)}.")
