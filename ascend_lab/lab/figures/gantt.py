"""Gantt charts of a `Timeline`: work, stalls and latency per pipe, the critical path on top."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.patheffects import Normal, Stroke

from ascend_lab.lab.figures import style as st
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import Span, Timeline, simulate

FLOW = ("S", "MTE2", "MTE1", "M", "V", "FIX", "MTE3")
"""Rows from top to bottom: the way data goes through a core."""
BAR = 0.62
"""Height of a bar of work, where rows are 1 apart."""
STALL = 0.24
"""Height of a stall."""
RAIL = 0.42
"""How far below the middle of a row the critical path runs."""
MAX_BARS = 1500
"""Above this many bars in a window, neighbours closer than a pixel are drawn as one."""
Window = tuple[int, int]
"""First and last cycle that are drawn."""


def pipes_of(timelines: Iterable[Timeline]) -> list[str]:
    """Return the pipes any of the timelines uses, in the order of `FLOW`."""
    used = {pipe for timeline in timelines for pipe in timeline.compiled.pipes}
    return [pipe for pipe in FLOW if pipe in used]


def draw_gantt(
    ax: Any,
    timeline: Timeline,
    *,
    window: Window | None = None,
    pipes: Sequence[str] | None = None,
    critical: bool = True,
    numbers: bool = True,
) -> None:
    """Draw one timeline into the axes: a row per pipe, cycles from left to right.

    `window` is (first, last) cycle; `numbers` counts the pieces of work between two flags, which
    for a queue kernel are the tiles.
    """
    first, last = window or (0, timeline.cycles)
    rows = {pipe: row for row, pipe in enumerate(pipes or pipes_of([timeline]))}
    spans = [s for s in timeline.spans if s.end > first and s.start < last]
    gap = (last - first) / 1000 if len(spans) > MAX_BARS else -1
    for pipe, row in rows.items():
        pipe_spans = [s for s in spans if s.pipe == pipe]
        work = [(s.start, s.end) for s in pipe_spans if not _is_sync(s)]
        stalls = [(s.start, s.start + s.stall_cycles) for s in pipe_spans if s.stall_cycles]
        barriers = [(s.start + s.stall_cycles, s.end) for s in pipe_spans if s.name == "barrier"]
        look = st.PIPE_STYLE[pipe].patch_args()
        for pieces, size, args in ((work, BAR, look), (stalls, STALL, _STALL_STYLE)):
            for start, end in _merge(pieces, gap):
                ax.barh(row, end - start, size, left=start, **args)
        for start, end in _merge(barriers, 0):
            if end > start:
                ax.barh(row, end - start, BAR, left=start, color=st.GREY)
    _draw_latency(ax, timeline, spans, rows)
    if critical:
        _draw_critical(ax, timeline, rows, (first, last))
    if numbers:
        _number(ax, timeline, rows, (first, last))
    ax.set(xlim=(first, last), ylim=(len(rows) - 0.35, -0.6))
    ax.set_yticks(list(rows.values()), list(rows))
    ax.tick_params(axis="y", length=0)
    if first <= timeline.cycles < last:
        ax.axvline(timeline.cycles, color=st.INK, linewidth=0.8, linestyle=(0, (1, 1.5)))


_STALL_STYLE: dict[str, Any] = {
    "facecolor": st.LIGHT,
    "edgecolor": st.GREY,
    "linestyle": (0, (2, 1.5)),
    "linewidth": 0.7,
}
_LATENCY_STYLE: dict[str, Any] = {"color": st.INK, "linewidth": 1.0, "linestyle": (0, (1, 1))}


def _is_sync(span: Span) -> bool:
    """Tell whether a span is a flag or a barrier, not work."""
    return span.name.startswith(("set_flag", "wait_flag", "barrier"))


def _merge(pieces: Sequence[tuple[int, int]], gap: float) -> list[tuple[int, int]]:
    """Join pieces at most `gap` cycles apart; a negative gap joins nothing."""
    merged: list[tuple[int, int]] = []
    for start, end in pieces:
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _draw_latency(ax: Any, timeline: Timeline, spans: Sequence[Span], rows: dict[str, int]) -> None:
    """Draw, behind a bar, the latency for which another pipe had to wait: the flag came later."""
    drawn = set()
    for span in spans:
        if not span.stall_cycles or span.previous < 0:
            continue
        source = timeline.spans[span.previous]
        ready = span.start + span.stall_cycles
        if ready > source.end and (source.pipe, source.end) not in drawn:
            drawn.add((source.pipe, source.end))
            level = rows[source.pipe] - 0.2
            ax.plot([source.end, ready], [level, level], zorder=0.5, **_LATENCY_STYLE)


def _draw_critical(ax: Any, timeline: Timeline, rows: dict[str, int], window: Window) -> None:
    """Run a line under the spans of the critical path, and across where it changes the pipe."""
    path = [s for s in timeline.critical_path if s.end >= window[0] and s.start <= window[1]]
    xs = [x for span in path for x in (span.start + span.stall_cycles, span.end)]
    ys = [rows[span.pipe] + RAIL for span in path for _ in range(2)]
    look = {"color": st.INK, "linewidth": 2.0, "solid_joinstyle": "round", "zorder": 4}
    edge = [Stroke(linewidth=3.6, foreground="#FFFFFF"), Normal()]
    ax.plot(xs, ys, path_effects=edge, **look)


def _number(ax: Any, timeline: Timeline, rows: dict[str, int], window: Window) -> None:
    """Write 0, 1, 2, ... on the pieces of work between two flags where they have room."""
    width = window[1] - window[0]
    for pipe, row in rows.items():
        look = st.PIPE_STYLE[pipe]
        # an edge in the colour of the bar keeps the hatch out of the letters
        halo = [Stroke(linewidth=3, foreground=look.colour), Normal()]
        for count, (start, end) in enumerate(work_pieces(timeline, pipe)):
            low = max(start, window[0])
            high = min(end, window[1])
            if high - low > 0.011 * width * (1 + len(str(count))):
                look_of_number = {"color": look.text_colour, "path_effects": halo}
                st.put(ax, (low + high) / 2, row, str(count), **look_of_number)


def work_pieces(timeline: Timeline, pipe: str) -> list[tuple[int, int]]:
    """Return (start, end) of each run of work that no flag or barrier interrupts, in cycles."""
    pipe_spans = [span for span in timeline.spans if span.pipe == pipe]
    runs = [list(run) for sync, run in groupby(pipe_spans, _is_sync) if not sync]
    return [(run[0].start, run[-1].end) for run in runs]


def gantt_legend(
    fig: st.LabFigure, timelines: Iterable[Timeline], *, critical: bool = True
) -> None:
    """Add the legend of Gantt charts of these timelines below the axes."""
    handles: list[Any] = [
        Patch(label="stall", **_STALL_STYLE),
        Line2D([], [], label="latency", **_LATENCY_STYLE),
    ]
    if any(i.op == "barrier" for t in timelines for i in t.compiled.sources):
        handles.append(Patch(label="barrier", color=st.GREY))
    if critical:
        handles.append(Line2D([], [], color=st.INK, linewidth=2.0, label="critical path"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def describe(timeline: Timeline, window: Window | None = None) -> str:
    """Return the sentence a reader needs instead of the picture: shares, stalls, critical path."""
    first, last = window or (0, timeline.cycles)
    shares = []
    for pipe in pipes_of([timeline]):
        work_spans = (s for s in timeline.spans if s.pipe == pipe and not _is_sync(s))
        work_cycles = sum(max(0, min(s.end, last) - max(s.start, first)) for s in work_spans)
        shares.append(f"{pipe} works {work_cycles / (last - first):.0%}")
    text = f"{timeline.name}, cycles {first} to {last} of {timeline.cycles}: {', '.join(shares)}"
    if timeline.stalls:
        (pipe, event), cycles = next(iter(timeline.stalls.items()))
        text += f"; longest wait in all: {pipe} for {event}, {cycles} cycles"
    path = max(timeline.critical_share().items(), key=lambda item: item[1], default=None)
    return text + (f"; {path[1]:.0%} of the critical path is on {path[0]}." if path else ".")


def fig_gantt(
    timeline: Timeline,
    *,
    window: Window | None = None,
    critical: bool = True,
    numbers: bool = True,
    title: str = "",
) -> st.LabFigure:
    """Draw a timeline as a Gantt chart: pipes as rows, stalls hollow, critical path underlined.

    `window` (first, last) cuts out some cycles. A dotted line behind a bar is latency: the pipe is
    free again but the result is not yet visible.
    """
    pipes = pipes_of([timeline])
    fig, ax = st.new_figure(height_in=0.95 + 0.36 * len(pipes))
    draw_gantt(ax, timeline, window=window, critical=critical, numbers=numbers)
    ax.set_xlabel("cycles")
    ax.set_title(title or f"{timeline.name} on {timeline.chip.name}: {timeline.cycles:,} cycles")
    gantt_legend(fig, [timeline], critical=critical)
    return st.finish(fig, alt=f"Gantt chart of {describe(timeline, window)}")


# -- the overlap chapter: Gantt charts compared, circuits, what one more buffer buys ---------------
QueueKernel = Callable[[Chip, Sequence[int], int, int], isa.Program]
"""A queue kernel as the chapter writes it: (chip, polynomial degree of each tile, slots of each
queue, number of rounds over those tiles) -> program."""
LOOKS = ((st.BLUE, "o"), (st.VERMILLION, "s"), (st.GREEN, "^"), (st.ORANGE, "D"))


def fig_buffer_depths(timelines: Mapping[str, Timeline]) -> st.LabFigure:
    """Draw labelled timelines as Gantt charts one under the other, on one time axis in cycles."""
    pipes = pipes_of(timelines.values())
    window = (0, max(t.cycles for t in timelines.values()))
    height = 0.7 + len(timelines) * (0.28 + 0.23 * len(pipes))
    fig, axes = st.new_figure(nrows=len(timelines), height_in=height, sharex=True)
    panels = st.panels(axes)
    for ax, (label, timeline) in zip(panels, timelines.items(), strict=True):
        draw_gantt(ax, timeline, window=window, pipes=pipes, critical=False)
        ax.set_title(f"{label}: {timeline.cycles:,} cycles", loc="left", pad=3)
        ax.spines["bottom"].set_visible(ax is panels[-1])
        ax.tick_params(axis="x", length=3 if ax is panels[-1] else 0)
    panels[-1].set_xlabel("cycles")
    gantt_legend(fig, timelines.values(), critical=False)
    parts = [f"{label} {t.cycles} cycles ({_shares(t)})" for label, t in timelines.items()]
    return st.finish(fig, alt=f"Gantt charts, busy shares in brackets: {'; '.join(parts)}.")


def _shares(timeline: Timeline) -> str:
    """Return the busy share of each pipe in words."""
    busy = timeline.busy_cycles
    return ", ".join(f"{p} {busy[p] / timeline.cycles:.0%}" for p in pipes_of([timeline]))


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
    tokens = []
    for x, pipe, name, cycles in ((2.6, "MTE2", "load", load), (7.4, "V", "compute", compute)):
        look = st.PIPE_STYLE[pipe]
        box = FancyBboxPatch((x - 0.75, -0.45), 1.5, 0.9, boxstyle="round,pad=0.08")
        box.set(facecolor=look.colour, edgecolor=st.INK, linewidth=0.8)
        ax.add_patch(box)
        st.put(ax, x, 0, f"{name}\n{cycles}", fontsize=9, color=look.text_colour)
        st.put(ax, x, -0.82, pipe, fontsize=9, fontweight="bold")
        _arc(ax, (x - 0.5, 0.55), (x + 0.5, 0.55), -1.5, name == slowest)
        tokens.append((x, 1.36))
        _label(ax, x, 1.9, f"{cycles} / 1 = {cycles}", name == slowest)
    slots_are_slowest = slowest == "slots"
    _arc(ax, (3.45, 0.2), (6.55, 0.2), -0.12, slots_are_slowest)
    _arc(ax, (6.55, -0.25), (3.45, -0.25), -0.28, slots_are_slowest)
    ax.text(5, 0.66, f"full, after latency {latency}", ha="center", fontsize=8)
    ax.text(5, -0.3, f"free, after tail {tail}", ha="center", fontsize=8)
    tokens += [(5 + 0.3 * (i - (buffers - 1) / 2), -0.69) for i in range(buffers)]
    for token in tokens:
        ax.plot(*token, marker="o", markersize=7, color=st.INK, mec="#FFFFFF", zorder=5)
    sum_text = f"({load} + {latency} + {compute} + {tail}) / {buffers} = {rates['slots']:.4g}"
    _label(ax, 5, -1.45, sum_text, slots_are_slowest)
    alt = (
        f"Two nodes, load on MTE2 ({load} cycles) and compute on V ({compute} cycles), and three "
        f"circuits: load on itself {load} cycles a tile, compute on itself {compute}, and the "
        f"round trip of {buffers} slots {rates['slots']:.4g}. The slowest is {slowest}."
    )
    return st.finish(fig, alt=alt)


def _arc(ax: Any, start: st.Point, end: st.Point, bend: float, bold: bool) -> None:
    """Draw a bent arrow."""
    arrow = FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>")
    arrow.set(mutation_scale=12, linewidth=2.8 if bold else 1.0, color=st.INK if bold else st.GREY)
    ax.add_patch(arrow)


def _label(ax: Any, x: float, y: float, text: str, bold: bool) -> None:
    """Write the cycles a tile of a circuit."""
    st.put(ax, x, y, f"{text} cycles a tile", fontsize=9, fontweight="bold" if bold else "normal")


def steady_cycles(
    kernel: QueueKernel, chip: Chip, degrees: Sequence[int], depth: int, rounds: int = 60
) -> float:
    """Return cycles per tile far from both ends: (T(2 n) - T(n)) / n passes / tiles a pass."""
    programs = (kernel(chip, degrees, depth, n) for n in (rounds, 2 * rounds))
    short, long = (simulate(program, chip).cycles for program in programs)
    return (long - short) / rounds / len(degrees)


def fig_more_buffers(kernel: QueueKernel, chips: Mapping[str, Chip]) -> st.LabFigure:
    """Draw how many times faster d buffers are than one, steadily, against compute / load."""
    degrees = range(1, 9)
    depths = (2, 3, 4)
    fig, axes = st.new_figure(ncols=len(chips), height_in=2.9, sharey=True)
    panels = st.panels(axes)
    alt_parts = []
    for ax, (label, chip) in zip(panels, chips.items(), strict=True):
        ratios = [_ratio(simulate(kernel(chip, (g,), 1, 4), chip)) for g in degrees]
        single_cycles = [steady_cycles(kernel, chip, (g,), 1) for g in degrees]
        for depth, (colour, marker) in zip(depths, LOOKS, strict=False):
            depth_cycles = [steady_cycles(kernel, chip, (g,), depth) for g in degrees]
            gain = [a / b for a, b in zip(single_cycles, depth_cycles, strict=True)]
            ax.axhline(depth, color=colour, linewidth=0.6, linestyle="-", alpha=0.6)
            size = max(14 - 2.5 * depth, 2)  # curves coincide where a pipe is the limit
            ax.plot(ratios, gain, color=colour, marker=marker, markersize=size, label=str(depth))
            alt_parts.append(f"{label}, {depth} buffers: {min(gain):.2f} to {max(gain):.2f}")
        ax.set(title=label, xlabel="compute cycles / load cycles")
    panels[0].set(ylabel="times faster than one buffer", ylim=(1.0, max(depths) + 0.15))
    panels[-1].legend(title="buffers")
    alt = f"Speed-up over one buffer for compute/load from {ratios[0]:.2f} to {ratios[-1]:.2f}. "
    return st.finish(fig, alt=alt + "; ".join(alt_parts) + ".")


def _ratio(timeline: Timeline) -> float:
    """Return the cycles of compute over those of loads."""
    return timeline.busy_cycles["V"] / timeline.busy_cycles["MTE2"]


def fig_overlap(
    kernel: QueueKernel,
    chip: Chip,
    degree: int = 3,
    buffers: int = 2,
    latency_cycles: int = 0,
    tiles: int = 8,
) -> st.LabFigure:
    """Draw `kernel` with tiles of one degree, on `chip` with a memory of that latency."""
    memory = replace(chip.device_memory, latency_cycles=latency_cycles)
    slow_chip = replace(chip, device_memory=memory)
    single = simulate(kernel(slow_chip, (degree,), 1, tiles), slow_chip)
    buffered = simulate(kernel(slow_chip, (degree,), buffers, tiles), slow_chip)
    gain = single.cycles / buffered.cycles
    fig, ax = st.new_figure(height_in=2.2)
    draw_gantt(ax, buffered)
    ax.set_xlabel("cycles")
    text = (
        f"compute / load = {_ratio(buffered):.2f}, latency {latency_cycles}, buffers {buffers}: "
        f"{buffered.cycles:,} cycles, {gain:.2f}x one buffer"
    )
    ax.set_title(text)
    gantt_legend(fig, [buffered])
    return st.finish(fig, alt=f"Gantt chart of {tiles} tiles; {text}; busy: {_shares(buffered)}.")
