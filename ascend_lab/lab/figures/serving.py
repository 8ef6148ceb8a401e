"""Figures of servers: what requests wait for, and how many answers fit in a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ascend_lab.lab.figures.style import (
    BLUE,
    INK,
    VERMILLION,
    LabFigure,
    finish,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from ascend_lab.serving import Served


@styled
def fig_served(served: Served) -> LabFigure:
    """Return the share of requests answered within a time, and the histogram of batches."""
    fig, (left, right) = new_figure(ncols=2, height_in=2.6, width_ratios=(3, 2))
    times_s = np.sort(served.latency_s)
    shares = np.arange(1, len(times_s) + 1) / max(len(times_s), 1)
    shown = np.linspace(0, max(len(times_s) - 1, 0), min(len(times_s), 400)).astype(int)
    left.plot(times_s[shown], shares[shown], color=BLUE)
    told = []
    for percent in (50, 95, 99) if len(times_s) else ():
        value = float(np.percentile(times_s, percent))
        left.axvline(value, color=VERMILLION, linestyle=":", linewidth=1)
        left.text(value, percent / 100 - 0.12, f" p{percent}", color=INK, fontsize=8)
        told.append(f"p{percent} {value:.4g} s")
    left.set(xlabel="time to the answer (s)", ylabel="share of requests", ylim=(0, 1.02))
    sizes, counts = np.unique(served.batches(), return_counts=True)
    right.bar(sizes, counts / max(counts.sum(), 1), color=BLUE, hatch="//", edgecolor=INK)
    right.set(xlabel="items in a batch", ylabel="share of batches")
    mean = f"{sizes @ counts / counts.sum():.3g}" if len(sizes) else "none"
    return finish(fig, alt=f"Answers within a time: {', '.join(told)}; mean batch {mean} items.")
