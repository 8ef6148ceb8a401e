"""Workers that measure candidates (this process, other processes or a Dask cluster), and deadlines.

A candidate that raises an error, takes too long, or kills its worker process is a failed trial, and
the run goes on. If the workers themselves are gone, `WorkersLostError` ends the run.

A run has one `Deadline`. Loops check it between two steps; a single step that would run past it is
interrupted by a timer signal, where the operating system has one.
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from ascend_lab.aoe.space import Point
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.limits import PROCESSES, whole_of
from ascend_lab.machine.sim import few_collections


class TimeUpError(Exception):
    """The deadline of a run has passed."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment at which a run ends, on the clock `time.monotonic`; infinite for no limit."""

    end: float = math.inf

    @classmethod
    def of(cls, limit_s: float | None) -> "Deadline":
        """Return the deadline that lies `limit_s` seconds ahead; None means no limit."""
        return cls() if limit_s is None else cls(time.monotonic() + limit_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.end - time.monotonic() if math.isfinite(self.end) else math.inf

    @property
    def limit_s(self) -> float | None:
        """The same as `remaining_s`, but None instead of infinity if there is no limit."""
        return None if math.isinf(self.end) else self.remaining_s

    @property
    def has_passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.remaining_s <= 0

    def within(self, limit_s: float | None) -> "Deadline":
        """Return the earlier of this deadline and one `limit_s` seconds ahead."""
        return self if limit_s is None else Deadline(min(self.end, Deadline.of(limit_s).end))

    def reserving(self, reserve_s: float) -> "Deadline":
        """Return an earlier deadline, which reserves `reserve_s` seconds for later work."""
        return Deadline(self.end - reserve_s)

    def cut(self) -> "Alarm":
        """Return a context manager that raises `TimeUpError` in its body at the deadline."""
        return Alarm(self.limit_s, TimeUpError)


class Alarm:
    """A context manager that raises `error` in its body after some seconds; alarms may be nested.

    It uses SIGALRM, which only the main thread receives, and which Windows does not have; without
    it the body is not interrupted.
    """

    def __init__(self, limit_s: float | None, error: Callable[[], BaseException]) -> None:
        """Take the limit in seconds (None: no limit) and the error to raise."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.limit_s = limit_s if is_main_thread and hasattr(signal, "setitimer") else None
        self.is_late = limit_s is not None and limit_s <= 0
        self.error = error

    def __enter__(self) -> None:
        if self.is_late:
            raise self.error()
        if self.limit_s is not None:
            self.started = time.monotonic()
            self.handler = signal.signal(signal.SIGALRM, self._ring)
            # A process has one timer. An outer alarm is stopped here, and set again at the end of
            # this body.
            self.outer_s = signal.setitimer(signal.ITIMER_REAL, self.limit_s)[0]

    def __exit__(self, *_: object) -> None:
        if self.limit_s is not None and not self.is_late:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.handler)
            if self.outer_s:
                remaining_s = self.outer_s - (time.monotonic() - self.started)
                # If the outer limit passed meanwhile, the outer alarm rings in a millisecond: a
                # timer of 0 would be switched off.
                signal.setitimer(signal.ITIMER_REAL, max(remaining_s, 1e-3))

    def _ring(self, *_: object) -> None:
        raise self.error()


Measure = Callable[[Point], float]
Answer = tuple[float, str]
"""Cost and note of a candidate."""
OnAnswer = Callable[[int, float, str], None]
"""Receives the index in the list, the cost and the note of each candidate."""
MAX_ROUNDS = 2
"""A candidate whose worker process died this many times counts as failed."""
WORKER_DIED = "its worker process died"
UNMEASURED_NOTES = (
    WORKER_DIED,
    "CancelledError",
    "FutureCancelledError",
    "CommClosedError",
    "KilledWorker",
    "RuntimeError: Error during deserialization",
)
"""Beginnings of the notes of trials that have no measurement because a worker was lost.

All but the first were written by earlier versions.
"""
NO_WORKERS = "no workers"
POLL_S = 0.5
"""Time between two checks whether a cluster still works."""
PATIENCE_S = 10.0
"""A cluster may be without any worker for this long."""
SILENCE_S = 30.0
"""The scheduler of a cluster, which may be busy, may be silent for this long."""
GRACE_S = 1.0
"""The answer of a cluster may come this much later than a candidate's time limit."""


class WorkersLostError(InputError):
    """The workers are gone: candidates that were not yet measured have no result."""


class _TooLongError(Exception):
    """Raised inside a candidate when its time is over."""


@few_collections()
def attempt(measure: Measure, point: Point, limit_s: float | None = None) -> Answer:
    """Measure a candidate: return its cost and "", or infinity and the reason why it failed."""
    try:
        with Alarm(limit_s, _TooLongError):
            cost = float(measure(point))
        return (math.inf, "its cost is not a number") if math.isnan(cost) else (cost, "")
    except _TooLongError:
        return math.inf, f"took longer than {limit_s:g} s"
    except AscendLabError as error:
        return math.inf, str(error)
    except Exception as error:
        return math.inf, f"{type(error).__name__}: {error}"


@dataclass
class Workers:
    """Measures lists of points, in this process or on an executor.

    `start_executor` starts it, and starts it again after its processes have died. `executor` may be
    an executor of the caller in its place. Without either, this process measures.
    """

    start_executor: Callable[[], Executor] | None = None
    executor: Executor | None = field(default=None, repr=False)
    name: str = "the workers"

    def run(
        self,
        measure: Measure,
        points: Sequence[Point],
        limit_s: float | None = None,
        on_answer: OnAnswer | None = None,
    ) -> list[Answer]:
        """Return cost and note of each point, in their order.

        `on_answer` is called for every point as soon as it is measured. Raises `WorkersLostError`.
        """
        done: dict[int, Answer] = {}

        def add(index: int, answer: Answer) -> None:
            done[index] = answer
            if on_answer:
                on_answer(index, *answer)

        if self.start_executor is None and self.executor is None:
            for i, point in enumerate(points):
                add(i, attempt(measure, point, limit_s))
            return list(done.values())
        # When a process dies, the executor loses all candidates it was given. All of them are
        # measured again, now one by one, so that only the candidate at fault fails again.
        for round_number in range(1, MAX_ROUNDS + 1):
            pending = [i for i in range(len(points)) if i not in done]
            groups = [pending] if round_number == 1 else [[i] for i in pending]
            for group in groups:
                self._measure_group(measure, {i: points[i] for i in group}, limit_s, add)
        failed = [i for i in range(len(points)) if i not in done]
        # These kill every process that measures them, unless no process can be started at all.
        if failed:
            self._check_alive()
        for i in failed:
            add(i, (math.inf, WORKER_DIED))
        return [done[i] for i in range(len(points))]

    def _measure_group(
        self,
        measure: Measure,
        points: Mapping[int, Point],
        limit_s: float | None,
        add: Callable[[int, Answer], None],
    ) -> None:
        """Measure some points at once and `add` their results, but for those whose worker died."""
        futures: dict[int, Future[Answer]] = {}
        is_broken = False
        for i, point in points.items():
            try:
                futures[i] = self._executor().submit(attempt, measure, point, limit_s)
            except BrokenExecutor:
                is_broken = True
                break
            except (OSError, RuntimeError) as error:
                raise self._lost(type(error).__name__) from None
        try:
            for i, future in futures.items():
                answer = self._answer(future, list(futures.values()), limit_s)
                if answer is None:
                    is_broken = True
                else:
                    add(i, answer)
        except WorkersLostError:
            raise
        except BaseException:  # Ctrl-C, or an error that `on_answer` raises to end the search
            for future in futures.values():
                with suppress(Exception):
                    future.cancel()
            raise
        # A pool with a dead process accepts no more work: the next group gets a new one.
        if is_broken and self.start_executor is not None:
            self.close()

    def _answer(
        self, future: Future[Answer], futures: Sequence[Future[Answer]], limit_s: float | None
    ) -> Answer | None:
        """Wait for a measurement and return it, or None if its worker died."""
        self._await(future, futures, limit_s)
        try:
            return future.result()
        except BrokenExecutor:
            return None
        except Exception as error:  # not an error of the candidate: `attempt` catches those
            if type(error).__name__ == "KilledWorker":
                return None
            why = f"{type(error).__name__} {error}".split("\n", 1)[0]
            raise self._lost(why[:200].strip()) from None

    def _await(
        self, future: Future[Any], futures: Sequence[Future[Any]], limit_s: float | None
    ) -> None:
        """Wait until a cluster has measured a point; raise `WorkersLostError` if it never will.

        It gives up if the cluster is in trouble for too long, or if none of the `futures` has
        ended within the time limit. Local processes need no check: they always answer or die.
        """
        if not isinstance(self.executor, _Cluster):
            return
        patience_limit_s = math.inf if limit_s is None else limit_s + GRACE_S
        last_healthy_s = time.monotonic()
        last_answer_s = last_healthy_s
        last_count = 0
        # A lost network connection raises no error: the cluster has to be asked now and then.
        while not wait([future], POLL_S).done:
            trouble = self.executor.trouble()
            now_s = time.monotonic()
            last_healthy_s = last_healthy_s if trouble else now_s
            count = sum(f.done() for f in futures)
            if count != last_count:
                last_count = count
                last_answer_s = now_s
            patience_s = PATIENCE_S if trouble == NO_WORKERS else SILENCE_S
            if now_s - last_healthy_s > patience_s or now_s - last_answer_s > patience_limit_s:
                raise self._lost(trouble or f"no answer in {patience_limit_s:g} s")

    def _check_alive(self) -> None:
        """Raise `WorkersLostError` if the workers cannot even evaluate `int()`."""
        with suppress(BrokenExecutor):
            # `int()` cannot fail by itself: if it does, the fault is not in the candidates.
            future: Future[Any] = self._executor().submit(int)
            if self._answer(future, [future], PATIENCE_S) is not None:
                return
        self.close()
        raise self._lost("they end before they answer")

    def _lost(self, why: str) -> WorkersLostError:
        remedy = "see to them, then resume=True goes on with what was measured"
        return WorkersLostError(f"lost {self.name}: {why}", "", remedy)

    def _executor(self) -> Executor:
        if self.executor is None:
            assert self.start_executor is not None
            self.executor = self.start_executor()
        return self.executor

    def close(self) -> None:
        """Stop the executor, if this object started it."""
        if self.executor is not None and self.start_executor is not None:
            self.executor.shutdown(wait=False, cancel_futures=True)
            self.executor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def workers_of(text: str = "serial") -> Workers:
    """Return the workers that `--executor` names: serial, processes:N, or dask:ADDRESS."""
    kind, _, argument = text.partition(":")
    if text == "serial":
        return Workers()
    if kind == "processes" and 0 < (count := whole_of(argument) or 0) <= PROCESSES:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor  # not in Python for browsers

        # Processes are spawned: a forked one would inherit locks that threads of the parent hold,
        # and nobody would release them.
        spawn = multiprocessing.get_context("spawn")
        # Ctrl-C reaches all processes of a terminal. Workers ignore it; their parent ends them.
        ignore_ctrl_c = (signal.SIGINT, signal.SIG_IGN)
        start = partial(ProcessPoolExecutor, count, spawn, signal.signal, ignore_ctrl_c)
        return Workers(start, name=f"the {count} worker processes")
    if kind == "dask" and argument:
        return Workers(
            partial(_dask, argument), name=f"the Dask scheduler at {argument} or its workers"
        )
    needed = f"serial, processes:N or dask:ADDRESS, N at most {PROCESSES}"
    raise InputError(needed, text[:200], "e.g. processes:2")


class _Cluster(Executor):
    """A Dask client as an executor; shutting it down closes the client."""

    def __init__(self, client: Any) -> None:
        self.client = client
        # pure=False: equal calls are not answered from one result
        self.dask_executor = client.get_executor(pure=False)

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        """Send a call to the cluster and return its future."""
        future: Future[Any] = self.dask_executor.submit(*args, **options)
        return future

    def trouble(self) -> str:
        """Return why the cluster cannot answer at the moment, or "" if it can."""
        try:
            if self.client.status != "running":
                return "the scheduler is gone"
            return "" if self.client.nthreads(callback_timeout=PATIENCE_S) else NO_WORKERS
        except Exception as error:  # a network may raise errors of many kinds
            return f"the scheduler does not answer ({type(error).__name__})"

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect from the cluster; the cluster itself goes on running."""
        with suppress(Exception):
            if self.client.status == "running":
                self.dask_executor.shutdown(wait=wait)
            self.client.close()


def _dask(address: str) -> Executor:
    """Return an executor on the Dask cluster at an address; raise `InputError` if there is none."""
    try:
        from distributed import Client
    except ImportError as error:
        remedy = 'pip install "ascend-lab[scale]"'
        raise InputError("Dask's distributed scheduler", "it is not installed", remedy) from error
    try:
        client: Any = Client
        # Their messages about a failed connection would repeat the error that is raised here.
        for name in ("distributed.client", "distributed", "tornado", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return _Cluster(client(address, timeout="5s"))
    except Exception as error:  # a wrong address or a network may raise errors of many kinds
        raise InputError(f"a Dask scheduler at {address}", str(error), "start one") from error
