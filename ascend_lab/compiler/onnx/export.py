"""Writes a graph as an ONNX model.

Most operators become one ONNX node; those that ONNX lacks become several, with the same values.
ONNX knows no layouts: a `trans_data` becomes an Identity.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ascend_lab import output
from ascend_lab.compiler.ir import Fill, Graph, Node, TensorType, operator_of
from ascend_lab.compiler.onnx import export_writer, quantised  # noqa: F401 - its rules
from ascend_lab.compiler.onnx.elementwise import COMPARISONS, LIBRARY_OPERATORS
from ascend_lab.compiler.onnx.export_writer import NARROW, RULES, Result, Rule, Site, Writer, rule
from ascend_lab.compiler.onnx.tensors import free_name
from ascend_lab.errors import UnsupportedError
from ascend_lab.machine import chip
from ascend_lab.operators.ops.attention import has_groups
from ascend_lab.operators.ops.formats import axes_of, axis_of, is_float, numpy_type, pad_pairs, pair

OPSET = 22
"""Operator set written: the first in which convolutions and pooling take bf16."""
IR_VERSION = 10
MAX_BYTES = 2**31 - 2**20
"""Most bytes of a model's weights: a protobuf file holds less than 2 GiB."""
LARGEST_EXACT_FP32 = 2**24
"""Whole numbers up to here are exact in fp32."""


def export_onnx(graph: Graph, *, fill_nodes: bool = False) -> onnx.ModelProto:
    """Return the graph as an ONNX model of operator set 22 that contains its weights.

    With `fill_nodes` constants with one number everywhere become ConstantOfShape nodes, so that
    the file stays small. Raises `UnsupportedError` for operators ONNX cannot express and for
    models beyond 2 GiB.
    """
    _check_size(graph, fill_nodes)
    writer = Writer(graph.types)
    for name, constant in graph.constants.items():
        kind = constant.type
        if fill_nodes and isinstance(constant.data, Fill) and kind.elements > 1:
            writer.fill(name, kind, constant.data.value)
        else:
            writer.tensor(name, constant.array(), kind.dtype)
    for node in graph.nodes:
        if node.op not in RULES:
            needed = f"node {node.name}: an operator with an ONNX form"
            remedy = "add a rule to graph.onnx.export_writer.RULES"
            raise UnsupportedError(needed, node.op, remedy)
        writer.begin(node.name)
        site = _site(graph, node, writer)
        names = RULES[node.op](site)
        result_names = (names,) if isinstance(names, str) else names
        writer.finish(_in_file_formats(graph, node, site, result_names), node.outputs)
    inner = [n for node in graph.nodes for n in node.outputs if n not in graph.outputs]
    boundary_infos = _infos(graph, graph.inputs), _infos(graph, list(dict.fromkeys(graph.outputs)))
    graph_name = graph.name or "graph"
    inner_infos = _infos(graph, inner)
    onnx_graph = onnx.helper.make_graph(
        writer.nodes, graph_name, *boundary_infos, writer.tensors, value_info=inner_infos
    )
    _keep_elements(onnx_graph, graph)
    producer = {"ir_version": IR_VERSION, "producer_name": "ascend_lab"}
    return onnx.helper.make_model(
        onnx_graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], **producer
    )


def save_onnx(graph: Graph, path: str | Path, *, fill_nodes: bool = False) -> Path:
    """Write the graph as an ONNX file; return its path. Raises like `export_onnx`."""
    target = Path(path)
    data = export_onnx(graph, fill_nodes=fill_nodes).SerializeToString()
    output.write_whole(target, data)
    return target


def _check_size(graph: Graph, fill_nodes: bool) -> None:
    total = sum(
        c.type.elements * chip.DTYPE_BYTES[c.type.dtype]
        for c in graph.constants.values()
        if not (fill_nodes and isinstance(c.data, Fill))
    )
    if total > MAX_BYTES:
        needed = f"{graph.name}: at most {MAX_BYTES:,} bytes of constants in an ONNX file"
        raise UnsupportedError(needed, f"{total:,}", "use a narrower format, or fill_nodes=True")


