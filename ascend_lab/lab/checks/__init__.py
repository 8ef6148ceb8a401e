"""Checks of the exercises, `check_ex_NN_k(fn, seed=...)`, and predictions to compare.

The checks of a chapter are loaded when first used.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from ascend_lab.lab.checks.core import CheckResult, check_property, compare, like, predict

__all__ = ["CheckResult", "check_property", "compare", "like", "predict"]
HOMES = {
    name: module.stem
    for module in sorted(Path(__file__).parent.glob("chapter*.py"))
    for name in re.findall(
        r"^(?:def )?(check_ex_\d\d[a-z]?_\d+)", module.read_text("utf-8"), re.MULTILINE
    )
}
"""Check -> module of this package that defines it."""


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    if name in HOMES.values():
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__} has no {name!r}; see {__name__}.check_names()")


def check_names() -> list[str]:
    """Return the names of all exercise checks, in order of chapter and number."""
    return sorted(HOMES, key=lambda name: (name.split("_")[2], int(name.split("_")[3])))


def __dir__() -> list[str]:
    return sorted([*__all__, "check_names", *check_names()])
