"""Checks never raise, name what failed, and test the very object they were given."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from notebook_pages import Page, exercises_of, read_code_cells

from ascend_lab.lab import checks
from ascend_lab.lab.checks import CheckResult, check_property, compare, like, predict, wall
from ascend_lab.lab.checks.core import Prediction, PredictionError, equal_to, show
from ascend_lab.lab.checks.grading import SOLUTION, STUB, needed_cells
from ascend_lab.lab.checks.wall import CheckError


def draw(rng: np.random.Generator) -> dict[str, object]:
    return {"n": int(rng.integers(1, 100))}


def check_ex_90_1(fn, *, seed: int = 7) -> CheckResult:
    return check_property(
        "ex_90_1", fn, like(lambda n: 2 * n), draw, seed=seed, edge_cases=[{"n": 0}]
    )


def double(n):
    return 2 * n


def test_a_right_answer_passes_and_says_how_much_was_tried() -> None:
    result = check_ex_90_1(double)
    assert repr(result) == "ex 90.1 passed: 1 edge and 40 random cases (seed 7)"
    assert result and result.subject is double and result.cases == 41


def test_a_failing_case_can_be_called_again() -> None:
    def index(n: int) -> int:
        return [0, 1, 4][n]

    squares = like(lambda n: n * n)
    result = check_property("ex_01_1", index, squares, lambda rng: {"n": int(rng.integers(2, 9))})
    assert re.search(r"raised IndexError in line \d+: list index", repr(result))
    with pytest.raises(IndexError):
        index(**result.arguments)
    passed = check_property("ex_01_1", lambda n: n, like(lambda n: n), lambda rng: {"n": 1})
    with pytest.raises(CheckError, match="a case that failed"):
        assert passed.arguments


def test_arrays_and_lists_name_the_first_place_that_differs() -> None:
    right = np.arange(12).reshape(3, 4)
    wrong = right.copy()
    wrong[1, 2] = 99
    assert (equal_to(right)(wrong) or "").startswith("first differing at [1, 2]: 99 for 6;")
    assert (equal_to([1, 2, 3])([1, 5, 3]) or "").startswith("first differing at [1]: 5 for 2;")
    assert (equal_to([1, 2, 3])([1, 2]) or "").startswith("of length 2 for 3;")
    assert equal_to([])([4]) == "of length 1 for 0; expected []"
    assert equal_to(right)(right) is None


def test_a_wrong_answer_names_case_answer_expectation_and_seed() -> None:
    result = check_property("ex_01_2", lambda n: None, like(lambda n: 2 * n), lambda rng: {"n": 17})
    assert repr(result) == (
        "ex 1.2 not yet: for n=17 your function returned None, expected 34 (seed 7)"
    )
    assert not result and result.cases == 1


class BrokenRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def raises(error: BaseException):
    def function(n):
        raise error

    return function


@pytest.mark.parametrize(
    "fn",
    [
        None,
        42,
        "text",
        lambda: 1,
        lambda n: None,
        lambda n: "34",
        lambda n: True,
        lambda n: [n, n],
        lambda n: np.full((2, 2), 2 * n),
        lambda n: math.nan,
        lambda n: BrokenRepr(),
        lambda n: n / 0,
        lambda n: n + 0.5j,
        lambda n: (_ for _ in ()),
        raises(NotImplementedError()),
        raises(SystemExit(3)),
        raises(RecursionError("deep")),
        raises(AssertionError(BrokenRepr)),
        raises(AssertionError(BrokenRepr())),
        raises(KeyboardInterrupt()),
        raises(GeneratorExit()),
    ],
)
def test_nonsense_is_not_yet_and_never_an_exception(fn: object) -> None:
    first = check_ex_90_1(fn)
    second = check_ex_90_1(fn)
    assert not first.passed
    assert repr(first) == repr(second)
    assert " at 0x" not in repr(first)
    assert "\n" not in repr(first)


@pytest.mark.parametrize("name", checks.check_names())
def test_every_check_of_the_book_refuses_nonsense(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wall, "FORKS", False)  # each calls it behind the wall: see that one's test
    answers = None, 7, "far", (), [(0, 0)], math.nan
    for fn in (None, *(lambda *_, answer=answer: answer for answer in answers)):
        result = getattr(checks, name)(fn)
        assert not result.passed and result.subject is fn, result


def test_a_function_cannot_change_the_case_it_is_judged_by() -> None:
    def cheat(values):
        values[:] = 0
        return values

    result = check_property(
        "ex_90_1", cheat, like(lambda v: 2 * v), lambda rng: {"v": rng.random(3)}
    )
    assert not result.passed


def test_the_same_seed_draws_the_same_cases_and_another_seed_others() -> None:
    def drawn(seed: int) -> str:
        seen: list[int] = []

        def judge(got: object, case: dict[str, int]) -> str | None:
            seen.append(case["n"])
            return f"expected {seen}" if len(seen) == 5 else None

        return check_property("ex_90_1", double, judge, draw, seed=seed).message

    assert drawn(7) == drawn(7) != drawn(8)


def test_a_broken_check_raises_instead_of_blaming_the_student() -> None:
    with pytest.raises(CheckError, match="reference"):
        check_property("ex_90_1", double, like(lambda n: n / 0), draw)
    with pytest.raises(CheckError, match="ex_01_2"):
        check_property("exercise 1", double, like(double), draw)
    with pytest.raises(CheckError, match="at least one case"):
        check_property("ex_90_1", double, like(double), draw, cases=0)


@pytest.mark.parametrize(
    ("expected", "good", "bad"),
    [
        (3, [3, 3.0, np.int64(3)], [4, "3", None, True, [3]]),
        (0.1 + 0.2, [0.3], [0.3001, None]),
        (True, [True, np.True_], [1, "True", False, None]),
        (None, [None], [0, False, ""]),
        (math.nan, [math.nan], [0.0]),
        ([1, (2, 3)], [[1, [2, 3]], (1, (2, 3))], [[1, 2], [1, (2, 4)], None, 5]),
        ("ring", ["ring"], ["mesh", None]),
        (np.arange(4), [np.arange(4.0), [0, 1, 2, 3]], [np.arange(5), np.zeros(4), None]),
    ],
)
def test_equal_to_compares_by_what_is_expected(expected, good, bad) -> None:
    judge = equal_to(expected, rel_tol=1e-9)
    assert [judge(value) for value in good] == [None] * len(good)
    assert all(judge(value) for value in bad)


def test_show_is_short_and_has_no_addresses() -> None:
    assert show(object()) == "<object object>"
    assert len(show("x" * 5000)) < 200
    assert len(show(np.zeros((1000, 1000)))) < 200
    assert show(np.float64(0.5)) == "0.5"
    assert show(BrokenRepr()) == "<BrokenRepr instance>"
    # reprlib goes by the name of the class and expects array.array here.
    assert show(type("array", (), {})()) == "a array whose repr raises AttributeError"


def test_checks_of_chapters_are_found_by_name_or_say_so() -> None:
    with pytest.raises(AttributeError, match="check_ex_99_1"):
        _ = checks.check_ex_99_1
    with pytest.raises(AttributeError, match="nothing"):
        _ = checks.nothing
    assert set(checks.check_names()) <= set(dir(checks))
    assert callable(checks.predict)


@pytest.mark.parametrize(
    ("guess", "model", "said"),
    [
        (2.0, 3.1, "You guessed 2x; the model says 3.1x: your guess is too low by a factor"),
        (6.2, 3.1, "too high by a factor of 2."),
        (3.0, 3.1, "within 5%, well predicted."),
        (-1.0, 3.0, "too low by 4x."),
        (1.0, 0.0, "too high by 1x."),
        (0.0, 0.0, "well predicted"),
        (None, 3.0, "The model says 3x."),
    ],
)
def test_compare_says_how_far_off(guess, model, said, capsys) -> None:
    prediction = predict("How many times faster?", guess=guess, unit="x")
    compare(prediction, model)
    question, *_, verdict = capsys.readouterr().out.splitlines()
    assert question.startswith("How many times faster?")
    assert said in verdict


def test_without_a_guess_the_reader_is_asked_for_one(capsys) -> None:
    prediction = predict("How many times faster?", unit="x")
    assert prediction.guess is None
    asked = capsys.readouterr().out
    assert asked == (
        "How many times faster?\nYour guess, as a factor? "
        "Add guess=... to predict(...) and run it again.\n"
    )
    predict("How many?", unit="cycles")
    assert "Your guess, in cycles? Add" in capsys.readouterr().out
    compare(prediction, 3.0)
    assert "guess" not in capsys.readouterr().out
    with pytest.raises(TypeError):
        predict("How many?", 3)  # a guess has a name: what stands second could be the unit
    compare(3, 3.0)  # a reader's `guess = 3`
    assert (
        capsys.readouterr().out == "You guessed 3; the model says 3: within 5%, well predicted.\n"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, "3", True, [1.0]])
def test_a_guess_or_model_value_must_be_a_finite_number(value) -> None:
    with pytest.raises(PredictionError, match="finite number"):
        predict("How many?", guess=value)
    with pytest.raises(PredictionError, match="finite number"):
        compare(Prediction("How many?", 1.0), value)


# The two-sided runner, on notebooks small enough to read.


def notebook(tmp_path: Path, *cells: tuple[str, str, str]) -> Path:
    """Write a notebook of (tag, exercise, source) code cells."""
    made = [
        {
            "cell_type": "code",
            "id": f"c{index}",
            "execution_count": None,
            "outputs": [],
            "metadata": {"tags": [tag] if tag else [], **({"exercise": name} if name else {})},
            "source": source.splitlines(keepends=True),
        }
        for index, (tag, name, source) in enumerate(cells)
    ]
    path = tmp_path / "90_tiny.ipynb"
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


CHECK = """
from ascend_lab.lab.checks import check_property, like

