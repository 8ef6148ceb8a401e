"""The knowledge bank: what tuning has found, kept in one file, so that it is found once.

What is known and where it lies: the custom bank of the user first, then the built-in one.

The custom bank lies where `TUNE_BANK_PATH`, else `ASCEND_CACHE_PATH` says, else in the home folder.
What is done with an operator, and counted::

    asked before, `REPEAT_TUNE`   done                            counted in
    hit, no                       use the entry                   `repo_hit_num`
    hit, yes, better found        written to the custom bank      `repo_update_num`
    hit, yes, nothing better      the entry stays                 `repo_reserved_num`
    miss, better than default     written to the custom bank      `repo_add_num`
    miss, nothing better          the default itself is written   `repo_unsatisfied_num`

The published tool writes no record in the last case and searches again next time. Here the entry
says that the default is the best known (`improved` is False, `proven` if that is certain), so that
a second run is a hit.
"""

import gzip
import json
import os
import zlib
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
from ascend_lab.aoe.workers import UNMEASURED
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
FILL = "export a bank that has some: `aoe bank export FILE.jsonl`"
_T = TypeVar("_T")


# -- the bank that comes with the package: a compressed list a line, problems as digests -----------

BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl.gz")
_HEADER = {"format": "ascend_lab built-in knowledge bank", "version": 1}
_KEY = tuple(f.name for f in fields(BankKey) if f.name != "problem")
_ENTRY = tuple(f.name for f in fields(BankEntry) if f.name != "key")


def short(key: BankKey) -> BankKey:
    """Return the key with the digest of its problem in place of the problem."""
    return replace(key, problem=records.digest(key.problem))


def find_builtin(key: BankKey, file: Path = BUILTIN_FILE) -> BankEntry | None:
    """Return the built-in entry of exactly this key, or None; BankError if the file is damaged."""
    entry = builtin_entries(file).get(short(key))
    return replace(entry, key=key) if entry is not None else None


@lru_cache(maxsize=4)
def builtin_entries(file: Path = BUILTIN_FILE) -> Mapping[BankKey, BankEntry]:
    """Return the built-in entries by their short keys (see `short`); none if there is no file."""
    if not file.exists():
        return MappingProxyType({})
    entries = {}
    try:
        lines = gzip.decompress(file.read_bytes()).splitlines()
        if not lines or json.loads(lines[0]) != _HEADER:
            raise ValueError("no header, or one of another version")
        for line in lines[1:]:
            *values, problem = json.loads(line)
            key = BankKey(problem=problem, **dict(zip(_KEY, values, strict=False)))
            # A line is a list without names: [chip, digest, cores, kind, op, schedule, before, ...,
            # problem].
            values_by_name = dict(zip(_ENTRY, values[len(_KEY) :], strict=True))
            entries[key] = BankEntry(key=key, **values_by_name)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, BankError) as error:
        remedy = "install ascend_lab again, or delete that file: it is not needed"
        raise BankError("damaged", f"reading built-in bank {file}", str(error), remedy) from None
    return MappingProxyType(entries)


def write_builtin(entries: Iterable[BankEntry], file: Path = BUILTIN_FILE) -> int:
    """Write the better entry of each key, equal bytes for equal entries; return how many."""
    best: dict[BankKey, BankEntry] = {}
    for entry in entries:
        small = replace(entry, key=short(entry.key))
        best[small.key] = records.better(best.get(small.key, small), small)
    rows = []
    for key, entry in best.items():  # the digest comes last, so that like lines sort together
        values = [*(getattr(key, n) for n in _KEY), *(getattr(entry, n) for n in _ENTRY)]
        rows.append(records.canonical([*values, key.problem]))
    # Sorted, and compressed without a time stamp: equal entries make equal bytes in version
    # control.
    data = ("\n".join([records.canonical(_HEADER), *sorted(rows)]) + "\n").encode("ascii")
    write_whole(file, gzip.compress(data, compresslevel=9, mtime=0))
    builtin_entries.cache_clear()
    return len(best)


