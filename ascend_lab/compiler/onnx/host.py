"""Computes any ONNX model on the host, with ONNX Runtime, ONNX's reference evaluator or a graph."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler.evaluate import evaluate
from ascend_lab.compiler.onnx import import_pinning, witnesses
from ascend_lab.compiler.onnx.model_file import EXTERNAL, load, sound_nodes, tensor_of, title
from ascend_lab.compiler.onnx.sound import STANDARD, check_sound, version_of
from ascend_lab.compiler.onnx.tensors import in_type, inputs_of, pinned_shapes
from ascend_lab.compiler.onnx.witnesses import GRAPH, REFERENCE, RUNTIME, inner_graphs
from ascend_lab.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

Values = np.ndarray
MULTIPLIES = {
    "Conv": 1,
    "ConvInteger": 1,
    "ConvTranspose": 1,
    "DeformConv": 1,
    "QLinearConv": 3,
    "MatMul": 1,
    "MatMulInteger": 1,
    "QLinearMatMul": 3,
    "Gemm": 1,
}
"""The index of the second factor of operators that multiply, for `moved_bytes`."""
WIDER_TYPES = 22
"""The operator set in which many operators got bfloat16 and changed in nothing else."""
OLD_IR = 8
"""A version of the file format that every runtime reads."""
INSTALL = "pip install onnxruntime"


def run_on_host(
    model: ModelProto, given: Mapping[str, Any], *, everything: bool = False
) -> dict[str, Any]:
    """Return a model's outputs by name, or with `everything` all tensors of its nodes.

    Each node is computed by the first evaluator that is correct for it (`witnesses.FAULTS`);
    consecutive nodes with the same evaluator run as one model. Raises `UnsupportedError`, naming
    the node and the reason, if no evaluator computes it.
    """
    import onnx
    from onnx import inliner

    inlined = inliner.inline_local_functions(model) if model.functions else model
    names = [entry.name for entry in inlined.graph.output]
    feed = {e.name: _as_array(given[e.name]) for e in inlined.graph.input if e.name in given}
    nodes = list(sound_nodes(inlined))
    if everything:
        written = [name for node in nodes for name in node.output if name]
        names = list(dict.fromkeys((*names, *written)))
    check_sound(inlined, nodes)
    host = _Host(onnx, inlined, {**constants_of(inlined), **feed}, names)
    host.compute(nodes)
    if missing := [name for name in names if name not in host.values]:
        raise InputError(f"an input {missing[0]}", "none", "give each by name")
    return {name: host.values[name] for name in names}


def _as_array(value: Any) -> Any:
    """Return a NumPy scalar as an array without axes, which ONNX Runtime requires."""
    return np.asarray(value) if isinstance(value, np.generic) else value


class _Host:
    """Computes a model on the host: the values so far, and the evaluators of its nodes."""

    def __init__(
        self, onnx: Any, model: ModelProto, values: dict[str, Any], needed_names: Sequence[str]
    ) -> None:
        self.onnx = onnx
        self.model = model
        self.values = values
        self.needed_names = needed_names
        self.opset = version_of(model)
        self.has_runtime = importlib.util.find_spec("onnxruntime") is not None

    def compute(self, nodes: Sequence[NodeProto]) -> None:
        """Compute nodes in order; consecutive nodes with the same evaluator run together."""
        parts: list[tuple[tuple[str, ...], list[NodeProto]]] = []
        for node in nodes:
            names = self.evaluators(node)
            # a call of an evaluator takes longer than a node: consecutive nodes share it
            if not parts or parts[-1][0][:1] != names[:1]:
                parts.append((names, []))
            parts[-1][1].append(node)
        for i, (names, nodes_of_part) in enumerate(parts):
            later_nodes_of_model = [
                node for _, later_nodes in parts[i + 1 :] for node in later_nodes
            ]
            reads = [name for node in later_nodes_of_model for name in all_reads(node)]
            self.compute_part(names, nodes_of_part, [*self.needed_names, *reads])

    def evaluators(self, node: NodeProto) -> tuple[str, ...]:
        """Return the installed evaluators that are correct for a node; raise if there is none."""
        correct = witnesses.evaluators(node, self.opset)
        installed = tuple(name for name in correct if name != RUNTIME or self.has_runtime)
        if installed:
            return installed
        raise self.refused(node, [])

    def compute_part(
        self, names: tuple[str, ...], nodes: Sequence[NodeProto], needed_names: Sequence[str]
    ) -> None:
        """Compute nodes by their common evaluator; if it raises an error, compute each half."""
        try:
            self.values.update(self.run_evaluator(names[0], nodes, needed_names))
        except Exception as error:  # evaluators raise any type of exception
            reason = f"{names[0]}: {_first_line(error)}"
        else:
            return
        if len(nodes) == 1:
            self.compute_node(nodes[0], self.evaluators(nodes[0])[1:], needed_names, reason)
            return
        # an evaluator does not say which node it refuses: six halvings find the node among 64
        half = len(nodes) // 2
        # the first half must also return tensors that only the second half reads
        reads = [name for node in nodes[half:] for name in all_reads(node)]
        self.compute_part(names, nodes[:half], [*needed_names, *reads])
        self.compute_part(names, nodes[half:], needed_names)

    def compute_node(
        self, node: NodeProto, names: Sequence[str], needed_names: Sequence[str], reason: str
    ) -> None:
        """Compute one node by the first of the other evaluators that does not raise an error."""
        reasons = [reason]
        for name in names:
            try:
                self.values.update(self.run_evaluator(name, [node], needed_names))
            except Exception as error:  # as above
                reasons.append(f"{name}: {_first_line(error)}")
            else:
                return
        raise self.refused(node, reasons)

    def run_evaluator(
        self, evaluator: str, nodes: Sequence[NodeProto], needed_names: Sequence[str]
    ) -> dict[str, Any]:
        """Return the tensors in `needed_names` that nodes write, computed by one evaluator."""
        reads, writes = reads_and_writes(nodes, needed_names)
        # weights are stored in the model of the part, values computed so far are its inputs
        sub = sub_model(self.model, nodes, reads, writes, self.values)
        stored = {tensor.name for tensor in sub.graph.initializer}
        feed = {name: self.values[name] for name in reads if name not in stored}
        if not writes:
            return {}
        run = {RUNTIME: _onnxruntime, REFERENCE: _reference, GRAPH: _own_graph}[evaluator]
        try:
            results = run(sub, writes, feed)
        except Exception:
            # the runtime may be older than the file's version of an operator
            older = _in_oldest_opset(sub, self.onnx) if evaluator == RUNTIME else None
            if older is None:
                raise
            results = run(older, writes, feed)
        return dict(zip(writes, results, strict=True))

    def refused(self, node: NodeProto, reasons: Sequence[str]) -> UnsupportedError:
        """Return the error for a node that no installed evaluator computes correctly."""
        where = f"node {title(node)} ({node.op_type})"
        faulty = next(witnesses.faults_within(node, self.opset, REFERENCE), None)
        if self.has_runtime or not (faulty or node.domain not in STANDARD):
            needed = f"{where}: an operator that the host computes"
            return UnsupportedError(needed, "; ".join(reasons), "check the model and its inputs")
        got = f"{REFERENCE}, which {faulty[1].does}" if faulty else "none"
        return UnsupportedError(f"{where}: onnxruntime, which computes it", got, INSTALL)


def _in_oldest_opset(model: ModelProto, onnx: Any) -> ModelProto | None:
    """Return an equal model in the oldest operator set that has its operators; None if it is that.

    A runtime may lack kernels for the newest version of an operator, or refuse files that name a
    version newer than itself, although each operator in it is old.
    """
    introduced_in = []
    for node in model.graph.node:
        if node.domain in STANDARD:
            schema = onnx.defs.get_schema(node.op_type, version_of(model), "")
            if schema.since_version == WIDER_TYPES:
                schema = onnx.defs.get_schema(node.op_type, WIDER_TYPES - 1, "")
            # opset 21 with Relu (since 14) and Add (since 14): the model is the same in opset 14
            introduced_in.append(schema.since_version)
    # each operator needs the version that introduced its present form: take the newest of these
    oldest = max(introduced_in, default=version_of(model))
    if oldest == version_of(model) or any(list(inner_graphs(node)) for node in model.graph.node):
        return None
    older: ModelProto = onnx.ModelProto()
    older.CopyFrom(model)
    older.ir_version = min(model.ir_version, OLD_IR)
    for entry in older.opset_import:
        if entry.domain in STANDARD:
            entry.version = oldest
    return older


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:160] or type(error).__name__


def _onnxruntime(model: ModelProto, names: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """Return tensors computed by ONNX Runtime, on one thread and without optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # errors are raised, and need not be printed as well
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # optimisations would round in other places than the model
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    kinds = {entry.name: entry.type for entry in session.get_outputs()}
    results = session.run(names, dict(feed))
    return [_in_kind(value, kinds[name]) for name, value in zip(names, results, strict=True)]


