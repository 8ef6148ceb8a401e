"""Who measures candidates, and how long: this process, some of this machine, or a Dask cluster.

A candidate that raises, takes too long, or kills its worker costs a trial and nothing else. Where
the workers themselves are lost nothing was measured: `WorkersLostError` ends the run. One clock
holds for a whole run: loops ask between their steps how much of the time is left; a step that would
take longer is cut by an alarm, where the system has one.
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
    """The time of a run is over."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment, of `time.monotonic`, at which a run ends."""

    end: float = math.inf

    @classmethod
    def of(cls, limit_s: float | None) -> "Deadline":
        """Return the deadline that lies `limit_s` seconds ahead; None means never."""
        return cls() if limit_s is None else cls(time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """Seconds until the end, negative behind it."""
        return self.end - time.monotonic() if math.isfinite(self.end) else math.inf

    @property
    def limit_s(self) -> float | None:
        """Seconds until the end; None if there is none."""
        return None if math.isinf(self.end) else self.left_s

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.left_s <= 0

    def within(self, limit_s: float | None) -> "Deadline":
        """Return the earlier of this deadline and one `limit_s` seconds ahead."""
        return self if limit_s is None else Deadline(min(self.end, Deadline.of(limit_s).end))

    def keeping(self, reserve_s: float) -> "Deadline":
        """Return an earlier deadline that leaves `reserve_s` seconds for what follows."""
        return Deadline(self.end - reserve_s)

    def cut(self) -> "Alarm":
        """Return a context whose body raises `TimeUpError` at the end."""
        return Alarm(self.limit_s, TimeUpError)


class Alarm:
    """Raise `error` in the body after some seconds, if the system has timers; alarms nest."""

    def __init__(self, limit_s: float | None, error: Callable[[], BaseException]) -> None:
        """Take the limit in seconds (None: never) and what to raise."""
        main = threading.current_thread() is threading.main_thread()
        self.limit_s = limit_s if main and hasattr(signal, "setitimer") else None
        self.late = limit_s is not None and limit_s <= 0
        self.error = error

    def __enter__(self) -> None:
        if self.late:
            raise self.error()
        if self.limit_s is not None:
            self.started = time.monotonic()
            self.handler = signal.signal(signal.SIGALRM, self._ring)
            # A process has one timer: the outer alarm's is stopped here and set again when this
            # body ends.
            self.outer_s = signal.setitimer(signal.ITIMER_REAL, self.limit_s)[0]

    def __exit__(self, *_: object) -> None:
        if self.limit_s is not None and not self.late:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.handler)
            if self.outer_s:
                left_s = self.outer_s - (time.monotonic() - self.started)
                # An outer limit that passed meanwhile still rings, a millisecond from now: 0 would
                # switch it off.
                signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))

    def _ring(self, *_: object) -> None:
        raise self.error()


Measure = Callable[[Point], float]
Attempt = tuple[float, str]
"""Cost and note of a candidate."""
OnAnswer = Callable[[int, float, str], None]
"""Receives the place, the cost and the note of each candidate."""
TRIES = 2
"""A candidate whose worker died is tried so often before it counts as failed."""
DIED = "its worker process died"
UNMEASURED = (
    DIED,
    "CancelledError",
    "FutureCancelledError",
    "CommClosedError",
    "KilledWorker",
    "RuntimeError: Error during deserialization",
)
"""So begin notes of trials without a measurement (all but the first are of earlier versions)."""
POLL_S = 0.5
NO_WORKERS = "no workers"
PATIENCE_S = 10.0
SILENCE_S = 30.0
GRACE_S = 1.0
"""So long a cluster may be without workers, its scheduler (busy?) silent, an answer late."""


class WorkersLostError(InputError):
    """Who measures is gone: what is not measured yet has no result."""


class _TooLongError(Exception):
    """Raised inside a candidate when its time is over."""


