"""Bad calls: each raises a typed error before any work, with the numbers and a remedy."""

from functools import partial

import numpy as np
import pytest
from message_lists import assert_messages

from ascend_lab.errors import AscendLabError, InputError, TypeMismatchError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops

H = "fp16"
# fmt: off
CASES = [
    # operator (and its chip), shapes, formats, attributes
    ("add", ((3,), (4,)), H, {}),
    ("add", ((2, 3), (3, 2)), H, {}),
    ("add", ((3,), (3,)), (H, "fp32"), {}),
    ("add", ((3,), (3,)), "int8", {}),
    ("add", ((3,), (3,)), "fp64", {}),
    ("add on Ascend910A", ((3,), (3,)), "bf16", {}),
    ("add", ((3,),), H, {}),
    ("add", ((3,), (3,)), (H,), {}),
    ("add", ((3,), (3,)), H, {"alpha": 2}),
    ("add", ((-3,), (3,)), H, {}),
    ("add", ((2.5,), (3,)), H, {}),
    ("add", ((1 << 20, 1 << 12), (1,)), H, {}),
    ("div", ((3,), (3,)), "int32", {}),
    ("and", ((3,), (3,)), H, {}),
    ("leaky_relu", ((3,),), H, {"alhpa": 1}),
    ("cast", ((3,),), H, {}),
    ("cast", ((3,),), H, {"dtype": "fp8"}),
    ("cast", ((3,),), H, {"dtype": "int8", "round": "up"}),
    ("cast", ((3,),), H, {"dtype": "fp32", "round": "floor"}),
    ("reduce_sum", ((2, 3),), H, {"axis": 2}),
    ("reduce_sum", ((2, 3),), H, {"axis": -3}),
    ("reduce_sum", ((2, 3),), H, {"axis": (0, -2)}),
    ("reduce_max", ((2, 0),), H, {"axis": 1}),
    ("softmax", ((2, 3),), H, {"axis": 5}),
    ("softmax", ((0, 3),), H, {}),
    ("layer_norm", ((2, 3), (2,), (3,)), H, {}),
    ("batch_norm", ((2, 3, 4, 4), (3,), (3,), (2,), (3,)), (H, *("fp32",) * 4), {}),
    ("batch_norm", ((2, 3, 4, 4), *((3,),) * 4), H, {}),
    ("transpose", ((2, 3),), H, {"perm": (0, 0)}),
    ("transpose", ((2, 3),), H, {"perm": (0, 2)}),
    ("reshape", ((2, 3),), H, {"shape": (4,)}),
    ("reshape", ((2, 3),), H, {"shape": (-1, -1)}),
    ("reshape", ((2, 3),), H, {"shape": (4, -1)}),
    ("expand", ((2, 3),), H, {"shape": (2, 4)}),
    ("concat", ((2, 3), (2, 4)), H, {"axis": 0}),
    ("concat", ((2, 3), (2, 3)), (H, "fp32"), {}),
    ("split", ((7,),), H, {"sizes": 2}),
    ("split", ((7,),), H, {"sizes": (3, 5)}),
    ("slice", ((7,),), H, {"begin": (3,), "end": (3,)}),
    ("slice", ((7, 7),), H, {"begin": (0,), "end": (3,)}),
    ("slice", ((7,),), H, {"begin": (0,), "end": (7,), "step": (-1,)}),
    ("pad", ((7,),), H, {"pads": 5}),
    ("max_pool2d", ((1, 1, 4, 4),), H, {"kernel": 2.5}),
    ("max_pool2d", ((1, 1, 4, 4),), H, {"kernel": True}),
    ("max_pool2d", ((1, 1, 4, 4),), H, {"kernel": 2, "pad": 0.5}),
    ("reduce_sum", ((7,),), H, {"axis": "x"}),
    ("pad", ((7,),), H, {"pads": ((-1, 0),)}),
    ("gather", ((7, 2), (3,)), H, {}),
    ("gather", ((7, 2), (3,)), (H, "int32"), {"axis": 2}),
    ("scatter_add", ((7, 2), (3,), (2, 2)), (H, "int32", H), {}),
    ("embedding", ((7,), (3,)), (H, "int32"), {}),
    ("one_hot", ((3,),), "int32", {"depth": 0}),
    ("matmul", ((2, 3), (4, 5)), H, {}),
    ("matmul", ((2, 3), (3, 5)), "fp32", {}),
    ("matmul", ((3,), (3, 5)), H, {}),
    ("matmul", ((2, 3), (3, 5)), "int8", {"out_dtype": "fp16"}),
    ("matmul on Ascend310", ((2, 3), (3, 5)), "bf16", {}),
    ("batch_matmul", ((2, 3, 4), (3, 4, 5)), H, {}),
    ("gemm", ((2, 3), (3, 5), (4,)), H, {}),
    ("conv2d", ((1, 3, 4, 4), (2, 4, 3, 3)), H, {}),
    ("conv2d", ((1, 3, 2, 2), (2, 3, 3, 3)), H, {}),
    ("conv2d", ((3, 4, 4), (2, 3, 3, 3)), H, {}),
    ("conv2d", ((1, 3, 4, 4), (2, 3, 3, 3)), H, {"groups": 2}),
    ("conv2d", ((1, 3, 4, 4), (2, 3, 3, 3)), H, {"stride": 0}),
    ("conv2d", ((1, 3, 4, 4), (2, 3, 3, 3), (3,)), H, {}),
    ("conv_transpose2d", ((1, 3, 4, 4), (3, 2, 3, 3)), H, {"stride": 2, "output_padding": 2}),
    ("max_pool2d", ((1, 3, 4, 4),), H, {"kernel": 2, "pad": 2}),
    ("max_pool2d", ((1, 3, 4, 4),), H, {"kernel": 5}),
    ("attention", ((2, 3), (4, 3), (5, 3)), H, {}),
    ("attention", ((2, 3), (4, 3), (4, 3), (3, 4)), H, {}),
    ("adam", ((3,), (3,), (4,), (3,)), "fp32", {}),
    ("cross_entropy", ((3, 4), (3,)), H, {}),
    ("conv2d_grad_weight", ((1, 4, 8, 8), (1, 4, 8, 8)), H, {"kernel": 3}),
    ("conv2d_grad_weight", ((2, 4, 8, 8), (1, 4, 8, 8)), H, {"kernel": 1}),
    ("conv2d_grad_weight", ((1, 4, 8, 8), (1, 6, 8, 8)), H, {"kernel": 1, "groups": 4}),
    ("conv2d_grad_weight", ((1, 4, 8), (1, 6, 8, 8)), H, {"kernel": 1}),
    ("conv2d_grad_weight", ((1, 4, 2, 2), (1, 6, 1, 1)), H, {"kernel": 5}),
    ("conv2d_grad_weight", ((1, 1, 1, 1), (1, 1, 1, 1)), "int8", {"kernel": 1}),
    ("avg_pool2d_grad", ((1, 4, 4, 4),), H, {"kernel": 2, "size": (7, 6)}),
]
# fmt: on


