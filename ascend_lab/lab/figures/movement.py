"""Figures of the transpose and scatter chapter: block shapes, conflicts, ways to scatter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from ascend_lab.chip import BLOCK_BYTES
from ascend_lab.errors import InputError
from ascend_lab.lab.figures import style as st

SIDES = (1, 2, 4, 8, 16, 32, 64)
WAYS = {"owner": (st.BLUE, "o"), "atomic": (st.VERMILLION, "s"), "sorted": (st.GREEN, "^")}
HEAT = LinearSegmentedColormap.from_list("heat", [st.PAPER, "#f3c98b", "#d55e00"])


def wire_ratio(rows: int, columns: int, itemsize: int) -> float:
    """Bytes on the wires per byte moved when a matrix is transposed in rows x columns blocks.

    A block is loaded in bursts of `columns` elements and stored in bursts of `rows`; every burst
    takes whole 32-byte blocks. The mean of load and store.
    """
    bursts = [side * itemsize for side in (rows, columns)]
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES / size for size in bursts) / 2


def draw_indices(updates: int, rows: int, duplicates: float, seed: int = 0) -> NDArray[np.int64]:
    """Return `updates` row numbers, a share `duplicates` of them repeating an earlier one.

    Raises `InputError` unless the others find a row of their own.
    """
    fresh = updates - round(duplicates * updates)
    if not 1 <= fresh <= rows:
        raise InputError(
            f"between 1 and {rows} different rows", str(fresh), "change updates or duplicates"
        )
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(rows)[:fresh]
    again = rng.choice(chosen, updates - fresh)
    return rng.permutation(np.concatenate([chosen, again]))


def conflicts(index: NDArray[Any], cores: int) -> dict[int, list[int]]:
    """Return the rows that several cores write: row -> cores, updates dealt out in equal parts."""
    per = -(-len(index) // cores)
    writers: dict[int, set[int]] = {}
    for position, row in enumerate(index):
        writers.setdefault(int(row), set()).add(position // per)
    return {row: sorted(w) for row, w in sorted(writers.items()) if len(w) > 1}


@st.styled
def fig_blocks_and_conflicts(
    block_rows: int = 16,
    block_columns: int = 16,
    duplicates: float = 0.25,
    cores: int = 4,
    updates: int = 16,
    rows: int = 16,
    itemsize: int = 2,
    seed: int = 0,
) -> st.LabFigure:
    """Draw wire bytes over block shapes beside the cores and rows of a scatter.

    Left: every cell is a shape of block in which a matrix is transposed; the chosen one is framed.
    Right: an edge per update from the core that makes it to the row it changes; rows that more than
    one core changes are conflicts.
    """
    index = draw_indices(updates, rows, duplicates, seed)
    fig, (left, right) = st.new_figure(ncols=2, height_in=3.3, width_ratios=(1.15, 1))
    _heat(left, (block_rows, block_columns), itemsize)
    torn = _graph(right, index, cores, rows)
    ratio = wire_ratio(block_rows, block_columns, itemsize)
    corners = wire_ratio(1, 1, itemsize), wire_ratio(16, 16, itemsize)
    alt = (
        f"Left: bytes on the wires per byte moved for blocks of 1 to 64 rows and columns, from "
        f"{corners[0]:.3g} for single elements to {corners[1]:.3g} for 16 x 16; the framed block "
        f"{block_rows} x {block_columns} needs {ratio:.3g}. Right: {updates} updates of "
        f"{cores} cores to {len(set(index.tolist()))} of {rows} rows; {len(torn)} rows are written "
        f"by more than one core{_named(torn)}."
    )
    return st.finish(fig, alt=alt)


def _named(torn: Mapping[int, Sequence[int]]) -> str:
    parts = [f"row {row} by cores {', '.join(map(str, who))}" for row, who in torn.items()]
    return ": " + "; ".join(parts[:6]) if parts else ""


def _heat(ax: Any, chosen: tuple[int, int], itemsize: int) -> None:
    grid = np.array([[wire_ratio(r, c, itemsize) for c in SIDES] for r in SIDES])
    ax.imshow(grid, cmap=HEAT, norm=LogNorm(1, BLOCK_BYTES / itemsize), origin="lower")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            text = f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7, color="black")
    places = [float(np.log2(side)) for side in chosen]
    corner = places[1] - 0.5, places[0] - 0.5
    ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=2.2))
    ticks = range(len(SIDES))
    ax.set_xticks(ticks, [str(s) for s in SIDES])
    ax.set_yticks(ticks, [str(s) for s in SIDES])
    ax.set_xlabel("columns of a block (burst of the load)")
    ax.set_ylabel("rows (burst of the store)")
    ax.set_title("bytes on the wires per byte", loc="left")
    ax.tick_params(length=0)


def _graph(ax: Any, index: NDArray[Any], cores: int, rows: int) -> dict[int, list[int]]:
    torn = conflicts(index, cores)
    per = -(-len(index) // cores)
    height = float(max(rows - 1, 1))

    def core_y(core: int) -> float:
        return height * (1 - (core + 0.5) / cores)

    for position, row in enumerate(index):
        core, bad = position // per, int(row) in torn
        colour, width = (st.VERMILLION, 1.8) if bad else (st.GREY, 0.9)
        line = "-" if bad else "--"
        place = [core_y(core), height - int(row)]
        ax.plot([0, 1], place, color=colour, lw=width, ls=line, zorder=1)
    for core in range(cores):
        ax.plot(0, core_y(core), marker="s", ms=15, mfc=st.PAPER, mec=st.BLUE, mew=1.4, zorder=2)
        ax.text(0, core_y(core), str(core), ha="center", va="center", fontsize=8, color="black")
    for row in range(rows):
        bad = row in torn
        face, edge = (st.VERMILLION, st.VERMILLION) if bad else (st.PAPER, st.GREEN)
        marker = "X" if bad else "o"
        ax.plot(1, height - row, marker=marker, ms=6.5, mfc=face, mec=edge, zorder=2)
        ax.text(1.07, height - row, str(row), va="center", fontsize=7, color=st.INK)
    ax.text(0, height + 1.1, "cores", ha="center", color=st.INK)
    ax.text(1, height + 1.1, "rows", ha="center", color=st.INK)
    ax.set_title(f"{len(torn)} torn rows", loc="left")
    ax.set(xlim=(-0.2, 1.25), ylim=(-0.8, height + 2))
    ax.axis("off")
    return torn


@st.styled
def fig_scatter_ways(
    times_each: Sequence[int],
    moved_bytes: Mapping[str, Sequence[float]],
    cycles: Mapping[str, Sequence[float]],
) -> st.LabFigure:
    """Draw bytes and cycles of ways to scatter over how often each row is updated.

    `moved_bytes` and `cycles` give per way (owner, atomic, sorted) one number per entry of
    `times_each`. Raises `InputError` for another way or other lengths.
    """
    for name, values in (*moved_bytes.items(), *cycles.items()):
        if name not in WAYS or len(values) != len(times_each):
            needed = f"{len(times_each)} numbers for each of {', '.join(WAYS)}"
            raise InputError(needed, f"{name}: {len(values)}", "give one per entry of times_each")
    fig, (left, right) = st.new_figure(ncols=2, height_in=2.6)
    panels = ((left, moved_bytes, 1e-3, "kB through memory"), (right, cycles, 1e-3, "kilocycles"))
    for ax, data, factor, label in panels:
        for name, values in data.items():
            colour, marker = WAYS[name]
            scaled = [v * factor for v in values]
            ax.plot(times_each, scaled, color=colour, marker=marker, ms=5, label=name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(times_each, [str(t) for t in times_each])
        ax.minorticks_off()
        ax.set_xlabel("updates of each row")
        ax.set_ylabel(label)
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    right.legend(loc="center right")
    parts = []
    for name, values in moved_bytes.items():
        first, last = values[0] / 1e3, values[-1] / 1e3
        clock = cycles[name]
        parts.append(
            f"{name} {first:.0f} to {last:.0f} kB and {clock[0]:,.0f} to {clock[-1]:,.0f} cycles"
        )
    span = f"from {times_each[0]} to {times_each[-1]} updates of each row"
    return st.finish(fig, alt=f"Bytes and cycles of a scatter {span}: {'; '.join(parts)}.")
