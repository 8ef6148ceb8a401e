"""Writes a quantised network as an ONNX file: adds QDQ pairs to the model from which it comes.

A pair is QuantizeLinear (Q) followed by DequantizeLinear (DQ): DQ(Q(x)) is x rounded to the levels
of a scale. Constants are stored as whole numbers and only need DQ.

    before                                after
    Conv x w b                            Conv DQ(Q(x)) DQ(whole w) DQ(whole b)
    BatchNormalization after it           removed: it is part of w and b
    a layer that is balanced              Div x factors, then as above
    Add t y, if a layer reads t in bytes  Add DQ(Q(t)) y

Everything else stays as in the model: names, types, open sizes, all other operators.

Runtimes that know the pattern compute the layer on whole numbers; ONNX Runtime does so exactly on
x64 processors without VNNI only with "session.x64quantprecision" set to "1".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import Graph, Node, ir
from ascend_lab.compiler.onnx.model_file import sound_nodes
from ascend_lab.compiler.passes import formats
from ascend_lab.deploy.compress.config import PRODUCTS
from ascend_lab.deploy.compress.layers import (
    Quantised,
    bias_of,
    by_node,
    channel_axis,
    input_axes,
)
from ascend_lab.deploy.compress.onnx_layers import LAYERS, Places
from ascend_lab.deploy.compress.scales import (
    LayerScales,
    bias_in_steps,
    bias_scales,
    broadcast_along,
    quantise,
)
from ascend_lab.errors import UnsupportedError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

WIDTHS = {8: np.int8, 16: np.int16}
"""Formats of whole numbers by their bits."""
PAIRS_SINCE = {8: 13, 16: 21}
"""Bits -> the first operator set with pairs of that width, including scales per channel."""


def qdq_model(
    quantised: Quantised, source: ModelProto | None = None, source_graph: Graph | None = None
) -> ModelProto:
    """Return a model with pairs for a quantised graph.

    They are written into a copy of `source`, the model from which `source_graph` was read; without
    it, into the quantised graph exported to ONNX. Weights of fewer than 8 bits are stored in int8.
    Raises `UnsupportedError` for activations of a width other than 8 or 16 bits and for a layer
    that is not an operator of the source, and the errors of `export_onnx`.
    """
    from onnx import ModelProto

    from ascend_lab.compiler.onnx import export_onnx

    for layer in quantised.layers:
        if layer.bits not in WIDTHS:
            raise UnsupportedError(f"{layer.name}: activations in 8 or 16 bits", f"{layer.bits}")
    if source is None:
        model: ModelProto = export_onnx(quantised.graph)
    else:
        model = ModelProto()
        model.CopyFrom(source)
    return _PairWriter(model, quantised, source_graph or quantised.graph).written()


def upgraded(model: ModelProto, bits: int = 8) -> ModelProto | None:
    """Return the model in an operator set that has pairs; None if it cannot be converted."""
    from onnx import version_converter

    needed_version = PAIRS_SINCE[bits]
    version = qdq_opset(model)
    if version >= needed_version:
        return model
    try:
        converted: ModelProto = version_converter.convert_version(model, needed_version)
    except Exception:  # whatever the converter raises: it does not know some operator
        return None
    # a version of the file format that is new enough for the operator set
    converted.ir_version = max(converted.ir_version, 10 if bits == 16 else 8)
    return converted


def qdq_opset(model: ModelProto) -> int:
    """Return the version of the standard's operators that a model uses."""
    versions = (entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return max(versions, default=1)


@dataclass(frozen=True)
class _WholeNumbers:
    """Whole numbers and their scales: a single one, or one for each index along an axis."""

    values: ir.Values
    scales: ir.Values
    axis: int | None


class _PairWriter:
    """A model whose layers get pairs; new nodes are appended, and `written` sorts them."""

    def __init__(self, model: ModelProto, quantised: Quantised, source_graph: Graph) -> None:
        self.model = model
        self.graph = model.graph
        self.source_graph = source_graph
        self.quantised_graph = quantised.graph
        self.layers = by_node(quantised)
        self.places = Places(model)
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self.names = {name for node in self.graph.node for name in (*node.input, *node.output)}
        self.names |= {entry.name for entry in (*self.graph.input, *self.graph.output)}
        self.names |= self.initializers.keys()
        self.pair_names: dict[tuple[Any, ...], str] = {}
        self.new_nodes: list[NodeProto] = []

    def written(self) -> ModelProto:
        """Write every layer and return the model."""
        norm_biases = self.remove_folded_norms()
        # quantised layers, and those in floats whose weights a norm has changed; each once
        for name in {**dict.fromkeys(self.layers), **dict.fromkeys(norm_biases)}:
            self.write_layer(self.quantised_graph.node(name), norm_biases)
        self.pair_summands()
        self.graph.node.extend(self.new_nodes)
        _tidy(self.model)
        return self.model

    # -- names and tensors ------------------------------------------------------------------------
    def unused_name(self, stem: str) -> str:
        """Return an unused name, and mark it as used."""
        name = stem
        count = 0
        while name in self.names:
            count += 1
            name = f"{stem}_{count}"
        self.names.add(name)
        return name

    def store(self, name: str, array: ir.Values) -> str:
        """Add an initialiser; return its name."""
        from onnx import numpy_helper

        stored_name = self.unused_name(name)
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), stored_name)
        self.graph.initializer.append(tensor)
        return stored_name

    def add_node(self, op: str, inputs: list[str], output: str, **attrs: Any) -> str:
        """Add a node with one output; return the output's name."""
        from onnx import helper

        output_name = self.unused_name(output)
        node = helper.make_node(op, inputs, [output_name], f"{output_name}/{op}", **attrs)
        self.new_nodes.append(node)
        return output_name

    # -- batch norms ------------------------------------------------------------------------------
    def remove_folded_norms(self) -> dict[str, ir.Values | None]:
        """Remove the norms that are folded into layers; return the new bias of each such layer.

        With scale g and shift t for each channel, norm(w x + b) is (g w) x + (g b + t).
        """
        remaining = {node.name for node in self.quantised_graph.nodes if node.op == "batch_norm"}
        biases: dict[str, ir.Values | None] = {}
        for node in self.source_graph.nodes:
            if node.op != "batch_norm" or {node.name, f"{node.name}_image"} & remaining:
                continue
            conv = self.source_graph.producers[node.inputs[0]]
            if conv.op == "reshape":  # a row, which the graph convolves as an image
                conv = self.source_graph.producers[conv.inputs[0]]
            layer = self.places.layer(conv)
            norm = self.places.of(node, "BatchNormalization")
            if layer is None or norm is None:
                raise self.missing(conv)
            # the layer writes the tensor that its norm wrote, so that readers need not change
            layer.output[0] = norm.output[0]
            self.graph.node.remove(norm)
            biases[conv.name] = self.bias_with_norm(conv.name, node.name)
        self.places = Places(self.model)
        return biases

    def bias_with_norm(self, conv_name: str, norm_name: str) -> ir.Values | None:
        """Return the bias of a layer into which a norm is folded; None if the graph has none.

        A depthwise convolution of the graph has no bias: the norm became an addition after it.
        """
        layer = self.quantised_graph.node(conv_name)
        if len(layer.inputs) > 2:
            return self.constant_row(layer.inputs[2])
        for node in self.quantised_graph.nodes:
            if node.name == norm_name and node.op == "add":
                return self.constant_row(node.inputs[1])
        return None

    def constant_row(self, name: str) -> ir.Values:
        """Return a constant of the quantised graph as a row of numbers."""
        return self.quantised_graph.constants[name].array().reshape(-1)

    def missing(self, node: Node) -> UnsupportedError:
        """Return the error for a layer that is no operator of the file."""
        needed = f"{node.name} ({node.op}): an operator {' or '.join(LAYERS)} of the model"
        return UnsupportedError(needed, "another", "skip it by the configuration: skip_layers")

    # -- layers -----------------------------------------------------------------------------------
    def write_layer(self, node: Node, norm_biases: Mapping[str, ir.Values | None]) -> None:
        """Let a layer read whole numbers, or else the weights changed by its folded norm."""
        operator = self.places.layer(node)
        if operator is None:
            raise self.missing(node)
        weights, axis = self.weights_of(node, operator)
        has_norm = node.name in norm_biases
        bias = norm_biases[node.name] if has_norm else bias_of(node, self.quantised_graph)
        layer = self.layers.get(node.name)
        if layer is None:  # it stays in floats, but its norm is folded into it
            operator.input[1] = self.store(f"{node.inputs[1]}_folded", weights)
            bias_name = self.store(f"{node.name}_bias", bias) if bias is not None else None
        else:
            x = self.balanced_input(node, operator, layer)
            operator.input[0] = self.paired(x, layer)
            operator.input[1] = self.whole_weights(node, layer, weights, axis)
            bias_name = self.whole_bias(node, layer, bias, has_norm)
        if bias_name is not None:
            del operator.input[2:]
            operator.input.append(bias_name)

    def whole_weights(
        self, node: Node, layer: LayerScales, weights: ir.Values, axis: int | None
    ) -> str:
        """Store a layer's weights as whole numbers; return the name of their dequantised tensor."""
        scales = np.asarray(layer.weight_scales, np.float32)
        scale_axis = axis if scales.size > 1 else None
        step_sizes = broadcast_along(scales, scale_axis, weights.ndim)
        values = quantise(weights, step_sizes, 0, layer.weight_bits)
        # weights of fewer bits, such as 4, are stored in bytes, too
        dtype = WIDTHS.get(layer.weight_bits, np.int8)
        numbers = _WholeNumbers(values.astype(dtype), scales, scale_axis)
        return self.dequantised(numbers, f"{node.inputs[1]}_dequantised")

    def whole_bias(
        self, node: Node, layer: LayerScales, bias: ir.Values | None, has_norm: bool
    ) -> str | None:
        """Store a layer's bias in whole numbers if int32 holds it, and return its name.

        Otherwise store it in floats if a norm changed it; None if it is missing or unchanged.
        """
        if bias is None:
            return None
        bias_steps = bias_in_steps(bias, layer)
        if bias_steps is None:
            return self.store(f"{node.name}_bias", bias) if has_norm else None
        name = node.inputs[2] if len(node.inputs) > 2 else f"{node.name}_bias"
        scales = bias_scales(layer)
        numbers = _WholeNumbers(bias_steps, scales, 0 if scales.size > 1 else None)
        return self.dequantised(numbers, f"{name}_dequantised")

    def weights_of(self, node: Node, operator: NodeProto) -> tuple[ir.Values, int | None]:
        """Return a layer's weights in the shape its operator needs, and the axis of channels."""
        values = self.quantised_graph.constants[node.inputs[1]].array()
        axis = channel_axis(node, self.quantised_graph)
        rank = values.ndim
        transposed = any(a.name == "transB" and a.i for a in operator.attribute)
        if node.op in PRODUCTS and transposed != bool(node.attr("trans_b", False)):
            values = np.swapaxes(values, -1, -2)
            # the last two axes, rank - 2 and rank - 1, are exchanged
            if axis is not None:
                axis = rank - 2 if axis == rank - 1 else rank - 1
        return self.in_file_shape(node, operator, values), axis

    def in_file_shape(self, node: Node, operator: NodeProto, values: ir.Values) -> ir.Values:
        """Return weights of the graph in the shape that they have in the file."""
        stored = self.initializers.get(operator.input[1])
        if stored is not None:
            return values.reshape(tuple(stored.dims))
        # The graph convolves rows as images of height 1, and has weights (k, c, 1, s) for a file's
        # (k, c, s). Here the file computes its weights, so their shape is not stated; a convolution
        # of rows shows by one size in `kernel_shape` or, without it, by a node of another name.
        kernel_ranks = [len(a.ints) for a in operator.attribute if a.name == "kernel_shape"]
        of_rows = kernel_ranks == [1] or (not kernel_ranks and node.name != operator.name)
        if operator.op_type.startswith("Conv") and values.ndim == 4 and of_rows:
            return values[:, :, 0]
        return values

    def balanced_input(self, node: Node, operator: NodeProto, layer: LayerScales) -> str:
        """Return the name of a layer's input, divided by its factors unless the model does that."""
        x = str(operator.input[0])
        source_node = {source.name: source for source in self.source_graph.nodes}.get(node.name)
        divided_already = source_node is not None and source_node.inputs[0] == node.inputs[0]
        if not layer.balance or divided_already:
            return x
        axes = input_axes(node, self.quantised_graph)
        assert axes is not None
        rank = axes[0] + 1
        if source_node is not None:
            rank = len(self.source_graph.types[source_node.inputs[0]].shape)
        if self.convolves_rows(node, operator):
            rank -= 1
        factors = broadcast_along(np.asarray(layer.balance, np.float32), axes[0], rank)
        divisor = self.store(f"{x}_factors", factors)
        return self.add_node("Div", [x, divisor], f"{x}_balanced")

    def convolves_rows(self, node: Node, operator: NodeProto) -> bool:
        """Tell whether the file convolves rows (n, c, w), the graph images (n, c, 1, w)."""
        is_convolution = operator.op_type.startswith("Conv")
        return is_convolution and self.weights_of(node, operator)[0].ndim == 3

    def paired(self, x: str, layer: LayerScales) -> str:
        """Return the name of DQ(Q(x)), which layers with the same input and scale share."""
        key = (x, layer.scale, layer.offset, layer.bits)
        if key not in self.pair_names:
            name = f"{x}_dequantised"
            dtype = WIDTHS[layer.bits]
            parameters = [
                self.store(f"{name}/scale", np.asarray(layer.scale, np.float32)),
                self.store(f"{name}/offset", np.asarray(layer.offset, dtype)),
            ]
            quantised = self.add_node("QuantizeLinear", [x, *parameters], f"{name}/whole")
            self.pair_names[key] = self.add_node("DequantizeLinear", [quantised, *parameters], name)
        return self.pair_names[key]

    def dequantised(self, numbers: _WholeNumbers, name: str) -> str:
        """Store whole numbers and write the DQ that reads them; return the name of its output."""
        scales = numbers.scales.reshape(-1 if numbers.axis is not None else ())
        parameters = [
            self.store(f"{name}/whole", numbers.values),
            self.store(f"{name}/scale", scales),
            self.store(f"{name}/offset", np.zeros_like(scales, numbers.values.dtype)),
        ]
        attrs = {} if numbers.axis is None else {"axis": numbers.axis}
        return self.add_node("DequantizeLinear", parameters, name, **attrs)

    def pair_summands(self) -> None:
        """Let additions read the pairs of layers: where both read a tensor, it is stored in bytes.

        This concerns residuals, which a layer and the addition after it read.
        """
        shared_layers = [name for name, layer in self.layers.items() if layer.shared]
        for addition, name in formats.summands(self.quantised_graph, shared_layers):
            node = self.quantised_graph.node(addition)
            layer = self.layers[name]
            operator = self.places.of(node, "Add", "Sum")
            x = self.quantised_graph.node(name).inputs[0]
            for place, read in enumerate(node.inputs):
                if operator is not None and len(operator.input) == 2 and read == x:
                    operator.input[place] = self.paired(operator.input[place], layer)


