"""Reads and writes the custom bank's file: the best entry of each key, and unfinished trials.

The file is a SQLite database in write-ahead mode: a commit appends to `<file>-wal`, and survives if
the process is killed right after it. Several processes on one machine may write to the file; they
wait for each other. SQLite's locks do not work on most network file systems: only one machine
should write to a bank there.
"""

from __future__ import annotations

import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

from ascend_lab.aoe.bank import records
from ascend_lab.aoe.bank.records import BankEntry, BankError, BankKey, better, explained
from ascend_lab.aoe.drive import Trial

with suppress(ImportError):  # Python in a browser may have no sqlite3: `connect` then raises
    import sqlite3

FILE_NAME = "knowledge.db"
UNFINISHED_DAYS = 30
"""The trials of a search that was not resumed for so long are deleted."""
Written = Literal["add", "update", "reserved"]
"""What was done with an entry: its key was new, it replaced a worse one, or it was not stored."""
_PURGE_STATEMENTS = (
    "CREATE TABLE IF NOT EXISTS runs (run_id TEXT PRIMARY KEY, touched REAL NOT NULL)",
    "INSERT OR IGNORE INTO runs SELECT DISTINCT run_id, julianday('now') FROM trials",
    f"DELETE FROM runs WHERE touched < julianday('now') - {UNFINISHED_DAYS}",
    "DELETE FROM trials WHERE run_id NOT IN (SELECT run_id FROM runs)",
)
APPLICATION_ID = 0x414C4B42
"""A number in the header of every bank (the text "ALKB"), which other SQLite databases lack."""
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 8.0
MAX_FILE_BYTES = 2**31
"""Larger files are refused before they are read."""
_OTHER_FILE_REMEDY = "name another file; this one is left as it is"
_SELECT_ENTRIES = "SELECT rowid, digest, kind, op, chip, line FROM entries"

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


