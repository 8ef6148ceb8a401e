"""Operators in forms that the standard's own cases leave out, against ONNX Runtime.

Random shapes, attributes and zero points; forms that newer opsets replaced; what exporters write;
refusals by name.
"""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx_models import INT64, assert_close, model_of, one_node, run_onnx

from ascend_lab.compiler import evaluate, run_compiled
from ascend_lab.compiler.onnx import backend as onnx_backend, import_model, import_onnx
from ascend_lab.errors import AscendLabError, UnsupportedError

SEEDS = range(3)


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def whole(rng, low, high, shape, kind=np.int64):
    return rng.integers(low, high, shape).astype(kind)


def shape_of(rng, least=1, most=4):
    return tuple(int(n) for n in rng.integers(1, 6, rng.integers(least, most + 1)))


def scatter_elements(rng):
    shape = shape_of(rng)
    axis = int(rng.integers(0, len(shape)))
    adds = bool(rng.integers(2))
    size = [int(rng.integers(1, n + 1)) for n in shape]
    # without a sum the places along a line must differ
    lines = np.argsort(rng.random(shape), axis)[tuple(slice(n) for n in size)]
    indices = whole(rng, -shape[axis], shape[axis], size) if adds else lines
    updates = floats(rng, *indices.shape)
    return "ScatterElements", [floats(rng, *shape), indices, updates], {
        "axis": axis, "reduction": "add" if adds else "none"
    }  # fmt: skip


def gather_nd(rng):
    shape = shape_of(rng, 2)
    batch = int(rng.integers(0, 2))
    depth = int(rng.integers(1, len(shape) - batch + 1))
    lead = (*shape[:batch], *shape_of(rng, 0, 2))
    tuples = np.stack([whole(rng, -n, n, lead) for n in shape[batch : batch + depth]], -1)
    return "GatherND", [floats(rng, *shape), tuples], {"batch_dims": batch}


def recurrent(rng):
    op = str(rng.choice(["RNN", "GRU", "LSTM"]))
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    steps, batch, width, hidden = (int(n) for n in rng.integers(1, 5, 4))
    direction = str(rng.choice(["forward", "reverse", "bidirectional"]))
    d = 2 if direction == "bidirectional" else 1
    arrays = [
        floats(rng, steps, batch, width),
        floats(rng, d, gates * hidden, width),
        floats(rng, d, gates * hidden, hidden),
        floats(rng, d, 2 * gates * hidden),
    ]
    attrs = {"hidden_size": hidden, "direction": direction}
    if op == "GRU":
        attrs["linear_before_reset"] = int(rng.integers(2))
    if rng.integers(2):
        arrays += [np.full(batch, steps, np.int32), floats(rng, d, batch, hidden)]
        if op == "LSTM":
            arrays += [floats(rng, d, batch, hidden), floats(rng, d, 3 * hidden)]
    return op, arrays, attrs


def quantised(rng):
    shape = shape_of(rng, 2)
    kind = [np.int8, np.uint8][rng.integers(2)]
    axis = int(rng.integers(-len(shape), len(shape)))
    each = bool(rng.integers(2))
    count = (shape[axis],) if each else ()
    scale = rng.uniform(0.01, 0.2, count).astype(np.float32)
    zero = whole(rng, *((-20, 20) if kind == np.int8 else (0, 99)), count, kind)
    if rng.integers(2):
        x = (floats(rng, *shape) * 20).astype(np.float32)
        return "QuantizeLinear", [x, scale, zero], {"axis": axis}
    low = np.iinfo(kind).min
    high = np.iinfo(kind).max
    return "DequantizeLinear", [whole(rng, low, high + 1, shape, kind), scale, zero], {"axis": axis}


def whole_product(rng):
    m, k, n = (int(v) for v in rng.integers(1, 9, 3))
    a = whole(rng, 0, 256, (2, m, k), np.uint8)
    b = whole(rng, -128, 128, (k, n), np.int8)
    zeros = [whole(rng, 0, 99, (), np.uint8), whole(rng, -20, 20, (), np.int8)]
    return "MatMulInteger", [a, b, *zeros], {}


