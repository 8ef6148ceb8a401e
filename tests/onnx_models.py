"""Small ONNX models for tests, and the values ONNX Runtime computes for them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: list[str],
    weights: dict[str, Any] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """Return a model; inputs map names to shapes (floats), or to (shape, element type)."""
    entries = []
    for name, given in inputs.items():
        shape, kind = given if given and isinstance(given[0], (tuple, list)) else (given, FLOAT)
        entries.append(helper.make_tensor_value_info(name, kind, list(shape)))
    graph = helper.make_graph(
        nodes,
        "small",
        entries,
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def one_node(
    op: str, arrays: dict[str, Any], opset: int = 17, outputs: int = 1, **attrs: Any
) -> onnx.ModelProto:
    """Return a model of one node that reads graph inputs of the arrays' shapes and types."""
    names = [f"y{i}" if outputs > 1 else "y" for i in range(outputs)]
    node = helper.make_node(op, list(arrays), names, "the_node", **attrs)
    entries = {
        name: (np.shape(a), helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype))
        for name, a in arrays.items()
    }
    return model_of([node], entries, names, opset=opset)


def expected(model: onnx.ModelProto, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [entry.name for entry in model.graph.output]
    return dict(zip(names, session.run(names, inputs), strict=True))


def with_random_weights(path: Path, seed: int = 0) -> onnx.ModelProto:
    """Return a light model whose constant weights are drawn, cut before the last softmax.

    The files hold the same number everywhere, so that every class is equally likely: a test of
    nothing. Normal weights of variance 2 / inputs keep the values in range.
    """
    model, rng = onnx.load(path), np.random.default_rng(seed)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape":
            shape = tuple(stored[node.input[0]])
            if len(shape) > 1:
                scale = math.sqrt(2 / math.prod(shape[1:]))
                drawn = rng.standard_normal(shape, np.float32) * np.float32(scale)
            else:
                drawn = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(drawn, node.output[0]))
        elif node.op_type == "Softmax":
            model.graph.output[0].name = node.input[0]
            model.graph.output[0].type.tensor_type.ClearField("shape")
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model
