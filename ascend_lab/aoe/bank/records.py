"""Records of the knowledge bank: keys, entries and trials, and how they are written as text.

A key names a tuning problem: an operator with its shapes on a chip. An entry is the best schedule
known for a key, with its cycles and how it was found. A trial is one candidate of a search that has
not finished, stored so that the search can be resumed.

An entry is stored as a line of JSON; the user's bank and its export contain the same lines.
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
"""With these reasons only storing fails: tuning goes on without the file."""


class BankError(errors.InputError):
    """A knowledge bank, a JSON Lines file of entries, or a record cannot be used."""

    def __init__(self, reason: Reason, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message from needed, got and remedy; a program can act on `reason`."""
        super().__init__(needed, got, remedy)
        self.reason: Reason = reason


_BUSY_REMEDY = "another process holds it: wait for that one or end it"
_REASONS: dict[str, tuple[Reason, str]] = {
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
    "BUSY": ("busy", _BUSY_REMEDY),
    "LOCKED": ("busy", _BUSY_REMEDY),
    "NOTADB": ("not-a-bank", "name another file; this one is left as it is"),
}
"""Reason and remedy by SQLite's error code, whose name begins with SQLITE_: SQLITE_BUSY."""
_DAMAGED: tuple[Reason, str] = (
    "damaged",
    "it is left as it is; import a JSON Lines export of it into a new bank",
)


@contextmanager
def explained(file: Path, doing: str) -> Iterator[None]:
    """Turn errors of SQLite or the operating system about `file` into a `BankError`.

    `doing` says what was tried: "reading". Errors of the program itself are raised unchanged.
    """
    action = f"{doing} {file}"
    try:
        yield
    except FileNotFoundError:
        raise BankError("missing", action, "no such file", "check the name") from None
    except (OSError, ValueError) as error:  # ValueError: a file name with a zero byte, for example
        got = getattr(error, "strerror", None) or str(error)
        raise BankError("unwritable", action, got, "check the name and the permissions") from None
    except ImportError:  # Python in a browser may come without sqlite3
        remedy = "run 'import sqlite3' in a cell of its own first, which may fetch it"
        raise BankError("unwritable", action, "no sqlite3 in this Python", remedy) from None
    except Exception as error:  # sqlite3.Error, without importing it
        name = getattr(error, "sqlite_errorname", None)
        if name is None:  # an error of the program: a closed connection, a wrong thread
            raise
        # SQLITE_IOERR_WRITE is a special case of SQLITE_IOERR
        kind = name.removeprefix("SQLITE_").partition("_")[0]
        reason, remedy = _REASONS.get(kind, _DAMAGED)
        raise BankError(reason, action, " ".join(str(error).split()), remedy) from error


# -- keys and entries ------------------------------------------------------------------------------

Kind = Literal["op", "graph", "profile"]
MODEL_VERSION = 3
"""Increased whenever the simulator's cycle counts change: older entries then no longer match."""
MAX_LOG2 = 1000
"""Largest feature: no tensor is near 2^1000 entries, and 2^1000 is still a finite float."""
_FIELDS_WITHOUT_EFFECT = frozenset(
    {
        "name",
        "family",
        "summary",
        "facts",
        "sources",
        "ai_cpu_overhead_s",
        "ai_cpu_rate_bytes_per_s",
        "memory_peak_bytes_per_s",
    }
)
"""Chip fields that do not change a kernel's cycles (`facts` repeats numbers with their sources)."""


def canonical(data: object) -> str:
    """Return data as JSON text, keys sorted and no spaces, so that equal data give equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str, size_bytes: int = 16) -> str:
    """Return a hash of `text` as hexadecimal digits, two for each of `size_bytes` bytes."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size_bytes).hexdigest()


def chip_digest(chip: Chip) -> str:
    """Return a hash, 16 hexadecimal digits, of those numbers of a chip that decide kernel times.

    The name, the sources, the numbers of the AI CPU and the memory's peak rate are left out.
    """
    # A user who edits a rate in a chip file must not get the schedules found for the preset.
    numbers = {
        f.name: _plain(getattr(chip, f.name))
        for f in fields(chip)
        if f.name not in _FIELDS_WITHOUT_EFFECT
    }
    return digest(canonical(numbers), 8)


