"""The importer: light models, symbolic sizes, folding, types; values against ONNX Runtime."""

import tracemalloc
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, helper
from onnx_models import (
    BOOL,
    INT64,
    LIGHT,
    assert_close,
    model_of,
    one_node,
    run_onnx,
    with_random_weights,
)

from ascend_lab.compiler import evaluate, random_inputs
from ascend_lab.compiler.ir import Fill
from ascend_lab.compiler.onnx import (
    CONVERTERS,
    NeedsConstant,
    converter,
    import_model,
    import_onnx,
)
from ascend_lab.compiler.onnx.model_file import signature
from ascend_lab.compiler.passes import run_passes
from ascend_lab.errors import GraphError, InputError, UnsupportedError

LIGHT_MODELS = {
    "bvlc_alexnet": (22, 60_965_224),
    "densenet121": (668, 8_146_152),
    "inception_v1": (142, 6_998_552),
    "inception_v2": (371, 11_234_792),
    "resnet50": (176, 25_610_152),
    "shufflenet": (203, 1_420_152),
    "squeezenet": (67, 1_235_496),
    "vgg19": (44, 143_667_240),
    "zfnet512": (22, 87_250_536),
}
"""Nodes of the graph and numbers in its weights."""
SLOW = (
    pytest.param(n, marks=pytest.mark.full) for n in ("inception_v1", "inception_v2", "resnet50")
)
RUN = ("densenet121", "shufflenet", "squeezenet", *SLOW)
"""Those whose weights, drawn anew and held twice, fit a small machine's memory."""


def path_of(name):
    return LIGHT / f"light_{name}.onnx"


def compare(model, inputs, rtol=1e-5, **how):
    """Assert that a model computes what ONNX Runtime does, up to rtol of the largest value."""
    found = import_model(model, **how)
    got = evaluate(found.graph, {name: inputs[name] for name in found.graph.inputs})
    wanted = run_onnx(model, inputs)
    types = {name: str(want.dtype).replace("float64", "double") for name, want in wanted.items()}
    assert {name: found.output_types[name] for name in wanted} == types
    assert_close(got, wanted, rtol)
    return found.graph


# -- the nine light models ------------------------------------------------------------------------
@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_a_light_model_becomes_a_graph(name):
    graph = import_onnx(path_of(name))
    assert (len(graph.nodes), graph.parameter_count) == LIGHT_MODELS[name]
    model = onnx.load(path_of(name))
    kinds = Counter(node.op_type for node in model.graph.node)
    ours = Counter(node.op for node in graph.nodes)
    same = {"Conv": "conv2d", "Gemm": "gemm", "MaxPool": "max_pool2d", "Softmax": "softmax",
            "BatchNormalization": "batch_norm", "Concat": "concat", "Relu": "relu"}  # fmt: skip
    assert {op: ours[op] for op in same.values()} == {op: kinds[o] for o, op in same.items()}


@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_shapes_and_names_are_those_the_standard_infers(name):
    graph = import_onnx(path_of(name))
    inferred = onnx.shape_inference.infer_shapes(onnx.load(path_of(name))).graph
    compared = 0
    for entry in (*inferred.value_info, *inferred.output, *inferred.input):
        if entry.name in graph.types:
            sizes = tuple(d.dim_value for d in entry.type.tensor_type.shape.dim)
            assert graph.types[entry.name].shape == sizes, entry.name
            compared += 1
    assert compared > 0.6 * len(graph.nodes)
    assert graph.outputs == tuple(entry.name for entry in inferred.output)


@pytest.mark.parametrize("name", RUN)
def test_a_light_model_with_drawn_weights_computes_what_onnx_runtime_does(name):
    model = with_random_weights(path_of(name))
    inputs = random_inputs(import_onnx(model), seed=1)
    graph = compare(model, inputs, rtol=3e-5)
    after = evaluate(run_passes(graph)[0], inputs)
    assert_close(after, run_onnx(model, inputs), 3e-5)


def test_the_weights_of_the_largest_model_are_never_made_while_importing():
    import_onnx(path_of("zfnet512"))  # what is imported once, is so
    tracemalloc.start()
    graph = import_onnx(path_of("vgg19"))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4e6
    large = [c for c in graph.constants.values() if c.type.elements > 1e6]
    assert len(large) > 5 and all(isinstance(c.data, Fill) for c in large)


# -- names, types, sizes --------------------------------------------------------------------------
def test_names_are_the_models_and_never_taken_by_helpers():
    nodes = "mul: Mish x -> tanh; Identity tanh -> softplus; Relu softplus -> y"
    model = model_of(nodes, {"x": (2, 3)}, ["y", "softplus"], opset=18)
    graph = compare(model, {"x": np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3)})
    assert graph.inputs == ("x",) and graph.outputs == ("y", "softplus")
    assert graph.producers["tanh"].name == "mul" and graph.producers["y"].op == "relu"


