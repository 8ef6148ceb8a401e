"""Packages whose names are imported when they are first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: each name is imported from its module when asked for.

    `homes` maps a module, relative to the package, to the names it defines, with spaces between.
    So a command that needs two modules of a package does not wait for the other twenty.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def name_of(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return name_of
