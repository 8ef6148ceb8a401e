"""The host's processor: values of any ONNX model, and what is asked of nodes no graph holds."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.graph.onnx.model_file import EXTERNAL, load, sound_nodes, tensor_of, title
from ascend_lab.graph.onnx.tensors import inputs_of, pinned_shapes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

Values = np.ndarray
MULTIPLIES = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "DeformConv": 1, "QLinearConv": 3,
              "MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3, "Gemm": 1}  # fmt: skip
"""Operators that read both factors of every multiplication, and which input is the second."""
SMALL, CURRENT, WRONG = 2**16, 14, ("GlobalMaxPool",)
"""The reference, exact and slow, comes first for models of at most so many elements, of this opset
at least: it takes some operators of old ones, such as softmax before 13, for those of now; and for
none with operators that it has wrong (but in two dimensions)."""


def run_on_host(
    model: ModelProto, given: Mapping[str, Any], *, everything: bool = False
) -> dict[str, Any]:
    """Return a model's outputs by name, or with `everything` all tensors of its nodes.

    Raises `UnsupportedError`, naming why, if neither ONNX Runtime nor the reference computes it.
    """
    feed = {e.name: given[e.name] for e in model.graph.input if e.name in given}
    names = [entry.name for entry in model.graph.output]
    if everything:
        written = (name for node in model.graph.node for name in node.output if name)
        names = list(dict.fromkeys((*names, *written)))
    sizes = (math.prod(t.dims) for t in model.graph.initializer)
    size = sum(sizes) + sum(np.size(v) for v in feed.values() if isinstance(v, np.ndarray))
    version = max((o.version for o in model.opset_import if not o.domain), default=CURRENT)
    sound = version >= CURRENT and not any(n.op_type in WRONG for n in model.graph.node)
    reasons, runners = [], (_reference, _onnxruntime)
    for runner in runners if sound and size <= SMALL else runners[::-1]:
        try:
            return dict(zip(names, runner(model, names, feed), strict=True))
        except Exception as error:  # whatever either raises: it is the model's or theirs
            reasons.append(str(error).strip().split("\n")[0][:160] or type(error).__name__)
    needed = f"{model.graph.name or 'model'}: operators that the host computes"
    raise UnsupportedError(needed, reasons[-1], "check the model and its inputs")


def _onnxruntime(model: ModelProto, names: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """Return the tensors as ONNX Runtime computes them, on one thread, its graph as it stands."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise UnsupportedError("onnxruntime", "none")
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = _asking(model, names, onnx).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    found: list[Any] = session.run(names, dict(feed))
    return found


def _reference(model: ModelProto, names: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """Return the tensors as the reference evaluator computes them."""
    import onnx.reference

    with np.errstate(all="ignore"):
        evaluator = onnx.reference.ReferenceEvaluator(_asking(model, names, onnx))
        found = evaluator.run(names, dict(feed))
    return [np.asarray(v) if isinstance(v, np.generic | int | float) else v for v in found]


def _asking(model: ModelProto, names: list[str], onnx: Any) -> ModelProto:
    """Return a copy with these outputs; batch norms keep still (the reference's learn below 14)."""
    asked: ModelProto = onnx.ModelProto()
    asked.CopyFrom(model)
    if [entry.name for entry in model.graph.output] != names:
        del asked.graph.output[:]
        asked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    for node in asked.graph.node:
        own = {one.name: one for one in node.attribute}
        if node.op_type == "BatchNormalization" and "training_mode" not in own:
            (own.get("momentum") or node.attribute.add(name="momentum", type=1)).f = 1.0
    return asked


# -- whole models, nodes and values ---------------------------------------------------------------
def constants_of(model: ModelProto) -> dict[str, Any]:
    """Return the initialisers' values by name; raise `InputError` for one whose sizes lie."""
    from onnx import numpy_helper

    values = {}
    for tensor in model.graph.initializer:
        try:
            values[tensor.name] = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, MemoryError) as error:
            needed = f"tensor {tensor.name[:60] or '(unnamed)'}: values of its sizes and its type"
            raise InputError(needed, str(error)[:120], "export again") from error
    return values


