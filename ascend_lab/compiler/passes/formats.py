"""Converts a graph to another number format: all of it to fp16 or bf16, its products to int8.

In int8, x is stored as qx = round(x / sx) + ox with a scale sx and an offset ox, and weights w as
qw = round(w / sw). A product is then y = sx sw (sum of (qx - ox) qw + qb), with a bias of
qb = b / (sx sw). Unless scales are given, quantisation is symmetric (ox = 0), with one scale for
each tensor: sx = max|x| / 127. With max|x| = 6.35 the scale is 0.05, and x = 1.02 becomes 20.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.compiler.draft import Draft, given_attrs
from ascend_lab.compiler.evaluate import evaluate, random_inputs
from ascend_lab.compiler.passes.rewrite import Pass, derived, having, plugged
from ascend_lab.compiler.passes.simplify import PRODUCT_OPS
from ascend_lab.errors import InputError
from ascend_lab.operators.ops.formats import FLOATS

LARGEST_NUMBER = {"fp16": 65504.0, "bf16": 3.3895313892515355e38, "fp32": 3.4028234663852886e38}
QUANTISABLE_OPS = ("conv2d", "matmul", "gemm")
INTEGER_LAYERS = "RequantFusionPass"
fold = plugged(INTEGER_LAYERS)
"""Turns quantised layers into integer layers; without this plug-in they compute in floats."""
INT8_LARGEST = 127
"""Largest number used in int8. The range is symmetric around 0: -128 is not used."""


# -- fp16, bf16 -----------------------------------------------------------------------------------
def convert(
    graph: ir.Graph, dtype: str, source: str = "fp32", keep: frozenset[str] = frozenset()
) -> tuple[ir.Graph, int]:
    """Return the graph with all of format `source` in `dtype`, and the number of changes.

    Inputs, constants and outputs change, too. Some tensors stay as they are: operands whose format
    the operator fixes (statistics of a batch norm in fp32, indices), and the scales of int32 sums,
    which are too small for fp16. Constants beyond the largest number of `dtype` become that number.

    Nodes that `keep` names still compute in `source`, and so do the inputs and outputs of the graph
    that they read or write. A product among them reads `dtype`, as the cube does, and writes its
    sums in `source`. Raises `InputError` for a name that no node has.
    """
    split_graph = graph
    kept_nodes = keep
    if keep:
        split_graph, kept_nodes = _split_gemms(graph, _node_names(graph, keep))
    types = split_graph.types
    if not any(kind.dtype == source for kind in types.values()):
        return split_graph, 0
    conversion = _Conversion(split_graph, dtype, source, kept_nodes)
    for node in split_graph.nodes:
        conversion.append(node)
    if not conversion.changed_count:
        return split_graph, 0
    # callers expect outputs in the new format, except those of nodes that `keep` names
    for name in split_graph.outputs:
        maker = split_graph.producers.get(name)
        keeps_format = maker is not None and maker.name in kept_nodes
        is_unchanged = types[name].dtype == conversion.draft.types[name].dtype == source
        if is_unchanged and not keeps_format:
            conversion.cast_output(name)
    return conversion.draft.finish(), conversion.changed_count


class _Conversion:
    """The graph converted so far.

    `converted_names` holds, by (tensor, format), the name of that tensor converted to the format.
    `changed_count` counts the inputs, constants and nodes that changed their format.
    """

    def __init__(
        self, graph: ir.Graph, dtype: str, source: str, keep: frozenset[str] = frozenset()
    ) -> None:
        self.graph = graph
        self.dtype = dtype
        self.source = source
        self.keep = keep | scaled_sums(graph, source)
        self.draft = Draft(graph, nodes=())
        self.converted_names: dict[tuple[str, str], str] = {}
        self.changed_count = 0
        # the caller passes inputs in the new format: the network does not cast them
        for name in graph.inputs:
            stays = any(reader.name in keep for reader in graph.readers[name])
            if graph.types[name].dtype == source and not stays:
                self.draft.types[name] = replace(graph.types[name], dtype=dtype)
                self.changed_count += 1

    def name_in_format(self, name: str, dtype: str) -> str:
        """Return a tensor's name in a format; add a converted constant or a cast if needed."""
        draft = self.draft
        constant = self.draft.constants.get(name)
        if draft.types[name].dtype == dtype:
            return name
        # one cast serves all readers
        if (name, dtype) not in self.converted_names:
            if constant is not None:
                converted = draft.add(in_format(constant, dtype), f"{name}_{dtype}")
                self.changed_count += 1
            else:
                converted = draft.new_name(f"{name}_{dtype}")
                kind = replace(draft.types[name], dtype=dtype)
                cast = ir.Node(converted, "cast", (name,), (converted,), {"dtype": dtype})
                draft.put(cast, kind)
            self.converted_names[name, dtype] = converted
        return self.converted_names[name, dtype]

    def append(self, node: ir.Node) -> None:
        """Append a node in its new format, with casts of the inputs that differ."""
        operator = ir.operator_of(node.op)
        operand_names = operator.names(len(node.inputs))
        rule = operator.types
        old_formats = tuple(t.dtype for t in self.graph.in_types(node))
        main_dtype = rule.main(operand_names, old_formats)
        attrs = operator.settings(node.attrs)
        is_kept = node.name in self.keep
        # a product whose sums are kept reads the narrow format and writes the wide one
        keeps_sums = is_kept and "out_dtype" in attrs and main_dtype == self.source
        if not is_kept:
            attrs = {k: self.dtype if v == self.source else v for k, v in attrs.items()}
        if keeps_sums:
            attrs = {**attrs, "out_dtype": self.source}
        # a cast reads any format; all other operators read the formats that their rule states
        if node.op == "cast":
            formats = tuple(self.draft.types[name].dtype for name in node.inputs)
        else:
            converts = (
                main_dtype == self.source
                and self.dtype in rule.allowed
                and (keeps_sums or not is_kept)
            )
            self.changed_count += converts
            main_dtype = self.dtype if converts else main_dtype
            formats = rule.inputs(operand_names, main_dtype, attrs)
        inputs = tuple(map(self.name_in_format, node.inputs, formats))
        kinds = ir.infer(node.op, [self.draft.types[name] for name in inputs], attrs)
        explicit_attrs = given_attrs(node.op, attrs)
        self.draft.put(ir.Node(node.name, node.op, inputs, node.outputs, explicit_attrs), *kinds)

    def cast_output(self, name: str) -> None:
        """Add a cast after an output of the graph that is still in the old format."""
        draft = self.draft
        # the output's name goes to the cast; its old tensor gets a new name
        wide_name = draft.new_name(f"{name}_{self.source}")
        title = draft.new_name(f"{name}_cast")
        kind = draft.types[wide_name] = draft.types[name]
        if name in draft.constants:
            draft.constants[wide_name] = draft.constants.pop(name)
        for node in draft.nodes.values():
            draft.nodes[node.name] = replace(
                node,
                inputs=tuple(wide_name if n == name else n for n in node.inputs),
                outputs=tuple(wide_name if n == name else n for n in node.outputs),
            )
        cast = ir.Node(title, "cast", (wide_name,), (name,), {"dtype": self.dtype})
        draft.put(cast, replace(kind, dtype=self.dtype))