EQUATIONS = (
    "ij,jk->ik", "bij,bjk->bik", "bhqd,bhkd->bhqk", "ij->ji", "ij->", "ij,ij->", "i,j->ij",
    "bi,ij,bj->b", "...ij,...jk->...ik", "b...i,ij->b...j", "ij,jk", "ba", "bc,cd,de->be",
    "bhwc,hkc->bhwk", "i,i->i", "abc,cd->abd", "ijk,ilm->jklm", "...i->...",
)  # fmt: skip


def named_sum(rng):
    equation = EQUATIONS[rng.integers(len(EQUATIONS))]
    sizes = {letter: int(rng.integers(1, 5)) for letter in "abcdehijklmqw"}
    dots = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3)))
    arrays = []
    for term in equation.partition("->")[0].split(","):
        before, _, after = term.partition("...")
        middle = dots if "..." in term else ()
        shape = (*(sizes[c] for c in before), *middle, *(sizes[c] for c in after))
        arrays.append(floats(rng, *shape))
    return "Einsum", arrays, {"equation": equation}


def fourier(rng):
    n = int(rng.integers(2, 12))
    inverse = int(rng.integers(2))
    onesided = 0 if inverse else int(rng.integers(2))
    parts = 1 if onesided else int(rng.integers(1, 3))
    length = np.array(rng.integers(1, 14))
    attrs = {"inverse": inverse, "onesided": onesided}
    return "DFT", [floats(rng, 2, n, 3, parts), length, np.array(1)], attrs


def dilated_average(rng):
    x = floats(rng, 1, 2, 9, 8)
    attrs = {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 1, 2, 0], "strides": [1, 2]}
    return "AveragePool", [x], attrs | {
        "count_include_pad": int(rng.integers(2)), "ceil_mode": int(rng.integers(2))
    }  # fmt: skip


def log_sum(rng):
    shape = shape_of(rng)
    x = floats(rng, *shape) * np.float32(100)
    x.ravel()[0] = rng.choice([np.inf, -np.inf, 1e30])
    axes = np.array([rng.integers(-len(shape), len(shape))])
    return "ReduceLogSumExp", [x, axes], {"keepdims": int(rng.integers(2))}


def local_response(rng):
    attrs = {"size": int(rng.integers(1, 6)), "alpha": 0.3, "beta": 0.7, "bias": 2.0}
    return "LRN", [3 * floats(rng, 2, 6, 3, 4)], attrs


def converted(rng):
    kinds = [TensorProto.FLOAT, TensorProto.INT32, TensorProto.BOOL, TensorProto.INT8,
             TensorProto.UINT8, TensorProto.FLOAT16, TensorProto.INT64]  # fmt: skip
    x = [
        (floats(rng, 9) * 50).astype(np.float32),
        whole(rng, -99, 99, (9,)),
        whole(rng, 0, 2, (9,), np.bool_),
        whole(rng, -99, 99, (9,), np.int8),
        whole(rng, 0, 255, (9,), np.uint8),
    ][rng.integers(5)]
    target = kinds[rng.integers(len(kinds))]
    if x.dtype == np.float32 and target == TensorProto.UINT8:
        x = np.abs(x)
    return "Cast", [x], {"to": int(target)}


CASES = (
    scatter_elements, gather_nd, recurrent, quantised, whole_product, named_sum, fourier,
    dilated_average, log_sum, local_response, converted,
)  # fmt: skip


def one_of(op, arrays, attrs, opset=23):
    outputs = {"TopK": 2, "RNN": 2, "GRU": 2, "LSTM": 3, "Split": 3}.get(op, 1)
    feed = {f"in{i}": array for i, array in enumerate(arrays)}
    return one_node(op, feed, opset, outputs, **attrs), feed


