"""What the commands print on standard error, and streams that nobody reads."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the guard needs this module at once
    from typing import Any

INTERRUPTED = 130


def drop(stream: Any) -> None:
    """Forget what a stream still holds: the interpreter would try to write it at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # no stream of the system
        return


def complain(name: str, text: str, code: int = 0) -> int:
    """Print one line on stderr and return the exit code."""
    from ascend_lab.limits import printable

    if sys.stderr is not None:
        try:
            print(f"{name}: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)
    return code


def choice_in(message: str) -> tuple[str, str, str]:
    """Return what argparse's words need, what they got, and the nearest of its choices."""
    from difflib import get_close_matches

    what, _, rest = message.removeprefix("argument ").partition(": invalid choice: ")
    got, _, words = rest.rstrip(")").partition(" (choose from ")
    if not words:
        return message, "", ""
    known = [word.strip("'") for word in words.split(", ")]
    near = "".join(f"did you mean {n}? " for n in get_close_matches(got.strip("'"), known, 1))
    what = what if what.startswith("-") else "a verb"
    return what + f" among {', '.join(known)}" * (len(known) < 8), got, near
