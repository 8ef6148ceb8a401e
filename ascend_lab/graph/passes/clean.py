"""What need not be computed when the network runs: dead, constant, or computed already."""

from collections.abc import Hashable

import numpy as np

from ascend_lab.graph.draft import SMALL, Draft, pruned
from ascend_lab.graph.evaluate import compute
from ascend_lab.graph.ir import Constant, Fill, Graph, Node, Values
from ascend_lab.graph.passes.rewrite import Pass, derived


def remove_dead_code(graph: Graph) -> tuple[Graph, int]:
    """Drop nodes, constants and types that no output of the graph depends on."""
    kept = pruned(graph)
    gone = len(graph.nodes) - len(kept.nodes) + len(graph.constants) - len(kept.constants)
    return (kept, gone) if gone else (graph, 0)


def fold_constants(graph: Graph) -> tuple[Graph, int]:
    """Compute nodes of constants: small results now, large ones when asked for.

    A node whose result is far larger than what it reads (expand) stays, unless it is a `Fill`.
    """
    draft, count = Draft(graph), 0
    for node in draft:
        if node.op != "trans_data" and node.inputs and draft.outputs.isdisjoint(node.outputs):
            count += _fold(draft, node)
    return (draft.finish(), count) if count else (graph, 0)


def _fold(draft: Draft, node: Node) -> bool:
    known = [c for c in map(draft.constant, node.inputs) if c is not None]
    kinds = [draft.type(name) for name in node.outputs]
    limit = max(SMALL, sum(c.type.elements for c in known))
    filled = node.has("moves") and bool(known) and isinstance(known[0].data, Fill)
    filled = filled and (node.op != "concat" or all(c.data == known[0].data for c in known))
    if len(known) < len(node.inputs) or not (filled or sum(k.elements for k in kinds) <= limit):
        return False
    for i, (name, kind) in enumerate(zip(node.outputs, kinds, strict=True)):
        one = Constant(kind, known[0].data) if filled else _result(draft, node, i, known)
        draft.replace(name, draft.add(one, f"{name}_folded"))
    draft.remove(node.name)
    return True


def _result(draft: Draft, node: Node, place: int, known: list[Constant]) -> Constant:
    """Return output `place` of a node as a constant."""
    types = {name: draft.type(name) for name in (*node.inputs, *node.outputs)}
    alone = Graph(node.name, (), node.outputs, (node,), types)

    def value(*arrays: Values) -> Values:
        return np.asarray(compute(alone, node, list(arrays))[place])

    return derived(types[node.outputs[place]], value, *known)


def merge_common(graph: Graph) -> tuple[Graph, int]:
    """Let nodes with the same operator, inputs and attributes, and equal constants, be one."""
    draft, count = Draft(graph), 0
    seen: dict[Hashable, str] = {}
    for name, constant in graph.constants.items():
        first = seen.setdefault(_content(constant), name)
        if first != name and name not in draft.outputs:
            draft.replace(name, first)
            count += 1
    nodes: dict[Hashable, str] = {}
    for node in draft:
        key = (node.op, node.inputs, repr(sorted(node.attrs.items())))
        twin = draft.nodes[nodes.setdefault(key, node.name)]
        if twin.name == node.name:
            continue
        if len(node.outputs) == 1:
            count += draft.forward(node, twin.output)
        elif draft.outputs.isdisjoint(node.outputs):
            for old, new in zip(node.outputs, twin.outputs, strict=True):
                draft.replace(old, new)
            count += 1
    return (draft.finish(), count) if count else (graph, 0)


def _content(constant: Constant) -> Hashable:
    """Return what two constants share if they are equal; large arrays only equal themselves."""
    data = constant.data
    if not isinstance(data, np.ndarray):
        return constant.type, id(data) if callable(data) else data
    large = constant.type.elements > SMALL
    return constant.type, id(data) if large else constant.array().tobytes()


DEAD_CODE = Pass(
    "DeadCodeEliminationPass", "prepare", remove_dead_code, "drops what no output depends on"
)
FOLDING = Pass(
    "ConstantFoldingPass", "prepare", fold_constants, "computes what depends on constants only"
)
COMMON = Pass(
    "CommonSubexpressionEliminationPass",
    "prepare",
    merge_common,
    "computes equal expressions once",
)
