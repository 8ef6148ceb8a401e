"""One clock for a whole run: every stage asks how much of the time is left.

Loops ask between their steps; a step that would take longer is cut by an alarm, where the system
has one.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


class TimeUpError(Exception):
    """The time of a run is over."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment, of `time.monotonic`, at which a run ends."""

    end: float = math.inf

    @classmethod
    def of(cls, limit_s: float | None) -> Deadline:
        """Return the deadline so many seconds from now; None is never."""
        return cls() if limit_s is None else cls(time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """Seconds until the end, negative behind it."""
        return self.end - time.monotonic() if math.isfinite(self.end) else math.inf

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.left_s <= 0

    def within(self, limit_s: float | None) -> Deadline:
        """Return the deadline of a part that may take so many seconds from now."""
        return self if limit_s is None else Deadline(min(self.end, Deadline.of(limit_s).end))

    def keeping(self, reserve_s: float) -> Deadline:
        """Return the deadline of a part that leaves so many seconds to what follows."""
        return Deadline(self.end - reserve_s)

    def cut(self) -> Alarm:
        """Return a context whose body raises `TimeUpError` at the end."""
        return Alarm(None if math.isinf(self.end) else self.left_s, TimeUpError)


class Alarm:
    """Raise `error` inside the body after some seconds, where the system has timers for it.

    Alarms nest: the inner one rings first, then the outer one goes on.
    """

    def __init__(self, limit_s: float | None, error: Callable[[], BaseException]) -> None:
        """Take the limit in seconds (None: never) and what to raise."""
        main = threading.current_thread() is threading.main_thread()
        self.limit_s = limit_s if main and hasattr(signal, "setitimer") else None
        self.late, self.error = limit_s is not None and limit_s <= 0, error

    def __enter__(self) -> None:
        if self.late:
            raise self.error()
        if self.limit_s is not None:
            self.started = time.monotonic()
            self.handler = signal.signal(signal.SIGALRM, self._ring)
            self.outer_s = signal.setitimer(signal.ITIMER_REAL, self.limit_s)[0]

    def __exit__(self, *_: object) -> None:
        if self.limit_s is not None and not self.late:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.handler)
            if self.outer_s:
                left_s = self.outer_s - (time.monotonic() - self.started)
                signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))

    def _ring(self, *_: object) -> None:
        raise self.error()