def _infos(graph: Graph, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    return [
        onnx.helper.make_tensor_value_info(
            name, export_writer.ONNX_TYPES[_format(graph, name)], graph.types[name].shape
        )
        for name in names
    ]


# -- int64 and bool of a model ---------------------------------------------------------------------
def _format(graph: Graph, name: str) -> str:
    """Return the format of a tensor in the file: the graph's, or int64 if the model had int64."""
    # A model's int64 shape is int32 in the graph and int64 again in the file.
    dtype = graph.types[name].dtype
    return "int64" if dtype == "int32" and name in graph.narrowed else dtype


def _site(graph: Graph, node: Node, writer: Writer) -> Site:
    """Return the site of a node: the node with its inputs and types, as a rule needs them.

    A node that reads or writes int64 computes in int64: its other integer inputs are cast to it.
    """
    settings = operator_of(node.op).settings(node.attrs)
    names = (*node.inputs, *node.outputs)
    if not any(_format(graph, name) == "int64" for name in names):
        types = graph.in_types(node), graph.out_types(node)
        return Site(node.op, writer, node.inputs, *types, settings)

    def format_in_node(name: str) -> str:
        # a cast has the formats of the file; all other operators here have int64 for int32
        dtype = graph.types[name].dtype
        if node.op == "cast":
            return _format(graph, name)
        return "int64" if dtype == "int32" else dtype

    def types_in_node(names: Sequence[str]) -> tuple[TensorType, ...]:
        return tuple(replace(graph.types[name], dtype=format_in_node(name)) for name in names)

    inputs = list[str]()
    for name in node.inputs:
        fits = _format(graph, name) == format_in_node(name)
        inputs.append(name if fits else writer.emit("Cast", name, to=INT64)[0])
    out_types = types_in_node(node.outputs)
    if node.op == "cast":
        settings = {**settings, "dtype": out_types[0].dtype}
    in_types = types_in_node(node.inputs)
    return Site(node.op, writer, tuple(inputs), in_types, out_types, settings)


INT64 = export_writer.ONNX_TYPES["int64"]


def _in_file_formats(graph: Graph, node: Node, site: Site, names: Sequence[str]) -> Sequence[str]:
    """Return a rule's results; int64 results that are int32 in the file are cast to int32."""
    kinds = [_format(graph, name) for name in node.outputs]
    return [
        name if kind.dtype == dtype else site.cast(name, dtype)
        for name, kind, dtype in zip(names, site.out_types, kinds, strict=True)
    ]


def _keep_elements(onnx_graph: onnx.GraphProto, graph: Graph) -> None:
    """Give inputs and outputs the element types of the model from which the graph was imported.

    The nodes compute in the graph's formats: a Cast follows each such input and precedes each such
    output.
    """
    taken = set(graph.types) | {name for node in onnx_graph.node for name in node.output}
    inner_names: dict[str, str] = {}
    casts_in: list[onnx.NodeProto] = []
    casts_out: list[onnx.NodeProto] = []
    for entry in (*onnx_graph.input, *onnx_graph.output):
        elem = graph.elements.get(entry.name)
        kind = entry.type.tensor_type
        graph_type = kind.elem_type
        if elem is None or graph_type == export_writer.ONNX_TYPES[elem]:
            continue
        kind.elem_type = export_writer.ONNX_TYPES[elem]
        if entry.name in inner_names:  # the tensor is an input and an output of the graph
            continue
        inner_name = inner_names[entry.name] = free_name(
            f"{entry.name}/{graph.types[entry.name].dtype}", taken
        )
        if entry.name in graph.inputs:
            casts_in.append(
                onnx.helper.make_node("Cast", [entry.name], [inner_name], inner_name, to=graph_type)
            )
        else:
            cast = onnx.helper.make_node(
                "Cast", [inner_name], [entry.name], entry.name, to=kind.elem_type
            )
            casts_out.append(cast)
    for node in onnx_graph.node:
        node.input[:] = [inner_names.get(name, name) for name in node.input]
        node.output[:] = [inner_names.get(name, name) for name in node.output]
    for tensor in onnx_graph.initializer:  # an output that is constant
        tensor.name = inner_names.get(tensor.name, tensor.name)
    nodes = [*casts_in, *onnx_graph.node, *casts_out]
    del onnx_graph.node[:]
    onnx_graph.node.extend(nodes)


# -- element by element ---------------------------------------------------------------------------
def direct(op: str, *keys: str, **attrs: Any) -> Rule:
    """Return the rule of an operator that ONNX calls `op`; the attributes `keys` are copied."""
    return lambda site: site.one(op, *site.inputs, **attrs, **{k: site.attrs[k] for k in keys})


def compared(op: str) -> Rule:
    """Return the rule of a comparison: ONNX writes bool, which is cast to the graph's format."""
    return lambda site: site.cast(site.one(op, *site.inputs), site.dtype)


RULES.update({ours: direct(theirs) for theirs, ours in LIBRARY_OPERATORS.items()})
RULES.update({ours: compared(theirs) for theirs, ours in COMPARISONS.items()})
RULES |= {
    "embedding": direct("Gather"),
    "global_max_pool": direct("GlobalMaxPool"),
    "global_avg_pool": direct("GlobalAveragePool"),
    "gelu": direct("Gelu", approximate="tanh"),
    "hard_sigmoid": direct("HardSigmoid", alpha=1 / 6, beta=0.5),
    "lrn": direct("LRN", "alpha", "beta", "bias", "size"),
    "leaky_relu": direct("LeakyRelu", "alpha"),
    "elu": direct("Elu", "alpha"),
    "softmax": direct("Softmax", "axis"),
    "log_softmax": direct("LogSoftmax", "axis"),
    "layer_norm": direct("LayerNormalization", "axis", "epsilon"),
    "batch_norm": direct("BatchNormalization", "epsilon"),
    "gather": direct("Gather", "axis"),
    "concat": direct("Concat", "axis"),
    "trans_data": lambda site: site.one("Identity", site.inputs[0]),
    "rsqrt": lambda site: site.one("Reciprocal", site.one("Sqrt", *site.inputs)),
    "square": lambda site: site.one("Mul", *site.inputs * 2),
    "not_equal": lambda site: site.cast(
        site.one("Not", site.one("Equal", *site.inputs)), site.dtype
    ),
    "select": lambda site: site.one("Where", site.cast(site.inputs[0], "bool"), *site.inputs[1:]),
    "relu6": lambda site: _clip(site, site.inputs[0], 0.0, 6.0, site.dtype),
    "clip": lambda site: _clip(
        site, site.inputs[0], site.attrs["low"], site.attrs["high"], site.dtype
    ),
    "batch_norm_training": lambda site: site.writer.emit(
        "BatchNormalization", *site.inputs, outputs=3, training_mode=1, **site.attrs
    ),
    "attention_scores": lambda site: site.from_fp32(_scores(site, *site.in_fp32())),
    "masked_softmax": lambda site: site.from_fp32(
        site.one("Softmax", site.one("Add", *site.in_fp32()), axis=-1)
    ),
}


def _clip(site: Site, name: str, low: float, high: float, dtype: str) -> str:
    return site.one("Clip", name, *(site.writer.number(n, dtype) for n in (low, high)))


@rule("silu")
def _silu(site: Site) -> Result:
    x = site.inputs[0]
    return site.one("Mul", x, site.one("Sigmoid", x))


@rule("adds", "muls")
def _with_number(site: Site) -> Result:
    """Return x op number; in fp32 where the format cannot hold the number."""
    # 0.1 in fp16 is 0.09998: x * 0.1 goes through fp32, x * 0.5 does not.
    op = "Add" if site.op == "adds" else "Mul"
    number = site.attrs["number"]
    dtype = site.dtype
    if dtype in NARROW and float(np.asarray(number).astype(numpy_type(dtype))) != number:
        return site.from_fp32(site.one(op, *site.in_fp32(), site.writer.number(number, "fp32")))
    return site.one(op, *site.inputs, site.writer.number(number, dtype))


@rule("cast")
def _cast(site: Site) -> Result:
    """Return a cast; ONNX truncates and leaves overflows undefined, so round and limit first.

    fp32 cannot hold 2^31 - 1 as a limit: the casts of floats beyond int32 stay undefined.
    """
    source = site.dtype
    target = site.attrs["dtype"]
    name = site.inputs[0]
    if is_float(target) or (not is_float(source) and "int64" in (source, target)):
        return site.cast(name, target)
    limits = np.iinfo(np.int64 if target == "int64" else numpy_type(target))
    low = int(limits.min)
    high = int(limits.max)
    if is_float(source):
        rounding = {"rint": "Round", "floor": "Floor", "ceil": "Ceil"}.get(site.attrs["round"])
        name = site.one(rounding, name) if rounding else name
        inside = target in ("int32", "int64")
    else:
        source_limits = np.iinfo(numpy_type(source))
        inside = low <= source_limits.min and source_limits.max <= high
        # int32 to int8: limited to -128 .. 127 first; uint8 to int8: to 0 .. 127.
        low = max(low, int(source_limits.min))
        high = min(high, int(source_limits.max))
    return site.cast(name if inside else _clip(site, name, low, high, source), target)


# -- reduce and rescale ---------------------------------------------------------------------------
@rule("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod")
def _reduced(site: Site) -> Result:
    axes = site.writer.ints(axes_of("reduce", site.attrs["axis"], site.shape))
    op = f"Reduce{site.op.removeprefix('reduce_').capitalize()}"
    return site.one(op, site.inputs[0], axes, keepdims=int(site.attrs["keepdims"]))


@rule("rms_norm")
def _rms_norm(site: Site) -> Result:
    x, scale = site.in_fp32()
    axes = range(axis_of("axis", site.attrs["axis"], site.shape), len(site.shape))
    mean = site.one("ReduceMean", site.one("Mul", x, x), site.writer.ints(tuple(axes)))
    added = site.one("Add", mean, site.writer.number(site.attrs["epsilon"], "fp32"))
    return site.from_fp32(site.one("Mul", site.one("Div", x, site.one("Sqrt", added)), scale))


@rule("cross_entropy")
def _cross_entropy(site: Site) -> Result:
    logits, target = site.in_fp32()
    # -sum over classes of target * log_softmax(logits), a number for each row.
    weighted = site.one("Mul", target, site.one("LogSoftmax", logits, axis=1))
    total = site.one("ReduceSum", weighted, site.writer.ints((1,)), keepdims=0)
    return site.from_fp32(site.one("Neg", total))


# -- moving ---------------------------------------------------------------------------------------
@rule("reshape", "expand")
def _reshaped(site: Site) -> Result:
    return site.one(site.op.capitalize(), site.inputs[0], site.writer.ints(site.out_types[0].shape))


@rule("transpose")
def _transpose(site: Site) -> Result:
    rank = len(site.shape)
    perm = site.attrs["perm"]
    order = range(rank)[::-1] if perm is None else (p % rank for p in perm)
    return site.one("Transpose", site.inputs[0], perm=tuple(order))


@rule("slice")
def _slice(site: Site) -> Result:
    attrs = site.attrs
    axes = tuple(range(len(site.shape)))
    steps = (1,) * len(axes) if attrs["step"] is None else attrs["step"]
    bounds = (site.writer.ints(v) for v in (attrs["begin"], attrs["end"], axes, steps))
    return site.one("Slice", site.inputs[0], *bounds)


@rule("pad")
def _pad(site: Site) -> Result:
    # ((1, 2), (3, 4)) is written 1, 3, 2, 4: the pads before each axis, then those after it.
    pads = [p[side] for side in (0, 1) for p in site.attrs["pads"]]
    value = site.writer.number(site.attrs["value"], site.dtype)
    return site.one("Pad", site.inputs[0], site.writer.ints(pads), value)


@rule("split")
def _split(site: Site) -> Result:
    axis = axis_of("split", site.attrs["axis"], site.shape)
    sizes = site.writer.ints([kind.shape[axis] for kind in site.out_types])
    return site.writer.emit("Split", site.inputs[0], sizes, outputs=len(site.out_types), axis=axis)


@rule("one_hot")
def _one_hot(site: Site) -> Result:
    attrs = site.attrs
    writer = site.writer
    values = writer.number((attrs["off_value"], attrs["on_value"]), "fp32")
    index = site.cast(site.inputs[0], "int64")
    return site.from_fp32(site.one("OneHot", index, writer.ints((attrs["depth"],)), values))


@rule("scatter_update", "scatter_add")
def _scatter(site: Site) -> Result:
    """Return a ScatterND; for repeated indices ONNX runtimes keep the last update, as here.

    The standard itself leaves open which of the updates wins.
    """
    x, indices, updates = site.inputs
    # ScatterND takes index tuples: indices of shape (5,) become (5, 1), tuples of one index.
    index_column = site.one("Unsqueeze", site.cast(indices, "int64"), site.writer.ints((-1,)))
    reduction = "add" if site.op == "scatter_add" else "none"
    return site.one("ScatterND", x, index_column, updates, reduction=reduction)


# -- products -------------------------------------------------------------------------------------
def _transposed(site: Site, name: str, rank: int) -> str:
    return site.one("Transpose", name, perm=(*range(rank - 2), rank - 1, rank - 2))


@rule("matmul", "batch_matmul", "attention_context")
def _matmul(site: Site) -> Result:
    """Return the product a b, transposed as the attributes say; int8 is summed in int32.

    Matrices of floats become a Gemm, which transposes its inputs itself: no transposed copy of a
    weight is stored, and nodes can share it.
    """
    names = site.factors()
    transposes = [site.attrs.get(key) for key in ("trans_a", "trans_b")]
    matrices = all(len(kind.shape) == 2 for kind in site.in_types[:2]) and is_float(site.dtype)
    if matrices and any(transposes):
        return site.one(
            "Gemm", *names, transA=int(bool(transposes[0])), transB=int(bool(transposes[1]))
        )
    sides = [
        _transposed(site, name, len(kind.shape)) if turn else name
        for name, kind, turn in zip(names, site.in_types[:2], transposes, strict=False)
    ]
    return site.one("MatMulInteger" if site.dtype == "int8" else "MatMul", *sides)


@rule("gemm")
def _gemm(site: Site) -> Result:
    attrs = site.attrs
    transposes = {"transA": int(attrs["trans_a"]), "transB": int(attrs["trans_b"])}
    return site.one(
        "Gemm", *site.inputs, alpha=float(attrs["alpha"]), beta=float(attrs["beta"]), **transposes
    )


def _scores(site: Site, q: str, k: str) -> str:
    """Return scale q k^T in fp32."""
    scale = site.attrs["scale"]
    # Depth 64: scores times 1/8.
    scale = 1.0 / math.sqrt(site.shape[-1]) if scale is None else scale
    total = site.one("MatMul", q, _transposed(site, k, len(site.in_types[1].shape)))
    return site.one("Mul", total, site.writer.number(scale, "fp32"))


@rule("attention", "flash_attention")
def _attention(site: Site) -> Result:
    operand_shapes = [kind.shape for kind in site.in_types]
    if site.attrs.get("causal") or has_groups(*operand_shapes[:3]):
        needed = "ONNX: attention with a mask and a head of k for each of q"
        got = f"causal={site.attrs.get('causal')}, q {operand_shapes[0]}, k {operand_shapes[1]}"
        raise UnsupportedError(needed, got, "write the mask, expand k and v")
    q, k, v, *mask = site.in_fp32()
    scores = _scores(site, q, k)
    scores = site.one("Add", scores, *mask) if mask else scores
    return site.from_fp32(site.one("MatMul", site.one("Softmax", scores, axis=-1), v))


# -- windows --------------------------------------------------------------------------------------
def _pads(site: Site) -> tuple[int, int, int, int]:
    """Return the pads top, left, bottom, right, as ONNX writes them."""
    (top, bottom), (left, right) = pad_pairs("pad", site.attrs["pad"])
    return top, left, bottom, right


@rule("conv2d", "depthwise_conv2d", "conv_transpose2d")
def _convolution(site: Site) -> Result:
    """Return a convolution; an image padded with other numbers than 0 gets a Pad before it."""
    attrs = site.attrs
    onnx_attrs: dict[str, Any] = {
        "pads": _pads(site),
        "kernel_shape": site.in_types[1].shape[2:],
        "strides": pair("stride", attrs["stride"]),
        "dilations": pair("dilation", attrs["dilation"]),
        "group": attrs.get("groups", site.shape[1]),
    }
    op = "Conv"
    if "output_padding" in attrs:
        op = "ConvTranspose"
        onnx_attrs["output_padding"] = pair("", attrs["output_padding"], least=0)
    border = attrs.get("pad_value", 0)
    if border and any(onnx_attrs["pads"]):  # in ONNX a convolution can be padded only with 0
        top, left, bottom, right = onnx_attrs["pads"]
        # axes n, c, h, w: the pads before each axis, then those after it; n and c get none
        around = site.writer.ints((0, 0, top, left, 0, 0, bottom, right))
        image = site.one("Pad", site.inputs[0], around, site.writer.number(border, site.dtype))
        onnx_attrs["pads"] = (0, 0, 0, 0)
        return _convolved(replace(site, inputs=(image, *site.inputs[1:])), op, onnx_attrs)
    return _convolved(site, op, onnx_attrs)


def _convolved(site: Site, op: str, onnx_attrs: dict[str, Any]) -> str:
    if site.dtype == "int8":
        return _int8_convolution(site, op, onnx_attrs)
    return site.one(op, *site.factors(), **onnx_attrs)


def _int8_convolution(site: Site, op: str, attrs: dict[str, Any]) -> str:
    """Return an int8 convolution summed in int32.

    ONNX has no transposed convolution of int8: it is computed in fp32. Raises `UnsupportedError` if
    its sums could exceed the integers that fp32 holds exactly.
    """
    if op == "Conv":
        sums = site.one("ConvInteger", *site.inputs[:2], **attrs)
    else:
        weight = site.in_types[1].shape
        # A product of two bytes is at most 128 * 128 = 2^14: 1024 of them may reach 2^24.
        largest = math.prod((weight[0] // attrs["group"], *weight[2:])) * 2**14
        if largest > LARGEST_EXACT_FP32:
            needed = f"conv_transpose2d: int8 sums up to {LARGEST_EXACT_FP32:,} for ONNX"
            raise UnsupportedError(needed, f"up to {largest:,}", "cast to fp16 first")
        sides = [site.cast(name, "fp32") for name in site.inputs[:2]]
        sums = site.cast(site.one(op, *sides, **attrs), "int32")
    if len(site.inputs) > 2:
        column = site.one("Reshape", site.inputs[2], site.writer.ints((1, -1, 1, 1)))
        sums = site.one("Add", sums, column)
    return sums


@rule("max_pool2d", "avg_pool2d")
def _pool(site: Site) -> Result:
    attrs = site.attrs
    kernel = pair("kernel", site.attrs["kernel"])
    step = kernel if attrs["stride"] is None else pair("stride", attrs["stride"])
    onnx_attrs: dict[str, Any] = {"pads": _pads(site), "kernel_shape": kernel, "strides": step}
    if "count_include_pad" not in attrs:
        return site.one("MaxPool", *site.inputs, **onnx_attrs)
    onnx_attrs["count_include_pad"] = int(attrs["count_include_pad"])
    return site.one("AveragePool", *site.inputs, **onnx_attrs)
