"""Printing and writing of results for all verbs: lines, JSON, tables, pictures."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend_lab import output
from ascend_lab.errors import InputError, printable


def say(lines: Iterable[str]) -> None:
    """Print lines on standard output; raise `InputError` if it is closed."""
    # Python has no stream where file 1 was closed before it started.
    if sys.stdout is None:
        raise InputError("a standard output to print on", "a closed one", "leave it open")
    for line in lines:
        print(printable(line))


def show(text: str) -> None:
    """Print a text of lines as `say` does."""
    say(text.split("\n"))


def emit(target: str | None, data: Any, lines: Iterable[str]) -> None:
    """Print the lines, or write `data` as JSON to a file or, for "-", to standard output."""
    if target is None:
        say(lines)
        return
    # json leaves DEL as it is: printed, it would reach the terminal
    dump = json.dumps(_finite(data), indent=2).replace("\x7f", "\\u007f")
    if target == "-":
        say(dump.split("\n"))
    else:
        output.write_whole(target, dump + "\n")


def _finite(value: Any) -> Any:
    """Return a value with None in place of infinities and NaN, which JSON has no words for."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- tables ---------------------------------------------------------------------------------------
_ALIGNED = re.compile(r"[<>][0-9]*")


def columns(formats: Mapping[str, str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table as lines: the heads, then a line for each row, cells separated by a blank.

    `formats` maps the head of each column to the format of its cells: with ">9.3f" for "us" the
    head and all cells are nine characters wide and right-aligned; numbers have three decimals.
    """
    heads = []
    for head, cell_format in formats.items():
        aligned = _ALIGNED.match(cell_format)  # ">9" of ">9.3f": a head has no decimals
        heads.append(f"{head:{aligned[0] if aligned else ''}}")
    lines = [" ".join(heads)]
    for row in rows:
        cells = zip(row, formats.values(), strict=True)
        lines.append(" ".join(f"{cell:{cell_format}}" for cell, cell_format in cells))
    return lines


# -- pictures -------------------------------------------------------------------------------------
PICTURES = (".svg", ".png", ".pdf")


def check_picture(path: str | None) -> None:
    """Raise `InputError`, before any work, for a --figure whose ending is not in `PICTURES`."""
    if path is not None and picture_kind(path) not in PICTURES:
        needed = f"--figure with an ending among {', '.join(PICTURES)}"
        raise InputError(needed, path, "rename it")


def picture_kind(path: str) -> str:
    """Return the ending of a picture's name: ".svg" of Times.SVG."""
    return Path(path).suffix.lower()


def write_picture(figure: Any, path: str) -> None:
    """Write a figure of `ascend_lab.lab` in the format that the name asks for."""
    drawn = io.BytesIO()  # drawn in memory first: a failure leaves no half file
    figure.savefig(drawn, format=picture_kind(path)[1:])
    output.write_whole(path, drawn.getvalue())
