"""Profiles from files: a CSV table, the bank of CANN's gradient tuner, a PyTorch profiler trace.

CSV: a header, then a row a gradient in backward order, `ready_us` never falling. Columns `name`,
`ready_us` and `bytes`, also `dtype`; those of CANN's `gradient_summary.csv` (`gradient_node_name`,
`gradient_size(byte)`, `data_type`) are taken too, which has no times of its own: add a column
`ready_us`.

JSON with a list of `modelvalue`: CANN's `<soc>_gradient_fusion.json`, `gradientTime` nanoseconds
since the gradient before (the first counts as 0), `gradientSize` bytes.

Any other JSON is a trace of the PyTorch profiler: `traces`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_lab.aoe.gradient.splits import LONGEST_S, MOST_BYTES, Gradient
from ascend_lab.aoe.gradient.traces import gradients_of_trace
from ascend_lab.errors import InputError
from ascend_lab.limits import csv_of, json_number, json_of, number_of, read_file, shown

COLUMNS = {
    "name": ("name", "gradient_node_name"),
    "ready": ("ready_us",),
    "bytes": ("bytes", "gradient_size(byte)"),
    "dtype": ("dtype", "data_type"),
}
PASSED_OVER = ("graph_id", "group_name", "trace_node_name", "allreduce_node_name")
"""The other columns of CANN's `gradient_summary.csv`: nothing here depends on them."""
MOST_ROWS = 10_000
BANK_LISTS = ("gradientTime", "gradientSize")


def read_profile(file: str | Path) -> tuple[Gradient, ...]:
    """Return the gradients of a .csv, .json or .json.gz file.

    Raises `InputError` with the line or the event for what cannot be read.
    """
    path = Path(file)
    data = read_file(path, "a profile that can be read")
    # The name decides: CSV has no mark of its own by which to know it.
    kind = _from_json if path.name.endswith((".json", ".json.gz")) else _from_csv
    rows = kind(path, data)
    if not rows:
        raise InputError(f"{path}: at least one gradient", "none", "check the file")
    if len(rows) > MOST_ROWS:
        raise InputError(f"{path}: at most {MOST_ROWS} gradients", str(len(rows)), "join some")
    return rows


def _number(where: str, name: str, value: object) -> float:
    number = number_of(value) if isinstance(value, str) else json_number(value)
    if number is None:
        raise InputError(f"{where}: {name} as a number", shown(value), "mend the row")
    return number


def _gradient(where: str, name: str, ready_s: float, size: float, dtype: str) -> Gradient:
    """Return a row, or raise `InputError` that says where the wrong one stands."""
    if not 0 <= ready_s <= LONGEST_S:
        raise InputError(f"{where}: a ready time of at least 0", str(ready_s), "mend the row")
    if not (0 <= size <= MOST_BYTES and size == int(size)):
        raise InputError(f"{where}: a whole number of bytes, at least 0", str(size), "round it")
    return Gradient(name, ready_s, int(size), dtype or "fp16")


# -- tables and banks -----------------------------------------------------------------------------
def _from_csv(path: Path, data: bytes) -> tuple[Gradient, ...]:
    table = [(number, row) for number, row in csv_of(data, path) if not row[0].startswith("#")]
    if not table:
        raise InputError(f"{path}: a header name,ready_us,bytes", "an empty file", "check the path")
    places = _places(path, table[0][1])
    rows = list[Gradient]()
    first_line = dict[str, int]()
    for number, row in table[1:]:
        where = f"{path} line {number}"
        if len(row) > len(table[0][1]):
            raise InputError(f"{where}: {len(table[0][1])} columns", str(len(row)), "mend it")
        gradient = _row(where, row, places)
        if gradient.name in first_line:
            got = f"{shown(gradient.name)}, as in line {first_line[gradient.name]}"
            raise InputError(f"{where}: a name of its own for each gradient", got, "drop one")
        # Rows out of order are more often a table sorted by name than a noisy clock: the user
        # should know.
        if rows and gradient.ready_s < rows[-1].ready_s:
            needed = (
                f"{where}: a ready_us of at least {rows[-1].ready_s * 1e6:g}, as in the row above"
            )
            remedy = "sort the rows by ready_us: the order of the backward pass"
            raise InputError(needed, f"{gradient.ready_s * 1e6:g}", remedy)
        first_line[gradient.name] = number
        rows.append(gradient)
    return tuple(rows)


def _places(path: Path, header: list[str]) -> dict[str, int]:
    """Return the column of each value; raise `InputError` for unknown columns and two of a kind."""
    column_of = dict[str, int]()
    remedy = "columns are name, ready_us, bytes and, where wanted, dtype"
    key_of = {name: key for key, names in COLUMNS.items() for name in names}
    for place, word in enumerate(header):
        # Columns of CANN's table that name graphs and groups say nothing about times and sizes.
        if word.lower() in PASSED_OVER:
            continue
        key = key_of.get(word.lower())
        if key is None:
            raise InputError(f"{path} line 1: known columns", shown(word), remedy)
        if key in column_of:
            needed = f"{path} line 1: one column {COLUMNS[key][0]}"
            raise InputError(needed, f"{header[column_of[key]]} and {word}", remedy)
        column_of[key] = place
    for key, names in COLUMNS.items():
        if key not in column_of and key != "dtype":
            raise InputError(f"{path} line 1: a column {names[0]}", ",".join(header)[:80], remedy)
    return column_of


def _row(where: str, row: list[str], places: Mapping[str, int]) -> Gradient:
    if len(row) <= max(places.values()):
        raise InputError(f"{where}: {max(places.values()) + 1} columns", str(len(row)), "mend it")
    size = _number(where, "bytes", row[places["bytes"]])
    ready = _number(where, "ready_us", row[places["ready"]])
    dtype = row[places["dtype"]] if "dtype" in places else ""
    return _gradient(where, row[places["name"]], ready / 1e6, size, dtype)


def _from_json(path: Path, data: bytes) -> tuple[Gradient, ...]:
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
    rows = list[Gradient]()
    ready = 0.0
    for i, (time, size) in enumerate(zip(times, sizes, strict=True)):
        where = f"{path} gradient {i}"
        # CANN's first number is the time before the first gradient, which delays all ends alike.
        step_ns = _number(where, BANK_LISTS[0], time) if i else 0.0
        if step_ns < 0:
            raise InputError(f"{where}: a {BANK_LISTS[0]} of at least 0", str(step_ns), "mend it")
        ready += step_ns * 1e-9
        count = _number(where, BANK_LISTS[1], size)
        rows.append(_gradient(where, f"gradient {i}", ready, count, ""))
    return tuple(rows)
