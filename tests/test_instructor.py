"""The instructor's page does what it says: its scripts run on a student's file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_lab import checks
from ascend_lab.checks.grading import SOLUTION, attempt, exercises_of, read_code_cells

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "instructor.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[012]*.ipynb"))


def defined_by(script: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(script, "<instructor.md>", "exec"), names)
    return names


@pytest.fixture
def grade() -> Callable[..., float]:
    return defined_by(SCRIPTS[0])["grade"]


def test_a_file_without_functions_gets_nothing(grade, tmp_path: Path, capsys) -> None:
    path = tmp_path / "solutions.py"
    path.write_text("", encoding="utf-8")
    assert grade(path, hidden=(1001,)) == 0
    assert capsys.readouterr().out.count("not yet") == len(checks.check_names())


def test_one_solved_exercise_earns_its_share_and_wrong_ones_nothing(
    grade, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "solutions.py"
    path.write_text(
        "from ascend_lab.checks.chapter02 import largest_k as ex_02_3\n"
        "def ex_01_3(mask, then, other): raise RuntimeError('no idea')\n",
        encoding="utf-8",
    )
    assert grade(path) == pytest.approx(80 / len(checks.check_names()))
    printed = capsys.readouterr().out
    assert "ex 2.3 passed" in printed
    assert "ex 1.3 not yet" in printed


def test_the_book_s_own_solutions_get_full_marks(grade, tmp_path: Path, monkeypatch) -> None:
    solved = {}
    for notebook in NOTEBOOKS:
        cells = read_code_cells(notebook)
        for name in exercises_of(cells):
            solved[name] = attempt(cells, name, SOLUTION, (), where=notebook.stem).subject
    monkeypatch.setattr(checks, "_solved", solved, raising=False)
    path = tmp_path / "solutions.py"
    path.write_text(
        "from ascend_lab import checks\nglobals().update(checks._solved)\n", encoding="utf-8"
    )
    assert grade(path, hidden=(1001,)) == pytest.approx(80)


def test_cycles_are_graded_exactly() -> None:
    check_fast = defined_by(SCRIPTS[1])["check_fast"]
    from ascend_lab.chip import load_chip
    from ascend_lab.kernels import elementwise_program
    from ascend_lab.sim import simulate

    chip = load_chip("Ascend910A")

    def relu(tiles: int) -> Any:
        return elementwise_program(chip, tiles * 1024, op="vrelu")

    cycles = int(simulate(relu(8), chip).cycles)
    assert check_fast(relu, cycles)
    assert f"takes {cycles} cycles" in repr(check_fast(relu, cycles - 1))
