"""What can go wrong with a knowledge bank, as one error with a reason."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ascend_lab.errors import InputError

Reason = Literal[
    "missing", "unwritable", "full", "busy", "not-a-bank", "newer", "damaged", "line", "record"
]

SURVIVABLE: frozenset[Reason] = frozenset({"unwritable", "full", "busy"})
"""Reasons that only keep results from being stored: tuning may go on without the file."""


class BankError(InputError):
    """A knowledge bank, a JSON Lines file of entries, or a record cannot be used."""

    def __init__(self, reason: Reason, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message as every error here does; `reason` is for programs to act on."""
        super().__init__(needed, got, remedy)
        self.reason: Reason = reason


_CODES: dict[int, tuple[Reason, str]] = {
    sqlite3.SQLITE_READONLY: (
        "unwritable",
        "make the file and its folder writable, or point TUNE_BANK_PATH elsewhere",
    ),
    sqlite3.SQLITE_PERM: ("unwritable", "make the file and its folder readable and writable"),
    sqlite3.SQLITE_CANTOPEN: (
        "unwritable",
        "it must be a file in a folder that may be read and written, not a folder itself",
    ),
    sqlite3.SQLITE_FULL: ("full", "free some space, then run again"),
    sqlite3.SQLITE_IOERR: ("full", "check that the disk is there, works and has space"),
    sqlite3.SQLITE_BUSY: ("busy", "another process holds it: wait for that one or end it"),
    sqlite3.SQLITE_LOCKED: ("busy", "another process holds it: wait for that one or end it"),
    sqlite3.SQLITE_NOTADB: ("not-a-bank", "name another file; this one is left as it is"),
}
_DAMAGED: tuple[Reason, str] = (
    "damaged",
    "it is left as it is; import a JSON Lines export of it into a new bank",
)


@contextmanager
def explained(file: Path, doing: str) -> Iterator[None]:
    """Turn what SQLite or the system says of `file` into a `BankError`; wrong calls pass."""
    what = f"{doing} {file}"
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:  # not from the library: a closed connection, a wrong thread
            raise
        reason, remedy = _CODES.get(code & 0xFF, _DAMAGED)  # the low byte is the kind
        raise BankError(reason, what, " ".join(str(error).split()), remedy) from error
    except FileNotFoundError:
        raise BankError("missing", what, "no such file", "check the name") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no system call takes
        got = getattr(error, "strerror", None) or str(error)
        remedy = "check the name and the permissions"
        raise BankError("unwritable", what, got, remedy) from None
