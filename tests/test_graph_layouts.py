"""Which layout every tensor gets, where conversions stand, and which are taken out again."""

from dataclasses import replace

import numpy as np
import pytest
from graph_strategies import whole_graphs, whole_inputs
from hypothesis import given

from ascend_lab.compiler import Graph, GraphBuilder, Node, TensorType, evaluate, run_compiled
from ascend_lab.compiler.aliases import keeps_addresses, view_nodes
from ascend_lab.compiler.ir import to_text, verify
from ascend_lab.compiler.layout import assign_layouts, cancel_trans_data
from ascend_lab.compiler.lower import packed
from ascend_lab.compiler.tasks import compile_tasks
from ascend_lab.compiler.text_form import from_text
from ascend_lab.compiler.values import run_tasks
from ascend_lab.machine.chip import load_chip

TOY = load_chip("Toy")


def conversions(graph):
    return [(n.inputs[0], n.attr("layout")) for n in graph.nodes if n.op == "trans_data"]


def compiled(graph, inputs):
    return run_tasks(compile_tasks(graph, TOY, [(node,) for node in graph.nodes]), inputs)


# -- by hand --------------------------------------------------------------------------------------
CONV = """graph conv (x: fp16[1, 3, 8, 8]) -> (s) {
  w: fp16[20, 3, 3, 3] = seeded(1, 1.0, 0.0)
  c: fp16[1, 20, 8, 8] = conv2d(x, w) {pad = 1} c
  r: fp16[1, 20, 8, 8] = relu(c) r
  p: fp16[1, 20, 4, 4] = max_pool2d(r) {kernel = 2, stride = 2} p
  f: fp16[1, 320] = reshape(p) {shape = (1, -1)} f
  v: fp16[320, 10] = seeded(2, 0.1, 0.0)
  m: fp16[1, 10] = matmul(f, v) m
  s: fp16[1, 10] = softmax(m) s
}
"""

CONV_LAID_OUT = """graph conv (x: fp16[1, 3, 8, 8]) -> (s) {
  w: fp16[20, 3, 3, 3] = seeded(1, 1.0, 0.0)
  v: fp16[320, 10] = seeded(2, 0.1, 0.0)
  x.NC1HWC0: fp16[1, 3, 8, 8]@NC1HWC0 = trans_data(x) {layout = 'NC1HWC0'} x.NC1HWC0
  c: fp16[1, 20, 8, 8]@NC1HWC0 = conv2d(x.NC1HWC0, w) {pad = 1} c
  r: fp16[1, 20, 8, 8]@NC1HWC0 = relu(c) r
  p: fp16[1, 20, 4, 4]@NC1HWC0 = max_pool2d(r) {kernel = 2, stride = 2} p
  p.ND: fp16[1, 20, 4, 4] = trans_data(p) {layout = 'ND'} p.ND
  f: fp16[1, 320] = reshape(p.ND) {shape = (1, -1)} f
  f.FRACTAL_NZ: fp16[1, 320]@FRACTAL_NZ = trans_data(f) {layout = 'FRACTAL_NZ'} f.FRACTAL_NZ
  m: fp16[1, 10]@FRACTAL_NZ = matmul(f.FRACTAL_NZ, v) m
  m.ND: fp16[1, 10] = trans_data(m) {layout = 'ND'} m.ND
  s: fp16[1, 10] = softmax(m.ND) s
}
"""


def test_a_small_network_by_hand():
    assert to_text(assign_layouts(from_text(CONV))) == CONV_LAID_OUT
    assert to_text(cancel_trans_data(from_text(CONV_LAID_OUT))) == CONV_LAID_OUT


def test_without_following_every_cube_operator_pays_both_ways():
    lonely = assign_layouts(from_text(CONV), follow=False)
    assert conversions(lonely) == [
        ("x", "NC1HWC0"),
        ("c", "ND"),
        ("r", "NC1HWC0"),
        ("p", "ND"),
        ("f", "FRACTAL_NZ"),
        ("m", "ND"),
    ]
    inputs = {"x": np.ones((1, 3, 8, 8), np.float16)}
    found = [evaluate(g, inputs)["s"] for g in (lonely, from_text(CONV), from_text(CONV_LAID_OUT))]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_a_conversion_serves_all_readers_and_is_never_undone():
    graph = from_text("""graph g (x: fp16[1, 16, 4, 4]) -> (y, z) {
  w: fp16[16, 16, 1, 1] = seeded(1, 1.0, 0.0)
  a: fp16[1, 16, 4, 4] = conv2d(x, w) a
  b: fp16[1, 16, 4, 4] = conv2d(x, w) b
  y: fp16[1, 16, 4, 4] = add(a, x) y
  z: fp16[1, 16, 4, 4] = transpose(x) {perm = (0, 1, 3, 2)} z
}
""")
    laid = assign_layouts(graph)
    assert conversions(laid) == [("x", "NC1HWC0"), ("y", "ND")]
    assert laid.node("y").inputs == ("a", "x.NC1HWC0") and laid.node("z").inputs == ("x",)
    assert laid.outputs == ("y.ND", "z")