class Store:
    """A custom bank's file, open until `close()` or the end of a `with` block.

    Several processes may have the file open and write to it. An object may only be used by the
    thread that created it. Every method may raise `BankError`.
    """

    def __init__(self, file: str | Path, write: bool = True) -> None:
        """Open `file`: to read and write (it is created if missing), or only to read."""
        self.file = Path(file)
        self._con, lost_count = connect(self.file, write)
        try:
            self.skipped_count = lost_count + len(self._unreadable())
            """Number of rows that cannot be read as entries; they stay in the file."""
            if write:
                # deletes the trials of old searches; a failure to do so does no harm
                with suppress(BankError), self._writing(durable=False):
                    for statement in _PURGE_STATEMENTS:
                        self._con.execute(statement)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._con.close()

    @property
    def skipped_warning(self) -> str:
        """A line of text that says how many rows could not be read."""
        remedy = "the file is kept, `aoe bank forget --unreadable` removes them"
        return f"{self.skipped_count} unreadable rows of {self.file} are passed over; {remedy}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- entries -----------------------------------------------------------------------------------

    def get(self, key: BankKey) -> BankEntry | None:
        """Return the entry of exactly this key, or None."""
        entries = self._entries("WHERE digest = ?", key.digest)
        return entries[0] if entries and entries[0].key == key else None

    def entries(self) -> tuple[BankEntry, ...]:
        """Return all entries, sorted by key, whatever order they were written in."""
        return tuple(self._entries("ORDER BY kind, op, chip, digest"))

    def nearest(self, key: BankKey, features: Sequence[float], count: int) -> list[BankEntry]:
        """Return the `count` entries of the most similar shapes, for the same operator and chip."""
        condition = "WHERE kind = ? AND op = ? AND chip = ?"
        comparable = self._entries(condition, key.kind, key.op, key.chip)
        return records.nearest(comparable, key, features, count)

    def put(self, entry: BankEntry) -> Written:
        """Store `entry` if its key is new or it is better; return what was done."""
        with self._writing(durable=True):
            current = self.get(entry.key)
            if not entry.better_than(current):
                return "reserved"
            self._replace(entry)
        return "update" if current else "add"

    def export_jsonl(self, file: str | Path) -> int:
        """Write all entries to `file`, one JSON object per line; return their number."""
        entries = self.entries()
        records.write_lines(file, entries)
        return len(entries)

    def import_jsonl(self, file: str | Path) -> dict[Written, int]:
        """Store the entries of `file` that are new or better; return the number of each outcome.

        If a line is wrong, nothing is stored and `BankError` is raised.
        """
        entries, line_errors = records.read_lines(file)
        if line_errors:
            remedy = "correct or delete that line; nothing was imported"
            raise BankError("line", str(line_errors[0]), "", remedy)
        return self.put_all(entries)

    def forget(self, keys: Iterable[BankKey]) -> None:
        """Delete the entries of these keys in one transaction."""
        self._delete([key.digest for key in keys])

    def forget_unreadable(self) -> int:
        """Delete the rows that cannot be read as entries; return their number."""
        digests = self._unreadable()
        self._delete(digests)
        return len(digests)

    # -- trials of running searches ----------------------------------------------------------------

    def save_trials(self, run_id: str, trials: Iterable[Trial]) -> None:
        """Store trials without waiting for the disk: they may be lost in a power failure."""
        rows = [(run_id, t.number, records.point_text(t), float(t.cost), t.note) for t in trials]
        with self._writing(durable=False):
            self._con.executemany("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?)", rows)
            self._con.execute("INSERT OR REPLACE INTO runs VALUES (?, julianday('now'))", (run_id,))

    def trials(self, run_id: str) -> tuple[Trial, ...]:
        """Return the trials stored for `run_id`, by number, skipping rows that cannot be read."""
        query = "SELECT number, point, cost, note FROM trials WHERE run_id = ? ORDER BY number"
        return tuple(
            trial for row in self._read(query, run_id) if (trial := records.trial_of(*row))
        )

    def forget_trials(self, run_id: str) -> None:
        """Delete the trials of all searches for the same problem as `run_id`, with any settings.

        An id is the hash of the problem, then the settings: "5e1f... 3 Settings(budget=200, ...)".
        """
        problem_hash = run_id.partition(" ")[0]
        with self._writing(durable=False):
            for table in ("trials", "runs"):
                self._con.execute(
                    f"DELETE FROM {table} WHERE run_id = ? OR substr(run_id, 1, ?) = ?",
                    (problem_hash, len(problem_hash) + 1, f"{problem_hash} "),
                )

    # -- the file ----------------------------------------------------------------------------------

    def check(self) -> tuple[str, ...]:
        """Read the whole file and return what is damaged; empty if nothing is."""
        rows = self._read("PRAGMA integrity_check")
        return tuple(text for (text,) in rows if text != "ok")

    def put_all(self, entries: Iterable[BankEntry]) -> dict[Written, int]:
        """Store every entry that is new or better, in one transaction; count the outcomes."""
        counts: Counter[Written] = Counter()
        with self._writing(durable=True):
            for entry in entries:
                current = self.get(entry.key)
                if current is not None and better(current, entry) == current:
                    counts["reserved"] += 1
                    continue
                self._replace(entry)
                counts["update" if current else "add"] += 1
        return {"add": counts["add"], "update": counts["update"], "reserved": counts["reserved"]}

    def _replace(self, entry: BankEntry) -> None:
        key = entry.key
        row = (key.digest, key.kind, key.op, key.chip, records.to_line(entry))
        self._con.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with explained(self.file, "reading knowledge bank"):
            return self._con.execute(query, values).fetchall()

    def _entries(self, where: str, *values: str) -> list[BankEntry]:
        """Return the entries that a query selects, skipping rows that cannot be read."""
        rows = self._read(f"SELECT digest, line FROM entries {where}", *values)
        return [entry for row in rows if (entry := records.entry_of(*row))]

    def _unreadable(self) -> list[Any]:
        """Return the digests of the rows that cannot be read as entries."""
        rows = self._read("SELECT digest, line FROM entries")
        return [row[0] for row in rows if not records.entry_of(*row)]

    def _delete(self, digests: Iterable[Any]) -> None:
        with self._writing(durable=True):
            self._con.executemany("DELETE FROM entries WHERE digest IS ?", [(d,) for d in digests])

    @contextmanager
    def _writing(self, durable: bool) -> Iterator[None]:
        """One transaction; if it is `durable`, it is on the disk before the block ends."""
        with explained(self.file, "writing to knowledge bank"):
            self._con.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            # IMMEDIATE locks the file before the block reads it: no other process can write
            # between its reading and its writing.
            self._con.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._con.execute("COMMIT")
            except BaseException:
                if self._con.in_transaction:  # SQLite itself ends it when the disk is full
                    self._con.execute("ROLLBACK")
                raise


