"""A notebook's code without `glue` and what served only it; `copies.py` calls it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import chain


def without_glue(sources: Sequence[str]) -> list[str]:
    """Return the cells' code without statements that only fill in the book's sentences."""
    trees = [ast.parse(source) for source in sources]
    dead = {s for tree in trees for s in ast.walk(tree) if isinstance(s, ast.stmt) and glues(s)}
    while more := served(trees, dead):
        dead |= more
    gone = loaded(dead) - loaded(live(trees, dead))
    return [without(source, tree, dead, gone) for source, tree in zip(sources, trees, strict=True)]


def glues(statement: ast.stmt) -> bool:
    """Tell whether a statement does nothing but glue."""
    match statement:
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] == "myst_nb"
        case ast.Expr(value=ast.Call(func=ast.Name(id="glue"))):
            return True
        case ast.Expr(value=ast.Tuple(elts=parts)):
            return all(glues(ast.Expr(part)) for part in parts)
        case ast.For(body=body, orelse=other) | ast.If(body=body, orelse=other):
            return all(map(glues, chain(body, other)))
    return False


def live(trees: Iterable[ast.Module], dead: set[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of all levels that stay and hold no others."""
    found, waiting = [], [s for tree in trees for s in tree.body]
    while waiting:
        statement = waiting.pop()
        if statement in dead:
            continue
        inner = [s for s in ast.walk(statement) if isinstance(s, ast.stmt) and s in dead]
        if inner:
            waiting += [s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)]
            found += [ast.Expr(e) for e in ast.iter_child_nodes(statement) if is_header(e)]
        else:
            found.append(statement)
    return found


def is_header(node: ast.AST) -> bool:
    """Tell whether a part of a compound statement is no statement of its body."""
    return isinstance(node, ast.expr | ast.withitem)


def loaded(statements: Iterable[ast.AST]) -> set[str]:
    """Return the names that statements read."""
    nodes = chain.from_iterable(map(ast.walk, statements))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def served(trees: Sequence[ast.Module], dead: set[ast.stmt]) -> set[ast.stmt]:
    """Return further statements of cells' top level whose names only dead statements read."""
    gone = loaded(dead) - loaded(live(trees, dead))
    return {
        statement
        for tree in trees
        for statement in tree.body
        if statement not in dead and (names := defined(statement)) and names <= gone
    }


def defined(statement: ast.stmt) -> set[str]:
    """Return the names an assignment or definition makes, or none if it may do more."""
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    if not isinstance(statement, ast.Assign):
        return set()
    parts = [n for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.expr)]
    if not all(isinstance(part, ast.Name | ast.Tuple) for part in parts):
        return set()
    return {part.id for part in parts if isinstance(part, ast.Name)}


def without(source: str, tree: ast.Module, dead: set[ast.stmt], gone: set[str]) -> str:
    """Return a cell's code without dead statements and without the imports of names `gone`."""
    lines = source.split("\n")
    drop: set[int] = set()
    new: dict[int, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        rows = range(node.lineno - 1, node.end_lineno)
        if node in dead:
            drop |= {*rows, *comments_above(lines, node.lineno - 1)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            kept = [a for a in node.names if (a.asname or a.name.split(".")[0]) not in gone]
            if len(kept) < len(node.names):
                drop |= set(rows)
                new |= {rows[0]: import_text(node, kept)} if kept else {}
    if not drop:
        return source
    if all(statement in dead for statement in tree.body):
        return ""
    last = [s for s in tree.body if s not in dead][-1]
    if tree.body[-1] in dead and isinstance(last, ast.Expr) and not silent(last):
        lines[last.end_lineno - 1] += ";"  # it was not the last one, so its value was not shown
    kept_lines = [new.get(i, line) for i, line in enumerate(lines) if i in new or i not in drop]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept_lines)).strip("\n")


def comments_above(lines: Sequence[str], row: int) -> Iterable[int]:
    """Yield the rows of comments that stand directly above `row`."""
    while row > 0 and lines[row - 1].lstrip().startswith("#"):
        row -= 1
        yield row


def silent(statement: ast.Expr) -> bool:
    """Tell whether a statement calls a function that prints and has no value to show."""
    return ast.unparse(statement).startswith(("print(", "compare("))


def import_text(node: ast.Import | ast.ImportFrom, names: Sequence[ast.alias]) -> str:
    """Return an import statement of fewer names, over several lines if it is long."""
    listed = [ast.unparse(name) for name in names]
    start = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
    if len(start + ", ".join(listed)) <= 100:
        return start + ", ".join(listed)
    return start + "(\n" + "".join(f"    {name},\n" for name in listed) + ")"
