"""A time that no slicing, grouping or order of a network's kernels can go below on a chip.

    time >= max(cube work / cube peak, vector work / vector peak, compulsory bytes / memory rate)
            + one launch

Valid because slices compute every result at least once; a cube does at most m k n products a
cycle; a vector unit writes at most its lanes a cycle; and L2 starts empty, so that whatever is read
whole must come from device memory once. Counted are only: products and convolutions by their
definition; one vector operation per result of operators that the cube's output path cannot do;
weights of cube operators; inputs that some operator reads whole; results as far as they are more
than L2 may keep to itself. What is left out only makes the bound lower.
"""

from __future__ import annotations

from collections.abc import Mapping

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.graph import Compiled, Graph, Node
from ascend_lab.graph.layouts.assign import ELEMENTWISE
from ascend_lab.graph.zoo.counts import node_macs

ON_VECTORS = frozenset((
    "softmax", "layer_norm", "gelu", "tanh", "sigmoid", "silu", "exp", "hard_swish",
    "max_pool2d", "avg_pool2d",
))  # fmt: skip
"""Operators that take at least one vector operation per result, fused or not."""
MOVING = ("reshape", "transpose", "trans_data", "concat")
CONVOLVING = ("conv2d", "depthwise_conv2d")
PRODUCTS = ("matmul", "batch_matmul")


def network_bound(network: Compiled | Graph, chip: Chip) -> float:
    """Return the certified lower bound in seconds of a network before slicing, or as compiled."""
    graph = network.graph if isinstance(network, Compiled) else network
    parts = bound_parts(graph, chip)
    return max(parts.values()) + (chip.launch_overhead_s if graph.nodes else 0.0)


def bound_parts(graph: Graph, chip: Chip) -> Mapping[str, float]:
    """Return the seconds for which the "cube", the "vector" units and "memory" must be busy."""
    cube = vector = 0.0
    for node in graph.nodes:
        kind = graph.types[node.inputs[0]].dtype if node.inputs else ""
        if (products := node_macs(graph, node)) and kind in chip.cube:
            cube += 2 * products / chip.peak_ops_per_s(kind)
        out = graph.types[node.output]
        if node.op in ON_VECTORS and DTYPE_BYTES[out.dtype] > 1:
            vector += out.elements / chip.vector_peak_ops_per_s("fp16")
    memory = compulsory_bytes(graph, chip) / chip.device_memory.rate_bytes_per_s
    return {"cube": cube, "vector": vector, "memory": memory}


def compulsory_bytes(graph: Graph, chip: Chip) -> int:
    """Return the bytes that cross the memory interface whatever the schedule."""
    weights = {
        name
        for node in graph.nodes
        if node.op in (*CONVOLVING, *PRODUCTS)
        for name in node.inputs[1:2]
        if name in graph.constants
    }
    inputs = [n for n in graph.inputs if _read_whole(graph, n)]
    read = sum(graph.types[n].size_bytes for n in (*weights, *inputs))
    written = sum(graph.types[n].size_bytes for n in graph.outputs if n in graph.producers)
    return read + max(0, written - chip.l2.size_bytes)


def _read_whole(graph: Graph, name: str) -> bool:
    """Tell whether some operator needs every element of a tensor."""
    ahead, seen = [name], {name}
    while ahead:
        current = ahead.pop()
        for node in graph.readers.get(current, ()):
            if _needs_all(graph, node):
                return True
            if node.op in MOVING:
                ahead += [n for n in node.outputs if n not in seen]
                seen.update(node.outputs)
    return False


def _needs_all(graph: Graph, node: Node) -> bool:
    if node.op in CONVOLVING:
        kernel = graph.types[node.inputs[1]].shape[-2:]
        stride = node.attr("stride", 1)
        steps = (stride, stride) if isinstance(stride, int) else tuple(stride)
        return all(k >= s for k, s in zip(kernel, steps, strict=True))
    return node.op in ELEMENTWISE or node.op in PRODUCTS or node.op in ("softmax", "layer_norm")
