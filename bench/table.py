"""The rows of `lab.py bench`: a figure beside its target, and how seconds are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

CHIPS = ("Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2")


class Figure(NamedTuple):
    """One measured figure beside its target; `met` is None where it is information only."""

    name: str
    measured: str
    target: str
    met: bool | None

    def line(self) -> str:
        """Return the row as text."""
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"{self.name:<34}{self.measured:>20}   {self.target:<14}{verdict}".rstrip()


def below(name: str, seconds: float, limit_s: float | None = None, unit: str = "ms") -> Figure:
    """Return seconds as a figure that should stay below a limit."""
    scale, digits = {"ms": (1e3, 2), "s": (1, 2)}[unit]
    target = "" if limit_s is None else f"< {limit_s * scale:g} {unit}"
    met = None if limit_s is None else seconds < limit_s
    return Figure(name, f"{seconds * scale:.{digits}f} {unit}", target, met)


def times(name: str, ratio: float, limit: float | None = None) -> Figure:
    """Return a ratio as a figure that should stay below a limit."""
    met = None if limit is None else ratio < limit
    return Figure(name, f"{ratio:.2f}x", "" if limit is None else f"< {limit:g}x", met)


def median_s(action: Callable[[], object], repeats: int = 41) -> float:
    """Return the median seconds of an action, after one run to warm up."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def closing(figures: Sequence[Figure]) -> str:
    """Return the last lines: every target that was missed, under what it belongs to, or none."""
    lines = []
    above = ""
    for figure in figures:
        name = figure.name.strip()
        above, name = (above, f"{above}, {name}") if figure.name[0] == " " else (name, name)
        if figure.met is False:
            lines.append(f"missed: {name}: {figure.measured}, target {figure.target}")
    return "\n".join(lines) or "all targets met"
