"""The near side of the wall: hand a task to a process of its own, take plain data back.

One process a hand-in answers all calls, and is started again behind a call that ended it. It gets
a clean environment, an empty folder, limits on time, memory, files and output; another account
when this one is root; and, where Linux grants them, no network and no file but Python's and its own
(see `confine` and `shelf`). It is killed with everything it has started, and what it left on disk
is removed. Windows has no limits but time; macOS none on memory that can be relied on.
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
"""How often a hand-in's process is started again before the rest of its calls is given up."""
PATIENCE_S = 3.0
"""After how many seconds of waiting that is said."""


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


@dataclass(frozen=True, slots=True)
class Wall:
    """What stands between hand-ins and this machine: their account, and what is closed to them."""

    account: int = -1
    """Number of the account they run as; -1 where the system does not say."""
    files: bool = False
    """Whether they can open nothing but Python, what is installed, and their own folder."""
    network: bool = False
    disk: bool = False
    """Whether their folder is a small disk in memory and all else is read-only."""

    def lines(self) -> list[str]:
        """Return what an instructor should know before hand-ins run."""
        own = os.name == "posix" and self.account == os.getuid()
        if self.account < 0:
            who = "on this system hand-ins run as you, and only time is limited"
        elif own:
            who = "hand-ins run as your account"
        else:
            who = f"you are root: hand-ins run as account {self.account}, which owns nothing"
        open_files = "and open only files of Python, of installed packages, and their own"
        if self.files:
            return [f"{who}, {open_files}"]
        reads = "you can read and change" if own or self.account < 0 else "everybody can read"
        remedy = "" if not (own or self.account < 0) else "; grade in a container"
        return [f"{who}; the wall has a gap here: they reach what {reads}{remedy}"]


class RefusedError(InputError):
    """Nothing is run here: there is no account that hand-ins could run as."""


class LostError(Exception):
    """A hand-in's process that is of no more use; the text says how it ended."""


class Session:
    """A process that runs one hand-in: a line of JSON there, a line back, within a time.

    `told` hears, when an answer takes long, for how long it has been waited and what the limit is.
    """

    def __init__(
        self,
        source: str,
        file: str,
        limits: Limits,
        denied: Sequence[str] = (),
        told: Callable[[str], None] | None = None,
        *,
        lenient: bool = False,
    ) -> None:
        self.limits = limits
        self.told = told
        self.rest = b""
        self.remark = ""
        self.before = _children()
        self.wall = Wall()
        self.folder = Path(tempfile.mkdtemp(prefix="handin-", dir=_open_folder()))
        _adopt_orphans()
        self.child = _started(self._own_folder())
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self.what = ""
        self.most_s = 0.0
        self.since_s = 0.0
        laid = shelf.laid(self.folder / "shelf", denied)
        self.task = {
            "source": source,
            "file": file,
            "denied": list(denied),
            "case_s": limits.case_s,
            "start_s": limits.start_s,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "lenient": lenient,
            "path": laid.path,
            "moved": laid.moved,
            "handles": laid.handles,
            "readable": laid.readable,
            "listed": laid.listed,
        }

    def _own_folder(self) -> str:
        """Make what the hand-in may write to; beside it lies what it may import."""
        self.folder.chmod(0o711)
        (self.folder / "shelf").mkdir()
        own = self.folder / "own"
        own.mkdir(mode=0o700)
        return str(own)

    def open(self) -> str:
        """Run the file itself; return "" or why it does not run.

        Raises `LostError`; `RefusedError` where this is root and cannot give it another account.
        """
        self.begin(self.limits.start_s, "the file itself")
        self.send(self.task)
        built = self.hear()
        if "refused" in built or "wall" not in built:
            remedy = "grade from an account that is not root and owns nothing else"
            raise RefusedError("an account for hand-ins", str(built.get("refused")), remedy)
        self.wall = Wall(**built["wall"])
        said = self.hear()
        self.remark = shown(str(said.get("remark", "")))
        return shown(str(said.get("error", "")))

    def rests(self) -> bool:
        """Whether all that was asked has been answered; the far side forgets what it was handed."""
        try:
            self.begin(1.0, "its end")
            self.send({"begin": True})
            return self.hear() == {"began": True}
        except LostError:
            return False

    def begin(self, most_s: float, what: str) -> None:
        """Let the time run: until the next `begin`, by the clock, twice what a processor may."""
        self.what = what
        self.most_s = most_s
        self.since_s = time.monotonic()

    def send(self, line: Mapping[str, Any]) -> None:
        """Send a line; raise `LostError` where nobody reads it in time."""
        assert self.child.stdin is not None
        end = self.child.stdin.fileno()
        data = json.dumps(line).encode() + b"\n"
        with selectors.DefaultSelector() as ready:
            ready.register(end, selectors.EVENT_WRITE)
            while data:
                if time.monotonic() > self.since_s + 2 * self.most_s:
                    raise LostError(self._late())
                try:
                    data = data[os.write(end, data) :] if ready.select(0.5) else data
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise LostError("ended the process") from error

    def hear(self) -> dict[str, Any]:
        """Return the next line; raise `LostError` where none comes, or something else."""
        most = self.limits.answer_bytes
        said_s = 0.0
        assert self.child.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.child.stdout, selectors.EVENT_READ)
            while b"\n" not in self.rest:
                now_s = time.monotonic()
                if now_s > self.since_s + 2 * self.most_s:
                    raise LostError(self._late())
                if self.told and now_s - max(self.since_s, said_s) > PATIENCE_S:
                    said_s = now_s
                    self.told(
                        f"{self.what}: still waiting after {now_s - self.since_s:.0f} s; "
                        f"it may take {self.most_s:g} s of processor time"
                    )
                if not ready.select(0.5):
                    continue
                data = os.read(self.child.stdout.fileno(), 1 << 16)
                if not data:
                    spent = time.monotonic() - self.since_s >= self.most_s
                    raise LostError(self._late() if spent else "ended the process")
                self.rest += data
                if len(self.rest) > most and b"\n" not in self.rest[:most]:
                    raise LostError(f"answered more than {most:,} bytes")
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            said = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise LostError("sent something that is no answer") from error
        if not isinstance(said, dict):
            raise LostError("sent something that is no answer")
        return said

    def _late(self) -> str:
        return f"did not end within {self.most_s:g} s"

    def close(self) -> None:
        """End the process and all that it has started."""
        with contextlib.suppress(OSError), self.child:
            _end(self.child, self.before)
        leftovers.remove(self.folder)
        if os.name == "posix" and os.getuid() == 0:
            leftovers.sweep(confine.account_of(self.child.pid))


