"""Algebraic simplification: identities that hold to the last bit, and some that round."""

from __future__ import annotations

import math

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep

LIMITS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
NOT_NEGATIVE = ("abs", "exp", "sigmoid", "softmax", "sqrt", "relu", "relu6", "hard_sigmoid")
ODD_SIGN = ("abs", "square")
"""Operators that do not see their operand's sign."""


def simplify(rw: Draft, node: Node) -> bool:
    """Apply the first exact identity that fits a node."""
    if node.op in ("add", "sub"):
        return _sum_with_negative(rw, node)
    if node.op in ("clip", "relu", "relu6"):
        return _limits(rw, node)
    source = rw.maker(node.inputs[0])
    if source is None:
        return False
    if node.op == "neg" and source.op == "neg":
        return rw.forward(node, source.inputs[0])
    if node.op in ODD_SIGN and source.op == "neg":
        return rw.become(node, node.op, source.inputs)
    if node.op == "abs" and source.op in (*NOT_NEGATIVE, "square"):
        return rw.forward(node, node.inputs[0])
    return node.op == "muls" and _negation(rw, node)


def _negation(rw: Draft, node: Node) -> bool:
    return node.attr("number") == -1 and rw.become(node, "neg", node.inputs)


def _sum_with_negative(rw: Draft, node: Node) -> bool:
    """Turn x + (-y) into x - y and x - (-y) into x + y."""
    x, y = node.inputs
    for first, second in ((x, y), (y, x)) if node.op == "add" else ((x, y),):
        maker = rw.maker(second)
        if maker is not None and maker.op == "neg":
            other = "sub" if node.op == "add" else "add"
            return rw.become(node, other, (first, maker.inputs[0]))
    return False


def _bounds(node: Node) -> tuple[float, float] | None:
    if node.op == "clip":
        options = settings(node)
        return float(options["low"]), float(options["high"])
    return LIMITS.get(node.op)


def _limits(rw: Draft, node: Node) -> bool:
    """Merge two limits on a value into one; drop a relu of what is never negative."""
    source = rw.maker(node.inputs[0])
    outer = _bounds(node)
    if source is None or outer is None:
        return False
    if node.op == "relu" and source.op in (*NOT_NEGATIVE, "square"):
        return rw.forward(node, node.inputs[0])
    inner = _bounds(source)
    if inner is None:
        return False
    low, high = (min(max(end, outer[0]), outer[1]) for end in inner)
    if (low, high) == inner:
        return rw.forward(node, node.inputs[0])
    return rw.become(node, "clip", source.inputs, {"low": low, "high": high})


def reassociate(rw: Draft, node: Node) -> bool:
    """Merge constants of two steps: (x a) b = x (a b), (x + a) + b = x + (a + b), x / a = x (1/a).

    One rounding instead of two: the last digit may differ.
    """
    if node.op == "div":
        number = rw.number(node.inputs[1])
        if not number or rw.type(node.inputs[0]) != rw.type(node.output):
            return False
        return rw.become(node, "muls", node.inputs[:1], {"number": 1 / number})
    source = rw.only(node.inputs[0], node.op)
    if source is None:
        return False
    a, b = settings(source)["number"], settings(node)["number"]
    both = a + b if node.op == "adds" else a * b
    return math.isfinite(both) and rw.become(node, node.op, source.inputs, {"number": both})


ALGEBRA = Pass(
    "AlgebraicSimplificationPass",
    "prepare",
    sweep(simplify, "add", "sub", "neg", "abs", "square", "clip", "relu", "relu6", "muls"),
    "double negations, sums with negatives, limits of limits: exact identities",
)
REASSOCIATION = Pass(
    "ReassociationPass",
    "prepare",
    sweep(reassociate, "muls", "adds", "div"),
    "merges successive constant factors and summands; divides by multiplying",
    "rounded",
)
