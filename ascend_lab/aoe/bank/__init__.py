"""The knowledge bank: a database of the best schedules, so that no operator is searched twice.

There are two banks. The custom bank is the user's file; it is in the folder that the environment
variable `TUNE_BANK_PATH` or else `ASCEND_CACHE_PATH` names, or else in the home folder. The
built-in bank comes with the package and is only read. A schedule is looked up in the custom bank
first.

A lookup is a hit or a miss. After a miss, or if `REPEAT_TUNE` asks for it after a hit, the operator
is searched. CANN's report counts what happened::

    lookup   searched   result of the search    what is stored            counted in
    hit      no         -                       nothing                   `repo_hit_num`
    hit      yes        better than the entry   the new schedule          `repo_update_num`
    hit      yes        not better              nothing                   `repo_reserved_num`
    miss     yes        better than default     the new schedule          `repo_add_num`
    miss     yes        not better              that the default is best  `repo_unsatisfied_num`

CANN's tool stores nothing in the last case and searches again next time. Here an entry is stored
whose schedule is empty (`improved` is False), so that the next lookup is a hit.
"""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self, TypeVar

# fmt: off
# isort: off
from ascend_lab.aoe.bank import records
from ascend_lab.aoe.bank.records import (
    MODEL_VERSION, BankEntry, BankError, BankKey, canonical, chip_digest,
)
from ascend_lab.aoe.bank.store import FILE_NAME, Store, Written
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.workers import UNMEASURED_NOTES
from ascend_lab.errors import InputError
from ascend_lab.output import write_whole
# fmt: on
# isort: on

__all__ = [
    "BUILTIN_FILE",
    "FILE_NAME",
    "MODEL_VERSION",
    "BankEntry",
    "BankError",
    "BankKey",
    "Knowledge",
    "Origin",
    "Outcome",
    "Store",
    "Written",
    "bank_file",
    "builtin_entries",
    "canonical",
    "chip_digest",
    "open_knowledge",
    "repeat_tune",
    "repo_summary",
    "settle",
    "write_builtin",
]

Origin = Literal["custom", "builtin"]
Outcome = Literal["hit", "add", "update", "reserved", "unsatisfied"]
OUTCOMES: tuple[Outcome, ...] = ("add", "hit", "reserved", "unsatisfied", "update")
NOT_STORED = "{}; tuning goes on, results are not stored in the bank"
NO_ENTRIES_REMEDY = "export a bank that has some: `aoe bank export FILE.jsonl`"
_T = TypeVar("_T")


# -- the built-in bank: a compressed file, one list per line, problems as hashes -------------------

BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl.gz")
_HEADER = {"format": "ascend_lab built-in knowledge bank", "version": 1}
_KEY_FIELDS = tuple(f.name for f in fields(BankKey) if f.name != "problem")
_ENTRY_FIELDS = tuple(f.name for f in fields(BankEntry) if f.name != "key")


def short_key(key: BankKey) -> BankKey:
    """Return the key with a hash in place of the problem's text, which may be very long."""
    return replace(key, problem=records.digest(key.problem))


def find_builtin(key: BankKey, file: Path = BUILTIN_FILE) -> BankEntry | None:
    """Return the built-in entry of a key, or None; raises `BankError` if the file is damaged."""
    entry = builtin_entries(file).get(short_key(key))
    return replace(entry, key=key) if entry is not None else None


@lru_cache(maxsize=4)
def builtin_entries(file: Path = BUILTIN_FILE) -> Mapping[BankKey, BankEntry]:
    """Return the built-in entries by `short_key`; an empty mapping if there is no file."""
    if not file.exists():
        return MappingProxyType({})
    entries = {}
    try:
        lines = gzip.decompress(file.read_bytes()).splitlines()
        if not lines or json.loads(lines[0]) != _HEADER:
            raise ValueError("no header, or one of another version")
        for line in lines[1:]:
            *values, problem = json.loads(line)
            # A line is a list without field names: first the fields of the key, then those of the
            # entry, and the hash of the problem at the end.
            key_values = dict(zip(_KEY_FIELDS, values, strict=False))
            entry_values = dict(zip(_ENTRY_FIELDS, values[len(_KEY_FIELDS) :], strict=True))
            key = BankKey(problem=problem, **key_values)
            entries[key] = BankEntry(key=key, **entry_values)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, BankError) as error:
        remedy = "install ascend_lab again, or delete that file: it is not needed"
        raise BankError("damaged", f"reading built-in bank {file}", str(error), remedy) from None
    return MappingProxyType(entries)


