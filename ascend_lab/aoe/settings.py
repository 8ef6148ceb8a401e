"""What a user may say about a tuning run, and the bars that show how far it is."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self, TextIO

from ascend_lab.errors import InputError

JOBS = {"1": "subgraph", "2": "operator"}
"""The published numbers of the jobs that may run together."""
ALONE = {"4": "gradient"}
"""Of those that run by themselves: this one needs a cluster."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Budgets and ways of a run.

    `budget`: unique candidates per operator. `time_limit_s`: for the whole network, shared by its
    operators in proportion to what they can still gain. `trial_limit_s`: for one candidate.
    `search`: the name of a search instead of the one that suits each operator. `repeat`: tune again
    what the bank knows. Where a cube's operator is not proven optimal, branch and bound tries
    `budget` more; with `deeper` as many as it takes, within `deeper_s` seconds an operator.
    `verify`: run every winner and compare its values with the default's. `prior`: let what the bank
    knows of vector operators steer the tree search of others.
    """

    budget: int = 200
    seed: int = 0
    time_limit_s: float | None = None
    trial_limit_s: float | None = 30.0
    early_stop: float | None = 4.0
    search: str = ""
    repeat: bool = False
    deeper: bool = False
    deeper_s: float = 10.0
    verify: bool = True
    prior: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` for numbers that make no sense."""
        if self.budget < 1:
            raise InputError("a budget of at least 1", str(self.budget), "raise it")
        limits = [self.time_limit_s, self.trial_limit_s, self.early_stop, self.deeper_s]
        if any(x is not None and x <= 0 for x in limits):
            raise InputError("limits above 0", str(limits), "raise them, or leave them out")


def jobs_of(text: str) -> tuple[str, ...]:
    """Return the jobs of a text such as "2" or "1,2", in the order they run: subgraph first."""
    given = [part.strip() for part in text.split(",")]
    if not text or any(job not in JOBS for job in given):
        names = ", ".join(f"{number} {name}" for number, name in {**JOBS, **ALONE}.items())
        remedy = "e.g. 2, or 1,2; 4 by itself: `aoe --job_type 4 --cluster NAME`, or tune_gradients"
        raise InputError(f"jobs among {names}", text or "nothing", remedy)
    return tuple(sorted(set(given)))


OVERALL = "all"
"""What progress of a whole run is called: compiling, slicing, each operator, the end."""
Progress = Callable[[str, int, int, str], None]
"""(what is tuned, done, out of, best so far as text) -> None."""

UNITS = {
    "read": "file",
    "compile": "pass",
    "cuts": "cut",
    "segments": "segment",
    "plans": "plan",
    "bounds": "operator",
    "proof": "kernel",
    "values": "check",
    "save": "file",
}
"""What the stages count; all others count trials."""


class Bars:
    """Shows progress as bars: in terminals and notebooks, or where it is `on`."""

    def __init__(self, on: bool | None = None, stream: TextIO | None = None) -> None:
        """Start without a bar; `on` decides, else whether somebody watches `stream` (stderr)."""
        self.stream = stream or sys.stderr
        notebook = type(self.stream).__module__.startswith("ipykernel")
        self.on = (notebook or self.stream.isatty()) if on is None else on
        self.label, self.best = "", math.inf
        self.bar: Any = None
        self.overall: Any = None

    def __call__(self, label: str, done: int, total: int, best: str) -> None:
        """Show `done` of at most `total`, and the least number that `best` began with."""
        if not self.on:
            return
        if label == OVERALL:
            self.overall = self.overall or self._bar(label, total, "step", 0)
            self.overall.total = total
            self.overall.update(done - self.overall.n)
            self.overall.refresh()
            return
        if self.bar is None or label != self.label:
            if self.bar is not None:
                self.bar.close()
            self.label, self.best = label, math.inf
            unit = UNITS.get(label.rpartition(", ")[2], "trial")
            self.bar = self._bar(label, total, unit, int(self.overall is not None))
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        with suppress(IndexError, ValueError):  # a text without a number in front is no best
            if (cost := float(best.split(maxsplit=1)[0])) < self.best:
                self.best = cost
                self.bar.set_postfix_str(f"best {best}")

    def _bar(self, label: str, total: int, unit: str, place: int) -> Any:
        tqdm = import_module("tqdm.auto").tqdm
        where = {"position": place} if place else {}
        return tqdm(total=total, desc=label, file=self.stream, leave=False, unit=unit, **where)

    def close(self) -> None:
        """End the bars."""
        for bar in (self.bar, self.overall):
            if bar is not None:
                bar.close()
        self.bar = self.overall = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
