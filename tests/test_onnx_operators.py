"""Operators in forms that the standard's own cases leave out, against ONNX Runtime.

Random shapes, attributes and zero points; forms that newer opsets replaced; refusals by name.
"""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.onnx import backend as onnx_backend

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


def scatter_nd(rng):
    shape = shape_of(rng, 1, 3)
    depth = int(rng.integers(1, len(shape) + 1))
    count = int(np.prod(shape[:depth]))
    picks = rng.permutation(count)[: rng.integers(1, count + 1)]
    tuples = np.stack(np.unravel_index(picks, shape[:depth]), -1).astype(np.int64)
    updates = floats(rng, len(picks), *shape[depth:])
    how = "add" if rng.integers(2) else "none"
    return "ScatterND", [floats(rng, *shape), tuples, updates], {"reduction": how}


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
    given = [
        floats(rng, steps, batch, width),
        floats(rng, d, gates * hidden, width),
        floats(rng, d, gates * hidden, hidden),
        floats(rng, d, 2 * gates * hidden),
    ]
    attrs = {"hidden_size": hidden, "direction": direction}
    if op == "GRU":
        attrs["linear_before_reset"] = int(rng.integers(2))
    if rng.integers(2):
        given += [np.full(batch, steps, np.int32), floats(rng, d, batch, hidden)]
        if op == "LSTM":
            given += [floats(rng, d, batch, hidden), floats(rng, d, 3 * hidden)]
    return op, given, attrs


def quantised(rng):
    shape, kind = shape_of(rng, 2), [np.int8, np.uint8][rng.integers(2)]
    axis = int(rng.integers(-len(shape), len(shape)))
    each = bool(rng.integers(2))
    count = (shape[axis],) if each else ()
    scale = rng.uniform(0.01, 0.2, count).astype(np.float32)
    zero = whole(rng, *((-20, 20) if kind == np.int8 else (0, 99)), count, kind)
    if rng.integers(2):
        x = (floats(rng, *shape) * 20).astype(np.float32)
        return "QuantizeLinear", [x, scale, zero], {"axis": axis}
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    return "DequantizeLinear", [whole(rng, low, high + 1, shape, kind), scale, zero], {"axis": axis}


def whole_product(rng):
    m, k, n = (int(v) for v in rng.integers(1, 9, 3))
    a = whole(rng, 0, 256, (2, m, k), np.uint8)
    b = whole(rng, -128, 128, (k, n), np.int8)
    zeros = [whole(rng, 0, 99, (), np.uint8), whole(rng, -20, 20, (), np.int8)]
    return "MatMulInteger", [a, b, *zeros], {}


def whole_convolution(rng):
    x = whole(rng, 0, 256, (1, 4, 7, 6), np.uint8)
    groups = int(rng.choice([1, 2]))
    w = whole(rng, 0, 256, (6, 4 // groups, 3, 2), np.uint8)
    zeros = [whole(rng, 0, 99, (), np.uint8), whole(rng, 0, 99, (), np.uint8)]
    attrs = {"pads": [1, 0, 0, 1], "strides": [2, 1], "group": groups}
    return "ConvInteger", [x, w, *zeros], attrs


def quotient(rng):
    shape = shape_of(rng)
    limit = [10, 2**31 - 1][rng.integers(2)]
    x = whole(rng, -limit, limit, shape, np.int32)
    y = whole(rng, 1, min(limit, 10 ** int(rng.integers(1, 9))), shape, np.int32)
    y = y * rng.choice([-1, 1], shape).astype(np.int32)
    op = str(rng.choice(["Div", "Mod"]))
    return op, [x, y], {"fmod": int(rng.integers(2))} if op == "Mod" else {}


def bytes_(rng):
    kind = [np.int8, np.uint8][rng.integers(2)]
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    x, y = (whole(rng, low, high + 1, (3, 40), kind) for _ in range(2))
    y[y == 0] = 3
    op = str(rng.choice(["Add", "Sub", "Mul", "Div", "BitwiseXor", "BitwiseAnd", "BitwiseOr"]))
    return op, [np.where(x == low, 1, x).astype(kind), y], {}


def shifted(rng):
    x, y = whole(rng, 0, 256, (4, 1), np.uint8), whole(rng, 0, 8, (1, 7), np.uint8)
    return "BitShift", [x, y], {"direction": str(rng.choice(["LEFT", "RIGHT"]))}


def narrowed(rng):
    x = whole(rng, -1000, 1000, (50,), np.int32)
    return "Cast", [x], {"to": int(rng.choice([TensorProto.INT8, TensorProto.UINT8]))}


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
    n, inverse = int(rng.integers(2, 12)), int(rng.integers(2))
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


def normal(rng):
    n, c, h, w = 2, 6, 3, 4
    x, scale, bias = floats(rng, n, c, h, w), floats(rng, c), floats(rng, c)
    if rng.integers(2):
        return "InstanceNormalization", [x, scale, bias], {"epsilon": 0.01}
    return "GroupNormalization", [x, scale, bias], {"num_groups": int(rng.choice([1, 2, 3, 6]))}


def log_sum(rng):
    shape = shape_of(rng)
    x = floats(rng, *shape) * np.float32(100)
    x.ravel()[0] = rng.choice([np.inf, -np.inf, 1e30])
    axes = np.array([rng.integers(-len(shape), len(shape))])
    return "ReduceLogSumExp", [x, axes], {"keepdims": int(rng.integers(2))}


def attention(rng):
    heads, per = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    n, s, t, d, e = (int(v) for v in rng.integers(1, 6, 5))
    q = floats(rng, n, heads * per, s, d)
    k, v = floats(rng, n, heads, t, d), floats(rng, n, heads, t, e)
    if rng.integers(2):
        return "Attention", [q, k, v], {"is_causal": int(rng.integers(2))}
    return "Attention", [q, k, v, floats(rng, s, t)], {"softcap": float(rng.integers(2)) * 2}


def flag(rng):
    return bool(rng.integers(2))


def arithmetic(rng):
    shape = shape_of(rng)
    other = tuple(n if flag(rng) else 1 for n in shape)[int(rng.integers(0, len(shape))) :]
    op = str(rng.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "PRelu"]))
    x, y = floats(rng, *shape), floats(rng, *other)
    if op == "Pow":
        x = np.abs(x) + np.float32(0.1)
    return op, [x, y] if op in ("Pow", "PRelu") or flag(rng) else [y, x], {}


