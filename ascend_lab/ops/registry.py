"""The operators by name: the library's and those a reader registers."""

from __future__ import annotations

import difflib

from ascend_lab.errors import InputError
from ascend_lab.ops.operator import Operator

OPERATORS: dict[str, Operator] = {}
"""Every known operator; a plain dict in the order of registration."""


def register(operator: Operator, *, replace: bool = False) -> Operator:
    """Add an operator and return it; raise `InputError` if the name is taken, unless `replace`."""
    if operator.name in OPERATORS and not replace:
        raise InputError(
            "an operator name that is free", operator.name, "rename it, or pass replace=True"
        )
    OPERATORS[operator.name] = operator
    return operator


def get(name: str) -> Operator:
    """Return an operator by name; raise `InputError` with the nearest names."""
    if name in OPERATORS:
        return OPERATORS[name]
    near = difflib.get_close_matches(name, OPERATORS, 3, 0.5)
    remedy = f"did you mean {' or '.join(near)}?" if near else "see ops.OPERATORS"
    raise InputError(f"one of {len(OPERATORS)} operators", repr(name), remedy)


def resolve(operator: Operator | str) -> Operator:
    """Return an operator given itself or its name."""
    return get(operator) if isinstance(operator, str) else operator