# -- opening the file ------------------------------------------------------------------------------
def connect(file: Path, write: bool) -> tuple[sqlite3.Connection, int]:
    """Return a connection to a bank's file, and the number of rows that damage made unreadable.

    With `write` a missing file is created, and a damaged one raises `BankError`. Otherwise, or if
    the file may not be written, the connection is to a copy in memory: nothing changes on the disk,
    and a damaged page costs only the rows on it.
    """
    with explained(file, "opening knowledge bank"):
        import sqlite3

        size_bytes = _size_bytes(file, write)
        if size_bytes > MAX_FILE_BYTES:
            needed = f"a knowledge bank of at most {MAX_FILE_BYTES:,} bytes"
            raise BankError("not-a-bank", needed, f"{size_bytes:,} in {file}", "name another file")
        if not write:
            return _read_into_memory(file)
        try:
            return _open_with_retries(file), 0
        except sqlite3.OperationalError as error:
            kinds = sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY
            # the low byte of an error code is its general type
            if error.sqlite_errorcode & 0xFF not in kinds or not file.is_file():
                raise
        return _read_into_memory(file)


def _size_bytes(file: Path, write: bool) -> int:
    """Return the size of a bank's file, 0 if it is to be created; raises `BankError`."""
    try:
        status = file.stat()
    except FileNotFoundError:
        if write and file.parent.is_dir():
            return 0
        got = "no such file" if file.parent.is_dir() else "no such folder"
        remedy = "check the name, or tune something first: that makes a bank"
        raise BankError("missing", f"opening knowledge bank {file}", got, remedy) from None
    if not stat.S_ISREG(status.st_mode):
        got = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, a pipe or the like"
        raise BankError("unwritable", f"a file as knowledge bank {file}", got, "name another")
    if not write and not status.st_size:
        needed = f"opening knowledge bank {file}"
        raise BankError("not-a-bank", needed, "an empty file", _OTHER_FILE_REMEDY)
    return status.st_size


def _open_with_retries(file: Path) -> sqlite3.Connection:
    """Open for writing; try again for some seconds while another process has locked the file.

    SQLite waits for most locks by itself, but not while another process sets the journal mode.
    """
    give_up_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _open(file)
        except sqlite3.OperationalError as error:
            # the low byte is the general type of error: SQLITE_BUSY for SQLITE_BUSY_RECOVERY
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_s:
                raise
            time.sleep(0.02)


def _open(file: Path) -> sqlite3.Connection:
    """Open for writing; a damaged bank is refused, because writing to it may destroy more of it."""
    con = _raw(file, "rwc")
    try:
        if not con.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            con.execute("PRAGMA journal_mode=WAL")
            con.executescript(_SCHEMA)
        _check(con, file)
        finding = con.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if finding != "ok":
            needed = f"a sound knowledge bank {file} to write to"
            remedy = "`aoe bank export` saves what can be read; move the file away, import that"
            raise BankError("damaged", needed, " ".join(finding.split())[:200], remedy)
    except BaseException:
        con.close()
        raise
    return con


