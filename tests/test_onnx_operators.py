"""Importing one operator with random shapes and attributes: ONNX Runtime computes the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto
from test_onnx_composed import floats, model_of, run_theirs, shape_of, whole

from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.onnx import backend as onnx_backend

SEEDS = range(8)
REFUSED = ("needs no output_padding",)
"""What refusals of these random cases may say: few of them are refused."""
AUTO = ("NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def flag(rng):
    return bool(rng.integers(2))


def axis_of(rng, shape):
    return int(rng.integers(-len(shape), len(shape)))


def window(rng, rank, *, dilated=True, most=3):
    """Return attributes of a window over `rank` axes."""
    kernel = [int(n) for n in rng.integers(1, most + 1, rank)]
    attrs = {"kernel_shape": kernel, "auto_pad": str(rng.choice(AUTO))}
    attrs["strides"] = [int(n) for n in rng.integers(1, 4, rank)]
    if dilated and attrs["auto_pad"] in ("NOTSET", "VALID"):
        attrs["dilations"] = [int(n) for n in rng.integers(1, 3, rank)]
    if attrs["auto_pad"] == "NOTSET":
        attrs["pads"] = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
    return attrs


def image(rng, channels=4):
    return floats(rng, 2, channels, *rng.integers(5, 9, rng.integers(1, 3)))


def conv(rng):
    x, groups = image(rng), int(rng.choice([1, 2, 4]))
    attrs = window(rng, x.ndim - 2) | {"group": groups}
    w = floats(rng, 2 * groups, 4 // groups, *attrs["kernel_shape"])
    return "Conv", [x, w, *([floats(rng, 2 * groups)] if flag(rng) else [])], attrs


def conv_transpose(rng):
    x, groups = image(rng), int(rng.choice([1, 2]))
    attrs = window(rng, x.ndim - 2) | {"group": groups}
    if flag(rng) and attrs["auto_pad"] == "NOTSET":
        attrs["output_padding"] = [int(rng.integers(0, s)) for s in attrs["strides"]]
    w = floats(rng, 4, 3, *attrs["kernel_shape"])
    return "ConvTranspose", [x, w, *([floats(rng, 3 * groups)] if flag(rng) else [])], attrs


def pool(rng):
    x = image(rng)
    attrs = window(rng, x.ndim - 2) | {"ceil_mode": int(flag(rng))}
    if attrs["auto_pad"] != "NOTSET":  # where ONNX Runtime fails for steps beyond the kernel
        attrs["ceil_mode"] = 0
        attrs["strides"] = [min(attrs["strides"][0], k) for k in attrs["kernel_shape"]]
    if flag(rng):
        return "MaxPool", [x], attrs
    return "AveragePool", [x], attrs | {"count_include_pad": int(flag(rng))}


def gemm(rng):
    m, k, n = (int(v) for v in rng.integers(1, 6, 3))
    ta, tb = flag(rng), flag(rng)
    a, b = floats(rng, *((k, m) if ta else (m, k))), floats(rng, *((n, k) if tb else (k, n)))
    shapes = [(m, n), (n,), (1, n), (m, 1), (1,), ()]
    c = [floats(rng, *shapes[rng.integers(len(shapes))])] if flag(rng) else []
    attrs = {"alpha": float(rng.choice([1, 0.5])), "beta": float(rng.choice([1, 0.25]))}
    return "Gemm", [a, b, *c], attrs | {"transA": int(ta), "transB": int(tb)}


def matmul(rng):
    m, k, n = (int(v) for v in rng.integers(1, 6, 3))
    left, right = [((k,), (k,)), ((m, k), (k, n)), ((k,), (2, k, n)), ((2, 3, m, k), (k,)),
                   ((2, 1, m, k), (3, k, n))][rng.integers(5)]  # fmt: skip
    return "MatMul", [floats(rng, *left), floats(rng, *right)], {}


def reduction(rng):
    kind = str(rng.choice(["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum"]))
    shape = shape_of(rng)
    x = np.abs(floats(rng, *shape)) + np.float32(0.1)
    attrs = {"keepdims": int(flag(rng)), "noop_with_empty_axes": int(flag(rng))}
    count = int(rng.integers(0 if kind in ("Sum", "Max", "Mean") else 1, len(shape) + 1))
    axes = rng.permutation(len(shape))[:count] - len(shape) * int(flag(rng))
    return f"Reduce{kind}", [x, axes.astype(np.int64)], attrs


def arithmetic(rng):
    shape = shape_of(rng)
    other = tuple(n if flag(rng) else 1 for n in shape)[int(rng.integers(0, len(shape))) :]
    op = str(rng.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "PRelu"]))
    x, y = floats(rng, *shape), floats(rng, *other)
    if op == "Pow":
        x = np.abs(x) + np.float32(0.1)
    return op, [x, y] if op in ("Pow", "PRelu") or flag(rng) else [y, x], {}


def comparison(rng):
    shape = shape_of(rng)
    op = str(rng.choice(["Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"]))
    if flag(rng):
        return op, [np.round(floats(rng, *shape)), np.round(floats(rng, *shape))], {}
    return op, [whole(rng, -2, 3, shape, np.int32), whole(rng, -2, 3, shape, np.int32)], {}


def logic(rng):
    shape = shape_of(rng)
    x, y = (rng.integers(0, 2, shape).astype(bool) for _ in range(2))
    op = str(rng.choice(["And", "Or", "Xor", "Not", "Equal"]))
    return op, [x] if op == "Not" else [x, y], {}


def where(rng):
    shape = shape_of(rng)
    condition = rng.integers(0, 2, shape[-1:]).astype(bool)
    kind = [np.float32, np.int32, np.int64, np.uint8][rng.integers(4)]
    x, y = whole(rng, 0, 99, shape, kind), whole(rng, 0, 99, (), kind)
    return "Where", [condition, x, y], {}


UNARY = (
    ("Relu", {}), ("LeakyRelu", {"alpha": 0.2}), ("LeakyRelu", {"alpha": 1.5}), ("Selu", {}),
    ("Elu", {"alpha": 2.0}), ("Celu", {"alpha": 0.7}), ("HardSigmoid", {"alpha": 0.3}),
    ("HardSwish", {}), ("Softplus", {}), ("Softsign", {}), ("ThresholdedRelu", {"alpha": 0.3}),
    ("Gelu", {}), ("Gelu", {"approximate": "tanh"}), ("Mish", {}), ("Sigmoid", {}), ("Tanh", {}),
    ("Erf", {}), ("Round", {}), ("Floor", {}), ("Ceil", {}), ("Sign", {}), ("Abs", {}),
    ("Neg", {}), ("Exp", {}), ("Reciprocal", {}), ("Sinh", {}), ("Cosh", {}),
    ("Shrink", {"lambd": 0.3, "bias": 0.1}), ("IsNaN", {}), ("IsInf", {"detect_negative": 0}),
    ("Identity", {}), ("Dropout", {}), ("GlobalMaxPool", {}), ("GlobalAveragePool", {}),
    ("Flatten", {"axis": 2}), ("Size", {}), ("LRN", {"size": 3, "alpha": 0.1}),
    ("LRN", {"size": 5, "beta": 0.5, "bias": 2.0}), ("DepthToSpace", {"blocksize": 2}),
    ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}), ("SpaceToDepth", {"blocksize": 2}),
    ("MeanVarianceNormalization", {}), ("LpNormalization", {"axis": 1, "p": 1}),
    ("Transpose", {"perm": [2, 0, 3, 1]}), ("Softmax", {"axis": 1}), ("LogSoftmax", {"axis": -2}),
    ("Hardmax", {"axis": 2}),
)  # fmt: skip


def unary(rng, at=None):
    op, attrs = UNARY[rng.integers(len(UNARY)) if at is None else at]
    x = floats(rng, 2, 4, 4, 6) * np.float32(2)
    if op.startswith("Is"):
        x.ravel()[:3] = (np.nan, np.inf, -np.inf)
    return op, [x], attrs


def cut(rng):
    shape = shape_of(rng)
    axes = rng.permutation(len(shape))[: rng.integers(1, len(shape) + 1)]
    steps = rng.choice([1, 2, -1, -2], len(axes))
    starts = np.where(steps > 0, rng.integers(-7, 2, len(axes)), rng.integers(2, 9, len(axes)))
    ends = np.where(steps > 0, rng.integers(2, 9, len(axes)), -(2**40))
    return (
        "Slice",
        [floats(rng, *shape), *(v.astype(np.int64) for v in (starts, ends, axes, steps))],
        {},
    )


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


def moved(rng):
    x = floats(rng, 2, 3, 4)
    return [
        ("Reshape", [x, np.array([0, -1])], {}),
        ("Reshape", [x, np.array([4, 1, -1])], {}),
        ("Squeeze", [x[:, :1, None], np.array([1, -2])], {}),
        ("Squeeze", [x[:1, :1]], {}),
        ("Unsqueeze", [x, np.array([0, -1])], {}),
        ("Expand", [x[:, :1], np.array([5, 1, 3, 1])], {}),
        ("Tile", [x, np.array([1, 2, 3])], {}),
        ("Concat", [x, x[:, :1], x], {"axis": -2}),
        ("Flatten", [x], {"axis": -1}),
        ("Sum", [x, x[0], x[0, 0]], {}),
        ("Mean", [x, x[:1], x], {}),
    ][rng.integers(11)]


def picked(rng):
    shape = shape_of(rng)
    axis = axis_of(rng, shape)
    return "Gather", [floats(rng, *shape), whole(rng, 0, shape[axis], shape_of(rng, 0, 2))], {
        "axis": axis
    }  # fmt: skip


def marked(rng):
    depth, indices = int(rng.integers(2, 6)), shape_of(rng, 1, 2)
    values = np.array([-1, 2], [np.float32, np.int64][rng.integers(2)])
    attrs = {"axis": int(rng.integers(-len(indices) - 1, len(indices) + 1))}
    return "OneHot", [whole(rng, 0, depth, indices), np.array([depth]), values], attrs


def limited(rng):
    x, low, high = floats(rng, 3, 4), np.array(-0.5, np.float32), np.array(0.5, np.float32)
    if flag(rng):
        return "Clip", [whole(rng, -9, 9, (5,), np.int32), np.array(-3, np.int32)], {}
    return "Clip", [x, low, high] if flag(rng) else [x, low], {}


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


def normalised(rng):
    c = 5
    x, scale, bias, mean = floats(rng, 2, c, 3, 2), *(floats(rng, c) for _ in range(3))
    if flag(rng):
        variance = np.abs(floats(rng, c)) + np.float32(0.1)
        return "BatchNormalization", [x, scale, bias, mean, variance], {"epsilon": 0.01}
    axis = int(rng.integers(1, 4))
    shape = x.shape[axis:]
    if flag(rng):
        return "RMSNormalization", [x, floats(rng, *shape)], {"axis": axis}
    return "LayerNormalization", [x, floats(rng, *shape), floats(rng, *shape)], {"axis": axis - 4}


def counted(rng):
    start, delta = float(rng.integers(-5, 5)), float(rng.choice([1, 2, -1, -3, 0.5]))
    stop = start + delta * float(rng.integers(1, 8)) + 0.1
    kind = np.float32 if flag(rng) else np.int64
    delta = delta if kind == np.float32 else float(np.ceil(delta))
    return "Range", [np.array(v, kind) for v in (start, stop, delta)], {}


CASES = (
    conv, conv_transpose, pool, gemm, matmul, reduction, arithmetic, comparison, logic, where,
    cut, padded, pieces, moved, picked, marked, limited, converted, normalised, counted,
)  # fmt: skip


def agree(op, arrays, attrs, opset=23):
    """Raise unless both compute the same."""
    model = model_of(op, arrays, attrs, opset)
    wanted = run_theirs(model, arrays)
    got = onnx_backend.run_model(model, arrays)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_an_imported_operator_agrees_with_onnx_runtime(make, seed):
    op, arrays, attrs = make(np.random.default_rng(seed))
    try:
        agree(op, arrays, attrs)
    except UnsupportedError as error:
        if not any(text in str(error) for text in REFUSED):
            raise


@pytest.mark.parametrize("at", range(len(UNARY)), ids=lambda at: UNARY[at][0])
def test_functions_of_one_tensor_agree_with_onnx_runtime(at):
    agree(*unary(np.random.default_rng(at), at))


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
