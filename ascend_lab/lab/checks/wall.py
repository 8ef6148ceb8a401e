"""The wall around a check: whatever an answer does behind it, the notebook lives.

On Linux a check as a whole (cases, answer, judge) runs in a copy of this process that prints
through it and sends back one verdict, as text. An answer that does not end, ends Python, crashes
it, eats memory or waits for input ends that copy, with what it started; so does the interrupt
key, at once. What it does to variables stays in the copy; what it writes to files stays in the
files.

Elsewhere (Windows has no fork; macOS has one that its own libraries may not survive) the check
runs in this process: an answer that runs on is interrupted between two steps of Python, again and
again, and `os._exit` and `os.abort` are refused. That cannot stop one that sleeps, stays inside
one call of compiled code, eats all memory or crashes Python.

The wall is against mistakes. An answer that wants to be marked right without being right can.
"""

import builtins
import codecs
import ctypes
import faulthandler
import gc
import getpass
import io
import json
import math
import os
import selectors
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ascend_lab.errors import AscendLabError

CASE_S = 20
"""Processor seconds a case may take. By the clock, a case that waits may take twice that and a
check ten times, so that an answer has its time on a loaded computer, too."""
MEMORY_BYTES = 2 << 30
"""What a check may allocate beyond what the notebook has; with 64 MiB for each processor."""
OUTPUT_BYTES = 100_000
"""What a check may print; the rest is dropped."""
ENDING_S = 5.0
"""By the clock, between the last word of a check and its end."""
IDLE = 0.02
"""A case that is busy for less than this share of the time waits for something."""
PIPE_BYTES = 1 << 20
"""More than a pipe holds."""
Verdict = tuple[bool, str, int]
"""Passed, message, and how many cases were tried."""
Tell = Callable[[int, str], None]
"""Called before each step with the number of the case and the subject of the sentence that says
how the step ended, such as "for n=5 your function"."""
Run = Callable[[Tell], Verdict]
_leave = os._exit


class CheckError(AscendLabError):
    """A check that is itself written wrongly; a wrong answer never raises."""


class EndedError(BaseException):
    """Raised by a function that asks another process, where that gives no answer: how it ended."""


@dataclass(slots=True)
class _Heard:
    """What this process has heard from a child that runs a check."""

    child: int
    began_s: float = field(default_factory=time.monotonic)
    told_s: float = field(default_factory=time.monotonic)
    told_busy_s: float = 0.0
    cases: int = 0
    doing: str = "the check"
    answer: list[Any] | None = None
    rest: bytes = b""
    room_bytes: int = field(default_factory=lambda: OUTPUT_BYTES)

    def hear(self, data: bytes) -> None:
        """Take lines of JSON: what is being done, then the answer."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for kind, *rest in map(json.loads, lines):
            if kind != "at":
                self.answer = self.answer or [kind, *rest]
            else:
                self.cases, self.doing = rest
                self.told_s, self.told_busy_s = time.monotonic(), _busy_s(self.child)

    def printer(self, name: str) -> Callable[[bytes], None]:
        """Return what prints bytes on the stream `sys.<name>` as long as there is room."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode

        def show(data: bytes) -> None:
            if self.room_bytes > 0:
                text = decode(data[: self.room_bytes])
                self.room_bytes -= len(data)
                if self.room_bytes <= 0:
                    text += f"\n... no more than {OUTPUT_BYTES:,} bytes of a check are printed\n"
                getattr(sys, name).write(text)

        return show

    def late(self) -> str:
        """Return how a check ended that has had its time by the clock, else nothing."""
        now_s = time.monotonic()
        since_s = now_s - self.told_s
        idle = _busy_s(self.child) - self.told_busy_s < IDLE * since_s
        if not (now_s > self.began_s + 10 * CASE_S or (idle and since_s > 2 * CASE_S)):
            return ""
        if since_s > CASE_S:
            return f"did not end within {CASE_S} s"
        return f"made the check take more than {10 * CASE_S} s"

    def listen(self, ends: Sequence[int]) -> str:
        """Listen on the pipes until the answer, the end or the limit; return how it was late."""
        takes = (self.printer("stdout"), self.printer("stderr"), self.hear)
        with selectors.DefaultSelector() as ready:
            for end, take in zip(ends, takes, strict=True):
                os.set_blocking(end, False)
                ready.register(end, selectors.EVENT_READ, take)
            while self.answer is None and ends[-1] in ready.get_map():
                if late := self.late():
                    return late
                for key, _ in ready.select(0.5):
                    data = os.read(key.fd, PIPE_BYTES)
                    if data:
                        key.data(data)
                    else:
                        ready.unregister(key.fd)
        for end, take in zip(ends[:2], takes[:2], strict=True):
            with suppress(BlockingIOError):
                take(os.read(end, PIPE_BYTES))
        return ""


def _busy_s(child: int) -> float:
    """Return the processor seconds of another process, 0 where nobody knows them."""
    with suppress(OSError):
        return time.clock_gettime(~child << 3 | 2)  # how Linux numbers the clock of a process
    return 0.0


def forked(run: Run) -> Verdict | None:
    """Return the verdict of `run` in a copy, or how it ended; None if there is no room for one."""
    ends = [os.pipe() for _ in range(3)]
    closed = False
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until both sides are ready
    try:
        child = _fork()
    except OSError:
        child = -1
    if child == 0:
        _live(run, [write for _, write in ends], held)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for _, write in ends:
            os.close(write)
        heard = _Heard(child)
        late = heard.listen([read for read, _ in ends]) if child > 0 else ""
        closed = not late and heard.answer is None  # it is ending by itself
    finally:
        status = _end(child, ENDING_S * closed) if child > 0 else 0
        for read, _ in ends:
            os.close(read)
    return _verdict(heard, late, status) if child > 0 else None


