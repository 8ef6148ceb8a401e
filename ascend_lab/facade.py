"""Lazy imports: a package imports one of its modules when a name of it is first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, module_names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports each name when it is first used.

    `module_names` maps a module, relative to the package, to the names that it defines:
    {"chip": "Chip load_chip"} says that `load_chip` is in the module `chip`.
    A command that needs two modules of a package then does not wait for the other twenty.
    """
    module_of = {
        name: module_name for module_name, names in module_names.items() for name in names.split()
    }

    def name_of(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return name_of
