"""Defines the records of a measured row: the work, its time, or why it cannot be read."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import shown, wholes_of

Shape = tuple[int, ...]
L2_STATES = ("cold", "warm", "unknown")
LANGUAGE = "llm"
"""The operator given to rows without one whose attributes name a language model."""
TIMINGS = ("kernel", "wall", "step")
"""What was timed: the task on the device, a call by the host's clock, or a step of a network."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that was timed, as far as a model has to know it.

    `operator` is a name of the operator library, `zoo:NAME`, `all_reduce` or `all_to_all`. `shapes`
    are those of its inputs; a collective has `size_bytes` instead, the bytes of each rank. `dtypes`
    holds one format for all inputs, or one for each. `group` is the source's name for this sort of
    work. `kernels` names the kernels whose times were added up; "" means a single kernel.
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
        """Return how many kernels of a chain change layouts: 3 in TransData*3+Conv2D."""
        # TransData*3+Conv2D means three conversions, then a convolution
        matches = [
            re.fullmatch(r"TransData(?:\*(\d{1,4}))?", kernel) for kernel in self.kernels.split("+")
        ]
        return sum(int(match[1] or 1) for match in matches if match)


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a file: `work` took `measured_s` seconds, or `refused` says why it cannot be read.

    `marks` are remarks for the comparison of model and measurement. `busy` is the share of the time
    that each pipe worked, if the source states it.
    """

    case: str
    group: str
    measured_s: float | None = None
    work: Work | None = None
    marks: tuple[str, ...] = ()
    busy: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""


@contextmanager
def reasons_in(reasons: list[str]) -> Iterator[None]:
    """Add the text of an error to `reasons` instead of raising it.

    One row that cannot be read must not stop the others, whatever it holds. Errors that this
    package does not raise on purpose are reported as bugs of this package.
    """
    try:
        yield
    except AscendLabError as error:
        reasons.append(" ".join(str(error).split()))
    except RecursionError:
        reasons.append("nested too deeply")
    except MemoryError:
        reasons.append("too large for the memory of this machine")
    except Exception as error:  # a bug of this package in one row: report it, go on
        text = " ".join(str(error).split())[:120]
        reasons.append(f"a mistake of ours: {type(error).__name__}: {text}")


def shape_of(text: str, separator: str, where: str) -> Shape:
    """Return the sizes of a shape such as 4x128x64; raise `InputError` naming `where`."""
    sizes = wholes_of(text.lower(), separator)
    if not sizes or min(sizes) < 1:
        example = separator.join(("4096", "1024"))
        raise InputError(f"{where}: a shape such as {example}", shown(text), "correct that row")
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
"""A profiler's name of a pipe -> its name here."""
CORES = {"aic": "AIC.", "aiv": "AIV."}
"""A profiler's prefix for cube or vector cores -> the prefix of a pipe's name here."""


def pipe_of(name: str) -> str:
    """Return our name of a profiler's pipe: "M" of "mac", "AIV.V" of "aiv_vec", "" if unknown."""
    core, _, pipe = name.partition("_")
    if pipe:
        return f"{CORES[core]}{PIPES[pipe]}" if core in CORES and pipe in PIPES else ""
    return PIPES.get(name, "")
