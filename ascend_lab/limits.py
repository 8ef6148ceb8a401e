"""Limits on what users write, and the readers of numbers and files that enforce them.

A file of 10 GB, a list of a million cores or the number 1e999 is refused with a message before any
work begins, instead of filling memory or overflowing later. Numbers in texts are plain ASCII: no
digits of other scripts, no underscores (`int("1_0")` is 10 in Python), no nan, no infinity.
"""

import csv
import gzip
import io
import json
import re
import reprlib
import tomllib
import zlib
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from ascend_lab.errors import AscendLabError, InputError

Number = TypeVar("Number", int, float)

# A gzip of 1 MB can hold 1 GB: the limits on files are those of their unpacked bytes.
FILE_BYTES = 2**28
"""Most bytes of a trace or a problem, also after unpacking: 256 MiB."""
TABLE_BYTES = 2**25
"""Most bytes of a table in CSV: 32 MiB."""
TOML_BYTES = 2**20
"""Most bytes of a TOML file: 1 MiB."""
ARRAY_BYTES = 2**30
"""Most bytes of an archive of arrays, unpacked: 1 GiB."""
# Python's TOML parser recurses once per dot: a.a.a... of 10,000 dots would exhaust its stack.
KEY_DOTS = 32
"""Most dots in one key of a TOML file."""
ITEMS = 64
"""Most items of one list in a TOML file."""
COUNT = 10**6
"""The greatest count on a command line: of cores, trials, seeds, plans."""
ROWS = 2**18
"""Most rows of a table."""
COLUMNS = 64
"""Most columns of a table, or of a recorded space."""
SEEDS = 1000
"""Most random seeds of one command."""
LINKS = 2**17
"""Most links of a topology."""
INSTRUCTIONS = 2**16
"""Most instructions in all programs of one kernel."""
WINDOWS = 2**32
"""Most elements in all windows of one pooling."""
PROCESSES = 32
"""Most processes that a command starts."""
# Above 2^53 a float skips whole numbers: 2^53 + 1 is read as 2^53.
WHOLE = 2**53
"""The greatest whole number in an argument."""
# Their squares and products stay finite as well: 1e30 ** 2 = 1e60, far below 1.8e308.
TINY = 1e-30
"""The least size of a number that is not 0, whatever its unit."""
HUGE = 1e30
"""The greatest size of a number, whatever its unit."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
# at most 18 and 80 digits are read: `int` and `float` of a million digits take long
_NUMBER = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = 60
_SHORT.maxother = 60


def refuse_above(
    quantity: str,
    value: float,
    limit: float,
    remedy: str = "use a smaller one",
    kind: type[AscendLabError] = InputError,
) -> None:
    """Raise an error of class `kind` if a value is above its limit; the message names both."""
    if value > limit:
        raise kind(f"{quantity} of at most {limit:,}", f"{value:,}", remedy)


def shown(value: object) -> str:
    """Return any value as text of at most 80 characters, for messages."""
    try:
        return _SHORT.repr(value)[:80]
    except (ValueError, RecursionError):
        # Python refuses to print an int of more than 4300 digits
        return f"a {type(value).__name__} too long to print"


def labelled(name: str, kind: str, max_length: int) -> str:
    """Return "name (kind)" in at most `max_length` characters; a longer name ends in two dots."""
    name_length = max(8, max_length - len(kind) - 3)
    short_name = name if len(name) <= name_length else f"{name[: name_length - 2]}.."
    text = f"{short_name} ({kind})"
    return text if len(text) <= max_length else f"{text[: max_length - 2]}.."


def choice_in(message: str) -> tuple[str, str, str]:
    """Return from a message of argparse what was needed, what it got, and the nearest choice."""
    # argument --like: invalid choice: 'can' (choose from 'cann')
    argument, _, complaint = message.removeprefix("argument ").partition(": invalid choice: ")
    got, _, words = complaint.rstrip(")").partition(" (choose from ")
    if not words:
        return message, "", ""
    choices = [word.strip("'") for word in words.split(", ")]
    close = get_close_matches(got.strip("'"), choices, 1)
    question = f"did you mean {close[0]}? " if close else ""
    needed = argument if argument.startswith("-") else "a verb"
    # A list of thirty verbs would hide the one that was meant.
    if len(choices) < 8:
        needed += f" among {', '.join(choices)}"
    return needed, got, question


# -- numbers in texts -----------------------------------------------------------------------------
def whole_of(text: str) -> int | None:
    """Return the whole number in a text: 12 for " +12 ", None for "12.0" or "twelve"."""
    plain = text.strip()
    return int(plain) if _WHOLE.fullmatch(plain) else None


def wholes_of(text: str, separator: str) -> tuple[int, ...]:
    """Return the whole numbers that a text lists, or () if a part is not a whole number."""
    numbers = [whole_of(word) for word in text.split(separator)]
    return tuple(n for n in numbers if n is not None) if None not in numbers else ()


def number_of(text: str) -> float | None:
    """Return the number in a text, or None unless it is 0 or of a size from `TINY` to `HUGE`."""
    plain = text.strip()
    value = float(plain) if _NUMBER.fullmatch(plain) else None
    return value if value is not None and (value == 0 or TINY <= abs(value) <= HUGE) else None


def whole(text: str) -> int:
    """Read an argument that must be a whole number; raise ArgumentTypeError otherwise."""
    return _argument(whole_of(text), "a whole number", WHOLE, text)


def count(text: str) -> int:
    """Read an argument that counts something; raise ArgumentTypeError above `COUNT`."""
    return _argument(whole_of(text), "a whole number", COUNT, text)


def decimal(text: str) -> float:
    """Read an argument that must be a number; raise ArgumentTypeError otherwise."""
    needed = f"a number, 0 or from {TINY:g} to {HUGE:g} in size,"
    return _argument(number_of(text), needed, HUGE, text)


def _argument(value: Number | None, needed: str, limit: Number, text: str) -> Number:
    """Return an argument's value; raise the error that argparse reports if `value` is None."""
    if value is None:
        raise ArgumentTypeError(f"{needed} in ASCII digits; got {shown(text)}")
    if abs(value) > limit:
        raise ArgumentTypeError(f"{needed} of at most {limit:,}; got {shown(text)}")
    return value


