"""Recomputation: activations that are not kept but computed once more, before backward needs them.

Memory for time: with segments of equal cost between the kept tensors, a chain of n layers keeps
about sqrt(n) tensors for one more forward pass (Chen et al. 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_lab.errors import InputError
from ascend_lab.graph import Graph
from ascend_lab.ops.formats import is_float


def carried(graph: Graph, parameters: Sequence[str]) -> frozenset[str]:
    """Return the tensors through which gradients flow: floats that hang on a parameter."""
    found = set(parameters)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(n for n in node.outputs if is_float(graph.types[n].dtype))
    return frozenset(found)


def cuts(graph: Graph, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors that alone carry the forward pass at some moment, in its order.

    They part the network into blocks: between a residual block and the next there is one, inside
    there is none. Tensors that hang on no parameter, such as masks, do not count.
    """
    flowing = carried(graph, parameters) - set(parameters)
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    last.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    live: set[str] = set()
    found: list[str] = []
    for i, node in enumerate(graph.nodes):
        live.update(name for name in node.outputs if name in flowing and name in last)
        live -= {name for name in live if last[name] <= i}
        if len(live) == 1 and not live.intersection(found):
            found += live
    return tuple(found)


def every(graph: Graph, blocks: int, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors to drop so that every n-th cut is kept; those after the last cut stay.

    What hangs on no parameter is kept too. Raises `InputError` for fewer than one block.
    """
    if blocks < 1:
        raise InputError("recompute: every n-th block, n of at least 1", str(blocks), "raise it")
    inner = [name for name in cuts(graph, parameters) if name not in graph.outputs]
    kept = inner[blocks - 1 :: blocks]
    if not kept:
        return ()
    flowing, dropped = carried(graph, parameters), []
    for node in graph.nodes:
        if kept[-1] in node.outputs:
            break
        dropped += [n for n in node.outputs if n in flowing and n not in kept]
    return tuple(dropped)


def dropped_tensors(
    graph: Graph, recompute: Sequence[str] | int, parameters: Sequence[str]
) -> frozenset[str]:
    """Return the tensors not kept: named themselves or by their node, or by "every n-th block".

    All outputs of a node go together; graph outputs stay. Raises `InputError` for unknown names.
    """
    names = every(graph, recompute, parameters) if isinstance(recompute, int) else recompute
    nodes = {node.name: node for node in graph.nodes}
    found: set[str] = set()
    for name in names:
        node = graph.producers.get(name) or nodes.get(name)
        if node is None:
            raise InputError("recompute: nodes or their outputs", repr(name), "check the name")
        found.update(node.outputs)
    return frozenset(found - set(graph.outputs))