def test_a_symbolic_size_names_the_input_and_the_argument():
    model = model_of("Relu x -> y", {"x": ("N", 3, "side")}, ["y"])
    with pytest.raises(UnsupportedError, match=r"input x.*got \[N, 3, side\].*shapes=\{'x':"):
        import_onnx(model)
    first = model_of("Relu x -> y", {"x": ("N", 3)}, ["y"])
    with pytest.raises(UnsupportedError, match=r"\(1, 3\)\} or batch=1"):
        import_onnx(first, shapes={})
    assert import_onnx(model, shapes={"x": (2, 3, 5)}).types["y"].shape == (2, 3, 5)
    with pytest.raises(UnsupportedError, match="side"):
        import_onnx(model, batch=4)
    with pytest.raises(InputError, match=r"input x: a size of 3 at axis 1 .*got 4"):
        import_onnx(model, shapes={"x": (2, 4, 5)})
    with pytest.raises(InputError, match="an input of the model"):
        import_onnx(model, shapes={"z": (2, 3, 5)})


def test_whole_and_logical_types_come_back():
    nodes = (
        "Greater x limit -> above; And above mask -> both; Cast both -> count to=INT64; "
        "Where both x limit -> y"
    )
    entries = {"x": (4,), "mask": ((4,), BOOL)}
    model = model_of(nodes, entries, ["both", "count", "y"], {"limit": np.float32(0.5)})
    found = import_model(model)
    assert found.input_types == {"x": "float32", "mask": "bool"}
    assert found.output_types == {"both": "bool", "count": "int64", "y": "float32"}
    x = np.array([0, 1, 2, 0.5], np.float32)
    compare(model, {"x": x, "mask": np.array([True, False, True, True])})


def test_doubles_and_64_bit_constants_are_refused_and_sums_beyond_32_bits_are_exact():
    x = np.ones(3)
    with pytest.raises(UnsupportedError, match="double"):
        import_onnx(one_node("Relu", {"x": x}))
    total = one_node("Add", {"a": x.astype(np.int64), "b": x.astype(np.int64)})
    compare(total, {"a": np.array([1, -2, 3]), "b": np.array([2**31 - 2, 5, -(2**31)])})
    compare(total, {"a": np.full(3, 2**31 - 1), "b": np.array([2, 2**40, -(2**50)])})
    with pytest.raises(GraphError, match=r"^the_node: int64 .* 64 bits; got .* to 1.*e.19"):
        evaluate(import_onnx(total), {"a": np.full(3, 2**63 - 1), "b": np.full(3, 2**62)})
    model = model_of("Max x big -> y", {"x": ((1,), INT64)}, ["y"], {"big": np.array([2**40])})
    with pytest.raises(UnsupportedError, match=f"32 bits; got {2**40}"):
        import_onnx(model)


# -- folding --------------------------------------------------------------------------------------
def shape_arithmetic():
    """(n, c, h, w) -> (n, c, h w): as exporters write x.reshape(n, c, -1) and transpose."""
    return (
        "Shape x -> shape; Gather shape zero -> n; Gather shape one -> c; "
        "Unsqueeze n axis -> n1; Unsqueeze c axis -> c1; Concat n1 c1 rest -> wanted axis=0; "
        "Reshape x wanted -> y"
    )


NUMBERS = {"zero": np.array(0), "one": np.array(1), "axis": np.array([0]), "rest": np.array([-1])}


def test_shape_arithmetic_leaves_one_node():
    model = model_of(shape_arithmetic(), {"x": ("N", 3, 4, 5)}, ["y"], NUMBERS)
    graph = import_onnx(model, batch=2)
    assert [node.op for node in graph.nodes] == ["reshape"]
    assert graph.types["y"].shape == (2, 3, 20)
    assert not graph.constants


def test_ranges_divisions_and_casts_fold():
    nodes = (
        "Shape x -> shape; Gather shape one -> c; Range zero c one -> r; Cast r -> rf to=1; "
        "Div minus two -> half; Cast half -> hf to=1; Mul rf hf -> table; Add x table -> y"
    )
    weights = {"one": np.array(1), "zero": np.array(0), "minus": np.array(-7), "two": np.array(2)}
    model = model_of(nodes, {"x": (2, 4)}, ["y"], weights)
    graph = compare(model, {"x": np.zeros((2, 4), np.float32)})
    assert [node.op for node in graph.nodes] == ["add"]
    (table,) = graph.constants.values()
    assert table.array().tolist() == [0, -3, -6, -9]


def test_a_reshaped_fill_stays_a_fill():
    nodes = (
        "ConstantOfShape s -> w value=FLOAT:0.25; Unsqueeze w axis -> w1; Reshape w1 flat -> w2; "
        "Expand w2 wide -> w3; MatMul x w3 -> y"
    )
    weights = {"s": np.array([2000, 3000]), "axis": np.array([0]), "flat": np.array([3000, 2000]),
               "wide": np.array([5, 3000, 2000])}  # fmt: skip
    graph = import_onnx(model_of(nodes, {"x": (1, 3000)}, ["y"], weights))
    assert graph.constants["w3"].data == Fill(0.25)
    assert [node.op for node in graph.nodes] == ["batch_matmul"]


