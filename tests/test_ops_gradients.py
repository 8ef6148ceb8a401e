"""Gradients against central differences in fp64, for every operator that has a rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import case_of

from ascend_lab import ops
from ascend_lab.errors import UnsupportedError
from ascend_lab.ops import verify

WITH_GRADIENT = [name for name, operator in ops.OPERATORS.items() if operator.backward]
WITHOUT = {
    "not", "and", "or", "one_hot", "sgd_momentum", "adam", "reduce_prod", "scatter_update", "lrn",
    "conv2d_grad_weight", "max_pool2d_grad", "avg_pool2d_grad",
    "bn_training_reduce", "bn_training_update_grad",
}  # fmt: skip


def test_what_has_no_gradient():
    assert set(ops.OPERATORS) - set(WITH_GRADIENT) == WITHOUT
    with pytest.raises(UnsupportedError, match="a gradient rule for operator adam"):
        ops.gradient("adam", [np.ones(3)] * 3, [np.ones(3)] * 4, [np.ones(3)] * 3)


@pytest.mark.parametrize("name", WITH_GRADIENT)
@settings(max_examples=15)
@given(st.data())
def test_gradients_equal_central_differences(name, data):
    shapes, attrs = data.draw(
        case_of(name).filter(lambda case: all(0 not in shape for shape in case[0]))
    )
    seed = data.draw(st.integers(0, 99))
    assert verify.check_gradient(ops.get(name), shapes, attrs, seed) > 0


def test_indices_and_conditions_have_no_gradient():
    x, indices = np.arange(6.0).reshape(3, 2), np.array([2, 2], np.int32)
    grads = ops.gradient("gather", [np.ones((2, 2))], [x, indices], [x[indices]], axis=0)
    assert grads[1] is None
    np.testing.assert_array_equal(grads[0], [[0, 0], [0, 0], [2, 2]])


def test_a_wrong_gradient_is_found():
    def slope(s):
        return (s.net.mul(s.g, s.net.exp(s.net.muls(s.x(), number=-1.0))),)

    broken = ops.Operator("broken", ("x",), np.exp, backward=slope)
    with pytest.raises(AssertionError, match="central differences"):
        verify.check_gradient(broken, ((5,),), {})
    forgotten = ops.Operator("forgotten", ("x",), np.exp, backward=lambda s: (None,))
    with pytest.raises(AssertionError, match="central differences"):
        verify.check_gradient(forgotten, ((5,),), {})