# -- both banks -----------------------------------------------------------------------------------
class Knowledge:
    """Both banks, open until `close()` or the end of a `with`.

    A custom bank that cannot be written, is on a full disk or held by another process does not stop
    a tuning run: results stay in memory, in `unsaved`, and `warnings` says why. A file that is no
    bank, damaged, or from a newer version raises `BankError`: that is for the user to decide. Rows
    that are no entries are passed over, and `warnings` says how many. `written` tells what became
    of each entry kept. Trials of an interrupted run are answered only if `resume`.
    """

    def __init__(
        self,
        custom: str | Path | None = None,
        builtin: Path | None = BUILTIN_FILE,
        *,
        write: bool = True,
        resume: bool = True,
    ) -> None:
        """Open the bank file `custom` (made if missing); None keeps results in memory only.

        Without `write` the file is only read, and whatever keeps it from being is an error.
        """
        self.warnings: list[str] = []
        self.unsaved: dict[BankKey, BankEntry] = {}
        self.written: dict[BankKey, Outcome] = {}
        self.resume = resume
        self._builtin = builtin
        self._store: Store | None = None
        if custom is not None:
            opened = self._surviving(lambda: Store(custom)) if write else Store(custom, False)
            self._store = opened
            self.warnings += [opened.passed_over] if opened and opened.skipped else []

    def close(self) -> None:
        """Close the custom bank."""
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, key: BankKey) -> tuple[BankEntry, Origin] | None:
        """Return the entry of this key and `MODEL_VERSION`, and its bank, the custom one first."""
        custom = self._custom(key)
        # Entries of an older model of the chip were proven for other cycle counts: they are no
        # hits.
        if custom is not None and custom.model_version == MODEL_VERSION:
            return custom, "custom"
        builtin = find_builtin(key, self._builtin) if self._builtin else None
        if builtin is not None and builtin.model_version == MODEL_VERSION:
            return builtin, "builtin"
        return None

    def nearest(self, key: BankKey, features: Sequence[float], count: int) -> list[BankEntry]:
        """Return entries of like shapes, to start with; built-in ones have a digest as problem."""
        stored = self._asked(lambda store: store.nearest(key, features, count)) or ()
        custom = {entry.key: entry for entry in stored} | self.unsaved
        # An entry of the custom bank takes the place of the built-in one for the same problem.
        builtin = self._builtin_besides((*custom, key))
        return records.nearest([*custom.values(), *builtin], key, features, count)

    def _builtin_besides(self, keys: Iterable[BankKey]) -> list[BankEntry]:
        """Return the entries of the built-in bank for other problems than those of `keys`."""
        shorts = {short(key) for key in keys}
        builtin = builtin_entries(self._builtin) if self._builtin else {}
        return [entry for key, entry in builtin.items() if key not in shorts]

    def keep(self, entry: BankEntry) -> Written:
        """Write an entry if it is new or better, to memory where the bank cannot be; say which."""
        was_known = self.find(entry.key) is not None
        done = self._asked(lambda store: store.put(entry)) or self._remembered(entry)
        outcome_if_better: Outcome = "add" if entry.improved else "unsatisfied"
        self.written[entry.key] = (
            done if done == "reserved" else "update" if was_known else outcome_if_better
        )
        return done

    def _remembered(self, entry: BankEntry) -> Written:
        """Keep `entry` in memory, in the place of a bank that cannot be written."""
        current = self._custom(entry.key)
        if not entry.better_than(current):
            return "reserved"
        self.unsaved[entry.key] = entry
        return "update" if current else "add"

    def save_trials(self, run_id: str, trials: Iterable[Trial]) -> None:
        """Store the measured trials of a running search, if the bank can be written."""
        # A candidate whose process was killed has no cost: a resumed run must measure it again.
        measured = tuple(t for t in trials if not t.note.startswith(UNMEASURED))
        self._asked(lambda store: store.save_trials(run_id, measured))

    def trials(self, run_id: str) -> tuple[Trial, ...]:
        """Return the trials kept for the search `run_id`, for `--reload`; none without a bank."""
        saved = self._asked(lambda store: store.trials(run_id)) if self.resume else None
        return tuple(t for t in saved or () if not t.note.startswith(UNMEASURED))

    def forget_trials(self, run_id: str) -> None:
        """Delete the trials of a search that is finished."""
        self._asked(lambda store: store.forget_trials(run_id))

    def _custom(self, key: BankKey) -> BankEntry | None:
        """Return the entry of the custom bank, or of the memory that stands in for it."""
        stored = self._asked(lambda store: store.get(key))
        unsaved = self.unsaved.get(key)
        if stored is None or unsaved is None:
            return stored or unsaved
        # The file may have become writable again, or another process may have written to it.
        return unsaved if unsaved.better_than(stored) else stored

    def _asked(self, action: Callable[[Store], _T]) -> _T | None:
        """Return what `action` does on the custom bank, or None where it is out of reach."""
        store = self._store
        return self._surviving(lambda: action(store)) if store else None

    def _surviving(self, action: Callable[[], _T]) -> _T | None:
        """Return what `action` does, or None and a warning if the bank is out of reach."""
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
    """Write what tuning found, if it is worth it, and return how to count the problem.

    It never makes the custom bank worse, nor puts there what the built-in bank already holds.
    """
    current = knowledge.find(tuned.key)
    # A search of 20 trials must not replace the result of one of 2,000.
    if not tuned.better_than(current[0] if current else None):
        return "reserved"
    knowledge.keep(tuned)
    return knowledge.written[tuned.key]


