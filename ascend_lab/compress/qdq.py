"""What a quantised graph computes, for others to read: in fp32, as an ONNX file, as records.

`fake_quantised` puts the rounding where the hardware rounds. In a file QuantizeLinear and
DequantizeLinear stand there: what a layer reads passes through a pair of them, weights lie in it as
whole numbers behind a DequantizeLinear. Runtimes that know the pattern compute the layer on whole
numbers; ONNX Runtime does so exactly on x64 processors without VNNI only with
"session.x64quantprecision" set to "1".

A record file is a text of records, one a layer, with the keys that AMCT's tools read and write
(scale_offset_record_pytorch.proto).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compress import config, quantise as q
from ascend_lab.compress.quantise import Quantised, constant_of, weight_scales
from ascend_lab.compress.scales import LayerScales, fake, limits, quantise
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.graph import Draft, Graph, Node, ir
from ascend_lab.graph.passes import formats
from ascend_lab.limits import TABLE_BYTES, read_file

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto


def with_reads(
    graph: Graph,
    layers: Mapping[str, LayerScales],
    put: Callable[[Draft, Node, LayerScales, int], str],
) -> Graph:
    """Return the graph whose layers read what `put` writes in place of an input.

    Its places are what a layer reads, 0, once for equal scales; the weights, 1; a whole bias, 2.
    """
    draft, made = Draft(graph), dict[tuple[str, float, int, int], str]()
    for node in graph.nodes:
        if node.name not in layers:
            continue
        layer, reads = layers[node.name], list(node.inputs)
        key = (reads[0], layer.scale, layer.offset, layer.bits)
        if key not in made:
            made[key] = put(draft, node, layer, 0)
        reads[0], reads[1] = made[key], put(draft, node, layer, 1)
        if whole_bias(layer, node, graph) is not None:
            reads[2] = put(draft, node, layer, 2)
        draft.become(node, node.op, reads, node.attrs)
    for addition, name in formats.summands(graph, [n for n, one in layers.items() if one.shared]):
        layer, x = layers[name], graph.node(name).inputs[0]
        formats.share(draft, addition, x, made[x, layer.scale, layer.offset, layer.bits])
    return draft.finish()


def fake_quantised(found: Quantised) -> Graph:
    """Return the graph that rounds what layers read as whole numbers would, in fp32.

    Raises `InputError` for scales of a layer that the graph has not.
    """

    def put(draft: Draft, node: Node, layer: LayerScales, place: int) -> str:
        name, graph = node.inputs[place], found.graph
        if place == 0:  # (clip(round(x / scale) + offset) - offset) scale
            step = draft.add(constant_of(np.asarray(layer.scale, np.float32)), f"{name}_scale")
            y = draft.insert("round", [draft.insert("div", [name, step])])
            low, high = (float(end - layer.offset) for end in limits(layer.bits))
            y = draft.insert("clip", [y], {"low": low, "high": high})
            return draft.insert("muls", [y], {"number": layer.scale}, f"{name}_fake")
        if place == 1:
            array, scales = graph.constants[name].array(), weight_scales(layer, node, graph)
            return draft.add(constant_of(fake(array, scales, 0, layer.weight_bits)), f"{name}_fake")
        bias = whole_bias(layer, node, graph) * bias_scales(layer)
        return draft.add(constant_of(bias), f"{name}_fake")

    return with_reads(found.graph, q.by_node(found), put)


def bias_scales(layer: LayerScales) -> ir.Values:
    """Return the scales of a layer's sums: one, or one per output channel."""
    return np.float32(layer.scale) * np.asarray(layer.weight_scales, np.float32)


def whole_bias(layer: LayerScales, node: Node, graph: Graph) -> ir.Values | None:
    """Return round(b / (scale x weight scale)), limited to int32; None without a plain bias."""
    plain = node.attr("alpha", 1.0) == node.attr("beta", 1.0) == 1.0
    if len(node.inputs) < 3 or node.inputs[2] not in graph.constants or not plain:
        return None
    bias = graph.constants[node.inputs[2]].array()
    if bias.ndim != 1:
        return None
    steps = np.rint(bias.astype(np.float64) / bias_scales(layer))
    return np.clip(steps, -(2**31), 2**31 - 1).astype(np.int32)


# -- an ONNX file ---------------------------------------------------------------------------------
WIDTHS = {8: np.int8, 16: np.int16}


