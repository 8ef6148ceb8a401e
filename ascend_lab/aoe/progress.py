"""Progress bars of the whole run and of its stage, in a terminal or a notebook."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from types import TracebackType
from typing import Any, TextIO

from ascend_lab.aoe.settings import OVERALL

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
    """Shows what the tuner says (`settings.Progress`) as bars; silent where nobody looks.

    Without `on`, terminals and notebooks get bars, files and pipes do not.
    """

    def __init__(self, on: bool | None = None, stream: TextIO | None = None) -> None:
        """Start without a bar; `on` decides, else whether somebody watches `stream` (stderr)."""
        self.stream = stream or sys.stderr
        notebook = type(self.stream).__module__.startswith("ipykernel")
        self.on = (notebook or self.stream.isatty()) if on is None else on
        self.label = ""
        self.best = math.inf
        self.bar: Any = None
        self.overall: Any = None

    def __call__(self, label: str, done: int, total: int, best: str) -> None:
        """Show that `done` of at most `total` candidates are tried; a new label is a new bar.

        The least number that `best` began with is shown. The bar of `OVERALL` stands above.
        """
        if not self.on:
            return
        if label == OVERALL:
            self.overall = self.overall or self._bar(label, total, "step", 0)
            self.overall.total = total
            self.overall.update(done - self.overall.n)
            self.overall.refresh()
            return
        if self.bar is None or label != self.label:
            self._end("bar")
            self.label, self.best = label, math.inf
            unit = UNITS.get(label.rpartition(", ")[2], "trial")
            self.bar = self._bar(label, total, unit, int(self.overall is not None))
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        cost = _number(best)
        if cost < self.best:
            self.best = cost
            self.bar.set_postfix_str(f"best {best}")

    def _bar(self, label: str, total: int, unit: str, place: int) -> Any:
        tqdm = import_module("tqdm.auto").tqdm
        where = {"position": place} if place else {}
        return tqdm(total=total, desc=label, file=self.stream, leave=False, unit=unit, **where)

    def _end(self, name: str) -> None:
        if getattr(self, name) is not None:
            getattr(self, name).close()
            setattr(self, name, None)

    def close(self) -> None:
        """End the bars."""
        self._end("bar")
        self._end("overall")

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(text: str) -> float:
    """Return the number that a text such as "0.01 s" begins with, else infinity."""
    try:
        return float(text.split(maxsplit=1)[0])
    except (IndexError, ValueError):
        return math.inf
