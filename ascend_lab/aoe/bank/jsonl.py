"""Entries as JSON Lines: one entry a line, to look at, to send and to keep in version control."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from ascend_lab.aoe.bank.errors import BankError, explained
from ascend_lab.aoe.bank.records import BankEntry, from_line, to_line
from ascend_lab.output import write_whole

LONGEST_BYTES = 2**28
"""Of a file of lines: larger ones are refused before they are read."""


def write_lines(file: str | Path, entries: Iterable[BankEntry]) -> None:
    """Write `entries` to `file`: afterwards it holds all of them, or what it held before.

    Raises `InputError`, also for what is there and no regular file.
    """
    write_whole(file, "".join(to_line(e) + "\n" for e in entries), only_files=True)


def read_lines(file: str | Path) -> tuple[list[BankEntry], list[BankError]]:
    """Return the entries of `file`, and what is wrong with each line that is none; BankError."""
    entries, wrong = [], []
    for number, line in enumerate(read_file(file).split(b"\n"), 1):
        try:
            entries += [from_line(line)] if line.strip() else []
        except BankError as error:
            wrong.append(BankError("line", f"{file} line {number}: {error}"))
    return entries, wrong


def read_file(file: str | Path) -> bytes:
    """Return the bytes of a regular file of at most `LONGEST_BYTES`; BankError."""
    with explained(Path(file), "reading"):
        found = Path(file).stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > LONGEST_BYTES:
            got = f"{found.st_size:,}" if stat.S_ISREG(found.st_mode) else "no regular file"
            needed = f"a file of at most {LONGEST_BYTES:,} bytes: {file}"
            raise BankError("unwritable", needed, got, "check the name")
        return Path(file).read_bytes()