def padded(rng):
    shape = shape_of(rng)
    mode = str(rng.choice(["constant", "constant", "reflect", "edge", "wrap"]))
    least = min(shape) - 1 if mode != "constant" else 3
    pads = rng.integers(0, least + 1, 2 * len(shape)).astype(np.int64)
    value = [np.array(1.5, np.float32)] if mode == "constant" and flag(rng) else []
    return "Pad", [floats(rng, *shape), pads, *value], {"mode": mode}


def pieces(rng):
    shape = (*shape_of(rng, 0, 2), int(rng.choice([3, 5, 6, 8])))
    if flag(rng):
        return "Split", [floats(rng, *shape)], {"axis": -1, "num_outputs": 3}
    first = int(rng.integers(1, shape[-1] - 1))
    sizes = np.array([first, 1, shape[-1] - first - 1])
    return "Split", [floats(rng, *shape), sizes], {"axis": len(shape) - 1}


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
    scatter_elements, scatter_nd, gather_nd, recurrent, quantised, whole_product,
    whole_convolution, quotient, bytes_, shifted, narrowed, named_sum, fourier, dilated_average,
    normal, log_sum, attention, arithmetic, padded, pieces, converted,
)  # fmt: skip


def model_of(op, arrays, attrs, opset=23):
    names = [f"in{i}" for i in range(len(arrays))]
    outs = {"TopK": 2, "RNN": 2, "GRU": 2, "LSTM": 3, "Split": 3}.get(op, 1)
    node = helper.make_node(op, names, [f"out{i}" for i in range(outs)], **attrs)
    entries = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in zip(names, arrays, strict=True)
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], op, entries, results)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run_theirs(model, arrays):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if model.graph.node[0].op_type == "MatMulInteger":  # saturates on processors without VNNI
        return list(ReferenceEvaluator(model).run(None, dict(zip(
            [entry.name for entry in model.graph.input], arrays, strict=True))))  # fmt: skip
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))


def agree(op, arrays, attrs, opset=23):
    """Raise unless both compute the same."""
    model = model_of(op, arrays, attrs, opset)
    got, wanted = onnx_backend.run_model(model, arrays), run_theirs(model, arrays)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1) if theirs.size else 1
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(scale))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_random_cases_agree_with_onnx_runtime(make, seed):
    agree(*make(np.random.default_rng(seed)))


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


@pytest.mark.parametrize(("first", "last", "op", "given", "attrs"), OLD)
def test_old_forms_of_operators_agree_with_onnx_runtime(first, last, op, given, attrs):
    rng = np.random.default_rng(0)
    arrays = [floats(rng, *shape) if isinstance(shape, tuple) else shape for shape in given]
    for opset in {first, last}:
        agree(op, arrays, attrs, opset)


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
        onnx_backend.prepare(model_of(op, arrays, attrs))
