"""Figures of the gradient tuner: buckets under backward, and what size of bucket does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ascend_lab.aoe.gradient import AlphaBeta, Cost, Gradient, end_of, plan
from ascend_lab.aoe.gradient.planning import MIB, by_cap
from ascend_lab.aoe.gradient.splits import Split, table_of
from ascend_lab.errors import InputError
from ascend_lab.lab.figures import style as st
from ascend_lab.train.timeline import checked


def lanes_of(split: Split, rows: Sequence[Gradient], cost: Cost) -> list[tuple[float, float]]:
    """Return when each bucket starts to be sent and how long that takes, in seconds."""
    table, end, found = table_of(rows), 0.0, []
    for (_, last), size in zip(split, table.sizes_bytes(split), strict=True):
        start, time_s = max(end, float(table.ready_s[last])), float(cost(float(size)))
        found.append((start, time_s))
        end = start + time_s
    return found


@st.styled
def fig_buckets(
    rows: Sequence[Gradient], cost: Cost, splits: Mapping[str, Sequence[Sequence[int]]]
) -> st.LabFigure:
    """Draw backward, and below it when each split sends its buckets; a dot where one is ready.

    Raises `InputError` without a split.
    """
    if not splits:
        raise InputError("at least one split to draw", "none", "name one")
    table = table_of(rows)
    backward = float(table.ready_s[-1])
    fig, ax = st.new_figure(height_in=0.9 + 0.42 * len(splits))
    ax.barh(0, 1e3 * backward, height=0.6, fc=st.SKY, ec=st.INK, lw=0.5)
    ax.text(1e3 * backward / 2, 0, "backward", ha="center", va="center", fontsize=8)
    said = []
    for row, (name, given) in enumerate(splits.items(), 1):
        split = checked(given, len(rows))
        for i, (start, time_s) in enumerate(lanes_of(split, rows, cost)):
            ax.barh(
                row,
                1e3 * time_s,
                left=1e3 * start,
                height=0.6,
                ec=st.INK,
                lw=0.3,
                fc=(st.BLUE, st.ORANGE)[i % 2],
            )
        end = end_of(split, rows, cost)
        ax.text(1e3 * end, row, f" {1e3 * end:.1f}", va="center", fontsize=8)
        said.append(f"{name} {len(split)} buckets, end {1e3 * end:.2f} ms")
    ax.axvline(1e3 * backward, color=st.VERMILLION, lw=1, ls="--", zorder=0)
    ax.set_yticks(range(len(splits) + 1), ["compute", *splits])
    ax.invert_yaxis()
    ax.margins(x=0.09)
    ax.set(xlabel="ms from the start of backward", xlim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    return st.finish(fig, alt=f"Backward takes {1e3 * backward:.2f} ms; {'; '.join(said)}.")


@st.styled
def fig_caps(
    rows: Sequence[Gradient], alpha_us: float = 400.0, gbytes_per_s: float = 1.0, points: int = 41
) -> st.LabFigure:
    """Draw when all is sent if buckets close at a size, over that size, beside the best split."""
    if alpha_us < 0 or gbytes_per_s <= 0 or points < 2:
        got = f"{alpha_us} us, {gbytes_per_s} GB/s, {points} points"
        raise InputError("alpha of at least 0, a rate above 0, two points", got, "change them")
    cost, table = AlphaBeta(1e-6 * alpha_us, 1e-9 / gbytes_per_s), table_of(rows)
    total = float(table.sums_bytes[-1])
    caps = np.geomspace(max(total / 4000, 1.0), total, points)
    ends = [1e3 * end_of(by_cap(table, float(cap)), rows, cost) for cap in caps]
    best = plan(rows, cost)
    fig, ax = st.new_figure(height_in=2.6)
    ax.plot(caps / MIB, ends, color=st.BLUE, ls="-", marker="o", ms=3)
    ax.axhline(1e3 * best.end_s, color=st.VERMILLION, ls="--", lw=1.2)
    ax.text(caps[0] / MIB, 1e3 * best.end_s, "best split", va="bottom", fontsize=8)
    ax.axhline(1e3 * best.ready_s, color=st.GREY, ls=":", lw=1.2)
    ax.text(caps[0] / MIB, 1e3 * best.ready_s, "backward", va="top", fontsize=8)
    ax.set(
        xscale="log",
        xlabel="bucket closed at (MiB)",
        ylabel="all sent (ms)",
        ylim=(0, max(ends) * 1.05),
    )
    ax.grid(color=st.LIGHT, lw=0.6)
    low = int(np.argmin(ends))
    text = f"alpha {alpha_us:g} us, {gbytes_per_s:g} GB/s: best single size {caps[low] / MIB:.2f}"
    return st.finish(
        fig,
        alt=f"{text} MiB with {ends[low]:.2f} ms; smallest {ends[0]:.2f}, one bucket "
        f"{ends[-1]:.2f}; best split {1e3 * best.end_s:.2f}; backward {1e3 * best.ready_s:.2f}.",
    )


def toy_rows(ready: Sequence[float], sizes: Sequence[int]) -> tuple[Gradient, ...]:
    """Return gradients g0, g1, ... from ready times in seconds and sizes in bytes."""
    pairs: Any = zip(ready, sizes, strict=True)
    return tuple(Gradient(f"g{i}", float(r), int(s)) for i, (r, s) in enumerate(pairs))
