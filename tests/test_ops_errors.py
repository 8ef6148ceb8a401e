"""Bad calls: each raises a typed error before any work, with the numbers and a remedy."""

import numpy as np
import pytest

from ascend_lab.errors import AscendLabError, InputError, ShapeError, TypeMismatchError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops

H = "fp16"
# fmt: off
CASES = [
    # operator (and its chip), shapes, formats, attributes, error, words of the message
    ("add", ((3,), (4,)), H, {}, ShapeError, ("(3,)", "(4,)", "3 against 4")),
    ("add", ((2, 3), (3, 2)), H, {}, ShapeError, ("(2, 3)", "(3, 2)", "axis -")),
    ("add", ((3,), (3,)), (H, "fp32"), {}, TypeMismatchError, ("y", "fp16", "fp32", "cast")),
    ("add", ((3,), (3,)), "int8", {}, TypeMismatchError, ("int8", "fp16 or fp32")),
    ("add", ((3,), (3,)), "fp64", {}, TypeMismatchError, ("fp64", "fp32")),
    ("add on Ascend910A", ((3,), (3,)), "bf16", {}, TypeMismatchError, ("bf16", "910A")),
    ("add", ((3,),), H, {}, InputError, ("2 inputs", "x, y", "1")),
    ("add", ((3,), (3,)), (H,), {}, InputError, ("format", "1")),
    ("add", ((3,), (3,)), H, {"alpha": 2}, InputError, ("alpha", "(none)")),
    ("add", ((-3,), (3,)), H, {}, ShapeError, ("-3", "at least 0")),
    ("add", ((2.5,), (3,)), H, {}, ShapeError, ("2.5",)),
    ("add", ((1 << 20, 1 << 12), (1,)), H, {}, ShapeError, ("2147483647", "4294967296")),
    ("div", ((3,), (3,)), "int32", {}, TypeMismatchError, ("int32", "cast")),
    ("and", ((3,), (3,)), H, {}, TypeMismatchError, ("int32", "fp16")),
    ("leaky_relu", ((3,),), H, {"alhpa": 1}, InputError, ("alhpa", "did you mean alpha")),
    ("cast", ((3,),), H, {}, InputError, ("dtype", "dtype=...")),
    ("cast", ((3,),), H, {"dtype": "fp8"}, TypeMismatchError, ("fp8", "int32")),
    ("cast", ((3,),), H, {"dtype": "int8", "round": "up"}, InputError, ("up", "floor")),
    ("cast", ((3,),), H, {"dtype": "fp32", "round": "floor"}, TypeMismatchError,
     ("floor", "whole")),
    ("reduce_sum", ((2, 3),), H, {"axis": 2}, ShapeError, ("-2 to 1", "2", "(2, 3)")),
    ("reduce_sum", ((2, 3),), H, {"axis": -3}, ShapeError, ("-2 to 1", "-3")),
    ("reduce_sum", ((2, 3),), H, {"axis": (0, -2)}, ShapeError, ("each axis once", "-2")),
    ("reduce_max", ((2, 0),), H, {"axis": 1}, ShapeError, ("not empty", "(2, 0)")),
    ("softmax", ((2, 3),), H, {"axis": 5}, ShapeError, ("-2 to 1", "5")),
    ("softmax", ((0, 3),), H, {}, ShapeError, ("not empty", "(0, 3)")),
    ("layer_norm", ((2, 3), (2,), (3,)), H, {}, ShapeError, ("(3,)", "(2,)")),
    ("batch_norm", ((2, 3, 4, 4), (3,), (3,), (2,), (3,)), (H, *("fp32",) * 4), {}, ShapeError,
     ("mean", "(3,)", "(2,)")),
    ("batch_norm", ((2, 3, 4, 4), *((3,),) * 4), H, {}, TypeMismatchError,
     ("scale", "fp32", "fp16")),
    ("transpose", ((2, 3),), H, {"perm": (0, 0)}, ShapeError, ("(0, 0)", "once")),
    ("transpose", ((2, 3),), H, {"perm": (0, 2)}, ShapeError, ("-2 to 1", "2")),
    ("reshape", ((2, 3),), H, {"shape": (4,)}, ShapeError, ("6 elements", "4 in (4,)")),
    ("reshape", ((2, 3),), H, {"shape": (-1, -1)}, ShapeError, ("one -1",)),
    ("reshape", ((2, 3),), H, {"shape": (4, -1)}, ShapeError, ("divide the 6",)),
    ("expand", ((2, 3),), H, {"shape": (2, 4)}, ShapeError, ("(2, 3)", "(2, 4)")),
    ("concat", ((2, 3), (2, 4)), H, {"axis": 0}, ShapeError, ("(2, 3)", "(2, 4)")),
    ("concat", ((2, 3), (2, 3)), (H, "fp32"), {}, TypeMismatchError, ("fp16", "fp32")),
    ("split", ((7,),), H, {"sizes": 2}, ShapeError, ("7", "(3, 3)")),
    ("split", ((7,),), H, {"sizes": (3, 5)}, ShapeError, ("7", "(3, 5)")),
    ("slice", ((7,),), H, {"begin": (3,), "end": (3,)}, ShapeError, ("3 .. 3",)),
    ("slice", ((7, 7),), H, {"begin": (0,), "end": (3,)}, ShapeError, ("2 axes",)),
    ("slice", ((7,),), H, {"begin": (0,), "end": (7,), "step": (-1,)}, ShapeError,
     ("at least 1", "-1", "gather")),
    ("pad", ((7,),), H, {"pads": 5}, InputError, ("attributes of the kind",)),
    ("max_pool2d", ((1, 1, 4, 4),), H, {"kernel": 2.5}, ShapeError,
     ("kernel: one or two whole numbers >= 1; got 2.5; e.g. 2",)),
    ("max_pool2d", ((1, 1, 4, 4),), H, {"kernel": True}, ShapeError, ("got True",)),
    ("max_pool2d", ((1, 1, 4, 4),), H, {"kernel": 2, "pad": 0.5}, ShapeError, ("pad", "0.5")),
    ("reduce_sum", ((7,),), H, {"axis": "x"}, ShapeError, ("-1 to 0", "'x'")),
    ("pad", ((7,),), H, {"pads": ((-1, 0),)}, ShapeError, ("-1", "slice")),
    ("gather", ((7, 2), (3,)), H, {}, TypeMismatchError, ("indices", "int32", "fp16")),
    ("gather", ((7, 2), (3,)), (H, "int32"), {"axis": 2}, ShapeError, ("-2 to 1", "2")),
    ("scatter_add", ((7, 2), (3,), (2, 2)), (H, "int32", H), {}, ShapeError, ("(3, 2)", "(2, 2)")),
    ("embedding", ((7,), (3,)), (H, "int32"), {}, ShapeError, ("words, width", "(7,)")),
    ("one_hot", ((3,),), "int32", {"depth": 0}, ShapeError, ("depth", "0")),
    ("matmul", ((2, 3), (4, 5)), H, {}, ShapeError, ("3 in a", "4 in b", "transpose")),
    ("matmul", ((2, 3), (3, 5)), "fp32", {}, TypeMismatchError, ("fp32", "int8")),
    ("matmul", ((3,), (3, 5)), H, {}, ShapeError, ("2 axes", "1 in (3,)")),
    ("matmul", ((2, 3), (3, 5)), "int8", {"out_dtype": "fp16"}, TypeMismatchError,
     ("int32", "fp16")),
    ("matmul on Ascend310", ((2, 3), (3, 5)), "bf16", {}, TypeMismatchError,
     ("cube unit of Ascend310", "bf16")),
    ("batch_matmul", ((2, 3, 4), (3, 4, 5)), H, {}, ShapeError, ("2 against 3",)),
    ("gemm", ((2, 3), (3, 5), (4,)), H, {}, ShapeError, ("(2, 5)", "(4,)")),
    ("conv2d", ((1, 3, 4, 4), (2, 4, 3, 3)), H, {}, ShapeError, ("3 channels", "4 in")),
    ("conv2d", ((1, 3, 2, 2), (2, 3, 3, 3)), H, {}, ShapeError, ("(2 + 0)", "padding")),
    ("conv2d", ((3, 4, 4), (2, 3, 3, 3)), H, {}, ShapeError, ("4 axes", "3 in")),
    ("conv2d", ((1, 3, 4, 4), (2, 3, 3, 3)), H, {"groups": 2}, ShapeError,
     ("groups", "3 input", "2")),
    ("conv2d", ((1, 3, 4, 4), (2, 3, 3, 3)), H, {"stride": 0}, ShapeError, ("stride", ">= 1", "0")),
    ("conv2d", ((1, 3, 4, 4), (2, 3, 3, 3), (3,)), H, {}, ShapeError, ("bias", "(2,)", "(3,)")),
    ("conv_transpose2d", ((1, 3, 4, 4), (3, 2, 3, 3)), H, {"stride": 2, "output_padding": 2},
     ShapeError, ("output_padding", "(2, 2)")),
    ("max_pool2d", ((1, 3, 4, 4),), H, {"kernel": 2, "pad": 2}, ShapeError, ("(2, 2)",)),
    ("max_pool2d", ((1, 3, 4, 4),), H, {"kernel": 5}, ShapeError, ("(4 + 0)", "5")),
    ("attention", ((2, 3), (4, 3), (5, 3)), H, {}, ShapeError, ("4 in a", "5 in b")),
    ("attention", ((2, 3), (4, 3), (4, 3), (3, 4)), H, {}, ShapeError, ("(2, 4)", "(3, 4)")),
    ("adam", ((3,), (3,), (4,), (3,)), "fp32", {}, ShapeError, ("(3,)", "(4,)")),
    ("cross_entropy", ((3, 4), (3,)), H, {}, ShapeError, ("(3, 4)", "one_hot")),
    ("conv2d_grad_weight", ((1, 4, 8, 8), (1, 4, 8, 8)), H, {"kernel": 3}, ShapeError,
     ("gradient of shape (1, 4, 6, 6)",)),
    ("conv2d_grad_weight", ((2, 4, 8, 8), (1, 4, 8, 8)), H, {"kernel": 1}, ShapeError,
     ("gradient of shape (2, 4, 8, 8)",)),
    ("conv2d_grad_weight", ((1, 4, 8, 8), (1, 6, 8, 8)), H, {"kernel": 1, "groups": 4}, ShapeError,
     ("groups that divide",)),
    ("conv2d_grad_weight", ((1, 4, 8), (1, 6, 8, 8)), H, {"kernel": 1}, ShapeError, ("4 axes",)),
    ("conv2d_grad_weight", ((1, 4, 2, 2), (1, 6, 1, 1)), H, {"kernel": 5}, ShapeError,
     ("a window no larger",)),
    ("conv2d_grad_weight", ((1, 1, 1, 1), (1, 1, 1, 1)), "int8", {"kernel": 1}, TypeMismatchError,
     ("fp16 or bf16",)),
    ("avg_pool2d_grad", ((1, 4, 4, 4),), H, {"kernel": 2, "size": (7, 6)}, ShapeError,
     ("a gradient of",)),
]
# fmt: on


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "attrs", "error", "words"),
    CASES,
    ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)],
)
def test_bad_calls(name, shapes, dtypes, attrs, error, words):
    name, _, chip = name.partition(" on ")
    target = load_chip(chip or "Toy")
    dtypes = (dtypes,) * len(shapes) if isinstance(dtypes, str) else dtypes
    with pytest.raises(error) as caught:
        ops.check(name, shapes, dtypes, target, **attrs)
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.startswith(name)
    assert caught.value.remedy
    for word in words:
        assert word in message, message
    with pytest.raises(error):
        ops.compile(name, shapes, dtypes, target, **attrs)


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