def test_a_shape_that_is_an_input_is_pinned():
    model = model_of("Reshape x shape -> y", {"x": (2, 6), "shape": ((2,), INT64)}, ["y"])
    with pytest.raises(NeedsConstant) as refused:
        import_onnx(model)
    assert refused.value.names == ("shape",)
    graph = import_onnx(model, pinned={"shape": np.array([3, -1])})
    assert graph.inputs == ("x",) and graph.types["y"].shape == (3, 4)
    with pytest.raises(InputError, match="to pin"):
        import_onnx(model, pinned={"w": np.array([3, -1])})


def test_an_end_beyond_all_sizes_is_clamped_and_backward_slices_gather():
    weights = {"s": np.array([1, -1]), "e": np.array([2**63 - 1, -(2**63)]),
               "a": np.array([0, 1]), "p": np.array([1, -2])}  # fmt: skip
    model = model_of("Slice x s e a p -> y", {"x": (3, 5)}, ["y"], weights)
    graph = compare(model, {"x": np.arange(15, dtype=np.float32).reshape(3, 5)})
    assert [n.op for n in graph.nodes] == ["slice", "gather"]


# -- weights --------------------------------------------------------------------------------------
def test_external_data_are_read_when_asked_for(tmp_path):
    weight = np.arange(6000, dtype=np.float32).reshape(3, 2000)
    model = model_of("MatMul x w -> y", {"x": (2, 3)}, ["y"],
                     {"w": weight, "unused": np.ones(2000, np.float32)})  # fmt: skip
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    graph = import_onnx(path)
    assert callable(graph.constants["w"].data)
    np.testing.assert_array_equal(graph.constants["w"].array(), weight)
    x = {"x": np.ones((2, 3), np.float32)}
    np.testing.assert_array_equal(evaluate(graph, x)["y"], x["x"] @ weight)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InputError, match=r"a file weights\.bin"):
        import_onnx(path)


# -- refusals -------------------------------------------------------------------------------------
def test_an_unknown_operator_is_refused_before_any_work_with_near_names():
    nodes = "Relu x -> a; n: Softmux a -> y"
    with pytest.raises(
        UnsupportedError, match=r"node n: one of the \d+ ONNX operators.*Softmux.*Softmax"
    ):
        import_onnx(model_of(nodes, {"x": ("N",)}, ["y"]))
    foreign = model_of("Relu x -> y", {"x": (1,)}, ["y"])
    foreign.graph.node[0].domain = "com.example"
    with pytest.raises(UnsupportedError, match=r"com\.example\.Relu"):
        import_onnx(foreign)


def test_an_attribute_that_is_not_understood_is_refused():
    model = one_node("Relu", {"x": np.ones(3, np.float32)}, slope=2.0)
    with pytest.raises(UnsupportedError, match=r"the_node \(Relu\): attributes none; got slope"):
        import_onnx(model)
    model = one_node("LeakyRelu", {"x": np.ones(3, np.float32)}, alpha=2)
    with pytest.raises(GraphError, match="attribute alpha"):
        import_onnx(model)


def test_indices_of_the_maximum_are_refused_only_if_read():
    text = "MaxPool x -> y where kernel_shape=[2,2] dilations=[1,1]"
    assert len(import_onnx(model_of(text, {"x": (1, 1, 4, 4)}, ["y"])).nodes) == 1


def test_every_converter_states_versions_and_arity():
    assert len(CONVERTERS) > 100
    for name, how in CONVERTERS.items():
        says = signature(name, max(how.since, defs.get_schema(name).since_version))
        assert (
            how.op == name and how.types and says is not None and says.min_inputs <= says.max_inputs
        )


def test_an_operator_of_ones_own_domain_reaches_its_converter():
    nodes = [
        helper.make_node("Scaled", ["x"], ["a"], name="own", domain="my.lab", factor=3.0),
        helper.make_node("Exp", ["a"], ["y"], name="exp"),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (4,)) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "own", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.lab", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    with pytest.raises(UnsupportedError, match=r'register one: @converter\("my.lab.Scaled"\)'):
        import_onnx(model)
    try:

        @converter("my.lab.Scaled")
        def scaled(ctx):
            return ctx.emit("muls", ctx.input(0), number=ctx.attr("factor"))

        imported = import_onnx(model)
    finally:
        CONVERTERS.pop("my.lab.Scaled", None)
    (y,) = evaluate(imported, {"x": np.arange(4, dtype=np.float32)}).values()
    np.testing.assert_allclose(y, np.exp(3.0 * np.arange(4)), rtol=1e-6)
