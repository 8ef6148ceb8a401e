"""Small ONNX models for tests, and the values ONNX Runtime computes for them."""

import math
import re
from ast import literal_eval
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
FLOAT = onnx.TensorProto.FLOAT
INT64 = onnx.TensorProto.INT64
BOOL = onnx.TensorProto.BOOL


def node(text: str) -> onnx.NodeProto:
    """Return the node that "name: Op a b -> y z key=value" says; "_" is an input left out.

    The name may be left out; values are literals, words, the name of an element type, or
    TYPE:number, a tensor of one element.
    """
    name, op = re.fullmatch(r"(?:(\S+): )?(.*)", text).groups()  # type: ignore[union-attr]
    reads, _, rest = op.partition(" -> ")
    op, *inputs = ["" if one == "_" else one for one in reads.split()]
    outputs = [one for one in rest.split() if "=" not in one]
    attrs: dict[str, Any] = {}
    for key, value in (one.split("=") for one in rest.split() if "=" in one):
        word, _, number = value.partition(":")
        attrs[key] = getattr(onnx.TensorProto, word, word)
        if number:
            attrs[key] = helper.make_tensor(key, attrs[key], [1], [literal_eval(number)])
        elif not word.replace("_", "").isalnum() or word.isdigit():
            attrs[key] = literal_eval(value)
    return helper.make_node(op, inputs, outputs, name, **attrs)


def model_of(
    nodes: str | list[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: list[str],
    weights: dict[str, Any] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """Return a model of nodes, or of their texts with "; " between.

    Inputs map names to shapes (floats), or to (shape, element type).
    """
    entries = []
    for name, given in inputs.items():
        shape, kind = given if given and isinstance(given[0], (tuple, list)) else (given, FLOAT)
        entries.append(helper.make_tensor_value_info(name, kind, list(shape)))
    made = [node(text) for text in nodes.split("; ")] if isinstance(nodes, str) else nodes
    ends = entries, [onnx.ValueInfoProto(name=name) for name in outputs]
    stored = [numpy_helper.from_array(np.asarray(v), name) for name, v in (weights or {}).items()]
    graph = helper.make_graph(made, "small", *ends, stored)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def one_node(
    op: str, arrays: dict[str, Any], opset: int = 17, outputs: int = 1, **attrs: Any
) -> onnx.ModelProto:
    """Return a model of one node that reads graph inputs of the arrays' shapes and types."""
    names = [f"y{i}" if outputs > 1 else "y" for i in range(outputs)]
    made = helper.make_node(op, list(arrays), names, "the_node", **attrs)
    entries = {
        name: (np.shape(a), helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype))
        for name, a in arrays.items()
    }
    return model_of([made], entries, names, opset=opset)


def run_onnx(model: onnx.ModelProto | bytes, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs ONNX Runtime computes, by name; on one thread, silent."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_close(found: Any, wanted: dict[str, Any], limit: float, rtol: float = 0.0) -> None:
    """Assert equal shapes and numbers, errors up to a share of the largest number."""
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        wide = value.astype(np.float64)
        atol = limit * max(1.0, float(np.abs(wide).max(initial=0.0)))
        got = found[name].astype(np.float64)
        np.testing.assert_allclose(got, wide, rtol=rtol or limit, atol=atol, err_msg=name)


def with_random_weights(path: Path, seed: int = 0) -> onnx.ModelProto:
    """Return a light model whose constant weights are drawn, cut before the last softmax.

    The files hold the same number everywhere, so that every class is equally likely: a test of
    nothing. Normal weights of variance 2 / inputs keep the values in range.
    """
    model = onnx.load(path)
    rng = np.random.default_rng(seed)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    kept = []
    for one in model.graph.node:
        if one.op_type == "ConstantOfShape":
            shape = tuple(stored[one.input[0]])
            if len(shape) > 1:
                scale = math.sqrt(2 / math.prod(shape[1:]))
                drawn = rng.standard_normal(shape, np.float32) * np.float32(scale)
            else:
                drawn = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(drawn, one.output[0]))
        elif one.op_type == "Softmax":
            model.graph.output[0].name = one.input[0]
            model.graph.output[0].type.tensor_type.ClearField("shape")
        else:
            kept.append(one)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model
