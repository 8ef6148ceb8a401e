"""The model against published measurements, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascend_lab.kernels.validation import PIPES, SHARE_LIMIT, TIME_LIMIT, ValidationRow
from ascend_lab.lab.figures import style as st


@st.styled
def fig_validation(rows: Sequence[ValidationRow]) -> st.LabFigure:
    """Draw, per published row, the error of the time and of each pipe's busy share.

    Shaded bands mark the goals; a filled marker lies inside its band, an open one outside.
    """
    shown = list(rows)
    fig, (left, right) = st.new_figure(1, 2, height_in=0.9 + 0.26 * len(shown), sharey=True)
    for y, row in enumerate(shown):
        _mark(left, 100 * row.time_error, y, st.BLUE, "o", abs(row.time_error) <= TIME_LIMIT)
        for pipe, (colour, marker) in zip(PIPES, _MARKS, strict=True):
            error = row.share_errors[pipe]
            _mark(right, 100 * error, y, colour, marker, abs(error) <= SHARE_LIMIT)
    for ax, limit, label in (
        (left, TIME_LIMIT, "time: model / published - 1, %"),
        (right, SHARE_LIMIT, "busy share: model - publ., points"),
    ):
        ax.axvspan(-100 * limit, 100 * limit, color=st.LIGHT, zorder=0)
        ax.axvline(0, color=st.GREY, linewidth=0.8)
        ax.set_xlabel(label)
    left.set_yticks(range(len(shown)), [row.name for row in shown])
    left.invert_yaxis()
    _legend(right)
    return st.finish(fig, alt=_alt(shown))


_MARKS = ((st.BLUE, "o"), (st.ORANGE, "s"), ("#009E73", "^"), ("#CC79A7", "D"))


def _mark(ax: Any, x: float, y: int, colour: str, marker: str, inside: bool) -> None:
    face = colour if inside else "#FFFFFF"
    ax.plot([x], [y], marker=marker, color=colour, markerfacecolor=face, linestyle="none")


def _legend(ax: Any) -> None:
    handles = [
        ax.plot([], [], marker=m, color=c, linestyle="none", label=pipe)[0]
        for pipe, (c, m) in zip(PIPES, _MARKS, strict=True)
    ]
    ax.legend(handles=handles, loc="lower left", ncols=2)


def _alt(rows: Sequence[ValidationRow]) -> str:
    inside = sum(not row.misses for row in rows)
    worst = max(rows, key=lambda row: abs(row.time_error))
    return (
        f"Errors of the model on {len(rows)} published rows. {inside} of them lie inside both "
        f"bands; the largest error of a time is {worst.time_error:+.0%} at {worst.name}."
    )
