"""How far a simulated mean can be trusted: batch means, and the interval around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab.errors import InputError

GROUPS = 20
T_99 = 2.8609
"""Two-sided 99 % quantile of Student's t with GROUPS - 1 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and what holds the true one in 99 of 100 simulations."""

    mean: float
    half: float

    def __contains__(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half


def interval(samples: Any) -> Interval:
    """Return mean and 99 % interval of samples that depend on their neighbours, by batch means.

    The means of `GROUPS` long stretches are nearly independent. Raises `InputError` for fewer than
    ten samples a stretch.
    """
    values = np.asarray(samples, float)
    if len(values) < 10 * GROUPS:
        raise InputError(f"at least {10 * GROUPS} samples", str(len(values)), "simulate longer")
    means = np.array([part.mean() for part in np.array_split(values, GROUPS)])
    return Interval(float(values.mean()), T_99 * float(means.std(ddof=1)) / GROUPS**0.5)