@pytest.mark.parametrize(
    ("other", "layout"),
    [
        ((1, 17, 4, 4), "NC1HWC0"),
        ((1, 17, 1, 1), "NC1HWC0"),
        ((1, 17, 1, 4), "NC1HWC0"),
        ((1, 1, 4, 4), "ND"),
        ((1, 1, 1, 1), "ND"),
        ((17, 1, 1), "ND"),
        ((4,), "ND"),
    ],
)
def test_what_elementwise_work_follows_beside_another_activation(other, layout):
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (1, 17, 4, 4))
    z = net.input("z", other)
    net.output(net.mul(net.max_pool2d(x, kernel=1), z, name="y"))
    assert assign_layouts(net.build()).types["y"].layout == layout


@pytest.mark.parametrize(
    "shape", [(), (1,), (4,), (4, 4), (17, 1, 1), (1, 17, 1, 1), (1, 1, 4, 4), (1, 17, 4, 4)]
)
def test_constants_follow_every_shape(shape):
    net = GraphBuilder("g", "fp16")
    x = net.max_pool2d(net.input("x", (1, 17, 4, 4)), kernel=1)
    data = (np.arange(int(np.prod(shape))) % 5 - 2).reshape(shape).astype(np.float16)
    net.output(net.sub(net.constant(data), x, name="y"))
    laid = assign_layouts(net.build())
    assert laid.types["y"].layout == "NC1HWC0" and len(conversions(laid)) == 2
    inputs = {"x": np.arange(272).reshape(1, 17, 4, 4).astype(np.float16)}
    assert np.array_equal(compiled(laid, inputs)["y.ND"], data - inputs["x"])


@pytest.mark.parametrize("op", ["avg_pool2d", "max_pool2d", "relu"])
@pytest.mark.parametrize("shape", [(2, 20, 3, 2), (3, 17, 5, 5), (2, 40, 4, 4)])
def test_pools_do_the_same_to_blocks_in_any_order(op, shape):
    """In C1NHWC0 the first block of the second image stands where NC1HWC0 has the ragged one."""
    net = GraphBuilder("g", "fp16")
    how = {} if op == "relu" else {"kernel": 2, "stride": 1}
    net.output(getattr(net, op)(net.input("x", shape), **how))
    graph = net.build()
    types = {name: replace(kind, layout="C1NHWC0") for name, kind in graph.types.items()}
    inputs = {"x": np.random.default_rng(0).integers(-3, 4, shape).astype(np.float16)}
    (wanted,) = evaluate(graph, inputs).values()
    for name in ("Ascend310", "Ascend910B2"):
        compiled_graph = compile_tasks(replace(graph, types=types), load_chip(name), [graph.nodes])
        (found,) = run_tasks(compiled_graph, inputs).values()
        np.testing.assert_allclose(found, wanted, atol=2**-9)


@pytest.mark.parametrize("kind", ["conv2d", "conv_transpose2d", "max_pool2d", "global_avg_pool"])
def test_an_image_may_be_a_constant(kind):
    """A model's output is not folded: its kernel reads a constant image, in blocks as any other."""
    net = GraphBuilder("g", "fp16")
    image = net.constant((np.arange(3 * 17 * 16) % 5 - 2).reshape(3, 17, 4, 4).astype(np.float16))
    if kind == "max_pool2d":
        y = net.max_pool2d(image, kernel=2)
    elif kind == "global_avg_pool":
        y = net.global_avg_pool(image)
    else:
        shape = (5, 17, 1, 1) if kind == "conv2d" else (17, 5, 2, 2)
        y = getattr(net, kind)(image, net.constant(np.ones(shape, np.float16)))
    net.output(y, net.relu(net.input("x", (1, 4))))
    graph = net.build()
    inputs = {"x": np.ones((1, 4), np.float16)}
    wanted = evaluate(graph, inputs)[y.name]
    for name in ("Ascend310", "Ascend910B2"):
        found = run_compiled(graph, inputs, name)[y.name]
        np.testing.assert_allclose(found, wanted, rtol=2**-9, atol=2**-9)


