"""Constant folding: nodes that read only constants become constants."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.draft import SMALL, Draft, pruned
from ascend_lab.graph.evaluate import compute
from ascend_lab.graph.ir import Constant, Fill, Graph, Node
from ascend_lab.graph.passes.rewrite import Pass, derived

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


# Common subexpression elimination: what is computed twice is computed once.


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


# Dead code elimination: what no output needs goes.


def remove_dead_code(graph: Graph) -> tuple[Graph, int]:
    """Drop nodes, constants and types that no output of the graph depends on."""
    kept = pruned(graph)
    gone = len(graph.nodes) - len(kept.nodes) + len(graph.constants) - len(kept.constants)
    return (kept, gone) if gone else (graph, 0)


DEAD_CODE = Pass(
    "DeadCodeEliminationPass", "prepare", remove_dead_code, "drops what no output depends on"
)
