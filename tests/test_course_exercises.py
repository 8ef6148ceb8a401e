"""The book's exercises behind the wall: right answers pass, kept mistakes fail, nothing escapes."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_wrong_solutions import definitions

from ascend_lab.course.exercises import (
    DENIED,
    LIMITS,
    NOT_BY_MACHINE,
    names_of,
    verdict,
)
from ascend_lab.course.sandbox import Session
from ascend_lab.lab import checks
from ascend_lab.lab.checks.grading import SOLUTION, Page, needed_cells, read_code_cells

HERE = Path(__file__).parent
CODED = [name.removeprefix("check_") for name in checks.check_names()]
TRAVEL = [name for name in CODED if name not in NOT_BY_MACHINE]
OF_EACH_KIND = ("ex_01_2", "ex_02_2", "ex_04_3", "ex_05_2", "ex_08_4", "ex_13_2", "ex_14_2",
                "ex_14_4", "ex_15_2", "ex_19_5", "ex_24_3")  # fmt: skip
"""Dataclasses, programs, callbacks, errors, arrays, builders, drafts, what may not be written,
generators, objects that are called."""


@cache
def answer_to(exercise: str) -> tuple[str, str]:
    """Return the cells that the published solution needs, and the solution."""
    (path,) = (HERE.parent / "notebooks").glob(f"{exercise[3:].rpartition('_')[0]}_*.ipynb")
    cells = read_code_cells(path)
    own, _ = Page(cells)._own(exercise, SOLUTION)
    above = "\n\n".join(cell.source for cell in needed_cells(cells, own))
    return above, without_check("\n\n".join(cell.source for cell in own))


def without_check(source: str) -> str:
    """Return a solution without what it prints and without the call of its check."""
    return re.sub(r"(?m)^.*check_ex_.*$", "", definitions(source))


@cache
def mistakes_in(exercise: str) -> list[tuple[str, str]]:
    """Return (solution with a kept mistake, the mistake)."""
    (path,) = (HERE.parent / "notebooks").glob(f"{exercise[3:].rpartition('_')[0]}_*.ipynb")
    own, _ = Page(read_code_cells(path))._own(exercise, SOLUTION)
    source = "\n\n".join(cell.source for cell in own)
    kept = tomllib.loads((HERE / f"wrong/{path.stem[: path.stem.index('_')]}.toml").read_text())
    edits = kept[exercise]["wrong"]
    return [(without_check(source.replace(old, new, 1)), said) for old, new, said in edits]


def source_with(exercise: str, answers: list[str]) -> str:
    """Return a hand-in whose functions answer_0, answer_1, ... are these answers'."""
    above, _ = answer_to(exercise)
    name = names_of(exercise)[-1]
    lines = [above, "def _answer(text):\n    names = dict(globals())\n    exec(text, names)",
             f"    return names[{name!r}]"]  # fmt: skip
    chunks = ["\n".join(lines[1:])]
    chunks += [f"answer_{i} = _answer({text!r})" for i, text in enumerate(answers)]
    return above + "\n\n" + "\n".join(chunks)


@pytest.fixture
def verdicts() -> Iterator[Any]:
    """Return a function that says what an exercise's check says to each of some answers."""
    opened: list[Session] = []

    def try_all(exercise: str, answers: list[str], seed: int = 20) -> Iterator[str]:
        for number in range(len(answers)):
            if opened and not opened[-1].rests():
                opened.pop().close()
            if not opened:
                source = source_with(exercise, answers)
                opened.append(Session(source, "w.py", LIMITS, DENIED, lenient=True))
                assert opened[-1].open() == ""
            yield verdict(opened[-1], exercise, [f"answer_{number}"], seed)

    yield try_all
    for session in opened:
        session.close()


def test_nearly_all_exercises_are_graded_by_machine() -> None:
    assert len(CODED) == 117
    assert set(NOT_BY_MACHINE) <= set(CODED)
    assert len(TRAVEL) / len(CODED) > 0.9


def try_both_sides(exercise: str, verdicts: Any) -> None:
    wrong = mistakes_in(exercise)
    answers = [answer_to(exercise)[1], *(source for source, _ in wrong)]
    right, *said = verdicts(exercise, answers)
    assert right == ""
    passed = [mistake for (_, mistake), text in zip(wrong, said, strict=True) if not text]
    assert not passed
    assert not [text for text in said if "sent something" in text or "no function" in text]


@pytest.mark.parametrize("exercise", OF_EACH_KIND)
def test_solutions_pass_and_mistakes_fail_through_the_wall(exercise: str, verdicts: Any) -> None:
    try_both_sides(exercise, verdicts)


@pytest.mark.full
@pytest.mark.parametrize("exercise", [name for name in TRAVEL if name not in OF_EACH_KIND])
def test_every_solution_passes_and_every_mistake_fails(exercise: str, verdicts: Any) -> None:
    try_both_sides(exercise, verdicts)
