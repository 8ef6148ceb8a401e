"""Run the exercises of a notebook outside Jupyter, to test them from both sides.

The shipped stub must fail its check and the shipped solution must pass it, under several seeds,
and the object that was tested must be the very one that the notebook's cell defined. The
exercise's own cells run, and before them, in page order, the cells above that `grading` finds.
Lines of IPython magic (`%`, `!`) are left out.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from ascend_lab.lab.checks import core, wall
from ascend_lab.lab.checks.grading import SOLUTION, STUB, CodeCell, needed_cells


@dataclass(frozen=True, slots=True)
class Attempt:
    """One side of an exercise, run: the object handed to the check and its result per seed."""

    exercise: str
    side: str
    subject: object
    defined_here: bool
    results: tuple[core.CheckResult, ...]


def read_code_cells(notebook: Path) -> list[CodeCell]:
    """Return the code cells of a notebook in page order, IPython magics left out."""
    document = json.loads(notebook.read_text(encoding="utf-8"))
    cells = []
    for index, cell in enumerate(document["cells"]):
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        source = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
        meta = cell["metadata"]
        cells.append(
            CodeCell(index, source, frozenset(meta.get("tags", [])), meta.get("exercise", ""))
        )
    return cells


def exercises_of(cells: Sequence[CodeCell]) -> list[str]:
    """Return the exercises that have a stub or a solution cell, in page order."""
    return list(dict.fromkeys(cell.exercise for cell in cells if not cell.is_ordinary))


class Page:
    """The ordinary cells of a notebook, each run once, and its exercises tried on top of them.

    An exercise finds what all cells above bind that some exercise needs; its own cells run in a
    copy of these names.
    """

    def __init__(
        self, cells: Sequence[CodeCell], where: str = "nb", exercises: Sequence[str] | None = None
    ) -> None:
        self.cells = cells
        self.where = where
        self.exercises = exercises_of(cells) if exercises is None else exercises
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.done = -1

    def attempt(self, exercise: str, side: str, seeds: Sequence[int]) -> Attempt:
        """Run one side (`STUB` or `SOLUTION`) of an exercise and check it under each seed."""
        own, call = self._own(exercise, side)
        if own[0].index <= self.done:
            self.names = {"__name__": "__main__"}
            self.done = -1
        with redirect_stdout(StringIO()):
            for cell in self._needed():
                if self.done < cell.index < own[0].index:
                    self._run(cell, self.names)
                    self.done = cell.index
            names = dict(self.names)
            for cell in own:
                self._run(cell, names, without=call.func)
            subject = eval(ast.unparse(call.args[0]), names)
            check = eval(ast.unparse(call.func), names)
            results = tuple(check(subject, seed=seed) for seed in seeds)
        code = getattr(subject, "__code__", None)
        files = {self._file(cell) for cell in own}
        return Attempt(exercise, side, subject, getattr(code, "co_filename", "") in files, results)

    def _own(self, exercise: str, side: str) -> tuple[list[CodeCell], ast.Call]:
        """Return the cells of one side and the call of its check."""
        own = [cell for cell in self.cells if cell.exercise == exercise and side in cell.tags]
        if not own:
            raise wall.CheckError(f"{self.where}: {exercise} has no cell tagged {side}; tag one")
        name = f"check_{exercise}"
        later = [cell for cell in self.cells if cell.index >= own[0].index]
        call = next((c for cell in later for c in _calls(cell.source, name)), None)
        if call is None or not call.args:
            where = f"after the {side} of {exercise}"
            raise wall.CheckError(f"{self.where}: no cell calls {name}(fn) {where}")
        return own, call

    def _needed(self) -> list[CodeCell]:
        """Return the ordinary cells that any side of the exercises needs, in page order."""
        found: dict[int, CodeCell] = {}
        for exercise in self.exercises:
            for side in (STUB, SOLUTION):
                if any(side in c.tags for c in self.cells if c.exercise == exercise):
                    own, call = self._own(exercise, side)
                    # The call may stand in the next cell: its names count, it does not run twice.
                    caller = CodeCell(own[-1].index + 1, ast.unparse(call.func), frozenset(), "")
                    wanted = needed_cells(self.cells, [*own, caller])
                    found |= {cell.index: cell for cell in wanted}
        return [found[index] for index in sorted(found)]

    def _run(
        self, cell: CodeCell, names: dict[str, object], without: ast.expr | None = None
    ) -> None:
        """Run a cell, but not a bare call of the check: that is made under the seeds asked for."""
        tree = ast.parse(cell.source)
        if without is not None:
            check = ast.dump(without)
            tree.body = [one for one in tree.body if not _is_call(one, check)]
        exec(compile(tree, self._file(cell), "exec"), names)

    def _file(self, cell: CodeCell) -> str:
        return f"<{self.where} cell {cell.index}>"


def _is_call(statement: ast.stmt, function: str) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.dump(call.func) == function


def _calls(source: str, name: str) -> Iterator[ast.Call]:
    """Find the calls of a function by its last name: `checks.check_x(f)` and `check_x(f)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            func = node.func
            last = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if last == name:
                yield node
