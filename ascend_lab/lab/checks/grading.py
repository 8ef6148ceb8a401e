"""Run the exercises of a notebook outside Jupyter, to test them from both sides.

The shipped stub must fail its check and the shipped solution must pass it, under several seeds,
and the object that was tested must be the very one that the notebook's cell defined.

Which cells run: the exercise's own cells, and before them, in page order, every ordinary cell
above that binds a name which one of the running cells reads (import cells, helper functions,
constants). So an exercise may use anything that a cell above *assigns*; changes made to an object
by a method call in another cell are not followed. Lines of IPython magic (`%`, `!`) are left out.
"""

import ast
import builtins
import json
import symtable
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path

from ascend_lab.lab.checks import core, wall

STUB = "exercise-stub"
SOLUTION = "exercise-solution"


@dataclass(frozen=True, slots=True)
class CodeCell:
    """One code cell: position in the notebook, source, role, and the exercise it belongs to."""

    index: int
    source: str
    tags: frozenset[str]
    exercise: str

    @property
    def is_ordinary(self) -> bool:
        """Tell whether the cell belongs to the lesson, not to an exercise."""
        return not self.tags & {STUB, SOLUTION}


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
        self.cells, self.where = cells, where
        self.exercises = exercises_of(cells) if exercises is None else exercises
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.done = -1

    def attempt(self, exercise: str, side: str, seeds: Sequence[int]) -> Attempt:
        """Run one side (`STUB` or `SOLUTION`) of an exercise and check it under each seed."""
        own, call = self._own(exercise, side)
        if own[0].index <= self.done:
            self.names, self.done = {"__name__": "__main__"}, -1
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


def needed_cells(cells: Sequence[CodeCell], wanted: Sequence[CodeCell]) -> list[CodeCell]:
    """Return the ordinary cells above that bind what the wanted cells read, transitively."""
    first = min(cell.index for cell in wanted)
    candidates = [cell for cell in cells if cell.is_ordinary and cell.index < first]
    chosen: dict[int, CodeCell] = {}
    open_ends = [(cell, _reads(cell.source)) for cell in wanted]
    while open_ends:
        cell, names = open_ends.pop()
        for other in candidates:
            if other.index >= cell.index or other.index in chosen:
                continue
            bound = _binds(other.source)
            if bound & names or "*" in bound:
                chosen[other.index] = other
                open_ends.append((other, _reads(other.source)))
    return [chosen[index] for index in sorted(chosen)]


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


_CERTAIN = (ast.Assign, ast.AugAssign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
"""Statements whose names are bound once they have run."""


@lru_cache(4096)
def _reads(source: str) -> set[str]:
    """Return the names a cell may read from cells above: not those it has bound before."""
    return _open(ast.parse(source).body, set()) - set(vars(builtins))


def _open(body: Sequence[ast.stmt], bound: set[str]) -> set[str]:
    """Return the names that statements read before they bind them; `bound` takes what they bind."""
    read: set[str] = set()
    for one in body:
        if isinstance(one, ast.For):
            head = ast.Assign([one.target], one.iter, lineno=0)
            read |= _open([head, *one.body], set(bound)) | _open(one.orelse, set(bound))
        elif isinstance(one, ast.If):
            read |= _open([ast.Expr(one.test)], bound)
            read |= _open(one.body, set(bound)) | _open(one.orelse, set(bound))
        else:
            read |= _named(one) - bound
            bound |= _binds(ast.unparse(one)) if isinstance(one, _CERTAIN) else set()
    return read


def _named(statement: ast.stmt) -> set[str]:
    """Return the names a statement reads or updates: globals, not locals."""
    top = symtable.symtable(ast.unparse(statement), "<cell>", "exec")
    read = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    inner = top.get_children()
    while inner:
        table = inner.pop()
        inner += table.get_children()
        read |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
        updated = (n.target for n in ast.walk(statement) if isinstance(n, ast.AugAssign))
        read |= {target.id for target in updated if isinstance(target, ast.Name)}
    return read


@lru_cache(4096)
def _binds(source: str) -> set[str]:
    """Return the names a cell binds at its top level; "*" stands for a star import."""
    bound = {
        symbol.get_name()
        for symbol in symtable.symtable(source, "<cell>", "exec").get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    imports = (n for n in ast.parse(source).body if isinstance(n, ast.ImportFrom))
    return bound | {"*" for one in imports if one.names[0].name == "*"}
