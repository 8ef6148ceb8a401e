"""Reads the gradients of a training step from a file, with their sizes and ready times.

- A CSV table: a header, then one row per gradient in backward order. The columns are `name`,
  `ready_us`, `bytes` and, if wanted, `dtype`; `ready_us` must not fall from row to row. The columns
  of CANN's `gradient_summary.csv` are accepted as well (`gradient_node_name`,
  `gradient_size(byte)`, `data_type`). That file has no times: add a column `ready_us`.
- The bank of CANN's gradient tuner, `<soc>_gradient_fusion.json`, which contains `modelvalue`:
  `gradientTime` in nanoseconds since the previous gradient (0 for the first), `gradientSize` in
  bytes.
- Any other JSON is a trace of the PyTorch profiler: see `traces`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_lab.aoe.gradient.splits import MAX_BYTES, MAX_TIME_S, Gradient
from ascend_lab.aoe.gradient.traces import gradients_of_trace
from ascend_lab.errors import InputError
from ascend_lab.limits import csv_of, json_number, json_of, number_of, read_file, shown

COLUMNS = {
    "name": ("name", "gradient_node_name"),
    "ready": ("ready_us",),
    "bytes": ("bytes", "gradient_size(byte)"),
    "dtype": ("dtype", "data_type"),
}
IGNORED_COLUMNS = ("graph_id", "group_name", "trace_node_name", "allreduce_node_name")
"""The other columns of CANN's `gradient_summary.csv`."""
MAX_GRADIENTS = 10_000
BANK_LISTS = ("gradientTime", "gradientSize")


def read_profile(file: str | Path) -> tuple[Gradient, ...]:
    """Return the gradients of a .csv, .json or .json.gz file.

    Raises `InputError`, which names the line or the event that cannot be read.
    """
    path = Path(file)
    data = read_file(path, "a profile that can be read")
    # The file's name decides, because the contents of a CSV file do not identify it.
    is_json = path.name.endswith((".json", ".json.gz"))
    gradients = _from_json(path, data) if is_json else _from_csv(path, data)
    if not gradients:
        raise InputError(f"{path}: at least one gradient", "none", "check the file")
    if len(gradients) > MAX_GRADIENTS:
        needed = f"{path}: at most {MAX_GRADIENTS} gradients"
        raise InputError(needed, str(len(gradients)), "join some")
    return gradients


def _number(where: str, name: str, value: object) -> float:
    """Return a number from a cell; raise `InputError`, which names the row, for other text."""
    # the cells of a CSV file are text, the values of JSON are numbers already
    number = number_of(value) if isinstance(value, str) else json_number(value)
    if number is None:
        raise InputError(f"{where}: {name} as a number", shown(value), "correct the row")
    return number


def _gradient(where: str, name: str, ready_s: float, size: float, dtype: str) -> Gradient:
    """Return a gradient; raise `InputError` for a wrong time or size, naming the row `where`."""
    if not 0 <= ready_s <= MAX_TIME_S:
        raise InputError(f"{where}: a ready time of at least 0", str(ready_s), "correct the row")
    # 1e6 is a whole number of bytes, 0.5 is not
    if not (0 <= size <= MAX_BYTES and size == int(size)):
        raise InputError(f"{where}: a whole number of bytes, at least 0", str(size), "round it")
    # if no row has a format, any single one will do: no bucket is cut at a change of format
    return Gradient(name, ready_s, int(size), dtype or "fp16")


# -- tables and banks -----------------------------------------------------------------------------
def _from_csv(path: Path, data: bytes) -> tuple[Gradient, ...]:
    """Return the gradients of a CSV table; lines that begin with # are comments."""
    table = [(number, row) for number, row in csv_of(data, path) if not row[0].startswith("#")]
    if not table:
        raise InputError(f"{path}: a header name,ready_us,bytes", "an empty file", "check the path")
    column_of = _columns(path, table[0][1])
    rows = list[Gradient]()
    first_line = dict[str, int]()
    for number, row in table[1:]:
        where = f"{path} line {number}"
        if len(row) > len(table[0][1]):
            raise InputError(f"{where}: {len(table[0][1])} columns", str(len(row)), "correct it")
        gradient = _from_row(where, row, column_of)
        if gradient.name in first_line:
            got = f"{shown(gradient.name)}, as in line {first_line[gradient.name]}"
            raise InputError(f"{where}: a name of its own for each gradient", got, "drop one")
        # rows out of order are probably a table that was sorted by name
        if rows and gradient.ready_s < rows[-1].ready_s:
            needed = (
                f"{where}: a ready_us of at least {rows[-1].ready_s * 1e6:g}, as in the row above"
            )
            remedy = "sort the rows by ready_us: the order of the backward pass"
            raise InputError(needed, f"{gradient.ready_s * 1e6:g}", remedy)
        first_line[gradient.name] = number
        rows.append(gradient)
    return tuple(rows)


