"""Bytes that a network keeps in device memory along its nodes, and what a kernel can take on."""

from __future__ import annotations

from itertools import accumulate

from ascend_lab.graph.ir import Graph, Node
from ascend_lab.ops.slicing import Range

CONVOLVE = ("conv2d", "conv_transpose2d", "depthwise_conv2d")


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


def pixels(graph: Graph, node: Node) -> int:
    """Return the pixels of all images that a convolution writes; 0 for other operators."""
    n, _, h, w = graph.types[node.output].shape if node.op in CONVOLVE else (0,) * 4
    return n * h * w
