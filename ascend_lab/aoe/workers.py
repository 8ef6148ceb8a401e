"""Who measures candidates: this process, some processes of this machine, or a Dask cluster.

A candidate that raises, takes too long, or kills its worker costs a trial and nothing else.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ascend_lab.aoe.clock import Alarm
from ascend_lab.aoe.space import Point
from ascend_lab.errors import AscendLabError, InputError

Measure = Callable[[Point], float]
Attempt = tuple[float, str]
"""Cost and note of a candidate."""
Told = Callable[[int, float, str], None]
"""Hears place, cost and note of each candidate."""
TRIES = 2
"""A candidate whose worker died is tried so often before it counts as failed."""


class _TooLongError(Exception):
    """Raised inside a candidate when its time is over."""


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


class _Done(dict[int, Attempt]):
    """Attempts by place, which tells of each that is added."""

    def __init__(self, told: Told | None) -> None:
        super().__init__()
        self.told = told

    def __setitem__(self, place: int, found: Attempt) -> None:
        super().__setitem__(place, found)
        if self.told:
            self.told(place, *found)


@dataclass
class Workers:
    """Measures lists of points; `make` starts an executor anew when its processes have died."""

    make: Callable[[], Executor] | None = None
    executor: Executor | None = field(default=None, repr=False)

    def run(
        self,
        measure: Measure,
        points: Sequence[Point],
        limit_s: float | None = None,
        told: Told | None = None,
    ) -> list[Attempt]:
        """Return the attempts in the order of the points; `told` hears of each when it ends."""
        done = _Done(told)
        if self.make is None and self.executor is None:
            for i, point in enumerate(points):
                done[i] = attempt(measure, point, limit_s)
            return [done[i] for i in range(len(points))]
        for tries in range(1, TRIES + 1):
            left = [i for i in range(len(points)) if i not in done]
            # after a death every candidate goes alone, so that only the guilty one fails again
            groups = [left] if tries == 1 else [[i] for i in left]
            for group in groups:
                self._round(measure, {i: points[i] for i in group}, limit_s, done)
        for i in range(len(points)):
            if i not in done:
                done[i] = (math.inf, "its worker process died")
        return [done[i] for i in range(len(points))]

    def _round(
        self,
        measure: Measure,
        points: dict[int, Point],
        limit_s: float | None,
        done: dict[int, Attempt],
    ) -> None:
        """Measure some points; those whose worker died stay undone."""
        futures: dict[int, Future[Attempt]] = {}
        broken = False
        for i, point in points.items():
            try:
                futures[i] = self._executor().submit(attempt, measure, point, limit_s)
            except BrokenExecutor:
                broken = True
                break
        try:
            for i, future in futures.items():
                try:
                    found = future.result()
                except BrokenExecutor:
                    broken = True
                    continue
                except Exception as error:  # what cannot be sent, or a cluster's own error
                    found = (math.inf, f"{type(error).__name__}: {error}")
                done[i] = found
        finally:  # who hears of them may have heard enough
            for future in futures.values():
                future.cancel()
        if broken and self.make is not None:
            self.close()

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

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def workers_of(text: str = "serial") -> Workers:
    """Return the workers that `--executor` names: serial, processes:N, or dask:ADDRESS."""
    kind, _, rest = text.partition(":")
    if text == "serial":
        return Workers()
    if kind == "processes" and rest.isdigit() and int(rest) > 0:
        return Workers(lambda: _processes(int(rest)))
    if kind == "dask" and rest:
        return Workers(lambda: _dask(rest))
    raise InputError("serial, processes:N or dask:ADDRESS", text, "e.g. processes:2")


def _processes(count: int) -> Executor:
    # spawned, not forked: threads of the parent cannot leave a lock behind
    spawn = multiprocessing.get_context("spawn")
    # Ctrl-C is for the parent, which ends its workers
    quiet = (signal.SIGINT, signal.SIG_IGN)
    return ProcessPoolExecutor(count, spawn, initializer=signal.signal, initargs=quiet)


class _Cluster(Executor):
    """A Dask client as an executor, closed with it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.inner = client.get_executor(pure=False)

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        """Send a call to the cluster."""
        future: Future[Any] = self.inner.submit(*args, **options)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which goes on without us."""
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
        return _Cluster(client(address, timeout="5s"))
    except (OSError, ValueError) as error:
        raise InputError(f"a Dask scheduler at {address}", str(error), "start one") from error