def _node_names(graph: ir.Graph, keep: frozenset[str]) -> frozenset[str]:
    """Return the names of the nodes that `keep` names, directly or by one of their outputs.

    Raises `InputError` for a name that is neither a node's nor an output's.
    """
    nodes = {out: node.name for node in graph.nodes for out in node.outputs}
    nodes |= {node.name: node.name for node in graph.nodes}
    for name in sorted(keep):
        if name not in nodes:
            close_names = get_close_matches(name, nodes, 1)
            remedy = (
                f"did you mean {close_names[0]}?"
                if close_names
                else "passes may have merged it with others"
            )
            raise InputError(
                f"{graph.name}: nodes to keep in fp32", f"{name}, which is none", remedy
            )
    return frozenset(nodes[name] for name in keep)


def _split_gemms(graph: ir.Graph, keep: frozenset[str]) -> tuple[ir.Graph, frozenset[str]]:
    """Return the graph with each gemm in `keep` split into product, factors and sum.

    All operands of a gemm have one format. After the split only the product reads the narrow one,
    and the sum is computed in the wide one. The names of the new nodes are added to `keep`.
    """
    draft = Draft(graph)
    kept_names = set(keep)
    # gemm(a, b, c) = alpha a b + beta c
    for node in graph.nodes:
        if node.name not in keep or node.op != "gemm":
            continue
        settings = ir.operator_of(node.op).settings(node.attrs)
        transposes = {key: settings[key] for key in ("trans_a", "trans_b")}
        result = draft.insert("matmul", node.inputs[:2], transposes, f"{node.name}_product")
        kept_names.add(draft.maker_names[result])
        bias = node.inputs[2]
        if settings["alpha"] != 1:
            result = draft.insert(
                "muls", (result,), {"number": settings["alpha"]}, f"{node.name}_alpha"
            )
            kept_names.add(draft.maker_names[result])
        if settings["beta"] != 1:
            bias = draft.insert("muls", (bias,), {"number": settings["beta"]}, f"{node.name}_beta")
            kept_names.add(draft.maker_names[bias])
        draft.become(node, "add", (result, bias))
    return draft.finish(), frozenset(kept_names)