def write_builtin(entries: Iterable[BankEntry], file: Path = BUILTIN_FILE) -> int:
    """Write a built-in bank with the best entry of each key; return the number of keys."""
    best: dict[BankKey, BankEntry] = {}
    for entry in entries:
        short_entry = replace(entry, key=short_key(entry.key))
        current = best.get(short_entry.key, short_entry)
        best[short_entry.key] = records.better(current, short_entry)
    rows = []
    for key, entry in best.items():
        key_values = [getattr(key, name) for name in _KEY_FIELDS]
        entry_values = [getattr(entry, name) for name in _ENTRY_FIELDS]
        # the hash comes last, so that similar lines are neighbours and compress well
        rows.append(records.canonical([*key_values, *entry_values, key.problem]))
    # Sorted, and compressed without a time stamp: equal entries give equal bytes, so that version
    # control sees no change.
    data = ("\n".join([records.canonical(_HEADER), *sorted(rows)]) + "\n").encode("ascii")
    write_whole(file, gzip.compress(data, compresslevel=9, mtime=0))
    builtin_entries.cache_clear()
    return len(best)


# -- both banks -----------------------------------------------------------------------------------
class Knowledge:
    """The custom and the built-in bank, open until `close()` or the end of a `with` block.

    If the custom bank cannot be written, or is on a full disk, or is locked by another process,
    tuning goes on: results stay in memory, in `unsaved`, and `warnings` says why. A file that is
    not a bank, is damaged, or comes from a newer version raises `BankError`. Rows that cannot be
    read as entries are skipped, and `warnings` says how many. `written` records for each stored
    entry whether it was new or replaced another. Trials of an interrupted run are only returned if
    `resume` is set.
    """

    def __init__(
        self,
        custom: str | Path | None = None,
        builtin: Path | None = BUILTIN_FILE,
        *,
        write: bool = True,
        resume: bool = True,
    ) -> None:
        """Open the file `custom`, created if it is missing; None keeps results in memory only.

        With `write=False` the file is only read, and every failure to read it raises `BankError`.
        """
        self.warnings: list[str] = []
        self.unsaved: dict[BankKey, BankEntry] = {}
        self.written: dict[BankKey, Outcome] = {}
        self.resume = resume
        self._builtin = builtin
        self._store: Store | None = None
        if custom is not None:
            store = self._or_warning(lambda: Store(custom)) if write else Store(custom, False)
            self._store = store
            if store and store.skipped_count:
                self.warnings.append(store.skipped_warning)

    def close(self) -> None:
        """Close the custom bank."""
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, key: BankKey) -> tuple[BankEntry, Origin] | None:
        """Return the entry of a key and the bank it is from, or None.

        The custom bank is asked first. Entries of an older version of the simulator do not count:
        their cycles are no longer comparable.
        """
        custom = self._custom(key)
        if custom is not None and custom.model_version == MODEL_VERSION:
            return custom, "custom"
        builtin = find_builtin(key, self._builtin) if self._builtin else None
        if builtin is not None and builtin.model_version == MODEL_VERSION:
            return builtin, "builtin"
        return None

    def nearest(self, key: BankKey, features: Sequence[float], count: int) -> list[BankEntry]:
        """Return the `count` entries of the most similar shapes, to begin a search with.

        Built-in entries have a hash in place of the problem's text.
        """
        stored = self._ask_store(lambda store: store.nearest(key, features, count)) or ()
        custom = {entry.key: entry for entry in stored} | self.unsaved
        # An entry of the custom bank takes the place of the built-in one for the same problem.
        builtin = self._builtin_without((*custom, key))
        return records.nearest([*custom.values(), *builtin], key, features, count)

    def _builtin_without(self, keys: Iterable[BankKey]) -> list[BankEntry]:
        """Return the built-in entries, without those of `keys`."""
        excluded = {short_key(key) for key in keys}
        builtin = builtin_entries(self._builtin) if self._builtin else {}
        return [entry for key, entry in builtin.items() if key not in excluded]

    def keep(self, entry: BankEntry) -> Written:
        """Store an entry if its key is new or it is better, and return what was done.

        If the custom bank cannot be written, the entry is stored in memory.
        """
        was_known = self.find(entry.key) is not None
        done = self._ask_store(lambda store: store.put(entry)) or self._put_in_memory(entry)
        outcome: Outcome
        if done == "reserved":
            outcome = "reserved"
        elif was_known:
            outcome = "update"
        else:
            outcome = "add" if entry.improved else "unsatisfied"
        self.written[entry.key] = outcome
        return done

    def _put_in_memory(self, entry: BankEntry) -> Written:
        """Store an entry in memory, in place of a bank that cannot be written."""
        current = self._custom(entry.key)
        if not entry.better_than(current):
            return "reserved"
        self.unsaved[entry.key] = entry
        return "update" if current else "add"

    def save_trials(self, run_id: str, trials: Iterable[Trial]) -> None:
        """Store the measured trials of a running search, if the bank can be written."""
        # A candidate whose process was killed has no cost: a resumed run must measure it again.
        measured = tuple(t for t in trials if not t.note.startswith(UNMEASURED_NOTES))
        self._ask_store(lambda store: store.save_trials(run_id, measured))

    def trials(self, run_id: str) -> tuple[Trial, ...]:
        """Return the stored trials of an interrupted search; empty unless `resume` is set."""
        saved = self._ask_store(lambda store: store.trials(run_id)) if self.resume else None
        return tuple(t for t in saved or () if not t.note.startswith(UNMEASURED_NOTES))

    def forget_trials(self, run_id: str) -> None:
        """Delete the stored trials of a search that has finished."""
        self._ask_store(lambda store: store.forget_trials(run_id))

    def _custom(self, key: BankKey) -> BankEntry | None:
        """Return the better of the entry in the custom bank and the one in memory, or None."""
        stored = self._ask_store(lambda store: store.get(key))
        unsaved = self.unsaved.get(key)
        if stored is None or unsaved is None:
            return stored or unsaved
        # Both exist if the file became writable again, or if another process wrote to it.
        return unsaved if unsaved.better_than(stored) else stored

    def _ask_store(self, action: Callable[[Store], _T]) -> _T | None:
        """Return the result of `action` on the custom bank, or None if it cannot be used."""
        store = self._store
        return self._or_warning(lambda: action(store)) if store else None

    def _or_warning(self, action: Callable[[], _T]) -> _T | None:
        """Return the result of `action`; if the bank cannot be used, add a warning, return None."""
        try:
            return action()
        except BankError as error:
            if error.reason not in records.SURVIVABLE:
                raise
            text = NOT_STORED.format(error)
            if text not in self.warnings:
                self.warnings.append(text)
            return None