@few_collections()
def attempt(measure: Measure, point: Point, limit_s: float | None = None) -> Attempt:
    """Return the cost of a candidate, or infinity and the reason it has none."""
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
    """Measures lists of points; `make` starts an executor anew when its processes have died."""

    make: Callable[[], Executor] | None = None
    executor: Executor | None = field(default=None, repr=False)
    name: str = "the workers"

    def run(
        self,
        measure: Measure,
        points: Sequence[Point],
        limit_s: float | None = None,
        on_answer: OnAnswer | None = None,
    ) -> list[Attempt]:
        """Return the attempts in order; `on_answer` gets each, too. Raises `WorkersLostError`."""
        done: dict[int, Attempt] = {}

        def add(place: int, attempted: Attempt) -> None:
            done[place] = attempted
            if on_answer:
                on_answer(place, *attempted)

        if self.make is None and self.executor is None:
            for i, point in enumerate(points):
                add(i, attempt(measure, point, limit_s))
            return list(done.values())
        # A process that dies takes all candidates given to it along: the innocent ones get a second
        # try.
        for tries in range(1, TRIES + 1):
            pending = [i for i in range(len(points)) if i not in done]
            # after a death every candidate goes alone, so that only the guilty one fails again
            for group in [pending] if tries == 1 else [[i] for i in pending]:
                self._round(measure, {i: points[i] for i in group}, limit_s, add)
        dead = [i for i in range(len(points)) if i not in done]
        # Twice dead alone: the candidate kills its process, unless no process starts at all.
        if dead:
            self._probe()
        for i in dead:
            add(i, (math.inf, DIED))
        return [done[i] for i in range(len(points))]

    def _round(
        self,
        measure: Measure,
        points: Mapping[int, Point],
        limit_s: float | None,
        add: Callable[[int, Attempt], None],
    ) -> None:
        """Measure some points and `add` their attempts; those whose worker died have none."""
        futures: dict[int, Future[Attempt]] = {}
        broken = False
        for i, point in points.items():
            try:
                futures[i] = self._executor().submit(attempt, measure, point, limit_s)
            except BrokenExecutor:
                broken = True
                break
            except (OSError, RuntimeError) as error:
                raise self._lost(type(error).__name__) from None
        try:
            for i, future in futures.items():
                answer = self._answer(future, list(futures.values()), limit_s)
                if answer is None:
                    broken = True
                else:
                    add(i, answer)
        except WorkersLostError:
            raise
        except BaseException:  # Ctrl-C, or `on_answer` ends the search
            for future in futures.values():
                with suppress(Exception):
                    future.cancel()
            raise
        # A pool with a dead process accepts nothing more: a new one is made for the next group.
        if broken and self.make is not None:
            self.close()

    def _answer(
        self, future: Future[Attempt], futures: Sequence[Future[Attempt]], limit_s: float | None
    ) -> Attempt | None:
        """Return an attempt, or None if its worker died."""
        self._await(future, futures, limit_s)
        try:
            return future.result()
        except BrokenExecutor:
            return None
        except Exception as error:  # never the candidate's own: `attempt` has caught those
            if type(error).__name__ == "KilledWorker":
                return None
            why = f"{type(error).__name__} {error}".split("\n", 1)[0]
            raise self._lost(why[:200].strip()) from None

    def _await(
        self, future: Future[Any], futures: Sequence[Future[Any]], limit_s: float | None
    ) -> None:
        """Wait for a cluster's answer while one of all may come; processes always give one."""
        if not isinstance(self.executor, _Cluster):
            return
        limit_s = math.inf if limit_s is None else limit_s + GRACE_S
        last_well_s = last_answer_s = time.monotonic()
        count = 0
        # A lost network connection raises nothing: only asking now and then shows that nobody is
        # there.
        while not wait([future], POLL_S).done:
            trouble = self.executor.trouble()
            now = time.monotonic()
            last_well_s = last_well_s if trouble else now
            if (answers := sum(f.done() for f in futures)) != count:
                count = answers
                last_answer_s = now
            patience_s = PATIENCE_S if trouble == NO_WORKERS else SILENCE_S
            if now - last_well_s > patience_s or now - last_answer_s > limit_s:
                raise self._lost(trouble or f"no answer in {limit_s:g} s")

    def _probe(self) -> None:
        """Raise `WorkersLostError` if not even nothing can be done."""
        with suppress(BrokenExecutor):
            # `int()` cannot fail by itself: if it does, the workers are at fault and not the
            # candidates.
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
            assert self.make is not None
            self.executor = self.make()
        return self.executor

    def close(self) -> None:
        """Stop the executor, if this object started it."""
        if self.executor is not None and self.make is not None:
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
        from concurrent.futures import ProcessPoolExecutor  # here: a browser has no processes

        # spawned, not forked: threads of the parent cannot leave a lock behind. Ctrl-C is for the
        # parent, which ends its workers
        spawn = multiprocessing.get_context("spawn")
        quiet = (signal.SIGINT, signal.SIG_IGN)
        make = partial(ProcessPoolExecutor, count, spawn, signal.signal, quiet)
        return Workers(make, name=f"the {count} worker processes")
    if kind == "dask" and argument:
        return Workers(
            partial(_dask, argument), name=f"the Dask scheduler at {argument} or its workers"
        )
    needed = f"serial, processes:N or dask:ADDRESS, N at most {PROCESSES}"
    raise InputError(needed, text[:200], "e.g. processes:2")


class _Cluster(Executor):
    """A Dask client as an executor, closed with it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.inner = client.get_executor(pure=False)

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        """Send a call to the cluster."""
        future: Future[Any] = self.inner.submit(*args, **options)
        return future

    def trouble(self) -> str:
        """Return what keeps the cluster from answering just now, or nothing."""
        try:
            if self.client.status != "running":
                return "the scheduler is gone"
            return "" if self.client.nthreads(callback_timeout=PATIENCE_S) else NO_WORKERS
        except Exception as error:  # whatever a network may say
            return f"the scheduler does not answer ({type(error).__name__})"

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which goes on without us, if it is still there."""
        with suppress(Exception):
            if self.client.status == "running":
                self.inner.shutdown(wait=wait)
            self.client.close()


def _dask(address: str) -> Executor:
    try:
        from distributed import Client
    except ImportError as error:
        remedy = 'pip install "ascend-lab[scale]"'
        raise InputError("Dask's distributed scheduler", "it is not installed", remedy) from error
    try:
        client: Any = Client
        for name in ("distributed.client", "distributed", "tornado", "asyncio"):  # we say it in one
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return _Cluster(client(address, timeout="5s"))
    except Exception as error:  # whatever its address or a network may bring about
        raise InputError(f"a Dask scheduler at {address}", str(error), "start one") from error