def json_number(value: object) -> float | None:
    """Return a number of a JSON file as a float; None for other values and for sizes above HUGE."""
    # In Python True is an int; in JSON it is not a number.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= HUGE else None  # type: ignore[arg-type]


# -- files ----------------------------------------------------------------------------------------
def read_file(path: str | Path, what: str, max_bytes: int = FILE_BYTES) -> bytes:
    """Return the bytes of a file, unpacked if it is a gzip; `what` names the file in messages.

    Raises `InputError` for a file that cannot be read or has more than `max_bytes` bytes after
    unpacking. At most `max_bytes` + 1 bytes are ever in memory.
    """
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"  # the first bytes of every gzip
            file.seek(0)
            # One byte more than allowed is read, never the terabyte a small archive may unpack to.
            data = (gzip.GzipFile(fileobj=file) if packed else file).read(max_bytes + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(what, f"{path}: {reason}", "check the path") from None
    if len(data) > max_bytes:
        unpacked = " when unpacked" if packed else ""
        raise InputError(
            f"{what} of at most {max_bytes:,} bytes", f"more in {path}{unpacked}", "cut it"
        )
    return data


def json_of(data: str | bytes, where: str, remedy: str = "check the file") -> Any:
    """Return the decoded JSON of a text; raise `InputError` for other texts.

    NaN and Infinity, which Python's reader accepts and JSON does not have, become None.
    """
    try:
        return json.loads(data, parse_constant=lambda word: None)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: JSON", str(error)[:80], remedy) from None


SEPARATORS = {
    # Spreadsheets of countries that write 1,5 for one and a half separate cells by semicolons.
    ";": ("semicolons", "sed 's/,/./g; s/;/,/g' OLD.csv > NEW.csv"),
    "\t": ("tabs", "tr '\\t' ',' < OLD.csv > NEW.csv"),
}
"""What other programs put between cells, and a command that puts commas there."""


def csv_of(data: bytes, where: str | Path) -> list[tuple[int, list[str]]]:
    """Return (line number, cells) of each row of a CSV file; cells are stripped.

    Rows of empty cells are passed over. Raises `InputError`, also for a header with semicolons or
    tabs between its cells.
    """
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
    except UnicodeDecodeError as error:
        raise InputError("a CSV file in UTF-8", f"{where}: {error}", "check the file") from None
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        got = f"{where} line {reader.line_num}: {error}"
        raise InputError("a CSV file", got, "check the file") from None
    rows = [(line, row) for line, row in rows if any(row)]
    # The header is the first row that is not a comment; without commas it is a single cell.
    header = next((row for _, row in rows if not row[0].startswith("#")), [])
    if len(header) == 1:
        _refuse_separators(header[0], where)
    return rows


def _refuse_separators(header: str, where: str | Path) -> None:
    """Raise `InputError` for a header that is a single cell because no comma separates its words.

    "bytes;ranks;time_s" is refused with the command that makes it "bytes,ranks,time_s".
    """
    for separator, (words, command) in SEPARATORS.items():
        if separator in header:
            needed = f"{where}: a comma between two cells"
            raise InputError(needed, words, f"save the table anew with commas, or {command}")


def toml_of(path: str | Path, what: str, kind: type[AscendLabError]) -> dict[str, Any]:
    """Return the tables of a TOML file; raise an error of class `kind` for other files."""
    try:
        text = read_file(path, what, TOML_BYTES).decode("utf-8")
        # tomllib makes a table for each dot of a key, one inside the other, by recursion: a key of
        # thousands is refused first. Dots inside quotes do not count.
        pieces = re.split(r"[=,\[\]{}#\n]", _QUOTED.sub('""', text))
        refuse_above(f"{path}: dots in a key", max(p.count(".") for p in pieces), KEY_DOTS)
        return tomllib.loads(text)
    except InputError as error:
        raise kind(error.needed, error.got, error.remedy) from None
    except UnicodeDecodeError as error:
        raise kind(what, f"{path}: {error}", "write it in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: valid TOML", str(error)[:200], "correct that line") from None


# -- checking the contents of a file --------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an entry of a file may hold: their type, the least and the greatest."""

    kind: type[int] | type[float]
    low: float
    high: float

    def __contains__(self, value: Any) -> bool:
        """Tell whether a decoded value lies in this range."""
        # sizes below TINY are refused, too: they would underflow in a product
        is_of_kind = json_number(value) is not None
        if self.kind is int:
            is_of_kind = type(value) is int
        return is_of_kind and self.low <= value <= self.high and not 0 < abs(value) < TINY

    def __str__(self) -> str:
        """Return the words of messages: "a whole number from 1 to 64"."""
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}"


