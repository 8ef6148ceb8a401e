"""Checks of chapter 13: a rule of a verifier, a Gemm as nodes, a cut of a graph, an importer.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "which has a gemm in it; use matmul, muls and add".
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, GraphBuilder, evaluate, onnx, random_inputs
from ascend_lab.lab.checks import core as ex

Values = np.ndarray
DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
"""What the attributes of ONNX's Gemm are where a node does not say."""


def _chain(length: int, rng: np.random.Generator | None = None) -> Graph:
    """Return a sound graph of additions: each node reads the one before, and an earlier tensor."""
    net = GraphBuilder("chain")
    tensors = [net.input("x", (4,)), net.fill((4,), 1.0, "w")]
    for i in range(length):
        previous = tensors[-1] if i else tensors[0]
        earlier = tensors[int(rng.integers(len(tensors)))] if rng is not None else tensors[1]
        tensors.append(net.add(previous, earlier, name=f"n{i}"))
    net.output(tensors[-1])
    return net.build()


def _first_too_early(graph: Graph) -> str | None:
    """Return the name of the first node that reads a tensor before it is written, or None."""
    ready = {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        if not ready.issuperset(node.inputs):
            return node.name
        ready.update(node.outputs)
    return None


def _split_chain() -> Graph:
    """Return a sound graph in which a node reads the second output of another."""
    net = GraphBuilder("split")
    first, second = net.split(net.input("x", (4,)), sizes=(2, 2), name="halves")
    net.output(net.add(net.relu(second), first))
    return net.build()


SOUND = _chain(5)
SPLIT = _split_chain()
N0, N1, N2, N3, N4 = SOUND.nodes
SWAPPED = replace(SOUND, nodes=(N1, N0, N2, N3, N4))
N4_OF_NOBODY = replace(N4, name="late", inputs=("nobody", "w"))  # it still writes n4
READS_NOBODY = replace(SOUND, nodes=(N0, N1, N2, N3, N4_OF_NOBODY))
N2_OF_ITSELF = replace(N2, inputs=(N2.inputs[0], N2.output))
READS_ITSELF = replace(SOUND, nodes=(N0, N1, N2_OF_ITSELF, N3, N4))


@ex.against(
    _first_too_early,
    edges=[
        (SOUND,),
        (SWAPPED,),
        (READS_NOBODY,),
        (SPLIT,),
        (READS_ITSELF,),
    ],
)
def check_ex_13_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(graph)`: the first node that reads what is not there yet, or None."""
    graph = _chain(int(rng.integers(2, 9)), rng)
    nodes = list(graph.nodes)
    if rng.random() < 0.6:
        one, two = rng.choice(len(nodes), 2, replace=False)
        nodes[one], nodes[two] = nodes[two], nodes[one]
    return {"graph": replace(graph, nodes=tuple(nodes))}


def _with_builder(fn: Any) -> Any:
    """Return a function that builds the graph of a Gemm with `fn`; a, b and c are shapes."""

    def build(a: Any, b: Any, c: Any, attributes: dict[str, Any]) -> Graph:
        net = GraphBuilder("gemm")
        tensor_a = net.input("a", a)
        tensor_b = net.input("b", b)
        tensor_c = None if c is None else net.input("c", c)
        net.output(fn(net, tensor_a, tensor_b, tensor_c, dict(attributes)))
        return net.build()

    return build


def _judge_gemm(got: Graph, case: ex.Case) -> str | None:
    """Judge the graph of a Gemm: no gemm in it, and its values."""
    if "gemm" in [node.op for node in got.nodes]:
        return "which has a gemm in it; use matmul, muls and add"
    inputs = random_inputs(got, 13)
    attributes = {**DEFAULTS, **case["attributes"]}
    (values,) = evaluate(got, inputs).values()
    a = inputs["a"].T if attributes["transA"] else inputs["a"]
    b = inputs["b"].T if attributes["transB"] else inputs["b"]
    expected = attributes["alpha"] * (a.astype(np.float64) @ b)
    if "c" in inputs:
        expected = expected + attributes["beta"] * inputs["c"]
    if values.shape != expected.shape:
        return f"of shape {values.shape}, expected {expected.shape}"
    if not np.allclose(values, expected, rtol=1e-5, atol=1e-5):
        first = ex.show(values.ravel()[:3])
        return f"which computes {first}, expected {ex.show(expected.ravel()[:3])}"
    return None


@ex.judged(
    _judge_gemm,
    edges=[
        ((2, 3), (3, 4), (4,), {}),
        ((2, 3), (3, 4), None, {}),
        ((3, 2), (4, 3), (2, 4), {"transA": 1, "transB": 1}),
        ((2, 3), (3, 4), (2, 1), {"alpha": 0.5, "beta": 0.0}),
        ((2, 3), (3, 4), (4,), DEFAULTS),  # stated, and yet nothing is transposed
    ],
    cases=20,
    wrap=_with_builder,
)
def check_ex_13_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(net, a, b, c, attributes)`: a Gemm of ONNX from nodes that are no `gemm`."""
    m, k, n = (int(s) for s in rng.integers(2, 6, 3))
    options = {"alpha": 0.25, "beta": 2.0, "transA": 1, "transB": 1}
    attributes = {key: value for key, value in options.items() if rng.random() < 0.5}
    forms: tuple[Any, ...] = (None, (n,), (m, n), (1, n), (m, 1))
    return {
        "a": (k, m) if "transA" in attributes else (m, k),
        "b": (n, k) if "transB" in attributes else (k, n),
        "c": forms[int(rng.integers(len(forms)))],
        "attributes": attributes,
    }


def _judge_cut(got: Any, case: ex.Case) -> str | None:
    """Judge a cut between two devices by the slowest of both parts and the copy."""
    times, over, rate, wait = case.values()
    if not isinstance(got, int | np.integer) or not 0 < got < len(times):
        return f"expected a position from 1 to {len(times) - 1}"
    periods_s = dict[int, float]()
    for cut in range(1, len(times)):
        copy_s = wait + over[cut] / rate
        periods_s[cut] = max(sum(times[:cut]), copy_s, sum(times[cut:]))
    period_s = periods_s[int(got)]
    best = min(periods_s, key=lambda cut: periods_s[cut])
    if period_s > periods_s[best] * (1 + 1e-9):
        best_s = periods_s[best]
        return f"an image every {period_s:.4g} s; a cut at {best} gives one every {best_s:.4g} s"
    return None


@ex.judged(
    _judge_cut,
    edges=[
        ([1.0, 1.0], [8, 8], 8.0, 0.0),
        ([1.0, 1.0], [1, 100], 1.0, 0.0),
        ([4.0, 1.0, 1.0, 1.0], [1] * 4, 8.0, 0.0),
        ([1.0] * 4, [9, 2, 9, 1], 1.0, 0.5),
        ([1.0] * 4, [9, 2, 3, 9], 2.0, 2.0),
        ([1.0] * 4, [9, 1, 3, 9], 2.0, 1.0),
    ],
)
def check_ex_13_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(times_s, bytes_over, rate, latency_s)`: where to cut a graph for two devices."""
    count = int(rng.integers(2, 12))
    times = rng.uniform(0.5, 3.0, count).tolist()
    sizes = rng.integers(1, 20, count).tolist()
    given = ex.drawn(rng, rate=(1.0, 4.0), latency_s=(0.0, 1.0))
    return {"times_s": times, "bytes_over": sizes, **given}


def _model(kinds: Sequence[str], batch: int) -> Any:
    """Return an ONNX model: a convolution, then what `kinds` name, then scores of 5 classes."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(len(kinds))
    held = dict[str, Values]()
    nodes = list[Any]()
    held |= {
        "to": np.array([0, -1] if len(kinds) % 4 else [-1, 5, 1]),
        "zero": np.array(0),
        "one": np.array(1),
        "rest": np.array([-1]),
    }

    def put(op: str, name: str, *reads: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, reads, [name], name, **attributes))
        return name

    def weight(name: str, *shape: int) -> str:
        held[name] = rng.standard_normal(shape).astype(np.float32)
        return name

    stem = weight("stem.w", 4, 3, 3, 3), weight("stem.b", 4)
    picture = f"picture{len(kinds)}"  # an input may have any name
    at = skip = put("Conv", "stem", picture, *stem, pads=[1] * 4)
    for i, kind in enumerate(kinds):
        if kind == "Conv":  # two of them read the same weights
            at = put(kind, f"n{i}", at, weight("shared", 4, 4, 3, 3), pads=[1] * 4)
        elif kind == STRIDED:
            wide = weight(f"w{i}", 4, 4, 5, 5)
            at = skip = put("Conv", f"n{i}", at, wide, pads=[2] * 4, strides=[2, 2])
        elif kind == "Mul":  # the constant is the first or the second operand
            factors = [at, weight(f"w{i}", 4, 1, 1)]
            at = put(kind, f"n{i}", *factors[:: 1 if i % 2 else -1])
        else:
            at = put(kind, f"n{i}", *((at, skip) if kind == "Add" else (at,)))
        skip = at if kind == "Relu" else skip
    # ONNX: a stride that the file does not state is 1
    strides = {"strides": [2, 2]} if len(kinds) % 2 == 0 else {}
    at = put("MaxPool", "pool", at, kernel_shape=[2 + len(kinds) % 3 // 2] * 2, **strides)
    at = put("Conv", "classes", at, weight("classes.w", 5, 4, 1, 1), strides=[1, 1])
    at = put("GlobalAveragePool", "mean", at)
    to = "to"
    if batch % 2:
        shape = put("Shape", "shape", at)
        count = put("Gather", "count", shape, "zero", axis=0)
        columns = "rest"
        if len(kinds) % 2:  # the number of classes is asked for, too
            classes = put("Gather", "classes.count", shape, "one", axis=0)
            columns = put("Unsqueeze", "columns", classes, axes=[0])
        to = put("Concat", "both", put("Unsqueeze", "vector", count, axes=[0]), columns, axis=0)
    put("Reshape", "y", at, to)
    put("Identity", "spare", at)  # the last node need not write the output
    ends: dict[str, list[int | None]] = {
        picture: [batch, 3, 12, 12],
        "y": [None] * (2 if to != "to" else len(held["to"])),
    }
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ends.items())
    constants = [numpy_helper.from_array(values, name) for name, values in held.items()]
    graph = helper.make_graph(nodes, "network", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)


STRIDED = "Conv, stride 2"
KINDS_5 = "Conv", STRIDED, "Relu", "Add", "Mul", "Dropout", "Identity"


@ex.judged(
    edges=[
        ([], 2),
        (["Relu", "Conv", "Add", "Relu"], 2),
        (["Dropout", "Identity", "Mul"], 1),
        (["Relu", "Identity", "Conv", "Dropout", "Add"], 3),
        (["Conv", STRIDED, "Mul", "Conv"], 2),
    ],
    cases=4,
    wrap=lambda fn: lambda kinds, batch: fn(_model(kinds, batch)),
    kinds=lambda rng: rng.choice(KINDS_5, int(rng.integers(1, 7))).tolist(),
    batch=range(1, 4),
)
def check_ex_13_5(got: Any, case: ex.Case) -> str | None:
    """Check `fn(model)`: an ONNX network as a graph, its values and as few nodes as ours."""
    if not isinstance(got, Graph):
        return "expected a Graph (end with net.build())"
    from onnx.reference import ReferenceEvaluator

    model = _model(case["kinds"], case["batch"])
    x = np.random.default_rng(1).standard_normal((case["batch"], 3, 12, 12)).astype(np.float32)
    (given,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x})
    wanted = np.asarray(given)
    (found,) = evaluate(got, {got.inputs[0]: x}).values()
    if found.shape != wanted.shape:
        return f"whose scores are of shape {found.shape}, expected {wanted.shape}"
    if not np.allclose(found, wanted, rtol=1e-4, atol=1e-4):
        scores = f"{found.flat[0]:.4g} for the first class; the onnx package computes"
        kinds = ", ".join(node.op_type for node in model.graph.node)
        return f"which computes {scores} {wanted.flat[0]:.4g} (the file: {kinds})"
    if len(got.nodes) > (enough := len(onnx.import_onnx(model).nodes)):
        return f"of {len(got.nodes)} nodes; {enough} are enough"
    return None
