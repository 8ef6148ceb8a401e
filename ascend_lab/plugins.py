"""Plug-ins: finds the installed modules with special kernels and collects what they offer.

A plug-in is a module of `ascend_lab.fused`. It defines lists under agreed names, and the compiler
and the operators ask for the items of all lists with a name:

    fused/pooled.py           FUSIONS = [...]            compiler.rules asks for FUSIONS
    fused/flash_attention.py  TEMPLATES = [...]          operators.ops.operator asks for TEMPLATES

Plug-ins are imported when a list is first asked for. A missing module is left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGE = "ascend_lab.fused"
_switched_off: list[bool] = []
"""One item per open `without_special_kernels`: a list, because such blocks nest."""


@contextmanager
def without_special_kernels() -> Iterator[None]:
    """Compile as if this installation had no special kernels, to measure what they save."""
    _switched_off.append(True)
    try:
        yield
    finally:
        _switched_off.pop()


def plugins() -> tuple[ModuleType, ...]:
    """Return the modules whose special kernels may be used now."""
    return () if _switched_off else _installed()


def listed(name: str) -> tuple[Any, ...]:
    """Return the items of all lists called `name`: `listed("FUSIONS")`, say."""
    return _items(plugins(), name)


@cache
def _items(modules: tuple[ModuleType, ...], name: str) -> tuple[Any, ...]:
    return tuple(item for module in modules for item in getattr(module, name, ()))


@cache
def _installed() -> tuple[ModuleType, ...]:
    """Return the modules with special kernels that this installation has.

    A missing module is left out; an exception while one is imported passes through.
    """
    package = _module(PACKAGE)
    names = getattr(package, "PLUGINS", ())  # a folder left empty is a package without names
    modules = (_module(f"{PACKAGE}.{name}") for name in names)
    return tuple(module for module in modules if module is not None)


def _module(name: str) -> ModuleType | None:
    """Return a module, or None if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # `name` exists and imports something missing: that is an error, not an absent plugin
        if error.name != name:
            raise
        return None
