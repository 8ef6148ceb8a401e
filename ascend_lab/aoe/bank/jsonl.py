"""Entries as JSON Lines: one entry a line, to look at, to send and to keep in version control."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ascend_lab.aoe.bank.errors import BankError
from ascend_lab.aoe.bank.records import BankEntry, from_line, to_line


def write_lines(file: str | Path, entries: Iterable[BankEntry]) -> None:
    """Write `entries` to `file`: afterwards it holds all of them, or what it held before."""
    write_atomically(Path(file), "".join(to_line(e) + "\n" for e in entries).encode("ascii"))


def read_lines(file: str | Path) -> tuple[BankEntry, ...]:
    """Return the entries of `file`; `BankError` names the first line that is none."""
    with _explained(Path(file), "reading"):
        lines = Path(file).read_bytes().split(b"\n")
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(from_line(line))
        except BankError as error:
            remedy = "correct or delete that line; nothing was imported"
            raise BankError("line", f"{file} line {number}: {error}", "", remedy) from None
    return tuple(entries)


def write_atomically(file: Path, data: bytes) -> None:
    """Replace the contents of `file` at once; a crash leaves the old or the new, never a part."""
    with _explained(file, "writing"):
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            Path(name).chmod(0o644)  # a temporary file is private at first
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def _explained(file: Path, doing: str) -> Iterator[None]:
    """Turn what the operating system says into a `BankError`."""
    try:
        yield
    except FileNotFoundError:
        raise BankError("missing", f"{doing} {file}", "no such file", "check the name") from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "check the name and the permissions"
        raise BankError(
            "full" if full else "unwritable", f"{doing} {file}", str(error.strerror), remedy
        ) from None