def _columns(path: Path, header: list[str]) -> dict[str, int]:
    """Return the column number of each value; raise `InputError` for unknown or double columns."""
    column_of = dict[str, int]()
    remedy = "columns are name, ready_us, bytes and, where wanted, dtype"
    # both spellings of a column lead to its key: "bytes" and "gradient_size(byte)"
    key_of = {name: key for key, names in COLUMNS.items() for name in names}
    for number, title in enumerate(header):
        if title.lower() in IGNORED_COLUMNS:
            continue
        key = key_of.get(title.lower())
        if key is None:
            raise InputError(f"{path} line 1: known columns", shown(title), remedy)
        if key in column_of:
            needed = f"{path} line 1: one column {COLUMNS[key][0]}"
            raise InputError(needed, f"{header[column_of[key]]} and {title}", remedy)
        column_of[key] = number
    for key, names in COLUMNS.items():
        if key not in column_of and key != "dtype":
            raise InputError(f"{path} line 1: a column {names[0]}", ",".join(header)[:80], remedy)
    return column_of


def _from_row(where: str, row: list[str], column_of: Mapping[str, int]) -> Gradient:
    """Return the gradient in a row of a CSV table."""
    last_column = max(column_of.values())
    if len(row) <= last_column:
        raise InputError(f"{where}: {last_column + 1} columns", str(len(row)), "correct it")
    size_bytes = _number(where, "bytes", row[column_of["bytes"]])
    ready_us = _number(where, "ready_us", row[column_of["ready"]])
    dtype = row[column_of["dtype"]] if "dtype" in column_of else ""
    return _gradient(where, row[column_of["name"]], ready_us / 1e6, size_bytes, dtype)


def _from_json(path: Path, data: bytes) -> tuple[Gradient, ...]:
    """Return the gradients of CANN's bank, or of a trace of the PyTorch profiler."""
    document = json_of(data, str(path))
    head = document[0] if isinstance(document, list) and document else None
    if isinstance(head, dict) and "modelvalue" in head:
        return _from_bank(path, head["modelvalue"])
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        needed = (
            f"{path}: a Chrome trace (an object whose key traceEvents holds a list) or CANN's bank "
            "(a list whose first object has the key modelvalue)"
        )
        keys = ", ".join(map(str, document))[:60] if isinstance(document, dict) else ""
        got = f"an object with the keys {keys or 'none'}" if isinstance(document, dict) else ""
        remedy = "a table of gradients is a .csv with the columns name, ready_us, bytes"
        raise InputError(needed, got or type(document).__name__, remedy)
    return gradients_of_trace(str(path), events)


def _from_bank(path: Path, value: Any) -> tuple[Gradient, ...]:
    """Return the profile of the first model in a bank of CANN's tuner."""
    times, sizes = (value.get(k) if isinstance(value, dict) else None for k in BANK_LISTS)
    if not isinstance(times, list) or not isinstance(sizes, list) or len(times) != len(sizes):
        needed = f"{path}: modelvalue with {' and '.join(BANK_LISTS)} of one length"
        raise InputError(needed, shown(value))
    gradients = list[Gradient]()
    ready_s = 0.0
    for i, (time_value, size_value) in enumerate(zip(times, sizes, strict=True)):
        where = f"{path} gradient {i}"
        # The first number is the time before the first gradient; it delays all splits equally.
        step_ns = _number(where, BANK_LISTS[0], time_value) if i else 0.0
        if step_ns < 0:
            raise InputError(
                f"{where}: a {BANK_LISTS[0]} of at least 0", str(step_ns), "correct it"
            )
        ready_s += step_ns * 1e-9
        size_bytes = _number(where, BANK_LISTS[1], size_value)
        gradients.append(_gradient(where, f"gradient {i}", ready_s, size_bytes, ""))
    return tuple(gradients)
