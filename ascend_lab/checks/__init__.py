"""Checks of the exercises, `check_ex_NN_k(fn, seed=...)`, and predictions to compare.

The checks of chapter NN live in the module `chapter*NN*` and are loaded when first used.
"""

from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ascend_lab.checks.core import CheckResult, check_against, check_property
from ascend_lab.checks.prediction import Prediction, compare, predict

__all__ = [
    "CheckResult",
    "Prediction",
    "check_against",
    "check_property",
    "compare",
    "predict",
]

_CHECK = re.compile(r"check_ex_(\d\d)_\d+")


def __getattr__(name: str) -> Any:
    found = _CHECK.fullmatch(name)
    for module in _modules() if found else ():
        if found[1] in module:
            check = getattr(import_module(f"{__name__}.{module}"), name, None)
            if check is not None:
                return check
    raise AttributeError(f"ascend_lab.checks has no {name!r}; see ascend_lab.checks.check_names()")


def _modules() -> list[str]:
    """Return the modules of checks: chapter13_14 serves chapters 13 and 14."""
    return [m.name for m in iter_modules(__path__) if m.name.startswith("chapter")]


def check_names() -> list[str]:
    """Return the names of all exercise checks, in order of chapter and number."""
    names = [
        name
        for module in _modules()
        for name in vars(import_module(f"{__name__}.{module}"))
        if _CHECK.fullmatch(name)
    ]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def __dir__() -> list[str]:
    return sorted([*__all__, "check_names", *check_names()])
