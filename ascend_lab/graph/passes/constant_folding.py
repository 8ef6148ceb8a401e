"""Constant folding: nodes that read only constants become constants."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.evaluate import compute
from ascend_lab.graph.ir import Constant, Fill, Graph, Node
from ascend_lab.graph.passes.rewrite import SMALL, Pass, Rewriter, derived

KEEPS_FILL = ("reshape", "transpose", "expand", "slice", "gather", "split", "concat")
"""Operators whose output holds only numbers that are in their first input."""
NEVER = ("trans_data",)


def fold_constants(graph: Graph) -> tuple[Graph, int]:
    """Compute nodes of constants: small results now, large ones when asked for.

    A node whose result is far larger than what it reads (expand) stays, unless it is a `Fill`.
    """
    rewriter, count = Rewriter(graph), 0
    for node in rewriter.edit:
        if node.op not in NEVER and node.inputs and rewriter.outputs.isdisjoint(node.outputs):
            count += _fold(rewriter, node)
    return (rewriter.finish(), count) if count else (graph, 0)


def _fold(rewriter: Rewriter, node: Node) -> bool:
    sources = [rewriter.constant(name) for name in node.inputs]
    known = [source for source in sources if source is not None]
    kinds = [rewriter.type(name) for name in node.outputs]
    limit = max(SMALL, sum(c.type.elements for c in known))
    filled = _filled(node, known)
    if len(known) < len(sources) or not (filled or sum(k.elements for k in kinds) <= limit):
        return False
    names = [f"{name}_folded" for name in node.outputs]
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        one = Constant(kind, known[0].data) if filled else _result(rewriter, node, i, known)
        rewriter.edit.replace(node.outputs[i], rewriter.add(one, name))
    rewriter.edit.remove(node.name)
    return True


def _filled(node: Node, known: list[Constant]) -> bool:
    first = known[0].data if known else None
    return node.op in KEEPS_FILL and isinstance(first, Fill) and (
        node.op != "concat" or all(c.data == first for c in known)
    )  # fmt: skip


def _result(rewriter: Rewriter, node: Node, place: int, known: list[Constant]) -> Constant:
    """Return output `place` of a node as a constant."""
    names = (*node.inputs, *node.outputs)
    alone = Graph(node.name, (), node.outputs, (node,), {n: rewriter.type(n) for n in names})

    def value(*arrays: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(compute(alone, node, list(arrays))[place])
        return found

    return derived(alone.types[node.outputs[place]], value, *known)


FOLDING = Pass(
    "ConstantFoldingPass", "prepare", fold_constants, "computes what depends on constants only"
)
