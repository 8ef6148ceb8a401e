"""A quantised network as an ONNX file: pairs are written into the model that it comes from.

    before                                after
    Conv x w b                            Conv DQ(Q(x)) DQ(whole w) DQ(whole b)
    BatchNormalization behind it          gone: w and b have taken it in
    a layer that is balanced              Div x factors, then as above
    Add t y, where t is read in bytes     Add DQ(Q(t)) y

All else stays as the model has it: names, types, sizes that are open, operators of any kind. A
layer of the graph is found again by the title of its node, or by the tensor it writes.

Runtimes that know the pattern compute the layer on whole numbers; ONNX Runtime does so exactly on
x64 processors without VNNI only with "session.x64quantprecision" set to "1".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import Graph, Node, ir
from ascend_lab.compiler.onnx.model_file import sound_nodes, title
from ascend_lab.compiler.passes import formats
from ascend_lab.deploy.compress.config import PRODUCTS, Plan
from ascend_lab.deploy.compress.layers import (
    HEAVY,
    Quantised,
    bias_of,
    by_node,
    channel_axis,
    input_axes,
    why_not,
)
from ascend_lab.deploy.compress.scales import (
    LayerScales,
    along,
    bias_in_steps,
    bias_scales,
    quantise,
)
from ascend_lab.errors import UnsupportedError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

WIDTHS = {8: np.int8, 16: np.int16}
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators of ONNX that are layers of weights and may read pairs."""
OTHERS = ("RNN", "GRU", "LSTM", "Einsum", "Attention")
"""Other operators of ONNX that multiply."""
PAIRS_SINCE = {8: 13, 16: 21}
"""The first operator set with pairs of so many bits, scales per channel included."""


