"""Operators as exporters write them, numbers that are rare, and refusals by name.

Random nodes of every operator stand in test_onnx_witnesses.py, the standard's own cases in
test_onnx_backend.py.
"""

import math

import numpy as np
import pytest
from onnx_models import INT64, assert_close, model_of, one_node, run_onnx

from ascend_lab.compiler import evaluate, run_compiled
from ascend_lab.compiler.onnx import backend as onnx_backend, import_model, import_onnx
from ascend_lab.errors import AscendLabError, UnsupportedError


def one_of(op, arrays, attrs, opset=23):
    outputs = {"TopK": 2, "RNN": 2, "GRU": 2, "LSTM": 3, "Split": 3}.get(op, 1)
    feed = {f"in{i}": array for i, array in enumerate(arrays)}
    return one_node(op, feed, opset, outputs, **attrs), feed


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "message"),
    [
        ("Attention", [(1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)], {}, "heads in groups of 2"),
        ("Attention", [(1, 2, 4)] * 3, {"q_num_heads": 3, "kv_num_heads": 3}, "divide the width"),
        ("LSTM", [(2, 1, 3), (1, 8, 3), (1, 8, 2)], {"input_forget": 1}, "input_forget"),
        ("RNN", [(2, 1, 3), (1, 2, 3), (1, 2, 2)], {"activations": ["Softsign"]}, "activations"),
        ("LpNormalization", [(3,)], {"p": 3}, "p of 1 or 2"),
        ("DFT", [(2, 3, 3)], {}, "a signal axis"),
        ("Hardmax", [(2, 3)], {"axis": 2}, "an axis of a tensor of 2 axes"),
        ("LpPool", [(1, 1, 4, 4)], {"kernel_shape": [2, 2], "ceil_mode": 1}, "ceil_mode"),
        ("SoftmaxCrossEntropyLoss", [(2, 3), (2,)], {"reduction": "max"}, "reduction"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(op, shapes, attrs, message):
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    if op == "SoftmaxCrossEntropyLoss":
        arrays[1] = arrays[1].astype(np.int64)
    with pytest.raises(UnsupportedError, match=rf"\({op}\).*{message}"):
        onnx_backend.prepare(one_of(op, arrays, attrs)[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_deviations_keep_their_digits_beside_a_large_mean(dtype):
    """E[x^2] - m^2 has none left: 4096.0625 - 4096 in fp16 is 0."""
    x = (64 + np.array([-0.25, 0.25, 0.25, -0.25])).astype(dtype).reshape(1, 1, 2, 2)
    model, feed = one_of("MeanVarianceNormalization", [x], {})
    graph = import_onnx(model)
    (name,) = graph.outputs
    inputs = dict(zip(graph.inputs, feed.values(), strict=True))
    wanted = np.sign(x - 64)
    np.testing.assert_allclose(evaluate(graph, inputs)[name], wanted, rtol=1e-5)
    found = run_compiled(graph, inputs, "Ascend310")[name]
    np.testing.assert_allclose(found, wanted, rtol=2**-8)


@pytest.mark.parametrize("exponent", [[2.0], [[2.0], [4.0]], [3.0, 5.0], [[-1.0], [-3.0]], 6.0])
def test_whole_powers_take_negative_numbers(exponent):
    """A kernel computes e^(y ln x), which negative numbers do not have."""
    x = np.array([[-1.5, 1.25], [-0.75, 2.0]], np.float32)
    model, feed = one_of("Pow", [x, np.array(exponent, np.float32)], {})
    graph = import_onnx(model, pinned={"in1": feed["in1"]})
    inputs = {"in0": x}
    wanted = np.power(x, np.array(exponent, np.float32))
    (name,) = graph.outputs
    np.testing.assert_allclose(evaluate(graph, inputs)[name], wanted, rtol=1e-5)
    found = run_compiled(graph, inputs, "Ascend310")[name]
    np.testing.assert_allclose(found, wanted, rtol=2**-6)


# -- windows, moves and products, and what exporters write -----------------------------------------
RTOL = 1e-5
"""Both sum in their own order in fp32 or wider; relative to the largest value."""


def numbers(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# -- what exporters write -------------------------------------------------------------------------
def encoder(n, width, heads, inner):
    """Return a transformer layer as exporters for opset 13 write it.

    Shapes are computed at run time, the mask is an input, normalisation and gelu are in pieces.
    """
    one = {"root": math.sqrt(width / heads), "one": 1, "low": -10000, "square": 2, "eps": 1e-5,
           "sqrt2": math.sqrt(2), "half": 0.5}  # fmt: skip
    weights = {name: np.float32(number) for name, number in one.items()}
    weights |= {"axis": [0], "heads": [heads], "each": [width // heads], "width": [width],
                "mask_axes": [1, 2], "place_batch": 0, "place_length": 1}  # fmt: skip
    drawn = {f"w{name}": (width, width) for name in "qkv"} | {
        f"b{name}": (width,) for name in "qkv"
    }
    drawn |= {"w1": (width, inner), "w2": (inner, width)}
    for seed, (name, shape) in enumerate(drawn.items()):
        weights[name] = numbers(shape, seed) / np.float32(math.sqrt(width))
    size = "Gather shape place_{0} -> {0}0; Unsqueeze {0}0 axis -> {0}; "
    side = ("MatMul x w{0} -> {0}0; Add {0}0 b{0} -> {0}1; Reshape {0}1 split -> {0}2; "
            "Transpose {0}2 -> {0} perm={1}; ")  # fmt: skip
    nodes = (
        "Shape x -> shape; " + "".join(size.format(name) for name in ("batch", "length")) +
        "Concat batch length heads each -> split axis=0; "
        "Concat batch length width -> joined axis=0; "
        + "".join(side.format(c, "[0,2,3,1]" if c == "k" else "[0,2,1,3]") for c in "qkv") +
        "MatMul q k -> s0; Div s0 root -> s1; Unsqueeze mask mask_axes -> m0; Cast m0 -> m1 to=1; "
        "Sub one m1 -> m2; Mul m2 low -> m3; Add s1 m3 -> s2; Softmax s2 -> p axis=-1; "
        "MatMul p v -> c0; Transpose c0 -> c1 perm=[0,2,1,3]; Reshape c1 joined -> c2; "
        "Add c2 x -> r; ReduceMean r -> mean axes=[-1]; Sub r mean -> d; Pow d square -> d2; "
        "ReduceMean d2 -> var axes=[-1]; Add var eps -> var1; Sqrt var1 -> std; Div d std -> n; "
        "MatMul n w1 -> h; Div h sqrt2 -> e0; Erf e0 -> e1; Add e1 one -> e2; Mul h e2 -> e3; "
        "Mul e3 half -> e4; MatMul e4 w2 -> y"
    )  # fmt: skip
    return model_of(nodes, {"x": (n, 5, width), "mask": ((n, 5), INT64)}, ["y"], weights, opset=13)


def test_a_transformer_layer_as_exporters_write_it():
    model = encoder("batch", 8, 2, 16)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    inputs = {"x": numbers((2, 5, 8), 9), "mask": mask}
    found = import_onnx(model, batch=2)
    assert_close(evaluate(found, inputs), run_onnx(model, inputs), RTOL)
    assert not {n.op for n in found.nodes} & {"gather", "concat"}, "shape arithmetic is folded"
    assert sum(n.op == "square" for n in found.nodes) == 1


def test_a_causal_mask_is_cut_from_a_constant():
    full = np.tril(np.ones((1, 1, 64, 64), bool))
    nodes = "Slice full zero size axes -> mask; Where mask x low -> y"
    weights = {"full": full, "zero": np.array([0, 0]), "size": np.array([5, 5]),
               "axes": np.array([2, 3]), "low": np.float32(-1e9)}  # fmt: skip
    model = model_of(nodes, {"x": (1, 2, 5, 5)}, ["y"], weights)
    graph = import_onnx(model)
    x = {"x": numbers((1, 2, 5, 5))}
    np.testing.assert_array_equal(evaluate(graph, x)["y"], run_onnx(model, x)["y"])
    assert [node.op for node in graph.nodes] == ["cast", "select"]


def test_cases_that_are_not_computed_as_the_standard_says_are_refused():
    x = numbers((1, 2, 6, 6))
    for model in (
        one_node("AveragePool", {"x": x}, 19, kernel_shape=[2, 2], auto_pad="VALID", ceil_mode=1),
        one_node("MaxPool", {"x": x}, kernel_shape=[2, 2], dilations=[2, 2], auto_pad="SAME_UPPER"),
        one_node("Conv", {"x": numbers((1, 1, 4, 4, 4, 4)), "w": numbers((1, 1, 2, 2, 2, 2))}),
        one_node("Dropout", {"x": x}, 6),
        one_node("Softmax", {"x": x}, 6, axis=9),
    ):
        with pytest.raises(UnsupportedError, match="the_node"):
            import_onnx(model)


def test_a_class_token_repeated_as_exporters_write_it():
    """x.expand(n, -1, -1): sizes of -1 are replaced by 1 through Equal and Where."""
    nodes = (
        "Shape x -> s; Gather s zero -> n; Unsqueeze n axis -> n1; "
        "Concat n1 keep keep -> wanted axis=0; Shape wanted -> rank; "
        "ConstantOfShape rank -> ones value=INT64:1; Mul ones minus -> marks; "
        "Equal wanted marks -> open; Where open ones wanted -> sizes; "
        "Expand token sizes -> tokens; Concat tokens x -> all axis=1; Slice s last end -> width; "
        "Cast width -> width_f to=1; Sqrt width_f -> root; Div all root -> y"
    )
    weights = {"zero": np.array(0), "axis": np.array([0]), "keep": np.array([-1]),
               "minus": np.array(-1), "last": np.array([-1]), "end": np.array([2**63 - 1]),
               "token": numbers((1, 1, 4))}  # fmt: skip
    model = model_of(nodes, {"x": ("n", 3, 4)}, ["y"], weights)
    graph = import_onnx(model, batch=2)
    x = {"x": numbers((2, 3, 4), 1)}
    assert [node.op for node in graph.nodes] == ["expand", "concat", "div"]
    np.testing.assert_array_equal(evaluate(graph, x)["y"], run_onnx(model, x)["y"])


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_places_of_extremes_lie_on_the_axis_where_nothing_compares(op, last):
    text = f"{op} x -> y axis=1 select_last_index={last}"
    graph = import_onnx(model_of(text, {"x": (2, 3)}, ["y"]))
    with np.errstate(all="ignore"):
        found = evaluate(graph, {"x": np.full((2, 3), np.nan, np.float32)})["y"]
    assert ((found >= 0) & (found < 3)).all()


# -- numbers that are rare, and places that come from an input -------------------------------------
CHIPS = ("Ascend310", "Ascend910B2")


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("largest", "order"), [(1, [1, 2, 3, 4, 0]), (0, [0, 4, 1, 2, 3])])
def test_places_of_the_largest_are_used_once_though_some_are_nan(largest, order, chip):
    """NaN counts as infinity; equal elements keep their order."""
    x = np.array([[1, np.nan, np.inf, np.nan, 2], [3, 1, 1, 2, 3]], np.float32)
    model = model_of(
        f"TopK x k -> v i largest={largest}", {"x": x.shape}, ["v", "i"], {"k": np.array([5])}
    )
    graph = import_model(model).graph
    second = [0, 4, 3, 1, 2] if largest else [1, 2, 3, 0, 4]
    for found in (evaluate(graph, {"x": x}), run_compiled(graph, {"x": x}, chip)):
        values, places = found.values()
        np.testing.assert_array_equal(places, [order, second])
        np.testing.assert_array_equal(values, np.take_along_axis(x, np.array(places), 1))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("how", ["input", "tensor", "even", "odd"])
def test_powers_of_any_base(how, chip):
    """Whole exponents of negative bases, powers of 0; NaN for the others, as NumPy has it."""
    x = np.array([0, 0, 0, -2, -2, -2, -0.5, 3, -1, -np.inf, 1, 4], np.float32)
    y = np.array([2, 0, -1, 3, -2, 0.5, -3, 2, np.inf, 1.5, np.nan, 1.5], np.float32)
    if how in ("even", "odd"):
        y = np.array([6, 0, -2, 2, -2, 4, -4, 2, 6, 2, 0, 2], np.float32) - (how == "odd")
    inputs = {"x": x, "y": y} if how == "input" else {"x": x}
    weights = {} if how == "input" else {"y": y}
    model = model_of("Pow x y -> z", {n: v.shape for n, v in inputs.items()}, ["z"], weights)
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64))
    graph = import_model(model).graph
    for found in (evaluate(graph, inputs), run_compiled(graph, inputs, chip)):
        np.testing.assert_allclose(next(iter(found.values())), want, rtol=2**-10)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("axis", [0, 1])
def test_indices_of_an_input_may_count_from_the_end(axis, chip):
    x = numbers((7, 5))
    places = np.array([[-1, 0, -5], [4, -2, 3]])
    sizes = {"x": x.shape, "i": (places.shape, INT64)}
    model = model_of(f"Gather x i -> y axis={axis}", sizes, ["y"])
    graph = import_model(model).graph
    inputs = {"x": x, "i": places}
    want = run_onnx(model, inputs)["y"]
    np.testing.assert_array_equal(evaluate(graph, inputs)["y"], want)
    found = run_compiled(graph, inputs, chip)["y"]
    np.testing.assert_array_equal(found, want.astype(np.float16))
    beyond = {"x": x, "i": np.full(places.shape, -8)}
    with pytest.raises(AscendLabError, match="indices from -"):
        evaluate(graph, beyond)
    with pytest.raises(AscendLabError, match=r"an index of -\d"):
        run_compiled(graph, beyond, chip)
