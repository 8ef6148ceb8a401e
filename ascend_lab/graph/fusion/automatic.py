"""Fusion without patterns: by kind of operator, up to the post-dominator.

kind        may be followed, in its kernel, by
cube        elementwise                 (sums leave through the vector unit)
elementwise elementwise, reduce
reduce      elementwise, reduce         (rows stay on chip; the scheduler cuts phases)
other       nothing: it moves data or has a kernel of its own
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ascend_lab.graph.fusion.dominators import between, immediate_post_dominators
from ascend_lab.graph.fusion.rules import LONGEST
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.lower import CONVOLUTIONS, PRODUCTS

Kind = Literal["cube", "elementwise", "reduce", "other"]
REDUCTIONS = (
    "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "softmax",
    "log_softmax", "masked_softmax", "layer_norm", "rms_norm", "global_avg_pool", "global_max_pool",
)  # fmt: skip
FOLLOWERS: Mapping[Kind, tuple[Kind, ...]] = {
    "cube": ("elementwise",),
    "elementwise": ("elementwise", "reduce"),
    "reduce": ("elementwise", "reduce"),
}


def kind_of(node: Node) -> Kind:
    """Return how a node takes part in fusion."""
    if node.op in (*CONVOLUTIONS, *PRODUCTS):
        return "cube"
    if node.op in REDUCTIONS:
        return "reduce"
    operator = operator_of(node.op)
    plain = operator.slicing is None and operator.template is None and node.op != "trans_data"
    return "elementwise" if plain or node.op == "cast" else "other"


def automatic_groups(graph: Graph, taken: Iterable[str]) -> list[list[Node]]:
    """Return groups of at least two nodes, in order, of the nodes not `taken` by a rule."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    kinds = {node.name: kind_of(node) for node in graph.nodes}
    kinds.update((name, "other") for name in taken)
    parents = immediate_post_dominators(graph)
    group = {node.name: [node] for node in graph.nodes}
    for node in graph.nodes:
        last = parents[node.name]
        if last is None or kinds[node.name] == "other":
            continue
        path = between(graph, node, last, LONGEST)
        if len(path) < LONGEST and _fusable(graph, kinds, group, node, path):
            merged = {n.name: n for n in (node, *path) for n in group[n.name]}
            if len(merged) <= LONGEST:
                nodes = sorted(merged.values(), key=lambda n: place[n.name])
                group.update(dict.fromkeys(merged, nodes))
    found = {id(nodes): nodes for nodes in group.values() if len(nodes) > 1}
    return sorted(found.values(), key=lambda nodes: place[nodes[-1].name])


def _fusable(
    graph: Graph,
    kinds: Mapping[str, Kind],
    group: dict[str, list[Node]],
    node: Node,
    path: list[Node],
) -> bool:
    """Tell whether `node` and its path may be one kernel: kinds that follow, layouts that agree."""
    own = group[node.name]
    head = "cube" if any(kinds[n.name] == "cube" for n in own) else kinds[node.name]
    allowed = FOLLOWERS[head]
    layout = _blocks(graph, node)
    for other in path:
        if kinds[other.name] not in allowed or _blocks(graph, other) != layout:
            return False
        cube = any(kinds[n.name] == "cube" for n in group[other.name])
        if cube and group[other.name] is not own:
            return False
    return True


def _blocks(graph: Graph, node: Node) -> str:
    """Return the layout a node writes; how many channels a block has does not matter."""
    return graph.types[node.output].layout.partition(":")[0]
