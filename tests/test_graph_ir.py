"""Graphs as data: types and bytes, constants, the verifier, text, builder, evaluation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from graph_strategies import whole_graphs, whole_inputs
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import Graph, GraphBuilder, Node, TensorType, evaluate, random_inputs
from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.ir import Constant, Fill, Seeded, to_text, verify
from ascend_lab.compiler.text_form import from_text
from ascend_lab.errors import GraphError, InputError, ShapeError, TypeMismatchError

FP32 = TensorType((2, 3), "fp32")
X = np.arange(6, dtype=np.float32).reshape(2, 3)


# -- types ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "stored"),
    [
        ((2, 3), "fp32", "ND", (2, 3)),
        ((), "fp16", "ND", ()),
        ((2, 17, 5, 7), "fp16", "NC1HWC0", (2, 2, 5, 7, 16)),
        ((2, 17, 5, 7), "fp32", "NC1HWC0", (2, 2, 5, 7, 16)),
        ((2, 17, 5, 7), "int32", "NC1HWC0", (2, 2, 5, 7, 16)),
        ((2, 17, 5, 7), "int8", "NC1HWC0", (2, 1, 5, 7, 32)),
        ((2, 17, 5, 7), "int8", "NC1HWC0:16", (2, 2, 5, 7, 16)),
        ((17, 33), "fp16", "FRACTAL_NZ", (3, 2, 16, 16)),
        ((17, 33), "int8", "FRACTAL_NZ", (2, 2, 16, 32)),
        ((17, 33), "int8", "FRACTAL_NZ:16", (3, 2, 16, 16)),
        ((17, 33), "fp32", "FRACTAL_NZ", (3, 2, 16, 16)),
        ((4, 17, 33), "fp16", "FRACTAL_ZN", (4, 2, 3, 16, 16)),
    ],
)
def test_stored_shape_and_bytes(shape, dtype, layout, stored):
    kind = TensorType(shape, dtype, layout)
    wide = {"fp32": 4, "int32": 4, "fp16": 2, "int8": 1}[dtype]
    assert kind.stored_shape == stored
    assert kind.size_bytes == math.prod(stored) * wide >= kind.elements * wide


# -- constants ------------------------------------------------------------------------------------
def test_constants_of_every_kind():
    half = TensorType((2, 3), "fp16")
    assert np.array_equal(Constant(half, X).array(), X)
    assert Constant(half, X).array().dtype == np.float16
    assert np.array_equal(Constant(half, Fill(2.5)).array(), np.full((2, 3), 2.5))
    assert np.array_equal(Constant(FP32, lambda: X + 1).array(), X + 1)
    assert Constant(TensorType((), "int32"), Fill(7)).array() == 7


def test_lazy_constants_are_made_only_when_asked_for():
    asked = []

    def make():
        asked.append(1)
        return X

    net = GraphBuilder("lazy")
    net.output(net.relu(net.constant(make, FP32)))
    graph = net.build()
    assert to_text(graph.renamed("a")) and graph.parameter_count == 6
    assert asked == [1]  # the text writes six numbers
    large = replace(FP32, shape=(100, 100))
    net = GraphBuilder("lazy")
    net.output(net.relu(net.constant(lambda: 1 / 0, large)))
    assert "= data" in str(net.build())


def test_seeded_constants_repeat():
    def drawn(*how):
        return Constant(TensorType((100, 100), "fp32"), Seeded(*how)).array()

    assert np.array_equal(drawn(3), drawn(3))
    assert not np.array_equal(drawn(3), drawn(4))
    values = drawn(3, 0.5, 2.0)
    assert abs(values.mean() - 2) < 0.02 and abs(values.std() - 0.5) < 0.02


def test_constant_of_another_shape():
    with pytest.raises(GraphError, match=r"shape \(2, 3\).*\(3,\)"):
        Constant(FP32, np.zeros(3)).array()
    with pytest.raises(GraphError, match="fix the data"):
        Constant(FP32, lambda: np.zeros((3, 2))).array()


# -- graphs and the verifier ----------------------------------------------------------------------
def graph_of(*nodes, inputs=("x",), outputs=("y",), types=None, constants=None):
    names = {n for node in nodes for n in (*node.inputs, *node.outputs)} | {*inputs, *outputs}
    kinds = dict.fromkeys(names, FP32) | (types or {})
    kinds = {name: kind for name, kind in kinds.items() if kind is not None}
    return Graph("g", inputs, outputs, nodes, kinds, constants or {})


def relu(name, read, write):
    return Node(name, "relu", (read,), (write,))


def test_producers_readers_and_lookups():
    graph = verify(
        graph_of(relu("a", "x", "t"), Node("b", "add", ("t", "t"), ("y",)), relu("c", "t", "z"))
    )
    assert {n: p.name for n, p in graph.producers.items()} == {"t": "a", "y": "b", "z": "c"}
    assert [n.name for n in graph.readers["t"]] == ["b", "c"]
    assert graph.readers["y"] == ()
    assert graph.node("b").output == "y" and graph.node("b").attr("axis", 5) == 5
    assert graph.in_types(graph.node("b")) == (FP32, FP32)
    assert repr(graph) == "Graph(g: 3 nodes, 1 inputs, 1 outputs, 0 parameters)"
    with pytest.raises(GraphError, match="'q'"):
        graph.type_of("q")
    with pytest.raises(GraphError, match="a node of the graph; got 'q'"):
        graph.node("q")


MALFORMED = {
    "input and constant": (
        graph_of(relu("a", "x", "y"), constants={"x": Constant(FP32, X)}),
        "every name once; got x twice",
    ),
    "two inputs": (graph_of(relu("a", "x", "y"), inputs=("x", "x")), "every name once"),
    "input without type": (graph_of(relu("a", "x", "y"), types={"x": None}), "a type for x"),
    "result without type": (graph_of(relu("a", "x", "y"), types={"y": None}), "a type for y"),
    "double": (
        graph_of(relu("a", "x", "y"), types={"x": TensorType((2, 3), "fp64")}),
        "x: one of fp16.*got fp64",
    ),
    "layout": (
        graph_of(relu("a", "x", "y"), types={"x": TensorType((2, 3), "fp32", "NHC")}),
        "x: one of ND.*got NHC",
    ),
    "constant's type": (
        graph_of(
            relu("a", "x", "y"),
            inputs=(),
            constants={"x": Constant(replace(FP32, dtype="fp16"), X)},
        ),
        "constant x as fp32",
    ),
    "node names": (graph_of(relu("a", "x", "t"), relu("a", "t", "y")), "node names once; got a"),
    "written twice": (
        graph_of(relu("a", "x", "y"), relu("b", "x", "y")),
        r"node b \(relu\): a new name to write; got y exists",
    ),
    "writes an input": (graph_of(relu("a", "x", "x"), outputs=("x",)), "got x exists"),
    "one name for two results": (
        graph_of(Node("a", "split", ("x",), ("y", "y"), {"sizes": (1, 1)})),
        "got y exists",
    ),
    "read before": (
        graph_of(relu("b", "t", "y"), relu("a", "x", "t")),
        r"node b \(relu\): input t; got written later: a cycle, or nodes out of order",
    ),
    "cycle": (graph_of(relu("a", "u", "t"), relu("b", "t", "u"), outputs=("u",)), "a cycle"),
    "read by nobody's leave": (graph_of(relu("a", "q", "y")), "input q; got nothing writes it"),
    "output": (graph_of(relu("a", "x", "y"), outputs=("y", "z")), "output z; got nothing writes"),
    "operator": (
        graph_of(Node("a", "rleu", ("x",), ("y",))),
        r"node a \(rleu\): one of \d+ operators; got 'rleu'; did you mean .*relu",
    ),
    "attribute": (
        graph_of(Node("a", "clip", ("x",), ("y",), {"hight": 1})),
        r"node a \(clip\): .*got hight; did you mean high",
    ),
    "inputs": (graph_of(Node("a", "add", ("x",), ("y",))), "add: 2 inputs.*got 1"),
    "shapes": (
        graph_of(Node("a", "matmul", ("x", "x"), ("y",))),
        r"node a \(matmul\): .*\(2, 3\)",
    ),
    "formats": (
        graph_of(
            Node("a", "add", ("x", "z"), ("y",)),
            inputs=("x", "z"),
            types={"z": replace(FP32, dtype="fp16")},
        ),
        "input . in fp32; got fp16; cast",
    ),
    "results": (
        graph_of(Node("a", "split", ("x",), ("y",), {"sizes": (1, 1)})),
        "node a .*: 2 outputs; got 1",
    ),
    "stated type": (
        graph_of(relu("a", "x", "y"), types={"y": TensorType((3, 2), "fp32")}),
        r"y as fp32\[2, 3\]; got fp32\[3, 2\]; infer",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_verifier_names_what_is_wrong(name):
    graph, message = MALFORMED[name]
    with pytest.raises(GraphError, match=message):
        verify(graph)


# -- text -----------------------------------------------------------------------------------------
@settings(max_examples=100)
@given(graph=whole_graphs())
def test_text_round_trip(graph):
    data = {name: c.array() for name, c in graph.constants.items()}
    text = to_text(graph)
    again = from_text(text, data)
    assert to_text(again) == text
    assert (again.inputs, again.outputs, again.nodes) == (graph.inputs, graph.outputs, graph.nodes)
    inputs = whole_inputs(graph)
    for name, value in evaluate(graph, inputs).items():
        assert np.array_equal(evaluate(again, inputs)[name], value, equal_nan=True)


TRICKY = (
    *("a b", "a/b:0", 'a"b', "a\\b", "ünï", "a: fp16[1]", "x = y", "f(b)", "a{b}", "a,b", "a\nb"),
    *("", "1a", "a.b", "}", "# x", "a) -> (b", '": fp16[3] = ', "a\u2028b", "fill(1)"),
)


def odd_graph(a, b):
    names = [f"{a}{i}" for i in range(3)] + [f"{b}{i}" for i in "cde"]
    last = Node(f"{a}&{b}", "add", (names[1], names[3]), (names[2],))
    nodes = (relu(b, names[0], names[1]), last)
    kinds = dict.fromkeys(names[:4], FP32)
    constants = {names[3]: Constant(FP32, X)}
    return Graph(a, (names[0],), (names[2], names[1]), nodes, kinds, constants)


@given(
    a=st.one_of(st.sampled_from(TRICKY), st.text(max_size=5)),
    b=st.one_of(st.sampled_from(TRICKY), st.text(max_size=5)).map(lambda text: f"{text}|"),
)
def test_text_round_trip_with_odd_names(a, b):
    graph = verify(odd_graph(a, b))
    again = from_text(to_text(graph))
    assert to_text(again) == to_text(graph)
    assert (again.name, again.nodes, again.outputs) == (graph.name, graph.nodes, graph.outputs)


@pytest.mark.parametrize(
    ("op", "shape", "attrs", "written"),
    [
        ("clip", (2,), {"low": -math.inf, "high": math.inf}, "{high = 1e999, low = -1e999}"),
        ("clip", (2,), {"low": 1e-7, "high": 6}, "{high = 6, low = 1e-07}"),
        ("clip", (2,), {"low": np.float32(0.5), "high": np.int64(6)}, "{high = 6, low = 0.5}"),
        ("reshape", (2,), {"shape": [2, np.int64(1)]}, "{shape = (2, 1)}"),
        ("reshape", (1,), {"shape": ()}, "{shape = ()}"),
        ("cast", (2,), {"dtype": "fp16", "round": "rint"}, "{dtype = 'fp16'}"),
        ("transpose", (2, 3), {"perm": None}, None),
        ("softmax", (2,), {"axis": -1}, None),
        ("reduce_sum", (2,), {"axis": 0, "keepdims": True}, "{axis = 0, keepdims = True}"),
        (
            "avg_pool2d",
            (1, 1, 4, 4),
            {"kernel": (2, 2), "pad": ((0, 0), (1, 1))},
            "{kernel = (2, 2), pad = ((0, 0), (1, 1))}",
        ),
    ],
)
def test_attributes_in_text(op, shape, attrs, written):
    net = GraphBuilder("g")
    net.output(net.add_node(op, net.input("x", shape), name="n", **attrs))
    graph = net.build()
    middle = f" {written}" if written else ""
    assert f"{op}(x){middle} n\n" in str(graph)
    assert from_text(str(graph)).nodes == graph.nodes


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("fp32", [1e20, -0.0, 1.5]),
        ("fp32", [math.inf, -math.inf, 0.0]),
        ("fp32", [10.0, -10.0, 20.05]),
        ("fp16", [65504.0, 6e-8, 0.1]),
        ("bf16", [1.0, 2.5, -3.0]),
        ("int32", [2**31 - 1, -(2**31), 0]),
        ("int8", [-128, 127, 0]),
        ("uint8", [0, 255, 1]),
    ],
)
def test_numbers_of_constants_survive_text_bit_for_bit(dtype, values):
    kind = TensorType((3,), dtype)
    made = Constant(kind, np.array(values)).array()
    graph = Graph("g", (), ("c",), (), {"c": kind}, {"c": Constant(kind, made)})
    found = from_text(str(graph)).constants["c"].array()
    assert found.dtype == made.dtype and found.tobytes() == made.tobytes()


@pytest.mark.parametrize("data", [Fill(3), Fill(-math.inf), Seeded(7), Seeded(7, 0.5, math.inf)])
def test_constants_by_rule_survive_text(data):
    graph = Graph("g", (), ("c",), (), {"c": FP32}, {"c": Constant(FP32, data)})
    assert from_text(str(graph)).constants["c"].data == data


HEAD = "graph g (x: fp16[2]) -> (y) {\n\n  "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y: fp16[2] = relu(x)", "line 3"),
        ("y: fp16[2] = relu(x) {a = } n", "line 3.*invalid syntax"),
        ("y: fp16[2] = relu(x) {a = b} n", "line 3"),
        ("y: fp16[2] = relu(x) {**x} n", "line 3"),
        ("y: fp16[2] = relu(x) {a = 1) + dict(b=2} n", "line 3.*key = literal"),
        ("y: fp16[2] = clip(x) {low = __import__('os')} n", "line 3"),
        ("y = relu(x) n", "line 3.*write name: type"),
        ("c: fp16[2] = [1, 2", "line 3.*delimiter"),
        ("c: fp16[2] = [1, 2, 3]", "line 3.*reshape"),
        ('c: fp16[2] = [1, "a"]', "line 3"),
        ("c: fp16[2] = data", "line 3.*pass data="),
        ("c: fp16[2] = zeros()", "line 3"),
        ("c: fp16[2] = seeded(1, 2, 3, 4)", "line 3"),
        ("c: fp16[2], d: fp16[2] = fill(1)", "line 3"),
        ("x: fp16[2] = fill(1)", "x twice"),
        ("y: fp16[3] = relu(x) n", r"y as fp16\[2\]"),
        ("y: half[2] = relu(x) n", "y: one of fp16"),
        ("", "output y; got nothing"),
    ],
)
def test_text_errors(body, message):
    with pytest.raises(GraphError, match=message):
        from_text(f"{HEAD}{body}\n}}\n")


@pytest.mark.parametrize(
    "text",
    ["", "relu(x)", "graph g () -> ()", "graph g () -> () {", 'graph "g () -> () {\n}', "{\n}"],
)
def test_text_without_head_or_end(text):
    with pytest.raises(GraphError, match="see to_text"):
        from_text(text)


# -- builder --------------------------------------------------------------------------------------
def test_builder_names_tensors_apart():
    net = GraphBuilder("g")
    x = net.input("x", (4,))
    first = net.relu(x)
    second = net.relu(x)
    one, two = net.split(second, sizes=(1, 3), axis=0, name="cut")
    assert [v.name for v in (first, second, one, two)] == ["relu", "relu_1", "cut", "cut_1"]
    net.output(one, two)
    net.output(first)
    assert net.build().outputs == ("cut", "cut_1", "relu")


def test_builder_methods_are_operators():
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (4, 4))
    y = net.max_(net.trans_data(x, layout="FRACTAL_NZ"), net.fill((4, 4), 2.0))
    assert y.type.dtype == "fp16" and y.shape == (4, 4)
    with pytest.raises(InputError, match="did you mean relu"):
        net.rel(x)
    with pytest.raises(AttributeError):
        _ = net._relu


def test_builder_refuses():
    net = GraphBuilder("g")
    x = net.input("x", (2, 3))
    with pytest.raises(GraphError, match="an output; got none"):
        net.build()
    with pytest.raises(GraphError, match="a new name; got x"):
        net.input("x", (2,))
    with pytest.raises(ShapeError, match="matmul"):
        net.matmul(x, x)
    with pytest.raises(TypeMismatchError, match=r"add: input . in fp32"):
        net.add(x, net.constant(np.zeros((2, 3), np.float16)))
    with pytest.raises(TypeMismatchError):
        net.constant(np.zeros(3, np.complex64))


def test_weights_differ_by_name_and_repeat():
    def weights(name):
        net = GraphBuilder(name)
        net.output(net.weight((50, 8, 3, 3)), net.weight((50, 8, 3, 3)))
        graph = net.build()
        return [graph.constants[n].array() for n in graph.outputs]

    one, two = weights("a")
    assert np.array_equal(one, weights("a")[0])
    assert not np.array_equal(one, two) and not np.array_equal(one, weights("b")[0])
    assert abs(one.std() - math.sqrt(2 / 72)) < 0.005


# -- evaluation -----------------------------------------------------------------------------------
def test_every_node_rounds_once():
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (1,))
    net.output(net.adds(net.adds(x, number=2048.0), number=-2048.0))
    found = evaluate(net.build(), {"x": np.array([0.7], np.float16)})
    assert next(iter(found.values())) == 0.0  # 2048.7 is 2048 in fp16


def test_evaluate_all_and_outputs_that_are_inputs():
    net = GraphBuilder("g")
    x = net.input("x", (2, 3))
    c = net.constant(X)
    net.output(x, c, net.add(x, c))
    graph = net.build()
    found = evaluate(graph, {"x": X})
    assert list(found) == ["x", "const", "add"]
    assert np.array_equal(found["add"], 2 * X)
    assert evaluate_all(graph, {"x": X}).keys() == graph.types.keys()


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({}, "missing \\['x'\\]"),
        ({"x": X, "z": X}, "unknown \\['z'\\]"),
        ({"x": X.T}, r"shape \(2, 3\).*\(3, 2\)"),
        ({"x": X.astype(str)}, "use numbers"),
        ({"x": X.astype(complex)}, "use numbers"),
    ],
)
def test_inputs_that_do_not_fit(given_, message):
    graph = verify(graph_of(relu("a", "x", "y")))
    with pytest.raises(InputError, match=message):
        evaluate(graph, given_)


def test_whole_inputs_are_range_checked():
    graph = verify(graph_of(outputs=("x",), types={"x": TensorType((2,), "int8")}))
    assert evaluate(graph, {"x": np.array([-128, 127])})["x"].dtype == np.int8
    with pytest.raises(InputError, match=r"within int8.*to 128"):
        evaluate(graph, {"x": np.array([0, 128])})
    with pytest.raises(InputError, match="use astype"):
        evaluate(graph, {"x": np.zeros(2)})


def lookup(rows=5):
    net = GraphBuilder("g")
    index = net.input("index", (40,), "int32")
    net.output(net.gather(net.constant(np.eye(rows, dtype=np.float32)), index))
    net.output(net.embedding(net.weight((3, 4)), index))
    return net.build()


def test_an_index_outside_names_the_node():
    with pytest.raises(GraphError, match=r"gather: .*from 0 to 4; got 5"):
        evaluate(lookup(), {"index": np.full(40, 5)})


def test_random_inputs_respect_every_reader_of_an_index():
    graph = lookup()
    found = random_inputs(graph)["index"]
    assert set(found) == {0, 1, 2}  # the embedding has three rows
    assert np.array_equal(found, random_inputs(graph)["index"])
    assert not np.array_equal(found, random_inputs(graph, 1)["index"])
    assert evaluate(graph, {"index": found})["gather"].shape == (40, 5)
