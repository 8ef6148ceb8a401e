"""Search where the dynamic programming's assumptions do not hold, with its answer as the start.

Iterated local search on the last gradients of the buckets: a step moves one of them, drops one or
adds one; where no step helps, a few random ones are taken from the best split and the walk begins
anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.aoe.gradient.baselines import BASELINES, baseline
from ascend_lab.aoe.gradient.cost import price_of
from ascend_lab.aoe.gradient.exact import best_split
from ascend_lab.aoe.gradient.rows import Gradient, Split, Table, split_at, table_of
from ascend_lab.aoe.gradient.scenario import Scenario, scorer
from ascend_lab.errors import InputError

KICK = 3
"""Random steps taken from the best split when none helps."""
MOST_STARTS = 8
"""The best splits in at most 1, 2, ... so many buckets are tried first."""


@dataclass(frozen=True, slots=True)
class Improved:
    """The best split found for a scenario, its end, and the end of the dynamic programming's."""

    segments: Split
    end_s: float
    start_s: float
    tried: int

    @property
    def gain(self) -> float:
        """How much longer the dynamic programming's answer takes."""
        return self.start_s / self.end_s - 1.0 if self.end_s else 0.0


def improve(
    rows: Sequence[Gradient],
    scenario: Scenario,
    *,
    max_segments: int | None = None,
    max_bytes: float | None = None,
    budget: int = 1000,
    seed: int = 0,
) -> Improved:
    """Return a split for a scenario, found by trying at most `budget` of them.

    Never worse there than the best split without streams, slowdown and noise, which is tried first,
    nor than a baseline that keeps the limits, if the budget reaches them. Raises as `plan`.
    """
    if budget < 1:
        raise InputError("a budget of at least 1", str(budget))
    table, price = table_of(rows, max_bytes), price_of(scenario.cost)
    start, _ = best_split(table, price, max_segments)
    walk = _Walk(table, scenario, max_segments, budget, seed)
    start_s = walk.cost(start)
    for few in range(1, min(MOST_STARTS, max_segments or table.count, table.count) + 1):
        try:
            walk.cost(best_split(table, price, few)[0])
        except InputError:  # so few cannot keep the formats apart
            continue
    for name in BASELINES:
        walk.cost(baseline(name, table, scenario.cost))
    walk.run()
    return Improved(walk.best, walk.end_s, start_s, len(walk.known))


class _Walk:
    """The state of a search: what is known, and the best of it."""

    def __init__(
        self, table: Table, scenario: Scenario, most: int | None, budget: int, seed: int
    ) -> None:
        self.table, self.most, self.budget = table, most, budget
        self.score = scorer(table, scenario)
        self.rng = np.random.default_rng(seed)
        self.known: dict[Split, float] = {}
        self.best: Split = ()
        self.end_s = np.inf

    def cost(self, split: Split) -> float:
        """Return the end of a split; infinity if it breaks a limit or the budget is spent."""
        if split not in self.known:
            if len(self.known) >= self.budget or not self.table.allows(split, self.most):
                return np.inf
            self.known[split] = self.score(split)
            if self.known[split] < self.end_s:
                self.best, self.end_s = split, self.known[split]
        return self.known[split]

    def run(self) -> None:
        """Walk down, jump, walk down again, until the budget is spent or nothing is new."""
        self._down(self.best)
        idle = 0
        while len(self.known) < self.budget and idle < 50:
            known, split = len(self.known), self.best
            for _ in range(KICK):
                near = self._near(split)
                split = near[int(self.rng.integers(len(near)))] if near else split
            self._down(split)
            idle = idle + 1 if len(self.known) == known else 0

    def _down(self, split: Split) -> None:
        """Take the first step that helps, until there is none."""
        end, moved = self.cost(split), True
        while moved and len(self.known) < self.budget:
            moved = False
            near = self._near(split)
            for i in self.rng.permutation(len(near)):
                reached = self.cost(near[i])
                if reached < end:
                    split, end, moved = near[i], reached, True
                    break

    def _near(self, split: Split) -> list[Split]:
        """Return the splits one step away that keep the limits."""
        last = self.table.count - 1
        cuts = [end for _, end in split[:-1]]
        found: set[tuple[int, ...]] = set()
        for k, cut in enumerate(cuts):
            low = cuts[k - 1] if k else -1
            high = cuts[k + 1] if k + 1 < len(cuts) else last
            others = (*cuts[:k], *cuts[k + 1 :])
            found.add(others)
            step = 1
            while step <= last:
                moved = [c for c in (cut - step, cut + step) if low < c < high]
                found |= {tuple(sorted((*others, c))) for c in moved}
                step *= 2
        for first, end in split:
            places = {(first + end) // 2, *self.rng.integers(first, end + 1, 2).tolist()}
            found |= {tuple(sorted({*cuts, int(c)})) for c in places if first <= c < end}
        near = [split_at((*ends, last)) for ends in sorted(found)]
        return [s for s in near if self.table.allows(s, self.most)]
