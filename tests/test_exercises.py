"""Every exercise of the book from both sides, and plausible mistakes: the stub fails its check, the
solution passes, each edit of it kept in tests/wrong/NN.toml fails.

A file has one table an exercise, its `wrong` a list of [old text, new text, the mistake, and if you
like words that the check must say]; the first occurrence of the old text in the solution's cells is
replaced and the check must say no. The edits of a list `right` are answers as good as ours.
"""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from notebook_pages import Page, exercises_of, read_code_cells

from ascend_lab.lab import checks
from ascend_lab.lab.checks import wall
from ascend_lab.lab.checks.core import DEFAULT_SEED, CheckResult
from ascend_lab.lab.checks.grading import SOLUTION, STUB, CodeCell

HERE = Path(__file__).parent
NOTEBOOKS = sorted((HERE.parent / "notebooks").glob("*.ipynb"))
LABEL = re.compile(r"^:label:\s*(ex-\d\d[a-z]?-\d+)\s*$", re.MULTILINE)
EXERCISE_BLOCK = re.compile(
    r"^(`{3,}|:{3,})\{exercise(?:-start)?\}.*?^\1", re.MULTILINE | re.DOTALL
)
FORKS = wall.FORKS
ANSWERED = re.compile(r"\{solution(?:-start)?\}\s+(ex-\d\d[a-z]?-\d+)")


@cache
def cells_of(notebook: Path) -> list[CodeCell]:
    return read_code_cells(notebook)


@cache
def page_of(notebook: Path) -> Page:
    """Return a chapter's page, whose ordinary cells run once for all that is tried on them."""
    return Page(cells_of(notebook), notebook.stem)


@cache
def edits_of(notebook: Path) -> dict[str, dict[str, list[list[str]]]]:
    path = HERE / "wrong" / f"{notebook.stem.partition('_')[0]}.toml"
    return tomllib.loads(path.read_text("utf-8"))


def prose_of(notebook: Path) -> str:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    return "\n\n".join(
        "".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "markdown"
    )


CODED = [(path, name) for path in NOTEBOOKS for name in exercises_of(cells_of(path))]
each_coded = pytest.mark.parametrize(
    ("notebook", "exercise"), CODED, ids=[f"{path.stem}-{name}" for path, name in CODED]
)


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


def tried(
    notebook: Path, exercise: str, old: str, new: str, seeds: Sequence[int]
) -> tuple[CheckResult, ...]:
    """Return what the check says of the solution with one edit."""
    page = page_of(notebook)
    cells = cells_of(notebook)
    for place, cell in enumerate(cells):
        if cell.exercise == exercise and SOLUTION in cell.tags and old in cell.source:
            edited = replace(cell, source=definitions(cell.source.replace(old, new, 1)))
            page.cells = [*cells[:place], edited, *cells[place + 1 :]]
            try:
                return page.attempt(exercise, SOLUTION, seeds).results
            finally:
                page.cells = cells
    pytest.fail(f"{exercise}: {old!r} does not stand in its solution")


def forgiven(notebook: Path, exercise: str, seeds: Sequence[int]) -> Iterator[str]:
    """Yield what the check says of the mistakes that it lets pass, or of other words for them."""
    for old, new, mistake, *said in edits_of(notebook)[exercise]["wrong"]:
        with pytest.MonkeyPatch.context() as patch:
            if said == ["did not end"]:
                patch.setattr(wall, "FORKS", FORKS)
                patch.setattr(wall, "CASE_S", 0.5)
            for result in tried(notebook, exercise, old, new, seeds):
                if result.passed or not all(word in result.message for word in said):
                    yield f"{mistake} (seed {result.seed}): {result!r}"


@pytest.fixture
def no_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check in this process, where what a check caches stays: a copy costs more than an answer."""
    monkeypatch.setattr(wall, "FORKS", False)
    monkeypatch.setattr(wall, "CASE_S", 600)


@pytest.mark.usefixtures("no_wall")
@each_coded
def test_stub_fails_solution_passes_and_mistakes_fail(notebook: Path, exercise: str) -> None:
    """The solution under a seed that the notebook, where each check has its wall, does not run."""
    page = page_of(notebook)
    for side, seed in ((STUB, DEFAULT_SEED), (SOLUTION, 20)):
        run = page.attempt(exercise, side, (seed,))
        (result,) = run.results
        assert result.passed is (side == SOLUTION), f"{side}: {result!r}"
        assert result.subject is run.subject, f"{exercise}: the check tested another object"
        assert (result.exercise, result.seed) == (exercise, seed)
        assert run.defined_here, f"{exercise}: the {side} cell does not define what it checks"
    assert not list(forgiven(notebook, exercise, (DEFAULT_SEED,)))
    for old, new, answer, *_ in edits_of(notebook)[exercise].get("right", ()):
        results = tried(notebook, exercise, old, new, range(4))
        assert all(result.passed for result in results), f"{answer}: {results!r}"


@pytest.mark.full
@each_coded
def test_all_sides_under_more_seeds(notebook: Path, exercise: str) -> None:
    run = page_of(notebook).attempt(exercise, SOLUTION, tuple(range(21, 25)))
    assert all(result.passed for result in run.results), run.results
    assert not list(forgiven(notebook, exercise, range(100, 120)))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_exercises_are_labelled_answered_checked_once_and_have_four_mistakes(
    notebook: Path,
) -> None:
    prose = prose_of(notebook)
    blocks = [found[0] for found in EXERCISE_BLOCK.finditer(prose)]
    labels = [label for block in blocks for label in LABEL.findall(block)]
    assert len(labels) == len(blocks), "an exercise has no label of the form ex-NN-k"
    assert Counter(labels) == Counter(ANSWERED.findall(prose)), "one solution per exercise"
    named = {label.replace("-", "_") for label in labels}
    coded = exercises_of(cells_of(notebook))
    assert set(coded) <= named, "a stub or solution cell names an exercise the prose lacks"
    for exercise in coded:
        assert callable(getattr(checks, f"check_{exercise}"))
    if coded:
        kept = edits_of(notebook)
        assert set(kept) == set(coded)
        few = {name: len(table["wrong"]) for name, table in kept.items() if len(table["wrong"]) < 4}
        assert not few, f"fewer than four mistakes: {few}"


def test_every_check_belongs_to_an_exercise() -> None:
    asked = {f"check_{name}" for _, name in CODED}
    assert set(checks.check_names()) == asked
