"""Export to ONNX: operators, random graphs and networks compute there what we evaluate."""

import itertools

import numpy as np
import onnx
import pytest
from graph_strategies import smooth_graphs, whole_graphs
from hypothesis import given, strategies as st
from onnx_models import assert_close, run_onnx

from ascend_lab.compiler import GraphBuilder, TensorType, evaluate, random_inputs, zoo
from ascend_lab.compiler.ir import Fill
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.onnx.export import export_onnx, save_onnx
from ascend_lab.compiler.onnx.export_writer import RULES
from ascend_lab.compiler.passes import convert
from ascend_lab.errors import UnsupportedError
from ascend_lab.operators import ops
from ascend_lab.operators.ops import verify
from ascend_lab.operators.ops.formats import format_of

# Training writes parameters and walks backwards; ONNX's operators for it are a preview domain.
WITHOUT_FORM = {
    "sgd_momentum", "adam", "conv2d_grad_weight", "max_pool2d_grad", "avg_pool2d_grad",
    "bn_training_reduce", "bn_training_update_grad",
}  # fmt: skip
WHOLE = ("int8", "int32")
# ONNX Runtime has no CPU kernel: bf16 nearly anywhere, ScatterND sums in fp16.
NOT_RUN = {("scatter_add", "fp16")}


def one_node(name, arrays, attrs):
    """Return a graph of one operator and its inputs by name."""
    net = GraphBuilder("one")
    values = [net.input(f"in{i}", a.shape, format_of(a)) for i, a in enumerate(arrays)]
    found = net.add_node(name, *values, **attrs)
    net.output(*(found if isinstance(found, tuple) else (found,)))
    return net.build(), {v.name: a for v, a in zip(values, arrays, strict=True)}


@pytest.mark.parametrize("name", [n for n in ops.OPERATORS if n not in WITHOUT_FORM])
def test_an_exported_operator_computes_the_same_there_and_imported_again(name):
    """In every format the operator takes, and in fp32, which graphs may hold; no CPU runs bf16."""
    operator = ops.get(name)
    whole = not {"fp16", "fp32", "bf16"} & set(operator.types.allowed)
    formats = dict.fromkeys(operator.types.allowed if whole else (*operator.types.allowed, "fp32"))
    runs = {d for d in ("fp16", *WHOLE) if (name, d) not in NOT_RUN} & set(operator.types.allowed)
    runs |= {"fp32"} if set(operator.types.allowed) - set(WHOLE) else set()
    for dtype, example in itertools.product(formats, operator.examples):
        attrs = dict(example.attrs)
        arrays = verify.sample(operator, example.shapes, dtype, attrs)
        graph, feed = one_node(name, arrays, attrs)
        model = export_onnx(graph)
        wanted = tuple(evaluate(graph, feed).values())
        if dtype in runs or (dtype == "bf16" and example is operator.examples[-1]):
            onnx.checker.check_model(model, full_check=True)
        if dtype in runs and not (name == "lrn" and attrs["size"] % 2 == 0):  # odd sizes there
            verify.check_within(operator, tuple(run_onnx(model, feed).values()), wanted)
        sizes = {one: graph.types[one].shape for one in graph.inputs}  # 0 is an open size
        again = import_onnx(model, shapes=sizes)
        assert (again.inputs, again.outputs) == (graph.inputs, graph.outputs)
        verify.check_within(operator, tuple(evaluate(again, feed).values()), wanted)


def test_every_operator_has_a_rule_or_is_refused_by_name():
    assert set(ops.OPERATORS) - set(RULES) == WITHOUT_FORM
    for name in WITHOUT_FORM:
        example = ops.get(name).examples[0]
        kind = ops.get(name).types.allowed[0]
        graph, _ = one_node(name, verify.sample(ops.get(name), example.shapes, kind, example.attrs),
                            example.attrs)  # fmt: skip
        with pytest.raises(UnsupportedError, match=f"node {name}.*got {name}"):
            export_onnx(graph)


@pytest.mark.parametrize("mode", ["rint", "floor", "ceil", "trunc"])
def test_casts_round_and_limit_as_ours_do(mode):
    values = np.array([-1e9, -129.5, -2.5, -1.5, -0.4, 0.5, 1.5, 2.6, 127.4, 255.5, 1e9], "f4")
    for dtype in ("int8", "uint8", "int32"):
        graph, feed = one_node("cast", [values], {"dtype": dtype, "round": mode})
        got = run_onnx(export_onnx(graph), feed)["cast"]
        np.testing.assert_array_equal(got, evaluate(graph, feed)["cast"])


@pytest.mark.parametrize("op", ["adds", "muls"])
def test_a_number_fp16_cannot_hold_is_not_rounded_first(op):
    x = np.linspace(-300, 300, 999, dtype=np.float32).astype(np.float16)
    for number in (0.5, 1 / 3, 0.1001):
        graph, feed = one_node(op, [x], {"number": number})
        got = run_onnx(export_onnx(graph), feed)[op]
        np.testing.assert_array_equal(got, evaluate(graph, feed)[op])


def test_int8_products_sum_in_int32():
    x = np.full((1, 8, 9, 9), -128, np.int8)
    weight = np.full((4, 8, 3, 3), -128, np.int8)
    bias = np.arange(4, dtype=np.int32) * 1000
    for name, arrays in (
        ("conv2d", (x, weight, bias)),
        ("matmul", (x[0, 0], x[0, 1])),
        ("conv_transpose2d", (x[:, :4], weight[:, :2], bias[:2])),
    ):
        graph, feed = one_node(name, arrays, {})
        got = run_onnx(export_onnx(graph), feed)[name]
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, evaluate(graph, feed)[name])


