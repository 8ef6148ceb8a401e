"""Operators: references against plain-Python oracles; what one operator says and refuses."""

import math

import numpy as np
import ops_oracles as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import case_of, conv, deconv, pool

from ascend_lab import ops
from ascend_lab.chip import load_chip
from ascend_lab.errors import InputError, ShapeError
from ascend_lab.ops import verify
from ascend_lab.ops.formats import is_float, round_to, spacing


def drawn(name, data):
    """Draw a case without empty tensors and fp64 inputs for it."""
    operator = ops.get(name)
    shapes, attrs = data.draw(case_of(name).filter(lambda c: all(0 not in s for s in c[0])))
    return (
        operator,
        verify.sample(operator, shapes, "fp64", attrs, data.draw(st.integers(0, 9))),
        attrs,
    )


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


# -- references -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", oracle.SCALAR)
def test_one_operand(name):
    operator = ops.get(name)
    (x,) = verify.sample(operator, ((3, 67),), "fp64", {}, 1)
    wanted = oracle.each(x.shape, lambda i, j: oracle.SCALAR[name](float(x[i, j])))
    close(operator.reference(x), wanted)


@pytest.mark.parametrize("name", oracle.TWO)
def test_two_operands_broadcast(name):
    operator = ops.get(name)
    x, y = verify.sample(operator, ((5, 1, 7), (3, 1)), "fp64", {}, 2)
    wanted = oracle.each(
        (5, 3, 7), lambda i, j, k: oracle.TWO[name](float(x[i, 0, k]), float(y[j, 0]))
    )
    close(operator.reference(x, y), wanted)


def test_bitwise_operators_work_on_bits():
    x, y = np.array([12, -1, 0], np.int32), np.array([10, 5, 7], np.int32)
    np.testing.assert_array_equal(ops.get("and").reference(x, y), [8, 5, 0])
    np.testing.assert_array_equal(ops.get("or").reference(x, y), [14, -1, 7])
    np.testing.assert_array_equal(ops.get("not").reference(x), [-13, 0, -1])


def test_select_takes_x_where_the_condition_is_not_zero():
    got = ops.get("select").reference(
        np.array([1, 0, -2], np.float16), np.full(3, 5, np.float16), np.arange(3).astype(np.float16)
    )
    np.testing.assert_array_equal(got, [5, 1, 5])


@pytest.mark.parametrize(
    ("dtype", "mode", "wanted"),
    [
        ("int32", "rint", [-2, -2, 0, 2, 2, 200]),
        ("int32", "floor", [-3, -2, 0, 1, 2, 200]),
        ("int32", "ceil", [-2, -1, 1, 2, 3, 200]),
        ("int32", "trunc", [-2, -1, 0, 1, 2, 200]),
        ("int8", "rint", [-2, -2, 0, 2, 2, 127]),
        ("uint8", "rint", [0, 0, 0, 2, 2, 200]),
    ],
)
def test_casts_round_halves_to_even_and_saturate(dtype, mode, wanted):
    x = np.array([-2.5, -1.5, 0.5, 1.5, 2.5, 200], np.float16)
    np.testing.assert_array_equal(ops.get("cast").reference(x, dtype=dtype, round=mode), wanted)


def test_a_reference_rounds_once():
    x = np.full(3000, 1.0, np.float16)
    assert ops.get("reduce_sum").reference(x) == 3000  # summed in fp16 it would stop at 2048
    big = np.array([60000.0], np.float16)
    assert ops.get("add").reference(big, big)[0] == np.inf


@settings(max_examples=25)
@given(st.data())
def test_reductions_fold_element_by_element(data):
    name = data.draw(st.sampled_from(["sum", "mean", "max", "min", "prod"]))
    operator, (x,), attrs = drawn(f"reduce_{name}", data)
    axis = attrs["axis"]
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    folded = {a % x.ndim for a in axes}
    groups = {}
    for index in np.ndindex(x.shape):
        key = tuple(0 if i in folded else n for i, n in enumerate(index))
        groups.setdefault(key, []).append(float(x[index]))
    fold = {
        "sum": math.fsum,
        "mean": lambda v: math.fsum(v) / len(v),
        "max": max,
        "min": min,
        "prod": math.prod,
    }[name]
    got = operator.reference(x, **attrs)
    kept = tuple(1 if i in folded else n for i, n in enumerate(x.shape))
    assert got.shape == kept if attrs["keepdims"] else got.ndim == x.ndim - len(folded)
    for key, values in groups.items():
        assert got.reshape(kept)[key] == pytest.approx(fold(values), rel=1e-12, abs=1e-12)


