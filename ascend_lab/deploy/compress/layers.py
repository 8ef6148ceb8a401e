"""Finds the layers of a graph that can be quantised, and the tensors that each of them reads.

A layer is a convolution or a product of fp32 tensors whose weights are constant. `Quantised` is a
graph together with the scales of its layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, Node, TensorType, evaluate
from ascend_lab.compiler.ir import Constant, Values, operator_of
from ascend_lab.deploy.compress.config import CONVOLUTIONS, PRODUCTS
from ascend_lab.deploy.compress.scales import LayerScales, broadcast_along
from ascend_lab.errors import InputError

Feeds = Sequence[Mapping[str, Any]]
"""Samples: for each run of a graph, the arrays of its inputs by name."""
ATTENTION = ("attention", "flash_attention", "attention_scores", "attention_context")
HEAVY = (*CONVOLUTIONS, *PRODUCTS, *ATTENTION)
"""Operators that multiply matrices or convolve: those that quantising could make faster."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A graph in fp32, prepared (norms folded, balanced, rounded), and the scales of its layers.

    Nodes without scales stay in floating point.
    """

    graph: Graph
    layers: tuple[LayerScales, ...]


# -- which nodes are layers -----------------------------------------------------------------------
def layers_of(graph: Graph) -> tuple[Node, ...]:
    """Return the convolutions and products of fp32 tensors with constant weights, in order."""
    return tuple(node for node in graph.nodes if node.op in HEAVY and not why_not(node, graph))


def why_not(node: Node, graph: Graph) -> str:
    """Return why a convolution or product cannot be quantised, "" if it can."""
    # a layer read from a QDQ file has DequantizeLinear before it, and integer files int8 tensors
    producers = [graph.producers[n].op for n in node.inputs[:2] if n in graph.producers]
    dtypes = {graph.types[name].dtype for name in (*node.inputs[:2], node.output)}
    if node.op in ATTENTION:
        return "its factors are computed, not constant"
    if "dequantise" in producers or dtypes & {"int8", "uint8", "int32"}:
        return "it is in whole numbers already"
    if dtypes != {"fp32"}:
        return f"it computes in {', '.join(sorted(dtypes))}, not in fp32"
    if node.inputs[0] in graph.constants:
        return "what it reads is a constant"
    if node.inputs[1] not in graph.constants:
        return "its weights are computed, not constant"
    if node.attr("trans_a"):
        return "it transposes what it reads"
    return ""


def by_node(quantised: Quantised) -> dict[str, LayerScales]:
    """Return the scales by layer; raise `InputError` for a layer that the graph does not have."""
    graph = quantised.graph
    names = {node.name for node in layers_of(graph)}
    for layer in quantised.layers:
        if layer.name not in names:
            raise InputError(f"{graph.name}: a layer", repr(layer.name), "check the records")
    return {layer.name: layer for layer in quantised.layers}


# -- the inputs of a layer ------------------------------------------------------------------------
def channel_axis(node: Node, graph: Graph) -> int | None:
    """Return the axis of a layer's weights along which its output channels lie.

    The result is None for a transposed convolution in groups, whose channels lie along two axes,
    and for weights that are several matrices, for which ONNX Runtime allows only one scale.
    """
    if node.op in ("conv2d", "depthwise_conv2d"):
        return 0  # weights (k, c, r, s)
    if node.op == "conv_transpose2d":
        return 1 if node.attr("groups", 1) == 1 else None  # weights (c, k, r, s)
    rank = len(graph.types[node.inputs[1]].shape)
    if rank > 2:
        return None
    # a product x w has its outputs along the columns of w (k, n), or along the rows of w^T
    return rank - 2 if node.attr("trans_b") else rank - 1


def input_axes(node: Node, graph: Graph) -> tuple[int, int] | None:
    """Return the axes of a layer's input and weights along which input channels lie.

    The result is None for a convolution in groups: its weights see only some of the channels.
    """
    # x (m, k) w (k, n): k is the last axis of x and the last but one of w
    if node.op in PRODUCTS:
        weight_rank = len(graph.types[node.inputs[1]].shape)
        x_axis = len(graph.types[node.inputs[0]].shape) - 1
        return x_axis, weight_rank - 1 if node.attr("trans_b") else weight_rank - 2
    grouped = node.op == "depthwise_conv2d" or node.attr("groups", 1) != 1
    return None if grouped else (1, 0 if node.op == "conv_transpose2d" else 1)


def weight_scales(layer: LayerScales, node: Node, graph: Graph) -> Values:
    """Return the scales of a layer's weights, shaped to broadcast with them."""
    axis = channel_axis(node, graph)
    kind = graph.types[node.inputs[1]]
    count = len(layer.weight_scales)
    if count > 1 and (axis is None or kind.shape[axis] != count):
        raise InputError(f"{node.name}: one weight scale, or one a channel", str(count))
    return broadcast_along(np.array(layer.weight_scales, np.float32), axis or 0, len(kind.shape))


def bias_of(node: Node, graph: Graph) -> Values | None:
    """Return a layer's bias, one number a channel; None if it has no such constant bias."""
    # gemm computes alpha a b + beta c: with other factors c is not what is added to the sums
    plain = node.attr("alpha", 1.0) == node.attr("beta", 1.0) == 1.0
    if len(node.inputs) < 3 or node.inputs[2] not in graph.constants or not plain:
        return None
    bias = graph.constants[node.inputs[2]].array()
    return bias if bias.ndim == 1 else None


# -- values and constants -------------------------------------------------------------------------
def tensor_values(graph: Graph, feeds: Feeds, names: Iterable[str]) -> dict[str, list[Values]]:
    """Return the values of the named tensors of a graph, one array for each feed."""
    # two layers may read the same tensor, which is then an output once
    unique_names = tuple(dict.fromkeys(names))
    runs = [evaluate(replace(graph, outputs=unique_names), feed) for feed in feeds]
    return {name: [run[name] for run in runs] for name in unique_names}


def output_of(node: Node, arrays: Sequence[Values], kind: type = np.float64) -> Values:
    """Return the output that a single node computes from arrays, in the number format `kind`."""
    operator = operator_of(node.op)
    converted: list[Values] = [array.astype(kind) for array in arrays]
    return np.asarray(operator.formula(*converted, **operator.settings(node.attrs)))


def with_values(graph: Graph, values: Mapping[str, Values]) -> Graph:
    """Return the graph with some of its constants replaced, in fp32; unknown names are ignored."""
    replaced = {name: constant_of(v) for name, v in values.items() if name in graph.constants}
    return replace(graph, constants={**graph.constants, **replaced})


def constant_of(array: Values) -> Constant:
    """Return an array as a constant in fp32."""
    return Constant(TensorType(array.shape, "fp32"), array.astype(np.float32, copy=False))
