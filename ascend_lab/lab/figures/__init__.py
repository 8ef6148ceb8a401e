"""Figures: pure functions `fig_*(...) -> Figure`, loaded when first used, drawn in one style.

To add a figure write it in a module of this package.
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
    if name in FIGURES:
        return _styled(name)
    known = ", ".join(sorted(FIGURES))
    raise AttributeError(f"{__name__} has no figure {name!r}; there are: {known}")


@cache
def _styled(name: str) -> Any:
    from ascend_lab.lab.figures.style import styled

    return styled(getattr(import_module(f"{__name__}.{FIGURES[name]}"), name))


def __dir__() -> list[str]:
    return sorted([*FIGURES, "FIGURES"])
