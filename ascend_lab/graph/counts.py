"""What a graph counts before any kernel: bytes alive along its nodes, products, parameters."""

import math
from itertools import accumulate

from ascend_lab.graph.ir import Graph, Node, Seeded
from ascend_lab.ops.slicing import Range

STATISTICS = (3, 4)
"""Inputs of a batch norm that training averages but no gradient changes: mean and variance."""


# -- bytes -----------------------------------------------------------------------------------------
def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all constants that nodes read."""
    read = {name for node in graph.nodes for name in node.inputs}
    return sum(c.type.size_bytes for name, c in graph.constants.items() if name in read)


def spans(graph: Graph) -> dict[str, Range]:
    """Return, for every activation, the first and the last node that needs it to be there."""
    found = dict.fromkeys(graph.inputs, (0, 0))
    for i, node in enumerate(graph.nodes):
        found.update((name, (i, i)) for name in node.outputs)
        for name in node.inputs:
            if name in found:
                found[name] = (found[name][0], i)
    end = max(len(graph.nodes) - 1, 0)
    found.update((n, (found[n][0], end)) for n in graph.outputs if n in found)
    return found


def live_bytes(graph: Graph) -> list[int]:
    """Return the bytes of the activations that exist while each node runs, its own included."""
    change = [0] * (max(len(graph.nodes), 1) + 1)
    for name, (first, last) in spans(graph).items():
        size = graph.types[name].size_bytes
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change))[:-1]


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes alive along the nodes in order: activations, and all weights.

    Every node writes a tensor of its own: fusion, in-place results and views save some of it.
    """
    return weight_bytes(graph) + max(live_bytes(graph))


# -- pixels, parameters, products -----------------------------------------------------------------
def pixels(graph: Graph, node: Node) -> int:
    """Return the pixels of all images that a convolution writes; 0 for other operators."""
    if node.has("convolution") or node.op == "conv_transpose2d":
        n, _, h, w = graph.types[node.output].shape
        return n * h * w
    return 0


def parameters(graph: Graph) -> int:
    """Return the trainable parameters of a model of the zoo, counted as published.

    Every `Seeded` constant that a node reads, once however often it is read; not the running
    statistics of batch norms, nor masks and other constants that are no weights.
    """
    read = {
        name
        for node in graph.nodes
        for place, name in enumerate(node.inputs)
        if not (node.op == "batch_norm" and place in STATISTICS)
    }
    found = ((name, c) for name, c in graph.constants.items() if isinstance(c.data, Seeded))
    return sum(c.type.elements for name, c in found if name in read)


def node_macs(graph: Graph, node: Node) -> int:
    """Return the multiply-accumulates of one node; 0 unless it multiplies matrices or convolves."""
    given = graph.in_types(node)
    out = graph.types[node.output].elements
    if node.op in ("conv2d", "depthwise_conv2d"):
        return out * math.prod(given[1].shape[1:])
    if node.op == "conv_transpose2d":
        return given[0].elements * math.prod(given[1].shape[1:])
    if node.op in ("matmul", "batch_matmul", "gemm"):
        return out * given[0].shape[-2 if node.attr("trans_a") else -1]
    if node.op == "attention":
        (*_, d), (*_, t, _), (*_, e) = (kind.shape for kind in given[:3])
        return out // e * t * (d + e)
    return 0


def macs(graph: Graph) -> int:
    """Return the multiply-accumulates of convolutions and matrix products of a graph."""
    return sum(node_macs(graph, node) for node in graph.nodes)


def published_macs(graph: Graph) -> int:
    """Return the multiply-accumulates of a model of the zoo, counted as published.

    All but those with a fixed matrix, which is no weight: the interpolation of a resize is free.
    """
    fixed = {name for name, c in graph.constants.items() if not isinstance(c.data, Seeded)}
    return sum(node_macs(graph, node) for node in graph.nodes if node.inputs[-1] not in fixed)
