"""Reading strategy problems: every malformed file is refused with the place; evaluation."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from strategy_cases import BENCHMARK, EXAMPLE

from ascend_lab.cli import ascend_lab as main
from ascend_lab.errors import InputError
from ascend_lab.parallel.strategy import FORBIDDEN, evaluate, parse_problem, read_problem


def example() -> Any:
    return json.loads(EXAMPLE.read_text("utf-8"))


def changed(path: str, value: Any) -> Any:
    """Return the example with one place replaced; None removes it."""
    data = copy.deepcopy(example())
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = data
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


def test_the_example_reads_as_it_is_written() -> None:
    problem = read_problem(EXAMPLE)
    assert (problem.name, problem.usage_limit) == ("example", 50)
    assert (len(problem.nodes), len(problem.edges)) == (5, 5)
    node = problem.nodes[2]
    assert (node.lower, node.upper) == (50, 120)
    assert (node.costs, node.usages) == ((25, 45, 35), (15, 20, 15))
    assert (problem.edges[3].source, problem.edges[3].target) == (2, 4)


def test_the_example_is_priced_as_published() -> None:
    problem = read_problem(EXAMPLE)
    cheap = evaluate(problem, [0, 0, 2, 1, 0])
    assert (cheap.cost, cheap.peak_usage, cheap.feasible) == (445, 50, True)
    dear = evaluate(problem, [0, 0, 2, 0, 0])
    assert (dear.cost, dear.feasible) == (545, True)
    full = evaluate(problem, [0, 0, 1, 1, 0])
    assert (full.peak_usage, full.peak_at, full.feasible) == (55, 50, False)


def test_a_packed_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(EXAMPLE.read_bytes()))
    assert read_problem(packed) == read_problem(EXAMPLE)
    large = read_problem(BENCHMARK)
    assert (len(large.nodes), len(large.edges), large.usage_limit) == (816, 1096, 14_392_528)


def test_costs_add_up_beyond_64_bits() -> None:
    data = changed("problem.nodes.costs.0", [2**63 - 1])
    data["problem"]["nodes"]["costs"][4] = [2**63 - 1]
    found = evaluate(parse_problem(data), [0, 0, 2, 1, 0])
    assert found.cost == 445 - 15 - 95 + 2 * (2**63 - 1)
    assert (found.forbidden, found.feasible) == (2, False)
    assert FORBIDDEN == 10**17


@pytest.mark.parametrize("limit", [None, "null"])
def test_a_missing_limit_is_none(limit: str | None) -> None:
    data = changed("problem.usage_limit", None)
    if limit:
        data["problem"]["usage_limit"] = None
    problem = parse_problem(data)
    assert problem.usage_limit is None
    assert evaluate(problem, [0, 1, 1, 0, 0]).feasible


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("problem", None, "the whole file as a JSON object with the key problem; got no problem"),
        ("problem", [], "problem as a JSON object"),
        ("problem.nodes", None, "no nodes"),
        ("problem.nodes.usages", None, "no usages"),
        ("problem.edges.costs", None, "no costs"),
        ("problem.nodes.costs.1", None, "5 entries in nodes.costs"),
        ("problem.nodes.intervals.2", [5], r"2 entries in nodes.intervals\[2\]"),
        ("problem.nodes.intervals.2", [9, 5], "lower <= upper"),
        ("problem.nodes.intervals.2", [9.5, 11], "whole numbers"),
        ("problem.nodes.costs.3", [], "3 entries|at least one strategy"),
        ("problem.nodes.usages.1", [25], r"2 entries in nodes.usages\[1\]"),
        ("problem.nodes.usages.1", [25, -1], r"nodes.usages\[1\] from 0"),
        ("problem.nodes.costs.1", [25, True], r"nodes.costs\[1\] in whole"),
        ("problem.nodes.costs.1", [25, 2**63], r"nodes.costs\[1\] from"),
        ("problem.nodes.costs.1", [25, 1e400], "whole numbers"),
        ("problem.edges.nodes.1", [0, 5], r"edges.nodes\[1\] among the 5 nodes"),
        ("problem.edges.nodes.1", [0, -1], r"edges.nodes\[1\] from 0"),
        ("problem.edges.nodes.1", [0, 1, 2], r"2 entries in edges.nodes\[1\]"),
        ("problem.edges.costs.2", [90, 10, 20], r"4 entries in edges.costs\[2\]"),
        ("problem.edges.costs.2", "free", r"edges.costs\[2\] as a list"),
        ("problem.edges.costs.0", None, "5 entries in edges.costs"),
        ("problem.usage_limit", -1, "usage_limit from 0"),
        ("problem.usage_limit", "50", "usage_limit in whole"),
    ],
)
def test_malformed_problems_are_refused_with_the_place(
    path: str, value: Any, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        parse_problem(changed(path, value))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\x1f\x8b\x08garbage",
        gzip.compress(b"{}", mtime=0)[:-9],
        b"\xff\xfe\x00",
        b"[" * 9999,
    ],
)
def test_broken_files_are_one_line_on_the_command_line(
    raw: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.json.gz"
    file.write_bytes(raw)
    assert main(["strategy", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["strategy", str(tmp_path)]) == 2


@pytest.mark.parametrize("chosen", [[0], [0, 0, 3, 0, 0], [0, 0, -1, 0, 0]])
def test_choices_that_are_none_are_refused(chosen: list[int]) -> None:
    with pytest.raises(InputError):
        evaluate(read_problem(EXAMPLE), chosen)


def test_the_command_prints_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategy", str(EXAMPLE), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["cost"], data["lower_bound"], data["proven"]) == (445, 445, True)
    assert data["strategies"] == [0, 0, 2, 1, 0]
    assert main(["strategy", str(EXAMPLE), "--method", "heuristic", "--time-limit", "5"]) == 0
    assert "445" in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra", [["--time-limit", "-1"], ["--time-limit", "nan"], ["--method", "x"], ["--seed", "-1"]]
)
def test_bad_flags_are_refused(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategy", str(EXAMPLE), *extra]) == 2
    assert capsys.readouterr().err.count("\n") == 1
