"""Fake quantisation: builds a network in fp32 with the rounding errors of the quantised one.

Before each layer its input x is rounded to the levels of its scale and clipped, but stays in fp32:

    x' = (clip(round(x / scale) + offset) - offset) scale

Weights and biases are constants and are rounded once. The errors of the network's output are then
those of eight bits, and any tool that runs fp32 can measure them.
"""

from __future__ import annotations

import numpy as np

from ascend_lab.compiler import Graph, Node
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.passes import formats
from ascend_lab.deploy.compress.layers import (
    Quantised,
    bias_of,
    by_node,
    constant_of,
    weight_scales,
)
from ascend_lab.deploy.compress.scales import (
    LayerScales,
    bias_in_steps,
    bias_scales,
    fake_quantise,
    integer_range,
)


def fake_quantised(quantised: Quantised) -> Graph:
    """Return the graph in fp32 that rounds the inputs of layers as whole numbers would be.

    Raises `InputError` for scales of a layer that is not in the graph.
    """
    graph = quantised.graph
    layers = by_node(quantised)
    draft = Draft(graph)
    rounded_inputs = dict[tuple[str, float, int, int], str]()
    for node in graph.nodes:
        if node.name not in layers:
            continue
        layer = layers[node.name]
        reads = list(node.inputs)
        # layers that read the same tensor in the same steps share its rounding
        key = (reads[0], layer.scale, layer.offset, layer.bits)
        if key not in rounded_inputs:
            rounded_inputs[key] = _rounded_input(draft, node, layer)
        reads[0] = rounded_inputs[key]
        reads[1] = _rounded_weights(draft, node, layer, graph)
        # on the chip a bias is added to sums in int32, so it is a whole number of their steps
        bias = bias_of(node, graph)
        whole_bias = bias_in_steps(bias, layer) if bias is not None else None
        if whole_bias is not None:
            rounded_bias = constant_of(whole_bias * bias_scales(layer))
            reads[2] = draft.add(rounded_bias, f"{node.inputs[2]}_fake")
        draft.become(node, node.op, reads, node.attrs)
    # an addition with the same input reads the same rounded tensor, as it will in bytes on the chip
    shared_layers = [name for name, layer in layers.items() if layer.shared]
    for addition, name in formats.summands(graph, shared_layers):
        layer = layers[name]
        x = graph.node(name).inputs[0]
        rounded_x = rounded_inputs[x, layer.scale, layer.offset, layer.bits]
        formats.share(draft, addition, x, rounded_x)
    return draft.finish()


def _rounded_input(draft: Draft, node: Node, layer: LayerScales) -> str:
    """Insert the rounding of a layer's input; return the name of the rounded tensor.

    The offset cancels: clip(round(x / scale) + offset) - offset is round(x / scale), clipped to
    limits from which the offset has been taken away.
    """
    name = node.inputs[0]
    step = draft.add(constant_of(np.asarray(layer.scale, np.float32)), f"{name}_scale")
    steps = draft.insert("round", [draft.insert("div", [name, step])])
    low, high = (float(end - layer.offset) for end in integer_range(layer.bits))
    clipped = draft.insert("clip", [steps], {"low": low, "high": high})
    return draft.insert("muls", [clipped], {"number": layer.scale}, f"{name}_fake")


def _rounded_weights(draft: Draft, node: Node, layer: LayerScales, graph: Graph) -> str:
    """Add a layer's weights, rounded, as a constant; return its name."""
    name = node.inputs[1]
    weights = graph.constants[name].array()
    scales = weight_scales(layer, node, graph)
    return draft.add(
        constant_of(fake_quantise(weights, scales, 0, layer.weight_bits)), f"{name}_fake"
    )
