"""Open the one file of a bank: for writing, or as a copy in memory that only reads.

The file is a SQLite database in write-ahead mode: a commit appends to `<file>-wal` and is there for
good even if the process is killed right after it; the next one to open the file tidies up. Writers
of several processes on one machine queue up. A network file system shared by several machines does
not give SQLite the locks it needs: let one machine write.
"""

import shutil
import sqlite3
import stat
import time
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ascend_lab.aoe.bank.records import BankError, explained

APPLICATION_ID = 0x414C4B42
"""Stands in the header of every bank ("ALKB"), so that another database is not taken for one."""
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 8.0
LARGEST_BYTES = 2**31
"""Of a bank: larger files are refused before they are read."""
_LEFT = "name another file; this one is left as it is"
_ROWS = "SELECT rowid, digest, kind, op, chip, line FROM entries"

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


def connect(file: Path, write: bool) -> tuple[sqlite3.Connection, int]:
    """Return a connection to the bank `file`, and how many rows its damage hides; BankError.

    To `write` the file is made if it is missing. Else what comes back is a copy in memory: nothing
    is changed or made on the disk, and a damaged page costs only its own rows. So it is where the
    file or its folder may not be written, too.
    """
    with explained(file, "opening knowledge bank"):
        size_bytes = _size_bytes(file, write)
        if size_bytes > LARGEST_BYTES:
            needed = f"a knowledge bank of at most {LARGEST_BYTES:,} bytes"
            raise BankError("not-a-bank", needed, f"{size_bytes:,} in {file}", "name another file")
        if not write:
            return _read(file)
        try:
            return _patiently(file), 0
        except sqlite3.OperationalError as error:
            kinds = sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY
            if error.sqlite_errorcode & 0xFF not in kinds or not file.is_file():
                raise
        return _read(file)


def _size_bytes(file: Path, write: bool) -> int:
    """Return the size of a bank's file, 0 of one to make; BankError for what can be none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        if write and file.parent.is_dir():
            return 0
        got = "no such file" if file.parent.is_dir() else "no such folder"
        remedy = "check the name, or tune something first: that makes a bank"
        raise BankError("missing", f"opening knowledge bank {file}", got, remedy) from None
    if not stat.S_ISREG(found.st_mode):
        got = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, a pipe or the like"
        raise BankError("unwritable", f"a file as knowledge bank {file}", got, "name another")
    if not write and not found.st_size:
        raise BankError("not-a-bank", f"opening knowledge bank {file}", "an empty file", _LEFT)
    return found.st_size


def _patiently(file: Path) -> sqlite3.Connection:
    """Open; SQLite does not wait by itself where another process changes the journal mode."""
    last = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _open(file)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > last:
                raise
            time.sleep(0.02)


def _open(file: Path) -> sqlite3.Connection:
    """Open for writing: a sound bank only, since a write to another may lose more of it."""
    con = _raw(file, "rwc")
    try:
        if not con.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            con.execute("PRAGMA journal_mode=WAL")
            con.executescript(_SCHEMA)
        _check(con, file)
        wrong = con.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if wrong != "ok":
            needed = f"a sound knowledge bank {file} to write to"
            remedy = "`aoe bank export` saves what can be read; move the file away, import that"
            raise BankError("damaged", needed, " ".join(wrong.split())[:200], remedy)
    except BaseException:
        con.close()
        raise
    return con


def _read(file: Path) -> tuple[sqlite3.Connection, int]:
    """Return a bank in memory with all rows of `file` that can be read; count those that cannot."""
    with closing(_copied(file)) as raw:
        _check(raw, file)
        rows, hidden = _salvaged(raw)
        trials = []
        with suppress(sqlite3.DatabaseError):
            trials = raw.execute("SELECT run_id, number, point, cost, note FROM trials").fetchall()
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.executescript(_SCHEMA)
    made.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?)", rows)
    hidden += len(rows) - made.total_changes
    made.executemany("INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, ?)", trials)
    made.execute("PRAGMA query_only=ON")
    return made, hidden


def _copied(file: Path) -> sqlite3.Connection:
    """Return a bank's bytes in memory, with what its write-ahead file adds.

    While a process has it open (there is a `-shm`), or was killed, SQLite's locks are needed; a
    file that lies alone is copied first, because SQLite would put files beside it.
    """
    memory, shared = sqlite3.connect(":memory:"), file.with_name(f"{file.name}-shm")
    memory.text_factory = _text
    if not shared.exists():
        with TemporaryDirectory() as folder:
            own = Path(folder, "bank")
            shutil.copyfile(file, own)
            with suppress(FileNotFoundError):
                shutil.copyfile(file.with_name(f"{file.name}-wal"), f"{own}-wal")
            with closing(_raw(own, "rw")) as alone:
                alone.backup(memory)
    if shared.exists():  # from the start, or a writer came in between
        with closing(_raw(file, "ro")) as live:
            live.backup(memory)
    return memory


def _salvaged(con: sqlite3.Connection) -> tuple[list[tuple[object, ...]], int]:
    """Return the rows found from both ends and by the index, and how many are lost, at least."""
    found: dict[int, tuple[object, ...]] = {}
    whole = False
    for order in ("ASC", "DESC"):
        if not whole:
            rows, whole = _until_damage(con, f"{_ROWS} NOT INDEXED ORDER BY rowid {order}")
            found |= {row[0]: row[1:] for row in rows}
    places, _ = _until_damage(con, "SELECT rowid FROM entries INDEXED BY alike")
    missing = [place for (place,) in places if place not in found]
    for place in missing:
        rows, _ = _until_damage(con, f"{_ROWS} WHERE rowid = ?", place)
        found |= {row[0]: row[1:] for row in rows}
    hidden = sum(place not in found for place in missing)
    return list(found.values()), hidden if whole else max(1, hidden)


def _until_damage(
    con: sqlite3.Connection, query: str, *values: int
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the rows of a query up to a damaged page, and whether that was all."""
    rows = []
    try:
        for row in con.execute(query, values):
            rows.append(row)  # noqa: PERF402 - those before an error count
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise
        return rows, False
    return rows, True


def _raw(file: Path, mode: str) -> sqlite3.Connection:
    uri = f"{file.resolve().as_uri()}?mode={mode}"
    con = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    con.text_factory = _text
    return con


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _check(con: sqlite3.Connection, file: Path) -> None:
    """Refuse a database that is no bank, or one of a later version."""
    if con.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        got, remedy = "a database of some other program", _LEFT
        raise BankError("not-a-bank", f"opening knowledge bank {file}", got, remedy)
    version = con.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        needed = f"a knowledge bank of version {SCHEMA_VERSION} in {file}"
        remedy = "update ascend_lab, or export it as JSON Lines with the newer one"
        raise BankError("newer", needed, f"version {version}", remedy)
