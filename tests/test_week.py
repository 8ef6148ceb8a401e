"""The page "The code in a week": what it asks to read exists, is plain, and fits in evenings."""

import ast
import doctest
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import ascend_lab
from ascend_lab.floor import FIRST_FLOOR

ROOT = Path(ascend_lab.__file__).parents[1]
PAGE = (ROOT / "book" / "code_in_a_week.md").read_text("utf-8")
SITTINGS = PAGE.split("\n## ")[1:7]
SECONDS_A_LINE = 5
EVENING_MINUTES = 150


class Reading(NamedTuple):
    """A file that a sitting asks to read, and the functions and classes of it; () for all of it."""

    file: str
    names: tuple[str, ...]


def readings(sitting: str) -> list[Reading]:
    """Return what the list of a sitting asks to read: "- `file` (`name`, `name`): why"."""
    items = re.findall(r"(?ms)^- `(ascend_lab/\S+?\.py)`(?:\s+\(([^)]*)\))?:", sitting)
    return [Reading(file, tuple(re.findall(r"`([^`]+)`", names))) for file, names in items]


@cache
def spans_of(file: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last line of every function and class of a file."""
    spans: dict[str, tuple[int, int]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.end_lineno is not None
                first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                spans[prefix + node.name] = (first_line, node.end_lineno)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{node.name}.")

    visit(ast.parse((ROOT / file).read_text("utf-8")).body, "")
    return spans


def line_count(reading: Reading) -> int:
    """Return the lines that a reading asks for; empty ones take no time."""
    lines = (ROOT / reading.file).read_text("utf-8").splitlines()
    spans = spans_of(reading.file)
    asked = [spans[name] for name in reading.names] or [(1, len(lines))]
    numbers = {number for first, last in asked for number in range(first, last + 1)}
    return sum(bool(lines[number - 1].strip()) for number in numbers)


def minutes(sitting: str) -> int:
    """Return the minutes of a sitting, rounded up to tens."""
    seconds = SECONDS_A_LINE * sum(map(line_count, readings(sitting)))
    return -(-seconds // 600) * 10


def test_the_week_has_six_sittings() -> None:
    titles = [sitting.splitlines()[0] for sitting in SITTINGS]
    assert [title.partition(".")[0] for title in titles] == list("123456")
    assert "simulate" in titles[-1]


@pytest.mark.parametrize("sitting", SITTINGS, ids=lambda sitting: sitting.splitlines()[0])
def test_a_sitting_reads_what_exists_on_the_first_floor(sitting: str) -> None:
    files = readings(sitting)
    assert len(files) >= 5
    for file, names in files:
        module = file.removeprefix("ascend_lab/").removesuffix(".py").replace("/", ".")
        assert module.removesuffix(".__init__") in FIRST_FLOOR, f"{file} is on an upper floor"
        missing = [name for name in names if name not in spans_of(file)]
        assert not missing, f"{file} has no {', '.join(missing)}"


@pytest.mark.parametrize("sitting", SITTINGS, ids=lambda sitting: sitting.splitlines()[0])
def test_a_sitting_fits_in_an_evening_and_says_how_long_it_takes(sitting: str) -> None:
    stated = re.search(r"\*(\d+) minutes", sitting)
    assert stated is not None
    assert int(stated.group(1)) == minutes(sitting)
    assert minutes(sitting) <= EVENING_MINUTES


@pytest.mark.parametrize("sitting", SITTINGS, ids=lambda sitting: sitting.splitlines()[0])
def test_the_experiment_of_a_sitting_runs(sitting: str) -> None:
    (experiment,) = re.findall(r"(?ms)^```pycon\n(.*?)^```$", sitting)
    test = doctest.DocTestParser().get_doctest(experiment, {}, sitting.splitlines()[0], None, 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted >= 4
    assert result.failed == 0
