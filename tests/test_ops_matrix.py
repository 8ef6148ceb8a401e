"""One matrix of all operators: examples by the tests that are written for them, and random cases.

A random case goes through everything that holds for an operator: inferred shapes and formats, a
kernel's values on a chip, pieces that join to the whole, gradients against central differences.
"""

import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from ops_cases import case_of

from ascend_lab.errors import InputError, ShapeError, UnsupportedError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops
from ascend_lab.operators.ops import expressions, verify
from ascend_lab.operators.ops.formats import format_of, is_float
from ascend_lab.operators.ops.slicing import Source, Window

ROOT = Path(__file__).resolve().parent.parent
CHIPS = ("Ascend910A", "Ascend910B2")
NAMES = list(ops.OPERATORS)
WITHOUT_GRADIENT = {
    "not", "and", "or", "one_hot", "sgd_momentum", "adam", "reduce_prod", "scatter_update", "lrn",
    "conv2d_grad_weight", "max_pool2d_grad", "avg_pool2d_grad",
    "bn_training_reduce", "bn_training_update_grad",
    "quantise", "dequantise", "requantise", "add_dequantised",
}  # fmt: skip


def wide_format(operator: ops.Operator) -> str:
    first = operator.types.allowed[0]
    return "fp64" if is_float(first) else first


# -- random cases ---------------------------------------------------------------------------------
def check_inferred(operator: ops.Operator, shapes: Any, dtype: str, attrs: Any) -> None:
    arrays = verify.sample(operator, shapes, dtype, attrs)
    found = operator.reference(*arrays, **attrs)
    outputs = found if isinstance(found, tuple) else (found,)
    formats = operator.dtypes(*(format_of(a) for a in arrays), **attrs)
    assert tuple(o.shape for o in outputs) == operator.infer(*shapes, **attrs)
    assert {format_of(o) for o in outputs} <= set(formats)


def check_random(name: str, data: Any, chips: tuple[str, ...]) -> None:
    operator = ops.get(name)
    shapes, attrs = data.draw(case_of(name))
    seed = data.draw(st.integers(0, 99))
    empty = any(0 in s for s in shapes)
    if empty and not operator.allows_empty:
        return
    try:
        check_inferred(operator, shapes, data.draw(st.sampled_from(operator.types.allowed)), attrs)
    except ShapeError:
        assert empty
        return
    chip = load_chip(data.draw(st.sampled_from(chips)))
    dtype = data.draw(st.sampled_from(operator.types.on_chip(chip)))
    verify.check_values(operator, shapes, attrs, dtype, chip, seed)
    if not empty:
        verify.check_slices(operator, shapes, attrs, wide_format(operator), seed)
        if operator.backward:
            assert verify.check_gradient(operator, shapes, attrs, seed) > 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_random_cases(name, data):
    check_random(name, data, CHIPS)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_many_random_cases_on_more_chips(name, data):
    check_random(name, data, ("Toy", "Ascend310", "Ascend310P3", *CHIPS))


# -- examples, by generated tests -----------------------------------------------------------------
def functions_of(source: str) -> dict[str, Callable[..., None]]:
    """Return the test functions that a generated file defines."""
    space: dict[str, Any] = {}
    exec(compile(source, "generated", "exec"), space)
    return {name: value for name, value in space.items() if name.startswith("test_")}