def test_an_int8_transposed_convolution_with_large_sums_is_refused():
    x = np.ones((1, 2048, 2, 2), np.int8)
    weight = np.ones((2048, 1, 1, 1), np.int8)
    with pytest.raises(UnsupportedError, match="conv_transpose2d"):
        export_onnx(one_node("conv_transpose2d", (x, weight), {})[0])


def test_outputs_that_are_inputs_constants_or_shared():
    net = GraphBuilder("net")
    x = net.input("x", (3,))
    y = net.relu(x, name="a name/with: signs")
    net.output(y, x, net.fill((2,), 7.0), net.adds(y, number=0.5))
    graph = net.build()
    feed = {"x": np.array([-1, 0, 2], np.float32)}
    model = export_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    got = run_onnx(model, feed)
    wanted = evaluate(graph, feed)
    assert list(got) == list(graph.outputs)
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value)


def test_names_of_helpers_do_not_clash_with_tensors_of_the_graph():
    net = GraphBuilder("net")
    x = net.input("fp32_constant", (3,))
    y = net.silu(net.adds(x, name="silu/Sigmoid", number=3.0), name="silu")
    net.output(net.adds(y, name="int64_constant", number=3.0))
    graph = net.build()
    feed = {"fp32_constant": np.arange(3, dtype=np.float32)}
    got = run_onnx(export_onnx(graph), feed)["int64_constant"]
    np.testing.assert_allclose(got, evaluate(graph, feed)["int64_constant"], rtol=1e-6)


def test_layout_changes_become_identities():
    net = GraphBuilder("net")
    x = net.input("x", (1, 3, 4, 4))
    net.output(net.relu(net.trans_data(x, layout="NC1HWC0")))
    model = export_onnx(net.build())
    assert [node.op_type for node in model.graph.node] == ["Identity", "Relu"]


def test_fills_can_be_nodes_so_that_files_stay_small(tmp_path):
    net = GraphBuilder("net")
    x = net.input("x", (1, 512))
    net.output(net.gemm(x, net.fill((512, 256), 0.25), net.fill((256,), 1.0)))
    graph = net.build()
    feed = {"x": np.ones((1, 512), np.float32)}
    for fill_nodes, least, most in ((False, 512 * 256 * 4, 600_000), (True, 100, 2000)):
        path = save_onnx(graph, tmp_path / "net.onnx", fill_nodes=fill_nodes)
        assert least < path.stat().st_size < most
        onnx.checker.check_model(onnx.load(path), full_check=True)
        np.testing.assert_array_equal(run_onnx(path.read_bytes(), feed)["gemm"], 129.0)


def test_models_beyond_what_a_file_holds_are_refused():
    net = GraphBuilder("big")
    weight = net.constant(Fill(1.0), TensorType((2**15, 2**14), "fp32"))
    net.output(net.reduce_sum(weight))
    with pytest.raises(UnsupportedError, match="bytes of constants"):
        export_onnx(net.build())
    assert len(export_onnx(net.build(), fill_nodes=True).SerializeToString()) < 1000


# -- random graphs, and networks ------------------------------------------------------------------
# Both sum fp32 products, in another order: errors grow with the largest number a graph holds.
RTOL = 2e-5


@given(whole_graphs() | smooth_graphs(), st.integers(0, 1000))
def test_random_graphs_agree_with_onnx_runtime_and_survive_the_way_back(graph, seed):
    graph, _ = convert(graph, "fp32", "fp16")
    feed = random_inputs(graph, seed)
    model = export_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    wanted = evaluate(graph, feed)
    again = import_onnx(model)
    assert_close(run_onnx(model, feed), wanted, RTOL, 1e-3)
    assert (again.inputs, again.outputs) == (graph.inputs, graph.outputs)
    assert_close(evaluate(again, feed), wanted, RTOL, 1e-3)


# Networks of the zoo, the transformers with fewer layers and words
QUICK = ("squeezenet", "mobilenet_v3_large", "bert_base")
NETWORKS = {
    "squeezenet": {},
    "mobilenet_v2": {},
    "mobilenet_v3_large": {},
    "shufflenet_v2": {},
    "efficientnet_b0": {},
    "inception_v1": {},
    "mobilevit_block": {},
    "bert_base": {"layers": 1, "vocabulary": 500, "length": 32},
    "gpt2_small": {"layers": 1, "vocabulary": 500, "length": 32},
    "vit_b16": {"layers": 1},
}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in NETWORKS]
)
def test_networks_agree_with_onnx_runtime_before_and_after_the_way_back(name):
    """fp32 sums of up to thousands of products: 1e-5 of the largest output."""
    graph = zoo.build(name, **NETWORKS[name])
    model = export_onnx(graph)
    feed = random_inputs(graph)
    wanted = run_onnx(model, feed)
    again = import_onnx(model)
    assert (again.inputs, again.outputs) == (graph.inputs, graph.outputs)
    for found in (evaluate(graph, feed), evaluate(again, feed)):
        for key, value in wanted.items():
            limit = 1e-5 * float(np.abs(value).max())
            np.testing.assert_allclose(found[key], value, rtol=0, atol=limit)