def _fork() -> int:
    with warnings.catch_warnings():  # Python warns of threads; the copy needs none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _end(child: int, wait_s: float) -> int:
    """Let the check end for some seconds, then kill it and what it has started."""
    ended = 0
    status = 0
    until_s = time.monotonic() + wait_s
    with suppress(ChildProcessError):
        while not ended and time.monotonic() < until_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0 if ended else 0.002)
    for kill in (os.killpg,) if ended else (os.killpg, os.kill):  # it may lead no group yet
        with suppress(OSError):
            kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        return status if ended else os.waitpid(child, 0)[1]
    return 0


def _verdict(heard: _Heard, late: str, status: int) -> Verdict:
    if heard.answer is not None:
        kind, *rest = heard.answer
        if kind == "broken":
            raise CheckError(*rest)
        passed, message, cases = rest
        return passed, message, cases
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        late = f"did not end within {CASE_S} s"
    how = signal.strsignal(-code) if code < 0 else f"exit status {code}"
    return False, f"{heard.doing} {late or f'ended Python ({how})'}", heard.cases


# -- in the copy -----------------------------------------------------------------------------------
def _live(run: Run, ends: Sequence[int], held: Iterable[int]) -> NoReturn:
    """Run the check in the copy, and leave without cleaning up what belongs to the original."""
    try:
        me = os.getpid()
        case = 0
        doing = "the check"

        def send(*line: object) -> None:
            if os.getpid() != me:  # the answer has forked
                _leave(0)
            os.write(ends[-1], json.dumps(line).encode() + b"\n")

        def tell(number: int, what: str) -> None:
            nonlocal case, doing
            case = number
            doing = what
            _limit("RLIMIT_CPU", math.ceil(time.process_time()) + CASE_S)
            send("at", number, what)

        _settle(ends, held)
        tell(case, doing)
        try:
            answer: tuple[object, ...] = ("done", *run(tell))
        except AscendLabError as error:
            answer = ("broken", error.needed, error.got, error.remedy)
        except EndedError as error:
            answer = ("done", False, f"{doing} {error}", case)
        except BaseException as error:
            answer = ("done", False, f"{doing} raised {type(error).__name__}", case)
            if isinstance(error, Exception) and not isinstance(error, MemoryError):
                answer = ("broken", "a check that works", repr(error), "correct the check")
        _limit("RLIMIT_DATA", math.inf)
        send(*answer)
    finally:
        _leave(0)


def _settle(ends: Sequence[int], held: Iterable[int]) -> None:
    """Cut the copy off: own group, own output, no input, limits, and no life after the original."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    gc.freeze()  # garbage of the original is for the original to collect
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((nothing, *ends[:2]), range(3), strict=True):
        os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.FileIO(end, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
        )
        for end in (1, 2)
    )
    builtins.input = getpass.getpass = no_input  # type: ignore[assignment]
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
        room = MEMORY_BYTES + (os.cpu_count() or 1) * (64 << 20)
        _limit("RLIMIT_DATA", pages * os.sysconf("SC_PAGE_SIZE") + room)
    _limit("RLIMIT_CORE", 0)


def no_input(*_: object) -> NoReturn:
    """Stand in for `input`: nobody is there to answer."""
    raise EOFError("a check gives no input")


def _limit(name: str, soft: float) -> None:
    import resource

    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    room = math.inf if hard == resource.RLIM_INFINITY else hard
    least = min(soft, room)
    resource.setrlimit(kind, (hard if math.isinf(least) else int(least), hard))


# -- where this process does not fork ------------------------------------------------------------
FORKS = sys.platform == "linux"


class _StoppedError(BaseException):
    """Raised by the clock inside an answer that shares this process."""


def behind_wall(run: Run) -> Verdict:
    """Return the verdict of `run`, or how what it told of last ended it."""
    return (forked(run) if FORKS else None) or _here(run)


def _here(run: Run) -> Verdict:
    """Run a check in this process under a clock that raises in it; see the top of the module."""
    doing: tuple[int, str] = 0, "the check"
    told_s = time.monotonic()
    over = threading.Event()
    lock = threading.Lock()
    thread = threading.get_ident()

    def tell(case: int, what: str) -> None:
        nonlocal doing, told_s
        doing = (case, what)
        told_s = time.monotonic()

    def watch() -> None:
        while not over.wait(min(1.0, CASE_S / 4)):
            with lock:
                if not over.is_set() and time.monotonic() > told_s + CASE_S:
                    error = ctypes.py_object(_StoppedError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    with suppress(RuntimeError):  # a browser has no threads: nothing ends what runs on there
        threading.Thread(target=watch, daemon=True).start()
    try:
        try:
            with _exits_refused():
                return run(tell)
        finally:
            with lock:
                over.set()
    except _StoppedError:
        return False, f"{doing[1]} did not end within {CASE_S} s", doing[0]
    except EndedError as error:
        return False, f"{doing[1]} {error}", doing[0]
    except (SystemExit, GeneratorExit) as error:
        return False, f"{doing[1]} raised {type(error).__name__}", doing[0]


@contextmanager
def _exits_refused() -> Iterator[None]:
    def refuse(*_: object) -> NoReturn:
        raise SystemExit("a check does not end Python")

    saved = os._exit, os.abort, builtins.input
    os._exit, os.abort, builtins.input = refuse, refuse, no_input  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit, os.abort, builtins.input = saved