def answers_of(
    source: str,
    calls: Sequence[Call],
    limits: Limits = Limits(),
    denied: Sequence[str] = (),
    file: str = "handin.py",
    told: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Run a hand-in's functions behind the wall; return one answer for each call, in order.

    Never raises for what the hand-in does.
    """
    found: list[Answer] = []
    starts = 0
    while len(found) < len(calls):
        if starts == STARTS:
            lost = Answer(error=f"not run: the file ended its process {STARTS} times")
            return found + [lost] * (len(calls) - len(found))
        starts += 1
        session = Session(source, file, limits, denied, told)
        try:
            if wrong := opened(session):  # nor will it run next time
                return [Answer(error=wrong)] * len(calls)
            for number in range(len(found), len(calls)):
                session.begin(limits.case_s, f"call {number + 1} of {len(calls)}")
                found.append(_answer(session, number, calls[number]))
        except LostError as error:
            found.append(Answer(error=str(error)))
        finally:
            session.close()
    return found


def standing_wall() -> Wall:
    """Try the wall with a file that imports NumPy; return what stands of it here.

    Raises `RefusedError` where this is root and no other account can run Python.
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
    """Run the file; return "" or why it does not run."""
    try:
        return session.open()
    except LostError as error:
        return str(error)


def _answer(session: Session, number: int, call: Call) -> Answer:
    session.send(
        {
            "number": number,
            "function": call.function,
            "arguments": dict(call.arguments),
            "files": dict(call.files),
        }
    )
    said = session.hear()
    if said.get("at") != number or not {"value", "error"} & set(said):
        raise LostError("sent something that is no answer")
    return Answer(said.get("value"), shown(str(said.get("error", ""))))


def _open_folder() -> str:
    """Return a folder for temporary files that another account can reach.

    A hand-in of root's runs as an account of its own: below a folder that only root may enter, a
    private TMPDIR say, it would find neither its own files nor what it may import.
    """
    usual = tempfile.gettempdir()
    for name in (usual, "/tmp", "/var/tmp"):
        folder = Path(name)
        if folder.is_dir() and all(p.stat().st_mode & 0o001 for p in (folder, *folder.parents)):
            return name
    return usual


def _started(folder: str) -> subprocess.Popen[bytes]:
    """Start the far side, with nothing of this process' environment but the search path."""
    keep = ("PATH", "SYSTEMROOT", "LANG")
    clean = {name: os.environ[name] for name in keep if name in os.environ}
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
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _no_number(text)
    return number


# -- the end of a process and of what it started -----------------------------------------------
def _adopt_orphans() -> None:
    """Become the parent of processes whose parent ends (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    """Return the processes of which this one is the parent (Linux; elsewhere none)."""
    found = set()
    me = os.getpid()
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
