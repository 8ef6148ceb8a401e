"""Reads measured times from a table in this package's format: one measurement per row.

The columns are those of `COLUMNS`; every cell is checked. A row that cannot be read stays in the
list, with the reason in `refused`. A table that lacks a needed column or has an unknown one raises.
"""

import ast
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ascend_lab.compare.chains import CASE_NAMES, CHAINS, ESTIMATES, GROUPS
from ascend_lab.compare.rows import (
    L2_STATES,
    LANGUAGE,
    TIMINGS,
    Measured,
    Work,
    pipe_of,
    reasons_in,
    shape_of,
)
from ascend_lab.errors import InputError
from ascend_lab.limits import number_of, shown
from ascend_lab.operators.ops import OPERATORS

NEEDED = ("case", "chip", "operator", "inputs", "dtype", "timing", "measured_us")
COLUMNS = (
    *("group", "case", "chip", "operator", "inputs", "dtype", "attributes", "l2", "timing"),
    *("measured_us", "kernels", "source", "note"),
)
"""Columns of a table, in any order; those of `NEEDED` must be present."""
COLLECTIVES = ("all_reduce", "all_to_all")
LONGEST_S = 1e6
"""Most seconds a row may have taken: a time given in the wrong unit is usually above it."""
MAX_BYTES = 1e18
"""Most bytes a rank of a collective may hold."""
MAX_ATTRIBUTES = 64
LONGEST_VALUE = 200
"""Characters of one attribute's value."""


def columns_of(header: Sequence[str], where: str) -> None:
    """Raise `InputError` for columns that are unknown, written twice or missing."""
    for name in header:
        if name not in COLUMNS:
            similar = get_close_matches(name, COLUMNS, 1)
            remedy = f"did you mean {similar[0]}?" if similar else "drop it"
            raise InputError(f"{where}: columns among {', '.join(COLUMNS)}", shown(name), remedy)
    repeated = [name for name in COLUMNS if header.count(name) > 1]
    if repeated:
        raise InputError(f"{where}: each column once", f"{repeated[0]} twice", "keep one of them")
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise InputError(
            f"{where}: also the columns {', '.join(missing)}", "none of them", "add them"
        )


def read_rows(rows: Sequence[tuple[int, list[str]]], where: str) -> list[Measured]:
    """Return the measurements of a table's lines, the header first; raises `InputError`."""
    (_, header), *lines = rows
    columns_of(header, where)
    return [_row(header, cells, line) for line, cells in lines]


def _row(header: Sequence[str], cells: Sequence[str], line: int) -> Measured:
    """Return one measurement; `refused` gives all reasons if it cannot be read."""
    row = dict(zip(header, cells, strict=False))
    case = row.get("case", "") or f"line {line}"
    group = row.get("group", "") or row.get("operator", "") or "no group"
    reasons: list[str] = []
    measured_s: float | None = None
    work: Work | None = None
    marks: list[str] = []
    busy: dict[str, float] = {}
    # a comma in an unquoted cell shifts all cells after it
    if len(cells) != len(header):
        reasons.append(f"{len(header)} cells in a row; got {len(cells)}; quote cells with commas")
    else:
        # A block for each part of the row: if both are wrong, both reasons are reported.
        with reasons_in(reasons):
            measured_s = _seconds(row["measured_us"])
        with reasons_in(reasons):
            work = _work(row, group)
    if work and measured_s:
        busy = _busy(work.attributes, measured_s)
    if kernels := row.get("kernels", ""):
        marks.append(f"measured: a sum of kernels ({kernels})")
    return Measured(
        case=case,
        group=group,
        measured_s=measured_s,
        work=work,
        marks=tuple(marks),
        busy=busy,
        refused="; ".join(reasons),
    )


def _seconds(text: str) -> float:
    """Return the seconds of a cell in microseconds."""
    value = number_of(text)
    if value is None or not 0 < value * 1e-6 <= LONGEST_S:
        needed = f"measured_us: microseconds above 0, at most {LONGEST_S * 1e6:g}"
        raise InputError(needed, shown(text), "correct that row")
    return value * 1e-6


