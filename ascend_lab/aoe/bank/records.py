"""What a bank holds: a key that says which problem on which chip, and an entry that answers it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args

from ascend_lab.aoe.bank.errors import BankError
from ascend_lab.chip import Chip

Kind = Literal["op", "graph", "profile"]

MODEL_VERSION = 1
"""Raised whenever the simulator's cycle counts change: older entries then are no hits any more."""

LARGEST_LOG2 = 1000
"""Of a feature: no size is near it, and 2 to that power is a number."""
_WORDS_ONLY = frozenset(("name", "summary", "facts", "sources",
                         "ai_cpu_overhead_s", "ai_cpu_rate_bytes_per_s"))  # fmt: skip
"""Chip fields that say nothing of kernels (`facts` repeats numbers with their sources)."""


def canonical(data: object) -> str:
    """Return plain data as JSON text: keys sorted, no spaces, ASCII; equal data, equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str, size_bytes: int = 16) -> str:
    """Return a hash of `text` as hexadecimal digits (two a byte)."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size_bytes).hexdigest()


def chip_digest(chip: Chip) -> str:
    """Return 16 hexadecimal digits that change with any number of the chip, not with its words."""
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

    `op` is an operator's name ("conv2d") or a graph's. Two problems are the same exactly when their
    texts are. `chip_digest` comes from the function of that name: who edits a chip file gets no
    answers that were found for the preset.
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

    @property
    def digest(self) -> str:
        """128 bits that stand for the whole key, as 32 hexadecimal digits."""
        return digest(canonical([getattr(self, f.name) for f in fields(self)]))


@dataclass(frozen=True, slots=True)
class BankEntry:
    """The best schedule found for a key, and how it was found.

    `schedule` is plain JSON data (tuples become lists); what stands in it is the tuner's affair.
    `before_cycles` is the default schedule's cost, `after_cycles` this one's; they are equal when
    nothing better than the default was found. `proven`: no point of the searched space is better.
    `features` are log2 of the sizes, in the tuner's order; they find the nearest shapes.
    """

    key: BankKey
    schedule: Any = field(hash=False)
    before_cycles: int
    after_cycles: int
    bound_cycles: int | None
    proven: bool
    search: str
    seed: int
    trials: int
    tool_version: str
    created: str
    model_version: int = MODEL_VERSION
    features: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Bring `schedule` and `features` to their plain form and check every field; BankError."""
        try:
            plain = json.loads(canonical(self.schedule))
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong("BankEntry", "schedule", "plain JSON data", error) from None
        object.__setattr__(self, "schedule", plain)
        for name in ("before_cycles", "after_cycles", "trials", "model_version"):
            _integer("BankEntry", name, getattr(self, name), 0)
        if self.after_cycles > self.before_cycles:
            limit = f"at most before_cycles = {self.before_cycles}: the default is always there"
            raise _wrong("BankEntry", "after_cycles", limit, self.after_cycles)
        if self.bound_cycles is not None:
            _integer("BankEntry", "bound_cycles", self.bound_cycles, 0)
            if self.bound_cycles > self.after_cycles:
                limit = f"at most after_cycles = {self.after_cycles}, which was reached"
                raise _wrong("BankEntry", "bound_cycles", limit, self.bound_cycles)
        _integer("BankEntry", "seed", self.seed, None)
        if not isinstance(self.proven, bool):
            raise _wrong("BankEntry", "proven", "true or false", self.proven)
        for name in ("search", "tool_version", "created"):
            if not isinstance(getattr(self, name), str):
                raise _wrong("BankEntry", name, "text", getattr(self, name))
        object.__setattr__(self, "features", _features(self.features))

    @property
    def gap(self) -> float | None:
        """How far from optimal at most: after_cycles / bound_cycles - 1; None without a bound."""
        return self.after_cycles / self.bound_cycles - 1 if self.bound_cycles else None

    @property
    def improved(self) -> bool:
        """True if the schedule is faster than the default one."""
        return self.after_cycles < self.before_cycles

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Smaller is better: newer model, fewer cycles, then proven, then the tighter bound."""
        return (-self.model_version, self.after_cycles, not self.proven, -(self.bound_cycles or 0))

    def better_than(self, other: BankEntry | None) -> bool:
        """True if this entry should replace `other` (None: there is none)."""
        return other is None or self.rank < other.rank


def better(a: BankEntry, b: BankEntry) -> BankEntry:
    """Return the better of two entries of one key; the same one whatever their order."""
    return min(a, b, key=lambda entry: (entry.rank, to_line(entry)))


def to_line(entry: BankEntry) -> str:
    """Return an entry as one line of JSON Lines, without the line end."""
    data = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name != "key"}
    data["key"] = {f.name: getattr(entry.key, f.name) for f in fields(entry.key)}
    return canonical(data)


def from_line(line: str | bytes) -> BankEntry:
    """Return the entry written by `to_line`; BankError says which field is wrong."""
    try:
        data = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BankError("record", "one JSON object", str(error)) from None
    key_data = _checked(data, BankEntry)["key"]
    return BankEntry(**(data | {"key": BankKey(**_checked(key_data, BankKey))}))


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


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _features(values: object) -> tuple[float, ...]:
    """Return numbers as a tuple of floats."""
    good = isinstance(values, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < LARGEST_LOG2
        for v in values
    )
    if not good:
        raise _wrong("BankEntry", "features", f"numbers below {LARGEST_LOG2}", values)
    assert isinstance(values, list | tuple)
    return tuple(float(v) for v in values)


def _integer(record: str, name: str, value: object, least: int | None) -> None:
    """Refuse anything but an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(record, name, "an integer", value)
    if least is not None and not least <= value < 2**63:
        raise _wrong(record, name, f"at least {least}, and below 2^63", value)


def _wrong(record: str, name: str, needed: str, got: object) -> BankError:
    return BankError("record", f"{record}.{name} must be {needed}", repr(got)[:80])
