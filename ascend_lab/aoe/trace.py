"""What a search did: every trial in order, so that curves, reports and grading read one object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ascend_lab.aoe.space import Point
from ascend_lab.errors import InputError


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: its cost (infinite if it failed) and a note that says why, or ""."""

    number: int
    point: Point
    cost: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The trials of one search, and why it ended.

    `end`: "exhausted" (nothing left to try), "proven" (nothing better left), "budget", "time", or
    "interrupted".
    """

    names: tuple[str, ...]
    trials: tuple[Trial, ...]
    end: str
    seed: int = 0

    @property
    def best(self) -> Trial:
        """The first trial of least cost; raises `InputError` if none succeeded."""
        good = [t for t in self.trials if math.isfinite(t.cost)]
        if not good:
            notes = {t.note for t in self.trials}
            got = f"{len(self.trials)} trials: {'; '.join(sorted(notes))[:200]}"
            raise InputError("a candidate that can be built", got, "widen the space")
        return min(good, key=lambda t: t.cost)

    @property
    def best_so_far(self) -> list[float]:
        """Least cost after each trial."""
        return list(accumulate((t.cost for t in self.trials), min))

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Trials that gave no cost."""
        return tuple(t for t in self.trials if not math.isfinite(t.cost))

    def as_dict(self) -> Mapping[str, Any]:
        """Return the trace as plain data; failed trials have cost None."""
        rows = [
            {
                "number": t.number,
                "point": dict(zip(self.names, t.point, strict=True)),
                "cost": t.cost if math.isfinite(t.cost) else None,
                "note": t.note,
            }
            for t in self.trials
        ]
        return {"end": self.end, "seed": self.seed, "trials": rows}