def test_softmax_and_layer_norm_by_rows():
    x, scale, bias = verify.sample(ops.get("layer_norm"), ((4, 9), (9,), (9,)), "fp64", {}, 3)
    close(ops.get("softmax").reference(x), oracle.softmax_rows(x))
    close(ops.get("log_softmax").reference(x), np.log(oracle.softmax_rows(x)))
    close(
        ops.get("layer_norm").reference(x, scale, bias),
        oracle.layer_norm_rows(x, scale, bias, 1e-5),
    )
    rms = [[v / math.sqrt(math.fsum(u * u for u in r) / 9 + 1e-5) for v in r] for r in x]
    close(ops.get("rms_norm").reference(x, np.ones(9)), np.array(rms))


def test_lrn_by_neighbours():
    op = ops.get("lrn")
    (x,) = verify.sample(op, ((2, 7, 3),), "fp64", {"size": 4}, 3)
    got = op.reference(x, size=4, alpha=0.5, beta=0.75, bias=2.0)
    for n, c, i in np.ndindex(x.shape):
        near = [x[n, k, i] ** 2 for k in range(c - 1, c + 3) if 0 <= k < 7]
        assert got[n, c, i] == pytest.approx(x[n, c, i] / (2 + 0.5 / 4 * sum(near)) ** 0.75)


def test_softmax_does_not_overflow():
    x = np.array([[60000.0, -60000.0, 60000.0]], np.float16)
    np.testing.assert_array_equal(ops.get("softmax").reference(x), [[0.5, 0, 0.5]])


def test_batch_norm_uses_the_given_or_the_batch_statistics():
    shapes = ((2, 3, 2, 2), (3,), (3,), (3,), (3,))
    x, scale, bias, mean, var = verify.sample(ops.get("batch_norm"), shapes, "fp64", {}, 4)

    def wanted(m, v):
        return oracle.each(
            x.shape,
            lambda n, c, i, j: (x[n, c, i, j] - m[c]) / math.sqrt(v[c] + 1e-5) * scale[c] + bias[c],
        )

    close(ops.get("batch_norm").reference(x, scale, bias, mean, var), wanted(mean, var))
    values = [[float(x[n, c, i, j]) for n, i, j in np.ndindex(2, 2, 2)] for c in range(3)]
    now = [math.fsum(v) / 8 for v in values]
    spread = [math.fsum((u - m) ** 2 for u in v) / 8 for v, m in zip(values, now, strict=True)]
    y, running, running_var = ops.get("batch_norm_training").reference(x, scale, bias, mean, var)
    close(y, wanted(now, spread))
    close(running, [0.9 * a + 0.1 * b for a, b in zip(mean, now, strict=True)])
    close(running_var, [0.9 * a + 0.1 * b for a, b in zip(var, spread, strict=True)])


FEW = (1, 2, 3)
SMALL_CASES = {
    "conv2d": lambda: conv(FEW),
    "conv_transpose2d": lambda: deconv(FEW),
    "max_pool2d": lambda: pool(channels=FEW),
    "avg_pool2d": lambda: pool(average=True, channels=FEW),
}
ORACLES = {
    "conv2d": oracle.conv2d,
    "conv_transpose2d": oracle.conv_transpose2d,
    "max_pool2d": lambda x, **attrs: oracle.pool(x, "max", **attrs),
    "avg_pool2d": lambda x, **attrs: oracle.pool(x, "avg", **attrs),
}


@pytest.mark.parametrize("name", SMALL_CASES)
@settings(max_examples=25)
@given(st.data())
def test_windows_follow_the_definition(name, data):
    operator = ops.get(name)
    shapes, attrs = data.draw(SMALL_CASES[name]())
    arrays = verify.sample(operator, shapes, "fp64", attrs, data.draw(st.integers(0, 9)))
    close(operator.reference(*arrays, **attrs), ORACLES[name](*arrays, **attrs))


