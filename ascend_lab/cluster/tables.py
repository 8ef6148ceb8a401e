"""Tables of measured collectives: a CSV file with bytes, ranks, time_s, or DeepBench's columns."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from ascend_lab.cluster.fit import Measured
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, number_of, read_file, shown

OWN = ("bytes", "ranks", "time_s")
DEEPBENCH = ("num_floats", "num_procs", "mean_time_ms")
FLOAT_BYTES = 4
MOST_ROWS = 2000
"""Errors on rows left out take many fits: more rows would take minutes."""
LARGEST = 1e18
"""Of any number in a table: beyond it a slip of units or of the pen."""


def read_table(
    file: str | Path, *, device: str | None = None, max_ranks: int | None = None
) -> list[Measured]:
    """Return the rows of a CSV file: of one device where it names several, of so many ranks.

    Columns: bytes, ranks, time_s; or those of Baidu's DeepBench, num_floats, num_procs and
    mean_time_ms, in any case. Other columns, and lines that begin with #, are passed over. Raises
    `InputError` with file and line.
    """
    name = str(file)
    data = read_file(name, "a readable CSV file", TABLE_BYTES)
    try:
        text = data.decode("utf-8-sig")
        reader = csv.reader(text.splitlines(), strict=True)
        lines = [(reader.line_num, [cell.strip() for cell in line]) for line in reader]
    except (ValueError, csv.Error) as error:
        raise InputError("a readable CSV file", f"{name}: {error}", "check it") from error
    lines = [(n, line) for n, line in lines if any(line) and not line[0].startswith("#")]
    columns = [column.lower() for column in lines[0][1]] if lines else []
    names = next((kind for kind in (OWN, DEEPBENCH) if set(kind) <= set(columns)), None)
    if names is None:
        got = ", ".join(columns)[:80] or "nothing"
        raise InputError(f"{name}: columns {', '.join(OWN)}", got, "name them in the first line")
    rows = [(number, dict(zip(columns, line, strict=False))) for number, line in lines[1:]]
    _one_device(name, rows, device)
    found = [
        _measured(f"{name}, line {number}", row, names)
        for number, row in rows
        if device is None or row.get("device") == device
    ]
    kept = [row for row in found if max_ranks is None or row.ranks <= max_ranks]
    if len(kept) > MOST_ROWS:
        what = f"{name}: at most {MOST_ROWS} rows"
        raise InputError(what, str(len(kept)), "average those of one size, or take fewer ranks")
    if not kept:
        got = f"{len(found)} rows, none of at most {max_ranks} ranks" if found else "no rows"
        raise InputError(f"{name}: measured rows", got, "measure some")
    return kept


def _one_device(name: str, rows: list[tuple[int, dict[str, str]]], device: str | None) -> None:
    """Refuse a table of several devices with none chosen, or a device it has not."""
    there = sorted({row["device"] for _, row in rows if row.get("device")})
    if device is None and len(there) > 1:
        raise InputError(f"{name}: rows of one device", ", ".join(there), "choose one device")
    if device is not None and device not in there:
        got = ", ".join(there) or "no column device"
        raise InputError(f"{name}: rows of device {device}", got, "choose one of them")


def _measured(where: str, row: Mapping[str, str], names: tuple[str, str, str]) -> Measured:
    values = [_number(where, column, row.get(column)) for column in names]
    if values[1] != int(values[1]):
        raise InputError(f"{where}: a whole count of ranks", row[names[1]], "mend it")
    size, ranks, time = values[0], int(values[1]), values[2]
    if names is DEEPBENCH:
        size, time = size * FLOAT_BYTES, time / 1e3
    try:
        return Measured(size, ranks, time)
    except InputError as error:
        raise InputError(f"{where}: {error.needed}", error.got, error.remedy) from error


def _number(where: str, column: str, text: str | None) -> float:
    value = number_of(text or "")
    if value is None or abs(value) > LARGEST:
        raise InputError(f"{where}: {column} as a number", shown(text), "mend it")
    return value
