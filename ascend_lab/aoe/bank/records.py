"""What a bank holds: keys that say which problem on which chip, entries that answer them, trials.

An entry is a row of the custom bank, a line of a JSON Lines file, or a line of the built-in bank;
a trial, of a search that is still running, is a row of the custom bank.
"""

import json
import math
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

from ascend_lab import __version__, errors, output
from ascend_lab.aoe.drive import Trial
from ascend_lab.machine.chip import Chip

# -- what can go wrong -----------------------------------------------------------------------------

Reason = Literal[
    "missing", "unwritable", "full", "busy", "not-a-bank", "newer", "damaged", "line", "record"
]
SURVIVABLE: frozenset[Reason] = frozenset({"unwritable", "full", "busy"})
"""Reasons that only keep results from being stored: tuning may go on without the file."""


class BankError(errors.InputError):
    """A knowledge bank, a JSON Lines file of entries, or a record cannot be used."""

    def __init__(self, reason: Reason, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message as every error here does; `reason` is for programs to act on."""
        super().__init__(needed, got, remedy)
        self.reason: Reason = reason


_HELD = "another process holds it: wait for that one or end it"
_KINDS: dict[str, tuple[Reason, str]] = {
    "READONLY": (
        "unwritable",
        "make the file and its folder writable, or point TUNE_BANK_PATH elsewhere",
    ),
    "PERM": ("unwritable", "make the file and its folder readable and writable"),
    "CANTOPEN": (
        "unwritable",
        "it must be a file in a folder that may be read and written, not a folder itself",
    ),
    "FULL": ("full", "free some space, then run again"),
    "IOERR": ("full", "check that the disk is there, works and has space"),
    "BUSY": ("busy", _HELD),
    "LOCKED": ("busy", _HELD),
    "NOTADB": ("not-a-bank", "name another file; this one is left as it is"),
}
_DAMAGED: tuple[Reason, str] = (
    "damaged",
    "it is left as it is; import a JSON Lines export of it into a new bank",
)


@contextmanager
def explained(file: Path, doing: str) -> Iterator[None]:
    """Turn what SQLite or the system says of `file` into a `BankError`; wrong calls pass."""
    action = f"{doing} {file}"
    try:
        yield
    except FileNotFoundError:
        raise BankError("missing", action, "no such file", "check the name") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no system call takes
        got = getattr(error, "strerror", None) or str(error)
        raise BankError("unwritable", action, got, "check the name and the permissions") from None
    except ImportError:  # in some browsers' Python
        remedy = "run 'import sqlite3' in a cell of its own first, which may fetch it"
        raise BankError("unwritable", action, "no sqlite3 in this Python", remedy) from None
    except Exception as error:  # sqlite3.Error, without importing it
        name = getattr(error, "sqlite_errorname", None)
        if name is None:  # not from the library: a closed connection, a wrong thread
            raise
        kind = name.removeprefix("SQLITE_").partition("_")[0]
        reason, remedy = _KINDS.get(kind, _DAMAGED)
        raise BankError(reason, action, " ".join(str(error).split()), remedy) from error


# -- keys and entries ------------------------------------------------------------------------------

Kind = Literal["op", "graph", "profile"]
MODEL_VERSION = 3
"""Raised whenever the simulator's cycle counts change: older entries then are no hits any more."""
LARGEST_LOG2 = 1000
"""Of a feature: no size is near it, and 2 to that power is a number."""
_WORDS_ONLY = frozenset(
    {
        "name",
        "summary",
        "facts",
        "sources",
        "ai_cpu_overhead_s",
        "ai_cpu_rate_bytes_per_s",
        "memory_peak_bytes_per_s",
    }
)
"""Chip fields that say nothing of kernels (`facts` repeats numbers with their sources)."""


def canonical(data: object) -> str:
    """Return plain data as JSON text: keys sorted, no spaces, ASCII; equal data, equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str, size_bytes: int = 16) -> str:
    """Return a hash of `text` as hexadecimal digits (two a byte)."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size_bytes).hexdigest()


def chip_digest(chip: Chip) -> str:
    """Return 16 hexadecimal digits of the numbers of a chip that time its kernels.

    Words, the AI CPU's numbers and the memory's peak rate are left out.
    """
    # Two chip files that differ in a rate or a size answer different questions; in a name, the
    # same.
    numbers = {f.name: _plain(getattr(chip, f.name)) for f in fields(chip)}
    return digest(canonical({k: v for k, v in numbers.items() if k not in _WORDS_ONLY}), 8)


def _plain(value: object) -> Any:
    """Return `value` as JSON data; 1 and 1.0 are the same number."""
    if is_dataclass(value):
        return [_plain(getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True, slots=True)
class BankKey:
    """Which problem: chip, its numbers, cores used, operator or graph, and its full canonical text.

    Two problems are the same exactly when their texts are. `chip_digest` comes from the function of
    that name: who edits a chip file gets no answers that were found for the preset.
    """

    chip: str
    chip_digest: str
    core_count: int
    kind: Kind
    op: str
    problem: str

    def __post_init__(self) -> None:
        """Refuse what could not be stored; BankError."""
        for name in ("chip", "chip_digest", "op", "problem"):
            value = getattr(self, name)
            if not isinstance(value, str) or (name != "problem" and not value.isprintable()):
                raise _wrong("BankKey", name, "printable text", value)
        _integer("BankKey", "core_count", self.core_count, 1)
        if self.kind not in get_args(Kind):
            raise _wrong("BankKey", "kind", '"op", "graph" or "profile"', self.kind)

    @classmethod
    def of(cls, chip: Chip, kind: Kind, op: str, problem: str) -> "BankKey":
        """Return the key of a problem on a chip."""
        return cls(chip.name, chip_digest(chip), chip.core_count, kind, op, problem)

    @property
    def digest(self) -> str:
        """128 bits that stand for the whole key, as 32 hexadecimal digits."""
        return digest(canonical([getattr(self, f.name) for f in fields(self)]))


@dataclass(frozen=True, slots=True)
class BestKnown:
    """The best schedule known for a problem, and what is certain about it.

    `schedule` is plain JSON data (tuples become lists); only the tuner knows what it means.
    `before_cycles` is the default schedule's cost, `after_cycles` this one's; they are equal when
    nothing better than the default was found. No schedule takes fewer than `bound_cycles`.
    `proven`: no point of the searched space is better.
    """

    key: BankKey
    schedule: Any = field(hash=False)
    before_cycles: int
    after_cycles: int
    bound_cycles: int | None
    proven: bool

    def __post_init__(self) -> None:
        """Bring `schedule` to its plain form and check every field; BankError."""
        try:
            plain = json.loads(canonical(self.schedule))
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong("BankEntry", "schedule", "plain JSON data", error) from None
        # (4, 8) as a tuple and [4, 8] as read from JSON are then equal.
        object.__setattr__(self, "schedule", plain)
        for name in ("before_cycles", "after_cycles"):
            _integer("BankEntry", name, getattr(self, name), 0)
        if self.after_cycles > self.before_cycles:
            limit = f"at most before_cycles = {self.before_cycles}: the default is always there"
            raise _wrong("BankEntry", "after_cycles", limit, self.after_cycles)
        if self.bound_cycles is not None:
            _integer("BankEntry", "bound_cycles", self.bound_cycles, 0)
            if self.bound_cycles > self.after_cycles:
                limit = f"at most after_cycles = {self.after_cycles}, which was reached"
                raise _wrong("BankEntry", "bound_cycles", limit, self.bound_cycles)
        if not isinstance(self.proven, bool):
            raise _wrong("BankEntry", "proven", "true or false", self.proven)

    @property
    def gap(self) -> float | None:
        """How far from optimal at most: after_cycles / bound_cycles - 1; None without a bound."""
        return self.after_cycles / self.bound_cycles - 1 if self.bound_cycles else None

    @property
    def improved(self) -> bool:
        """True if the schedule is faster than the default one."""
        return self.after_cycles < self.before_cycles


@dataclass(frozen=True, slots=True)
class BankEntry(BestKnown):
    """What a bank holds for a key: the best schedule known, and how it was found.

    `features` are log2 of the sizes, in the tuner's order; they find the nearest shapes.
    """

    search: str
    seed: int
    trials: int
    tool_version: str = __version__
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    model_version: int = MODEL_VERSION
    features: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check every field, and make `features` floats; BankError."""
        BestKnown.__post_init__(self)
        for name in ("trials", "model_version"):
            _integer("BankEntry", name, getattr(self, name), 0)
        _integer("BankEntry", "seed", self.seed, None)
        for name in ("search", "tool_version", "created"):
            if not isinstance(getattr(self, name), str):
                raise _wrong("BankEntry", name, "text", getattr(self, name))
        object.__setattr__(self, "features", _features(self.features))

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Smaller is better: newer model, fewer cycles, then proven, then the tighter bound."""
        # (-3, 1000, False, -900) is better than (-3, 1000, True, -950): a proof counts more than a
        # bound.
        return (-self.model_version, self.after_cycles, not self.proven, -(self.bound_cycles or 0))

    def better_than(self, other: "BankEntry | None") -> bool:
        """True if this entry should replace `other` (None: there is none)."""
        return other is None or self.rank < other.rank


def better(a: BankEntry, b: BankEntry) -> BankEntry:
    """Return the better of two entries of one key; the same one whatever their order."""
    return min(a, b, key=lambda entry: (entry.rank, to_line(entry)))


def nearest(
    entries: Iterable[BankEntry], key: BankKey, features: Sequence[float], count: int
) -> list[BankEntry]:
    """Return the `count` entries closest to `features`, closest first, `key` itself left out.

    Distance = sum of squared differences of log2 sizes. Among equals, the same chip numbers and
    then the closest number of cores come first. Same kind, operator and chip name only.
    """
    # Vectors of other lengths belong to other ranks of tensors, which have no distance.
    alike = [
        e
        for e in entries
        if (e.key.kind, e.key.op, e.key.chip) == (key.kind, key.op, key.chip)
        and len(e.features) == len(features)
        and e.key != key
    ]

    def distance(entry: BankEntry) -> tuple[float, bool, int, str]:
        # Twice the rows and half the columns are a distance of 1 + 1 = 2 away, whatever the sizes.
        squares = sum((a - b) ** 2 for a, b in zip(entry.features, features, strict=True))
        cores = abs(entry.key.core_count - key.core_count)
        return squares, entry.key.chip_digest != key.chip_digest, cores, entry.key.problem

    return sorted(alike, key=distance)[:count]


def _features(values: object) -> tuple[float, ...]:
    """Return numbers as a tuple of floats."""
    if isinstance(values, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < LARGEST_LOG2
        for v in values
    ):
        return tuple(map(float, values))
    raise _wrong("BankEntry", "features", f"numbers below {LARGEST_LOG2}", values)


def _integer(record: str, name: str, value: object, minimum: int | None) -> None:
    """Refuse anything but an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(record, name, "an integer", value)
    if minimum is not None and not minimum <= value < 2**63:
        raise _wrong(record, name, f"at least {minimum}, and below 2^63", value)


def _wrong(record: str, name: str, needed: str, got: object) -> BankError:
    return BankError("record", f"{record}.{name} must be {needed}", repr(got)[:80])


# -- JSON Lines: one entry a line, to look at, to send and to keep in version control --------------

LONGEST_BYTES = 2**28
"""Of a file of lines: larger ones are refused before they are read."""


def to_line(entry: BankEntry) -> str:
    """Return an entry as one line of JSON Lines, without the line end."""
    data = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name != "key"}
    data["key"] = {f.name: getattr(entry.key, f.name) for f in fields(entry.key)}
    return canonical(data)


def from_line(line: str | bytes) -> BankEntry:
    """Return the entry written by `to_line`; BankError says which field is wrong."""

    def no_constant(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    try:
        data = json.loads(line, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise BankError("record", "one JSON object", str(error)) from None
    # The records check the values themselves; here only the names of the fields are checked.
    key = BankKey(**_checked(_checked(data, BankEntry)["key"], BankKey))
    return BankEntry(**(data | {"key": key}))


def entry_of(digest: object, line: object) -> BankEntry | None:
    """Return the entry in a row; None if the row is damaged, foreign or of a newer version."""
    # `to_line` writes ASCII only: any other character is damage.
    if not isinstance(line, str) or not line.isascii():
        return None
    try:
        found = from_line(line)
    except BankError:
        return None
    return found if found.key.digest == digest else None


def _checked(data: object, record: type) -> dict[str, Any]:
    """Return `data` if it is an object with exactly the fields of `record`."""
    names = {f.name for f in fields(record)}
    if not isinstance(data, dict):
        raise BankError("record", f"a {record.__name__} as a JSON object", repr(data)[:60])
    if set(data) != names:
        wrong = [f"no {name!r}" for name in sorted(names - set(data))]
        wrong += [f"an unknown {name!r}" for name in sorted(set(data) - names)]
        raise BankError("record", f"the fields of a {record.__name__}", ", ".join(wrong))
    return data


def write_lines(file: str | Path, entries: Iterable[BankEntry]) -> None:
    """Write `entries` to a regular file, all of them or none; raises `InputError`."""
    output.write_whole(file, "".join(to_line(e) + "\n" for e in entries), only_files=True)


def read_lines(file: str | Path) -> tuple[list[BankEntry], list[BankError]]:
    """Return the entries of `file`, and an error for each line that is not an entry; BankError."""
    entries = []
    wrong = []
    for number, line in enumerate(read_file(file).split(b"\n"), 1):
        try:
            entries += [from_line(line)] if line.strip() else []
        except BankError as error:
            wrong.append(BankError("line", f"{file} line {number}: {error}"))
    return entries, wrong


def read_file(file: str | Path) -> bytes:
    """Return the bytes of a regular file of at most `LONGEST_BYTES`; BankError."""
    with explained(Path(file), "reading"):
        status = Path(file).stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LONGEST_BYTES:
            got = f"{status.st_size:,}" if stat.S_ISREG(status.st_mode) else "no regular file"
            needed = f"a file of at most {LONGEST_BYTES:,} bytes: {file}"
            raise BankError("unwritable", needed, got, "check the name")
        return Path(file).read_bytes()


# -- trials of running searches, a row each --------------------------------------------------------


def point_text(trial: Trial) -> str:
    """Return the point as JSON; it must be made of numbers, text, None and tuples."""
    # Every comparison with nan is false: sorting trials by cost would no longer mean anything.
    if math.isnan(trial.cost):
        raise BankError("record", "a trial's cost as a number or infinity", "nan")
    try:
        return canonical(trial.point)
    except (TypeError, ValueError) as error:
        raise BankError("record", "a point of plain values", str(error)) from None


def trial_of(number: object, point: object, cost: object, note: object) -> Trial | None:
    """Return the trial in a row, or None if the row is not a trial."""
    if not (isinstance(number, int) and isinstance(point, str) and isinstance(note, str)):
        return None
    if not (isinstance(cost, float) and cost >= 0):
        return None
    with suppress(ValueError, RecursionError):
        values = _tuples(json.loads(point))
        return Trial(number, values, cost, note) if isinstance(values, tuple) else None
    return None


def _tuples(data: Any) -> Any:
    """Return JSON data with every list as a tuple, as in a point."""
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data