def test_global_pools_see_the_whole_image():
    (x,) = verify.sample(ops.get("global_avg_pool"), ((2, 3, 4, 5),), "fp64", {}, 5)
    means = oracle.each((2, 3, 1, 1), lambda n, c, i, j: math.fsum(x[n, c].ravel()) / 20)
    close(ops.get("global_avg_pool").reference(x), means)
    tops = oracle.each((2, 3, 1, 1), lambda n, c, i, j: max(x[n, c].ravel().tolist()))
    close(ops.get("global_max_pool").reference(x), tops)


def test_products_of_matrices_and_batches():
    a, b = verify.sample(ops.get("matmul"), ((5, 7), (7, 3)), "fp64", {}, 6)
    close(ops.get("matmul").reference(a, b), oracle.matmul(a, b))
    flipped = ops.get("matmul").reference(a.T, b.T, trans_a=True, trans_b=True)
    close(flipped, oracle.matmul(a, b))
    batch = ops.get("batch_matmul").reference(np.stack([a, 2 * a]), b[None])
    close(batch, np.stack([oracle.matmul(a, b), oracle.matmul(2 * a, b)]))
    bias = np.arange(3.0)
    close(
        ops.get("gemm").reference(a, b, bias, alpha=0.5, beta=2.0),
        0.5 * oracle.matmul(a, b) + np.array([[0.0, 2.0, 4.0]] * 5),
    )


def test_int8_products_add_up_in_int32():
    a, b = np.full((1, 1000), 127, np.int8), np.full((1000, 1), -128, np.int8)
    got = ops.get("matmul").reference(a, b)
    assert got.dtype == np.int32
    assert got[0, 0] == -127 * 128 * 1000


def test_attention_by_rows():
    shapes = ((2, 3, 4), (2, 5, 4), (2, 5, 6), (3, 5))
    q, k, v, mask = verify.sample(ops.get("attention"), shapes, "fp64", {}, 7)
    mask = np.where(mask > 1, -10000.0, 0.0)
    for n in range(2):
        p = oracle.softmax_rows(oracle.matmul(q[n], k[n].T) / 2.0 + mask)
        close(ops.get("attention").reference(q, k, v, mask)[n], oracle.matmul(p, v[n]))
    scores = ops.get("attention_scores").reference(q, k)
    p = ops.get("masked_softmax").reference(scores, mask)
    whole = ops.get("attention").reference(q, k, v, mask)
    close(ops.get("attention_context").reference(p, v), whole)


# -- moves ----------------------------------------------------------------------------------------
def test_moves_put_elements_where_they_belong():
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    turned = ops.get("transpose").reference(x, perm=(2, 0, 1))
    assert turned[3, 1, 2] == x[1, 2, 3]
    assert ops.get("reshape").reference(x, shape=(0, -1)).tolist()[1][0] == 12
    parts = ops.get("split").reference(x, sizes=(1, 2), axis=1)
    np.testing.assert_array_equal(ops.get("concat").reference(*parts, axis=1), x)
    cut = ops.get("slice").reference(x, begin=(0, -2, 1), end=(2, 3, 4), step=(1, 1, 2))
    assert cut[1].tolist() == [[17, 19], [21, 23]]
    wide = ops.get("pad").reference(cut, pads=((0, 0), (1, 0), (0, 2)), value=-1)
    assert wide[1].tolist() == [[-1] * 4, [17, 19, -1, -1], [21, 23, -1, -1]]
    assert ops.get("expand").reference(x[:1, :1], shape=(5, 1, 4))[4, 0, 2] == 2


def test_gather_and_embedding_pick_rows_in_order():
    x, rows = np.arange(12, dtype=np.float16).reshape(3, 4), np.array([[2, 0], [2, 2]], np.int32)
    got = ops.get("gather").reference(x, rows)
    assert got.shape == (2, 2, 4)
    np.testing.assert_array_equal(got[1, 0], x[2])
    np.testing.assert_array_equal(ops.get("embedding").reference(x, rows), got)
    columns = ops.get("gather").reference(x, np.array([3], np.int32), axis=1)
    np.testing.assert_array_equal(columns, [[3], [7], [11]])


