"""Vector-Jacobian products: for each operator, the nodes that compute its inputs' gradients.

A rule reads a `Site`, appends nodes, and returns one gradient, or None, per input. It appends
gradients of weights before those of activations: a weight's is wanted as soon as it can be.
Rules marked wide compute in fp32 whatever the format of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_lab.errors import UnsupportedError
from ascend_lab.graph import Node, TensorType, Value
from ascend_lab.graph.infer import operator_of
from ascend_lab.ops.shapes import Shape
from ascend_lab.train.tape import Tape

Grads = Sequence[Value | None]
Rule = Callable[["Site"], Grads]
RULES: dict[str, Rule] = {}
"""The rule of every operator that has one."""
_WIDE: set[str] = set()


@dataclass(frozen=True, slots=True)
class Site:
    """One forward node seen from backward: its tensors, their gradients, attributes in full."""

    net: Tape
    node: Node
    grads: tuple[Value | None, ...]
    wanted: tuple[bool, ...]
    attrs: dict[str, Any]
    wide: bool = False

    def _seen(self, value: Value) -> Value:
        return self.net.wide(value) if self.wide else value

    def x(self, place: int = 0) -> Value:
        """Return an input: kept, or computed again."""
        return self._seen(self.net.kept(self.node.inputs[place]))

    def y(self, place: int = 0) -> Value:
        """Return an output: kept, or computed again."""
        return self._seen(self.net.kept(self.node.outputs[place]))

    @property
    def g(self) -> Value:
        """The gradient of the first output."""
        found = self.grads[0]
        if found is None:
            raise UnsupportedError(
                f"a gradient of the first output of {self.node.name}",
                "of others only",
                "use the first output in the loss",
            )
        return self._seen(found)

    def kind(self, place: int = 0) -> TensorType:
        """Return the type of an input."""
        return self.net.kind(self.node.inputs[place])

    def shape(self, place: int = 0) -> Shape:
        """Return the shape of an input."""
        return self.kind(place).shape

    def out_kind(self, place: int = 0) -> TensorType:
        """Return the type of an output."""
        return self.net.kind(self.node.outputs[place])


def rule(*ops: str, wide: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operators."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        _WIDE.update(ops if wide else ())
        return function

    return add


def gradients(
    net: Tape, node: Node, grads: tuple[Value | None, ...], wanted: tuple[bool, ...]
) -> list[Value | None]:
    """Append what computes the gradients of a node's inputs; None where none is wanted or is.

    Each has the format of its input. Raises `UnsupportedError` for an operator without a rule.
    """
    if node.op not in RULES:
        raise UnsupportedError(
            f"a gradient rule for operator {node.op} of node {node.name}",
            f"rules for {len(RULES)} operators",
            "rewrite the graph, or register one with train.rules.rule",
        )
    net.prefix = f"{node.name}.grad"
    attrs = operator_of(node.op).settings(node.attrs)
    site = Site(net, node, grads, wanted, attrs, node.op in _WIDE)
    found = RULES[node.op](site)
    return [
        net.in_format(grad, net.kind(name).dtype) if want and grad is not None else None
        for name, grad, want in zip(node.inputs, found, wanted, strict=True)
    ]
