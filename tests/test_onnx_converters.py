"""Converters against ONNX Runtime: random attributes and shapes, and what exporters write."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx_models import INT64, expected, model_of, one_node

from ascend_lab.errors import AscendLabError, UnsupportedError
from ascend_lab.graph import evaluate
from ascend_lab.graph.onnx import import_model, import_onnx

RTOL = 1e-5
"""Both sum in their own order in fp32 or wider; relative to the largest value."""


def numbers(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def agree(model, inputs, rtol=RTOL):
    """Assert that we compute what ONNX Runtime computes, unless one of the two refuses."""
    try:
        found = import_model(model)
    except AscendLabError:
        return assume(False)
    try:
        want = expected(model, inputs)
    except Exception:
        return assume(False)
    got = evaluate(found.graph, {name: inputs[name] for name in found.graph.inputs})
    for name, values in want.items():
        assert got[name].shape == values.shape
        wide = values.astype(np.float64)
        scale = max(1.0, float(np.abs(wide).max(initial=0.0)))
        np.testing.assert_allclose(got[name].astype(np.float64), wide, rtol=rtol, atol=rtol * scale)
    return None


# -- windows --------------------------------------------------------------------------------------
@st.composite
def windows(draw, dilated=True):
    """Attributes of a window over rows or images, and the sizes of an input."""
    rank = draw(st.integers(1, 2))
    size = tuple(draw(st.integers(4, 9)) for _ in range(rank))
    kernel = [draw(st.integers(1, 4)) for _ in range(rank)]
    attrs = {"kernel_shape": kernel, "strides": [draw(st.integers(1, 3)) for _ in range(rank)]}
    way = draw(st.sampled_from(("pads", "SAME_UPPER", "SAME_LOWER", "VALID")))
    if way == "pads":
        attrs["pads"] = [draw(st.integers(0, 2)) for _ in range(2 * rank)]
        if dilated:
            attrs["dilations"] = [draw(st.integers(1, 2)) for _ in range(rank)]
    else:
        attrs["auto_pad"] = way
    return (draw(st.integers(1, 2)), draw(st.sampled_from((2, 4))), *size), attrs


@settings(max_examples=25)
@given(windows(), st.sampled_from((1, 2)), st.booleans())
def test_convolutions(window, groups, biased):
    shape, attrs = window
    arrays = {"x": numbers(shape), "w": numbers((4, shape[1] // groups, *attrs["kernel_shape"]), 1)}
    if biased:
        arrays["b"] = numbers(4, 2)
    agree(one_node("Conv", arrays, group=groups, **attrs), arrays)


@settings(max_examples=25)
@given(st.data(), windows(), st.sampled_from((1, 2)))
def test_transposed_convolutions(data, window, groups):
    shape, attrs = window
    arrays = {"x": numbers(shape), "w": numbers((shape[1], 2, *attrs["kernel_shape"]), 1)}
    extra = [data.draw(st.integers(0, s - 1)) for s in attrs["strides"]]
    agree(one_node("ConvTranspose", arrays, group=groups, output_padding=extra, **attrs), arrays)


@settings(max_examples=25)
@given(windows(), st.booleans())
def test_maximum_pooling(window, ceiling):
    shape, attrs = window
    arrays = {"x": numbers(shape)}
    agree(one_node("MaxPool", arrays, ceil_mode=int(ceiling), **attrs), arrays)


@settings(max_examples=25)
@given(windows(), st.booleans(), st.booleans())
def test_average_pooling(window, ceiling, include):
    shape, attrs = window
    arrays = {"x": numbers(shape)}
    how = {"ceil_mode": int(ceiling), "count_include_pad": int(include)}
    agree(one_node("AveragePool", arrays, opset=19, **how, **attrs), arrays)


# -- moving ---------------------------------------------------------------------------------------
BOUNDS = (2**63 - 1, -(2**63), -1, 0, 1, 2, 3, -2, -3, 5, -5, 10)


@settings(max_examples=25)
@given(st.data())
def test_slices(data):
    shape = (3, 4, 5)
    axes = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    pick = st.sampled_from(BOUNDS)
    starts, ends = ([data.draw(pick) for _ in axes] for _ in range(2))
    steps = [data.draw(st.sampled_from((1, 1, 2, 3, -1, -2))) for _ in axes]
    weights = {"s": starts, "e": ends, "a": axes, "p": steps}
    node = helper.make_node("Slice", ["x", *weights], ["y"])
    weights = {name: np.array(v, np.int64) for name, v in weights.items()}
    agree(model_of([node], {"x": shape}, ["y"], weights), {"x": numbers(shape)}, 0)


@settings(max_examples=25)
@given(st.lists(st.integers(-1, 2), min_size=6, max_size=6),
       st.sampled_from(("constant", "edge", "reflect")))  # fmt: skip
def test_pads(pads, mode):
    names = ["x", "p", "v"] if mode == "constant" else ["x", "p"]
    weights = {"p": np.array(pads), "v": np.float32(1.5)}
    node = helper.make_node("Pad", names, ["y"], mode=mode)
    agree(model_of([node], {"x": (3, 4, 5)}, ["y"], weights), {"x": numbers((3, 4, 5))}, 0)


@settings(max_examples=25)
@given(st.integers(-3, 2), st.sampled_from(((), (3,), (2, 2))), st.integers(0, 99))
def test_gathers_with_negative_indices(axis, shape, seed):
    size = (3, 4, 5)[axis]
    indices = np.random.default_rng(seed).integers(-size, size, shape)
    node = helper.make_node("Gather", ["x", "i"], ["y"], axis=axis)
    model = model_of([node], {"x": (3, 4, 5)}, ["y"], {"i": np.asarray(indices)})
    agree(model, {"x": numbers((3, 4, 5))}, 0)


# -- sums and products ----------------------------------------------------------------------------
@pytest.mark.parametrize("left", [(4,), (3, 4), (2, 3, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("right", [(4,), (4, 5), (2, 4, 5), (1, 3, 4, 2)])
def test_matrix_products_of_any_rank(left, right):
    arrays = {"a": numbers(left), "b": numbers(right, 1)}
    try:
        want = np.matmul(arrays["a"], arrays["b"])
    except ValueError:
        with pytest.raises(AscendLabError, match="MatMul"):
            import_onnx(one_node("MatMul", arrays))
        return
    found = evaluate(import_onnx(one_node("MatMul", arrays)), arrays)["y"]
    np.testing.assert_allclose(found, want, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_local_response_normalisation(size):
    arrays = {"x": 3 * numbers((2, 6, 3, 4))}
    attrs = {"size": size, "alpha": 0.3, "beta": 0.7, "bias": 2.0}
    found = evaluate(import_onnx(one_node("LRN", arrays, **attrs)), arrays)["y"]
    x, sums = arrays["x"].astype(np.float64), np.zeros((2, 6, 3, 4))
    for c in range(6):
        low, high = max(0, c - (size - 1) // 2), min(6, c + size // 2 + 1)
        sums[:, c] = (x[:, low:high] ** 2).sum(axis=1)
    np.testing.assert_allclose(found, x / (2 + 0.3 / size * sums) ** 0.7, rtol=RTOL)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_one_hot_counts_negative_indices_back_and_marks_none_outside(kind, axis):
    indices = np.array([[0, 2, -1], [5, -7, 4]], kind)
    node = helper.make_node("OneHot", ["i", "depth", "values"], ["y"], axis=axis)
    weights = {"depth": np.array(5), "values": np.array([-1, 3], np.float32)}
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    graph = import_onnx(model_of([node], {"i": ((2, 3), element)}, ["y"], weights))
    hot = (indices[..., None] == np.arange(5)) | (indices[..., None] + 5 == np.arange(5))
    want = np.moveaxis(np.where(hot, 3, -1), -1, axis)
    np.testing.assert_array_equal(
        evaluate(graph, {"i": indices.astype(graph_type(kind))})["y"], want
    )


def graph_type(kind):
    return np.int32 if kind is np.int64 else kind


# -- what exporters write -------------------------------------------------------------------------
def encoder(n, width, heads, inner):
    """Return a transformer layer as exporters for opset 13 write it.

    Shapes are computed at run time, the mask is an input, normalisation and gelu are in pieces.
    """
    nodes, weights = [], {}

    def node(op, *inputs, out, **attrs):
        nodes.append(helper.make_node(op, [*inputs], [out], **attrs))

    def weight(name, value):
        weights[name] = np.asarray(value)
        return name

    def drawn(name, *shape):
        return weight(name, numbers(shape, len(weights)) / np.float32(math.sqrt(width)))

    weight("axis", [0])
    weight("heads", [heads])
    weight("each", [width // heads])
    weight("width", [width])
    node("Shape", "x", out="shape")
    for i, name in enumerate(("batch", "length")):
        node("Gather", "shape", weight(f"place_{name}", i), out=f"{name}0")
        node("Unsqueeze", f"{name}0", "axis", out=name)
    node("Concat", "batch", "length", "heads", "each", out="split", axis=0)
    node("Concat", "batch", "length", "width", out="joined", axis=0)
    for name in "qkv":
        node("MatMul", "x", drawn(f"w{name}", width, width), out=f"{name}0")
        node("Add", f"{name}0", drawn(f"b{name}", width), out=f"{name}1")
        node("Reshape", f"{name}1", "split", out=f"{name}2")
        perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        node("Transpose", f"{name}2", out=name, perm=perm)
    node("MatMul", "q", "k", out="s0")
    node("Div", "s0", weight("root", np.float32(math.sqrt(width / heads))), out="s1")
    node("Unsqueeze", "mask", weight("mask_axes", [1, 2]), out="m0")
    node("Cast", "m0", out="m1", to=1)
    node("Sub", weight("one", np.float32(1)), "m1", out="m2")
    node("Mul", "m2", weight("low", np.float32(-10000)), out="m3")
    node("Add", "s1", "m3", out="s2")
    node("Softmax", "s2", out="p", axis=-1)
    node("MatMul", "p", "v", out="c0")
    node("Transpose", "c0", out="c1", perm=[0, 2, 1, 3])
    node("Reshape", "c1", "joined", out="c2")
    node("Add", "c2", "x", out="r")
    node("ReduceMean", "r", out="mean", axes=[-1])
    node("Sub", "r", "mean", out="d")
    node("Pow", "d", weight("square", np.float32(2)), out="d2")
    node("ReduceMean", "d2", out="var", axes=[-1])
    node("Add", "var", weight("eps", np.float32(1e-5)), out="var1")
    node("Sqrt", "var1", out="std")
    node("Div", "d", "std", out="n")
    node("MatMul", "n", drawn("w1", width, inner), out="h")
    node("Div", "h", weight("sqrt2", np.float32(math.sqrt(2))), out="e0")
    node("Erf", "e0", out="e1")
    node("Add", "e1", "one", out="e2")
    node("Mul", "h", "e2", out="e3")
    node("Mul", "e3", weight("half", np.float32(0.5)), out="e4")
    node("MatMul", "e4", drawn("w2", inner, width), out="y")
    return model_of(nodes, {"x": (n, 5, width), "mask": ((n, 5), INT64)}, ["y"], weights, opset=13)


def test_a_transformer_layer_as_exporters_write_it():
    model = encoder("batch", 8, 2, 16)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    inputs = {"x": numbers((2, 5, 8), 9), "mask": mask}
    found = import_onnx(model, batch=2)
    want = expected(model, inputs)["y"]
    np.testing.assert_allclose(evaluate(found, inputs)["y"], want, rtol=1e-5, atol=1e-5)
    assert not {n.op for n in found.nodes} & {"gather", "concat"}, "shape arithmetic is folded"
    assert sum(n.op == "square" for n in found.nodes) == 1


def test_a_causal_mask_is_cut_from_a_constant():
    full = np.tril(np.ones((1, 1, 64, 64), bool))
    nodes = [
        helper.make_node("Slice", ["full", "zero", "size", "axes"], ["mask"]),
        helper.make_node("Where", ["mask", "x", "low"], ["y"]),
    ]
    weights = {"full": full, "zero": np.array([0, 0]), "size": np.array([5, 5]),
               "axes": np.array([2, 3]), "low": np.float32(-1e9)}  # fmt: skip
    model = model_of(nodes, {"x": (1, 2, 5, 5)}, ["y"], weights)
    graph, x = import_onnx(model), {"x": numbers((1, 2, 5, 5))}
    np.testing.assert_array_equal(evaluate(graph, x)["y"], expected(model, x)["y"])
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
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"]),
        helper.make_node("Concat", ["n1", "keep", "keep"], ["wanted"], axis=0),
        helper.make_node("Shape", ["wanted"], ["rank"]),
        helper.make_node("ConstantOfShape", ["rank"], ["ones"], value=helper.make_tensor(
            "one", INT64, [1], [1])),
        helper.make_node("Mul", ["ones", "minus"], ["marks"]),
        helper.make_node("Equal", ["wanted", "marks"], ["open"]),
        helper.make_node("Where", ["open", "ones", "wanted"], ["sizes"]),
        helper.make_node("Expand", ["token", "sizes"], ["tokens"]),
        helper.make_node("Concat", ["tokens", "x"], ["all"], axis=1),
        helper.make_node("Slice", ["s", "last", "end"], ["width"]),
        helper.make_node("Cast", ["width"], ["width_f"], to=1),
        helper.make_node("Sqrt", ["width_f"], ["root"]),
        helper.make_node("Div", ["all", "root"], ["y"]),
    ]  # fmt: skip
    weights = {"zero": np.array(0), "axis": np.array([0]), "keep": np.array([-1]),
               "minus": np.array(-1), "last": np.array([-1]), "end": np.array([2**63 - 1]),
               "token": numbers((1, 1, 4))}  # fmt: skip
    model = model_of(nodes, {"x": ("n", 3, 4)}, ["y"], weights)
    graph, x = import_onnx(model, batch=2), {"x": numbers((2, 3, 4), 1)}
    assert [node.op for node in graph.nodes] == ["expand", "concat", "div"]
    np.testing.assert_array_equal(evaluate(graph, x)["y"], expected(model, x)["y"])
