"""What an all-reduce of so many bytes takes: any callable `size_bytes -> seconds`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.aoe.gradient.rows import LONGEST_S, Floats
from ascend_lab.errors import InputError

Cost = Callable[[float], float]
"""`size_bytes -> seconds`; a method `many(sizes) -> seconds` on arrays makes planning faster."""
Price = Callable[[Floats], Floats]
"""The same on arrays."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """alpha + beta * bytes: a startup, and a time for every byte."""

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that are not finite and at least 0."""
        for value in (self.alpha_s, self.beta_s_per_byte):
            if not (math.isfinite(value) and value >= 0):
                raise InputError("alpha and beta of at least 0", str(value), "check the units")

    def __call__(self, size_bytes: float) -> float:
        """Return the seconds of one all-reduce."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes

    def many(self, sizes_bytes: Floats) -> Floats:
        """Return the seconds of many."""
        found: Floats = self.alpha_s + self.beta_s_per_byte * sizes_bytes
        return found


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A measured table, made non-decreasing and joined by lines.

    Where a measured time falls with the size, neighbouring rows are replaced by their mean until
    it does not (least squares: "pool adjacent violators", Ayer et al. 1955). Below the first row
    its time holds; above the last the line goes on with the slope from the origin to the last row.
    """

    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]
    _x: Floats = field(init=False, repr=False, compare=False)
    _y: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise `InputError` for a table that is empty, unordered, negative or not finite."""
        x, y = np.array(self.sizes_bytes, np.float64), np.array(self.times_s, np.float64)
        if not len(x) or len(x) != len(y):
            raise InputError("a time for each size, one at least", f"{len(x)} and {len(y)}")
        if not (np.all(np.isfinite(x)) and x[0] >= 0 and np.all(np.diff(x) > 0)):
            raise InputError("sizes of at least 0, each above the one before", str(x)[:80])
        if not (np.all(np.isfinite(y)) and np.all(y >= 0)):
            raise InputError("times of at least 0 s", str(y)[:80])
        object.__setattr__(self, "_x", x)
        object.__setattr__(self, "_y", _rising(y))

    def __call__(self, size_bytes: float) -> float:
        """Return the seconds of one all-reduce."""
        return float(self.many(np.array([size_bytes], np.float64))[0])

    def many(self, sizes_bytes: Floats) -> Floats:
        """Return the seconds of many."""
        x, y = self._x, self._y
        slope = y[-1] / x[-1] if x[-1] > 0 else 0.0
        beyond = np.maximum(sizes_bytes - x[-1], 0.0)
        found: Floats = np.interp(sizes_bytes, x, y) + slope * beyond
        return found


def sampled(
    cost: Cost, most_bytes: float, *, least_bytes: float = 1024.0, per_octave: int = 2
) -> Piecewise:
    """Return a slow cost as a table of so many sizes per octave, `most_bytes` among them.

    For times with one straight line per algorithm the table errs only where the algorithm changes.
    Below one byte its cost holds: an all-reduce of nothing is still started.
    """
    most = max(float(most_bytes), 2 * least_bytes)
    count = math.ceil(per_octave * math.log2(most / least_bytes)) + 1
    sizes = [1.0, *np.geomspace(least_bytes, most, count).round().tolist()]
    return Piecewise(tuple(sizes), tuple(float(cost(size)) for size in sizes))


def price_of(cost: Cost) -> Price:
    """Return a cost on arrays, checked: `InputError` for times below 0 or without end."""
    many = getattr(cost, "many", None)
    known: dict[float, float] = {}

    def each(sizes: Floats) -> Floats:
        keys = sizes.tolist()
        known.update({size: float(cost(size)) for size in keys if size not in known})
        return np.array([known[size] for size in keys], np.float64)

    found: Price = each if many is None else many

    def price(sizes: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            times = found(sizes)
        if not ((times >= 0) & (times <= LONGEST_S)).all():
            got = str(times)[:80]
            raise InputError(f"a cost of at least 0 and at most {LONGEST_S:g} s", got)
        return times

    return price


def startup_s(cost: Cost) -> float:
    """Return what an all-reduce takes beyond its bytes: alpha, else the cost of one byte."""
    alpha_s = getattr(cost, "alpha_s", None)
    return float(cost(1.0) if alpha_s is None else alpha_s)


def _rising(values: Sequence[float] | Floats) -> Floats:
    """Return the non-decreasing values closest to `values` by least squares."""
    pools: list[list[float]] = []  # sum and count of each
    for value in values:
        pools.append([float(value), 1.0])
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    return np.concatenate([np.full(int(count), total / count) for total, count in pools])
