"""The near side of the wall: hand a task to a process of its own, take plain data back.

One process a hand-in answers all calls, and is started again behind a call that ended it. It gets
a clean environment, an empty folder, limits on time, memory, files and output, no network where
the system allows that, and another account when this one is root. It is killed with everything it
has started. Windows has no limits but time; macOS none on memory that can be relied on.
"""

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ascend_lab

PACKAGE = Path(ascend_lab.__file__).resolve().parent.parent
INSIDE = Path(__file__).with_name("inside.py")
PR_SET_CHILD_SUBREAPER = 36
STARTS = 4
"""How often a hand-in's process is started again before the rest of its calls is given up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a hand-in may use: seconds of processor time a call, bytes of memory and of text."""

    case_s: float = 10.0
    start_s: float = 20.0
    memory_bytes: int = 768 << 20
    output_bytes: int = 1 << 20
    answer_bytes: int = 2 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the hand-in, by keyword, in plain data.

    `files` are laid, by name, into the folder it runs in.
    """

    function: str
    arguments: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Plain data that came back, or one line that says why none did."""

    value: Any = None
    error: str = ""


@dataclass(slots=True)
class _Talk:
    """What one process has said so far."""

    pending: dict[int, Call]
    limits: Limits
    answers: dict[int, Answer] = field(default_factory=dict)
    at: int = -1
    rest: bytes = b""
    ended: str = ""

    def hear(self, data: bytes) -> None:
        """Take lines of JSON; whatever else comes ends the talk."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > self.limits.answer_bytes or any(
            len(line) > self.limits.answer_bytes for line in lines
        ):
            self.ended = f"answered more than {self.limits.answer_bytes:,} bytes"
            return
        for line in lines:
            try:
                said = json.loads(line, parse_constant=_no_number)
                number = said["at"]
            except (ValueError, RecursionError, KeyError, TypeError):
                self.ended = "sent something that is no answer"
                return
            if number == -1:
                self.ended = str(said.get("error", ""))[:400]
            elif number in self.pending and number not in self.answers and number >= self.at:
                self.at = number
                if "value" in said or "error" in said:
                    error = str(said.get("error", ""))[:400]
                    self.answers[number] = Answer(said.get("value"), error)


def answers_of(
    source: str,
    calls: Sequence[Call],
    limits: Limits = Limits(),
    denied: Sequence[str] = (),
) -> list[Answer]:
    """Run a hand-in's functions behind the wall; return one answer for each call, in order.

    Never raises for what the hand-in does.
    """
    found: dict[int, Answer] = {}
    for _ in range(STARTS):
        pending = {n: call for n, call in enumerate(calls) if n not in found}
        if not pending:
            break
        talk = _talk(source, pending, limits, denied)
        found |= talk.answers
        if talk.at == -1 and talk.ended:  # the file itself does not run: nor will it next time
            return [Answer(error=talk.ended)] * len(calls)
        if talk.at in pending and talk.at not in found:
            found[talk.at] = Answer(error=talk.ended or "ended the process")
    lost = Answer(error=f"not run: the file ended its process {STARTS} times")
    return [found.get(n, lost) for n in range(len(calls))]


def _talk(source: str, pending: dict[int, Call], limits: Limits, denied: Sequence[str]) -> _Talk:
    task = {
        "package": str(PACKAGE), "source": source, "file": "handin.py", "denied": list(denied),
        "case_s": limits.case_s, "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
        "calls": [{"number": n, "function": c.function, "arguments": dict(c.arguments),
                   "files": dict(c.files)} for n, c in pending.items()],
    }  # fmt: skip
    folder = tempfile.mkdtemp(prefix="handin-")
    before = _children()
    _adopt_orphans()
    try:
        with _started(folder) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            talk = _Talk(pending, limits)
            try:
                with contextlib.suppress(OSError):
                    child.stdin.write(json.dumps(task).encode() + b"\n")
                    child.stdin.close()
                _listen(talk, child.stdout)
            finally:
                _end(child, before)
        return talk
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _started(folder: str) -> subprocess.Popen[bytes]:
    """Start the far side, with nothing of this process' environment but the search path."""
    keep = ("PATH", "SYSTEMROOT", "LANG")
    clean = {name: os.environ[name] for name in keep if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-I", "-B", str(INSIDE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=clean | threads | {"HOME": folder, "TMPDIR": folder},
        start_new_session=os.name == "posix",
    )


def _listen(talk: _Talk, pipe: IO[bytes]) -> None:
    """Hear the process until its last answer, its end, or its time is over."""
    os.set_blocking(pipe.fileno(), False)
    told_s, heard, allowed_s = time.monotonic(), (talk.at, 0), talk.limits.start_s
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while not talk.ended and len(talk.answers) < len(talk.pending):
            left_s = told_s + allowed_s - time.monotonic()
            if left_s <= 0:
                talk.ended = f"did not end within {talk.limits.case_s:g} s"
                return
            if not ready.select(min(left_s, 0.5)):
                continue
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return
            talk.hear(data)
            if (talk.at, len(talk.answers)) != heard:
                heard = talk.at, len(talk.answers)
                told_s, allowed_s = time.monotonic(), 2 * talk.limits.case_s


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


# -- the end of a process and of what it started -----------------------------------------------


def _adopt_orphans() -> None:
    """Become the parent of processes whose parent ends (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    """Return the processes of which this one is the parent (Linux; elsewhere none)."""
    found, me = set(), os.getpid()
    for folder in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
            if int(fields[1]) == me:
                found.add(int(folder.name))
    return found


def _end(child: subprocess.Popen[bytes], before: set[int]) -> None:
    """Kill the process, its group, and everything that came to this process through it."""
    if os.name == "posix":
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()
    for _ in range(100):
        new = _children() - before
        if not new:
            return
        for orphan in new:
            with contextlib.suppress(OSError):
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