def repo_summary(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """Count outcomes under the field names of the published report, and in `total_num`."""
    seen = list(outcomes)
    counts = {f"repo_{name}_num": seen.count(name) for name in OUTCOMES}
    return {**counts, "total_num": len(seen)}


# -- where the custom bank lies --------------------------------------------------------------------

ROOT_VARIABLE = "TUNE_BANK_PATH"
CACHE_VARIABLE = "ASCEND_CACHE_PATH"
REPEAT_VARIABLE = "REPEAT_TUNE"
_SETTING = f"set {ROOT_VARIABLE} to a folder that may be written"


def bank_file(*, make: bool = True) -> Path:
    """Return the file of the custom bank; its folder exists then, unless nothing is to `make`.

    `TUNE_BANK_PATH` must name a folder that exists and may be read, written and entered; the folder
    `aoe_data` in `ASCEND_CACHE_PATH` and `.ascend_lab/aoe` in the home folder are made. Raises
    `InputError` naming the variable.
    """
    cache = os.environ.get(CACHE_VARIABLE, "")
    # The folder is the user's own: one that is missing is more likely a typing error than a wish.
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
    """Open the banks where the environment says.

    A `TUNE_BANK_PATH` that cannot be used raises `InputError`, as published; any other place that
    cannot be made leaves a warning and the built-in bank.
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
    """Return the bank in a file (of `aoe bank`, or exported as .jsonl), or of "builtin" alone.

    The built-in bank answers what a bank's file does not. What is read stays as it is. Rows and
    lines that are no entries are passed over with a warning. Raises `InputError` for anything else.
    """
    if str(path) == "builtin":
        return Knowledge(None)
    if Path(path).suffix == ".jsonl":
        knowledge = Knowledge(None)
        entries, wrong = records.read_lines(path)
        if not entries:
            raise wrong[0] if wrong else InputError("entries of a bank", f"none in {path}", FILL)
        for entry in entries:
            knowledge.keep(entry)
        passed = f"{len(wrong)} lines of {path} are no entries and are passed over"
        knowledge.warnings += [passed] if wrong else []
        return knowledge
    return Knowledge(path, write=False)


def repeat_tune(environ: Mapping[str, str]) -> bool:
    """Return what `REPEAT_TUNE` says: True or False (the default), in any case."""
    value = environ.get(REPEAT_VARIABLE, "") or "False"
    if value.lower() not in ("true", "false"):
        raise InputError(f"{REPEAT_VARIABLE} as True or False", repr(value), "unset it")
    return value.lower() == "true"


def _usable(folder: Path, variable: str) -> Path:
    """Return the folder if it exists and may be read, written and entered."""
    wrong = ""
    try:
        if not folder.is_dir():
            wrong = "a file" if folder.exists() else "nothing there"
        elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            wrong = "no permission"
    except OSError as error:
        wrong = str(error.strerror)
    if wrong:
        got = f"{str(folder)!r}: {wrong}"
        remedy = f"make that folder, change its permissions, or unset {variable}"
        raise InputError(f"{variable} as an existing folder to read, write and enter", got, remedy)
    return folder


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise InputError("a home folder for the knowledge bank", str(error), _SETTING) from None
