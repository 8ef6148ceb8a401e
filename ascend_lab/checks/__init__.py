"""Checks of the exercises, `check_ex_NN_k(fn, seed=...)`, and predictions to compare.

The checks of chapter NN live in `chapterNN.py` and are loaded when first used.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
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
    module = f"{__name__}.chapter{found[1]}" if found else ""
    if module and find_spec(module) is not None:
        check = getattr(import_module(module), name, None)
        if check is not None:
            return check
    raise AttributeError(f"ascend_lab.checks has no {name!r}; see ascend_lab.checks.check_names()")


def check_names() -> list[str]:
    """Return the names of all exercise checks, in order of chapter and number."""
    chapters = [m.name for m in iter_modules(__path__) if re.fullmatch(r"chapter\d\d", m.name)]
    names = [
        name
        for chapter in chapters
        for name in vars(import_module(f"{__name__}.{chapter}"))
        if _CHECK.fullmatch(name)
    ]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def __dir__() -> list[str]:
    return sorted([*__all__, "check_names", *check_names()])
