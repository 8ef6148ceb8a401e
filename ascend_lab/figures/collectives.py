"""Figures of collectives: who holds what after each round, and which algorithm wins where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from ascend_lab.cluster import Schedule, execute
from ascend_lab.errors import InputError
from ascend_lab.figures.style import (
    BLUE,
    INK,
    LabFigure,
    finish,
    new_figure,
    styled,
)

SHADES = LinearSegmentedColormap.from_list("held", ["#FFFFFF", BLUE])
MOST_PANELS = 8


def contributions(
    schedule: Schedule, rounds: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return (rank, block): of how many ranks an all-reduce holds the sum after some rounds."""
    if schedule.op != "all_reduce":
        raise InputError("an all_reduce to count contributions of", schedule.op, "make one")
    cut = replace(schedule, rounds=schedule.rounds[:rounds])
    ones = [np.ones(schedule.blocks, np.int64)] * schedule.ranks
    return np.stack(execute(cut, ones))


@styled
def fig_holdings(schedule: Schedule, after: Sequence[int] | None = None) -> LabFigure:
    """Draw, after some rounds of an all-reduce, of how many ranks each block holds the sum.

    One panel a round, one row a rank, one column a block. Raises `InputError` for another
    operation, or more rounds than can be drawn.
    """
    shown = tuple(range(len(schedule.rounds) + 1)) if after is None else tuple(after)
    if not 0 < len(shown) <= MOST_PANELS:
        raise InputError(f"at most {MOST_PANELS} rounds to draw", str(len(shown)), "choose some")
    fig, axes = new_figure(ncols=len(shown), height_in=1.7)
    panels = np.atleast_1d(axes)
    said = []
    for number, ax in zip(shown, panels, strict=True):
        held = contributions(schedule, number)
        ax.imshow(held, cmap=SHADES, vmin=0, vmax=schedule.ranks, aspect="equal")
        for (rank, block), count in np.ndenumerate(held):
            dark = count > schedule.ranks / 2
            ax.text(
                block,
                rank,
                str(count),
                ha="center",
                va="center",
                fontsize=8,
                color="#FFFFFF" if dark else INK,
            )
        ax.set(title="start" if number == 0 else f"round {number}", xticks=[], yticks=[])
        ax.tick_params(length=0)
        said.append(f"after {number} rounds {int((held == schedule.ranks).sum())} complete")
    panels[0].set(ylabel="rank", xlabel="block")
    panels[0].set_yticks(range(schedule.ranks))
    text = f"{schedule.algorithm} all-reduce of {schedule.ranks} ranks, {schedule.blocks} blocks"
    return finish(fig, alt=f"{text}. Of {schedule.ranks * schedule.blocks}: {', '.join(said)}.")