def ready_made(n):
    return 2 * n

class checks:
    @staticmethod
    def check_ex_90_1(fn, seed=7):
        draw = lambda rng: {"n": int(rng.integers(1, 100))}
        return check_property("ex_90_1", fn, like(ready_made), draw, seed=seed)
"""
STUB_CELL = (STUB, "ex_90_1", "def double(n):\n    ...")
CALL_CELL = ("", "", "checks.check_ex_90_1(double)")
SOLUTION_CELL = (
    SOLUTION,
    "ex_90_1",
    "def double(n):\n    return FACTOR * n\n\nchecks.check_ex_90_1(double)",
)


def test_both_sides_of_an_exercise_run_on_the_cells_own_function(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        ("", "", f"%matplotlib inline\n{CHECK}"),
        ("", "", "FACTOR = 2"),
        ("", "", "raise SystemExit('an unrelated cell must not run')"),
        STUB_CELL,
        CALL_CELL,
        SOLUTION_CELL,
    )
    cells = read_code_cells(path)
    assert exercises_of(cells) == ["ex_90_1"]
    stub, solution = (Page(cells).attempt("ex_90_1", side, [1, 2, 3]) for side in (STUB, SOLUTION))
    assert [r.passed for r in stub.results] == [False] * 3
    assert [r.passed for r in solution.results] == [True] * 3
    for side in (stub, solution):
        assert side.defined_here
        assert all(result.subject is side.subject for result in side.results)
    assert [r.seed for r in stub.results] == [1, 2, 3]


def test_a_solution_that_checks_somebody_elses_function_is_noticed(tmp_path: Path) -> None:
    foreign = "double = ready_made\nchecks.check_ex_90_1(double)"
    cells = read_code_cells(
        notebook(tmp_path, ("", "", CHECK), STUB_CELL, CALL_CELL, (SOLUTION, "ex_90_1", foreign))
    )
    result = Page(cells).attempt("ex_90_1", SOLUTION, [1])
    assert result.results[0].passed
    assert not result.defined_here


def test_needed_cells_follow_names_through_cells_above_only(tmp_path: Path) -> None:
    cells = read_code_cells(
        notebook(
            tmp_path,
            ("", "", "import math as m"),
            ("", "", "unused = 1"),
            ("", "", "def area(r):\n    hidden = 3\n    return m.pi * r"),
            ("", "", "with open('x') as handle, area as (a, *b):\n    total = [i for i in a]"),
            (STUB, "ex_90_1", "x = area(2)"),
            ("", "", "area = None"),
            ("", "", "b += [hidden, unused]"),
            ("", "", "b"),
            ("", "", "if m:\n    b = 2\nfor a in b:\n    a\ndef f():\n    a = 1\n    a += x"),
            ("", "", "x = 3\nfor a in range(2):\n    b = a\nf = [b for b in 'no']\na + x"),
            ("", "", "def g():\n    global unused\n    unused = 4\ng()"),
        )
    )
    assert [c.index for c in needed_cells(cells, [cells[4]])] == [0, 2]
    assert [c.index for c in needed_cells(cells, [cells[7]])] == [0, 1, 2, 3, 6]
    # what a cell binds itself is not asked of cells above, unless it may not have been bound
    first = {0, 1, 2, 3, 6}
    assert {c.index for c in needed_cells(cells, [cells[8]])} == first
    assert {c.index for c in needed_cells(cells, [cells[9]])} == first | {8}
    assert {c.index for c in needed_cells(cells, [cells[10]])} == {1}


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([("", "", CHECK), STUB_CELL], "no cell calls check_ex_90_1"),
        ([("", "", CHECK), STUB_CELL, ("", "", "checks.check_ex_90_1()")], "no cell calls"),
        ([("", "", CHECK), SOLUTION_CELL], "no cell tagged exercise-stub"),
    ],
)
def test_an_incomplete_exercise_is_named(tmp_path: Path, cells, said: str) -> None:
    with pytest.raises(CheckError, match=said):
        Page(read_code_cells(notebook(tmp_path, *cells))).attempt("ex_90_1", STUB, [1])


@pytest.mark.parametrize("check", ["check_ex_13_3", "check_ex_20_3"])
def test_an_answer_that_is_called_by_another_function_is_told_its_own_line(check):
    def answer(*arguments):
        raise ValueError("no")

    line = answer.__code__.co_firstlineno + 1
    assert f"in line {line}: no" in getattr(checks, check)(answer).message


def test_a_tempting_answer_is_named_with_its_argument(capsys: pytest.CaptureFixture[str]) -> None:
    guess = predict("How many times?", unit="x", guess=4)
    compare(guess, 2.0, tempting=4, because="a quarter of the bytes")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "The tempting answer is 4x: a quarter of the bytes."
