"""AscendCL in small: `init` first, `finalize` last, `rt` and `mdl` between."""

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.runtime import mdl, rt
from ascend_lab.runtime.codes import FINALISED, TWICE, UNINITIALISED, AclError, DeadlockError, need
from ascend_lab.runtime.mdl import create_data_buffer, destroy_data_buffer
from ascend_lab.runtime.process import PROCESSES, Device, Process

__all__ = [
    "AclError", "DeadlockError", "create_data_buffer", "destroy_data_buffer", "finalize", "init",
    "mdl", "rt",
]  # fmt: skip
_ENDED: list[Process] = []


def init(*chips: Chip | str, kernels: bool = True) -> None:
    """Begin, with a device per chip (an Ascend310 if none is named).

    Models compute by their kernels, or, without `kernels`, by the graph they were compiled from:
    quicker, and not rounded to the kernels' formats. Raises `AclError` 100002 for a second call.
    """
    need(not PROCESSES, TWICE, "acl.init once", "a second", "call acl.finalize first")
    found = [load_chip(c) if isinstance(c, str) else c for c in chips or ("Ascend310",)]
    _ENDED.clear()
    PROCESSES.append(Process(tuple(Device(i, chip) for i, chip in enumerate(found)), kernels))


def finalize() -> tuple[str, ...]:
    """End, and return what was never given back, a line each; `AclError` 100037 for a second call.

    Streams do what they still have to; those that never can are let go.
    """
    code = FINALISED if _ENDED else UNINITIALISED
    need(bool(PROCESSES), code, "acl.init before acl.finalize", "none", "call each once")
    found = PROCESSES.pop()
    _ENDED.append(found)
    try:
        found.clock.drain()
    except AscendLabError as error:
        return (*found.leaks(), f"streams that stand still: {error}")
    return found.leaks()