def call_of(how, name, shapes, dtypes, attrs):
    """The check of a call, or its compilation."""
    name, _, chip = name.partition(" on ")
    dtypes = (dtypes,) * len(shapes) if isinstance(dtypes, str) else dtypes
    return partial(how, name, shapes, dtypes, load_chip(chip or "Toy"), **attrs)


def test_bad_calls_say_what_is_needed_before_any_work():
    calls = {" ".join(map(str, case)): call_of(ops.check, *case) for case in CASES}
    assert_messages("ops", "test_ops_errors", calls)
    for case in CASES:
        with pytest.raises(AscendLabError):
            call_of(ops.compile, *case)()


@pytest.mark.parametrize("index", [-1, 3, 1 << 20])
def test_indices_outside_are_named_before_anything_runs(index):
    x = np.zeros((3, 4), np.float16)
    at = np.array([[0, 2], [index, 1]], np.int32)
    for call in (
        lambda: ops.run("gather", x, at, chip=load_chip("Toy")),
        lambda: ops.get("gather").reference(x, at),
        lambda: ops.run(
            "scatter_add", x, at, np.ones((2, 2, 4), np.float16), chip=load_chip("Toy")
        ),
    ):
        with pytest.raises(InputError, match=rf"from 0 to 2; got {index} at \(1, 0\)"):
            call()


def test_arrays_of_foreign_types_are_refused():
    for wrong in (np.zeros(3, bool), np.zeros(3, complex), np.array(["a"])):
        with pytest.raises(TypeMismatchError, match="number format"):
            ops.run("abs", wrong, chip=load_chip("Toy"))


def test_an_operator_without_expression_says_so():
    bare = ops.Operator("bare", ("x",), np.sin)
    with pytest.raises(InputError, match="set compute="):
        ops.compile(bare, ((3,),), ("fp16",), load_chip("Toy"))


def test_adam_counts_steps_from_one():
    x = np.ones(2)
    with pytest.raises(InputError, match="step: a whole number from 1"):
        ops.get("adam").reference(x, x, x, x, step=0)


def test_a_test_of_an_unknown_operator_needs_an_import_line():
    with pytest.raises(AscendLabError, match="import line"):
        ops.make_test(ops.Operator("mine", ("x",), np.sin))
