"""The shape of a model before any work: names written once, nothing missing, no cycle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from ascend_lab.errors import GraphError, InputError, UnsupportedError
from ascend_lab.graph.onnx.attributes import find, title
from ascend_lab.graph.onnx.tensors import Limits

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


def checked_nodes(model: ModelProto, opset: int, limits: Limits) -> Sequence[NodeProto]:
    """Return the nodes in an order in which each reads what is there.

    Raises `UnsupportedError` for too many nodes or one that cannot be converted, `GraphError` for
    names written twice, names nothing writes and cycles.
    """
    graph = model.graph
    if len(graph.node) > limits.nodes:
        raise UnsupportedError(f"at most {limits.nodes} nodes", str(len(graph.node)), "split it")
    if graph.sparse_initializer:
        raise UnsupportedError("dense initialisers", "a sparse one", "store it densely")
    _check_text(graph)
    for node in graph.node:
        find(node, opset)
    return _ordered(graph, _names(graph))


def _names(graph: GraphProto) -> set[str]:
    """Return the names there are before the first node; raise `GraphError` for repeats."""
    entries = [entry.name for entry in graph.input]
    weights = [tensor.name for tensor in graph.initializer]
    for what, names in (("graph input", entries), ("initialiser", weights)):
        if len(set(names)) < len(names) or "" in names:
            twice = Counter(names).most_common(1)[0][0] if "" not in names else ""
            raise GraphError(f"{what} names, each once", repr(twice), "rename one")
    ready = {*entries, *weights}
    written = set(ready)
    for node in graph.node:
        for name in filter(None, node.output):
            if name in written:
                raise GraphError(f"node {title(node)}: a new name", f"{name} twice", "rename one")
            written.add(name)
    for node in graph.node:
        for name in filter(None, node.input):
            if name not in written:
                raise GraphError(
                    f"node {title(node)} ({node.op_type}): input {name}",
                    "nothing writes it: no initialiser, no graph input, no node",
                    "export the model with its weights",
                )
    for entry in graph.output:
        if entry.name not in written:
            raise GraphError(f"output {entry.name}", "nothing writes it", "check the name")
    outs = [entry.name for entry in graph.output]
    if len(set(outs)) < len(outs):
        raise InputError("each output name once", ", ".join(outs)[:80], "drop the repeat")
    return ready


def _check_text(graph: GraphProto) -> None:
    """Raise `InputError` for names that are not text: damaged files hold any bytes."""
    nodes = (text for n in graph.node for text in (n.name, n.op_type, *n.input, *n.output))
    ends = (entry.name for entry in (*graph.input, *graph.output, *graph.initializer))
    for name in (graph.name, *ends, *nodes):
        if not isinstance(name, str) or not name.isprintable():
            raise InputError("names of printable text", repr(name)[:40], "export the model again")


def _ordered(graph: GraphProto, ready: set[str]) -> Sequence[NodeProto]:
    """Return the nodes as they stand if that order works, else sorted."""
    there, sound = set(ready), True
    for node in graph.node:
        sound = sound and all(not name or name in there for name in node.input)
        there.update(node.output)
    if sound:
        return list(graph.node)
    writer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    before = {
        i: [writer[name] for name in node.input if name in writer]
        for i, node in enumerate(graph.node)
    }
    try:
        return [graph.node[i] for i in TopologicalSorter(before).static_order()]
    except CycleError as error:
        loop = [title(graph.node[i]) for i in error.args[1]]
        text = " -> ".join(loop if len(loop) < 8 else [*loop[:3], "...", *loop[-3:]])
        raise GraphError("a model without cycles", text, "cut one edge") from None
