"""Operators that become many nodes, on random shapes and attributes, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.onnx import backend as onnx_backend

SEEDS = range(6)


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def whole(rng, low, high, shape, kind=np.int64):
    return rng.integers(low, high, shape).astype(kind)


def shape_of(rng, least=1, most=4):
    return tuple(int(n) for n in rng.integers(1, 6, rng.integers(least, most + 1)))


def arg(rng):
    shape = shape_of(rng)
    attrs = {"axis": int(rng.integers(-len(shape), len(shape))), "keepdims": int(rng.integers(2))}
    x = np.round(floats(rng, *shape))
    return (
        "ArgMax" if rng.integers(2) else "ArgMin",
        [x],
        attrs | {"select_last_index": int(rng.integers(2))},
    )


def top_k(rng):
    shape = shape_of(rng)
    axis = int(rng.integers(-len(shape), len(shape)))
    k = np.array([rng.integers(1, shape[axis] + 1)])
    return (
        "TopK",
        [np.round(floats(rng, *shape)), k],
        {"axis": axis, "largest": int(rng.integers(2))},
    )


def trilu(rng):
    x = floats(rng, *shape_of(rng, 2))
    return "Trilu", [x, whole(rng, -3, 4, ())], {"upper": int(rng.integers(2))}


def cumulated(rng):
    shape = shape_of(rng)
    x = whole(rng, -9, 9, shape, np.int32) if rng.integers(2) else floats(rng, *shape)
    attrs = {"exclusive": int(rng.integers(2)), "reverse": int(rng.integers(2))}
    return "CumSum", [x, whole(rng, -len(shape), len(shape), ())], attrs


def gather_elements(rng):
    shape = shape_of(rng)
    axis = int(rng.integers(-len(shape), len(shape)))
    size = [int(rng.integers(1, n + 1)) for n in shape]
    indices = whole(rng, -shape[axis], shape[axis], size)
    return "GatherElements", [floats(rng, *shape), indices], {"axis": axis}


def gather_nd(rng):
    shape = shape_of(rng, 2)
    batch = int(rng.integers(0, 2))
    depth = int(rng.integers(1, len(shape) - batch + 1))
    lead = (*shape[:batch], *shape_of(rng, 0, 2))
    tuples = np.stack([whole(rng, -n, n, lead) for n in shape[batch : batch + depth]], -1)
    return "GatherND", [floats(rng, *shape), tuples], {"batch_dims": batch}


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


def compress(rng):
    shape = shape_of(rng)
    axis = int(rng.integers(-len(shape), len(shape)))
    kept = rng.integers(0, 2, shape[axis]).astype(bool)
    kept[0] = True
    return "Compress", [floats(rng, *shape), kept], {"axis": axis}


def reverse_sequence(rng):
    shape = shape_of(rng, 2)
    time = int(rng.integers(2))
    lengths = whole(rng, 1, shape[time] + 1, shape[1 - time])
    return "ReverseSequence", [floats(rng, *shape), lengths], {
        "time_axis": time, "batch_axis": 1 - time
    }  # fmt: skip


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


def pooled(rng):
    x = floats(rng, 1, 2, 9, 8)
    attrs = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}
    return "LpPool", [x], attrs | {"p": int(rng.integers(1, 4))}


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


CASES = (
    arg, top_k, trilu, cumulated, gather_elements, gather_nd, scatter_elements, scatter_nd,
    compress, reverse_sequence, recurrent, quantised, whole_product, whole_convolution, quotient,
    bytes_, shifted, narrowed, named_sum, fourier, pooled, dilated_average, normal, log_sum,
    attention,
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
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_composed_operators_agree_with_onnx_runtime(make, seed):
    op, arrays, attrs = make(np.random.default_rng(seed))
    model = model_of(op, arrays, attrs)
    wanted = run_theirs(model, arrays)
    got = onnx_backend.run_model(model, arrays)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1) if theirs.size else 1
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(scale))


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
