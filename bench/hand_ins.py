"""Kept hand-ins with the marks predicted for them: what `lab.py bench course` grades.

A row writes its hand-in into the folder of the class, as a course system would lay it there, and
says between which totals (without the log) its mark must lie. The hostile ones stand in
`bench/hostile.py`, the honest and the wrong ones in `bench/honest.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Writer = Callable[[Path, str], None]
"""Takes the folder of the class and the student's name; writes a file or folder of that name."""


@dataclass(frozen=True, slots=True)
class Row:
    """A hand-in that is kept: who, for which assignment, how it is written, its mark foretold."""

    student: str
    """Name of the file or folder in the class' folder, without a suffix; letters, digits, `_`."""
    assignment: str
    """`A1` to `A5`, or `A0`, the toy of the tests, whose calls may take 0.4 s."""
    write: Writer
    least: float
    """The least total, without points of a log."""
    most: float
    kind: str = ""
    """What it tries, in a few words, for the table."""


def script(source: str) -> Writer:
    """Return what writes a source as `STUDENT.py`; lone surrogates become bytes, no UTF-8."""

    def write(folder: Path, student: str) -> None:
        (folder / f"{student}.py").write_bytes(source.encode("utf-8", "surrogatepass"))

    return write


def data(content: bytes, suffix: str) -> Writer:
    """Return what writes bytes as a file of that suffix."""

    def write(folder: Path, student: str) -> None:
        (folder / f"{student}{suffix}").write_bytes(content)

    return write