def _in_kind(value: Any, kind: str) -> Any:
    """Return a tensor of 8-bit floats in its type: the runtime returns them as uint8."""
    from onnx import TensorProto, helper

    # "tensor(float8e4m3fn)" is FLOAT8E4M3FN
    word = kind.removeprefix("tensor(").removesuffix(")").upper()
    if not word.startswith("FLOAT8") or getattr(value, "dtype", None) != np.uint8:
        return value
    return value.view(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(word)))


def _reference(model: ModelProto, names: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """Return tensors computed by ONNX's reference evaluator."""
    import onnx.reference

    with np.errstate(all="ignore"):
        results = onnx.reference.ReferenceEvaluator(model).run(names, dict(feed))
    return [np.asarray(v) if isinstance(v, np.generic | int | float) else v for v in results]


def _own_graph(model: ModelProto, names: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """Return tensors computed by importing the model as a graph and evaluating that."""
    imported = import_pinning(model, feed, shapes={n: np.shape(v) for n, v in feed.items()})
    graph = imported.graph
    results = evaluate(graph, {name: feed[name] for name in graph.inputs})
    return [in_type(results[name], imported.output_types[name]) for name in names]


# -- whole models, nodes and values ---------------------------------------------------------------
def constants_of(model: ModelProto) -> dict[str, Any]:
    """Return initialisers' values by name; raise `InputError` if size and data do not match."""
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
    """Return a model without checking that its operators can be imported.

    Its nodes get unique names, its functions are replaced by their bodies, external data are read.
    Raises as `import_onnx` for files.
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
    # names of nodes are optional in ONNX; here they are keys of dictionaries
    title_counts: Counter[str] = Counter()
    for node in model.graph.node:
        # two nodes "Relu" become Relu and Relu_1
        name = title(node)
        node.name = f"{name}_{title_counts[name]}" if title_counts[name] else name
        title_counts[name] += 1
    return model


def all_reads(node: NodeProto) -> list[str]:
    """Return the names a node reads, including those that its branches read from outside."""
    reads = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            inner_names = {entry.name for entry in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                # a branch reads the tensors that it does not write from the graph around it
                reads += [name for name in all_reads(inner) if name not in inner_names]
                inner_names.update(inner.output)
            reads += [entry.name for entry in graph.output if entry.name not in inner_names]
    return list(dict.fromkeys(reads))


def reads_and_writes(
    nodes: Sequence[NodeProto], needed_names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the names that nodes read from outside, and which of `needed_names` they write."""
    written = {name for node in nodes for name in node.output if name}
    reads = [name for node in nodes for name in all_reads(node) if name not in written]
    return list(dict.fromkeys(reads)), [n for n in dict.fromkeys(needed_names) if n in written]


def sub_model(
    model: ModelProto,
    nodes: Sequence[NodeProto],
    reads: Sequence[str],
    writes: Sequence[str],
    values: Mapping[str, Any],
    constants: set[str] | None = None,
) -> ModelProto:
    """Return some nodes as a model; `constants` are stored in it, other `reads` are inputs."""
    import onnx

    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    stored_names = stored.keys() | (constants or set())
    sub = onnx.ModelProto(ir_version=model.ir_version)
    sub.opset_import.extend(model.opset_import)
    sub.functions.extend(model.functions)
    graph = sub.graph
    graph.name = model.graph.name or "part"
    graph.node.extend(nodes)
    for name in reads:
        if name in stored:
            graph.initializer.append(stored[name])
        elif name in stored_names and is_numbers(values[name]):
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values[name]), name))
        else:
            graph.input.append(entry_of(name, values[name]))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in writes)
    return sub


