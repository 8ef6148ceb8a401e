"""Passes keep what a graph computes: each one on its example, all together on random graphs."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pass_cases import CASES, CHANGING, Case, text
from test_passes import name_of, thousand

from ascend_lab.compiler import Graph, GraphBuilder, TensorType, evaluate, random_inputs
from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.ir import Seeded, verify
from ascend_lab.compiler.passes import (
    DEFAULT,
    PASSES,
    convert,
    measured_scales,
    quantise,
    run_passes,
)
from ascend_lab.compiler.placement import live_bytes
from ascend_lab.compiler.text_form import from_text
from ascend_lab.lab.graph_examples import topological_order

SHAPE = (1, 4, 4, 4)
EXACT = [name for name in DEFAULT if PASSES[name].values == "exact"]


def assert_same(before: Graph, after: Graph, *, exact: bool, seed: int = 3) -> None:
    """Compare all outputs: bit by bit, or within 1e-4 of the largest element.

    Reassociation moves a few roundings of 6e-8 each; sums that cancel enlarge them.
    """
    inputs = random_inputs(before, seed)
    wanted = evaluate(before, inputs)
    got = evaluate(after, inputs)
    assert list(wanted) == list(got)
    for name, values in wanted.items():
        assert got[name].dtype == values.dtype
        assert got[name].shape == values.shape
        if exact:
            np.testing.assert_array_equal(got[name], values, err_msg=name)
        else:
            size = max(1e-3, float(np.max(np.abs(values), initial=0.0)))
            np.testing.assert_allclose(got[name], values, rtol=0, atol=1e-4 * size, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_pass_keeps_the_values_of_its_example(case: Case, seed: int) -> None:
    before = from_text(text(case, case.before))
    after = PASSES[case.name].run(before)
    exact = PASSES[case.name].values == "exact"
    assert_same(before, after, exact=exact, seed=seed)
    assert_same(before, run_passes(before)[0], exact=False, seed=seed)


@pytest.mark.parametrize("case", CHANGING, ids=name_of)
def test_passes_that_change_values_do(case: Case) -> None:
    before = from_text(text(case, case.before))
    after = PASSES[case.name].run(before)
    inputs = random_inputs(before, 3)
    wanted = evaluate(before, inputs)["y"]
    got = evaluate(after, inputs)["y"]
    assert np.max(np.abs(wanted - got.astype(np.float64))) > 1e-4


class Net(GraphBuilder):
    """Random graphs whose tensors all are (1, 4, 4, 4), so that every step fits every tensor."""

    def weights(self, shape: tuple[int, ...], seed: int) -> Value:
        return self.constant(Seeded(seed, 0.3), TensorType(shape, "fp32"), "w")

    def number(self, seed: int) -> Value:
        shape = [(1,), (), (4,), (4, 1, 1), (1, 4, 1, 1), SHAPE][seed % 6]
        return self.fill(shape, (0.0, 1.0, -1.0, 0.5, 3.0, 2.0)[seed % 6])

    def norm(self, x: Value, seed: int) -> Value:
        rest = [self.weights((4,), seed + i) for i in range(3)]
        made: Value = self.batch_norm(x, *rest, self.fill((4,), 0.5))
        return made


def moved(net: Net, x: Value, seed: int) -> Value:
    """Move elements or change their format, and sometimes back."""
    perm = [(0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2), (0, 1, 3, 2)][seed % 4]
    made: Value
    if seed % 3 == 0:
        made = net.reshape(net.reshape(x, shape=(16, -1)), shape=SHAPE)
    elif seed % 3 == 1:
        made = net.cast(net.cast(x, dtype=("fp32", "fp16")[seed % 2]), dtype="fp32")
    else:
        made = net.transpose(net.relu(x) if seed % 2 else x, perm=perm)
    return made


def limited(net: Net, x: Value, seed: int) -> Value:
    high = (0.25, 6.0, math.inf)[seed % 3]
    made: Value = net.clip(x, low=-0.5 * (seed % 3), high=high)
    return made


def cut(net: Net, x: Value, seed: int) -> Value:
    made: Value
    if seed % 2:
        made = net.concat(*net.split(x, sizes=2, axis=seed % 3 + 1), axis=seed % 3 + 1)
    else:
        row = net.expand(net.weights((4, 1), seed), shape=(4, 4))
        made = net.tanh(net.add(x, row))
    return made


def convolved(net: Net, x: Value, seed: int) -> Value:
    """Append a convolution, with padding, bias, batch norm, factor and summand as it comes."""
    weight = net.weights((4, 4 if seed % 2 else 1, 3, 3), seed)
    bias = [net.weights((4,), seed)] if seed % 3 else []
    outside = seed % 5 == 0
    if outside:
        x = net.pad(x, pads=((0, 0), (0, 0), (1, 1), (1, 1)))
    y = net.conv2d(x, weight, *bias, pad=0 if outside else 1, groups=1 if seed % 2 else 4)
    y = net.norm(y, seed) if seed % 4 else y
    y = net.mul(y, net.weights((4, 1, 1), seed)) if seed % 7 else y
    y = net.add(net.weights((1, 4, 1, 1), seed), y) if seed % 3 != 1 else y
    made: Value = net.tanh(y)
    return made


def attended(net: Net, x: Value, y: Value, seed: int) -> Value:
    scores = net.muls(net.batch_matmul(x, y, trans_b=True), number=0.5)
    if seed % 2:
        scores = net.add(scores, net.weights((4, 4), seed))
    made: Value = net.batch_matmul(net.softmax(scores), y)
    return made


def twice(net: Net, x: Value, y: Value) -> Value:
    """Compute the same thing two times."""
    made: Value = net.max(net.add(net.exp(net.tanh(x)), y), net.add(net.exp(net.tanh(x)), y))
    return net.tanh(made)


def spelled(net: Net, x: Value, seed: int) -> Value:
    """Write a layer norm, a GELU, a linear layer or a mean in small operators."""
    made: Value
    if seed % 4 == 0:
        away = net.sub(x, net.reduce_mean(x, axis=-1, keepdims=True))
        squares = net.mul(away, away) if seed % 8 else net.pow(away, net.fill((1,), 2.0))
        spread = net.add(net.reduce_mean(squares, axis=-1, keepdims=True), net.fill((1,), 1e-2))
        normal = net.div(away, net.sqrt(spread))
        made = net.add(net.mul(normal, net.weights((4,), seed)), net.weights((4,), seed + 1))
    elif seed % 4 == 1:
        cube = net.mul(net.pow(x, net.fill((1,), 3.0)), net.fill((1,), 0.044715))
        inner = net.mul(net.add(x, cube), net.fill((1,), math.sqrt(2 / math.pi)))
        one = net.add(net.tanh(inner), net.fill((1,), 1.0))
        made = net.mul(net.mul(x, one), net.fill((1,), 0.5))
    elif seed % 4 == 2:
        rows = net.batch_matmul(x, net.transpose(net.weights((4, 4), seed)))
        made = net.add(net.weights((4,), seed), rows)
    else:
        made = net.sub(x, net.reduce_mean(x, axis=(2, 3), keepdims=True))
    return made


UNARY = ("relu", "neg", "tanh", "sigmoid", "abs", "softmax", "exp")
STEPS = {
    "unary": lambda net, x, y, n: net.tanh(net.add_node(UNARY[n % 7], net.tanh(x))),
    "sign": lambda net, x, y, n: net.add_node(("neg", "relu", "abs", "relu6")[n % 4], x),
    "scaled": lambda net, x, y, n: net.add_node(("muls", "adds")[n % 2], x, number=n % 5 - 1.0),
    "pair": lambda net, x, y, n: net.tanh(net.add_node(("add", "sub", "mul")[n % 3], x, y)),
    "number": lambda net, x, y, n: net.add_node(
        ("add", "sub", "mul", "max", "min")[n % 5], x, net.number(n)
    ),
    "channel": lambda net, x, y, n: net.mul(net.norm(net.tanh(x), n), net.weights((4, 1, 1), n)),
    "div": lambda net, x, y, n: net.div(x, net.fill((1,), (2.0, 3.0, 1.0)[n % 3])),
    "gate": lambda net, x, y, n: net.mul(x, net.sigmoid(x)),
    "limited": lambda net, x, y, n: limited(net, x, n),
    "moved": lambda net, x, y, n: moved(net, x, n),
    "cut": lambda net, x, y, n: cut(net, x, n),
    "conv": lambda net, x, y, n: convolved(net, x, n),
    "product": lambda net, x, y, n: net.tanh(
        net.batch_matmul(x, net.transpose(y, perm=(0, 1, 3, 2)) if n % 2 else y)
    ),
    "attention": attended,
    "spelled": lambda net, x, y, n: spelled(net, x, n),
    "twice": lambda net, x, y, n: twice(net, x, y),
}


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    net = Net("random")
    values = [net.input("x", SHAPE), net.input("z", SHAPE)]
    for _ in range(draw(st.integers(3, 12))):
        step = STEPS[draw(st.sampled_from(sorted(STEPS)))]
        # the newest tensor nine times in ten: chains are what passes look for
        newest = draw(st.integers(0, 9)) > 0
        x = values[-1 if newest else draw(st.integers(0, len(values) - 1))]
        y = values[draw(st.integers(0, len(values) - 1))]
        values.append(step(net, x, y, draw(st.integers(0, 60))))
    net.output(values[-1])
    if draw(st.booleans()):
        net.output(values[len(values) // 2])
    return net.build()


@given(graphs())
def test_all_passes_together_keep_the_values_of_random_graphs(graph: Graph) -> None:
    after, report = run_passes(graph)
    assert verify(after) is after
    assert len(after.nodes) <= len(graph.nodes) + 3 * sum(report.matches.values())
    assert_same(graph, after, exact=False)
    assert run_passes(after)[0] is after


@given(graphs())
def test_exact_passes_keep_every_bit_of_random_graphs(graph: Graph) -> None:
    after, _ = run_passes(graph, EXACT)
    assert_same(graph, after, exact=True)


@given(graphs())
def test_orders_are_orders(graph: Graph) -> None:
    for mode in ("bfs", "dfs"):
        after = verify(topological_order(graph, mode))
        assert sorted(n.name for n in after.nodes) == sorted(n.name for n in graph.nodes)
        assert_same(graph, after, exact=True)
        assert max(live_bytes(after)) >= max(
            sum(
                after.types[name].size_bytes
                for name in {*node.inputs, *node.outputs} - set(after.constants)
            )
            for node in after.nodes
        )


def branches() -> Graph:
    """Return two branches that grow and shrink again: one after the other needs less memory."""
    net = GraphBuilder("branches")
    x = net.input("x", (1, 8))
    ends = []
    for name in "abc":
        wide = net.expand(x, shape=(100, 8), name=f"{name}1")
        ends.append(net.reduce_sum(wide, axis=0, name=f"{name}2"))
    net.output(net.add(net.add(ends[0], ends[1], name="s"), ends[2], name="y"))
    return net.build()


def test_orders_run_branches_side_by_side_or_one_after_the_other() -> None:
    graph = branches()
    names = {
        mode: [n.name for n in topological_order(graph, mode).nodes] for mode in ("bfs", "dfs")
    }
    assert names["bfs"] == ["a1", "b1", "c1", "a2", "b2", "c2", "s", "y"]
    assert names["dfs"] == ["a1", "a2", "b1", "b2", "s", "c1", "c2", "y"]
    peaks = {mode: max(live_bytes(topological_order(graph, mode))) for mode in ("bfs", "dfs")}
    assert peaks["bfs"] == 32 + 3 * 3200
    assert peaks["dfs"] == 32 + 3200 + 2 * 32


def test_orders_of_a_thousand_nodes_keep_values() -> None:
    graph = thousand()
    for mode in ("bfs", "dfs"):
        assert len(verify(topological_order(graph, mode)).nodes) == len(graph.nodes)


def test_folded_weights_are_made_only_when_asked_for() -> None:
    net = GraphBuilder("g")
    x = net.input("x", (1, 64, 3, 3))
    asked = []

    def slow() -> np.ndarray:
        asked.append(1)
        return np.ones((64, 64, 3, 3), np.float32)

    w = net.constant(slow, TensorType((64, 64, 3, 3), "fp32"), "w")
    given = [net.fill((64,), number) for number in (1.0, 0.1, 0.2, 1.0)]
    net.output(net.batch_norm(net.conv2d(x, w, pad=1), *given, name="y"))
    graph = net.build()
    after, _ = run_passes(graph)
    half, _ = convert(after, "fp16")
    assert [n.op for n in half.nodes] == ["conv2d"]
    assert not asked
    assert_same(graph, after, exact=False)
    assert asked


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_conversion_is_as_near_as_the_format_allows(dtype: str) -> None:
    net = GraphBuilder("g")
    x = net.input("x", SHAPE)
    y = net.conv2d(x, net.weight((4, 4, 3, 3)), net.weight((4,), "b"), pad=1)
    y = net.batch_norm(y, *(net.fill((4,), number) for number in (1.0, 0.1, 0.2, 1.0)))
    net.output(net.softmax(net.matmul(net.reshape(y, shape=(4, 16)), net.weight((16, 5), "m"))))
    graph = net.build()
    after, changed = convert(graph, dtype)
    assert changed > len(graph.nodes)
    assert {after.types[name].dtype for node in after.nodes for name in node.outputs} == {dtype}
    assert "cast" not in {node.op for node in after.nodes}
    inputs = random_inputs(graph)
    (wanted,), (got,) = (evaluate(g, inputs).values() for g in (graph, after))
    error = np.max(np.abs(wanted - got.astype(np.float64)))
    assert 0 < error < {"fp16": 2e-3, "bf16": 2e-2}[dtype]


def test_conversion_casts_what_an_operator_keeps_in_fp32() -> None:
    net = GraphBuilder("g")
    x = net.input("x", (1, 4, 2, 2))
    mean = net.reduce_mean(x, axis=(0, 2, 3), name="mean")
    rest = [net.fill((4,), number) for number in (1.0, 0.0)]
    net.output(net.batch_norm(x, *rest, mean, net.fill((4,), 1.0), name="y"))
    after, _ = convert(net.build(), "fp16")
    assert [(n.op, n.inputs) for n in after.nodes][1] == ("cast", ("mean",))
    assert after.node("y").inputs[3] == "mean_fp32"
    assert after.types["y"].dtype == "fp16"


def test_int8_products_come_near_and_scales_can_be_given() -> None:
    net = GraphBuilder("g")
    x = net.input("x", SHAPE)
    y = net.relu(net.conv2d(x, net.weight((4, 4, 3, 3)), net.weight((4,), "b"), pad=1, name="c"))
    rows = net.reshape(y, shape=(4, 16), name="rows")
    z = net.gemm(rows, net.weight((5, 16), "m"), net.weight((5,), "d"), trans_b=True, name="f")
    net.output(net.matmul(z, net.weight((5, 3), "n"), name="y"))
    graph = net.build()
    scales = measured_scales(graph)
    assert set(scales) == {"x", "rows", "f"}
    after, count = quantise(graph)
    assert count == 3
    assert [n.op for n in after.nodes if after.types[n.output].dtype == "int32"] == [
        "conv2d",
        "matmul",
        "matmul",
    ]
    inputs = random_inputs(graph)
    wanted = evaluate(graph, inputs)["y"]
    got = evaluate(after, inputs)["y"]
    error = np.max(np.abs(wanted - got)) / np.max(np.abs(wanted))
    assert 1e-4 < error < 0.05
    coarse, _ = quantise(graph, {"x": 100 * scales["x"]})
    assert [n.op for n in coarse.nodes if coarse.types[n.output].dtype == "int32"] == ["conv2d"]
    worse = np.max(np.abs(wanted - evaluate(coarse, inputs)["y"])) / np.max(np.abs(wanted))
    assert worse > 2 * error


@pytest.mark.parametrize("int8_first", [True, False])
def test_int8_and_fp16_scale_sums_in_fp32(int8_first: bool) -> None:
    net = GraphBuilder("g")
    x = net.input("x", (1, 256, 4, 4))
    net.output(net.conv2d(x, net.weight((8, 256, 3, 3)), pad=1, name="y"))
    half, _ = convert(net.build(), "fp16")
    after = convert(quantise(net.build())[0], "fp16")[0] if int8_first else quantise(half)[0]
    assert after.types["y"].dtype == "fp16"
    inputs = random_inputs(half)
    sums = evaluate_all(after, inputs)["y_sums"]
    assert np.max(np.abs(sums)) > 65504
    wanted, got = (evaluate(g, inputs)["y"].astype(np.float64) for g in (half, after))
    assert np.max(np.abs(wanted - got)) < 0.05 * np.max(np.abs(wanted))


def test_pooling_as_convolution_keeps_averages_and_changes_maxima() -> None:
    for op, same in (("avg_pool2d", True), ("max_pool2d", False)):
        net = GraphBuilder("g")
        x = net.input("x", SHAPE)
        net.output(net.add_node(op, x, kernel=2, stride=2, name="y"))
        graph = net.build()
        after = PASSES["PoolingToConvPass"].run(graph)
        inputs = random_inputs(graph)
        error = np.max(np.abs(evaluate(graph, inputs)["y"] - evaluate(after, inputs)["y"]))
        assert (error < 1e-6) == same
