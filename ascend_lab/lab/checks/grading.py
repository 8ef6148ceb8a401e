"""Which cells of a notebook an exercise needs beside its own.

Every ordinary cell above that binds a name which one of the running cells reads (import cells,
helper functions, constants). So an exercise may use anything that a cell above *assigns*; changes
made to an object by a method call in another cell are not followed.
"""

import ast
import builtins
import symtable
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
