"""Lazy imports: a package imports one of its modules when a name of it is first used."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ascend_lab.moved import MOVED_NAMES


def names_of(package: str, module_names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports each name when it is first used.

    `module_names` maps a module, relative to the package, to the names that it defines:
    {"chip": "Chip load_chip"} says that `load_chip` is in the module `chip`.
    A command that needs two modules of a package then does not wait for the other twenty.
    A name of `MOVED_NAMES`, which the package no longer offers, comes with a `DeprecationWarning`.
    """
    module_of = _modules_by_name(module_names)
    moved_to = _modules_by_name(MOVED_NAMES.get(package.removeprefix("ascend_lab."), {}))

    def name_of(name: str) -> Any:
        module_name = module_of.get(name)
        if module_name is None and name in moved_to:
            module_name = moved_to[name]
            place = f"{package}.{module_name}.{name}"
            warnings.warn(f"{package}.{name} is {place} now", DeprecationWarning, stacklevel=2)
        if module_name is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_name}"), name)

    return name_of


def _modules_by_name(module_names: Mapping[str, str]) -> dict[str, str]:
    """Return {"Chip": "chip", "load_chip": "chip"} for {"chip": "Chip load_chip"}."""
    return {name: module for module, names in module_names.items() for name in names.split()}
