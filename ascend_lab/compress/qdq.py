"""A quantised graph as an ONNX file: QuantizeLinear and DequantizeLinear around what is rounded.

What a layer reads passes through a pair of them, weights lie in the file as whole numbers behind a
DequantizeLinear. Runtimes that know the pattern compute the layer on whole numbers; ONNX Runtime
does so exactly on x64 processors without VNNI only with "session.x64quantprecision" set to "1".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ascend_lab.compress import quantise as q
from ascend_lab.compress.scales import LayerScales, quantise
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph import Draft, Graph, Node
from ascend_lab.graph.ir import Values

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

WIDTHS = {8: np.int8, 16: np.int16}


def qdq_model(found: q.Quantised) -> ModelProto:
    """Return the model, operator set 22; weights of fewer than 8 bits lie in int8.

    Raises `UnsupportedError` for activations in other than 8 or 16 bits, and as `export_onnx`.
    """
    from ascend_lab.graph.onnx import export_onnx

    marks: dict[str, tuple[LayerScales, Node]] = {}

    def put(draft: Draft, node: Node, layer: LayerScales, place: int) -> str:
        """Write a node that does nothing, and keep by its name what is to stand there."""
        if layer.bits not in WIDTHS:
            raise UnsupportedError(f"{node.name}: activations in 8 or 16 bits", f"{layer.bits}")
        x = node.inputs[place]
        name = draft.insert("trans_data", [x], {"layout": "ND"}, f"{x}_dequantised")
        marks[name] = layer, node
        return name

    graph = q.with_reads(found.graph, q.by_node(found), put)
    model: ModelProto = export_onnx(graph)
    nodes, tensors = list(model.graph.node), list(model.graph.initializer)
    del model.graph.node[:], model.graph.initializer[:]
    for node in nodes:
        if node.output[0] in marks:
            layer, reader = marks[node.output[0]]
            constant = node.input[0] in reader.inputs[1:]
            made = _constant(node, layer, reader, graph) if constant else _pair(node, layer)
            model.graph.node.extend(made[0])
            model.graph.initializer.extend(made[1])
        else:
            model.graph.node.append(node)
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(one for one in tensors if one.name in read)
    return model


Written = tuple[list["NodeProto"], list["TensorProto"]]


def _pair(node: NodeProto, layer: LayerScales) -> Written:
    """Return x quantised and dequantised, under the name of the node it takes the place of."""
    from onnx import helper

    name, kind = node.output[0], WIDTHS[layer.bits]
    scale, offset = np.asarray(layer.scale, np.float32), np.asarray(layer.offset, kind)
    given, tensors = _grid(name, scale, offset)
    first = helper.make_node("QuantizeLinear", [node.input[0], *given], [f"{name}/whole"])
    second = helper.make_node("DequantizeLinear", [f"{name}/whole", *given], [name])
    for one in (first, second):
        one.name = f"{name}/{one.op_type}"
    return [first, second], tensors


def _constant(node: NodeProto, layer: LayerScales, reader: Node, graph: Graph) -> Written:
    """Return a layer's weights or bias as whole numbers, dequantised."""
    from onnx import helper, numpy_helper

    name, before = node.output[0], node.input[0]
    axis = q.channel_axis(reader, graph)
    if before == reader.inputs[1]:
        scales = q.weight_scales(layer, reader, graph)
        values = quantise(graph.constants[before].array(), scales, 0, layer.weight_bits)
        whole = values.astype(WIDTHS.get(layer.weight_bits, np.int8))
    else:
        found = q.whole_bias(layer, reader, graph)
        assert found is not None
        scales, whole, axis = q.bias_scales(layer), found, 0
    scales = scales.reshape(-1) if scales.size > 1 else scales.reshape(())
    given, tensors = _grid(name, scales, np.zeros_like(scales, whole.dtype))
    tensors.append(numpy_helper.from_array(whole, f"{name}/whole"))
    made = helper.make_node("DequantizeLinear", [f"{name}/whole", *given], [name], name)
    if scales.ndim:
        made.attribute.append(helper.make_attribute("axis", axis))
    return [made], tensors


def _grid(name: str, scale: Values, offset: Values) -> tuple[list[str], list[TensorProto]]:
    """Return the names and tensors of a scale and a zero point."""
    from onnx import numpy_helper

    named = {f"{name}/scale": scale, f"{name}/offset": offset}
    return list(named), [numpy_helper.from_array(array, key) for key, array in named.items()]


# -- any batch ------------------------------------------------------------------------------------
def with_open_batch(one: ModelProto, other: ModelProto) -> ModelProto | None:
    """Return the model for any batch, from two that differ in the batch only.

    What differs must be the sizes of inputs and outputs, and one size in the wanted shape of a
    reshape, which is then left open; None where more differs.
    """
    from onnx import ModelProto, numpy_helper

    pairs = zip(one.graph.node, other.graph.node, strict=False)
    if len(one.graph.node) != len(other.graph.node) or any(a != b for a, b in pairs):
        return None
    found: ModelProto = ModelProto.FromString(one.SerializeToString())
    found.graph.ClearField("value_info")
    wanted = {node.input[1] for node in found.graph.node if node.op_type == "Reshape"}
    others = [n for node in found.graph.node if node.op_type != "Reshape" for n in node.input]
    tensors = {tensor.name: tensor for tensor in other.graph.initializer}
    for tensor in found.graph.initializer:
        if tensor == tensors[tensor.name]:
            continue
        shape = numpy_helper.to_array(tensor).copy()
        changed = shape != numpy_helper.to_array(tensors[tensor.name])
        if tensor.name not in wanted or tensor.name in others or changed.sum() != 1:
            return None
        shape[changed] = -1
        tensor.CopyFrom(numpy_helper.from_array(shape, tensor.name))
    for mine, theirs in (
        (found.graph.input, other.graph.input),
        (found.graph.output, other.graph.output),
    ):
        for a, b in zip(mine, theirs, strict=True):
            sizes = (a.type.tensor_type.shape.dim, b.type.tensor_type.shape.dim)
            for axis, (size, second) in enumerate(zip(*sizes, strict=True)):
                if size != second:
                    size.dim_param = "batch" if axis == 0 else f"{a.name}_{axis}"
    return found
