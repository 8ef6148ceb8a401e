"""Gradients against central differences in fp64, for every operator that has one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import case_of

from ascend_lab import ops
from ascend_lab.ops import verify

WITH_GRADIENT = [name for name, operator in ops.OPERATORS.items() if operator.backward]
WITHOUT = {
    "not", "and", "or", "one_hot", "sgd_momentum", "adam",
    "conv2d_grad_weight", "max_pool2d_grad", "avg_pool2d_grad", "bn_training_update_grad",
}  # fmt: skip


def test_what_has_no_gradient():
    assert set(ops.OPERATORS) - set(WITH_GRADIENT) == WITHOUT
    x = np.ones(3)
    assert ops.get("adam").gradient([x] * 3, [x] * 4, [x] * 3) == (None,) * 4


@pytest.mark.parametrize("name", WITH_GRADIENT)
@settings(max_examples=30)
@given(st.data())
def test_gradients_equal_central_differences(name, data):
    shapes, attrs = data.draw(
        case_of(name).filter(lambda case: all(0 not in shape for shape in case[0]))
    )
    seed = data.draw(st.integers(0, 99))
    assert verify.check_gradient(ops.get(name), shapes, attrs, seed) > 0


def test_indices_and_conditions_have_no_gradient():
    operator = ops.get("gather")
    x, indices = np.arange(6.0).reshape(3, 2), np.array([2, 2], np.int32)
    grads = operator.gradient([np.ones((2, 2))], [x, indices], [x[indices]], axis=0)
    assert grads[1] is None
    np.testing.assert_array_equal(grads[0], [[0, 0], [0, 0], [2, 2]])


def test_of_equal_indices_only_the_last_update_gets_the_gradient():
    operator = ops.get("scatter_update")
    x, indices = np.zeros((3, 1)), np.array([1, 1], np.int32)
    updates = np.array([[5.0], [7.0]])
    y = operator.reference(x, indices, updates)
    np.testing.assert_array_equal(y, [[0], [7], [0]])
    dx, _, du = operator.gradient([np.ones((3, 1))], [x, indices, updates], [y])
    np.testing.assert_array_equal(dx, [[1], [0], [1]])
    np.testing.assert_array_equal(du, [[0], [1]])


def test_the_gradient_of_a_product_holds_where_a_factor_is_zero():
    operator = ops.get("reduce_prod")
    x = np.array([2.0, 0.0, 3.0])
    (grad,) = operator.gradient([np.ones(())], [x], [np.zeros(())])
    np.testing.assert_array_equal(grad, [0, 6, 0])


def test_a_wrong_gradient_is_found():
    broken = ops.Operator(
        "broken", ("x",), np.sin, backward=lambda grads, inputs, outputs: -np.cos(inputs[0])
    )
    with pytest.raises(AssertionError, match="central differences"):
        verify.check_gradient(broken, ((5,),), {})
