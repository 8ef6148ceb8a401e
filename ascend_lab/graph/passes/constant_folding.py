"""Constant folding: nodes that read only constants become constants."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.evaluate import compute
from ascend_lab.graph.ir import Constant, Fill, Graph, Node
from ascend_lab.graph.passes.rewrite import SMALL, Pass, derived

KEEPS_FILL = ("reshape", "transpose", "expand", "slice", "gather", "split", "concat")
"""Operators whose output holds only numbers that are in their first input."""
NEVER = ("trans_data",)


def fold_constants(graph: Graph) -> tuple[Graph, int]:
    """Compute nodes of constants: small results now, large ones when asked for.

    A node whose result is far larger than what it reads (expand) stays, unless it is a `Fill`.
    """
    rw, count = Draft(graph), 0
    for node in rw:
        if node.op not in NEVER and node.inputs and rw.outputs.isdisjoint(node.outputs):
            count += _fold(rw, node)
    return (rw.finish(), count) if count else (graph, 0)


def _fold(rw: Draft, node: Node) -> bool:
    sources = [rw.constant(name) for name in node.inputs]
    known = [source for source in sources if source is not None]
    kinds = [rw.type(name) for name in node.outputs]
    limit = max(SMALL, sum(c.type.elements for c in known))
    filled = _filled(node, known)
    if len(known) < len(sources) or not (filled or sum(k.elements for k in kinds) <= limit):
        return False
    names = [f"{name}_folded" for name in node.outputs]
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        one = Constant(kind, known[0].data) if filled else _result(rw, node, i, known)
        rw.replace(node.outputs[i], rw.add(one, name))
    rw.remove(node.name)
    return True


def _filled(node: Node, known: list[Constant]) -> bool:
    first = known[0].data if known else None
    return node.op in KEEPS_FILL and isinstance(first, Fill) and (
        node.op != "concat" or all(c.data == first for c in known)
    )  # fmt: skip


def _result(rw: Draft, node: Node, place: int, known: list[Constant]) -> Constant:
    """Return output `place` of a node as a constant."""
    names = (*node.inputs, *node.outputs)
    alone = Graph(node.name, (), node.outputs, (node,), {n: rw.type(n) for n in names})

    def value(*arrays: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(compute(alone, node, list(arrays))[place])
        return found

    return derived(alone.types[node.outputs[place]], value, *known)


FOLDING = Pass(
    "ConstantFoldingPass", "prepare", fold_constants, "computes what depends on constants only"
)
