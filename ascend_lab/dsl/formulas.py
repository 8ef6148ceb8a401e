"""What a formula of `te.compute` may use on elements: folds over axes and functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ascend_lab.dsl.expr import Call, Expr, binary, unary
from ascend_lab.dsl.tensor import Axis, Fold
from ascend_lab.errors import ShapeError


def _fold(kind: str) -> Callable[[Expr, Axis | Sequence[Axis]], Fold]:
    def fold(expr: Expr, axis: Axis | Sequence[Axis]) -> Fold:
        axes = (axis,) if isinstance(axis, Axis) else tuple(axis)
        bad = next((a for a in axes if not isinstance(a, Axis) or not a.reduce), None)
        if bad is not None or not axes:
            raise ShapeError(f"te.{kind}: axes from te.reduce_axis", repr(bad), "make one")
        return Fold(kind, expr, axes)

    fold.__name__ = kind
    fold.__doc__ = f"Return the {kind} of an element over axes made by `reduce_axis`."
    return fold


sum, max, min, prod = (_fold(kind) for kind in ("sum", "max", "min", "prod"))  # noqa: A001


def _function(name: str, op: str) -> Callable[[Expr], Call]:
    def function(value: Expr) -> Call:
        return unary(op, value)

    function.__name__ = name
    function.__doc__ = f"Return {name} of an element."
    return function


exp, log, sqrt = _function("exp", "vexp"), _function("log", "vln"), _function("sqrt", "vsqrt")
rsqrt, relu = _function("rsqrt", "vrsqrt"), _function("relu", "vrelu")


def absolute(value: Expr) -> Call:
    """Return the absolute value of an element."""
    return unary("vabs", value)


def maximum(left: Expr, right: Expr | float) -> Call:
    """Return the larger of two elements, or of an element and a number."""
    return binary("vmax", left, right)


def minimum(left: Expr, right: Expr | float) -> Call:
    """Return the smaller of two elements, or of an element and a number."""
    return binary("vmin", left, right)
