"""Synchronous against asynchronous SGD, as rates: the slowest device's pace, or everyone's own.

Synchronous, each step waits for the slowest: E[max of n]. Asynchronous, a device updates shared
parameters when it is ready: E[mean], but its gradient was taken at parameters that others have
changed since ({cite}`chen2016revisiting`). How that changes the
values is another question; here is only time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """Gradients a second of all devices together, and staleness: updates by others in between."""

    synchronous_per_s: float
    asynchronous_per_s: float
    mean_staleness: float
    most_staleness: int

    @property
    def gain(self) -> float:
        """Asynchronous / synchronous rate."""
        return self.asynchronous_per_s / self.synchronous_per_s


def compare_rates(times_s: Any, exchange_s: float = 0.0, server_s: float = 0.0) -> Rates:
    """Compare the two from step times of shape (steps, devices), in seconds.

    `exchange_s` is one all-reduce, or one push and pull, per step; a parameter server takes
    `server_s` for each push and pull, so it serves at most 1 / server_s a second. Raises
    `InputError` for other shapes and times that are not above 0.
    """
    times: Times = np.asarray(times_s, float)
    if times.ndim != 2 or not times.size or not (times > 0).all() or min(exchange_s, server_s) < 0:
        got = f"shape {times.shape}"
        raise InputError("times (steps, devices) above 0, costs of at least 0", got, "correct them")
    steps, devices = times.shape
    together = float((times.max(axis=1) + exchange_s).sum())
    own = times + exchange_s
    rate = float((1.0 / own.mean(axis=0)).sum())
    if server_s:
        rate = min(rate, 1.0 / server_s)
    stale = staleness(own)
    return Rates(steps * devices / together, rate, float(stale.mean()), int(stale.max()))


def staleness(times_s: Times) -> NDArray[np.int64]:
    """Return, for every update (steps, devices), how many others happened since its device's last.

    Counted while all devices are still at work; of updates at one time the lower device's is first.
    """
    ends = np.cumsum(times_s, axis=0)
    order = np.argsort(ends.ravel(), kind="stable")
    rank = np.argsort(order, kind="stable").reshape(ends.shape)
    between = np.diff(rank, axis=0, prepend=-1) - 1
    found: NDArray[np.int64] = between[ends <= ends[-1].min()]
    return found
