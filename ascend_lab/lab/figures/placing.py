"""Figures of chapter 18a: a cut between device and host, and frames on streams."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_lab.deploy.runtime import pipeline_programs, run_streams
from ascend_lab.lab.figures import style as st

TOY = {"conv": (2, 9), "sort": (6, 1), "head": (1, 5)}
"""Milliseconds of an operator on the device and on the host."""
DEVICE_X = 0.0
OPERATOR_X = 5.0
HOST_X = 10.0
MIDDLE_Y = (len(TOY) - 1) / 2
Spot = tuple[float, float]
"""A point of the drawing: x, y."""


def cost(places: Sequence[int], copy: float, toy: Mapping[str, tuple[float, float]]) -> float:
    """Return the milliseconds of a chain, and of a copy wherever it changes sides."""
    works = sum(pair[place] for pair, place in zip(toy.values(), places, strict=True))
    return works + copy * sum(a != b for a, b in itertools.pairwise(places))


def fig_cut(copy: float = 1.0) -> st.LabFigure:
    """Draw a chain of operators between device and host, and the least cut.

    A place is 0 for the device and 1 for the host. An operator that is placed on the host cuts
    its edge to the device, whose label is the time on the host; so the labels of all cut edges
    add up to the cost of the placement.
    """
    choices = itertools.product((0, 1), repeat=len(TOY))
    places = min(choices, key=lambda choice: cost(choice, copy, TOY))
    fig, ax = st.new_figure(height_in=2.8)
    cut_edges = _draw_edges(ax, places, copy)
    _draw_operators(ax, places)
    least_ms = cost(places, copy, TOY)
    ax.set(xlim=(-1.2, 11.2), ylim=(-0.5, len(TOY) - 0.5), xticks=[], yticks=[])
    ax.set_title(f"copies {copy:g} ms: the least cut costs {least_ms:g} ms", loc="left")
    st.bare(ax)
    copies = sum(a != b for a, b in itertools.pairwise(places))
    alt = (
        f"Device on the left, host on the right, between them conv, sort and head. An edge from "
        f"the device pays the time on the host, one to the host the time on the device; "
        f"neighbours are tied by {copy:g} ms. The least cut goes through {', '.join(cut_edges)} "
        f"and {copies} copies: {least_ms:g} ms."
    )
    return st.finish(fig, alt=alt)


def _operator_spots() -> dict[str, Spot]:
    """Return where each operator of the chain is drawn, from top to bottom."""
    return {name: (OPERATOR_X, float(len(TOY) - 1 - i)) for i, name in enumerate(TOY)}


def _draw_edges(ax: Any, places: Sequence[int], copy: float) -> list[str]:
    """Draw the edges with their times; return the cut ones to device or host, in words."""
    spots = _operator_spots()
    cut_edges = list[str]()
    for (name, (on_device, on_host)), place in zip(TOY.items(), places, strict=True):
        _draw_edge(ax, (DEVICE_X, MIDDLE_Y), spots[name], on_host, is_cut=place == 1)
        _draw_edge(ax, (HOST_X, MIDDLE_Y), spots[name], on_device, is_cut=place == 0)
        cut_edges.append(
            f"{name} {on_host:g} (host)" if place else f"{name} {on_device:g} (device)"
        )
    neighbours = itertools.pairwise(zip(TOY, places, strict=True))
    for (upper, upper_place), (lower, lower_place) in neighbours:
        _draw_edge(ax, spots[upper], spots[lower], copy, is_cut=upper_place != lower_place)
    return cut_edges


def _draw_edge(ax: Any, start: Spot, end: Spot, milliseconds: float, *, is_cut: bool) -> None:
    """Draw one edge with its time: dashed and bold where the cut goes through it."""
    look: dict[str, Any] = {"color": st.GREY, "ls": "-"}
    if is_cut:
        look = {"color": st.VERMILLION, "lw": 2.4, "ls": "--"}
    ax.plot([start[0], end[0]], [start[1], end[1]], zorder=1, **look)
    x = 0.45 * start[0] + 0.55 * end[0]
    y = 0.45 * start[1] + 0.55 * end[1]
    back = {"boxstyle": "square,pad=0.15", "fc": st.PAPER, "ec": "none"}
    st.put(ax, x, y, f"{milliseconds:g}", bbox=back, weight="bold" if is_cut else "normal")


def _draw_operators(ax: Any, places: Sequence[int]) -> None:
    """Draw device and host as squares, and the operators as dots in the colour of their place."""
    marks = [("device", (DEVICE_X, MIDDLE_Y), 0), ("host", (HOST_X, MIDDLE_Y), 1)]
    for (name, spot), place in zip(_operator_spots().items(), places, strict=True):
        marks.append((name, spot, place))
    for name, (x, y), place in marks:
        colour, ink = (st.ORANGE, st.INK) if place else (st.BLUE, st.PAPER)
        ax.plot(x, y, "o" if name in TOY else "s", ms=30, color=colour, zorder=2)
        st.put(ax, x, y, name, color=ink, zorder=3)


def fig_frames(
    streams: int = 2,
    copy_ms: float = 1.0,
    net_ms: float = 1.0,
    out_ms: float = 0.2,
    frames: int = 6,
) -> st.LabFigure:
    """Draw when frames are copied in, computed and copied out, on some streams."""
    programs = pipeline_programs(frames, streams, copy_ms, net_ms, out_ms)
    rows = {"H2D": "copy in", "AI Core": "network", "D2H": "copy out"}
    spans = run_streams(programs)
    end_ms = max(span.end_s for span in spans)
    fig, ax = st.new_figure(height_in=2.0)
    for span in spans:
        frame = int(span.name.split()[1])
        colour = st.PALETTE[frame % streams]
        row = list(rows).index(span.engine)
        took_ms = span.end_s - span.start_s
        ax.barh(row, took_ms, 0.6, left=span.start_s, color=colour, ec=st.INK, lw=0.4)
        if took_ms > end_ms / 60:
            paper = {"boxstyle": "round,pad=0.15", "fc": st.PAPER, "ec": "none"}
            middle_ms = (span.start_s + span.end_s) / 2
            st.put(ax, middle_ms, row, str(frame), fontsize=7, bbox=paper)
    st.name_rows(ax, list(rows.values()))
    ax.set(xlim=(0, 1.02 * end_ms), xlabel="ms")
    plural = "stream" if streams == 1 else "streams"
    ax.set_title(f"{frames} frames on {streams} {plural}: {end_ms:.2f} ms", loc="left")
    busy = sum(span.end_s - span.start_s for span in spans if span.engine == "AI Core")
    alt = (
        f"{frames} frames on {streams} {plural}, a colour for each stream: copied in for "
        f"{copy_ms:.2f} ms, computed for {net_ms:.2f} ms, copied out for {out_ms:.2f} ms. All are "
        f"out after {end_ms:.2f} ms; the core works {busy / end_ms:.0%} of the time."
    )
    return st.finish(fig, alt=alt)
