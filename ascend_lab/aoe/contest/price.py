"""A memory of group prices, shared by all searches, that also keeps the clock."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable

from ascend_lab.aoe.contest.group import group_of
from ascend_lab.aoe.contest.partition import Partition, Relations, bits
from ascend_lab.aoe.contest.problem import Problem
from ascend_lab.aoe.contest.tiles import Choice, best_tile, smallest_space

Kept = frozenset[int]
NOTHING: Kept = frozenset()


class Prices:
    """The cheapest way to run each group asked for, found once; counts the groups.

    Groups whose slices and operations are alike, as in repeated layers, share one search.

    A search looks at `spent` between its steps: true when the seconds or the evaluations are used
    up. Without `seconds` the clock plays no part and results repeat exactly.
    """

    def __init__(
        self, problem: Problem, seconds: float | None = None, evaluations: int | None = None
    ) -> None:
        """Start the clock."""
        self.problem = problem
        self.relations = Relations(problem)
        self.evaluations = evaluations
        self.start, self.seconds = time.monotonic(), seconds
        self.asked = 0
        self._known: dict[tuple[int, Kept, Kept], Choice | None] = {}
        self._alike: dict[Hashable, Choice | None] = {}
        self._legal: dict[int, bool] = {}

    @property
    def progress(self) -> float:
        """Return the part of the budget that is used up, 0 without a budget."""
        counted = self.asked / self.evaluations if self.evaluations else 0.0
        timed = (time.monotonic() - self.start) / self.seconds if self.seconds else 0.0
        return max(counted, timed)

    @property
    def spent(self) -> bool:
        """Return whether the budget is used up."""
        return self.seconds == 0 or self.evaluations == 0 or self.progress >= 1

    def legal(self, group: int) -> bool:
        """Return whether shared tensors join all operations of a group."""
        if group not in self._legal:
            self._legal[group] = self.relations.connected(group)
        return self._legal[group]

    def choice(self, group: int, resident: Kept = NOTHING, retain: Kept = NOTHING) -> Choice | None:
        """Return the cheapest way to run a group, or None when no candidate fits."""
        key = (group, resident, retain)
        if key not in self._known:
            self.asked += 1
            found = group_of(self.problem, bits(group), resident, retain)
            room = sum(map(self.problem.size, found.kept))
            alike = (frozenset(found.bundles), frozenset(found.works), room)
            if alike not in self._alike:
                fits = smallest_space(found) <= self.problem.capacity
                self._alike[alike] = best_tile(found) if fits else None
            self._known[key] = self._alike[alike]
        return self._known[key]

    def price(self, group: int, resident: Kept = NOTHING, retain: Kept = NOTHING) -> float:
        """Return the least time of a group, infinite when it does not fit."""
        choice = self.choice(group, resident, retain)
        return float("inf") if choice is None else choice.cost

    def total(self, groups: Iterable[int]) -> float:
        """Return the time of groups that keep nothing resident."""
        return sum(self.price(group) for group in groups)

    def singles(self) -> Partition:
        """Return the schedule in which every operation is a subgraph of its own."""
        return tuple(1 << op for op in self.problem.order)
