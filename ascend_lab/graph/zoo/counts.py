"""Two numbers by which models are known: trainable parameters and multiply-accumulates."""

from __future__ import annotations

import math

from ascend_lab.graph.ir import Graph, Node, Seeded

STATISTICS = (3, 4)
"""Inputs of a batch norm that training averages but no gradient changes: mean and variance."""


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
