"""Open the one file of a bank: new, existing, read-only, or refused with a reason.

The file is a SQLite database in write-ahead mode: a commit appends to `<file>-wal` and is there for
good even if the process is killed right after it; the next one to open the file tidies up. Writers
of several processes on one machine queue up. A network file system shared by several machines does
not give SQLite the locks it needs: let one machine write.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from ascend_lab.aoe.bank.errors import BankError, explained

APPLICATION_ID = 0x414C4B42
"""Stands in the header of every bank ("ALKB"), so that another database is not taken for one."""
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    digest TEXT PRIMARY KEY, kind TEXT NOT NULL, op TEXT NOT NULL, chip TEXT NOT NULL,
    line TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS alike ON entries (kind, op, chip);
CREATE TABLE IF NOT EXISTS trials (
    run_id TEXT NOT NULL, number INTEGER NOT NULL, point TEXT NOT NULL, cost REAL NOT NULL,
    note TEXT NOT NULL, PRIMARY KEY (run_id, number)) WITHOUT ROWID;
PRAGMA application_id={APPLICATION_ID};
PRAGMA user_version={SCHEMA_VERSION};
COMMIT;
"""


def connect(file: Path, create: bool) -> sqlite3.Connection:
    """Return a connection to the bank `file`, made if it is missing and `create`; BankError."""
    if not file.exists() and not (create and file.parent.is_dir()):
        raise BankError(
            "missing",
            f"opening knowledge bank {file}",
            "no such file" if file.parent.is_dir() else "no such folder",
            "check the name, or tune something first: that makes a bank",
        )
    with explained(file, "opening"):
        return _patiently(file, create)


def _patiently(file: Path, create: bool) -> sqlite3.Connection:
    """Open, again and again while another process holds the whole file for a moment.

    SQLite waits by itself for a writer, but not for a change of the journal mode.
    """
    last = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _any_way(file, create)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > last:
                raise
            time.sleep(0.02)


def _any_way(file: Path, create: bool) -> sqlite3.Connection:
    """Open for writing; if that is impossible, for reading; else as a file that never changes."""
    try:
        return _open(file, "mode=rwc" if create else "mode=rw", create)
    except sqlite3.OperationalError as error:
        # A folder that may not be written has no room for the write-ahead files. Left-over ones of
        # a killed process must be written back first: without them the file may be half of a state.
        kind, log = error.sqlite_errorcode & 0xFF, file.with_name(file.name + "-wal")
        closed = file.is_file() and not (log.exists() and log.stat().st_size)
        if kind not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or not closed:
            raise
    return _open(file, "mode=ro&immutable=1", create=False)


def _open(file: Path, mode: str, create: bool) -> sqlite3.Connection:
    """Open in one mode and check that it is a bank of a version known here."""
    uri = f"{file.resolve().as_uri()}?{mode}"
    con = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        tables = con.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not tables and create:
            con.execute("PRAGMA journal_mode=WAL")
            con.executescript(_SCHEMA)
        _check(con, file)
    except BaseException:
        con.close()
        raise
    return con


def _check(con: sqlite3.Connection, file: Path) -> None:
    """Refuse a database that is no bank, or one of a later version."""
    if con.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise BankError(
            "not-a-bank",
            f"opening knowledge bank {file}",
            "a database of some other program",
            "name another file; this one is left as it is",
        )
    version = con.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise BankError(
            "newer",
            f"a knowledge bank of version {SCHEMA_VERSION} in {file}",
            f"version {version}",
            "update ascend_lab, or export it as JSON Lines with the newer one",
        )
