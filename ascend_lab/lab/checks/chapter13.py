"""Check of the evening exercise of chapter 13: a network is imported from its file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ascend_lab.graph import Graph, evaluate
from ascend_lab.graph.onnx import import_onnx
from ascend_lab.lab.checks import core as ex

Values = NDArray[Any]


def _model(kinds: Sequence[str], batch: int) -> Any:
    """Return an ONNX model: a convolution, then what `kinds` name, then scores of 5 classes."""
    rng, held, nodes = np.random.default_rng(len(kinds)), dict[str, Values](), list[Any]()
    held |= {"to": np.array([0, -1]), "zero": np.array(0), "rest": np.array([-1])}

    def put(op: str, name: str, *reads: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, reads, [name], name, **attributes))
        return name

    def weight(name: str, *shape: int) -> str:
        held[name] = rng.standard_normal(shape).astype(np.float32)
        return name

    stem = weight("stem.w", 4, 3, 3, 3), weight("stem.b", 4)
    at = skip = put("Conv", "stem", "x", *stem, pads=[1] * 4)
    for i, kind in enumerate(kinds):
        more: tuple[str, ...] = (skip,) if kind == "Add" else ()
        if kind in ("Conv", "Mul"):
            more = (weight(f"w{i}", *((4, 4, 3, 3) if kind == "Conv" else (4, 1, 1))),)
        at = put(kind, f"n{i}", at, *more, **({"pads": [1] * 4} if kind == "Conv" else {}))
        skip = at if kind == "Relu" else skip
    at = put("MaxPool", "pool", at, kernel_shape=[2, 2], strides=[2, 2])
    at = put("Conv", "classes", at, weight("classes.w", 5, 4, 1, 1), strides=[1, 1])
    at, to = put("GlobalAveragePool", "mean", at), "to"
    if batch % 2:
        count = put("Gather", "count", put("Shape", "shape", at), "zero", axis=0)
        to = put("Concat", "both", put("Unsqueeze", "vector", count, axes=[0]), "rest", axis=0)
    put("Reshape", "y", at, to)
    ends = {"x": [batch, 3, 6, 6], "y": [batch, 5]}
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ends.items())
    constants = [numpy_helper.from_array(values, name) for name, values in held.items()]
    graph = helper.make_graph(nodes, "network", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)


def _judge_13_5(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, Graph):
        return "expected a Graph (end with net.build())"
    model = _model(case["kinds"], case["batch"])
    x = np.random.default_rng(1).standard_normal((case["batch"], 3, 6, 6)).astype(np.float32)
    (given,) = ReferenceEvaluator(model).run(None, {"x": x})
    wanted = np.asarray(given)
    (found,) = evaluate(got, {"x": x}).values()
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-4, atol=1e-4):
        return "which computes other scores than the evaluator of the onnx package"
    if len(got.nodes) > (enough := len(import_onnx(model).nodes)):
        return f"of {len(got.nodes)} nodes; {enough} are enough"
    return None


KINDS_5 = "Conv", "Relu", "Add", "Mul", "Dropout", "Identity"


@ex.judged(
    _judge_13_5,
    edges=ex.rows(
        "kinds batch",
        ([], 2),
        (["Relu", "Conv", "Add", "Relu"], 2),
        (["Dropout", "Identity", "Mul"], 1),
        (["Relu", "Identity", "Conv", "Dropout", "Add"], 3),
    ),
    cases=4,
    wrap=lambda fn: lambda kinds, batch: fn(_model(kinds, batch)),
)
def check_ex_13_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(model)`: an ONNX network as a graph, its values and as few nodes as ours."""
    return {"kinds": rng.choice(KINDS_5, int(rng.integers(1, 7))).tolist(),
            "batch": int(rng.integers(1, 4))}  # fmt: skip