def _plain(value: object) -> Any:
    """Return `value` as JSON data, integers as floats: 1 and 1.0 give the same text."""
    if is_dataclass(value):
        return [_plain(getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True, slots=True)
class BankKey:
    """A tuning problem: what is tuned (an operator, a graph or a training profile), on which chip.

    `problem` is the full text of the problem, such as an operator with its shapes: two problems are
    equal exactly if their texts are. `chip_digest` is a hash of the chip's numbers, see the
    function of that name.
    """

    chip: str
    chip_digest: str
    core_count: int
    kind: Kind
    op: str
    problem: str

    def __post_init__(self) -> None:
        """Raise `BankError` for a field that could not be stored."""
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
    """The best schedule known for a problem, with its cycles and a lower bound.

    `schedule` is JSON data (tuples become lists) that the bank does not interpret. `before_cycles`
    are those of the default schedule, `after_cycles` those of this one; they are equal if nothing
    better was found. No schedule takes fewer than `bound_cycles`. `proven` says that no point of
    the searched space is better.
    """

    key: BankKey
    schedule: Any = field(hash=False)
    before_cycles: int
    after_cycles: int
    bound_cycles: int | None
    proven: bool

    def __post_init__(self) -> None:
        """Turn `schedule` into JSON data and check every field; raises `BankError`."""
        try:
            plain = json.loads(canonical(self.schedule))
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong("BankEntry", "schedule", "plain JSON data", error) from None
        # JSON has no tuples: (4, 8) becomes [4, 8] here, as it will be when it is read back.
        object.__setattr__(self, "schedule", plain)
        for name in ("before_cycles", "after_cycles"):
            _integer("BankEntry", name, getattr(self, name), 0)
        if self.after_cycles > self.before_cycles:
            limit = f"at most before_cycles = {self.before_cycles}, those of the default"
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
        """How far above the bound, after_cycles / bound_cycles - 1; None without a bound."""
        return self.after_cycles / self.bound_cycles - 1 if self.bound_cycles else None

    @property
    def improved(self) -> bool:
        """True if the schedule is faster than the default one."""
        return self.after_cycles < self.before_cycles


@dataclass(frozen=True, slots=True)
class BankEntry(BestKnown):
    """An entry of the bank: the best schedule known for a key, and how it was found.

    `features` are the base-2 logarithms of the tensor sizes, in an order that the tuner chooses;
    entries of similar shapes are found by their distance (see `nearest`).
    """

    search: str
    seed: int
    trials: int
    tool_version: str = __version__
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    model_version: int = MODEL_VERSION
    features: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check every field, and turn `features` into floats; raises `BankError`."""
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
        """A tuple that is smaller for a better entry.

        A newer model counts first, then fewer cycles, then a proof, then the higher lower bound.
        """
        # Proven with bound 900: (-3, 1000, False, -900). It is smaller than (-3, 1000, True, -950),
        # not proven with bound 950.
        return (-self.model_version, self.after_cycles, not self.proven, -(self.bound_cycles or 0))

    def better_than(self, other: "BankEntry | None") -> bool:
        """Tell whether this entry should replace `other`, which is None if there is no other."""
        return other is None or self.rank < other.rank


def better(a: BankEntry, b: BankEntry) -> BankEntry:
    """Return the better of two entries of one key; the result does not depend on their order."""
    return min(a, b, key=lambda entry: (entry.rank, to_line(entry)))


def nearest(
    entries: Iterable[BankEntry], key: BankKey, features: Sequence[float], count: int
) -> list[BankEntry]:
    """Return the `count` entries of the same `kind`, operator and chip closest to `features`.

    The distance is the sum of squared differences of the features. Among equally distant entries
    those for the same numbers of the chip come first, then those for the closest number of cores.
    The entry of `key` itself is left out.
    """
    # Feature vectors of another length belong to tensors of another rank: no distance is defined.
    comparable = [
        e
        for e in entries
        if (e.key.kind, e.key.op, e.key.chip) == (key.kind, key.op, key.chip)
        and len(e.features) == len(features)
        and e.key != key
    ]

    def distance(entry: BankEntry) -> tuple[float, bool, int, str]:
        # Twice the rows and half the columns are a distance of 1 + 1 = 2 away, whatever the sizes.
        squares = sum((a - b) ** 2 for a, b in zip(entry.features, features, strict=True))
        is_other_chip = entry.key.chip_digest != key.chip_digest
        core_difference = abs(entry.key.core_count - key.core_count)
        return squares, is_other_chip, core_difference, entry.key.problem

    return sorted(comparable, key=distance)[:count]


def _features(values: object) -> tuple[float, ...]:
    """Return a list of numbers as a tuple of floats; raise `BankError` for anything else."""
    if isinstance(values, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < MAX_LOG2 for v in values
    ):
        return tuple(map(float, values))
    raise _wrong("BankEntry", "features", f"numbers below {MAX_LOG2}", values)


def _integer(record: str, name: str, value: object, minimum: int | None) -> None:
    """Raise `BankError` unless `value` is an integer of at least `minimum` (None: any integer)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(record, name, "an integer", value)
    if minimum is not None and not minimum <= value < 2**63:
        raise _wrong(record, name, f"at least {minimum}, and below 2^63", value)


def _wrong(record: str, name: str, needed: str, got: object) -> BankError:
    return BankError("record", f"{record}.{name} must be {needed}", repr(got)[:80])


# -- JSON Lines: one entry per line, to read, to send and to keep in version control ---------------

MAX_LINES_FILE_BYTES = 2**28
"""Larger files of entries are refused before they are read."""


def to_line(entry: BankEntry) -> str:
    """Return an entry as one line of JSON Lines, without the line end."""
    data = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name != "key"}
    data["key"] = {f.name: getattr(entry.key, f.name) for f in fields(entry.key)}
    return canonical(data)


