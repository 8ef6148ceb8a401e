"""A bank in one file: best entries by key, and the trials of searches that are still running.

The file is a SQLite database in write-ahead mode: a commit appends to `<file>-wal` and is there for
good even if the process is killed right after it; the next one to open the file tidies up. Writers
of several processes on one machine queue up. A network file system shared by several machines does
not give SQLite the locks it needs: let one machine write.
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

with suppress(ImportError):  # some browsers' Python has none: `connect` says so
    import sqlite3

FILE_NAME = "knowledge.db"
UNFINISHED_DAYS = 30
"""The trials of a search that nobody has gone on with for so long are removed."""
Written = Literal["add", "update", "reserved"]
"""A new key; a better entry under a known key; or what was there stays."""
_PURGE = (
    "CREATE TABLE IF NOT EXISTS runs (run_id TEXT PRIMARY KEY, touched REAL NOT NULL)",
    "INSERT OR IGNORE INTO runs SELECT DISTINCT run_id, julianday('now') FROM trials",
    f"DELETE FROM runs WHERE touched < julianday('now') - {UNFINISHED_DAYS}",
    "DELETE FROM trials WHERE run_id NOT IN (SELECT run_id FROM runs)",
)
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


class Store:
    """A knowledge bank file, open until `close()` or the end of a `with`.

    Two processes may hold and write one file at once. Every method raises `BankError`. To be used
    by the thread and the process that opened it.
    """

    def __init__(self, file: str | Path, write: bool = True) -> None:
        """Open `file` for writing (created if missing), or else only read its present contents."""
        self.file = Path(file)
        self._con, hidden = connect(self.file, write)
        try:
            self.skipped = hidden + len(self._unreadable())
            """Rows that are no entries, of a damaged page or by themselves: they are left alone."""
            if write:  # if it can be: a search that nobody will go on with leaves its trials
                with suppress(BankError), self._writing(durable=False):
                    for statement in _PURGE:
                        self._con.execute(statement)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._con.close()

    @property
    def passed_over(self) -> str:
        """A line that says how many rows are no entries."""
        remedy = "the file is kept, `aoe bank forget --unreadable` removes them"
        return f"{self.skipped} unreadable rows of {self.file} are passed over; {remedy}"

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
        """Return all entries, in an order that depends on their keys only."""
        return tuple(self._entries("ORDER BY kind, op, chip, digest"))

    def nearest(self, key: BankKey, features: Sequence[float], count: int) -> list[BankEntry]:
        """Return up to `count` entries of like problems of the same operator and chip."""
        alike = self._entries("WHERE kind = ? AND op = ? AND chip = ?", key.kind, key.op, key.chip)
        return records.nearest(alike, key, features, count)

    def put(self, entry: BankEntry) -> Written:
        """Store `entry` if its key is new or it is better than what is there, and say which."""
        with self._writing(durable=True):
            current = self.get(entry.key)
            if not entry.better_than(current):
                return "reserved"
            self._replace(entry)
        return "update" if current else "add"

    def export_jsonl(self, file: str | Path) -> int:
        """Write all entries to `file`, one JSON object a line; return how many."""
        entries = self.entries()
        records.write_lines(file, entries)
        return len(entries)

    def import_jsonl(self, file: str | Path) -> dict[Written, int]:
        """Take over the entries of `file` that are new or better; none if a line is wrong."""
        entries, wrong = records.read_lines(file)
        if wrong:
            remedy = "correct or delete that line; nothing was imported"
            raise BankError("line", str(wrong[0]), "", remedy)
        return self.take(entries)

    def forget(self, keys: Iterable[BankKey]) -> None:
        """Delete the entries of these keys, all or none."""
        self._delete([key.digest for key in keys])

    def forget_unreadable(self) -> int:
        """Delete the rows that cannot be read as entries; return how many."""
        digests = self._unreadable()
        self._delete(digests)
        return len(digests)

    # -- trials of running searches ----------------------------------------------------------------

    def save_trials(self, run_id: str, trials: Iterable[Trial]) -> None:
        """Keep trials at once and cheaply: they survive a killed process, but not a power cut."""
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
        """Delete the trials of all searches for the problem that `run_id` begins with."""
        word = run_id.partition(" ")[0]
        with self._writing(durable=False):
            # A run's id begins with the digest of its problem: runs with other settings go as well.
            for table in ("trials", "runs"):
                self._con.execute(
                    f"DELETE FROM {table} WHERE run_id = ? OR substr(run_id, 1, ?) = ?",
                    (word, len(word) + 1, f"{word} "),
                )

    # -- the file ----------------------------------------------------------------------------------

    def check(self) -> tuple[str, ...]:
        """Read the whole file and return what is wrong with it; empty if it is sound."""
        rows = self._read("PRAGMA integrity_check")
        return tuple(text for (text,) in rows if text != "ok")

    def take(self, entries: Iterable[BankEntry]) -> dict[Written, int]:
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
        """One short transaction; `durable` waits for the disk, so that a power cut keeps it too."""
        with explained(self.file, "writing to knowledge bank"):
            self._con.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            # The lock is taken before reading: another process cannot write a better entry in
            # between.
            self._con.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._con.execute("COMMIT")
            except BaseException:
                if self._con.in_transaction:  # a full disk has ended it already
                    self._con.execute("ROLLBACK")
                raise


# -- opening the file ------------------------------------------------------------------------------
def connect(file: Path, write: bool) -> tuple[sqlite3.Connection, int]:
    """Return a connection to the bank `file`, and how many rows its damage hides; BankError.

    To `write` the file is made if it is missing. Else what comes back is a copy in memory: nothing
    is changed or made on the disk, and a damaged page costs only its own rows. So it is where the
    file or its folder may not be written, too.
    """
    with explained(file, "opening knowledge bank"):
        import sqlite3

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
        raise BankError("not-a-bank", f"opening knowledge bank {file}", "an empty file", _LEFT)
    return status.st_size


def _patiently(file: Path) -> sqlite3.Connection:
    """Open; SQLite does not wait by itself where another process changes the journal mode."""
    give_up_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _open(file)
        except sqlite3.OperationalError as error:
            # The low byte is the kind of error, the upper ones say more: BUSY_RECOVERY is BUSY,
            # too.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_s:
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
    bank = sqlite3.connect(":memory:", isolation_level=None)
    bank.executescript(_SCHEMA)
    bank.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?)", rows)
    # Rows that break the table's rules, two with one digest for example, were ignored by the
    # insert.
    hidden += len(rows) - bank.total_changes
    bank.executemany("INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, ?)", trials)
    bank.execute("PRAGMA query_only=ON")
    return bank, hidden


def _copied(file: Path) -> sqlite3.Connection:
    """Return a copy of a bank in memory, including its write-ahead file.

    While a process has it open (there is a `-shm`), or was killed, SQLite's locks are needed; a
    file that lies alone is copied first, because SQLite would put files beside it.
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
    if shared.exists():  # from the start, or a writer came in between
        with closing(_raw(file, "ro")) as live:
            live.backup(memory)
    return memory


