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
from ascend_lab.serving import Arrivals, Policy, Scenario, Service, Step, simulate_serving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascend_lab.serving import Served

LOADS = (0.1, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Shares of a server's capacity at which it is simulated."""


TICKS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


@styled
def fig_knee(
    seconds: Sequence[float], max_batch: int = 8, delay_ms: float = 0.0, instances: int = 1
) -> LabFigure:
    """Return mean and p99 by rate, one at a time and in batches of service times `seconds`."""
    fig, ax = new_figure(height_in=3.0)
    servers = {"one at a time": Policy(), f"up to {max_batch}": Policy(
        instances, max_batch, delay_ms / 1e3)}  # fmt: skip
    service, told, highest = Service(seconds=tuple(seconds)), [], 1.0
    for (name, policy), colour in zip(servers.items(), (VERMILLION, BLUE), strict=True):
        most = policy.max_batch
        capacity = policy.instances * most / service.batch_s(most)
        rates = [load * capacity for load in LOADS]
        found = [
            simulate_serving(
                Scenario(Arrivals(rate_per_s=rate), (Step("m", service, policy),), 12_000, 1, 2000)
            ).latency_s * 1e3
            for rate in rates
        ]  # fmt: skip
        ax.plot(rates, [x.mean() for x in found], "o-", color=colour, label=f"{name}: mean")
        p99 = [float(np.percentile(x, 99)) for x in found]
        highest = max(highest, *p99)
        ax.plot(rates, p99, "s--", color=colour, label=f"{name}: p99")
        ax.axvline(capacity, color=colour, linestyle=":", linewidth=1, label=f"{name}: capacity")
        told.append(f"{name} p99 {p99[0]:.1f} ms at {rates[0]:.0f} a second, {p99[-1]:.0f} ms at "
                    f"{rates[-1]:.0f}, capacity {capacity:.0f}")  # fmt: skip
    ax.set(xlabel="requests a second", ylabel="time to the answer (ms)", yscale="log")
    ax.set_yticks(TICKS_MS, labels=[f"{ms:g}" for ms in TICKS_MS])
    ax.minorticks_off()
    ax.set_ylim(0.8e3 * service.batch_s(1), 1.3 * highest)
    ax.legend()
    return finish(fig, alt=f"Times that rise slowly, then like a wall. {'; '.join(told)}.")


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