def qdq_model(
    found: Quantised, source: ModelProto | None = None, before: Graph | None = None
) -> ModelProto:
    """Return the model with pairs: `source`, of which `before` is the graph, or the graph's own.

    Weights of fewer than 8 bits lie in int8. Raises `UnsupportedError` for activations in other
    than 8 or 16 bits, for a layer that is no operator of the source, and as `export_onnx`.
    """
    from onnx import ModelProto

    from ascend_lab.compiler.onnx import export_onnx

    for layer in found.layers:
        if layer.bits not in WIDTHS:
            raise UnsupportedError(f"{layer.name}: activations in 8 or 16 bits", f"{layer.bits}")
    if source is None:
        model: ModelProto = export_onnx(found.graph)
    else:
        model = ModelProto()
        model.CopyFrom(source)
    return _Writer(model, found, before or found.graph).written()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An operator that multiplies or convolves and stays in floating point, and why."""

    name: str
    op: str
    reason: str


def left_out(
    model: ModelProto, graph: Graph, plan: Plan
) -> tuple[tuple[LeftOut, ...], frozenset[str]]:
    """Return what of a model stays in floating point, and the layers that a plan has to skip.

    These are layers of the graph, ready to be quantised, that are no operators of the model: a
    recurrent network, for instance, is many products in a graph and one operator in a file.
    """
    places = Places(model)
    apart = set[str]()
    layers = set[str]()
    found: dict[str, LeftOut] = {}
    for node in graph.nodes:
        if node.op not in HEAVY:
            continue
        owner = next(places.candidates(node), None)
        name, op = (title(owner), owner.op_type) if owner is not None else (node.name, node.op)
        reason = why_not(node, graph)
        if not reason and plan.of(node) is None:
            reason = "the configuration skips it"
        elif not reason and places.layer(node) is None:
            reason = f"a file has no form of {op} in eight bits"
            apart.add(node.name)
        if reason:
            found.setdefault(name, LeftOut(name, op, reason))
        else:
            layers.add(name)
    for one in model.graph.node:
        name = title(one)
        if one.op_type in (*LAYERS, *OTHERS) and name not in found and name not in layers:
            reason = "what it computes is known before the network runs"
            found[name] = LeftOut(name, one.op_type, reason)
    return tuple(found.values()), frozenset(apart)


def upgraded(model: ModelProto, bits: int = 8) -> ModelProto | None:
    """Return the model in an operator set that has pairs; None where it cannot be converted."""
    from onnx import version_converter

    wanted = PAIRS_SINCE[bits]
    version = qdq_opset(model)
    if version >= wanted:
        return model
    try:
        made: ModelProto = version_converter.convert_version(model, wanted)
    except Exception:  # whatever the converter raises: it does not know some operator
        return None
    made.ir_version = max(made.ir_version, 10 if bits == 16 else 8)
    return made


def qdq_opset(model: ModelProto) -> int:
    """Return the version of the standard's operators that a model uses."""
    versions = (one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
    return max(versions, default=1)


def _outer(name: str) -> str:
    """Return the title of the operator that a graph's node is a part of."""
    return name.rpartition("/")[0]


class Places:
    """Where a graph's nodes are in a model."""

    def __init__(self, model: ModelProto) -> None:
        """Index the nodes by title and by what they write."""
        self.titles = {title(node): node for node in model.graph.node}
        self.makers = {name: node for node in model.graph.node for name in node.output if name}

    def candidates(self, node: Node) -> Iterator[NodeProto]:
        """Yield the operators that a graph's node may be."""
        for name in (node.name, _outer(node.name)):
            if name in self.titles:
                yield self.titles[name]
        if node.output in self.makers:
            yield self.makers[node.output]

    def of(self, node: Node, *ops: str) -> NodeProto | None:
        """Return the operator, one of `ops`, that a graph's node is; None if there is none."""
        return next((one for one in self.candidates(node) if one.op_type in ops), None)

    def layer(self, node: Node) -> NodeProto | None:
        """Return the operator that a layer is."""
        return self.of(node, *LAYERS)


@dataclass(frozen=True)
class _Grid:
    """Whole numbers and what they stand for: scales, one or along an axis."""

    whole: ir.Values
    scales: ir.Values
    axis: int | None


class _Writer:
    """A model being changed; new nodes stand at its end until `written` sorts them."""

    def __init__(self, model: ModelProto, found: Quantised, before: Graph) -> None:
        self.model = model
        self.graph = model.graph
        self.before = before
        self.after = found.graph
        self.layers = by_node(found)
        self.places = Places(model)
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}
        self.names = {name for node in self.graph.node for name in (*node.input, *node.output)}
        self.names |= {entry.name for entry in (*self.graph.input, *self.graph.output)}
        self.names |= self.stored.keys()
        self.pairs: dict[tuple[Any, ...], str] = {}
        self.new: list[NodeProto] = []

    def written(self) -> ModelProto:
        """Write every layer and return the model."""
        shifts = self.without_norms()
        for name in {**dict.fromkeys(self.layers), **dict.fromkeys(shifts)}:
            self.layer(self.after.node(name), shifts)
        self.summands()
        self.graph.node.extend(self.new)
        _tidy(self.model)
        return self.model

    # -- names and tensors ------------------------------------------------------------------------
    def free(self, wanted: str) -> str:
        """Return a name that nothing has, and take it."""
        name = wanted
        count = 0
        while name in self.names:
            count += 1
            name = f"{wanted}_{count}"
        self.names.add(name)
        return name

    def store(self, name: str, array: ir.Values) -> str:
        """Add an initialiser; return its name."""
        from onnx import numpy_helper

        name = self.free(name)
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, op: str, inputs: list[str], output: str, **attrs: Any) -> str:
        """Add a node of one output; return that."""
        from onnx import helper

        name = self.free(output)
        self.new.append(helper.make_node(op, inputs, [name], f"{name}/{op}", **attrs))
        return name

    # -- batch norms ------------------------------------------------------------------------------
    def without_norms(self) -> dict[str, ir.Values | None]:
        """Take out the norms that layers have taken in; return those layers and their biases."""
        kept = {node.name for node in self.after.nodes if node.op == "batch_norm"}
        found: dict[str, ir.Values | None] = {}
        for node in self.before.nodes:
            if node.op != "batch_norm" or {node.name, f"{node.name}_image"} & kept:
                continue
            conv = self.before.producers[node.inputs[0]]
            if conv.op == "reshape":  # a row, which the graph convolves as an image
                conv = self.before.producers[conv.inputs[0]]
            layer = self.places.layer(conv)
            norm = self.places.of(node, "BatchNormalization")
            if layer is None or norm is None:
                raise self.missing(conv)
            layer.output[0] = norm.output[0]
            self.graph.node.remove(norm)
            found[conv.name] = self.shift(conv.name, node.name)
        self.places = Places(self.model)
        return found

    def shift(self, conv: str, norm: str) -> ir.Values | None:
        """Return the bias that a layer has with its norm, which a depthwise one adds behind it."""
        layer = self.after.node(conv)
        behind = [n for n in self.after.nodes if n.name == norm and n.op == "add"]
        names = layer.inputs[2:] or (behind[0].inputs[1:] if behind else ())
        return self.after.constants[names[0]].array().reshape(-1) if names else None

    def missing(self, node: Node) -> UnsupportedError:
        needed = f"{node.name} ({node.op}): an operator {' or '.join(LAYERS)} of the model"
        return UnsupportedError(needed, "another", "skip it by the configuration: skip_layers")

    # -- layers -----------------------------------------------------------------------------------
    def layer(self, node: Node, shifts: Mapping[str, ir.Values | None]) -> None:
        """Let a layer read whole numbers, or the weights that its norm has changed."""
        site = self.places.layer(node)
        layer = self.layers.get(node.name)
        if site is None:
            raise self.missing(node)
        weights, axis = self.weights(node, site)
        changed = node.name in shifts
        bias = shifts[node.name] if changed else bias_of(node, self.after)
        if layer is None:
            site.input[1] = self.store(f"{node.inputs[1]}_folded", weights)
            whole = None
        else:
            x = self.balanced(node, site, layer)
            site.input[0] = self.pair(x, layer)
            flat = np.asarray(layer.weight_scales, np.float32)
            axis = axis if flat.size > 1 else None
            steps = along(flat, axis, weights.ndim)
            values = quantise(weights, steps, 0, layer.weight_bits)
            kind = WIDTHS.get(layer.weight_bits, np.int8)
            grid = _Grid(values.astype(kind), flat, axis)
            site.input[1] = self.constant(grid, f"{node.inputs[1]}_dequantised")
            whole = bias_in_steps(bias, layer) if bias is not None else None
        if bias is None or (whole is None and not changed):
            return
        if whole is None or layer is None:
            name = self.store(f"{node.name}_bias", bias)
        else:
            own = node.inputs[2] if len(node.inputs) > 2 else f"{node.name}_bias"
            scales = bias_scales(layer)
            grid = _Grid(whole, scales, 0 if scales.size > 1 else None)
            name = self.constant(grid, f"{own}_dequantised")
        del site.input[2:]
        site.input.append(name)

    def weights(self, node: Node, site: NodeProto) -> tuple[ir.Values, int | None]:
        """Return a layer's weights as its operator has them, and the axis of its channels."""
        values = self.after.constants[node.inputs[1]].array()
        axis = channel_axis(node, self.after)
        rank = values.ndim
        turned = any(one.name == "transB" and one.i for one in site.attribute)
        if node.op in PRODUCTS and turned != bool(node.attr("trans_b", False)):
            values = np.swapaxes(values, -1, -2)
            axis = None if axis is None else 2 * rank - 3 - axis
        stored = self.stored.get(site.input[1])
        if stored is not None:
            return values.reshape(tuple(stored.dims)), axis
        kernel = [len(one.ints) for one in site.attribute if one.name == "kernel_shape"]
        row = kernel == [1] or (not kernel and node.name != site.name)
        if site.op_type.startswith("Conv") and rank == 4 and row:
            values = values[:, :, 0]
        return values, axis

    def balanced(self, node: Node, site: NodeProto, layer: LayerScales) -> str:
        """Return what a layer reads, divided by its factors if the model does not do so yet."""
        own = {one.name: one for one in self.before.nodes}.get(node.name)
        if not layer.balance or (own is not None and own.inputs[0] == node.inputs[0]):
            return str(site.input[0])
        axes = input_axes(node, self.after)
        assert axes is not None
        rank = len(self.before.types[own.inputs[0]].shape) if own is not None else axes[0] + 1
        row = site.op_type.startswith("Conv") and self.weights(node, site)[0].ndim == 3
        factors = along(np.asarray(layer.balance, np.float32), axes[0], rank - row)
        divisor = self.store(f"{site.input[0]}_factors", factors)
        return self.node("Div", [site.input[0], divisor], f"{site.input[0]}_balanced")

    def pair(self, x: str, layer: LayerScales) -> str:
        """Return a tensor quantised and dequantised, once for equal scales."""
        key = (x, layer.scale, layer.offset, layer.bits)
        if key not in self.pairs:
            name = f"{x}_dequantised"
            kind = WIDTHS[layer.bits]
            given = [
                self.store(f"{name}/scale", np.asarray(layer.scale, np.float32)),
                self.store(f"{name}/offset", np.asarray(layer.offset, kind)),
            ]
            whole = self.node("QuantizeLinear", [x, *given], f"{name}/whole")
            self.pairs[key] = self.node("DequantizeLinear", [whole, *given], name)
        return self.pairs[key]

    def constant(self, grid: _Grid, name: str) -> str:
        """Return whole numbers, dequantised."""
        scales = grid.scales.reshape(-1 if grid.axis is not None else ())
        given = [
            self.store(f"{name}/whole", grid.whole),
            self.store(f"{name}/scale", scales),
            self.store(f"{name}/offset", np.zeros_like(scales, grid.whole.dtype)),
        ]
        attrs = {} if grid.axis is None else {"axis": grid.axis}
        return self.node("DequantizeLinear", given, name, **attrs)

    def summands(self) -> None:
        """Let additions read what the layers beside them read in whole numbers."""
        shared = [name for name, layer in self.layers.items() if layer.shared]
        for addition, name in formats.summands(self.after, shared):
            node = self.after.node(addition)
            layer = self.layers[name]
            site = self.places.of(node, "Add", "Sum")
            x = self.after.node(name).inputs[0]
            for place, read in enumerate(node.inputs):
                if site is not None and len(site.input) == 2 and read == x:
                    site.input[place] = self.pair(site.input[place], layer)


def _tidy(model: ModelProto) -> None:
    """Sort a model's nodes and drop what no output needs any more."""
    from onnx import GraphProto

    from ascend_lab.compiler.onnx.host import all_reads

    graph = model.graph
    ordered = GraphProto(node=sound_nodes(model))
    needed = {entry.name for entry in graph.output}
    kept = list[Any]()
    for node in reversed(ordered.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(all_reads(node))
    del graph.node[:]
    graph.node.extend(reversed(kept))
    tensors: list[TensorProto] = [one for one in graph.initializer if one.name in needed]
    gone = {one.name for one in graph.initializer} - {one.name for one in tensors}
    entries = [entry for entry in graph.input if entry.name not in gone]
    infos = [info for info in graph.value_info if info.name in needed]
    for field, left in (
        (graph.initializer, tensors),
        (graph.input, entries),
        (graph.value_info, infos),
    ):
        copies = [type(one).FromString(one.SerializeToString()) for one in left]
        del field[:]
        field.extend(copies)
