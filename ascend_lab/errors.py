"""The errors of this package: every message says what was needed, what was there, and a remedy.

    needed  "a chip among 910A, 910B"
    got     "'910C'"
    remedy  "did you mean 910B?"

    a chip among 910A, 910B; got '910C'; did you mean 910B?

Commands print these messages on standard error with `complain`.
"""

import os
import sys

# Importing `typing` takes time, and the commands should handle Ctrl-C from the first moment.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class AscendLabError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message from `needed`, `got` and `remedy`; empty parts are left out."""
        self.needed = needed
        self.got = got
        self.remedy = remedy
        parts = [needed]
        if got:
            parts.append(f"got {got}")
        if remedy:
            parts.append(remedy)
        super().__init__("; ".join(parts))


class ChipError(AscendLabError):
    """A chip file or chip name is wrong."""


class ProgramError(AscendLabError):
    """An instruction, region, loop or program is malformed."""


class PathError(ProgramError):
    """The chip has no data path, compute unit or number format that an instruction needs."""


class CapacityError(ProgramError):
    """Something does not fit: a buffer, a repeat count, an event id."""


class AlignmentError(ProgramError):
    """An on-chip address or length is not a multiple of the buffer's block."""


class SyncError(ProgramError):
    """Flags are used so that pipes wait forever or synchronise nothing."""


class SimulationError(AscendLabError):
    """A program cannot be executed or timed as asked."""


class NotComposableError(SimulationError):
    """The program has waits before their sets or unbalanced loops; use the reference."""


class MachineError(AscendLabError):
    """A small teaching machine was asked for something it cannot do."""


class InputError(AscendLabError):
    """A user's file, number or command-line argument cannot be used."""


class ShapeError(AscendLabError):
    """Shapes do not fit together, or an axis does not exist."""


class TypeMismatchError(AscendLabError):
    """An operation does not accept a number format, or two formats differ that must be equal."""


class ScheduleError(AscendLabError):
    """A schedule step that the stage, its axes or the chip do not allow."""


class LayoutError(AscendLabError):
    """A layout, an index into it, or a conversion between two layouts is wrong."""


class GraphError(AscendLabError):
    """A graph is malformed: a name, a type, an edge or a node that does not fit."""


class UnsupportedError(AscendLabError):
    """A model uses an operator, a format or a feature that is not supported here."""


class ClusterError(AscendLabError):
    """A topology, a collective or a parallel plan contradicts itself or cannot be built."""


# -- printing on standard error --------------------------------------------------------------------
# 128 + 2 (SIGINT), as shells report a program that Ctrl-C has ended
INTERRUPTED = 130


def printable(text: str) -> str:
    """Return text with escapes for characters that a terminal would obey instead of showing.

    A file name may hold the sequence that clears the screen: it is printed as `\\x1b[2J`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def drop(stream: "Any") -> None:
    """Redirect a broken stream to nowhere: the interpreter would flush it at its end and fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # not a stream of the operating system
        return


def complain(name: str, text: str, code: int = 0) -> int:
    """Print one line on stderr and return the exit code."""
    if sys.stderr is not None:
        try:
            print(f"{name}: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)
    return code
