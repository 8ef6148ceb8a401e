"""Common subexpression elimination: what is computed twice is computed once."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Constant, Graph
from ascend_lab.graph.passes.rewrite import SMALL, Pass


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
    rw, count = Draft(graph), 0
    seen: dict[Hashable, str] = {}
    for name, constant in graph.constants.items():
        first = seen.setdefault(_content(constant), name)
        if first != name and name not in graph.outputs:
            rw.replace(name, first)
            count += 1
    nodes: dict[Hashable, str] = {}
    for node in rw:
        key = (node.op, node.inputs, repr(sorted(node.attrs.items())))
        first = nodes.setdefault(key, node.name)
        if first == node.name:
            continue
        twin = rw.nodes[first]
        if len(node.outputs) == 1:
            count += rw.forward(node, twin.output)
        elif not set(node.outputs) & set(graph.outputs):
            for old, new in zip(node.outputs, twin.outputs, strict=True):
                rw.replace(old, new)
            count += 1
    return (rw.finish(), count) if count else (graph, 0)


COMMON = Pass(
    "CommonSubexpressionEliminationPass",
    "prepare",
    merge_common,
    "computes equal expressions once",
)
