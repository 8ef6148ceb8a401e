"""Protobuf's text form against a table of keys: the files that calibration tools exchange.

    record { key: "conv1" value { scale_d: 0.5 offset_d: -128 scale_w: [0.1, 0.2] } }

A table maps each key to what it holds: `str`, `bool`, `int`, `float`, a `Range`, a tuple of words
to choose from, a table of its own, a list with one of these in it (the key may be repeated), or a
text: why the key is refused.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import Range, number_of, shown, whole_of

Table = Mapping[str, Any]
Message = dict[str, Any]
DEEPEST, FEW = 16, 8
"""Messages inside each other; keys that a message about an unknown one can list."""
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<word>[-+.\w]+)|(?P<mark>[{}<>:;,\[\]])"""
)

_READERS: Mapping[type, tuple[str, Callable[[str], Any]]] = {
    str: ("a text in quotes", lambda word: None),
    bool: ("true or false", {"true": True, "false": False}.get),
    int: ("a whole number", whole_of),
    float: ("a finite number", number_of),
}
"""What each kind is called, and what reads a word of it; None: it is none."""


def read_text(text: str, table: Table, where: str) -> Message:
    """Return what a text says, by the keys of a table; repeated keys as lists.

    Raises `InputError` for a text that is none or a key with another kind of value, and for an
    unknown key; `UnsupportedError` for a key the table refuses. All name the key and the line.
    """
    reader = _Reader(text, where)
    found = reader.message(table, "")
    if reader.token:
        raise reader.error("a key", shown(reader.take()))
    return found


class _Reader:
    """A text as tokens, one ahead: `line` is that of the one at fault, `ahead` of the next."""

    def __init__(self, text: str, where: str) -> None:
        self.where, self.line, self.ahead, self.depth = where, 1, 1, 0
        self.tokens = self._split(text)
        self.token = next(self.tokens, "")

    def _split(self, text: str) -> Iterator[str]:
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                self.line = self.ahead
                raise self.error("protobuf text", shown(text[place]))
            place = found.end()
            if found.lastgroup != "space":
                yield found[0]
            self.ahead += found[0].count("\n")

    def error(self, needed: str, got: str, remedy: str = "mend that line") -> InputError:
        return InputError(f"{self.where}: line {self.line}: {needed}", got, remedy)

    def take(self, *wanted: str) -> str:
        """Return the token, which must be one of those wanted (any if none is), and step on."""
        found = self.token
        self.line = self.ahead if found else self.line
        if not found or (wanted and found not in wanted):
            raise self.error(" or ".join(wanted) or "a value", shown(found) if found else "the end")
        self.token = next(self.tokens, "")
        return found

    def message(self, table: Table, end: str) -> Message:
        """Return the fields up to the closing mark."""
        found: Message = {}
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(f"at most {DEEPEST} messages inside each other", "more")
        while self.token and self.token != end:
            key = self.take()
            if key not in table:
                raise self.unknown(key, table)
            kind = table[key]
            if isinstance(kind, str):
                raise UnsupportedError(f"{self.where}: line {self.line}: no key {key}", kind)
            values = self.values(key, kind[0] if isinstance(kind, list) else kind)
            if isinstance(kind, list):
                found.setdefault(key, []).extend(values)
            elif key in found or len(values) != 1:
                raise self.error(f"{key} once", "several")
            else:
                found[key] = values[0]
            if self.token in (",", ";"):
                self.take()
        self.depth -= 1
        return found

    def unknown(self, key: str, table: Table) -> InputError:
        near = difflib.get_close_matches(key, table, 1)
        if near:
            return self.error("a known key", shown(key), f"did you mean {near[0]}? correct it")
        some = difflib.get_close_matches(key, table, FEW, 0.0)
        return self.error(f"a key such as {', '.join(some)}", shown(key), "correct it or drop it")

    def values(self, key: str, kind: Any) -> list[Any]:
        """Return what stands behind a key: one value, or those of a list in brackets."""
        if self.token == ":":
            self.take()
        elif not isinstance(kind, Mapping):
            raise self.error(f"{key}: a value behind a colon", shown(self.token))
        if self.token != "[":
            return [self.value(key, kind)]
        found: list[Any] = []
        mark = self.take()
        while mark != "]":
            if self.token == "]" and not found:
                self.take()
                break
            found.append(self.value(key, kind))
            mark = self.take(",", "]")
        return found

    def value(self, key: str, kind: Any) -> Any:
        if isinstance(kind, Mapping):
            end = "}" if self.take("{", "<") == "{" else ">"
            made = self.message(kind, end)
            self.take(end)
            return made
        word = self.take()
        if kind is str and word[0] in "\"'":
            return re.sub(r"\\(.)", r"\1", word[1:-1])
        if isinstance(kind, tuple):
            needed, found = " or ".join(kind), word if word in kind else None
        elif isinstance(kind, Range):
            needed, found = str(kind), _READERS[kind.kind][1](word)
            found = found if found in kind else None
        else:
            needed, read = _READERS[kind]
            found = read(word)
        if found is None:
            raise self.error(f"{key}: {needed}", shown(word))
        return found