def test_matrices_follow_where_no_column_pads_or_zeros_stay():
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (5, 8))
    net.output(net.exp(net.matmul(x, net.weight((8, 32))), name="whole"))
    net.output(net.exp(net.matmul(x, net.weight((8, 33))), name="ragged"))
    net.output(net.log(net.matmul(x, net.weight((8, 16))), name="unsafe"))
    net.output(net.add(net.matmul(x, net.weight((8, 33))), net.weight((33,)), name="sum"))
    laid = assign_layouts(net.build())
    found = {name: laid.types[name].layout for name in ("whole", "ragged", "unsafe", "sum")}
    assert found == {"whole": "FRACTAL_NZ", "ragged": "ND", "unsafe": "ND", "sum": "FRACTAL_NZ"}


def test_products_choose_by_how_their_operands_are_stored():
    net = GraphBuilder("g", "fp16")
    a = net.input("a", (16, 32))
    b = net.input("b", (32, 16))
    net.output(net.matmul(a, b), net.matmul(b, a, trans_a=True, trans_b=True))
    laid = assign_layouts(net.build())
    back = [("matmul", "ND"), ("matmul_1", "ND")]
    assert conversions(laid) == [("a", "FRACTAL_NZ"), ("b", "FRACTAL_ZN"), *back]
    assert laid.node("matmul_1").inputs == ("b.FRACTAL_ZN", "a.FRACTAL_NZ")


def test_int8_cast_from_half_has_blocks_of_16():
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (1, 40, 4, 4))
    y = net.cast(net.max_pool2d(x, kernel=1), dtype="int8", name="low")
    w = net.constant(np.ones((8, 40, 1, 1), np.int8))
    net.output(net.conv2d(y, w, name="sums"))
    laid = assign_layouts(net.build())
    assert laid.types["low"].layout == "NC1HWC0:16"
    assert laid.node("sums").inputs[0] == "low.NC1HWC0"
    assert laid.types["low"].stored_shape == (1, 3, 4, 4, 16)
    assert laid.types["low.NC1HWC0"].stored_shape == (1, 2, 4, 4, 32)
    inputs = {"x": np.ones((1, 40, 4, 4), np.float16)}
    assert (compiled(laid, inputs)[laid.outputs[0]] == 40).all()


def test_names_of_conversions_do_not_clash():
    kind = TensorType((1, 16, 2, 2), "fp16")
    nodes = (
        Node("x.NC1HWC0", "relu", ("x",), ("x.NC1HWC0",)),
        Node("y", "max_pool2d", ("x",), ("y",), {"kernel": 1}),
        Node("z", "add", ("y", "x.NC1HWC0"), ("z",)),
    )
    names = ("x", "x.NC1HWC0", "y", "z")
    graph = verify(Graph("g", ("x",), ("z",), nodes, dict.fromkeys(names, kind)))
    laid = verify(assign_layouts(graph))
    inputs = {"x": np.arange(-32, 32).reshape(kind.shape).astype(np.float16)}
    (got,) = compiled(laid, inputs).values()
    assert np.array_equal(got, inputs["x"] + np.maximum(inputs["x"], 0))


# -- random graphs --------------------------------------------------------------------------------
@given(graph=whole_graphs(most=8))
def test_layouts_change_no_value(graph):
    laid = assign_layouts(graph)
    lonely = assign_layouts(graph, follow=False)
    short = cancel_trans_data(laid)
    inputs = whole_inputs(graph)
    wanted = list(evaluate(graph, inputs).values())
    for found in (laid, lonely, short):
        verify(found)
        got = list(evaluate(found, inputs).values())
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, wanted, strict=True))
        assert all(found.types[n].layout == "ND" for n in (*found.inputs, *found.outputs))
    assert len(conversions(short)) <= len(conversions(laid))


def cleaned(graph):
    """Return how many conversions only refill padding."""
    return sum(
        graph.types[n.inputs[0]].layout == graph.types[n.output].layout
        for n in graph.nodes
        if n.op == "trans_data"
    )


@given(graph=whole_graphs(most=8))
def test_padding_is_refilled_only_between_products(graph):
    laid = assign_layouts(graph)
    for node in laid.nodes:
        same = node.op == "trans_data" and (
            laid.types[node.inputs[0]].layout == laid.types[node.output].layout
        )
        if same:
            assert "matmul" in laid.producers[node.inputs[0]].op
            assert "matmul" in "".join(r.op for r in laid.readers[node.output])
    assert cleaned(assign_layouts(from_text(CONV))) == 0


