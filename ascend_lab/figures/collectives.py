"""Figures of collectives: who holds what after each round, and which algorithm wins where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch, Rectangle

from ascend_lab.cluster import Schedule, Topology, execute, load_topology
from ascend_lab.cluster.collectives import collective_time
from ascend_lab.errors import InputError
from ascend_lab.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    LabFigure,
    finish,
    new_figure,
    styled,
)

SHADES = LinearSegmentedColormap.from_list("held", ["#FFFFFF", BLUE])
MOST_PANELS = 8
FAMILIES = {
    "recursive-doubling": ("RD", SKY),
    "tree": ("T", GREY),
    "mesh": ("M", YELLOW),
    "halving-doubling": ("HD", GREEN),
    "nhr": ("N", PURPLE),
    "bruck": ("B", SKY),
    "pairwise": ("PW", ORANGE),
    "star": ("S", PURPLE),
    "ring": ("R", ORANGE),
    "double-ring": ("2R", ORANGE),
    "chain": ("C", VERMILLION),
    "pipeline": ("P", PURPLE),
    "hierarchical": ("H", BLUE),
}
"""Letters and colour of each algorithm in the map."""
DARK = (BLUE, VERMILLION, GREEN, GREY)
"""Colours on which letters are white."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


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


@styled
def fig_best_collective(
    kind: str = "910a-roce",
    counts: Sequence[int] = (2, 4, 8, 16, 32, 64),
    sizes_bytes: Sequence[int] = tuple(2**k for k in range(10, 31, 2)),
    op: str = "all_reduce",
) -> LabFigure:
    """Draw which algorithm is quickest for every size and number of devices of a cluster.

    `kind` is a topology that takes a count. Cells bear letters; the legend names them.
    """
    names = [[_winner(op, load_topology(f"{kind}:{p}"), n) for n in sizes_bytes] for p in counts]
    fig, ax = new_figure(height_in=0.55 + 0.36 * len(counts))
    for (row, column), name in np.ndenumerate(np.array(names)):
        letters, colour = FAMILIES[name]
        ink = "#FFFFFF" if colour in DARK else INK
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fc=colour, ec="#FFFFFF", lw=1))
        ax.text(column, row, letters, ha="center", va="center", fontsize=8, color=ink)
    ax.set(xlim=(-0.5, len(sizes_bytes) - 0.5), ylim=(-0.5, len(counts) - 0.5))
    ax.set(xlabel="size", ylabel="devices")
    ax.set_xticks(range(len(sizes_bytes)), [_size(n) for n in sizes_bytes])
    ax.set_yticks(range(len(counts)), [str(p) for p in counts])
    ax.tick_params(length=0)
    used = [name for name in FAMILIES if any(name in line for line in names)]
    patches = [Patch(fc=FAMILIES[n][1], ec=INK, label=f"{FAMILIES[n][0]}: {n}") for n in used]
    fig.legend(handles=patches, loc="outside upper center", ncols=min(4, len(used)), frameon=False)
    lines = zip(counts, names, strict=True)
    said = "; ".join(f"{p} devices {_runs(line, sizes_bytes)}" for p, line in lines)
    return finish(fig, alt=f"The quickest {op} on {kind}: {said}.")


def _winner(op: str, topology: Topology, size_bytes: int) -> str:
    """Return the family of the quickest algorithm: its name without levels and chunks."""
    algorithm = collective_time(op, topology, size_bytes).algorithm
    return algorithm.partition("(")[0].partition("*")[0]


def _size(size_bytes: int) -> str:
    for unit, name in UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}".replace(" ", "\n")
    return "0"


def _runs(line: Sequence[str], sizes_bytes: Sequence[int]) -> str:
    """Return "ring from 1 KiB, mesh from 4 KiB" for a row of the map."""
    found = []
    for i, name in enumerate(line):
        if i == 0 or name != line[i - 1]:
            found.append(f"{name} from {_size(sizes_bytes[i])}".replace("\n", " "))
    return ", ".join(found)
