"""Bytes that a network keeps in device memory along its nodes, and what a kernel can take on."""

from __future__ import annotations

from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.passes.order import live_bytes, spans

__all__ = ["live_bytes", "peak_bytes", "pixels", "spans", "weight_bytes"]
CONVOLVE = ("conv2d", "conv_transpose2d", "depthwise_conv2d")


def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all constants that nodes read."""
    read = {name for node in graph.nodes for name in node.inputs}
    return sum(c.type.size_bytes for name, c in graph.constants.items() if name in read)


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes alive along the nodes in order: activations, and all weights.

    Every node writes a tensor of its own: fusion, in-place results and views save some of it.
    """
    return weight_bytes(graph) + max(live_bytes(graph))


def pixels(graph: Graph, node: Node) -> int:
    """Return the pixels of all images that a convolution writes; 0 for other operators."""
    n, _, h, w = graph.types[node.output].shape if node.op in CONVOLVE else (0,) * 4
    return n * h * w
