"""Operands that are one number become attributes: x + 2 is `adds`, max(x, 0) is `relu`."""

from __future__ import annotations

import math

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep

POWERS = {2.0: "square", 0.5: "sqrt", -1.0: "rec"}


def is_power_of_two(number: float) -> bool:
    """Tell whether dividing by a number is exactly multiplying by its reciprocal."""
    return number != 0 and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def take_scalar(rw: Draft, node: Node) -> bool:
    """Replace a node whose second operand is one number (the first too where they commute)."""
    if node.op == "clip":
        return _named_clip(rw, node)
    x, other = node.inputs
    number = rw.number(other)
    if number is None and node.op in ("add", "mul", "max", "min"):
        x, other, number = other, x, rw.number(x)
    kind = rw.type(node.output)
    if number is None or rw.type(x) != kind or kind.dtype not in ("fp16", "bf16", "fp32"):
        return _reciprocal(rw, node)
    if node.op in ("add", "sub"):
        return rw.become(node, "adds", [x], {"number": number if node.op == "add" else -number})
    if node.op == "mul" or (node.op == "div" and is_power_of_two(number)):
        return rw.become(node, "muls", [x], {"number": number if node.op == "mul" else 1 / number})
    if node.op == "pow" and number in POWERS:
        return rw.become(node, POWERS[number], [x])
    if node.op in ("max", "min") and not math.isnan(number):
        low, high = (number, math.inf) if node.op == "max" else (-math.inf, number)
        return rw.become(node, "clip", [x], {"low": low, "high": high})
    return False


def _reciprocal(rw: Draft, node: Node) -> bool:
    """Replace 1 / x, and x x by the square."""
    x, y = node.inputs
    kind = rw.type(node.output)
    if node.op == "div" and rw.number(x) == 1.0 and rw.type(y) == kind:
        return rw.become(node, "rec", [y])
    if node.op == "mul" and x == y and kind.dtype != "int32":
        return rw.become(node, "square", [x])
    return False


def _named_clip(rw: Draft, node: Node) -> bool:
    low, high = (settings(node)[key] for key in ("low", "high"))
    named = {(0.0, math.inf): "relu", (0.0, 6.0): "relu6"}.get((low, high))
    return named is not None and rw.become(node, named, node.inputs)


SCALARS = Pass(
    "ScalarOperandPass",
    "prepare",
    sweep(take_scalar, "add", "sub", "mul", "div", "pow", "max", "min", "clip"),
    "turns operands that are one number into attributes: adds, muls, square, relu, clip",
)