def _read_into_memory(file: Path) -> tuple[sqlite3.Connection, int]:
    """Return a bank in memory with all readable rows of `file`, and the number of lost rows."""
    with closing(_copied(file)) as raw:
        _check(raw, file)
        rows, lost_count = _salvaged(raw)
        trials = []
        with suppress(sqlite3.DatabaseError):
            trials = raw.execute("SELECT run_id, number, point, cost, note FROM trials").fetchall()
    bank = sqlite3.connect(":memory:", isolation_level=None)
    bank.executescript(_SCHEMA)
    bank.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?)", rows)
    # The insert ignored rows that break the table's rules, for example two with the same digest.
    lost_count += len(rows) - bank.total_changes
    bank.executemany("INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, ?)", trials)
    bank.execute("PRAGMA query_only=ON")
    return bank, lost_count


def _copied(file: Path) -> sqlite3.Connection:
    """Return a copy of a bank in memory, including its write-ahead file.

    A file `<file>-shm` exists while a process has the bank open, or after it was killed: the bank
    is then read under SQLite's locks. Otherwise its file is copied to a temporary folder first,
    because SQLite would create files beside it.
    """
    memory = sqlite3.connect(":memory:")
    shared = file.with_name(f"{file.name}-shm")
    memory.text_factory = _text
    if not shared.exists():
        with TemporaryDirectory() as folder:
            copy = Path(folder, "bank")
            shutil.copyfile(file, copy)
            with suppress(FileNotFoundError):
                shutil.copyfile(file.with_name(f"{file.name}-wal"), f"{copy}-wal")
            with closing(_raw(copy, "rw")) as alone:
                alone.backup(memory)
    if shared.exists():  # from the start, or a process opened the bank while it was copied
        with closing(_raw(file, "ro")) as live:
            live.backup(memory)
    return memory


def _salvaged(con: sqlite3.Connection) -> tuple[list[tuple[object, ...]], int]:
    """Return the readable rows of a possibly damaged bank, and at least how many are lost.

    The rows are read forwards until the first damaged page, backwards until the last one, and those
    in between one by one.
    """
    rows_by_id: dict[int, tuple[object, ...]] = {}
    is_complete = False
    for order in ("ASC", "DESC"):
        if not is_complete:
            query = f"{_SELECT_ENTRIES} NOT INDEXED ORDER BY rowid {order}"
            rows, is_complete = _until_damage(con, query)
            rows_by_id |= {row[0]: row[1:] for row in rows}
    # The index lies on other pages than the rows: it names rows between two damaged pages.
    indexed_ids, _ = _until_damage(con, "SELECT rowid FROM entries INDEXED BY alike")
    missing_ids = [row_id for (row_id,) in indexed_ids if row_id not in rows_by_id]
    for row_id in missing_ids:
        rows, _ = _until_damage(con, f"{_SELECT_ENTRIES} WHERE rowid = ?", row_id)
        rows_by_id |= {row[0]: row[1:] for row in rows}
    lost_count = sum(row_id not in rows_by_id for row_id in missing_ids)
    return list(rows_by_id.values()), lost_count if is_complete else max(1, lost_count)


def _until_damage(
    con: sqlite3.Connection, query: str, *values: int
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the rows of a query up to the first damaged page, and whether these are all rows."""
    rows = []
    try:
        for row in con.execute(query, values):
            rows.append(row)  # noqa: PERF402 - list() would lose the rows read before an error
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
    """Raise `BankError` for a database that is not a bank, or a bank of a later version."""
    if con.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        needed = f"opening knowledge bank {file}"
        got = "a database of some other program"
        raise BankError("not-a-bank", needed, got, _OTHER_FILE_REMEDY)
    version = con.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        needed = f"a knowledge bank of version {SCHEMA_VERSION} in {file}"
        remedy = "update ascend_lab, or export it as JSON Lines with the newer one"
        raise BankError("newer", needed, f"version {version}", remedy)