def calls_of(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of every case of a parametrised test."""
    sets = []
    for mark in getattr(function, "pytestmark", []):
        names, values = mark.args
        sets.append([dict(zip(names, value, strict=True)) for value in values])
    for choice in itertools.product(*sets):
        yield {name: value for part in choice for name, value in part.items()}


@pytest.mark.parametrize("name", NAMES)
def test_generated_tests_pass(name, monkeypatch):
    """Equal calls, of the test of values and that of programs, are scheduled once."""
    schedule = expressions._schedule
    known = {}

    def once(op, call, chip):
        key = op.name, repr(call), chip.name
        if key not in known:
            known[key] = schedule(op, call, chip)
        return known[key]

    monkeypatch.setattr(expressions, "_schedule", once)
    source = ops.make_test(name, chips=CHIPS, limit=1)
    assert "'" not in source.split('"""')[2]
    assert not [line for line in source.splitlines() if line != line.rstrip()]
    functions = functions_of(source)
    runs = 0
    for function in functions.values():
        for arguments in calls_of(function):
            assert set(arguments) == set(inspect.signature(function).parameters)
            function(**arguments)
            runs += 1
    assert runs > 8
    assert ("test_gradients_equal_finite_differences" in functions) == bool(ops.get(name).backward)


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_says_all_about_itself(name):
    operator = ops.get(name)
    assert operator.summary and (operator.compute or operator.template)
    examples = [e for e in operator.examples if all(0 not in s for s in e.shapes)]
    assert len(examples) >= 2
    for dtype in operator.types.allowed:
        kinds = operator.input_types(len(examples[0].shapes), dtype, **examples[0].attrs)
        for out in operator.dtypes(*kinds, **examples[0].attrs):
            assert (operator.tolerances or ops.rounded())[out].reason
    cuts = 0
    for example in examples:
        out = operator.infer(*example.shapes, **example.attrs)[0]
        rules = operator.slice_rules(example.shapes, example.attrs)
        cuts += sum(r.splits and out[r.axis] > r.grain for r in rules.axes) + len(rules.reductions)
    assert cuts, "no example can be cut"


# -- what the tools find --------------------------------------------------------------------------
STUDENT = '''"""An operator of one's own."""

import numpy as np

from ascend_lab.operators import dsl as te
from ascend_lab.operators import ops

SWISH_ADD = ops.Operator(
    "swish_add",
    ("x", "y"),
    lambda x, y: x / (1 + np.exp(-x)) + y,
    lambda x, y: te.vadd(te.vmul(x, te.vrec(te.vadds(te.vexp(te.vmuls(x, -1.0)), 1.0))), y),
    types=ops.TypeRule(("fp32",)),
    tolerances=ops.rounded(fp32_ulps=16, atol=1e-6),
)
'''


def test_a_reader_tests_the_operator_just_written(tmp_path):
    (tmp_path / "my_ops.py").write_text(STUDENT, "utf-8")
    sys.path.insert(0, str(tmp_path))
    try:
        from my_ops import SWISH_ADD
    finally:
        sys.path.remove(str(tmp_path))
    with pytest.raises(InputError, match="import line"):
        ops.make_test(SWISH_ADD)
    source = ops.make_test(
        SWISH_ADD, imports="from my_ops import SWISH_ADD", lookup="SWISH_ADD", chips=("Toy",)
    )
    (tmp_path / "test_swish_add.py").write_text(source, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_generated_test_finds_a_wrong_kernel():
    right = ops.get("relu")
    wrong = ops.Operator(
        "relu", ("x",), lambda x: np.maximum(x, 0), ops.get("abs").compute, types=right.types
    )
    source = ops.make_test(wrong, lookup="None", imports="# given below")
    space: dict[str, Any] = {}
    exec(compile(source, "generated", "exec"), space)
    space["OPERATOR"] = wrong
    check = space["test_the_kernel_computes_what_the_reference_computes"]
    case = next(calls_of(check))
    with pytest.raises(AssertionError, match="relu: y"):
        check(**{**case, "dtype": "fp16", "shapes": ((33,),)})


def test_a_wrong_rule_is_found():
    right = ops.get("max_pool2d")

    def too_small_a_halo(shapes, **attrs):
        rules = right.slice_rules(shapes, attrs)
        rows = replace(rules.axes[2], sources=(Source(0, 2, Window(0, 1)),))
        return replace(rules, axes=(*rules.axes[:2], rows, rules.axes[3]))

    broken = replace(right, name="broken", slicing=too_small_a_halo)
    with pytest.raises(AssertionError, match="axis 2"):
        verify.check_slices(broken, ((1, 1, 8, 8),), {"kernel": 3, "stride": 1}, "fp64")


def test_a_wrong_gradient_is_found():
    def slope(s):
        return (s.net.mul(s.g, s.net.exp(s.net.muls(s.x(), number=-1.0))),)

    for rule in (slope, lambda s: (None,)):
        broken = ops.Operator("broken", ("x",), np.exp, backward=rule)
        with pytest.raises(AssertionError, match="central differences"):
            verify.check_gradient(broken, ((5,),), {})


# -- gradients ------------------------------------------------------------------------------------
def test_what_has_no_gradient():
    assert {name for name in NAMES if not ops.get(name).backward} == WITHOUT_GRADIENT
    with pytest.raises(UnsupportedError, match="a gradient rule for operator adam"):
        ops.gradient("adam", [np.ones(3)] * 3, [np.ones(3)] * 4, [np.ones(3)] * 3)


def test_indices_have_no_gradient():
    x = np.arange(6.0).reshape(3, 2)
    indices = np.array([2, 2], np.int32)
    grads = ops.gradient("gather", [np.ones((2, 2))], [x, indices], [x[indices]], axis=0)
    assert grads[1] is None
    np.testing.assert_array_equal(grads[0], [[0, 0], [0, 0], [2, 2]])


# -- slice rules ----------------------------------------------------------------------------------
def test_two_pieces_of_a_convolution_share_rows_and_keep_the_outer_padding():
    operator = ops.get("conv2d")
    shapes = ((1, 1, 8, 8), (1, 1, 3, 3))
    attrs = {"pad": 1}
    rules = operator.slice_rules(shapes, attrs)
    assert rules.axes[2].kind == "halo"
    assert rules.axes[2].sources[0].window == Window(before=1, after=1)
    assert [r.combine for r in rules.reductions] == ["sum"]
    upper = ops.cut(rules, shapes, attrs, 2, (0, 4))
    lower = ops.cut(rules, shapes, attrs, 2, (4, 8))
    assert (upper.ranges[0][2], lower.ranges[0][2]) == ((0, 5), (3, 8))
    assert upper.attrs["pad"] == ((1, 0), (1, 1))
    assert lower.attrs["pad"] == ((0, 1), (1, 1))


def test_grouped_convolutions_split_at_group_borders_only():
    operator = ops.get("conv2d")
    shapes = ((1, 4, 5, 5), (6, 2, 3, 3))
    attrs = {"groups": 2}
    rules = operator.slice_rules(shapes, attrs)
    piece = ops.cut(rules, shapes, attrs, 1, (3, 6))
    assert piece.ranges[0][1] == (2, 4)
    assert piece.attrs["groups"] == 1
    with pytest.raises(ShapeError, match="grains of 3"):
        ops.cut(rules, shapes, attrs, 1, (1, 6))


def test_axes_that_depend_on_all_of_it_say_so():
    rules = ops.get("softmax").slice_rules(((4, 8),), {"axis": 1})
    assert [r.kind for r in rules.axes] == ["free", "reduce"]
    assert ops.get("scatter_add").slice_rules(((4, 8), (2,), (2, 8))).axes[0].kind == "indices"
    with pytest.raises(ShapeError, match="maximum and sum"):
        ops.cut(rules, ((4, 8),), {"axis": 1}, 1, (0, 4))


SQUAREPLUS = """
import numpy as np
from ascend_lab.operators import dsl as te, ops

ops.register(
    ops.Operator(
        "squareplus",
        ("x",),
        lambda x: (x + np.sqrt(x * x + 1)) / 2,
        lambda x: te.vmuls(te.vadd(x, te.vsqrt(te.vadds(te.vmul(x, x), 1.0))), FACTOR),
    )
)
ops.register(
    ops.Operator(
        "row_sum",
        ("x",),
        lambda x: x.sum(axis=-1, keepdims=True),
        lambda x: te.reduce_sum(x, -1, keepdims=True),
        shape_rule=lambda x: (*x[:-1], 1),
        examples=(ops.Example(((4, 1000),)), ops.Example(((3, 33),))),
    )
)
"""


@pytest.mark.parametrize(("factor", "fails"), [("0.5", 0), ("0.51", 1)])
def test_a_generated_file_runs_and_its_tolerance_is_that_of_the_expression(tmp_path, factor, fails):
    (tmp_path / "my_ops.py").write_text(SQUAREPLUS.replace("FACTOR", factor), "utf-8")
    lines = """
import my_ops
from pathlib import Path
from ascend_lab.operators import ops
for name in ("squareplus", "row_sum"):
    text = ops.make_test(name, imports="import my_ops", chips=("Ascend910A",))
    Path(f"test_{name}.py").write_text(text)
"""
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"}

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    made = python("-c", lines)
    assert made.returncode == 0, made.stderr
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert done.returncode == fails, done.stdout[-2000:]
    if fails:
        assert "test_squareplus" in done.stdout and "FAILED test_row_sum" not in done.stdout


def test_a_test_of_ones_own_operator_asks_for_its_import_line():
    own = ops.Operator("mine", ("x",), np.tanh)
    with pytest.raises(InputError, match='imports="import my_ops"'):
        ops.make_test(own)
