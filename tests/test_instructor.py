"""The instructor's page does what it says: its scripts run on a student's file."""

import builtins
import re
import symtable
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ascend_lab.lab import checks
from ascend_lab.lab.checks import core, wall
from ascend_lab.lab.checks.grading import SOLUTION, Page, exercises_of, read_code_cells

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


@pytest.fixture
def few(monkeypatch) -> int:
    """Ask only for the exercises of the first two chapters; return how many these are."""
    names = [name for name in checks.check_names() if name[9:11] in ("01", "02")]
    monkeypatch.setattr(checks, "check_names", lambda: names)
    return len(names)


def test_a_file_without_functions_gets_nothing(grade, tmp_path: Path, capsys) -> None:
    path = tmp_path / "solutions.py"
    path.write_text("", encoding="utf-8")
    assert grade(path, hidden=(1001,)) == 0
    assert capsys.readouterr().out.count("not yet") == len(checks.check_names())


def test_one_solved_exercise_earns_its_share_and_wrong_ones_nothing(
    grade, tmp_path: Path, capsys, few: int
) -> None:
    path = tmp_path / "solutions.py"
    path.write_text(
        "from ascend_lab.lab.checks.chapter01_02 import largest_k as ex_02_3\n"
        "def ex_01_3(mask, then, other): raise RuntimeError('no idea')\n",
        encoding="utf-8",
    )
    assert grade(path) == pytest.approx(80 / few)
    printed = capsys.readouterr().out
    assert "ex 2.3 passed" in printed
    assert "ex 1.3 not yet" in printed


def test_the_book_s_own_solutions_get_full_marks(grade, tmp_path: Path, monkeypatch) -> None:
    solved = {}
    for notebook in [n for n in NOTEBOOKS if n.name[:2] in ("01", "03", "09")]:
        page = Page(read_code_cells(notebook), notebook.stem)
        for name in page.exercises:
            solved[name] = page.attempt(name, SOLUTION, ()).subject
    monkeypatch.setattr(checks, "_solved", solved, raising=False)
    monkeypatch.setattr(checks, "check_names", lambda: [f"check_{name}" for name in solved])
    path = tmp_path / "solutions.py"
    path.write_text(
        "from ascend_lab.lab import checks\nglobals().update(checks._solved)\n", encoding="utf-8"
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


ENDLESS = """
import os
from ascend_lab.lab.checks.chapter01_02 import largest_k as ex_02_3
def ex_01_3(mask, then, other):
    while True: pass
def ex_01_4(stride, offset): os._exit(0)
"""


@pytest.mark.skipif(not wall.FORKS, reason="os._exit is refused here")
def test_an_answer_that_never_ends_does_not_stop_the_marks(
    grade, tmp_path: Path, capsys, monkeypatch, few: int
) -> None:
    monkeypatch.setattr(wall, "CASE_S", 1)
    path = tmp_path / "solutions.py"
    path.write_text(ENDLESS, encoding="utf-8")
    assert grade(path, hidden=(1001,)) == pytest.approx(80 / few)
    printed = capsys.readouterr().out
    assert "your function did not end within 1 s" in printed
    assert "your function ended Python" in printed


def test_the_page_names_a_fraud_that_works(grade, tmp_path: Path, monkeypatch, few: int) -> None:
    monkeypatch.setattr(core, "_same", core._same)  # put back what the file replaces
    path = tmp_path / "solutions.py"
    path.write_text(
        "from ascend_lab.lab.checks import core\n"
        "core._same = lambda got, expected, rel_tol: True\n"
        "def ex_01_3(mask, then, other): return 0\n",
        encoding="utf-8",
    )
    assert grade(path, hidden=(1001,)) > 0, "the page may promise more than it does"
    assert "A file that wants points can take them" in PAGE


def source_of(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_a_solution_is_handed_out(path: Path) -> None:
    whole = nbformat.read(path, as_version=4)
    page = "\n\n".join(source_of(whole, "markdown"))
    rest = defined_by(SCRIPTS[2])["without_solutions"](nbformat.read(path, as_version=4))
    prose = "\n\n".join(source_of(rest, "markdown"))
    assert "{solution" not in prose
    # What goes and what stays, found by other means: line by line.
    open_fence, gone, stays, inside = "", [], [], False
    for line in page.splitlines():
        start = re.match(r"(`{3,}|:{3,})\{solution(-start|-end)?\}", line)
        if start and not open_fence:
            open_fence, kind = start[1], start[2]
        (gone if inside or open_fence else stays).append(line)
        if open_fence and line.rstrip() == open_fence:
            open_fence, inside = "", kind == "-start"
    assert [line for line in prose.splitlines() if line] == [line for line in stays if line]
    assert any(gone)
    solved = {c.source for c in whole.cells if "exercise-solution" in c.metadata.get("tags", [])}
    assert not solved & set(source_of(rest, "code"))
    exercises = {f"check_{name}" for name in exercises_of(read_code_cells(path))}
    assert all(any(name in code for code in source_of(rest, "code")) for name in exercises)


def read_and_bound(table: symtable.SymbolTable, top: bool = True) -> tuple[set[str], set[str]]:
    """Return the names that a cell reads from the notebook, and those that it binds in it."""
    read = {
        s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())
    }
    bound = {
        s.get_name() for s in table.get_symbols() if top and (s.is_assigned() or s.is_imported())
    }
    for child in table.get_children():
        read |= read_and_bound(child, top=False)[0]
    return read, bound


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_handed_out_needs_no_name_of_a_solution(path: Path, tmp_path: Path) -> None:
    rest = defined_by(SCRIPTS[2])["without_solutions"](nbformat.read(path, as_version=4))
    nbformat.write(rest, tmp_path / path.name)
    cells = read_code_cells(tmp_path / path.name)
    names = [read_and_bound(symtable.symtable(cell.source, "cell", "exec")) for cell in cells]
    read, bound = (set().union(*side) for side in zip(*names, strict=True))
    assert read <= bound | set(dir(builtins)) | {"get_ipython"}
