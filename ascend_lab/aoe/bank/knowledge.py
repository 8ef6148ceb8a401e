"""What is known, from both banks: the custom one of the user first, then the built-in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

from ascend_lab.aoe.bank.builtin import BUILTIN_FILE, builtin_entries, find_builtin, short
from ascend_lab.aoe.bank.errors import SURVIVABLE, BankError
from ascend_lab.aoe.bank.records import MODEL_VERSION, BankEntry, BankKey
from ascend_lab.aoe.bank.store import Store, Written, nearest
from ascend_lab.aoe.trace import Trial
from ascend_lab.aoe.workers import UNMEASURED

Origin = Literal["custom", "builtin"]
Outcome = Literal["hit", "add", "update", "reserved", "unsatisfied"]
OUTCOMES: tuple[Outcome, ...] = ("add", "hit", "reserved", "unsatisfied", "update")
NOT_STORED = "{}; tuning goes on, results are not stored in the bank"
_T = TypeVar("_T")


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
            opened = self._surviving(lambda: Store(custom), None) if write else Store(custom, False)
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
        """Return the entry of exactly this key and the bank it is from, custom first.

        Entries of another `MODEL_VERSION` are none: their cycles mean something else.
        """
        custom = self._custom(key)
        if custom is not None and custom.model_version == MODEL_VERSION:
            return custom, "custom"
        builtin = find_builtin(key, self._builtin) if self._builtin else None
        if builtin is not None and builtin.model_version == MODEL_VERSION:
            return builtin, "builtin"
        return None

    def entries(self) -> list[BankEntry]:
        """Return all entries of this `MODEL_VERSION`, custom ones first, of a key the best one."""
        stored = self._asked(Store.entries, ())
        known = {entry.key: entry for entry in stored}
        for key, entry in sorted(self.unsaved.items(), key=lambda pair: pair[0].digest):
            known[key] = entry if entry.better_than(known.get(key)) else known[key]
        found = [*known.values(), *self._builtin_besides(known)]
        return [entry for entry in found if entry.model_version == MODEL_VERSION]

    def nearest(self, key: BankKey, features: Sequence[float], count: int) -> list[BankEntry]:
        """Return up to `count` entries of like shapes, as suggestions for where to start.

        Those of the built-in bank carry a digest in place of their problem.
        """
        none: list[BankEntry] = []
        near = self._asked(lambda store: store.nearest(key, features, count), none)
        known = {entry.key: entry for entry in near} | self.unsaved
        others = self._builtin_besides((*known, key))
        return nearest([*known.values(), *others], key, features, count)

    def _builtin_besides(self, keys: Iterable[BankKey]) -> list[BankEntry]:
        """Return the entries of the built-in bank for other problems than those of `keys`."""
        shorts = {short(key) for key in keys}
        builtin = builtin_entries(self._builtin) if self._builtin else {}
        return [entry for key, entry in builtin.items() if key not in shorts]

    def keep(self, entry: BankEntry) -> Written:
        """Write `entry` to the custom bank if it is new there or better, and say which.

        If the bank cannot be written the entry stays in `unsaved`, is found there for as long as
        this object lives, and a warning is added.
        """
        known = self.find(entry.key) is not None
        done = self._asked(lambda store: store.put(entry), None) or self._remembered(entry)
        new: Outcome = "add" if entry.improved else "unsatisfied"
        self.written[entry.key] = done if done == "reserved" else "update" if known else new
        return done

    def _remembered(self, entry: BankEntry) -> Written:
        """Keep `entry` in memory, in the place of a bank that cannot be written."""
        old = self._custom(entry.key)
        if not entry.better_than(old):
            return "reserved"
        self.unsaved[entry.key] = entry
        return "update" if old else "add"

    def save_trials(self, run_id: str, trials: Iterable[Trial]) -> None:
        """Keep trials of a running search in the custom bank, if it can be written.

        Those that were not measured, because their worker died, are none.
        """
        kept = tuple(t for t in trials if not t.note.startswith(UNMEASURED))
        self._asked(lambda store: store.save_trials(run_id, kept), None)

    def trials(self, run_id: str) -> tuple[Trial, ...]:
        """Return the trials kept for the search `run_id`, for `--reload`; none without a bank."""
        none: tuple[Trial, ...] = ()
        found = self._asked(lambda store: store.trials(run_id), none) if self.resume else none
        return tuple(t for t in found if not t.note.startswith(UNMEASURED))

    def forget_trials(self, run_id: str) -> None:
        """Delete the trials of a search that is finished."""
        self._asked(lambda store: store.forget_trials(run_id), None)

    def _custom(self, key: BankKey) -> BankEntry | None:
        """Return the entry of the custom bank, or of the memory that stands in for it."""
        stored, unsaved = self._asked(lambda store: store.get(key), None), self.unsaved.get(key)
        if stored is None or unsaved is None:
            return stored or unsaved
        return unsaved if unsaved.better_than(stored) else stored

    def _asked(self, action: Callable[[Store], _T], otherwise: _T) -> _T:
        """Return what `action` does on the custom bank, or `otherwise` where it is out of reach."""
        store = self._store
        return self._surviving(lambda: action(store), otherwise) if store else otherwise

    def _surviving(self, action: Callable[[], _T], otherwise: _T) -> _T:
        """Return what `action` does, or `otherwise` and a warning if the bank is out of reach."""
        try:
            return action()
        except BankError as error:
            if error.reason not in SURVIVABLE:
                raise
            text = NOT_STORED.format(error)
            if text not in self.warnings:
                self.warnings.append(text)
            return otherwise