def check_node(op, arrays, attrs, opset=23):
    """Raise unless both compute the same."""
    model, feed = one_of(op, arrays, attrs, opset)
    # ONNX Runtime saturates these on processors without VNNI
    evaluated = op == "MatMulInteger"
    wanted = (
        ReferenceEvaluator(model).run(None, feed) if evaluated else run_onnx(model, feed).values()
    )
    got = onnx_backend.run_model(model, arrays)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1) if theirs.size else 1
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(scale))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_random_cases_agree_with_onnx_runtime(make, seed):
    check_node(*make(np.random.default_rng(seed)))


# (first opset, last opset) of a form of an operator that newer ones replaced
OLD = (
    (7, 12, "Squeeze", [(1, 3, 1)], {"axes": [0]}),
    (7, 12, "Unsqueeze", [(3, 2)], {"axes": [0, 2]}),
    (7, 12, "Softmax", [(2, 3, 4)], {"axis": 1}),
    (7, 12, "Softmax", [(2, 3, 4)], {}),
    (7, 12, "LogSoftmax", [(2, 3, 4)], {"axis": -1}),
    (7, 12, "Hardmax", [(2, 3, 4)], {}),
    (7, 10, "Clip", [(3, 4)], {"min": -0.5, "max": 0.25}),
    (7, 9, "Slice", [(5, 6)], {"starts": [1, -4], "ends": [9, -1], "axes": [0, 1]}),
    (7, 10, "Pad", [(3, 4)], {"pads": [1, 0, 0, 2], "value": 2.0}),
    (7, 10, "Pad", [(3, 4)], {"pads": [1, 0, 0, 2], "mode": "reflect"}),
    (7, 8, "Upsample", [(1, 2, 3, 4)], {"scales": [1.0, 1.0, 2.0, 3.0]}),
    (9, 9, "Upsample", [(1, 1, 3, 4), np.array([1, 1, 2, 2], "f4")], {"mode": "linear"}),
    (10, 10, "Resize", [(1, 1, 3, 4), np.array([1, 1, 2, 2], "f4")], {}),
    (7, 12, "ReduceSum", [(2, 3, 4)], {"axes": [0, 2], "keepdims": 0}),
    (7, 17, "ReduceMax", [(2, 3, 4)], {"axes": [1]}),
    (7, 17, "ReduceL2", [(2, 3, 4)], {"axes": [-1]}),
    (7, 12, "Split", [(6, 2)], {"axis": 0, "split": [1, 2, 3]}),
    (7, 11, "Dropout", [(3, 4)], {"ratio": 0.9}),
    (7, 13, "BatchNormalization", [(2, 3, 4, 4), (3,), (3,), (3,), np.ones(3, "f4")], {}),
    (7, 12, "ArgMax", [(3, 4)], {"axis": -1}),
    (7, 10, "Gemm", [(2, 3), (3, 4), (4,)], {}),
    (7, 9, "AveragePool", [(1, 2, 7, 6)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}),
    (8, 9, "MaxPool", [(1, 2, 7, 6)], {"kernel_shape": [3, 2], "strides": [2, 2]}),
    (7, 14, "PRelu", [(2, 3, 4), (3, 1)], {}),
    (9, 10, "Scatter", [(3, 4), np.array([[1, 0, 2, 0]]), (1, 4)], {}),
    (7, 12, "Flatten", [(2, 3, 4)], {"axis": 2}),
    (7, 13, "RNN", [(2, 1, 3), (1, 2, 3), (1, 2, 2)], {"hidden_size": 2}),
    (18, 20, "GroupNormalization", [(2, 6, 3, 3), (3,), (3,)], {"num_groups": 3}),
    (17, 19, "DFT", [(1, 6, 2, 1)], {"axis": 1, "onesided": 1}),
)


@pytest.mark.parametrize(("first", "last", "op", "shapes", "attrs"), OLD)
def test_old_forms_of_operators_agree_with_onnx_runtime(first, last, op, shapes, attrs):
    rng = np.random.default_rng(0)
    arrays = [floats(rng, *shape) if isinstance(shape, tuple) else shape for shape in shapes]
    for opset in {first, last}:
        check_node(op, arrays, attrs, opset)


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