# -- hit, miss, repeat ----------------------------------------------------------------------------


def settle(knowledge: Knowledge, tuned: BankEntry) -> Outcome:
    """Store the result of a search if it is better than what both banks know; return the outcome.

    An entry is never replaced by a worse one, nor copied from the built-in to the custom bank.
    """
    current = knowledge.find(tuned.key)
    # A second search of 20 trials must not replace the better result of one of 2,000.
    if not tuned.better_than(current[0] if current else None):
        return "reserved"
    knowledge.keep(tuned)
    return knowledge.written[tuned.key]


def repo_summary(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """Count outcomes under the field names of the published report, and in `total_num`."""
    counts = Counter(outcomes)
    summary = {f"repo_{name}_num": counts[name] for name in OUTCOMES}
    return {**summary, "total_num": counts.total()}


# -- the path of the custom bank -------------------------------------------------------------------

ROOT_VARIABLE = "TUNE_BANK_PATH"
CACHE_VARIABLE = "ASCEND_CACHE_PATH"
REPEAT_VARIABLE = "REPEAT_TUNE"
_SETTING = f"set {ROOT_VARIABLE} to a folder that may be written"


def bank_file(*, make: bool = True) -> Path:
    """Return the path of the custom bank; with `make` its folder is created.

    The folder that `TUNE_BANK_PATH` names must exist and be readable and writable; it is never
    created. The other folders, `aoe_data` in `ASCEND_CACHE_PATH` and `.ascend_lab/aoe` in the home
    folder, are created. Raises `InputError` naming the variable.
    """
    cache = os.environ.get(CACHE_VARIABLE, "")
    # If a folder that the user names is missing, its name is probably misspelt.
    if root := os.environ.get(ROOT_VARIABLE, ""):
        return _usable(Path(root), ROOT_VARIABLE) / FILE_NAME
    if cache:
        folder = Path(cache) / "aoe_data"
        variable = CACHE_VARIABLE
    else:
        folder = _home() / ".ascend_lab" / "aoe"
        variable = "the home folder"
    if not make:
        return folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        needed = f"a folder for the knowledge bank, from {variable}"
        got = f"{str(folder)!r}: "
        raise InputError(needed, f"{got}{error.strerror}", _SETTING) from None
    return _usable(folder, variable) / FILE_NAME


def open_knowledge(*, resume: bool = True) -> Knowledge:
    """Open the custom bank at the place that the environment names, and the built-in bank.

    If `TUNE_BANK_PATH` cannot be used, `InputError` is raised, as CANN does. If another folder
    cannot be created, the built-in bank is opened alone, with a warning.
    """
    try:
        return Knowledge(bank_file(), resume=resume)
    except InputError as error:
        if os.environ.get(ROOT_VARIABLE) or type(error) is not InputError:
            raise
        knowledge = Knowledge(None, resume=resume)
        knowledge.warnings.append(NOT_STORED.format(error))
        return knowledge


def bank_at(path: str | Path) -> Knowledge:
    """Open a bank for reading: a custom bank, an export of one (.jsonl), or "builtin".

    For keys that the file does not have, the built-in bank is used. Rows and lines that cannot be
    read as entries are skipped with a warning. Raises `InputError` if the file cannot be read.
    """
    if str(path) == "builtin":
        return Knowledge(None)
    if Path(path).suffix == ".jsonl":
        knowledge = Knowledge(None)
        entries, line_errors = records.read_lines(path)
        if line_errors and not entries:
            raise line_errors[0]
        if not entries:
            raise InputError("entries of a bank", f"none in {path}", NO_ENTRIES_REMEDY)
        for entry in entries:
            knowledge.keep(entry)
        if line_errors:
            warning = f"{len(line_errors)} lines of {path} are no entries and are passed over"
            knowledge.warnings.append(warning)
        return knowledge
    return Knowledge(path, write=False)


def repeat_tune(environ: Mapping[str, str]) -> bool:
    """Return the value of `REPEAT_TUNE`, "True" or "False" in any case; False if it is not set."""
    value = environ.get(REPEAT_VARIABLE, "") or "False"
    if value.lower() not in ("true", "false"):
        raise InputError(f"{REPEAT_VARIABLE} as True or False", repr(value), "unset it")
    return value.lower() == "true"


def _usable(folder: Path, variable: str) -> Path:
    """Return the folder if it can be read, written and entered; else raise `InputError`."""
    problem = ""
    try:
        if not folder.is_dir():
            problem = "a file" if folder.exists() else "nothing there"
        elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            problem = "no permission"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        got = f"{str(folder)!r}: {problem}"
        remedy = f"make that folder, change its permissions, or unset {variable}"
        raise InputError(f"{variable} as an existing folder to read, write and enter", got, remedy)
    return folder


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise InputError("a home folder for the knowledge bank", str(error), _SETTING) from None
