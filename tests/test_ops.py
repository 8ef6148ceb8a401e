"""Operators: what references are to the last digit, what one operator says and refuses.

That references compute what others compute is asked of ONNX Runtime (`test_onnx_export.py`).
"""

import math

import numpy as np
import pytest

from ascend_lab.errors import InputError, ShapeError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops
from ascend_lab.operators.ops import verify
from ascend_lab.operators.ops.expressions import run
from ascend_lab.operators.ops.formats import round_to, spacing


# -- references -----------------------------------------------------------------------------------
def test_a_reference_rounds_once():
    x = np.full(3000, 1.0, np.float16)
    assert ops.get("reduce_sum").reference(x) == 3000  # summed in fp16 it would stop at 2048
    big = np.array([60000.0], np.float16)
    assert ops.get("add").reference(big, big)[0] == np.inf


def test_softmax_does_not_overflow():
    x = np.array([[60000.0, -60000.0, 60000.0]], np.float16)
    np.testing.assert_array_equal(ops.get("softmax").reference(x), [[0.5, 0, 0.5]])


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("erf", math.erf),
        ("gelu", lambda x: x / (1 + math.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)))),
        ("softplus", lambda x: math.log(1 + math.exp(x))),
    ],
)
def test_functions_that_numpy_lacks(name, formula):
    x = np.linspace(-7, 7, 999)
    np.testing.assert_allclose(ops.get(name).reference(x), list(map(formula, x)), rtol=1e-12)


def test_epsilon_is_added_to_what_is_divided_by():
    x = np.array([[-1e-3, 1e-3]])
    one = np.ones(2)
    zero = np.zeros(2)
    for name, given in (
        ("layer_norm", (one, zero)),
        ("rms_norm", (one,)),
        ("batch_norm", (one, zero, zero, np.full(2, 1e-6))),
    ):
        np.testing.assert_allclose(ops.get(name).reference(x, *given, epsilon=3e-6), x / 2e-3)


# -- optimisers and losses ------------------------------------------------------------------------
def test_sgd_with_momentum_walks_like_the_textbook():
    p = np.array([1.0])
    v = np.array([0.0])
    for step in range(3):
        p, v = ops.get("sgd_momentum").reference(p, 2 * p, v, lr=0.1, momentum=0.5)
        assert p[0] == pytest.approx([0.8, 0.54, 0.302][step])


def test_adam_first_step_moves_by_the_learning_rate():
    g = np.array([3.0, -0.01])
    p, m, s = ops.get("adam").reference(np.zeros(2), g, np.zeros(2), np.zeros(2), lr=0.1)
    np.testing.assert_allclose(p, [-0.1, 0.1], rtol=1e-4)
    np.testing.assert_allclose(m, 0.1 * g)
    np.testing.assert_allclose(s, 0.001 * g**2)


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
def test_a_cast_rounds_once_and_saturates_whatever_it_passes_through(chip):
    """Numbers beside a half, which fp16 would round onto it, and beyond what the steps hold."""
    near = [sign * (n + 0.5 + turn * 2.0**-13) for n in (0, 1, 2, 126) for turn in (-1, 0, 1)
            for sign in (-1, 1)]  # fmt: skip
    for dtype, low, high in (("int8", -128, 127), ("uint8", 0, 255), ("int32", -(2**31), 2**31)):
        x = np.array([*near, -1e6, 255.5, 65504.5, 70000.0], np.float32)
        got = run("cast", x, chip=load_chip(chip), dtype=dtype)
        np.testing.assert_array_equal(got, np.clip(np.rint(x.astype(np.float64)), low, high))
    whole = np.array([-70001, -129, 257, 2**20 + 2**12, 2**24 - 1], np.int32)
    for dtype in ("fp32", *(["bf16"] if "bf16" in load_chip(chip).cube else [])):
        got = run("cast", whole, chip=load_chip(chip), dtype=dtype)
        np.testing.assert_array_equal(got, round_to(whole.astype(np.float64), dtype))


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
        verify.check_within(operator, y + 2 * np.spacing(y), y)
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


def test_names_are_looked_up_with_help():
    assert ops.get("conv2d") is ops.OPERATORS["conv2d"]
    with pytest.raises(InputError, match="did you mean"):
        ops.get("conv2")
    with pytest.raises(InputError, match="free"):
        ops.register(ops.get("add"))
