"""Gantt charts of a `Timeline`: work, stalls and latency per pipe, the critical path on top."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke

from ascend_lab.errors import AscendLabError
from ascend_lab.lab.figures import style as st
from ascend_lab.sim.timeline import Span, Timeline

FLOW = ("S", "MTE2", "MTE1", "M", "V", "FIX", "MTE3")
"""Rows from top to bottom: the way data goes through a core."""

BAR, STALL, RAIL = 0.62, 0.24, 0.42
"""Height of a working bar and of a stall, and how far below its row the critical path runs."""

MAX_BARS = 1500
"""Above this many bars in a window, neighbours closer than a pixel are drawn as one."""

Window = tuple[int, int]


class WindowError(AscendLabError):
    """A part of the timeline that cannot be drawn."""


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
    for a queue kernel are the tiles. Raises `WindowError` for an empty window.
    """
    first, last = _window(timeline, window)
    rows = {pipe: row for row, pipe in enumerate(pipes or pipes_of([timeline]))}
    spans = [s for s in timeline.spans if s.end > first and s.start < last]
    gap = (last - first) / 1000 if len(spans) > MAX_BARS else -1
    for pipe, row in rows.items():
        own = [s for s in spans if s.pipe == pipe]
        work = [(s.start, s.end) for s in own if not _is_sync(s)]
        stalls = [(s.start, s.start + s.stall_cycles) for s in own if s.stall_cycles]
        fences = [(s.start + s.stall_cycles, s.end) for s in own if s.name == "barrier"]
        look = st.PIPE_STYLE[pipe].patch_args()
        for pieces, size, args in ((work, BAR, look), (stalls, STALL, _STALL_STYLE)):
            for start, end in _merge(pieces, gap):
                ax.barh(row, end - start, size, left=start, **args)
        for start, end in _merge(fences, 0):
            if end > start:
                ax.barh(row, end - start, BAR, left=start, color=st.GREY)
    _draw_latency(ax, timeline, spans, rows)
    if critical:
        _draw_critical(ax, timeline, rows, (first, last))
    if numbers:
        _number(ax, timeline, rows, (first, last))
    ax.set_xlim(first, last)
    ax.set_ylim(len(rows) - 0.35, -0.6)
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


def _window(timeline: Timeline, window: Window | None) -> Window:
    first, last = (0, timeline.cycles) if window is None else window
    if not 0 <= first < last or first >= max(timeline.cycles, 1):
        raise WindowError(
            f"a window (first, last) of cycles with 0 <= first < last inside 0..{timeline.cycles}",
            f"({first}, {last})",
            "leave it out to draw everything",
        )
    return first, last


def _is_sync(span: Span) -> bool:
    return span.name.startswith(("set_flag", "wait_flag", "barrier"))


def _merge(pieces: Sequence[tuple[int, int]], gap: float) -> list[tuple[int, int]]:
    """Join pieces at most `gap` cycles apart; a negative gap joins nothing."""
    out: list[tuple[int, int]] = []
    for start, end in pieces:
        if out and start - out[-1][1] <= gap:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def _draw_latency(ax: Any, timeline: Timeline, spans: Sequence[Span], rows: dict[str, int]) -> None:
    """Draw, behind a bar, the latency that somebody had to wait for: its flag came that late."""
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
    xs: list[float] = []
    ys: list[float] = []
    for span in timeline.critical_path:
        if span.end < window[0] or span.start > window[1]:
            continue
        rail = rows[span.pipe] + RAIL
        xs += [span.start + span.stall_cycles, span.end]
        ys += [rail, rail]
    line = ax.plot(xs, ys, color=st.INK, linewidth=2.0, solid_joinstyle="round", zorder=4)
    line[0].set_path_effects([Stroke(linewidth=3.6, foreground="#FFFFFF"), Normal()])


def _number(ax: Any, timeline: Timeline, rows: dict[str, int], window: Window) -> None:
    """Write 0, 1, 2, ... on the pieces of work between two flags where they have room."""
    width = window[1] - window[0]
    for pipe, row in rows.items():
        for count, (start, end) in enumerate(work_pieces(timeline, pipe)):
            low, high = max(start, window[0]), min(end, window[1])
            if high - low > 0.011 * width * (1 + len(str(count))):
                middle = (low + high) / 2
                look = st.PIPE_STYLE[pipe]
                text = ax.text(middle, row, str(count), ha="center", va="center", fontsize=8)
                text.set_color(look.text_colour)  # a halo of the bar's colour keeps the hatch off
                text.set_path_effects([Stroke(linewidth=3, foreground=look.colour), Normal()])


def work_pieces(timeline: Timeline, pipe: str) -> list[tuple[int, int]]:
    """Return (start, end) of each run of work that no flag or barrier interrupts, in cycles."""
    pieces: list[tuple[int, int]] = []
    fresh = True
    for span in timeline.spans:
        if span.pipe != pipe:
            continue
        if _is_sync(span):
            fresh = True
        elif fresh:
            pieces.append((span.start, span.end))
            fresh = False
        else:
            pieces[-1] = (pieces[-1][0], span.end)
    return pieces


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
    first, last = _window(timeline, window)
    shares = []
    for pipe in pipes_of([timeline]):
        inside = sum(
            max(0, min(s.end, last) - max(s.start, first))
            for s in timeline.spans
            if s.pipe == pipe and not _is_sync(s)
        )
        shares.append(f"{pipe} works {inside / (last - first):.0%}")
    text = f"{timeline.name}, cycles {first} to {last} of {timeline.cycles}: {', '.join(shares)}"
    if timeline.stalls:
        (pipe, event), cycles = next(iter(timeline.stalls.items()))
        text += f"; longest wait in all: {pipe} for {event}, {cycles} cycles"
    path = max(timeline.critical_share().items(), key=lambda item: item[1], default=None)
    return text + (f"; {path[1]:.0%} of the critical path is on {path[0]}." if path else ".")


@st.styled
def fig_gantt(
    timeline: Timeline,
    *,
    window: Window | None = None,
    critical: bool = True,
    numbers: bool = True,
    title: str = "",
) -> st.LabFigure:
    """Draw a timeline as a Gantt chart: pipes as rows, stalls hollow, critical path underlined.

    `window` (first, last) cuts out some cycles. A dotted line behind a bar is latency: the pipe
    is free again but the result is not yet visible. Raises `WindowError` for an empty window and
    `SimulationError` for more than `sim.timeline.MAX_SPANS` instructions.
    """
    pipes = pipes_of([timeline])
    fig, ax = st.new_figure(height_in=0.95 + 0.36 * len(pipes))
    draw_gantt(ax, timeline, window=window, critical=critical, numbers=numbers)
    ax.set_xlabel("cycles")
    ax.set_title(title or f"{timeline.name} on {timeline.chip.name}: {timeline.cycles:,} cycles")
    gantt_legend(fig, [timeline], critical=critical)
    return st.finish(fig, alt=f"Gantt chart of {describe(timeline, window)}")