def _work(row: Mapping[str, str], group: str) -> Work:
    """Return the work of a row; raises `InputError` that names the column at fault."""
    # cases of benchmark suites name the kernel: suite/swi_glu/3
    operator = row["operator"] or _kernel_in(row["case"])
    l2 = row.get("l2", "") or "unknown"
    for name, value, choices in (("l2", l2, L2_STATES), ("timing", row["timing"], TIMINGS)):
        if value not in choices:
            raise InputError(
                f"{name}: one of {', '.join(choices)}", shown(value), "correct that row"
            )
    attributes = attributes_of(row.get("attributes", ""))
    if not operator and "model" in attributes:
        operator = LANGUAGE
    if not operator:
        needed = "operator, or a case source/KERNEL/number whose kernel is known"
        raise InputError(needed, shown(row["case"]), "none is guessed")
    shapes: tuple[tuple[int, ...], ...] = ()
    size_bytes: float | None = None
    if row["inputs"].startswith("bytes="):
        size_bytes = number_of(row["inputs"].removeprefix("bytes="))
        if size_bytes is None or not 0 < size_bytes <= MAX_BYTES:
            needed = f"inputs: bytes=N above 0, at most {MAX_BYTES:g}"
            raise InputError(needed, shown(row["inputs"]), "correct that row")
    # "32x64;64x128": two inputs
    elif row["inputs"]:
        shapes = tuple(shape_of(text.strip(), "x", "inputs") for text in row["inputs"].split(";"))
    dtypes = tuple(text.strip() for text in row["dtype"].split(";")) if row["dtype"] else ()
    return Work(
        operator=operator,
        chip=row["chip"],
        shapes=shapes,
        size_bytes=size_bytes,
        dtypes=dtypes,
        attributes=attributes,
        l2=l2,
        timing=row["timing"],
        group=group,
        kernels=row.get("kernels", ""),
    )


def _kernel_in(case: str) -> str:
    """Return the kernel in the name of a case, source/KERNEL/number, "" if it is unknown here."""
    words = case.split("/")
    name = words[1] if len(words) > 2 else ""
    name = CASE_NAMES.get(name, name)
    return name if any(name in names for names in (OPERATORS, CHAINS, GROUPS, ESTIMATES)) else ""


def attributes_of(text: str) -> dict[str, Any]:
    """Return the attributes of a text: `axis=-1;perm=(1,0)` is {"axis": -1, "perm": (1, 0)}.

    Raises `InputError` for a text that is not key=value, a key written twice, or too many of them.
    """
    attributes: dict[str, Any] = {}
    pairs = [pair.strip() for pair in text.split(";") if pair.strip()]
    if len(pairs) > MAX_ATTRIBUTES:
        raise InputError(f"attributes: at most {MAX_ATTRIBUTES}", str(len(pairs)), "drop some")
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        value = value.strip()
        if not equals or not key or len(value) > LONGEST_VALUE:
            raise InputError("attributes: key=value;key=value", shown(pair), "correct that row")
        if key in attributes:
            raise InputError(f"attributes: {key} once", "it twice", "keep one of them")
        try:
            # literals only: a table must not run code
            attributes[key] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            attributes[key] = value  # a word without quotes, such as tanh, is a text
    return attributes


def _busy(attributes: Mapping[str, Any], measured_s: float) -> dict[str, float]:
    """Return the pipes' shares of the time, from `mac_us` or from `cube_share` in per cent.

    All are shares of the measured time. `aicore_us` is ignored, as it belongs to no single pipe.
    """
    busy: dict[str, float] = {}
    for key, value in attributes.items():
        # attributes such as layout=BSND are not shares of time
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if pipe := pipe_of(key.removesuffix("_us")) if key.endswith("_us") else "":
            busy[pipe] = value * 1e-6 / measured_s
        elif pipe := pipe_of(key.removesuffix("_share")) if key.endswith("_share") else "":
            busy[pipe] = value / 100.0
    return busy
