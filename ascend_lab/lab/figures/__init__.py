"""The figures of the book: functions `fig_*(...) -> Figure`, without side effects, in one style.

`figures.fig_levels(...)` finds the function in its module, which is imported when first used. To
add a figure, write a function `fig_*` in a module of this package; `FIGURES` lists it by itself.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

FIGURES: dict[str, str] = {
    name: module.stem
    for module in sorted(Path(__file__).parent.glob("*.py"))
    for name in re.findall(r"^def (fig_\w+)\(", module.read_text("utf-8"), re.MULTILINE)
}
"""Figure function -> module of this package that defines it."""


def __getattr__(name: str) -> Any:
    """Return a figure function, which draws in the style of the book."""
    if name in FIGURES:
        return _styled(name)
    known = ", ".join(sorted(FIGURES))
    raise AttributeError(f"{__name__} has no figure {name!r}; there are: {known}")


@cache
def _styled(name: str) -> Any:
    """Import a figure function, and return it with the style of the book around it."""
    from ascend_lab.lab.figures.style import styled

    return styled(getattr(import_module(f"{__name__}.{FIGURES[name]}"), name))


def __dir__() -> list[str]:
    return sorted([*FIGURES, "FIGURES"])