def _salvaged(con: sqlite3.Connection) -> tuple[list[tuple[object, ...]], int]:
    """Return the rows found from both ends and by the index, and how many are lost, at least."""
    rows_by_id: dict[int, tuple[object, ...]] = {}
    is_complete = False
    # A damaged page in the middle stops both directions: what lies before and behind it is still
    # read.
    for order in ("ASC", "DESC"):
        if not is_complete:
            rows, is_complete = _until_damage(con, f"{_ROWS} NOT INDEXED ORDER BY rowid {order}")
            rows_by_id |= {row[0]: row[1:] for row in rows}
    # The index lies on other pages than the rows: it names rows between two damaged pages.
    places, _ = _until_damage(con, "SELECT rowid FROM entries INDEXED BY alike")
    missing = [place for (place,) in places if place not in rows_by_id]
    for place in missing:
        rows, _ = _until_damage(con, f"{_ROWS} WHERE rowid = ?", place)
        rows_by_id |= {row[0]: row[1:] for row in rows}
    hidden = sum(place not in rows_by_id for place in missing)
    return list(rows_by_id.values()), hidden if is_complete else max(1, hidden)


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
        got = "a database of some other program"
        remedy = _LEFT
        raise BankError("not-a-bank", f"opening knowledge bank {file}", got, remedy)
    version = con.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        needed = f"a knowledge bank of version {SCHEMA_VERSION} in {file}"
        remedy = "update ascend_lab, or export it as JSON Lines with the newer one"
        raise BankError("newer", needed, f"version {version}", remedy)
