"""The calendar of an event simulation: actions at future times, carried out in order of time.

Two actions at one time are carried out in the order in which they were entered, so that a
simulation does the same in every run.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Agenda:
    """Actions at future times, and the time of the last one that was carried out."""

    def __init__(self) -> None:
        self.now_s = 0.0
        # (time, ticket, action, argument): a heap compares entries from the left, and as no two
        # tickets are equal it never comes to compare two actions, which have no order
        self.entries: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.tickets = count()

    def at(self, time_s: float, act: Callable[[float, Any], None], argument: Any = None) -> None:
        """Enter a call `act(time_s, argument)`."""
        heappush(self.entries, (time_s, next(self.tickets), act, argument))

    def step(self, until_s: float = float("inf")) -> bool:
        """Carry out the next action unless it lies after `until_s`; return whether one was."""
        if not self.entries or self.entries[0][0] > until_s:
            return False
        self.now_s, _, act, argument = heappop(self.entries)
        act(self.now_s, argument)
        return True

    def run(self, arrivals: Sequence[float], send: Callable[[float, int], None]) -> None:
        """Call `send(time, number)` at the time of each arrival, and carry out all actions.

        Arrivals are not entered: they are sorted already, and a short heap is a fast one.
        """
        for number, time_s in enumerate(arrivals):
            while self.step(time_s):
                pass
            send(time_s, number)
        while self.step():
            pass