@pytest.mark.parametrize("op", ["Celu", "Mish", "Softsign", "ThresholdedRelu", "Shrink"])
def test_functions_of_a_number_are_a_number(op):
    """The body of Celu divides by a list of one number."""
    x = np.array(-0.75, np.float32)
    model, feed = one_of(op, [x], {}, 18)
    (name,) = import_onnx(model).outputs
    found = evaluate(import_onnx(model), feed)[name]
    assert found.shape == ()
    np.testing.assert_allclose(found, run_onnx(model, feed)["y"], rtol=1e-5)


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


def agree(model, inputs, rtol=RTOL):
    """Assert that we compute what ONNX Runtime computes, unless one of the two refuses."""
    try:
        found = import_model(model)
    except AscendLabError:
        return assume(False)
    try:
        want = run_onnx(model, inputs)
    except Exception:
        return assume(False)
    got = evaluate(found.graph, {name: inputs[name] for name in found.graph.inputs})
    assert_close(got, want, rtol)
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


@settings(max_examples=100)
@given(windows(), st.sampled_from((1, 2)), st.booleans())
def test_convolutions(window, groups, biased):
    shape, attrs = window
    arrays = {"x": numbers(shape), "w": numbers((4, shape[1] // groups, *attrs["kernel_shape"]), 1)}
    if biased:
        arrays["b"] = numbers(4, 2)
    agree(one_node("Conv", arrays, group=groups, **attrs), arrays)


@given(st.data(), windows(), st.sampled_from((1, 2)))
def test_transposed_convolutions(data, window, groups):
    shape, attrs = window
    arrays = {"x": numbers(shape), "w": numbers((shape[1], 2, *attrs["kernel_shape"]), 1)}
    extra = [data.draw(st.integers(0, s - 1)) for s in attrs["strides"]]
    agree(one_node("ConvTranspose", arrays, group=groups, output_padding=extra, **attrs), arrays)


@settings(max_examples=100)
@given(windows(), st.booleans())
def test_maximum_pooling(window, ceiling):
    shape, attrs = window
    arrays = {"x": numbers(shape)}
    agree(one_node("MaxPool", arrays, ceil_mode=int(ceiling), **attrs), arrays)


@given(windows(), st.booleans(), st.booleans())
def test_average_pooling(window, ceiling, include):
    shape, attrs = window
    arrays = {"x": numbers(shape)}
    how = {"ceil_mode": int(ceiling), "count_include_pad": int(include)}
    agree(one_node("AveragePool", arrays, opset=19, **how, **attrs), arrays)


# -- moving ---------------------------------------------------------------------------------------
BOUNDS = (2**63 - 1, -(2**63), -1, 0, 1, 2, 3, -2, -3, 5, -5, 10)


@settings(max_examples=100)
@given(st.data())
def test_slices(data):
    shape = (3, 4, 5)
    axes = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    pick = st.sampled_from(BOUNDS)
    starts, ends = ([data.draw(pick) for _ in axes] for _ in range(2))
    steps = [data.draw(st.sampled_from((1, 1, 2, 3, -1, -2))) for _ in axes]
    weights = {"s": starts, "e": ends, "a": axes, "p": steps}
    weights = {name: np.array(v, np.int64) for name, v in weights.items()}
    model = model_of("Slice x s e a p -> y", {"x": shape}, ["y"], weights)
    agree(model, {"x": numbers(shape)}, 0)


@settings(max_examples=100)
@given(st.lists(st.integers(-1, 2), min_size=6, max_size=6),
       st.sampled_from(("constant", "edge", "reflect")))  # fmt: skip
def test_pads(pads, mode):
    weights = {"p": np.array(pads), "v": np.float32(1.5)}
    text = f"Pad x p {'v ' * (mode == 'constant')}-> y mode={mode}"
    agree(model_of(text, {"x": (3, 4, 5)}, ["y"], weights), {"x": numbers((3, 4, 5))}, 0)


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
