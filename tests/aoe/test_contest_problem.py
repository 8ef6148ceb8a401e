"""Reading contest problems: the shipped instances, and every way a file can be wrong."""

import json

import pytest

from ascend_lab.data import data_path
from ascend_lab.errors import InputError
from ascend_lab.lab.contest import lower_bound, read_problem, unfused_floor
from ascend_lab.lab.contest.problem import parse_problem

FOLDER = data_path("mlsys2026/example_problem.json").parent
GOOD = json.loads((FOLDER / "example_problem.json").read_text())


def test_the_shipped_instances_and_their_bounds():
    first = read_problem(FOLDER / "mlsys-2026-1.json")
    ninth = read_problem(FOLDER / "mlsys-2026-9.json")
    assert [len(problem.operations) for problem in (first, ninth)] == [5, 32]
    assert [lower_bound(problem) for problem in (first, ninth)] == [112_000, 13_465_600]
    floors = [unfused_floor(problem) for problem in (first, ninth)]
    assert floors == pytest.approx([183_500.8, 16_950_886.4])


def test_the_bound_is_the_traffic_where_that_is_more():
    problem = parse_problem({**MATMUL, "base_costs": [0]})
    assert lower_bound(problem) == (4 * 6 + 6 * 5 + 4 * 5) / 2


MATMUL = {
    "widths": [6, 5, 5],
    "heights": [4, 6, 4],
    "inputs": [[0, 1]],
    "outputs": [[2]],
    "base_costs": [10],
    "op_types": ["MatMul"],
    "fast_memory_capacity": 100,
    "slow_memory_bandwidth": 2,
    "native_granularity": [4, 4],
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("widths", 5, "widths as a list"),
        ("widths", [0, 5, 5], "from 1"),
        ("widths", [6.5, 5, 5], "whole numbers"),
        ("widths", [True, 5, 5], "whole numbers"),
        ("heights", [4, 6], "3 entries in heights"),
        ("heights", [4, -6, 4], "whole numbers from 1"),
        ("inputs", [], "1 entries in inputs"),
        ("inputs", [[]], "one or two tensors in inputs"),
        ("inputs", [[0, 1, 1]], "one or two tensors in inputs"),
        ("inputs", [[0, 3]], "from 0 to 2"),
        ("inputs", [[0, "1"]], "whole numbers"),
        ("inputs", [0], "inputs\\[0\\] as a list"),
        ("inputs", [[0, 2]], "without cycles"),
        ("outputs", [[]], "one or more different tensors"),
        ("outputs", [[2, 2]], "one or more different tensors"),
        ("base_costs", [-1], "at least 0"),
        ("base_costs", ["a"], "finite number"),
        ("base_costs", [float("nan")], "finite number"),
        ("op_types", ["Conv"], "MatMul, Pointwise"),
        ("op_types", [3], "MatMul, Pointwise"),
        ("op_types", [], "at least one operation"),
        ("fast_memory_capacity", 0, "above 0"),
        ("slow_memory_bandwidth", float("inf"), "finite number"),
        ("native_granularity", [4], "2 entries in native_granularity"),
        ("native_granularity", [4, 0], "from 1"),
    ],
)
def test_a_wrong_field_is_named(field, value, message):
    with pytest.raises(InputError, match=message):
        parse_problem({**MATMUL, field: value})


@pytest.mark.parametrize("field", list(GOOD))
def test_a_missing_field_is_named(field):
    with pytest.raises(InputError, match=field):
        parse_problem({name: value for name, value in GOOD.items() if name != field})


def test_two_makers_and_long_cycles_are_refused():
    chain = {**GOOD, "outputs": [[1], [1]]}
    with pytest.raises(InputError, match="one operation that makes tensor 1"):
        parse_problem(chain)
    ring = {**GOOD, "op_types": ["Pointwise"] * 2, "inputs": [[2], [1]]}
    with pytest.raises(InputError, match="without cycles"):
        parse_problem(ring)


@pytest.mark.parametrize("text", ["", "[1]", "{", "null", "[" * 100_000])
def test_files_that_hold_no_problem(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_problem(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="readable"):
        read_problem(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        read_problem(tmp_path / "bytes.json")