def whole_model(source: str | Path | bytes | ModelProto) -> ModelProto:
    """Return a model whose operators nobody has looked at; raises as `import_onnx` for files.

    Its nodes have titles of their own, its own functions are written out, external data are read.
    """
    import onnx
    from onnx import inliner, numpy_helper

    model, folder = load(source)
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
    if model.functions:
        model = inliner.inline_local_functions(model)
    for tensor in model.graph.initializer:
        if tensor.data_location == EXTERNAL:
            array = tensor_of(tensor, folder).array()
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    ordered = onnx.GraphProto(node=sound_nodes(model))
    del model.graph.node[:]
    model.graph.node.extend(ordered.node)
    seen: Counter[str] = Counter()
    for node in model.graph.node:
        name = title(node)
        node.name = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
    return model


def all_reads(node: NodeProto) -> list[str]:
    """Return the names a node reads, those that its branches take from outside included."""
    found = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {entry.name for entry in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                found += [name for name in all_reads(inner) if name not in own]
                own.update(inner.output)
            found += [entry.name for entry in graph.output if entry.name not in own]
    return list(dict.fromkeys(found))


def ends(nodes: Sequence[NodeProto], wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names that nodes read from outside, and those they write that are wanted."""
    written = {name for node in nodes for name in node.output if name}
    reads = [name for node in nodes for name in all_reads(node) if name not in written]
    return list(dict.fromkeys(reads)), [n for n in dict.fromkeys(wanted) if n in written]


def sub_model(
    model: ModelProto, nodes: Sequence[NodeProto], reads: Sequence[str], writes: Sequence[str],
    values: Mapping[str, Any], constants: set[str] | None = None,
) -> ModelProto:  # fmt: skip
    """Return nodes as a model of their own, `constants` stored, the rest inputs."""
    import onnx

    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    fixed = stored.keys() | (constants or set())
    found = onnx.ModelProto(ir_version=model.ir_version)
    found.opset_import.extend(model.opset_import)
    found.functions.extend(model.functions)
    graph = found.graph
    graph.name = model.graph.name or "part"
    graph.node.extend(nodes)
    for name in reads:
        if name in stored:
            graph.initializer.append(stored[name])
        elif name in fixed and is_numbers(values[name]):
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values[name]), name))
        else:
            graph.input.append(entry_of(name, values[name]))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in writes)
    return found


def entry_of(name: str, value: Any) -> Any:
    """Return the declaration of an input with the type and shape of a value."""
    from onnx import TensorProto, ValueInfoProto, helper

    if not isinstance(value, np.ndarray):
        return ValueInfoProto(name=name)
    text = value.dtype.kind in "OUST"
    kind = TensorProto.STRING if text else helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, kind, value.shape)


def is_numbers(value: Any) -> bool:
    """Tell whether a value is a tensor of numbers, not of texts, and no list."""
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufV"


def size_bytes(value: Any) -> int:
    """Return the bytes of a tensor, of the texts or tensors of a list; 0 for none."""
    if isinstance(value, list | tuple):
        return sum(size_bytes(part) for part in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return sum(len(str(text)) for text in value.ravel())
    return int(np.asarray(value).nbytes) if value is not None else 0


def moved_bytes(node: NodeProto, values: Mapping[str, Any]) -> int:
    """Return the bytes a node reads and writes, both factors of every multiplication."""
    reads = [values.get(name) for name in all_reads(node)]
    writes = [values.get(name) for name in node.output if name]
    read = sum(size_bytes(value) for value in reads)
    place = MULTIPLIES.get(node.op_type)
    if place is not None:
        x, w, y = (np.asarray(v) for v in (reads[0], reads[place], writes[0]))
        deep = w.shape[1:] if "Conv" in node.op_type else x.shape[-1:]
        each = x.dtype.itemsize + w.dtype.itemsize
        read = max(read, y.size * math.prod(deep) * each)
    return read + sum(size_bytes(value) for value in writes)


def random_feed(
    model: ModelProto, shapes: Mapping[str, Sequence[int]], batch: int | None, seed: int
) -> dict[str, Values]:
    """Return seeded inputs of a model's own element types: normal numbers, or 0 and 1."""
    from onnx import helper

    rng, found, entries = np.random.default_rng(seed), {}, inputs_of(model.graph)
    for entry in entries:
        if not entry.type.HasField("tensor_type"):
            raise UnsupportedError(f"{entry.name}: a tensor", "another type", "give the inputs")
    for name, shape in pinned_shapes(entries, shapes, batch).items():
        number = {e.name: e.type.tensor_type.elem_type for e in entries}[name]
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(number))
        if kind.kind in "biu":
            found[name] = rng.integers(0, 2, shape).astype(kind)
        elif kind.kind == "O":
            found[name] = np.full(shape, "a", object)
        else:
            found[name] = rng.standard_normal(shape, np.float32).astype(kind)
    return found
