"""Runs the functions of a hand-in in a confined process, and reads back plain data.

One process per hand-in answers all calls, and is started again after a call that ended it. It has a
clean environment, an empty folder, and limits on time, memory, files and output. If this process is
root, it runs as another account. Where Linux grants it, it has no network and can open no files but
Python's and its own (see `confine` and `shelf`). At the end it is killed with all processes that it
has started, and its files are removed. Windows limits only time; limits on memory are unreliable on
macOS.
"""

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ascend_lab.course import confine, leftovers, shelf
from ascend_lab.course.texts import shown
from ascend_lab.errors import InputError

INSIDE = Path(__file__).with_name("inside.py")
PR_SET_CHILD_SUBREAPER = 36
STARTS = 4
"""How often the process of a hand-in is started before its remaining calls are given up."""
PATIENCE_S = 3.0
"""Seconds between messages that the user is still waiting for an answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a hand-in: processor time per call and at the start, memory, output and answer."""

    case_s: float = 10.0
    start_s: float = 20.0
    memory_bytes: int = 768 << 20
    output_bytes: int = 1 << 20
    answer_bytes: int = 2 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the hand-in, with keyword arguments of plain data.

    `files` holds the contents, by name, of files that are written into its working directory.
    """

    function: str
    arguments: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The plain data that a call returned, or one line with the reason why it returned none."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Wall:
    """How hand-ins are confined on this machine: their account, and what they cannot reach."""

    account: int = -1
    """Number of the account they run as; -1 on systems without such numbers."""
    files: bool = False
    """Whether they can open only Python, installed packages and their own folder."""
    network: bool = False
    disk: bool = False
    """Whether their folder is a small disk in memory and all others are read-only."""

    def lines(self) -> list[str]:
        """Return what an instructor should know before hand-ins run, as lines of text."""
        is_grader = os.name == "posix" and self.account == os.getuid()
        if self.account < 0:
            who = "on this system hand-ins run as you, and only time is limited"
        elif is_grader:
            who = "hand-ins run as your account"
        else:
            who = f"you are root: hand-ins run as account {self.account}, which owns nothing"
        open_files = "and open only files of Python, of installed packages, and their own"
        if self.files:
            return [f"{who}, {open_files}"]
        reads = "you can read and change" if is_grader or self.account < 0 else "everybody can read"
        remedy = "" if not (is_grader or self.account < 0) else "; grade in a container"
        return [f"{who}; the wall has a gap here: they reach what {reads}{remedy}"]


class RefusedError(InputError):
    """Hand-ins are not run, as there is no account that they could run as."""


class LostError(Exception):
    """The process of a hand-in cannot be used any more; the text says how it ended."""


class Session:
    """A process that runs one hand-in, and answers each line of JSON with another in limited time.

    `report_wait` is called with a text when an answer takes long: the time so far and the limit.
    """

    def __init__(
        self,
        source: str,
        file: str,
        limits: Limits,
        denied: Sequence[str] = (),
        report_wait: Callable[[str], None] | None = None,
        *,
        lenient: bool = False,
    ) -> None:
        self.limits = limits
        self.report_wait = report_wait
        self.unread = b""
        self.remark = ""
        self.earlier_children = _children()
        self.wall = Wall()
        self.folder = Path(tempfile.mkdtemp(prefix="handin-", dir=_open_folder()))
        _adopt_orphans()
        self.child = _started(self._make_folder())
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self.activity = ""
        self.limit_s = 0.0
        self.since_s = 0.0
        files = shelf.fill(self.folder / "shelf", denied)
        self.task = {
            "source": source,
            "file": file,
            "denied": list(denied),
            "case_s": limits.case_s,
            "start_s": limits.start_s,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "lenient": lenient,
            "path": files.path,
            "moved": files.moved,
            "handles": files.handles,
            "readable": files.readable,
            "listed": files.listed,
        }

    def _make_folder(self) -> str:
        """Make the folder that the hand-in may write to, next to the one it may import from."""
        self.folder.chmod(0o711)
        (self.folder / "shelf").mkdir()
        writable = self.folder / "own"
        writable.mkdir(mode=0o700)
        return str(writable)

    def open(self) -> str:
        """Run the file itself; return "" or its error.

        Raises `LostError` if the process ends, and `RefusedError` if this process is root and
        cannot give it another account.
        """
        self.begin(self.limits.start_s, "the file itself")
        self.send(self.task)
        report = self.hear()
        if "refused" in report or "wall" not in report:
            remedy = "grade from an account that is not root and owns nothing else"
            raise RefusedError("an account for hand-ins", str(report.get("refused")), remedy)
        self.wall = Wall(**report["wall"])
        reply = self.hear()
        self.remark = shown(str(reply.get("remark", "")))
        return shown(str(reply.get("error", "")))

    def rests(self) -> bool:
        """Tell whether the process waits for a new call; it forgets the objects of the last one."""
        try:
            self.begin(1.0, "its end")
            self.send({"begin": True})
            return self.hear() == {"began": True}
        except LostError:
            return False

    def begin(self, limit_s: float, activity: str) -> None:
        """Start the time limit of an activity: twice `limit_s` by the clock, until the next one."""
        self.activity = activity
        self.limit_s = limit_s
        self.since_s = time.monotonic()

    def send(self, line: Mapping[str, Any]) -> None:
        """Send a line; raise `LostError` if the process does not read it in time."""
        assert self.child.stdin is not None
        descriptor = self.child.stdin.fileno()
        data = json.dumps(line).encode() + b"\n"
        with selectors.DefaultSelector() as ready:
            ready.register(descriptor, selectors.EVENT_WRITE)
            while data:
                if time.monotonic() > self.since_s + 2 * self.limit_s:
                    raise LostError(self._late())
                try:
                    data = data[os.write(descriptor, data) :] if ready.select(0.5) else data
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise LostError("ended the process") from error

    def hear(self) -> dict[str, Any]:
        """Return the next line; raise `LostError` if none comes in time or it is not JSON."""
        limit_bytes = self.limits.answer_bytes
        last_report_s = 0.0
        assert self.child.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.child.stdout, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                now_s = time.monotonic()
                if now_s > self.since_s + 2 * self.limit_s:
                    raise LostError(self._late())
                if self.report_wait and now_s - max(self.since_s, last_report_s) > PATIENCE_S:
                    last_report_s = now_s
                    self.report_wait(
                        f"{self.activity}: still waiting after {now_s - self.since_s:.0f} s; "
                        f"it may take {self.limit_s:g} s of processor time"
                    )
                if not ready.select(0.5):
                    continue
                data = os.read(self.child.stdout.fileno(), 1 << 16)
                if not data:
                    # The system ends a process whose processor time is used up.
                    timed_out = time.monotonic() - self.since_s >= self.limit_s
                    raise LostError(self._late() if timed_out else "ended the process")
                self.unread += data
                if len(self.unread) > limit_bytes and b"\n" not in self.unread[:limit_bytes]:
                    raise LostError(f"answered more than {limit_bytes:,} bytes")
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            reply = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise LostError("sent something that is no answer") from error
        if not isinstance(reply, dict):
            raise LostError("sent something that is no answer")
        return reply

    def _late(self) -> str:
        """Return the message of a process that took too long."""
        return f"did not end within {self.limit_s:g} s"

    def close(self) -> None:
        """End the process and all processes that it has started, and remove its files."""
        with contextlib.suppress(OSError), self.child:
            _end(self.child, self.earlier_children)
        leftovers.remove(self.folder)
        if os.name == "posix" and os.getuid() == 0:
            leftovers.sweep(confine.account_of(self.child.pid))


def answers_of(
    source: str,
    calls: Sequence[Call],
    limits: Limits = Limits(),
    denied: Sequence[str] = (),
    file: str = "handin.py",
    report_wait: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Run functions of a hand-in in a confined process; return one answer per call, in order.

    Errors of the hand-in become answers and are never raised.
    """
    answers: list[Answer] = []
    starts = 0
    while len(answers) < len(calls):
        if starts == STARTS:
            lost = Answer(error=f"not run: the file ended its process {STARTS} times")
            return answers + [lost] * (len(calls) - len(answers))
        starts += 1
        session = Session(source, file, limits, denied, report_wait)
        try:
            if wrong := opened(session):  # it would fail again
                return [Answer(error=wrong)] * len(calls)
            for number in range(len(answers), len(calls)):
                session.begin(limits.case_s, f"call {number + 1} of {len(calls)}")
                answers.append(_answer(session, number, calls[number]))
        except LostError as error:
            answers.append(Answer(error=str(error)))
        finally:
            session.close()
    return answers


