"""Lazy imports: a package imports one of its modules when a name of it is first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports each name when it is first used.

    `homes` maps a module, relative to the package, to the names it defines, with spaces between.
    A command that needs two modules of a package then does not wait for the other twenty.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def name_of(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return name_of