def test_repeated_indices_last_wins_or_all_add():
    x, at = np.zeros((3, 2), np.float32), np.array([1, 2, 1], np.int32)
    rows = np.array([[1, 1], [5, 5], [2, 2]], np.float32)
    replaced = ops.get("scatter_update").reference(x, at, rows)
    np.testing.assert_array_equal(replaced, [[0, 0], [2, 2], [5, 5]])
    added = ops.get("scatter_add").reference(x, at, rows)
    np.testing.assert_array_equal(added, [[0, 0], [3, 3], [5, 5]])


def test_one_hot_marks_the_class():
    got = ops.get("one_hot").reference(np.array([2, 0], np.int32), depth=3, dtype="int32")
    np.testing.assert_array_equal(got, [[0, 0, 1], [1, 0, 0]])


# -- optimisers and losses ------------------------------------------------------------------------
def test_sgd_with_momentum_walks_like_the_textbook():
    p, v = np.array([1.0]), np.array([0.0])
    for step in range(3):
        p, v = ops.get("sgd_momentum").reference(p, 2 * p, v, lr=0.1, momentum=0.5)
        assert p[0] == pytest.approx([0.8, 0.54, 0.302][step])


def test_adam_first_step_moves_by_the_learning_rate():
    g = np.array([3.0, -0.01])
    p, m, s = ops.get("adam").reference(np.zeros(2), g, np.zeros(2), np.zeros(2), lr=0.1)
    np.testing.assert_allclose(p, [-0.1, 0.1], rtol=1e-4)
    np.testing.assert_allclose(m, 0.1 * g)
    np.testing.assert_allclose(s, 0.001 * g**2)


def test_cross_entropy_of_a_uniform_guess_is_log_classes():
    target = np.eye(4)[[1, 3]]
    close(ops.get("cross_entropy").reference(np.zeros((2, 4)), target), [math.log(4)] * 2)


# -- formats and bounds ---------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "bf16"])
def test_spacing_is_the_distance_to_the_next_number(dtype):
    values = round_to(np.array([0.0, 1e-7, 0.3, 1.0, 1.5, 1000.0]), dtype)
    if dtype == "bf16":
        assert spacing(values, dtype)[3] == 2.0**-7
    else:
        np.testing.assert_array_equal(spacing(values, dtype), np.spacing(values))


def test_bounds_are_tight_enough_to_see_one_wrong_bit():
    operator = ops.get("exp")
    x = np.linspace(0, 1, 50).astype(np.float16)
    y = operator.reference(x)
    verify.check_within(operator, np.nextafter(y, np.float16(9)), y)
    with pytest.raises(AssertionError, match="1 ulps"):
        verify.check_within(
            operator, np.nextafter(np.nextafter(y, np.float16(9)), np.float16(9)), y
        )
    with pytest.raises(AssertionError, match="off by more than 0"):
        verify.check_within(ops.get("abs"), np.nextafter(y, np.float16(9)), y)


# -- kernels --------------------------------------------------------------------------------------
def test_empty_tensors_launch_nothing():
    chip = load_chip("Ascend910A")
    got = ops.run("add", np.zeros((0, 3), np.float16), np.zeros((1, 3), np.float16), chip=chip)
    assert got.shape == (0, 3)
    total = ops.run("reduce_sum", np.zeros((2, 0), np.float16), chip=chip, axis=1)
    np.testing.assert_array_equal(total, [0, 0])
    with pytest.raises(ShapeError, match="elements to compute"):
        ops.compile("add", ((0,), (1,)), ("fp16", "fp16"), chip)


def test_time_of_an_operator_is_a_timeline():
    chip = load_chip("Ascend910A")
    line = ops.time("add", ((4096, 64),) * 2, ("fp16", "fp16"), chip)
    assert line.time_s > 3 * 4096 * 64 * 2 / chip.device_memory.rate_bytes_per_s / 2
    assert is_float("fp16")


def test_names_are_looked_up_with_help():
    assert ops.get("conv2d") is ops.OPERATORS["conv2d"]
    with pytest.raises(InputError, match="did you mean"):
        ops.get("conv2")
    with pytest.raises(InputError, match="free"):
        ops.register(ops.get("add"))
