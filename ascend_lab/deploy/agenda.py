"""The event queue of a discrete-event simulation: actions, carried out in order of their times.

Two actions at the same time are carried out in the order in which they were added, so that every
run of a simulation gives the same result.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Agenda:
    """An event queue; `now_s` is the time of the last action that was carried out."""

    def __init__(self) -> None:
        self.now_s = 0.0
        # (time, ticket, action, argument): a heap compares entries from the left. As no two
        # tickets are equal, it never compares two actions, which have no order.
        self.entries: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.tickets = count()

    def at(self, time_s: float, action: Callable[[float, Any], None], argument: Any = None) -> None:
        """Add a call `action(time_s, argument)` at a time."""
        heappush(self.entries, (time_s, next(self.tickets), action, argument))

    def step(self, until_s: float = float("inf")) -> bool:
        """Carry out the next action, and return True; False if none is due by `until_s`."""
        if not self.entries or self.entries[0][0] > until_s:
            return False
        self.now_s, _, action, argument = heappop(self.entries)
        action(self.now_s, argument)
        return True

    def run(self, arrivals: Sequence[float], send: Callable[[float, int], None]) -> None:
        """Call `send(time, number)` at the time of each arrival, and carry out all actions.

        Arrivals are sorted already, so they do not enter the heap, which stays short and fast.
        """
        for number, time_s in enumerate(arrivals):
            while self.step(time_s):
                pass
            send(time_s, number)
        while self.step():
            pass
