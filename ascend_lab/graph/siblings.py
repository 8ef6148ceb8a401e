"""Products that read one tensor become one: queries, keys and values of an attention, for example.

    x @ A, x @ B, x @ C  ->  x @ [A B C], and slices of its columns

One launch instead of several, x is read once, and wide results keep more cores busy. Columns of
fractals are the outermost axis in memory, so that the slices are views. Biases and what else all
of them do alike, lane by lane, comes along.
"""

from functools import partial

import numpy as np

from ascend_lab.chip import Chip
from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Constant, Graph, Node, TensorType, Values
from ascend_lab.ops.formats import is_float

BLOCK = 16


def merged_products(graph: Graph, chip: Chip) -> Graph:
    """Return the graph with one product for all of flat matrices that read one tensor."""
    families: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "matmul" and _joins(graph, node):
            key = (node.inputs[0], *sorted(node.attrs.items()))
            families.setdefault(key, []).append(node)
    draft = Draft(graph)
    for family in families.values():
        chains = _alike(graph, family)
        later = [_reader(graph, chain[-1]) for chain in chains]
        alone = chip.combined and any(node is not None and node.has("lanes") for node in later)
        if len(family) > 1 and not alone:  # what follows one of them alone stays in its kernel
            _merge(draft, chains)
    return draft.finish()


def _joins(graph: Graph, node: Node) -> bool:
    """Tell whether columns of a product are whole blocks, its weights constants."""
    weight, out = graph.constants.get(node.inputs[1]), graph.types[node.output]
    plain = weight is not None and not node.attr("trans_a", False) and len(node.inputs) == 2
    return plain and len(out.shape) == 2 and out.shape[1] % BLOCK == 0 and is_float(out.dtype)


def _reader(graph: Graph, node: Node) -> Node | None:
    """Return the one node that reads a node's result; None if that is an output, too."""
    readers = graph.readers[node.output]
    return readers[0] if len(readers) == 1 and node.output not in graph.outputs else None


def _alike(graph: Graph, family: list[Node]) -> list[list[Node]]:
    """Return each product with the additions and other lane-wise work that all have in common."""
    chains = [[node] for node in family]
    while True:
        found = [_reader(graph, chain[-1]) for chain in chains]
        pairs = [(n, c[-1]) for n, c in zip(found, chains, strict=True) if n is not None]
        kinds = {(n.op, *sorted(n.attrs.items())) for n, _ in pairs}
        same = len(pairs) == len(chains) and len(kinds) == 1
        if not same or not all(_along(graph, n, before) for n, before in pairs):
            return chains
        for chain, (node, _) in zip(chains, pairs, strict=True):
            chain.append(node)


def _along(graph: Graph, node: Node, before: Node) -> bool:
    """Tell whether a node reads its chain first, then at most a number per column."""
    rest = node.inputs[1:]
    plain = node.has("lanes") and node.inputs[0] == before.output and len(rest) < 2
    kind, width = graph.types[node.output], graph.types[before.output].shape[1:]
    same = kind == graph.types[before.output]
    return (
        plain and same and all(n in graph.constants and graph.types[n].shape == width for n in rest)
    )


def _merge(draft: Draft, chains: list[list[Node]]) -> None:
    """Insert one chain for all, and a slice of its result for each."""
    first = [chain[0] for chain in chains]
    axis = 0 if first[0].attr("trans_b", False) else 1
    weight = _joined(draft, [node.inputs[1] for node in first], axis)
    y = draft.insert("matmul", (first[0].inputs[0], weight), first[0].attrs, first[0].name)
    for nodes in zip(*(chain[1:] for chain in chains), strict=True):
        rest = [
            _joined(draft, [n.inputs[i] for n in nodes], 0) for i in range(1, len(nodes[0].inputs))
        ]
        y = draft.insert(nodes[0].op, (y, *rest), nodes[0].attrs, nodes[0].name)
    rows, at = draft.type(y).shape[0], 0
    for chain in chains:
        end = at + draft.type(chain[-1].output).shape[1]
        attrs = {"begin": (0, at), "end": (rows, end)}
        draft.replace(
            chain[-1].output, draft.insert("slice", (y,), attrs, f"{chain[-1].name}_part")
        )
        at = end


def _joined(draft: Draft, names: list[str], axis: int) -> str:
    """Add constants side by side as one, made when somebody asks for it."""
    parts = [draft.constants[name] for name in names]
    shape = list(parts[0].type.shape)
    shape[axis] = sum(p.type.shape[axis] for p in parts)
    kind = TensorType(tuple(shape), parts[0].type.dtype)
    return draft.add(Constant(kind, partial(_side_by_side, tuple(parts), axis)), f"{names[0]}_all")


def _side_by_side(parts: tuple[Constant, ...], axis: int) -> Values:
    return np.concatenate([part.array() for part in parts], axis=axis)
