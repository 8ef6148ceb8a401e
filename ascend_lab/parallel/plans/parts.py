"""Where a network can be cut into stages, and what each part costs and keeps.

A part ends where one tensor alone carries the forward pass. The kernels of a profile belong to the
part whose nodes they compute, forward or backward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.graph import Graph, Node
from ascend_lab.graph.aliases import aliases, view_nodes
from ascend_lab.parallel.plans.shape import HALF_BYTES
from ascend_lab.train.autodiff import training_graph
from ascend_lab.train.precision import in_compute_format, master_of
from ascend_lab.train.profile import StepProfile
from ascend_lab.train.recompute import carried
from ascend_lab.train.trainable import trainable

WHOLE = ("layer_norm", "rms_norm")
PRODUCTS = ("matmul", "gemm")
VOCABULARY = 8192
"""Rows from which an embedding's table is cut."""


@dataclass(frozen=True, slots=True)
class Part:
    """A unit before it is cut: its bytes and seconds, split by how tensor parallelism cuts them.

    Seconds are (forward, backward) of products, of other kernels that are cut, and of those that
    are not; `products` the (rows, inner, columns) of its products with weights.
    """

    name: str
    matrices: int
    vectors: int
    products: tuple[tuple[int, int, int], ...]
    product_s: tuple[float, float]
    cut_s: tuple[float, float]
    whole_s: tuple[float, float]
    cut_bytes: float
    whole_bytes: float
    input_bytes: float
    boundary_bytes: float
    attends: bool


def parts_of(graph: Graph, profile: StepProfile, dtype: str) -> tuple[Part, ...]:
    """Return the parts of a network with the times of its profile.

    A parameter that several parts read (a tied embedding) is counted in the first.
    """
    typed = in_compute_format(graph, dtype)
    names = trainable(graph)
    leaves = tuple(c for c in typed.constants if master_of(c, graph) in names)
    groups = unit_nodes(typed, leaves)
    place = {node.name: i for i, nodes in enumerate(groups) for node in nodes}
    seconds = _seconds(profile, place, typed)
    kept = kept_tensors(graph, dtype)
    found, counted = [], set[str]()
    for i, nodes in enumerate(groups):
        found.append(_part(i, nodes, typed, frozenset(leaves), counted, seconds[i], kept))
        counted.update(name for node in nodes for name in node.inputs)
    return tuple(found)


def unit_nodes(typed: Graph, leaves: Sequence[str]) -> list[list[Node]]:
    """Return the nodes of each unit: they end where one tensor that carries gradients is alive.

    Units without parameters are joined to those before.
    """
    flowing = carried(typed, leaves) - set(leaves)
    last = {name: i for i, node in enumerate(typed.nodes) for name in node.inputs}
    last.update(dict.fromkeys(typed.outputs, len(typed.nodes)))
    own, live, found = set(leaves), set[str](), list[list[Node]]([[]])
    for i, node in enumerate(typed.nodes):
        found[-1].append(node)
        live.update(name for name in node.outputs if name in flowing and name in last)
        live -= {name for name in live if last[name] <= i}
        if len(live) == 1 and i + 1 < len(typed.nodes):
            found.append([])
    joined: list[list[Node]] = []
    for nodes in found:
        has = any(not own.isdisjoint(node.inputs) for node in nodes)
        if joined and not (has and any(not own.isdisjoint(n.inputs) for n in joined[-1])):
            joined[-1] += nodes
        else:
            joined.append(nodes)
    return joined


def kept_tensors(graph: Graph, dtype: str) -> Mapping[str, int]:
    """Return the bytes of each tensor that forward writes and backward reads; views count once."""
    step = training_graph(graph, optimizer=None, dtype=dtype)
    full = step.graph
    owner = {name: alias.owner for name, alias in aliases(full, view_nodes(full)).items()}
    ahead = {name for node in full.nodes if step.phases[node.name] == "forward"
             for name in node.outputs}  # fmt: skip
    read = {n for node in full.nodes if step.phases[node.name] == "backward" for n in node.inputs}
    found = {owner.get(name, name) for name in ahead & read}
    copies = {n.output for n in full.nodes if n.op == "cast" and n.inputs[0] in step.parameters}
    return {n: full.types[n].size_bytes for n in found - copies if n not in full.inputs}


def _seconds(
    profile: StepProfile, place: Mapping[str, int], typed: Graph
) -> list[dict[str, list[float]]]:
    """Return, per unit, (forward, backward) seconds by kind: product, cut, whole."""
    count = max(place.values()) + 1
    found = [{k: [0.0, 0.0] for k in ("product", "cut", "whole")} for _ in range(count)]
    ops = {node.name: node.op for node in typed.nodes}
    unit = 0
    for row in profile.operators:
        if row.phase == "update":
            continue
        bases = [base for name in row.nodes if (base := _base(name, place))]
        unit = place[bases[0]] if bases else unit
        kind = "cut"
        if any(ops[b] in PRODUCTS for b in bases):
            kind = "product"
        elif any(ops[b] in WHOLE for b in bases):
            kind = "whole"
        found[unit][kind][row.phase == "backward"] += row.time_s
    return found


def _base(name: str, place: Mapping[str, int]) -> str:
    """Return the forward node a node of the step belongs to: w.grad.matmul to w; "" for none."""
    while name and name not in place:
        name = name.rpartition(".")[0]
    return name


def _part(
    number: int,
    nodes: Sequence[Node],
    typed: Graph,
    leaves: frozenset[str],
    counted: Collection[str],
    seconds: Mapping[str, Sequence[float]],
    kept: Mapping[str, int],
) -> Part:
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    own = {name for node in nodes for name in node.outputs}
    own_leaves = leaves - set(counted)
    weights = [typed.types[name] for name in read if name in own_leaves]
    cut = {n for node in nodes for n in node.inputs if n in own_leaves and _is_cut(typed, node, n)}
    matrices = sum(typed.types[n].elements for n in cut)
    whole = {name for node in nodes if node.op in WHOLE for name in node.outputs}
    outer = [n for n in read if n not in own and n not in leaves and n not in typed.constants]
    wide = DTYPE_BYTES[typed.types[nodes[-1].output].dtype]
    pair = {kind: (times[0], times[1]) for kind, times in seconds.items()}
    return Part(
        f"unit{number}:{nodes[0].name}", matrices, sum(w.elements for w in weights) - matrices,
        tuple(_product(typed, n) for n in nodes if n.op in PRODUCTS and leaves & {*n.inputs}),
        pair["product"], pair["cut"], pair["whole"],
        float(sum(kept.get(n, 0) for n in own - whole)),
        float(sum(kept.get(n, 0) for n in own & whole)),
        float(sum(typed.types[n].size_bytes for n in outer)),
        float(typed.types[nodes[-1].output].elements * min(wide, HALF_BYTES)),
        any(node.op == "softmax" for node in nodes),
    )  # fmt: skip


def _is_cut(typed: Graph, node: Node, weight: str) -> bool:
    """Tell whether tensor parallelism cuts a weight: a product's matrix or a vocabulary."""
    shape = typed.types[weight].shape
    if node.op == "embedding":
        return shape[0] >= VOCABULARY
    return node.op in PRODUCTS and len(shape) == 2


def _product(typed: Graph, node: Node) -> tuple[int, int, int]:
    out = typed.types[node.output].shape
    inner = typed.in_types(node)[0].shape[-2 if node.attr("trans_a") else -1]
    return math.prod(out[:-1]), inner, out[-1]
