"""Common subexpression elimination: what is computed twice is computed once."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ascend_lab.graph.ir import Constant, Graph
from ascend_lab.graph.passes.rewrite import SMALL, Pass, Rewriter


def _content(constant: Constant) -> Hashable:
    """Return what two constants share if they are equal; large arrays only equal themselves."""
    data = constant.data
    if isinstance(data, np.ndarray):
        if constant.type.elements > SMALL:
            return constant.type, id(data)
        return constant.type, constant.array().tobytes()
    return constant.type, id(data) if callable(data) else data


def merge_common(graph: Graph) -> tuple[Graph, int]:
    """Let nodes with the same operator, inputs and attributes, and equal constants, be one."""
    rewriter, count = Rewriter(graph), 0
    seen: dict[Hashable, str] = {}
    for name, constant in graph.constants.items():
        first = seen.setdefault(_content(constant), name)
        if first != name and name not in graph.outputs:
            rewriter.edit.replace(name, first)
            rewriter.uses[first] += rewriter.uses[name]
            count += 1
    nodes: dict[Hashable, str] = {}
    for node in rewriter.edit:
        key = (node.op, node.inputs, repr(sorted(node.attrs.items())))
        first = nodes.setdefault(key, node.name)
        if first == node.name:
            continue
        twin = rewriter.edit.nodes[first]
        if len(node.outputs) == 1:
            count += rewriter.forward(node, twin.output)
        elif not set(node.outputs) & set(graph.outputs):
            for old, new in zip(node.outputs, twin.outputs, strict=True):
                rewriter.edit.replace(old, new)
                rewriter.uses[new] += rewriter.uses[old]
            count += 1
    return (rewriter.finish(), count) if count else (graph, 0)


COMMON = Pass(
    "CommonSubexpressionEliminationPass",
    "prepare",
    merge_common,
    "computes equal expressions once",
)
