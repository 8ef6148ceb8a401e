"""Plausible mistakes fail: each is an edit of the published solution, kept in tests/wrong/NN.toml.

A file has one table an exercise, its `wrong` a list of [old text, new text, the mistake, and if you
like words that the check must say]; the first occurrence of the old text in the solution's cells is
replaced and the check must say no. The edits of a list `right` are answers as good as ours.
"""

import ast
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascend_lab.lab.checks.core import DEFAULT_SEED
from ascend_lab.lab.checks.grading import SOLUTION, Page, exercises_of, read_code_cells

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


def page_with(chapter: str, exercise: str, old: str, new: str) -> Page:
    """Return the chapter's page with one mistake in one solution."""
    (notebook,) = (HERE.parent / "notebooks").glob(f"{chapter}_*.ipynb")
    cells = read_code_cells(notebook)
    for place, cell in enumerate(cells):
        if cell.exercise == exercise and SOLUTION in cell.tags and old in cell.source:
            cells[place] = replace(cell, source=definitions(cell.source.replace(old, new, 1)))
            return Page(cells, notebook.stem, [exercise])
    pytest.fail(f"{exercise}: {old!r} does not stand in its solution")


@pytest.mark.parametrize(FIELDS, edits("wrong"))
def test_a_plausible_mistake_fails(
    chapter: str, exercise: str, old: str, new: str, mistake: str, said: str
) -> None:
    run = page_with(chapter, exercise, old, new).attempt(exercise, SOLUTION, (DEFAULT_SEED,))
    assert not run.results[0].passed, f"{mistake}: {run.results[0]!r}"
    assert said in run.results[0].message


@pytest.mark.parametrize(FIELDS, edits("right"))
def test_another_right_answer_passes(
    chapter: str, exercise: str, old: str, new: str, mistake: str, said: str
) -> None:
    run = page_with(chapter, exercise, old, new).attempt(exercise, SOLUTION, range(4))
    assert all(result.passed for result in run.results), f"{mistake}: {run.results!r}"


@pytest.mark.full
@pytest.mark.parametrize(FIELDS, edits("wrong"))
def test_a_plausible_mistake_fails_under_twenty_seeds(
    chapter: str, exercise: str, old: str, new: str, mistake: str, said: str
) -> None:
    seeds = tuple(range(100, 120))
    run = page_with(chapter, exercise, old, new).attempt(exercise, SOLUTION, seeds)
    lucky = [result.seed for result in run.results if result.passed]
    assert not lucky, f"{mistake}: passes under the seeds {lucky}"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_coded_exercise_keeps_four_mistakes(path: Path) -> None:
    (notebook,) = (HERE.parent / "notebooks").glob(f"{path.stem}_*.ipynb")
    lists = tomllib.loads(path.read_text("utf-8"))
    coded = exercises_of(read_code_cells(notebook))
    assert set(lists) == set(coded)
    few = {name: len(table["wrong"]) for name, table in lists.items() if len(table["wrong"]) < 4}
    assert not few, f"fewer than four mistakes: {few}"