# -- cancelling -----------------------------------------------------------------------------------
def chain(*layouts, shape=(32, 32)):
    net = GraphBuilder("g", "fp16")
    x = net.input("x", shape)
    for layout in layouts:
        x = net.trans_data(x, layout=layout)
    net.output(net.neg(x) if x.type.layout == "ND" else x)
    return net.build()


@pytest.mark.parametrize(
    ("layouts", "shape", "left"),
    [
        (("FRACTAL_NZ", "ND"), (32, 32), []),
        (("FRACTAL_NZ", "FRACTAL_ZN", "FRACTAL_NZ"), (32, 32), ["FRACTAL_NZ"]),
        (("FRACTAL_NZ", "ND", "FRACTAL_ZN"), (32, 32), ["FRACTAL_ZN"]),
        (("FRACTAL_NZ", "ND"), (5, 7), []),
        (("NC1HWC0", "FRACTAL_NZ"), (1, 5, 7, 3), ["FRACTAL_NZ"]),
    ],
)
def test_chains_become_one_conversion(layouts, shape, left):
    graph = chain(*layouts, shape=shape)
    short = cancel_trans_data(graph)
    assert [layout for _, layout in conversions(short)] == left
    inputs = {"x": np.arange(np.prod(shape)).reshape(shape).astype(np.float16)}
    assert [v.tolist() for v in evaluate(short, inputs).values()] == [
        v.tolist() for v in evaluate(graph, inputs).values()
    ]
    (got,) = compiled(short, inputs).values()
    (wanted,) = evaluate(graph, inputs).values()
    assert np.array_equal(got, wanted)


def test_there_and_back_stays_where_it_refills_padding():
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (5, 7))
    there = net.trans_data(x, layout="FRACTAL_NZ")
    back = net.trans_data(net.trans_data(there, layout="ND"), layout="FRACTAL_NZ")
    net.output(net.trans_data(net.neg(x), layout="ND"), back)
    short = cancel_trans_data(net.build())
    # x itself never had fractals: from it there is one way to them, and it is shared
    assert conversions(short) == [("x", "FRACTAL_NZ")]
    padded = Node("again", "trans_data", ("t",), ("again",), {"layout": "FRACTAL_NZ"})
    kind = TensorType((5, 7), "fp16", "FRACTAL_NZ")
    alone = Graph("g", ("t",), ("again",), (padded,), {"t": kind, "again": kind})
    assert cancel_trans_data(alone) is alone and padded.name not in view_nodes(alone)
    full = {n: replace(kind, shape=(16, 32)) for n in ("t", "again")}
    whole = replace(alone, types=full)
    assert padded.name in view_nodes(whole) and not cancel_trans_data(whole).nodes


def test_equal_conversions_are_merged():
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (5, 7))
    one, two = (net.trans_data(x, layout="FRACTAL_NZ") for _ in range(2))
    net.output(net.add(net.trans_data(one, layout="ND"), net.trans_data(two, layout="ND")))
    short = cancel_trans_data(net.build())
    assert not conversions(short) and short.node("add").inputs == ("x", "x")


# -- views ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "one", "two", "same"),
    [
        ((2, 64, 1, 1), "NC1HWC0", "ND", True),
        ((2, 17, 1, 1), "NC1HWC0", "ND", False),
        ((2, 64, 2, 1), "NC1HWC0", "ND", False),
        ((2, 16, 5, 3), "NC1HWC0", "NHWC", True),
        ((16, 16), "FRACTAL_NZ", "ND", True),
        ((64, 16), "FRACTAL_NZ", "ND", True),
        ((16, 32), "FRACTAL_NZ", "ND", False),
        ((16, 32), "FRACTAL_NZ", "FRACTAL_ZZ", True),
        ((5, 32), "FRACTAL_NZ", "FRACTAL_ZZ", False),
        ((32, 32), "FRACTAL_NZ", "FRACTAL_NZ", True),
        ((5, 16), "FRACTAL_NZ", "FRACTAL_NZ", False),
    ],
)
def test_conversions_that_only_rename(shape, one, two, same):
    types = [TensorType(shape, "fp16", layout) for layout in (one, two)]
    assert keeps_addresses(*types) is keeps_addresses(*types[::-1]) is same
    if same:
        array = np.arange(np.prod(shape)).reshape(shape).astype(np.float16)
        assert np.array_equal(*(packed(kind, array) for kind in types))