def qdq_model(found: Quantised) -> ModelProto:
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

    graph = with_reads(found.graph, q.by_node(found), put)
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
        scales = weight_scales(layer, reader, graph)
        values = quantise(graph.constants[before].array(), scales, 0, layer.weight_bits)
        whole = values.astype(WIDTHS.get(layer.weight_bits, np.int8))
    else:
        found = whole_bias(layer, reader, graph)
        assert found is not None
        scales, whole, axis = bias_scales(layer), found, 0
    scales = scales.reshape(-1) if scales.size > 1 else scales.reshape(())
    given, tensors = _grid(name, scales, np.zeros_like(scales, whole.dtype))
    tensors.append(numpy_helper.from_array(whole, f"{name}/whole"))
    made = helper.make_node("DequantizeLinear", [f"{name}/whole", *given], [name], name)
    if scales.ndim:
        made.attribute.append(helper.make_attribute("axis", axis))
    return [made], tensors


def _grid(name: str, scale: ir.Values, offset: ir.Values) -> tuple[list[str], list[TensorProto]]:
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


# -- a record file --------------------------------------------------------------------------------
_WIDTHS = {f"INT{bits}": bits for bits in range(2, 17)}
_RNN = "records of recurrent layers are not read"
_VALUE: Mapping[str, Any] = {
    "scale_d": float,
    "offset_d": int,
    "scale_w": [float],
    "offset_w": [int],
    "tensor_balance_factor": [float],
    "dst_type": tuple(_WIDTHS),
    "act_type": tuple(_WIDTHS),
    "wts_type": tuple(_WIDTHS),
    "skip_fusion": bool,
    "shift_bit": "shifts belong to an older form of integer layers",
    "fakequant_precision_mode": "values are computed in fp32",
    **dict.fromkeys(("scale_h", "offset_h", "scale_r", "offset_r"), _RNN),
}
_FILE: Mapping[str, Any] = {
    "record": [{"key": str, "value": _VALUE}],
    "prune_record": "records of pruning are not read here",
}


def parse_records(text: str, where: str = "record file") -> tuple[LayerScales, ...]:
    """Return the layers of a record file; raise `InputError` naming the layer or key at fault."""
    found: dict[str, LayerScales] = {}
    for record in config.read_text(text, _FILE, where).get("record", []):
        name, value = record.get("key", ""), record.get("value", {})
        missing = [key for key in ("scale_d", "scale_w") if key not in value]
        if not name or missing or name in found:
            got = f"{name}: no {missing[0]}" if missing else f"{name or 'a record without'} twice"
            raise InputError(f"{where}: records with key, scale_d, scale_w, each once", got)
        if any(value.get("offset_w", ())):
            raise InputError(f"{where}: {name}: offset_w of 0", "another", "weights are symmetric")
        both = value.get("dst_type", "INT8")
        found[name] = LayerScales(
            name, value["scale_d"], value.get("offset_d", 0), tuple(value["scale_w"]),
            _WIDTHS[value.get("act_type", both)], _WIDTHS[value.get("wts_type", both)],
            tuple(value.get("tensor_balance_factor", ())),
        )  # fmt: skip
    return tuple(found.values())


def read_records(path: str | Path) -> tuple[LayerScales, ...]:
    """Return the layers of a record file on disk; raises as `parse_records`."""
    data = read_file(path, "a record file", TABLE_BYTES)
    return parse_records(data.decode("utf-8", "replace"), str(path))


def records_text(layers: Iterable[LayerScales]) -> str:
    """Return the record file of some layers; `parse_records` of it gives them back."""
    lines = []
    for one in layers:
        quoted = one.name.replace("\\", "\\\\").replace('"', '\\"')
        lines += ["record {", f'  key: "{quoted}"', "  value {"]
        lines += [f"    scale_d: {one.scale:.9g}", f"    offset_d: {one.offset}"]
        for scale in one.weight_scales:
            lines += [f"    scale_w: {scale:.9g}", "    offset_w: 0"]
        lines += [f"    tensor_balance_factor: {factor:.9g}" for factor in one.balance]
        lines += [f"    act_type: INT{one.bits}", f"    wts_type: INT{one.weight_bits}"]
        lines += ["  }", "}"]
    return "\n".join([*lines, ""])
