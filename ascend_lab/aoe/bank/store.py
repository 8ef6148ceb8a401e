"""A bank in one file: best entries by key, and the trials of searches that are still running."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

from ascend_lab.aoe.bank import records
from ascend_lab.aoe.bank.records import BankEntry, BankError, BankKey, better, explained
from ascend_lab.aoe.drive import Trial

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


class Store:
    """A knowledge bank file, open until `close()` or the end of a `with`.

    Two processes may hold and write one file at once. Every method raises `BankError`. To be used
    by the thread and the process that opened it.
    """

    def __init__(self, file: str | Path, write: bool = True) -> None:
        """Open `file` to write, made if it is missing; else only what it held is read."""
        self.file = Path(file)
        with explained(self.file, "opening knowledge bank"):
            from ascend_lab.aoe.bank.connect import connect  # needs sqlite3
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
        found = self._entries("WHERE digest = ?", key.digest)
        return found[0] if found and found[0].key == key else None

    def entries(self) -> tuple[BankEntry, ...]:
        """Return all entries, in an order that depends on their keys only."""
        return tuple(self._entries("ORDER BY kind, op, chip, digest"))

    def nearest(self, key: BankKey, features: Sequence[float], count: int) -> list[BankEntry]:
        """Return up to `count` entries of like problems of the same operator and chip."""
        alike = self._entries("WHERE kind = ? AND op = ? AND chip = ?", key.kind, key.op, key.chip)
        return nearest(alike, key, features, count)

    def put(self, entry: BankEntry) -> Written:
        """Store `entry` if its key is new or it is better than what is there, and say which."""
        with self._writing(durable=True):
            old = self.get(entry.key)
            if not entry.better_than(old):
                return "reserved"
            self._replace(entry)
        return "update" if old else "add"

    def merge(self, other: "Store") -> dict[Written, int]:
        """Take over every entry of `other` that is new or better; all of them or none."""
        return self.take(other.entries())

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
        """Delete the rows that are no entries; return how many."""
        found = self._unreadable()
        self._delete(found)
        return len(found)

    # -- trials of running searches ----------------------------------------------------------------

    def save_trials(self, run_id: str, trials: Iterable[Trial]) -> None:
        """Keep trials at once and cheaply: they survive a killed process, but not a power cut."""
        rows = [(run_id, t.number, _point_text(t), float(t.cost), t.note) for t in trials]
        with self._writing(durable=False):
            self._con.executemany("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?)", rows)
            self._con.execute("INSERT OR REPLACE INTO runs VALUES (?, julianday('now'))", (run_id,))

    def trials(self, run_id: str) -> tuple[Trial, ...]:
        """Return the trials kept for `run_id`, by number; rows that are none are passed over."""
        query = "SELECT number, point, cost, note FROM trials WHERE run_id = ? ORDER BY number"
        return tuple(trial for row in self._read(query, run_id) if (trial := _trial(*row)))

    def forget_trials(self, run_id: str) -> None:
        """Delete the trials of all searches for the problem that `run_id` begins with."""
        word = run_id.partition(" ")[0]
        with self._writing(durable=False):
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
        """Keep the better one of each key, in one transaction; count what happened."""
        counts: Counter[Written] = Counter()
        with self._writing(durable=True):
            for entry in entries:
                old = self.get(entry.key)
                if old is not None and better(old, entry) == old:
                    counts["reserved"] += 1
                    continue
                self._replace(entry)
                counts["update" if old else "add"] += 1
        return {"add": counts["add"], "update": counts["update"], "reserved": counts["reserved"]}

    def _replace(self, entry: BankEntry) -> None:
        key = entry.key
        row = (key.digest, key.kind, key.op, key.chip, records.to_line(entry))
        self._con.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with explained(self.file, "reading knowledge bank"):
            return self._con.execute(query, values).fetchall()

    def _entries(self, where: str, *values: str) -> list[BankEntry]:
        """Return the rows of `entries` that a query finds, without those that are none."""
        rows = self._read(f"SELECT digest, line FROM entries {where}", *values)
        return [entry for row in rows if (entry := _entry(*row))]

    def _unreadable(self) -> list[Any]:
        """Return the digests of the rows that are no entries."""
        rows = self._read("SELECT digest, line FROM entries")
        return [row[0] for row in rows if not _entry(*row)]

    def _delete(self, digests: Iterable[Any]) -> None:
        with self._writing(durable=True):
            self._con.executemany("DELETE FROM entries WHERE digest IS ?", [(d,) for d in digests])

    @contextmanager
    def _writing(self, durable: bool) -> Iterator[None]:
        """One short transaction; `durable` waits for the disk, so that a power cut keeps it too."""
        with explained(self.file, "writing to knowledge bank"):
            self._con.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._con.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._con.execute("COMMIT")
            except BaseException:
                if self._con.in_transaction:  # a full disk has ended it already
                    self._con.execute("ROLLBACK")
                raise


def nearest(
    entries: Iterable[BankEntry], key: BankKey, features: Sequence[float], count: int
) -> list[BankEntry]:
    """Return the `count` entries closest to `features`, closest first, `key` itself left out.

    Distance = sum of squared differences of log2 sizes. Among equals, the same chip numbers and
    then the closest number of cores come first. Same kind, operator and chip name only.
    """
    alike = [
        e
        for e in entries
        if (e.key.kind, e.key.op, e.key.chip) == (key.kind, key.op, key.chip)
        and len(e.features) == len(features)
        and e.key != key
    ]

    def distance(entry: BankEntry) -> tuple[float, bool, int, str]:
        squares = sum((a - b) ** 2 for a, b in zip(entry.features, features, strict=True))
        cores = abs(entry.key.core_count - key.core_count)
        return squares, entry.key.chip_digest != key.chip_digest, cores, entry.key.problem

    return sorted(alike, key=distance)[:count]


def _point_text(trial: Trial) -> str:
    """Return the point as JSON; it must be made of numbers, text, None and tuples."""
    if math.isnan(trial.cost):
        raise BankError("record", "a trial's cost as a number or infinity", "nan")
    try:
        return records.canonical(trial.point)
    except (TypeError, ValueError) as error:
        raise BankError("record", "a point of plain values", str(error)) from None


def _entry(digest: object, line: object) -> BankEntry | None:
    """Return the entry of a row, or None of one that is damaged, of a newer version, or foreign."""
    if not isinstance(line, str) or not line.isascii():
        return None
    try:
        found = records.from_line(line)
    except BankError:
        return None
    return found if found.key.digest == digest else None


def _trial(number: object, point: object, cost: object, note: object) -> Trial | None:
    """Return the trial of a row, or None of one that is none."""
    if not (isinstance(number, int) and isinstance(point, str) and isinstance(note, str)):
        return None
    if not (isinstance(cost, float) and cost >= 0):
        return None
    with suppress(ValueError, RecursionError):
        found = _tuples(json.loads(point))
        return Trial(number, found, cost, note) if isinstance(found, tuple) else None
    return None


def _tuples(data: Any) -> Any:
    """Return JSON data with every list as a tuple, as in a point."""
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data
