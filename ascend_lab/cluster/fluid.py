"""Transfers as fluids: all that share a resource get fair shares of it, max-min.

A flow takes its rate from every resource (link) on its way. Rates are max-min fair: no flow can go
faster without slowing one that is not faster. They change only when a flow starts or ends, so time
goes from event to event, whatever the bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
EPSILON = 1e-9
"""Shares and moments that differ relatively by less are one."""


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Which flow uses which resource: two arrays of one length, and how many flows."""

    flow: Ints
    resource: Ints
    count: int

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> "Uses":
        """Return the uses of flows that take these resources."""
        lengths = np.array([len(path) for path in paths], np.int64)
        flat = np.array([r for path in paths for r in path], np.int64)
        return Uses(np.repeat(np.arange(len(paths)), lengths), flat, len(paths))

    def only(self, kept: NDArray[np.bool_]) -> "Uses":
        """Return the uses of some of the flows, numbered anew in order."""
        number, keep = np.cumsum(kept) - 1, kept[self.flow]
        return Uses(number[self.flow[keep]], self.resource[keep], int(kept.sum()))

    def components(self) -> Ints:
        """Return for every flow the least flow it shares resources with, if only through others."""
        label = np.arange(self.count)
        least = np.full(int(self.resource.max(initial=0)) + 1, self.count)
        while True:
            np.minimum.at(least, self.resource, label[self.flow])
            found = label.copy()
            np.minimum.at(found, self.flow, least[self.resource])
            found = found[found]
            if (found == label).all():
                return label
            label = found


def fair_rates(uses: Uses, capacity: Floats, active: NDArray[np.bool_] | None = None) -> Floats:
    """Return max-min fair rates of the active flows (others 0) by progressive filling.

    Of all resources the one with the least capacity a flow fills first and fixes the rate of its
    flows; what they leave of the others is shared on. Flows that use nothing, or only
    resources without limit, are infinitely fast.
    """
    rate = np.zeros(uses.count)
    open_flow = np.ones(uses.count, bool) if active is None else active.copy()
    left = np.array(capacity, float)
    finite = np.isfinite(left)
    while open_flow.any():
        live = open_flow[uses.flow]
        load = np.bincount(uses.resource[live], minlength=len(left))
        busy = (load > 0) & finite
        if not busy.any():
            rate[open_flow] = math.inf
            break
        share = np.full(len(left), math.inf)
        share[busy] = np.maximum(left[busy], 0.0) / load[busy]
        least = share.min()
        tight = share <= least * (1 + EPSILON)
        fixed = np.zeros(uses.count, bool)
        fixed[uses.flow[live & tight[uses.resource]]] = True
        rate[fixed] = least
        open_flow &= ~fixed
        left -= least * np.bincount(uses.resource[fixed[uses.flow]], minlength=len(left))
    return rate


def finish_times(starts_s: Floats, sizes: Floats, uses: Uses, capacity: Floats) -> Floats:
    """Return when each flow ends that starts at `starts_s` with `sizes` to carry.

    A flow of size 0 ends when it starts; one on a resource of capacity 0 never does (infinity).
    """
    ends, left = np.array(starts_s, float), np.array(sizes, float)
    waiting, now = left > 0, 0.0
    running = np.zeros(uses.count, bool)
    while waiting.any() or running.any():
        if not running.any():
            now = max(now, float(starts_s[waiting].min()))
        begin = waiting & (starts_s <= now * (1 + EPSILON))
        running |= begin
        waiting &= ~begin
        rate = fair_rates(uses, capacity, running)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(running, left / rate, math.inf)
        need[running & np.isinf(rate)] = 0.0
        coming = float(starts_s[waiting].min()) - now if waiting.any() else math.inf
        step = min(float(need.min()), coming)
        if math.isinf(step):
            ends[running] = math.inf
            break
        over = running & (need <= step * (1 + EPSILON))
        with np.errstate(invalid="ignore"):
            left = np.where(running & ~over, left - rate * step, left)
        now += step
        ends[over] = now
        running &= ~over
    return ends
