"""Reads protobuf's text format, checked against a table of the allowed keys.

    batch_num: 2
    common_config { arq_quantize { channel_wise: true } }

A table maps each key to the type of its value: `str`, `bool`, `int`, `float`, a `Range`, a tuple of
words to choose from, another table, a list with one of these in it (the key may be repeated), or a
text, which is the reason why the key is refused. With the table

    {"batch_num": Range(int, 1, 100), "common_config": {"arq_quantize": {"channel_wise": bool}}}

the text above is {"batch_num": 2, "common_config": {"arq_quantize": {"channel_wise": True}}}.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import Range, number_of, shown, whole_of

Table = Mapping[str, Any]
Message = dict[str, Any]
DEEPEST = 16
"""Greatest depth of messages nested in each other."""
FEW = 8
"""How many keys the error about an unknown key lists."""
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<word>[-+.\w]+)|(?P<mark>[{}<>:;,\[\]])"""
)

# A message is `key { ... }` or `key: { ... }`, also with < and >. A list is a repeated key, or
# `key: [a, b]`. Fields may be separated by commas or semicolons; # starts a comment.
_READERS: Mapping[type, tuple[str, Callable[[str], Any]]] = {
    str: ("a text in quotes", lambda word: None),
    bool: ("true or false", {"true": True, "false": False}.get),
    int: ("a whole number", whole_of),
    float: ("a finite number", number_of),
}
"""Type -> its name in errors, and the reader of a word, which returns None for other words."""


def read_text(text: str, table: Table, where: str) -> Message:
    """Return the values in a text by key; the values of a key that may be repeated are a list.

    Raises `InputError` for a text in another format, a key with a value of another type, and an
    unknown key; `UnsupportedError` for a key that the table refuses. All name the key and the line;
    `where` is the name of the text in messages.
    """
    reader = _Reader(text, where)
    message = reader.message(table, "")
    if reader.token:
        raise reader.error("a key", shown(reader.take()))
    return message


class _Reader:
    """A recursive-descent reader: one method for each construct, with one token of lookahead.

    `token` is the next token, "" at the end. `line` is the line of the token taken last, which
    errors name, and `next_line` that of the next token.
    """

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.line = 1
        self.next_line = 1
        self.depth = 0
        self.tokens = self._split(text)
        self.token = next(self.tokens, "")

    def _split(self, text: str) -> Iterator[str]:
        """Yield the tokens of a text, and count its lines."""
        place = 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                self.line = self.next_line
                raise self.error("protobuf text", shown(text[place]))
            place = match.end()
            if match.lastgroup != "space":
                yield match[0]
            # only space has line breaks: a text in quotes ends on its own line
            self.next_line += match[0].count("\n")

    def error(self, needed: str, got: str, remedy: str = "correct that line") -> InputError:
        return InputError(f"{self.where}: line {self.line}: {needed}", got, remedy)

    def take(self, *choices: str) -> str:
        """Return the token, which must be one of `choices` if there are any, and read the next."""
        token = self.token
        self.line = self.next_line if token else self.line
        if not token or (choices and token not in choices):
            got = shown(token) if token else "the end"
            raise self.error(" or ".join(choices) or "a value", got)
        self.token = next(self.tokens, "")
        return token

    def message(self, table: Table, end: str) -> Message:
        """Return the fields up to the closing mark."""
        fields: Message = {}
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
                fields.setdefault(key, []).extend(values)
            elif key in fields or len(values) != 1:
                raise self.error(f"{key} once", "several")
            else:
                fields[key] = values[0]
            # `a: 1, b: 2` and `a: 1 b: 2` say the same
            if self.token in (",", ";"):
                self.take()
        self.depth -= 1
        return fields

    def unknown(self, key: str, table: Table) -> InputError:
        """Return the error for an unknown key, with a similar known one."""
        similar = difflib.get_close_matches(key, table, 1)
        if similar:
            return self.error("a known key", shown(key), f"did you mean {similar[0]}? correct it")
        examples = difflib.get_close_matches(key, table, FEW, 0.0)
        needed = f"a key such as {', '.join(examples)}"
        return self.error(needed, shown(key), "correct it or drop it")

    def values(self, key: str, kind: Any) -> list[Any]:
        """Return the values after a key: one value, or those of a list in brackets."""
        # a message needs no colon: `crop { ... }`, but `width: 4`
        if self.token == ":":
            self.take()
        elif not isinstance(kind, Mapping):
            raise self.error(f"{key}: a value behind a colon", shown(self.token))
        if self.token != "[":
            return [self.value(key, kind)]
        values: list[Any] = []
        mark = self.take()
        while mark != "]":
            # `key: []` is an empty list, but `key: [1, ]` is refused
            if self.token == "]" and not values:
                self.take()
                break
            values.append(self.value(key, kind))
            mark = self.take(",", "]")
        return values

    def value(self, key: str, kind: Any) -> Any:
        """Return one value of the type `kind`."""
        if isinstance(kind, Mapping):
            end = "}" if self.take("{", "<") == "{" else ">"
            message = self.message(kind, end)
            self.take(end)
            return message
        word = self.take()
        if kind is str and word[0] in "\"'":
            # a backslash makes the next character stand for itself
            return re.sub(r"\\(.)", r"\1", word[1:-1])
        if isinstance(kind, tuple):
            needed = " or ".join(kind)
            decoded = word if word in kind else None
        elif isinstance(kind, Range):
            needed = str(kind)
            number = _READERS[kind.kind][1](word)
            decoded = number if number in kind else None
        else:
            needed, read = _READERS[kind]
            decoded = read(word)
        if decoded is None:
            raise self.error(f"{key}: {needed}", shown(word))
        return decoded
