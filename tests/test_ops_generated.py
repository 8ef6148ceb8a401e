"""Generated operator tests: they run for the whole library, and for an operator just written."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_lab import ops
from ascend_lab.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
CHIPS = ("Ascend910A", "Ascend910B2")

STUDENT = '''"""An operator of one's own."""

import numpy as np

from ascend_lab import dsl as te
from ascend_lab import ops

SWISH_ADD = ops.Operator(
    "swish_add",
    ("x", "y"),
    lambda x, y: x / (1 + np.exp(-x)) + y,
    lambda x, y: te.vadd(te.vmul(x, te.vrec(te.vadds(te.vexp(te.vmuls(x, -1.0)), 1.0))), y),
    types=ops.TypeRule(("fp32",)),
    tolerances=ops.rounded(fp32_ulps=16, atol=1e-6),
)
'''


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


@pytest.mark.parametrize("name", list(ops.OPERATORS))
def test_the_generated_tests_of_the_library_pass(name):
    functions = functions_of(ops.make_test(name, chips=CHIPS, limit=4))
    runs = 0
    for function in functions.values():
        for arguments in calls_of(function):
            assert set(arguments) == set(inspect.signature(function).parameters)
            function(**arguments)
            runs += 1
    assert runs > 8
    assert ("test_gradients_equal_finite_differences" in functions) == bool(ops.get(name).backward)


@pytest.mark.parametrize("name", list(ops.OPERATORS))
def test_the_file_is_tidy(name):
    source = ops.make_test(name)
    compile(source, name, "exec")
    assert "'" not in source.split('"""')[2]
    assert not [line for line in source.splitlines() if line != line.rstrip()]
    assert source == ops.make_test(ops.get(name))


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