INTEGER_PRODUCTS = (*PRODUCT_OPS, "conv2d", "depthwise_conv2d", "conv_transpose2d")
SCALING_OPS = ("mul", "muls", "div", "reshape", "expand", "transpose", "cast")


def scaled_sums(graph: ir.Graph, source: str) -> frozenset[str]:
    """Return the names of the nodes that cast and scale int32 sums, and that compute the scales.

    Sums of int8 products are too large for fp16 before they are scaled, and their scales are too
    small for it: both stay in `source` up to the first node that does something else. Other int32
    tensors may be masks: of their factors only constants count as scales.
    """
    scaling_nodes: set[str] = set()
    # tensors with such sums: as int32, cast to `source`, or already scaled
    sums: set[str] = set()
    # casts to `source` of other int32 tensors
    casts: set[str] = set()
    for node in graph.nodes:
        kind = graph.types[node.output]
        sums_read = sums.intersection(node.inputs)
        # a product of 4,096 pairs of bytes may reach 66 million; fp16 ends at 65,504
        if kind.dtype == "int32" and (sums_read or node.op in INTEGER_PRODUCTS):
            sums.add(node.output)
        elif node.op == "cast" and graph.types[node.inputs[0]].dtype == "int32":
            if kind.dtype == source:
                scaling_nodes.add(node.name)
                floats = sums if sums_read else casts
                floats.add(node.output)
        elif node.op == "muls" and node.inputs[0] in casts:
            scaling_nodes.add(node.name)
        elif node.op in ("mul", "muls", "div") and sums_read:
            scaling_nodes.add(node.name)
            scaling_nodes |= _makers_of_scales(graph, [n for n in node.inputs if n not in sums])
            sums.add(node.output)
    return frozenset(scaling_nodes)


def _makers_of_scales(graph: ir.Graph, names: list[str]) -> set[str]:
    """Return the nodes that compute these scales: factors, quotients, changes of shape, casts."""
    makers: set[str] = set()
    unvisited = list(names)
    while unvisited:
        maker = graph.producers.get(unvisited.pop())
        if maker is not None and maker.op in SCALING_OPS and maker.name not in makers:
            makers.add(maker.name)
            unvisited += maker.inputs
    return makers