def decoded(kind: Any, value: Any, where: str = "", max_items: int = ITEMS) -> Any:
    """Check a decoded value against a schema and return it, lists as tuples.

    The schema `kind` is bool, str, a `Range`, a tuple of words, a list holding the schema of its
    items, or a dict of schemas by key. A list has at most `max_items` items. With the schema

        {"server": {"policy": ("static", "select"), "max_batch": Range(int, 1, 4096)}}

    the text `[server] max_batch = 0` is refused with "[server] max_batch: a whole number from 1 to
    4096; got 0".
    """
    if isinstance(kind, Mapping):
        if not isinstance(value, dict):
            raise InputError(f"{where}: a table", shown(value), "write keys and values")
        if unknown := [key for key in value if key not in kind]:
            close = get_close_matches(unknown[0], kind, 1)
            remedy = f"did you mean {close[0]}?" if close else "drop it"
            needed = f"{where}: keys among {', '.join(kind)}".removeprefix(": ")
            raise InputError(needed, shown(unknown[0]), remedy)
        # "server.toml: [server] queue_limit": tables are in brackets, as in the file
        titles = {key: f"[{key}]" if isinstance(kind[key], Mapping) else key for key in value}
        places = {key: f"{where} {titles[key]}".strip() for key in value}
        return {k: decoded(kind[k], v, places[k], max_items) for k, v in value.items()}
    if isinstance(kind, list):
        if isinstance(value, list) and 0 < len(value) <= max_items:
            return tuple(
                decoded(kind[0], v, f"{where}[{n}]", max_items) for n, v in enumerate(value)
            )
        needed = f"a list of 1 to {max_items}"  # also said of a list that is empty or too long
        is_valid = False
    elif isinstance(kind, Range):
        needed = str(kind)
        is_valid = value in kind
    elif isinstance(kind, tuple):
        needed = f"one of {', '.join(kind)}"
        is_valid = value in kind
    else:
        needed = "true or false" if kind is bool else "a text"
        is_valid = type(value) is kind and (kind is bool or value.isprintable())
    if not is_valid:
        raise InputError(f"{where}: {needed}", shown(value), "correct it")
    return value


@contextmanager
def naming(where: str | Path) -> Iterator[None]:
    """Put a file's name in front of the message of an `InputError` that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error.needed}", error.got, error.remedy) from None
