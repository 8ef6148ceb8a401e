"""Signs that cost nothing: where weights stand before and behind a SiLU, it computes -silu(-x).

silu(x) = x / (1 + e^-x) begins with a pass that turns x around. -silu(-x) = x / (1 + e^x) does not:
four vector instructions instead of five. A product with constant weights makes -x as well as x, and
reads -y as well as y, with other weights; a mean, a scale or a move hands the sign on:

    conv2d(x, W, b) -> silu -> mean, scale -> conv2d(y, V, c)
    conv2d(x, -W, -b) -> silu, turned -> mean, scale -> conv2d(y, -V, c)

Signs round like no sign, so every other tensor keeps all its bits. What turned weights read turned
keeps its weights: only its bias changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Graph, Node, Values
from ascend_lab.graph.passes.rewrite import derived
from ascend_lab.ops.formats import is_float

PRODUCTS = ("conv2d", "depthwise_conv2d", "conv_transpose2d", "matmul")
HANDED_ON = (
    "global_avg_pool", "avg_pool2d", "reduce_mean", "reduce_sum", "muls",
    "reshape", "transpose", "slice", "expand",
)  # fmt: skip
"""Operators of one tensor that are as negative as it is."""


def turned_silus(graph: Graph) -> Graph:
    """Return the graph with every SiLU turned whose sign weights on both sides take in."""
    signs = _Signs(graph)
    for node in graph.nodes:
        if node.op == "silu" and not node.attr("turned", False):
            signs.turn(node)
    return signs.applied() if signs.silus else graph


@dataclass(slots=True)
class _Signs:
    """Tensors that are stored as their negatives, and the SiLUs between them."""

    graph: Graph
    negative: set[str] = field(default_factory=set)
    silus: set[str] = field(default_factory=set)

    def turn(self, silu: Node) -> None:
        """Turn a SiLU if what is before it and behind it can be negative."""
        before, behind = set[str](), set[str]()
        if self._made(silu.inputs[0], before) and self._read(silu.output, behind):
            self.negative |= before | behind
            self.silus.add(silu.name)

    def _made(self, name: str, found: set[str]) -> bool:
        """Tell whether a tensor with one reader can be made negative, by weights or sums of such.

        `found` gets its name and those on the way there.
        """
        graph = self.graph
        node = graph.producers.get(name)
        if node is None or len(graph.readers[name]) != 1 or name in graph.outputs:
            return False
        found.add(name)
        if self._weighs(node):
            return True
        varying = [n for n in node.inputs if n not in graph.constants]
        sums = node.op in ("add", "reshape") and len(varying) == 1
        return sums and is_float(graph.types[name].dtype) and self._made(varying[0], found)

    def _weighs(self, node: Node) -> bool:
        """Tell whether a node is a product with constant weights, and a constant bias."""
        fixed = all(name in self.graph.constants for name in node.inputs[1:])
        floats = all(is_float(self.graph.types[n].dtype) for n in (*node.inputs, *node.outputs))
        plain = node.inputs[0] not in self.graph.constants and not node.attr("pad_value", 0)
        return node.op in PRODUCTS and len(node.inputs) > 1 and fixed and floats and plain

    def _read(self, name: str, found: set[str]) -> bool:
        """Tell whether all that reads a tensor can read its negative; `found` as `_made`."""
        todo = [name]
        while todo:
            name = todo.pop()
            found.add(name)
            if name in self.graph.outputs or not self.graph.readers[name]:
                return False
            for node in self.graph.readers[name]:
                if self._weighs(node):
                    continue
                others = [n for n in node.inputs if n != name]
                scales = node.op == "mul" and len(others) == 1
                if not scales and node.op not in HANDED_ON:
                    return False
                if {*others, node.output} & (self.negative | found):
                    return False  # a product of two negatives
                todo.append(node.output)
        return True

    def applied(self) -> Graph:
        """Return the graph with SiLUs turned, and weights and biases that fit them."""
        draft, known = Draft(self.graph), dict[str, str]()
        for node in draft:
            if node.name in self.silus:
                draft.become(node, node.op, node.inputs, {"turned": True})
                continue
            result = node.output in self.negative
            if self._weighs(node):
                moved = node.inputs[1:2] if result != (node.inputs[0] in self.negative) else ()
                moved += node.inputs[2:] if result else ()
            else:
                sums = result and node.op == "add"
                moved = tuple(n for n in node.inputs if sums and n in draft.constants)
            if moved:
                for name in moved:
                    known[name] = known.get(name) or _negated(draft, name)
                inputs = [known[n] if n in moved else n for n in node.inputs]
                draft.become(node, node.op, inputs, node.attrs)
        return draft.finish()


def _negated(draft: Draft, name: str) -> str:
    constant = draft.constants[name]
    return draft.add(derived(constant.type, _minus, constant), f"{name}_turned")


def _minus(array: Values) -> Values:
    return np.negative(array)