def in_format(constant: ir.Constant, dtype: str) -> ir.Constant:
    """Return a constant in another format; floats saturate, large arrays convert when read."""
    kind = replace(constant.type, dtype=dtype)
    largest = LARGEST_NUMBER.get(dtype, np.inf)
    # seeded numbers are near 1 and need no clipping: they are rounded when they are drawn
    if isinstance(constant.data, ir.Seeded) and dtype in FLOATS:
        return ir.Constant(kind, constant.data)
    # -1e9 of a mask becomes -65504 in fp16, which softmax still turns into 0
    if isinstance(constant.data, ir.Fill):
        return ir.Constant(kind, ir.Fill(min(max(constant.data.value, -largest), largest)))

    def converted(values: ir.Values) -> ir.Values:
        # infinities stay, as masks have them; finite numbers are clipped to the format's range
        wide_values = values if values.dtype == np.float32 else values.astype(np.float64)
        return np.where(np.isinf(wide_values), wide_values, np.clip(wide_values, -largest, largest))

    return derived(kind, converted, constant)


# -- int8 -----------------------------------------------------------------------------------------
def quantisable_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the products and convolutions that can run in int8: their weights are constants."""
    return [
        node
        for node in graph.nodes
        if node.op in QUANTISABLE_OPS
        and all(name in graph.constants for name in node.inputs[1:])
        and graph.types[node.inputs[0]].dtype != "int8"
        and not node.attr("trans_a")
        and graph.types[node.output].dtype == graph.types[node.inputs[0]].dtype
    ]


def measured_scales(graph: ir.Graph, seed: int = 0) -> dict[str, float]:
    """Return the scale max|x| / 127 of each input of `quantisable_nodes`, from one seeded run."""
    names = tuple(dict.fromkeys(node.inputs[0] for node in quantisable_nodes(graph)))
    values = evaluate(replace(graph, outputs=names), random_inputs(graph, seed)) if names else {}
    return {name: scale_of(array) for name, array in values.items()}


def scale_of(values: ir.Values) -> float:
    """Return the smallest symmetric int8 scale that holds all values; 1 if all are 0."""
    # values up to 6.35: steps of 0.05, since 127 * 0.05 = 6.35
    largest = float(np.max(np.abs(values.astype(np.float64)), initial=0.0))
    return largest / INT8_LARGEST if largest > 0 and np.isfinite(largest) else 1.0


@dataclass(frozen=True, slots=True)
class LayerQuantisation:
    """How a layer is quantised: scale and offset of its input, scales of its weights.

    Weights have one scale, or one for each output channel. If `shared`, an addition that reads the
    layer's input reads the quantised input instead, as the layer does.
    """

    scale: float
    offset: int
    weight_scales: tuple[float, ...]
    weight_bits: int = 8
    shared: bool = False


def quantise(graph: ir.Graph, scales: Mapping[str, float] | None = None) -> tuple[ir.Graph, int]:
    """Return the graph with products and convolutions with constant weights in int8, and how many.

    These are counted as layers; the other nodes keep their number format.
    `scales` holds a scale for each tensor that these layers read; with None, scales are measured
    on seeded inputs. Additions that read such a tensor read it quantised, too.
    """
    scale_of_input = measured_scales(graph) if scales is None else scales
    layer_scales = {
        node.name: LayerQuantisation(
            scale_of_input[node.inputs[0]],
            0,
            (scale_of(graph.constants[node.inputs[1]].array()),),
            shared=True,
        )
        for node in quantisable_nodes(graph)
        if node.inputs[0] in scale_of_input
    }
    return fold(insert_quantise_pairs(graph, layer_scales))[0] if layer_scales else graph, len(
        layer_scales
    )


def insert_quantise_pairs(graph: ir.Graph, layers: Mapping[str, LayerQuantisation]) -> ir.Graph:
    """Return the graph with a quantise and a dequantise before each layer's input and weights.

    Layers that read the same tensor with the same scale and offset share this pair.
    """
    draft = Draft(graph)
    pairs: dict[tuple[str, float, int], str] = {}
    for node in graph.nodes:
        if node.name not in layers:
            continue
        scales = layers[node.name]
        x = node.inputs[0]
        attrs = {"scale": scales.scale, "offset": scales.offset}
        key = (x, scales.scale, scales.offset)
        if key not in pairs:
            quantised = draft.insert("quantise", (x,), attrs, f"{x}_int8")
            dequantise_attrs = {**attrs, "dtype": graph.types[x].dtype}
            pairs[key] = draft.insert("dequantise", (quantised,), dequantise_attrs, f"{x}_back")
        inputs = (pairs[key], _quantise_weights(draft, node, scales), *node.inputs[2:])
        draft.become(node, node.op, inputs, node.attrs)
    for name, layer_name in summands(
        graph, [name for name, scales in layers.items() if scales.shared]
    ):
        scales = layers[layer_name]
        x = graph.node(layer_name).inputs[0]
        share(draft, name, x, pairs[x, scales.scale, scales.offset])
    return draft.finish()


def summands(graph: ir.Graph, layers: Collection[str]) -> list[tuple[str, str]]:
    """Return pairs (addition, layer) that read the same tensor; the addition broadcasts nothing."""
    # if two layers read a tensor, the first is returned: in reversed order it is set last
    readers = {graph.node(layer).inputs[0]: layer for layer in reversed(list(layers))}
    pairs = []
    for node in graph.nodes:
        shapes = {graph.types[name].shape for name in (*node.inputs, *node.outputs)}
        if node.op == "add" and len(shapes) == 1:
            pairs += [(node.name, readers[name]) for name in node.inputs if name in readers]
    return pairs


def share(draft: Draft, addition: str, summand: str, quantised: str) -> None:
    """Let an addition read a quantised tensor in place of a summand."""
    node = draft.current(addition)
    inputs = [quantised if name == summand else name for name in node.inputs]
    draft.become(node, node.op, inputs, node.attrs)


def _quantise_weights(draft: Draft, node: ir.Node, layer: LayerQuantisation) -> str:
    """Insert a layer's weights as int8 constants and a dequantise; return its output."""
    name = node.inputs[1]
    weight = draft.constants[name]
    channel_scales = np.asarray(layer.weight_scales, np.float32)
    rank = len(weight.type.shape)
    # axis of the output channels: the first of (Co, Ci, Kh, Kw), the last of (.., k, n), the one
    # before it of a transposed (.., n, k)
    axis = 0
    if node.op in PRODUCT_OPS:
        axis = rank - 2 if node.attr("trans_b", False) else rank - 1
    # (Co, Ci, Kh, Kw) with 8 channels has scales (8, 1, 1, 1); a (k, n) matrix has (1, n).
    scales = (
        channel_scales.reshape([-1 if d == axis else 1 for d in range(rank)])
        if channel_scales.size > 1
        else channel_scales
    )
    # 8 bits: -128 .. 127; 4 bits: -8 .. 7.
    largest = 2 ** (layer.weight_bits - 1) - 1

    def quantised_values(values: ir.Values) -> ir.Values:
        rounded: ir.Values = np.rint(values.astype(np.float32) / scales)
        return np.clip(rounded, -largest - 1, largest)

    dtype = weight.type.dtype
    quantised = draft.add(
        derived(replace(weight.type, dtype="int8"), quantised_values, weight), f"{name}_int8"
    )
    if scales.size == 1:
        attrs = {"scale": float(channel_scales[0]), "dtype": dtype}
        return draft.insert("dequantise", (quantised,), attrs, f"{name}_back")
    scales_name = draft.add(
        ir.Constant(ir.TensorType(scales.shape, "fp32"), scales), f"{name}_scales"
    )
    return draft.insert("dequantise", (quantised, scales_name), {"dtype": dtype}, f"{name}_back")


FP16 = Pass(
    "Fp16ConversionPass",
    "precision",
    partial(convert, dtype="fp16"),
    "computes fp32 graphs in fp16",
    "changed",
)
BF16 = Pass(
    "Bf16ConversionPass",
    "precision",
    partial(convert, dtype="bf16"),
    "computes fp32 graphs in bf16",
    "changed",
)
REQUANT = Pass(
    INTEGER_LAYERS,
    "prepare",
    having(fold, "quantise", "dequantise"),
    "computes quantised layers in whole numbers",
    "steps",
)
INT8 = Pass(
    "Int8ConversionPass",
    "precision",
    quantise,
    "runs convolutions and products with constant weights in int8",
    "changed",
)
