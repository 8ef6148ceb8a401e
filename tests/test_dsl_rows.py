"""Rows on the vector unit: ragged ends moved by whole blocks, values right on poisoned memory."""

import numpy as np
import pytest
from dsl_oracles import Known, binary, fold, known, layer_norm, softmax, unary
from dsl_strategies import check_auto, chip_of
from hypothesis import given, strategies as st

from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import dsl as te
from bench.rows import ROWS as OPERATORS

CHIPS = ("Ascend310", "Ascend910A", "Ascend910B2")
LIKE_OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("Ascend310", "Ascend910A")]
each_chip = pytest.mark.parametrize("chip", ["Ascend310P3", "Ascend910B2", *LIKE_OTHERS])
ROWS = ((5, 197), (1, 1000), (37, 30), (2, 3, 97), (33, 17), (40, 3), (9, 10))


def rows(shape: tuple[int, ...], dtype: str) -> Known:
    """Rows with a masked one, a subnormal one and a large one among them."""
    x = np.random.default_rng(sum(shape)).normal(size=shape).astype(numpy_type(dtype))
    flat = x.reshape(-1, shape[-1])
    flat[0, 1::2] = -np.inf
    flat[-1] *= 6e-8 if dtype == "fp16" else 1e-40
    flat[len(flat) // 2] *= 8
    return known(x, dtype, "x")


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_ragged_rows_have_the_right_values(shape, dtype):
    """No race, no element read that nothing has written, no row that ends in its neighbour."""
    x = rows(shape, dtype)
    for y in (softmax(x, -1), fold("max", x, -1), binary("vadd", x, unary("vexp", x))):
        for chip in CHIPS:
            check_auto([y.named("y")], {"x": x.value}, chip)


@each_chip
@pytest.mark.parametrize("shape", [(3, 50257), (9, 32768)], ids=str)
def test_long_rows_have_the_right_values(shape, chip):
    """In parts, through tiles computed over others, and shared by the cores with a shorter end."""
    x = rows(shape, "fp16")
    check_auto([softmax(x, -1).named("y")], {"x": x.value}, chip)
    rng = np.random.default_rng(1)
    arrays = {n: rng.normal(size=s).astype(np.float16)
              for n, s in (("x", shape), ("w", shape[1:]), ("b", shape[1:]))}  # fmt: skip
    v, w, b = (known(a, "fp16", n) for n, a in arrays.items())
    check_auto([layer_norm(v, (1,), w, b).named("y")], arrays, chip)


def long_values(name: str, x: np.ndarray, chip: str) -> tuple[te.Schedule, np.ndarray]:
    """Return the default schedule of an operator on rows, and what it computes."""
    y = te.renamed(OPERATORS[name](te.placeholder(x.shape, "fp16", name="x")), "y")
    schedule = te.auto_schedule(y, chip_of(chip))
    return schedule, te.run(schedule, {"x": x})["y"].astype(np.float64)


@each_chip
def test_parts_of_rows_begin_without_the_fold_before(chip):
    """Softmax with parts that are -inf throughout, norms far off 0 and with outliers in front."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3, 50257)) * np.array([[3.0], [0.5], [1.0]])
    x[0, :30000] = x[1, 9000:] = -np.inf
    schedule, found = long_values("softmax", x.astype(np.float16), chip)
    assert any(step.primitive == "unchain" for step in schedule.steps)
    wide = x.astype(np.float16).astype(np.float64)
    powers = np.exp(wide - wide.max(1, keepdims=True))
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), rtol=6e-3, atol=1e-6)
    x = rng.normal(size=(3, 50257)) * np.array([[0.1], [1.0], [0.5]]) + [[0.0], [0.0], [1000.0]]
    x[1, :128] += 300.0
    schedule, found = long_values("layer norm", x.astype(np.float16), chip)
    assert any(step.primitive == "unchain" for step in schedule.steps)
    wide = x.astype(np.float16).astype(np.float64)
    deviation = np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    expected = (wide - wide.mean(1, keepdims=True)) / deviation
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("value", [0.0, 60000.0, -0.1])
def test_rows_of_one_value_have_no_variance(value):
    """Never less than 0, whatever rounding leaves of it."""
    x = np.full((3, 50257), value, np.float16)
    _, found = long_values("layer norm", x, "Ascend910B2")
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= 0.02 or value == 60000.0


def test_only_folds_that_have_an_online_form_are_unchained():
    """A sum of squares off the largest, or of powers of other values, stays where it is."""
    x = te.placeholder((3, 50257), name="x")
    top = te.broadcast(te.reduce_max(x, -1, True), x.shape)
    for odd in (te.vmul(te.vsub(x, top), te.vsub(x, top)), te.vexp(te.vsub(te.vabs(x), top))):
        y = te.vsub(x, te.broadcast(te.reduce_sum(odd, -1, True), x.shape))
        schedule = te.auto_schedule(y, "Ascend910B2")
        assert all(step.primitive != "unchain" for step in schedule.steps)


@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from(CHIPS))
def test_norms_of_rows_of_any_length(count, length, chip):
    rng = np.random.default_rng(count * length)
    arrays = {n: rng.normal(size=s).astype(np.float16)
              for n, s in (("x", (count, length)), ("w", (length,)), ("b", (length,)))}  # fmt: skip
    x, w, b = (known(a, "fp16", n) for n, a in arrays.items())
    check_auto([layer_norm(x, (1,), w, b).named("y")], arrays, chip)


NEAR = {
    (8192, 1024): ("softmax", "layer norm", "RMS norm", "sum", "max"),
    (1000, 1000): ("softmax", "layer norm", "RMS norm", "sum", "max"),
    (12, 197, 197): ("softmax", "layer norm", "RMS norm", "sum", "max"),
    (8192, 30): ("softmax", "layer norm", "sum"),
    (64, 32768): ("softmax", "log-softmax", "layer norm", "RMS norm", "sum"),
    (3, 50257): ("softmax", "log-softmax", "layer norm", "RMS norm", "sum"),
}


@each_chip
@pytest.mark.parametrize("shape", NEAR, ids=str)
def test_defaults_are_near_their_certified_bound(shape, chip):
    """Whole blocks within 1.4, ragged rows within 1.6, launch included; wide rows in few tiles.

    The worst is the RMS norm of 64 rows on the 910B2, 1.36: of 48 cores some have two rows, the
    others one.
    """
    limit = 1.4 if shape[-1] % 1024 == 0 else 1.6
    device = chip_of(chip)
    for name in NEAR[shape]:
        y = OPERATORS[name](te.placeholder(shape, name="x"))
        kernel = te.lower(te.auto_schedule(y, device))
        cycles = simulate_kernel(kernel, device).time_s * device.clock_hz
        assert 1.0 <= cycles / vector_bound(y, device) <= limit, name