def from_line(line: str | bytes) -> BankEntry:
    """Return the entry written by `to_line`; raise `BankError` naming the field that is wrong."""

    def refuse_constant(word: str) -> None:
        # Python's parser also takes NaN and Infinity, which JSON does not have
        raise ValueError(f"{word} is no JSON number")

    try:
        data = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BankError("record", "one JSON object", str(error)) from None
    # The constructors check the values; the names of the fields are checked here.
    entry_fields = _with_fields_of(BankEntry, data)
    key_fields = _with_fields_of(BankKey, entry_fields["key"])
    return BankEntry(**(entry_fields | {"key": BankKey(**key_fields)}))


def entry_of(digest: object, line: object) -> BankEntry | None:
    """Return the entry in a row of the database, or None if the row cannot be read as an entry.

    That is so if it is damaged, or was written by a newer version with other fields.
    """
    # `to_line` writes ASCII only: any other character is damage.
    if not isinstance(line, str) or not line.isascii():
        return None
    try:
        entry = from_line(line)
    except BankError:
        return None
    return entry if entry.key.digest == digest else None


def _with_fields_of(record: type, data: object) -> dict[str, Any]:
    """Return `data` if it is a dict with exactly the fields of `record`; else raise `BankError`."""
    names = {f.name for f in fields(record)}
    if not isinstance(data, dict):
        raise BankError("record", f"a {record.__name__} as a JSON object", repr(data)[:60])
    if set(data) != names:
        problems = [f"no {name!r}" for name in sorted(names - set(data))]
        problems += [f"an unknown {name!r}" for name in sorted(set(data) - names)]
        raise BankError("record", f"the fields of a {record.__name__}", ", ".join(problems))
    return data


def write_lines(file: str | Path, entries: Iterable[BankEntry]) -> None:
    """Write all `entries` to a regular file, or leave it unchanged and raise `InputError`."""
    output.write_whole(file, "".join(to_line(e) + "\n" for e in entries), only_files=True)


def read_lines(file: str | Path) -> tuple[list[BankEntry], list[BankError]]:
    """Return the entries of `file`, and an error for each line that is not an entry.

    Raises `BankError` if the file cannot be read.
    """
    entries = []
    line_errors = []
    for number, line in enumerate(read_file(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entries.append(from_line(line))
        except BankError as error:
            line_errors.append(BankError("line", f"{file} line {number}: {error}"))
    return entries, line_errors


def read_file(file: str | Path) -> bytes:
    """Return the bytes of a regular file of at most `MAX_LINES_FILE_BYTES`; raises `BankError`."""
    with explained(Path(file), "reading"):
        status = Path(file).stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_LINES_FILE_BYTES:
            got = f"{status.st_size:,}" if stat.S_ISREG(status.st_mode) else "no regular file"
            needed = f"a file of at most {MAX_LINES_FILE_BYTES:,} bytes: {file}"
            raise BankError("unwritable", needed, got, "check the name")
        return Path(file).read_bytes()


# -- trials of running searches, one row per trial -------------------------------------------------


def point_text(trial: Trial) -> str:
    """Return a trial's point as JSON; it must consist of numbers, text, None and tuples."""
    # Comparisons with nan are false, so that trials could no longer be sorted by cost.
    if math.isnan(trial.cost):
        raise BankError("record", "a trial's cost as a number or infinity", "nan")
    try:
        return canonical(trial.point)
    except (TypeError, ValueError) as error:
        raise BankError("record", "a point of plain values", str(error)) from None


def trial_of(number: object, point: object, cost: object, note: object) -> Trial | None:
    """Return the trial in a row of the database, or None if the row is not a trial."""
    if not (isinstance(number, int) and isinstance(point, str) and isinstance(note, str)):
        return None
    if not (isinstance(cost, float) and cost >= 0):
        return None
    with suppress(ValueError, RecursionError):
        values = _tuples(json.loads(point))
        return Trial(number, values, cost, note) if isinstance(values, tuple) else None
    return None


def _tuples(data: Any) -> Any:
    """Return JSON data with tuples in place of lists, as points have them."""
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data
