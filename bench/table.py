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
    lines, above = [], ""
    for figure in figures:
        name = figure.name.strip()
        above, name = (above, f"{above}, {name}") if figure.name[0] == " " else (name, name)
        if figure.met is False:
            lines.append(f"missed: {name}: {figure.measured}, target {figure.target}")
    return "\n".join(lines) or "all targets met"