def entry_of(name: str, value: Any) -> Any:
    """Return the declaration of an input with the type and shape of a value."""
    from onnx import TensorProto, ValueInfoProto, helper

    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        element = entry_of(name, value[0]).type.tensor_type.elem_type
        return helper.make_tensor_sequence_value_info(name, element, None)
    if not isinstance(value, np.ndarray):
        return ValueInfoProto(name=name)
    text = value.dtype.kind in "OUST"
    kind = TensorProto.STRING if text else helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, kind, value.shape)


def is_numbers(value: Any) -> bool:
    """Tell whether a value is a tensor of numbers, not one of strings and not a list."""
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufV"


def size_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all strings or tensors in a list; 0 for None."""
    if isinstance(value, list | tuple):
        return sum(size_bytes(entry) for entry in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return sum(len(str(text)) for text in value.ravel())
    return int(np.asarray(value).nbytes) if value is not None else 0


def moved_bytes(node: NodeProto, values: Mapping[str, Any]) -> int:
    """Return the bytes a node reads and writes; each multiplication reads its two factors."""
    reads = [values.get(name) for name in all_reads(node)]
    factors = [values.get(name) for name in node.input]
    writes = [values.get(name) for name in node.output if name]
    read_bytes = sum(size_bytes(value) for value in reads)
    place = MULTIPLIES.get(node.op_type)
    if place is not None:
        x, w, y = (np.asarray(v) for v in (factors[0], factors[place], writes[0]))
        depth_sizes = w.shape[1:] if "Conv" in node.op_type else x.shape[-1:]
        pair_bytes = x.dtype.itemsize + w.dtype.itemsize
        # (8, 64) times (64, 32) in fp32: 256 results of 64 products, two factors of 4 bytes each,
        # make 131 kB; the matrices alone are 10 kB
        read_bytes = max(read_bytes, y.size * math.prod(depth_sizes) * pair_bytes)
    return read_bytes + sum(size_bytes(value) for value in writes)


def random_feed(
    model: ModelProto, shapes: Mapping[str, Sequence[int]], batch: int | None, seed: int
) -> dict[str, Values]:
    """Return seeded inputs in a model's element types: normal floats, 0 and 1 otherwise."""
    from onnx import helper

    rng = np.random.default_rng(seed)
    feed = {}
    entries = inputs_of(model.graph)
    for entry in entries:
        if not entry.type.HasField("tensor_type"):
            raise UnsupportedError(f"{entry.name}: a tensor", "another type", "give the inputs")
    for name, shape in pinned_shapes(entries, shapes, batch).items():
        number = {e.name: e.type.tensor_type.elem_type for e in entries}[name]
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(number))
        if kind.kind in "biu":
            feed[name] = rng.integers(0, 2, shape).astype(kind)
        elif kind.kind == "O":
            feed[name] = np.full(shape, "a", object)
        else:
            feed[name] = rng.standard_normal(shape, np.float32).astype(kind)
    return feed
