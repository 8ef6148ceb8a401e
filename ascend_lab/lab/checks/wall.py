"""The wall around a check: whatever an answer does behind it, the notebook lives.

On Linux a check as a whole (cases, answer, judge) runs in a copy of this process that prints
through it and sends back one verdict, as text. An answer that does not end, ends Python, crashes
it, eats memory or waits for input ends that copy, with what it started; so does the interrupt key,
at once. What it does to variables stays in the copy; what it writes to files stays in the files.

Elsewhere (Windows has no fork; macOS has one that its own libraries may not survive) the check
runs in this process: an answer that runs on is interrupted between two steps of Python, again and
again, and `os._exit` and `os.abort` are refused. That cannot stop one that sleeps, stays inside one
call of compiled code, eats all memory or crashes Python.

The wall is against mistakes. An answer that wants to be marked right without being right can.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ascend_lab.lab.checks import process
from ascend_lab.lab.checks.process import Run, Verdict

FORKS = sys.platform == "linux"


class _StoppedError(BaseException):
    """Raised by the clock inside an answer that shares this process."""


def behind_wall(run: Run) -> Verdict:
    """Return the verdict of `run`, or how what it told of last ended it."""
    return (process.forked(run) if FORKS else None) or _here(run)


def _here(run: Run) -> Verdict:
    """Run a check in this process under a clock that raises in it; see the top of the module."""
    doing: tuple[int, str] = 0, "the check"
    told_s = time.monotonic()
    over, lock, thread = threading.Event(), threading.Lock(), threading.get_ident()

    def tell(case: int, what: str) -> None:
        nonlocal doing, told_s
        doing, told_s = (case, what), time.monotonic()

    def watch() -> None:
        while not over.wait(min(1.0, process.CASE_S / 4)):
            with lock:
                if not over.is_set() and time.monotonic() > told_s + process.CASE_S:
                    error = ctypes.py_object(_StoppedError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    threading.Thread(target=watch, daemon=True).start()
    try:
        try:
            with _exits_refused():
                return run(tell)
        finally:
            with lock:
                over.set()
    except _StoppedError:
        return False, f"{doing[1]} did not end within {process.CASE_S} s", doing[0]
    except (SystemExit, GeneratorExit) as error:
        return False, f"{doing[1]} raised {type(error).__name__}", doing[0]


@contextmanager
def _exits_refused() -> Iterator[None]:
    def refuse(*_: object) -> NoReturn:
        raise SystemExit("a check does not end Python")

    saved = os._exit, os.abort, builtins.input
    os._exit, os.abort, builtins.input = refuse, refuse, process.no_input  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit, os.abort, builtins.input = saved
