"""Every exercise of the book from both sides: the stub fails its check, the solution passes."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from ascend_lab.lab import checks
from ascend_lab.lab.checks.core import DEFAULT_SEED
from ascend_lab.lab.checks.grading import (
    SOLUTION,
    STUB,
    CodeCell,
    Page,
    exercises_of,
    read_code_cells,
)

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SEEDS = {STUB: (DEFAULT_SEED,), SOLUTION: (20,)}
"""The notebooks themselves run both sides under the default."""

LABEL = re.compile(r"^:label:\s*(ex-\d\d[a-z]?-\d+)\s*$", re.MULTILINE)
EXERCISE_BLOCK = re.compile(
    r"^(`{3,}|:{3,})\{exercise(?:-start)?\}.*?^\1", re.MULTILINE | re.DOTALL
)
ANSWERED = re.compile(r"\{solution(?:-start)?\}\s+(ex-\d\d[a-z]?-\d+)")


@cache
def cells_of(notebook: Path) -> list[CodeCell]:
    return read_code_cells(notebook)


@cache
def page_of(notebook: Path) -> Page:
    return Page(cells_of(notebook), notebook.stem)


def prose_of(notebook: Path) -> str:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    return "\n\n".join(
        "".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "markdown"
    )


CODED = [(path, name) for path in NOTEBOOKS for name in exercises_of(cells_of(path))]
CODED_IDS = [f"{path.stem}-{name}" for path, name in CODED]


@pytest.mark.full
@pytest.mark.parametrize(("notebook", "exercise"), CODED, ids=CODED_IDS)
def test_the_solution_passes_under_more_seeds(notebook: Path, exercise: str) -> None:
    run = page_of(notebook).attempt(exercise, SOLUTION, tuple(range(21, 25)))
    assert all(result.passed for result in run.results), run.results


@pytest.mark.parametrize(("notebook", "exercise"), CODED, ids=CODED_IDS)
def test_stub_fails_and_solution_passes(notebook: Path, exercise: str) -> None:
    page = page_of(notebook)
    for side, should_pass in ((STUB, False), (SOLUTION, True)):
        run = page.attempt(exercise, side, SEEDS[side])
        for seed, result in zip(SEEDS[side], run.results, strict=True):
            assert result.passed is should_pass, f"{side}: {result!r}"
            assert result.subject is run.subject, f"{exercise}: the check tested another object"
            assert (result.exercise, result.seed) == (exercise, seed)
        assert run.defined_here, f"{exercise}: the {side} cell does not define what it checks"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_exercises_are_labelled_answered_and_checked_once(notebook: Path) -> None:
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


def test_every_check_belongs_to_an_exercise() -> None:
    asked = {f"check_{name}" for _, name in CODED}
    assert set(checks.check_names()) == asked
