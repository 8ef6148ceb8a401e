"""Plausible mistakes fail: each is an edit of the published solution, kept in tests/wrong/NN.toml.

A file has one table an exercise, its `wrong` a list of [old text, new text, the mistake, and if you
like words that the check must say]; the first occurrence of the old text in the solution's cells is
replaced and the check must say no. The edits of a list `right` are answers as good as ours.
"""

import ast
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ascend_lab.lab.checks import wall
from ascend_lab.lab.checks.core import DEFAULT_SEED, CheckResult
from ascend_lab.lab.checks.grading import (
    SOLUTION,
    CodeCell,
    Page,
    exercises_of,
    read_code_cells,
)

HERE = Path(__file__).parent
LISTS = sorted((HERE / "wrong").glob("*.toml"))


def edits(side: str) -> list[Any]:
    return [
        pytest.param(
            path.stem, exercise, *edit, *[""] * (4 - len(edit)), id=f"{exercise}: {edit[2]}"
        )
        for path in LISTS
        for exercise, table in tomllib.loads(path.read_text("utf-8")).items()
        for edit in table.get(side, ())
    ]


FIELDS = ("chapter", "exercise", "old", "new", "mistake", "said")


def definitions(source: str) -> str:
    """Return the cell without what it prints: a mistake must fall to the check, not before it."""
    body = ast.parse(source).body
    kept = [
        node
        for node in body
        if not isinstance(node, ast.For | ast.While | ast.With | ast.If | ast.Expr)
        or "check_ex_" in ast.unparse(node)
    ]
    return "\n".join(map(ast.unparse, kept))


@cache
def page_of(chapter: str) -> tuple[Page, tuple[CodeCell, ...]]:
    """Return a chapter's page, whose ordinary cells run once for all edits, and its cells."""
    (notebook,) = (HERE.parent / "notebooks").glob(f"{chapter}_*.ipynb")
    cells = read_code_cells(notebook)
    return Page(cells, notebook.stem), tuple(cells)


def tried(
    chapter: str, exercise: str, old: str, new: str, seeds: Sequence[int]
) -> tuple[CheckResult, ...]:
    """Return what the check says of the solution with one mistake."""
    page, cells = page_of(chapter)
    page.cells = list(cells)
    for place, cell in enumerate(cells):
        if cell.exercise == exercise and SOLUTION in cell.tags and old in cell.source:
            page.cells[place] = replace(cell, source=definitions(cell.source.replace(old, new, 1)))
            return page.attempt(exercise, SOLUTION, seeds).results
    pytest.fail(f"{exercise}: {old!r} does not stand in its solution")


@pytest.mark.parametrize(FIELDS, edits("wrong"))
def test_a_plausible_mistake_fails(
    monkeypatch: pytest.MonkeyPatch,
    chapter: str,
    exercise: str,
    old: str,
    new: str,
    mistake: str,
    said: str,
) -> None:
    if said == "did not end":
        monkeypatch.setattr(wall, "CASE_S", 2)
    (result,) = tried(chapter, exercise, old, new, (DEFAULT_SEED,))
    assert not result.passed, f"{mistake}: {result!r}"
    assert said in result.message


@pytest.mark.parametrize(FIELDS, edits("right"))
def test_another_right_answer_passes(
    chapter: str, exercise: str, old: str, new: str, mistake: str, said: str
) -> None:
    results = tried(chapter, exercise, old, new, range(4))
    assert all(result.passed for result in results), f"{mistake}: {results!r}"


@pytest.mark.full
@pytest.mark.parametrize(FIELDS, edits("wrong"))
def test_a_plausible_mistake_fails_under_twenty_seeds(
    chapter: str, exercise: str, old: str, new: str, mistake: str, said: str
) -> None:
    results = tried(chapter, exercise, old, new, range(100, 120))
    lucky = [result.seed for result in results if result.passed]
    assert not lucky, f"{mistake}: passes under the seeds {lucky}"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_coded_exercise_keeps_four_mistakes(path: Path) -> None:
    (notebook,) = (HERE.parent / "notebooks").glob(f"{path.stem}_*.ipynb")
    lists = tomllib.loads(path.read_text("utf-8"))
    coded = exercises_of(read_code_cells(notebook))
    assert set(lists) == set(coded)
    few = {name: len(table["wrong"]) for name, table in lists.items() if len(table["wrong"]) < 4}
    assert not few, f"fewer than four mistakes: {few}"
