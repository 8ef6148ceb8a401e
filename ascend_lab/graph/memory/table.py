"""Buffers as CSV in the MiniMalloc form: a header id,lower,upper,size, then a row per buffer."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from ascend_lab.errors import GraphError, InputError
from ascend_lab.graph.memory.buffers import Buffer
from ascend_lab.limits import read_file, whole_of
from ascend_lab.output import write_whole

HEADER = ("id", "lower", "upper", "size")
MOST_FILE_BYTES = 2**20
MOST_ROWS = 10_000
MOST = 2**40
"""Times and sizes beyond this are refused, so that no sum leaves 64 bits."""


def read_csv(path: str | Path) -> list[Buffer]:
    """Return the buffers of a file; lifetimes are half-open, columns may stand in any order.

    Raises InputError, with the line, for a file that cannot be read or is too large, a missing
    column, a number that is none, a lifetime that is empty, and an id that stands twice.
    """
    data = read_file(path, "a CSV file", MOST_FILE_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except ValueError as error:
        raise InputError("a CSV file in UTF-8", f"{path}: {error}") from error
    rows = csv.reader(text.splitlines(), strict=True)
    try:
        numbered = [(rows.line_num, [cell.strip() for cell in row]) for row in rows if any(row)]
    except csv.Error as error:
        raise InputError("a CSV file", f"{path} line {rows.line_num}: {error}") from error
    return _buffers(numbered, str(path))


def write_csv(path: str | Path, buffers: Iterable[Buffer]) -> None:
    """Write buffers so that `read_csv` returns them (ids become strings)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows((b.id, b.lower, b.upper, b.size_bytes) for b in buffers)
    write_whole(path, text.getvalue())


def _buffers(rows: list[tuple[int, list[str]]], path: str) -> list[Buffer]:
    if not rows or not set(HEADER) <= set(rows[0][1]):
        raise InputError(f"a header with {','.join(HEADER)}", f"none in {path}")
    if len(rows) > MOST_ROWS + 1:
        raise InputError(f"at most {MOST_ROWS} buffers", f"{len(rows) - 1} in {path}")
    names = rows[0][1]
    found: dict[str, Buffer] = {}
    for line, row in rows[1:]:
        where = f"{path} line {line}"
        if len(row) != len(names):
            raise InputError(f"{len(names)} columns", f"{len(row)} in {where}")
        cells = dict(zip(names, row, strict=True))
        name = cells["id"]
        lower, upper, size = (_number(cells[key], key, where) for key in HEADER[1:])
        try:
            buffer = Buffer(name, lower, upper, size)
        except GraphError as error:
            raise InputError(error.needed, f"{error.got} in {where}") from error
        if name in found:
            raise InputError("a different id for each buffer", f"{name[:30]!r} again in {where}")
        found[name] = buffer
    return list(found.values())


def _number(text: str, name: str, where: str) -> int:
    value = whole_of(text)
    if value is None:
        raise InputError(f"{name} as a whole number", f"{text[:30]!r} in {where}")
    if abs(value) > MOST:
        raise InputError(f"{name} of at most {MOST}", f"{text[:30]} in {where}")
    return value
