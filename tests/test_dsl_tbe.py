"""Operators in the published TBE style run as they are written, import lines apart."""

from functools import reduce
from typing import Any

import numpy as np
import pytest
from message_lists import assert_messages

from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import execute
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.tbe import build, built, fusion_manager, generic, tvm, util

SHAPE_SIZE_LIMIT = 2147483648


@fusion_manager.register("fuse_add")
def add_compute(input_x, input_y, output_z=None, kernel_name="fuse_add"):
    shape_x = te.lang.cce.util.shape_to_list(input_x.shape)
    shape_y = te.lang.cce.util.shape_to_list(input_y.shape)
    shape_x, shape_y, shape_max = util.produce_shapes(shape_x, shape_y)
    size = reduce(lambda x, y: x * y, shape_max[:])
    if size > SHAPE_SIZE_LIMIT:
        raise RuntimeError("the shape is too large to calculate")
    input_x = te.lang.cce.broadcast(input_x, shape_max)
    input_y = te.lang.cce.broadcast(input_y, shape_max)
    return te.lang.cce.vadd(input_x, input_y)


@fusion_manager.register("fuse_relu")
def relu_compute(input_x, output_y=None, kernel_name="fuse_relu"):
    return te.lang.cce.vrelu(input_x)


@fusion_manager.register("fuse_add_relu")
def add_relu_compute(input_x, input_y, output_z=None, kernel_name="fuse_add_relu"):
    return te.vrelu(add_compute(input_x, input_y, output_z, kernel_name))


@util.check_input_type(dict, dict, dict, str)
def add_relu(input_x, input_y, output_z, kernel_name="add_relu"):
    shape_x = input_x.get("shape")
    shape_y = input_y.get("shape")
    for shape in (shape_x, shape_y):
        util.check_shape_rule(shape)
        util.check_shape_size(shape, SHAPE_SIZE_LIMIT)
    util.check_kernel_name(kernel_name)
    dtype = input_x.get("dtype").lower()
    util.check_dtype_rule(dtype, ("float16", "float32", "int32"))
    data_x = tvm.placeholder(shape_x, name="data_1", dtype=dtype)
    data_y = tvm.placeholder(shape_y, name="data_2", dtype=dtype)
    res = add_relu_compute(data_x, data_y, output_z, kernel_name)
    with tvm.target.cce():
        schedule = generic.auto_schedule(res)
    config = {
        "print_ir": False,
        "need_build": True,
        "name": kernel_name,
        "tensor_list": [data_x, data_y, res],
    }
    te.lang.cce.cce_build_code(schedule, config)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", np.float16), ("float32", np.float32), ("int32", np.int32)]
)
@pytest.mark.parametrize("shapes", [((4, 33), (4, 33)), ((3, 1, 20), (7, 1)), ((1,), (64, 128))])
def test_the_fused_operator_of_the_slides_runs(dtype: str, kind: Any, shapes: Any) -> None:
    entries = [{"shape": shape, "dtype": dtype} for shape in shapes]
    add_relu(entries[0], entries[1], {}, "add_relu_test")
    kernel = built("add_relu_test")
    chip = load_chip("Ascend310")
    rng = np.random.default_rng(5)
    x, y = (rng.integers(-9, 9, size=shape).astype(kind) for shape in shapes)
    memory = execute(kernel, {"data_1": x, "data_2": y}, chip)
    wanted = np.maximum(x + y, 0)
    assert np.array_equal(memory["vrelu"].reshape(wanted.shape), wanted)
    assert not sanitize(kernel, chip)


def test_printing_shows_the_nests(capsys: pytest.CaptureFixture[str]) -> None:
    data = tvm.placeholder((64,), name="data", dtype="float16")
    with tvm.target.cce("Toy"):
        build(generic.auto_schedule(te.vabs(data)), {"print_ir": True, "name": "shown"})
    assert "vabs_ub[i] = vabs(data_ub[i])" in capsys.readouterr().out


def _target_missing() -> None:
    generic.auto_schedule(te.vabs(te.placeholder((4,), name="x")))


BAD = {
    "(3, 4) and (3, 5)": lambda: util.produce_shapes((3, 4), (3, 5)),
    "4294967296": lambda: util.check_shape_size((1 << 20, 1 << 12)),
    "at least one dimension": lambda: util.check_shape_rule(()),
    "(3, 0)": lambda: util.check_shape_rule((3, 0)),
    "float64": lambda: util.check_dtype_rule("float64", ("float16",)),
    "9 lives": lambda: util.check_kernel_name("9 lives"),
    "argument 0 a dict": lambda: add_relu([], {}, {}, "k"),
    "tvm.target.cce": _target_missing,
    "a (2, 3) and b (3, 2)": lambda: te.vadd(
        te.placeholder((2, 3), name="a"), te.placeholder((3, 2), name="b")
    ),
}


def test_what_is_refused_says_what_is_needed() -> None:
    assert_messages("dsl", "test_dsl_tbe", BAD)
    # What there is, which these name, depends on the tests before.
    for look_up, words in ((built, "nothing"), (fusion_manager.get, "fuse_add_relu")):
        with pytest.raises(InputError, match=words):
            look_up("nothing")