def standing_wall() -> Wall:
    """Run a file that imports NumPy, and return how hand-ins are confined on this machine.

    Raises `RefusedError` if this process is root and no other account can run Python.
    """
    session = Session("import numpy", "a trial", Limits())
    try:
        wrong = opened(session)
    finally:
        session.close()
    if wrong:
        remedy = "let others read Python and its packages, or grade from another account"
        raise RefusedError("an account that can run hand-ins", wrong, remedy)
    return session.wall


def opened(session: Session) -> str:
    """Run the file of a session; return "" or why it does not run."""
    try:
        return session.open()
    except LostError as error:
        return str(error)


def _answer(session: Session, number: int, call: Call) -> Answer:
    """Send a call to the process and return its answer."""
    session.send(
        {
            "number": number,
            "function": call.function,
            "arguments": dict(call.arguments),
            "files": dict(call.files),
        }
    )
    reply = session.hear()
    if reply.get("at") != number or not {"value", "error"} & set(reply):
        raise LostError("sent something that is no answer")
    return Answer(reply.get("value"), shown(str(reply.get("error", ""))))


def _open_folder() -> str:
    """Return a folder for temporary files that another account can reach.

    If the grader is root, a hand-in runs as another account. In a folder that only root may enter,
    such as a private TMPDIR, it would reach neither its own files nor those that it may import.
    """
    default = tempfile.gettempdir()
    for name in (default, "/tmp", "/var/tmp"):
        folder = Path(name)
        if folder.is_dir() and all(p.stat().st_mode & 0o001 for p in (folder, *folder.parents)):
            return name
    return default