def _tidy(model: ModelProto) -> None:
    """Sort a model's nodes so that each follows its inputs; drop nodes that no output needs."""
    from onnx import GraphProto

    from ascend_lab.compiler.onnx.host import all_reads

    graph = model.graph
    ordered = GraphProto(node=sound_nodes(model))
    needed = {entry.name for entry in graph.output}
    needed_nodes = list[Any]()
    # from the outputs backward: a node is needed if a needed node reads its output
    for node in reversed(ordered.node):
        if needed.intersection(node.output):
            needed_nodes.append(node)
            needed.update(all_reads(node))
    del graph.node[:]
    graph.node.extend(reversed(needed_nodes))
    tensors: list[TensorProto] = [tensor for tensor in graph.initializer if tensor.name in needed]
    unused = {tensor.name for tensor in graph.initializer} - {tensor.name for tensor in tensors}
    entries = [entry for entry in graph.input if entry.name not in unused]
    value_infos = [info for info in graph.value_info if info.name in needed]
    for field, remaining in (
        (graph.initializer, tensors),
        (graph.input, entries),
        (graph.value_info, value_infos),
    ):
        # clearing a field would clear its entries too, so they are copied first
        copies = [type(tensor).FromString(tensor.SerializeToString()) for tensor in remaining]
        del field[:]
        field.extend(copies)
