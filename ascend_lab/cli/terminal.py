"""What the commands print: lines on standard output, complaints on standard error."""

from __future__ import annotations

import os
import sys

from ascend_lab.errors import InputError

TYPE_CHECKING = False
if TYPE_CHECKING:  # the guard needs this module at once
    from collections.abc import Iterable
    from typing import Any

INTERRUPTED = 130


def drop(stream: Any) -> None:
    """Forget what a stream still holds: the interpreter would try to write it at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # no stream of the system
        return


def printable(text: str) -> str:
    """Return text as one line, with escapes for what a terminal would obey instead of showing."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def complain(name: str, text: str, code: int = 0) -> int:
    """Print one line on stderr and return the exit code."""
    if sys.stderr is not None:
        try:
            print(f"{name}: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)
    return code


def say(lines: Iterable[str]) -> None:
    """Print lines on standard output; raise `InputError` if it is closed."""
    if sys.stdout is None:
        raise InputError("a standard output to print on", "a closed one", "leave it open")
    for line in lines:
        print(printable(line))


def show(text: str) -> None:
    """Print a text of lines as `say` does."""
    say(text.split("\n"))