def _started(folder: str) -> subprocess.Popen[bytes]:
    """Start `inside.py` in a folder, with almost nothing of the environment of this process."""
    passed_on = ("PATH", "SYSTEMROOT", "LANG")
    clean = {name: os.environ[name] for name in passed_on if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(INSIDE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=clean | threads | {"HOME": folder, "TMPDIR": folder},
        start_new_session=os.name == "posix",
    )


def _no_number(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's JSON reader would accept."""
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    """Return a number of JSON; raise `ValueError` for 1e999, which Python reads as infinity."""
    number = float(text)
    if not math.isfinite(number):
        _no_number(text)
    return number


# -- ending a process and those that it has started ------------------------------------------------
def _adopt_orphans() -> None:
    """Let this process become the parent of descendants whose parent ends (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    """Return the numbers of the child processes of this one (on Linux; elsewhere none)."""
    children = set()
    parent = os.getpid()
    for folder in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
            # After "number (name)" come the state and the number of the parent.
            if int(fields[1]) == parent:
                children.add(int(folder.name))
    return children


def _end(child: subprocess.Popen[bytes], earlier_children: set[int]) -> None:
    """Kill the process, its group, and its descendants, which this process has adopted."""
    if os.name == "posix":
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()
    for _ in range(100):
        orphans = _children() - earlier_children
        if not orphans:
            return
        for orphan in orphans:
            with contextlib.suppress(OSError):
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
