"""What a measured row is: the work that was timed, how long it took, or why it cannot be read."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import shown, wholes_of

Shape = tuple[int, ...]
L2_STATES = ("cold", "warm", "unknown")
TIMINGS = ("kernel", "wall", "step")
"""What was timed: the task on the device; a call, or a whole step, by a clock outside of it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What was timed, as far as a model has to know it.

    `operator` is a name of the operator library, `zoo:NAME`, `all_reduce` or `all_to_all`; `shapes`
    those of its inputs, or `size_bytes` what each rank of a collective holds. `dtypes` are one for
    all inputs, or one for each. `group` is the kind of work, in the words of who measured it,
    `kernels` the names of those whose times were added up, "" for one.
    """

    operator: str
    chip: str
    shapes: tuple[Shape, ...] = ()
    size_bytes: float | None = None
    dtypes: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    l2: str = "unknown"
    timing: str = "kernel"
    group: str = ""
    kernels: str = ""

    @property
    def conversions(self) -> int:
        """How many of the kernels of a chain change layouts: 3 of TransData*3+Conv2D."""
        counts = [
            re.fullmatch(r"TransData(?:\*(\d{1,4}))?", part) for part in self.kernels.split("+")
        ]
        return sum(int(found[1] or 1) for found in counts if found)


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a file: `work` took `measured_s` seconds; or `refused` says why it cannot be read.

    `marks` say what to keep in mind when model and measurement stand side by side; `busy` is the
    share of the time that each pipe worked, where the source tells it.
    """

    case: str
    group: str
    measured_s: float | None = None
    work: Work | None = None
    marks: tuple[str, ...] = ()
    busy: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""


@contextmanager
def reasons_in(found: list[str]) -> Iterator[None]:
    """Add the reason to `found` instead of raising it; what is no error of ours is named as such.

    One row that nobody can read must not stop the others, whatever it holds.
    """
    try:
        yield
    except AscendLabError as error:
        found.append(" ".join(str(error).split()))
    except RecursionError:
        found.append("nested too deeply")
    except MemoryError:
        found.append("too large for the memory of this machine")
    except Exception as error:  # a mistake of ours in one row: say so, go on
        text = " ".join(str(error).split())[:120]
        found.append(f"a mistake of ours: {type(error).__name__}: {text}")


def shape_of(text: str, separator: str, where: str) -> Shape:
    """Return the sizes of a shape such as 4x128x64; raise `InputError` naming `where`."""
    sizes = wholes_of(text.lower(), separator)
    if not sizes or min(sizes) < 1:
        example = separator.join(("4096", "1024"))
        raise InputError(f"{where}: a shape such as {example}", shown(text), "mend that row")
    return sizes


# -- pipes -----------------------------------------------------------------------------------------
PIPES = {
    "mac": "M",
    "cube": "M",
    "mte1": "MTE1",
    "mte2": "MTE2",
    "mte3": "MTE3",
    "fix": "FIX",
    "fixpipe": "FIX",
    "vec": "V",
    "scalar": "S",
}
"""What profilers call a pipe -> what it is called here."""
CORES = {"aic": "AIC.", "aiv": "AIV."}
"""Kind of core in front of a pipe's name, where a kernel runs on both."""


def pipe_of(name: str) -> str:
    """Return what a pipe such as "mac" or "aiv_vec" is called here, "" for what is none."""
    kind, _, rest = name.partition("_")
    if rest:
        return f"{CORES[kind]}{PIPES[rest]}" if kind in CORES and rest in PIPES else ""
    return PIPES.get(name, "")
